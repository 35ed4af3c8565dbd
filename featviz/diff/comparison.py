"""The result of a comparison of two runs: each compared tensor, what only one run has,
and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from featviz.diff.pairing import LayerPair
from featviz.errors import CHECK_FAILED
from featviz.files.urls import Url
from featviz.options.commands import DiffThresholds
from featviz.records import CaptureKey, ClassScore, GridPlan, Verdict, finite
from featviz.text import counted, layer_named, ranges

SCHEMA_VERSION = 1
"""The version of the JSON document. 1: first release."""

# the columns that name a tensor: on the page, the heading says the same
_NAMING = ("layer", "type", "tensor")
# at most this many ranges of newly dead channels are listed
_MAX_RANGES = 5


class ValueSpan(NamedTuple):
    """The values drawn darkest and brightest."""

    low: float
    high: float


class ChangedNumber(NamedTuple):
    """The value of a channel that is one number."""

    before: float
    after: float


class NumberedTile(NamedTuple):
    """Where the number of a channel stands: below its tile, in pixels of the picture."""

    channel: int
    x: float
    """The middle of the text."""
    y: float
    """The line on which it stands."""


@dataclass(frozen=True)
class DifferenceMap:
    """Three pictures of a tensor's most changed channels: in BASE, in NEW, and the signed
    difference. All have the same tiles."""

    file: str
    """The picture of the difference, by its name in the folder of the maps."""
    before_file: str
    after_file: str
    image: str
    """The image whose values are shown: the one in which the tensor differs most."""
    label: str
    """`ComparedTensor.label`."""
    stem: str
    """Which tensor of the layer it is: `output`, `output.call1`."""
    channels: tuple[int, ...]
    """The drawn channels in tile order: the most changed first."""
    source: str
    """What shows the values: `kept tensors` or `pixels`."""
    limit: float
    """The relative difference at the ends of the colours, -limit and limit."""
    range: ValueSpan
    """The scale of before and after."""
    plan: GridPlan
    slices: int
    """How many tiles each channel has, side by side."""
    numbers: Sequence[ChangedNumber] = ()
    """The values by themselves, where each channel is one number."""

    @property
    def letter_size(self) -> float:
        """The height of the channels' numbers in pixels of the picture."""
        return round(0.72 * self.plan.padding, 1)

    @property
    def numbered_tiles(self) -> list[NumberedTile]:
        """Where the number of each channel is written: below the middle of its tiles."""
        # The gap below a tile is as high as the padding: letters of 0.72 of it that stand
        # at 0.8 have room above and below.
        tiles = []
        padding = self.plan.padding
        for position, channel in enumerate(self.channels):
            left, top, width, height = self.plan.box(position * self.slices)
            # the slices with the gaps between them, but not the one behind
            across = self.slices * (width + padding) - padding
            baseline = top + height + 0.8 * padding
            tiles.append(NumberedTile(channel, left + across / 2, round(baseline, 1)))
        return tiles


@dataclass(frozen=True)
class PredictionChange:
    """The classes that a classifier predicts for an image, in BASE and in NEW."""

    image: str
    before: Sequence[ClassScore]
    """The likeliest class first; at least one."""
    after: Sequence[ClassScore]

    @property
    def changed(self) -> bool:
        """Whether another class is the likeliest."""
        return self.before[0].index != self.after[0].index

    @property
    def shift(self) -> float:
        """How far the probability of the likeliest class moved, 0..1."""
        return abs(self.after[0].probability - self.before[0].probability)

    @property
    def text(self) -> str:
        """`cat.jpg: tabby 61.2 % → lynx 40.0 %`."""
        return f"{self.image}: {self.before[0].text} → {self.after[0].text}"


class ImageChange(NamedTuple):
    """How much a tensor changed in one image; None for a number that is not known. `absolute`
    and `relative` are the largest differences (`diff.compare`)."""

    differing: int
    """How many channels differ."""
    absolute: float | None = None
    relative: float | None = None
    cosine: float | None = None
    sqnr: float | None = None
    """In dB; also None if nothing differs, or if no tensors were kept."""


class ChannelChanges(NamedTuple):
    """The largest differences (and the smallest cosine) of each channel over the images that
    could be compared: fields of `diff.compare.Change`, arrays [channels]."""

    absolute: np.ndarray
    relative: np.ndarray
    unlike: np.ndarray
    cosine: np.ndarray


