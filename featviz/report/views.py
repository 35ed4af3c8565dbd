"""What the pages of a report show: a run's records, sorted by image and by layer.

Statistics are in none of these: a page of an image reads its own (`featviz.report.data`), so that
the memory of a report does not grow with the channels of its run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from featviz.files import real
from featviz.records import Comparison
from featviz.report import words
from featviz.rundir import INPUT_FILE
from featviz.rundir.image import ReadImage
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import CaptureRow, Class, Manifest

_WIDE = 3.0
"""A picture wider than this many times its height gets a row of its own."""
_SMALL, _MIDDLE = 8, 16
"""Tiles side by side of which a picture may be small, or half a page wide: they stay 38 pixels
wide."""
_IN_SCRIPT, _MOST_IMAGES = 16, 8
"""Grids whose numbers stand in one script, and of how many images they are at most. A layer's page
loads twice what it shows then, an image's page up to eight times: it has fewer grids."""


@dataclass(frozen=True, slots=True)
class PictureView:
    """A picture on a page."""

    id: str
    """Unique in the report."""
    image: ReadImage
    file: str
    """Relative to the image's folder."""
    size: tuple[int, int]
    """Width and height in pixels."""
    alt: str
    home: str
    """The page of its image."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A grid on a page."""

    picture: PictureView
    input: PictureView
    row: CaptureRow
    image: str
    script: str
    """The file that holds its numbers."""
    other: bool
    """Whether it belongs to the run that this one is compared with."""
    titled: PictureView | None = None
    """The figure of `--figure`, with a title, the input and a colour bar."""

    @property
    def brief(self) -> str:
        """Range, zeros and non-finite values, on one line."""
        row = self.row
        parts = [f"range {words.number(row.min)} to {words.number(row.max)}"]
        parts.append(f"zeros {words.percent(row.zero_fraction)}")
        parts += [f"{row.nonfinite:,} NaN or infinite"] if row.nonfinite else []
        parts += [f"slices {side}"] if (side := words.slices(row)) else []
        return " · ".join(parts)

    @property
    def wide(self) -> str:
        """How much room its tiles need to be seen: `small`, `middle`, or a row of its own."""
        width, height = self.picture.size
        columns = self.row.plan.columns
        if width > _WIDE * height or columns > _MIDDLE:
            return "whole"
        return "small" if columns <= _SMALL else "middle"


@dataclass(frozen=True, slots=True)
class Group:
    """Figures of one tensor of one layer, of several images or of two runs."""

    id: str
    layer: str
    type: str
    stem: str
    """`output`, `output.call1`."""
    page: str
    """The layer's page."""
    figures: tuple[Figure, ...]

    @property
    def pairs(self) -> Iterator[tuple[Figure, ...]]:
        """The figures of each image: one, or those of two runs."""
        return (tuple(own) for _, own in groupby(self.figures, key=lambda figure: figure.image))

    @property
    def aligned(self) -> bool:
        """Whether each tile is at the same place in all figures."""
        first, *rest = ((f.row.plan, f.row.drawn) for f in self.figures)
        return all(other == first for other in rest)


@dataclass(frozen=True, slots=True)
class ImagePage:
    """One image: all its layers."""

    id: str
    name: str
    images: Mapping[bool, ReadImage]
    """The image in this run, under False, and in the run that this one is compared with."""
    input: PictureView
    other_input: PictureView | None
    """The input in the run that this one is compared with; None where that run lacks the image."""
    facts: words.Facts
    guesses: tuple[Class, ...]
    """The classes that the model thinks most likely."""
    groups: tuple[Group, ...]
    silent: tuple[tuple[str, str], ...]
    """Layers without a picture, and why."""


