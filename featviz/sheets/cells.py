"""What a sheet shows of its runs: which images, layers and channels, and their tiles,
which are cut from the runs' grids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from featviz.drawing.channels import choose_channels
from featviz.drawing.values import MEAN
from featviz.errors import LayoutError, UsageError
from featviz.hooks import selectors
from featviz.options.commands import SheetOptions
from featviz.records import Bytes, Floats, Layer
from featviz.rundir import INPUT_FILE
from featviz.rundir.image import ReadImage
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import Capture
from featviz.text import listed, quoted

ALL = -1
"""Stands for the one tile that all channels became (`run --reduce`)."""
MOST_ROWS = 24
"""Channels of a layer that a sheet shows, unless it is told which."""
_NAMED = 12
"""Layers or images that a message names."""


class SheetRun(NamedTuple):
    """A run that a sheet shows, or a step of a training."""

    name: str
    run: ReadRun


class SheetLayer(NamedTuple):
    """A tensor of a layer, and the channels of it that a sheet shows."""

    label: str
    channels: Sequence[int]
    """The same for all images; ALL alone for the one tile of all channels."""
    slices: int
    """Tiles side by side for each channel: steps of a clip, regions of a batch."""


class ImageCapture(NamedTuple):
    """A tensor of an image of a run."""

    image: ReadImage
    row: Capture


@dataclass(frozen=True)
class SheetContent:
    """What a sheet shows."""

    runs: Sequence[SheetRun]
    images: Sequence[str]
    """Names in the runs."""
    layers: Sequence[SheetLayer]
    captures: Mapping[tuple[int, str, str], ImageCapture]
    """By the number of the run, the label of the layer and the name of the image."""

    @property
    def slices(self) -> int:
        """The most tiles that a channel has."""
        return max(layer.slices for layer in self.layers)


def read_content(runs: Sequence[SheetRun], options: SheetOptions) -> SheetContent:
    """Find the images, layers and channels that the options name in the runs.

    Raises:
        UsageError: the runs have no such image, layer, tensor or channels.
    """
    names = dict.fromkeys(name for run in runs for name in run.run.images)
    images = _chosen_images(list(names), options.images)
    captures: dict[tuple[int, str, str], ImageCapture] = {}
    stems: dict[str, set[str]] = {}
    for number, run in enumerate(runs):
        for name in images:
            if name not in run.run.images:
                continue
            image = run.run.images[name]
            for row in image.captures.values():
                stems.setdefault(row.label, set()).add(row.place.stem)
                if row.place.stem == options.tensor:
                    captures[number, row.label, name] = ImageCapture(image, row)
    rows = [capture.row for capture in captures.values()]
    labels = _chosen_layers(rows, options, stems)
    layers = []
    for label in labels:
        of_layer = [capture for key, capture in captures.items() if key[1] == label]
        channels = _chosen_channels(label, of_layer, options.channels)
        slices = max(row.side for _, row in of_layer)
        layers.append(SheetLayer(label, channels, slices))
    return SheetContent(runs, images, layers, captures)


def _chosen_images(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Images by their names, file names or globs, in the order of the patterns."""
    if not patterns:
        return list(names)
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matching = []
        for name in names:
            path = PurePosixPath(name)
            if any(fnmatchcase(s, pattern) for s in (name, path.name, path.stem)):
                matching.append(name)
        if not matching:
            shown = [quoted(name) for name in names]
            raise UsageError(
                f"the runs have no image {quoted(pattern)!r}",
                f"they have {listed(shown, _NAMED)}",
            )
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def _chosen_layers(
    rows: Iterable[Capture], options: SheetOptions, stems: Mapping[str, set[str]]
) -> list[str]:
    """The labels of the layers that `--layers` selects, in the order of the model."""
    layers = {
        row.label: Layer(row.index, row.layer, row.type, classes=(row.type,))
        for row in rows
    }
    if not layers:
        there = sorted({stem for each in stems.values() for stem in each})
        raise UsageError(
            f"the runs have no {quoted(options.tensor)!r}",
            f"they have {listed(there, _NAMED)}; see --tensor",
        )
    in_order = sorted(layers.values(), key=lambda layer: layer.index)
    names = [quoted(layer.label) for layer in in_order]
    if options.layers is None:
        if len(names) > 1:
            raise UsageError(
                f"the runs have {len(names)} layers",
                f"--layers takes some of {listed(names, _NAMED)}",
            )
        return list(layers)
    selected = selectors.select(in_order, selectors.parse(options.layers, in_order))
    if not selected:
        raise UsageError(
            f"the runs have no layer {quoted(options.layers)!r}",
            f"they have {listed(names, _NAMED)}",
        )
    return [layer.label for layer in selected]


def _chosen_channels(
    label: str, captures: Sequence[ImageCapture], text: str | None
) -> list[int]:
    """The channels of a layer that are shown of all images: those that `text` names, or
    the first of a ranking over all images."""
    drawn = sorted({channel for _, row in captures for channel in row.drawn})
    if not drawn:
        if text is not None:
            raise UsageError(
                f"--channels {text}: all channels of {quoted(label)} are one tile",
                "leave out --channels, or run without --reduce",
            )
        return [ALL]
    if text is None:
        if len(drawn) <= MOST_ROWS:
            return drawn
        text = f"top:{MOST_ROWS}"
    count = max(row.maps for _, row in captures)
    means = np.full((len(captures), count), np.nan)
    shares = np.full((len(captures), count), np.nan)
    for number, (image, row) in enumerate(captures):
        stats = image.stats()
        means[number, : row.maps] = stats[row.place.stats_key][:, MEAN]
        deviations = np.nan_to_num(stats[row.place.deviations_key])
        # one image of strong contrasts would else choose for all others
        shares[number, : row.maps] = deviations / (deviations.max() or 1)
    try:
        return choose_channels(text, drawn, _average(means), _average(shares))
    except LayoutError as error:
        message = f"{quoted(label)} {error.message}"
        raise UsageError(message, f"it has {drawn[0]} to {drawn[-1]}") from None


def _average(numbers: Floats) -> Floats:
    """The mean of the finite numbers of each column [images, C]; NaN where there are
    none."""
    finite = np.isfinite(numbers)
    count = np.where(finite.any(0), finite.sum(0), np.nan)
    average: Floats = np.where(finite, numbers, 0).sum(0) / count
    return average


def cut_tiles(capture: ImageCapture, channels: Sequence[int]) -> dict[int, list[Bytes]]:
    """The tiles of channels as the run drew them, one for each slice, uint8 [h, w, 3].

    A channel that was not drawn of this image is missing.
    """
    image, row = capture
    picture = np.asarray(image.picture(row.file).convert("RGB"))
    tiles: dict[int, list[Bytes]] = {}
    for position, channel in enumerate(row.drawn or [ALL]):
        if channel not in channels:
            continue
        tiles[channel] = []
        for number in range(position * row.side, (position + 1) * row.side):
            left, top, width, height = row.plan.box(number)
            tiles[channel].append(picture[top : top + height, left : left + width])
    return tiles


def input_frames(image: ReadImage) -> list[Bytes]:
    """What the model saw, uint8 [h, w, 3] for each frame of a clip, which stand side by
    side in its file."""
    picture = np.asarray(image.picture(INPUT_FILE).convert("RGB"))
    shapes = image.manifest.input.shapes
    if len(shapes) > 1:
        return [picture]
    count = max(1, picture.shape[1] // shapes[0][-1])
    return np.array_split(picture, count, axis=1)
