"""`featviz report`: what it writes, reads and refuses, and its forms that can be moved."""

from __future__ import annotations

import base64
import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from conftest import Run
from PIL import Image
from rundirs import Drawn, summed_anew, write_run

from featviz.errors import StoreError, UsageError
from featviz.options.commands import ReportOptions
from featviz.report import build_report, fitting
from featviz.rundir.read import read_run

from .markup import Markup, built, pages, read


def test_every_link_and_picture_exists(gallery: Path) -> None:
    """Relative, inside the run directory, and nothing is copied."""
    root = gallery
    gallery_pages = pages(gallery)
    assert len(gallery_pages) == 1 + 3 + 3
    seen = set()
    ids = {
        name: {a["id"] for _, a in page.tags if a.get("id")}
        for name, page in gallery_pages.items()
    }
    for name, page in gallery_pages.items():
        targets = [a["href"] for a in page.of("a") + page.of("link")]
        targets += [a["src"] for a in page.of("img") + page.of("script")]
        for target in map(str, targets):
            path, _, fragment = target.partition("#")
            assert not path.startswith(("/", "http", "data:", "file:")), target
            file = root / "report" / unquote(path) if path else root / "report" / name
            assert file.is_file(), (name, target)
            assert not fragment or fragment in ids[file.name], (name, target)
            seen.add(file.resolve())
    drawn = {path.resolve() for path in root.rglob("output*.png")}
    assert drawn - seen == {p for p in drawn if "half.png" in p.parts}
    assert not list((root / "report").rglob("*.png"))


def test_no_inline_style_script_or_data(gallery: Path) -> None:
    """So that a CI host's content security policy has nothing to block but the scripts."""
    for page in pages(gallery).values():
        assert page.inline.strip() == ""
        for tag, attributes in page.tags:
            assert tag not in ("style", "iframe", "object", "base")
            assert not any(key == "style" or key.startswith("on") for key in attributes)
            assert not any(
                str(v).startswith(("data:", "javascript:")) for v in attributes.values()
            )
            assert tag != "script" or attributes.get("src")


def test_the_same_bytes_again(root: Path) -> None:
    """A second report replaces the first and equals it, in the folder and in one file
    of either kind."""

    def content() -> dict[str, bytes]:
        build_report(root, ReportOptions())
        build_report(root, ReportOptions(single_file=True))
        build_report(root, ReportOptions(zip=True))
        files = [
            *(root / "report").iterdir(),
            root / "report.html",
            root / "report.zip",
        ]
        return {path.name: path.read_bytes() for path in files}

    first = content()
    assert content() == first
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_one_file_has_everything_inside(root: Path, tmp_path: Path) -> None:
    """Pictures as data, each once; links lead to its own parts; nothing is fetched."""
    out = tmp_path / "one.html"
    build_report(root, ReportOptions(single_file=True, out=out))
    page = read(out)
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert all(
        str(a["href"])[1:] in ids and str(a["href"])[0] == "#" for a in page.of("a")
    )
    assert not page.of("link")
    assert not any("src" in a for a in page.of("script"))
    inside = [
        base64.b64decode(str(i["src"]).split(",")[1])
        for i in page.of("img")
        if "src" in i
    ]
    files = [
        p for p in root.rglob("*.png") if p.is_file() and "half.png" not in p.parts
    ]
    assert sorted(inside) == sorted(path.read_bytes() for path in files)
    for image in page.of("img"):
        assert "src" in image or image["data-same"] in ids


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda p: (p / "stats.npz").write_bytes(b"PK"),
            "a.png/stats.npz has 2 bytes, too few",
        ),
        (
            lambda p: (p / "manifest.json").write_text("{"),
            "a.png/manifest.json: cannot be read",
        ),
        (lambda p: p.rename(p.parent.with_name("gone")), "its folder is missing"),
    ],
)
def test_a_damaged_image_is_named_and_the_others_are_shown(
    root: Path, damage: Callable[[Path], object], message: str
) -> None:
    """One image does not take the report with it."""
    damage(root / "a.png")
    build_report(root, ReportOptions())
    text = pages(root)["index.html"].text
    assert "2 complete of 4" in text
    reason = read_run(root).left_out["a.png"]
    assert reason in text
    assert message in reason


def test_what_was_not_reached_and_what_failed_are_counted(tmp_path: Path) -> None:
    """run.json names how many there were to be; a run of failures alone says why."""
    images = {"total": 7, "complete": ["a.png"]}
    root = built(tmp_path / "out", {"a.png": [Drawn("x")]}, images=images)
    assert "1 complete of 7, 6 not reached" in pages(root)["index.html"].text
    root = built(tmp_path / "failed", {}, {"a.png": "it is truncated"})
    text = pages(root)["index.html"].text
    assert "0 complete of 1, 1 failed" in text
    assert "it is truncated" in text


