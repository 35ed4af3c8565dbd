"""Honest files changed a little, by fixed seeds: success or one `error:` line, and
nothing else."""

from __future__ import annotations

import copy
import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hostile_pickles
import hostile_rundirs
import pytest
import torch
from hostile_harness import MARKUP, TITLE, Attack, Sandbox, attempt
from hostile_images import encoded, png, saved_bytes, tarred, zipped
from hostile_rundirs import READING
from rundirs import summed_anew
from safetensors.torch import save
from torch import nn

VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    65_536,
    2**63,
    10**400,
    0.5,
    1e308,
    "",
    "a" * 10_000,
    MARKUP,
    TITLE,
    "../../../secret/id_secret",
    "a\nerror: b",
    "\ud800",
    "\0",
    [],
    {},
    [None],
    [0] * 1000,
]
"""What may stand in JSON in place of something else."""


def in_bytes(data: bytes, chance: random.Random) -> bytes:
    """One to four pieces replaced, doubled or dropped; or the file is cut off."""
    for _ in range(chance.randint(1, 4)):
        start = int(chance.random() * len(data))
        length = chance.randint(1, 40)
        piece = data[start : start + length]
        tail = data[start + length :]
        changed = chance.choice(
            [chance.randbytes(len(piece)), piece * 2, b"", bytes(len(piece))]
        )
        data = data[:start] + (changed + tail if chance.random() < 0.9 else b"")
    return data


def in_json(data: bytes, chance: random.Random) -> bytes:
    """One to three values replaced, removed or wrapped; or bytes."""
    if chance.random() < 1 / 3:
        return in_bytes(data, chance)
    document = json.loads(data)
    for _ in range(chance.randint(1, 3)):
        holder, key = chance.choice([*_places(document)] or [([None], 0)])
        change = chance.choice(["put", "put", "drop", "wrap"])
        value = chance.choice(VALUES)
        if change == "drop":
            holder.pop(key)
        else:
            holder[key] = copy.deepcopy(value) if change == "put" else [holder[key]]
    return json.dumps(document).encode()


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key in it, however deep."""
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], (dict, list)):
            yield from _places(holder[key])


def in_zip(data: bytes, chance: random.Random) -> bytes:
    """A record renamed, doubled, dropped, or of other bytes; or bytes of the file."""
    if chance.random() < 1 / 3:
        return in_bytes(data, chance)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    at = chance.randrange(len(records))
    name, content = records.pop(at)
    members = [(f"../{name.upper()}", content), (name, in_bytes(content, chance))]
    records[at:at] = chance.choice(
        [[], [(name, content)] * 2, members[:1], members[1:]]
    )
    return zipped(*records, packed=False)


NET = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).eval()
TOML = (
    b'layers = ["Conv2d", "ReLU"]\nnrow = 2\n[run]\npad-value = 0.5\nsize = "29x45"\n'
)
WEIGHTS = {"0.weight": torch.zeros(4, 3, 3, 3), "0.bias": torch.zeros(4)}
TWO = (("a.png", png()), ("b/c.png", b"x"))
MODEL = [
    "layers {file}",
    "identify {file}",
    "layers {given}/net.py:make --weights {file}",
]
PHOTO = ["run {given}/net.pth {file} --size 16x16 --layers Conv2d --out out"]
CONFIGURED = ["run --config {file} {given}/net.pth {given}/photos --out out --dry-run"]


class ChangedFile(NamedTuple):
    """A kind of file that is changed at random."""

    make: Callable[[], bytes]
    """An honest one."""
    change: Callable[..., bytes]
    """Of the honest bytes and a random generator."""
    commands: list[str]
    """What reads it."""


KINDS: dict[str, ChangedFile] = {
    "whole.pth": ChangedFile(lambda: saved_bytes(NET), in_zip, MODEL[:1]),
    "weights.pth": ChangedFile(lambda: saved_bytes(NET.state_dict()), in_zip, MODEL),
    "x.safetensors": ChangedFile(lambda: save(WEIGHTS), in_bytes, MODEL),
    **{
        f"run/{name}": ChangedFile(
            lambda name=name: hostile_rundirs.honest()[f"run/{name}"], change, READING
        )
        for name, change in {
            "a.png/manifest.json": in_json,
            "run.json": in_json,
            "a.png/stats.npz": in_zip,
            "a.png/001_0/output.png": in_bytes,
        }.items()
    },
    "x.zip": ChangedFile(lambda: zipped(*TWO), in_zip, PHOTO),
    "x.tar": ChangedFile(lambda: tarred(*TWO), in_bytes, PHOTO),
    "x.jpg": ChangedFile(lambda: encoded("JPEG"), in_bytes, PHOTO),
    "x.toml": ChangedFile(lambda: TOML, in_bytes, CONFIGURED),
}
"""Files below `given/`: what an honest one holds, how it is changed, and what reads it.
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", KINDS)
def test_any_change_ends_well_or_in_one_line(file: str, tmp_path: Path) -> None:
    """Changed files of each kind; one that fails is kept."""
    make, change, commands = KINDS[file]
    box = Sandbox(tmp_path / "box")
    hostile_pickles.surroundings(box, "weights.pth")
    path = box.given / file
    honest = make()
    for seed in range(5):
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
        assert faults == [], f"seed {seed}: see {path}"
