"""Pictures of the suspects only: each channel with the images that excite it most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from featviz import layout
from featviz.audit.call_graph import watching_calls
from featviz.audit.counting import Tally
from featviz.audit.plan import AuditPlan, AuditTarget, Spot
from featviz.audit.running_stats import to_rows
from featviz.drawing import colormap, levels
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.forward import forward
from featviz.models.load import LoadedModel
from featviz.models.preprocess import InputOptions
from featviz.pipeline.batches import batches
from featviz.pipeline.dealing import Deal
from featviz.pipeline.processes import World
from featviz.records import Call, Sample
from featviz.records.findings import FINDINGS
from featviz.text import printable

PER_LAYER = 8
"""Suspects that are drawn of one layer at most."""

_TILE = 88
"""Pixels of an image, and of a map, on its longer side."""
_LABEL, _GAP, _TEXT = 160, 6, 13  # Pillow sets the letters of its font well at 13 pixels
_CMAP = "viridis"
_KEY = 130
"""Pixels of the width of a colour key."""
_TOP, _ROW = 2 * (_TEXT + _GAP) + _GAP, _TILE + _TEXT + 2 * _GAP
"""Where the row of the first channel begins, and how high each is."""
_WORST_FIRST = sorted(FINDINGS, key=lambda name: FINDINGS[name].severity)
"""The findings in the order in which suspects are drawn."""


@dataclass(frozen=True)
class Suspect:
    """A channel with a finding."""

    finding: str
    channel: int
    images: tuple[int, ...]
    """Numbers of the images that excite it most, best first."""


@dataclass(frozen=True)
class SuspectSheet:
    """The suspects of one layer that are drawn."""

    target: AuditTarget
    suspects: tuple[Suspect, ...]
    total: int
    """All suspects of the layer."""
    source: Spot
    """The call whose maps are drawn: the layer itself, or for a dead activation what feeds it."""

    @property
    def stem(self) -> str:
        """Name of its file without the extension."""
        dead = self.source.call != self.target.spot.call
        return self.target.spot.call.label + (".dead" if dead else "")

    def as_json(self) -> dict[str, Any]:
        """A row of `drawn` in audit.json."""
        return {
            "layer": self.target.spot.call.label,
            "shown": self.source.call.label,
            "channels": [suspect.channel for suspect in self.suspects],
            "suspects": self.total,
            "rows": [_TOP, _ROW],
        }


@dataclass
class SuspectViews:
    """Maps and images as they will be drawn, by number of the image."""

    maps: dict[tuple[Call, int, int], np.ndarray] = field(default_factory=dict)
    """(call, channel, image) to float32 [h, w]."""
    images: dict[int, Image.Image] = field(default_factory=dict)


def line_up(
    plan: AuditPlan,
    findings: Mapping[Call, Mapping[str, Sequence[int]]],
    tallies: Mapping[Call, Tally],
    limit: int,
) -> list[SuspectSheet]:
    """Choose what is drawn: PER_LAYER suspects of a layer and `limit` in all, worst first."""
    sheets, left = [], limit
    for target in plan.targets:
        channels = findings.get(target.spot.call, {})
        every = [(name, channel) for name in _WORST_FIRST for channel in channels.get(name, ())]
        for source, chosen in _by_source(plan, target, every[: min(PER_LAYER, left)]):
            top = tallies[target.spot.call].top
            suspects = tuple(Suspect(name, i, tuple(top.of(i))) for name, i in chosen)
            left -= len(suspects)
            sheets.append(SuspectSheet(target, suspects, len(every), source))
    return sheets


def draw_suspects(
    model: LoadedModel,
    plan: AuditPlan,
    sheets: Sequence[SuspectSheet],
    samples: Sequence[Sample],
    inputs: InputOptions,
    team: World,
) -> list[tuple[SuspectSheet, Image.Image]]:
    """Show the images that are needed to the model once more, and draw the sheets.

    Processes divide the images; the first one draws, and the others return nothing.
    """
    parts = team.gather(_look_again(model, plan, sheets, samples, inputs, team))
    views = SuspectViews()
    for part in parts:
        views.maps |= part.maps
        views.images |= part.images
    return [(sheet, _compose(sheet, views, samples)) for sheet in sheets if team.first]


def _by_source(
    plan: AuditPlan, target: AuditTarget, chosen: Sequence[tuple[str, int]]
) -> Iterator[tuple[Spot, list[tuple[str, int]]]]:
    """Dead channels of an activation are black: what reaches it is drawn instead."""
    dead = [item for item in chosen if item[0] == "dead"]
    rest = [item for item in chosen if item[0] != "dead"]
    if dead:
        yield _before(plan, target), dead
    if rest:
        yield target.spot, rest


def _before(plan: AuditPlan, target: AuditTarget) -> Spot:
    graph = plan.trace.graph
    node = graph.given_by[target.spot.call]
    sources = graph.nodes[node].sources
    if target.spot.activation is None or len(sources) != 1:
        return target.spot
    return Spot(graph.nodes[sources[0]].call, target.spot.axis)


def _look_again(
    model: LoadedModel,
    plan: AuditPlan,
    sheets: Sequence[SuspectSheet],
    samples: Sequence[Sample],
    inputs: InputOptions,
    team: World,
) -> SuspectViews:
    """What this process's part of the images gives."""
    views, wanted = SuspectViews(), _wanted(sheets)
    names = frozenset(sheet.source.call.name for sheet in sheets)
    mine = Deal(team, sorted(wanted), "suspects")
    current = 0

    def sink(call: Call, args: Any, kwargs: Any, output: Any) -> None:
        for axis, channel in wanted[current].get(call, ()):
            views.maps[call, channel, current] = _map(output, axis, channel)

    with in_eval_mode(model.module), watching_calls(model.module, sink, names, plan.trace.atoms):
        for batch in batches(samples, model, inputs, 1, lambda *failed: None, mine):
            (current,) = batch.images
            views.images[current] = _thumbnail(model.preprocess.shown(batch.inputs)[0])
            forward(model.module, [arg.to(model.device) for arg in batch.inputs])
    return views


