"""The story of `sheet`: one picture of one layer, images by channels, cut from a run's grids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from featviz.drawing import sheet
from featviz.drawing.picture import MAX_PIXELS
from featviz.errors import StoreError, UsageError
from featviz.files.urls import Url
from featviz.options.commands import SheetOptions
from featviz.records import Floats
from featviz.rundir import INPUT_FILE
from featviz.rundir.image import DamagedError, ReadImage
from featviz.rundir.mirror import copied
from featviz.rundir.place import check_file, picture_of, writing
from featviz.rundir.read import ReadRun, read_run
from featviz.rundir.schema import Capture
from featviz.text import cut, read_ranges, safe_name

_SMALLEST = 32  # pixels of the longer side of what the model saw
_KIND = picture_of("sheet")
_MARK = PngInfo()
_MARK.add_text("Software", "featviz sheet")
_LONGEST_NAME = 28

ALL = -1  # stands for the one tile that all channels became (`run --reduce`)
ORDERS = {"mean": 2, "max": 1, "variance": 3, "zeros": 4}
"""Columns of stats.npz by which channels are sorted; `index` sorts by number."""
Cell = Image.Image | None  # a tile; None where an image does not have the channel


def make_sheet(
    place: Path | Url, options: SheetOptions
) -> tuple[Path, list[str], list[int], Mapping[str, str]]:
    """Draw a layer's maps of all images of a run, as they are in its grids, into one picture: its
    path, its images and channels (none where all are one tile), and what is left out."""
    out = options.out or Path(safe_name(f"sheet-{options.layer}.png"))
    check_file(out, _KIND, overwrite=options.overwrite)
    lines: dict[str, list[Cell]] = {}
    damaged: list[DamagedError] = []
    with copied(place) as root:
        run = read_run(root, hold=True)
        columns = _find(run, options)
        rows = [row for _, row in columns]
        stats = [image.stats()[row.place.stats_key] for image, row in columns]
        channels = sort_channels(stats, _wanted(options, rows), options.order)
        sizes = (math.prod(row.plan.tile) * row.side for row in rows)
        if (pixels := len(channels) * sum(sizes)) > MAX_PIXELS:
            raise UsageError(
                f"the sheet would have {pixels // 1_000_000} megapixels, more than Pillow opens",
                "--pick takes fewer rows",
            )
        for image, row in columns:
            try:
                lines[image.name] = _column(image, row, channels)
            except DamagedError as error:
                damaged.append(error)
    if not lines:
        raise damaged[0]
    heads = ["input", *("all" if channel == ALL else str(channel) for channel in channels)]
    sides, cells = [cut(name, _LONGEST_NAME) for name in lines], list(lines.values())
    if not options.transpose:
        heads, sides, cells = sides, heads, [list(row) for row in zip(*cells, strict=True)]
    picture = sheet.table(heads, sides, cells)
    with writing(out, _KIND, overwrite=options.overwrite) as file:
        picture.save(file, "png", pnginfo=_MARK)
    left_out = run.left_out | {error.image.name: error.message for error in damaged}
    return out, list(lines), [channel for channel in channels if channel != ALL], left_out


def sort_channels(stats: Sequence[Floats], channels: Sequence[int], by: str) -> list[int]:
    """Order channels by a statistic, its mean over the images: the largest first, equal ones in
    their order, those without a finite value last."""
    if by == "index":
        return sorted(channels)

    def rank(channel: int) -> tuple[float, int]:
        values = [float(own[channel, ORDERS[by]]) for own in stats if channel < len(own)]
        finite = [v**2 if by == "variance" else v for v in values if np.isfinite(v)]
        return -float(np.mean(finite)) if finite else np.inf, channel

    return sorted(channels, key=rank)


def _find(run: ReadRun, options: SheetOptions) -> list[tuple[ReadImage, Capture]]:
    """The grids of the tensor that was asked for."""
    if not run.images:
        reason = next(iter(run.left_out.values()), "its run.json says why")
        raise StoreError(f"{run.root} has no complete image", reason)
    layers: dict[str, dict[str, list[tuple[ReadImage, Capture]]]] = {}
    for image in run.images.values():
        for row in image.captures.values():
            stems = layers.setdefault(row.label, {})
            stems.setdefault(row.place.stem, []).append((image, row))
    if (stems := layers.get(options.layer, {})) == {}:
        raise UsageError(f"the run has no layer {options.layer!r}", f"it has {', '.join(layers)}")
    if options.stem not in stems:
        hint = f"it has {', '.join(stems)}; see --tensor"
        raise UsageError(f"{options.layer} has no {options.stem!r}", hint)
    return stems[options.stem]


def _wanted(options: SheetOptions, rows: Sequence[Capture]) -> list[int]:
    """The channels to show."""
    drawn = sorted({channel for row in rows for channel in row.drawn or [ALL]})
    text = options.pick
    if text is None:
        return drawn
    if drawn == [ALL]:
        words = f"--pick {text}: all channels of {options.layer} are one tile"
        raise UsageError(words, "leave out --pick, or run without --reduce")
    try:
        wanted = read_ranges(text)
    except ValueError as error:
        words = f"--pick {text!r}: {str(error)!r} is no channel or range"
        raise UsageError(words, "0-31, 3,7,12") from None
    if missing := sorted(set(wanted) - set(drawn)):
        hint = f"{len(drawn)} channels were, from {drawn[0]} to {drawn[-1]}"
        raise UsageError(f"--pick {text}: channel {missing[0]} was not drawn", hint)
    return wanted


def _column(image: ReadImage, row: Capture, channels: Sequence[int]) -> list[Cell]:
    """What the model saw, then an image's tiles: of a channel all its slices side by side."""
    picture, plan, side = image.picture(row.file).convert("RGB"), row.plan, row.side
    height, width = plan.tile
    seen = image.picture(INPUT_FILE).convert("RGB")
    factor = min(max(width * side, _SMALLEST) / seen.width, max(height, _SMALLEST) / seen.height)
    cells: list[Cell] = [sheet.resized(seen, factor, Image.Resampling.BICUBIC)]
    slots = {channel: slot * side for slot, channel in enumerate(row.drawn or [ALL])}
    for channel in channels:
        if channel not in slots:
            cells.append(None)
            continue
        strip = Image.new("RGB", (width * side, height))
        for n in range(side):
            left, top, _, _ = plan.box(slots[channel] + n)
            strip.paste(picture.crop((left, top, left + width, top + height)), (n * width, 0))
        cells.append(strip)
    return cells
