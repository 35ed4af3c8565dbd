"""Honest files changed a little, by Hypothesis: success or one `error:` line, and nothing else.

The examples are the same on every run (`derandomize`); `--hypothesis-seed` has no effect on them.
Each strategy gives a function from bytes to bytes, so that one honest file serves all examples.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostile_nodes
import hostile_rundirs
import pytest
import torch
from broken_checkpoints import saved_bytes
from hostile_harness import MARKUP, TITLE, Attack, Sandbox, attempt
from hostile_images import encoded, png, tarred, zipped
from hostile_rundirs import READING
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rundirs import summed_anew
from safetensors.torch import save
from torch import nn

Mutation = Callable[[bytes], bytes]

DEEP: list[Any] = functools.reduce(lambda inner, _: [inner], range(150), [])
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 255, 65_536, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e308, -1e308, "", " ", "0", "a" * 10_000, "../../../secret/id_secret"),
    *(MARKUP, TITLE, "a\nerror: b", "\ud800", "\0", "/etc/passwd"),
    *([], {}, [[]], [None], {"a": None}, [0] * 1000, DEEP),
]
"""What may stand in JSON in place of something else."""

shares = st.floats(0, 1, exclude_max=True)


BYTE_CHANGES: dict[str, Callable[[bytes, int], bytes]] = {
    "flip": lambda piece, value: bytes(b ^ (1 << value % 8) for b in piece[:1]) + piece[1:],
    "set": lambda piece, value: bytes([value]) + piece[1:],
    "insert": lambda piece, value: bytes([value]) * len(piece) + piece,
    "delete": lambda piece, value: b"",
    "double": lambda piece, value: piece * 2,
    "zero": lambda piece, value: bytes(len(piece)),
}


@st.composite
def bytes_changed(draw: st.DrawFn) -> Mutation:
    """One to four pieces changed; or the file is cut off."""
    kinds = st.sampled_from([*BYTE_CHANGES, "end"])
    step = st.tuples(kinds, shares, st.integers(0, 255), st.integers(1, 40))
    steps = draw(st.lists(step, min_size=1, max_size=4))

    def change(data: bytes) -> bytes:
        for kind, share, value, length in steps:
            start = int(share * len(data))
            piece, tail = data[start : start + length], data[start + length :]
            changed = b"" if kind == "end" else BYTE_CHANGES[kind](piece, value) + tail
            data = data[:start] + changed
        return data

    return change


@st.composite
def json_changed(draw: st.DrawFn) -> Mutation:
    """One to three values replaced, removed, wrapped, or renamed."""
    kinds = st.sampled_from(["put", "put", "put", "drop", "wrap", "rename"])
    step = st.tuples(kinds, shares, st.sampled_from(VALUES))
    steps = draw(st.lists(step, min_size=1, max_size=3))

    def change(data: bytes) -> bytes:
        document = json.loads(data)
        for kind, share, value in steps:
            places = list(_places(document)) or [([None], 0)]
            holder, key = places[int(share * len(places))]
            if kind == "put":
                holder[key] = copy.deepcopy(value)
            elif kind == "wrap":
                holder[key] = [holder[key]]
            else:
                taken = holder.pop(key)
                if kind == "rename" and isinstance(holder, dict):
                    holder[value if isinstance(value, str) else f"{key}x"] = taken
        return json.dumps(document).encode()

    return change


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key in it, however deep."""
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], (dict, list)):
            yield from _places(holder[key])


@st.composite
def zip_changed(draw: st.DrawFn) -> Mutation:
    """Records renamed, doubled, dropped, swapped, or other bytes in one."""
    kind = draw(st.sampled_from(["rename", "double", "drop", "swap", *["bytes"] * 4]))
    prefix, suffix = draw(st.sampled_from(["../", "/", "./", ""])), draw(st.sampled_from(["x", ""]))
    which, other, inner = draw(shares), draw(shares), draw(bytes_changed())

    def change(data: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = [(name, archive.read(name)) for name in archive.namelist()]
        at, to = int(which * len(records)), int(other * len(records))
        name, content = records[at]
        if kind == "rename":
            records[at] = (f"{prefix}{name.upper() if prefix == suffix else name}{suffix}", content)
        elif kind == "double":
            records.append((name, records[to][1]))
        elif kind == "drop":
            del records[at]
        elif kind == "swap":
            records[at], records[to] = (name, records[to][1]), (records[to][0], content)
        else:
            records[at] = (name, inner(content))
        return zipped(*records, packed=False)

    return change


any_zip = st.one_of(zip_changed(), zip_changed(), bytes_changed())
"""Of an archive."""
any_json = st.one_of(json_changed(), json_changed(), bytes_changed())
"""Of a JSON document."""


@dataclass(frozen=True)
class Kind:
    """A kind of file, how it is changed, and what reads it."""

    file: str
    """Below `given/`."""
    honest: Callable[[], bytes]
    changes: st.SearchStrategy[Mutation]
    commands: tuple[str, ...]
    examples: int
    """In the slow suite."""


def _net() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm, nn.ReLU()).eval()


