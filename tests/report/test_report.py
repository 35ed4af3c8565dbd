"""`featviz report`: what it writes, reads and refuses, and its forms that can be moved."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from conftest import Run
from PIL import Image
from rundirs import Drawn, summed_anew, write_run

from featviz.errors import StoreError, UsageError
from featviz.options.commands import ReportOptions
from featviz.report import build_report, fitting
from featviz.report.figures import arrange
from featviz.rundir.read import read_run

from .markup import Markup, assert_says, built, page_of, pages, read

pytestmark = pytest.mark.medium


def links_of(page: Markup) -> list[str]:
    """All addresses that a page leads to or loads."""
    links = page.values("a", "href") + page.values("link", "href")
    return links + page.values("img", "src") + page.values("script", "src")


def attributes_of(page: Markup) -> list[tuple[str, str | None]]:
    """All attributes of all elements."""
    pairs: list[tuple[str, str | None]] = []
    for _, attributes in page.tags:
        pairs += attributes.items()
    return pairs


def pictures_of(root: Path) -> list[Path]:
    """The pictures of all complete images of the gallery."""
    return [path for path in root.rglob("*.png") if is_shown(path)]


def is_shown(path: Path) -> bool:
    return path.is_file() and "half.png" not in path.parts


def targets_of(root: Path, name: str) -> list[tuple[Path, str]]:
    """The file and the part of a page that each link of a page leads to."""
    targets = []
    for link in links_of(page_of(root, name)):
        path, _, fragment = link.partition("#")
        assert not path.startswith("/"), link
        targets.append((root / "report" / unquote(path or name), fragment))
    return targets


def test_every_link_leads_to_a_file(gallery: Path) -> None:
    """It is relative, and inside the run directory."""
    gallery_pages = pages(gallery)
    assert len(gallery_pages) == 1 + 3 + 3
    for name in gallery_pages:
        for path, _ in targets_of(gallery, name):
            assert path.is_file(), (name, path)
            assert gallery in path.resolve().parents


def test_every_part_of_a_page_that_is_linked_is_there(gallery: Path) -> None:
    """It has the id that the link names."""
    gallery_pages = pages(gallery)
    for name in gallery_pages:
        for path, fragment in targets_of(gallery, name):
            if fragment:
                assert fragment in gallery_pages[path.name].ids, (name, fragment)


def test_pictures_are_shown_from_where_they_are(gallery: Path) -> None:
    """Every picture of a complete image is on some page, and none is copied."""
    linked = set()
    for page in pages(gallery).values():
        linked |= {unquote(address) for address in page.values("img", "src")}
    shown = {(gallery / "report" / address).resolve() for address in linked}
    assert set(pictures_of(gallery)) <= shown
    assert list((gallery / "report").rglob("*.png")) == []


def test_no_inline_style_script_or_data(gallery: Path) -> None:
    """A CI host's content security policy has nothing to block but the scripts."""
    for page in pages(gallery).values():
        assert page.inline.strip() == ""
        active = page.of("style") + page.of("iframe") + page.of("object")
        assert active + page.of("base") == []
        assert len(page.of("script")) == len(page.values("script", "src"))
        for name, value in attributes_of(page):
            assert not re.match("style$|on", name)
            assert not re.match("data:|javascript:", str(value))


def test_the_same_bytes_again(root: Path) -> None:
    """A second report replaces the first and equals it, in the folder and in a file of
    either kind."""

    def content() -> dict[str, bytes]:
        for options in ({}, {"single_file": True}, {"zip": True}):
            build_report(root, ReportOptions(**options))
        paths = [*(root / "report").iterdir(), *root.glob("report.*")]
        return {path.name: path.read_bytes() for path in paths}

    first = content()
    assert first.keys() > {"report.html", "report.zip"}
    assert content() == first
    assert list(root.glob(".*")) == []


@pytest.fixture
def single(root: Path, tmp_path: Path) -> Markup:
    """The report of the gallery in one file."""
    out = tmp_path / "one.html"
    build_report(root, ReportOptions(single_file=True, out=out))
    return read(out)


def test_links_of_one_file_lead_to_its_own_parts(single: Markup) -> None:
    """Nothing is fetched, and no id stands twice."""
    assert len(single.ids) == len(set(single.ids))
    assert set(single.values("a", "href")) <= {f"#{name}" for name in single.ids}
    assert single.of("link") + single.values("script", "src") == []


