"""Results in a notebook."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from PIL import Image

from featviz.api.keywords import Room
from featviz.errors import FileError, StoreError
from featviz.files import Folder
from featviz.records import TextTable
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


Figure: TypeAlias = tuple[str | None, str, tuple[int, int]]
"""A picture as a data URI, or None where there is none; the words below it; and width and height,
in pixels, at which it is shown."""


def figure(read: Callable[[], Image.Image], words: str, side: int = SMALL) -> Figure:
    """A picture as text, made smaller where a side is longer than `side`, and shown larger by a
    whole factor where it is small; one that cannot be read says so."""
    try:
        picture = read()
    except StoreError as error:
        return None, f"{words}: {error.message}", (side, side)
    picture = picture if picture.mode in ("L", "RGB") else picture.convert("RGB")
    picture.thumbnail((side, side), Image.Resampling.BOX)
    file = io.BytesIO()
    picture.save(file, "png")
    data = base64.b64encode(file.getvalue()).decode()
    factor = max(1, side // (2 * max(picture.size)))
    shown = (picture.width * factor, picture.height * factor)
    return f"data:image/png;base64,{data}", words, shown


def render(
    figures: Sequence[Figure] = (),
    lines: Sequence[str] = (),
    table: TextTable | None = None,
) -> str:
    """HTML for a notebook; what would make it too large is left out, and counted."""
    kept, room = [], MOST_BYTES
    for address, words, size in figures:
        room -= len(address or "")
        if room >= 0:
            kept.append((address, quoted(words), size))
    below = [quoted(line) for line in lines if line]
    if left := len(figures) - len(kept):
        below.append(f"{left} more pictures")
    if table is not None and (more := len(table.rows) - MOST_ROWS) > 0:
        footer = (f"{more} more rows", *table.footer)
        table = table._replace(rows=table.rows[:MOST_ROWS], footer=footer)
    return render_notebook({"figures": kept, "lines": below, "table": table})


def gallery(
    pictures: Sequence[tuple[Callable[[], Image.Image], str]], where: str, *lines: str
) -> str:
    """The first pictures of a result, each with its words, and how many more there are."""
    more = [f"{len(pictures) - MOST} more in {where}"] if len(pictures) > MOST else []
    return render([figure(*one) for one in pictures[:MOST]], [*lines, *more])


@dataclass(frozen=True, repr=False, eq=False)
class FolderResult:
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