class ChannelCount(NamedTuple):
    """How many channels differ, of how many."""

    differing: int
    total: int


@dataclass(frozen=True)
class ComparedTensor:
    """One tensor of a layer (its output at one call, say) in both runs, over all images."""

    key: CaptureKey
    type: str
    """The type of the layer: `Conv2d`."""
    index: int
    """The layer's position in the model."""
    by: Sequence[str]
    """What was compared; several if images differ in this: `tensors`, `statistics and
    pixels`, `statistics`."""
    reason: str | None
    """Why it could not be compared, in the first image where this happened; None if it could
    be compared in all images."""
    images: Mapping[str, ImageChange]
    """By name of the image."""
    count: ChannelCount
    """Each channel counts once, and differs if it does in at least one image."""
    channel_images: ChannelCount
    """Each channel counts once for each image."""
    channels: ChannelChanges
    cosine: float
    """The cosine of the whole tensor, in the image where it is smallest. NaN if it is not
    known: if only statistics are known, of all channels or of one that differs."""
    sqnr: float
    """Signal to quantization noise in dB, in the image where it is smallest; infinite if
    nothing differs, NaN unless both runs kept tensors."""
    most_changed: Sequence[int]
    """The at most five most changed channels, over all images, the most changed first."""
    newly_dead: Sequence[int]
    """The channels of an activation that are zero in every image of NEW, but not in every
    image of BASE; empty if only one image was compared."""
    image: str
    """The image in which it differs most; the next three fields are about this image."""
    severity: float
    """The largest relative difference, 0..1; 1 if the tensors cannot be compared, or have
    unlike values (see `Change`)."""
    change: np.ndarray
    """[channels]: the largest relative difference of each, 0..1."""
    changed: Sequence[int]
    """The channels that differ, the most changed first."""
    difference: DifferenceMap | None = None
    """Its pictures; None if none were drawn."""
    pair: LayerPair | None = None
    """How its partner in NEW was found; None for two runs of one runtime, where the partner
    has the same name."""

    @property
    def label(self) -> str:
        """`layer1.0.conv1`; the class name for the model itself."""
        return self.key.layer or self.type

    @property
    def differs(self) -> bool:
        """Whether a channel differs in some image."""
        return self.count.differing > 0

    @property
    def cells(self) -> dict[str, str]:
        """A row of a table, by heading. Cells that do not apply are empty."""
        differing_images = sum(change.differing > 0 for change in self.images.values())
        row = {
            "layer": self.label,
            "type": self.type,
            "tensor": self.key.stem,
            "images": f"{differing_images}/{len(self.images)}",
            "channels": f"{self.count.differing:,}/{self.count.total:,}",
            "absolute": "",
            "relative": "",
            "cosine": "",
            "SQNR": "",
            "most changed": self.reason or "",
            "newly dead": ranges(self.newly_dead, _MAX_RANGES, comma=", "),
            "by": "",
            "in NEW": "" if self.pair is None else self.pair.description,
        }
        if self.reason is None:
            unlike = self.channels.unlike.max()
            row["absolute"] = f"{self.channels.absolute.max():.3g}"
            if unlike:
                row["absolute"] += f" ({unlike} not finite)"
            row["relative"] = f"{self.channels.relative.max():.3g}"
            if math.isfinite(self.cosine):
                row["cosine"] = f"{self.cosine:.6f}"
            # an infinite SQNR is shown: it says that nothing differs
            if not math.isnan(self.sqnr):
                row["SQNR"] = f"{self.sqnr:.2f} dB"
            row["most changed"] = ", ".join(map(str, self.most_changed))
            row["by"] = " or ".join(self.by)
        return row

    @property
    def page_cells(self) -> list[tuple[str, str]]:
        """The facts that the page lists: headings and cells. Empty cells are left out, and
        those that name the tensor."""
        cells = []
        for heading, cell in self.cells.items():
            # beside it the page shows maps that are ranked by one image
            if heading == "most changed" and len(self.images) > 1 and not self.reason:
                heading = "most changed, all images"
            if cell and heading not in _NAMING:
                cells.append((heading, cell))
        return cells


class MissingCapture(NamedTuple):
    """A tensor that only one of the runs has."""

    key: CaptureKey
    type: str
    """The type of its layer."""
    reason: str
    """`skipped: ...`, `never ran` or `not there`, of the run that lacks it."""


