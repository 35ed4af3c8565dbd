"""The page of `diff`: the verdict, and of each layer the maps of both runs and the
difference."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from featviz.diff.comparison import ComparedLayer, Comparison, DifferenceMap
from featviz.report.color_keys import ColorKey, scale_colors
from featviz.report.descriptions import number, run_facts, setting
from featviz.report.engine import Document, Site, asset, render, render_document
from featviz.report.figures import Figure
from featviz.report.grids import difference_grid, figure_grid, script
from featviz.report.links import Links, PictureView
from featviz.rundir import DIFF_GRIDS, INPUT_FILE, REPORT_ASSETS
from featviz.rundir.read import ReadRun

# layers with pictures: the first that differs, and the most changed
_MAX_PICTURED = 60
# options that the page shows elsewhere than among the settings
_SHOWN_APART = ("out", "ablate", "edit")


class SettingChange(NamedTuple):
    """A setting that differs between the runs."""

    name: str
    base: str
    new: str


class ComparedSide(NamedTuple):
    """A run, or a figure of it, under its title."""

    title: str
    """BASE or NEW."""
    run: ReadRun


@dataclass(frozen=True)
class ComparedLayerView:
    """A layer on the page."""

    number: int
    layer: ComparedLayer
    is_first: bool
    """Whether it is the first that diverges."""
    figures: Sequence[Figure] = ()
    """Of BASE and of NEW; none where it has no pictures."""
    difference: DifferenceMap | None = None

    @property
    def id(self) -> str:
        """The id of its section."""
        return f"layer-{self.number:03d}"


@dataclass(frozen=True)
class ComparisonPage:
    """What the template of a comparison shows."""

    result: Comparison
    sides: Sequence[ComparedSide]
    layers: Sequence[ComparedLayerView]
    settings: Sequence[SettingChange]
    difference_key: ColorKey
    maps_address: str
    """The folder of difference maps, with a slash at the end."""

    @property
    def first_id(self) -> str:
        """The id of the first layer that diverges; empty where none does."""
        return next((view.id for view in self.layers if view.is_first), "")

    @property
    def pictured(self) -> int:
        """How many layers have pictures."""
        return sum(bool(view.figures) for view in self.layers)

    def difference_address(self, difference: DifferenceMap) -> str:
        """The address of a picture of differences."""
        return self.maps_address + quote(os.fsencode(difference.file))


def render_comparison(
    result: Comparison, base: ReadRun, new: ReadRun, page: Path, maps: Path
) -> tuple[str, Mapping[str, str]]:
    """Render the page of a comparison.

    Args:
        page: the file of the page.
        maps: the folder of the difference maps.

    Returns:
        The text of the page, and the texts of the files that are to lie with the maps,
        by name.
    """
    maps_address = quote(
        os.fsencode(f"{Path(os.path.relpath(maps, page.parent)).as_posix()}/")
    )
    site = Site(
        links=Links(page.absolute().parent),
        model=" → ".join(_run_names(base, new)),
        home=quote(os.fsencode(page.name)),
        asset_folder=maps_address,
        options={False: _options(base), True: _options(new)},
    )
    builder = _LayerBuilder(result, (base, new), site)
    layers = [builder.view(number, layer) for number, layer in enumerate(result.layers)]
    content = ComparisonPage(
        result=result,
        sides=(ComparedSide("BASE", base), ComparedSide("NEW", new)),
        layers=layers,
        settings=_changed_settings(base, new),
        difference_key=_difference_key(result),
        maps_address=maps_address,
    )
    document = Document(render("compare", site, content), scripts=[DIFF_GRIDS])
    assets = {name: asset(name) for name in REPORT_ASSETS}
    text = "".join(render_document(site, document))
    return text, {**assets, DIFF_GRIDS: script(builder.grids)}


def _options(run: ReadRun) -> Mapping[str, Any]:
    options: Mapping[str, Any] = run.record.get("options") or {}
    return options


def _run_names(base: ReadRun, new: ReadRun) -> list[str]:
    """Names of the runs' folders; where these are the same, their paths."""
    names = [run.root.absolute().name for run in (base, new)]
    return names if names[0] != names[1] else [str(run.place) for run in (base, new)]


@dataclass
class _LayerBuilder:
    """Builds the views of layers, and collects the grids of their pictures."""

    result: Comparison
    runs: tuple[ReadRun, ReadRun]
    site: Site
    grids: dict[str, str] = field(default_factory=dict)
    """JSON by id, for the scripts."""

    def __post_init__(self) -> None:
        """Choose the layers with pictures."""
        ranked = sorted(self.result.differing, key=lambda layer: -layer.severity)
        self._pictured = {layer.key for layer in ranked[: _MAX_PICTURED - 1]}
        if self.result.first is not None:
            self._pictured.add(self.result.first.key)

    def view(self, number: int, layer: ComparedLayer) -> ComparedLayerView:
        """A layer as the page shows it."""
        is_first = layer is self.result.first
        if layer.key not in self._pictured:
            return ComparedLayerView(number, layer, is_first)
        figures = [self._figure(number, layer, is_new) for is_new in (False, True)]
        difference = layer.difference
        if difference is not None:
            self.grids[f"d-{number}"] = difference_grid(
                difference.plan, difference.slices, difference.channels, layer.change
            )
        return ComparedLayerView(number, layer, is_first, figures, difference)

    def _figure(self, number: int, layer: ComparedLayer, is_new: bool) -> Figure:
        image = self.runs[is_new].images[layer.image]
        row = image.captures[layer.key]
        suffix = f"{int(is_new)}-{number}"
        alt = f"What the model saw of {image.name}"
        seen = PictureView(f"i{suffix}", image, INPUT_FILE, image.input_size, alt)
        figure = Figure.of(f"g{suffix}", row, seen, DIFF_GRIDS, other=is_new)
        stats = image.stats()[layer.key.stats_key]
        is_grey = self.site.color_key(figure).is_grey
        self.grids[figure.picture.id] = figure_grid(
            figure, stats, is_grey, layer.change
        )
        return figure


def _changed_settings(base: ReadRun, new: ReadRun) -> list[SettingChange]:
    """The facts and options that differ between the runs."""
    settings = []
    for run in (base, new):
        values = dict(run_facts(run.record))
        for name, value in _options(run).items():
            if name not in _SHOWN_APART:
                values[name] = setting(value)
        settings.append(values)
    old, now = settings
    changes = [
        SettingChange(name, old.get(name, "–"), now.get(name, "–"))
        for name in {**old, **now}
    ]
    return [change for change in changes if change.base != change.new]


def _difference_key(result: Comparison) -> ColorKey:
    limits = [layer.difference.limit for layer in result.layers if layer.difference]
    end = number(max(limits, default=1.0))
    text = "NEW − BASE, relative; one scale for all layers"
    return ColorKey(f"−{end}", f"+{end}", text, scale_colors("coolwarm"))
