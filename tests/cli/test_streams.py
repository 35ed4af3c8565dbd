"""Streams and endings: stdin, stdout, stderr, JSON, --dry-run, closed pipes, bugs,
interrupts."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import DIGITS, DIGITS_MODEL, SCENES, Outcome, Run
from pixels import pixels_of
from runs import complete, refused, tree

pytestmark = pytest.mark.medium


FIELDS = {
    "detections",
    "files",
    "folder",
    "image",
    "never_ran",
    "prediction",
    "skipped",
}
"""What a line of JSON says of an image that was drawn."""


def lines_of(done: Outcome) -> list[dict[str, Any]]:
    """The JSON lines that a command printed."""
    return [json.loads(line) for line in done.out.splitlines()]


def test_json_is_one_line_for_each_image_and_nothing_else(
    featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """stdout holds JSON lines in the order of the images, the failed one among them."""
    options = ("--out", out, "--layers", "Conv2d", "--json")
    lines = lines_of(featviz("run", f"{nets}:grey", folder, *options))
    assert [line["image"] for line in lines] == ["a.png", "b.png", "c.png"]
    assert [line.keys() for line in lines] == [FIELDS, {"error", "image"}, FIELDS]
    for line in (lines[0], lines[2]):
        image_folder = out / line["folder"]
        assert all((image_folder / file).is_file() for file in line["files"])


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Two digits and a broken file."""
    images = tmp_path / "digits"
    images.mkdir()
    for file in sorted(DIGITS.iterdir())[:2]:
        shutil.copy(file, images)
    (images / "broken.png").write_bytes(b"broken")
    return images


@pytest.mark.parametrize(
    ("inputs", "predictions", "failures"),
    [(["digits"], 0, 1), (["digits", "-v"], 2, 1), (["digits/00-5.png"], 1, 0)],
)
@pytest.mark.usefixtures("digits")
def test_predictions_are_printed_of_one_image_or_with_v(
    inputs: list[str], predictions: int, failures: int, featviz: Run, out: Path
) -> None:
    """JSON lines have those of all; failures are all named."""
    options = ("--layers", "Linear", "--out", out, "--json")
    done = featviz("run", DIGITS_MODEL, *inputs, *options)
    assert len(re.findall(r"^\d\d-\d\.png: class", done.err, re.M)) == predictions
    assert done.err.count("error: ") == failures
    complete_lines = [line for line in lines_of(done) if "prediction" in line]
    assert len(complete_lines) == len(complete(out))
    assert len(lines_of(done)) == len(complete(out)) + failures


class Totals(NamedTuple):
    """What a run wrote."""

    captures: int
    maps: int
    megapixels: float


def totals_of(out: Path) -> Totals:
    """Counted in the manifests and the pictures of a run."""
    captures = []
    for path in out.glob("*/manifest.json"):
        captures += json.loads(path.read_text())["captures"]
    maps = [len(row.get("channels") or range(row["maps"])) for row in captures]
    sizes = [pixels_of(path).size for path in out.rglob("output*.png")]
    assert len(sizes) == len(captures)
    return Totals(len(captures), sum(maps), sum(sizes) / 1e6)


def test_a_dry_run_foretells_the_run(
    featviz: Run, tiny_file: Path, photos: Path, out: Path
) -> None:
    """--dry-run writes nothing; its files, maps and megapixels are those of the real
    run."""
    drawing = ("--channels", "first:2", "--nrow", "2", "--scale", "3", "--out", out)
    command = ("run", tiny_file, photos, "--layers", "Conv2d,ReLU,Linear", *drawing)

    estimate = json.loads(featviz(*command, "--dry-run", "--json").out)
    assert not out.exists()
    assert featviz(*command).code == 0

    totals = totals_of(out)
    expected = {"images": 2, "files": totals.captures, "maps": totals.maps}
    assert estimate.items() >= expected.items()
    assert [row["layer"] for row in estimate["per_image"]] == ["0", "1", "4"]
    assert estimate["megapixels"] == pytest.approx(totals.megapixels, abs=6e-4)


