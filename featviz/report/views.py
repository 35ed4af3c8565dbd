"""What the pages of a report show: a run's records, sorted by image and by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from featviz.files import real
from featviz.report import words
from featviz.rundir import INPUT_FILE
from featviz.rundir.image import DrawnGrid, ReadImage
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import Audit, Manifest

_WIDE = 3.0
"""A picture wider than this many times its height gets a row of its own."""


@dataclass(frozen=True)
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

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.image.path / self.file


@dataclass(frozen=True)
class Figure:
    """A grid on a page."""

    picture: PictureView
    input: PictureView
    grid: DrawnGrid
    image: str
    facts: words.Facts
    dark: list[int]
    """Channels that are all zero."""
    other: bool
    """Whether it belongs to the run that this one is compared with."""

    @property
    def brief(self) -> str:
        """Range, zeros and non-finite values, on one line."""
        row = self.grid.capture
        parts = [f"range {words.number(row.min)} to {words.number(row.max)}"]
        parts.append(f"zeros {words.percent(row.zero_fraction)}")
        parts += [f"{row.nonfinite:,} NaN or infinite"] if row.nonfinite else []
        return " · ".join(parts)

    @property
    def wide(self) -> bool:
        """Whether it needs a row of its own."""
        width, height = self.picture.size
        return width > _WIDE * height


@dataclass(frozen=True)
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

    @cached_property
    def dark(self) -> list[int]:
        """Channels that are all zero in every figure of this run."""
        return sorted(set.intersection(*(set(f.dark) for f in self.figures if not f.other)))

    @property
    def aligned(self) -> bool:
        """Whether each tile is at the same place in all figures."""
        first, *rest = ((f.grid.capture.plan, f.grid.capture.drawn) for f in self.figures)
        return all(other == first for other in rest)


@dataclass(frozen=True)
class ImagePage:
    """One image: all its layers."""

    id: str
    name: str
    input: PictureView
    other_input: PictureView | None
    """The input in the run that this one is compared with; None where that run lacks the image."""
    facts: words.Facts
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
        return " + ".join(dict.fromkeys(str(g.figures[0].grid.capture.maps) for g in self.groups))

    @property
    def zeros(self) -> str:
        """Share of zeros, mean over its pictures."""
        figures = [f for g in self.groups for f in g.figures if not f.other]
        zeros = sum(figure.grid.capture.zero_fraction for figure in figures)
        return words.percent(zeros / len(figures))

    @property
    def dark(self) -> int:
        """Channels that are all zero in every image, all tensors together."""
        return sum(len(group.dark) for group in self.groups)

    @property
    def nonfinite(self) -> int:
        """Values that are NaN or infinite."""
        figures = (f for g in self.groups for f in g.figures if not f.other)
        return sum(f.grid.capture.nonfinite for f in figures)


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
    audit: Audit | None = None

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


def arrange(run: ReadRun, other: ReadRun | None = None, audit: Audit | None = None) -> ReportViews:
    """Sort a run, one to compare it with, and an audit into pages."""
    layer_ids = _layer_ids(run)
    figures = [
        {key: [f] for key, f in _figures(run, image, n, "p")}
        for n, image in enumerate(run.images.values())
    ]
    if other is not None:
        _add_other(figures, run, other)
    images = tuple(
        _image_page(n, image, of_image, layer_ids)
        for n, (image, of_image) in enumerate(zip(run.images.values(), figures, strict=True))
    )
    layers = tuple(_layer_pages(figures, layer_ids))
    return ReportViews(run, other, images, layers, _silent(run), audit)


def _key(grid: DrawnGrid) -> Key:
    return grid.capture.index, grid.capture.layer, grid.capture.place.stem


def _layer_ids(run: ReadRun) -> dict[tuple[int, str], str]:
    """Pages of the layers, in the model's order."""
    grids = (grid for image in run.images.values() for grid in image.grids)
    layers = {_key(grid)[:2]: None for grid in grids}
    order = sorted(layers, key=lambda layer: layer[0])
    return {layer: f"layer-{n:03d}" for n, layer in enumerate(order)}


def _figures(
    run: ReadRun, image: ReadImage, number: int, prefix: str
) -> Iterator[tuple[Key, Figure]]:
    home = f"image-{number:03d}"
    shown = _input(image, number, prefix)
    for n, grid in enumerate(image.grids):
        row = grid.capture
        alt = f"{words.tiles(row)} of {row.label}, {row.place.stem}, of {image.name}"
        size = (row.plan.width, row.plan.height)
        picture = PictureView(f"{prefix}{number}-{n}", image, row.file, size, alt, home)
        dark = words.all_zero(grid.stats)
        facts = words.grid_facts(row, dark, run.record.get("options") or {})
        yield _key(grid), Figure(picture, shown, grid, image.name, facts, dark, prefix != "p")


def _input(image: ReadImage, number: int, prefix: str) -> PictureView:
    alt = f"What the model saw of {image.name}"
    id, home = f"{prefix}{number}-i", f"image-{number:03d}"
    return PictureView(id, image, INPUT_FILE, image.input_size, alt, home)


def _add_other(figures: Sequence[dict[Key, list[Figure]]], run: ReadRun, other: ReadRun) -> None:
    """Put the other run's figure of the same tensor of the same image behind this run's."""
    for n, (name, pairs) in enumerate(zip(run.images, figures, strict=True)):
        if name not in other.images:
            continue
        others = {key[1:]: figure for key, figure in _figures(other, other.images[name], n, "o")}
        for key, pair in pairs.items():
            pair += [others[key[1:]]] if key[1:] in others else []


def _group(id: str, key: Key, figures: Sequence[Figure], page: str) -> Group:
    first = figures[0].grid.capture
    return Group(id, first.label, first.type, key[2], page, tuple(figures))


def _image_page(
    number: int,
    image: ReadImage,
    figures: Mapping[Key, list[Figure]],
    layer_ids: Mapping[tuple[int, str], str],
) -> ImagePage:
    id = f"image-{number:03d}"
    groups = tuple(
        _group(f"{id}-{n}", key, pair, layer_ids[key[:2]])
        for n, (key, pair) in enumerate(figures.items())
    )
    inputs = {f.other: f.input for group in groups for f in group.figures}
    return ImagePage(
        id,
        image.name,
        _input(image, number, "p"),
        inputs.get(True),
        words.image_facts(image.manifest),
        groups,
        tuple(_without_picture(image.manifest)),
    )


def _layer_pages(
    figures: Sequence[Mapping[Key, list[Figure]]], layer_ids: Mapping[tuple[int, str], str]
) -> Iterator[LayerPage]:
    sorted_in: dict[str, dict[Key, list[Figure]]] = {id: {} for id in layer_ids.values()}
    for of_image in figures:
        for key, pair in of_image.items():
            sorted_in[layer_ids[key[:2]]].setdefault(key, []).extend(pair)
    for id, tensors in sorted_in.items():
        groups = tuple(
            _group(f"{id}-{n}", key, pairs, id) for n, (key, pairs) in enumerate(tensors.items())
        )
        yield LayerPage(id, groups[0].layer, groups[0].type, groups)


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
