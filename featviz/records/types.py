"""Records that parts of featviz pass to each other: layers and their captures, hints on
layouts, images, and the outcome of a forward pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    Self,
    TypeAlias,
    TypeVar,
)

from featviz.files.urls import Url
from featviz.text import percent

if TYPE_CHECKING:  # completion of a shell imports this, and has no time for numpy
    import numpy as np
    from numpy.typing import NDArray

_L = TypeVar("_L")
Bytes: TypeAlias = "NDArray[np.uint8]"
Floats: TypeAlias = "NDArray[np.float32]"
Integers: TypeAlias = "NDArray[np.int64]"

Tiles: TypeAlias = Any
"""The tiles of a picture, uint8 [N, h, w] or [N, h, w, 3]: an array; or an object with
`shape` and `nbytes` that makes the tiles of a slice when it is indexed."""

STAT_COLUMNS = ("min", "max", "mean", "std", "zero_fraction", "nonfinite")
"""The columns of every array in `stats.npz`."""

UNLIKE_OUTPUTS = "its shape changed, or it is complex, sparse or nested"
"""The reason for people why the outputs of two passes are not compared."""


@dataclass(frozen=True)
class Layer:
    """A module of the model, or a function that a module calls."""

    index: int
    """The position in `model.named_modules()`, in which a shared module counts at each of
    its places; 0 is the model itself. A function has the position of its module."""
    name: str
    """The qualified name, `layer1.0.conv1` or `layer1.0/fn:add`; empty for the model
    itself."""
    type: str
    """The class of the module, or `fn:add` for a function."""
    classes: tuple[str, ...] = ()
    """The names of the module's class and of its base classes, which selectors match."""
    aliases: tuple[str, ...] = ()
    """Further qualified names of a shared module in the same place."""

    @property
    def is_function(self) -> bool:
        """Whether this is a function that a module calls: `layer1.0/fn:add`."""
        return self.type.startswith("fn:")

    @property
    def owner(self) -> str:
        """The qualified name of the module; for a function, of the module that calls it."""
        if not self.is_function:
            return self.name
        # a function that the model itself calls has no slash in its name: `fn:add`
        return self.name.rpartition("fn:")[0].rstrip("/")

    @property
    def label(self) -> str:
        """The name for people; for the model itself, its class."""
        return self.name or self.type


class CaptureAddress(NamedTuple, Generic[_L]):
    """The address of a capture among those of an image. The name of its file is
    `KIND[.callN][.KEY]`, in the folder of its layer."""

    layer: _L
    """The layer of a CaptureSite, the qualified name of the layer of a CaptureKey."""
    kind: str
    """One of the capture kinds, `output`, `input`, `grad`, `grad-input`; or `kernel`.
    """
    call: int
    """The number of the call of the layer, from 0."""
    key: str
    """The path of the tensor in a tuple, list or dict (`0`, `boxes`, `0.feat`); empty for
    a plain tensor."""

    @property
    def stats_key(self) -> str:
        """The key of the capture in stats.npz; a site and its key have the same one."""
        name = self.layer.name if isinstance(self.layer, Layer) else self.layer
        return f"{name}|{self.kind}|{self.call}|{self.key}"

    @property
    def deviations_key(self) -> str:
        """The key in stats.npz of the standard deviations without the border of maps."""
        return f"{self.stats_key}|inner_std"

    @property
    def stem(self) -> str:
        """The name of the capture's file, without its ending: `output`, `output.call1`,
        `output.call1.boxes`."""
        stem = self.kind
        if self.call:
            stem += f".call{self.call}"
        if self.key:
            stem += f".{self.key}"
        return stem

    @property
    def suffix(self) -> str:
        """The part of `stem` behind the kind: `.call1`, `.call1.boxes`; empty for a plain
        tensor of the first call. Tables and pictures put it behind the name of a layer."""
        return self.stem.removeprefix(self.kind)

    def inside(self, key: str) -> Self:
        """The address of a part of this tensor, by the name of the part; for an empty name,
        the address of the tensor itself."""
        if not key:
            return self
        # lstrip: if this is a plain tensor, there is no dot before the name
        return self._replace(key=f"{self.key}.{key}".lstrip("."))


CaptureKey: TypeAlias = CaptureAddress[str]
"""An address with the qualified name of the layer. Manifests have it, and the captures of
two runs are matched by it."""
CaptureSite: TypeAlias = CaptureAddress[Layer]
"""An address with the layer itself. A hook passes it to its sink."""


@dataclass(frozen=True)
class Trace:
    """Where the values of one tensor lie in the image, followed through the model's
    functions."""

    is_weights: bool = False
    """Whether the tensor comes from a softmax inside an attention."""
    grid: tuple[int, int, int] | None = None
    """Time steps, height and width of a map of which the tensor has each position exactly
    once; None if there is no such map."""
    axes: tuple[int, ...] = ()
    """The axes along which the position changes; all others are axes of channels."""
    positions: NDArray[np.int64] | None = field(default=None, compare=False)
    """For each index into `axes`, the last axis fastest: the position in the map, counted
    row by row; -1 for a value without a position, such as padding or a class token."""


