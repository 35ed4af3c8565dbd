"""Writes the data for `assets/places.js`, with which a page finds similar places in images.
A place is a position in the map of a layer. For each place of each image the data have a
shortened vector, and the channels that stand out there.

    places.js          the code
    places-index.js    window.FEATVIZ_PLACES = {layers: [...], images: [...], ...}
    places-000.js      FEATVIZ_PLACES.add(0, [{size, vectors, channels, values}, ...])

A browser loads the index when a user asks for places, then the script of the page's image,
then the scripts of the first images, with which every image is compared.

    conv1 relu1 conv2 relu2 pool conv3 relu3 ...     at most six layers have vectors; any
            ^           ^                ^           other layer uses those of the next one

A vector has one number for each channel, and is scaled to length 1. It is shortened to its
coordinates along the main axes of its layer, which all images share. A coordinate is an
int8, in a unit that each axis has of its own. The number of axes is the smallest with
which the cosines of 500 random pairs are right within 0.03. If that takes more bytes than
an image may have, squares of four places are averaged. The page shows the error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from featviz.drawing.readback import (
    MOST_SIDE,
    PlaceVectors,
    is_map_of_image,
    main_axes,
    read_places,
    unit_vectors,
    why_no_places,
)
from featviz.records import Floats
from featviz.report.engine import ReportFiles, Site
from featviz.report.figures import Figure, Group, ReportPage, ReportPages
from featviz.report.grids import base64_of, script_json
from featviz.rundir.image import DamagedError
from featviz.rundir.schema import Capture

PLACES_ASSET = "places.js"
"""The script that shows places; only a report with places has it."""
INDEX_SCRIPT = "places-index.js"
COMPARED_IMAGES = 50
"""How many of the first images every place is compared with: a browser loads the scripts
of all of them."""
MOST_LAYERS = 6
"""How many layers have vectors: enough for the last layer of each resolution."""
_MOST_BYTES = 225_000
"""The most bytes for an image in all layers; base64 makes 300 kB of them."""
_COUNTS = (8, 16, 24, 32, 48, 64)
"""The numbers of axes that are tried."""
_THREADS = 2
_PAIRS = 500
_SAMPLED = 4096
"""About how many places the axes and units are computed from."""
_LARGEST_ERROR = 0.03
_SHOWN_CHANNELS = 8
"""How many channels that stand out are shown for a place."""
_TENTH = 10
"""How many levels of int8 a standard deviation has."""


@dataclass
class LayerEntry:
    """A tensor of a layer in the index. Its number is its position in the index."""

    name: str
    type: str
    stem: str
    page: str
    """The id of the layer's page."""
    spot: str
    """The address of channel 0 on that page."""
    reason: str = ""
    """Why the layer has no places. Then the fields below keep their defaults."""
    stand_in: int | None = None
    """The number of the layer whose vectors are used instead; None for a layer with
    vectors, or with a reason."""
    channels: int = 0
    error: float = 0.0
    """The largest error of the cosines of 500 random pairs of vectors."""
    units: list[float] = field(default_factory=list)
    """The coordinate that level 1 means, for each axis."""


@dataclass
class ImageEntry:
    """An image in the index."""

    name: str
    page: str
    address: str
    input: str
    """The address of the picture of what the model saw."""
    size: tuple[int, int]
    """Width and height of this picture, in pixels."""
    script: str
    """The name of the script with the places of the image."""


@dataclass
class PlacesEntry:
    """The places of an image in a layer."""

    size: tuple[int, int]
    """The numbers of rows and columns of places."""
    factor: int
    """A place is the average of this many rows, and as many columns, of the map."""
    field: list[int] | None
    """`Capture.receptive_field` of the map."""
    vectors: str
    """Base64 of int8 [places, axes]: the coordinates, in the units of the axes."""
    channels: str
    """Base64 of [places, 8]: the channels that stand out most at each place; uint16 in a
    layer of more than 256 channels, else uint8."""
    values: str
    """Base64 of int8 [places, 8]: how far these channels are from their means, in tenths
    of a standard deviation."""


