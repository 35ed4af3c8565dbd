"""Pictures of the suspects, which are the channels with a finding: the images that excite
each most, and its maps of them.

layer (Type): 2 of 9 suspects
with the images that excite each most, and its map
channel 3    +-------+-----+  +-------+-----+
constant     | image | map |  | image | map |
[colour key] +-------+-----+  +-------+-----+
             name             name
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from featviz import layout
from featviz.audit.counting import Tally, to_rows
from featviz.audit.findings import AuditedRow
from featviz.audit.gates import FINDINGS
from featviz.audit.parts import Call
from featviz.audit.plan import AuditPlan, CountedCall
from featviz.drawing import colormap
from featviz.drawing.sheet import (
    Caption,
    Cell,
    Color,
    PixelCanvas,
    TileGrid,
    end_of,
    resize,
    text_width,
)
from featviz.drawing.values import ValueLimits, to_levels, to_rgb
from featviz.hooks.capture import forward
from featviz.hooks.eval_mode import in_eval_mode
from featviz.models.load import LoadedModel
from featviz.options import InputOptions
from featviz.records import Floats, Sample
from featviz.run.study import batches
from featviz.rundir.folder import Folder
from featviz.text import printable, safe_name

PER_LAYER = 8
"""At most this many suspects of a call are drawn."""

# pixels of the longer side of an image and of its map
_TILE = 88
# pixels of the column on the left, which names channels
_LABEL = 160
_GAP = 6
# pixels of a line of text
_TEXT = 13
# pixels of a colour key's width
_KEY = 130
_INK: Color = (34, 34, 34)
_CMAP = "viridis"
# where the row of the first channel begins
_TOP = 2 * (_TEXT + _GAP) + _GAP
_ROW_HEIGHT = _TILE + _TEXT + 2 * _GAP
# from one image to the next
_ACROSS = 2 * _TILE + 3 * _GAP


class Suspect(NamedTuple):
    """A channel with a finding."""

    finding: str
    """A key of `gates.FINDINGS`."""
    channel: int
    images: list[int]
    """Numbers of the images that excite it most, best first."""

    @property
    def is_dead(self) -> bool:
        """Whether its finding is `dead`."""
        return self.finding == "dead"


@dataclass(frozen=True)
class SuspectSheet:
    """Suspects of a call that are drawn in one picture."""

    target: CountedCall
    """The call whose channels they are."""
    source: CountedCall
    """The call whose maps are drawn: the target itself; or for dead channels of an
    activation, whose maps are black, the call that feeds it."""
    suspects: list[Suspect]
    total: int
    """How many suspects the target has, drawn or not."""

    @property
    def file(self) -> str:
        """Its path in the audit's folder."""
        suffix = "" if self.source.call == self.target.call else ".dead"
        return f"suspects/{safe_name(self.target.call.label + suffix)}.png"


class MapKey(NamedTuple):
    """A channel of a call's output for an image."""

    call: Call
    channel: int
    image: int
    """The number of the image among the samples."""


class SeenMaps(NamedTuple):
    """The maps and the images that the sheets show."""

    maps: dict[MapKey, Floats]
    """float32 [h, w]."""
    images: dict[int, Image.Image]
    """By the number of the image: the input of the model as a picture of a tile's size."""


def draw_suspects(
    folder: Folder,
    sheets: Sequence[SuspectSheet],
    model: LoadedModel,
    plan: AuditPlan,
    samples: Sequence[Sample],
    inputs: InputOptions,
) -> list[dict[str, Any]]:
    """Draw the sheets into a folder.

    Args:
        folder: the folder of the audit.
        plan: the plan that was made of this model.
        samples: all images of the audit; `Suspect.images` has their indices.
        inputs: how images become the model's inputs, as in the first pass.

    Returns:
        The entry `drawn` of audit.json: a row for each sheet.

    Raises:
        ForwardError: the model fails on an image of the sheets.
    """
    seen = _show_again(model, plan, sheets, samples, inputs)
    drawn = []
    for sheet in sheets:
        canvas, channels = _draw(sheet, seen, samples)
        with folder.write(sheet.file) as file:
            canvas.image.save(file, "png")
        drawn.append(
            {
                "layer": sheet.target.call.label,
                "shown": sheet.source.call.label,
                "suspects": sheet.total,
                "file": sheet.file,
                "channels": channels,
            }
        )
    return drawn


