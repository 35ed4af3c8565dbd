"""What became of it: pictures, captures, predictions, images, runs, and two runs compared."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from featviz.errors import CHECK_FAILED
from featviz.files.urls import Url
from featviz.records.layers import Place
from featviz.text import counted, percent, printable

if TYPE_CHECKING:  # completion of a shell imports this, and has no time for numpy
    import numpy as np
    from numpy.typing import NDArray

    from featviz.options import DiffThresholds

Bytes: TypeAlias = "NDArray[np.uint8]"
Floats: TypeAlias = "NDArray[np.float32]"
Integers: TypeAlias = "NDArray[np.int64]"


STAT_COLUMNS = ("min", "max", "mean", "std", "zero_fraction", "nonfinite")
"""The columns of every array in `stats.npz`."""


class Tiles(Protocol):
    """The tiles of a picture, uint8 [N, h, w] or [N, h, w, 3]: an array, or what makes them as they
    are asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        ...

    @property
    def nbytes(self) -> int:
        """What is held in memory."""
        ...

    def __getitem__(self, part: slice, /) -> Bytes:
        """Some of the tiles."""
        ...


@dataclass(frozen=True)
class GridPlan:
    """The geometry of a picture, in pixels; tiles run row by row."""

    maps: int
    columns: int
    """Tiles in a row; make_grid calls it nrow."""
    rows: int
    map_size: tuple[int, int]
    """Height and width of one map, before it is enlarged."""
    scale: tuple[int, int]
    """Whole factors by which a map is enlarged, down and across."""
    padding: int

    @cached_property
    def tile(self) -> tuple[int, int]:
        """Height and width of one drawn tile without its padding."""
        return self.map_size[0] * self.scale[0], self.map_size[1] * self.scale[1]

    @cached_property
    def height(self) -> int:
        """Height of the picture."""
        return self.rows * (self.tile[0] + self.padding) + self.padding

    @cached_property
    def width(self) -> int:
        """Width of the picture."""
        return self.columns * (self.tile[1] + self.padding) + self.padding

    @cached_property
    def pixels(self) -> int:
        """Pixels of the picture."""
        return self.height * self.width

    def box(self, number: int) -> tuple[int, int, int, int]:
        """Left, top, width and height of a tile in the picture."""
        row, column = divmod(number, self.columns)
        height, width = self.tile
        left = self.padding + column * (width + self.padding)
        return left, self.padding + row * (height + self.padding), width, height


@dataclass(frozen=True, slots=True)
class Guess:
    """One of the classes that a model thinks most likely."""

    index: int
    name: str | None
    """None where the weights have no names."""
    score: float
    probability: float
    """Its softmax, 0..1."""

    @property
    def title(self) -> str:
        """The class for people: `tabby`, or `class 281`."""
        return self.name or f"class {self.index}"

    @property
    def words(self) -> str:
        """For people: `tabby 43.1 %`."""
        return f"{self.title} {percent(self.probability)}"


def finite(value: float | None) -> float | None:
    """The value for JSON, which has neither NaN nor infinity."""
    return value if value is not None and math.isfinite(value) else None


UNLIKE_OUTPUTS = "its shape changed, or it is complex, sparse or nested"
"""Why the outputs of two passes are not compared, for people."""


@dataclass(frozen=True)
class Outcome:
    """What the model said of an input."""

    prediction: tuple[Guess, ...] = ()
    before: tuple[Guess, ...] = ()
    intervened: bool = False
    """Whether interventions changed what layers give."""
    largest_change: float | None = None
    """The largest change of a finite value of the model's output by the interventions; None where
    the outputs cannot be compared (UNLIKE_OUTPUTS)."""
    nonfinite: int = 0
    """Values of the output that are NaN or infinite with the interventions or without, but not
    alike in both."""
    target: float | None = None
    """The value that was differentiated; None where there was no backward pass."""
    target_title: str = ""
    """What was differentiated, for people: the class's name or number, or the target as it was
    asked for; empty where there was no backward pass."""
    idle: tuple[str, ...] = ()
    """What was asked for and changed nothing, in words."""

    @property
    def effect(self) -> dict[str, object]:
        """What the interventions did, for manifests and JSON lines."""
        before = [asdict(guess) for guess in self.before]
        change = finite(self.largest_change)
        return {"largest_change": change, "nonfinite": self.nonfinite, "before": before}


@dataclass(frozen=True)
class Skip:
    """Something a selected layer gave that could not be drawn: a row of `skipped`."""

    layer: str
    type: str
    index: int
    kind: str
    call: int
    key: str
    reason: str


@dataclass(frozen=True)
class ImageResult:
    """What became of one image."""

    name: str
    """Its path relative to the argument it came from; `image-0.png` for one in memory."""
    folder: str
    """Its folder, relative to the run directory."""
    rows: tuple[Any, ...] = ()
    """Of `rundir.schema.Capture`, which stands on a floor above."""
    skipped: tuple[Skip, ...] = ()
    """What selected layers gave that could not be drawn, each with the reason."""
    never_ran: tuple[str, ...] = ()
    """Selected layers that did not run."""
    error: str | None = None
    """What went wrong; None for a complete image."""
    hint: str | None = None
    outcome: Outcome = field(default_factory=Outcome)
    """What the model said, and what interventions and gradients did."""
    kept: bool = False
    """It was complete before, and `resume` left it as it was."""


