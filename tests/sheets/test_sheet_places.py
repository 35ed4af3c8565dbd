"""`featviz sheet` with one tile of all places of all images: components, and what is
like a place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image

import featviz as fv
from featviz.drawing import colormap
from featviz.drawing.outlines import with_ring
from featviz.drawing.place_tiles import (
    ImageCapture,
    component_tiles,
    parse_place,
    similarity_tiles,
)
from featviz.errors import UsageError
from featviz.options import read
from featviz.options.commands import SheetOptions
from featviz.rundir.image import read_image
from featviz.rundir.read import read_run
from featviz.sheets.cells import SheetRun, read_content
from featviz.sheets.sheets import Sheet, make_sheet


def sheet_of(run: Path, **options: Any) -> Sheet:
    """A sheet of one run."""
    return make_sheet([run], read(SheetOptions, options))


def captures_of(run: Path) -> dict[str, ImageCapture]:
    """The one capture of each of the two images, by the image's name."""
    captures = {}
    for name in ("image-0.png", "image-1.png"):
        image = read_image(run, name)
        captures[name] = ImageCapture(image, next(iter(image.captures.values())))
    return captures


@pytest.fixture(scope="module")
def run_of_maps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two images of different sizes through a convolution, to 7 by 11 places
    and to 5 by 8."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("places") / "run"
    images = [
        Image.fromarray(np.random.default_rng(n).integers(0, 256, (*size, 3), "uint8"))
        for n, size in enumerate(((16, 24), (12, 18)))
    ]
    conv = torch.nn.Conv2d(3, 6, 3, stride=2)
    fv.run(conv, images, "*", out, preset="none", tensors=True)
    return out


@pytest.mark.medium
@pytest.mark.parametrize(
    "option", [{"reduce": "pca"}, {"similar_to": "image-1.png@0.5,0.5"}]
)
def test_all_places_of_all_images_make_one_tile_for_each(
    run_of_maps: Path, option: dict[str, str]
) -> None:
    """In the colours of drawing.place_tiles, a column for each image."""
    sheet = sheet_of(run_of_maps, **option)
    assert sheet.images == ["image-0.png", "image-1.png"]
    assert list(sheet.channels.values()) == [[]]
    captures = captures_of(run_of_maps)
    if "reduce" in option:
        tiles = component_tiles(captures)
    else:
        tiles = similarity_tiles(captures, parse_place(option["similar_to"]))
    colors = set(map(tuple, sheet.pixels.reshape(-1, 3).tolist()))
    for tile in tiles.values():
        height, width = tile.shape[:2]
        assert tuple(tile[height // 2, width // 2].tolist()) in colors


def test_places_and_channels_exclude_each_other(
    featviz: Run, run_of_maps: Path
) -> None:
    """And what is no place is refused before the run is read."""
    with pytest.raises(UsageError, match="exclude each other"):
        sheet_of(run_of_maps, reduce="pca", channels="0-3")
    done = featviz("sheet", "nowhere", "--similar-to", "cat.jpg")
    assert done.code == 2


@pytest.mark.medium
@pytest.mark.parametrize(
    ("spot", "row", "column"),
    [
        ("0,0", 0, 0),
        ("1,1", 4, 7),
        ("0.97,0.1", 0, 7),
        ("0.15,0.97", 4, 1),
        ("0.5,0.3", 1, 4),
        ("0.5,0.19", 0, 4),
        ("0.36,0.61", 3, 2),
    ],
)
def test_the_colours_of_likeness_are_cosines_from_0_to_1(
    run_of_maps: Path, spot: str, row: int, column: int
) -> None:
    """They are torch's cosines of the tensors with the place that the spot lies in,
    enlarged by Pillow, over the input; the colour bar says so."""
    place = f"image-1.png@{spot}"
    tile = similarity_tiles(captures_of(run_of_maps), parse_place(place))
    maps = []
    for number in range(2):
        path = next(run_of_maps.glob(f"image-{number}.png/*/output.npy"))
        maps.append(torch.from_numpy(np.load(path))[0])
    vector = maps[1][:, row, column, None, None]
    cosines = torch.cosine_similarity(maps[0], vector, dim=0)
    likeness = Image.fromarray(cosines.clamp(0, 1).numpy())
    levels = np.asarray(likeness.resize((24, 16), Image.Resampling.BILINEAR)) * 255
    with Image.open(run_of_maps / "image-0.png" / "input.png") as opened:
        seen = np.asarray(opened.convert("RGB"), float)
    heat = colormap.ramp("inferno")[np.rint(levels).astype(int)]
    expected = 0.4 * seen + 0.6 * heat
    assert np.abs(tile["image-0.png"] - expected).max() < 12

    sheet = sheet_of(run_of_maps, similar_to=place)
    bar = sheet.pixels[:, -70:].reshape(-1, 3).tolist()
    assert colormap.ramp("inferno")[200].tolist() in bar


def test_a_ring_leaves_the_spot_as_it_is() -> None:
    """It is black and white, a tenth of the longer side away from the spot."""
    grey = np.full((80, 200, 3), 128, np.uint8)
    drawn = with_ring(grey, 0.25, 0.5)
    y, x = np.nonzero((drawn != 128).any(2))
    distance = np.hypot(y - 40, x - 50)
    assert distance.min() > 15
    assert distance.max() < 25
    assert {*np.unique(drawn)} == {0, 128, 255}


@pytest.mark.medium
def test_nothing_is_like_a_place_where_values_are_not_finite(tmp_path: Path) -> None:
    """A cosine with NaN is none: the error says which values the layer holds."""
    conv = torch.nn.Conv2d(3, 6, 3, stride=2)
    with torch.no_grad():
        conv.bias[2] = float("nan")
    image = np.zeros((16, 24, 3), np.uint8)
    fv.run(conv, image, "*", tmp_path, preset="none", tensors=True)
    with pytest.raises(UsageError, match="NaN or infinite values") as caught:
        sheet_of(tmp_path, similar_to="image-0.png@0.5,0.5")
    assert "--images leaves the image out" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["a@1.5,0.5", "a@0.5,1.5", "a@2,0", "@0,0", "a@0"])
def test_a_place_lies_in_its_image(text: str) -> None:
    """In both directions."""
    with pytest.raises(UsageError, match="is no place of an image"):
        parse_place(text)


@pytest.mark.parametrize("text", ["a@b@1,0", "a@b@1.0,.0", "a@b@1.,0."])
def test_edges_are_places_too(text: str) -> None:
    """Numbers are read as Python reads them; a name may have an @."""
    assert parse_place(text) == ("a@b", 1, 0)


def test_the_place_has_a_ring_in_the_input_too(run_of_maps: Path) -> None:
    """What the model saw of its image has one, and the other image has none."""
    run = SheetRun("run", read_run(run_of_maps, keep_stats=True))
    options = read(SheetOptions, {"similar_to": "image-1.png@0.5,0.5"})
    content = read_content([run], options)
    for name, is_ringed in (("image-0.png", False), ("image-1.png", True)):
        with Image.open(run_of_maps / name / "input.png") as opened:
            expected = np.asarray(opened.convert("RGB"))
        if is_ringed:
            expected = with_ring(expected, 0.5, 0.5)
        assert np.array_equal(content.inputs[name][0], expected)
