"""What a report knows of places: vectors read from grids, against kept tensors."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import featviz as fv
from featviz.drawing.place_tiles import (
    ImageCapture,
    component_tiles,
    parse_place,
    similarities_to,
    similarity_tiles,
)
from featviz.drawing.readback import (
    PlaceVectors,
    cosines,
    main_axes,
    read_places,
    unit_vectors,
    why_no_places,
)
from featviz.drawing.values import principal_components
from featviz.errors import UsageError
from featviz.hooks.layers import list_layers
from featviz.layout.tracing.hints import HintBook
from featviz.records import CaptureSite
from featviz.report import places
from featviz.report.places import halved, shortened_cosines, standing_out
from featviz.rundir.image import read_image

from .markup import source

CHANNELS = (12, 12, 24, 40, 40, 300)
"""Of the six convolutions."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six convolutions on three images, with its tensors and its report; the
    maps of four of them are larger than 32×32."""
    torch.manual_seed(5)
    layers: list[nn.Module] = []
    before = 3
    for number, channels in enumerate(CHANNELS):
        stride = 2 if number in (3, 4) else 1
        layers.append(nn.Conv2d(before, channels, 3, stride, padding=1))
        layers.append(nn.ReLU())
        before = channels
    images = [Image.fromarray(texture(seed)) for seed in range(3)]
    out = tmp_path_factory.mktemp("places") / "run"
    fv.run(nn.Sequential(*layers), images, "ReLU", out, preset="none", tensors=True)
    fv.report(out)
    return out


def texture(seed: int) -> np.ndarray:
    """Stripes and spots, uint8 [72, 88, 3]."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (9, 11, 3), np.uint8))
    return np.asarray(small.resize((88, 72), Image.Resampling.BICUBIC))


def index_of(run: Path) -> dict[str, Any]:
    """What the script of the layers holds."""
    text = source(run, "places-index.js").strip()
    begin = "window.FEATVIZ_PLACES = "
    index: dict[str, Any] = json.loads(text.removeprefix(begin).rstrip(");"))
    return index


def entries_of(run: Path, name: str) -> list[Any]:
    """What the script of an image holds, layer by layer."""
    arguments = source(run, name).strip().removeprefix("FEATVIZ_PLACES.add(")
    entries: list[Any] = json.loads(arguments.rstrip(");").partition(", ")[2])
    return entries


def exact_vectors(run: Path, image: str, layer: int, factor: int) -> np.ndarray:
    """The vectors of places [N, C] of a kept tensor, averaged over squares."""
    (path,) = (run / image).glob(f"*_{2 * layer + 1}/output.npy")
    maps = np.load(path)[0].astype(np.float32)
    return averaged(maps.transpose(1, 2, 0), factor)


def averaged(maps: np.ndarray, factor: int) -> np.ndarray:
    """The means of squares of a map [H, W, C], as vectors [N, C]."""
    height, width, _ = maps.shape
    means = []
    for top in range(0, height, factor):
        rows = maps[top : top + factor].mean(0)
        for start in range(0, width, factor):
            means.append(rows[start : start + factor].mean(0))
    return np.stack(means)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layer", "most_side", "size"),
    [
        (0, 32, (24, 30)),
        (0, 88, (72, 88)),
        (0, 20, (15, 18)),
        (3, 32, (18, 22)),
        (5, 32, (18, 22)),
    ],
)
def test_vectors_from_grids_are_those_of_the_tensors(
    run: Path, layer: int, most_side: int, size: tuple[int, int]
) -> None:
    """They differ by half a level of their channel, and their cosines by at most 0.01;
    larger maps are averaged down, the places at their edges from fewer values."""
    image = read_image(run, "image-0.png")
    row = list(image.captures.values())[layer]
    stats = np.asarray(image.stats()[row.capture_key.stats_key])
    vectors = read_places(image, row, stats, most_side)
    assert vectors is not None
    assert vectors.size == size
    exact = exact_vectors(run, "image-0.png", layer, vectors.factor)
    assert vectors.vectors.shape == exact.shape
    level = stats[:, 1] / 255
    assert (abs(vectors.vectors - exact) <= 0.51 * level).all()
    units = unit_vectors(exact)
    cosine = cosines(vectors.vectors, vectors.vectors[7])
    np.testing.assert_allclose(cosine, units @ units[7], atol=0.01)


@pytest.mark.medium
def test_the_index_names_the_images_and_their_files(run: Path) -> None:
    """The script of an image has at most 300 kB, and its input is there."""
    index = index_of(run)
    names = [image["name"] for image in index["images"]]
    assert names == ["image-0.png", "image-1.png", "image-2.png"]
    for image in index["images"]:
        assert (run / "report" / image["script"]).stat().st_size <= 300_000
        assert (run / "report" / image["input"]).is_file()
    assert [layer["reason"] for layer in index["layers"]] == [""] * len(CHANNELS)


