"""The data of the script of places (`assets/places.js`): for each place of each image a
shortened vector, and the channels that stand out there.

    places.js          the code
    places-index.js    window.FEATVIZ_PLACES = {layers: [...], images: [...], ...}
    places-000.js      FEATVIZ_PLACES.add(0, [{size, vectors, channels, values}, ...])

A browser loads the index when somebody asks for places, then the script of the page's
image, then those of the images with which all are compared.

    conv1 relu1 conv2 relu2 pool conv3 relu3 ...     at most six layers have vectors;
            ^           ^                ^           the next one answers for the others

Six suffice for what a user looks at, the last layer of each resolution. A vector has
length 1, and is shortened to its coordinates along the main axes of a layer, which all
images share: an int8 for each axis, in units of its own. The number of axes is the
smallest with which the cosines of 500 random pairs are right within 0.03. Where that
takes more bytes than an image may have, places are averaged in squares of four. The page
says the error."""

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
"""The code, which only a report with places has."""
INDEX_SCRIPT = "places-index.js"
COMPARED_IMAGES = 50
"""How many images, the first ones, any place is compared with: a browser loads the
scripts of all of them."""
MOST_LAYERS = 6
"""How many layers have vectors."""
_MOST_BYTES = 225_000
"""Bytes for an image in all layers, of which base64 makes 300 kB."""
_COUNTS = (8, 16, 24, 32, 48, 64)
"""The numbers of axes that are tried."""
_THREADS = 2
_PAIRS = 500
_SAMPLED = 4096
"""About how many places axes and units are computed from."""
_LARGEST_ERROR = 0.03
_SHOWN_CHANNELS = 8
_TENTH = 10
"""Levels to a standard deviation, in int8."""


@dataclass
class LayerEntry:
    """A tensor of a layer in the index; the script finds it by its number there."""

    name: str
    type: str
    stem: str
    page: str
    """The id of the layer's page."""
    spot: str
    """The address of its channel 0."""
    reason: str = ""
    """Why it has no places; then the fields below keep their defaults."""
    stand_in: int | None = None
    """The number of the layer that answers for it; None where it has vectors itself, or
    a reason."""
    channels: int = 0
    error: float = 0.0
    """The largest error of the cosines of 500 random pairs."""
    units: list[float] = field(default_factory=list)
    """What level 1 stands for along each axis."""


@dataclass
class ImageEntry:
    """An image in the index."""

    name: str
    page: str
    address: str
    input: str
    """The address of what the model saw."""
    size: tuple[int, int]
    """Width and height in pixels of that."""
    script: str


@dataclass
class PlacesEntry:
    """The places of an image in a layer."""

    size: tuple[int, int]
    """Rows and columns."""
    factor: int
    """How many rows of the map, and as many columns, were averaged into a place."""
    field: list[int] | None
    """`Capture.receptive_field` of the map."""
    vectors: str
    """Base64 of int8 [places, axes]: coordinates in units of each axis."""
    channels: str
    """Base64 of [places, 8]: the channels that stand out most; uint16 in a layer of more
    than 256 channels, else uint8."""
    values: str
    """Base64 of int8 [places, 8]: how far they are from their means, in tenths of a
    standard deviation."""


class _PlacesBasis(NamedTuple):
    """How the places of a layer are written, the same for all images."""

    axes: Floats
    """float32 [axes, C], each of length 1."""
    units: Floats
    """float32 [axes]: what level 1 stands for."""
    error: float
    """The largest error of the cosines of random pairs."""
    mean: Floats
    """float32 [C], over the places of the compared images."""
    deviation: Floats
    """float32 [C], over the same; infinite for a channel that is the same everywhere."""


