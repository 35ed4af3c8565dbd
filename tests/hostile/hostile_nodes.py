"""Pickles made by hand from opcodes, the zip around them, and how a hostile model file is given to
every command that takes one."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable
from typing import Any

from hostile_audit import MARKER
from hostile_harness import Attack, Sandbox
from hostile_images import png, zipped


class Opcodes(bytes):
    """Instructions that leave one value on the stack."""


def opcodes(value: Any) -> Opcodes:
    """The instructions that make a value, in which there may be others."""
    if isinstance(value, Opcodes):
        return value
    if isinstance(value, tuple):
        return Opcodes(b"(" + b"".join(map(opcodes, value)) + b"t")
    if isinstance(value, list):
        return Opcodes(b"](" + b"".join(map(opcodes, value)) + b"e")
    if isinstance(value, dict):
        return Opcodes(b"}(" + b"".join(opcodes(v) for pair in value.items() for v in pair) + b"u")
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return Opcodes(b"X" + len(data).to_bytes(4, "little") + data)
    return Opcodes(pickle.dumps(value, protocol=2)[2:-1])


def named(name: str) -> Opcodes:
    return Opcodes("c{}\n{}\n".format(*name.split(":", 1)).encode())


def call(function: Opcodes, *arguments: Any) -> Opcodes:
    return Opcodes(function + opcodes(arguments) + b"R")


LINEAR = "torch.nn.modules.linear:Linear"


def dumped(value: Any) -> bytes:
    return b"\x80\x02" + opcodes(value) + b"."


def around(value: Any, **more: bytes) -> bytes:
    """The zip file that torch.save would make around a pickle, with 64 bytes of data."""
    return wrapped(dumped(value), **more)


def wrapped(code: bytes, **more: bytes) -> bytes:
    own = {"data.pkl": code, "byteorder": b"little", "data/0": bytes(64), "version": b"3\n"}
    return zipped(*((f"a/{name}", data) for name, data in {**own, **more}.items()), packed=False)


NET = """from torch import nn


def make():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())

"""


def everywhere(name: str) -> list[str]:
    """The commands that read a model file; all by one reader, so that an attack needs one."""
    file = f"{{given}}/{name}"
    return [
        f"layers {file}",
        f"run {file} {{given}}/photo.png --out out{{n}}",
        f"identify {file}",
        f"layers {{given}}/net.py:make --weights {file}",
        "layers {given}/net.py:make --weights {given}/all.index.json",
    ]


def attack(
    name: str, make: Callable[[Sandbox], bytes], expect: str = "refused", words: str = ""
) -> Attack:
    """A model file of these bytes, in one command or the other, on its own or as a shard."""

    def place(box: Sandbox) -> None:
        surroundings(box, "model.pth")
        (box.given / "model.pth").write_bytes(make(box))

    lines = everywhere("model.pth")
    line = lines[zlib.crc32(name.encode()) % len(lines)]
    return Attack(name, place, [line], expect, words, own_code=("given/net.py",))


def surroundings(box: Sandbox, file: str) -> None:
    """A photo, an index that names the file, a factory that takes weights, and a trap to import."""
    (box.given / "photo.png").write_bytes(png())
    (box.given / "net.py").write_text(NET)
    index = {"weight_map": {"0.weight": file, "0.bias": file}}
    (box.given / "all.index.json").write_text(json.dumps(index))
    (box.given / f"{MARKER}_trap.py").write_text(
        f"open({str(box.marker)!r}, 'w')\nclass Net: ...\n"
    )
