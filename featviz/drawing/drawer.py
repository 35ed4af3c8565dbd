"""The story of one tensor: layout, statistics, levels, tiles, picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from msgspec import structs
from torch import Tensor

from featviz.drawing import class_maps, colormap, grid, labels, normalize, order, overlay, reduce
from featviz.drawing.normalize import Scale
from featviz.drawing.picture import GridPicture
from featviz.drawing.values import (
    MAX,
    MIN,
    NONFINITE,
    channel_stats,
    is_constant,
    limits,
    to_levels,
)
from featviz.layout import Maps, to_floats, to_maps
from featviz.layout.layouts import LAYOUTS
from featviz.options import DrawOptions
from featviz.records import SALIENCY, Bytes, Hints, Site, is_gradient

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


class Drawer:
    """Draws tensors by the options of a run; what is `auto` is settled for each."""

    def __init__(self, options: DrawOptions) -> None:
        self.options = options
        self._settled: dict[tuple[str, bool, bool], tuple[DrawOptions, Scale]] = {}
        """Options and scale without `auto`, by kind of tensor, whether maps lie over images, and
        whether they are phases."""

    def draw(
        self,
        site: Site,
        tensor: Tensor,
        hints: Hints | None = None,
        ground: Sequence[Bytes] = (),
        window: Sequence[int] | None = None,
        inputs: Sequence[Sequence[int]] = (),
        gradient: Tensor | None = None,
    ) -> dict[str, GridPicture]:
        """Turn a tensor into tiles and statistics, on its device.

        Args:
            ground: what the maps may lie over, uint8 [H, W, 3]: the picture that the model saw, or
                the frames of a clip.
            window: top, left, height and width of the part of it that is no padding; None for all.
            inputs: shapes of the model's inputs: a gradient of such a shape is that of the image.
            gradient: of the target at this tensor, for class activation maps.

        Returns:
            The picture of the tensor's maps under the empty key; tokens beside the grid under
            their names; of the gradient of the image SALIENCY, one picture of all its channels.

        Raises:
            LayoutError: no layout fits, a picture is larger than its format can hold, or there is
                no class activation map of the tensor.
            UsageError: no such scale.
        """
        parts, weights, phase = to_maps(tensor, hints or Hints()), None, bool(hints and hints.phase)
        if gradient is not None:  # tokens beside the grid have no places
            parts, weights = {"": parts[""]}, to_maps(gradient, hints or Hints())[""]
        drawn = [(key, site.kind, maps) for key, maps in parts.items()]
        if site.kind == "grad-input" and is_saliency(site, tensor.shape, inputs, self.options):
            drawn.append((SALIENCY, SALIENCY, parts[""]))
        pictures = {}
        for key, kind, maps in drawn:
            over = self.options.overlay is not None and LAYOUTS[maps.layout].aligned and not phase
            known = self._settled.get((kind, over, phase))
            options, scale = known or self._settle(kind, over, phase)
            picture = draw_maps(maps, options, scale, weights)
            picture = replace(picture, cmap=options.cmap) if phase else picture
            if picture.marked and is_gradient(kind):  # behind a pooling it is constant by nature
                picture = replace(picture, marked=(labels.ZERO,))
            if over and picture.constant is None:
                picture = overlay.lay_over(picture, ground, options, window)
            pictures[key] = picture
        return pictures

    def _settle(self, kind: str, over: bool, phase: bool) -> tuple[DrawOptions, Scale]:
        options, auto = self.options, "auto"
        options = structs.replace(options, **PHASE) if phase else options
        if kind == SALIENCY:  # one picture of all channels, whose values have no sign
            auto = "percentile:1,99"
            one = {"reduce": "max-abs", "order": "index", "labels": False}
            options = structs.replace(options, **one, nrow=None, max_maps=None, collapse=None)
        cmap = colormap.resolved(options.cmap, kind, over, options.reduce)
        scale = auto if options.normalize == "auto" else options.normalize
        scale = normalize.resolved(scale, kind, options.reduce)
        chosen = structs.replace(options, cmap=cmap), normalize.parse_scale(scale)
        self._settled[kind, over, phase] = chosen
        return chosen


def draw_maps(
    maps: Maps, options: DrawOptions, scale: Scale, gradient: Maps | None = None
) -> GridPicture:
    """Draw the maps of a tensor: a tile for each channel and slice, or one for all channels.

    Args:
        gradient: of the target at these maps, for class activation maps.
    """
    if maps.strip and gradient is None:
        return draw_tiles(maps.data[:, :, None], maps.layout, options, scale.for_layer, strip=True)
    if options.reduce is None:
        return draw_tiles(maps.data[:, :, None], maps.layout, options, scale, heat=True)
    steps = _steps(maps.layout, maps.data.shape[1], options)
    data = maps.data[:, steps]
    if options.reduce == "pca":
        one = reduce.principal_components(maps.data)[:, steps].transpose(0, 1)[None]
        scale = Scale("range", (-PCA_SPAN, PCA_SPAN))
    elif gradient is not None:
        one = class_maps.class_map(options.reduce, maps, gradient)[:, steps, None]
        scale = scale.for_layer
    else:
        one = reduce.REDUCTIONS[options.reduce](data)[:, :, None]
        scale = scale.for_layer
    return replace(
        draw_tiles(one, maps.layout, options, scale, alone=True),
        stats=channel_stats(maps.data),
        slices=(data.shape[1], maps.data.shape[1]),
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
    numbers = channel_stats(rows)
    flat, held, constant = is_constant(numbers), data, None
    several = len(data) > 1 and data[0].numel() > 1
    if heat and options.marks and several and flat.all() and numbers[:, MIN].any():
        # zeros everywhere are a finding of their own, and stay a grid
        constant, held = (data.shape[1], *data.shape[3:]), data[:, :1, :, :1, :1]
        strip, scale = True, scale.for_layer
    channels, groups = None, dict[int, list[int]]()
    if options.max_maps or options.order != "index" or options.collapse is not None:
        channels, groups = order.choose(rows, numbers, options, strip)
    steps = _steps(layout, held.shape[1], options) if held.shape[1] > 1 else slice(None)
    drawn = held if channels is None else held[channels]
    drawn = drawn if isinstance(steps, slice) else drawn[:, steps]
    count, slices, colours, height, width = drawn.shape
    plan = grid.plan((count, slices, height, width), options, strip=strip, alone=alone)
    ends = limits(scale, rows, numbers[:, MIN], numbers[:, MAX])
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
        marked=(labels.ZERO, labels.CONSTANT) if options.marks and flat.any() else (),
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