class OnlyIn(NamedTuple):
    """What only one of the runs has."""

    images: Mapping[str, str]
    """By name of the image: why the other run has no such image (`failed: ...`,
    `incomplete`, `not there`)."""
    captures: Sequence[MissingCapture]

    @property
    def lines(self) -> list[str]:
        """A line for each image and tensor."""
        lines = []
        for name, reason in self.images.items():
            lines.append(f"image {name} ({reason})")
        for key, type, reason in self.captures:
            lines.append(f"layer {key.layer or type} {key.stem} ({reason})")
        return lines


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two runs compared."""

    base: Path | Url | str
    """The run directory, or the name of the model that was run for the comparison."""
    new: Path | Url | str
    thresholds: DiffThresholds
    images: tuple[str, ...]
    """Names of the compared images."""
    layers: tuple[ComparedTensor, ...]
    """One for each tensor, in the order in which the model ran: a layer may have
    several."""
    only_in_base: OnlyIn
    only_in_new: OnlyIn
    incomplete: Mapping[str, Sequence[str]]
    """Under `base` and `new`: names of images that the comparison leaves out, since that run
    has not finished them."""
    predictions: tuple[PredictionChange, ...] = ()
    """The predictions for images that have one in both runs."""
    folded: tuple[str, ...] = ()
    """See `diff.pairing.Alignment`."""
    gates: tuple[Verdict, ...] = ()
    """Whether each gate of the thresholds held."""
    out: Path | None = None
    """The folder of the pictures of differences."""

    def __repr__(self) -> str:
        return f"<Comparison: {self.summary}>"

    @property
    def document(self) -> dict[str, Any]:
        """What `--json` prints, and the content of diff.json. All counts of channels in it
        are counts of `channel_images`, so that they add up."""
        differing, total = self.channel_images
        first = self.first
        predictions = []
        for change in self.predictions:
            predictions.append({**asdict(change), "changed": change.changed})
        maps = []
        for tensor in self.layers:
            if tensor.difference is not None:
                maps.append(_map_json(tensor.difference))
        return {
            "schema_version": SCHEMA_VERSION,
            "base": str(self.base),
            "new": str(self.new),
            **structs.asdict(self.thresholds),
            "equal": self.equal,
            "gates": [asdict(verdict) for verdict in self.gates],
            "images": list(self.images),
            "predictions": predictions,
            "channels": {"differing": differing, "total": total, "ratio": self.ratio},
            "first_divergence": None if first is None else _name_json(first),
            "layers": [_tensor_json(tensor) for tensor in self.layers],
            "only_in_base": _only_in_json(self.only_in_base),
            "only_in_new": _only_in_json(self.only_in_new),
            "folded": list(self.folded),
            "incomplete": {key: list(names) for key, names in self.incomplete.items()},
            "maps": maps,
        }

    @property
    def differing(self) -> tuple[ComparedTensor, ...]:
        """The tensors that differ, in the order in which the model ran."""
        return tuple(tensor for tensor in self.layers if tensor.differs)

    @property
    def first(self) -> ComparedTensor | None:
        """The first tensor that differs, in the order in which the model ran; later tensors
        inherit its difference. None if no tensor differs."""
        return self.differing[0] if self.differing else None

    @property
    def changed_predictions(self) -> list[PredictionChange]:
        """The predictions whose likeliest class changed."""
        return [change for change in self.predictions if change.changed]

    @property
    def channels(self) -> ChannelCount:
        """How many channels of all tensors differ in some image."""
        return _sum(tensor.count for tensor in self.layers)

    @property
    def channel_images(self) -> ChannelCount:
        """How many channels of all tensors differ, each counted once for each image."""
        return _sum(tensor.channel_images for tensor in self.layers)

    @property
    def ratio(self) -> float:
        """The share of channels that differ, 0..1, each counted once for each image."""
        count = self.channel_images
        return count.differing / count.total if count.total else 0.0

    @property
    def within(self) -> bool:
        """Whether no more channels differ than the thresholds allow."""
        return self.ratio <= self.thresholds.max_diff_ratio

    @property
    def equal(self) -> bool:
        """Whether no more channels differ than allowed, and both runs have the same images
        and tensors. With --ignore-added NEW may have more of them."""
        added = self.only_in_new.lines and not self.thresholds.ignore_added
        return self.within and not self.only_in_base.lines and not added

    @property
    def passed(self) -> bool:
        """Whether all gates held; without gates, whether the runs are equal."""
        # gates replace the rule that runs must be equal: a quantised model always differs
        if self.gates:
            return all(verdict.held for verdict in self.gates)
        return self.equal

    @property
    def exit_code(self) -> int:
        """0 if the comparison passed, else 4."""
        return 0 if self.passed else CHECK_FAILED

    @property
    def verdict(self) -> str:
        """`equal`, `different`, or `within --max-diff-ratio 0.1` if some channels differ,
        but no more than allowed."""
        if not self.equal:
            return "different"
        if self.first is None:
            return "equal"
        return f"within --max-diff-ratio {self.thresholds.max_diff_ratio:g}"

    @property
    def summary(self) -> str:
        """The whole result in a line: the verdict, how much differs, and where the
        difference begins."""
        where = ""
        if self.first is not None:
            where = f", first at {layer_named(self.first.label)} ({self.first.type})"
        return f"{self.verdict}: {self.extent}{where}"

    @property
    def extent(self) -> str:
        """How much was compared, and how much of it differs: `2 tensors of 1 image compared,
        3 of 8 channels differ (37.50%)`."""
        tensors = counted(len(self.layers), "tensor")
        images = counted(len(self.images), "image")
        # The text counts each channel once. The limit is on `ratio`, which counts each
        # channel once for each image. With one image the two counts are the same.
        share = f"{self.ratio:.2%}"
        if len(self.images) > 1:
            differing, total = self.channel_images
            share = f"{differing:,} of {total:,} counted in each image, {share}"
        most = ""
        if self.first is not None and self.equal:
            largest = max(tensor.severity for tensor in self.differing)
            most = f" by at most {largest:.3g} relative"
        differing, total = self.channels
        return (
            f"{tensors} of {images} compared, "
            f"{differing:,} of {counted(total, 'channel')} differ ({share}){most}"
        )

    @property
    def lists(self) -> dict[str, Sequence[str]]:
        """What was not compared, by title: what only one run has, layers inside another
        layer, and incomplete images. A list may be empty."""
        lists = {
            "Only in BASE": self.only_in_base.lines,
            "Only in NEW": self.only_in_new.lines,
            "Inside another layer": self.folded,
        }
        for title, names in self.incomplete.items():
            lists[f"Incomplete in {title.upper()}"] = names
        return lists


def _sum(counts: Iterable[ChannelCount]) -> ChannelCount:
    """The sum of the counts of several tensors."""
    differing = 0
    total = 0
    for count in counts:
        differing += count.differing
        total += count.total
    return ChannelCount(differing, total)


def _name_json(tensor: ComparedTensor) -> dict[str, Any]:
    """The entries that name a tensor, and the image in which the tensor differs most."""
    return {
        "type": tensor.type,
        "index": tensor.index,
        **tensor.key._asdict(),
        "image": tensor.image,
    }


def _tensor_json(tensor: ComparedTensor) -> dict[str, Any]:
    """An entry of `layers`. NaN and infinity become null, since JSON has neither."""
    differing, total = tensor.channel_images
    changes = tensor.channels
    return {
        **_name_json(tensor),
        "by": tensor.by,
        "in_new": None if tensor.pair is None else tensor.pair.document,
        "reason": tensor.reason,
        "images": {name: change._asdict() for name, change in tensor.images.items()},
        "differing": differing,
        "total": total,
        "cosine": finite(tensor.cosine),
        "sqnr": finite(tensor.sqnr),
        "most_changed": tensor.most_changed,
        "newly_dead": tensor.newly_dead,
        "channels": {
            "absolute": changes.absolute.tolist(),
            "relative": changes.relative.tolist(),
            "unlike": changes.unlike.tolist(),
            "cosine": [finite(value) for value in changes.cosine.tolist()],
        },
    }


def _only_in_json(only_in: OnlyIn) -> dict[str, Any]:
    """What only one run has, as diff.json lists it."""
    layers = []
    for key, type, reason in only_in.captures:
        layers.append({**key._asdict(), "type": type, "reason": reason})
    return {"images": dict(only_in.images), "layers": layers}


def _map_json(difference: DifferenceMap) -> dict[str, Any]:
    """An entry of `maps`."""
    return {
        "file": difference.file,
        "before": difference.before_file,
        "after": difference.after_file,
        "range": list(difference.range),
        "image": difference.image,
        "label": difference.label,
        "stem": difference.stem,
        "source": difference.source,
        "limit": difference.limit,
        "channels": difference.channels,
    }