def choose_suspects(
    plan: AuditPlan,
    rows: Sequence[AuditedRow],
    tallies: Mapping[Call, Tally],
    limit: int,
) -> list[SuspectSheet]:
    """Choose which suspects are drawn: at most the PER_LAYER worst ones of each call, call
    by call, until there are `limit` of them.

    Args:
        rows: the entry `layers` of audit.json.
        tallies: by call; a tally says which images excite a channel most.
        limit: the largest number of suspects in all sheets; 0 draws none.
    """
    sheets = []
    remaining = limit
    findings_of = {row["label"]: row["findings"] for row in rows}
    for target in plan.targets:
        suspects = []
        for name in sorted(FINDINGS, key=lambda name: FINDINGS[name].rank):
            for channel in findings_of.get(target.call.label, {}).get(name, ()):
                best = tallies[target.call].images[channel]
                suspects.append(Suspect(name, channel, best[best >= 0].tolist()))
        chosen = suspects[: min(PER_LAYER, remaining)]
        remaining -= len(chosen)
        # Dead suspects have a sheet of their own. Their maps in the activation's output
        # are black, so the sheet shows their maps in its input.
        for source, are_dead in ((_feeding_call(plan, target), True), (target, False)):
            drawn = [suspect for suspect in chosen if suspect.is_dead == are_dead]
            if drawn:
                sheets.append(SuspectSheet(target, source, drawn, len(suspects)))
    return sheets


def _feeding_call(plan: AuditPlan, target: CountedCall) -> CountedCall:
    """The call whose output an activation takes. For a target that is no activation, or
    that takes several tensors, the target."""
    if target.activation is None:
        return target
    graph = plan.graph
    sources = graph.nodes[graph.node_of[target.call]].sources
    if len(sources) != 1:
        return target
    return CountedCall(graph.nodes[sources[0]].call, target.channel_axis)


def _show_again(
    model: LoadedModel,
    plan: AuditPlan,
    sheets: Sequence[SuspectSheet],
    samples: Sequence[Sample],
    inputs: InputOptions,
) -> SeenMaps:
    """Show the images of the sheets to the model again, and keep the maps of the suspects.
    An image that can no longer be read is left out.

    Raises:
        ForwardError: the model fails on one of these images.
    """
    channels_of = defaultdict(set)
    for sheet in sheets:
        for suspect in sheet.suspects:
            for number in suspect.images:
                channels_of[number].add((sheet.source, suspect.channel))
    # one image in each batch: `current` is the image whose outputs the hooks get
    seen = SeenMaps({}, {})
    current = 0

    def sink(call: Call, output: Any) -> None:
        """Keep the maps of the suspects whose row shows the image `current`."""
        for source, channel in channels_of[current]:
            if source.call == call:
                seen.maps[MapKey(call, channel, current)] = _map_of(
                    output, source.channel_axis, channel
                )

    sources = [sheet.source.call for sheet in sheets]
    with in_eval_mode(model.module), plan.watching(model.module, sink, sources):
        for batch in batches(
            samples,
            model,
            inputs,
            size=1,
            # an image that can no longer be read is left out without a message
            failed=lambda number, error: None,
            numbers=sorted(channels_of),
        ):
            (current,) = batch.images
            pixels = to_rgb(model.preprocess.shown(batch.inputs)[0])
            seen.images[current] = _as_tile(Image.fromarray(pixels))
            forward(model.module, [arg.to(model.device) for arg in batch.inputs])
    return seen


