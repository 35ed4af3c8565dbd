"""Forms of a report that can be moved: one file of a bounded size, and a zip file; and figures."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from conftest import Outcome
from PIL import Image
from rundirs import Drawn, summed_anew, write_run

from featviz.errors import UsageError
from featviz.options import ReportOptions
from featviz.report import build_report, report
from featviz.rundir.read import read_run

from .markup import EVIL, HOSTILE, Markup, read

CLI = Callable[..., Outcome]
MAPS = 36


@pytest.fixture
def noisy(tmp_path: Path) -> Path:
    """Two images of a layer of 36 maps of noise: each picture has about 60 kB."""
    rng = np.random.default_rng(0)
    stats = rng.random((MAPS, 6), np.float32)
    stats[:, 1] += 2
    stats[:, 4:] = 0
    row = Drawn(
        "conv1", index=1, type="Conv2d", maps=MAPS, nrow=6, tile=(40, 40), scale=1, stats=stats
    )
    root = write_run(tmp_path / "out", {"a.png": [row], HOSTILE: [row]})
    for path in root.rglob("output.png"):
        with Image.open(path) as picture:
            pixels = rng.integers(0, 255, picture.size[::-1], np.uint8)
        Image.fromarray(pixels).save(path)
        summed_anew(path.parent.parent)
    return root


def grids(page: Markup) -> list[Image.Image]:
    """The grids of maps in a report of one file."""
    shown = [i for i in page.of("img") if "src" in i and "of conv1" in str(i["alt"])]
    files = [base64.b64decode(str(i["src"]).split(",")[1]) for i in shown]
    return [Image.open(io.BytesIO(file)) for file in files]


@pytest.mark.parametrize(("room", "tiles_left"), [(90_000, 18), (20_000, 4), (1_000, 4)])
def test_one_file_shows_fewer_tiles_where_it_must(
    room: int, tiles_left: int, noisy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that stay are the tiles of the run, pixel for pixel, and the same in both images, and
    never less than four; the page says how many."""
    out = tmp_path / "one.html"
    whole = build_report(noisy, ReportOptions(single_file=True, out=out))
    assert whole.tiles is None and "the most varied ones" not in read(out).text
    monkeypatch.setattr(report, "MOST_BYTES", room)
    part = build_report(noisy, ReportOptions(single_file=True, out=out))
    assert part.tiles == tiles_left
    page = read(out)
    assert f"at most {part.tiles} of its maps, the most varied ones" in page.text
    assert f"{part.tiles} of {MAPS} (--single-file)" in page.text
    sources = [tiles(Image.open(path)) for path in noisy.rglob("output.png")]
    for grid in grids(page):
        assert len(tiles(grid)) == part.tiles
        assert sum(tiles(grid) <= source for source in sources) == 1


def tiles(picture: Image.Image) -> set[bytes]:
    """The tiles of a grid, 40 × 40 with a padding of 2; those behind the last are left out."""
    pixels = np.asarray(picture)
    found = {
        pixels[top : top + 40, left : left + 40].tobytes()
        for top in range(2, pixels.shape[0] - 2, 42)
        for left in range(2, pixels.shape[1] - 2, 42)
    }
    return {tile for tile in found if len(set(tile)) > 1}


def test_one_file_and_a_zip_file_exclude_each_other(noisy: Path) -> None:
    """Refused before anything is read."""
    with pytest.raises(UsageError, match="--zip and --single-file"):
        build_report(noisy, ReportOptions(single_file=True, zip=True))


def test_a_zip_file_has_the_pages_and_their_pictures(noisy: Path, tmp_path: Path) -> None:
    """Each picture byte for byte and once, under a name of ours; every link leads into the file."""
    build_report(noisy, ReportOptions(zip=True))
    with zipfile.ZipFile(noisy / "report.zip") as packed:
        names = packed.namelist()
        pictures = [packed.read(name) for name in names if name.startswith("pictures/")]
        for name in (name for name in names if name.endswith(".html")):
            page = Markup(packed.read(name).decode())
            linked = [str(a["src"]) for a in page.of("img")] + [
                str(a["href"]) for a in page.of("a")
            ]
            missing = {unquote(link.partition("#")[0]) for link in linked} - {"", *names}
            assert not missing, name
    assert sorted(pictures) == sorted(
        path.read_bytes() for path in noisy.rglob("*.png") if path.is_file()
    )
    assert all(name.isascii() and ".." not in name for name in names)


@pytest.mark.parametrize("content", [b"GIF89a", EVIL.encode(), b""])
def test_a_figure_that_is_no_png(tmp_path: Path, content: bytes) -> None:
    """Its image is damaged, and is named with the file."""
    root = tmp_path / "run"
    write_run(root, {"a.png": [Drawn("conv1"), Drawn("relu", index=2)]})
    figure = root / "a.png" / "001_conv1" / "output.figure.png"
    figure.write_bytes(content)
    path = root / "a.png" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["captures"][0]["figure"] = "001_conv1/output.figure.png"
    path.write_text(json.dumps(manifest))
    summed_anew(root / "a.png")
    run = read_run(root)
    assert not run.images and "output.figure.png" in run.damaged["a.png"]
    assert "is no PNG" in run.damaged["a.png"]
