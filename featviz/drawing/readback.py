"""What the grids of a run say when they are read back: the levels of each channel, and
the vectors of places: what all channels say of one spot of an image.

A grid holds each channel at each place in eight bits, so a place is a vector of which
each number is known to half a level. Places are alike if the angle between their
vectors is small: their cosine is near 1. By the grids it is at most 0.010 off that of
the tensors (stages of resnet18, a block of a ViT, 4,000 pairs each)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from featviz.drawing import colormap
from featviz.layout.layouts import LAYOUTS
from featviz.records import BACKWARD, Bytes, Floats
from featviz.rundir.image import ReadImage
from featviz.rundir.schema import Capture

MOST_SIDE = 32
"""Places of the longer side of a map; a larger one is averaged down."""
_SAMPLED = 1024
"""Places from which axes are computed."""
_SURPLUS = 8
"""Further directions that are guessed along, so that the last ones wanted are good."""
_ROUNDS = 2
"""How many times the guessed directions are multiplied with the vectors."""


# Levels


def drawn_channels(row: Capture) -> list[int]:
    """The channels that have a tile, in tile order. A picture with `reduce` is one of all
    channels; of a single channel it shows that one."""
    return list(row.channels or range(row.maps))


class LevelScale(NamedTuple):
    """The values that the levels of drawn channels stand for: low + level · step."""

    low: np.ndarray
    """[channels]: the value of level 0."""
    step: np.ndarray
    """[channels]: from a level to the next."""


def level_scale(palette: Bytes | None, row: Capture, stats: Floats) -> LevelScale:
    """The values behind a grid's levels: from the range that its row of the manifest
    names, or else from the minimum and maximum of each channel. A channel without a
    finite value has 0 for both.

    Args:
        palette: of the picture; None for grey levels.
        stats: [channels, 6] of all channels.
    """
    channels = drawn_channels(row)
    if row.range is None:
        low, high = stats[channels, :2].astype(np.float64).T
    else:
        # an end that is None is NaN
        low, high = (np.full(len(channels), end, np.float64) for end in row.range)
    low = np.nan_to_num(low)
    # of the 256 entries of a palette one is for padding, one for what is not finite
    count = 256 if palette is None else 254
    return LevelScale(low, (np.nan_to_num(high) - low) / (count - 1))


def is_readable(levels: Bytes, palette: Bytes | None, row: Capture) -> bool:
    """Whether the pixels of a grid are levels, in tiles where the manifest says. Both are
    files that somebody may have changed, or that another version wrote.

    Args:
        levels: of the picture, uint8 [h, w].
        palette: of the picture, [entries, 3]; None for grey levels.
    """
    plan = row.plan
    if levels.shape != (plan.height, plan.width):
        return False
    if plan.tile_count != len(drawn_channels(row)) * row.slice_count:
        return False
    # a palette of ours has magenta as its last entry, for what is not finite
    if palette is not None and (
        len(palette) != 256 or (palette[-1] != colormap.MAGENTA).any()
    ):
        return False
    # of constant maps with several slices a picture may show only some
    return row.constant is None or row.constant[0] == 1


def tiles_of(levels: Bytes, row: Capture) -> Bytes:
    """The tiles of a grid, uint8 [N, H, W] in the size of the maps.

    Args:
        levels: of a grid that `is_readable`, uint8 [h, w], enlarged.
    """
    plan = row.plan
    height, width = plan.tile
    down, across = plan.scale
    padding = plan.padding
    # Each slot is a tile with the padding below it and to its right, so that the whole
    # grid is one reshape, and the tiles are read without a loop.
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
    """How many rows, and columns, of the map are averaged into a place."""


def is_map_of_image(row: Capture) -> bool:
    """Whether the positions of a capture's maps are places of the image."""
    layout = LAYOUTS.get(row.layout)
    return layout is not None and layout.aligned and row.plan.map_size != (1, 1)


def why_no_places(row: Capture, labelled: bool = False) -> str:
    """Why a capture's grid does not hold the vectors of places, for people; empty where
    it does.

    Args:
        labelled: whether numbers are written on its tiles.
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
    # a cosine needs all coordinates of a place
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
    """The vectors of an image's places; None where the picture does not show values.

    Args:
        row: one for which `why_no_places` is empty.
        stats: [channels, 6].
        most_side: places of the longer side at most; larger maps are averaged down.

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
        tiles = _averaged(tiles, factor)
    scale = level_scale(palette, row, stats)
    # each channel has a tile; by `--order` or `--channels` in another order
    slots = np.argsort(row.drawn)
    maps = tiles.reshape(len(tiles), -1)[slots]
    vectors: Floats = maps.T.astype(np.float32, order="C")
    vectors *= scale.step[slots].astype(np.float32)
    vectors += scale.low[slots].astype(np.float32)
    return PlaceVectors(vectors, (tiles.shape[1], tiles.shape[2]), factor)


def _averaged(tiles: Bytes, factor: int) -> Floats:
    """Maps [C, H, W] whose squares of `factor` pixels a side are averaged: float32 [C,
    H / factor, W / factor], rounded up. Squares at the lower and right edge have fewer
    pixels."""
    count, height, width = tiles.shape
    rows = -(-height // factor)
    columns = -(-width // factor)
    margin = ((0, 0), (0, rows * factor - height), (0, columns * factor - width))
    # zeros beyond the edge add nothing to the sum
    squares = np.pad(tiles, margin).reshape(count, rows, factor, columns, factor)
    # sums of 257 levels fit 16 bits, which are added in half the time
    small = np.uint16 if factor <= 257 else np.uint32
    sums = squares.sum(axis=2, dtype=small).sum(axis=3, dtype=np.uint32)
    heights = np.minimum(factor, height - factor * np.arange(rows))
    widths = np.minimum(factor, width - factor * np.arange(columns))
    means: Floats = sums / np.outer(heights, widths).astype(np.float32)
    return means


def unit_vectors(vectors: Floats) -> Floats:
    """Vectors [N, C] made 1 long; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: Floats = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return units


def cosines(vectors: Floats, vector: Floats) -> Floats:
    """How alike the vectors of places [N, C] are to one [C]: cosines [N], -1..1, and 0
    with a vector of zeros."""
    alike: Floats = unit_vectors(vectors) @ unit_vectors(vector[None])[0]
    return alike


def main_axes(vectors: Floats, count: int) -> Floats:
    """The directions along which vectors are longest, the longest first: unit vectors,
    float32 [count, C]. Of fewer vectors or channels there are fewer. They are computed
    from about _SAMPLED of the vectors, evenly spread.

    Args:
        vectors: [N, C]; their mean is not taken off.
    """
    step = -(-len(vectors) // _SAMPLED)
    sample = vectors[::step].astype(np.float64)
    count = min(count, *sample.shape)
    # Subspace iteration (Halko, Martinsson and Tropp, arXiv 0909.4061): a random guess
    # is multiplied with the vectors until it lies along their longest directions. The
    # sample itself is never decomposed, which takes ten times as long: double precision
    # bears two rounds without, and then a small matrix of products is enough.
    axes = np.random.default_rng(0).normal(size=(sample.shape[1], count + _SURPLUS))
    for _ in range(_ROUNDS):
        axes = sample.T @ (sample @ axes)
    axes, _ = np.linalg.qr(axes)
    along = sample @ axes
    _, rotation = np.linalg.eigh(along.T @ along)  # the longest direction comes last
    main: Floats = (axes @ rotation).T[::-1][:count].astype(np.float32)
    return main
