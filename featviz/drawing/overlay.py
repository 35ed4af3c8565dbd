"""Maps laid over what the model saw, one tile after the other, as they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from featviz.drawing import colormap, grid
from featviz.drawing.picture import GridPicture
from featviz.options import DrawOptions
from featviz.records import Bytes


def lay_over(
    picture: GridPicture,
    ground: Sequence[Bytes],
    options: DrawOptions,
    window: Sequence[int] | None = None,
) -> GridPicture:
    """Lay a picture's maps over what the model saw, the part in a window (top, left, height, width)
    or all: a picture, or the frames of a clip, of which each time step gets the one in its middle.
    """
    side, held = picture.slices
    count, window = picture.plan.maps // side, window or (0, 0, *ground[0].shape[:2])
    steps = np.arange(held)[picture.steps]
    frames = ((steps + 0.5) * len(ground) / held).astype(int).tolist() * count
    shape, alone = (count, side, *window[2:]), picture.reduce is not None
    colors, alpha = picture.palette, float(options.overlay or 0)
    over = (picture.tiles[:], colormap.table(colors), colors.nonfinite)
    return replace(
        picture,
        plan=grid.plan(shape, options, alone=alone),
        tiles=Overlay(*over, ground, frames, alpha, window),
        palette=colormap.plain_grey(options.gap_grey),
        overlay=options.overlay,
    )


@dataclass(frozen=True)
class Overlay:
    """RGB tiles [N, H, W, 3] of the input's size, or of the part of it that is drawn.

    A map covers the whole input: it is resized bilinearly (as Pillow does, for which pixels are
    areas, not points), coloured, and mixed in by `alpha`: 0 is the input, 1 the map.
    """

    maps: Bytes
    """Levels [N, h, w], or RGB [N, h, w, 3]."""
    colors: Bytes
    nonfinite: int | None
    """The level that is none: it is not mixed with its neighbours when a map is resized."""
    ground: Sequence[Bytes]
    """What the model saw, [H, W, 3]: one picture, or the frames of a clip."""
    frames: Sequence[int]
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
        from featviz.drawing import loops

        maps, frames = self.maps[part], self.frames[part]
        size = (self.ground[0].shape[0], self.ground[0].shape[1])
        top, left, height, width = self.window
        drawn = slice(top, top + height), slice(left, left + width)
        tiles = np.empty((len(maps), height, width, 3), np.uint8)
        holes = np.zeros(maps.shape, bool) if self.nonfinite is None else maps == self.nonfinite
        over = resized(np.where(holes, 0, maps).astype(np.uint8), size)
        for number in np.flatnonzero(holes.reshape(len(maps), -1).any(1)):
            where = Image.fromarray(holes[number]).resize(size[::-1], Image.Resampling.NEAREST)
            over[number, np.asarray(where)] = self.nonfinite or 0
        share, colors = 1.0 - self.alpha, self.alpha * self.colors
        for tile, frame, mine in zip(tiles, frames, over, strict=True):
            ground = np.require(self.ground[frame][drawn], requirements=["C", "W"])
            if mine.ndim == 3:
                tile[:] = share * ground + self.alpha * mine[drawn] + 0.5
            else:
                pixels, mixed = ground.reshape(-1, 3), tile.reshape(-1, 3)
                loops.blend(mine[drawn].reshape(-1), colors, pixels, share, mixed)
        return tiles


def resized(tiles: Bytes, size: tuple[int, int]) -> Bytes:
    """Resize tiles [N, h, w] or [N, h, w, 3] bilinearly to a size (height, width)."""
    how = Image.Resampling.BILINEAR
    return np.stack([np.asarray(Image.fromarray(t).resize(size[::-1], how)) for t in tiles])
