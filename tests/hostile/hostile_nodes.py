"""Pickles made by hand from opcodes, the zip around them, and how a hostile model file is given to
every command that takes one."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

from hostile_audit import MARKER
from hostile_harness import Attack, Sandbox
from hostile_images import png, zipped
from torch import nn


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
    """What has this name, `module:attribute`."""
    return Opcodes("c{}\n{}\n".format(*name.split(":", 1)).encode())


def call(function: Opcodes, *arguments: Any) -> Opcodes:
    """What a call gives."""
    return Opcodes(function + opcodes(arguments) + b"R")


def new(cls: Opcodes, *arguments: Any) -> Opcodes:
    """`cls.__new__(cls, *arguments)`."""
    return Opcodes(cls + opcodes(arguments) + b"\x81")


def built(target: Opcodes, state: Any) -> Opcodes:
    """An object whose state is put back."""
    return Opcodes(target + opcodes(state) + b"b")


def storage(*identity: Any) -> Opcodes:
    """What stands for a storage."""
    return Opcodes(opcodes(identity) + b"Q")


def ordered(**items: Any) -> Opcodes:
    """An OrderedDict."""
    made, pairs = call(named("collections:OrderedDict")), opcodes(items)[1:]
    return Opcodes(made + pairs) if items else made


def floats(size: tuple[int, ...], stride: tuple[int, ...], key: str = "0") -> Opcodes:
    """A tensor on a storage of 16 floats."""
    data = storage("storage", named("torch:FloatStorage"), key, "cpu", 16)
    rebuild = named("torch._utils:_rebuild_tensor_v2")
    return call(rebuild, data, 0, size, stride, False, ordered())


def partial(name: str, *arguments: Any) -> Opcodes:
    """A functools.partial of what has this name."""
    target = call(named("functools:partial"), named(name))
    return built(target, (named(name), arguments, {}, None))


def state_of(module: nn.Module) -> dict[str, Any]:
    """The state of a module without parameters."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()} if value else ordered()
        return call(named("builtins:set"), list(value)) if isinstance(value, set) else value

    return plain(vars(module))


def module(name: str, **state: Any) -> Opcodes:
    """A module as torch pickles it, with some of its state replaced."""
    return built(new(named(name)), {**state_of(nn.Identity()), **state})


RELU = "torch.nn.modules.activation:ReLU"
LINEAR = "torch.nn.modules.linear:Linear"
CONV = "torch.nn.modules.conv:Conv2d"


def relu(**state: Any) -> Opcodes:
    """A ReLU."""
    return module(RELU, **{"inplace": False, **state})


def shell(box: Sandbox) -> str:
    """A command that would leave the marker."""
    return f"touch '{box.marker}'"


def python(box: Sandbox) -> str:
    """Code that would leave the marker."""
    return f"open({str(box.marker)!r}, 'w')"


def system_call(box: Sandbox) -> Opcodes:
    """A call of os.system that would leave the marker."""
    return call(named("posix:system"), shell(box))


# Files ----------------------------------------------------------------------------------------


def dumped(value: Any) -> bytes:
    """A pickle of protocol 2."""
    return b"\x80\x02" + opcodes(value) + b"."


def around(value: Any, **more: bytes) -> bytes:
    """The zip file that torch.save would make around a pickle, with 64 bytes of data."""
    return wrapped(dumped(value), **more)


def wrapped(code: bytes, **more: bytes) -> bytes:
    """The same for a whole pickle."""
    own = {"data.pkl": code, "byteorder": b"little", "data/0": bytes(64), "version": b"3\n"}
    return zipped(*((f"a/{name}", data) for name, data in {**own, **more}.items()), packed=False)


def legacy(code: bytes) -> bytes:
    """torch's format before 1.6 around a pickle without tensors."""
    head = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True, "type_sizes": {}}]
    start = b"".join(pickle.dumps(part, protocol=2) for part in head)
    return start + code + pickle.dumps([], protocol=2)


NET = """from torch import nn


def make():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())

"""


def everywhere(name: str) -> list[str]:
    """The command lines that take a model file."""
    file = f"{{given}}/{name}"
    return [
        f"layers {file}",
        f"run {file} {{given}}/photo.png --out out{{n}}",
        f"identify {file}",
        f"audit {file} {{given}}/photo.png --out out{{n}}",
        f"kernels {file} --out out{{n}}",
        f"layers {{given}}/net.py:make --weights {file}",
        "layers {given}/net.py:make --weights {given}/all.index.json",
    ]


def attack(
    name: str, make: Callable[[Sandbox], bytes], expect: str = "refused", words: str = ""
) -> Attack:
    """A model file of these bytes, in every command, on its own and as a shard."""

    def place(box: Sandbox) -> None:
        surroundings(box, "model.pth")
        (box.given / "model.pth").write_bytes(make(box))

    lines = everywhere("model.pth")
    return Attack(name, place, lines, expect, words, own_code=("given/net.py",))


def surroundings(box: Sandbox, file: str) -> None:
    """A photo, an index that names the file, a factory that takes weights, and a trap to import."""
    (box.given / "photo.png").write_bytes(png())
    (box.given / "net.py").write_text(NET)
    index = {"weight_map": {"0.weight": file, "0.bias": file}}
    (box.given / "all.index.json").write_text(json.dumps(index))
    (box.given / f"{MARKER}_trap.py").write_text(
        f"open({str(box.marker)!r}, 'w')\nclass Net: ...\n"
    )
