"""Runs whose grids have titles: whatever reads a picture finds its tiles below them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Outcome
from PIL import Image
from rundirs import without_sums
from torch import nn

from featviz.report import ReportOptions, build_report
from featviz.report.network import tile_of
from featviz.report.shrinking import shrunk
from featviz.report.views import ReportForm
from featviz.rundir.read import read_run

from .browsing import Page
from .markup import loaded

CLI = Callable[..., Outcome]
TOP = 13


@pytest.fixture
def both(featviz: CLI, tmp_path: Path, picture: Path) -> tuple[Path, Path]:
    """The same run without titles and with them: twelve maps of 20 × 24."""
    torch.manual_seed(0)
    torch.save(nn.Sequential(nn.Conv2d(3, 12, 3, padding=1)), tmp_path / "net.pth")
    command = ("run", tmp_path / "net.pth", picture, "--layers", "0", "--size", "20x24")
    for name, more in (("plain", []), ("titled", ["--titles"])):
        assert featviz(*command, *more, "--cmap", "viridis", "--out", tmp_path / name).code == 0
    return tmp_path / "plain", tmp_path / "titled"


def test_a_sheet_of_titled_grids_has_the_same_tiles(
    both: tuple[Path, Path], featviz: CLI, tmp_path: Path
) -> None:
    """Pixel for pixel."""
    sheets = []
    for run in both:
        out = tmp_path / f"{run.name}.png"
        assert featviz("sheet", run, "--layer", "0", "--out", out).code == 0
        with Image.open(out) as opened:
            sheets.append(np.asarray(opened))
    assert np.array_equal(*sheets)


def test_diff_reads_the_values_below_the_title(both: tuple[Path, Path], featviz: CLI) -> None:
    """Equal runs are equal by their pixels, and a changed pixel is found in its channel."""
    plain, titled = both
    done = featviz("diff", plain, titled, "--json")
    assert done.code == 0
    (layer,) = json.loads(done.out)["layers"]
    assert layer["by"] == ["statistics and pixels"]
    (file,) = titled.glob("*/001_0/output.png")
    box = tile_of(row_of(titled), 7).box
    with Image.open(file) as opened:
        opened.load()
    value = opened.getpixel(box[:2])
    opened.putpixel(box[:2], 0 if value > 99 else 200)  # type: ignore[operator]
    opened.save(file)
    without_sums(file.parents[1])
    done = featviz("diff", plain, titled, "--json")
    assert done.code == 4
    (layer,) = json.loads(done.out)["layers"]
    assert layer["most_changed"] == [7]


def row_of(run: Path) -> Any:
    (image,) = read_run(run).images.values()
    (row,) = image.captures.values()
    return row


def test_the_report_says_where_tiles_begin(both: tuple[Path, Path]) -> None:
    """To its scripts, and in the tiles of the network's page."""
    entries = []
    for run in both:
        build_report(run, ReportOptions())
        (entry,) = loaded(run, "image-000.html").values()
        entries.append(entry)
    plain, titled = entries
    assert titled.pop("top") == TOP and "top" not in plain
    size, taller = plain.pop("size"), titled.pop("size")
    assert taller == [size[0], size[1] + TOP] and plain == titled
    for channel in (0, 11):
        left, top, width, height = tile_of(row_of(both[0]), channel).box
        assert tile_of(row_of(both[1]), channel).box == (left, top + TOP, width, height)


def test_a_report_of_fewer_tiles_cuts_them_from_below_the_title(both: tuple[Path, Path]) -> None:
    """The new picture has no title, and equals that of the run without titles."""
    cut = []
    for run in both:
        read = read_run(run)
        (image,) = shrunk([read], ReportForm(tiles=3))[0].images.values()
        (row,) = image.captures.values()
        assert row.plan.top == 0 and len(row.drawn) == 3
        cut.append(image.content(row.file))
    assert cut[0] == cut[1]


@pytest.mark.slow
def test_the_pointer_finds_tiles_below_the_title(browser: Any, both: tuple[Path, Path]) -> None:
    """In the middle of each tile it is on its channel, on the title on none; sorted and enlarged
    tiles are where they are drawn."""
    build_report(both[1], ReportOptions())
    page = Page(browser, both[1]).open("image-000.html")
    code = """
        const grid = [...frames.values()][0].grid;
        const middle = ([x, y, w, h]) => [x + w / 2, y + h / 2];
        const at = (n, view) => grid.channelAt(...middle(grid.place(n, view)), view);
        const seen = (view) => Array.from({length: 12}, (_, n) => at(n, view));
        return {own: seen(grid), large: seen(grid.resized(90, 400)), first: grid.place(0),
                title: grid.channelAt(20, 6), size: grid.size, high: grid.resized(90, 400)};
    """
    found = page.js(code)
    assert found["own"] == found["large"] == list(range(12))
    assert found["title"] is None
    box = tile_of(row_of(both[1]), 0).box
    assert tuple(found["first"]) == box
    (file,) = both[1].glob("*/001_0/output.png")
    with Image.open(file) as opened:
        assert found["size"] == list(opened.size)
    assert found["high"]["top"] == 0