def test_one_file_has_each_picture_once(root: Path, single: Markup) -> None:
    """It is there as data; where it is shown again, its id is named."""
    embedded = [decoded(address) for address in single.values("img", "src")]
    assert sorted(embedded) == sorted(path.read_bytes() for path in pictures_of(root))
    again = [image["data-same"] for image in single.of("img") if "src" not in image]
    assert set(again) <= set(single.ids)


def decoded(address: str) -> bytes:
    """The picture in a `data:` address."""
    return base64.b64decode(address.partition(",")[2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda image: (image / "stats.npz").write_bytes(b"PK"),
            "a.png/stats.npz has 2 bytes, too few",
        ),
        (
            lambda image: (image / "manifest.json").write_text("{"),
            "a.png/manifest.json: cannot be read",
        ),
        (
            lambda image: image.rename(image.with_name("gone")),
            "its folder is missing",
        ),
    ],
)
def test_a_damaged_image_is_named_and_the_others_are_shown(
    root: Path, damage: Callable[[Path], object], message: str
) -> None:
    """One image does not take the report with it."""
    damage(root / "a.png")
    build_report(root, ReportOptions())
    reason = read_run(root).left_out["a.png"]
    assert message in reason
    text = page_of(root).text
    assert reason in text
    assert "About this run: 2 images of 4" in text


def test_images_that_were_not_reached_are_counted(tmp_path: Path) -> None:
    """run.json says how many images there were to be: neither one that failed nor one
    whose folder is gone is among those that were not reached."""
    counts = {"total": 7, "complete": ["a.png", "gone.png"]}
    images = {"a.png": [Drawn("x")]}
    root = built(tmp_path / "out", images, {"b.png": "it is broken"}, images=counts)
    text = page_of(root).text
    assert "About this run: 1 image of 7, 1 failed, 1 incomplete, 4 not reached" in text


def test_the_head_of_the_page_names_the_file_of_weights(tmp_path: Path) -> None:
    """Before the code that it was put into, which is the same for all of its files."""
    model = {"kind": "file", "name": "nets.py:Net", "file": "broken.pth"}
    write_run(tmp_path / "run", {"a.png": [Drawn("conv1")]}, model=model)
    build_report(tmp_path / "run", ReportOptions())
    page = (tmp_path / "run" / "report" / "index.html").read_text("utf-8")
    assert "<h1>broken.pth (nets.py:Net)</h1>" in page
    assert "<title>broken.pth (nets.py:Net) · featviz</title>" in page


def test_a_run_of_failures_alone_says_why(tmp_path: Path) -> None:
    """The page counts the images that failed, with the reason of each."""
    text = page_of(built(tmp_path / "out", {}, {"a.png": "it is truncated"})).text
    assert_says(text, "About this run: 0 images of 1, 1 failed", "it is truncated")


def test_the_command_line_says_where_the_report_is(featviz: Run, root: Path) -> None:
    """Without --json stdout stays empty; stderr has the page, and what is incomplete."""
    done = featviz("report", root)
    assert (done.code, done.out) == (0, "")
    assert f"report in {root / 'report' / 'index.html'}" in done.err
    assert "warning: half.png is incomplete" in done.err


def test_json_lists_the_files_of_the_report(featviz: Run, root: Path) -> None:
    """stdout has the first page and every file by its path."""
    document = json.loads(featviz("report", root, "--json").out)
    assert document["page"] == str(root / "report" / "index.html")
    assert sorted(document["files"]) == sorted(map(str, (root / "report").iterdir()))


def test_a_folder_of_something_else_stays(root: Path) -> None:
    """It is refused before the run is read."""
    (root / "report").mkdir()
    (root / "report" / "thesis.txt").write_text("mine")
    (root / "run.json").write_text("{")
    with pytest.raises(StoreError, match="is not empty and holds no"):
        build_report(root, ReportOptions())
    assert (root / "report" / "thesis.txt").read_text() == "mine"


