"""The story of one tensor: layout, statistics, levels, tiles, picture; and which maps are drawn, in
which order: like beside like, and one tile for near-equals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from featviz import records
from featviz.drawing import colormap, grid, normalize, values
from featviz.drawing.normalize import Scale
from featviz.drawing.picture import GridPicture, lay_over
from featviz.drawing.values import MAX, MEAN, MIN, NONFINITE, is_constant, limits, statistics
from featviz.errors import LayoutError
from featviz.layout import Maps, to_floats, to_maps
from featviz.layout.layouts import LAYOUTS
from featviz.options import DrawOptions
from featviz.records import BACKWARD, SALIENCY, Bytes, CaptureSite, Floats, Hints

PHASE = {"cmap": "twilight", "normalize": f"range:{-math.pi},{math.pi}", "overlay": None}
"""How phases are drawn: in colours that meet where −π and π do, which no mixing keeps apart."""

PCA_SPAN = 2.5
"""Standard deviations from the mean at which a principal component is darkest and brightest."""


def is_saliency(
    site: CaptureSite, shape: Sequence[int], inputs: Sequence[Sequence[int]], options: DrawOptions
) -> bool:
    """Whether it is the gradient of an image, which gets a picture of all channels, too."""
    at_image = site.kind == "grad-input" and list(shape) in [list(size) for size in inputs]
    return at_image and len(shape) > 3 and options.reduce is None


def magnitude_and_phase(
    site: CaptureSite, tensor: Tensor, hints: Hints, options: DrawOptions
) -> Iterator[tuple[CaptureSite, Tensor, Hints]]:
    """Complex numbers as two parts of real ones: `abs`, and `angle`, which has no `--reduce`."""
    if tensor.is_nested or tensor.is_meta or tensor.layout != torch.strided:
        to_floats(tensor)  # raises
    wide = tensor.to(torch.complex64) if tensor.dtype == torch.complex32 else tensor
    yield site.inside("abs"), wide.abs(), hints
    if options.reduce is None:
        yield site.inside("angle"), wide.angle(), replace(hints, phase=True)


@lru_cache(64)
def settled(options: DrawOptions, kind: str, over: bool, phase: bool) -> tuple[DrawOptions, Scale]:
    """Options and scale without `auto`, for a kind of tensor, whether maps lie over images, and
    whether they are phases."""
    auto = "auto"
    options = structs.replace(options, **PHASE) if phase else options
    if kind == SALIENCY:  # one picture of all channels, whose values have no sign
        auto = "percentile:1,99"
        one = {"reduce": "max-abs", "order": "index", "labels": False}
        options = structs.replace(options, **one, nrow=None, max_maps=None, collapse=None)
    cmap = colormap.resolved(options.cmap, kind, over, options.reduce)
    scale = auto if options.normalize == "auto" else options.normalize
    return structs.replace(options, cmap=cmap), normalize.parse_scale(scale, kind, options.reduce)


def draw(
    options: DrawOptions,
    site: CaptureSite,
    tensor: Tensor,
    hints: Hints | None = None,
    background: Sequence[Bytes] = (),
    window: Sequence[int] | None = None,
    inputs: Sequence[Sequence[int]] = (),
    gradient: Tensor | None = None,
) -> dict[str, GridPicture]:
    """Turn a tensor into tiles and statistics, on its device: the picture of its maps under the
    empty key, tokens beside the grid under their names; of the gradient of the image SALIENCY, one
    picture of all its channels. LayoutError where there is no picture of it.

    Args:
        background: what the maps may lie over, see `lay_over`; and the `window` of it.
        inputs: shapes of the model's inputs: a gradient of such a shape is that of the image.
        gradient: of the target at this tensor, for class activation maps.
    """
    parts, weights, phase = to_maps(tensor, hints or Hints()), None, bool(hints and hints.phase)
    if gradient is not None:  # tokens beside the grid have no places
        parts, weights = {"": parts[""]}, to_maps(gradient, hints or Hints())[""]
    drawn = [(key, site.kind, maps) for key, maps in parts.items()]
    if site.kind == "grad-input" and is_saliency(site, tensor.shape, inputs, options):
        drawn.append((SALIENCY, SALIENCY, parts[""]))
    pictures = {}
    for key, kind, maps in drawn:
        over = options.overlay is not None and LAYOUTS[maps.layout].aligned and not phase
        own, scale = settled(options, kind, over, phase)
        picture = draw_maps(maps, own, scale, weights)
        picture = replace(picture, cmap=own.cmap) if phase else picture
        if picture.marked and kind in BACKWARD:  # behind a pooling it is constant by nature
            picture = replace(picture, marked=(grid.ZERO,))
        if over and picture.constant is None:
            picture = lay_over(picture, background, own, window)
        pictures[key] = picture
    return pictures


def draw_maps(
    maps: Maps, options: DrawOptions, scale: Scale, gradient: Maps | None = None
) -> GridPicture:
    """Draw the maps of a tensor: a tile for each channel and slice, or one for all channels."""
    strip = LAYOUTS[maps.layout].strip and gradient is None
    if strip or options.reduce is None:
        data = maps.data[:, :, None]
        return draw_tiles(data, maps.layout, options, scale, strip=strip, heat=not strip)
    held = maps.data.shape[1]
    steps = _steps(maps.layout, held, options)
    if options.reduce == "pca":
        one = principal_components(maps.data)[:, steps].transpose(0, 1)[None]
        scale = "range", (-PCA_SPAN, PCA_SPAN)
    elif gradient is not None:
        one = class_map(options.reduce, maps, gradient)[:, steps, None]
    else:
        one = REDUCTIONS[options.reduce](maps.data[:, steps])[:, :, None]
    return replace(
        draw_tiles(one, maps.layout, options, scale, alone=True),
        stats=statistics(maps.data)[0],
        slices=(one.shape[1], held),
        steps=steps,
        values=maps.data[0].numel(),
        reduce=options.reduce,
    )


def draw_tiles(
    data: Tensor,
    layout: str,
    options: DrawOptions,
    scale: Scale,
    *,
    strip: bool = False,
    alone: bool = False,
    heat: bool = False,
) -> GridPicture:
    """Draw maps float32 [C, S, K, H, W]: S tiles for each channel in K colours.

    The tiles of a channel share its limits. Where K is 3, so do the colours, and a pixel that is
    not finite in some colour is magenta. Statistics and limits are those of all slices. A `strip`
    is the numbers of a vector in their order, what is `alone` the one tile of all channels; with
    `heat`, maps that are all constant, and not all zero, become a strip of their values.
    """
    rows = data.flatten(1)
    numbers, _ = statistics(rows)
    flat, held, constant = is_constant(numbers), data, None
    several = len(data) > 1 and data[0].numel() > 1
    if heat and options.marks and several and flat.all() and numbers[:, MIN].any():
        # zeros everywhere are a finding of their own, and stay a grid
        constant, held = (data.shape[1], *data.shape[3:]), data[:, :1, :, :1, :1]
        strip = True
    channels, groups = None, dict[int, list[int]]()
    if options.max_maps or options.order != "index" or options.collapse is not None:
        channels, groups = choose(rows, numbers, options, strip)
    steps = _steps(layout, held.shape[1], options) if held.shape[1] > 1 else slice(None)
    drawn = held if channels is None else held[channels]
    drawn = drawn if isinstance(steps, slice) else drawn[:, steps]
    count, slices, colours, height, width = drawn.shape
    plan = grid.plan((count, slices, height, width), options, strip=strip, alone=alone)
    ends = limits(scale, rows, numbers[:, MIN], numbers[:, MAX], together=strip or alone)
    if len(ends.low) > 1 and (channels is not None or slices > 1):
        low, high = (v if channels is None else v[channels] for v in (ends.low, ends.high))
        ends = replace(ends, low=low.repeat(slices), high=high.repeat(slices))
    maps, nonfinite = drawn.flatten(0, 1), bool(numbers[:, NONFINITE].any())
    colors = colormap.chosen(options, nonfinite, colours == 3)
    if colours == 3:
        painted = values.to_levels(maps, ends, colors.levels, 0 if nonfinite else None)
        painted = painted.transpose(0, 2, 3, 1).copy()
        painted[~torch.isfinite(maps).all(1).cpu().numpy()] = colormap.MAGENTA
    else:
        painted = values.to_levels(maps[:, 0], ends, colors.levels, colors.nonfinite)
    return GridPicture(
        *(layout, plan, painted, colors, ends, numbers, channels),
        slices=(slices, held.shape[1]),
        steps=steps,
        values=data[0].numel(),
        strip=strip,
        constant=constant,
        groups=groups,
        labels=options.labels,
        marked=(grid.ZERO, grid.CONSTANT) if options.marks and flat.any() else (),
    )


def _steps(layout: str, held: int, options: DrawOptions) -> list[int] | slice:
    """The slices that are drawn of those that each channel holds, all as a slice: of a clip or a
    volume those in the middle of equal parts; of a batch the first, which may be its best."""
    most = options.max_slices
    if held <= most:
        return slice(None)
    if layout in LAYOUTS and LAYOUTS[layout].allows_many and layout != "windows":
        return list(range(most))
    return [(2 * part + 1) * held // (2 * most) for part in range(most)]


# Which maps, and in which order

_ROUNDING = 1e-5
"""By which the correlation of a map with its own copy may miss 1 in float32."""


def choose(
    maps: Tensor, numbers: Floats, options: DrawOptions, strip: bool
) -> tuple[list[int] | None, dict[int, list[int]]]:
    """The channels that are drawn, in their order (None where simply all are), and those of them
    that stand for several: near-equal maps share a tile, then `max_maps` picks (all that is done
    for a strip), then the tiles are ordered."""
    groups = {}
    if options.collapse is not None and not strip:
        groups = collapse(maps, numbers, options.collapse)
    ids = list(groups) or list(range(len(maps)))
    picked = pick_maps(numbers[ids, MEAN], options)
    ids = ids if picked is None else [ids[i] for i in picked]
    if options.order == "mean" and not strip:
        keys = np.nan_to_num(-numbers[ids, MEAN], nan=np.inf)  # without a finite value last
        ids = [ids[i] for i in np.argsort(keys, kind="stable")]
    elif options.order == "similarity" and not strip:
        ids = [ids[i] for i in by_similarity(maps[ids], numbers[ids])]
    shared = {leader: group for leader in ids if len(group := groups.get(leader, [])) > 1}
    return None if ids == list(range(len(maps))) else ids, shared


def pick_maps(means: Sequence[float] | Floats, options: DrawOptions) -> list[int] | None:
    """The maps to draw, in channel order, by their `means`; None where all are drawn."""
    count, limit = len(means), options.max_maps
    if limit is None or count <= limit:
        return None
    if options.pick == "first":
        return list(range(limit))
    if options.pick == "spread":
        return sorted({round(i) for i in np.linspace(0, count - 1, limit)})
    strongest = np.argsort(-np.nan_to_num(means, nan=-np.inf), kind="stable")
    return sorted(strongest[:limit].tolist())


def correlations(maps: Tensor) -> Floats:
    """Pearson's correlation of each map [N, P] with each, float32 [N, N]; 0 with a constant."""
    centred = maps - maps.mean(1, keepdim=True)
    length = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
    unit = centred / length.clamp_min(torch.finfo(torch.float32).tiny)
    cosines: Floats = (unit @ unit.T).clamp_(-1, 1).cpu().numpy()
    return cosines


