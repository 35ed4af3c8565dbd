"""The passive data that stages hand to each other: frozen, with shapes and units on the fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:  # completion of a shell imports this, and has no time for numpy
    import numpy as np
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"
Floats: TypeAlias = "NDArray[np.float32]"

STAT_COLUMNS = ("min", "max", "mean", "std", "zero_fraction", "nonfinite")
"""The columns of every array in `stats.npz`."""


class Tiles(Protocol):
    """The tiles of a picture, uint8 [N, h, w] or [N, h, w, 3]: an array, or what makes them as they
    are asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        ...

    @property
    def nbytes(self) -> int:
        """What is held in memory."""
        ...

    def __getitem__(self, part: slice, /) -> Bytes:
        """Some of the tiles."""
        ...


@dataclass(frozen=True)
class Layer:
    """A module of the model, or a function that a module calls, as selectors see it."""

    index: int
    """Position in `model.named_modules()`, of a function that of its module; 0 is the model."""
    name: str
    """Qualified name, `layer1.0.conv1`; empty for the model itself."""
    type: str
    """Class name, `Conv2d`."""
    classes: tuple[str, ...] = ()
    """Class names along the MRO, most derived first, without `object`."""
    aliases: tuple[str, ...] = ()
    """Further qualified names of the same (shared) module; of a function, those of its module."""

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


@dataclass(frozen=True)
class Site:
    """Where a tensor was met: the file `KIND[.callN][.KEY]` of a layer."""

    layer: Layer
    kind: str
    """What of the layer it is: `output`."""
    call: int
    """0 for the first call of the module with this image."""
    key: str
    """Path inside a tuple, list or dict (`0`, `boxes`, `0.feat`); empty for a plain tensor."""

    @property
    def stem(self) -> str:
        """File name without extension: `output`, `output.call1`, `output.call1.boxes`."""
        call = f".call{self.call}" if self.call else ""
        return f"{self.kind}{call}" + (f".{self.key}" if self.key else "")

    def inside(self, key: str) -> Site:
        """A part of this tensor, by name; the tensor itself for an empty one."""
        return replace(self, key=f"{self.key}.{key}".lstrip(".")) if key else self

    @property
    def stats_key(self) -> str:
        """Key of this tensor's statistics in `stats.npz`."""
        return f"{self.layer.name}|{self.kind}|{self.call}|{self.key}"


@dataclass(frozen=True)
class Windows:
    """How a block cuts a map into windows before attention."""

    size: tuple[int, int]
    """Height and width of a window, in tokens."""
    strided: bool = False
    """A window takes every n-th token of the map (MaxViT's grid attention), not neighbours."""
    axes: str = ""
    """How a tensor of windows stands, where not in one of the usual ways: a letter for each axis, n
    the windows, s the places in a window, c the channels, 1 the image."""
    shift: tuple[int, int] = (0, 0)
    """Tokens by which the map was rolled up and to the left before it was cut (Swin)."""


@dataclass(frozen=True)
class Hints:
    """What a tensor's shape does not say of its layout."""

    input_size: tuple[int, int] | None = None
    """Height and width of what the layers see: of the input, unless the model resizes it."""
    time: int | None = None
    """Time steps of a clip behind the first convolution."""
    patch: tuple[int, int] | None = None
    """Height and width in pixels of the patches that become tokens, where the model cuts such."""
    prefix: tuple[str, ...] = ()
    """Names of the tokens in front of the grid, in their order: `class_token`, ..."""
    windows: Windows | None = None
    """Set inside a block that cuts windows."""
    attention: bool = False
    """Whether the layer is an attention, or inside one."""
    tokens: int | None = None
    """The only number of tokens that there can be; 0 where there are none."""
    unrolled: tuple[int, int] | None = None
    """Height and width of the grid that is left when tokens that stand in the order of their
    pooling have all been pooled (Hiera)."""
    channels: Literal["first", "last"] | None = None
    """Where a layer has its channels, if that is certain: behind the batch in torch's own
    convolutions, normalisations and poolings."""
    layout: str | None = None
    """What the user said it is: a name of `layout.LAYOUTS`, `tokens:14x20+1`."""


