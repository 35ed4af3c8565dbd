"""What the pages of a report show: a run's records, sorted by image and by layer; and where it is.

Statistics are in none of these: a page of an image reads its own, and no report holds all.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

from featviz.report import words
from featviz.rundir import INPUT_FILE
from featviz.rundir.image import ReadImage, format_of
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import Capture

_WIDE = 3.0  # a picture wider than this many times its height gets a row of its own
_SMALL, _MIDDLE = 8, 16
"""Tiles side by side up to which a picture takes a third or two thirds of a page."""
_IN_SCRIPT, MOST_IMAGES = 16, 8
"""Grids whose numbers stand in one script, and of how many images they are at most. A layer's page
loads twice what it shows then, an image's page up to eight times: it has fewer grids."""


@dataclass(frozen=True, slots=True)
class PictureView:
    """A picture on a page."""

    id: str
    image: ReadImage
    file: str  # relative to the image's folder
    size: tuple[int, int]
    alt: str
    home: str = ""
    """The page that has it in a report of one file; others show it by their script."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A grid on a page."""

    picture: PictureView
    input: PictureView
    row: Capture
    script: str
    other: bool = False  # whether it belongs to the run that this one is compared with

    @classmethod
    def of(
        cls, id: str, row: Capture, input: PictureView, script: str, other: bool = False
    ) -> Figure:
        """The grid of a tensor of the image of an input."""
        alt = f"{words.tiles(row)} of {row.label}, {row.place.stem}, of {input.image.name}"
        size = (row.plan.width, row.plan.height)
        picture = PictureView(id, input.image, row.file, size, alt, input.home)
        return cls(picture, input, row, script, other)

    @property
    def name(self) -> str:
        """Its image."""
        return self.picture.image.name

    @property
    def wide(self) -> str:
        """How much room its tiles need to be seen: `small`, `middle`, or a row of its own."""
        (width, height), columns = self.picture.size, self.row.plan.columns
        if width > _WIDE * height or columns > _MIDDLE:
            return "whole"
        return "small" if columns <= _SMALL else "middle"


@dataclass(frozen=True, slots=True)
class Group:
    """Figures of one tensor of one layer, of several images or of two runs."""

    id: str
    layer: str
    type: str
    stem: str  # `output`, `output.call1`
    page: str
    figures: tuple[Figure, ...]

    @property
    def pairs(self) -> Iterator[tuple[Figure, ...]]:
        """The figures of each image: one, or those of two runs."""
        return (tuple(own) for _, own in groupby(self.figures, key=lambda figure: figure.name))

    @property
    def aligned(self) -> bool:
        """Whether each tile is at the same place in all figures."""
        first, *rest = ((f.row.plan, f.row.drawn) for f in self.figures)
        return all(other == first for other in rest)


@dataclass(frozen=True)
class ReportPage:
    """One image with all its layers, or one layer of all images."""

    id: str
    name: str
    groups: tuple[Group, ...]
    type: str = ""
    inputs: Mapping[bool, PictureView] = field(default_factory=dict)
    """What the model saw of an image in this run (False), and in the other (True), if it has it."""
    silent: Sequence[tuple[str, str]] = ()
    """Of an image the layers that it has no picture of, and why."""

    @property
    def image(self) -> ReadImage:
        """The image in this run."""
        return self.inputs[False].image

    @property
    def numbers(self) -> tuple[str, str, int]:
        """Of a layer: its maps, the mean share of zeros, and how many values are not finite."""
        maps = " + ".join(dict.fromkeys(str(g.figures[0].row.maps) for g in self.groups))
        rows = [figure.row for figure in figures_of(self.groups) if not figure.other]
        zeros = words.percent(sum(row.zero_fraction for row in rows) / len(rows))
        return maps, zeros, sum(row.nonfinite for row in rows)


