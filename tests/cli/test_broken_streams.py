"""Streams and signals as other programs leave them: closed, full, ignored."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from conftest import Outcome, Run
from runs import SMALL, complete, make_photos, run_json, tree

from featviz import cli
from featviz.run import run as pipeline
from featviz.run import workers

pytestmark = pytest.mark.medium


CODE = "from featviz.cli import main; main()"
FULL = "error: stdout cannot be written: No space left on device"


def into_a_closed_pipe(*arguments: str) -> None:
    """A command whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    forked.featviz(*arguments)


@pytest.mark.slow
def test_a_pipe_that_closes_in_the_midst_is_no_success(
    featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """`--json | head -1` ends with 141, run.json is true, and --resume makes it whole."""
    photos = make_photos(tmp_path / "photos", 6)
    command = ["run", tiny_file, photos, *SMALL, "--json", "-q", "--out"]
    out = tmp_path / "out"

    arguments = map(str, [*command, out])
    done = forked.fork(tmp_path / "process", into_a_closed_pipe, *arguments).ended()

    assert done == Outcome(141, "", "")
    images = run_json(out)["images"]
    assert images["complete"] == complete(out)
    assert images["missing"]
    # its line is the one that nobody read
    assert "00.png" in images["complete"]
    assert featviz(*command, out, "--resume").code == 0
    assert featviz(*command, tmp_path / "whole").code == 0
    assert tree(out) == tree(tmp_path / "whole")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    """The exit code is 1, also where click prints."""
    command = [sys.executable, "-c", CODE, "--help"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == f"{FULL}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_stops_the_lines_of_json(
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command ends the same where it prints as it goes, whatever is left in the
    stream."""
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(sys, "stdout", os.fdopen(full, "w"))
    done = featviz("run", tiny_file, photos, "--json", "-q", "--out", tmp_path / "out")
    assert (done.code, done.err) == (1, f"{FULL}\n")


def test_closed_streams_do_not_stop_the_drawing(
    featviz: Run, ran: Path, tmp_path: Path
) -> None:
    """The picture is that of a command whose streams are open: nothing was printed into
    it."""
    sheet = ["sheet", ran, "--layers", "0", "--json", "--out"]
    expected = tmp_path / "open.png"
    assert featviz(*sheet, expected).code == 0
    closed = tmp_path / "closed.png"
    arguments = shlex.join([sys.executable, "-c", CODE, *map(str, sheet), str(closed)])

    done = subprocess.run(f"{arguments} <&- >&- 2>&-", shell=True, check=False)

    assert done.returncode == 0
    assert closed.read_bytes() == expected.read_bytes()


def test_ignored_signals_stay_ignored() -> None:
    """`nohup` and a shell's `&` have them ignored; all others are heeded, and given
    back."""
    before = {number: signal.getsignal(number) for number in workers.SIGNALS}
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} == set(before)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # these tests may run under nohup themselves
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pipeline.stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert not stop.is_set()
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_signals_are_given_back_after_an_error() -> None:
    """A program whose run has failed is interrupted by the next Ctrl-C as before."""
    before = {number: signal.getsignal(number) for number in workers.SIGNALS}
    with pytest.raises(ZeroDivisionError), pipeline.stop_requests():
        raise ZeroDivisionError
    after = {number: signal.getsignal(number) for number in workers.SIGNALS}
    assert after == before


WAITS = """
import time
from pathlib import Path
def make():
    Path("begun").touch()
    time.sleep(60)
"""
"""A model that takes its time to load."""


@pytest.mark.slow
def test_a_signal_before_the_first_image(photos: Path, tmp_path: Path) -> None:
    """While the model loads it ends the command at once with 130; nothing is written."""
    (tmp_path / "net.py").write_text(WAITS)
    command = ("run", "net.py:make", photos, "--size", "8", "--out", "out")
    process = forked.command(tmp_path / "process", *command)
    while not (tmp_path / "begun").exists():
        time.sleep(0.02)
    process.kill(signal.SIGTERM)
    done = process.ended()
    assert done.code == 130
    assert done.err.strip() == "error: interrupted"
    assert not (tmp_path / "out").exists()


def test_too_little_memory_is_one_line_anywhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is also where memory is lacking before torch is loaded."""

    def full(*arguments: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(cli.group, "main", full)
    assert cli.guarded(["layers", "resnet18"]) == 1
    message = "error: there is too little memory\nhint: raise the limit (ulimit -v)\n"
    assert capsys.readouterr() == ("", message)


ENDING = """
import atexit, sys, threading
class Last:
    def __del__(self):
        print("taken down")
last = Last()
atexit.register(print, "called")
if "thread" in sys.argv[1]:
    ended = threading.main_thread().join
    threading.Thread(target=lambda: (ended(), print("thread"))).start()
if "traced" in sys.argv[1]:
    sys.setprofile("".format)
from featviz.cli import main
del sys.argv[1]
main()
"""


@pytest.mark.parametrize(
    ("unfinished", "last", "option", "code"),
    [
        ("", "called", "--version", 0),
        pytest.param("traced", "taken down", "--version", 0, marks=pytest.mark.slow),
        pytest.param("thread", "taken down", "--nonsense", 2, marks=pytest.mark.slow),
    ],
)
def test_a_command_is_over_when_its_work_is(
    unfinished: str, last: str, option: str, code: int
) -> None:
    """What is called at the end is called, but Python is not taken down; a tracer and a
    thread that is at work get Python's own end."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING, unfinished, option],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == code
    assert lines[-1] == last
    assert ("thread" in lines) == (unfinished == "thread")
    assert ("featviz" in lines[0]) == (code == 0)
    assert "Traceback" not in done.stderr


HUNG_UP = """
import os, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from featviz import cli
cli.guarded = lambda arguments: os.kill(os.getpid(), signal.SIGHUP) or 0
cli.main()
"""


def test_a_hangup_that_nohup_ignores_ends_no_command() -> None:
    """It ends none outside the loop over images, either."""
    assert subprocess.run([sys.executable, "-c", HUNG_UP], check=False).returncode == 0


SIGNALLED_AT_THE_END = """
import atexit, os, signal, sys
number = getattr(signal, sys.argv.pop(1))
if number != signal.SIGINT:
    signal.signal(number, signal.SIG_DFL)  # which nohup may have ignored
atexit.register(os.kill, os.getpid(), number)
from featviz.cli import main
main()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_after_the_last_line_shows_no_traceback(name: str) -> None:
    """It ends what is left of a command whose result is there."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED_AT_THE_END, name, "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("featviz, version ")
    assert done.stderr == ""
    assert done.returncode == -getattr(signal, name)
