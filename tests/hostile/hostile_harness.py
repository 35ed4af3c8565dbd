"""Runs command lines on hostile inputs, each in a forked child, and says what is wrong with it.

An input is made in a sandbox: `given/` holds it, `work/` is the current folder and may be written,
`secret/` and `bystander/` belong to somebody else. What a command may do is end well, or in one
`error:` line; everything else is a fault, in words.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import hashlib
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hostile_audit import MARKER
from PIL import Image

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

SECONDS = 20
"""Wall clock of one command line, for what waits without working (a FIFO)."""
CPU_SECONDS = 10
"""Processor time of one command line."""
REFUSAL_CPU_SECONDS = 4
"""The same where the input is to be refused: twice what is promised, for slow machines."""
MEMORY = 2**30
"""Bytes by which the address space of a command line may grow."""

SECRET = f"-----BEGIN {MARKER.upper()} KEY----- 4f1c9e7a5b2d8036 -----END"
"""Text that must not turn up anywhere."""
SECRET_NAME = "id_secret"
MARKUP = f"</script><script>{MARKER}()</script><img src=x onerror={MARKER}()>"
TITLE = f"\x1b]0;{MARKER}\x07\x9b31m\r"
"""Sets the title of a terminal, and goes back to the beginning of the line."""

_RAW_MARKUP = (f"<script>{MARKER}", f"onerror={MARKER}()>")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LINKS = re.compile(rf'(?:href|src)\s*=\s*["\'][^"\']*{SECRET_NAME}|url\([^)]*{SECRET_NAME}')
_PAGES = (".html", ".htm", ".svg")
_NO_MEMORY = re.compile(r"MemoryError|allocate memory|bad_alloc|[Uu]nable to allocate|alloc_cpu")
_WINDOW = 8
"""Pixels in a row by which the secret picture is known."""


@functools.cache
def secret_pixels() -> np.ndarray:
    """The secret picture, uint8 [64, 96]."""
    return np.random.default_rng(20240229).integers(0, 256, (64, 96), dtype=np.uint8)


@dataclass(frozen=True)
class Sandbox:
    """The folders of one input."""

    root: Path

    @property
    def given(self) -> Path:
        """Where the input is."""
        return self.root / "given"

    @property
    def work(self) -> Path:
        """The current folder of the command line; the only one that it may write, by default."""
        return self.root / "work"

    @property
    def secret(self) -> Path:
        """A file of somebody else's, whose text must stay there."""
        return self.root / "secret" / SECRET_NAME

    @property
    def secret_picture(self) -> Path:
        """A picture of somebody else's."""
        return self.root / "secret" / f"{SECRET_NAME}.png"

    @property
    def bystander(self) -> Path:
        """A file that must stay as it is."""
        return self.root / "bystander" / "notes.txt"

    @property
    def marker(self) -> Path:
        """What a payload makes if it runs."""
        return self.root / MARKER

    @classmethod
    def make(cls, root: Path) -> Sandbox:
        """An empty sandbox."""
        box = cls(root.resolve())
        for folder in (box.given, box.work, box.secret.parent, box.bystander.parent):
            folder.mkdir(parents=True)
        box.secret.write_text(SECRET)
        box.bystander.write_text("mine")
        Image.fromarray(secret_pixels()).save(box.secret_picture)
        return box

    def filled(self, word: str) -> str:
        """A word of a command line, with `{given}`, `{work}`, `{root}` in it replaced."""
        places = {"given": self.given, "work": self.work, "root": self.root}
        for name, place in places.items():
            word = word.replace(f"{{{name}}}", str(place))
        return word


@dataclass(frozen=True)
class Attack:
    """An input and the command lines that take it."""

    name: str
    """What it attempts, in one line."""
    make: Callable[[Sandbox], object]
    commands: Sequence[str | Sequence[str]]
    """Each a line, or words; `call:module:function` calls a function of the API."""
    expect: str = "any"
    """`good`: exit 0. `refused`: an error. `any`: either, but nothing else."""
    may_change: tuple[str, ...] = ("work",)
    """Files and folders of the sandbox that the command may write."""
    keep: tuple[str, ...] = ()
    """Files among these that must stay all the same."""
    own_code: tuple[str, ...] = ()
    """Python files of the sandbox that the command line names."""
    shares_secret: bool = False
    """The secret picture is an honest input."""


@dataclass
class Outcome:
    """What a command line did."""

    code: int | None
    signal: int | None
    late: bool
    out: str
    err: str
    violations: list[str]
    grown: int = 0
    faults: list[str] = field(default_factory=list)


