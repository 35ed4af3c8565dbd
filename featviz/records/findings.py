"""What audits and comparisons find: faults of channels, gates on them, and how two runs differ."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from featviz.errors import CHECK_FAILED, UsageError
from featviz.files.urls import Url
from featviz.records.types import CaptureKey, GridPlan
from featviz.text import counted, printable

if TYPE_CHECKING:  # the help of the command line imports this, and has no time for numpy
    import numpy as np
    from numpy.typing import NDArray

    from featviz.options.commands import DiffThresholds, Thresholds


class TextTable(NamedTuple):
    """A table of words."""

    headings: Sequence[str]
    numbers: Collection[str]
    rows: Sequence[Sequence[str]]
    totals: Sequence[Sequence[str]] = ()
    footer: Sequence[str] = ()

    def __str__(self) -> str:
        """All of it as plain text, columns apart by two spaces; without rows the lines below alone.
        Control characters are escaped."""
        rows = [self.headings, *self.rows, *self.totals]
        cells = [[printable(str(cell)) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for row in cells:
            parts = [
                words.rjust(width) if heading in self.numbers else words.ljust(width)
                for words, width, heading in zip(row, widths, self.headings, strict=True)
            ]
            lines.append("  ".join(parts).rstrip())
        return "\n".join([*(lines if self.rows else []), *map(printable, self.footer)])


@dataclass(frozen=True)
class Call:
    """One call of a module or a function in a forward pass."""

    name: str
    type: str
    index: int = 0

    @property
    def label(self) -> str:
        """For people: `layer1.0.relu`, and `layer1.0.relu.call1` for its second call."""
        return (self.name or self.type) + (f".call{self.index}" if self.index else "")


@dataclass(frozen=True)
class Activation:
    """What can be asked of an activation function's output."""

    zero: bool = False
    """Gives exact zeros below a threshold, and nothing below zero: it can be dead."""
    bounds: tuple[float, ...] = ()
    """Values at which it saturates: a ceiling, or the lower and the upper end."""
    margin: float = 0.0
    """A value this near to a bound, or beyond it, is at it."""


RECTIFIERS = frozenset({"ReLU", "ReLU6", "fn:relu", "fn:relu6"})
"""Types of calls whose output is zero below a threshold, whatever the model: a channel that is zero
there in all images is dead."""


@dataclass(frozen=True)
class Part:
    """What a module or function is to the channels that pass through it."""

    role: Literal["maker", "activation", "channelwise", "mixing", "other"]
    """maker: a convolution or linear module. channelwise: channel i depends on channel i alone.
    mixing: the others have a say in it (GroupNorm)."""
    axis: int | None = None
    """Where the channels are in its output; None where its input decides."""
    activation: Activation | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether a gate held, with its figure in words."""

    gate: str
    held: bool
    words: str


Flags: TypeAlias = "NDArray[np.bool_]"
Doubles: TypeAlias = "NDArray[np.float64]"

_ROUNDING = 2.0**-20
"""Values that differ by less than this share of the largest are equal but for rounding."""


@dataclass(frozen=True)
class Evidence:
    """What is known of a layer's C channels over all images; arrays [C]."""

    count: Doubles
    low: Doubles
    high: Doubles
    nonfinite: Doubles
    saturated: Doubles | None = None
    """Share of values at a bound; None where the layer has none."""
    ceiling: Doubles | None = None
    """Largest value at the activation by which `dead` is judged; None where there is none."""
    correlation: Doubles | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ChannelFinding:
    """One thing that can be wrong with a channel."""

    name: str  # docs/audit.md says what it means
    rule: Callable[[Evidence, Thresholds], Flags | None]
    """Says of each channel whether it holds; None where the layer cannot be judged for it."""
    severity: int
    """Suspects are drawn in this order: 0 is the worst."""
    remedy: str = "ask for another finding"
    """The hint of the message about a gate on layers that cannot be judged for it."""
    yields_to: tuple[str, ...] = ("nonfinite",)
    """A channel that has one of these findings has not this one as well."""