def arrange(
    run: ReadRun, other: ReadRun | None = None
) -> tuple[Sequence[ReportPage], Sequence[ReportPage]]:
    """Sort a run, and one to compare it with, into pages of images and of layers: these in the
    model's order; the numbers of some images and layers that follow one another in one script."""
    rows = (row for image in run.images.values() for row in image.captures.values())
    layers = dict.fromkeys((row.index, row.layer) for row in rows)
    numbers = {layer: n for n, layer in enumerate(sorted(layers, key=lambda layer: layer[0]))}
    together = max(1, min(MOST_IMAGES, len(run.images)))
    pages = []
    by_page: dict[str, dict[str, list[Group]]] = {f"layer-{n:03d}": {} for n in numbers.values()}
    for n, image in enumerate(run.images.values()):
        id, double = f"image-{n:03d}", other and other.images.get(image.name)
        inputs, doubles, groups = {}, {}, list[Group]()
        for side, own in ((False, image), (True, double)):
            if own:
                about = INPUT_FILE, own.input_size, f"What the model saw of {own.name}", id
                inputs[side] = PictureView(f"{'po'[side]}{n}-i", own, *about)
        for m, row in enumerate(double.captures.values() if double else ()):
            doubles[row.layer, row.place.stem] = f"o{n}-{m}", row
        for m, row in enumerate(image.captures.values()):
            number = numbers[row.index, row.layer]
            script = f"grids-{n // together:03d}-{number // (_IN_SCRIPT // together):03d}.js"
            page, stem = f"layer-{number:03d}", row.place.stem
            figures = [Figure.of(f"p{n}-{m}", row, inputs[False], script)]
            if pair := doubles.get((row.layer, stem)):
                figures.append(Figure.of(*pair, inputs[True], script, True))
            groups.append(Group(f"{id}-{m}", row.label, row.type, stem, page, tuple(figures)))
            by_page[page].setdefault(stem, []).append(groups[-1])
        manifest = image.manifest
        silent = [(skip.layer or skip.type, skip.reason) for skip in manifest.skipped]
        silent += [(name, "never ran") for name in manifest.never_ran]
        pages.append(ReportPage(id, image.name, tuple(groups), inputs=inputs, silent=silent))
    layer_pages = []
    for id, tensors in by_page.items():
        each = enumerate(tensors.values())
        merged = [replace(s[0], id=f"{id}-{n}", figures=tuple(figures_of(s))) for n, s in each]
        layer_pages.append(ReportPage(id, merged[0].layer, tuple(merged), merged[0].type))
    return pages, layer_pages


def figures_of(groups: Iterable[Group]) -> Iterator[Figure]:
    """All figures of some groups."""
    return (figure for group in groups for figure in group.figures)


class Links:
    """Where pages and pictures are: in a folder, whose pictures stay where they are; in one file,
    with a picture only on its image's page; in a zip file, under names of our own."""

    def __init__(self, folder: Path | None = None, packed: bool = False) -> None:
        self.folder = folder
        self.inline = folder is None and not packed
        self.packed: dict[tuple[Path, str], tuple[str, PictureView]] = {}
        """Pictures, and their names in the zip file, by folder and file."""
        self._folders: dict[Path, str] = {}

    def page(self, id: str) -> str:
        """The address of a page: `image-004.html`, in one file `#image-004`."""
        return f"#{id}" if self.inline else f"{id}.html"

    def anchor(self, page: str, name: str) -> str:
        """The id of a place on a page: `c17`, in one file `layer-003-c17`."""
        return f"{page}-{name}" if self.inline else name

    def place(self, page: str, name: str) -> str:
        """The address of such a place: `layer-003.html#c17`, in one file `#layer-003-c17`."""
        return f"#{page}-{name}" if self.inline else f"{page}.html#{name}"

    def picture(self, view: PictureView) -> str:
        """Relative to the folder; the picture itself, in base64; or `pictures/000123.png`."""
        image, kind = view.image, format_of(view.file)
        if self.inline:
            content = base64.b64encode(image.content(view.file)).decode()
            return f"data:{kind.mime};base64,{content}"
        if self.folder is not None:
            if image.path not in self._folders:
                path = Path(os.path.relpath(image.path, self.folder)).as_posix()
                self._folders[image.path] = quote(os.fsencode(path))
            return f"{self._folders[image.path]}/{quote(os.fsencode(view.file))}"
        name = f"pictures/{len(self.packed):06d}.{kind.name}"
        return self.packed.setdefault((image.path, view.file), (name, view))[0]
