"""Streams and endings: stdin, stdout, stderr, JSON, --dry-run, closed pipes, bugs,
interrupts."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import DIGITS, DIGITS_MODEL, SCENES, Outcome, Run
from PIL import Image
from runs import complete, refused, tree


def test_json_is_one_line_for_each_image_and_nothing_else(
    featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """stdout holds JSON lines in the order of the images, the failed one among them."""
    outcome = featviz(
        "run", f"{nets}:grey", folder, "--out", out, "--layers", "Conv2d", "--json"
    )
    lines = [json.loads(line) for line in outcome.out.splitlines()]
    assert [line["image"] for line in lines] == ["a.png", "b.png", "c.png"]
    fields = [
        "detections",
        "files",
        "folder",
        "image",
        "never_ran",
        "prediction",
        "skipped",
    ]
    assert [sorted(line) for line in lines] == [
        fields,
        ["error", "image"],
        fields,
    ]
    assert all(
        (out / line["folder"] / f).is_file()
        for line in lines[::2]
        for f in line["files"]
    )


def test_predictions_are_told_of_one_image_or_with_v(
    featviz: Run, tmp_path: Path, out: Path
) -> None:
    """Manifests and JSON lines have those of all; failures are all named."""
    images = tmp_path / "many"
    images.mkdir()
    for n, file in enumerate(sorted(DIGITS.iterdir())[:4]):
        (images / f"{n:02d}.png").write_bytes(
            file.read_bytes() if n != 3 else b"broken"
        )
    command = ("run", DIGITS_MODEL, "--layers", "Linear", "--overwrite", "--out", out)
    for inputs, predictions in (
        ((images,), 0),
        ((images, "-v"), 3),
        ((images / "00.png",), 1),
    ):
        done = featviz(*command, "--json", *inputs)
        assert (
            len(re.findall(r"^\d\d\.png: class", done.err, re.MULTILINE)) == predictions
        )
        assert done.code == (0 if predictions == 1 else 3)
        assert done.err.count("error: ") == bool(done.code)
        lines = [json.loads(line) for line in done.out.splitlines()]
        assert sum("prediction" in line for line in lines) == (3 if done.code else 1)


def captures_of(out: Path) -> list[dict[str, Any]]:
    """The captures that the manifests of a run list."""
    captures = []
    for path in sorted(out.glob("*/manifest.json")):
        captures += json.loads(path.read_text())["captures"]
    return captures


def pixels_of(out: Path) -> int:
    """Of all pictures of outputs in a run."""
    pixels = 0
    for path in out.rglob("output*.png"):
        with Image.open(path) as image:
            pixels += image.width * image.height
    return pixels


def test_a_dry_run_foretells_the_run(
    featviz: Run, tiny_file: Path, folder: Path, out: Path
) -> None:
    """--dry-run writes nothing; its files, maps and megapixels are those of the real
    run."""
    (folder / "b.png").unlink()
    extra = ["--channels", "first:2", "--nrow", "2", "--scale", "3"]
    base = [
        "run",
        tiny_file,
        folder,
        "--out",
        out,
        "--layers",
        "Conv2d,ReLU,Linear",
        *extra,
    ]
    estimate = json.loads(featviz(*base, "--dry-run", "--json").out)
    assert not out.exists()
    assert featviz(*base).code == 0
    captures = captures_of(out)
    maps = sum(
        len(capture.get("channels") or range(capture["maps"])) for capture in captures
    )
    assert estimate["images"] == 2
    assert estimate["layers"] == 3
    written = [
        path for path in out.rglob("*") if path.is_file() and path.name != "run.json"
    ]
    assert estimate["all_files"] == len(written)
    assert estimate["files"] == len(captures) == len(list(out.rglob("output*.png")))
    assert estimate["maps"] == maps
    assert estimate["megapixels"] == pytest.approx(pixels_of(out) / 1e6, abs=6e-4)
    assert [f["layer"] for f in estimate["per_image"]] == ["0", "1", "4"]


def test_a_dry_run_tells_people_a_table(
    featviz: Run, tiny_file: Path, picture: Path, out: Path
) -> None:
    """Without --json, a line for each picture and a sum."""
    outcome = featviz(
        "run", tiny_file, picture, "--layers", "0", "--out", out, "--dry-run"
    )
    line, total = outcome.out.splitlines()
    assert re.match(r"0  output\.png  4 maps  \d+×\d+  ~\d+ kB$", line)
    assert total.startswith("1 image: 1 file of 1 layer, 4 maps, ")
    assert not out.exists()


def test_quiet_leaves_errors_alone(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path
) -> None:
    """-q silences warnings and the summary, not errors."""
    base = ("run", tiny_file, picture, "--layers", "ReLU", "--out")
    assert "warning: preprocessing is a guess" in featviz(*base, tmp_path / "a").err
    assert featviz(*base, tmp_path / "b", "-q") == Outcome(0, "", "")
    assert featviz(*base, tmp_path / "b", "--quiet").err.startswith("error: ")


def test_verbose_adds_the_traceback(
    featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """-v shows where an error came from, after its line; also one that failed an image
    alone."""
    outcome = featviz("layers", f"{nets}:absent", "-v")
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert "Traceback" in outcome.err
    outcome = featviz(
        "run", f"{nets}:picky", folder, "--out", out, "--layers", "Conv2d", "-v"
    )
    assert outcome.code == 3
    assert "ValueError: no picture may be 13 wide" in outcome.err
    assert "Traceback" in outcome.err


def test_a_bug_shows_its_traceback() -> None:
    """The process ends with 1 and the traceback on stderr."""
    code = (
        "from featviz import cli\n"
        "def broken(ctx): raise RuntimeError('a bug of ours')\n"
        "cli.group.invoke = broken\n"
        "cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "layers"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" in done.stderr
    assert "RuntimeError: a bug of ours" in done.stderr


@pytest.mark.parametrize(("separator", "option"), [(b"\n", []), (b"\0", ["-0"])])
def test_a_list_of_paths(
    separator: bytes,
    option: list[str],
    featviz: Run,
    tiny_file: Path,
    picture: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One path a line, or between NULs, where a path may hold line ends. A stale one
    fails that image, not the run."""
    odd_name = picture.with_name("a b\nc.png" if option else "a b.png")
    odd_name.write_bytes(picture.read_bytes())
    names = [os.fsencode(picture), b"gone.png", os.fsencode(odd_name)]
    stdin = io.TextIOWrapper(io.BytesIO(separator.join(names)))
    monkeypatch.setattr(sys, "stdin", stdin)
    done = featviz(
        "run", tiny_file, "-", *option, "--json", "--out", out, "--layers", "0", "-q"
    )
    refused(done, 3, "gone.png")
    drawn_images = [json.loads(line)["image"] for line in done.out.splitlines()]
    assert drawn_images == ["picture.png", "gone.png", odd_name.name]
    assert len(complete(out)) == 2


@pytest.mark.parametrize(
    "options", [[], ["--tensors", "npy"]], ids=["pictures", "tensors"]
)
def test_the_estimate_is_what_is_written(
    options: list[str], featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """Files exactly; bytes within a factor of two, on the safe side. Nothing is
    written."""
    base = [
        "run",
        tiny_file,
        SCENES,
        "--layers",
        "Conv2d,ReLU,Linear",
        "--size",
        "96x64",
        *options,
    ]
    out = tmp_path / "out"
    estimate = json.loads(featviz(*base, "--dry-run", "--json", "--out", out).out)
    assert not out.exists()
    assert featviz(*base, "--out", out).code == 0
    written = {name: data for name, data in tree(out).items() if name != "run.json"}
    assert len(written) == estimate["all_files"]
    assert 1 <= estimate["estimated_bytes"] / sum(map(len, written.values())) < 2
