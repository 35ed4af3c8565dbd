"""What became of it: pictures, captures, predictions, images and runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from featviz.files.urls import Url
from featviz.text import percent

if TYPE_CHECKING:  # completion of a shell imports this, and has no time for numpy
    import numpy as np
    from numpy.typing import NDArray

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
    top: int = 0
    """Pixels above the grid, for its title."""

    @property
    def tile(self) -> tuple[int, int]:
        """Height and width of one drawn tile without its padding."""
        return self.map_size[0] * self.scale[0], self.map_size[1] * self.scale[1]

    @property
    def height(self) -> int:
        """Height of the picture."""
        return self.top + self.rows * (self.tile[0] + self.padding) + self.padding

    @property
    def width(self) -> int:
        """Width of the picture."""
        return self.columns * (self.tile[1] + self.padding) + self.padding

    @property
    def pixels(self) -> int:
        """Pixels of the picture."""
        return self.height * self.width

    def box(self, number: int) -> tuple[int, int, int, int]:
        """Left, top, width and height of a tile in the picture."""
        row, column = divmod(number, self.columns)
        height, width = self.tile
        left = self.padding + column * (width + self.padding)
        return left, self.top + self.padding + row * (height + self.padding), width, height


@dataclass(frozen=True, slots=True)
class Guess:
    """One of the classes that a model thinks most likely."""

    index: int
    name: str | None
    """None where the weights have no names."""
    score: float
    """The model's output for the class."""
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
    """The prediction without the interventions."""
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
class Capture:
    """One drawn tensor: a row of `captures` in a manifest."""

    layer: str
    type: str
    index: int
    kind: str
    call: int
    key: str
    shape: list[int]
    """The shape of the tensor as the layer gave it."""
    layout: str
    maps: int
    """Maps that the tensor holds; `channels` lists those that were drawn, where not all were."""
    file: str
    """Relative to the image's folder."""
    grid: Mapping[str, object]
    """nrow, padding, tile [height, width] and scale, in pixels; under a title top, its height."""
    normalize: str
    """The scale that was used; one-number maps share the layer's even under `map`."""
    range: list[float | None] | None
    """Values drawn darkest and brightest; None where each map has its own (see `stats.npz`)."""
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    zero_fraction: float
    nonfinite: int
    channels: list[int] | None = None
    """The drawn channels in tile order, where they are not simply all."""
    slices: list[int] | None = None
    """[drawn, held] tiles of each channel, side by side, where it holds several: the time steps of
    a clip, the regions of a batch."""
    steps: list[int] | None = None
    """The slices that are drawn, from 0, where not all are."""
    tensor: str | None = None
    """File of the raw tensor, relative to the image's folder."""
    constant: list[int] | None = None
    """Slices, height and width of each map, where all maps are constant: the picture is one strip
    of their values, a number for each channel."""
    collapsed: dict[str, list[int]] | None = None
    """The channels that share a tile, by the channel that is drawn."""
    reduce: str | None = None
    """How all channels became one tile."""
    overlay: float | None = None
    """How much of the map lies over the input, 0..1, where it does."""
    figure: str | None = None
    """File of the figure, relative to the image's folder."""


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
    """What became of one image; `error` is None for a complete one."""

    image: str
    folder: str
    captures: tuple[Capture, ...] = ()
    skipped: tuple[Skip, ...] = ()
    never_ran: tuple[str, ...] = ()
    error: str | None = None
    hint: str | None = None
    outcome: Outcome = field(default_factory=Outcome)
    kept: bool = False
    """It was complete before, and `--resume` left it as it was."""


@dataclass(frozen=True)
class RunResult:
    """What became of a run."""

    out: Path | Url
    images: tuple[ImageResult, ...] = field(default=())
    missing: tuple[str, ...] = ()
    """Images that were not reached: the run was stopped."""
    interrupted: bool = False
    """Whether SIGINT or SIGTERM ended the run."""
    pictures: int = 0
    """The number of pictures of all images."""

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
