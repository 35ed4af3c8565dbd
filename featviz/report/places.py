"""What the script of places (`assets/places.js`) knows: for each place of each image
its vector, shortened, and the channels that stand out there.

    places.js          the code
    places-index.js    window.FEATVIZ_PLACES = {layers: [...], images: [...]}
    places-000.js      FEATVIZ_PLACES.add(0, [{size, vectors, channels, values}, ...])

The index comes when somebody asks for places, and then a script for each image. A
vector has length 1 and is written in the main axes that all images of a layer share,
an axis as int8 in units of its own. As many axes are kept as leave the cosines of 500
random pairs within 0.03. Where these take more than 50 kB a layer and image, maps are
averaged down once more; the page says the error."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from featviz.drawing.readback import (
    MOST_SIDE,
    PlaceVectors,
    main_axes,
    read_places,
    unit_vectors,
    why_no_places,
)
from featviz.records import Floats
from featviz.report.engine import ReportFiles, Site
from featviz.report.figures import Figure, Group, ReportPage, ReportPages
from featviz.report.grids import as_json
from featviz.rundir.image import DamagedError

INDEX_SCRIPT = "places-index.js"
MOST_IMAGES = 50
"""The first images have places; the page says that others have none."""
_MOST_BYTES = 37_500
"""Of a layer and image on average, before base64 makes 50 kB of them."""
_COUNTS = (8, 16, 24, 32, 48, 64)
"""How many axes there may be."""
_THREADS = 2
_PAIRS = 500
_LARGEST_ERROR = 0.03
_SHOWN_CHANNELS = 8
_TENTH = 10
"""Standard deviations are written as int8 in tenths."""


@dataclass
class LayerEntry:
    """A layer in the index."""

    name: str
    type: str
    stem: str
    page: str
    """The id of the layer's page."""
    spot: str
    """The address of its channel 0."""
    reason: str = ""
    """Why it has no places; then all below is empty."""
    channels: int = 0
    error: float = 0.0
    """The largest of 500 random pairs' cosines."""
    units: list[float] = field(default_factory=list)
    """What 1 stands for along each axis."""


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
    """Rows, and columns, of the map that were averaged into a place."""
    field: list[int] | None
    """How the receptive field follows from a row and column of the map, as in
    `Capture.receptive_field`."""
    vectors: str
    """Base64 of int8 [places, axes]."""
    channels: str
    """Base64 of [places, 8]: those that stand out most; uint16 where there are more
    than 256, else uint8."""
    values: str
    """Base64 of int8 [places, 8]: tenths of a standard deviation from the mean over all
    places of all images."""


class _ReadFigure(NamedTuple):
    """The places of a grid."""

    image: int
    """Its number."""
    figure: Figure
    places: PlaceVectors


class _EncodedLayer(NamedTuple):
    """The places of a layer."""

    entries: dict[int, PlacesEntry]
    """By the number of the image."""
    bytes: int
    """What the image with the most places takes, before base64."""


def place_files(pages: ReportPages, site: Site) -> ReportFiles:
    """The scripts with the places of a run's images.

    Args:
        pages: of which the first MOST_IMAGES have places.

    Returns:
        A script for each of these images, and last the index. Layers without places are
        in the index with the reason, and null in the scripts.
    """
    images = pages.images[:MOST_IMAGES]
    stats = {page.name: page.image.stats() for page in images}
    groups: list[Group] = []
    for page in pages.layers:
        groups.extend(page.groups)
    layers = [_layer_entry(group, site) for group in groups]
    encoded = _encoded_layers(groups, layers, stats)
    for image in range(len(images)):
        places = [layer.entries.get(image) for layer in encoded]
        text = f"FEATVIZ_PLACES.add({image}, {as_json(places)});\n"
        yield _script_of(image), [text]
    index = {
        "layers": layers,
        "images": [_image_entry(page, n, site) for n, page in enumerate(images)],
        "left_out": len(pages.images) - len(images),
    }
    yield INDEX_SCRIPT, [f"window.FEATVIZ_PLACES = {as_json(index)};\n"]


