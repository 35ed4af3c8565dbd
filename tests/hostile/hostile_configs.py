"""Hostile values in TOML files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hostile_audit import MARKER
from hostile_harness import TITLE, Attack, Sandbox
from hostile_rundirs import place

_TITLE = TITLE.encode("unicode_escape").decode().replace("\\x", "\\u00")
TEXTS: dict[str, bytes] = {
    "100,000 brackets": b"layers = " + b"[" * 100_000,
    "5,000 tables inside one another": b"a" + b".a" * 5_000 + b" = 1",
    "a number of 10,000 digits": b"nrow = " + b"9" * 10_000,
    "no UTF-8": b"layers = '\xff\xfe'",
    "40 MB": b"# " + b"x" * 40_000_000,
    "an unknown table": b"[runn]\nnrow = 2",
    "a key that sets a terminal's title": f'"a{_TITLE}" = 1'.encode(),
    "a value that sets a terminal's title": f'layers = "a{_TITLE}"'.encode(),
    "a scale of 10**9": b"scale = 1000000000",
    "a share of superscripts": "shard = '²/4'".encode(),
    "a regular expression that does not end": b"layers = 're:(a+)+$'",
    "an index of 10**30": b"layers = 'Conv2d#" + b"9" * 30 + b"'",
    "a list for the output": b"out = ['a', 'b']",
    "a NUL in a path": b'out = "a\\u0000b"',
}
REFUSED = {
    "100,000 brackets",
    "no UTF-8",
    "an unknown table",
    "a table of the program's",
    "an unknown key",
    "a share of superscripts",
    "a format of no kind",
    "text for a number",
}
LINES = [
    "run --config {given}/c.toml {given}/net.pth {given}/photos --out out{n}",
    "run --config {given}/c.toml {given}/net.pth {given}/photos --out out{n} --dry-run",
]
OTHER_LINES = [
    *LINES,
    "layers --config {given}/c.toml {given}/net.pth",
    "audit --config {given}/c.toml {given}/net.pth {given}/photos --out out{n}",
    "diff --config {given}/c.toml {given}/run {given}/other --out out{n}",
    "merge --config {given}/c.toml {given}/run {given}/other --out out{n}",
]


def _given(name: str, make: Callable[[Path], object]) -> Callable[[Sandbox], None]:
    def both(box: Sandbox) -> None:
        place(box)
        make(box.given / name)

    return both


def _holds(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


FILES: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a secret": lambda path: path.symlink_to("../secret/id_secret"),
}
ARGUMENTS: dict[str, list[str]] = {
    "a size of 5,000 digits": ["--size", "9" * 5_000],
    "an amount of bytes of 400 digits": ["--max-output-size", "9" * 400],
    "a selector that is a title": ["--layers", f"a{TITLE}"],
    "a model argument that is code": ["--model-arg", f"a=__import__('os').mkdir('{MARKER}')"],
    "a target of no class": ["--target", f"class:{TITLE}"],
}
"""Values that a CI job may take from outside and put on the command line."""

BASELINES: dict[str, Callable[[Path], object]] = {
    "100,000 levels": _holds(b"[" * 100_000),
    "numbers of 1e400": _holds(
        b'{"schema_version": 1, "layers": [{"label": "0", "findings": {"dead": [1e400]}}]}'
    ),
    "a FIFO": FILES["a FIFO"],
    "a device": FILES["a device"],
}
"""What `--baseline` may name."""


def all_attacks() -> Iterator[Attack]:
    """All of this file."""
    for name, data in TEXTS.items():
        expect = "refused" if name in REFUSED else "any"
        yield Attack(f"toml: {name}", _given("c.toml", _holds(data)), LINES, expect)
    for name, make in FILES.items():
        yield Attack(f"toml: {name}", _given("c.toml", make), OTHER_LINES, "refused")
    line = f"layers {'n' * 300}.pth"
    yield Attack("argument: a model of 300 letters", place, [line], "refused")
    for name, make in BASELINES.items():
        line = "audit {given}/net.pth {given}/photos --baseline {given}/old.json --out out{n}"
        yield Attack(f"baseline: {name}", _given("old.json", make), [line], "refused")
    for name, words in ARGUMENTS.items():
        line = ["run", "{given}/net.pth", "{given}/photos", "--out", "out{n}", *words]
        yield Attack(f"argument: {name}", place, [line])
    good = _holds(b"[run]\nnrow = 2\nlayers = ['Conv2d', 'ReLU']\n[audit]\neps = 0.5\n")
    yield Attack("control: an honest TOML file", _given("c.toml", good), LINES, "good")
