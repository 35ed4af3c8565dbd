"""Where the pages of a report and their pictures are."""

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
    image: ReadImage
    file: str
    """Relative to the image's folder."""
    size: tuple[int, int]
    """Width and height in pixels."""
    alt: str
    """What a reader hears who cannot see it."""
    home: str = ""
    """The page that has it in a report of one file; others show it by their script."""


class PackedPicture(NamedTuple):
    """A picture in a zip file."""

    name: str
    view: PictureView


class Links:
    """Addresses in a folder, whose pictures stay where they are; in one file, with a
    picture only on its image's page; or in a zip file, under names of our own."""

    def __init__(self, folder: Path | None = None, packed: bool = False) -> None:
        """Lay out a report.

        Args:
            folder: where the pages will be; None for one file.
            packed: whether the pages and pictures go into a zip file.
        """
        self.folder = folder
        self.inline = folder is None and not packed
        self.packed: dict[tuple[Path, str], PackedPicture] = {}
        """By the image's folder and the file in it."""
        self._relative_folders: dict[Path, str] = {}

    def page(self, id: str) -> str:
        """The address of a page: `image-004.html`, in one file `#image-004`."""
        return f"#{id}" if self.inline else f"{id}.html"

    def anchor(self, page: str, name: str) -> str:
        """The id of an element of a page: `c17`, in one file `layer-003-c17`."""
        return f"{page}-{name}" if self.inline else name

    def element(self, page: str, name: str) -> str:
        """The address of such an element: `layer-003.html#c17`, in one file
        `#layer-003-c17`."""
        return f"#{page}-{name}" if self.inline else f"{page}.html#{name}"

    def picture(self, view: PictureView) -> str:
        """The address of a picture: of a report in a folder the relative path, of one file
        the picture itself in base64, of a zip file `pictures/000123.png`, under which it
        is noted to be packed."""
        image = view.image
        # in one file pictures are text inside the page; in a folder they stay in the run
        format = format_of(view.file)
        if self.inline:
            content = base64.b64encode(image.content(view.file)).decode()
            return f"data:{format.mime};base64,{content}"
        if self.folder is not None:
            return f"{self._relative(image.path, self.folder)}/{quote(os.fsencode(view.file))}"
        # packed once, however many pages show it; numbered, since the name of an image
        # may be no text
        key = (image.path, view.file)
        if key not in self.packed:
            name = f"pictures/{len(self.packed):06d}.{format.name}"
            self.packed[key] = PackedPicture(name, view)
        return self.packed[key].name

    def _relative(self, image_folder: Path, folder: Path) -> str:
        if image_folder not in self._relative_folders:
            # fsencode, since a name need not be text: each byte is quoted by itself
            path = Path(os.path.relpath(image_folder, folder)).as_posix()
            self._relative_folders[image_folder] = quote(os.fsencode(path))
        return self._relative_folders[image_folder]