def test_the_command_line_prints_paths(featviz: Run, root: Path) -> None:
    """--json on stdout; without it, one line and the warning on stderr."""
    outcome = featviz("report", root)
    assert outcome.code == 0
    assert outcome.out == ""
    assert f"report in {root / 'report' / 'index.html'}" in outcome.err
    assert "warning: half.png is incomplete" in outcome.err
    paths = json.loads(featviz("report", root, "--json").out)
    assert paths["page"] == str(root / "report" / "index.html")
    assert sorted(paths["files"]) == sorted(str(p) for p in (root / "report").iterdir())


def test_a_folder_of_something_else_stays(root: Path) -> None:
    """It is refused before the run is read."""
    (root / "report").mkdir()
    (root / "report" / "thesis.txt").write_text("words")
    (root / "run.json").write_text("{")
    with pytest.raises(StoreError, match="is not empty and holds no"):
        build_report(root, ReportOptions())
    assert (root / "report" / "thesis.txt").read_text() == "words"


@pytest.mark.parametrize(("byte_limit", "remaining"), [(90_000, 18), (1_000, 4)])
def test_one_file_shows_fewer_maps_where_it_must(
    byte_limit: int, remaining: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that stay are maps of the run, pixel for pixel, and the same channels of
    both images, never less than four; the page says how many."""
    rng = np.random.default_rng(0)
    size = {"nrow": 6, "tile": (40, 40), "scale": 1}
    stats = rng.random((36, 6), np.float32)
    stats[:, 1], stats[:, 4:] = 2 + stats[:, 1], 0
    row = Drawn("conv1", index=1, maps=36, stats=stats, **size)
    root = write_run(tmp_path / "out", {"a.png": [row], "b.png": [row]})
    out = tmp_path / "one.html"
    sources = []
    for path in root.rglob("output.png"):
        pixels = rng.integers(0, 255, (254, 254), np.uint8)
        Image.fromarray(pixels).save(path)
        summed_anew(path.parent.parent)
        corners = [(2 + 42 * (n // 6), 2 + 42 * (n % 6)) for n in range(36)]
        sources.append([pixels[y : y + 40, x : x + 40].tobytes() for y, x in corners])
    build_report(root, ReportOptions(single_file=True, out=out))
    assert "the most varied ones" not in read(out).text
    monkeypatch.setattr(fitting, "MOST_BYTES", byte_limit)
    build_report(root, ReportOptions(single_file=True, out=out))
    page = read(out)
    assert f"at most {remaining} of its maps, the most varied ones" in page.text
    (chosen,) = set(re.findall(r'"channels":\[([\d,]+)\]', out.read_text("utf-8")))
    channels = sorted(map(int, chosen.split(",")))
    assert len(channels) == remaining
    shown = [i for i in page.of("img") if "src" in i and "of conv1" in str(i["alt"])]
    for image in shown:
        grid = np.asarray(
            Image.open(io.BytesIO(base64.b64decode(str(image["src"]).split(",")[1])))
        )
        sides = [range(2, length - 2, 42) for length in grid.shape]
        found = {
            grid[y : y + 40, x : x + 40].tobytes() for y in sides[0] for x in sides[1]
        }
        found = {tile for tile in found if len(set(tile)) > 1}  # no empty place
        assert found in [
            {source_tiles[channel] for channel in channels} for source_tiles in sources
        ]


def test_a_zip_file_has_the_pages_and_their_pictures(
    root: Path, tmp_path: Path
) -> None:
    """Each picture byte for byte and once, under a name of ours; every link leads into
    the file."""
    with pytest.raises(UsageError, match="--zip and --single-file"):
        build_report(root, ReportOptions(single_file=True, zip=True))
    build_report(root, ReportOptions(zip=True))
    with zipfile.ZipFile(root / "report.zip") as packed:
        names = packed.namelist()
        pictures = [packed.read(name) for name in names if name.startswith("pictures/")]
        for name in (name for name in names if name.endswith(".html")):
            page = Markup(packed.read(name).decode())
            linked = [str(a["src"]) for a in page.of("img")] + [
                str(a["href"]) for a in page.of("a")
            ]
            missing = {unquote(link.partition("#")[0]) for link in linked} - {
                "",
                *names,
            }
            assert not missing, name
    assert sorted(pictures) == sorted(
        path.read_bytes()
        for path in root.rglob("*.png")
        if path.is_file() and "half.png" not in path.parts
    )
    assert all(name.isascii() and ".." not in name for name in names)
