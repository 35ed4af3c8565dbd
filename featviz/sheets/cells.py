"""The content of a sheet: its images, layers and channels, and their tiles, which are cut
out of the runs' grids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
from PIL import Image

from featviz.drawing.channels import (
    choose_channels,
    farthest_first,
    warn_of_missing,
)
from featviz.drawing.outlines import with_ring
from featviz.drawing.place_tiles import (
    ImageCapture,
    component_tiles,
    parse_place,
    similarity_tiles,
)
from featviz.drawing.values import MEAN
from featviz.errors import LayoutError, StoreError, UsageError
from featviz.hooks import selectors
from featviz.options.commands import SheetOptions
from featviz.options.values import channel_choice
from featviz.records import Bytes, Floats, Layer
from featviz.rundir import INPUT_FILE
from featviz.rundir.image import DamagedError, ReadImage
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import Capture
from featviz.text import layer_named, listed, quoted

ALL = -1
"""The channel number of a tile of all channels (`run --reduce`)."""
MOST_ROWS = 24
"""Channels of a layer that a sheet shows at most, unless the user chooses channels."""
_COMPARED_IMAGES = 4
"""Images in which the maps of channels are compared, about."""
_COMPARED_SIDE = 32
"""Pixels to which the longer side of a map is averaged down for this comparison, about."""
_NAMED = 12
"""Layers or images that a message names at most."""


class SheetRun(NamedTuple):
    """A run that a sheet shows, or a step of a training."""

    name: str
    """The text beside the run's rows: the name of its folder, or `step 100`."""
    run: ReadRun


class SheetLayer(NamedTuple):
    """A tensor of a layer, and the channels of it that a sheet shows."""

    label: str
    """`relu`, or `relu.call1` for its second call."""
    channels: Sequence[int]
    """The channels, the same for all images. [ALL] for one tile of all channels."""


class CellKey(NamedTuple):
    """A tensor of one image in one run, whose tiles stand in cells of a sheet."""

    run: int
    """Number of the run among the runs of the sheet, from 0."""
    layer: str
    """The label of the tensor, as in `SheetLayer`."""
    image: str
    """Name of the image in the run."""


