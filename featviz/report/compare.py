"""The page of a comparison of two runs, in the report's design."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np

from featviz.records import STAT_COLUMNS, ComparedLayer, Comparison, DifferenceMap
from featviz.report import pages, words
from featviz.report.views import Figure, Links, PictureView
from featviz.rundir import DIFF_GRIDS, INPUT_FILE, REPORT_ASSETS
from featviz.rundir.read import ReadRun

PICTURED = 60
"""Layers that are shown with their pictures: the first that differs, and the most changed."""
_SIDES = ("BASE", "NEW")


@dataclass(frozen=True)
class ComparedView:
    """A layer on the page."""

    id: str
    layer: ComparedLayer
    first: bool
    figures: Sequence[Figure]
    """That of BASE and that of NEW, in the image in which they differ most; or none."""
    difference: DifferenceMap | None


def render(
    found: Comparison, base: ReadRun, new: ReadRun, page: Path, maps: Path
) -> tuple[str, Mapping[str, str]]:
    """The text of the page, and those of the files that are to lie with the maps, by name."""
    runs = base, new
    views = list(_views(found, runs))
    beside = f"{Path(os.path.relpath(maps, page.parent)).as_posix()}/"
    short = [run.root.absolute().name for run in runs]
    names = short if len(set(short)) > 1 else [str(run.place) for run in runs]
    options = [run.record.get("options") or {} for run in runs]
    grids = {}
    for n, view in enumerate(views):
        place, change = view.layer.place, view.layer.change
        for figure in view.figures:
            stats = runs[figure.other].images[view.layer.image].stats()[place.stats_key]
            grey = words.key(figure.row, options[figure.other]).grey
            grids[figure.picture.id] = pages.figure_entry(figure, stats, grey, change)
        if (own := view.difference) is not None:
            unknown = np.full((len(change), len(STAT_COLUMNS)), np.nan, np.float32)
            parts = (own.plan, own.slices, unknown, change)
            grids[f"d-{n}"] = pages.entry(*parts, channels=own.channels)
    writer = pages.Pages(
        Links(page.absolute().parent),
        home=quote(os.fsencode(page.name)),
        model=" → ".join(names),
        beside=quote(os.fsencode(beside)),
        key_of=lambda figure: words.key(figure.row, options[figure.other]),
        link_of=lambda name: quote(os.fsencode(beside + name)),
    )
    limits = [layer.difference.limit for layer in found.layers if layer.difference]
    end = words.number(max(limits, default=1.0))
    scale = "NEW − BASE, relative; one scale for all layers"
    article = writer.pieces(
        "compare",
        found=found,
        layers=views,
        names=names,
        runs=runs,
        sides=_SIDES,
        settings=_settings(runs),
        signed=words.Key(f"−{end}", f"+{end}", scale, words.scale("coolwarm"), False),
    )
    text = "".join(writer.document(article, scripts=[DIFF_GRIDS]))
    assets = {name: pages.asset(name) for name in REPORT_ASSETS}
    return text, {**assets, DIFF_GRIDS: pages.script(grids)}


def _views(found: Comparison, runs: Sequence[ReadRun]) -> Iterator[ComparedView]:
    ranked = sorted(found.differing, key=lambda one: -one.severity)
    shown = {id(layer) for layer in ranked[: PICTURED - 1]} | {id(found.first)}
    for n, layer in enumerate(found.layers):
        figures = []
        for new, run in enumerate(runs if id(layer) in shown else ()):
            image = run.images[layer.image]
            alt, row = f"What the model saw of {image.name}", image.captures[layer.place]
            seen = PictureView(f"i{new}-{n}", image, INPUT_FILE, image.input_size, alt)
            figures.append(Figure.of(f"g{new}-{n}", row, seen, DIFF_GRIDS, bool(new)))
        difference = layer.difference if figures else None
        yield ComparedView(f"layer-{n:03d}", layer, layer is found.first, figures, difference)


def _settings(runs: Sequence[ReadRun]) -> list[tuple[str, str, str]]:
    """What the runs were made with, where it differs: its name, and its value in each."""
    base, new = (
        dict(words.run_facts(run.record))
        | {name: words.setting(own) for name, own in (run.record.get("options") or {}).items()}
        for run in runs
    )
    pairs = ((name, base.get(name, "–"), new.get(name, "–")) for name in {**base, **new})
    apart = ("out", "ablate", "edit")
    return [(name, a, b) for name, a, b in pairs if a != b and name not in apart]