@dataclass(frozen=True)
class LayerPage:
    """One layer: all images."""

    id: str
    name: str
    type: str
    groups: tuple[Group, ...]

    @property
    def maps(self) -> str:
        """How many maps it has."""
        return " + ".join(dict.fromkeys(str(g.figures[0].row.maps) for g in self.groups))

    @property
    def zeros(self) -> str:
        """Share of zeros, mean over its pictures."""
        figures = [f for g in self.groups for f in g.figures if not f.other]
        zeros = sum(figure.row.zero_fraction for figure in figures)
        return words.percent(zeros / len(figures))

    @property
    def nonfinite(self) -> int:
        """Values that are NaN or infinite."""
        figures = (f for g in self.groups for f in g.figures if not f.other)
        return sum(f.row.nonfinite for f in figures)


@dataclass(frozen=True)
class ReportForm:
    """How much of a run a report shows; all of it, but in one file that must stay small."""

    bytes: float = 0.0
    """Those of all its pictures, about."""
    figures: bool = True
    """Whether it shows the figures of `--figure`."""
    smaller: bool = False
    """Whether large maps have fewer pixels."""
    tiles: int | None = None
    """The most tiles that a layer shows; None for all."""


@dataclass(frozen=True)
class Silence:
    """A layer that gave no picture."""

    layer: str
    reason: str
    images: int


@dataclass(frozen=True)
class ReportViews:
    """All pages."""

    run: ReadRun
    other: ReadRun | None
    images: tuple[ImagePage, ...]
    layers: tuple[LayerPage, ...]
    silent: tuple[Silence, ...]
    together: int
    """Images, one after another, whose numbers stand in the same scripts."""
    audit: Any = None
    """The `audited.AuditViews` of its audit, if there is one."""
    kernels: Mapping[str, Any] = field(default_factory=dict)
    """`kernels.KernelView`s by the names of their layers."""
    exemplars: Mapping[tuple[str, str], Sequence[Any]] = field(default_factory=dict)
    """`excited.ExemplarView`s by the page of a layer and the stem of a tensor."""
    form: ReportForm = field(default_factory=ReportForm)
    """How much of the run is shown, where one file must stay small."""
    max_size: int = 0
    """Bytes that this file may have."""
    verdict: Comparison | None = None
    """What a comparison with the other run found."""
    not_compared: str = ""
    """Why the numbers of the other run could not be compared."""

    @property
    def labels(self) -> tuple[str, str | None]:
        """What the runs are called."""
        name = real(self.run.root).name
        if self.other is None:
            return name, None
        other = real(self.other.root).name
        return (name, other) if name != other else (f"{name} (this)", f"{other} (other)")


Key = tuple[int, str, str]
"""What identifies a tensor: the position of its layer, its name, and the stem of its file."""


class _Places:
    """Where the layers of a run are shown, and which scripts hold their numbers."""

    def __init__(self, run: ReadRun) -> None:
        rows = (row for image in run.images.values() for row in image.captures.values())
        layers = dict.fromkeys(_key(row)[:2] for row in rows)
        order = sorted(layers, key=lambda layer: layer[0])
        self.numbers = {layer: n for n, layer in enumerate(order)}
        self.images = max(1, min(_MOST_IMAGES, len(run.images)))
        """Images whose numbers share their scripts."""

    def page(self, key: Key) -> str:
        """`layer-003`, in the model's order."""
        return f"layer-{self.numbers[key[:2]]:03d}"

    def script(self, image: int, key: Key) -> str:
        """`grids-000-001.js`: of some images, and some layers, that follow one another."""
        layer = self.numbers[key[:2]] // (_IN_SCRIPT // self.images)
        return f"grids-{image // self.images:03d}-{layer:03d}.js"


def arrange(run: ReadRun, other: ReadRun | None = None) -> ReportViews:
    """Sort a run, and one to compare it with, into pages."""
    places = _Places(run)
    others = {} if other is None else other.images
    images = tuple(
        _image_page(n, image, others.get(name), places)
        for n, (name, image) in enumerate(run.images.items())
    )
    layers = tuple(_layer_pages(images))
    return ReportViews(run, other, images, layers, _silent(run), places.images)