@dataclass
class _PlacesLayer:
    """A tensor of a layer, while the places of its images are read."""

    entry: LayerEntry
    figures: Mapping[str, Figure]
    """Its figures in this run, by name of the image."""
    basis: _PlacesBasis | None = None
    """None until the compared images are read, and where the layer has no vectors."""
    is_halved: bool = False
    """Whether four places are averaged into one; known with the basis."""

    @property
    def has_vectors(self) -> bool:
        """Whether its places are written: there are some, and no other layer answers."""
        return not self.entry.reason and self.entry.stand_in is None

    @property
    def row(self) -> Capture:
        """The capture of the first image that has it."""
        return next(iter(self.figures.values())).row

    def read(self, name: str, stats: Mapping[str, Floats]) -> PlaceVectors | None:
        """Read the places of an image from its grid, halved if those of the layer are; None
        where the grid does not show them.

        Args:
            name: of the image.
            stats: its statistics, as `ReadImage.stats` has them.
        """
        figure = self.figures.get(name)
        # in some images a layer may be dead, or not finite, or have other channels
        if figure is None or why_no_places(figure.row):
            return None
        if figure.row.maps != self.row.maps:
            return None
        image_places = None
        with suppress(DamagedError):  # the page shows a broken picture
            table = stats[figure.row.capture_key.stats_key]
            image_places = read_places(figure.picture.image, figure.row, table)
        if image_places is not None and self.is_halved:
            return halved(image_places, figure.row.plan.map_size)
        return image_places

    def encode(self, name: str, image_places: PlaceVectors) -> PlacesEntry:
        """The entry of an image's places; the basis must be known.

        Args:
            name: of the image.
            image_places: from `read`.
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
    """Makes the scripts of places while the pages of images are rendered: then the
    statistics of an image are in memory."""

    def __init__(self, pages: ReportPages, site: Site) -> None:
        """Begin without an image.

        Args:
            pages: of the run.
            site: of the report, for addresses.
        """
        self._images = pages.images
        self._site = site
        self._layers = _layers(pages, site)
        self._added = 0  # images
        self._compared_stats: dict[str, Mapping[str, Floats]] = {}

    def add(self, page: ReportPage, stats: Mapping[str, Floats]) -> ReportFiles:
        """Add the next image, and return the scripts that can be written now. That is the
        image's own; those of the compared images come together, with the last of them.

        Args:
            page: of the image; images are added in the order of the report.
            stats: of the image, as `ReadImage.stats` has them.
        """
        compared = self._images[:COMPARED_IMAGES]
        number = self._added
        self._added += 1
        if number >= len(compared):
            entries = _entries_of(self._layers, page.name, stats)
            yield self._script(number, entries)
            return
        # the axes are computed from all compared images together
        self._compared_stats[page.name] = _stats_of_places(self._layers, page, stats)
        if number == len(compared) - 1:
            entries_of = _compared_entries(self._layers, self._compared_stats)
            for number, entries in enumerate(entries_of.values()):
                yield self._script(number, entries)
            self._compared_stats.clear()

    def index(self) -> ReportFiles:
        """The script with the index, for when all images have been added."""
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
        """The script of an image.

        Args:
            number: of the image.
            entries: its places, by number of the layer.
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
    """The layers of a run whose maps are of the image, in the order of their pages. Each has
    vectors, a layer that answers for it, or the reason why it has no places."""
    layers = []
    for page in pages.layers:
        for group in page.groups:
            # a vector or a class token lies nowhere in the image
            if any(is_map_of_image(figure.row) for figure in group.of_this_run):
                layers.append(_layer(group, site))
    entries = [layer.entry for layer in layers]
    numbers = {(entry.page, entry.stem): n for n, entry in enumerate(entries)}
    # a page has all calls of its layer, between which other layers ran
    in_order = []
    for group in pages.tensors:
        number = numbers.get((group.page, group.stem))
        if number is not None and not entries[number].reason:
            in_order.append(number)
    answering = _answering(layers, in_order)
    # The last one always answers, so that every other layer has one behind it.
    stand_in = None
    for number in reversed(in_order):
        if number in answering:
            stand_in = number
        else:
            entries[number].stand_in = stand_in
    return layers