@pytest.mark.slow
def test_a_dry_run_foretells_figures(
    featviz: Run, tiny_file: Path, picture: Path, out: Path
) -> None:
    """Each has the planned size: of maps a panel each, of a vector one strip."""
    drawing = ("--layers", "Conv2d,Linear", "--figure", "--out", out)
    command = ("run", tiny_file, picture, *drawing)

    planned = json.loads(featviz(*command, "--dry-run", "--json").out)["per_image"]
    assert featviz(*command).code == 0

    sizes = sorted((row["width"], row["height"]) for row in planned)
    assert len(sizes) == 4
    drawn = [pixels_of(path).shape[1::-1] for path in out.rglob("output*.png")]
    assert sizes == sorted(drawn)


def test_a_dry_run_tells_people_a_table(
    featviz: Run, tiny_file: Path, picture: Path, out: Path
) -> None:
    """Without --json it prints a line for each picture and a sum."""
    options = ("--layers", "0", "--out", out, "--dry-run")
    outcome = featviz("run", tiny_file, picture, *options)
    line, total = outcome.out.splitlines()
    assert re.match(r"0  output\.png  4 maps  \d+×\d+  ~\d\.\d MB$", line)
    assert total.startswith("1 image: 1 file of 1 layer, 4 maps, ")
    assert not out.exists()


def test_what_the_model_takes_an_image_for_is_told_once(
    featviz: Run, tiny_file: Path, picture: Path, out: Path
) -> None:
    """`--resume` of a complete run says that it was complete, and no more."""
    command = ("run", tiny_file, picture, "--layers", "0", "--out", out)
    first, second = featviz(*command), featviz(*command, "--resume")
    assert f"{picture.name}: class " in first.err
    assert f"{picture.name}: class " not in second.err
    assert "(1 was complete before)" in second.err


def test_quiet_leaves_errors_alone(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path
) -> None:
    """-q silences warnings and the summary, not errors."""
    command = ("run", tiny_file, picture, "--layers", "ReLU", "--out")
    assert "warning: preprocessing is a guess" in featviz(*command, tmp_path / "a").err
    assert featviz(*command, tmp_path / "b", "-q") == Outcome(0, "", "")
    assert featviz(*command, tmp_path / "b", "--quiet").err.startswith("error: ")


def test_verbose_adds_the_traceback(featviz: Run, nets: str) -> None:
    """-v shows where an error came from, after its line."""
    outcome = featviz("layers", f"{nets}:absent", "-v")
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert "Traceback" in outcome.err


def test_verbose_adds_the_traceback_of_an_image(
    featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """It stands after the line of an error that failed the image alone."""
    options = ("--out", out, "--layers", "Conv2d", "-v")
    outcome = featviz("run", f"{nets}:picky", folder, *options)
    assert outcome.code == 3
    assert "Traceback" in outcome.err
    assert "ValueError: no picture may be 13 wide" in outcome.err


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
    """Each stands on a line, or between NULs, where a path may hold line ends. A stale
    one fails that image, not the run."""
    odd_name = picture.with_name("a b\nc.png" if option else "a b.png")
    shutil.copy(picture, odd_name)
    paths = [os.fsencode(picture), b"gone.png", os.fsencode(odd_name)]
    stdin = io.TextIOWrapper(io.BytesIO(separator.join(paths)))
    monkeypatch.setattr(sys, "stdin", stdin)

    options = ("--json", "--out", out, "--layers", "0", "-q")
    done = featviz("run", tiny_file, "-", *option, *options)

    refused(done, 3, "gone.png")
    names = [line["image"] for line in lines_of(done)]
    assert names == ["picture.png", "gone.png", odd_name.name]
    assert len(complete(out)) == 2


@pytest.mark.parametrize(
    "options", [[], ["--tensors", "npy"]], ids=["pictures", "tensors"]
)
def test_the_estimate_is_what_is_written(
    options: list[str], featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """The count of files is exact; bytes are within a factor of two, on the safe side."""
    out = tmp_path / "out"
    layers = ("--layers", "Conv2d,ReLU,Linear", "--size", "96x64", "--out", out)
    command = ("run", tiny_file, SCENES, *layers, *options)
    estimate = json.loads(featviz(*command, "--dry-run", "--json").out)
    assert featviz(*command).code == 0
    written = tree(out)
    del written["run.json"]
    assert estimate["all_files"] == len(written)
    assert 1 <= estimate["estimated_bytes"] / sum(map(len, written.values())) < 2
