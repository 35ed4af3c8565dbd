"""Where the pages of a report and their pictures are: in a folder, or all in one file."""

from __future__ import annotations

import base64
import os
from functools import lru_cache
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from featviz.report.views import PictureView
from featviz.rundir.image import format_of


class Links(Protocol):
    """Where pages and pictures are."""

    inline: bool
    """Whether all pages are one file, in which a picture stands only on its image's page."""

    def page(self, id: str) -> str:
        """The address of a page."""

    def anchor(self, page: str, name: str) -> str:
        """The id of a place on a page."""

    def place(self, page: str, name: str) -> str:
        """Its address."""

    def picture(self, view: PictureView) -> str:
        """The address of a picture."""


class FolderLinks:
    """Pages are files in a folder, and pictures stay where they are."""

    inline = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ways: dict[tuple[Path, str], str] = {}

    def page(self, id: str) -> str:
        """`image-004.html`."""
        return f"{id}.html"

    def anchor(self, page: str, name: str) -> str:
        """`c17`."""
        return name

    def place(self, page: str, name: str) -> str:
        """`layer-003.html#c17`."""
        return f"{self.page(page)}#{name}"

    def picture(self, view: PictureView) -> str:
        """Relative to the folder, quoted."""
        home = (view.image.root, view.image.folder)
        if home not in self._ways:
            way = Path(os.path.relpath(view.image.path, self.folder)).as_posix()
            self._ways[home] = quote(os.fsencode(way))
        return f"{self._ways[home]}/{_quoted(view.file)}"


@lru_cache(maxsize=4096)
def _quoted(file: str) -> str:
    """The name of a file in an image's folder, which most images of a run have too."""
    return quote(os.fsencode(file))


class InlineLinks:
    """Everything is one file."""

    inline = True

    def page(self, id: str) -> str:
        """`#image-004`."""
        return f"#{id}"

    def anchor(self, page: str, name: str) -> str:
        """`layer-003-c17`."""
        return f"{page}-{name}"

    def place(self, page: str, name: str) -> str:
        """`#layer-003-c17`."""
        return f"#{page}-{name}"

    def picture(self, view: PictureView) -> str:
        """The picture itself, in base64."""
        kind = format_of(view.file).mime
        return f"data:{kind};base64,{base64.b64encode(view.image.content(view.file)).decode()}"
