"""The addresses of a report's pages and pictures."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from featviz.rundir.image import ReadImage, format_of


@dataclass(frozen=True, slots=True)
class PictureView:
    """A picture on a page."""

    id: str
    """The id of the picture in HTML."""
    image: ReadImage
    """The image that the picture belongs to."""
    file: str
    """The path of the picture, relative to the image's folder."""
    size: tuple[int, int]
    """Width and height in pixels."""
    alt: str
    """The text for a reader who cannot see the picture."""
    home: str = ""
    """The id of the image's page; empty where the report has only one page. If all pages
    are in one file, only this page contains the picture, and a script shows it on the
    other pages."""


class PackedPicture(NamedTuple):
    """A picture in a zip file."""

    name: str
    view: PictureView


class Links:
    """The addresses in a report, which has one of three forms. The pages in a folder show
    the pictures of the run where they are. In a report in one file, the page of an image
    contains its pictures. In a zip file, pictures are packed under new names."""

    def __init__(self, folder: Path | None = None, packed: bool = False) -> None:
        """Choose the form of the report: one file by default.

        Args:
            folder: the folder that the pages will be in; None for one file or a zip file.
            packed: whether pages and pictures go into a zip file.
        """
        self.folder = folder
        self.inline = folder is None and not packed
        self.packed: dict[tuple[Path, str], PackedPicture] = {}
        """The pictures for the zip file, by the image's folder and the file in it. The
        method `picture` adds them."""
        self._relative_folders: dict[Path, str] = {}

    def page(self, id: str) -> str:
        """The address of a page: `image-004.html`, in one file `#image-004`."""
        return f"#{id}" if self.inline else f"{id}.html"

    def anchor(self, page: str, name: str) -> str:
        """The id of an element of a page: `c17`, in one file `layer-003-c17`."""
        return f"{page}-{name}" if self.inline else name

    def element(self, page: str, name: str) -> str:
        """The address of an element of a page: `layer-003.html#c17`, in one file
        `#layer-003-c17`."""
        return f"#{page}-{name}" if self.inline else f"{page}.html#{name}"

    def picture(self, view: PictureView) -> str:
        """The address of a picture: in a folder, its relative path; in one file, a data
        URI; in a zip file, `pictures/000123.png`, and the picture is added to `packed`."""
        image = view.image
        format = format_of(view.file)
        if self.inline:
            content = base64.b64encode(image.content(view.file)).decode()
            return f"data:{format.mime};base64,{content}"
        if self.folder is not None:
            return f"{self._relative(image.path, self.folder)}/{quote(os.fsencode(view.file))}"
        # A picture is packed once, even if several pages show it. Its name is a number,
        # since the name of an image need not be valid text.
        key = (image.path, view.file)
        if key not in self.packed:
            name = f"pictures/{len(self.packed):06d}.{format.name}"
            self.packed[key] = PackedPicture(name, view)
        return self.packed[key].name

    def _relative(self, image_folder: Path, folder: Path) -> str:
        """The address of an image's folder, from the folder of the report."""
        if image_folder not in self._relative_folders:
            # the bytes are quoted, since names need not be valid text
            path = Path(os.path.relpath(image_folder, folder)).as_posix()
            self._relative_folders[image_folder] = quote(os.fsencode(path))
        return self._relative_folders[image_folder]
