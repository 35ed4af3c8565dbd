"""The story of one tensor: layout, statistics, levels, tiles, picture; and which maps
are drawn, in which order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from featviz.drawing import colormap, grid, normalize, values
from featviz.drawing.channels import choose_channels
from featviz.drawing.normalize import Scale
from featviz.drawing.picture import GridPicture, lay_over
from featviz.drawing.values import (
    MEAN,
    MIN,
    NONFINITE,
    STD,
    ValueLimits,
    is_constant,
    limits,
    statistics,
)
from featviz.errors import LayoutError
from featviz.layout import Maps, to_floats, to_maps
from featviz.layout.layouts import LAYOUTS
from featviz.options import DrawOptions
from featviz.records import (
    ATTENTION_MAPS,
    BACKWARD,
    SALIENCY,
    Bytes,
    CaptureSite,
    Floats,
    Hints,
)

_PHASE = {
    "cmap": "twilight",
    "normalize": f"range:{-math.pi},{math.pi}",
    "overlay": None,
}
"""How phases are drawn: in a colormap whose ends have the same colour, since −π and π are
the same angle; and without an overlay, since colours that are mixed with the input cannot
be told apart."""

_ONE_PICTURE = {
    "reduce": "max-abs",
    "order": "index",
    "labels": False,
    "nrow": None,
    "channels": None,
    "collapse": None,
}
"""How the saliency picture is drawn: the gradient of an image as one map."""


def is_saliency(
    site: CaptureSite,
    shape: Sequence[int],
    inputs: Sequence[Sequence[int]],
    options: DrawOptions,
) -> bool:
    """Whether a capture gets one more picture, of all its channels in one map: it is the
    gradient of an image, and `--reduce` does not make such a picture already.

    Args:
        shape: shape of the capture's tensor.
        inputs: shapes of the model's inputs.
    """
    if site.kind != "grad-input" or options.reduce is not None or len(shape) < 4:
        return False
    return list(shape) in [list(size) for size in inputs]


class RealCapture(NamedTuple):
    """The magnitudes or the phases of a capture of complex numbers."""

    site: CaptureSite
    tensor: Tensor
    """Real, of the capture's shape."""
    hints: Hints


def magnitude_and_phase(
    site: CaptureSite, tensor: Tensor, hints: Hints, options: DrawOptions
) -> Iterator[RealCapture]:
    """Yield complex numbers as captures of real numbers: `abs`, and, unless
    `options.reduce` is set, `angle`.

    Raises:
        LayoutError: the tensor is nested, sparse or on the device meta.
    """
    if tensor.is_nested or tensor.is_meta or tensor.layout != torch.strided:
        to_floats(tensor)  # always raises here, with a message for people
    if tensor.dtype == torch.complex32:  # has neither abs nor angle
        tensor = tensor.to(torch.complex64)
    yield RealCapture(site.inside("abs"), tensor.abs(), hints)
    # a mean of angles says nothing: π and -π are the same direction
    if options.reduce is None:
        phase_hints = replace(hints, phase=True)
        yield RealCapture(site.inside("angle"), tensor.angle(), phase_hints)


@lru_cache(64)
def _settle(
    options: DrawOptions, capture_kind: str, aligned: bool, phase: bool
) -> tuple[DrawOptions, Scale]:
    """Options and scale with `auto` decided. The overlay is dropped if the maps cannot lie
    over the input.

    Args:
        capture_kind: one of `records.KINDS`, or SALIENCY.
        aligned: whether the maps are pictures of the input. Vectors, attention weights,
            and tokens before or behind the grid are not.
        phase: whether the maps are the phases of complex numbers.
    """
    if phase:
        options = structs.replace(options, **_PHASE)
    if not aligned:
        options = structs.replace(options, overlay=None)
    scale = options.normalize
    if capture_kind == SALIENCY:
        options = structs.replace(options, **_ONE_PICTURE)
        if scale == "auto":
            scale = "percentile:1,99"  # absolute values have no sign
    is_over = options.overlay is not None
    cmap = colormap.decide_cmap(options.cmap, capture_kind, is_over, options.reduce)
    options = structs.replace(options, cmap=cmap)
    return options, normalize.parse_scale(scale, capture_kind, options.reduce)