def by_similarity(maps: Tensor, numbers: Floats) -> list[int]:
    """Places of the channels as a chain: from the first, each time the most correlated of the rest;
    at the end constant channels by value, then those with non-finite values."""
    finite, constant = numbers[:, NONFINITE] == 0, is_constant(numbers)
    varied, flat = np.flatnonzero(finite & ~constant), np.flatnonzero(constant)
    flat = flat[np.argsort(-numbers[flat, MEAN], kind="stable")]
    alike = correlations(maps[varied])
    chain, left = [0] if len(varied) else [], np.arange(len(varied)) > 0
    while left.any():
        chain.append(int(np.argmax(np.where(left, alike[chain[-1]], -np.inf))))
        left[chain[-1]] = False
    return [int(place) for place in (*varied[chain], *flat, *np.flatnonzero(~finite))]


def collapse(maps: Tensor, numbers: Floats, threshold: float) -> dict[int, list[int]]:
    """Groups of near-equal maps: the first of each, to all of it (itself included). In order of
    index, a map that no group has becomes a leader, and takes what correlates with it by
    `threshold` or more. Constant maps are alike only if they are equal, and maps with non-finite
    values are like nothing."""
    constant, means = is_constant(numbers), numbers[:, MEAN]
    varied = np.flatnonzero((numbers[:, NONFINITE] == 0) & ~constant)
    alike = constant[:, None] & constant & (means[:, None] == means)
    alike[np.ix_(varied, varied)] = correlations(maps[varied]) >= threshold - _ROUNDING
    groups: dict[int, list[int]] = {}
    left = np.ones(len(means), bool)
    for leader in range(len(means)):
        if left[leader]:
            alike[leader, leader] = True
            groups[leader] = [int(i) for i in np.flatnonzero(alike[leader] & left)]
            left[groups[leader]] = False
    return groups