def _map_of(output: Tensor, channel_axis: int, channel: int) -> Floats:
    """A channel of an output as a map [h, w]. A map that is larger than a tile is thinned:
    only every second (third, ...) row and column is kept. Tokens make a square, without a
    class token; if they do not fill a square, they make one row.

    Args:
        output: the output for one image, [1, ...].
        channel_axis: the axis of `output` that counts channels; negative from the end.
        channel: the index of the channel on that axis.
    """
    rows = to_rows(layout.to_floats(output.detach()), channel_axis, 1)
    values: Floats = rows[0, channel].cpu().numpy().copy()
    shape = list(output.shape[1:])
    del shape[channel_axis - 1 if channel_axis > 0 else channel_axis]
    # tokens: 196 are a square of 14 · 14, and 197 are a class token before that square
    if len(shape) != 2 or shape[0] * shape[1] != values.size:
        shape = [1, values.size]
        for class_tokens in (0, 1):
            side = round((values.size - class_tokens) ** 0.5)
            if side * side == values.size - class_tokens:
                values = values[class_tokens:]
                shape = [side, side]
                break
    step = -(-max(shape) // _TILE)
    return values.reshape(shape)[::step, ::step]


def _as_tile(image: Image.Image) -> Image.Image:
    return resize(image, _TILE / max(image.size))


def _draw(
    sheet: SuspectSheet, seen: SeenMaps, samples: Sequence[Sample]
) -> tuple[PixelCanvas, list[dict[str, Any]]]:
    """Draw a sheet: a row for each suspect, with the suspect's name, a colour key, and
    images with the suspect's maps.

    Returns:
        The picture, and the entry `channels` of the sheet's row in audit.json: where the
        tiles are, for pages that arrange them anew.
    """
    title = _title(sheet)
    columns = max(len(suspect.images) for suspect in sheet.suspects)
    widest = max(text_width(line, _TEXT) for line in title)
    width = max(_LABEL + columns * _ACROSS, round(widest) + 2 * _GAP)
    canvas = PixelCanvas(width, _TOP + len(sheet.suspects) * _ROW_HEIGHT, _TEXT)
    canvas.write("\n".join(title), _GAP, _GAP, _INK)
    grid = TileGrid(columns, _TILE, _TILE, _LABEL, _TOP, _ACROSS, _ROW_HEIGHT)
    channels = []
    for row, suspect in enumerate(sheet.suspects):
        first_cell = row * columns
        last_cell = first_cell + len(suspect.images)
        cells = [grid.cell(position) for position in range(first_cell, last_cell)]
        names = [samples[number].name for number in suspect.images]
        for cell, name in zip(cells, names, strict=True):
            # as wide as an image and its map
            line = end_of(name, _TEXT, 2 * _TILE + _GAP)
            canvas.caption(cell, [Caption(line, _INK)])
        top = _TOP + row * _ROW_HEIGHT
        channels.append(
            _draw_suspect(canvas, top, cells, names, suspect, sheet.source.call, seen)
        )
    return canvas, channels


def _title(sheet: SuspectSheet) -> tuple[str, str]:
    """The two lines above the suspects: the layer and how many suspects it has, and what
    is drawn of them."""
    call = sheet.target.call
    label = printable(call.label)
    title = (
        f"{label} ({printable(call.type)}): {len(sheet.suspects)} of {sheet.total}"
        " suspects"
    )
    if sheet.source.call == call:
        return title, "with the images that excite each most, and its map"
    return (
        title,
        "no image excites these: the maps show what"
        f" {printable(sheet.source.call.label)} gives to {label}, nothing above 0",
    )


def _draw_suspect(
    canvas: PixelCanvas,
    top: int,
    cells: Sequence[Cell],
    names: Sequence[str],
    suspect: Suspect,
    source: Call,
    seen: SeenMaps,
) -> dict[str, Any]:
    """Draw the row of a suspect: its name, a colour key, and in each cell an image, with
    the suspect's map of this image on the right. All maps of the row have one scale, which
    includes zero.

    Args:
        top: the top of the row, in pixels of the canvas.
        cells: a cell for each image of the suspect.
        names: the names of these images.
        source: the call whose maps are drawn.
        seen: images and maps. The cell of an image that is missing here, or whose map is,
            stays empty.

    Returns:
        The suspect's entry of `channels` in audit.json: the scale, and where the tiles are.
    """
    maps = []
    low = 0.0
    high = 0.0
    for number in suspect.images:
        values = seen.maps.get(MapKey(source, suspect.channel, number))
        maps.append(values)
        if values is not None:
            finite = values[np.isfinite(values)]
            low = min(low, float(finite.min(initial=0)))
            high = max(high, float(finite.max(initial=0)))
    canvas.write(f"channel {suspect.channel}\n{suspect.finding}", _GAP, top, _INK)
    _draw_key(canvas, top + 3 * (_TEXT + _GAP), low, high)
    colors = colormap.palette_of(_CMAP, 0)
    images = []
    for cell, name, number, values in zip(
        cells, names, suspect.images, maps, strict=True
    ):
        # the image can no longer be read, or the call did not run this time
        if number not in seen.images or values is None:
            continue
        tile = canvas.paste(seen.images[number], cell)
        limits = ValueLimits.fixed(low, high)
        levels = to_levels(values[None], limits, colors.levels, colors.nonfinite)
        painted = Image.fromarray(levels[0])
        painted.putpalette(colors.colors or b"")
        map = canvas.paste(
            _as_tile(painted.convert("RGB")),
            cell._replace(left=cell.left + _TILE + _GAP),
        )
        images.append({"image": name, "tile": tile, "map": map})
    return {
        "channel": suspect.channel,
        "finding": suspect.finding,
        "range": [low, high],
        "images": images,
    }


def _draw_key(canvas: PixelCanvas, top: float, low: float, high: float) -> None:
    """Draw the colour key of a channel's maps, and below it the values at both ends.

    Args:
        top: the top of the key, in pixels of the canvas.
        low: the value of the first colour.
        high: the value of the last colour.
    """
    ramp = Image.fromarray(colormap.ramp(_CMAP)[None]).resize((_KEY, _TEXT - 3))
    canvas.paste(ramp, Cell(_GAP, top, _KEY, _TEXT - 3))
    canvas.write(f"{low:.4g}", _GAP, top + _TEXT, _INK)
    # aligned with the right end of the colours
    right = _GAP + _KEY - round(text_width(f"{high:.4g}", _TEXT))
    canvas.write(f"{high:.4g}", right, top + _TEXT, _INK)