@dataclass
class SheetContent:
    """The content of a sheet; `read_content` fills it layer by layer."""

    runs: Sequence[SheetRun]
    images: list[str] = field(default_factory=list)
    """Names of the images that could be read."""
    layers: list[SheetLayer] = field(default_factory=list)
    rows: dict[CellKey, Capture] = field(default_factory=dict)
    """The manifests' rows of the tensors."""
    tiles: dict[CellKey, dict[int, list[Bytes]]] = field(default_factory=dict)
    """The tiles of each drawn channel, by its number: one for each slice, as the run drew
    them, uint8 [h, w, 3]."""
    inputs: dict[str, list[Bytes]] = field(default_factory=dict)
    """What the model saw of each image, by the image's name; of a clip, a picture for each
    frame."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Names of images with a file that cannot be read, and the reasons."""

    @property
    def slices(self) -> int:
        """The number of slices of the tensor with the most slices."""
        return max(row.slice_count for row in self.rows.values())

    def cell_picture(
        self, pictures: Sequence[Bytes] | None, slice: int | None
    ) -> Bytes | None:
        """The picture of a cell.

        Args:
            pictures: the pictures of the slices or frames, at least one, all of one size;
                None for an empty cell.
            slice: number of a slice, below `slices`; None puts all pictures side by side.

        Returns:
            uint8 [h, w, 3]; None for an empty cell.
        """
        if pictures is None:
            return None
        if slice is None:
            return np.hstack(pictures)
        # Strides shorten a clip: a map may have 4 slices for 16 frames. Fewer pictures
        # than `slices` are shown several times each; of more pictures, those in the middle
        # of each part are shown.
        return pictures[int((slice + 0.5) * len(pictures) / self.slices)]

    def tile(self, key: CellKey, channel: int, slice: int | None) -> Bytes | None:
        """The picture of a channel's cell, see `cell_picture`; None if the run did not draw the
        channel."""
        return self.cell_picture(self.tiles.get(key, {}).get(channel), slice)

    def add_place_tiles(
        self, captures: Mapping[CellKey, ImageCapture], options: SheetOptions
    ) -> None:
        """Add the one tile that --reduce or --similar-to makes of each capture. A ring is
        drawn on the input around the place of --similar-to.

        Args:
            captures: captures of one layer in all images of all runs.

        Raises:
            UsageError: options exclude each other, a run lacks the image of
                --similar-to, or a grid holds no values.
            DamagedError: a picture cannot be read: each tile depends on all images.
        """
        for key, tile in _place_tiles(captures, options).items():
            image, row = captures[key]
            # The tile's colours do not stand for values of the layer: no colour bar
            # (`range`), and no note on scaling (`normalize`).
            self.rows[key] = replace(row, range=None, normalize="")
            self.tiles[key] = {ALL: [tile]}
            self._add_input(key.image, image)
        if options.similar_to is not None:
            name, x, y = parse_place(options.similar_to)
            frames = self.inputs[name]
            self.inputs[name] = [with_ring(frame, x, y) for frame in frames]

    def add_channels(
        self, captures: Mapping[CellKey, ImageCapture], channels: Sequence[int]
    ) -> None:
        """Add the tiles of some channels of each capture. An image with damaged files is
        noted in `damaged`; the other images are read all the same."""
        for key, (image, row) in captures.items():
            self.rows[key] = row
            try:
                self.tiles[key] = _cut_tiles(image, row, channels)
                self._add_input(key.image, image)
            except DamagedError as error:
                self.damaged[key.image] = error.message

    def _add_input(self, name: str, image: ReadImage) -> None:
        """Read what the model saw of an image, once for all its layers and runs."""
        if name not in self.inputs:
            self.inputs[name] = _input_frames(image)


def read_content(runs: Sequence[SheetRun], options: SheetOptions) -> SheetContent:
    """Find the images, layers and channels that the options name in the runs, and cut
    their tiles out of the runs' grids.

    Args:
        runs: at least one, read with statistics (`keep_stats=True`), by which channels
            are ranked.

    Raises:
        UsageError: the runs have no such image, layer, tensor or channels.
        StoreError: no image can be read; or, with --reduce or --similar-to, one of them
            cannot.
    """
    # a dict as an ordered set: runs mostly have the same images
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(run.run.images)
    images = _choose_images(list(names), options.images)
    captures = _captures(runs, images, options.tensor)
    labels = _choose_layers(captures, options.layers)
    is_of_places = options.reduce is not None or options.similar_to is not None
    content = SheetContent(runs)
    for label in labels:
        # channels are chosen over all runs, so that all show the same ones
        of_layer = {
            key: capture for key, capture in captures.items() if key.layer == label
        }
        if is_of_places:
            content.layers.append(SheetLayer(label, [ALL]))
            content.add_place_tiles(of_layer, options)
        else:
            channels = _choose_channels(
                label, list(of_layer.values()), options.channels
            )
            content.layers.append(SheetLayer(label, channels))
            content.add_channels(of_layer, channels)
    if not content.inputs:
        first_reason, *_ = content.damaged.values()
        raise StoreError(first_reason)
    content.images = [name for name in images if name in content.inputs]
    return content