@dataclass(frozen=True)
class RunResult:
    """What became of a run."""

    root: Path | Url
    """The run directory, or its URL."""
    images: tuple[ImageResult, ...] = ()
    missing: tuple[str, ...] = ()
    """Images that were not reached: the run was stopped."""
    interrupted: bool = False
    pictures: int = 0
    whole: bool = True
    """Whether no image of the run is missing, those of other shards included."""
    all_failures: int = 0
    """The number of images of the run that failed, those of other shards included."""

    @property
    def failures(self) -> tuple[ImageResult, ...]:
        """The images that failed."""
        return tuple(image for image in self.images if image.error is not None)

    @property
    def drew_nothing(self) -> bool:
        """Whether images are complete, and none has a picture."""
        return len(self.failures) < len(self.images) and not self.pictures

    @property
    def exit_code(self) -> int:
        """0 all complete, 3 some failed, 1 all failed, stopped at one or drew nothing, 130
        interrupted."""
        if self.interrupted:
            return 130
        if self.drew_nothing:
            return 1
        if not self.failures:
            return 0
        return 3 if len(self.failures) < len(self.images) and not self.missing else 1


@dataclass(frozen=True)
class DifferenceMap:
    """A picture of signed differences."""

    file: str
    """Relative to the folder of the maps."""
    image: str
    label: str
    stem: str
    channels: tuple[int, ...]
    """The drawn channels in tile order: the most changed first."""
    source: str
    """`kept tensors` or `pixels`."""
    limit: float
    """The relative difference at the ends of the colours."""
    plan: GridPlan
    slices: int
    """Maps side by side of one channel."""


@dataclass(frozen=True)
class ComparedLayer:
    """One place of the model in both runs, over all images."""

    place: Place
    type: str
    """Class name of the layer."""
    index: int
    by: Sequence[str]
    """What its tensors were compared by: `tensors`, `statistics and pixels`, `statistics`."""
    reason: str | None
    """Why it could not be compared, in the first image where it could not."""
    images: Mapping[str, Mapping[str, float | None]]
    """By image: how many channels are `differing`, and `absolute`, `relative` and `cosine`."""
    differing: int
    """Channels that differ in some image, and how many there are."""
    total: int
    channel_images: tuple[int, int]
    """The same, with each channel counted in each image."""
    channels: Mapping[str, np.ndarray]
    """`absolute`, `relative`, `cosine` and `unlike`, as in `diff.compare.Change`: the worst of each
    channel over the images that could be compared, of the channels that all of these have."""
    cosine: float
    """The smallest of a whole tensor, over the images in which the layer differs; NaN where only
    statistics are known."""
    most_changed: Sequence[int]
    """The channels that differ most, of those that all images have."""
    image: str
    """The image in which the layer differs most; of equals the first."""
    severity: float
    """The largest relative difference there, 0..1; 1 where shapes or finite values differ."""
    change: np.ndarray
    """[channels]: the largest relative difference of each there, 0..1."""
    changed: Sequence[int]
    """The channels that differ there, the most changed first."""
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
            return (
                row
                | dict.fromkeys(("absolute", "relative", "cosine"), "")
                | {
                    "most changed": self.reason,
                    "by": "",
                }
            )
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


@dataclass(frozen=True)
class OnlyIn:
    """The images and layers that one run has and the other has not."""

    images: Mapping[str, str]
    """What became of each image, by name, in the other run."""
    places: Mapping[tuple[Place, str], str]
    """What became of each (place, type of the layer) in the other run."""

    @property
    def words(self) -> list[str]:
        """A line for each."""
        images = [f"image {name} ({reason})" for name, reason in self.images.items()]
        return images + [
            f"layer {place.layer or type} {place.stem} ({reason})"
            for (place, type), reason in self.places.items()
        ]


@dataclass(frozen=True)
class Comparison:
    """Two runs compared."""

    base: Path | Url
    new: Path | Url
    asked: DiffThresholds
    images: tuple[str, ...]
    layers: tuple[ComparedLayer, ...]
    """Those of both runs, in the order in which the model came to them."""
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
        added = self.only_in_new.words and not self.asked.ignore_added
        return self.within and not self.only_in_base.words and not added

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
            "Only in BASE": self.only_in_base.words,
            "Only in NEW": self.only_in_new.words,
            **{f"Incomplete in {side.upper()}": names for side, names in self.incomplete.items()},
        }


class TextTable(NamedTuple):
    """A table of words."""

    headings: Sequence[str]
    numbers: Collection[str]
    """Headings of the columns that are set flush right."""
    rows: Sequence[Sequence[str]]
    totals: Sequence[Sequence[str]] = ()
    footer: Sequence[str] = ()
    above: Sequence[str] = ()

    def __str__(self) -> str:
        """All of it as plain text, columns apart by two spaces; control characters are escaped."""
        cells = [[printable(str(c)) for c in row] for row in self._all]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        right = [heading in self.numbers for heading in self.headings]
        lines = [
            "  ".join(
                words.rjust(width) if flush else words.ljust(width)
                for words, width, flush in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in cells
        ]
        return "\n".join([*map(printable, self.above), *lines, *map(printable, self.footer)])

    @property
    def _all(self) -> list[Sequence[str]]:
        return [self.headings, *self.rows, *self.totals]