class Worker:
    """The other process; started at the first request, and again if it is lost."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def ask(self, **request: Any) -> Outcome:
        """Run one command line, or a call."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None and self._folder
        request["temporary"] = str(Path(self._folder.name) / "tmp")
        request["writable"] = [*request["writable"], self._folder.name, os.devnull]
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            self.close()
            raise AssertionError("the worker itself is gone")
        found = json.loads(answer)
        return Outcome(
            found["code"],
            found["signal"],
            found["late"],
            found["out"],
            found["err"],
            found["faults"].splitlines(),
            found.get("grown", 0),
        )

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._folder = tempfile.TemporaryDirectory(prefix="hostile-")
            home = Path(os.path.realpath(self._folder.name))
            (home / "tmp").mkdir()
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "hostile_worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=_environment(home),
            )
            assert self._process.stdout is not None
            assert json.loads(self._process.stdout.readline() or "{}") == {"ready": True}
        return self._process

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.communicate(timeout=30)
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


SHARED = Worker()
"""One for all test modules: it takes seconds to start."""
atexit.register(SHARED.close)


def _environment(home: Path) -> dict[str, str]:
    left = ("COV", "PYTORCH_NVML")  # Lightning sets the latter, and torch then opens a library
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left)}
    path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    return {
        **kept,
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "MPLCONFIGDIR": str(home / "mpl"),
        "TORCH_HOME": str(home / "torch"),
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
        "COLUMNS": "200",
    }


# One attack -----------------------------------------------------------------------------------


def attempt(worker: Worker, attack: Attack, box: Sandbox) -> list[str]:
    """Make the input, run its command lines, and return all that is wrong, in words."""
    attack.make(box)
    faults, after = [], snapshot(box.root)
    for number, command in enumerate(attack.commands):
        words = command.split() if isinstance(command, str) else list(command)
        words = [box.filled(word.replace("{n}", str(number))) for word in words]
        outcome = run(worker, box, words, attack, fresh=number == 0)
        before, after = after, snapshot(box.root)
        outcome.faults += changed(before, after, attack)
        if not attack.shares_secret:
            outcome.faults += leaks(box, attack, before)
        if outcome.faults:
            faults.append(f"{' '.join(words)}: {'; '.join(outcome.faults)}")
        if outcome.late or outcome.signal == signal.SIGXCPU:
            break  # the others would take as long
    return faults


def run(
    worker: Worker, box: Sandbox, words: Sequence[str], attack: Attack, fresh: bool = True
) -> Outcome:
    """Run one command line and judge its exit and its streams."""
    call = {"call": words[0].removeprefix("call:")} if words[0].startswith("call:") else {}
    refused = attack.expect == "refused"
    outcome = worker.ask(
        argv=list(words[1:]) if call else list(words),
        cwd=str(box.work),
        sandbox=str(box.root),
        writable=[str(box.root / own) for own in attack.may_change],
        own_code=[str(box.root / own) for own in attack.own_code],
        seconds=SECONDS,
        cpu=REFUSAL_CPU_SECONDS if refused else CPU_SECONDS,
        memory=MEMORY,
        fresh=fresh,
        **call,
    )
    several = words[0] in ("run", "audit") and not refused
    outcome.faults = judged(outcome, attack.expect, "--json" in words, several)
    return outcome


def judged(
    outcome: Outcome, expect: str, as_json: bool = False, several: bool = False
) -> list[str]:
    """What is wrong with an exit and its streams.

    Args:
        several: there may be an `error:` line for each image that failed, before the last one.
    """
    faults = [f"VIOLATION {line}" for line in dict.fromkeys(outcome.violations)]
    if outcome.late:
        return [*faults, f"HANG: no answer in {SECONDS} s"]
    if outcome.signal == signal.SIGXCPU:
        return [*faults, "TIME: more processor time than is allowed"]
    if outcome.signal is not None:
        return [*faults, f"SIGNAL {outcome.signal}: {_last_line(outcome.err)}"]
    if "Traceback (most recent call last)" in outcome.err:
        faults.append(f"TRACEBACK {_last_line(outcome.err)}")
    elif found := _NO_MEMORY.search(outcome.err):
        faults.append(f"MEMORY {found[0]}")
    elif outcome.code in (1, 2) and not _is_told(outcome, several):
        faults.append(f"{_error_lines(outcome.err)} error lines: {outcome.err[:200]!r}")
    if outcome.grown > MEMORY:
        faults.append(f"MEMORY {outcome.grown:,} bytes")
    return [*faults, *_streams(outcome, as_json), *_unexpected(outcome, expect)]


def _is_told(outcome: Outcome, several: bool) -> bool:
    """One `error:` line; or an answer on stdout, as identify's "12 tensors; ..."."""
    lines = _error_lines(outcome.err)
    return (
        lines == 1
        or (lines > 1 and several)
        or (lines == 0 and outcome.code == 1 and " tensors; " in outcome.out)
    )


