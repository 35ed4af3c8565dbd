"""Passive data that stages hand to each other: layers and the tensors taken there,
hints on their layout, images, and what became of them."""

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
"""The tiles of a picture, uint8 [N, h, w] or [N, h, w, 3]: an array, or what has its
`shape` and `nbytes` and makes them as slices are asked for."""

STAT_COLUMNS = ("min", "max", "mean", "std", "zero_fraction", "nonfinite")
"""The columns of every array in `stats.npz`."""

UNLIKE_OUTPUTS = "its shape changed, or it is complex, sparse or nested"
"""Why the outputs of two passes are not compared, for people."""


@dataclass(frozen=True)
class Layer:
    """A module of the model, or a function that a module calls, as selectors see it."""

    index: int
    """Position in `model.named_modules()`, where a shared module counts in each place;
    0 is the model."""
    name: str
    """Qualified name, `layer1.0.conv1`; empty for the model itself."""
    type: str
    classes: tuple[str, ...] = ()
    """Names of the module's class and of its base classes, which selectors match."""
    aliases: tuple[str, ...] = ()
    """Further qualified names of a shared module in the same place."""

    @property
    def is_function(self) -> bool:
        """Whether it is a function called inside a module: `layer1.0/fn:add`."""
        return self.type.startswith("fn:")

    @property
    def owner(self) -> str:
        """Qualified name of the module, or of the module that calls the function."""
        if not self.is_function:
            return self.name
        # `layer1.0/fn:add`, and `fn:add` of the model itself
        return self.name.rpartition("fn:")[0].rstrip("/")

    @property
    def label(self) -> str:
        """The name for people: the class name for the model itself."""
        return self.name or self.type


class CaptureAddress(NamedTuple, Generic[_L]):
    """Which capture of an image: its file is `KIND[.callN][.KEY]` in the folder of its
    layer."""

    layer: _L
    kind: str
    """One of the capture kinds, `output`, `input`, `grad`, `grad-input`; or `kernel`.
    """
    call: int
    key: str
    """Path inside a tuple, list or dict (`0`, `boxes`, `0.feat`); empty for a plain
    tensor."""

    @property
    def stats_key(self) -> str:
        """Its key in stats.npz."""
        # a site has the layer, a key its name: both lead to the same array
        name = self.layer.name if isinstance(self.layer, Layer) else self.layer
        return f"{name}|{self.kind}|{self.call}|{self.key}"

    @property
    def deviations_key(self) -> str:
        """The key in stats.npz of the deviations without the border of padding."""
        return f"{self.stats_key}|inner_std"

    @property
    def stem(self) -> str:
        """`output`, `output.call1`, `output.call1.boxes`."""
        stem = self.kind
        if self.call:
            stem += f".call{self.call}"
        if self.key:
            stem += f".{self.key}"
        return stem

    @property
    def suffix(self) -> str:
        """What files, tables and pictures put behind a name: `.call1`, `.call1.boxes`;
        empty for the only tensor of the first call."""
        return self.stem.removeprefix(self.kind)

    def inside(self, key: str) -> Self:
        """A part of this tensor, by name; the tensor itself for an empty one."""
        if not key:
            return self
        # a plain tensor has an empty key, and no dot before the name
        return self._replace(key=f"{self.key}.{key}".lstrip("."))


CaptureKey: TypeAlias = CaptureAddress[str]
"""With the layer's qualified name: what manifests hold, and two runs are matched by."""
CaptureSite: TypeAlias = CaptureAddress[Layer]
"""With the layer itself: what a hook passes to its sink."""


@dataclass(frozen=True)
class Trace:
    """Where the values of one tensor lie in the image, followed through the model's
    functions."""

    is_weights: bool = False
    """Whether a softmax inside an attention made it."""
    grid: tuple[int, int, int] | None = None
    """Time steps, height and width of the map each of whose positions the tensor holds
    once."""
    axes: tuple[int, ...] = ()
    """The axes along which the position changes; along the others are channels."""
    positions: NDArray[np.int64] | None = field(default=None, compare=False)
    """For each index into `axes`, the last axis fastest, the position in the map,
    counted row by row; -1 for a value that belongs to none, such as padding or a class
    token."""


