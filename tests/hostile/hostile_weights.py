"""Hostile weights: safetensors, indexes of shards, and the config.json beside a file."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from hostile_harness import TITLE, Attack, Sandbox
from hostile_models import attack, everywhere, surroundings
from hostile_nodes import LINEAR, Global, Reduce, around, floats

# safetensors, shards, and what lies beside ------------------------------------------------------


def safetensors(header: Any, data: bytes = bytes(64), length: int | None = None) -> bytes:
    """A file of these bytes; `length` is what it says of its header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return struct.pack("<Q", size) + text + data


def entry(begin: int = 0, end: int = 64, dtype: str = "F32", shape: Any = (16,)) -> dict[str, Any]:
    """A tensor in the header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "a header of 2**39 bytes": (safetensors({"w": entry()}, length=2**39), "refused"),
    "a header beyond the end": (safetensors({"w": entry()}, length=2**20), "refused"),
    "a header cut short": (safetensors({"w": entry()}, length=20), "refused"),
    "a header 100,000 deep": (safetensors(b'{"w":' + b"[" * 100_000), "refused"),
    "a header of a list": (safetensors([1, 2]), "refused"),
    "a header that is no UTF-8": (safetensors(b'{"\xff": 1}'), "refused"),
    "a tensor backwards": (safetensors({"w": entry(64, 0)}), "refused"),
    "a tensor outside": (safetensors({"w": entry(0, 2**40)}), "refused"),
    "tensors that overlap": (safetensors({"a": entry(), "b": entry()}), "refused"),
    "a tensor of too many elements": (
        safetensors({"w": entry(shape=[2**40, 2**40])}),
        "refused",
    ),
    "a tensor of no elements and a huge side": (
        safetensors({"0.weight": entry(0, 0, shape=[0, 2**62])}, b""),
        "any",
    ),
    "a tensor of a negative side": (safetensors({"w": entry(shape=[-16])}), "refused"),
    "a tensor of no dtype": (safetensors({"w": entry(dtype="F31")}), "refused"),
    "a tensor of 4 bits": (safetensors({"0.weight": entry(dtype="F4", shape=[128])}), "any"),
    "a shape that is text": (safetensors({"w": entry(shape="16")}), "refused"),
    "metadata of numbers": (safetensors({"__metadata__": {"a": 1}, "w": entry()}), "refused"),
    "names that set a terminal's title": (safetensors({f"a{TITLE}": entry()}), "any"),
    "10,000 tensors of nothing": (
        safetensors({f"w{n}": entry(0, 0, shape=[0]) for n in range(10_000)}, b""),
        "any",
    ),
}


def _shards(index: Any, **others: bytes) -> Callable[[Sandbox], None]:
    def make(box: Sandbox) -> None:
        surroundings(box, "nothing.pth")
        for name, data in others.items():
            (box.given / name.replace("__", ".")).write_bytes(data)
        text = index if isinstance(index, bytes) else json.dumps(index).encode()
        (box.given / "model.index.json").write_bytes(text)

    return make


def _linked(name: str, target: str) -> Callable[[Sandbox], None]:
    """A link beside the index, under a name that it lists."""

    def make(box: Sandbox) -> None:
        _shards({"weight_map": {"w": name}})(box)
        (box.given / name).symlink_to(box.filled(target))

    return make


def _fifo(name: str, first: Callable[[Sandbox], None]) -> Callable[[Sandbox], None]:
    def make(box: Sandbox) -> None:
        first(box)
        (box.given / name).unlink(missing_ok=True)
        os.mkfifo(box.given / name)

    return make


def _device(name: str, first: Callable[[Sandbox], None]) -> Callable[[Sandbox], None]:
    def make(box: Sandbox) -> None:
        first(box)
        (box.given / name).unlink(missing_ok=True)
        (box.given / name).symlink_to("/dev/zero")

    return make


def _weights() -> bytes:
    weights = {"0.weight": torch.zeros(4, 3, 3, 3), "0.bias": torch.zeros(4)}
    file = io.BytesIO()
    torch.save(weights, file)
    return file.getvalue()


def _map(name: Any) -> Callable[[Sandbox], None]:
    return _shards({"weight_map": {"w": name}})


SHARDS: dict[str, Callable[[Sandbox], None]] = {
    "a shard outside": _map("../secret/id_secret"),
    "an absolute shard": _map("/etc/passwd"),
    "a shard that is its index": _map("model.index.json"),
    "a shard that is a number": _map(7),
    "a shard that is a list": _map(["a"]),
    "a shard with a NUL": _map("a\0b"),
    "a shard of a name that sets a terminal's title": _map(f"a{TITLE}"),
    "a shard of a name of 5,000 characters": _map("a" * 5000),
    "an index of a list": _shards([1]),
    "an index of nothing": _shards({}),
    "an index 100,000 deep": _shards(b"[" * 100_000),
    "an index with a number of 10,000 digits": _shards(b'{"weight_map": ' + b"9" * 10_000 + b"}"),
    "an index that is no UTF-8": _shards(b"\xff\xfe{}"),
    "an index that is a FIFO": _fifo("model.index.json", _shards({})),
    "an index that is a device": _device("model.index.json", _shards({})),
    "a shard that is a FIFO": _fifo("a.pth", _map("a.pth")),
    "a shard that is a device": _device("a.pth", _map("a.pth")),
    "a shard that links to a secret": _linked("a.pth", "{root}/secret/id_secret"),
    "a shard that calls": _shards(
        {"weight_map": {"w": "a.pth"}}, a__pth=around(Reduce(Global(LINEAR), (30000, 30000)))
    ),
    "one shard 200 times": _shards(
        {"weight_map": {f"w{n}": f"{'./' * n}a.pth" for n in range(200)}},
        a__pth=around({"w": floats((16,), (1,))}),
    ),
}
INDEX_COMMANDS = [
    "layers {given}/model.index.json",
    "run {given}/model.index.json {given}/photo.png --out out{n}",
    "identify {given}/model.index.json",
    "layers {given}/net.py:make --weights {given}/model.index.json",
]


def _beside(make: Callable[[Sandbox], object]) -> Callable[[Sandbox], None]:
    """Honest weights, with a config.json of somebody else's beside them."""

    def place(box: Sandbox) -> None:
        surroundings(box, "model.pth")
        (box.given / "model.pth").write_bytes(_weights())
        make(box)

    return place


