"""What the pages of a report show: a run's records, sorted by image and by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import featviz.report.words as words
from featviz.report.reading import Grid, Image, Run
from featviz.report.words import Facts

_WIDE = 3.0
"""Pictures wider than so many heights get a row of their own."""


@dataclass(frozen=True)
class Picture:
    """A picture on a page."""

    id: str
    """Unique in the report."""
    path: Path
    size: tuple[int, int]
    """Width and height in pixels."""
    alt: str
    home: str
    """The page of its image."""


@dataclass(frozen=True)
class Figure:
    """A grid on a page."""

    picture: Picture
    input: Picture
    grid: Grid
    image: str
    facts: Facts
    dark: list[int]
    """Channels that are all zero."""
    other: bool
    """Whether it is of the run that is compared with."""

    @property
    def brief(self) -> str:
        """Some of the facts."""
        own = self.grid.capture
        parts = [f"range {words.number(own.min)} to {words.number(own.max)}"]
        parts.append(f"zeros {words.percent(own.zero_fraction)}")
        parts += [f"{own.nonfinite:,} NaN or infinite"] if own.nonfinite else []
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
        own = [set(f.dark) for f in self.figures if not f.other]
        return sorted(set.intersection(*own))

    @property
    def aligned(self) -> bool:
        """Whether each tile is at the same place in all figures."""
        first, *rest = ((f.grid.plan, f.grid.channels) for f in self.figures)
        return all(other == first for other in rest)


@dataclass(frozen=True)
class ImagePage:
    """One image: all its layers."""

    id: str
    name: str
    input: Picture
    other_input: Picture | None
    """Of the run that is compared with, where it has the image."""
    facts: Facts
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
        own = [f.grid.capture.zero_fraction for g in self.groups for f in g.figures if not f.other]
        return words.percent(sum(own) / len(own))

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
class Views:
    """All pages."""

    run: Run
    other: Run | None
    images: tuple[ImagePage, ...]
    layers: tuple[LayerPage, ...]
    silent: tuple[Silence, ...]

    @property
    def labels(self) -> tuple[str, str | None]:
        """What the runs are called."""
        name = self.run.root.resolve().name
        if self.other is None:
            return name, None
        other = self.other.root.resolve().name
        return (name, other) if name != other else (f"{name} (this)", f"{other} (other)")


Key = tuple[int, str, str]
"""Of a tensor: the layer's position, its name, and the file's stem."""


def arrange(run: Run, other: Run | None = None) -> Views:
    """Sort a run, and one to compare it with, into pages."""
    layer_ids = _layer_ids(run)
    figures = [
        {key: [f] for key, f in _figures(image, n, "p")} for n, image in enumerate(run.images)
    ]
    if other is not None:
        _add_other(figures, run, other)
    images = tuple(
        _image_page(n, image, own, layer_ids)
        for n, (image, own) in enumerate(zip(run.images, figures, strict=True))
    )
    return Views(run, other, images, tuple(_layer_pages(figures, layer_ids)), _silent(run))


def _key(grid: Grid) -> Key:
    return grid.capture.index, grid.capture.layer, grid.site.stem


def _layer_ids(run: Run) -> dict[tuple[int, str], str]:
    """Pages of the layers, in the model's order."""
    found = {_key(grid)[:2]: None for image in run.images for grid in image.grids}
    order = sorted(found, key=lambda layer: layer[0])
    return {layer: f"layer-{n:03d}" for n, layer in enumerate(order)}


def _figures(image: Image, number: int, prefix: str) -> Iterator[tuple[Key, Figure]]:
    home = f"image-{number:03d}"
    shown = _input(image, number, prefix)
    for n, grid in enumerate(image.grids):
        alt = (
            f"{words.counted(len(grid.channels), 'feature map')} of {grid.site.layer.label}, "
            f"{grid.site.stem}, of {image.name}"
        )
        size = (grid.plan.width, grid.plan.height)
        picture = Picture(f"{prefix}{number}-{n}", grid.path, size, alt, home)
        dark = words.all_zero(grid.stats)
        facts = words.grid_facts(grid, dark)
        yield _key(grid), Figure(picture, shown, grid, image.name, facts, dark, prefix != "p")


def _input(image: Image, number: int, prefix: str) -> Picture:
    alt = f"What the model saw of {image.name}"
    return Picture(f"{prefix}{number}-i", image.input, image.input_size, alt, f"image-{number:03d}")


def _add_other(figures: Sequence[dict[Key, list[Figure]]], run: Run, other: Run) -> None:
    """Put the other run's figure of the same tensor of the same image behind this run's."""
    theirs = {image.name: image for image in other.images}
    for n, (image, own) in enumerate(zip(run.images, figures, strict=True)):
        if image.name not in theirs:
            continue
        found = {key[1:]: figure for key, figure in _figures(theirs[image.name], n, "o")}
        for key, pair in own.items():
            pair += [found[key[1:]]] if key[1:] in found else []


def _group(id: str, key: Key, figures: Sequence[Figure], page: str) -> Group:
    layer = figures[0].grid.site.layer
    return Group(id, layer.label, layer.type, key[2], page, tuple(figures))


def _image_page(
    number: int,
    image: Image,
    figures: Mapping[Key, list[Figure]],
    layer_ids: Mapping[tuple[int, str], str],
) -> ImagePage:
    id = f"image-{number:03d}"
    groups = tuple(
        _group(f"{id}-{n}", key, own, layer_ids[key[:2]])
        for n, (key, own) in enumerate(figures.items())
    )
    silent = [(skip.layer or skip.type, skip.reason) for skip in image.skipped]
    silent += [(name, "never ran") for name in image.never_ran]
    inputs = {f.other: f.input for group in groups for f in group.figures}
    return ImagePage(
        id,
        image.name,
        _input(image, number, "p"),
        inputs.get(True),
        words.image_facts(image.manifest),
        groups,
        tuple(silent),
    )


def _layer_pages(
    figures: Sequence[Mapping[Key, list[Figure]]], layer_ids: Mapping[tuple[int, str], str]
) -> Iterator[LayerPage]:
    sorted_in: dict[str, dict[Key, list[Figure]]] = {id: {} for id in layer_ids.values()}
    for own in figures:
        for key, pair in own.items():
            sorted_in[layer_ids[key[:2]]].setdefault(key, []).extend(pair)
    for id, tensors in sorted_in.items():
        groups = tuple(
            _group(f"{id}-{n}", key, own, id) for n, (key, own) in enumerate(tensors.items())
        )
        yield LayerPage(id, groups[0].layer, groups[0].type, groups)


def _silent(run: Run) -> tuple[Silence, ...]:
    """Layers that were skipped or never ran, over all images."""
    counts: Counter[tuple[str, str]] = Counter()
    for image in run.images:
        skips = ((skip.layer or skip.type, skip.reason) for skip in image.skipped)
        counts.update(dict.fromkeys(skips, 1))
        counts.update((name, "never ran") for name in image.never_ran)
    return tuple(Silence(layer, reason, n) for (layer, reason), n in counts.items())