def _error_lines(err: str) -> int:
    return sum(line.startswith("error:") for line in err.splitlines())


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]


def _streams(outcome: Outcome, as_json: bool) -> Iterator[str]:
    for name, text in (("stdout", outcome.out), ("stderr", outcome.err)):
        text = re.sub(r"Traceback .*", "", text, flags=re.DOTALL)
        if SECRET in text:
            yield f"LEAK the secret is on {name}"
        if found := _CONTROLS.search(text):
            yield f"TERMINAL {found[0]!a} on {name}"
    if as_json and outcome.code == 0:
        try:
            [json.loads(line) for line in outcome.out.splitlines() or [outcome.out]]
        except ValueError:
            with contextlib.suppress(ValueError):
                json.loads(outcome.out)
                return
            yield "JSON on stdout cannot be read"


def _unexpected(outcome: Outcome, expect: str) -> Iterator[str]:
    if expect == "good" and outcome.code != 0:
        yield f"honest input refused: {_last_line(outcome.err)}"
    if expect == "refused" and (outcome.code not in (1, 2) or not _error_lines(outcome.err)):
        yield f"TAKEN: exit code {outcome.code}"
    if outcome.code not in (0, 1, 2, 3, 4):
        yield f"exit code {outcome.code}"


# Files ----------------------------------------------------------------------------------------

Listing = dict[str, tuple[int, str]]


def snapshot(root: Path) -> Listing:
    """Every file: type and mode, and its content or where it leads."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            mode = path.lstat().st_mode
            content = ""
            if stat.S_ISLNK(mode):
                content = str(path.readlink())
            elif stat.S_ISREG(mode):
                content = _digest(path)
            found[path.relative_to(root).as_posix()] = (mode, content)
    return found


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except PermissionError:
        return "not to be read"


def changed(before: Listing, after: Listing, attack: Attack) -> Iterator[str]:
    """Files that are not as they were, though they should be."""
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        if name in attack.keep or not _below(name, attack.may_change):
            verb = "REMOVED" if name not in after else "MADE" if name not in before else "CHANGED"
            yield f"{verb} {name}"


def _below(name: str, places: Iterable[str]) -> bool:
    return any(name == place or name.startswith(f"{place}/") for place in places)


def leaks(box: Sandbox, attack: Attack, before: Listing) -> Iterator[str]:
    """Somebody else's secrets in what was written, links to them, and markup that stands raw."""
    for place in attack.may_change:
        for path in [box.root / place, *(box.root / place).rglob("*")]:
            name = path.relative_to(box.root).as_posix()
            if path.is_symlink():
                if name not in before:
                    yield f"LINK {name} was made"
            elif path.is_file() and before.get(name, (0, ""))[1] != _digest(path):
                yield from (f"LEAK {words} {name}" for words in _leaks_in(path))


def _leaks_in(path: Path) -> Iterator[str]:
    data = path.read_bytes()
    if SECRET.encode() in data or any(piece in data for piece in _encoded()):
        yield "the secret is in"
    if _shows_secret(data):
        yield "secret pixels are in"
    if path.suffix in _PAGES:
        text = data.decode(errors="replace")
        if _LINKS.search(text):
            yield "a link to the secret is in"
        if any(markup in text for markup in _RAW_MARKUP):
            yield "MARKUP of the input stands raw in"


@functools.cache
def _encoded() -> tuple[bytes, ...]:
    """Base64 of pieces of the secrets, at each of the three alignments."""
    file = io.BytesIO()
    Image.fromarray(secret_pixels()).save(file, "PNG")
    pieces = [SECRET.encode(), file.getvalue()[200:400]]
    return tuple(
        base64.b64encode(piece[shift : shift + 30])[:36] for piece in pieces for shift in range(3)
    )


def _shows_secret(data: bytes) -> bool:
    """Whether a picture has rows of the secret one; channel by channel."""
    if not data.startswith((b"\x89PNG", b"\xff\xd8", b"RIFF")):
        return False
    try:
        with Image.open(io.BytesIO(data)) as opened:
            pixels = np.asarray(opened)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False
    planes = pixels[..., None] if pixels.ndim == 2 else pixels
    if planes.shape[1] < _WINDOW or planes.dtype != np.uint8:
        return False
    known = _windows(secret_pixels())
    return any(np.isin(_windows(planes[..., n]), known).any() for n in range(planes.shape[2]))


def _windows(pixels: np.ndarray) -> np.ndarray:
    """Every run of _WINDOW pixels of every row, as one number."""
    view = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(pixels), _WINDOW, axis=1)
    return np.ascontiguousarray(view).view(np.uint64).ravel()
