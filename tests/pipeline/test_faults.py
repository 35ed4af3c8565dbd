"""What goes wrong in the midst of a run: signals, disks, images, pipes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from conftest import Outcome
from PIL import Image
from runs import SMALL, check_whole, complete, fill_disk, make_photos, run_json, tree

from featviz import pipeline
from featviz.images import decode, find
from featviz.models.load import ModelOptions
from featviz.models.preprocess import InputOptions
from featviz.pipeline import session, signals
from featviz.pipeline.options import RunOptions
from featviz.records import ImageResult, Sample
from featviz.rundir import LOCK_FILE, write
from featviz.rundir.read import read_json

Run = Callable[..., Outcome]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 4)


@pytest.fixture
def at_image(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    """Have something happen once, when an image is about to be read."""
    events: dict[str, Callable[[], None]] = {}
    real = session.Session.visit

    def visit(self: session.Session, sample: Sample, *more: object) -> None:
        events.pop(sample.name, lambda: None)()
        real(self, sample, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(session.Session, "visit", visit)
    return events.__setitem__


def send(*numbers: int) -> Callable[[], None]:
    return lambda: [os.kill(os.getpid(), number) for number in numbers] and None


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_current_image(
    number: int, featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path, at_image: Callable
) -> None:
    """Exit code 130; run.json and stderr say what is missing; --resume makes it whole."""
    before = signal.getsignal(number)
    base = ["run", tiny_file, photos, *SMALL, "--out"]
    assert featviz(*base, tmp_path / "whole").code == 0
    at_image("01.png", send(number))
    done = featviz(*base, tmp_path / "out", "--json")
    assert done.code == 130
    assert "stopping after this image; once more to stop at once" in done.err
    assert "interrupted: 2 images missing, 2 complete; --resume goes on" in done.err
    assert [json.loads(line)["image"] for line in done.out.splitlines()] == ["00.png", "01.png"]
    assert run_json(tmp_path / "out")["images"] == {
        "total": 4,
        "complete": ["00.png", "01.png"],
        "missing": ["02.png", "03.png"],
    }
    assert complete(tmp_path / "out") == ["00.png", "01.png"]
    assert signal.getsignal(number) == before
    assert featviz(*base, tmp_path / "out", "--resume").code == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_the_same_signal_again_ends_it_at_once(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path, at_image: Callable
) -> None:
    """The current image is removed, the one before is completed, and run.json tells."""
    at_image("01.png", send(signal.SIGINT, signal.SIGINT))
    done = featviz("run", tiny_file, photos, *SMALL, "--out", tmp_path / "out")
    assert done.code == 130 and done.err.endswith("error: interrupted\n")
    assert run_json(tmp_path / "out")["images"]["complete"] == ["00.png"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["00.png", "run.json"]


def test_another_signal_is_no_second_one(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path, at_image: Callable
) -> None:
    """Ctrl-C followed by the SIGTERM of a scheduler still completes the current image."""
    at_image("01.png", send(signal.SIGINT, signal.SIGTERM))
    assert featviz("run", tiny_file, photos, *SMALL, "--out", tmp_path / "out").code == 130
    assert complete(tmp_path / "out") == ["00.png", "01.png"]


def test_signals_are_taken_only_in_the_main_thread() -> None:
    """In another thread nothing is installed, and nothing fails."""
    from concurrent.futures import ThreadPoolExecutor

    def inside() -> bool:
        with signals.stop_requests() as stop:
            return stop.is_set() or signal.getsignal(signal.SIGINT) is not before

    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(inside).result() is False


@pytest.mark.slow
def test_sigterm_while_the_model_loads(photos: Path, tmp_path: Path) -> None:
    """Before the first image a signal ends the command at once: 130, and nothing is written."""
    (tmp_path / "slow.py").write_text("import time\ndef make():\n    print()\n    time.sleep(60)\n")
    command = [sys.executable, "-u", "-m", "featviz", "run", f"{tmp_path}/slow.py:make", photos]
    with subprocess.Popen(
        [*command, "--archive", tmp_path / "x.zip"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.terminate()
        err = process.stderr.read().decode()
    assert process.returncode == 130 and err.strip() == "error: interrupted"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["photos", "slow.py"]


# Disks


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, of so many bytes."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk(featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path) -> None:
    """One error that names the file; complete images stay; with room, --resume goes on."""
    make_photos(photos, 30, (64, 64))
    base = ["run", tiny_file, photos, "--layers", "Conv2d", "--size", "64", "--out"]
    assert featviz(*base, tmp_path / "whole").code == 0
    with tmpfs(tmp_path / "disk", "512k") as disk:
        done = featviz(*base, disk / "out")
        assert done.code == 1
        (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert line.endswith("cannot be written: No space left on device")
        assert "hint: what is complete stays complete" in done.err
        check_whole(disk / "out")
        kept = complete(disk / "out")
        assert 2 < len(kept) < 30
        assert run_json(disk / "out")["images"]["complete"] == kept
        assert {p.name for p in (disk / "out").iterdir()} == {*kept, "run.json"}
        subprocess.run(["mount", "-o", "remount,size=32m", disk], check=True)
        done = featviz(*base, disk / "out", "--resume")
        assert done.code == 0 and f"({len(kept)} were complete before)" in done.err
        assert tree(disk / "out") == tree(tmp_path / "whole")


def test_a_folder_that_turns_read_only(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path, at_image: Callable
) -> None:
    """One error; what was complete stays complete and can be gone on with."""
    base = ["run", tiny_file, photos, *SMALL, "--out"]
    with tmpfs(tmp_path / "disk", "8m") as disk:

        def turn() -> None:  # a second mount over the first, in which the lock is open for writing
            subprocess.run(["mount", "--bind", disk, disk], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)

        at_image("02.png", turn)
        done = featviz(*base, disk / "out")
        assert done.code == 1
        (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert line.endswith("cannot be written: Read-only file system")
        check_whole(disk / "out")
        assert complete(disk / "out")[:1] == ["00.png"]
        subprocess.run(["umount", disk], check=True)
        assert featviz(*base, disk / "out", "--resume").code == 0
        assert featviz(*base, tmp_path / "whole").code == 0
        assert tree(disk / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("name", ["output.png", "stats.npz", "manifest.json", "input.png"])
def test_a_write_that_fails(
    name: str,
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever file it is: its image leaves nothing, those before are complete."""
    fill_disk(monkeypatch, lambda path: "02.png" in path.parts and path.name == name)
    done = featviz("run", tiny_file, photos, *SMALL, "--out", tmp_path / "out")
    assert done.code == 1 and f"{name} cannot be written: No space left" in done.err
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"00.png", "01.png", "run.json"}
    assert run_json(tmp_path / "out")["images"]["missing"] == ["02.png", "03.png"]


