"""Pickles made by hand from nodes (calls, objects, storages), and the zip around them."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hostile_harness import Sandbox
from hostile_models import zipped
from torch import nn


@dataclass(frozen=True)
class Global:
    """A name, `module:attribute`."""

    name: str


@dataclass(frozen=True)
class Reduce:
    """A call of something with arguments."""

    function: Any
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class NewObj:
    """`cls.__new__(cls, *arguments)`."""

    cls: Any
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Build:
    """An object whose state is put back."""

    target: Any
    state: Any


@dataclass(frozen=True)
class Persistent:
    """What stands for a storage."""

    identity: Any


@dataclass(frozen=True)
class Raw:
    """Opcodes as they are."""

    code: bytes


def dumped(value: Any) -> bytes:
    """The pickle of a value with such nodes in it, protocol 2."""
    return b"\x80\x02" + b"".join(opcodes(value)) + b"."


def opcodes(value: Any) -> Iterator[bytes]:
    """The instructions that make a value, nodes included."""
    if isinstance(value, Raw):
        yield value.code
    elif isinstance(value, Global):
        module, _, name = value.name.partition(":")
        yield f"c{module}\n{name}\n".encode()
    elif isinstance(value, (Reduce, NewObj)):
        yield from opcodes(value.function if isinstance(value, Reduce) else value.cls)
        yield from opcodes(value.arguments)
        yield b"R" if isinstance(value, Reduce) else b"\x81"
    elif isinstance(value, Build):
        yield from opcodes(value.target)
        yield from opcodes(value.state)
        yield b"b"
    elif isinstance(value, Persistent):
        yield from opcodes(value.identity)
        yield b"Q"
    elif isinstance(value, tuple):
        yield b"("
        for item in value:
            yield from opcodes(item)
        yield b"t"
    elif isinstance(value, list):
        yield b"]("
        for item in value:
            yield from opcodes(item)
        yield b"e"
    elif isinstance(value, dict):
        yield b"}("
        for key, item in value.items():
            yield from opcodes(key)
            yield from opcodes(item)
        yield b"u"
    else:
        yield from scalar(value)


def scalar(value: Any) -> Iterator[bytes]:
    """The instruction that makes a plain value."""
    if value is None:
        yield b"N"
    elif isinstance(value, bool):
        yield b"\x88" if value else b"\x89"
    elif isinstance(value, int):
        data = pickle.encode_long(value)
        long = (
            b"\x8b" + struct.pack("<i", len(data)) if len(data) > 255 else bytes((0x8A, len(data)))
        )
        yield long + data
    elif isinstance(value, float):
        yield b"G" + struct.pack(">d", value)
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        yield b"X" + struct.pack("<I", len(data)) + data
    else:
        raise TypeError(value)


def ordered(**items: Any) -> Any:
    """An OrderedDict."""
    made = Reduce(Global("collections:OrderedDict"))
    return Raw(b"".join((*opcodes(made), b"(", *_pairs(items), b"u"))) if items else made


def _pairs(items: Mapping[Any, Any]) -> Iterator[bytes]:
    for key, value in items.items():
        yield from opcodes(key)
        yield from opcodes(value)


def floats(size: tuple[int, ...], stride: tuple[int, ...], **more: Any) -> Any:
    """A tensor on storage `0`, which has 16 floats unless `count` says otherwise."""
    kind, offset = more.get("kind", "FloatStorage"), more.get("offset", 0)
    place, key = more.get("place", "cpu"), more.get("key", "0")
    storage = ("storage", Global(f"torch:{kind}"), key, place, more.get("count", 16))
    arguments = (Persistent(storage), offset, size, stride, False, ordered())
    return Reduce(Global("torch._utils:_rebuild_tensor_v2"), arguments)


def around(value: Any, **more: bytes) -> bytes:
    """The zip file that torch.save would make around a pickle, with 64 bytes of data."""
    return wrapped(dumped(value), **more)


def wrapped(code: bytes, **more: bytes) -> bytes:
    """The same for opcodes."""
    data = {"a/data.pkl": code, "a/byteorder": b"little", "a/data/0": bytes(64)}
    return zipped(
        {**data, "a/version": b"3\n", **{f"a/{name}": record for name, record in more.items()}}
    )


def legacy(code: bytes) -> bytes:
    """torch's format before 1.6 around a pickle without tensors."""
    head = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True, "type_sizes": {}}]
    start = b"".join(pickle.dumps(part, protocol=2) for part in head)
    return start + code + pickle.dumps([], protocol=2)


def state_of(module: nn.Module) -> dict[str, Any]:
    """The state of a module without parameters, as nodes."""
    return {name: _node(value) for name, value in vars(module).items()}


def _node(value: Any) -> Any:
    if isinstance(value, dict):
        return ordered(**value) if not value else {k: _node(v) for k, v in value.items()}
    if isinstance(value, set):
        return Reduce(Global("builtins:set"), (list(value),))
    return value


def module(name: str, **state: Any) -> Build:
    """A module as torch pickles it, with some of its state replaced."""
    return Build(NewObj(Global(name)), {**state_of(nn.Identity()), **state})


RELU = "torch.nn.modules.activation:ReLU"
LINEAR = "torch.nn.modules.linear:Linear"
LSTM = "torch.nn.modules.rnn:LSTM"
CONV = "torch.nn.modules.conv:Conv2d"


def relu(**state: Any) -> Build:
    """A ReLU."""
    return module(RELU, **{"inplace": False, **state})


def shell(box: Sandbox) -> str:
    """A command that would leave the marker."""
    return f"touch '{box.marker}'"


def python(box: Sandbox) -> str:
    """Code that would leave the marker."""
    return f"open({str(box.marker)!r}, 'w')"


def system_call(box: Sandbox) -> Reduce:
    """A call of os.system that would leave the marker."""
    return Reduce(Global("posix:system"), (shell(box),))


def partial(name: str, *arguments: Any) -> Build:
    """A functools.partial of what has this name."""
    target = Reduce(Global("functools:partial"), (Global(name),))
    return Build(target, (Global(name), tuple(arguments), {}, None))


def doubled(depth: int, close: bytes) -> Raw:
    """t = (t, t), so often: a few bytes, 2**depth leaves."""
    return Raw(b")" + b"".join(b"q\x08" + b"h\x08" + close for _ in range(depth)))