def _layer(group: Group, site: Site) -> _PlacesLayer:
    """A tensor of a layer before its places are read.

    Args:
        group: of the page of the layer.
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
    """The numbers of the layers that have vectors: all of up to six. Of more they are the
    last of each resolution, and others in the widest gaps until there are six.

    Args:
        layers: of the run.
        in_order: the numbers of those with places, in the order in which they ran.
    """
    if len(in_order) <= MOST_LAYERS:
        return list(in_order)
    ends = []  # positions in `in_order`
    position = -1
    sizes = [layers[number].row.plan.map_size for number in in_order]
    for _, run in groupby(sizes):
        position += len(list(run))
        ends.append(position)
    # a U-Net or a feature pyramid changes its resolution more often: some ends are kept
    if len(ends) > MOST_LAYERS:
        steps = np.linspace(0, len(ends) - 1, MOST_LAYERS)
        ends = [ends[round(step)] for step in steps.tolist()]
    # a transformer has one resolution
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
    """The statistics that an image's places need. No others stay in memory until all
    compared images are there."""
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
        layers: of the run. Each that has vectors gets its basis, and its entry in the
            index is completed.
        stats: of the compared images, by name; at least one.

    Returns:
        For each image, by name, its places by number of the layer.
    """
    entries: dict[str, list[PlacesEntry | None]] = {}
    for name in stats:
        entries[name] = [None] * len(layers)
    # A layer may need few axes, or many. So that the first layers cannot use up all bytes,
    # what all axes take at half the resolution is reserved for each layer behind them.
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
        # bytes that a layer does not need are left to those behind it
        fitted = _fit(layer, by_image, bytes_left - sum(reserved.values()))
        bytes_left -= _bytes_of(layer, len(layer.entry.units), layer.is_halved)
        for name, image_places in fitted.items():
            entries[name][number] = layer.encode(name, image_places)
    return entries


def _read_all(
    layer: _PlacesLayer, stats: Mapping[str, Mapping[str, Floats]]
) -> dict[str, PlaceVectors]:
    """The places of the images in a layer, by name; images without any are left out.

    Args:
        stats: of the images, by name.
    """
    vectors = {}
    # decoders let other threads work meanwhile
    with ThreadPoolExecutor(_THREADS) as threads:
        read = threads.map(lambda name: layer.read(name, stats[name]), stats)
        for name, image_vectors in zip(stats, read, strict=True):
            if image_vectors is not None:
                vectors[name] = image_vectors
    return vectors


def _entries_of(
    layers: Sequence[_PlacesLayer], name: str, stats: Mapping[str, Floats]
) -> list[PlacesEntry | None]:
    """The places of an image that is not among the compared ones, by number of the
    layer; None in a layer without vectors, or where the grid does not show them.

    Args:
        layers: of the run, with their bases.
        name: of the image.
        stats: its statistics.
    """

    def entry(layer: _PlacesLayer) -> PlacesEntry | None:
        image_places = None if layer.basis is None else layer.read(name, stats)
        return None if image_places is None else layer.encode(name, image_places)

    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(entry, layers))


