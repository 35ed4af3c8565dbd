"""Titles of grids: the grid below is the one without a title, the letters are Pillow's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Outcome
from PIL import Image, ImageDraw, ImageFont
from torch import nn

import featviz as fv
from featviz.drawing import grid, labels, scan
from featviz.drawing.drawer import Drawer
from featviz.drawing.picture import encode, to_image
from featviz.drawing.titles import fitted, titled
from featviz.errors import UsageError
from featviz.records import DrawOptions, GridPlan, Layer, Site

CLI = Callable[..., Outcome]
TOP = 13
SITE = Site(Layer(1, "conv", "Conv2d"), "output", 0, "")
GREY = 102
"""The padding, where nothing else is asked for: 0.4 of 255."""


def rows(run: Path) -> list[dict[str, Any]]:
    """The captures of the one image of a run."""
    (manifest,) = run.glob("*/manifest.json")
    captures: list[dict[str, Any]] = json.loads(manifest.read_text("utf-8"))["captures"]
    return [{**row, "path": manifest.parent / row["file"]} for row in captures]


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as opened:
        return np.asarray(opened.convert("RGB"))


def pillows(text: str, width: int) -> np.ndarray:
    """Where Pillow's bitmap font has ink, bool [TOP, width], with one pixel of ground around."""
    image = Image.new("1", (width, TOP))
    ImageDraw.Draw(image).text((1, 1), text, fill=1, font=ImageFont.load_default_imagefont())
    return np.asarray(image)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--scale 1",
        "--scale 3 --nrow 3",
        "--flat --format webp --cmap viridis",
        "--padding 0",
        "--padding 5 --pad-value 1 --cmap coolwarm",
        "--labels --cmap magma",
        "--labels --collapse 0.5 --order mean",
        "--overlay 0.5",
        "--overlay 0.5 --labels --format webp",
        "--reduce pca",
        "--reduce max --overlay 0.3",
        "--max-maps 3 --normalize layer",
        "--capture output,grad,input,grad-input",
        "--no-marks --normalize symmetric",
    ],
)
def test_below_the_title_is_the_grid_without_titles(
    options: str, featviz: CLI, tmp_path: Path, tiny_file: Path, picture: Path
) -> None:
    """Pixel for pixel, and the manifest says where it begins; nothing else in it changes."""
    command = ("run", tiny_file, picture, "--layers", "*", "-q", *options.split())
    plain, other = tmp_path / "plain", tmp_path / "titled"
    assert featviz(*command, "--out", plain).code == 0
    assert featviz(*command, "--titles", "--out", other).code == 0
    assert len(rows(plain)) == len(rows(other)) > 4
    for before, after in zip(rows(plain), rows(other), strict=True):
        assert after["grid"].pop("top") == TOP and "top" not in before["grid"]
        wanted, found = pixels(before.pop("path")), pixels(after.pop("path"))
        assert before == after
        assert np.array_equal(found[TOP:], wanted)
        assert len(np.unique(found[:TOP].reshape(-1, 3), axis=0)) == 1 + (found.shape[1] > 6)


def test_a_lossy_format_has_the_title_too(
    featviz: CLI, tmp_path: Path, tiny_file: Path, picture: Path
) -> None:
    """The JPEG is near the PNG on average, title and grid alike."""
    command = ("run", tiny_file, picture, "--layers", "0", "--titles", "-q")
    assert featviz(*command, "--out", tmp_path / "png").code == 0
    assert featviz(*command, "--format", "jpg", "--out", tmp_path / "jpg").code == 0
    (png,), (jpg,) = rows(tmp_path / "png"), rows(tmp_path / "jpg")
    apart = np.abs(pixels(png["path"]).astype(int) - pixels(jpg["path"]).astype(int))
    assert apart[:TOP].mean() < 8 and apart[TOP:].mean() < 8


@pytest.mark.parametrize(
    ("cmap", "ink"),
    [("grey", (255, 255, 255)), ("viridis", (253, 231, 36)), ("coolwarm", (221, 220, 219))],
)
def test_the_title_is_pillows_text_on_the_padding(
    cmap: str, ink: tuple[int, int, int], featviz: CLI, tmp_path: Path, picture: Path
) -> None:
    """Image, layer, shape and scale, in the colour that is told best from the padding."""
    torch.manual_seed(0)
    model = tmp_path / "net.pth"
    torch.save(nn.Sequential(nn.Conv2d(3, 64, 3, padding=1)), model)
    out = tmp_path / "out"
    args = ("--titles", "--cmap", cmap, "--normalize", "range:-1,2.5", "--size", "20x24")
    assert featviz("run", model, picture, *args, "--out", out).code == 0
    found = pixels(rows(out)[-1]["path"])[:TOP].astype(int)
    text = pillows("picture.png  0  1×64×20×24  scale: range, -1 to 2.5", found.shape[1])
    assert (found[~text] == GREY).all()
    assert (np.abs(found[text] - ink) <= 1).all()