def _place_tiles(
    captures: Mapping[CellKey, ImageCapture], options: SheetOptions
) -> dict[CellKey, Bytes]:
    """Compute tiles from the places of all images of a run together.

    Args:
        captures: captures of one layer in all images of all runs.
        options: `reduce` or `similar_to` is set.

    Returns:
        A tile uint8 [h, w, 3] for each capture.

    Raises:
        UsageError: more than one of `reduce`, `similar_to` and `channels` is set; a run
            lacks the image of `similar_to`; or a grid has no values of places.
        DamagedError: a picture cannot be read.
    """
    if options.channels is not None or None not in (options.reduce, options.similar_to):
        raise UsageError(
            "--reduce, --similar-to and --channels exclude each other",
            "the first two make one tile of all channels",
        )
    tiles: dict[CellKey, Bytes] = {}
    # Each run is computed alone: the channels of two models cannot be compared.
    for run in sorted({key.run for key in captures}):
        keys = {key.image: key for key in captures if key.run == run}
        of_run = {name: captures[key] for name, key in keys.items()}
        if options.similar_to is None:
            made = component_tiles(of_run)
        else:
            made = similarity_tiles(of_run, parse_place(options.similar_to))
        tiles |= {keys[name]: tile for name, tile in made.items()}
    return tiles


def _captures(
    runs: Sequence[SheetRun], images: Sequence[str], tensor: str | None
) -> dict[CellKey, ImageCapture]:
    """The captures of the tensor that --tensor names, in all layers, by run and image.

    Args:
        images: names of images. The cells of images that a run lacks stay white.
        tensor: a value of --tensor, the name of a capture's file without its ending:
            `output`, `output.call1`. None for the outputs of all calls, if an output is
            one tensor.

    Raises:
        UsageError: no image of any run has such a tensor.
    """
    captures = {}
    stems = set()
    for number, run in enumerate(runs):
        for name in images:
            image = run.run.images.get(name)
            if image is None:
                continue
            for row in image.captures.values():
                address = row.capture_key
                stems.add(address.stem)
                is_taken = address.stem == tensor
                if tensor is None:
                    is_taken = address.kind == "output" and not address.key
                if is_taken:
                    captures[CellKey(number, row.label + address.suffix, name)] = (
                        ImageCapture(image, row)
                    )
    if not captures:
        message = f"the runs have no {quoted(tensor or 'output')!r}"
        there = listed(sorted(stems), _NAMED)
        raise UsageError(message, f"they have {there}; see --tensor")
    return captures


