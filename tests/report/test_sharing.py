"""Forms of a report that can be moved: one file of a bounded size, and a zip file."""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from conftest import Outcome
from PIL import Image
from rundirs import Drawn, without_sums, write_run

from featviz.errors import StoreError, UsageError
from featviz.report import ReportOptions, build_report

from .markup import HOSTILE, Markup, read

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
        without_sums(path.parent.parent)
    return root


def grids(page: Markup) -> list[Image.Image]:
    """The grids of maps in a report of one file."""
    shown = [i for i in page.of("img") if "src" in i and "of conv1" in str(i["alt"])]
    files = [base64.b64decode(str(i["src"]).split(",")[1]) for i in shown]
    return [Image.open(io.BytesIO(file)) for file in files]


def test_one_file_shows_fewer_tiles_where_it_must(noisy: Path, tmp_path: Path) -> None:
    """Those that stay are the tiles of the run, pixel for pixel, and the same in both images; the
    page says how many, and why."""
    out = tmp_path / "one.html"
    whole = build_report(noisy, ReportOptions(single_file=True, out=out))
    size, most = out.stat().st_size, out.stat().st_size - 80_000
    assert whole.tiles is None and "the most telling ones" not in read(out).text
    part = build_report(noisy, ReportOptions(single_file=True, out=out, max_size=most))
    assert out.stat().st_size <= most < size
    assert part.tiles is not None and 4 <= part.tiles < MAPS
    page = read(out)
    assert f"at most {part.tiles} of its maps, the most telling ones" in page.text
    assert f"{part.tiles} of {MAPS} (--max-size)" in page.text
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


def large(root: Path, tile: int, scale: int, **options: object) -> Path:
    """An image of a layer of four maps of noise, enlarged by a factor, or as they are."""
    more = {"shape": [1, 4, tile // scale, tile // scale]}
    row = Drawn("conv1", maps=4, nrow=2, tile=(tile, tile), scale=scale, padding=0, more=more)
    write_run(root, {"a.png": [row]}, options=options)
    path = next(root.rglob("output.png"))
    noise = np.random.default_rng(0).integers(0, 255, (2 * tile // scale,) * 2, np.uint8)
    Image.fromarray(noise.repeat(scale, 0).repeat(scale, 1)).save(path, compress_level=0)
    without_sums(path.parent.parent)
    return root


@pytest.mark.parametrize(("tile", "scale", "factor"), [(160, 4, 4), (150, 1, 3)])
def test_one_file_has_fewer_pixels_before_fewer_maps(
    tmp_path: Path, tile: int, scale: int, factor: int
) -> None:
    """An enlarged map keeps every value; of a large one the mean of each block stays (numpy). The
    page shows both as large as they were."""
    root, out = large(tmp_path / "run", tile, scale), tmp_path / "one.html"
    build_report(root, ReportOptions(single_file=True, out=out))
    most = out.stat().st_size - 10_000
    part = build_report(root, ReportOptions(single_file=True, out=out, max_size=most))
    assert part.tiles is None and part.smaller
    page = read(out)
    assert "large maps have fewer pixels" in page.text and "at most" not in page.text
    with Image.open(next(root.rglob("output.png"))) as picture:
        pixels = np.asarray(picture, np.float64)
    side = len(pixels) // factor
    blocks = pixels.reshape(side, factor, side, factor).mean((1, 3))
    (shown,) = grids(page)
    assert abs(np.asarray(shown) - blocks).max() <= (0 if scale > 1 else 1)
    (image,) = [i for i in page.of("img") if "src" in i and "of conv1" in str(i["alt"])]
    assert image["width"] == str(2 * tile)


def test_letters_on_tiles_stay_readable(tmp_path: Path) -> None:
    """Under --labels no pixel goes; maps do, or the file is refused."""
    root, out = large(tmp_path / "run", 150, 1, labels=True), tmp_path / "one.html"
    build_report(root, ReportOptions(single_file=True, out=out))
    with pytest.raises(StoreError, match="not even with 4 tiles"):
        most = out.stat().st_size - 10_000
        build_report(root, ReportOptions(single_file=True, out=out, max_size=most))


def test_one_file_that_cannot_be_small_enough(noisy: Path) -> None:
    """Refused with what was asked for and the ways out; nothing is written."""
    with pytest.raises(StoreError, match=r"one file of 0\.02 MB, not even with 4 tiles") as caught:
        build_report(noisy, ReportOptions(single_file=True, max_size=20_000))
    assert "--zip" in str(caught.value.hint)
    assert not (noisy / "report.html").exists()
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


def test_a_zip_file_again(noisy: Path, featviz: CLI) -> None:
    """It replaces an earlier one with the same bytes, and no other file."""
    out = noisy / "report.zip"
    assert featviz("report", noisy, "--zip").code == 0
    before = out.read_bytes()
    assert featviz("report", noisy, "--zip").code == 0
    assert out.read_bytes() == before
    out.write_bytes(b"mine")
    done = featviz("report", noisy, "--zip")
    assert done.code == 1 and "is no report of featviz" in done.err
    assert out.read_bytes() == b"mine"


def test_the_statistics_take_little_more_than_their_numbers(tmp_path: Path) -> None:
    """Less than 1.35 times the bytes of float32, which is base64, and once in all."""
    stats = np.random.default_rng(0).random((4096, 6), np.float32)
    row = Drawn("conv1", index=1, type="Conv2d", maps=4096, channels=[0], stats=stats)
    root = write_run(tmp_path / "out", {f"{n}.png": [row] for n in range(3)})
    build_report(root, ReportOptions())
    size = sum(path.stat().st_size for path in (root / "report").glob("grids-*.js"))
    assert size < 1.35 * 3 * stats.nbytes