def draw(
    options: DrawOptions,
    site: CaptureSite,
    tensor: Tensor,
    hints: Hints | None = None,
    background: Sequence[Bytes] = (),
    window: Sequence[int] | None = None,
    inputs: Sequence[Sequence[int]] = (),
    gradient: Tensor | None = None,
    inner: bool = False,
) -> dict[str, GridPicture]:
    """Turn a tensor into tiles and statistics, on its device.

    Args:
        options: how maps are drawn.
        site: the capture whose tensor it is.
        tensor: of any shape that a layout fits, real, of one image.
        hints: on its layout; None if nothing is known of the tensor.
        background: uint8 [H, W, 3] each, the pictures under an overlay: see `lay_over`.
        window: top, left, height and width in pixels of the part of `background` that
            is drawn; None for all.
        inputs: shapes of the model's inputs, by which the gradient of an image is
            recognised.
        gradient: the target's gradient at this tensor, in its shape, if `options.reduce`
            is a class activation map; for ATTENTION_MAPS the map itself; else None.
        inner: see `draw_tiles`.

    Returns:
        The picture of the maps under the key "", and, without `gradient`, the pictures of
        tokens before and behind the grid under their names. The gradient of an image has
        one more picture, of all its channels, under SALIENCY.

    Raises:
        LayoutError: no layout fits the tensor, or `draw_maps` refuses its maps.
    """
    hints = hints or Hints()
    maps_by_key = to_maps(tensor, hints)
    weights = None
    if gradient is not None:
        # tokens before and behind the grid have no position in the image
        maps_by_key = {"": maps_by_key[""]}
        weights = to_maps(gradient, hints)[""]
    if is_saliency(site, tensor.shape, inputs, options):
        maps_by_key[SALIENCY] = maps_by_key[""]
    pictures = {}
    for key, maps in maps_by_key.items():
        capture_kind = SALIENCY if key == SALIENCY else site.kind
        aligned = LAYOUTS[maps.layout].aligned
        settled_options, scale = _settle(options, capture_kind, aligned, hints.phase)
        picture = draw_maps(
            maps, settled_options, scale, weights, hints.border, inner=inner
        )
        if hints.phase:
            picture = replace(picture, cmap=settled_options.cmap)
        # the gradient before a global pooling is always constant: not a finding
        if picture.marked and capture_kind in BACKWARD:
            picture = replace(picture, marked=(grid.ZERO,))
        if settled_options.overlay is not None and picture.constant is None:
            picture = lay_over(picture, background, settled_options, window)
        pictures[key] = picture
    return pictures