def _bytes_of(layer: _PlacesLayer, axes: int, is_halved: bool) -> int:
    """How many bytes the image with the most places takes in a layer, before base64.

    Args:
        axes: how many; each takes a byte at every place.
        is_halved: whether four places are averaged into one.
    """
    counts = []
    for figure in layer.figures.values():
        height, width = figure.row.plan.map_size
        # divisions round up, as in `read_places`
        factor = -(-max(height, width) // MOST_SIDE) * (2 if is_halved else 1)
        counts.append(-(-height // factor) * -(-width // factor))
    # a channel that stands out takes its number, and a byte for its value
    channel_bytes = 2 if layer.row.maps > 256 else 1
    return max(counts) * (axes + _SHOWN_CHANNELS * (channel_bytes + 1))


def _fit(
    layer: _PlacesLayer, by_image: Mapping[str, PlaceVectors], available: int
) -> Mapping[str, PlaceVectors]:
    """Choose the basis of a layer: at full resolution, or at half of it where its vectors
    need more axes than there are bytes for.

    Args:
        layer: gets the basis; its entry in the index is completed.
        by_image: the places of the compared images, by name; at least one.
        available: bytes for the image with the most places, before base64.

    Returns:
        `by_image`, halved if the layer is.
    """
    most_axes = _most_axes(layer, available)
    basis = _basis_of(by_image, most_axes)
    # Fewer axes than there is room for are all axes of these vectors: half the resolution
    # would make room for nothing.
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
    """How many axes there is room for in these bytes: 64 at most, and never fewer than
    eight, even if that is more bytes."""
    bytes_of_channels = _bytes_of(layer, 0, layer.is_halved)
    bytes_of_axis = _bytes_of(layer, 1, layer.is_halved) - bytes_of_channels
    fitting = (available - bytes_of_channels) // bytes_of_axis
    return max(_COUNTS[0], min(_COUNTS[-1], fitting))


def _basis_of(by_image: Mapping[str, PlaceVectors], most_axes: int) -> _PlacesBasis:
    """The basis of some images' places. All images have one: only along common axes can
    places of two images be compared, and a channel stands out against the mean of all.

    Args:
        by_image: the places of the images, by name; at least one.
        most_axes: how many axes there is room for.
    """
    vectors = np.concatenate([image.vectors for image in by_image.values()])
    sample = unit_vectors(vectors[:: -(-len(vectors) // _SAMPLED)])
    axes = main_axes(sample, most_axes)
    # In a common unit the last axes would round to nothing: vectors vary a hundredth as
    # much along them as along the first.
    units = np.maximum(abs(sample @ axes.T).max(0), 1e-30) / 127
    count, error = _axes_needed(vectors, axes, units)
    # divided by infinity, a channel that is the same everywhere stands out nowhere
    deviation = vectors.std(0)
    deviation[deviation == 0] = np.inf
    return _PlacesBasis(axes[:count], units[:count], error, vectors.mean(0), deviation)


def _axes_needed(vectors: Floats, axes: Floats, units: Floats) -> tuple[int, float]:
    """How many of the axes are needed: the smallest of `_COUNTS` with which the error is
    within _LARGEST_ERROR, or all; and the error with these.

    Args:
        vectors: float32 [N, C], of any length.
        axes: float32 [axes, C], as of `_PlacesBasis`.
        units: float32 [axes], likewise.
    """
    # a fixed seed: the same report has the same bytes
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
    """Coordinates [N, axes] as int8 in the units [axes]. Those of an image that is not
    compared may be beyond the range of int8, and are clipped."""
    levels: np.ndarray = np.rint(coordinates / units).clip(-127, 127).astype(np.int8)
    return levels


# Images


def halved(image_places: PlaceVectors, map_size: tuple[int, int]) -> PlaceVectors:
    """Places of half the resolution: each is the mean of a square of two by two, weighted
    by how many rows and columns of the map a place stands for.

    Args:
        image_places: those at the lower and the right edge may stand for fewer rows or
            columns than the others, and their squares may be cut.
        map_size: rows and columns of the map.
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
    """The channels that stand out most at each place."""

    channels: np.ndarray
    """uint8 or uint16 [N, 8], the one farthest from its mean first."""
    values: np.ndarray
    """int8 [N, 8]: tenths of a standard deviation from it."""


def standing_out(vectors: Floats, mean: Floats, deviation: Floats) -> StandingOut:
    """The eight channels at each place that are farthest from their means, in standard
    deviations; all channels where there are fewer.

    Args:
        vectors: float32 [N, C], of all places of an image in a layer.
        mean: [C], over all places of the compared images.
        deviation: [C], likewise; not 0.
    """
    scores = (vectors - mean) / deviation
    count = min(_SHOWN_CHANNELS, scores.shape[1])
    # to find the largest and then sort these is faster than to sort all channels
    channels = np.argpartition(-abs(scores), count - 1, axis=1)[:, :count]
    values = np.take_along_axis(scores, channels, axis=1)
    order = np.argsort(-abs(values), axis=1, kind="stable")
    channels = np.take_along_axis(channels, order, axis=1)
    values = np.take_along_axis(values, order, axis=1)
    tenths = np.rint(values * _TENTH).clip(-127, 127).astype(np.int8)
    type = np.uint8 if scores.shape[1] <= 256 else np.uint16
    return StandingOut(channels.astype(type), tenths)
