"""What a report knows of places: vectors read from grids, against kept tensors."""

from __future__ import annotations

import base64
import json
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
    principal_components,
    read_places,
    unit_vectors,
    why_no_places,
)
from featviz.errors import UsageError
from featviz.hooks.layers import list_layers
from featviz.layout.tracing.hints import HintBook
from featviz.records import CaptureSite
from featviz.report import places
from featviz.report.places import standing_out
from featviz.rundir.image import read_image

LAYERS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six convolutions on three images, with its tensors and its report; the
    maps of four of them are larger than 32×32."""
    torch.manual_seed(5)
    sizes = [3, 12, 12, 24, 40, 40, 300]
    layers: list[nn.Module] = []
    for n in range(LAYERS):
        stride = 2 if n in (3, 4) else 1
        layers += [nn.Conv2d(sizes[n], sizes[n + 1], 3, stride, padding=1), nn.ReLU()]
    out = tmp_path_factory.mktemp("places") / "run"
    images = [Image.fromarray(texture(seed)) for seed in range(3)]
    net = nn.Sequential(*layers)
    fv.run(net, images, "ReLU", out, preset="none", tensors=True)
    fv.report(out)
    return out


def texture(seed: int) -> np.ndarray:
    """Stripes and spots, uint8 [72, 88, 3]."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (9, 11, 3), np.uint8))
    return np.asarray(small.resize((88, 72), Image.Resampling.BICUBIC))


def written(run: Path, name: str) -> Any:
    """The JSON in a script."""
    text = (run / "report" / name).read_text().strip().rstrip(");")
    for begin in ("window.FEATVIZ_PLACES = ", "FEATVIZ_PLACES.add("):
        if text.startswith(begin):
            text = text.removeprefix(begin)
    return json.loads(text if text.startswith("{") else text.partition(", ")[2])


def exact_vectors(run: Path, image: str, layer: int, factor: int) -> np.ndarray:
    """The vectors of places [N, C] of a kept tensor, averaged over squares."""
    (path,) = (run / image).glob(f"*_{2 * layer + 1}/output.npy")
    maps = np.load(path)[0]
    height, width = maps.shape[1:]
    rows = [maps[:, i : i + factor].mean(1) for i in range(0, height, factor)]
    places = []
    for row in rows:
        places += [row[:, j : j + factor].mean(1) for j in range(0, width, factor)]
    return np.stack(places)


@pytest.mark.parametrize(
    ("layer", "size"), [(0, (24, 30)), (3, (18, 22)), (5, (18, 22))]
)
def test_vectors_from_grids_are_those_of_the_tensors(
    run: Path, layer: int, size: tuple[int, int]
) -> None:
    """Their cosines differ by at most 0.01, and maps larger than 32 places are averaged
    down."""
    image = read_image(run, "image-0.png")
    row = list(image.captures.values())[layer]
    places = read_places(image, row, image.stats()[row.capture_key.stats_key])
    assert places is not None
    assert places.size == size
    exact = exact_vectors(run, "image-0.png", layer, places.factor)
    assert places.vectors.shape == exact.shape
    first = unit_vectors(exact.astype(np.float32))
    expected = first @ first[7]
    found = cosines(places.vectors, places.vectors[7])
    assert abs(found - expected).max() < 0.01