@dataclass(frozen=True)
class Hints:
    """Facts on a tensor's layout that its shape does not show."""

    input_size: tuple[int, int] | None = None
    """Height and width in pixels of the image that the layers see: the size of the input,
    unless the model resizes it."""
    time_steps: int | None = None
    """How many time steps of a clip are left behind the first convolution."""
    patch_size: tuple[int, int] | None = None
    """Height and width in pixels of the patches that become tokens."""
    prefix_tokens: tuple[str, ...] = ()
    """The names of the tokens before those of the grid, such as a class token; a name for
    each token."""
    in_attention: bool = False
    """Whether the layer is an attention, or inside one."""
    features_last: bool = False
    """Whether the last axis of the output has features, as for a linear layer. Then it is
    not a matrix of attention, even if there are as many features as tokens."""
    token_count: int | None = None
    """The only possible number of tokens; 0 if there are no tokens, None if any number is
    possible."""
    channels: Literal["first", "last"] | None = None
    """Where the layer has its axis of channels; None if that is not certain."""
    trace: Trace | None = None
    """The trace of the tensor that these hints are for; None if the image was not followed
    to it."""
    arrangement: Any = None
    """The `layout.layouts.Arrangement` of this tensor; None until it is settled."""
    override: str | None = None
    """A value of `--tensor-layout` without selectors: `nhwc`, `tokens:14x20+1`."""
    border: int = 1
    """How many pixels at each edge of a map are affected by padding: half of the kernel's
    field, and at least one."""
    phase: bool = False
    """Whether the values are angles from −π to π, the phases of complex numbers."""


@dataclass(frozen=True)
class Raster:
    """An image as numbers, with any channels, or a volume: what Pillow's images cannot
    hold."""

    values: np.ndarray
    """float32 [C, H, W] or [C, D, H, W]. If a function of the user's prepares images, the
    numbers as the file has them, of any shape."""
    description: str
    """How the numbers of the file became these, for people: `uint16 / 65535`."""
    narrow_range: tuple[int, int] | None = None
    """For a file of 16 bits that uses less than a tenth of their range: its smallest and
    largest value."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels; a vector has the height 1."""
        height = self.values.shape[-2] if self.values.ndim > 1 else 1
        return self.values.shape[-1], height


@dataclass(frozen=True)
class Sample:
    """The input of one forward pass: an image, the frames of a clip, or several images."""

    name: str
    """The unique name: a relative path with forward slashes. The image's folder in the run
    directory has this name, made safe."""
    paths: tuple[Path | Url, ...]
    """The files; none for `--input`."""
    archive: str | None = None
    """The archive that holds the file, for `Shard`; None for a file outside of archives."""
    still: tuple[int, int] | None = None
    """For a single frame of a video: the number of the frame, and how many evenly spread
    frames are drawn."""

    @property
    def path(self) -> Path | Url:
        """The file, or the first of several."""
        return self.paths[0]

    @property
    def is_remote(self) -> bool:
        """Whether any of its files is in an object store."""
        return any(isinstance(path, Url) for path in self.paths)


@dataclass(frozen=True)
class Shard:
    """A part of the images of a run: every `count`-th image, beginning with the one at
    `index`. But if all images are in archives, and there are at least `count` archives,
    every `count`-th archive with all its images."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.count}"

    def of(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The samples of this part; each sample is in exactly one part."""
        return [samples[number] for number in self.numbers(samples)]

    def numbers(self, samples: Sequence[Sample]) -> Sequence[int]:
        """The indices of the samples of this part, in rising order.

        Args:
            samples: the samples of the whole run, in the same order for all shards. If
                there are fewer samples than shards, some shards are empty.
        """
        archives = list(dict.fromkeys(sample.archive for sample in samples))
        if None in archives or len(archives) < self.count:
            return range(self.index, len(samples), self.count)
        # An archive can only be read from beginning to end, so one shard reads all of it.
        of_shard = set(archives[self.index :: self.count])
        return [n for n, sample in enumerate(samples) if sample.archive in of_shard]


@dataclass(frozen=True)
class GridPlan:
    """The geometry of a picture, in pixels; tiles run row by row."""

    tile_count: int
    """How many tiles there are; the last row may have cells without a tile."""
    columns: int
    rows: int
    map_size: tuple[int, int]
    """Height and width of a map, before it is enlarged."""
    scale: tuple[int, int]
    """The whole factors by which maps are enlarged, down and across."""
    padding: int
    """The width of the gaps between tiles, and of the border around all of them."""

    # cached, since a report asks for these once for each of thousands of tiles
    @cached_property
    def tile(self) -> tuple[int, int]:
        """Height and width of a drawn tile, without padding."""
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
        """The number of pixels of the picture."""
        return self.height * self.width

    def box(self, number: int) -> tuple[int, int, int, int]:
        """Left, top, width and height of a tile in the picture, in pixels.

        Args:
            number: the number of the tile, from 0, row by row. It may be larger than
                `tile_count`.
        """
        row, column = divmod(number, self.columns)
        height, width = self.tile
        left = self.padding + column * (width + self.padding)
        return left, self.padding + row * (height + self.padding), width, height


