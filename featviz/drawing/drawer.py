"""The story of one tensor: layout, statistics, levels, tiles, picture; and which maps are drawn, in
which order: like beside like, and one tile for near-equals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from featviz.drawing import class_maps, colormap, grid, normalize
from featviz.drawing.normalize import Scale
from featviz.drawing.picture import GridPicture, lay_over
from featviz.drawing.values import (
    MAX,
    MEAN,
    MIN,
    NONFINITE,
    is_constant,
    limits,
    statistics,
    to_levels,
)
from featviz.layout import Maps, to_floats, to_maps
from featviz.layout.layouts import LAYOUTS
from featviz.options import DrawOptions
from featviz.records import SALIENCY, Bytes, Floats, Hints, Site, is_gradient

PHASE = {"cmap": "twilight", "normalize": f"range:{-math.pi},{math.pi}", "overlay": None}
"""How phases are drawn: in colours that meet where −π and π do, which no mixing keeps apart."""

PCA_SPAN = 2.5
"""Standard deviations from the mean at which a principal component is darkest and brightest."""


def is_saliency(
    site: Site, shape: Sequence[int], inputs: Sequence[Sequence[int]], options: DrawOptions
) -> bool:
    """Whether a tensor is the gradient of an image, of which one picture of all channels is drawn
    beside the channels."""
    at_image = site.kind == "grad-input" and list(shape) in [list(size) for size in inputs]
    return at_image and len(shape) > 3 and options.reduce is None


def magnitude_and_phase(
    site: Site, tensor: Tensor, hints: Hints, options: DrawOptions
) -> Iterator[tuple[Site, Tensor, Hints]]:
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
    site: Site,
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
        background: what the maps may lie over, uint8 [H, W, 3]: the picture that the model saw, or
            the frames of a clip.
        window: top, left, height and width of the part of it that is no padding; None for all.
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
        if picture.marked and is_gradient(kind):  # behind a pooling it is constant by nature
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
        one = class_maps.principal_components(maps.data)[:, steps].transpose(0, 1)[None]
        scale = "range", (-PCA_SPAN, PCA_SPAN)
    elif gradient is not None:
        one = class_maps.class_map(options.reduce, maps, gradient)[:, steps, None]
    else:
        one = class_maps.REDUCTIONS[options.reduce](maps.data[:, steps])[:, :, None]
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

    The tiles of a channel share its limits. Where K is 3, so do the colours, which makes equal
    values grey; the colormap is then not used, and a pixel that is not finite in some colour is
    magenta. Statistics and limits are those of all slices, drawn or not.

    Args:
        strip: the numbers of a vector, side by side and in their order.
        alone: the one tile of all channels.
        heat: draw maps that are all constant, and not all zero, as a strip of their values.
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
    values, nonfinite = drawn.flatten(0, 1), bool(numbers[:, NONFINITE].any())
    colors = colormap.chosen(options, nonfinite, colours == 3)
    if colours == 3:
        painted = to_levels(values, ends, colors.levels, 0 if nonfinite else None)
        painted = painted.transpose(0, 2, 3, 1).copy()
        painted[~torch.isfinite(values).all(1).cpu().numpy()] = colormap.MAGENTA
    else:
        painted = to_levels(values[:, 0], ends, colors.levels, colors.nonfinite)
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
    """The slices that are drawn of those that each channel holds, all as a slice.

    Of a clip or a volume those in the middle of equal parts; of a batch, whose first regions may be
    its best, the first.
    """
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
    """Places of the channels as a chain: from the first, each time the most correlated of the rest.

    Constant channels correlate with nothing and follow at the end by value; then those with
    non-finite values.
    """
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
    """Groups of near-equal maps: the first of each, to all of it (itself included).

    In order of index, a map that no group has becomes a leader, and takes what correlates with it
    by `threshold` or more: the same picture up to brightness and contrast. Constant maps are alike
    only if they are equal, and maps with non-finite values are like nothing.
    """
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