def draw_maps(
    maps: Maps,
    options: DrawOptions,
    scale: Scale,
    gradient: Maps | None = None,
    border: int = 1,
    inner: bool = False,
) -> GridPicture:
    """Draw the maps of a tensor: a tile for each channel and slice, or, with
    `options.reduce`, a tile of all channels for each slice. A vector becomes a strip of
    its numbers, whatever `options.reduce` says.

    Args:
        options, scale: with `auto` decided.
        gradient: what `draw` takes under this name, as maps of the same shape.
        border: pixels at each edge of the maps that do not count in rankings.
        inner: see `draw_tiles`; it has no effect with `options.reduce`.

    Raises:
        LayoutError: no class activation map can be made of the maps (see `class_map`),
            they have none of the channels that the options name, or the picture is too
            large.
    """
    layout = LAYOUTS[maps.layout]
    border = border if layout.aligned else 0
    is_strip = layout.strip and gradient is None
    if is_strip or options.reduce is None:
        tiles = maps.data[:, :, None]
        return draw_tiles(
            tiles,
            maps.layout,
            options,
            scale,
            strip=is_strip,
            as_values=not is_strip,
            border=border,
            inner=inner,
        )
    # Components and class activation maps are computed from all slices before some of
    # them are chosen: so a step of a clip looks the same, however many are drawn.
    # REDUCTIONS treat each slice alone.
    slices = maps.data.shape[1]
    steps = _drawn_slices(maps.layout, slices, options.max_slices)
    if options.reduce == "pca":
        reduced = component_maps(maps.data)[:, steps].transpose(0, 1)[None]
        scale = Scale("range", (-values.PCA_SPAN, values.PCA_SPAN))
    elif gradient is not None:
        reduced = class_map(options.reduce, maps, gradient)[:, steps, None]
    else:
        reduced = REDUCTIONS[options.reduce](maps.data[:, steps])[:, :, None]
    # the picture shows one tile, but the statistics are those of all channels
    return replace(
        draw_tiles(reduced, maps.layout, options, scale, alone=True),
        stats=statistics(maps.data),
        deviations=values.inner_deviations(maps.data, border),
        slices=(reduced.shape[1], slices),
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
    as_values: bool = False,
    border: int = 0,
    inner: bool = False,
) -> GridPicture:
    """Draw maps. The tiles of a channel share its limits. Statistics and limits count all
    slices and channels, drawn or not, so that a tile looks the same, however many others
    are drawn.

    Args:
        data: float32 [C, S, K, H, W]: S tiles for each channel in K colours, 1 or 3. In
            RGB, the colours share limits too, and a pixel that is not finite in one of
            them is magenta.
        layout: a name of LAYOUTS, or what a kernel's tiles show.
        options: with `cmap` decided.
        strip: whether the maps are the numbers of a vector, which are drawn as a strip.
        alone: whether the picture is the one tile of all channels.
        as_values: whether maps become a strip of their values if all are constant, and
            not all zero. Without `options.marks` this has no effect.
        border: pixels at each edge of the maps that do not count in rankings; 0 for none.
        inner: whether the border does not count for the limits either. A bright frame
            would otherwise leave the rest of a map one colour.

    Raises:
        LayoutError: there are none of the channels that the options name, or the picture
            is too large.
    """
    # without gaps: all that follows would make copies of its own
    data = data.contiguous()
    maps = data.flatten(1)
    stats = statistics(maps)
    deviations = values.inner_deviations(data, border) if border else stats[:, STD]
    are_constant = is_constant(stats)
    drawn = data
    constant = None
    if as_values and options.marks and _are_worth_a_strip(data, stats, are_constant):
        # one value of each map is drawn
        constant = (data.shape[1], *data.shape[3:])
        drawn = data[:, :1, :, :1, :1]
        strip = True
    channels, collapsed = _choose_maps(maps, stats, deviations, options, strip)
    if channels is not None:
        drawn = drawn[channels]
    slices = drawn.shape[1]
    steps = _drawn_slices(layout, slices, options.max_slices)
    drawn = drawn[:, steps]
    count, shown_slices, colors, height, width = drawn.shape
    if inner:
        value_limits = _inner_limits(scale, data, border, together=strip or alone)
    else:
        value_limits = limits(scale, maps, stats, together=strip or alone)
    value_limits = value_limits.of_tiles(channels, shown_slices)
    has_holes = bool(stats[:, NONFINITE].any())
    palette = colormap.picture_palette(options, has_holes, rgb=colors == 3)
    shape = (count, shown_slices, height, width)
    marked: Sequence[int] = ()
    if options.marks and are_constant.any():
        marked = (grid.ZERO, grid.CONSTANT)
    return GridPicture(
        layout=layout,
        plan=grid.plan(shape, options, strip=strip, alone=alone),
        tiles=_tiles(drawn.flatten(0, 1), value_limits, palette),
        palette=palette,
        limits=value_limits,
        stats=stats,
        deviations=deviations,
        channels=channels,
        slices=(shown_slices, slices),
        steps=steps,
        values=data[0].numel(),
        strip=strip,
        constant=constant,
        collapsed=collapsed,
        numbered=options.labels,
        marked=marked,
    )


def _are_worth_a_strip(data: Tensor, stats: Floats, are_constant: np.ndarray) -> bool:
    """Whether maps should become a strip of their values: there are several maps of
    several numbers, and all are constant. If all are zero, this is a finding, and they
    stay a grid.

    Args:
        data: [C, S, K, H, W].
        stats: float32 [C, 6].
        are_constant: bool [C], which maps are constant.
    """
    has_maps = len(data) > 1 and data[0].numel() > 1
    return has_maps and bool(are_constant.all()) and bool(stats[:, MIN].any())


