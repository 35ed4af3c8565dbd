"""Honest files changed a little, at random: success or one `error:` line, and nothing else.

The seeds are numbers, so that the changes are the same on every run.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import random
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
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
from rundirs import summed_anew
from safetensors.torch import save
from torch import nn

DEEP: list[Any] = functools.reduce(lambda inner, _: [inner], range(150), [])
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 255, 65_536, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e308, -1e308, "", " ", "0", "a" * 10_000, "../../../secret/id_secret"),
    *(MARKUP, TITLE, "a\nerror: b", "\ud800", "\0", "/etc/passwd"),
    *([], {}, [[]], [None], {"a": None}, [0] * 1000, DEEP),
]
"""What may stand in JSON in place of something else."""

BYTE_CHANGES: list[Callable[[bytes, int], bytes]] = [
    lambda piece, value: bytes(b ^ (1 << value % 8) for b in piece[:1]) + piece[1:],
    lambda piece, value: bytes([value]) + piece[1:],
    lambda piece, value: bytes([value]) * len(piece) + piece,
    lambda piece, value: b"",
    lambda piece, value: piece * 2,
    lambda piece, value: bytes(len(piece)),
]


def in_bytes(data: bytes, chance: random.Random) -> bytes:
    """One to four pieces changed; or the file is cut off."""
    for _ in range(chance.randint(1, 4)):
        start, length = int(chance.random() * len(data)), chance.randint(1, 40)
        piece, tail = data[start : start + length], data[start + length :]
        change = chance.choice([*BYTE_CHANGES, None])
        data = data[:start] + (change(piece, chance.randrange(256)) + tail if change else b"")
    return data


def in_json(data: bytes, chance: random.Random) -> bytes:
    """One to three values replaced, removed, wrapped, or renamed; or bytes."""
    if chance.random() < 1 / 3:
        return in_bytes(data, chance)
    document = json.loads(data)
    for _ in range(chance.randint(1, 3)):
        holder, key = chance.choice([*_places(document)] or [([None], 0)])
        kind = chance.choice(["put", "put", "put", "drop", "wrap", "rename"])
        value = copy.deepcopy(chance.choice(VALUES))
        if kind == "put":
            holder[key] = value
        elif kind == "wrap":
            holder[key] = [holder[key]]
        else:
            taken = holder.pop(key)
            if kind == "rename" and isinstance(holder, dict):
                holder[value if isinstance(value, str) else f"{key}x"] = taken
    return json.dumps(document).encode()


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key in it, however deep."""
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], (dict, list)):
            yield from _places(holder[key])


def in_zip(data: bytes, chance: random.Random) -> bytes:
    """Records renamed, doubled, dropped, swapped, or other bytes in one; or bytes."""
    if chance.random() < 1 / 3:
        return in_bytes(data, chance)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    at, to = (chance.randrange(len(records)) for _ in range(2))
    name, content = records[at]
    kind = chance.choice(["rename", "double", "drop", "swap", *["bytes"] * 4])
    if kind == "rename":
        records[at] = chance.choice(["../", "/", "./", ""]) + name.upper(), content
    elif kind == "double":
        records.append((name, records[to][1]))
    elif kind == "drop":
        del records[at]
    elif kind == "swap":
        records[at], records[to] = (name, records[to][1]), (records[to][0], content)
    else:
        records[at] = name, in_bytes(content, chance)
    return zipped(*records, packed=False)


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
WEIGHTS = {"0.weight": torch.zeros(4, 3, 3, 3), "0.bias": torch.zeros(4)}
TWO = (("a.png", png()), ("b/c.png", b"x"))
MODEL = ["layers {file}", "identify {file}", "layers {given}/net.py:make --weights {file}"]
PHOTO = ["run {given}/net.pth {file} --size 16x16 --layers Conv2d --out out"]
CONFIGURED = ["run --config {file} {given}/net.pth {given}/photos --out out --dry-run"]
KINDS: dict[str, tuple[Callable[[], bytes], Callable[..., bytes], list[str]]] = {
    "whole.pth": (lambda: saved_bytes(_net()), in_zip, MODEL[:1]),
    "weights.pth": (lambda: saved_bytes(_net().state_dict()), in_zip, MODEL),
    "x.safetensors": (lambda: save(WEIGHTS), in_bytes, MODEL),
    **{
        f"run/{name}": (lambda name=name: hostile_rundirs.honest()[f"run/{name}"], change, READING)
        for name, change in {
            "a.png/manifest.json": in_json,
            "run.json": in_json,
            "a.png/stats.npz": in_zip,
            "a.png/001_0/output.png": in_bytes,
        }.items()
    },
    "x.tar": (lambda: tarred(*TWO), in_bytes, PHOTO),
    "x.zip": (lambda: zipped(*TWO), in_zip, PHOTO),
    "x.png": (png, in_bytes, PHOTO),
    "x.jpg": (lambda: encoded("JPEG"), in_bytes, PHOTO),
    "x.toml": (lambda: TOML, in_bytes, CONFIGURED),
}
"""Files below `given/`: what an honest one holds, how it is changed, and what reads it."""
SEEDS = range(5)


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with tempfile.TemporaryDirectory() as folder:
        box = Sandbox(Path(folder) / "box")
        hostile_nodes.surroundings(box, "weights.pth")
        yield box


@pytest.mark.slow
@pytest.mark.parametrize("file", KINDS)
def test_any_change_ends_well_or_in_one_line(file: str, box: Sandbox, tmp_path: Path) -> None:
    """Changed files of each kind; one that fails is kept."""
    (make, change, commands), path = KINDS[file], box.given / file
    honest = make()
    for seed in SEEDS:
        chance = random.Random(seed)
        data = change(honest, chance)

        def place(box: Sandbox, data: bytes = data) -> None:
            hostile_rundirs.place(box)
            path.write_bytes(data)
            summed_anew(box.given / "run" / "a.png")

        line = chance.choice(commands).replace("{file}", f"{{given}}/{file}")
        faults = attempt(Attack("", place, [line], own_code=("given/net.py",)), box)
        if file.endswith((".pth", ".safetensors", ".toml")):  # no promise of memory
            faults = [fault for fault in faults if "MEMORY" not in fault]
        shutil.rmtree(box.work)
        box.work.mkdir()
        if faults:
            shutil.copy(path, tmp_path / path.name)
        assert faults == [], f"seed {seed}: see {tmp_path / path.name}"
