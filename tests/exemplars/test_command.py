"""`featviz exemplars`: pictures, files, failures and bad values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image
from runs import tree
from torch import nn

from featviz.exemplars import pictures
from featviz.exemplars.collect import ExemplarSource
from featviz.exemplars.crops import MapPosition, cut_tile
from featviz.exemplars.exemplars import class_names, find_exemplars
from featviz.exemplars.fields import is_map_of_input
from featviz.exemplars.pictures import TILE, ExemplarTile
from featviz.files.urls import Url
from featviz.layout.tracing.fields import PixelBox
from featviz.models.load import adopt
from featviz.options import InputOptions
from featviz.options.commands import ExemplarOptions
from featviz.records import CaptureSite, Layer, Sample
from featviz.run import workers
from featviz.rundir.studies import Exemplar

from .conftest import PLAIN, draw

pytestmark = pytest.mark.medium


def exemplar_tile(
    value: float, name: str = "a.png", color: Any = (0, 0, 0)
) -> ExemplarTile:
    """A tile of one colour."""
    exemplar = Exemplar(name, 0, value, place=None, map=None, box=None)
    return ExemplarTile(exemplar, Image.new("RGB", (TILE, TILE), color))


@pytest.fixture
def reds() -> Path:
    """Six pictures of one red each, by name in the order of their brightness."""
    for value in (40, 80, 120, 160, 200, 250):
        draw(Path(f"reds/{value:03d}.png"), np.full((14, 12, 3), (value, 0, 0)))
    return Path("reds")


@pytest.fixture
def lights() -> Path:
    """The file of a network of two channels: one for bright reds, one for dark ones."""
    model = nn.Sequential(nn.Conv2d(3, 2, 1))
    with torch.no_grad():
        model[0].weight.copy_(
            torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]])[:, :, None, None]
        )
        model[0].bias.zero_()
    torch.save(model, "lights.pth")
    return Path("lights.pth")


def pixels_of(path: Path) -> np.ndarray:
    """[H, W, 3]."""
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def tiles_of(path: Path, count: int) -> list[np.ndarray]:
    """The tiles of a channel's picture, each [128, 128, 3]."""
    pixels = pixels_of(path)
    corners = [pictures.tile_grid(count).cell(rank)[:2] for rank in range(count)]
    return [pixels[y : y + TILE, x : x + TILE] for x, y in corners]