def _encoded_layers(
    groups: Sequence[Group],
    layers: Sequence[LayerEntry],
    stats: Mapping[str, Mapping[str, Floats]],
) -> list[_EncodedLayer]:
    """The places of all layers, which share the bytes that an image may take.

    Args:
        groups: the tensors of the run.
        layers: their entries in the index, which are completed.
        stats: of each image by its name, as `ReadImage.stats` has them.
    """
    # A layer may need few axes, or many. Each has a part of the budget for certain, what
    # all axes take at half the resolution, so that the first ones cannot use up all.
    reserved = {}
    for n, layer in enumerate(layers):
        if not layer.reason:
            reserved[n] = _bytes_of(groups[n], MOST_SIDE // 2, _COUNTS[-1])
    bytes_left = _MOST_BYTES * len(reserved)
    encoded = [_EncodedLayer({}, 0) for _ in layers]
    for n in list(reserved):
        del reserved[n]
        # what a layer does not need is left to those behind it
        available = bytes_left - sum(reserved.values())
        encoded[n] = _encoded_layer(groups[n], layers[n], stats, available)
        if not encoded[n].entries:
            layers[n].reason = "its pictures do not show values"
        bytes_left -= encoded[n].bytes
    return encoded


def _encoded_layer(
    group: Group,
    layer: LayerEntry,
    stats: Mapping[str, Mapping[str, Floats]],
    available: int,
) -> _EncodedLayer:
    """The places of a layer, at half the resolution where its vectors need more axes
    than the bytes hold.

    Args:
        available: bytes for the image with the most places, before base64.
    """
    entries: dict[int, PlacesEntry] = {}
    for most_side in (MOST_SIDE, MOST_SIDE // 2):
        read = list(_read(group, stats, most_side))
        most_axes = _most_axes(group, most_side, available)
        entries = {}
        if read:
            entries = _encoded(layer, read, most_axes)
        # Fewer axes than there is room for are all that the vectors have: a coarser map
        # would make no room that they need.
        if layer.error <= _LARGEST_ERROR or len(layer.units) < most_axes:
            break
    return _EncodedLayer(entries, _bytes_of(group, most_side, len(layer.units)))


def _layer_entry(group: Group, site: Site) -> LayerEntry:
    """The entry of a tensor before its places are read, with the reason if it has none."""
    labelled = bool(site.options[False].get("labels"))
    # a layer may be dead, or not finite, in some images
    reasons = [why_no_places(figure.row, labelled) for figure in group.of_this_run]
    return LayerEntry(
        name=group.layer,
        type=group.type,
        stem=group.stem,
        page=group.page,
        spot=site.links.element(group.page, site.anchor(group, 0)),
        reason="" if "" in reasons else reasons[0],
    )


def _script_of(image: int) -> str:
    return f"places-{image:03d}.js"


def _image_entry(page: ReportPage, number: int, site: Site) -> ImageEntry:
    """The entry of an image in the index.

    Args:
        page: of the image.
        number: of the image in the report, from 0.
    """
    shown = page.inputs[False]
    return ImageEntry(
        name=page.name,
        page=page.id,
        address=site.links.page(page.id),
        input=site.links.picture(shown),
        size=shown.size,
        script=_script_of(number),
    )


def _most_axes(group: Group, most_side: int, available: int) -> int:
    """How many axes fit into `available` bytes, for the image with the most places; never
    fewer than eight, even if they take more bytes."""
    without = _bytes_of(group, most_side, 0)
    count = _bytes_of(group, most_side, 1) - without
    return max(_COUNTS[0], min(_COUNTS[-1], (available - without) // count))


def _bytes_of(group: Group, most_side: int, axes: int) -> int:
    """What the image with the most places takes, before base64.

    Args:
        most_side: places along the longer side; larger maps are averaged down to them.
        axes: a byte each at every place.
    """
    counts = []
    for figure in group.of_this_run:
        height, width = figure.row.plan.map_size
        # divisions round up, as in `read_places`
        factor = -(-max(height, width) // most_side)
        counts.append(-(-height // factor) * -(-width // factor))
    # of a channel that stands out its number, and its value in a byte
    channel_bytes = 2 if group.figures[0].row.maps > 256 else 1
    return max(counts) * (axes + _SHOWN_CHANNELS * (channel_bytes + 1))


def _read(
    group: Group, stats: Mapping[str, Mapping[str, Floats]], most_side: int
) -> Iterator[_ReadFigure]:
    """The places of those images that have statistics here.

    Args:
        stats: by name of the image, in the order of their numbers.
        most_side: places along the longer side.
    """
    numbers = {name: number for number, name in enumerate(stats)}

    def read(figure: Figure) -> _ReadFigure | None:
        """A figure with its places; None where it has none, or cannot be read."""
        row = figure.row
        if figure.name not in numbers or why_no_places(row):
            return None
        table = stats[figure.name][row.capture_key.stats_key]
        with suppress(DamagedError):  # the page shows a broken picture
            places = read_places(figure.picture.image, row, table, most_side)
            if places is not None:
                return _ReadFigure(numbers[figure.name], figure, places)
        return None

    # decoders let other threads work meanwhile
    with ThreadPoolExecutor(_THREADS) as threads:
        yield from filter(None, threads.map(read, group.of_this_run))


def _encoded(
    layer: LayerEntry, read: Sequence[_ReadFigure], most_axes: int
) -> dict[int, PlacesEntry]:
    """The entries of a layer's images, by their numbers; completes that of the layer.

    Args:
        read: at least one image, all of the same channels.
        most_axes: how many axes there is room for.
    """
    # All images at once: only in common axes can places of two images be compared, and a
    # channel stands out against the mean of all.
    # axes that all images share make places of two images comparable
    vectors = np.concatenate([figure.places.vectors for figure in read])
    units = unit_vectors(vectors)
    shortened = _shortened(layer, units, most_axes)
    channels, values = standing_out(vectors)
    layer.channels = vectors.shape[1]
    entries = {}
    first = 0
    for image, figure, places in read:
        last = first + len(places.vectors)
        entries[image] = PlacesEntry(
            size=places.size,
            factor=places.factor,
            field=figure.row.receptive_field,
            vectors=_base64(shortened[first:last]),
            channels=_base64(channels[first:last]),
            values=_base64(values[first:last]),
        )
        first = last
    return entries


def _shortened(layer: LayerEntry, units: Floats, most_axes: int) -> np.ndarray:
    """Vectors in their main axes, int8 [N, axes]: as many as keep the error small; the
    layer's entry says how large it is.

    Args:
        units: float32 [N, C], each of length 1 or 0.
        most_axes: how many axes there is room for.
    """
    # each axis has a unit of its own: the last ones vary a hundredth of the first, and
    # would round to nothing in common units
    axes = main_axes(units, most_axes)
    coordinates = units @ axes.T
    scale = np.maximum(abs(coordinates).max(0), 1e-30) / 127
    levels = np.rint(coordinates / scale).astype(np.int8)
    # a fixed seed: the same report has the same bytes
    first, second = np.random.default_rng(0).integers(0, len(units), (2, _PAIRS))
    exact_cosines = (units[first] * units[second]).sum(1)
    counts = [count for count in _COUNTS if count < len(axes)]
    for count in [*counts, len(axes)]:
        kept = unit_vectors(levels[:, :count] * scale[:count])
        cosines = (kept[first] * kept[second]).sum(1)
        layer.error = round(float(abs(cosines - exact_cosines).max()), 4)
        layer.units = [float(f"{unit:.6g}") for unit in scale[:count]]
        if layer.error <= _LARGEST_ERROR:
            break
    shortened: np.ndarray = levels[:, : len(layer.units)]
    return shortened


class StandingOut(NamedTuple):
    """The channels that stand out most at each place."""

    channels: np.ndarray
    """uint8 or uint16 [N, 8], the one farthest from its mean first."""
    values: np.ndarray
    """int8 [N, 8]: tenths of a standard deviation from it."""


def standing_out(vectors: Floats) -> StandingOut:
    """The channels farthest from their mean over all places, in standard deviations.

    Args:
        vectors: float32 [N, C], of all places of all images of a layer. With fewer than
            eight channels all of them are returned.
    """
    # a channel that is the same everywhere stands out nowhere
    deviation = vectors.std(0)
    deviation[deviation == 0] = np.inf
    scores = (vectors - vectors.mean(0)) / deviation
    count = min(_SHOWN_CHANNELS, scores.shape[1])
    # the largest first in any order, which is faster than to sort all channels; then these
    channels = np.argpartition(-abs(scores), count - 1, axis=1)[:, :count]
    values = np.take_along_axis(scores, channels, axis=1)
    order = np.argsort(-abs(values), axis=1, kind="stable")
    channels = np.take_along_axis(channels, order, axis=1)
    values = np.take_along_axis(values, order, axis=1)
    tenths = np.rint(values * _TENTH).clip(-127, 127).astype(np.int8)
    type = np.uint8 if scores.shape[1] <= 256 else np.uint16
    return StandingOut(channels.astype(type), tenths)


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()
