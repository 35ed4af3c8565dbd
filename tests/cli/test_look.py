"""`featviz look`: messages, exit codes, streams, and pictures in a terminal."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DIGITS, DIGITS_MODEL
from PIL import Image
from rich.console import Console

from featviz.cli import terminal
from featviz.inspection.look import LookResult
from featviz.inspection.shown import ShownLayer
from featviz.records import Guess

from .outcomes import Run

SEVEN = DIGITS / "05-7.png"
LOOK = ("look", DIGITS_MODEL, SEVEN)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_writes_one_picture_here(featviz: Run, tmp_path: Path) -> None:
    """Named after the image; the prediction and the file are said on stderr, nothing on stdout."""
    done = featviz(*LOOK)
    assert (done.code, done.out) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["look-05-7.png"]
    assert "05-7.png: class 7 > 99.9 %, class 1 < 0.1 %" in done.err
    assert done.err.endswith("4 layers in look-05-7.png\n")


def test_json_is_one_document(featviz: Run) -> None:
    """With the layers, channels and prediction."""
    done = featviz(*LOOK, "--json", "--maps", "3", "--by", "value", "--layers", "ReLU#0,Linear")
    document = json.loads(done.out)
    assert [row["layer"] for row in document["layers"]] == ["1", "10"]
    assert [len(row["channels"]) for row in document["layers"]] == [3, 3]
    assert document["layers"][1]["channels"][0] == document["prediction"][0]["index"] == 7
    assert Path(document["file"]).exists()


@pytest.mark.slow
def test_only_its_own_picture_is_replaced(featviz: Run, tmp_path: Path) -> None:
    """An earlier one of look without a word; another file only with --overwrite."""
    page = tmp_path / "page.png"
    Image.new("RGB", (3, 3)).save(page)
    before = page.read_bytes()
    done = featviz(*LOOK, "--out", page)
    assert (done.code, page.read_bytes()) == (1, before)
    assert "page.png is there and is no picture of featviz look" in done.err
    assert "hint: --overwrite replaces it" in done.err
    for options in (["--overwrite"], [], ["--cmap", "grey"]):
        before = page.read_bytes()
        assert featviz(*LOOK, "--out", page, *options).code == 0
        assert Image.open(page).info["Software"] == "featviz look"
    assert page.read_bytes() != before


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--out", "page.jpg"], 2, "--out page.jpg: look writes PNG\nhint: --out page.png"),
        (["--maps", "0"], 2, "--maps 0 is below 1"),
        (["--cmap", "viridiss"], 2, "hint: did you mean viridis"),
        (["--layers", "Conv3d"], 2, "no layer matches --layers 'Conv3d'"),
        (["--out", str(SEVEN), "--overwrite"], 2, "is the input"),
        (["--size", "2"], 1, "the model failed in"),
    ],
)
def test_refusals(featviz: Run, tmp_path: Path, words: list[str], code: int, message: str) -> None:
    """One line with its remedy, the exit codes of run, and nothing is written."""
    done = featviz(*LOOK, *words)
    assert done.code == code and message in done.err and "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


def test_a_broken_image_fails(featviz: Run, tmp_path: Path) -> None:
    """Exit 1 with its name, as of a run of one image."""
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    done = featviz("look", DIGITS_MODEL, "broken.png")
    assert done.code == 1 and "broken.png" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["broken.png"]


def test_of_a_folder_the_first_image_is_shown(featviz: Run, tmp_path: Path) -> None:
    """It says so, and which one."""
    done = featviz("look", DIGITS_MODEL, DIGITS)
    assert done.code == 0 and (tmp_path / "look-00-5.png").exists()
    assert "the first of 20 images, 00-5.png; name another one" in done.err


def result(**fields: Any) -> LookResult:
    """A page of one layer: two maps, red above blue and green."""
    red_blue = np.array([[[255, 0, 0]], [[0, 0, 255]]], np.uint8)
    green = np.full((2, 1, 3), (0, 255, 0), np.uint8)
    layer = ShownLayer(
        "conv\x1b[1m", "Conv2d", 1, 1, "", (1, 2, 2, 1), "nchw", 2, 0, 0, None, (5, 0),
        ((0.0, 1.0), (0.0, 1.0)), False, (red_blue, green),
    )  # fmt: skip
    known = {"path": Path("page.png"), "model": "net", "image": "a.png", "input_shape": (1,)}
    known |= {"preprocessing": "", "prediction": (Guess(7, None, 1.0, 0.5),), "layers": (layer,)}
    known |= {"left_out": (), "skipped": (), "never_ran": (), "shown": green, "picture": green}
    return LookResult(**{**known, **fields})


def test_blocks_have_the_colours_of_the_pixels() -> None:
    """A half block is two pixels: the upper one is its ink, the lower one its ground."""
    lines = list(terminal.blocks(result(), 30))
    blocks = [line for line in lines if "▀" in line.plain]
    row = blocks[-9:]
    colours = {str(span.style) for span in row[0].spans}
    assert colours == {"rgb(255,0,0) on rgb(255,0,0)", "rgb(0,255,0) on rgb(0,255,0)"}
    assert {str(span.style) for span in row[-1].spans} == {
        "rgb(0,0,255) on rgb(0,0,255)",
        "rgb(0,255,0) on rgb(0,255,0)",
    }
    assert row[0].plain == "▀" * 14 + " " + "▀" * 14
    assert lines[-1].plain.split() == ["5", "0"]
    words = [line.plain for line in lines]
    assert r"conv\x1b[1m  Conv2d 1×2×2×1" in words
    assert "██████████░░░░░░░░░░ class 7 50.0 %" in words
    assert max(map(len, words)) <= 30 + len("class 7 50.0 %")


@pytest.mark.parametrize(("colours", "shown"), [("truecolor", True), (None, False)])
def test_a_terminal_shows_blocks_if_it_has_colours(
    monkeypatch: pytest.MonkeyPatch, colours: Any, shown: bool
) -> None:
    """One without colours, whose blocks would be stripes, shows nothing."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system=colours, width=40)
    monkeypatch.setattr("rich.console.Console", lambda **settings: console)
    monkeypatch.setattr(terminal, "_graphics", lambda: None)
    terminal.show(result())
    assert ("▀" in stream.getvalue()) is shown


def test_a_terminal_that_knows_graphics_gets_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """What draws by the terminal's protocol gets the page's pixels and a width in columns."""
    stream, given = io.StringIO(), []
    console = Console(file=stream, force_terminal=True, width=200)
    monkeypatch.setattr("rich.console.Console", lambda **settings: console)
    monkeypatch.setattr(terminal, "_graphics", lambda: lambda *words: given.append(words) or "page")
    terminal.show(result())
    ((image, width),) = given
    assert (np.asarray(image) == result().picture).all() and width == 120
    assert stream.getvalue() == "page\n"


@pytest.mark.parametrize(
    ("is_terminal", "words", "shows"),
    [(True, [], True), (False, [], False), (True, ["--no-show"], False), (True, ["--json"], False)],
)
def test_only_a_terminal_gets_a_picture(
    featviz: Run, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, words: list[str], shows: bool
) -> None:
    """A pipe, a JSON document and --no-show get none; the file is written in any case."""
    shown: list[LookResult] = []
    monkeypatch.setattr(terminal, "show", shown.append)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert featviz(*LOOK, *words).code == 0
    assert len(shown) == shows and Path("look-05-7.png").exists()
