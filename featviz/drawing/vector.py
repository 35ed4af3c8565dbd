"""A canvas whose text stays text: PDF and SVG, by matplotlib's Figure."""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np

from featviz.drawing.sheet import Anchor, Canvas, Cell, Color, Letters
from featviz.models.requirements import require_matplotlib
from featviz.records import Bytes

FORMATS = ("pdf", "svg")
"""What a VectorCanvas is saved as."""
_STYLE: Any = {
    # 42 is TrueType. matplotlib's default is Type 3, which journals refuse.
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    # the same figure becomes the same bytes
    "svg.hashsalt": "featviz",
}
_WITHOUT_DATE = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
_SMALLEST_SIDE = 128
"""Pixels of a tile's longer side at least. Viewers of PDF smooth a small picture when
they enlarge it, and the squares that stand for values would lose their edges."""
_ALIGNMENTS = {
    "middle": ("center", "center"),
    "above": ("center", "bottom"),
    "left": ("right", "center"),
    "right": ("left", "center"),
}


class VectorCanvas(Canvas):
    """A `Canvas` whose pictures and texts are objects of a matplotlib figure: pictures
    keep their own pixels, and text stays text."""

    def __init__(self, height: float, width: float) -> None:
        """Take paper of a height and width in inches."""
        super().__init__(1, 1)  # `Canvas.width` measures text with its renderer
        require_matplotlib()
        from matplotlib.figure import Figure

        self._figure = Figure(figsize=(width, height))
        self._paper = self._figure.add_axes((0, 0, 1, 1))
        self._paper.set_axis_off()
        self._paper.set_xlim(0, width)
        self._paper.set_ylim(height, 0)

    def fill(self, cell: Cell, color: Color | Bytes) -> None:
        """Paint a rectangle in one colour, 0..255."""
        self._add_rectangle(cell, facecolor=np.asarray(color) / 255, linewidth=0)

    def frame(self, cell: Cell) -> None:
        """Draw the black edge of a rectangle."""
        self._add_rectangle(cell, facecolor="none", edgecolor="black", linewidth=0.5)

    def _add_rectangle(self, cell: Cell, **style: object) -> None:
        """Add a rectangle in a style of matplotlib's `Rectangle`."""
        from matplotlib.patches import Rectangle

        corner = (cell.left, cell.top)
        self._paper.add_patch(Rectangle(corner, cell.width, cell.height, **style))  # type: ignore[arg-type]

    def paste(self, pixels: Bytes, cell: Cell, smooth: bool = False) -> None:
        """Draw a picture over a rectangle.

        Args:
            pixels: uint8 [h, w, 3]; a small picture is enlarged by a whole factor.
            cell: the rectangle in inches, which the picture fills.
            smooth: has no effect here: the viewer scales the picture.
        """
        factor = -(-_SMALLEST_SIDE // max(pixels.shape[:2]))
        bottom = cell.top + cell.height
        self._paper.imshow(
            pixels.repeat(factor, 0).repeat(factor, 1),
            extent=(cell.left, cell.left + cell.width, bottom, cell.top),
            aspect="auto",
            interpolation="none",
        )

    def write(
        self,
        text: str,
        x: float,
        y: float,
        letters: Letters,
        anchor: Anchor = "right",
        max_width: float | None = None,
        upright: bool = False,
    ) -> float:
        """Write a line of text at a point, as `Canvas.write` does."""
        if max_width is not None:
            text = self.shorten(text, letters, max_width)
        across, down = _ALIGNMENTS["middle" if upright else anchor]
        self._paper.text(
            x,
            y,
            text,
            fontsize=letters.points,
            color=np.asarray(letters.color) / 255,
            fontweight="bold" if letters.bold else "normal",
            horizontalalignment=across,
            verticalalignment=down,
            rotation=90 if upright else 0,
            parse_math=False,  # a name may have a $
        )
        return self.width(text, letters)

    def save(self, file: BinaryIO, format: str) -> None:
        """Write the paper as one of FORMATS, without a date."""
        from matplotlib import rc_context

        with rc_context(_STYLE):
            self._figure.savefig(file, format=format, metadata=_WITHOUT_DATE[format])