@dataclass(frozen=True)
class Sample:
    """What the model is shown at once: an image, the frames of a clip, or several images."""

    name: str
    """Unique, relative, with forward slashes: the image's folder in the run directory."""
    paths: tuple[Path, ...]

    @property
    def path(self) -> Path:
        """The file, or the first of several."""
        return self.paths[0]


@dataclass(frozen=True)
class DrawOptions:
    """How maps become a picture; names and meanings are torchvision's where it has the option."""

    normalize: str = "auto"
    """auto (map; for gradients symmetric), map, layer, none, range:LO,HI, symmetric or
    percentile:LO,HI."""
    cmap: str = "auto"
    """`auto` (grey; for gradients coolwarm), `grey`, or the name of a matplotlib colormap."""
    nrow: int | None = None
    """Maps in a row (as in make_grid); None makes the picture about square."""
    padding: int = 2
    """Pixels between tiles and around them."""
    pad_value: float = 0.0
    """Grey of the padding, 0..1."""
    scale: int | None = None
    """Whole factor by which maps are enlarged; None enlarges small maps to `min_tile`."""
    min_tile: int = 32
    """Pixels that the longer side of a tile should have, for `scale=None`."""
    max_maps: int | None = None
    """At most so many maps are drawn; None draws all."""
    max_slices: int = 16
    """At most so many time steps of a clip, or regions of a batch, are drawn of each channel."""
    pick: Literal["first", "top", "spread"] = "first"
    """Which maps `max_maps` keeps: the first, the strongest (by mean), or evenly spread ones."""
    order: Literal["index", "mean", "similarity"] = "index"
    """Of the tiles: by channel, by mean (largest first), or like beside like."""
    collapse: float | None = None
    """Correlation, 0..1, from which on maps count as alike and share one tile."""
    labels: bool = False
    """Write the channel on each tile."""
    overlay: float | None = None
    """Lay each map over the input: 0 shows the input alone, 1 the map alone."""
    reduce: Literal["mean", "max", "l2", "pca"] | None = None
    """Make one tile of all channels."""
    shared_basis: bool = False
    """One PCA basis for each layer for all images of a run."""
    figure: bool = False
    """Draw a titled figure with the input and a colour bar beside each picture."""
    first: int | None = None
    """Maps in a figure; None takes 16."""
    format: Literal["png", "webp", "jpg"] = "png"
    tensors: Literal["npy"] | None = None
    """Keep the raw tensor beside the picture."""
    tensor_layout: tuple[str, ...] = ()
    """What the guess of the layout should be instead: `LAYOUT` or `SELECTORS=LAYOUT`."""


INTERVENTIONS = ("ablate", "scale-channel", "clamp", "noise", "grad-scale")
"""Changes of what layers give, in the order in which they are made at one layer."""