class _PlacesBasis(NamedTuple):
    """The axes and the statistics of a layer by which its places are written, the same for
    all images. C is the number of channels."""

    axes: Floats
    """float32 [axes, C]: the main axes, each of length 1."""
    units: Floats
    """float32 [axes]: the coordinate that level 1 means."""
    error: float
    """The largest error of the cosines of random pairs of vectors."""
    mean: Floats
    """float32 [C]: the means of the channels over all places of the compared images."""
    deviation: Floats
    """float32 [C]: the standard deviations over the same places; infinite for a constant
    channel."""


@dataclass
class _PlacesLayer:
    """A tensor of a layer, while its places are read."""

    entry: LayerEntry
    figures: Mapping[str, Figure]
    """The figures of the tensor in this run, by the name of the image."""
    basis: _PlacesBasis | None = None
    """None until all compared images are read, and for a layer without vectors."""
    is_halved: bool = False
    """Whether squares of four places are averaged; it is set together with `basis`."""

    @property
    def has_vectors(self) -> bool:
        """Whether the vectors of this layer are written."""
        return not self.entry.reason and self.entry.stand_in is None

    @property
    def row(self) -> Capture:
        """The capture of the tensor in the first image that has it."""
        return next(iter(self.figures.values())).row

    def read(self, name: str, stats: Mapping[str, Floats]) -> PlaceVectors | None:
        """Read the places of an image from the grid of this tensor, and average them if
        `is_halved`. None if the image has no such grid, or places cannot be read from it.

        Args:
            name: the name of the image.
            stats: the statistics of the image, from `ReadImage.stats`.
        """
        figure = self.figures.get(name)
        # in some images a layer may be constant, not finite, or have other channels
        if figure is None or why_no_places(figure.row):
            return None
        if figure.row.maps != self.row.maps:
            return None
        image_places = None
        with suppress(DamagedError):  # then the page shows the picture as broken
            table = stats[figure.row.capture_key.stats_key]
            image_places = read_places(figure.picture.image, figure.row, table)
        if image_places is not None and self.is_halved:
            return halved(image_places, figure.row.plan.map_size)
        return image_places

    def encode(self, name: str, image_places: PlaceVectors) -> PlacesEntry:
        """The entry of an image's places. `basis` must be set.

        Args:
            name: the name of the image.
            image_places: the places of the image, from `read`.
        """
        assert self.basis is not None
        channels, values = standing_out(
            image_places.vectors, self.basis.mean, self.basis.deviation
        )
        coordinates = unit_vectors(image_places.vectors) @ self.basis.axes.T
        return PlacesEntry(
            size=image_places.size,
            factor=image_places.factor,
            field=self.figures[name].row.receptive_field,
            vectors=base64_of(_levels(coordinates, self.basis.units)),
            channels=base64_of(channels),
            values=base64_of(values),
        )


class PlaceScripts:
    """Makes the scripts of places while the pages of images are rendered, when the
    statistics of the images are in memory."""

    def __init__(self, pages: ReportPages, site: Site) -> None:
        """Begin without an image.

        Args:
            pages: all pages of the report.
            site: what these pages share, for addresses.
        """
        self._images = pages.images
        self._site = site
        self._layers = _layers(pages, site)
        self._added = 0  # how many images were added
        self._compared_stats: dict[str, Mapping[str, Floats]] = {}

    def add(self, page: ReportPage, stats: Mapping[str, Floats]) -> ReportFiles:
        """Add the next image, and yield the scripts that can be written then. The scripts
        of all compared images are yielded when the last of them is added; the script of
        any later image, when it is added.

        Args:
            page: the page of the image. Images must be added in the order of the report.
            stats: the statistics of the image, from `ReadImage.stats`.
        """
        compared = self._images[:COMPARED_IMAGES]
        number = self._added
        self._added += 1
        if number >= len(compared):
            entries = _entries_of(self._layers, page.name, stats)
            yield self._script(number, entries)
            return
        # the axes are computed from all compared images
        self._compared_stats[page.name] = _stats_of_places(self._layers, page, stats)
        if number == len(compared) - 1:
            entries_of = _compared_entries(self._layers, self._compared_stats)
            for number, entries in enumerate(entries_of.values()):
                yield self._script(number, entries)
            self._compared_stats.clear()

    def index(self) -> ReportFiles:
        """The script with the index. All images must have been added before."""
        images = [self._image_entry(number) for number in range(len(self._images))]
        index = {
            "layers": [layer.entry for layer in self._layers],
            "images": images,
            "compared": min(COMPARED_IMAGES, len(images)),
        }
        yield INDEX_SCRIPT, [f"window.FEATVIZ_PLACES = {script_json(index)};\n"]

    def _script(
        self, number: int, entries: Sequence[PlacesEntry | None]
    ) -> tuple[str, list[str]]:
        """The script of an image: its name and its text.

        Args:
            number: the number of the image.
            entries: the places of the image in each layer, in the order of the index.
        """
        text = f"FEATVIZ_PLACES.add({number}, {script_json(entries)});\n"
        return _script_of(number), [text]

    def _image_entry(self, number: int) -> ImageEntry:
        """The entry of an image in the index, by its number."""
        page = self._images[number]
        shown = page.inputs[False]
        return ImageEntry(
            name=page.name,
            page=page.id,
            address=self._site.links.page(page.id),
            input=self._site.links.picture(shown),
            size=shown.size,
            script=_script_of(number),
        )


