"""`featviz exemplars`: pictures, files, failures and bad values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image
from runs import tree
from torch import nn

from featviz.exemplars import pictures
from featviz.exemplars.crops import TILE, MapPosition, cut
from featviz.exemplars.exemplars import find_exemplars
from featviz.layout.tracing.fields import PixelBox
from featviz.models.load import adopt
from featviz.options import InputOptions
from featviz.options.commands import ExemplarOptions

from .conftest import PLAIN, draw


@pytest.fixture
def reds(tmp_path: Path) -> Path:
    """Six pictures of one red each, by name in the order of their brightness."""
    for value in (40, 80, 120, 160, 200, 250):
        draw(
            tmp_path / "reds" / f"{value:03d}.png", np.full((14, 12, 3), (value, 0, 0))
        )
    return tmp_path / "reds"


@pytest.fixture
def lights(tmp_path: Path) -> Path:
    """The file of a network of two channels: one for bright reds, one for dark ones."""
    model = nn.Sequential(nn.Conv2d(3, 2, 1))
    with torch.no_grad():
        model[0].weight.copy_(
            torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]])[:, :, None, None]
        )
        model[0].bias.zero_()
    torch.save(model, tmp_path / "lights.pth")
    return tmp_path / "lights.pth"


def tile_colours(picture: Path, count: int) -> list[tuple[int, ...]]:
    """The colour in the middle of each tile of a channel's picture."""
    image = Image.open(picture)
    cells = [pictures.tile_grid(count).cell(rank) for rank in range(count)]
    half = TILE // 2
    return [image.getpixel((cell.left + half, cell.top + half)) for cell in cells]  # type: ignore[misc]


def test_pictures_show_the_best_images_first(
    featviz: Run, lights: Path, reds: Path, tmp_path: Path
) -> None:
    """The bright channel has the brightest reds, the dark one the darkest; the sheet
    has both."""
    out = tmp_path / "out"
    done = featviz(
        "exemplars", lights, reds, "--top", 3, "--layers", "0", "--out", out, *PLAIN
    )
    assert done.code == 0, done.err
    folder = out / "001_0" / "output"
    # two in a row, texts between rows
    assert pictures.tile_grid(3).cell(2) == (8, 214, 128, 128)
    bright, dark = (tile_colours(folder / f"c0000{n}.png", 3) for n in (0, 1))
    assert bright == [(value, 0, 0) for value in (250, 200, 160)]
    assert dark == [(value, 0, 0) for value in (40, 80, 120)]
    sheet = np.asarray(Image.open(out / "001_0" / "output.png").convert("RGB"))
    for value in (250, 200, 160, 120, 80, 40):
        assert (sheet == (value, 0, 0)).all(-1).sum() == 64 * 64
    columns = [
        np.argwhere((sheet == (v, 0, 0)).all(-1))[:, 1].min() for v in (250, 200, 160)
    ]
    assert columns == sorted(columns)


def test_a_crop_is_the_receptive_field(featviz: Run, tmp_path: Path) -> None:
    """A unit that sees 2 × 2 pixels shows those four, enlarged to halves of the tile."""
    pixels = np.zeros((14, 12, 3))
    pixels[4:6, 6:8] = [[(255, 0, 0), (0, 255, 0)], [(0, 0, 255), (255, 255, 0)]]
    draw(tmp_path / "photos" / "a.png", pixels)
    model = nn.Sequential(nn.Conv2d(3, 1, 2, 2, bias=False))
    model[0].weight.data.fill_(1)
    torch.save(model, tmp_path / "m.pth")
    out = tmp_path / "out"
    inputs = (tmp_path / "m.pth", tmp_path / "photos")
    done = featviz(
        "exemplars", *inputs, "--layers", "0", "--top", 1, "--out", out, *PLAIN
    )
    assert done.code == 0, done.err
    assert "2×2" in done.out
    assert "computed" in done.out
    with Image.open(out / "001_0" / "output" / "c00000.png") as picture:
        left_edge, top, width, height = pictures.tile_grid(1).cell(0)
        tile = np.asarray(
            picture.crop((left_edge, top, left_edge + width, top + height)).convert(
                "RGB"
            )
        )
    half = TILE // 2
    quarters = [tile[y : y + half, x : x + half] for y in (0, half) for x in (0, half)]
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]
    assert all(
        (quarter == colour).all()
        for quarter, colour in zip(quarters, colours, strict=True)
    )