@dataclass(frozen=True)
class Shard:
    """A part of the images: every `count`-th, from the one at `index` on."""

    index: int = 0
    count: int = 1

    def of(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The samples of this part: none are in two parts, and all parts together are all."""
        return samples[self.index :: self.count]


@dataclass(frozen=True)
class Written:
    """What a run has put into its folder, or would put there."""

    files: int = 0
    bytes: int = 0

    def __add__(self, other: Written) -> Written:
        return Written(self.files + other.files, self.bytes + other.bytes)


@dataclass(frozen=True)
class Limits:
    """What a run may put into its folder; None is no limit."""

    bytes: int | None = None
    files: int | None = None


@dataclass(frozen=True)
class PassOptions:
    """What happens while an image goes through the model, and back."""

    capture: tuple[str, ...] = ("output",)
    """Of each layer: output, input, grad (at its output), grad-input."""
    target: str | None = None
    """What is differentiated: top1, class:N, sum, mean, norm, output[KEY]:..., layer:NAME[:C]."""
    grad_rule: Literal["plain", "guided", "deconv"] = "plain"
    """How gradients pass a ReLU."""
    interventions: tuple[tuple[str, str], ...] = ()
    """Changes of what layers give, in order: (one of INTERVENTIONS, `SELECTORS:numbers`)."""
    seed: int = 0
    """Of the noise."""

    @property
    def gradients(self) -> bool:
        """Whether a backward pass is wanted."""
        return any(kind.startswith("grad") for kind in self.capture)


@dataclass(frozen=True)
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
    def words(self) -> str:
        """For people: `tabby 43.1 %`."""
        return f"{self.name or f'class {self.index}'} {100 * self.probability:.1f} %"


def finite(value: float | None) -> float | None:
    """The value for JSON, which has neither NaN nor infinity."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Outcome:
    """What the model said of an input."""

    prediction: tuple[Guess, ...] = ()
    before: tuple[Guess, ...] = ()
    """The prediction without the interventions."""
    intervened: bool = False
    """Whether interventions changed what layers give."""
    largest_change: float | None = None
    """Of the model's output, by the interventions; None where they changed its shape."""
    target: float | None = None
    """What was differentiated."""
    idle: tuple[str, ...] = ()
    """What was asked for and changed nothing, in words."""

    @property
    def effect(self) -> dict[str, object]:
        """What the interventions did, for manifests and JSON lines."""
        before = [asdict(guess) for guess in self.before]
        return {"largest_change": finite(self.largest_change), "before": before}


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

    @property
    def tile(self) -> tuple[int, int]:
        """Height and width of one drawn tile without its padding."""
        return self.map_size[0] * self.scale[0], self.map_size[1] * self.scale[1]

    @property
    def height(self) -> int:
        """Height of the picture."""
        return self.rows * (self.tile[0] + self.padding) + self.padding

    @property
    def width(self) -> int:
        """Width of the picture."""
        return self.columns * (self.tile[1] + self.padding) + self.padding

    @property
    def pixels(self) -> int:
        """Pixels of the picture."""
        return self.height * self.width


@dataclass(frozen=True)
class Capture:
    """One drawn tensor: a row of `captures` in a manifest (the design names the fields)."""

    layer: str
    type: str
    index: int
    kind: str
    call: int
    key: str
    shape: list[int]
    """Of the tensor as the layer gave it."""
    layout: str
    maps: int
    """Maps that the tensor holds; `channels` lists those that were drawn, where not all were."""
    file: str
    """Relative to the image's folder."""
    grid: dict[str, object]
    """nrow, padding, tile [height, width] and scale, in pixels."""
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
    tensor: str | None = None
    """File of the raw tensor, relative to the image's folder."""
    collapsed: dict[str, list[int]] | None = None
    """Of each tile that stands for several channels, by its own: all of them."""
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

    out: Path
    images: tuple[ImageResult, ...] = field(default=())
    missing: tuple[str, ...] = ()
    """Images that were not reached: the run was stopped."""
    interrupted: bool = False
    """By SIGINT or SIGTERM."""
    pictures: int = 0
    """Of all images together."""

    @property
    def failures(self) -> tuple[ImageResult, ...]:
        """The images that failed."""
        return tuple(image for image in self.images if image.error is not None)

    @property
    def exit_code(self) -> int:
        """0 all complete, 3 some failed, 1 all failed or stopped at one, 130 interrupted."""
        if self.interrupted:
            return 130
        if not self.failures:
            return 0
        return 3 if len(self.failures) < len(self.images) and not self.missing else 1


@dataclass(frozen=True)
class Call:
    """One call of a module or a function in a forward pass."""

    name: str
    """`layer1.0.relu` for a module, `layer1.0/fn:relu` for a function that layer1.0 calls."""
    type: str
    """Class name, or `fn:relu`."""
    index: int = 0
    """0 for the first call with this name in a forward pass."""

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
    """Values at which it saturates."""
    margin: float = 0.0
    """A value this near to a bound, or beyond it, is at it."""


Role = Literal["maker", "activation", "channelwise", "mixing", "other"]
"""maker: a convolution or linear module. channelwise: output channel i depends on input channel i
alone. mixing: channel i stays channel i, but the others have a say (GroupNorm)."""


@dataclass(frozen=True)
class Part:
    """What a module or function is to the channels that pass through it."""

    role: Role
    axis: int | None = None
    """Where the channels are in its output; None where its input decides."""
    activation: Activation | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether a gate held, with its figure in words."""

    gate: str
    """As it was written: `dead>5%`."""
    held: bool
    words: str