@dataclass(frozen=True)
class LayerVectors:
    """The vectors of a layer's places in an image, [N, C]."""

    stored: np.ndarray
    """Those of the script, shortened."""
    exact: np.ndarray
    """Those of the kept tensors, of length 1."""


def vectors_of(run: Path, report: Path, layer: int) -> list[LayerVectors]:
    """The vectors of a layer in each image, as a report has them."""
    index = index_of(report)
    units = np.array(index["layers"][layer]["units"], np.float32)
    vectors = []
    for image in index["images"]:
        entry = entries_of(report, image["script"])[layer]
        levels = np.frombuffer(base64.b64decode(entry["vectors"]), np.int8)
        stored = levels.reshape(-1, len(units)) * units
        exact = exact_vectors(run, image["name"], layer, entry["factor"])
        vectors.append(LayerVectors(stored, unit_vectors(exact)))
    return vectors


def differences(first: LayerVectors, second: LayerVectors) -> np.ndarray:
    """By how much the cosines of 400 pairs of places differ from those of the
    tensors."""
    rng = np.random.default_rng(9)
    ours = rng.integers(0, len(first.exact), 400)
    theirs = rng.integers(0, len(second.exact), 400)
    cosine: np.ndarray = shortened_cosines(first.stored[ours], second.stored[theirs])
    return abs(cosine - (first.exact[ours] * second.exact[theirs]).sum(1))


@pytest.mark.parametrize("layer", range(len(CHANNELS)))
def test_scripts_hold_the_cosines_of_all_images(run: Path, layer: int) -> None:
    """They are within the error that the index tells, plus that of the grids."""
    vectors = vectors_of(run, run, layer)
    joined = LayerVectors(
        stored=np.concatenate([image.stored for image in vectors]),
        exact=np.concatenate([image.exact for image in vectors]),
    )
    error = index_of(run)["layers"][layer]["error"]
    assert error <= 0.03
    assert np.quantile(differences(joined, joined), 0.99) <= error + 0.01