def _inner_limits(
    scale: Scale, data: Tensor, border: int, together: bool
) -> ValueLimits:
    """The `limits` of maps [C, S, K, H, W] without `border` pixels at each edge. Values in
    the border may lie outside the limits."""
    stats = values.inner_statistics(data, border)
    return replace(limits(scale, data, stats, together), clips=True)


def _tiles(maps: Tensor, value_limits: ValueLimits, palette: colormap.Palette) -> Bytes:
    """The tiles of float32 maps: levels, uint8 [N, H, W], for maps [N, 1, H, W]; RGB,
    uint8 [N, H, W, 3], for maps [N, 3, H, W]."""
    levels = palette.levels
    if maps.shape[1] == 1:
        return values.to_levels(maps[:, 0], value_limits, levels, palette.nonfinite)
    tiles = values.to_levels(maps, value_limits, levels, nonfinite=0)
    tiles = tiles.transpose(0, 2, 3, 1).copy()
    tiles[~torch.isfinite(maps).all(1).cpu().numpy()] = colormap.MAGENTA
    return tiles


def _drawn_slices(layout: str, slices: int, limit: int) -> list[int] | slice:
    """Which slices of each channel are drawn: all, if there are at most `limit`. If there
    are more, a clip or a volume is cut into `limit` equal parts, and the slice in the
    middle of each part is drawn. Of a batch, the first items are drawn, which may be its
    best.

    Args:
        layout: the name of the tensor's layout, or what a kernel's tiles show.
        slices: how many slices each channel has.

    Returns:
        The numbers of the slices; `slice(None)` for all.
    """
    if slices <= limit:
        return slice(None)
    if layout in LAYOUTS and LAYOUTS[layout].allows_many and layout != "windows":
        return list(range(limit))
    return [(2 * number + 1) * slices // (2 * limit) for number in range(limit)]


# Which maps, and in which order

_ROUNDING = 1e-5
"""By which the correlation of a map with its own copy may miss 1 in float32."""


def _choose_maps(
    maps: Tensor, stats: Floats, deviations: Floats, options: DrawOptions, strip: bool
) -> tuple[list[int] | None, dict[int, list[int]]]:
    """Choose channels: near-equal maps share a tile, then `--channels` chooses, then the
    tiles are ordered. For a strip, only `--channels` chooses.

    Args:
        maps: float32 [C, values].
        stats: float32 [C, 6].
        deviations: standard deviation of each channel without its border, float32 [C].
        strip: whether the maps are single numbers.

    Returns:
        The channels that are drawn, in the order of their tiles (None for all in their
        own order). Then the channels that share a tile, by the channel that is drawn;
        each list holds this channel, too.

    Raises:
        LayoutError: the tensor has none of the channels that `--channels` names.
    """
    groups: dict[int, list[int]] = {}
    # by default nothing is chosen, and lists of thousands of channels would take time
    if not options.channels and options.collapse is None and options.order == "index":
        return None, groups
    if options.collapse is not None and not strip:
        groups = collapse(maps, stats, options.collapse)
    channels = list(groups) or list(range(len(maps)))
    if options.channels is not None:
        means = stats[:, MEAN]
        channels = choose_channels(options.channels, channels, means, deviations)
    if not strip:
        channels = _ordered(channels, maps, stats, options)
    shared = {n: groups[n] for n in channels if len(groups.get(n, ())) > 1}
    if channels == list(range(len(maps))):
        return None, shared
    return channels, shared


def _ordered(
    channels: list[int], maps: Tensor, stats: Floats, options: DrawOptions
) -> list[int]:
    """Sort channels as `options.order` says.

    Args:
        channels: the channels to be sorted.
        maps, stats: maps and statistics of all channels of the tensor.
    """
    if options.order == "index":
        return channels
    if options.order == "similarity":
        order = by_similarity(maps[channels], stats[channels])
    else:
        # numpy sorts NaN last: a map without a finite value
        order = np.argsort(-stats[channels, MEAN], kind="stable").tolist()
    return [channels[i] for i in order]


def correlations(maps: Tensor) -> Floats:
    """Pearson's correlation of each map with each other, float32 [N, N]; 0 if one of the
    two is constant.

    Args:
        maps: float32 [N, P], finite.
    """
    # The product of two centred rows of length 1 is their correlation. A constant row
    # becomes zeros.
    centred = maps - maps.mean(1, keepdim=True)
    length = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
    unit = centred / length.clamp_min(torch.finfo(torch.float32).tiny)
    cosines: Floats = (unit @ unit.T).clamp_(-1, 1).cpu().numpy()
    return cosines


def by_similarity(maps: Tensor, stats: Floats) -> list[int]:
    """Order maps as a chain: the first map, then each time the one of the rest that
    correlates most with the last of the chain. At the end stand constant maps, the
    largest value first, then maps with non-finite values.

    Args:
        maps: float32 [N, P].
        stats: float32 [N, 6].

    Returns:
        The numbers of all maps, each once.
    """
    finite = stats[:, NONFINITE] == 0
    constant = is_constant(stats)
    varied = np.flatnonzero(finite & ~constant)
    flat = np.flatnonzero(constant)
    flat = flat[np.argsort(-stats[flat, MEAN], kind="stable")]
    correlation = correlations(maps[varied])
    chain = [0] if len(varied) else []
    # maps that are in the chain cannot be chosen again
    while len(chain) < len(varied):
        row = correlation[chain[-1]].copy()
        row[chain] = -np.inf
        chain.append(int(np.argmax(row)))
    return [*varied[chain].tolist(), *flat.tolist(), *np.flatnonzero(~finite).tolist()]


def collapse(maps: Tensor, stats: Floats, threshold: float) -> dict[int, list[int]]:
    """Groups of near-equal maps.

    The maps are taken in order. A map that is in no group becomes the leader of a new
    one, which gets all maps without a group that correlate with the leader. Constant maps
    are alike only if they are equal, and maps with non-finite values are like no other.

    Args:
        maps: float32 [N, P].
        stats: float32 [N, 6].
        threshold: the least correlation with the leader, 0 to 1.

    Returns:
        The maps of each group, by its leader, which is one of them.
    """
    finite = stats[:, NONFINITE] == 0
    constant = is_constant(stats)
    means = stats[:, MEAN]
    varied = np.flatnonzero(finite & ~constant)
    alike = constant[:, None] & constant & (means[:, None] == means)
    alike[np.ix_(varied, varied)] = correlations(maps[varied]) >= threshold - _ROUNDING
    groups = {}
    ungrouped = np.ones(len(means), bool)
    # a map that is like a member but not like the leader is not in the group
    for leader in range(len(means)):
        if ungrouped[leader]:
            alike[leader, leader] = True
            groups[leader] = np.flatnonzero(alike[leader] & ungrouped).tolist()
            ungrouped[groups[leader]] = False
    return groups


# All channels in one map: reductions, and class activation maps. In the formulas, A is a
# layer's output and G the gradient of the target there, both [C, S, H, W]; k counts
# channels, p the positions of all S slices.

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda data: data.mean(0, keepdim=True),
    "max": lambda data: data.amax(0, keepdim=True),
    "l2": lambda data: torch.linalg.vector_norm(data, dim=0, keepdim=True),
    "max-abs": lambda data: data.abs().amax(0, keepdim=True),
}
"""The arithmetic of `records.REDUCTIONS`, from [C, ...] to [1, ...]. `pca` is missing: it
makes three components (`component_maps`)."""