def _wanted(sheets: Sequence[SuspectSheet]) -> dict[int, dict[Call, set[tuple[int, int]]]]:
    """By image and call, the (axis, channel) of the maps to draw."""
    wanted: dict[int, dict[Call, set[tuple[int, int]]]] = {}
    for sheet in sheets:
        for suspect in sheet.suspects:
            for number in suspect.images:
                maps = wanted.setdefault(number, {}).setdefault(sheet.source.call, set())
                maps.add((sheet.source.axis, suspect.channel))
    return wanted


def _map(output: Tensor, axis: int, channel: int) -> np.ndarray:
    """One channel's map of the first image, float32 [h, w], thinned out to about a tile's size."""
    rows = to_rows(layout.to_floats(output.detach()), axis, 1)
    values = rows[0, channel].cpu().numpy().copy()
    shape = list(output.shape[1:])
    del shape[axis - 1 if axis > 0 else axis]
    if len(shape) != 2 or shape[0] * shape[1] != values.size:
        values, shape = _folded(values)
    step = -(-max(shape) // _TILE)
    return np.asarray(values.reshape(shape)[::step, ::step])


def _folded(values: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Tokens as a square, without the class token; else one row."""
    for first in (0, 1):
        side = round((values.size - first) ** 0.5)
        if side * side == values.size - first:
            return values[first:], [side, side]
    return values, [1, values.size]


def _thumbnail(pixels: Tensor) -> Image.Image:
    array = levels.pixels(pixels)
    image = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).convert("RGB")
    return _fitted(image)


def _fitted(image: Image.Image) -> Image.Image:
    factor = _TILE / max(image.size)
    size = tuple(max(1, round(side * factor)) for side in image.size)
    kind = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.BILINEAR
    return image.resize((size[0], size[1]), kind)


def _compose(sheet: SuspectSheet, views: SuspectViews, samples: Sequence[Sample]) -> Image.Image:
    columns = max(len(suspect.images) for suspect in sheet.suspects)
    cell = 2 * _TILE + 3 * _GAP
    title = _title(sheet)
    widest = max(_font().getlength(line) for line in title.split("\n"))
    width = max(_LABEL + columns * cell, round(widest) + 2 * _GAP)
    picture = Image.new("RGB", (width, _TOP + len(sheet.suspects) * _ROW), "white")
    _write(picture, (_GAP, _GAP), title)
    for index, suspect in enumerate(sheet.suspects):
        y = _TOP + index * _ROW
        maps = [views.maps.get((sheet.source.call, suspect.channel, n)) for n in suspect.images]
        limits = _limits([m for m in maps if m is not None])
        _write_label(picture, (_GAP, y), suspect, limits)
        for column, (number, values) in enumerate(zip(suspect.images, maps, strict=True)):
            at = (_LABEL + column * cell, y)
            if number in views.images and values is not None:
                picture.paste(views.images[number], at)
                picture.paste(_fitted(_colored(values, limits)), (at[0] + _TILE + _GAP, y))
            _write(picture, (at[0], y + _TILE + 1), _short(samples[number].name))
    return picture


def _title(sheet: SuspectSheet) -> str:
    call, source = sheet.target.spot.call, sheet.source.call
    label = printable(call.label)
    what = "with the images that excite each most, and its map"
    if source != call:
        what = (
            f"no image excites these; the first ones, and what {printable(source.label)} gives to "
            f"{label}"
        )
    return (
        f"{label} ({printable(call.type)}): {len(sheet.suspects)} of {sheet.total} suspects\n{what}"
    )


def _write_label(
    picture: Image.Image, at: tuple[int, int], suspect: Suspect, limits: tuple[float, float]
) -> None:
    """The channel and what was found of it, and the colours of its maps between their values."""
    left, top = at
    low, high = (f"{value:.4g}" for value in limits)
    _write(picture, at, f"channel {suspect.channel}\n{suspect.finding}")
    y = top + 3 * (_TEXT + _GAP)
    ramp = colormap.ramp(_CMAP)[None]
    picture.paste(Image.fromarray(ramp).resize((_KEY, _TEXT - 3)), (left, y))
    _write(picture, (left, y + _TEXT), low)
    _write(picture, (left + _KEY - round(_font().getlength(high)), y + _TEXT), high)


def _limits(maps: Sequence[np.ndarray]) -> tuple[float, float]:
    """Extremes of a channel's finite values over its maps, zero among them."""
    finite = [m[np.isfinite(m)] for m in maps]
    values = np.concatenate([np.zeros(1, np.float32), *finite])
    return float(values.min()), float(values.max())


def _colored(values: np.ndarray, limits: tuple[float, float]) -> Image.Image:
    colors = colormap.colored(_CMAP, 0.0)
    ends = levels.ValueLimits.fixed(*limits)
    image = Image.fromarray(
        levels.to_levels(values[None], ends, colors.levels, colors.nonfinite)[0]
    )
    image.putpalette(colors.colors or b"")
    return image.convert("RGB")


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= 28 else "…" + name[-27:]


def _write(picture: Image.Image, at: tuple[int, int], text: str) -> None:
    ImageDraw.Draw(picture).multiline_text(at, text, fill="#222222", font=_font(), spacing=4)


@cache
def _font() -> Any:
    return ImageFont.load_default(_TEXT)