@dataclass(frozen=True, slots=True)
class ClassScore:
    """A class with its score in the output of a classifier."""

    index: int
    name: str | None
    score: float
    probability: float

    @property
    def title(self) -> str:
        """The class for people: `tabby`, or `class 281`."""
        return self.name or f"class {self.index}"

    @property
    def text(self) -> str:
        """The class and its probability for people: `tabby 43.1 %`."""
        return f"{self.title} {percent(self.probability)}"


@dataclass(frozen=True)
class Detection:
    """A box of a detector."""

    box: tuple[float, float, float, float]
    """Left, top, right and bottom, in pixels of the model's input; in results and
    manifests, in pixels of the file's image."""
    index: int
    """The number of the class."""
    name: str | None
    """The name of the class, if it is known."""
    score: float
    """The confidence, 0..1."""

    @property
    def title(self) -> str:
        """The class for people: `dog`, or `class 16`."""
        return self.name or f"class {self.index}"

    @property
    def text(self) -> str:
        """The class and its score for people: `dog 87.0 %`."""
        return f"{self.title} {percent(self.score)}"


@dataclass(frozen=True)
class RegionMap:
    """The regions of a segmentation."""

    winners: Integers = field(repr=False, compare=False)
    """The class of each pixel, [h, w] in the size of the output; -1 for a pixel without a
    class."""
    names: tuple[str, ...]
    """The names of the classes, as far as they are known."""
    noun: str = "class"
    """What an index is called: `class`, or `channel` if the output may be a picture."""

    @property
    def largest(self) -> list[int]:
        """The classes that have pixels, the largest region first."""
        counts = Counter(self.winners[self.winners >= 0].tolist())
        return [index for index, _ in counts.most_common()]

    def title(self, index: int) -> str:
        """A class for people: `dog`, or `class 12`."""
        # a model may have more classes than there are names
        if index < len(self.names):
            return self.names[index]
        return f"{self.noun} {index}"

    def share(self, index: int) -> float:
        """The share of all pixels that have this class, 0..1."""
        return float((self.winners == index).mean())


def finite(value: float | None) -> float | None:
    """The value, or None for NaN, infinity and None: JSON has no NaN or infinity."""
    if value is None or not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True)
class Outcome:
    """The outcome of the passes of an input: what the output means, and the effect of
    interventions on it."""

    prediction: tuple[ClassScore, ...] = ()
    """The likeliest classes, the likeliest first; empty if the output is not a vector of
    scores."""
    before: tuple[ClassScore, ...] = ()
    """The prediction without the interventions; empty if there are none."""
    intervened: bool = False
    """Whether there are interventions."""
    largest_change: float | None = None
    """The largest change of a finite value of the output by interventions; None if the
    outputs are not compared (UNLIKE_OUTPUTS)."""
    nonfinite: int = 0
    """How many values of the output interventions changed from or to NaN or infinity."""
    target: float | None = None
    """The value that was differentiated; None without a backward pass."""
    target_title: str = ""
    """What this value is, for people."""
    focus: Detection | Integers | None = field(default=None, repr=False, compare=False)
    """The part of the image that the target is about: a box, or a mask [h, w]; None for
    the whole image."""
    detections: tuple[Detection, ...] = ()
    """The boxes of a detector, the most confident one first."""
    regions: RegionMap | None = None
    """The regions of a segmentation."""
    remark: str = ""
    """For a detector that found no box: what to say instead."""
    idle: tuple[str, ...] = ()
    """A warning for each intervention, or rule for ReLUs, that changed nothing."""

    @property
    def effect(self) -> dict[str, object]:
        """The effect of the interventions, for manifests and JSON lines."""
        before = [asdict(guess) for guess in self.before]
        change = finite(self.largest_change)
        return {"largest_change": change, "nonfinite": self.nonfinite, "before": before}


@dataclass(frozen=True)
class Verdict:
    """The result of a check: of a gate, of a baseline, or of whether two runs are equal."""

    gate: str
    """What was checked: the text of a gate, `baseline`, or a layer and its tensor."""
    held: bool
    """Whether the check passed."""
    message: str
    """The numbers that decided, for people."""


@dataclass(frozen=True)
class Skip:
    """A tensor of a selected layer that could not be drawn: a row of `skipped`."""

    layer: str
    type: str
    index: int
    kind: str
    call: int
    key: str
    reason: str
    """The reason, as the end of a sentence that begins with the layer's name: `is None`,
    `has no gradient`."""

    @property
    def label(self) -> str:
        """The layer's name; for the model itself, its class."""
        return self.layer or self.type

    @classmethod
    def of(cls, site: CaptureSite, reason: str) -> Skip:
        """Make the row of a capture that was not drawn."""
        layer, kind, call, key = site
        return cls(layer.name, layer.type, layer.index, kind, call, key, reason)
