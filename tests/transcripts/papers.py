"""What is written on the pages that commands draw, and whether it can be read: each text
is found by the pixels that it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from featviz.drawing.sheet import Canvas, PixelCanvas


class Ink(NamedTuple):
    """A text, and the rectangle of the pixels that it took."""

    text: str
    left: int
    top: int
    right: int
    bottom: int


@dataclass
class Paper:
    """A page, and what was written on it, in that order."""

    canvas: Canvas | PixelCanvas
    seen: np.ndarray | None = None
    """The pixels after what was drawn last, unless they have changed since."""
    texts: list[Ink] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    """Texts that touch an edge of the page or lie over something else, or that have a
    picture over them."""

    @property
    def pixels(self) -> np.ndarray:
        """uint8 [h, w, 3], which stay as they are when more is drawn."""
        if isinstance(self.canvas, Canvas):
            return self.canvas.pixels
        return np.asarray(self.canvas.image)

    @property
    def lines(self) -> list[str]:
        """The texts from top to bottom, those of one height side by side."""
        lines: list[list[Ink]] = []
        for ink in sorted(self.texts, key=lambda ink: ink.bottom):
            # a letter may reach below its line, or end above it, as a comma does
            if lines and ink.bottom - lines[-1][-1].bottom < 5:
                lines[-1].append(ink)
            else:
                lines.append([ink])
        shown = []
        for line in lines:
            texts = [ink.text for ink in sorted(line, key=_left)]
            shown.append(" | ".join(texts).replace("\n", " / "))
        return shown

    def told(self) -> Iterator[str]:
        """Its size, its lines, and what cannot be read."""
        height, width = self.pixels.shape[:2]
        yield f"page {width}x{height}"
        yield from (f"  {line}" for line in self.lines)
        yield from (f"  UNREADABLE: {fault}" for fault in self.unreadable)

    def note_text(self, text: str, before: np.ndarray, after: np.ndarray) -> None:
        """Find a text that was just written.

        Args:
            before: the pixels without it.
            after: the pixels with it.
        """
        changed = differing(before, after)
        if not changed.any():
            self.unreadable.append(f"{text!r} is not seen")
            return
        rows, columns = changed.any(1).nonzero()[0], changed.any(0).nonzero()[0]
        ink = Ink(text, columns[0], rows[0], columns[-1], rows[-1])
        self.texts.append(ink)
        height, width = changed.shape
        room = min(ink.left, ink.top, width - 1 - ink.right, height - 1 - ink.bottom)
        if room < 1:
            self.unreadable.append(f"{text!r} leaves the page")
        if (before[changed] != 255).any():
            self.unreadable.append(f"{text!r} lies over something")

    def note_picture(self, before: np.ndarray, after: np.ndarray) -> None:
        """Look whether a picture that was just drawn lies over a text."""
        for ink in self.texts:
            rows = slice(ink.top, ink.bottom + 1)
            columns = slice(ink.left, ink.right + 1)
            if (before[rows, columns] != after[rows, columns]).any():
                self.unreadable.append(f"a picture lies over {ink.text!r}")


def differing(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Which pixels of two pages differ; numpy's `any` over colours alone takes ten times
    as long."""
    red, green, blue = np.moveaxis(before != after, -1, 0)
    return red | green | blue


def _left(ink: Ink) -> int:
    return ink.left


@contextmanager
def noted() -> Iterator[list[Paper]]:
    """Note the pages that are drawn meanwhile, in the order in which they are begun."""
    papers: list[Paper] = []
    with pytest.MonkeyPatch.context() as patch:
        for canvas in (Canvas, PixelCanvas):
            for name in ("paste", "write"):
                way = _noting(getattr(canvas, name), name, papers)
                patch.setattr(canvas, name, way)
        for name in ("fill", "frame"):
            way = _noting_a_change(getattr(Canvas, name), papers)
            patch.setattr(Canvas, name, way)
        yield papers


def _noting(
    way: Callable[..., Any], name: str, papers: list[Paper]
) -> Callable[..., Any]:
    """A method of a canvas that notes what it has drawn."""

    def draw(canvas: Any, content: Any, *args: Any, **options: Any) -> Any:
        paper = _paper_of(canvas, papers)
        if paper is None:
            paper = Paper(canvas)
            papers.append(paper)
        # a page is copied once, not before and after each text
        before = paper.pixels if paper.seen is None else paper.seen
        result = way(canvas, content, *args, **options)
        after = paper.pixels
        paper.seen = after
        if name == "paste":
            paper.note_picture(before, after)
        elif content:
            paper.note_text(content, before, after)
        return result

    return draw


def _noting_a_change(
    way: Callable[..., Any], papers: list[Paper]
) -> Callable[..., Any]:
    """A method of a canvas that notes that something else was drawn."""

    def draw(canvas: Any, *args: Any, **options: Any) -> None:
        way(canvas, *args, **options)
        paper = _paper_of(canvas, papers)
        if paper is not None:
            paper.seen = None

    return draw


def _paper_of(canvas: Canvas | PixelCanvas, papers: list[Paper]) -> Paper | None:
    """The notes of a page that has been begun."""
    for paper in papers:
        if paper.canvas is canvas:
            return paper
    return None
