"""What goes wrong in the midst of a run: signals, disks, images, pipes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Run
from PIL import Image
from runs import complete, fill_disk, make_photos, refused, run_json, tree

from featviz.images import decode, find
from featviz.options import InputOptions, ModelOptions, RunOptions
from featviz.run import run as pipeline
from featviz.run.results import ImageResult
from featviz.rundir import write
from featviz.rundir.schema import read_json

pytestmark = pytest.mark.medium


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 4)


def send(*numbers: int) -> Callable[[], None]:
    """Signals to this process, when it is called."""

    def kill() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return kill


# Signals


def test_a_signal_ends_the_run_after_the_current_image(
    draw: Run, tmp_path: Path, at_image: Callable
) -> None:
    """Exit code 130; --resume makes the run whole."""
    before = signal.getsignal(signal.SIGINT)
    assert draw(tmp_path / "whole").code == 0
    at_image("01.png", send(signal.SIGINT))
    assert draw(tmp_path / "out").code == 130
    assert complete(tmp_path / "out") == ["00.png", "01.png"]
    assert signal.getsignal(signal.SIGINT) == before
    assert draw(tmp_path / "out", "--resume").code == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_an_interrupted_run_says_what_is_missing(
    draw: Run, tmp_path: Path, at_image: Callable
) -> None:
    """stderr has the counts, stdout the complete images, and run.json both."""
    at_image("01.png", send(signal.SIGINT))
    done = draw(tmp_path / "out", "--json")
    assert "stopping after this image; once more to stop at once" in done.err
    assert "interrupted: 2 images missing, 2 complete; --resume goes on" in done.err
    names = [json.loads(line)["image"] for line in done.out.splitlines()]
    assert names == ["00.png", "01.png"]
    assert run_json(tmp_path / "out")["images"] == {
        "total": 4,
        "complete": ["00.png", "01.png"],
        "missing": ["02.png", "03.png"],
    }


@pytest.mark.parametrize(
    ("second", "kept", "is_at_once"),
    [
        (signal.SIGINT, ["00.png"], True),
        (signal.SIGTERM, ["00.png", "01.png"], False),
    ],
)
def test_a_second_signal(
    second: int,
    kept: list[str],
    is_at_once: bool,
    draw: Run,
    tmp_path: Path,
    at_image: Callable,
) -> None:
    """The same one again ends the run at once: the current image is removed, the one
    before is completed. The SIGTERM of a scheduler after Ctrl-C still completes the
    current image."""
    out = tmp_path / "out"
    at_image("01.png", send(signal.SIGINT, second))
    done = draw(out)
    assert done.code == 130
    assert done.err.endswith("error: interrupted\n") is is_at_once
    assert "Traceback" not in done.err
    assert run_json(out)["images"]["complete"] == kept
    assert sorted(path.name for path in out.iterdir()) == [*kept, "run.json"]


# Disks


@pytest.mark.parametrize("name", ["output.png", "manifest.json"])
def test_a_write_that_fails(
    name: str,
    draw: Run,
    tmp_path: Path,
    one_process: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever file it is: its image leaves nothing, those before are complete."""
    out = tmp_path / "out"
    fill_disk(monkeypatch, lambda path: "02.png" in path.parts and path.name == name)
    refused(draw(out), 1, f"{name} cannot be written: No space left")
    names = sorted(path.name for path in out.iterdir())
    assert names == ["00.png", "01.png", "run.json"]
    assert run_json(out)["images"]["missing"] == ["02.png", "03.png"]