@dataclass(frozen=True)
class Hints:
    """Facts on a tensor's layout that its shape does not show."""

    input_size: tuple[int, int] | None = None
    """Height and width in pixels of what the layers see: of the input, unless the model
    resizes it."""
    time_steps: int | None = None
    """Time steps of a clip behind the first convolution."""
    patch_size: tuple[int, int] | None = None
    """Height and width in pixels of the patches that become tokens."""
    prefix_tokens: tuple[str, ...] = ()
    """Names of the model's own tokens in front of the grid, a name for each token."""
    in_attention: bool = False
    """Whether the layer is an attention, or inside one."""
    features_last: bool = False
    """Whether the layer makes the numbers along the last axis, as linear layers do: its
    output is not attention, even where there are as many numbers as tokens."""
    token_count: int | None = None
    """The only number of tokens that there can be; 0 where there are none."""
    channels: Literal["first", "last"] | None = None
    """Where a layer has its channels, if that is certain."""
    trace: Trace | None = None
    """Of the one tensor that these are the hints for, where the image was followed to
    it."""
    arrangement: Any = None
    """The `layout.layouts.Arrangement` of that tensor, once it is settled."""
    override: str | None = None
    """A value of `--tensor-layout` without selectors: `nhwc`, `tokens:14x20+1`."""
    border: int = 1
    """Pixels at each edge of a map on which padding acts: half of the kernel's field,
    and at least one."""
    phase: bool = False
    """Whether the numbers are angles from −π to π, the phases of complex numbers."""


@dataclass(frozen=True)
class Raster:
    """An image that is not a photograph, as numbers: any channels, or a volume."""

    values: np.ndarray
    """float32 [C, H, W] or [C, D, H, W]; for a function of the user's own as the file
    holds it."""
    description: str
    """How numbers of the file became these, for people: `uint16 / 65535`."""
    narrow_range: tuple[int, int] | None = None
    """The least and the largest value of a file of 16 bits that uses less than a tenth
    of them."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels; a vector has the height 1."""
        height = self.values.shape[-2] if self.values.ndim > 1 else 1
        return self.values.shape[-1], height


@dataclass(frozen=True)
class Sample:
    """The input of one forward pass: an image, the frames of a clip, or several images."""

    name: str
    """Unique, relative, with forward slashes: the image's folder in the run directory.
    """
    paths: tuple[Path | Url, ...]
    archive: str | None = None
    """The archive that holds the file, by which `Shard` divides."""
    still: tuple[int, int] | None = None
    """For a frame of a video: its number, and how many evenly spread ones there are."""

    @property
    def path(self) -> Path | Url:
        """The file, or the first of several."""
        return self.paths[0]

    @property
    def is_remote(self) -> bool:
        """Whether a file of it is in an object store."""
        return any(isinstance(path, Url) for path in self.paths)


@dataclass(frozen=True)
class Shard:
    """A part of the images: every `count`-th, from the one at `index` on; or whole
    archives, where all images lie in archives and there are enough of them."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.count}"

    def of(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The samples that are in this part; each sample is in exactly one part."""
        return [samples[number] for number in self.numbers(samples)]

    def numbers(self, samples: Sequence[Sample]) -> Sequence[int]:
        """The indices of the samples that are in this part, in their order.

        Args:
            samples: of the whole run, in the same order for all shards. Where there are
                fewer samples than shards, some shards are empty.
        """
        archives = list(dict.fromkeys(sample.archive for sample in samples))
        if None in archives or len(archives) < self.count:
            return range(self.index, len(samples), self.count)
        # An archive is read from its begin to its end, and often from afar: one shard
        # reads it
        of_shard = set(archives[self.index :: self.count])
        return [n for n, sample in enumerate(samples) if sample.archive in of_shard]


@dataclass(frozen=True)
class GridPlan:
    """The geometry of a picture, in pixels; tiles run row by row."""

    tile_count: int
    """The last row may have cells without a tile."""
    columns: int
    rows: int
    map_size: tuple[int, int]
    """Height and width of a map, before it is enlarged."""
    scale: tuple[int, int]
    """Whole factors, down and across."""
    padding: int
    """Between tiles, and around all of them."""

    # cached: a report needs them for each of many thousand tiles
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
        """Left, top, width and height of a tile in the picture, in pixels.

        Args:
            number: of the tile, from 0, row by row; it is not compared with `tile_count`.
        """
        row, column = divmod(number, self.columns)
        height, width = self.tile
        left = self.padding + column * (width + self.padding)
        return left, self.padding + row * (height + self.padding), width, height