def _constant(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    import numpy as np

    size = np.maximum(abs(evidence.low), abs(evidence.high))
    with np.errstate(invalid="ignore"):
        flat = evidence.high - evidence.low <= np.maximum(thresholds.eps, _ROUNDING * size)
    return np.asarray(flat & (evidence.count > 1))


def _redundant(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    linked = correlated(evidence, thresholds)
    return None if linked is None else linked.max(axis=1, initial=False)


def correlated(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """Which pairs of channels [C, C] correlate above the threshold, of those with finite values
    only, and ten of them at least; None where that was not asked."""
    import numpy as np

    if evidence.correlation is None or thresholds.redundant_at is None:
        return None
    linked = evidence.correlation > thresholds.redundant_at
    np.fill_diagonal(linked, False)
    judged = (evidence.nonfinite == 0) & (evidence.count >= 10)
    return np.asarray(linked & judged[:, None] & judged[None, :])


FINDINGS: dict[str, ChannelFinding] = {
    finding.name: finding
    for finding in (
        ChannelFinding(
            name="dead",
            rule=lambda seen, t: None if seen.ceiling is None else seen.ceiling <= t.eps,
            severity=1,
            remedy="dead is judged at a ReLU or ReLU6; constant suits other activations",
        ),
        ChannelFinding(
            name="constant",
            rule=_constant,
            severity=3,
            yields_to=("nonfinite", "dead", "saturated"),
        ),
        ChannelFinding(
            name="saturated",
            rule=lambda seen, t: (
                None if seen.saturated is None else seen.saturated > t.saturated_at
            ),
            severity=2,
            remedy="it is judged at ReLU6, Sigmoid, Tanh, Hardsigmoid and Hardtanh",
        ),
        ChannelFinding(
            name="nonfinite",
            rule=lambda seen, t: seen.nonfinite.astype(bool),
            severity=0,
            yields_to=(),
        ),
        ChannelFinding(
            name="redundant",
            rule=_redundant,
            severity=4,
            remedy="--redundant-at 0.98 asks for it",
        ),
    )
}
"""By name, in the order of audit.json, of the table and of help texts. Each makes a picture of its
channels, and gates take each."""


_FORM = re.compile(
    r"(?:(?P<where>.+):)?(?P<finding>[A-Za-z]+)\s*(?P<sign>>=?)\s*(?P<number>\d+(?:\.\d+)?)"
    r"\s*(?P<percent>%)?"
)


@dataclass(frozen=True)
class Gate:
    """A limit on the channels with a finding; beyond it the gate is broken."""

    text: str
    finding: str
    limit: float
    percent: bool
    """Whether the limit is a share of the channels, in percent; else it is a count."""
    inclusive: bool
    where: str = "*"


def parse_gate(text: str) -> Gate:
    """Read `[LAYERS:]FINDING>NUMBER[%]`.

    Raises:
        UsageError: another form, no such finding, or a share above 100 %.
    """
    parts = _FORM.fullmatch(text.strip())
    if parts is None:
        raise UsageError(
            f"--fail-on {text!r} is no gate",
            "for example dead>5%, nonfinite>0, 'layer3.*:constant>2'",
        )
    finding, limit = parts["finding"], float(parts["number"])
    if finding not in FINDINGS:
        close = difflib.get_close_matches(finding, FINDINGS, 1)
        raise UsageError(
            f"--fail-on {text!r}: there is no finding {finding!r}",
            f"did you mean {close[0]}?" if close else f"one of {', '.join(FINDINGS)}",
        )
    if parts["percent"] and limit > 100:
        raise UsageError(f"--fail-on {text!r} can never break", "a share is at most 100%")
    share, inclusive = bool(parts["percent"]), parts["sign"] == ">="
    return Gate(text.strip(), finding, limit, share, inclusive, parts["where"] or "*")


@dataclass(frozen=True)
class DifferenceMap:
    """A picture of signed differences."""

    file: str
    image: str
    label: str
    stem: str
    channels: tuple[int, ...]
    """The drawn channels in tile order: the most changed first."""
    source: str
    limit: float
    """The relative difference at the ends of the colours."""
    plan: GridPlan
    slices: int


@dataclass(frozen=True)
class ComparedLayer:
    """One place of the model in both runs, over all images."""

    place: CaptureKey
    type: str
    index: int
    by: Sequence[str]
    """What its tensors were compared by: `tensors`, `statistics and pixels`, `statistics`."""
    reason: str | None
    """Why it could not be compared, in the first image where it could not."""
    images: Mapping[str, Mapping[str, float | None]]
    """By image: how many channels are `differing`, and `absolute`, `relative` and `cosine`."""
    differing: int
    total: int
    channel_images: tuple[int, int]
    """The same, with each channel counted in each image."""
    channels: Mapping[str, np.ndarray]
    """`absolute`, `relative`, `cosine` and `unlike`, as in `diff.compare.Change`: the worst of each
    channel over the images that could be compared."""
    cosine: float
    """The smallest of a whole tensor; NaN where only statistics are known."""
    most_changed: Sequence[int]
    image: str
    """The image in which the layer differs most; the next three hold for it."""
    severity: float
    """The largest relative difference, 0..1; 1 where shapes or finite values differ."""
    change: np.ndarray
    """[channels]: the largest relative difference of each, 0..1."""
    changed: Sequence[int]
    """The channels that differ, the most changed first."""
    difference: DifferenceMap | None = None

    @property
    def label(self) -> str:
        """`layer1.0.conv1`; the class name for the model itself."""
        return self.place.layer or self.type

    @property
    def cells(self) -> dict[str, str]:
        """A row of a table, by heading."""
        row = {"layer": self.label, "type": self.type, "tensor": self.place.stem}
        differing = sum(bool(numbers["differing"]) for numbers in self.images.values())
        row["images"] = f"{differing}/{len(self.images)}"
        row["channels"] = f"{self.differing:,}/{self.total:,}"
        if self.reason is not None:
            empty = dict.fromkeys(("absolute", "relative", "cosine"), "")
            return row | empty | {"most changed": self.reason, "by": ""}
        lost = self.channels["unlike"].max()
        return row | {
            "absolute": f"{self.channels['absolute'].max():.3g}"
            + (f" ({lost} not finite)" if lost else ""),
            "relative": f"{self.channels['relative'].max():.3g}",
            "cosine": f"{self.cosine:.6f}" if math.isfinite(self.cosine) else "",
            "most changed": ", ".join(map(str, self.most_changed)),
            "by": " or ".join(self.by),
        }

    @property
    def words(self) -> list[tuple[str, str]]:
        """What the page says of it: the cells behind its name that hold something."""
        return [(heading, cell) for heading, cell in list(self.cells.items())[3:] if cell]


OnlyIn: TypeAlias = tuple[Mapping[str, str], Mapping[tuple[CaptureKey, str], str]]
"""The images, and the layers with their types, that one run has and the other has not, and why."""


def lines_of(only: OnlyIn) -> list[str]:
    """A line for each image and layer that only one run has."""
    images = [f"image {name} ({reason})" for name, reason in only[0].items()]
    return images + [
        f"layer {place.layer or type} {place.stem} ({reason})"
        for (place, type), reason in only[1].items()
    ]


@dataclass(frozen=True)
class Comparison:
    """Two runs compared."""

    base: Path | Url
    new: Path | Url
    asked: DiffThresholds
    images: tuple[str, ...]
    layers: tuple[ComparedLayer, ...]
    only_in_base: OnlyIn
    only_in_new: OnlyIn
    incomplete: Mapping[str, Sequence[str]]
    """Names of images that are left out as incomplete, under `base` and `new`."""

    @property
    def differing(self) -> tuple[ComparedLayer, ...]:
        """The layers that differ."""
        return tuple(layer for layer in self.layers if layer.differing)

    @property
    def first(self) -> ComparedLayer | None:
        """The first layer that diverges."""
        return next(iter(self.differing), None)

    @property
    def channels(self) -> tuple[int, int]:
        """How many channels of all layers differ in some image, and how many there are."""
        return sum(one.differing for one in self.layers), sum(one.total for one in self.layers)

    @property
    def channel_images(self) -> tuple[int, int]:
        """The same, with each channel counted in each image."""
        counts = [layer.channel_images for layer in self.layers]
        return sum(differing for differing, _ in counts), sum(total for _, total in counts)

    @property
    def ratio(self) -> float:
        """Share of channels that differ, each counted in each image."""
        differing, total = self.channel_images
        return differing / total if total else 0.0

    @property
    def within(self) -> bool:
        """Whether no more channels differ than the thresholds allow."""
        return self.ratio <= self.asked.max_diff_ratio

    @property
    def equal(self) -> bool:
        """Whether the runs are equal, as far as the thresholds ask."""
        added = lines_of(self.only_in_new) and not self.asked.ignore_added
        return self.within and not lines_of(self.only_in_base) and not added

    @property
    def exit_code(self) -> int:
        """0, or 4 where the runs differ."""
        return 0 if self.equal else CHECK_FAILED

    @property
    def words(self) -> str:
        """The whole result in a line."""
        differing, total = self.channels
        where = "" if self.first is None else f", first at {self.first.label} ({self.first.type})"
        tensors, images = counted(len(self.layers), "tensor"), counted(len(self.images), "image")
        share = f"{self.ratio:.2%}"
        if len(self.images) > 1:
            some, every = self.channel_images
            share = f"{some:,} of {every:,} counted in each image, {share}"
        return (
            f"{'equal' if self.equal else 'different'}: {tensors} of {images} compared, "
            f"{differing:,} of {counted(total, 'channel')} differ ({share}){where}"
        )

    @property
    def lists(self) -> dict[str, Sequence[str]]:
        """What only one run has, or has in part, under titles."""
        return {
            "Only in BASE": lines_of(self.only_in_base),
            "Only in NEW": lines_of(self.only_in_new),
            **{f"Incomplete in {side.upper()}": names for side, names in self.incomplete.items()},
        }