def component_maps(data: Tensor) -> Tensor:
    """Three principal components of the channels, computed from the pixels that are
    finite in all channels; see `values.principal_components`.

    Args:
        data: float32 [C, ...], on any device.

    Returns:
        float32 [3, ...] on the CPU; NaN at pixels that are not finite in some channel.
    """
    pixels = data.flatten(1).cpu().numpy().T
    finite = np.isfinite(pixels).all(1)
    components = np.full((len(pixels), values.COMPONENTS), np.nan, np.float32)
    components[finite] = values.principal_components(pixels[finite])
    return torch.from_numpy(components.T).reshape(-1, *data.shape[1:])


_POSITIONS = (1, 2, 3)
"""The axes of slices, rows and columns."""


def gradcam_plus_plus(output: Tensor, gradient: Tensor) -> Tensor:
    """ReLU(sum_k w_k A_k): Chattopadhyay et al., arXiv 1710.11063, equation 19. w_k =
    sum_p a_kp ReLU(G_kp), a = G² / (2 G² + sum_p(A_k) G³), which is 1 / (2 + sum_p(A_k)
    G) if G is not zero. The paper's target is the exponential of the score; the factor
    that this gives to all weights is left out."""
    share = 2 + output.sum(_POSITIONS, keepdim=True) * gradient
    alpha = torch.where(share == 0, 0.0, 1 / share)
    return _weighted(output, (alpha * gradient.relu()).sum(_POSITIONS)).relu()


