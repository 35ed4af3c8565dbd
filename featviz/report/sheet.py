"""The story of `sheet`: one picture of one layer, images by channels, cut from a run's
grids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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

# pixels of the longer edge of what the model saw, at least
_MIN_INPUT = 32
# letters of an image's name
_MAX_NAME = 28
_SHEET_FILE = picture_of("sheet")
# by which an earlier sheet is known, and may be replaced
_TEXT_CHUNK = PngInfo()
_TEXT_CHUNK.add_text("Software", "featviz sheet")

ALL = -1
"""Stands for the one tile that all channels became (`run --reduce`)."""
ORDERS = {"mean": 2, "max": 1, "variance": 3, "zeros": 4}
"""Columns of stats.npz by which channels are sorted; `index` sorts by number."""

SheetTile = Image.Image | None
"""None where an image does not have the channel."""


class Sheet(NamedTuple):
    """A sheet that was written."""

    path: Path
    images: list[str]
    channels: list[int]
    """None where all are one tile."""
    left_out: Mapping[str, str]
    """Images that are not on it, and why."""


class _Grid(NamedTuple):
    """The grid of a tensor of an image."""

    image: ReadImage
    row: Capture


def make_sheet(source: Path | Url, options: SheetOptions) -> Sheet:
    """Draw a layer's maps of all images of a run into one picture, as they are in its
    grids.

    Raises:
        UsageError: the run has no such layer, tensor or channels, or the sheet would be
            too large.
        StoreError: the run has no complete image.
    """
    out = options.out or Path(safe_name(f"sheet-{options.layer}.png"))
    check_file(out, _SHEET_FILE, overwrite=options.overwrite)
    tiles: dict[str, list[SheetTile]] = {}
    damaged: list[DamagedError] = []
    with copied(source) as root:
        run = read_run(root, hold=True)
        grids = _grids(run, options)
        stats = [image.stats()[row.place.stats_key] for image, row in grids]
        channels = sort_channels(stats, _channels(options, grids), options.order)
        _check_size(grids, len(channels))
        for grid in grids:
            try:
                tiles[grid.image.name] = _image_tiles(grid, channels)
            except DamagedError as error:
                damaged.append(error)
    if not tiles:
        raise damaged[0]
    _write(out, tiles, channels, options)
    return Sheet(
        path=out,
        images=list(tiles),
        channels=[channel for channel in channels if channel != ALL],
        left_out=run.left_out | {error.image.name: error.message for error in damaged},
    )


def _write(
    out: Path,
    tiles: Mapping[str, Sequence[SheetTile]],
    channels: Sequence[int],
    options: SheetOptions,
) -> None:
    """Lay the tiles out: images side by side, channels below each other, or transposed."""
    image_names = [cut(name, _MAX_NAME) for name in tiles]
    channel_names = ["all" if channel == ALL else str(channel) for channel in channels]
    by_image = [list(row) for row in tiles.values()]
    if options.transpose:
        picture = sheet.table(["input", *channel_names], image_names, by_image)
    else:
        by_channel = [list(row) for row in zip(*by_image, strict=True)]
        picture = sheet.table(image_names, ["input", *channel_names], by_channel)
    with writing(out, _SHEET_FILE, overwrite=options.overwrite) as file:
        picture.save(file, "png", pnginfo=_TEXT_CHUNK)


def _check_size(grids: Sequence[_Grid], channels: int) -> None:
    pixels = channels * sum(math.prod(row.plan.tile) * row.side for _, row in grids)
    if pixels > MAX_PIXELS:
        raise UsageError(
            f"the sheet would have {pixels // 1_000_000} megapixels, more than Pillow"
            " opens",
            "--pick takes fewer rows",
        )


def sort_channels(
    stats: Sequence[Floats], channels: Sequence[int], order: str
) -> list[int]:
    """Order channels by a statistic, its mean over the images: the largest first, equal
    ones in their order, those without a finite value last.

    Args:
        stats: [channels, 6] of each image.
        order: `index`, or one of ORDERS.
    """
    if order == "index":
        return sorted(channels)

    def rank(channel: int) -> tuple[float, int]:
        values = [
            float(table[channel, ORDERS[order]])
            for table in stats
            if channel < len(table)
        ]
        finite = [value for value in values if np.isfinite(value)]
        if order == "variance":  # the column has standard deviations
            finite = [value**2 for value in finite]
        return -float(np.mean(finite)) if finite else np.inf, channel

    return sorted(channels, key=rank)


def _grids(run: ReadRun, options: SheetOptions) -> list[_Grid]:
    """The grids of the tensor that the options name, one for each image that has it."""
    if not run.images:
        reason = next(iter(run.left_out.values()), "its run.json says why")
        raise StoreError(f"{run.root} has no complete image", reason)
    grids_of: dict[str, dict[str, list[_Grid]]] = {}
    for image in run.images.values():
        for row in image.captures.values():
            stems = grids_of.setdefault(row.label, {})
            stems.setdefault(row.place.stem, []).append(_Grid(image, row))
    if options.layer not in grids_of:
        raise UsageError(
            f"the run has no layer {options.layer!r}", f"it has {', '.join(grids_of)}"
        )
    stems = grids_of[options.layer]
    if options.stem not in stems:
        hint = f"it has {', '.join(stems)}; see --tensor"
        raise UsageError(f"{options.layer} has no {options.stem!r}", hint)
    return stems[options.stem]


def _channels(options: SheetOptions, grids: Sequence[_Grid]) -> list[int]:
    """The channels of `--pick`, or all that some image has."""
    drawn = sorted({channel for grid in grids for channel in grid.row.drawn or [ALL]})
    text = options.pick
    if text is None:
        return drawn
    if drawn == [ALL]:
        message = f"--pick {text}: all channels of {options.layer} are one tile"
        raise UsageError(message, "leave out --pick, or run without --reduce")
    try:
        channels = read_ranges(text)
    except ValueError as error:
        message = f"--pick {text!r}: {str(error)!r} is no channel or range"
        raise UsageError(message, "0-31, 3,7,12") from None
    missing = sorted(set(channels) - set(drawn))
    if missing:
        hint = f"{len(drawn)} channels were, from {drawn[0]} to {drawn[-1]}"
        raise UsageError(f"--pick {text}: channel {missing[0]} was not drawn", hint)
    return channels


def _image_tiles(grid: _Grid, channels: Sequence[int]) -> list[SheetTile]:
    """What the model saw, then an image's tiles: of a channel all its slices side by
    side."""
    image, row = grid
    picture = image.picture(row.file).convert("RGB")
    height, width = row.plan.tile
    slices = row.side
    tiles: list[SheetTile] = [_input_tile(image, width * slices, height)]
    first_tile = {
        channel: slot * slices for slot, channel in enumerate(row.drawn or [ALL])
    }
    for channel in channels:
        if channel not in first_tile:
            tiles.append(None)
            continue
        strip = Image.new("RGB", (width * slices, height))
        for slice in range(slices):
            left, top, _, _ = row.plan.box(first_tile[channel] + slice)
            tile = picture.crop((left, top, left + width, top + height))
            strip.paste(tile, (slice * width, 0))
        tiles.append(strip)
    return tiles


def _input_tile(image: ReadImage, width: int, height: int) -> Image.Image:
    """What the model saw, as large as a tile, but large enough to be seen."""
    seen = image.picture(INPUT_FILE).convert("RGB")
    scale = min(
        max(width, _MIN_INPUT) / seen.width, max(height, _MIN_INPUT) / seen.height
    )
    return sheet.resized(seen, scale, Image.Resampling.BICUBIC)
