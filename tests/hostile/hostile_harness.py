"""Runs command lines on hostile inputs, in forked children, and says what is wrong.

An input is made in a sandbox: `given/` holds it, `work/` is the current folder and may
be written, `secret/` and `bystander/` belong to somebody else. What a command may do is
end well, or in one `error:` line; everything else is a fault, in words."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hostile_audit import MARKER
from PIL import Image
from PIL.PngImagePlugin import PngInfo

HERE = Path(__file__).parent
SECONDS = 20
"""Wall clock of one command line, for what waits without working (a FIFO)."""
CPU_SECONDS = {"any": 10, "refused": 4}
"""Processor time of one command line; twice what is promised, for slow machines."""
MEMORY = 2**30
"""Bytes by which the address space of a command line may grow."""

SECRET = f"-----BEGIN {MARKER.upper()} KEY----- 4f1c9e7a5b2d8036 -----END"
"""Text that must not turn up anywhere."""
MARKUP = f"</script><script>{MARKER}()</script><img src=x onerror={MARKER}()>"
TITLE = f"\x1b]0;{MARKER}\x07\x9b31m\r"
"""Sets the title of a terminal, and goes back to the beginning of the line."""

_RAW_MARKUP = (f"<script>{MARKER}", f"onerror={MARKER}()>")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LINKS = re.compile(r'(?:href|src)\s*=\s*["\'][^"\']*id_secret|url\([^)]*id_secret')
_NO_MEMORY = re.compile(
    r"MemoryError|allocate memory|bad_alloc|[Uu]nable to allocate|alloc_cpu"
)
_COLOUR = (3, 253, 131)
"""Of every pixel of the secret picture, and of no map or photo here."""


class Sandbox:
    """The folders of one input.

    `given` holds it; `work` is the current folder of the command line, the only one
    that it may write by default. `secret` is a file of somebody else's (beside it the
    same as a picture and an array), `bystander` one that must stay as it is, and
    `marker` what a payload makes if it runs."""

    def __init__(self, root: Path) -> None:
        self.root = root = root.resolve()
        self.given = root / "given"
        self.work = root / "work"
        self.marker = root / MARKER
        self.secret = root / "secret/id_secret"
        self.bystander = root / "bystander/notes.txt"
        for folder in ("given", "work", "secret", "bystander"):
            (root / folder).mkdir(parents=True)
        self.secret.write_text(SECRET)
        self.bystander.write_text("mine")
        text_chunks = PngInfo()
        text_chunks.add_text("words", SECRET)
        image = Image.new("RGB", (96, 64), _COLOUR)
        for name in ("id_secret.png", "output.png"):
            image.save(self.secret.with_name(name), pnginfo=text_chunks)
        array = np.frombuffer(SECRET.encode(), np.uint8)
        np.save(self.secret.with_suffix(".npy"), array)

    def filled(self, text: str) -> str:
        """A text with `{given}` and `{root}` in it replaced."""
        text = text.replace("{given}", str(self.given))
        return text.replace("{root}", str(self.root))


@dataclass(frozen=True)
class Attack:
    """An input and the command lines that take it."""

    name: str
    """What it attempts, in one line."""
    make: Callable[[Sandbox], object]
    commands: Sequence[str | Sequence[str]]
    """Each a line, or its arguments; `{n}` in one is its number."""
    expect: str | Sequence[int] = "any"
    """`good`: exit 0. `refused`: an error. `any`: either. Or the exit code of each
    command line."""
    message: str = ""
    """What must stand on stderr of each command line."""
    may_change: tuple[str, ...] = ("work",)
    """Files and folders of the sandbox that the command may write."""
    keep: tuple[str, ...] = ()
    """Files among these that must stay all the same."""
    own_code: tuple[str, ...] = ()
    """Python files of the sandbox that the command line names."""

    def lines(self, box: Sandbox) -> list[list[str]]:
        """The arguments of each command line."""
        lines = []
        for number, line in enumerate(self.commands):
            arguments = line.split() if isinstance(line, str) else line
            lines.append([box.filled(a.replace("{n}", str(number))) for a in arguments])
        return lines

    def expected(self, number: int) -> str | int:
        """How a command line must end."""
        return self.expect if isinstance(self.expect, str) else self.expect[number]


@dataclass(frozen=True)
class Outcome:
    """How a command line ended."""

    code: int | None
    signal: int | None
    late: bool
    out: str
    err: str
    violations: str

    @property
    def errors(self) -> int:
        """How many lines of errors there are."""
        return sum(line.startswith("error:") for line in self.err.splitlines())

    @property
    def last_line(self) -> str:
        """The end of stderr."""
        lines = self.err.strip().splitlines() or [""]
        return lines[-1][:200]


@functools.cache
def worker() -> tuple[subprocess.Popen[str], str]:
    """The other process, one for all test modules: it takes seconds to start; and its
    home."""
    folder = tempfile.TemporaryDirectory(prefix="hostile-")
    home = Path(folder.name).resolve()
    (home / "tmp").mkdir()
    # Lightning sets the second: torch opens a library
    dropped = ("COV", "PYTORCH_NVML", "YOLO")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    path = [str(HERE.parent.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment |= {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "MPLCONFIGDIR": str(home / "mpl"),
        "TORCH_HOME": str(home / "torch"),
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
        "COLUMNS": "200",
    }
    process = subprocess.Popen(
        [sys.executable, str(HERE / "hostile_worker.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    atexit.register(folder.cleanup)
    atexit.register(process.communicate, timeout=30)
    return process, str(home)


def ask(**request: Any) -> list[Outcome]:
    process, home = worker()
    assert process.stdin
    assert process.stdout
    request["writable"] += [home, os.devnull]
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return [Outcome(**fields) for fields in json.loads(process.stdout.readline())]


def attempt(
    attack: Attack,
    box: Sandbox,
    seconds: float = SECONDS,
    cpu: int = 0,
) -> list[str]:
    """Make the input, run its command lines, and return all that is wrong, in words."""
    attack.make(box)
    lines = attack.lines(box)
    before = snapshot(box.root)
    outcomes = ask(
        commands=lines,
        cwd=str(box.work),
        sandbox=str(box.root),
        writable=[str(box.root / path) for path in attack.may_change],
        own_code=[str(box.root / path) for path in attack.own_code],
        seconds=seconds,
        cpu=cpu or CPU_SECONDS["refused" if attack.expect == "refused" else "any"],
        memory=MEMORY,
    )
    faults = []
    for number, outcome in enumerate(outcomes):
        line = lines[number]
        for fault in judged(attack, number, line, outcome):
            faults.append(f"{' '.join(line)}: {fault}")
    after = snapshot(box.root)
    faults += changed(before, after, attack)
    faults += leaks(box, before, after, attack)
    return faults


def judged(
    attack: Attack,
    number: int,
    line: list[str],
    outcome: Outcome,
) -> Iterator[str]:
    """What is wrong with the end of a command line, and with its streams."""
    for violation in dict.fromkeys(outcome.violations.splitlines()):
        yield f"VIOLATION {violation}"
    # --compare names no file
    if attack.message not in outcome.err and "--compare" not in line:
        yield f"{attack.message!r} is not said: {outcome.err[:300]!r}"
    if outcome.late or outcome.signal == signal.SIGXCPU:
        yield "HANG: more time than is allowed"
        return
    if outcome.signal is not None:
        yield f"SIGNAL {outcome.signal}: {outcome.last_line}"
        return
    expect = attack.expected(number)
    # of several images each may have an error
    several = line[0] in ("run", "audit") and expect != "refused"
    yield from _error_faults(outcome, several)
    yield from _stream_faults("stdout", outcome.out)
    yield from _stream_faults("stderr", outcome.err)
    yield from _code_faults(outcome, expect)


def _error_faults(outcome: Outcome, several: bool) -> Iterator[str]:
    """What is wrong with errors; a failure has one line of them."""
    if "Traceback (most recent call last)" in outcome.err:
        yield f"TRACEBACK {outcome.last_line}"
    elif match := _NO_MEMORY.search(outcome.err):
        yield f"MEMORY {match[0]}"
    elif outcome.code in (1, 2):
        # or the answer of identify: "12 tensors; ..."
        is_answer = outcome.code == 1 and " tensors; " in outcome.out
        expected = several if outcome.errors else is_answer
        if outcome.errors != 1 and not expected:
            yield f"{outcome.errors} error lines: {outcome.err[:200]!r}"


def _code_faults(outcome: Outcome, expect: str | int) -> Iterator[str]:
    """What is wrong with an exit code."""
    code = outcome.code
    allowed = [expect] if isinstance(expect, int) else range(5)
    if expect == "good" and code != 0:
        yield f"honest input refused: {outcome.last_line}"
    elif expect == "refused" and (code not in (1, 2) or not outcome.errors):
        yield f"TAKEN: exit code {code}"
    elif code not in allowed:
        yield f"exit code {code}"


def _stream_faults(name: str, text: str) -> Iterator[str]:
    """What a stream must not show: the secret, and what a terminal would obey."""
    without_traceback = re.sub(r"Traceback .*", "", text, flags=re.DOTALL)
    if SECRET in without_traceback:
        yield f"LEAK the secret is on {name}"
    if match := _CONTROLS.search(without_traceback):
        yield f"TERMINAL {match[0]!a} on {name}"


Listing = dict[str, tuple[int, str]]


def snapshot(root: Path) -> Listing:
    """Every file: type and mode, and its content or where it leads."""
    listing: Listing = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            mode = path.lstat().st_mode
            listing[path.relative_to(root).as_posix()] = (mode, _content(path, mode))
    return listing


def _content(path: Path, mode: int) -> str:
    """Where a link leads, or the digest of a file."""
    if stat.S_ISLNK(mode):
        return str(path.readlink())
    if stat.S_ISREG(mode):
        with contextlib.suppress(PermissionError), path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return ""


def changed(before: Listing, after: Listing, attack: Attack) -> Iterator[str]:
    """Files that are not as they were, though they should be."""
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        if name not in attack.keep and _below(name, attack.may_change):
            continue
        if name not in after:
            yield f"REMOVED {name}"
        elif name not in before:
            yield f"MADE {name}"
        else:
            yield f"CHANGED {name}"


def _below(name: str, folders: Iterable[str]) -> bool:
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def leaks(
    box: Sandbox, before: Listing, after: Listing, attack: Attack
) -> Iterator[str]:
    """Somebody else's secrets in what was written, links to them, and markup that
    stands raw."""
    for name, (mode, _) in after.items():
        if after[name] == before.get(name) or not _below(name, attack.may_change):
            continue
        if stat.S_ISLNK(mode):
            yield f"LINK {name} was made"
        elif stat.S_ISREG(mode):
            for leak in _leaks_in(box.root / name):
                yield f"LEAK {leak} {name}"


def _leaks_in(path: Path) -> Iterator[str]:
    data = path.read_bytes()
    if any(piece in data for piece in _secrets()):
        yield "the secret is in"
    if _shows_secret(data):
        yield "secret pixels are in"
    if path.suffix in (".html", ".svg"):
        text = data.decode(errors="replace")
        if _LINKS.search(text):
            yield "a link to the secret is in"
        if any(markup in text for markup in _RAW_MARKUP):
            yield "MARKUP of the input stands raw in"


@functools.cache
def _secrets() -> tuple[bytes, ...]:
    """The secret, and Base64 of a piece of it at each of the three alignments."""
    secret = SECRET.encode()
    pieces = [secret[shift : shift + 30] for shift in range(3)]
    return secret, *(base64.b64encode(piece)[:36] for piece in pieces)


def _shows_secret(data: bytes) -> bool:
    """Whether a picture has a pixel of the secret one."""
    if not data.startswith((b"\x89PNG", b"\xff\xd8", b"RIFF")):
        return False
    try:
        with Image.open(io.BytesIO(data)) as opened:
            pixels = np.asarray(opened.convert("RGB"), np.int16)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False
    return bool((np.abs(pixels - _COLOUR) < 5).all(axis=2).any())