@pytest.mark.parametrize(("pad_value", "ink"), [(0, 255), (1, 0), (0.6, 0)])
def test_letters_are_told_from_any_padding(pad_value: float, ink: int) -> None:
    """White on dark, black on light."""
    options = DrawOptions(pad_value=pad_value)
    picture = Drawer(options).draw(SITE, torch.rand(1, 9, 8, 8))[""]
    shown = np.asarray(to_image(titled(picture, SITE, (1, 9, 8, 8), "png", "a.png")))
    assert set(np.unique(shown[:TOP])) == {round(pad_value * 255), ink}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("padding", [0, 2])
def test_a_large_grid_is_streamed_under_its_title(
    compiled: bool, padding: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Written in many pieces, by the compiled loops and by numpy, it is the whole picture."""
    if not compiled:
        monkeypatch.setattr(scan, "compiled", lambda: None)
    monkeypatch.setattr(grid, "PIECE_BYTES", 5_000)
    options = DrawOptions(padding=padding, pad_value=0.4, scale=2, marks=False)
    tensor = torch.rand(1, 100, 17, 13, generator=torch.Generator().manual_seed(0))
    plain = Drawer(options).draw(SITE, tensor)[""]
    picture = titled(plain, SITE, tensor.shape, "png", "a.png")
    pieces = [piece.copy() for piece in grid.strips(picture.plan, picture.tiles, 102)]
    assert len(pieces) > 5
    with (tmp_path / "grid.png").open("wb") as file:
        encode(picture, file, "png", {})
    with Image.open(tmp_path / "grid.png") as opened:
        found = np.asarray(opened)
    assert np.array_equal(found, np.asarray(to_image(picture)))
    assert np.array_equal(found[TOP:], np.asarray(to_image(plain)))
    text = "a.png  conv  1×100×17×13  scale: map"
    assert np.array_equal(found[:TOP] == 255, pillows(text, found.shape[1]))


@pytest.mark.parametrize(
    ("letters", "line"),
    [
        (56, "a_photograph_of_a_cat.jpg  conv1  1×64×56×56  scale: map"),
        (55, "a_photograp..f_a_cat.jpg  conv1  1×64×56×56  scale: map"),
        (47, "a_photo..cat.jpg  conv1  1×64×56×56  scale: map"),
        (44, "a_photograph_of_a_cat.jpg  conv1  1×64×56×56"),
        (35, "a_photo..cat.jpg  conv1  1×64×56×56"),
        (34, "a_photograph_of_a_cat.jpg  conv1"),
        (13, "a_..pg  conv1"),
        (10, "a..g  c..1"),
        (9, "conv1"),
        (4, "c..1"),
        (3, "con"),
        (0, ""),
    ],
)
def test_names_are_shortened_in_the_middle(letters: int, line: str) -> None:
    """The longer one first; then scale, shape and image give way; nothing is ever too long."""
    names, rest = ["a_photograph_of_a_cat.jpg", "conv1"], ["1×64×56×56", "scale: map"]
    assert fitted(names, rest, letters) == line and len(line) <= letters


def test_a_title_never_widens_the_picture(
    featviz: CLI, tmp_path: Path, tiny_file: Path, picture: Path
) -> None:
    """Of 200 letters as of five; a picture too narrow for a letter has an empty line."""
    long = picture.with_name(f"{'x' * 200}.png")
    picture.rename(long)
    for scale in ("1", "auto"):
        command = ("run", tiny_file, long, "--layers", "*", "--scale", scale, "--nrow", "1", "-q")
        assert featviz(*command, "--out", tmp_path / f"plain{scale}").code == 0
        assert featviz(*command, "--titles", "--out", tmp_path / f"titled{scale}").code == 0
        plain, other = (rows(tmp_path / f"{name}{scale}") for name in ("plain", "titled"))
        sizes = [[pixels(row["path"]).shape[:2] for row in side] for side in (plain, other)]
        assert sizes[1] == [(height + TOP, width) for height, width in sizes[0]]


def test_letters_that_the_font_lacks_are_question_marks() -> None:
    """Control characters are escaped, as everywhere; Latin-1 is written."""
    picture = Drawer(DrawOptions()).draw(SITE, torch.rand(1, 64, 8, 8))[""]
    shown = titled(picture, SITE, (1, 64, 8, 8), "png", "Zoë кот\x1b.png")
    assert shown.title.startswith(r"Zoë ???\x1b.png  conv  1×64×8×8")
    assert np.asarray(to_image(shown))[:TOP].max() == 255


@pytest.mark.parametrize(
    ("kind", "call", "key", "words"),
    [
        ("output", 0, "", "conv"),
        ("output", 1, "", "conv output.call1"),
        ("grad-input", 0, "saliency", "conv grad-input.saliency"),
    ],
)
def test_tensors_of_one_layer_are_told_apart(kind: str, call: int, key: str, words: str) -> None:
    """Kind, call and key stand behind the layer where it is not its first output."""
    picture = Drawer(DrawOptions()).draw(SITE, torch.rand(1, 144, 8, 8))[""]
    site = Site(SITE.layer, kind, call, key)
    assert titled(picture, site, (1, 64, 8, 8), "png").title.startswith(f"{words}  1×64×8×8")


@pytest.mark.slow
def test_a_picture_that_its_format_holds_only_without_a_title_is_skipped(
    featviz: CLI, tmp_path: Path, picture: Path
) -> None:
    """WebP ends at 16,383 pixels: the reason names the size, and the other layers are drawn."""
    model = tmp_path / "net.pth"
    torch.save(nn.Sequential(nn.Conv2d(3, 65535 // 4, 20), nn.Flatten(), nn.ReLU()), model)
    args = ("--size", "20", "--nrow", "1", "--scale", "1", "--padding", "0", "--format", "webp")
    base = ("run", model, picture, *args, "--layers", "0,2", "--max-maps", "16375")
    assert featviz(*base, "--out", tmp_path / "plain").code == 0
    done = featviz(*base, "--titles", "--out", tmp_path / "titled")
    assert "16388 pixels is more than webp holds (16383 a side)" in done.err


def test_kernels_have_titles(featviz: CLI, tmp_path: Path, tiny_file: Path) -> None:
    """Layer and shape of the weights, above the kernels as they are without."""
    plain, other = tmp_path / "a" / "k", tmp_path / "b" / "k"
    assert featviz("kernels", tiny_file, "--out", plain).code == 0
    assert featviz("kernels", tiny_file, "--titles", "--out", other).code == 0
    (before,), (after,) = rows(plain.parent), rows(other.parent)
    assert after["grid"]["top"] == TOP
    assert np.array_equal(pixels(after["path"])[TOP:], pixels(before["path"]))
    assert pixels(after["path"])[:TOP].max() == 255


def test_titles_from_python(tiny: nn.Module, picture: Path) -> None:
    """`titles=True` does it for runs and kernels; one tensor has no name to write."""
    plain, other = (
        fv.run(tiny, picture, "0", titles=titles).captures[0].image for titles in (False, True)
    )
    assert np.array_equal(np.asarray(other)[TOP:], np.asarray(plain))
    assert fv.kernels(tiny, titles=True).captures[0].row["grid"]["top"] == TOP
    with pytest.raises(UsageError, match="no option titles"):
        fv.grid(torch.rand(1, 4, 8, 8), titles=True)  # type: ignore[call-arg]


def test_tensorboards_grids_have_no_titles(
    featviz: CLI, tmp_path: Path, tiny_file: Path, picture: Path
) -> None:
    """Its tags say what they are: the pictures are the same with --titles."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = []
    for name, more in (("plain", []), ("titled", ["--titles"])):
        command = ("run", tiny_file, picture, "--layers", "*", "--tensorboard", tmp_path / "tb")
        assert featviz(*command, *more, "--out", tmp_path / name).code == 0
        board = EventAccumulator(str(tmp_path / "tb" / name)).Reload()
        tags = board.Tags()["images"]
        shown.append({tag: [image.encoded_image_string for image in board.Images(tag)]
                      for tag in tags})  # fmt: skip
    assert shown[0] == shown[1] and len(shown[0]) > 4


def test_the_plan_finds_tiles_below_the_title() -> None:
    """`GridPlan.box` counts row by row, from the title and the padding on."""
    plan = GridPlan(5, 3, 2, (4, 5), (2, 2), 2, top=TOP)
    assert (plan.width, plan.height) == (3 * 12 + 2, TOP + 2 * 10 + 2)
    assert plan.box(0) == (2, TOP + 2, 10, 8) and plan.box(4) == (14, TOP + 12, 10, 8)
    assert labels.LINE == TOP
