"""What can be read back from the grids of a run: the levels of each channel, and a vector
for each place of an image, with the values of all channels there.

A grid has eight bits for each value, so each number of a vector is known to half a
level. Places are alike if the angle between their vectors is small, and its cosine near
1. Cosines from grids differ by at most 0.010 from those of the tensors (stages of
resnet18, a block of a ViT, 4,000 pairs each)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from featviz.drawing import colormap
from featviz.layout.layouts import LAYOUTS
from featviz.records import BACKWARD, Bytes, Floats
from featviz.rundir.image import ReadImage
from featviz.rundir.schema import Capture

MOST_SIDE = 32
"""Places along the longer side of a map at most; a larger map is averaged down."""
_SAMPLED = 1024
"""Vectors from which axes are computed, about."""
_SURPLUS = 8
"""How many more axes are computed than are wanted, since the last ones are the least
exact."""
_ROUNDS = 2
"""How many times the random directions are multiplied with the vectors."""


# Levels


def drawn_channels(row: Capture) -> list[int]:
    """The channels that have a tile, in tile order. A picture with `reduce` has one tile of
    all channels: the result is right for it only if there is one channel."""
    return list(row.channels or range(row.maps))


class LevelScale(NamedTuple):
    """The values that the levels of drawn channels stand for: low + level · step."""

    low: np.ndarray
    """[channels]: the value of level 0."""
    step: np.ndarray
    """[channels]: the value of a level minus the value of the level before."""


def level_scale(palette: Bytes | None, row: Capture, stats: Floats) -> LevelScale:
    """The values for which a grid's levels stand: from the range in the manifest's row, or,
    without one, from the minimum and maximum of each channel.

    Args:
        palette: palette of the picture; None for grey levels.
        row: the manifest's row of the picture.
        stats: [channels, 6], statistics of all channels.

    Returns:
        For the drawn channels. `low` and `step` are 0 for a channel without a finite
        value.
    """
    channels = drawn_channels(row)
    if row.range is None:
        low, high = stats[channels, :2].astype(np.float64).T
    else:
        # an end of None becomes NaN, and then 0
        low, high = (np.full(len(channels), end, np.float64) for end in row.range)
    low = np.nan_to_num(low)
    # in a palette of 256 entries, one is for padding, and one for NaN and infinity
    count = 256 if palette is None else 254
    return LevelScale(low, (np.nan_to_num(high) - low) / (count - 1))


def is_readable(levels: Bytes, palette: Bytes | None, row: Capture) -> bool:
    """Whether the pixels of a grid are levels, and its tiles are where the manifest says.
    Somebody may have changed either file, or another version may have written it.

    Args:
        levels: pixels of the picture, uint8 [h, w].
        palette: palette of the picture, [entries, 3]; None for grey levels.
        row: the manifest's row of the picture.
    """
    plan = row.plan
    if levels.shape != (plan.height, plan.width):
        return False
    if plan.tile_count != len(drawn_channels(row)) * row.slice_count:
        return False
    # featviz writes palettes of 256 entries with magenta, for NaN and infinity, at the end
    if palette is not None and (
        len(palette) != 256 or (palette[-1] != colormap.MAGENTA).any()
    ):
        return False
    # constant maps are drawn as their values, but only those of the first slice
    return row.constant is None or row.constant[0] == 1


def tiles_of(levels: Bytes, row: Capture) -> Bytes:
    """The tiles of a grid, uint8 [N, H, W] in the size of the maps.

    Args:
        levels: pixels of a grid, uint8 [h, w], for which `is_readable` is true.
        row: the manifest's row of the grid.
    """
    plan = row.plan
    height, width = plan.tile
    down, across = plan.scale
    padding = plan.padding
    # A slot is a tile with the padding below it and to its right. The grid consists of
    # equal slots, so one reshape takes all tiles out, without a loop.
    slots = levels[padding:, padding:].reshape(
        plan.rows, height + padding, plan.columns, width + padding
    )
    pixels = slots[:, :height:down, :, :width:across].swapaxes(1, 2)
    return pixels.reshape(plan.rows * plan.columns, *plan.map_size)[: plan.tile_count]


# Places


class PlaceVectors(NamedTuple):
    """The places of one image in a layer."""

    vectors: Floats
    """float32 [h · w, C], row by row."""
    size: tuple[int, int]
    """h and w: rows and columns of places."""
    factor: int
    """A place is the average of `factor` rows and `factor` columns of the map."""


def is_map_of_image(row: Capture) -> bool:
    """Whether the positions of a capture's maps are places of the image."""
    layout = LAYOUTS.get(row.layout)
    return layout is not None and layout.aligned and row.plan.map_size != (1, 1)