def test_scripts_hold_the_cosines_of_all_images(run: Path) -> None:
    """Within the error that the index tells, plus that of the grids; at most 300 kB an
    image."""
    index = written(run, "places-index.js")
    assert [layer["reason"] for layer in index["layers"]] == [""] * LAYERS
    assert [image["name"] for image in index["images"]] == [
        "image-0.png",
        "image-1.png",
        "image-2.png",
    ]
    for image in index["images"]:
        assert (run / "report" / image["script"]).stat().st_size <= 300_000
        assert (run / "report" / image["input"]).is_file()
    for number, layer in enumerate(index["layers"]):
        units = np.array(layer["units"], np.float32)
        shortened = []
        exact = []
        for image in index["images"]:
            entry = written(run, image["script"])[number]
            levels = np.frombuffer(base64.b64decode(entry["vectors"]), np.int8)
            shortened.append(levels.reshape(-1, len(units)) * units)
            name = image["name"]
            exact.append(exact_vectors(run, name, number, entry["factor"]))
        found = np.concatenate(shortened)
        expected = unit_vectors(np.concatenate(exact).astype(np.float32))
        pairs = np.random.default_rng(9).integers(0, len(found), (2, 400))
        differences = places.shortened_cosines(found[pairs[0]], found[pairs[1]])
        differences -= (expected[pairs[0]] * expected[pairs[1]]).sum(1)
        assert layer["error"] <= 0.03
        assert np.quantile(abs(differences), 0.99) <= layer["error"] + 0.01


def test_channels_stand_out_in_standard_deviations() -> None:
    """By numpy over all places; the one farthest from its mean comes first."""
    vectors = np.random.default_rng(2).normal(3, 2, (50, 300)).astype(np.float32)
    vectors[:, 4] = 1
    vectors[9, 17] = 40
    deviation = vectors.std(0)
    deviation[4] = np.inf
    channels, values = standing_out(vectors, vectors.mean(0), deviation)
    scores = (vectors - vectors.mean(0)) / deviation
    assert channels.dtype == np.uint16
    assert channels[9, 0] == 17
    expected = np.sort(-abs(scores), axis=1)[:, :8]
    picked = -abs(np.take_along_axis(scores, channels.astype(int), 1))
    np.testing.assert_array_equal(picked, expected)
    assert abs(values[9] / 10 - scores[9, channels[9]]).max() <= 0.05


@pytest.mark.parametrize("shape", [(60, 9), (9, 60)])
def test_main_axes_are_singular_vectors(shape: tuple[int, int]) -> None:
    """Of numpy's decomposition, whichever side of the matrix is longer."""
    vectors = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    _, _, expected = np.linalg.svd(vectors.astype(np.float64), full_matrices=False)
    products = abs((main_axes(vectors, 4) * expected[:4]).sum(1))
    np.testing.assert_allclose(products, 1, atol=1e-4)


def test_components_are_those_of_scikit_learn() -> None:
    """Of all vectors together, in standard deviations, up to the sign, which makes the
    largest loading positive."""
    decomposition = pytest.importorskip("sklearn.decomposition")
    rng = np.random.default_rng(4)
    vectors = (rng.normal(size=(200, 12)) * np.arange(12)).astype(np.float32)
    found = principal_components(vectors)
    pca = decomposition.PCA(3).fit(vectors)
    expected = pca.transform(vectors) / pca.transform(vectors).std(0)
    for n in range(3):
        loadings = pca.components_[n]
        sign = np.sign(loadings[abs(loadings).argmax()])
        np.testing.assert_allclose(found[:, n], sign * expected[:, n], atol=1e-3)


def test_what_is_flat_has_fewer_components() -> None:
    """Directions in which nothing varies are 0."""
    vectors = np.outer(np.arange(20), np.ones(5)).astype(np.float32)
    found = principal_components(vectors)
    assert found[:, 0].std() == pytest.approx(1)
    assert not found[:, 1:].any()


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
    """In the index, which the page shows; the scripts of images hold nothing of it."""
    net = nn.Sequential(nn.Conv2d(3, 12, 3))
    out = tmp_path / "run"
    fv.run(net, torch.rand(3, 20, 20), "Conv2d", out, preset="none", **options)
    fv.report(out)
    (layer,) = written(out, "places-index.js")["layers"]
    assert layer["reason"] == reason
    assert written(out, "places-000.js") == [None]


def test_vectors_have_no_places(tmp_path: Path) -> None:
    """A Linear's output is no map of the image."""
    net = nn.Sequential(nn.Conv2d(3, 2, 5), nn.Flatten(), nn.Linear(32, 4))
    out = tmp_path / "run"
    fv.run(net, torch.rand(3, 8, 8), "Conv2d,Linear", out, preset="none")
    image = read_image(out, "image-0.png")
    reasons = [why_no_places(row) for row in image.captures.values()]
    assert reasons == ["", "its maps have no places of the image"]