# All channels in one: reductions, and class activation maps. A is a layer's output and G the
# gradient of the target there, both [C, S, H, W]; k counts channels, p all places of the S slices

COMPONENTS = len(records.REDUCTIONS["pca"].colors)
_NOTHING = 1e-6
"""A component whose deviation is below this share of the first one's is rounding, left out."""

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda data: data.mean(0, keepdim=True),
    "max": lambda data: data.amax(0, keepdim=True),
    "l2": lambda data: torch.linalg.vector_norm(data, dim=0, keepdim=True),
    "max-abs": lambda data: data.abs().amax(0, keepdim=True),
}
"""From [C, ...] to [1, ...]: those of `records.REDUCTIONS` with one component; `pca` has three and
is not among them."""


def principal_components(data: Tensor) -> Tensor:
    """[C, ...] to float32 [3, ...]: in standard deviations from the mean, along the directions in
    which the channels vary most; NaN where some channel is not finite, 0 where the channels do not
    vary in so many directions.

    The directions, whose largest number is positive, are eigenvectors of the channels' covariance
    over the finite pixels, got from the pixels' where these are fewer (they share eigenvalues).
    """
    values = data.flatten(1).cpu().double()
    finite = torch.isfinite(values).all(0)
    count = max(int(finite.sum()), 1)
    average = torch.where(finite, values, 0.0).sum(1, keepdim=True) / count
    centred = (values - average)[:, finite]
    if len(values) <= count:
        powers, vectors = torch.linalg.eigh(centred @ centred.T / count)
    else:
        powers, pixels = torch.linalg.eigh(centred.T @ centred / count)
        vectors = centred @ pixels
    std = powers.flip(0)[:COMPONENTS].clamp_min(0).sqrt()
    directions = torch.nn.functional.normalize(vectors.T.flip(0)[:COMPONENTS], dim=1, eps=1e-300)
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    scale = torch.where(std > _NOTHING * std[:1], std, torch.inf)[:, None]
    known = directions * largest.sign() / scale @ centred
    components = torch.full((COMPONENTS, values.shape[1]), torch.nan)
    components[:, finite] = 0.0
    components[: len(known), finite] = known.float()
    return components.reshape(COMPONENTS, *data.shape[1:])