def xgradcam(output: Tensor, gradient: Tensor) -> Tensor:
    """sum_k w_k A_k with w_k = sum_p(G_k A_k) / sum_p(A_k), or 0 if sum_p(A_k) is 0: Fu
    et al., arXiv 2008.02312."""
    total = output.sum(_POSITIONS)
    weights = torch.where(total == 0, 0.0, (gradient * output).sum(_POSITIONS) / total)
    return _weighted(output, weights)


def _weighted(output: Tensor, weights: Tensor) -> Tensor:
    """sum_k w_k A_k: [C, S, H, W] and [C] to [1, S, H, W]."""
    total: Tensor = torch.tensordot(weights, output, 1)
    return total[None]


METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # ReLU(sum_k mean_p(G_k) A_k): Selvaraju et al., arXiv 1610.02391, equations 1 and 2
    "gradcam": lambda output, gradient: _weighted(
        output, gradient.mean(_POSITIONS)
    ).relu(),
    "gradcam++": gradcam_plus_plus,
    # ReLU(sum_k ReLU(G_k) A_k): Jiang et al., LayerCAM, doi 10.1109/TIP.2021.3089943
    "layercam": lambda output, gradient: (
        (gradient.relu() * output).sum(0, keepdim=True).relu()
    ),
    # ReLU(sum_k G_k A_k): Draelos and Carin, arXiv 2011.08891, whose sum has a sign
    # (see gradxact)
    "hirescam": lambda output, gradient: (
        (gradient * output).sum(0, keepdim=True).relu()
    ),
    "xgradcam": xgradcam,
    # sum_k G_k A_k: gradient × input (Shrikumar et al., arXiv 1605.01713) at a layer. If
    # the network is linear from there on, a value is the share of its position in the
    # target
    "gradxact": lambda output, gradient: (gradient * output).sum(0, keepdim=True),
    # the second argument is the map itself (gradients.attention)
    **dict.fromkeys(ATTENTION_MAPS, lambda output, attention: attention),
}
"""The arithmetic of `records.CLASS_MAPS`, from output and gradient [C, S, H, W] to a map
[1, S, H, W]; and of ATTENTION_MAPS, from output and attention map to this map."""


def check_places(maps: Maps) -> None:
    """Raise LayoutError for maps whose values are not places of the image: no class
    activation map can be made of them."""
    layout = LAYOUTS[maps.layout]
    message = "has no places of the image: its output has"
    if not layout.aligned:
        raise LayoutError(f"{message} the layout {layout.name} {layout.shape}")
    if maps.data.shape[2:] == (1, 1):
        raise LayoutError(f"{message} one value for each channel")


def class_map(method: str, output: Maps, gradient: Maps) -> Tensor:
    """The class activation map of a layer's output, float32 [1, S, H, W].

    Args:
        method: a name of METHODS.
        output: maps of the layer's output, [C, S, H, W].
        gradient: maps of the target's gradient at the output, of the same shape; for
            ATTENTION_MAPS the map itself, [1, S, H, W].

    Raises:
        LayoutError: the values of the output are not places of the image, or the gradient
            is zero everywhere.
    """
    check_places(output)
    if not gradient.data.any():
        raise LayoutError(
            "has a gradient of zero at every place: the target does not depend on it"
        )
    return METHODS[method](output.data, gradient.data)
