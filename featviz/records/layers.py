"""Layers, the places where their tensors are captured, and hints on the layout of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from featviz.files.urls import Remote

if TYPE_CHECKING:  # completion of a shell imports this, and has no time for numpy
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Layer:
    """A module of the model, or a function that a module calls, as selectors see it."""

    index: int
    """Position in `model.named_modules()`, where a shared module counts in each place from which it
    is called; of a function that of its module; 0 is the model."""
    name: str
    """Qualified name, `layer1.0.conv1`; empty for the model itself."""
    type: str
    """Class name, `Conv2d`."""
    classes: tuple[str, ...] = ()
    """Class names along the MRO, most derived first, without `object`."""
    aliases: tuple[str, ...] = ()
    """Further qualified names of a shared module in the same place; of a function, those of its
    module."""

    @property
    def is_function(self) -> bool:
        """Whether it is a function called inside a module: `layer1.0/fn:add`, of type `fn:add`."""
        return self.type.startswith("fn:")

    @property
    def owner(self) -> str:
        """Qualified name of the module; of a function, of the module that calls it."""
        return self.name.rpartition("fn:")[0].rstrip("/") if self.is_function else self.name

    @property
    def label(self) -> str:
        """The name for people: the model itself has no qualified name, so its class stands in."""
        return self.name or self.type


class Place(NamedTuple):
    """Where in a run's image a tensor was met, by name: what two runs are matched by."""

    layer: str
    """Qualified name; empty for the model itself."""
    kind: str
    call: int
    key: str

    @property
    def stats_key(self) -> str:
        """Its key in stats.npz."""
        return "|".join(map(str, self))

    @property
    def stem(self) -> str:
        """`output`, `output.call1`, `output.call1.boxes`."""
        call = f".call{self.call}" if self.call else ""
        return f"{self.kind}{call}" + (f".{self.key}" if self.key else "")


@dataclass(frozen=True)
class Site:
    """The place of a captured tensor: the file `KIND[.callN][.KEY]` of a layer."""

    layer: Layer
    kind: str
    """One of the capture kinds: `output`, `input`, `grad`, `grad-input`; or `kernel`."""
    call: int
    """0 for the first call of the module with this image."""
    key: str
    """Path inside a tuple, list or dict (`0`, `boxes`, `0.feat`); empty for a plain tensor."""

    @property
    def place(self) -> Place:
        """The same by name."""
        return Place(self.layer.name, self.kind, self.call, self.key)

    @property
    def stem(self) -> str:
        """File name without extension: `output`, `output.call1`, `output.call1.boxes`."""
        return self.place.stem

    def inside(self, key: str) -> Site:
        """A part of this tensor, by name; the tensor itself for an empty one."""
        return replace(self, key=f"{self.key}.{key}".lstrip(".")) if key else self

    @property
    def stats_key(self) -> str:
        """Key of this tensor's statistics in `stats.npz`."""
        return self.place.stats_key


@dataclass(frozen=True)
class Origin:
    """What one tensor is made of, followed through the model's functions from the image on."""

    weights: bool = False
    """Whether a softmax inside an attention made it."""
    grid: tuple[int, int, int] | None = None
    """Time steps, height and width of the map each of whose places the tensor holds once; None
    where it is no such tensor."""
    axes: tuple[int, ...] = ()
    """The axes along which the places change; along the others are channels."""
    places: NDArray[np.int64] | None = field(default=None, compare=False)
    """For each index into `axes`, the last one fastest, the place in the map, row by row; -1
    for a value beside the map."""


@dataclass(frozen=True)
class Hints:
    """Facts on a tensor's layout that its shape does not show."""

    input_size: tuple[int, int] | None = None
    """Height and width of what the layers see: of the input, unless the model resizes it."""
    time: int | None = None
    """Time steps of a clip behind the first convolution."""
    patch: tuple[int, int] | None = None
    """Height and width in pixels of the patches that become tokens, where the model cuts such."""
    prefix: tuple[str, ...] = ()
    """Names of the tokens in front of the grid, in their order: `class_token`, ..."""
    attention: bool = False
    """Whether the layer is an attention, or inside one."""
    features_last: bool = False
    """Whether the layer makes or scales the numbers along the last axis, as linear layers do: what
    it gives is no attention, even where there are as many numbers as tokens."""
    tokens: int | None = None
    """The only number of tokens that there can be; 0 where there are none."""
    channels: Literal["first", "last"] | None = None
    """Where a layer has its channels, if that is certain: behind the batch in torch's own
    convolutions, normalisations and poolings."""
    origin: Origin | None = None
    """What the tensor is made of, where that has been followed; None before a forward pass."""
    form: Any = None
    """The `layout.layouts.Form` of the one tensor that these are the hints for, once found."""
    layout: str | None = None
    """The user's choice of the layout: a name of `layouts.LAYOUTS`, or `tokens:14x20+1`."""


@dataclass(frozen=True)
class Raster:
    """An image that is no photograph, as numbers: any channels, or a volume."""

    values: np.ndarray
    """float32 [C, H, W], or [C, D, H, W] for a volume of D slices; for a function of the user's
    own the array as the file holds it, of any shape and type."""
    words: str
    """What the numbers are, for the manifest: `uint16 / 65535`."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.values.shape[-1], self.values.shape[-2]


@dataclass(frozen=True)
class Sample:
    """The input of one forward pass: an image, the frames of a clip, or several images."""

    name: str
    """Unique, relative, with forward slashes: the image's folder in the run directory."""
    paths: tuple[Path | Remote, ...]
    archive: str | None = None
    """The archive that holds the file, by which `Shard` divides; None for files of their own."""

    @property
    def path(self) -> Path | Remote:
        """The file, or the first of several."""
        return self.paths[0]


@dataclass(frozen=True)
class Shard:
    """A part of the images: every `count`-th, from the one at `index` on; or whole archives, where
    all images lie in archives and there are enough of them, so that each is read by one process."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.count}"

    def of(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Those samples that are in this part: each is in exactly one."""
        return [samples[number] for number in self.numbers(samples)]

    def numbers(self, samples: Sequence[Sample]) -> Sequence[int]:
        """The places of those samples in the whole, in their order."""
        archives = list(dict.fromkeys(sample.archive for sample in samples))
        if None in archives or len(archives) < self.count:
            return range(self.index, len(samples), self.count)
        mine = set(archives[self.index :: self.count])
        return [number for number, sample in enumerate(samples) if sample.archive in mine]
