"""The vectors of places: what all channels of a layer say of one spot of an image, read
from a run's files.

A grid holds each channel at each place in eight bits, so a place is a vector of which
each number is known to half a level. Places are alike if the angle between their
vectors is small: their cosine is near 1. By the grids it is at most 0.010 off that of
the tensors (stages of resnet18, a block of a ViT, 4,000 pairs each)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from featviz.diff.tensors import is_readable, level_scale, tiles_of
from featviz.layout.layouts import LAYOUTS
from featviz.records import BACKWARD, Floats
from featviz.rundir.image import ReadImage
from featviz.rundir.schema import Capture

MOST_SIDE = 32
"""Places of the longer side of a map; a larger one is averaged down."""
COMPONENTS = 3
_SAMPLED = 2048
"""Places from which axes are computed."""


class PlaceVectors(NamedTuple):
    """The places of one image in a layer."""

    vectors: Floats
    """float32 [h · w, C], row by row."""
    size: tuple[int, int]
    """Rows and columns, h and w."""
    factor: int
    """How many rows, and columns, of the map are averaged into a place."""


def why_no_places(row: Capture, labelled: bool = False) -> str:
    """Why a grid does not hold the vectors of places; empty where it does.

    Args:
        labelled: whether numbers are written on its tiles.
    """
    layout = LAYOUTS.get(row.layout)
    if layout is None or not layout.aligned or row.plan.map_size == (1, 1):
        return "its maps have no places of the image"
    if row.constant is not None:
        return "each of its maps holds one value"
    if row.kind in BACKWARD:
        return "it is a gradient"
    if row.reduce is not None:
        return f"its picture is one of all channels (--reduce {row.reduce})"
    if row.overlay is not None:
        return "its maps lie over the input (--overlay)"
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
        row: one of which `why_no_places` finds nothing.
        stats: [channels, 6].
        most_side: places of the longer side; larger maps are averaged down.

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
        means = tiles.astype(np.float32)
        for axis in (1, 2):
            length = means.shape[axis]
            starts = np.arange(0, length, factor)
            counts = np.diff([*starts, length])
            means = np.add.reduceat(means, starts, axis)
            means /= counts[:, None] if axis == 1 else counts
        tiles = means
    scale = level_scale(palette, row, stats)
    values = scale.low[:, None] + tiles.reshape(len(tiles), -1) * scale.step[:, None]
    vectors = np.empty((values.shape[1], row.maps), np.float32)
    vectors[:, row.drawn] = values.T
    return PlaceVectors(vectors, (tiles.shape[1], tiles.shape[2]), factor)


def unit_vectors(vectors: Floats) -> Floats:
    """Vectors of length 1; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: Floats = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return units


def cosines(vectors: Floats, vector: Floats) -> Floats:
    """How alike places [N, C] are to one [C]: -1..1, 0 with a vector of zeros."""
    alike: Floats = unit_vectors(vectors) @ unit_vectors(vector[None])[0]
    return alike


def main_axes(vectors: Floats, count: int) -> Floats:
    """The directions along which vectors are longest, the first one first, float32
    [count, C] or fewer. They are those of some of the vectors, evenly spread.

    Args:
        vectors: [N, C]; their mean is not taken off.
    """
    step = -(-len(vectors) // _SAMPLED)
    sample = vectors[::step].astype(np.float64)
    # eigenvectors of channels × channels, or of places × places where these are fewer
    if sample.shape[1] <= len(sample):
        _, columns = np.linalg.eigh(sample.T @ sample)
    else:
        squares, weights = np.linalg.eigh(sample @ sample.T)
        lengths = np.sqrt(np.maximum(squares, squares[-1] * 1e-12))
        columns = sample.T @ weights / np.maximum(lengths, 1e-300)
    # eigh gives the smallest first
    return columns.T[::-1][:count].astype(np.float32)


def principal_components(vectors: Floats) -> Floats:
    """Three principal components of all places together, float32 [N, 3], in standard
    deviations; those along which nothing varies are 0.

    The largest number of each direction is positive, so that the same vectors give the
    same colours on every machine."""
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    variances, columns = np.linalg.eigh(centred.T @ centred / len(centred))
    components = np.zeros((len(vectors), COMPONENTS), np.float32)
    for number in range(min(COMPONENTS, vectors.shape[1])):
        variance = variances[-1 - number]
        direction = columns[:, -1 - number]
        if variance <= 1e-12 * variances[-1]:
            break
        sign = np.sign(direction[abs(direction).argmax()])
        components[:, number] = centred @ direction * sign / np.sqrt(variance)
    return components