# Layers


def _layers(pages: ReportPages, site: Site) -> list[_PlacesLayer]:
    """The layers of a run with maps of the image, in the order of their pages. Each has
    vectors, a stand-in, or a reason why it has no places."""
    layers = []
    for page in pages.layers:
        for group in page.groups:
            # vectors, for example, have no places in the image
            if any(is_map_of_image(figure.row) for figure in group.of_this_run):
                layers.append(_layer(group, site))
    entries = [layer.entry for layer in layers]
    numbers = {(entry.page, entry.stem): n for n, entry in enumerate(entries)}
    # Stand-ins follow the order in which the calls ran: a page has all calls of its layer,
    # between which other layers ran.
    in_order = []
    for group in pages.tensors:
        number = numbers.get((group.page, group.stem))
        if number is not None and not entries[number].reason:
            in_order.append(number)
    answering = _answering(layers, in_order)
    # the last layer always has vectors, so every other one finds a stand-in behind it
    stand_in = None
    for number in reversed(in_order):
        if number in answering:
            stand_in = number
        else:
            entries[number].stand_in = stand_in
    return layers


def _layer(group: Group, site: Site) -> _PlacesLayer:
    """A tensor of a layer, before its places are read.

    Args:
        group: the group of the tensor on the page of the layer.
    """
    labelled = bool(site.options[False].get("labels"))
    reasons = [why_no_places(figure.row, labelled) for figure in group.of_this_run]
    entry = LayerEntry(
        name=group.layer,
        type=group.type,
        stem=group.stem,
        page=group.page,
        spot=site.links.element(group.page, site.anchor(group, 0)),
        reason="" if "" in reasons else reasons[0],
    )
    return _PlacesLayer(entry, {figure.name: figure for figure in group.of_this_run})


def _answering(layers: Sequence[_PlacesLayer], in_order: Sequence[int]) -> list[int]:
    """The numbers of the layers that get vectors, at most MOST_LAYERS: the last layer of
    each resolution, and then layers in the middle of the widest gaps between these.

    Args:
        layers: the layers of the run.
        in_order: the numbers of the layers with places, in the order in which they ran.
    """
    if len(in_order) <= MOST_LAYERS:
        return list(in_order)
    ends = []  # positions in `in_order`
    position = -1
    sizes = [layers[number].row.plan.map_size for number in in_order]
    for _, run in groupby(sizes):
        position += len(list(run))
        ends.append(position)
    # the resolution of a U-Net or a feature pyramid changes more often: drop some ends
    if len(ends) > MOST_LAYERS:
        steps = np.linspace(0, len(ends) - 1, MOST_LAYERS)
        ends = [ends[round(step)] for step in steps.tolist()]
    # a transformer has only one resolution: fill the gaps
    while len(ends) < MOST_LAYERS:
        gaps = np.diff([-1, *ends])
        widest = int(gaps.argmax())
        middle = ends[widest] - int(gaps[widest]) // 2
        ends.insert(widest, middle)
    return [in_order[end] for end in ends]