def test_the_place_is_marked_where_the_whole_image_is_shown() -> None:
    """Around the middle of the cell of the map, and nowhere where the crop tells the
    place."""
    picture = Image.new("RGB", (64, 32), "#336699")
    position = MapPosition(row=0, column=3, rows=2, columns=4)
    uncropped = cut(picture, PixelBox(0, 0, 64, 32), (32, 64), position)
    yellow = np.argwhere((np.asarray(uncropped) == (255, 212, 0)).all(-1))
    assert yellow.min(0).tolist() == [32, 96]
    assert yellow.max(0).tolist() == [63, 127]
    cropped = np.asarray(cut(picture, PixelBox(0, 0, 16, 32), (32, 32), position))
    assert not (cropped == (255, 212, 0)).all(-1).any()
    # one that the border of the image has halved fills half of the tile
    assert (cropped == (0x33, 0x66, 0x99)).all(-1).sum() == TILE * TILE // 2


@pytest.mark.parametrize(
    ("channels", "count", "tile", "shown", "rows"),
    [(8, 9, 32, 9, 8), (1, 1000, 64, 40, 1), (64, 9, 32, 1, 31)],
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
    monkeypatch.setattr(pictures, "_MOST_PIXELS", 2**18)
    tiles = [Image.new("RGB", (128, 128), "#abcdef")] * count
    picture = pictures.LayerPicture(["title"], channels, count)
    for channel in range(channels):
        picture.add_row(channel, tiles, [1.0] * count)
    colored = (np.asarray(picture.image) == (0xAB, 0xCD, 0xEF)).all(-1)
    assert colored.sum() == rows * shown * tile * tile


def test_an_image_that_vanishes_before_it_is_drawn(
    lights: Path, reds: Path, tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    """Its value stays, with an empty tile and no box, and a warning names it."""

    def remove(image: str, error: object, total: int) -> None:
        if image == "250.png":
            (reds / image).unlink()

    inputs = InputOptions(size=(14, 12), mean=(0.0,) * 3, std=(1.0,) * 3)
    options = ExemplarOptions(layers="0", inputs=inputs, out=tmp_path / "out")
    net = torch.load(lights, weights_only=False)
    result = find_exemplars(adopt(net, inputs), [str(reds)], options, remove)
    assert not result.images.failures
    first, second = result.layers[0].channels[0].exemplars[:2]
    assert (first.image, first.box, second.box) == ("250.png", None, [0, 0, 1, 1])
    assert "250.png cannot be read again" in messages.text


def test_a_broken_image_fails_alone(
    featviz: Run, lights: Path, reds: Path, tmp_path: Path
) -> None:
    """Exit code 3, and exemplars of the others."""
    (reds / "broken.png").write_bytes(b"no image")
    done = featviz(
        "exemplars", lights, reds, "--layers", "0", "--out", tmp_path / "out", *PLAIN
    )
    assert done.code == 3
    assert "broken.png" in done.err
    assert (tmp_path / "out" / "001_0" / "output" / "c00000.png").is_file()


LAYERS = ("--layers", "Conv2d,ReLU,Linear", "--top", "4")


@pytest.mark.slow
def test_batches_of_any_size_give_the_same_bytes(
    featviz: Run, net_file: Path, noise: Path, tmp_path: Path
) -> None:
    """Some, and more than there are images; every file is equal."""
    trees = []
    for n in ("5", "50"):
        arguments = (
            f"{net_file}:make",
            noise,
            *LAYERS,
            *PLAIN,
            "--batch-size",
            n,
            "--per-class",
        )
        done = featviz("exemplars", *arguments, "--out", tmp_path / n)
        assert done.code == 0, done.err
        trees.append(tree(tmp_path / n))
    assert trees[0] == trees[1]
    assert len(trees[0]) > 20
