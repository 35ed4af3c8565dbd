"""The page of a comparison of two runs: `diff --html` writes only this page, `report
--compare` writes it among others.

    verdict       gates, the first layer that diverges
    predictions   image   before → after, changed ones first
    depth         SQNR and cosine of all layers as lines
    layers        input | before | after | difference of the most changed channels
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from urllib.parse import quote

from featviz.diff.comparison import (
    ComparedTensor,
    Comparison,
    DifferenceMap,
    PredictionChange,
)
from featviz.report.color_keys import ColorKey, scale_colors
from featviz.report.depth_chart import DepthChart, depth_chart
from featviz.report.descriptions import number, run_facts, setting
from featviz.report.engine import Document, Site, asset, render
from featviz.report.grids import changed_grid, script
from featviz.report.links import Links, PictureView
from featviz.rundir import DIFF_GRIDS, INPUT_FILE, REPORT_ASSETS
from featviz.rundir.read import ReadRun

COMPARISON_PAGE = "comparison"
"""The id of the page."""
_SHOWN_APART = ("out", "ablate", "edit")
"""Options that are not shown among the settings, since the page shows them elsewhere."""


class SettingChange(NamedTuple):
    """A setting that differs between the runs, with its values as text."""

    name: str
    base: str
    new: str


class ComparedSide(NamedTuple):
    """One of the two runs, under its title."""

    title: str
    """BASE or NEW."""
    run: ReadRun
    origin: str
    """The folder of the run; or the model, if it was run only for the comparison."""


class MapColumn(NamedTuple):
    """One of the three pictures of a tensor."""

    id: str
    """The id of the picture's grid, for the scripts."""
    title: str
    """`before`, `after` or `difference`."""
    address: str
    alt: str
    """The text for a reader who cannot see the picture."""
    key: ColorKey


@dataclass(frozen=True)
class ComparedTensorView:
    """A compared tensor on the page."""

    number: int
    """The position of the tensor in the comparison, from 0."""
    tensor: ComparedTensor
    is_first: bool
    """Whether this is the first tensor that diverges."""
    columns: Sequence[MapColumn] = ()
    """The three pictures of the tensor; empty if it has no difference map."""

    @property
    def id(self) -> str:
        """The id of the tensor's section on the page."""
        return f"compared-{self.number:03d}"


@dataclass(frozen=True)
class ComparisonPage:
    """What the template of a comparison shows."""

    result: Comparison
    title: str
    sides: Sequence[ComparedSide]
    tensors: Sequence[ComparedTensorView]
    settings: Sequence[SettingChange]
    predictions: Sequence[PredictionChange]
    """The predictions of all images: changed ones first, then by `shift`."""
    chart: DepthChart | None
    inputs: Mapping[str, PictureView]
    """The pictures of what the models saw, by image; both models saw the same."""
    grids: Mapping[str, str]
    """The grids of all pictures as JSON, by id."""

    @property
    def first_id(self) -> str:
        """The id of the first tensor that diverges; empty if no tensor diverges."""
        return next((view.id for view in self.tensors if view.is_first), "")

    @property
    def pictured(self) -> int:
        """How many tensors have pictures."""
        return sum(view.tensor.difference is not None for view in self.tensors)


def comparison_page(
    result: Comparison,
    base: ReadRun,
    new: ReadRun,
    inputs: Mapping[str, PictureView],
    address: Callable[[str], str],
) -> ComparisonPage:
    """Gather the content of the page.

    Args:
        result: the comparison. Tensors with a `difference` get pictures.
        base: the run that `result.base` names.
        new: the run that `result.new` names.
        inputs: the pictures of what the models saw, by image.
        address: returns the address of a picture of a `DifferenceMap`, for its file.
    """
    grids: dict[str, str] = {}
    views = []
    for position, tensor in enumerate(result.layers):
        columns = []
        if tensor.difference is not None:
            columns = _columns(position, tensor.difference, address)
            grids |= _grids(columns, tensor, tensor.difference, (base, new))
        is_first = tensor is result.first
        views.append(ComparedTensorView(position, tensor, is_first, columns))
    return ComparisonPage(
        result=result,
        title=" → ".join(_names(result)),
        sides=(
            ComparedSide("BASE", base, str(result.base)),
            ComparedSide("NEW", new, str(result.new)),
        ),
        tensors=views,
        settings=_changed_settings(base, new),
        # changed ones first, since readers look for these
        predictions=sorted(
            result.predictions,
            key=lambda change: (change.changed, change.shift),
            reverse=True,
        ),
        chart=depth_chart(result.layers),
        inputs=inputs,
        grids=grids,
    )