# Bases


def _stats_of_places(
    layers: Sequence[_PlacesLayer], page: ReportPage, stats: Mapping[str, Floats]
) -> Mapping[str, Floats]:
    """The part of an image's statistics from which places are read: only this part stays in
    memory until all compared images are added."""
    kept = {}
    for layer in layers:
        figure = layer.figures.get(page.name)
        if layer.has_vectors and figure is not None:
            key = figure.row.capture_key.stats_key
            kept[key] = stats[key]
    return kept


def _compared_entries(
    layers: Sequence[_PlacesLayer], stats: Mapping[str, Mapping[str, Floats]]
) -> dict[str, list[PlacesEntry | None]]:
    """The places of the compared images.

    Args:
        layers: the layers of the run. This sets the basis of each layer with vectors, and
            completes its entry in the index.
        stats: the statistics of the compared images, by name; at least one.

    Returns:
        By the name of the image, its places in each layer, in the order of `layers`; None
        for a layer without vectors, or without places in this image.
    """
    entries: dict[str, list[PlacesEntry | None]] = {}
    for name in stats:
        entries[name] = [None] * len(layers)
    # The first layers must not use up all bytes. So for each layer behind, as many bytes
    # are reserved as all its axes take at half the resolution.
    reserved = {}
    for number, layer in enumerate(layers):
        if layer.has_vectors:
            reserved[number] = _bytes_of(layer, _COUNTS[-1], is_halved=True)
    bytes_left = _MOST_BYTES
    for number in list(reserved):
        del reserved[number]
        layer = layers[number]
        by_image = _read_all(layer, stats)
        if not by_image:
            layer.entry.reason = "its pictures do not show values"
            continue
        # bytes that a layer does not use are left to the layers behind it
        chosen = _choose_basis(layer, by_image, bytes_left - sum(reserved.values()))
        bytes_left -= _bytes_of(layer, len(layer.entry.units), layer.is_halved)
        for name, image_places in chosen.items():
            entries[name][number] = layer.encode(name, image_places)
    return entries


def _read_all(
    layer: _PlacesLayer, stats: Mapping[str, Mapping[str, Floats]]
) -> dict[str, PlaceVectors]:
    """The places of some images in a layer, by the name of the image. Images without
    places are left out.

    Args:
        stats: the statistics of the images, by name.
    """
    vectors = {}
    # threads help, since decoding a picture does not hold Python's lock
    with ThreadPoolExecutor(_THREADS) as threads:
        read = threads.map(lambda name: layer.read(name, stats[name]), stats)
        for name, image_vectors in zip(stats, read, strict=True):
            if image_vectors is not None:
                vectors[name] = image_vectors
    return vectors


def _entries_of(
    layers: Sequence[_PlacesLayer], name: str, stats: Mapping[str, Floats]
) -> list[PlacesEntry | None]:
    """The places of an image that is not a compared one, in each layer; None for a layer
    without vectors, or without places in this image.

    Args:
        layers: the layers of the run, with their bases.
        name: the name of the image.
        stats: the statistics of the image.
    """

    def entry(layer: _PlacesLayer) -> PlacesEntry | None:
        """The places of the image in a layer, or None."""
        image_places = None if layer.basis is None else layer.read(name, stats)
        return None if image_places is None else layer.encode(name, image_places)

    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(entry, layers))


