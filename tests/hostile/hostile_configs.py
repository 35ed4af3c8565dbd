"""Hostile values in TOML files, in baselines and on the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hostile_audit import MARKER
from hostile_harness import TITLE, Attack, Sandbox
from hostile_rundirs import place

_TITLE = TITLE.encode("unicode_escape").decode().replace("\\x", "\\u00")
REFUSED: dict[str, bytes] = {
    "100,000 brackets": b"layers = " + b"[" * 100_000,
    "no UTF-8": b"layers = '\xff\xfe'",
    "an unknown table": b"[runn]\nnrow = 2",
}
TEXTS: dict[str, bytes] = {
    **REFUSED,
    "a number of 10,000 digits": b"nrow = " + b"9" * 10_000,
    "40 MB": b"# " + b"x" * 40_000_000,
    "a key that sets a terminal's title": f'"a{_TITLE}" = 1'.encode(),
    "a value that sets a terminal's title": f'layers = "a{_TITLE}"'.encode(),
    "a NUL in a path": b'out = "a\\u0000b"',
}
FILES: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a secret": lambda path: path.symlink_to("../secret/id_secret"),
}
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
RUN = "run --config {given}/c.toml {given}/net.pth {given}/photos --out out{n}"
AUDIT = "audit {given}/net.pth {given}/photos --out out{n}"
READING = [
    RUN,
    "layers --config {given}/c.toml {given}/net.pth",
    "diff --config {given}/c.toml {given}/run {given}/other --out out{n}",
]


def _given(
    name: str, content: bytes | Callable[[Path], object]
) -> Callable[[Sandbox], None]:
    def make(box: Sandbox) -> None:
        place(box)
        path = box.given / name
        path.write_bytes(content) if isinstance(content, bytes) else content(path)

    return make


def all_attacks() -> Iterator[Attack]:
    for name, data in TEXTS.items():
        expect = "refused" if name in REFUSED else "any"
        yield Attack(
            f"toml: {name}", _given("c.toml", data), [f"{RUN} --dry-run"], expect
        )
    for name, make in FILES.items():
        yield Attack(f"toml: {name}", _given("c.toml", make), READING[:1], "refused")
    for name, content in {"100,000 levels": b"[" * 100_000, **FILES}.items():
        line = f"{AUDIT} --baseline {{given}}/old.json"
        yield Attack(
            f"baseline: {name}", _given("old.json", content), [line], "refused"
        )
    for name, message in ARGUMENTS.items():
        line = ["run", "{given}/net.pth", "{given}/photos", "--out", "out{n}", *message]
        yield Attack(f"argument: {name}", place, [line])
    yield Attack("argument: 300 letters", place, [f"layers {'n' * 300}.pth"], "refused")
    good = b"[run]\nnrow = 2\nlayers = ['Conv2d', 'ReLU']\n[audit]\neps = 0.5\n"
    yield Attack("control: an honest TOML file", _given("c.toml", good), [RUN], "good")