def test_an_encoder_that_dies(
    draw: Run, tmp_path: Path, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in a writer thread is not swallowed: it ends the run, and its image is no
    image."""
    real = write.ImageFolder.writing

    def writing(self: write.ImageFolder, relative: str) -> object:
        if self.name == "02.png" and relative.endswith("output.png"):
            raise ZeroDivisionError("bug")
        return real(self, relative)

    monkeypatch.setattr(write.ImageFolder, "writing", writing)
    with pytest.raises(ZeroDivisionError, match="bug"):
        draw(tmp_path / "out")
    assert complete(tmp_path / "out") == ["00.png", "01.png"]
    assert run_json(tmp_path / "out")["images"]["missing"] == ["02.png", "03.png"]


# Images


def test_an_image_that_vanishes_or_changes_while_listed(
    draw: Run, photos: Path, tmp_path: Path, at_image: Callable
) -> None:
    """The one fails by name, of the other the new content is drawn and noted; exit code
    3."""

    def event() -> None:
        (photos / "02.png").unlink()  # 01.png may be read already
        Image.new("RGB", (20, 20), "red").save(photos / "03.png")

    at_image("00.png", event)
    done = draw(tmp_path / "out")
    assert done.code == 3
    assert "error: 02.png is no file" in done.err
    assert complete(tmp_path / "out") == ["00.png", "01.png", "03.png"]
    (sample,) = find.find_samples([str(photos / "03.png")])
    manifest = read_json(tmp_path / "out" / "03.png" / "manifest.json")
    assert manifest["image"]["sha256"] == decode.digest(sample)
    with Image.open(tmp_path / "out" / "03.png" / "input.png") as seen:
        assert seen.getpixel((8, 8)) == (255, 0, 0)


BROKEN = {
    **dict.fromkeys(range(7, 160, 40), "truncated"),
    **dict.fromkeys(range(27, 160, 40), "is no image that Pillow can read"),
}
"""Numbers of the images that are broken, and what is said of them."""


def break_images(folder: Path) -> None:
    """Cut or replace the files of the broken images."""
    for number, reason in BROKEN.items():
        path = folder / f"{number:02d}.png"
        if reason == "truncated":
            os.truncate(path, 400)
        else:
            path.write_bytes(b"not a picture\n")


@pytest.mark.slow
def test_the_memory_stays_flat_over_many_images(
    tiny_file: Path, tmp_path: Path
) -> None:
    """Also where some are broken: those are named with a reason, with exit code 3."""
    photos = make_photos(tmp_path / "photos", 160)
    break_images(photos)
    resident: list[int] = []

    def progress(image: ImageResult, total: int) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * os.sysconf("SC_PAGE_SIZE"))

    options = RunOptions("re:.", tmp_path / "out", inputs=InputOptions(size=16))
    model = ModelOptions(str(tiny_file))
    result = pipeline.run(model, [str(photos)], options, progress)
    assert result.exit_code == 3
    assert len(complete(tmp_path / "out")) == 152
    failures = run_json(tmp_path / "out")["failures"]
    errors = {row["image"]: row["error"] for row in failures}
    assert len(errors) == 8
    for number, reason in BROKEN.items():
        assert reason in errors[f"{number:02d}.png"]
    # a single step is no growth
    grown = float(np.median(np.diff(resident[40::30]))) / 30
    # allocators keep some; an image that stayed would be its input, maps and tiles, 20
    # kB and more
    assert grown < 10_000, f"{grown:.0f} bytes for each image"


# Pipes


def test_a_line_for_each_image_as_it_completes(
    draw: Run,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When a line is written, its image is complete; lines keep the order of the
    images, broken ones among them."""
    (photos / "01.png").write_bytes(b"no picture")
    lines: list[tuple[str, bool]] = []

    def written(text: str) -> None:
        line = json.loads(text)
        done = (tmp_path / "out" / line["image"] / "manifest.json").is_file()
        lines.append((line["image"], done))

    def echo(text: str, err: bool = False, nl: bool = True) -> None:
        if text and not err:
            written(text)

    monkeypatch.setattr("featviz.cli.output.click.echo", echo)
    draw(tmp_path / "out", "--json")
    assert lines == [(f"0{n}.png", n != 1) for n in range(4)]
