"""How a hostile model file is given to every command that takes one."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Callable, Mapping

from bombs import packing_quickly
from hostile_audit import MARKER
from hostile_harness import Attack, Sandbox
from PIL import Image

Records = dict[str, bytes]
"""Name to content, in the order in which they stand in the zip."""

NET = """from torch import nn


def make():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())

"""


def everywhere(name: str) -> list[str]:
    """The command lines that take a model file."""
    file = f"{{given}}/{name}"
    return [
        f"layers {file}",
        f"summary {file}",
        f"run {file} {{given}}/photo.png --out out{{n}}",
        f"identify {file}",
        f"audit {file} {{given}}/photo.png --out out{{n}}",
        f"kernels {file} --out out{{n}}",
        f"layers {{given}}/net.py:make --weights {file}",
        "layers {given}/net.py:make --weights {given}/all.index.json",
    ]


def once_each_way(name: str) -> list[str]:
    """One command line for each way of reading a model file: as a model, to find its architecture,
    as weights, as a shard. The others read it as the first does."""
    lines = everywhere(name)
    return [lines[0], lines[3], *lines[6:]]


def attack(
    name: str,
    make: Callable[[Sandbox], bytes],
    expect: str = "refused",
    file: str = "model.pth",
    takes_long: bool = False,
) -> Attack:
    """A model file of these bytes, in every command, on its own and as a shard; in one command for
    each way of reading it where that takes long."""

    def place(box: Sandbox) -> None:
        surroundings(box, file)
        (box.given / file).write_bytes(make(box))

    lines = once_each_way(file) if takes_long else everywhere(file)
    return Attack(name, place, lines, expect, own_code=("given/net.py",))


def surroundings(box: Sandbox, file: str) -> None:
    """A photo, an index that names the file, a factory that takes weights, and a trap to import."""
    Image.new("RGB", (20, 16), "red").save(box.given / "photo.png")
    (box.given / "net.py").write_text(NET)
    index = {"weight_map": {"0.weight": file, "0.bias": file}}
    (box.given / "all.index.json").write_text(json.dumps(index))
    (box.given / f"{MARKER}_trap.py").write_text(
        f"open({str(box.marker)!r}, 'w')\nclass Net: ...\n"
    )


def zipped(records: Mapping[str, bytes] | list[tuple[str, bytes]], packed: bool = False) -> bytes:
    """A zip file; a list may name a record twice."""
    file = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    pairs = records.items() if isinstance(records, Mapping) else records
    opened = zipfile.ZipFile(file, "w", kind)
    with warnings.catch_warnings(), packing_quickly(), opened as archive:
        warnings.simplefilter("ignore")
        for name, data in pairs:
            archive.writestr(zipfile.ZipInfo(name), data, kind)
    return file.getvalue()


def unzipped(data: bytes) -> Records:
    """The records of a zip file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def control(file: str, make: Callable[[], bytes]) -> Attack:
    """An honest file, which the first three commands must take."""
    place = attack("", lambda box: make(), file=file).make
    name = f"control: {file} goes through every command"
    return Attack(name, place, everywhere(file)[:3], "good")