def _choose_images(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The images that match patterns, in the order of the patterns, each once.

    Args:
        names: names of the images of all runs.
        patterns: names, file names with or without their ending, or globs of these;
            empty for all images.

    Raises:
        UsageError: a pattern matches no image.
    """
    if not patterns:
        return list(names)
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matching = []
        for name in names:
            path = PurePosixPath(name)
            texts = (name, path.name, path.stem)
            # a name may contain characters that are special in a glob: `a[1].png`
            if pattern in texts or any(fnmatchcase(text, pattern) for text in texts):
                matching.append(name)
        if not matching:
            shown = [quoted(name) for name in names]
            raise UsageError(
                f"the runs have no image {quoted(pattern)!r}",
                f"they have {listed(shown, _NAMED)}",
            )
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def _choose_layers(
    captures: Mapping[CellKey, ImageCapture], text: str | None
) -> list[str]:
    """The labels of the layers that `--layers` selects, in the order of the model. A layer
    with several calls has a label for each call.

    Args:
        text: selectors; None takes the only layer of the runs.

    Raises:
        UsageError: no layer is selected, or `text` is None and there are several layers.
    """
    by_label = {}
    # the labels of a layer's calls, such as relu.call1, as ordered sets
    labels_of_calls: dict[str, dict[str, None]] = defaultdict(dict)
    for key, (_, row) in captures.items():
        # a manifest names the class of a layer, not its ancestors
        layer = Layer(row.index, row.layer, row.type, classes=(row.type,))
        by_label[row.label] = layer
        labels_of_calls[row.label][key.layer] = None
    layers = sorted(by_label.values(), key=lambda layer: layer.index)
    names = listed([quoted(layer.label) for layer in layers], _NAMED)
    selected = layers
    if text is None and len(layers) > 1:
        raise UsageError(
            f"a sheet of runs with {len(layers)} layers needs --layers",
            f"--layers takes some of {names}",
        )
    if text is not None:
        parsed = selectors.parse(text)
        selected = selectors.select(layers, parsed)
        if not selected:
            raise UsageError(
                f"the runs have no layer {quoted(text)!r}", f"they have {names}"
            )
        selectors.warn_of_unmatched(layers, parsed, "layer of the runs")
    labels: list[str] = []
    for layer in selected:
        labels += labels_of_calls[layer.label]
    return labels


def _choose_channels(
    label: str, captures: Sequence[ImageCapture], text: str | None
) -> list[int]:
    """The channels of a layer that are shown, the same for all images.

    Args:
        label: label of the layer, for messages.
        captures: captures of the layer in all images of all runs.
        text: a value of --channels. None for all channels that were drawn, but at most
            the MOST_ROWS with the highest means.

    Returns:
        Channels in the order of `choose_channels`; [ALL] if each capture is one tile of
        all channels.

    Raises:
        UsageError: none of the channels in `text` was drawn; each capture is one tile of
            all channels, but `text` chooses some; or only some captures are such tiles.
    """
    # runs may have drawn different channels: those of all runs can be shown
    in_any = set()
    for _, row in captures:
        in_any.update(row.drawn)
    drawn = sorted(in_any)
    warn_of_missing(text, {label: drawn})
    label = layer_named(quoted(label))
    if drawn and not all(row.drawn for _, row in captures):
        raise UsageError(
            f"{label} is one tile of all channels in some runs, and channels in others",
            "a sheet takes runs with --reduce, or runs without, not both",
        )
    if not drawn:
        if text is not None:
            raise UsageError(
                f"--channels {text}: all channels of {label} are one tile",
                "leave out --channels, or run without --reduce",
            )
        return [ALL]
    if text is None:
        if len(drawn) <= MOST_ROWS:
            return drawn
        text = f"top:{MOST_ROWS}"
    # one ranking over all images, since a row shows the same channel of all images
    strength = _channel_strength(captures)
    choice = channel_choice(text)
    if choice.rule == "varied":
        # take the half that varies most; `_choose_different` chooses among these
        text = f"varied:{max(choice.most * 3 // 2, len(drawn) // 2)}"
    try:
        chosen = choose_channels(text, drawn, strength.means, strength.deviations)
    except LayoutError as error:
        raise UsageError(
            f"{label} {error.message}", f"it has {drawn[0]} to {drawn[-1]}"
        ) from None
    if choice.rule == "varied":
        return _choose_different(captures, chosen, strength.deviations, choice.most)
    return chosen


def _choose_different(
    captures: Sequence[ImageCapture],
    ranking: Sequence[int],
    deviations: Floats,
    count: int,
) -> list[int]:
    """Choose channels of a ranking: the first one, then each time the one whose tiles
    differ most from those of all chosen channels. Channels with flat or nearly dark tiles
    come last.

    Args:
        captures: captures of the layer in all images of all runs. About _COMPARED_IMAGES
            of them are compared.
        ranking: channels, the best first.
        deviations: deviation of each channel, [C].
        count: how many channels are chosen, if the ranking has so many.
    """
    varying = [channel for channel in ranking if deviations[channel] > 0]
    rows = []
    for image, row in captures[:: -(-len(captures) // _COMPARED_IMAGES)]:
        # a capture counts only if all these channels were drawn
        if varying and set(varying) <= set(row.drawn):
            with suppress(DamagedError):  # `add_channels` will note it
                tiles = _cut_tiles(image, row, varying)
                rows.append(_thumbnails([tiles[channel][0] for channel in varying]))
    if not rows:
        return list(ranking[:count])
    points = np.concatenate(rows, axis=1)
    # In a map that is dark except for some pixels there is little to see, although it
    # differs from all others.
    contrasts = np.linalg.norm(points, axis=1)
    is_telling = contrasts >= contrasts.max() / 4
    is_telling[0] = True
    telling = [varying[position] for position in np.flatnonzero(is_telling)]
    chosen = [telling[n] for n in farthest_first(points[is_telling], count)]
    rest = [channel for channel in ranking if channel not in chosen]
    return (chosen + rest)[:count]


def _thumbnails(tiles: Sequence[Bytes]) -> Floats:
    """Average tiles of one size down, and subtract the mean of each: float32 [N, P], a row
    for each tile."""
    step = max(1, max(tiles[0].shape[:2]) // _COMPARED_SIDE)
    small = [np.asarray(Image.fromarray(tile).reduce(step)).ravel() for tile in tiles]
    rows: Floats = np.stack(small).astype(np.float32)
    rows -= rows.mean(axis=1, keepdims=True)
    return rows


class _ChannelStrength(NamedTuple):
    """The numbers by which the channels of a layer are ranked: averages over all images,
    [C]; NaN for a channel without a finite number in any image."""

    means: Floats
    deviations: Floats
    """Standard deviations, 0..1. In each image, they are divided by the largest one of the
    layer before they are averaged."""


def _channel_strength(captures: Sequence[ImageCapture]) -> _ChannelStrength:
    """Compute the numbers by which the channels of a layer are ranked.

    Args:
        captures: at least one, of runs that were read with statistics.
    """
    # another model's layer may have fewer channels: its rows are filled up with NaN,
    # which the averages leave out
    channels = max(row.maps for _, row in captures)
    means = np.full((len(captures), channels), np.nan)
    shares = np.full((len(captures), channels), np.nan)
    for number, (image, row) in enumerate(captures):
        stats = image.stats()
        means[number, : row.maps] = stats[row.capture_key.stats_key][:, MEAN]
        # These deviations leave out the border that padding makes: a flat map with a
        # bright frame would come first.
        deviations = np.nan_to_num(stats[row.capture_key.deviations_key])
        # divided by the largest: else one image of strong contrasts would decide
        shares[number, : row.maps] = deviations / (deviations.max() or 1)
    # the mean of each column's finite numbers; NaN if there are none
    return _ChannelStrength(
        means=np.ma.masked_invalid(means).mean(0).filled(np.nan),
        deviations=np.ma.masked_invalid(shares).mean(0).filled(np.nan),
    )


def _cut_tiles(
    image: ReadImage, row: Capture, channels: Sequence[int]
) -> dict[int, list[Bytes]]:
    """Cut the tiles of channels out of a picture.

    Args:
        channels: the channels; those that were not drawn are left out. ALL is the channel
            of a picture with one tile of all channels.

    Returns:
        By channel, a tile uint8 [h, w, 3] for each slice.

    Raises:
        DamagedError: the picture cannot be read.
    """
    picture = np.asarray(image.picture(row.file).convert("RGB"))
    tiles: dict[int, list[Bytes]] = {}
    for position, channel in enumerate(row.drawn or [ALL]):
        if channel not in channels:
            continue
        tiles[channel] = []
        # in a grid, the slices of a channel follow each other
        for number in range(
            position * row.slice_count, (position + 1) * row.slice_count
        ):
            left, top, width, height = row.plan.box(number)
            # a copy, so that the grid's memory, which may be large, becomes free
            tiles[channel].append(
                picture[top : top + height, left : left + width].copy()
            )
    return tiles


def _input_frames(image: ReadImage) -> list[Bytes]:
    """What the model saw: a picture [h, w, 3], or one for each frame of a clip. In the
    file, frames stand side by side.

    Raises:
        DamagedError: the file cannot be read.
    """
    picture = np.asarray(image.picture(INPUT_FILE).convert("RGB"))
    shapes = image.manifest.input.shapes
    width = picture.shape[1]
    if len(shapes) == 1:  # several inputs stand side by side, too, but are not frames
        width = shapes[0][-1]
    return np.array_split(picture, max(1, picture.shape[1] // width), axis=1)
