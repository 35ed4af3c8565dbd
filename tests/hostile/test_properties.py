"""Honest files changed a little, by fixed seeds: success or one `error:` line, and
nothing else."""

from __future__ import annotations

import copy
import io
import json
import random
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
        end = start + chance.randint(1, 40)
        piece = data[start:end]
        tail = data[end:]
        changes = [chance.randbytes(len(piece)), piece * 2, b"", bytes(len(piece))]
        changed = chance.choice(changes)
        if chance.random() >= 0.9:
            return data[:start]
        data = data[:start] + changed + tail
    return data


def in_json(data: bytes, chance: random.Random) -> bytes:
    """One to three values replaced, removed or wrapped; or bytes."""
    if chance.random() < 1 / 3:
        return in_bytes(data, chance)
    document = json.loads(data)
    for _ in range(chance.randint(1, 3)):
        container, key = chance.choice([*_entries(document)] or [([None], 0)])
        change = chance.choice(["put", "put", "drop", "wrap"])
        if change == "drop":
            container.pop(key)
        elif change == "wrap":
            container[key] = [container[key]]
        else:
            container[key] = copy.deepcopy(chance.choice(VALUES))
    return json.dumps(document).encode()


def _entries(container: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key in it, however deep."""
    keys = list(container) if isinstance(container, dict) else range(len(container))
    for key in keys:
        yield container, key
        if isinstance(container[key], (dict, list)):
            yield from _entries(container[key])


def in_zip(data: bytes, chance: random.Random) -> bytes:
    """A record renamed, doubled, dropped, or of other bytes; or bytes of the file."""
    if chance.random() < 1 / 3:
        return in_bytes(data, chance)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    index = chance.randrange(len(records))
    name, content = records[index]
    renamed = (f"../{name.upper()}", content)
    changed = (name, in_bytes(content, chance))
    records[index : index + 1] = chance.choice(
        [[], [records[index]] * 2, [renamed], [changed]]
    )
    return zipped(*records, packed=False)


NET = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).eval()
TOML = b"""
layers = ["Conv2d", "ReLU"]
nrow = 2
[run]
pad-value = 0.5
size = "29x45"
"""
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

    change: Callable[[bytes, random.Random], bytes]
    commands: list[str]
    """What reads it."""
    content: bytes = b""
    """Of an honest one; empty for files of the honest run."""
    may_swell: bool = False
    """Whether no memory is promised."""


FILES: dict[str, ChangedFile] = {
    "whole.pth": ChangedFile(in_zip, MODEL[:1], saved_bytes(NET), True),
    "weights.pth": ChangedFile(in_zip, MODEL, saved_bytes(NET.state_dict()), True),
    "x.safetensors": ChangedFile(in_bytes, MODEL, save(WEIGHTS), True),
    "run/a.png/manifest.json": ChangedFile(in_json, READING),
    "run/run.json": ChangedFile(in_json, READING),
    "run/a.png/stats.npz": ChangedFile(in_zip, READING),
    "run/a.png/001_0/output.png": ChangedFile(in_bytes, READING),
    "x.zip": ChangedFile(in_zip, PHOTO, zipped(*TWO)),
    "x.tar": ChangedFile(in_bytes, PHOTO, tarred(*TWO)),
    "x.jpg": ChangedFile(in_bytes, PHOTO, encoded("JPEG")),
    "x.toml": ChangedFile(in_bytes, CONFIGURED, TOML, True),
}
"""Files below `given/`: how an honest one is changed, and what reads it."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("file", FILES)
def test_any_change_ends_well_or_in_one_line(
    file: str,
    seed: int,
    tmp_path: Path,
) -> None:
    """A changed file of any kind does no harm; one that does is kept."""
    changed = FILES[file]
    chance = random.Random(seed)
    data = changed.change(changed.content or hostile_rundirs.honest()[file], chance)

    def place(box: Sandbox) -> None:
        hostile_pickles.surroundings(box, "weights.pth")
        hostile_rundirs.place(box)
        (box.given / file).write_bytes(data)
        summed_anew(box.given / "run" / "a.png")

    line = chance.choice(changed.commands).replace("{file}", f"{{given}}/{file}")
    attack = Attack("", place, [line], own_code=("given/net.py",))
    faults = attempt(attack, Sandbox(tmp_path / "box"))
    if changed.may_swell:
        faults = [fault for fault in faults if "MEMORY" not in fault]
    assert faults == []