def _config(content: Any) -> Callable[[Sandbox], object]:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return _beside(lambda box: (box.given / "config.json").write_bytes(text))


CONFIGS: dict[str, Callable[[Sandbox], object]] = {
    "a config.json that is a FIFO": _beside(lambda b: os.mkfifo(b.given / "config.json")),
    "a config.json that is a device": _device("config.json", _beside(lambda b: None)),
    "a config.json that is a folder": _beside(lambda b: (b.given / "config.json").mkdir()),
    "a config.json 100,000 deep": _config(b'{"a":' + b"[" * 100_000),
    "a config.json of 40 MB": _config(b'{"a": "' + b"x" * 40_000_000 + b'"}'),
    "a config.json that is no UTF-8": _config(b"\xff\xfe{}"),
    "a config.json of a list": _config([1]),
    "a config.json with a number of 10,000 digits": _config(b'{"a": ' + b"9" * 10_000 + b"}"),
    "an architecture that is a list": _config({"architecture": ["resnet18"]}),
    "an architecture of 10**6 characters": _config({"architecture": "a" * 10**6}),
    "an architecture that sets a terminal's title": _config({"architecture": TITLE}),
    "an architecture that is a path": _config({"architecture": "../../secret/id_secret"}),
    "an architecture from a hub": _config({"architecture": "hf-hub:evil/model"}),
    "10**12 classes": _config({"architecture": "resnet18", "num_classes": 10**12}),
}


def _given(data: bytes, box: Sandbox) -> bytes:
    return data


def all_attacks() -> Iterator[Attack]:
    """All of this file."""
    for name, (data, expect) in SAFETENSORS.items():
        long = name == "10,000 tensors of nothing"
        make = partial(_given, data)
        yield attack(f"safetensors: {name}", make, expect, "model.safetensors", long)
    for name, place in SHARDS.items():
        expect = "any" if name == "one shard 200 times" else "refused"
        yield Attack(f"shards: {name}", place, INDEX_COMMANDS, expect, own_code=("given/net.py",))
    for name, place in CONFIGS.items():
        lines = everywhere("model.pth")
        yield Attack(f"beside: {name}", place, lines, "any", own_code=("given/net.py",))
