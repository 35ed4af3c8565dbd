"""The chart of an audit: bars of the average percentage of zeros (APoZ) of each layer.

             Average percentage of zeros, 6 images
            +--------------------------------+
layer1.relu |███████                         |
layer2.relu |██████████████                  |
            +--------------------------------+
            0     20     40    60    80    100
            ██ APoZ   ██ dead channels
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from featviz.drawing.sheet import DPI, Canvas, Cell, Color, Letters
from featviz.records import Bytes
from featviz.text import quoted

_BAR: Color = (107, 140, 174)
_DEAD_BAR: Color = (192, 57, 43)
_RULE: Color = (221, 221, 221)
# inches of a bar for a share of 1
_FULL_BAR = 5.0
# inches from one layer's bar to the next
_ROW = 0.24
# inches of a letter of a layer's name, about: names get their room by it
_LETTER = 0.07


class ZeroShares(NamedTuple):
    """A bar of the chart; shares are 0..1."""

    label: str
    apoz: float
    """The share of zeros, averaged over the channels."""
    dead: float
    """The share of dead channels."""


def apoz_chart(layers: Sequence[ZeroShares], title: str) -> Bytes:
    """Draw the shares of all layers.

    Args:
        layers: at least one, from top to bottom.
        title: the line above the chart.

    Returns:
        uint8 [H, W, 3]; the size depends on the number of layers and their longest name.
    """
    # all lengths are inches until the canvas makes pixels of them
    labels = [quoted(layer.label, 60) for layer in layers]
    left = 0.3 + _LETTER * max(map(len, labels))
    top = 0.35
    height = _ROW * len(layers)
    bottom = top + height
    canvas = Canvas(round(DPI * (bottom + 0.75)), round(DPI * (left + _FULL_BAR + 0.3)))
    canvas.write(title, left, top / 2, Letters(10))
    # the rules come first, so that bars cover them
    for tick in range(0, 101, 20):
        x = left + _FULL_BAR * tick / 100
        canvas.fill(Cell(x, top, 0, height + 0.05), _RULE)
        canvas.write(str(tick), x, bottom + 0.15, Letters(9), "middle")
    canvas.write("per cent", left + _FULL_BAR / 2, bottom + 0.33, Letters(9), "middle")
    for row, (label, layer) in enumerate(zip(labels, layers, strict=True)):
        y = top + _ROW * row
        canvas.write(label, left - 0.08, y + _ROW / 2, Letters(9), "left")
        canvas.fill(Cell(left, y + 0.03, _FULL_BAR * layer.apoz, _ROW - 0.06), _BAR)
        # A dead channel is all zeros (unless --eps allows for more). So the bar of the dead
        # is not longer than the other one, and is drawn over it, but thinner.
        canvas.fill(
            Cell(left, y + 0.08, _FULL_BAR * layer.dead, _ROW - 0.16), _DEAD_BAR
        )
    # last, since rules and bars reach into it
    canvas.frame(Cell(left, top, _FULL_BAR, height))
    for x, color, text in (
        (left, _BAR, "APoZ"),
        (left + 0.9, _DEAD_BAR, "dead channels"),
    ):
        canvas.fill(Cell(x, bottom + 0.5, 0.2, 0.1), color)
        canvas.write(text, x + 0.28, bottom + 0.55, Letters(8))
    return canvas.pixels
