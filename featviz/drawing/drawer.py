"""The story of one tensor: layout, statistics, levels, tiles, picture."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from featviz.drawing import colormap, normalize, overlay, tiles
from featviz.drawing.labels import CONSTANT
from featviz.drawing.normalize import Scale
from featviz.drawing.picture import GridPicture
from featviz.drawing.reduce import Basis
from featviz.layout import to_maps
from featviz.layout.layouts import LAYOUTS
from featviz.records import SALIENCY, Bytes, DrawOptions, Hints, Site, is_gradient
from featviz.text import by

log = logging.getLogger(__name__)

_OF_ALL_TILES = ("scale", "min_tile", "padding", "pad_value", "max_slices", "overlay", "format")
"""Fields of DrawOptions that are about every tile, not about which channels are drawn."""


def is_saliency(
    site: Site, shape: Sequence[int], inputs: Sequence[Sequence[int]], options: DrawOptions
) -> bool:
    """Whether a tensor is the gradient of an image, of which one picture of all channels is drawn
    beside the channels."""
    at_image = site.kind == "grad-input" and list(shape) in [list(size) for size in inputs]
    return at_image and len(shape) > 3 and options.reduce is None


class Drawer:
    """Draws tensors by the options of a run; what is `auto` is settled for each."""

    def __init__(self, options: DrawOptions, bases: Mapping[str, Basis] | None = None) -> None:
        """Take the options.

        Args:
            bases: of principal components, by `Site.stats_key`.
        """
        self.options = options
        self.bases = bases or {}
        self._warned = False
        self._settled: dict[tuple[str, bool], tuple[DrawOptions, Scale]] = {}
        """Options and scale without `auto`, by kind of tensor and whether maps lie over images."""

    def draw(
        self,
        site: Site,
        tensor: Tensor,
        hints: Hints | None = None,
        ground: Sequence[Bytes] = (),
        window: Sequence[int] | None = None,
        inputs: Sequence[Sequence[int]] = (),
    ) -> dict[str, GridPicture]:
        """Turn a tensor into tiles and statistics, on its device.

        Args:
            ground: what the maps may lie over, uint8 [H, W, 3]: the picture that the model saw, or
                the frames of a clip.
            window: top, left, height and width of the part of it that is no padding; None for all.

            inputs: shapes of the model's inputs: a gradient of such a shape is that of the image.

        Returns:
            The picture of the tensor's maps under the empty key; tokens beside the grid under
            their names; of the gradient of the image SALIENCY, one picture of all its channels.

        Raises:
            LayoutError: no layout fits, or a picture is larger than its format can hold.
            UsageError: no such scale.
        """
        pictures = {}
        for key, maps in to_maps(tensor, hints or Hints()).items():
            over = self.options.overlay is not None and LAYOUTS[maps.layout].aligned
            chosen, scale = self._settle(site.kind, over)
            picture = tiles.draw_maps(maps, chosen, scale, self.bases.get(site.stats_key))
            if is_gradient(site.kind):  # behind a pooling it is constant by nature
                picture = replace(picture, marked=[m for m in picture.marked if m != CONSTANT])
            if over and picture.constant is None:
                picture = overlay.lay_over(picture, ground, chosen, window)
            pictures[key] = picture
            self._check_labels(site, pictures[key])
            if not key and is_saliency(site, tensor.shape, inputs, self.options):
                single = tiles.draw_maps(maps, *self._of_saliency(over))
                laid = overlay.lay_over(single, ground, chosen, window) if over else single
                pictures[SALIENCY] = laid
        return pictures

    def _of_saliency(self, over: bool) -> tuple[DrawOptions, Scale]:
        """Options and scale of one picture of all channels of a gradient, whose values have no
        sign."""
        options, normal = self.options, self.options.normalize
        scale = "percentile:1,99" if normal == "auto" else normal
        cmap = colormap.resolved(options.cmap, over=over)
        plain = replace(DrawOptions(), **{name: getattr(options, name) for name in _OF_ALL_TILES})
        return replace(plain, cmap=cmap, reduce="max-abs"), normalize.parse_scale(scale)

    def _settle(self, kind: str, over: bool) -> tuple[DrawOptions, Scale]:
        if (kind, over) not in self._settled:
            options = self.options
            chosen = replace(options, cmap=colormap.resolved(options.cmap, kind, over))
            scale = normalize.parse_scale(normalize.resolved(options.normalize, kind))
            self._settled[kind, over] = chosen, scale
        return self._settled[kind, over]

    def _check_labels(self, site: Site, picture: GridPicture) -> None:
        """Say once where labels are left out."""
        if not self._warned and not picture.labels_fit:
            self._warned = True
            log.warning(
                "labels do not all fit the tiles of %s pixels of %s, and are left out there; "
                "--scale or --min-tile makes tiles larger",
                by(picture.plan.tile[::-1]),
                site.layer.label,
            )
