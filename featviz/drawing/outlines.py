"""Boxes of detectors and the edges of regions, drawn on pictures."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from PIL import Image, ImageDraw

from featviz.drawing.sheet import (
    BLACK,
    WHITE,
    line_height,
    pixel_font,
    text_width,
)
from featviz.records import Bytes, Integers
from featviz.text import printable

_POINTS = 11
_LINES_A_SIDE = 200
"""A line is one pixel wide for so many pixels of the picture's longer side."""
_RADII_A_SIDE = 10
"""The picture's longer side is so many radii of a ring long."""


def with_boxes(
    pixels: Bytes, boxes: Sequence[Sequence[float]], labels: Sequence[str]
) -> Bytes:
    """A picture with white boxes drawn on it, and labels in black on white. If a box
    reaches out of the picture, its edge is drawn at the picture's border.

    Args:
        pixels: uint8 [H, W, 3].
        boxes: left, top, right and bottom of each box in pixels, the most confident
            first: the first box lies on top.
        labels: a text for the upper left corner of each box. It is left out if it is
            empty, or the picture has no room for it.

    Returns:
        uint8 [H, W, 3].
    """
    image = Image.fromarray(pixels)
    draw = ImageDraw.Draw(image)
    thick = max(1, round(max(image.size) / _LINES_A_SIDE))
    limits = np.array([*image.size, *image.size]) - 1
    # from the last to the first, so that the most confident box lies on top
    for box, label in reversed(list(zip(boxes, labels, strict=True))):
        x0, y0, x1, y1 = np.clip(np.round(box), 0, limits).astype(int).tolist()
        draw.rectangle((x0, y0, x1, y1), outline=BLACK, width=thick + 2)
        # a light line inside a dark one can be seen on any picture
        if x1 - x0 > 2 and y1 - y0 > 2:
            inside = (x0 + 1, y0 + 1, x1 - 1, y1 - 1)
            draw.rectangle(inside, outline=WHITE, width=thick)
        _label(draw, printable(label), (x0, y0), image.size)
    return np.asarray(image)


def with_ring(pixels: Bytes, x: float, y: float) -> Bytes:
    """A picture with a ring drawn around a spot.

    Args:
        pixels: uint8 [H, W, 3].
        x, y: the spot, 0..1 from the left and from the top.
    """
    image = Image.fromarray(pixels)
    draw = ImageDraw.Draw(image)
    centre = (x * image.width, y * image.height)
    longest = max(image.size)
    radius = longest / _RADII_A_SIDE
    # twice as wide as other lines: a sheet may show the picture at half of its size
    thick = max(1, round(2 * longest / _LINES_A_SIDE))
    draw.circle(centre, radius + thick, outline=BLACK, width=3 * thick)
    draw.circle(centre, radius, outline=WHITE, width=thick)
    return np.asarray(image)


def _label(
    draw: ImageDraw.ImageDraw,
    text: str,
    corner: tuple[int, int],
    size: tuple[int, int],
) -> None:
    """Write a text above the upper edge of a box, or below this edge if there is no room
    above. A picture that is narrower than the text, or lower than two lines, gets none.

    Args:
        draw: draws on the picture.
        corner: left and top of the box, in pixels.
        size: width and height of the picture in pixels.
    """
    # whole pixels: letters between two pixels would be blurred
    width = ceil(text_width(text, _POINTS)) + 4
    height = line_height(_POINTS)
    if not text or width > size[0] or 2 * height > size[1]:
        return
    x = min(corner[0], size[0] - width)
    y = corner[1]
    if y >= height:
        y -= height
    draw.rectangle((x, y, x + width, y + height), fill=WHITE)
    draw.text((x + 2, y), text, fill=BLACK, font=pixel_font(_POINTS))


def with_outline(pixels: Bytes, mask: Integers) -> Bytes:
    """A picture with the edge of a region drawn on it, a white line on a black one.

    Args:
        pixels: uint8 [H, W, 3].
        mask: which pixels belong to the region, bool or 0 and 1, [h, w]. It is stretched
            over the whole picture.

    Returns:
        uint8 [H, W, 3].
    """
    height, width = pixels.shape[:2]
    region = Image.fromarray(mask.astype(bool)).resize(
        (width, height), Image.Resampling.NEAREST
    )
    inside = np.asarray(region)
    thick = max(1, round(max(height, width) / _LINES_A_SIDE))
    # dark behind light, so that the line is seen on any picture
    dark = _edge(inside, thick + 1)
    light = _edge(inside, thick)
    drawn = pixels.copy()
    drawn[dark] = BLACK
    drawn[light] = WHITE
    return drawn


def _edge(inside: Integers, thick: int) -> Integers:
    """The edge of a region, bool [H, W]: its pixels that are near a pixel outside the
    region. The picture's border is not an edge.

    Args:
        inside: bool [H, W], the pixels of the region.
        thick: distance in pixels that still is near.
    """
    # The edge is what the region loses when it is made thinner. Its outermost pixels are
    # repeated beyond the picture, so that the picture's border is no edge.
    padded = np.pad(inside, thick, mode="edge")
    height, width = inside.shape
    eroded = inside.copy()
    for shift in range(2 * thick + 1):
        eroded &= padded[shift : shift + height, thick : thick + width]
        eroded &= padded[thick : thick + height, shift : shift + width]
    return inside & ~eroded