@pytest.mark.medium
def test_later_images_are_written_in_the_axes_of_the_first(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their cosines with the compared images are those of the tensors, too."""
    monkeypatch.setattr(places, "COMPARED_IMAGES", 2)
    fv.report(run, tmp_path / "report")
    assert index_of(tmp_path)["compared"] == 2
    first, _, later = vectors_of(run, tmp_path, 3)
    assert np.quantile(differences(later, first), 0.99) <= 0.05


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A run of nine convolutions, of which the fifth and the eighth halve the
    resolution; and its report."""
    torch.manual_seed(0)
    strides = [1, 1, 1, 1, 2, 1, 1, 2, 1]
    net = nn.Sequential(*(nn.Conv2d(3, 3, 3, n, padding=1) for n in strides))
    out = tmp_path / "run"
    fv.run(net, torch.rand(3, 40, 40), "Conv2d", out, preset="none")
    fv.report(out)
    return out


def answering_of(run: Path) -> list[int]:
    """The layers that have vectors, in the order of their pages."""
    entries = entries_of(run, "places-000.js")
    return [number for number, entry in enumerate(entries) if entry is not None]


@pytest.mark.medium
def test_of_many_layers_six_have_places(deep: Path) -> None:
    """They are the last of each resolution, 3, 6 and 8, and those in the middle of the
    widest gaps."""
    assert answering_of(deep) == [0, 1, 3, 5, 6, 8]


@pytest.mark.medium
def test_of_many_resolutions_the_first_and_the_last_have_places(tmp_path: Path) -> None:
    """Of eight between which a network goes back and forth, six are spread over all."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers.append(nn.ConvTranspose2d(3, 3, 2, 2))
        layers.append(nn.Conv2d(3, 3, 2, 2))
    out = tmp_path / "run"
    net = nn.Sequential(*layers)
    fv.run(net, torch.rand(3, 12, 20), "_ConvNd", out, preset="none")
    fv.report(out)
    assert answering_of(out) == [0, 1, 3, 4, 6, 7]


@pytest.mark.medium
def test_the_next_layer_answers_for_one_without_places(deep: Path) -> None:
    """The index names it; a layer with vectors answers itself."""
    answering = answering_of(deep)
    for number, layer in enumerate(index_of(deep)["layers"]):
        following = answering[np.searchsorted(answering, number)]
        expected = None if following == number else following
        assert layer["stand_in"] == expected


def test_four_places_are_averaged_into_one() -> None:
    """The number of values in each counts, also at the edges of the map."""
    maps = np.random.default_rng(4).random((11, 7, 5)).astype(np.float32)
    vectors = halved(PlaceVectors(averaged(maps, 2), (6, 4), 2), (11, 7))
    assert (vectors.size, vectors.factor) == ((3, 2), 4)
    np.testing.assert_allclose(vectors.vectors, averaged(maps, 4), rtol=1e-5)


@pytest.mark.parametrize(
    ("count", "type"), [(300, np.uint16), (257, np.uint16), (256, np.uint8)]
)
def test_channels_stand_out_in_standard_deviations(
    count: int, type: type[np.unsignedinteger[Any]]
) -> None:
    """They are the eight farthest from their means over all places (numpy), the farthest
    first, in bytes where these hold all channels, as the script reads them."""
    vectors = np.random.default_rng(2).normal(3, 2, (50, count)).astype(np.float32)
    vectors[:, 4] = 1
    vectors[9, 17] = 40
    deviation = vectors.std(0)
    deviation[4] = np.inf
    channels, values = standing_out(vectors, vectors.mean(0), deviation)
    scores = (vectors - vectors.mean(0)) / deviation
    assert channels.dtype == type
    assert channels[9, 0] == 17
    chosen = np.take_along_axis(scores, channels.astype(int), axis=1)
    largest = np.sort(-abs(scores), axis=1)[:, :8]
    np.testing.assert_array_equal(-abs(chosen), largest)
    np.testing.assert_allclose(values[9] / 10, chosen[9], atol=0.05)


@pytest.mark.parametrize("shape", [(60, 9), (9, 60)])
def test_main_axes_are_singular_vectors(shape: tuple[int, int]) -> None:
    """They are those of numpy's decomposition, whichever side of the matrix is
    longer."""
    vectors = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    _, _, expected = np.linalg.svd(vectors.astype(np.float64), full_matrices=False)
    products = (main_axes(vectors, 4) * expected[:4]).sum(1)
    np.testing.assert_allclose(abs(products), 1, atol=1e-4)


def reference_components(vectors: np.ndarray) -> np.ndarray:
    """Three principal components in standard deviations [N, 3], by numpy's
    decomposition; the sign makes the largest loading positive."""
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    scores: np.ndarray = centred @ axes[:3].T
    largest = abs(axes[:3]).argmax(1)
    signs = np.sign(axes[np.arange(3), largest])
    return signs * scores / scores.std(0)


def test_components_are_those_of_numpy() -> None:
    """They are of all vectors together, in standard deviations."""
    rng = np.random.default_rng(4)
    vectors = (rng.normal(size=(200, 12)) * np.arange(12)).astype(np.float32)
    components = principal_components(vectors)
    np.testing.assert_allclose(components, reference_components(vectors), atol=1e-3)


def test_what_is_flat_has_fewer_components() -> None:
    """Directions in which nothing varies are 0."""
    vectors = np.outer(np.arange(20), np.ones(5)).astype(np.float32)
    components = principal_components(vectors)
    assert components[:, 0].std() == pytest.approx(1)
    assert not components[:, 1:].any()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"channels": "0-3"}, "its grid has 4 of 12 channels"),
        ({"reduce": "mean"}, "its picture is one of all channels (--reduce mean)"),
        ({"overlay": 0.5}, "its maps lie over the input (--overlay)"),
        ({"labels": True}, "numbers are written on its maps (--labels)"),
    ],
)
def test_a_grid_that_lacks_values_says_why(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    """The reason stands in the index, which the page shows; the script of the image
    holds nothing of the layer."""
    net = nn.Sequential(nn.Conv2d(3, 12, 3))
    out = tmp_path / "run"
    fv.run(net, torch.rand(3, 20, 20), "Conv2d", out, preset="none", **options)
    fv.report(out)
    (layer,) = index_of(out)["layers"]
    assert layer["reason"] == reason
    assert entries_of(out, "places-000.js") == [None]


@pytest.mark.medium
def test_vectors_have_no_places(tmp_path: Path) -> None:
    """A Linear's output is no map of the image; nobody can ask for its places."""
    net = nn.Sequential(nn.Conv2d(3, 2, 5), nn.Flatten(), nn.Linear(32, 4))
    out = tmp_path / "run"
    fv.run(net, torch.rand(3, 8, 8), "Conv2d,Linear", out, preset="none")
    image = read_image(out, "image-0.png")
    reasons = [why_no_places(row) for row in image.captures.values()]
    assert reasons == ["", "its maps have no places of the image"]
    fv.report(out)
    assert [layer["name"] for layer in index_of(out)["layers"]] == ["0"]
    assert len(entries_of(out, "places-000.js")) == 1


@pytest.mark.medium
def test_receptive_fields_stand_in_the_manifest(tmp_path: Path) -> None:
    """Those of a strided convolution with padding and of one behind it are lines, by
    hand; of images of several sizes those of the first one's have them."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    )
    images = [torch.rand(3, 20, 30), torch.rand(3, 24, 24), torch.rand(3, 20, 30)]
    result = fv.run(net, images, "Conv2d", tmp_path / "run", preset="none")
    fields = []
    for image in result.images:
        fields.append([capture.row.receptive_field for capture in image.captures])
    lines = [[-1, 2, 2, -1, 2, 2], [-3, 4, 2, -3, 4, 2]]
    assert fields == [lines, [None, None], lines]


@pytest.mark.medium
def test_lines_are_those_of_the_boxes() -> None:
    """They hold also where the picture cuts every field at a side or both."""
    convolutions = [nn.Conv2d(3, 3, 5, stride=2, padding=2) for _ in range(4)]
    net = nn.Sequential(*convolutions)
    book = HintBook(net, (1, 3, 48, 64))
    layers = list_layers(net)
    with torch.no_grad(), book.traced(net, layers, fields=True):
        net(torch.zeros(1, 3, 48, 64))
    for layer in layers[1:]:
        field = book.receptive_field(CaptureSite(layer, "output", 0, ""))
        first_row, last_row, down, first_column, last_column, across = field.lines(
            (48, 64)
        )
        _, rows, columns = field.edges.shape
        for row, column in np.ndindex(rows, columns):
            box = field.box(row, column)
            assert (box.top, box.left) == (
                max(0, first_row + down * row),
                max(0, first_column + across * column),
            )
            assert (box.bottom, box.right) == (
                min(48, last_row + down * row),
                min(64, last_column + across * column),
            )


def captures_of(run: Path, layer: int) -> dict[str, ImageCapture]:
    """A layer's capture of each image."""
    captures = {}
    for number in range(3):
        image = read_image(run, f"image-{number}.png")
        captures[image.name] = ImageCapture(image, list(image.captures.values())[layer])
    return captures


PLACE = "image-1.png@0.4,0.7"


@pytest.mark.medium
def test_similarities_are_the_cosines_of_the_tensors(run: Path) -> None:
    """Those of all images to a place are within 0.01 of those of the kept tensors."""
    similarities = similarities_to(captures_of(run, 5), parse_place(PLACE))
    row = int(0.7 * 18)
    column = int(0.4 * 22)
    vector = exact_vectors(run, "image-1.png", 5, 1)[row * 22 + column]
    for name, similarity in similarities.items():
        expected = cosines(exact_vectors(run, name, 5, 1), vector)
        np.testing.assert_allclose(similarity, expected.reshape(18, 22), atol=0.01)


@pytest.mark.medium
def test_components_share_their_colours_between_images(run: Path) -> None:
    """They are those of all images together (numpy), within 3 grey levels of 255 at 99
    of 100 places."""
    tiles = component_tiles(captures_of(run, 3))
    vectors = np.concatenate([exact_vectors(run, name, 3, 1) for name in tiles])
    expected = 255 * (0.5 + reference_components(vectors) / 5).clip(0, 1)
    joined = np.stack([*tiles.values()])
    scale = joined.shape[1] // 36
    levels = joined[:, ::scale, ::scale].reshape(-1, 3)
    assert np.quantile(abs(levels - expected), 0.99) <= 3


def test_similarities_lie_over_the_inputs(run: Path) -> None:
    """Tiles have the size of the inputs."""
    tiles = similarity_tiles(captures_of(run, 5), parse_place(PLACE))
    assert [tile.shape for tile in tiles.values()] == [(72, 88, 3)] * 3


@pytest.mark.parametrize(
    "text", ["cat.jpg", "cat.jpg@0.4", "cat.jpg@1.2,0.3", "@.,.", "a@.,1", "a@x,y"]
)
def test_what_is_no_place_is_refused(text: str) -> None:
    """The message says that it is none."""
    with pytest.raises(UsageError, match="is no place of an image"):
        parse_place(text)


def test_places_of_no_image_are_refused(run: Path) -> None:
    """The message names the image that is not there."""
    with pytest.raises(UsageError, match=r"no image 'dog.jpg'"):
        similarities_to(captures_of(run, 5), parse_place("dog.jpg@0.4,0.7"))


@pytest.mark.medium
def test_one_file_has_no_script_of_places(run: Path, tmp_path: Path) -> None:
    """It has no data for it, and no button that asks."""
    fv.report(run, tmp_path / "report.html", single_file=True)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "data-places=" not in page
    assert "class PlaceGrid" not in page
