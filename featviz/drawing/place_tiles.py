"""Tiles that are computed from the places of all images of a layer together, one for each
image: three principal components as colours, or how similar each place is to a chosen
one."""

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
"""From dark for places that are not similar to a light colour that photos do not have."""
_EVERY_PLACE = 2**31
"""More places than a map can have, so that no map is averaged down."""
# numbers from 0 to 1.99: `parse_place` refuses those above 1
_ADDRESS = re.compile(r"(.+)@([01]\.?|[01]?\.\d+),([01]\.?|[01]?\.\d+)")
_NAMED = 12
"""Images that a message names at most."""


class ImageCapture(NamedTuple):
    """A captured tensor of an image of a run."""

    image: ReadImage
    row: Capture
    """The tensor in the image's manifest."""


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
        text: `IMAGE@X,Y` with X and Y from 0 to 1. The name may contain `@`, too.

    Raises:
        UsageError: the text has another form, or X or Y is above 1.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or max(float(match[2]), float(match[3])) > 1:
        raise UsageError(
            f"--similar-to {quoted(text)!r} is no place of an image",
            "IMAGE@X,Y from 0 to 1, such as cat.jpg@0.41,0.63",
        )
    return Place(match[1], float(match[2]), float(match[3]))


def component_tiles(captures: Mapping[str, ImageCapture]) -> dict[str, Bytes]:
    """Draw three principal components of the places as red, green and blue. They are
    computed from all images together: a colour means the same in all of them.

    Args:
        captures: one tensor of the same layer for each image, by the image's name.

    Returns:
        uint8 [h, w, 3] in the size of the layer's tiles, by the image's name.

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
    """Draw how similar each place of all images is to one place: the cosine of their
    vectors, from 0 or less (dark) to 1 (bright), laid over the input. A ring marks the
    place.

    Args:
        captures: one tensor of the same layer for each image, by the image's name.
        place: the place with which all others are compared.

    Returns:
        uint8 [h, w, 3] in the size of the input, by the image's name.

    Raises:
        UsageError: the place is of another image, or a grid does not hold the values of
            all channels.
        DamagedError: a picture cannot be read.
    """
    tiles = {}
    # one scale for all images and layers: equal colours are equal cosines
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
    """The cosine of the angle between the vector of each place of all images and the vector
    of one place.

    Args:
        captures: one tensor of the same layer for each image, by the image's name.
        place: the place with which all others are compared.

    Returns:
        float32 [h, w], -1..1, in the size of the layer's maps, by the image's name; 0 at
        places with a vector of zeros.

    Raises:
        UsageError: the place is of another image, or a grid does not hold the values of
            all channels.
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
            # another run would not help: these values come from the image itself
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
    """Divide values of all places among the images.

    Args:
        places_by_image: the places of each image.
        values: [N, ...], in the order of `_all_vectors`.

    Returns:
        The values of each image, [h, w, ...], by its name.
    """
    grids = {}
    first = 0
    for name, place_vectors in places_by_image.items():
        last = first + len(place_vectors.vectors)
        grids[name] = values[first:last].reshape(*place_vectors.size, *values.shape[1:])
        first = last
    return grids
