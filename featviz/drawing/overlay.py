"""Maps laid over what the model saw, one tile after the other, as they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from featviz.drawing import colormap, grid
from featviz.drawing.picture import GridPicture
from featviz.records import Bytes, DrawOptions


def lay_over(
    picture: GridPicture,
    ground: Sequence[Bytes],
    options: DrawOptions,
    window: Sequence[int] | None = None,
) -> GridPicture:
    """Lay a picture's maps over what the model saw.

    Args:
        ground: uint8 [H, W, 3]: the picture, or the frames of a clip, of which each time step gets
            the one in its middle.
        window: top, left, height and width of the part of the picture that is drawn; None draws
            all.

    Raises:
        LayoutError: the picture is larger than its format can hold.
    """
    side, steps = picture.slices
    count = picture.tiles.shape[0] // side
    frames = [int((step + 0.5) * len(ground) / steps) for step in range(side)] * count
    colors, alpha = picture.palette, float(options.overlay or 0)
    window = window or (0, 0, *ground[0].shape[:2])
    shape, alone = (count, side, *window[2:]), picture.reduce is not None
    return replace(
        picture,
        plan=grid.plan_file(shape, options, alone=alone),
        tiles=Overlay(
            picture.tiles[:],
            colormap.table(colors),
            colors.nonfinite,
            ground,
            frames,
            alpha,
            window,
        ),
        palette=colormap.plain_grey(options.pad_value),
        overlay=options.overlay,
    )


@dataclass(frozen=True)
class Overlay:
    """RGB tiles [N, H, W, 3] of the input's size, or of the part of it that is drawn.

    A map covers the whole input: it is resized bilinearly (by Pillow, for which pixels are areas,
    not points), coloured, and mixed in by `alpha`: 0 is the input, 1 the map.
    """

    maps: Bytes
    """Levels [N, h, w], or RGB [N, h, w, 3]."""
    colors: Bytes
    """[256, 3]: the colours of the levels."""
    nonfinite: int | None
    """The level that is none: it is not mixed with its neighbours when a map is resized."""
    ground: Sequence[Bytes]
    """What the model saw, [H, W, 3]: one picture, or the frames of a clip."""
    frames: Sequence[int]
    """The index into `ground` for each tile."""
    alpha: float
    window: Sequence[int]
    """Top, left, height and width of the part of the input that is drawn."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, H, W, 3]"""
        return (len(self.maps), *self.window[2:], 3)

    @property
    def nbytes(self) -> int:
        """Bytes of the maps, and of the input under them."""
        return self.maps.nbytes + sum(picture.nbytes for picture in self.ground)

    def __getitem__(self, part: slice) -> Bytes:
        """Some of the tiles, uint8 [n, H, W, 3]."""
        tiles = np.empty((len(self.maps[part]), *self.shape[1:]), np.uint8)
        for place, number in enumerate(range(*part.indices(len(self.maps)))):
            tiles[place] = self._tile(number)
        return tiles

    def _tile(self, number: int) -> Bytes:
        ground = self.ground[self.frames[number]]
        over = self._colored(self.maps[number], (ground.shape[1], ground.shape[0]))
        top, left, height, width = self.window
        part = slice(top, top + height), slice(left, left + width)
        mixed = (1 - self.alpha) * ground[part] + self.alpha * over[part] + 0.5
        return mixed.astype(np.uint8)

    def _colored(self, tile: Bytes, size: tuple[int, int]) -> Bytes:
        """RGB [H, W, 3] for a size (width, height)."""
        if tile.ndim == 3:
            return _resized(tile, size)
        if self.nonfinite is None:
            return self.colors[_resized(tile, size)]
        holes = tile == self.nonfinite
        colored = self.colors[_resized(np.where(holes, 0, tile).astype(np.uint8), size)]
        where = _resized(holes.astype(np.uint8), size, Image.Resampling.NEAREST) > 0
        colored[where] = self.colors[self.nonfinite]
        return colored


def _resized(
    tile: Bytes, size: tuple[int, int], how: Image.Resampling = Image.Resampling.BILINEAR
) -> Bytes:
    return np.asarray(Image.fromarray(tile).resize(size, how))