def grid_tiles(grid: Path | io.BytesIO) -> list[bytes]:
    """The tiles of 40×40 pixels of a grid, row by row."""
    pixels = np.asarray(Image.open(grid))
    tiles = []
    for top in range(2, pixels.shape[0] - 2, 42):
        for left in range(2, pixels.shape[1] - 2, 42):
            tiles.append(pixels[top : top + 40, left : left + 40].tobytes())
    return tiles


def embedded_grids(page: Markup) -> list[io.BytesIO]:
    """The grids of the layer in a report in one file."""
    grids = []
    for image in page.of("img"):
        if "src" in image and "of conv1" in str(image["alt"]):
            grids.append(io.BytesIO(decoded(str(image["src"]))))
    assert grids
    return grids


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """A run of two images with 36 maps of noise each, which no PNG makes small."""
    rng = np.random.default_rng(0)
    stats = rng.random((36, 6), np.float32)
    stats[:, 1] += 2
    stats[:, 4:] = 0
    geometry: dict[str, Any] = {"nrow": 6, "tile": (40, 40), "scale": 1}
    drawn = Drawn("conv1", index=1, maps=36, stats=stats, **geometry)
    root = write_run(tmp_path / "out", {"a.png": [drawn], "b.png": [drawn]})
    for path in root.rglob("output.png"):
        Image.fromarray(rng.integers(0, 255, (254, 254), np.uint8)).save(path)
        summed_anew(path.parent.parent)
    return root


def test_one_file_shows_all_maps_where_they_fit(noise: Path, tmp_path: Path) -> None:
    """A page within the limit speaks of no choice of maps."""
    out = tmp_path / "one.html"
    build_report(noise, ReportOptions(single_file=True, out=out))
    assert "the most varied ones" not in read(out).text