def _bytes_of(layer: _PlacesLayer, axes: int, is_halved: bool) -> int:
    """How many bytes a layer takes in the image with the most places, before base64.

    Args:
        axes: the number of axes; each takes a byte for every place.
        is_halved: whether squares of four places are averaged.
    """
    counts = []
    for figure in layer.figures.values():
        height, width = figure.row.plan.map_size
        # -(-a // b) is a / b rounded up, as in `read_places`
        factor = -(-max(height, width) // MOST_SIDE) * (2 if is_halved else 1)
        counts.append(-(-height // factor) * -(-width // factor))
    # a channel that stands out takes one or two bytes for its number, and one for its value
    channel_bytes = 2 if layer.row.maps > 256 else 1
    return max(counts) * (axes + _SHOWN_CHANNELS * (channel_bytes + 1))


def _choose_basis(
    layer: _PlacesLayer, by_image: Mapping[str, PlaceVectors], available: int
) -> Mapping[str, PlaceVectors]:
    """Choose the basis of a layer, for places at full resolution; or, if these need more
    axes than there are bytes for, at half the resolution.

    Args:
        layer: the layer. This sets its basis and `is_halved`, and completes its entry in
            the index.
        by_image: the places of the compared images, by name; at least one.
        available: the bytes for the image with the most places, before base64.

    Returns:
        The places at the chosen resolution, by the name of the image.
    """
    most_axes = _most_axes(layer, available)
    basis = _basis_of(by_image, most_axes)
    # If the basis has fewer axes than there is room for, these are all axes of the
    # vectors, and half the resolution would not help.
    if basis.error > _LARGEST_ERROR and len(basis.units) == most_axes:
        layer.is_halved = True
        halves = {}
        for name, fine in by_image.items():
            halves[name] = halved(fine, layer.figures[name].row.plan.map_size)
        by_image = halves
        basis = _basis_of(by_image, _most_axes(layer, available))
    layer.basis = basis
    layer.entry.channels = len(basis.mean)
    layer.entry.error = basis.error
    layer.entry.units = basis.units.tolist()
    return by_image


def _most_axes(layer: _PlacesLayer, available: int) -> int:
    """How many axes fit into the available bytes. At least eight, even if they do not fit;
    at most 64.

    Args:
        layer: the layer.
        available: the bytes for the image with the most places, before base64.
    """
    bytes_of_channels = _bytes_of(layer, 0, layer.is_halved)
    bytes_of_axis = _bytes_of(layer, 1, layer.is_halved) - bytes_of_channels
    fitting = (available - bytes_of_channels) // bytes_of_axis
    return max(_COUNTS[0], min(_COUNTS[-1], fitting))


def _basis_of(by_image: Mapping[str, PlaceVectors], most_axes: int) -> _PlacesBasis:
    """The common basis of the places of all images. Places of two images can be compared
    only along common axes.

    Args:
        by_image: the places of the compared images, by name; at least one.
        most_axes: the most axes that there is room for.
    """
    vectors = np.concatenate([image.vectors for image in by_image.values()])
    sample = unit_vectors(vectors[:: -(-len(vectors) // _SAMPLED)])
    axes = main_axes(sample, most_axes)
    # Each axis has its own unit. Along the last axes vectors vary a hundredth as much as
    # along the first, and in one unit for all they would be rounded to 0.
    units = np.maximum(abs(sample @ axes.T).max(0), 1e-30) / 127
    count, error = _axes_needed(vectors, axes, units)
    # a constant channel never stands out, since it is divided by infinity
    deviation = vectors.std(0)
    deviation[deviation == 0] = np.inf
    return _PlacesBasis(axes[:count], units[:count], error, vectors.mean(0), deviation)


def _axes_needed(vectors: Floats, axes: Floats, units: Floats) -> tuple[int, float]:
    """How many axes are needed: the smallest of `_COUNTS` with an error of at most
    _LARGEST_ERROR, else all.

    Args:
        vectors: float32 [N, C], of any length.
        axes, units: as in `_PlacesBasis`.

    Returns:
        The number of axes, and the error with these.
    """
    # a fixed seed, so that the same report has the same bytes
    pairs = np.random.default_rng(0).integers(0, len(vectors), (2, _PAIRS))
    first = unit_vectors(vectors[pairs[0]])
    second = unit_vectors(vectors[pairs[1]])
    exact_cosines = (first * second).sum(1)
    first = _levels(first @ axes.T, units) * units
    second = _levels(second @ axes.T, units) * units
    counts = [count for count in _COUNTS if count < len(axes)]
    for count in [*counts, len(axes)]:
        kept_cosines = shortened_cosines(first[:, :count], second[:, :count])
        error = round(float(abs(kept_cosines - exact_cosines).max()), 4)
        if error <= _LARGEST_ERROR:
            break
    return count, error


def shortened_cosines(first: Floats, second: Floats) -> Floats:
    """Estimate the cosines of pairs of vectors from their coordinates along some axes.

    Of the rest of a vector only the length is known, since the whole has length 1. Equal
    places have the same rest, and the rests of unlike places have nothing in common: so
    the cosine of the rests is taken to be the eighth power of the cosine along the axes.
    For random pairs in resnet18's stages, with 32 to 64 axes, this makes the largest
    error 0.6 times as large as without the rest, and no larger for the most similar
    pairs.

    Args:
        first, second: [N, axes], a pair in each row.

    Returns:
        [N], at most 1.
    """
    first_lengths = np.linalg.norm(first, axis=1)
    second_lengths = np.linalg.norm(second, axis=1)
    products = (first * second).sum(1)
    tiny = np.finfo(np.float32).tiny
    inside = products / np.maximum(first_lengths * second_lengths, tiny)
    # rounded to eight bits, a vector may be longer than 1
    first_outside = np.sqrt((1 - first_lengths**2).clip(0))
    second_outside = np.sqrt((1 - second_lengths**2).clip(0))
    outside = first_outside * second_outside
    cosines: Floats = (products + inside.clip(0, 1) ** 8 * outside).clip(max=1)
    return cosines


def _levels(coordinates: Floats, units: Floats) -> np.ndarray:
    """Round coordinates [N, axes] to int8, in the units [axes]. Coordinates of an image
    that is not a compared one may be too large for int8: they are clipped."""
    levels: np.ndarray = np.rint(coordinates / units).clip(-127, 127).astype(np.int8)
    return levels


# Images


def halved(image_places: PlaceVectors, map_size: tuple[int, int]) -> PlaceVectors:
    """Average squares of two by two places. Each place is weighted by the number of
    positions of the map that it was averaged from.

    Args:
        image_places: the places of an image. A place at the lower or the right edge may
            come from fewer rows or columns of the map, and a square there may have fewer
            places.
        map_size: the numbers of rows and columns of the map.
    """
    vectors = image_places.vectors.reshape(*image_places.size, -1)
    for axis, length in enumerate(map_size):
        count = image_places.size[axis]
        weights = np.minimum(
            image_places.factor, length - image_places.factor * np.arange(count)
        )
        weights = weights.reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        pairs = np.arange(0, count, 2)
        sums = np.add.reduceat(vectors * weights, pairs, axis=axis)
        totals = np.add.reduceat(weights, pairs, axis=axis)
        vectors = (sums / totals).astype(np.float32)
    rows, columns, channels = vectors.shape
    return PlaceVectors(
        vectors.reshape(rows * columns, channels),
        (rows, columns),
        2 * image_places.factor,
    )


def _script_of(image: int) -> str:
    """The name of the script with the places of an image, by its number."""
    return f"places-{image:03d}.js"


class StandingOut(NamedTuple):
    """The channels that stand out most at each place; fewer than 8 if the layer has fewer."""

    channels: np.ndarray
    """uint8 or uint16 [N, 8]: the channels, the one farthest from its mean first."""
    values: np.ndarray
    """int8 [N, 8]: their distances from their means, in tenths of a standard deviation."""


def standing_out(vectors: Floats, mean: Floats, deviation: Floats) -> StandingOut:
    """Find the eight channels at each place that are farthest from their means, in
    standard deviations. A layer of fewer channels gives all of them.

    Args:
        vectors: float32 [N, C]: the vectors of all places of an image in a layer.
        mean: [C]: the means of the channels over all places of the compared images.
        deviation: [C]: the standard deviations over the same places; never 0.
    """
    scores = (vectors - mean) / deviation
    count = min(_SHOWN_CHANNELS, scores.shape[1])
    # argpartition first, since sorting all channels would take longer
    channels = np.argpartition(-abs(scores), count - 1, axis=1)[:, :count]
    values = np.take_along_axis(scores, channels, axis=1)
    order = np.argsort(-abs(values), axis=1, kind="stable")
    channels = np.take_along_axis(channels, order, axis=1)
    values = np.take_along_axis(values, order, axis=1)
    tenths = np.rint(values * _TENTH).clip(-127, 127).astype(np.int8)
    type = np.uint8 if scores.shape[1] <= 256 else np.uint16
    return StandingOut(channels.astype(type), tenths)
