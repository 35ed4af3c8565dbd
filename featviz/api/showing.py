"""Results in a notebook."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from PIL import Image

from featviz.api.keywords import Room
from featviz.errors import FileError, StoreError
from featviz.files import Folder
from featviz.records.findings import TextTable
from featviz.report.pages import render_notebook
from featviz.rundir.image import BROKEN, format_of
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


@dataclass(frozen=True, repr=False, eq=False)
class FolderResult(Shown):
    """A result whose files lie in a folder."""

    document: Mapping[str, Any]
    folder: Path
    room: Room | None

    @property
    def out(self) -> Path | None:
        """The folder; None where it is temporary."""
        return self.folder if self.room is None else None

    def picture_at(self, relative: str) -> Image.Image:
        """A picture in the folder; no link is followed."""
        try:
            with (
                Folder(self.folder) as opened,
                opened.open(relative) as file,
                Image.open(file, formats=[format_of(relative).pillow]) as picture,
            ):
                picture.load()
                return picture
        except (FileError, *BROKEN) as error:
            raise StoreError(f"{quoted(relative)} cannot be read: {quoted(str(error))}") from error