@pytest.mark.parametrize(("share", "is_whole"), [(0.99, False), (1.01, True)])
def test_the_limit_counts_pictures_as_the_text_that_they_become(
    share: float,
    is_whole: bool,
    noise: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All maps are shown just where the pictures in base64 stay below the limit."""
    pictures = filter(Path.is_file, noise.rglob("*.png"))
    sizes = [len(base64.b64encode(path.read_bytes())) for path in pictures]
    out = tmp_path / "one.html"
    monkeypatch.setattr(fitting, "MOST_BYTES", int(share * sum(sizes)))
    build_report(noise, ReportOptions(single_file=True, out=out))
    assert ("the most varied ones" not in read(out).text) is is_whole


@pytest.mark.parametrize(("byte_limit", "remaining"), [(90_000, 18), (1_000, 4)])
def test_one_file_shows_fewer_maps_where_it_must(
    byte_limit: int,
    remaining: int,
    noise: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its maps are those of the run, pixel for pixel, of the same channels in both
    images, never less than four; the page says how many."""
    out = tmp_path / "one.html"
    monkeypatch.setattr(fitting, "MOST_BYTES", byte_limit)
    build_report(noise, ReportOptions(single_file=True, out=out))
    assert f"at most {remaining} of its maps, the most varied ones" in read(out).text
    (chosen,) = set(re.findall(r'"channels":\[([\d,]+)\]', out.read_text("utf-8")))
    channels = sorted(map(int, chosen.split(",")))
    assert len(channels) == remaining
    drawn = {tuple(grid_tiles(path)) for path in noise.rglob("output.png")}
    expected = {tuple(tiles[channel] for channel in channels) for tiles in drawn}
    shown = {tuple(grid_tiles(grid)[:remaining]) for grid in embedded_grids(read(out))}
    assert shown == expected


def test_slices_of_a_channel_stay_in_one_row_where_maps_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tile of the smaller grid has the grey that its channel and slice had."""
    stats = np.random.default_rng(0).random((16, 6), np.float32)
    clip = Drawn("conv", maps=16, slices=(3, 3), nrow=12, scale=1, stats=stats)
    root = write_run(tmp_path / "out", {"a.png": [clip]})
    (grid,) = root.rglob("output.png")
    gap = 200
    with Image.open(grid) as drawn:
        drawn.point(lambda level: level or gap).save(grid)
    summed_anew(root / "a.png")
    monkeypatch.setattr(fitting, "MOST_BYTES", 0)
    (run,), count = fitting.fit_into_one_file([read_run(root)])
    (image,) = run.images.values()
    (row,) = image.captures.values()
    assert (count, len(row.drawn), row.plan.columns) == (4, 4, 2 * 3)
    picture = Image.open(io.BytesIO(image.content(row.file)))
    assert picture.size == row.size
    pixels = np.asarray(picture)
    boxes = np.array([row.plan.box(number) for number in range(12)])
    left = boxes[:, 0]
    middle = boxes[:, 1] + 5
    shades = clip.shade + 3 * np.repeat(row.drawn, 3) + np.tile(range(3), 4)
    assert pixels[middle, left + 5].tolist() == shades.tolist()
    assert set(pixels[middle, left - 1].tolist()) == {gap}


def fewer(monkeypatch: pytest.MonkeyPatch, *roots: Path) -> list[list[list[int]]]:
    """The channels that are left of each image of runs, where four have room."""
    monkeypatch.setattr(fitting, "MOST_BYTES", 0)
    runs, _ = fitting.fit_into_one_file([read_run(root) for root in roots])
    rows = [[i.manifest.captures[0] for i in run.images.values()] for run in runs]
    return [[row.drawn for row in rows_of_run] for rows_of_run in rows]


def test_all_images_show_the_channels_that_vary_most_in_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both runs, so that tiles beside each other are of one channel; an image without
    these shows its first ones."""
    stats = np.zeros((12, 6), np.float32)
    stats[:4, 3] = 1
    first = Drawn("conv", maps=12, stats=stats)
    second = Drawn("conv", maps=12, stats=stats[::-1])
    other = Drawn("conv", maps=12, stats=stats, channels=[*range(5, 12)])
    images = {"a.png": [first], "b.png": [second], "c.png": [other]}
    new = write_run(tmp_path / "new", images)
    base = write_run(tmp_path / "base", {"a.png": [second]})
    shown = [0, 1, 2, 3]
    assert fewer(monkeypatch, new, base) == [[shown, shown, [5, 6, 7, 8]], [shown]]


def test_a_compared_run_shows_as_few_maps(
    noise: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in one file have the same tiles."""
    out = tmp_path / "one.html"
    base = shutil.copytree(noise, tmp_path / "base")
    monkeypatch.setattr(fitting, "MOST_BYTES", 0)
    build_report(noise, ReportOptions(single_file=True, compare=base, out=out))
    sizes = {Image.open(grid).size for grid in embedded_grids(read(out))}
    assert sizes == {(86, 86)}


def test_inputs_that_differ_are_both_shown(tmp_path: Path) -> None:
    """Of a run and the one that it is compared with; one where they are the same."""
    runs = [
        write_run(tmp_path / name, {"a.png": [Drawn("relu")]})
        for name in ("new", "base")
    ]
    (page,) = arrange(*map(read_run, runs)).images
    assert list(page.seen) == [False]
    Image.new("RGB", (24, 20)).save(runs[1] / "a.png" / "input.png")
    summed_anew(runs[1] / "a.png")
    (page,) = arrange(*map(read_run, runs)).images
    assert list(page.seen) == [False, True]


@pytest.fixture
def packed(root: Path) -> dict[str, bytes]:
    """The files in the zip file of a report."""
    build_report(root, ReportOptions(zip=True))
    with zipfile.ZipFile(root / "report.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_zip_file_has_each_picture_once(root: Path, packed: dict[str, bytes]) -> None:
    """It is there byte for byte, under a portable name."""
    pictures = [data for name, data in packed.items() if name.startswith("pictures/")]
    assert sorted(pictures) == sorted(path.read_bytes() for path in pictures_of(root))
    assert "\n".join(packed).isascii()
    assert ".." not in "\n".join(packed)


def test_every_link_in_a_zip_file_leads_into_it(packed: dict[str, bytes]) -> None:
    """Pages and pictures are all there."""
    names = [name for name in packed if name.endswith(".html")]
    assert len(names) == 1 + 3 + 3
    for name in names:
        page = Markup(packed[name].decode())
        links = page.values("img", "src") + page.values("a", "href")
        paths = {unquote(link.partition("#")[0]) for link in links}
        assert paths <= {"", *packed}, name


def test_one_form_is_asked_for(root: Path) -> None:
    """--zip and --single-file together are refused by name."""
    with pytest.raises(UsageError, match="--zip and --single-file"):
        build_report(root, ReportOptions(single_file=True, zip=True))
