"""Hostile values in TOML files, in baselines and on the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hostile_audit import MARKER
from hostile_harness import TITLE, Attack, Sandbox
from hostile_rundirs import place

Make = Callable[[Path], object]
"""Makes a file at a path."""


def _of(data: bytes) -> Make:
    return lambda path: path.write_bytes(data)


_TITLE = TITLE.encode("unicode_escape").decode().replace("\\x", "\\u00")
FILES: dict[str, Make] = {
    "a FIFO": os.mkfifo,
    "a secret": lambda path: path.symlink_to("../secret/id_secret"),
}
REFUSED: dict[str, Make] = {
    "100,000 brackets": _of(b"layers = " + b"[" * 100_000),
    "no UTF-8": _of(b"layers = '\xff\xfe'"),
    "an unknown table": _of(b"[runn]\nnrow = 2"),
    **FILES,
}
TEXTS: dict[str, Make] = {
    "a number of 10,000 digits": _of(b"nrow = " + b"9" * 10_000),
    "40 MB": lambda path: path.write_bytes(b"# " + b"x" * 40_000_000),
    "a key that sets a terminal's title": _of(f'"a{_TITLE}" = 1'.encode()),
    "a value that sets a terminal's title": _of(f'layers = "a{_TITLE}"'.encode()),
    "a NUL in a path": _of(b'out = "a\\u0000b"'),
}
BASELINES: dict[str, Make] = {"100,000 levels": _of(b"[" * 100_000), **FILES}
ARGUMENTS: dict[str, list[str]] = {
    "a size of 5,000 digits": ["--size", "9" * 5_000],
    "a selector that is a title": ["--layers", f"a{TITLE}"],
    "a model argument that is code": [
        "--model-arg",
        f"a=__import__('os').mkdir('{MARKER}')",
    ],
    "a target of no class": ["--target", f"class:{TITLE}"],
}
"""Values that a CI job may take from outside and put on the command line."""
HONEST = b"[run]\nnrow = 2\nlayers = ['Conv2d', 'ReLU']\n[audit]\neps = 0.5\n"
RUN = "run --config {given}/c.toml {given}/net.pth {given}/photos --out out{n}"
AUDIT = "audit --baseline {given}/old.json {given}/net.pth {given}/photos --out out{n}"


def _given(name: str, make: Make) -> Callable[[Sandbox], None]:
    def place_with(box: Sandbox) -> None:
        place(box)
        make(box.given / name)

    return place_with


def all_attacks() -> Iterator[Attack]:
    for name, make in REFUSED.items():
        yield Attack(f"toml: {name}", _given("c.toml", make), [RUN], "refused")
    for name, make in TEXTS.items():
        yield Attack(f"toml: {name}", _given("c.toml", make), [f"{RUN} --dry-run"])
    for name, make in BASELINES.items():
        yield Attack(f"baseline: {name}", _given("old.json", make), [AUDIT], "refused")
    for name, arguments in ARGUMENTS.items():
        line = ["run", "{given}/net.pth", "{given}/photos", "--out", "out", *arguments]
        yield Attack(f"argument: {name}", place, [line])
    yield Attack("argument: 300 letters", place, [f"layers {'n' * 300}.pth"], "refused")
    honest = _given("c.toml", _of(HONEST))
    yield Attack("control: an honest TOML file", honest, [RUN], "good")