_PLACES = (1, 2, 3)


def gradcam_plus_plus(output: Tensor, gradient: Tensor) -> Tensor:
    """ReLU(sum_k w_k A_k): Chattopadhyay et al., arXiv 1710.11063, equation 19. w_k = sum_p a_kp
    ReLU(G_kp), a = G² / (2 G² + sum_p(A_k) G³), which is 1 / (2 + sum_p(A_k) G) where G is not
    zero. The target is the exponential of the score; a factor of all weights is left out."""
    share = 2 + output.sum(_PLACES, keepdim=True) * gradient
    alpha = torch.where(share == 0, 0.0, 1 / share)
    return _weighted(output, (alpha * gradient.relu()).sum(_PLACES)).relu()


def xgradcam(output: Tensor, gradient: Tensor) -> Tensor:
    """sum_k w_k A_k with w_k = sum_p(G_k A_k) / sum_p(A_k), 0 if that is 0: Fu et al., arXiv
    2008.02312."""
    total = output.sum(_PLACES)
    weights = torch.where(total == 0, 0.0, (gradient * output).sum(_PLACES) / total)
    return _weighted(output, weights)


def _weighted(output: Tensor, weights: Tensor) -> Tensor:
    """sum_k w_k A_k: [C, S, H, W] and [C] to [1, S, H, W]."""
    total: Tensor = torch.tensordot(weights, output, 1)
    return total[None]


METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # ReLU(sum_k mean_p(G_k) A_k): Selvaraju et al., arXiv 1610.02391, equations 1 and 2
    "gradcam": lambda output, gradient: _weighted(output, gradient.mean(_PLACES)).relu(),
    "gradcam++": gradcam_plus_plus,
    # ReLU(sum_k ReLU(G_k) A_k): Jiang et al., LayerCAM, doi 10.1109/TIP.2021.3089943
    "layercam": lambda output, gradient: (gradient.relu() * output).sum(0, keepdim=True).relu(),
    # ReLU(sum_k G_k A_k): Draelos and Carin, arXiv 2011.08891, whose sum has a sign (see gradxact)
    "hirescam": lambda output, gradient: (gradient * output).sum(0, keepdim=True).relu(),
    "xgradcam": xgradcam,
    # sum_k G_k A_k: gradient × input (Shrikumar et al., arXiv 1605.01713) at a layer. Of a network
    # that is linear from there on, each value is that place's share
    "gradxact": lambda output, gradient: (gradient * output).sum(0, keepdim=True),
}
"""The arithmetic of `records.CLASS_MAPS`: from output and gradient [C, S, H, W] to [1, S, H, W]."""


def check_places(maps: Maps) -> None:
    """Refuse maps without places of the image."""
    layout = LAYOUTS[maps.layout]
    what = "one value for each channel" if list(maps.data.shape[2:]) == [1, 1] else ""
    if not layout.aligned:
        what = f"the layout {layout.name} {layout.shape}"
    if what:
        raise LayoutError(f"has no places of the image: its output has {what}")


def class_map(method: str, output: Maps, gradient: Maps) -> Tensor:
    """The class activation map of a layer's output, float32 [1, S, H, W]."""
    check_places(output)
    if not gradient.data.any():
        raise LayoutError("has a gradient of zero at every place: the target does not depend on it")
    return METHODS[method](output.data, gradient.data)
