"""The page of a comparison of two runs, in the report's design."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from featviz.records import ComparedLayer, Comparison, DifferenceMap, Place
from featviz.report import words
from featviz.report.channels import ChannelTotals, Found
from featviz.report.data import difference_entry, entry, script
from featviz.report.legend import Key, key, scale
from featviz.report.links import FolderLinks
from featviz.report.pages import asset, fill, templates
from featviz.report.views import Figure, PictureView
from featviz.rundir import DIFF_GRIDS, INPUT_FILE, REPORT_ASSETS
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import CaptureRow
from featviz.text import counted

PICTURED = 60
"""Layers that are shown with their pictures: the first that differs, and the most changed."""
_SIDES = ("BASE", "NEW")


@dataclass(frozen=True)
class ComparedView:
    """A layer on the page."""

    id: str
    layer: ComparedLayer
    first: bool
    """Whether it is the first that diverges."""
    figures: Sequence[Figure]
    """That of BASE and that of NEW, in the image in which they differ most; or none."""
    one_sided: Sequence[str]
    """`1 channel constant in NEW only: 9`: findings over all images that one run has."""

    @property
    def difference(self) -> DifferenceMap | None:
        """The picture of the differences."""
        return self.layer.difference if self.figures else None

    @property
    def alt(self) -> str:
        """What the picture of the differences shows."""
        drawn = self.layer.difference
        maps = counted(len(drawn.channels) if drawn else 0, "map")
        return f"NEW minus BASE: {maps} of {self.layer.label}, {self.layer.image}"


@dataclass(frozen=True)
class ComparisonViews:
    """The whole page."""

    found: Comparison
    layers: Sequence[ComparedView]
    changed: Sequence[str]
    """What was changed while each run ran, in words: ablations, noise and the like."""
    settings: Sequence[tuple[str, str, str]]
    """What the runs were made with, where it differs: its name, and its value in each."""
    limit: float

    @property
    def different(self) -> list[ComparedView]:
        """The layers that differ."""
        return [view for view in self.layers if view.layer.differing]

    @property
    def pictured(self) -> int:
        """How many layers are shown with their pictures."""
        return sum(bool(view.figures) for view in self.layers)


def render(
    found: Comparison, base: ReadRun, new: ReadRun, page: Path, maps: Path
) -> tuple[str, Mapping[str, str]]:
    """The text of the page, and those of the files that are to lie with the maps, by name."""
    runs = base, new
    views = _arrange(found, runs)
    links = FolderLinks(page.absolute().parent)
    beside = f"{Path(os.path.relpath(maps, page.parent)).as_posix()}/"
    engine = templates()
    names = _names(runs)
    keys = [run.record.get("options") or {} for run in runs]
    engine.globals |= {
        "links": links,
        "words": words,
        "home": quote(os.fsencode(page.name)),
        "model": " → ".join(names),
        "beside": quote(os.fsencode(beside)),
        "key_of": lambda figure: key(figure.row, keys[figure.other]),
        "link_of": lambda name: quote(os.fsencode(beside + name)),
    }
    macros: Any = engine.get_template("picture.html").module
    engine.globals |= {"picture": lambda view: macros.picture(view, False, view.alt)}
    values = {"views": views, "found": found, "names": names, "runs": runs, "sides": _SIDES}
    article = fill(engine, "compare", signed=_signed(views.limit), **values)
    text = fill(
        engine,
        "document",
        name="",
        articles=[article],
        assets=REPORT_ASSETS,
        scripts=[DIFF_GRIDS],
        inside=None,
    )
    return text, {name: asset(name) for name in REPORT_ASSETS} | {
        DIFF_GRIDS: script(dict(_entries(views, runs, keys)))
    }


def _names(runs: Sequence[ReadRun]) -> list[str]:
    """What the runs are called: their folders, or all of their ways where these are alike."""
    short = [run.root.absolute().name for run in runs]
    return short if len(set(short)) > 1 else [str(run.place) for run in runs]


def _arrange(found: Comparison, runs: Sequence[ReadRun]) -> ComparisonViews:
    ranked = sorted(
        (layer for layer in found.layers if layer.differing), key=lambda one: -one.severity
    )
    shown = {id(layer) for layer in ranked[: PICTURED - 1]} | {id(found.first)}
    totals = [_totals(found, runs, side) for side in (0, 1)]
    limits = [layer.difference.limit for layer in found.layers if layer.difference]
    return ComparisonViews(
        found,
        [
            ComparedView(
                f"layer-{n:03d}",
                layer,
                layer is found.first,
                _figures(n, layer, runs) if id(layer) in shown else (),
                _one_sided([own[layer.place].found for own in totals]),
            )
            for n, layer in enumerate(found.layers)
        ],
        [_changed(run) for run in runs],
        list(_settings(runs)),
        max(limits, default=1.0),
    )


def _totals(found: Comparison, runs: Sequence[ReadRun], side: int) -> Mapping[Place, ChannelTotals]:
    """What is known of the channels of one run, over the images that both have."""
    totals = {layer.place: ChannelTotals() for layer in found.layers}
    for name in runs[0].images.keys() & runs[1].images.keys():
        image = runs[side].images[name]
        stats = image.stats()
        for place in totals.keys() & image.captures.keys():
            totals[place].add(image.captures[place], stats[place.stats_key])
    return totals


def _one_sided(found: Sequence[Found]) -> list[str]:
    """Channels of which something was found in one run, and not in the other."""
    lines = []
    for side, own, other in zip(_SIDES, found, reversed(found), strict=True):
        for name, channels in own.items():
            if alone := [one for one in channels if one not in set(other.get(name, ()))]:
                which = words.channel_list(alone)
                lines.append(f"{counted(len(alone), 'channel')} {name} in {side} only: {which}")
    return lines


def _figures(number: int, layer: ComparedLayer, runs: Sequence[ReadRun]) -> tuple[Figure, ...]:
    return tuple(_figure(number, layer, run, side) for side, run in enumerate(runs))


def _figure(number: int, layer: ComparedLayer, run: ReadRun, side: int) -> Figure:
    image = run.images[layer.image]
    row: CaptureRow = image.captures[layer.place]
    home = f"layer-{number:03d}"

    def view(id: str, file: str, size: tuple[int, int], alt: str) -> PictureView:
        return PictureView(id, image, file, size, f"{alt} of {image.name}, {_SIDES[side]}", home)

    seen = view(f"i{side}-{number}", INPUT_FILE, image.input_size, "What the model saw")
    maps = f"{words.tiles(row)} of {row.label}, {row.place.stem},"
    picture = view(f"g{side}-{number}", row.file, (row.plan.width, row.plan.height), maps)
    return Figure(picture, seen, row, image.name, DIFF_GRIDS, bool(side))


def _changed(run: ReadRun) -> str:
    """What interventions changed while a run ran."""
    rows = (row for image in run.images.values() for row in image.manifest.interventions)
    return ", ".join(dict.fromkeys(f"{row.kind} {row.what}" for row in rows))


def _settings(runs: Sequence[ReadRun]) -> Iterator[tuple[str, str, str]]:
    base, new = (
        {
            **dict(words.run_facts(run.record)),
            **{
                name: words.setting(value)
                for name, value in (run.record.get("options") or {}).items()
            },
        }
        for run in runs
    )
    for name in dict.fromkeys([*base, *new]):
        values = base.get(name, "–"), new.get(name, "–")
        if values[0] != values[1] and name not in ("out", "interventions"):
            yield (name, *values)


def _signed(limit: float) -> Key:
    """The colours of all maps of differences."""
    end = words.number(limit)
    text = "NEW − BASE, relative to the value and the layer’s largest; one scale for all layers"
    return Key(f"−{end}", f"+{end}", text, scale("coolwarm"), False)


def _entries(
    views: ComparisonViews, runs: Sequence[ReadRun], options: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    for number, view in enumerate(views.layers):
        layer = view.layer
        for run, figure, drawn in zip(runs, view.figures, options, strict=False):
            stats = run.images[layer.image].stats()[layer.place.stats_key]
            grey = key(figure.row, drawn).grey
            yield figure.picture.id, entry(figure, stats, grey, layer.change)
        if view.difference is not None:
            yield f"d-{number}", difference_entry(view.difference, layer.change)
