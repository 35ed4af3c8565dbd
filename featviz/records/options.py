"""What can be asked for: drawing, passes, shares and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from featviz.records.kinds import is_gradient
from featviz.records.layers import Sample


@dataclass(frozen=True)
class Within:
    """What a number may be, as an annotation of a field."""

    least: float = 0
    most: float | None = None
    hint: str = "give a whole number"
    """What to give instead."""
    among: tuple[int, ...] = ()
    """The only values, if there are such."""


AUTO = "auto"
"""An annotation of a field whose None is called `auto`."""

Count = Annotated[int, Within(1)]
Seed = Annotated[int, Within(-(2**63), 2**64 - 1, "give a number that torch.manual_seed takes")]


@dataclass(frozen=True)
class DrawOptions:
    """How maps become a picture; names and meanings are torchvision's where it has the option."""

    normalize: str = "auto"
    """auto (map; for gradients symmetric), map, layer, none, range:LO,HI, symmetric or
    percentile:LO,HI."""
    cmap: str = "auto"
    """`auto` (grey; for gradients coolwarm), `grey`, or the name of a matplotlib colormap."""
    nrow: Annotated[Count | None, AUTO] = None
    """Maps in a row (as in make_grid); None makes the picture about square."""
    padding: Annotated[int, Within(0, hint="give pixels")] = 2
    """Pixels between tiles and around them."""
    pad_value: Annotated[float, Within(0, 1, "0 is black, 1 white")] = 0.0
    """Grey of the padding, 0..1."""
    scale: Annotated[Count | None, AUTO] = None
    """Whole factor by which maps are enlarged; None enlarges small maps to `min_tile`."""
    min_tile: Count = 32
    """Pixels that the longer side of a tile should have, for `scale=None`."""
    max_maps: Count | None = None
    """At most so many maps are drawn; None draws all."""
    max_slices: Count = 16
    """At most so many time steps of a clip, or regions of a batch, are drawn of each channel."""
    pick: Literal["first", "top", "spread"] = "first"
    """Which maps `max_maps` keeps: the first, the strongest (by mean), or evenly spread ones."""
    order: Literal["index", "mean", "similarity"] = "index"
    """Of the tiles: by channel, by mean (largest first), or like beside like."""
    collapse: float | None = None
    """Correlation, 0..1, from which on maps count as alike and share one tile."""
    labels: bool = False
    """Write the channel on each tile."""
    overlay: Annotated[float, Within(0, 1, "0 is the input alone, 1 the map")] | None = None
    """Lay each map over the input: 0 shows the input alone, 1 the map alone."""
    reduce: Literal["mean", "max", "l2", "pca"] | None = None
    """Make one tile of all channels."""
    shared_basis: bool = False
    """One PCA basis for each layer for all images of a run."""
    figure: bool = False
    """Draw a titled figure with the input and a colour bar beside each picture."""
    first: Count | None = None
    """Maps in a figure; None takes 16."""
    format: Literal["png", "webp", "jpg"] = "png"
    tensors: Literal["npy"] | None = None
    """Keep the raw tensor beside the picture."""
    tensor_layout: tuple[str, ...] = ()
    """What the guess of the layout should be instead: `LAYOUT` or `SELECTORS=LAYOUT`."""


INTERVENTIONS = ("ablate", "scale-channel", "clamp", "noise", "grad-scale")
"""Changes of what layers give, in the order in which they are made at one layer."""


@dataclass(frozen=True)
class PassOptions:
    """What happens while an image goes through the model, and back."""

    capture: tuple[str, ...] = ("output",)
    """What is captured of each layer: names of `KINDS`."""
    target: str | None = None
    """What is differentiated: top1, class:N, sum, mean, norm, output[KEY]:..., layer:NAME[:C]."""
    grad_rule: Literal["plain", "guided", "deconv"] = "plain"
    """How gradients pass a ReLU."""
    interventions: tuple[tuple[str, str], ...] = ()
    """Changes of what layers give, in order: (one of INTERVENTIONS, `SELECTORS:numbers`)."""
    seed: Seed = 0
    """Of the noise."""

    @property
    def gradients(self) -> bool:
        """Whether a backward pass is wanted."""
        return any(is_gradient(kind) for kind in self.capture)


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

    bytes: Annotated[int, Within(0)] | None = None
    files: Annotated[int, Within(0)] | None = None
