"""One tile for each image of a layer, made of all places of all images together: three
principal components as colours, or how like each place is to one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from PIL import Image

from featviz.drawing import colormap
from featviz.drawing.outlines import with_ring
from featviz.drawing.readback import (
    PlaceVectors,
    cosines,
    read_places,
    why_no_places,
)
from featviz.drawing.values import PCA_SPAN, principal_components
from featviz.errors import UsageError
from featviz.records import Bytes, Floats
from featviz.rundir import INPUT_FILE
from featviz.rundir.image import ReadImage
from featviz.rundir.schema import Capture
from featviz.text import layer_named, listed, quoted

SIMILARITY_CMAP = "inferno"
"""From the dark of what is unlike to a light that no picture has."""
_EVERY_PLACE = 2**31
"""More places than a map has: none are joined to fewer."""
# numbers from 0 to 1.99: `parse_place` refuses those above 1
_ADDRESS = re.compile(r"(.+)@([01]\.?|[01]?\.\d+),([01]\.?|[01]?\.\d+)")
_NAMED = 12
"""Images that a message names."""


class ImageCapture(NamedTuple):
    """A tensor of an image of a run."""

    image: ReadImage
    row: Capture


class Place(NamedTuple):
    """A spot of an image, `cat.jpg@0.41,0.63`."""

    image: str
    x: float
    """From 0, the left edge, to 1."""
    y: float
    """From 0, the top, to 1."""


def parse_place(text: str) -> Place:
    """Read a spot of an image.

    Args:
        text: `IMAGE@X,Y`, X and Y from 0 to 1; the name may hold `@`, too.

    Raises:
        UsageError: the text has another form, or X or Y is not in 0..1.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or max(float(match[2]), float(match[3])) > 1:
        raise UsageError(
            f"--similar-to {quoted(text)!r} is no place of an image",
            "IMAGE@X,Y from 0 to 1, such as cat.jpg@0.41,0.63",
        )
    return Place(match[1], float(match[2]), float(match[3]))


def component_tiles(captures: Mapping[str, ImageCapture]) -> dict[str, Bytes]:
    """Three principal components of all places of all images together as red, green and
    blue: the same colour means the same in all images.

    Args:
        captures: a tensor of one layer, by the image's name.

    Returns:
        uint8 [h, w, 3] in the size of a tile of the layer, by the image's name.

    Raises:
        UsageError: a grid does not hold the values of all channels.
        DamagedError: a picture cannot be read.
    """
    places_by_image = _places_by_image(captures)
    components = principal_components(_all_vectors(places_by_image))
    shares = 0.5 + components / (2 * PCA_SPAN)
    levels = np.rint(255 * shares.clip(0, 1)).astype(np.uint8)
    tiles = {}
    for name, grid in _on_grids(places_by_image, levels).items():
        down, across = captures[name].row.plan.scale
        tiles[name] = grid.repeat(down, 0).repeat(across, 1)
    return tiles


def similarity_tiles(
    captures: Mapping[str, ImageCapture], place: Place
) -> dict[str, Bytes]:
    """How like each place of all images is to one of them, over what the model saw: the
    cosine of their vectors, from 0 or less (dark) to 1 (bright). A ring is around that
    one.

    Args:
        captures: a tensor of one layer, by the image's name.

    Returns:
        uint8 [h, w, 3] in the size of the input, by the image's name.

    Raises:
        UsageError: a grid does not hold the values of all channels, or the images have
            no such place.
        DamagedError: a picture cannot be read.
    """
    tiles = {}
    # one scale for all images and layers, so that equal colours are equal likeness
    for name, grid in similarities_to(captures, place).items():
        seen = captures[name].image.picture(INPUT_FILE).convert("RGB")
        levels = Image.fromarray(np.rint(255 * grid.clip(0, 1)).astype(np.uint8))
        smooth = levels.resize(seen.size, Image.Resampling.BILINEAR)
        heat = Image.fromarray(colormap.ramp(SIMILARITY_CMAP)[np.asarray(smooth)])
        tiles[name] = np.asarray(Image.blend(seen, heat, 0.6))
        if name == place.image:
            tiles[name] = with_ring(tiles[name], place.x, place.y)
    return tiles


def similarities_to(
    captures: Mapping[str, ImageCapture], place: Place
) -> dict[str, Floats]:
    """The cosine of the vector of each place of all images to that of one place, -1..1
    and 0 for a zero vector.

    Args:
        captures: a tensor of one layer, by the image's name.

    Returns:
        float32 [h, w] in the size of the layer's maps, by the image's name.

    Raises:
        UsageError: the place is of an image that is not among these, or a grid does not
            hold the values of all channels.
        DamagedError: a picture, or the statistics, cannot be read.
    """
    places_by_image = _places_by_image(captures)
    if place.image not in places_by_image:
        names = listed([quoted(name) for name in places_by_image], _NAMED)
        raise UsageError(
            f"there is no image {quoted(place.image)!r}", f"there are {names}"
        )
    place_vectors = places_by_image[place.image]
    height, width = place_vectors.size
    row = min(height - 1, int(place.y * height))
    column = min(width - 1, int(place.x * width))
    vector = place_vectors.vectors[row * width + column]
    likeness = cosines(_all_vectors(places_by_image), vector)
    return _on_grids(places_by_image, likeness)


def _places_by_image(captures: Mapping[str, ImageCapture]) -> dict[str, PlaceVectors]:
    """The places of each image, by its name, in the order of `captures`.

    Raises:
        UsageError: a grid does not hold the values of all channels.
        DamagedError: a picture, or the statistics, cannot be read.
    """
    places_by_image = {}
    for name, (image, row) in captures.items():
        table = image.stats()[row.capture_key.stats_key]
        reason = why_no_places(row)
        place_vectors = None if reason else read_places(image, row, table, _EVERY_PLACE)
        if place_vectors is None:
            reason = reason or "its picture does not show values"
            hint = "run without --reduce, --overlay and --channels, into PNG"
            # no other run would help where the layer shows nothing of this image
            if row.constant is not None or row.nonfinite:
                hint = "--images leaves the image out, --layers names another layer"
            layer = layer_named(quoted(row.label))
            raise UsageError(f"{layer} of {quoted(name)}: {reason}", hint)
        places_by_image[name] = place_vectors
    return places_by_image


def _all_vectors(places_by_image: Mapping[str, PlaceVectors]) -> Floats:
    """The vectors of all places of all images, [N, C], image by image."""
    return np.concatenate(
        [place_vectors.vectors for place_vectors in places_by_image.values()]
    )


def _on_grids(
    places_by_image: Mapping[str, PlaceVectors], values: np.ndarray
) -> dict[str, np.ndarray]:
    """Values of all places [N, ...], in the order of `_all_vectors`, as those of each
    image [h, w, ...]."""
    grids = {}
    first = 0
    for name, place_vectors in places_by_image.items():
        last = first + len(place_vectors.vectors)
        grids[name] = values[first:last].reshape(*place_vectors.size, *values.shape[1:])
        first = last
    return grids