def _key(row: CaptureRow) -> Key:
    return row.index, row.layer, row.place.stem


def _image_page(number: int, image: ReadImage, other: ReadImage | None, at: _Places) -> ImagePage:
    id = f"image-{number:03d}"
    shown = _Shown(number, image, "p", False)
    beside = None if other is None else _Shown(number, other, "o", True)
    groups = []
    for n, (key, row) in enumerate(shown.rows.items()):
        script = at.script(number, key)
        figures = [shown.figure(key, script, at.page(key))]
        if beside is not None and (same := beside.same.get(key[1:])) is not None:
            figures.append(beside.figure(same, script, at.page(key)))
        groups.append(Group(f"{id}-{n}", row.label, row.type, key[2], at.page(key), tuple(figures)))
    return ImagePage(
        id,
        image.name,
        {one.other: one.image for one in (shown, beside) if one is not None},
        shown.input,
        None if beside is None else beside.input,
        words.image_facts(image.manifest),
        tuple(image.manifest.prediction),
        tuple(groups),
        tuple(_without_picture(image.manifest)),
    )


class _Shown:
    """An image of one of the two runs."""

    def __init__(self, number: int, image: ReadImage, prefix: str, other: bool) -> None:
        self.image, self.other, self.id = image, other, f"{prefix}{number}"
        self.home = f"image-{number:03d}"
        alt = f"What the model saw of {image.name}"
        size = image.input_size
        self.input = PictureView(f"{self.id}-i", image, INPUT_FILE, size, alt, self.home)
        self.rows = {_key(row): row for row in image.captures.values()}
        self.same = {key[1:]: key for key in self.rows}
        """Keys, by what does not depend on the position of a layer in its model."""
        self._numbers = {key: n for n, key in enumerate(self.rows)}

    def figure(self, key: Key, script: str, page: str) -> Figure:
        """The grid of a tensor, and its figure, which the page of its layer shows."""
        row, name = self.rows[key], self.image.name
        alt = f"{words.tiles(row)} of {row.label}, {row.place.stem}, of {name}"
        size = (row.plan.width, row.plan.height)
        id = f"{self.id}-{self._numbers[key]}"
        picture = PictureView(id, self.image, row.file, size, alt, self.home)
        titled = None
        if row.figure is not None:
            alt = f"Figure of {row.label}, {row.place.stem}, of {name}"
            pixels = self.image.pixels[row.figure]
            titled = PictureView(f"{id}-f", self.image, row.figure, pixels, alt, page)
        return Figure(picture, self.input, row, name, script, self.other, titled)


def _layer_pages(images: Sequence[ImagePage]) -> Iterator[LayerPage]:
    by_page: dict[str, dict[str, list[Group]]] = {}
    for group in (group for image in images for group in image.groups):
        by_page.setdefault(group.page, {}).setdefault(group.stem, []).append(group)
    for id, tensors in sorted(by_page.items(), key=lambda item: int(item[0].split("-")[1])):
        groups = []
        for n, same in enumerate(tensors.values()):
            figures = tuple(figure for group in same for figure in group.figures)
            groups.append(replace(same[0], id=f"{id}-{n}", figures=figures))
        yield LayerPage(id, groups[0].layer, groups[0].type, tuple(groups))


def _without_picture(manifest: Manifest) -> list[tuple[str, str]]:
    """Layers that an image has no picture of, and why."""
    skipped = [(skip.layer or skip.type, skip.reason) for skip in manifest.skipped]
    return skipped + [(name, "never ran") for name in manifest.never_ran]


def _silent(run: ReadRun) -> tuple[Silence, ...]:
    """Layers that were skipped or never ran, over all images."""
    counts: Counter[tuple[str, str]] = Counter()
    for image in run.images.values():
        counts.update(dict.fromkeys(_without_picture(image.manifest), 1))
    return tuple(Silence(layer, reason, n) for (layer, reason), n in counts.items())