def test_receptive_fields_stand_in_the_manifest(tmp_path: Path) -> None:
    """As lines, by hand: a strided convolution with padding, and one behind it. Of
    images of several sizes, those of the first one's have them."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    )
    images = [torch.rand(3, 20, 30), torch.rand(3, 24, 24), torch.rand(3, 20, 30)]
    found = fv.run(net, images, "Conv2d", tmp_path / "run", preset="none")
    expected = [[-1, 2, 2, -1, 2, 2], [-3, 4, 2, -3, 4, 2]]
    for image, lines in zip(
        found.images, [expected, [None] * 2, expected], strict=True
    ):
        assert [capture.row.receptive_field for capture in image.captures] == lines


def test_lines_are_those_of_the_boxes() -> None:
    """Also where the picture cuts every field at one side or both."""
    net = nn.Sequential(*(nn.Conv2d(3, 3, 5, stride=2, padding=2) for _ in range(4)))
    book = HintBook(net, (1, 3, 48, 64))
    layers = list_layers(net)
    with torch.no_grad(), book.traced(net, layers, fields=True):
        net(torch.zeros(1, 3, 48, 64))
    for layer in layers[1:]:
        field = book.receptive_field(CaptureSite(layer, "output", 0, ""))
        top, bottom, down, left, right, across = field.lines((48, 64))
        _, rows, columns = field.edges.shape
        for row in range(rows):
            for column in range(columns):
                box = field.box(row, column)
                assert box.top == max(0, top + down * row)
                assert box.bottom == min(48, bottom + down * row)
                assert box.left == max(0, left + across * column)
                assert box.right == min(64, right + across * column)


def captures_of(run: Path, layer: int) -> dict[str, ImageCapture]:
    """A layer's capture of each image."""
    captures = {}
    for number in range(3):
        image = read_image(run, f"image-{number}.png")
        captures[image.name] = ImageCapture(image, list(image.captures.values())[layer])
    return captures


def test_similarities_are_the_cosines_of_the_tensors(run: Path) -> None:
    """Of all images to one place, within 0.01 of those of the kept tensors."""
    found = similarities_to(captures_of(run, 5), parse_place("image-1.png@0.4,0.7"))
    names = list(found)
    exact = [exact_vectors(run, name, 5, 1).astype(np.float32) for name in names]
    vector = exact[1][int(0.7 * 18) * 22 + int(0.4 * 22)]
    for name, vectors in zip(names, exact, strict=True):
        expected = cosines(vectors, vector).reshape(18, 22)
        assert abs(found[name] - expected).max() < 0.01


def test_components_share_their_colours_between_images(run: Path) -> None:
    """Those of scikit-learn's PCA of all images together, within 3 grey levels of 255
    at 99 of 100 places."""
    decomposition = pytest.importorskip("sklearn.decomposition")
    tiles = component_tiles(captures_of(run, 3))
    joined = np.concatenate([exact_vectors(run, name, 3, 1) for name in tiles])
    pca = decomposition.PCA(3).fit(joined)
    values = pca.transform(joined)
    signs = [np.sign(row[abs(row).argmax()]) for row in pca.components_]
    levels = 255 * (0.5 + values * signs / values.std(0) / 5).clip(0, 1)
    scale = next(iter(tiles.values())).shape[0] // 36
    found = [tile[::scale, ::scale].reshape(-1, 3) for tile in tiles.values()]
    assert np.quantile(abs(np.concatenate(found) - levels), 0.99) <= 3


def test_the_place_itself_is_brightest(run: Path) -> None:
    """Tiles lie over the inputs, and have their size."""
    tiles = similarity_tiles(captures_of(run, 5), parse_place("image-1.png@0.4,0.7"))
    assert [tile.shape for tile in tiles.values()] == [(72, 88, 3)] * 3