TOML = b"""layers = ["Conv2d", "ReLU"]
nrow = 2
[run]
padding = 1
pad-value = 0.5
normalize = "percentile:1,99"
size = "29x45"
"""
BYTES = bytes_changed()
SMALL = "--size 16x16 --layers Conv2d --out out"
READERS = tuple(line.replace("{n}", "") for line in READING)


def _in_run(name: str, changes: st.SearchStrategy[Mutation], examples: int) -> Kind:
    """A file of a run directory."""
    honest = lambda: hostile_rundirs.honest()[f"run/{name}"]  # noqa: E731
    return Kind(f"run/{name}", honest, changes, READERS, examples)


def _photos(file: str, honest: Callable[[], bytes], changes: Any = BYTES) -> Kind:
    """An image or an archive of them."""
    line = f"run {{given}}/net.pth {{given}}/{file} {SMALL}"
    return Kind(file, honest, changes, (line,), 90)


def _weights(file: str, honest: Callable[[], bytes], changes: Any) -> Kind:
    """Weights, as a model and beside one."""
    words = ("layers", "identify", "layers {given}/net.py:make --weights")
    lines = tuple(f"{word} {{given}}/{file}" for word in words)
    return Kind(file, honest, changes, lines, 200)


TWO = (("a.png", png()), ("b/c.png", b"x"))
KINDS = {
    "whole model": Kind(
        "x.pth", lambda: saved_bytes(_net()), any_zip, ("layers {given}/x.pth",), 350
    ),
    "state dict": _weights("z.pth", lambda: saved_bytes(_net().state_dict()), any_zip),
    "safetensors": _weights(
        "x.safetensors",
        lambda: save({"0.weight": torch.zeros(4, 3, 3, 3), "0.bias": torch.zeros(4)}),
        BYTES,
    ),
    "manifest": _in_run("a.png/manifest.json", any_json, 300),
    "run.json": _in_run("run.json", any_json, 200),
    "stats.npz": _in_run("a.png/stats.npz", any_zip, 150),
    "grid": _in_run("a.png/001_0/output.png", BYTES, 50),
    "tar": _photos("x.tar", lambda: tarred(*TWO)),
    "zip": _photos("x.zip", lambda: zipped(*TWO), any_zip),
    "PNG": _photos("x.png", png),
    "JPEG": _photos("x.jpg", lambda: encoded("JPEG")),
    "TOML": Kind(
        "x.toml",
        lambda: TOML,
        BYTES,
        ("run --config {given}/x.toml {given}/net.pth {given}/photos --out out --dry-run",),
        100,
    ),
}
QUICK_EXAMPLES = 8
"""Of each kind, between edits."""


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with tempfile.TemporaryDirectory() as folder:
        box = Sandbox(Path(folder) / "box")
        hostile_nodes.surroundings(box, "x.pth")
        yield box


def _holds(kind: Kind, box: Sandbox, examples: int, failed: Path) -> None:
    """Run so many examples of a kind; a file that fails is kept in the folder `failed`."""
    honest, path = kind.honest(), box.given / kind.file

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # to shrink what hangs takes hours
        suppress_health_check=list(HealthCheck),
    )
    @given(change=kind.changes, line=st.sampled_from(kind.commands))
    def holds(change: Mutation, line: str) -> None:
        def make(box: Sandbox) -> None:
            hostile_rundirs.place(box)
            path.write_bytes(change(honest))
            summed_anew(box.given / "run" / "a.png")

        faults = attempt(Attack("", make, [line], own_code=("given/net.py",)), box)
        if kind.file.endswith((".pth", ".safetensors", ".toml")):  # no promise of memory
            faults = [fault for fault in faults if "MEMORY" not in fault]
        if faults:
            shutil.copy(path, failed / path.name)
        shutil.rmtree(box.work)
        box.work.mkdir()
        assert faults == [], f"see {failed / path.name}"

    holds()


@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        *((kind, QUICK_EXAMPLES) for kind in KINDS),
        *(pytest.param(n, k.examples, marks=pytest.mark.slow) for n, k in KINDS.items()),
    ],
)
def test_any_change_ends_well_or_in_one_line(
    kind: str, examples: int, box: Sandbox, tmp_path: Path
) -> None:
    """Changed files of each kind, few between edits and at least 1,600 in all: success or one
    line."""
    assert sum(k.examples for k in KINDS.values()) >= 1_600
    _holds(KINDS[kind], box, examples, tmp_path)
