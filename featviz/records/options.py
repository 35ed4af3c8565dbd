"""Options that several wings share: drawing, passes, shares and limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from featviz.records.formats import FORMATS
from featviz.records.kinds import is_gradient
from featviz.records.reductions import REDUCTIONS

T = TypeVar("T")


@dataclass(frozen=True)
class Within:
    """The range of a number, as an annotation of a field."""

    least: float = 0
    most: float | None = None
    hint: str = "give a whole number"
    """The remedy that an error names."""


@dataclass(frozen=True)
class OneOf:
    """Which words a field takes, as an annotation: the names of a table."""

    names: tuple[str, ...]


AUTO = "auto"
"""An annotation of a field whose None is called `auto`."""

INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "lanczos")
"""How pixels are computed when an image is resized: values of torchvision's InterpolationMode that
both pictures of Pillow and tensors take."""

Count = Annotated[int, Within(1)]
Seed = Annotated[int, Within(-(2**63), 2**64 - 1, "give a number that torch.manual_seed takes")]


PAD_GREY = 0.4
"""Between tiles unless the user says otherwise: neither the black in which maps begin, nor the grey
(0.5) of a constant map."""


@dataclass(frozen=True)
class DrawOptions:
    """How maps become a picture; names and meanings are torchvision's where it has the option."""

    normalize: str = "auto"
    """A mode of `drawing.normalize.MODES` as it is spelt there (`range:0,6`), or `auto`: map, for
    gradients symmetric-percentile:99."""
    cmap: str = "auto"
    """`auto` (grey; for gradients coolwarm), `grey`, or the name of a matplotlib colormap."""
    nrow: Annotated[Count | None, AUTO] = None
    """Maps in a row (as in make_grid); None makes the picture about square."""
    padding: Annotated[int, Within(0, hint="give pixels")] | None = None
    """Pixels between tiles and around them; None is make_grid's 2."""
    pad_value: Annotated[float, Within(0, 1, "0 is black, 1 white")] | None = None
    """Grey level of the padding, 0 (black) to 1 (white); None is make_grid's 0 where `padding` is
    given, else PAD_GREY."""
    scale: Annotated[Count | None, AUTO] = None
    """Whole factor by which maps are enlarged; None enlarges small maps to `min_tile`."""
    min_tile: Count = 32
    """Pixels that the longer side of a tile should have, for `scale=None`."""
    max_maps: Count | None = None
    """At most so many maps are drawn; None draws all."""
    max_slices: Count = 16
    """At most so many slices of a clip or volume, evenly spread, or of a batch, the first, are
    drawn of each channel."""
    pick: Literal["first", "top", "spread"] = "first"
    """The maps that `max_maps` keeps: the first, the strongest (by mean), or evenly spread ones."""
    order: Literal["index", "mean", "similarity"] = "index"
    """Order of the tiles: by channel, by mean (largest first), or similar maps side by side."""
    collapse: float | None = None
    """Correlation, 0..1, from which on maps count as alike and share one tile."""
    labels: bool = False
    """Write the channel on each tile."""
    titles: bool = False
    """Write image, layer, shape and scale above each grid."""
    marks: bool = True
    """Mark constant maps, and draw maps that are all constant as one strip of their values."""
    overlay: Annotated[float, Within(0, 1, "0 is the input alone, 1 the map")] | None = None
    """Lay each map over the input: 0 shows the input alone, 1 the map alone."""
    reduce: Annotated[str, OneOf(tuple(REDUCTIONS))] | None = None
    """Make one tile of all channels."""
    shared_basis: bool = False
    """One PCA basis for each layer for all images of a run."""
    figure: bool = False
    """Draw a titled figure with the input and a colour bar beside each picture."""
    first: Count | None = None
    """Maps in a figure; None takes 16."""
    format: Annotated[str, OneOf(tuple(FORMATS))] = "png"
    flat: bool = False
    """Put all files of an image into its folder, each with image and layer in its name."""
    tensors: Literal["npy"] | None = None
    """Keep the raw tensor beside the picture."""
    tensor_layout: tuple[str, ...] = ()
    """Layouts that take the place of the guess: `LAYOUT` or `SELECTORS=LAYOUT`."""

    @property
    def gap(self) -> int:
        """Pixels between tiles and around them."""
        return 2 if self.padding is None else self.padding

    @property
    def gap_grey(self) -> float:
        """Grey level of the gaps, and of cells that no map is for, 0..1."""
        if self.pad_value is not None:
            return self.pad_value
        return PAD_GREY if self.padding is None else 0.0

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Options that cannot be met, or that would do nothing beside the others: each as the
        message and the hint of an error."""
        if self.collapse is not None and not 0 < self.collapse <= 1:
            yield (
                f"--collapse {self.collapse:g} is no correlation above 0",
                "0.98, or 1 for equal maps",
            )
        maps = {
            "--order": self.order != "index",
            "--collapse": self.collapse is not None,
            "--labels": self.labels,
            "--max-maps": self.max_maps is not None,
        }
        for name, given in maps.items():
            if given and self.reduce is not None:
                yield (
                    f"{name} and --reduce exclude each other",
                    "--reduce leaves one tile of all channels",
                )
        colours = {"--normalize": self.normalize != "auto", "--cmap": self.cmap != "auto"}
        for name, given in colours.items():
            if given and self.reduce == "pca":
                yield (
                    f"{name} and --reduce pca exclude each other",
                    "three components are three colours",
                )
        if self.shared_basis and self.reduce != "pca":
            yield "--shared-basis is for --reduce pca", "add it, or leave this out"
        if self.first is not None and not self.figure:
            yield "--first is for --figure", "--max-maps limits the maps of the grids"


@dataclass(frozen=True)
class PageOptions:
    """Which maps the page of `look` shows, and how."""

    maps: Count = 8
    """Maps of each layer."""
    by: Literal["deviation", "value"] = "deviation"
    """The maps that are shown: those whose values differ most from place to place (by their
    standard deviation), or those of the highest mean."""
    cmap: str = "viridis"
    """`grey`, or the name of a matplotlib colormap."""


INTERVENTIONS = ("ablate", "scale-channel", "clamp", "noise", "grad-scale")
"""Kinds of changes to the outputs of layers, in the order in which they are made at one layer."""


@dataclass(frozen=True)
class PassOptions:
    """What happens while an image goes through the model, and back."""

    capture: tuple[str, ...] = ("output",)
    """Tensors of each layer to draw: names of `KINDS`."""
    target: str | None = None
    """The scalar that is differentiated: top1, class:N, sum, mean, norm, output[KEY]:...,
    layer:NAME[:C]."""
    grad_rule: Literal["plain", "guided", "deconv"] = "plain"
    """The rule by which gradients pass a ReLU."""
    interventions: tuple[tuple[str, str], ...] = ()
    """Changes to the outputs of layers, in order: (one of INTERVENTIONS, `SELECTORS:numbers`)."""
    seed: Seed = 0
    """Seed of the noise that `interventions` add."""

    @property
    def gradients(self) -> bool:
        """Whether a backward pass is wanted."""
        return any(is_gradient(kind) for kind in self.capture)


@dataclass(frozen=True)
class Shard:
    """A part of the images: every `count`-th, from the one at `index` on."""

    index: int = 0
    count: int = 1

    def of(self, samples: Sequence[T]) -> Sequence[T]:
        """Those samples, or names of samples, that are in this part: each is in exactly one."""
        return samples[self.index :: self.count]


@dataclass(frozen=True)
class Written:
    """The size of a run directory, written or planned."""

    files: int = 0
    bytes: int = 0

    def __add__(self, other: Written) -> Written:
        return Written(self.files + other.files, self.bytes + other.bytes)


@dataclass(frozen=True)
class Limits:
    """The largest run directory that may be written; None is no limit."""

    bytes: Annotated[int, Within(0)] | None = None
    files: Annotated[int, Within(0)] | None = None