def of_colour(pixels: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Rows and columns of the pixels of a colour, [pixels, 2]."""
    return np.argwhere((pixels == colour).all(-1))


@pytest.fixture
def best_three(featviz: Run, lights: Path, reds: Path) -> Path:
    """The folder of the exemplars of the two channels."""
    out = Path("out")
    options = ("--top", 3, "--layers", "0", "--out", out, *PLAIN)
    done = featviz("exemplars", lights, reds, *options)
    assert done.code == 0, done.err
    return out / "001_0"


@pytest.mark.parametrize(
    ("file", "reds_in_order"),
    [("c00000.png", (250, 200, 160)), ("c00001.png", (40, 80, 120))],
)
def test_pictures_show_the_best_images_first(
    file: str, reds_in_order: tuple[int, ...], best_three: Path
) -> None:
    """The bright channel has the brightest reds, the dark one the darkest."""
    tiles = tiles_of(best_three / "output" / file, 3)
    middles = [tile[TILE // 2, TILE // 2].tolist() for tile in tiles]
    assert middles == [[red, 0, 0] for red in reds_in_order]


def test_tiles_stand_two_in_a_row_with_texts_between() -> None:
    """The third begins the second row."""
    assert pictures.tile_grid(3).cell(2) == (8, 210, TILE, TILE)


def test_a_sheet_has_the_best_images_of_all_channels(best_three: Path) -> None:
    """At half their size, the best one first."""
    sheet = pixels_of(best_three / "output.png")
    areas = {red: of_colour(sheet, (red, 0, 0)) for red in (250, 200, 160, 120, 80, 40)}
    assert {len(area) for area in areas.values()} == {64 * 64}
    columns = [areas[red][:, 1].min() for red in (250, 200, 160)]
    assert columns == sorted(columns)


COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0))


def test_a_crop_is_the_receptive_field(featviz: Run) -> None:
    """A unit that sees 2 × 2 pixels shows those four, enlarged to halves of the tile."""
    pixels = np.zeros((14, 12, 3))
    pixels[4:6, 6:8] = np.reshape(COLOURS, (2, 2, 3))
    draw(Path("photos/a.png"), pixels)
    model = nn.Sequential(nn.Conv2d(3, 1, 2, 2, bias=False))
    nn.init.ones_(model[0].weight)
    torch.save(model, "m.pth")
    out = Path("out")
    options = ("--layers", "0", "--top", 1, "--out", out, *PLAIN)

    done = featviz("exemplars", "m.pth", "photos", *options)

    assert done.code == 0, done.err
    assert "2×2" in done.out
    assert "computed" in done.out
    (tile,) = tiles_of(out / "001_0/output/c00000.png", 1)
    half = TILE // 2
    quarters = np.reshape(COLOURS, (2, 2, 3)).repeat(half, 0).repeat(half, 1)
    assert np.array_equal(tile, quarters)


@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("column", [0, 1, 3])
@pytest.mark.parametrize("size", [(64, 32), (32, 64), (96, 96)])
def test_the_mark_lies_around_the_cell_of_the_map(
    size: tuple[int, int], column: int, row: int
) -> None:
    """Of a map of 3 × 4 cells that covers the image, whichever side of the image is the
    longer one; a cell is at least 12 pixels wide and high here."""
    picture = Image.new("RGB", size, "#336699")
    position = MapPosition(row=row, column=column, rows=3, columns=4)
    tile = cut_tile(picture, PixelBox(0, 0, *size), size[::-1], position)
    image = of_colour(np.asarray(tile), (0x33, 0x66, 0x99))
    first = image.min(0)
    height, width = image.max(0) - first + 1
    assert max(height, width) == TILE
    mark = of_colour(np.asarray(tile), (255, 212, 0))
    middle = (mark.min(0) + mark.max(0) + 1) / 2
    offset = np.array([height * (row + 0.5) / 3, width * (column + 0.5) / 4])
    np.testing.assert_allclose(middle, first + offset, atol=1)
    np.testing.assert_allclose(np.ptp(mark, axis=0), [height / 3, width / 4], atol=2)


def test_the_mark_of_a_narrow_cell_can_be_seen() -> None:
    """Of a map of a hundred columns a cell is a pixel wide, and its mark six."""
    picture = Image.new("RGB", (64, 64), "#336699")
    position = MapPosition(row=1, column=50, rows=4, columns=100)
    tile = cut_tile(picture, PixelBox(0, 0, 64, 64), (64, 64), position)
    mark = of_colour(np.asarray(tile), (255, 212, 0))
    assert np.ptp(mark, axis=0).tolist() == [TILE // 4 - 1, 5]


def test_the_place_is_marked_where_the_whole_image_is_shown() -> None:
    """Around the middle of the cell of the map, and nowhere where the crop tells the
    place."""
    picture = Image.new("RGB", (64, 32), "#336699")
    position = MapPosition(row=0, column=3, rows=2, columns=4)
    yellow = (255, 212, 0)

    uncropped = np.asarray(
        cut_tile(picture, PixelBox(0, 0, 64, 32), (32, 64), position)
    )
    cropped = np.asarray(cut_tile(picture, PixelBox(0, 0, 16, 32), (32, 32), position))

    mark = of_colour(uncropped, yellow)
    assert mark.min(0).tolist() == [32, 96]
    assert mark.max(0).tolist() == [63, 127]
    assert not len(of_colour(cropped, yellow))
    # one that the border of the image has halved fills half of the tile
    assert len(of_colour(cropped, (0x33, 0x66, 0x99))) == TILE * TILE // 2


def test_a_crop_in_a_corner_keeps_the_scale_of_its_layer() -> None:
    """The border halves it in both directions, so it fills a quarter of the tile."""
    picture = Image.new("RGB", (64, 64), "#336699")

    tile = cut_tile(picture, PixelBox(0, 0, 16, 16), (32, 32))

    crop = of_colour(np.asarray(tile), (0x33, 0x66, 0x99))
    assert len(crop) == (TILE // 2) ** 2


@pytest.mark.parametrize(
    ("channels", "count", "tile", "shown", "rows"),
    [(8, 9, 32, 9, 8), (1, 1000, 64, 40, 1), (64, 9, 32, 1, 24)],
)
def test_a_sheet_stays_viewable(
    monkeypatch: pytest.MonkeyPatch,
    channels: int,
    count: int,
    tile: int,
    shown: int,
    rows: int,
) -> None:
    """Tiles shrink first, then fewer of each channel are shown, then fewer channels."""
    # the limit itself would take pictures of 64 megapixels
    monkeypatch.setattr(pictures, "_MOST_PIXELS", 300_000)
    tiles = [exemplar_tile(1.0, color="#abcdef")] * count
    picture = pictures.LayerPicture(["title"], channels, count)
    for channel in range(channels):
        picture.add_row(channel, tiles)
    colored = of_colour(np.asarray(picture.image), (0xAB, 0xCD, 0xEF))
    assert len(colored) == rows * shown * tile * tile


def test_an_image_that_vanishes_before_it_is_drawn(
    lights: Path, reds: Path, messages: pytest.LogCaptureFixture
) -> None:
    """Its value stays, with an empty tile and no box, and a warning names it, once for
    all layers."""

    def remove(image: str, error: object, total: int) -> None:
        if image == "250.png":
            (reds / image).unlink()

    inputs = InputOptions(size=(14, 12), mean=(0.0,) * 3, std=(1.0,) * 3)
    options = ExemplarOptions(layers="*", inputs=inputs, out=Path("out"))
    net = torch.load(lights, weights_only=False)
    result = find_exemplars(adopt(net, inputs), [str(reds)], options, remove)
    assert len(result.layers) == 2
    assert not result.images.failures
    first, second = result.layers[0].channels[0].exemplars[:2]
    assert (first.image, first.box, second.box) == ("250.png", None, [0, 0, 1, 1])
    assert messages.text.count("250.png cannot be read again") == 1


def test_a_broken_image_fails_alone(featviz: Run, lights: Path, reds: Path) -> None:
    """Exit code 3, and exemplars of the others."""
    (reds / "broken.png").write_bytes(b"no image")
    options = ("--layers", "0", "--out", "out", *PLAIN)
    done = featviz("exemplars", lights, reds, *options)
    assert done.code == 3
    assert "broken.png" in done.err
    assert Path("out/001_0/output/c00000.png").is_file()


@pytest.mark.slow
def test_batches_of_any_size_give_the_same_bytes(featviz: Run, noise: Path) -> None:
    """Batches of some images, and one of more than there are; every file is equal."""
    factory = Path("whole_numbers.py")
    factory.write_text("from exemplars.conftest import whole_numbers as make\n")
    trees = []
    for size in (5, 50):
        out = Path(str(size))
        options = ("--layers", "Conv2d,ReLU,Linear", "--top", 4, "--per-class", *PLAIN)
        batches = ("--batch-size", size, "--out", out)
        done = featviz("exemplars", f"{factory}:make", noise, *options, *batches)
        assert done.code == 0, done.err
        trees.append(tree(out))
    assert trees[0] == trees[1]
    assert len(trees[0]) > 20


@pytest.mark.parametrize("cores", [2, 5])
def test_worker_processes_draw_what_one_process_draws(
    featviz: Run, noise: Path, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sheets of several layers, among them one without the channels that are asked for:
    every file is equal, and so is what is said."""
    factory = Path("whole_numbers.py")
    factory.write_text("from exemplars.conftest import whole_numbers as make\n")
    options = ("--layers", "Conv2d,ReLU,Linear", "--channels", "4", *PLAIN)
    said = []
    for count in (1, cores):
        monkeypatch.setattr(workers, "usable_cores", lambda count=count: count)
        done = featviz(
            "exemplars", f"{factory}:make", noise, *options, "--out", f"{count}"
        )
        assert done.code == 0, done.err
        # the last line names the folder
        said.append(done.out + done.err.partition("results in")[0])
    assert tree(Path("1")) == tree(Path(f"{cores}"))
    assert said[0] == said[1]
    assert "4 channels" in said[0]


def test_a_class_is_the_folder_of_an_image_and_of_a_clip() -> None:
    """The folder of a clip's frames is the clip itself."""
    frames = (Path("cats/clip/0.png"), Path("cats/clip/1.png"))
    samples = [
        Sample("dogs/a.png", (Path("dogs/a.png"),)),
        Sample("clip", frames),
        Sample("b.png", (Url.of_file("memory://bucket/birds/b.png"),)),
    ]
    assert class_names(samples) == ["dogs", "cats", "birds"]


@pytest.mark.parametrize(
    ("frames", "inputs", "layout", "is_map"),
    [
        (None, 1, "nchw", True),
        (None, 1, "vector", False),
        (8, 1, "nchw", False),
        (None, 2, "nchw", False),
    ],
)
def test_units_have_places_in_the_image_where_there_is_one(
    frames: int | None, inputs: int, layout: str, is_map: bool
) -> None:
    """Not in a clip, nor in one of two images."""
    preprocess = SimpleNamespace(frames=frames, inputs=inputs)
    model: Any = SimpleNamespace(preprocess=preprocess)
    site = CaptureSite(Layer(1, "0", "Conv2d", ("Conv2d",)), "output", 0, "")
    source = ExemplarSource(site, layout, (1, 4, 5, 5), 4)
    assert is_map_of_input(model, source) is is_map


def test_images_that_a_channel_ranks_by_nothing_are_told() -> None:
    """A channel of equal values says so below its name, and one that is zero in all
    images; one image equals no other."""

    def letters(*values: float, is_zero: bool = False) -> int:
        """Pixels of the column of names that are not background."""
        picture = pictures.LayerPicture(["title"], 1, 2)
        picture.add_row(0, [*map(exemplar_tile, values)], is_zero=is_zero)
        names = np.asarray(picture.image)[:, :96]
        return int((names != names[0, 0]).any(2).sum())

    one, different, equal, none = (
        letters(*values) for values in ([0.5], [0.5, 0.25], [0.5, 0.5], [])
    )
    assert one == different < min(equal, none)
    assert equal != none
    assert letters(is_zero=True) > none


def test_a_sheet_names_the_image_of_each_tile() -> None:
    """Below the tile: the end of the name, without that of the file."""

    def below(name: str) -> np.ndarray:
        picture = pictures.LayerPicture(["title"], 1, 1)
        left, top, width, height = picture.add_row(0, [exemplar_tile(0.5, name)])
        return np.asarray(picture.image)[top + height :, left : left + width]

    assert (below("cat.jpg") == below("cat.png")).all()
    assert (below("cat.jpg") != below("dog.jpg")).any()
    long = "of_a_very_long_name_0017.jpg"
    assert (below(f"a{long}") == below(f"b{long}")).all()


def test_channels_of_a_sheet_run_down_and_then_across() -> None:
    """Of six, in two columns of three rows, the fourth stands beside the first."""
    picture = pictures.LayerPicture(["title"], 6, 1)
    colors = {0: (255, 0, 0), 1: (0, 255, 0), 3: (0, 0, 255)}
    for channel in range(6):
        color = colors.get(channel, (200, 200, 200))
        picture.add_row(channel, [exemplar_tile(0.5, color=color)])
    pixels = np.asarray(picture.image)
    first, second, fourth = (
        np.argwhere((pixels == color).all(axis=2))[0] for color in colors.values()
    )
    assert second[1] == first[1]
    assert second[0] > first[0]
    assert fourth[0] == first[0]
    assert fourth[1] > first[1]
