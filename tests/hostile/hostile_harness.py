"""Runs command lines on hostile inputs, each attack in a forked child, and says what is
wrong.

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
        for folder in (
            self.given,
            self.work,
            self.secret.parent,
            self.bystander.parent,
        ):
            folder.mkdir(parents=True)
        self.secret.write_text(SECRET)
        self.bystander.write_text("mine")
        text_chunks = PngInfo()
        text_chunks.add_text("words", SECRET)
        for name in ("id_secret.png", "output.png"):
            Image.new("RGB", (96, 64), _COLOUR).save(
                self.secret.with_name(name), pnginfo=text_chunks
            )
        np.save(
            self.secret.with_suffix(".npy"), np.frombuffer(SECRET.encode(), np.uint8)
        )

    def filled(self, word: str) -> str:
        """A word of a command line, with `{given}` and `{root}` in it replaced."""
        return word.replace("{given}", str(self.given)).replace(
            "{root}", str(self.root)
        )


@dataclass(frozen=True)
class Attack:
    """An input and the command lines that take it."""

    name: str
    """What it attempts, in one line."""
    make: Callable[[Sandbox], object]
    commands: Sequence[str | Sequence[str]]
    """Each a line, or words; `{n}` in one is its number."""
    expect: str | Sequence[int] = "any"
    """`good`: exit 0. `refused`: an error. `any`: either. Or the exit code of each
    command line."""
    words: str = ""
    """What must stand on stderr of each command line."""
    may_change: tuple[str, ...] = ("work",)
    """Files and folders of the sandbox that the command may write."""
    keep: tuple[str, ...] = ()
    """Files among these that must stay all the same."""
    own_code: tuple[str, ...] = ()
    """Python files of the sandbox that the command line names."""


@dataclass(frozen=True)
class Outcome:
    code: int | None
    signal: int | None
    late: bool
    out: str
    err: str
    violations: str


@functools.cache
def worker() -> tuple[subprocess.Popen[str], str]:
    """The other process, one for all test modules: it takes seconds to start; and its
    home."""
    folder = tempfile.TemporaryDirectory(prefix="hostile-")
    home = Path(folder.name).resolve()
    (home / "tmp").mkdir()
    # Lightning sets the second: torch opens a library
    dropped = ("COV", "PYTORCH_NVML", "YOLO")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(dropped)
    }
    path = os.pathsep.join(
        [str(HERE.parent.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    )
    environment |= {
        "PYTHONPATH": path,
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
    command = [sys.executable, str(HERE / "hostile_worker.py")]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=environment
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
    return [Outcome(**found) for found in json.loads(process.stdout.readline())]


def attempt(
    attack: Attack, box: Sandbox, seconds: float = SECONDS, cpu: int = 0
) -> list[str]:
    """Make the input, run its command lines, and return all that is wrong, in words."""
    attack.make(box)
    lines = [
        line.split() if isinstance(line, str) else list(line)
        for line in attack.commands
    ]
    lines = [
        [box.filled(argument.replace("{n}", str(n))) for argument in line]
        for n, line in enumerate(lines)
    ]
    before = snapshot(box.root)
    outcomes = ask(
        commands=lines,
        cwd=str(box.work),
        sandbox=str(box.root),
        writable=[str(box.root / relative_path) for relative_path in attack.may_change],
        own_code=[str(box.root / relative_path) for relative_path in attack.own_code],
        seconds=seconds,
        cpu=cpu or CPU_SECONDS["refused" if attack.expect == "refused" else "any"],
        memory=MEMORY,
    )
    faults = []
    for number, (line, outcome) in enumerate(zip(lines, outcomes, strict=False)):
        expect = (
            attack.expect if isinstance(attack.expect, str) else attack.expect[number]
        )
        several = line[0] in ("run", "audit") and expect != "refused"
        found = [*judged(outcome, expect, several)]
        # which names nothing
        if attack.words not in outcome.err and "--compare" not in line:
            found.append(f"{attack.words!r} is not said: {outcome.err[:300]!r}")
        faults += [f"{' '.join(line)}: {fault}" for fault in found]
    after = snapshot(box.root)
    return [
        *faults,
        *changed(before, after, attack),
        *leaks(box, before, after, attack),
    ]


def judged(outcome: Outcome, expect: str | int, several: bool) -> Iterator[str]:
    """What is wrong with an exit and its streams; of `several` images each may have an
    error."""
    yield from (
        f"VIOLATION {line}" for line in dict.fromkeys(outcome.violations.splitlines())
    )
    last = (outcome.err.strip().splitlines() or [""])[-1][:200]
    if outcome.late or outcome.signal == signal.SIGXCPU:
        yield "HANG: more time than is allowed"
        return
    if outcome.signal is not None:
        yield f"SIGNAL {outcome.signal}: {last}"
        return
    errors = sum(line.startswith("error:") for line in outcome.err.splitlines())
    if "Traceback (most recent call last)" in outcome.err:
        yield f"TRACEBACK {last}"
    elif match := _NO_MEMORY.search(outcome.err):
        yield f"MEMORY {match[0]}"
    # with one line, or the answer of identify: "12 tensors; ..."
    elif outcome.code in (1, 2):
        answered = outcome.code == 1 and " tensors; " in outcome.out
        if not (errors == 1 or (several if errors else answered)):
            yield f"{errors} error lines: {outcome.err[:200]!r}"
    yield from _stream_faults("stdout", outcome.out)
    yield from _stream_faults("stderr", outcome.err)
    if expect == "good" and outcome.code != 0:
        yield f"honest input refused: {last}"
    elif expect == "refused" and (outcome.code not in (1, 2) or not errors):
        yield f"TAKEN: exit code {outcome.code}"
    elif outcome.code not in ([expect] if isinstance(expect, int) else (0, 1, 2, 3, 4)):
        yield f"exit code {outcome.code}"


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
    contents = {}
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in (*folders, *files)):
            mode = path.lstat().st_mode
            content = ""
            if stat.S_ISLNK(mode):
                content = str(path.readlink())
            elif stat.S_ISREG(mode):
                with contextlib.suppress(PermissionError), path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            contents[path.relative_to(root).as_posix()] = (mode, content)
    return contents


def changed(before: Listing, after: Listing, attack: Attack) -> Iterator[str]:
    """Files that are not as they were, though they should be."""
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        if name in attack.keep or not _below(name, attack.may_change):
            verb = (
                "REMOVED"
                if name not in after
                else "MADE"
                if name not in before
                else "CHANGED"
            )
            yield f"{verb} {name}"


def _below(name: str, places: Iterable[str]) -> bool:
    return any(name == place or name.startswith(f"{place}/") for place in places)


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
            yield from (f"LEAK {words} {name}" for words in _leaks_in(box.root / name))


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
    return secret, *(
        base64.b64encode(secret[shift : shift + 30])[:36] for shift in range(3)
    )


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