def test_a_run_json_that_cannot_be_written_hides_no_other_error(
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message is that of the first failure, not of the attempt to note it."""
    written: list[Path] = []

    def full(path: Path) -> bool:
        if path.name == "manifest.json" or (path.name == "run.json" and written):
            return True
        if path.name != LOCK_FILE:
            written.append(path)
        return False

    fill_disk(monkeypatch, full)
    done = featviz("run", tiny_file, photos, *SMALL, "--out", tmp_path / "out")
    assert done.code == 1 and "manifest.json cannot be written: No space left" in done.err
    assert run_json(tmp_path / "out")["images"]["missing"] == [f"0{i}.png" for i in range(4)]


def test_an_encoder_that_dies(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in a writer thread is not swallowed: it ends the run, and its image is no image."""
    real = write.NewImageFolder.writing

    def writing(self: write.NewImageFolder, relative: str) -> object:
        if self.name == "02.png" and relative.endswith("output.png"):
            raise ZeroDivisionError("bug")
        return real(self, relative)

    monkeypatch.setattr(write.NewImageFolder, "writing", writing)
    with pytest.raises(ZeroDivisionError, match="bug"):
        featviz("run", tiny_file, photos, *SMALL, "--out", tmp_path / "out")
    assert complete(tmp_path / "out") == ["00.png", "01.png"]
    assert run_json(tmp_path / "out")["images"]["missing"] == ["02.png", "03.png"]


# Images


def test_an_image_that_vanishes_or_changes_while_listed(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path, at_image: Callable
) -> None:
    """The one fails by name, of the other the new content is drawn and noted; exit code 3."""

    def event() -> None:
        (photos / "01.png").unlink()
        Image.new("RGB", (20, 20), "red").save(photos / "02.png")

    at_image("00.png", event)
    done = featviz("run", tiny_file, photos, *SMALL, "--out", tmp_path / "out")
    assert done.code == 3 and "error: 01.png is no file" in done.err
    assert complete(tmp_path / "out") == ["00.png", "02.png", "03.png"]
    (found,) = find.find_samples([str(photos / "02.png")])
    manifest = read_json(tmp_path / "out" / "02.png" / "manifest.json")
    assert manifest["image"]["sha256"] == decode.digest(found)
    with Image.open(tmp_path / "out" / "02.png" / "input.png") as seen:
        assert seen.getpixel((8, 8)) == (255, 0, 0)


@pytest.mark.parametrize("names", [["00.png"], ["02.png"], ["03.png"], ["01.png", "02.png"]])
def test_fail_fast_stops_at_the_first_failure(
    names: list[str], featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """Images before it are complete, those behind it missing; 1, or 3 if it was the last."""
    for name in names:
        (photos / name).write_bytes(b"no picture")
    done = featviz("run", tiny_file, photos, *SMALL, "--out", tmp_path / "out", "--fail-fast")
    everything = [f"0{i}.png" for i in range(4)]
    first = everything.index(names[0])
    run = run_json(tmp_path / "out")
    assert done.code == (3 if first == 3 else 1)
    assert done.err.count("error: ") == 1 and f"error: {names[0]} is no image" in done.err
    assert [row["image"] for row in run["failures"]] == names[:1]
    assert run["images"]["complete"] == everything[:first]
    assert run["images"]["missing"] == everything[first + 1 :]


def break_in_ten_ways(folder: Path) -> dict[str, str]:
    """50 of the pictures in a folder, each fifth in its own way; returns the kinds by name."""
    chosen = sorted(folder.iterdir())[7::20]
    kinds = [
        "empty",
        "truncated",
        "text",
        "zeros",
        "no header",
        "bad checksum",
        "cut header",
        "huge",
        "dead link",
        "nan",
    ]
    for index, path in enumerate(chosen):
        data = path.read_bytes()
        match kinds[index % 10]:
            case "empty":
                path.write_bytes(b"")
            case "truncated":
                path.write_bytes(data[: len(data) // 2])
            case "text":
                path.write_text("not a picture\n")
            case "zeros":
                path.write_bytes(bytes(len(data)))
            case "no header":
                path.write_bytes(data[8:])
            case "bad checksum":
                path.write_bytes(data[:45] + b"\xff\xff\xff\xff" + data[49:])
            case "cut header":
                path.write_bytes(data[:20])
            case "huge":
                header = data[12:16] + b"\x00\x0f\xff\xff" * 2 + data[24:29]
                checksum = zlib.crc32(header).to_bytes(4, "big")
                path.write_bytes(data[:12] + header + checksum + data[33:])
            case "dead link":
                path.unlink()
                path.symlink_to(folder / "nowhere.png")
            case "nan":
                import numpy as np

                values = np.full((8, 8), np.nan, np.float32)
                Image.fromarray(values).save(path, format="TIFF")
    return {path.name: kinds[index % 10] for index, path in enumerate(chosen)}


@pytest.mark.slow
def test_a_thousand_images_of_which_fifty_are_broken(
    tiny_file: Path, tmp_path: Path, featviz: Run
) -> None:
    """950 complete, 50 named with a reason, exit code 3, and the memory stays flat."""
    photos = make_photos(tmp_path / "photos", 1000)
    kinds = break_in_ten_ways(photos)
    assert len(kinds) == 50 and len(set(kinds.values())) == 10
    resident: list[int] = []

    def progress(image: ImageResult, total: int) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * os.sysconf("SC_PAGE_SIZE"))

    options = RunOptions("re:.", tmp_path / "out", inputs=InputOptions(size=16))
    result = pipeline.run(ModelOptions(str(tiny_file)), [str(photos)], options, progress)
    run = run_json(tmp_path / "out")
    assert result.exit_code == 3
    assert len(complete(tmp_path / "out")) == len(run["images"]["complete"]) == 950
    failures = {row["image"]: row["error"] for row in run["failures"]}
    assert set(failures) == set(kinds)
    reasons = {kind: failures[name].removeprefix(f"{name} ") for name, kind in kinds.items()}
    assert reasons["dead link"] == "is no file"
    assert reasons["text"] == "is no image that featviz reads: it looks like text"
    assert "truncated" in reasons["truncated"] and "more pixels than" in reasons["huge"]
    known = re.compile(r"is no |is empty$|has more pixels than |holds NaN |cannot be read: .{10,}$")
    assert [reason for reason in reasons.values() if not known.match(reason)] == []
    grown = float(np.median(np.diff(resident[200::100]))) / 100  # a single step is no growth
    assert grown < 2_000, f"{grown:.0f} bytes for each image"


# Pipes


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly(tiny_file: Path, photos: Path, tmp_path: Path) -> None:
    """`find ... -print0 | featviz run ... - -0 --json | head -1`: a line, no message, whole files;
    the rest of the run is there to be resumed."""
    make_photos(photos, 40)
    command = (
        f"find {photos} -name '*.png' -print0 | sort -z | {sys.executable} -m featviz run "
        f"{tiny_file} - -0 --json -q --out {tmp_path}/out {' '.join(SMALL)} | head -1"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert json.loads(done.stdout)["image"] == "00.png"
    assert done.stderr == b"" and done.returncode == 0
    check_whole(tmp_path / "out")
    run = run_json(tmp_path / "out")
    assert run["images"]["complete"] == complete(tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        *complete(tmp_path / "out"),
        "run.json",
    }


def test_a_line_for_each_image_as_it_completes(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a line is written, its image is complete; lines keep the order of the images, broken
    ones among them."""
    (photos / "01.png").write_bytes(b"no picture")
    lines: list[tuple[str, bool]] = []

    def written(text: str) -> None:
        line = json.loads(text)
        done = (tmp_path / "out" / line["image"] / "manifest.json").is_file()
        lines.append((line["image"], done))

    monkeypatch.setattr(
        "featviz.cli.output.click.echo",
        lambda text, err=False: None if err else written(text),
    )
    featviz("run", tiny_file, photos, *SMALL, "--out", tmp_path / "out", "--json")
    assert lines == [
        ("00.png", True),
        ("01.png", False),
        ("02.png", True),
        ("03.png", True),
    ]


def test_a_reader_that_leaves_costs_no_image(
    featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 141; the image under way is completed, and run.json says what is missing."""

    def gone(text: str, err: bool = False) -> None:
        if not err:
            raise BrokenPipeError

    monkeypatch.setattr("featviz.cli.output.click.echo", gone)
    done = featviz("run", tiny_file, photos, *SMALL, "--out", tmp_path / "out", "--json")
    assert done.code == 141 and "error" not in done.err
    assert complete(tmp_path / "out") == ["00.png", "01.png"]
    assert run_json(tmp_path / "out")["images"]["complete"] == ["00.png", "01.png"]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"00.png", "01.png", "run.json"}