def why_no_places(row: Capture, labelled: bool = False) -> str:
    """The reason why the vectors of places cannot be read from a capture's grid, for
    people; empty if they can.

    Args:
        row: the manifest's row of the capture.
        labelled: whether numbers are written on the tiles.
    """
    if not is_map_of_image(row):
        return "its maps have no places of the image"
    if row.constant is not None:
        return "each of its maps holds one value"
    if row.kind in BACKWARD:
        return "it is a gradient"
    if row.reduce is not None:
        return f"its picture is one of all channels (--reduce {row.reduce})"
    if row.overlay is not None:
        return "its maps lie over the input (--overlay)"
    # a cosine needs all numbers of a vector
    if len(row.drawn) < row.maps:
        return f"its grid has {len(row.drawn)} of {row.maps} channels"
    if row.slice_count > 1:
        return "its channels have several slices each"
    if row.nonfinite:
        return "it holds NaN or infinite values"
    if labelled:
        return "numbers are written on its maps (--labels)"
    return ""


def read_places(
    image: ReadImage, row: Capture, stats: Floats, most_side: int = MOST_SIDE
) -> PlaceVectors | None:
    """The vectors of an image's places; None if values cannot be read from the picture.

    Args:
        row: the manifest's row of a capture for which `why_no_places` returns "".
        stats: [channels, 6], statistics of all channels.
        most_side: places along the longer side at most; larger maps are averaged down.

    Raises:
        DamagedError: the picture cannot be read.
    """
    picture = image.levels(row)
    if picture is None or not is_readable(*picture, row):
        return None
    levels, palette = picture
    tiles: np.ndarray = tiles_of(levels, row)
    height, width = tiles.shape[1:]
    factor = -(-max(height, width) // most_side)
    if factor > 1:
        tiles = _average(tiles, factor)
    scale = level_scale(palette, row, stats)
    # each channel has a tile, but --order or --channels may have changed their order
    slots = np.argsort(row.drawn)
    maps = tiles.reshape(len(tiles), -1)[slots]
    vectors: Floats = maps.T.astype(np.float32, order="C")
    vectors *= scale.step[slots].astype(np.float32)
    vectors += scale.low[slots].astype(np.float32)
    return PlaceVectors(vectors, (tiles.shape[1], tiles.shape[2]), factor)


def _average(tiles: Bytes, factor: int) -> Floats:
    """Average maps [C, H, W] over squares of `factor` × `factor` pixels: float32 [C, H /
    factor, W / factor], with both sizes rounded up. Squares at the lower and right edge
    may have fewer pixels."""
    count, height, width = tiles.shape
    rows = -(-height // factor)
    columns = -(-width // factor)
    margin = ((0, 0), (0, rows * factor - height), (0, columns * factor - width))
    # zeros beyond the edge add nothing to the sum
    squares = np.pad(tiles, margin).reshape(count, rows, factor, columns, factor)
    # the sum of up to 257 levels fits 16 bits, which are added in half the time
    small = np.uint16 if factor <= 257 else np.uint32
    sums = squares.sum(axis=2, dtype=small).sum(axis=3, dtype=np.uint32)
    heights = np.minimum(factor, height - factor * np.arange(rows))
    widths = np.minimum(factor, width - factor * np.arange(columns))
    means: Floats = sums / np.outer(heights, widths).astype(np.float32)
    return means


def unit_vectors(vectors: Floats) -> Floats:
    """Vectors [N, C] scaled to length 1. A vector of zeros stays as it is."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: Floats = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return units


def cosines(vectors: Floats, vector: Floats) -> Floats:
    """The cosines [N], -1..1, of the angles between vectors [N, C] and one vector [C]; 0
    if either is a vector of zeros."""
    alike: Floats = unit_vectors(vectors) @ unit_vectors(vector[None])[0]
    return alike


def main_axes(vectors: Floats, count: int) -> Floats:
    """The directions along which vectors are longest.

    Args:
        vectors: [N, C]; their mean is not subtracted. Only about _SAMPLED of them count,
            evenly spread.
        count: number of directions; there are fewer if N or C is smaller.

    Returns:
        Unit vectors, float32 [count, C], the longest direction first.
    """
    step = -(-len(vectors) // _SAMPLED)
    sample = vectors[::step].astype(np.float64)
    count = min(count, *sample.shape)
    # Subspace iteration (Halko, Martinsson and Tropp, arXiv 0909.4061): random directions
    # are multiplied with the vectors until they lie along the longest ones. Then a small
    # matrix is decomposed, since decomposing the sample takes ten times as long. Double
    # precision is exact enough for two rounds in a row.
    axes = np.random.default_rng(0).normal(size=(sample.shape[1], count + _SURPLUS))
    for _ in range(_ROUNDS):
        axes = sample.T @ (sample @ axes)
    axes, _ = np.linalg.qr(axes)
    along = sample @ axes
    _, rotation = np.linalg.eigh(along.T @ along)  # the longest direction comes last
    main: Floats = (axes @ rotation).T[::-1][:count].astype(np.float32)
    return main