def render_comparison(
    result: Comparison, base: ReadRun, new: ReadRun, page: Path, maps: Path
) -> tuple[str, Mapping[str, str]]:
    """Render the page of `diff --html`.

    Args:
        result: the comparison of `base` and `new`, with difference maps.
        page: the path of the page.
        maps: the folder of the difference maps.

    Returns:
        The text of the page; and, by name, the texts of further files, which the caller
        writes into the folder of the maps.
    """
    # The address of this folder is relative, so that users can move everything at once. It
    # is made from bytes, since names of folders need not be valid text.
    folder = Path(os.path.relpath(maps, page.parent)).as_posix()
    maps_address = quote(os.fsencode(f"{folder}/"))

    def address(file: str) -> str:
        """The address of a difference map."""
        return maps_address + quote(os.fsencode(file))

    # The inputs of NEW stand for both: `compare_runs` has checked that they differ by at
    # most one level.
    inputs = {}
    for position, name in enumerate(result.images):
        image = new.images[name]
        alt = f"What the models saw of {name}"
        inputs[name] = PictureView(
            f"i{position}", image, INPUT_FILE, image.input_size, alt
        )
    content = comparison_page(result, base, new, inputs, address)
    site = Site(
        links=Links(page.absolute().parent),
        model=content.title,
        home=quote(os.fsencode(page.name)),
        asset_folder=maps_address,
        options={False: _options(base), True: _options(new)},
    )
    document = Document(render("compare", site, content), scripts=[DIFF_GRIDS])
    assets = {name: asset(name) for name in REPORT_ASSETS}
    text = "".join(render("document", site, document))
    return text, {**assets, DIFF_GRIDS: script(content.grids)}


def data_address(content: bytes) -> str:
    """The address of a PNG that is part of the page: a data URI with its bytes."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _options(run: ReadRun) -> Mapping[str, Any]:
    """The options of a run; empty if run.json has none."""
    options = run.record.get("options") or {}
    return options


def _names(result: Comparison) -> list[str]:
    """The names of both runs for the title: the last parts of their paths, or of their
    models; or the whole paths, if these parts are equal or empty."""
    origins = (result.base, result.new)
    # equal for `monday/out` and `tuesday/out`, empty for `.`
    names = [PurePath(str(origin)).name for origin in origins]
    if names[0] == names[1] or "" in names:
        return [str(origin) for origin in origins]
    return names


def _columns(
    position: int, maps: DifferenceMap, address: Callable[[str], str]
) -> list[MapColumn]:
    """The three pictures of a tensor.

    Args:
        position: the position of the tensor in the result, for ids.
        maps: the difference map of the tensor.
        address: returns the address of a picture, for its file.
    """
    # Before and after share a grey scale. Differences have a colour scale, which a page may
    # not change.
    low = number(maps.range.low)
    high = number(maps.range.high)
    end = number(maps.limit)
    value_key = ColorKey(
        low=low,
        high=high,
        text="before and after alike",
        colors=scale_colors("grey"),
        is_grey=True,
    )
    change_key = ColorKey(
        low=f"−{end}",
        high=f"+{end}",
        text="NEW − BASE, relative; scale of this layer",
        colors=scale_colors("coolwarm"),
    )
    channels = ", ".join(map(str, maps.channels))
    columns = []
    for title, file, key in (
        ("before", maps.before_file, value_key),
        ("after", maps.after_file, value_key),
        ("difference", maps.file, change_key),
    ):
        alt = f"{maps.label} {title}, {maps.image}: channels {channels}"
        columns.append(MapColumn(f"{title}-{position}", title, address(file), alt, key))
    return columns


def _grids(
    columns: Sequence[MapColumn],
    tensor: ComparedTensor,
    maps: DifferenceMap,
    runs: tuple[ReadRun, ReadRun],
) -> dict[str, str]:
    """The grids of a tensor's three pictures as JSON, by id.

    Args:
        columns: the pictures before, after and of the difference.
        maps: the difference map of the tensor.
        runs: BASE and NEW.
    """
    stats = [run.images[maps.image].stats()[tensor.key.stats_key] for run in runs]
    grids = {}
    # the None stands for the difference, which has no statistics
    for column, numbers in zip(columns, [*stats, None], strict=True):
        grids[column.id] = changed_grid(
            maps, tensor.change, numbers, is_grey=column.key.is_grey
        )
    return grids


def _changed_settings(base: ReadRun, new: ReadRun) -> list[SettingChange]:
    """The facts and options in which the runs differ, in the order of BASE; then those
    that only NEW has."""
    old = _settings(base)
    now = _settings(new)
    changes = []
    # a dash stands for an option that the featviz of the run did not have yet
    for name in {**old, **now}:
        change = SettingChange(name, old.get(name, "–"), now.get(name, "–"))
        if change.base != change.new:
            changes.append(change)
    return changes


def _settings(run: ReadRun) -> dict[str, str]:
    """The facts and options of a run as text, by name."""
    settings = dict(run_facts(run.record))
    for name, value in _options(run).items():
        if name not in _SHOWN_APART:
            settings[name] = setting(value)
    return settings