@pytest.mark.parametrize(
    "text", ["cat.jpg", "cat.jpg@0.4", "cat.jpg@1.2,0.3", "@.,.", "a@x,y"]
)
def test_what_is_no_place_is_refused(text: str) -> None:
    """With an example."""
    with pytest.raises(UsageError, match="is no place of an image"):
        parse_place(text)


def test_places_of_no_image_are_refused(run: Path) -> None:
    """The message names those that there are."""
    with pytest.raises(UsageError, match=r"no image 'dog.jpg'"):
        similarities_to(captures_of(run, 5), parse_place("dog.jpg@0.4,0.7"))


def test_of_many_layers_six_have_places(tmp_path: Path) -> None:
    """The last of each resolution, and layers between; the next one answers for the
    others."""
    torch.manual_seed(0)
    strides = [1, 1, 1, 1, 2, 1, 1, 2, 1]
    net = nn.Sequential(*(nn.Conv2d(3, 3, 3, n, padding=1) for n in strides))
    out = tmp_path / "run"
    fv.run(net, torch.rand(3, 40, 40), "Conv2d", out, preset="none")
    fv.report(out)
    layers = written(out, "places-index.js")["layers"]
    entries = written(out, "places-000.js")
    answering = [n for n, entry in enumerate(entries) if entry is not None]
    assert len(answering) == 6
    # the resolutions end with these
    assert {3, 6, 8} <= {*answering}
    for number, layer in enumerate(layers):
        behind = [other for other in answering if other >= number]
        expected = None if number in answering else behind[0]
        assert layer["stand_in"] == expected


def test_later_images_are_written_in_the_axes_of_the_first(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their cosines with the compared images are those of the tensors, too."""
    monkeypatch.setattr(places, "COMPARED_IMAGES", 2)
    fv.report(run, tmp_path / "report")
    index = written(tmp_path, "places-index.js")
    assert index["compared"] == 2
    units = np.array(index["layers"][3]["units"], np.float32)
    shortened = []
    exact = []
    for image in index["images"]:
        entry = written(tmp_path, image["script"])[3]
        levels = np.frombuffer(base64.b64decode(entry["vectors"]), np.int8)
        shortened.append(levels.reshape(-1, len(units)) * units)
        vectors = exact_vectors(run, image["name"], 3, entry["factor"])
        exact.append(unit_vectors(vectors.astype(np.float32)))
    pairs = np.random.default_rng(9).integers(0, len(exact[0]), (2, 400))
    found = places.shortened_cosines(shortened[2][pairs[0]], shortened[0][pairs[1]])
    differences = found - (exact[2][pairs[0]] * exact[0][pairs[1]]).sum(1)
    assert np.quantile(abs(differences), 0.99) <= 0.05


def test_four_places_are_averaged_into_one() -> None:
    """By the number of values in each, also at the edges of the map."""
    maps = np.random.default_rng(4).random((11, 7, 5)).astype(np.float32)
    rows = [maps[i : i + 2].mean(0) for i in range(0, 11, 2)]
    fine = np.array([[row[j : j + 2].mean(0) for j in range(0, 7, 2)] for row in rows])
    vectors = fine.reshape(-1, 5)
    found = places.halved(PlaceVectors(vectors, (6, 4), 2), (11, 7))
    rows = [maps[i : i + 4].mean(0) for i in range(0, 11, 4)]
    expected = [row[j : j + 4].mean(0) for row in rows for j in range(0, 7, 4)]
    assert found.size == (3, 2)
    assert found.factor == 4
    np.testing.assert_allclose(found.vectors, expected, rtol=1e-5)


def test_one_file_has_no_script_of_places(run: Path, tmp_path: Path) -> None:
    """It has no data for it, and no button that asks."""
    fv.report(run, tmp_path / "report.html", single_file=True)
    page = (tmp_path / "report.html").read_text()
    assert "data-places=" not in page
    assert "class PlaceGrid" not in page