@dataclass(frozen=True, slots=True)
class ClassScore:
    """One of the classes that a model thinks most likely."""

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
        """For people: `tabby 43.1 %`."""
        return f"{self.title} {percent(self.probability)}"


@dataclass(frozen=True)
class Detection:
    """A box of a detector."""

    box: tuple[float, float, float, float]
    """Left, top, right and bottom in pixels of the model's input; in results and
    manifests, of the file's image."""
    index: int
    """The number of the class."""
    name: str | None
    score: float
    """0..1."""

    @property
    def title(self) -> str:
        """The class for people: `dog`, or `class 16`."""
        return self.name or f"class {self.index}"

    @property
    def text(self) -> str:
        """For people: `dog 87 %`."""
        return f"{self.title} {percent(self.score)}"


@dataclass(frozen=True)
class RegionMap:
    """The regions of a segmentation."""

    winners: Integers = field(repr=False, compare=False)
    """The class of each pixel, [h, w] in the output's own size; -1 for none."""
    names: tuple[str, ...]
    noun: str = "class"
    """What an index counts: `channel` where the output may be a picture."""

    @property
    def largest(self) -> list[int]:
        """The classes that win pixels, the largest region first."""
        # -1 stands for pixels that no class wins
        counts = Counter(self.winners[self.winners >= 0].tolist())
        return [index for index, _ in counts.most_common()]

    def title(self, index: int) -> str:
        """A class for people: `dog`, or `class 12`."""
        # a model may have more classes than the list of names that came with it
        if index < len(self.names):
            return self.names[index]
        return f"{self.noun} {index}"

    def share(self, index: int) -> float:
        """The share of the pixels that a class wins, 0..1; 0 for one that wins none."""
        # of all pixels, those that no class wins among them
        return float((self.winners == index).mean())


def finite(value: float | None) -> float | None:
    """The value for JSON, which has neither NaN nor infinity: None for these, and for
    None."""
    if value is None or not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True)
class Outcome:
    """What the model said of an input."""

    prediction: tuple[ClassScore, ...] = ()
    """The likeliest class first; none where the output is not a vector of scores."""
    before: tuple[ClassScore, ...] = ()
    """The same without the interventions; none where there are none."""
    intervened: bool = False
    largest_change: float | None = None
    """Of any finite value of the output, by interventions; None for UNLIKE_OUTPUTS."""
    nonfinite: int = 0
    """Values of the output that are not finite with the interventions or without, but
    not alike."""
    target: float | None = None
    """The value that was differentiated; None where there was no backward pass."""
    target_title: str = ""
    """What was differentiated, for people."""
    focus: Detection | Integers | None = field(default=None, repr=False, compare=False)
    """The part of the image that the target is of: a box, or a mask [h, w]; None for
    all of it."""
    detections: tuple[Detection, ...] = ()
    """The boxes of a detector, the most confident one first."""
    regions: RegionMap | None = None
    remark: str = ""
    """What a detector without a box has in its place."""
    idle: tuple[str, ...] = ()
    """Which interventions, or rule for ReLUs, changed nothing: a warning for each."""

    @property
    def effect(self) -> dict[str, object]:
        """What the interventions did, for manifests and JSON lines."""
        before = [asdict(guess) for guess in self.before]
        change = finite(self.largest_change)
        return {"largest_change": change, "nonfinite": self.nonfinite, "before": before}


@dataclass(frozen=True)
class Verdict:
    """Whether a check held that was asked for: a gate, a baseline, or two runs being
    equal."""

    gate: str
    """What was checked: the text of a gate, `baseline`, or a layer and its tensor."""
    held: bool
    message: str
    """The figures on which it rests, for people."""


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
    """Goes on from the layer's name: `is None`, `has no gradient`."""

    @property
    def label(self) -> str:
        """The layer's name; its class for the model itself."""
        return self.layer or self.type

    @classmethod
    def of(cls, site: CaptureSite, reason: str) -> Skip:
        """The row of a capture that was not drawn."""
        layer, kind, call, key = site
        return cls(layer.name, layer.type, layer.index, kind, call, key, reason)
