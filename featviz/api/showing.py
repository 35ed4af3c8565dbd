"""Results in a notebook."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from PIL import Image

from featviz.errors import StoreError
from featviz.records.findings import TextTable
from featviz.report.pages import render_notebook
from featviz.text import quoted

SMALL, LARGE, PAGE = 240, 960, 1800
"""The longest side, in pixels, of a picture in a gallery, of one that stands alone, and of one with
letters on it."""
MOST = 24
MOST_ROWS = 60
MOST_BYTES = 3 * 2**20
"""What all pictures of one page may take as text."""

Pictures: TypeAlias = Iterable[tuple[Callable[[], Image.Image], str]]
"""What reads each picture, and the words below it."""


class Shown:
    """A result that shows itself in a notebook."""

    side = SMALL
    """The longest side of its pictures."""

    def _pictures(self) -> Pictures:
        return ()

    def _lines(self) -> Sequence[str]:
        """What stands below the pictures."""
        return ()

    def _table(self) -> TextTable | None:
        return None

    def _repr_html_(self) -> str:
        """The first pictures, as data URIs; a large one is made smaller, a small one is shown
        larger by a whole factor, and one that cannot be read says so."""
        figures: list[tuple[str | None, str, tuple[int, int]]] = []
        room, side = MOST_BYTES, self.side
        lines = [quoted(line) for line in self._lines()]
        for read, words in self._pictures():
            try:
                picture = read()
            except StoreError as error:
                figures.append((None, quoted(f"{words}: {error.message}"), (side, side)))
                continue
            picture = picture if picture.mode in ("L", "RGB") else picture.convert("RGB")
            picture.thumbnail((side, side), Image.Resampling.BOX)
            file = io.BytesIO()
            picture.save(file, "png")
            data = base64.b64encode(file.getvalue()).decode()
            room -= len(data)
            if room < 0 or len(figures) == MOST:
                lines.append("there are more pictures")
                break
            factor = max(1, side // (2 * max(picture.size)))
            size = picture.width * factor, picture.height * factor
            figures.append((f"data:image/png;base64,{data}", quoted(words), size))
        table = self._table()
        if table is not None and (more := len(table.rows) - MOST_ROWS) > 0:
            footer = (f"{more} more rows", *table.footer)
            table = table._replace(rows=table.rows[:MOST_ROWS], footer=footer)
        return render_notebook({"figures": figures, "lines": lines, "table": table})
