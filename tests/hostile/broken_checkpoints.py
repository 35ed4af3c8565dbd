"""Files that are no checkpoints, broken ones, weights that lead elsewhere: what each holds, and
what the line that refuses it says."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hostile_harness import TITLE, Attack, Sandbox
from hostile_images import encoded, zipped
from hostile_nodes import LINEAR, around, call, everywhere, named, surroundings
from torch import nn
from torchvision import models

Maker = Callable[[Path], Path]
"""Writes a file into a folder and returns its path."""


def written(data: bytes, name: str = "model.pth") -> Maker:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def saved_bytes(content: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


WEIGHTS = {"weight": torch.arange(16.0)}
WHOLE, OLD = saved_bytes(WEIGHTS), saved_bytes(WEIGHTS, _use_new_zipfile_serialization=False)
with zipfile.ZipFile(io.BytesIO(WHOLE)) as _archive:
    MEMBERS = {name.partition("/")[2]: _archive.read(name) for name in _archive.namelist()}
"""What a good file holds."""


def _rezipped(**changed: bytes) -> Maker:
    """The members of a good file, some of them changed, zipped again with right checksums."""
    members = {**MEMBERS, **changed}
    return written(zipped(*((f"a/{n}", data) for n, data in members.items()), packed=False))


def _lying(old: bytes, new: bytes) -> Maker:
    assert old in MEMBERS["data.pkl"]
    return _rezipped(**{"data.pkl": MEMBERS["data.pkl"].replace(old, new, 1)})


def other(make: Callable[[Path], object], name: str = "model.pth") -> Maker:
    def place(folder: Path) -> Path:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        return folder / name

    return place


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _safetensors(header: object, data: bytes = bytes(64), length: int | None = None) -> Maker:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return written(size.to_bytes(8, "little") + text + data, "model.safetensors")


def _tensor(dtype: str = "F32", shape: tuple[int, ...] = (16,)) -> object:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, 64]}


def index_of_shards(index: object, **others: bytes) -> Maker:
    def make(folder: Path) -> Path:
        for name, data in others.items():
            (folder / name).write_bytes(data)
        text = index if isinstance(index, bytes) else json.dumps(index).encode()
        return written(text, "model.index.json")(folder)

    return make


def _shard(name: object, **others: bytes) -> Maker:
    return index_of_shards({"weight_map": {"weight": name}}, **others)


def _itself() -> object:
    content: dict[str, Any] = {"epoch": 3}
    content["model"] = content["state_dict"] = content
    return content


def _mesh() -> object:
    """400 ways out of each dict, each back to it: 400 to the power of the depth."""
    inner: dict[str, Any] = {}
    inner.update({str(number): inner for number in range(400)})
    return {"state_dict": inner}


def _expanded() -> object:
    """A head of a billion classes in four bytes."""
    with torch.device("meta"):
        small = models.get_model("squeezenet1_1", weights=None).state_dict()
    weights = {name: torch.zeros(()).expand(t.shape) for name, t in small.items()}
    for name in ("classifier.1.weight", "classifier.1.bias"):
        weights[name] = torch.zeros(()).expand(1_000_000_000, *weights[name].shape[1:])
    return weights


HEADER = "cannot be loaded: SafetensorError: Error while deserializing header: "
NOTHING = "holds no weights: nothing"
NO_INDEX = "is no index of shards"

NO_CHECKPOINTS = {
    "empty": (b"", "is no checkpoint: it is empty"),
    "PNG": (encoded("PNG"), "it is a PNG image"),
    "half a file": (WHOLE[: len(WHOLE) // 2], "it is a zip archive that is truncated or damaged"),
    "HTML": (b"<!DOCTYPE html><html>404</html>", "it is a web page"),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "it is a Git LFS pointer, not the file itself",
    ),
    "zip of something else": (
        zipped(("readme.txt", b"hello"), packed=False),
        "it is a zip archive that is no checkpoint",
    ),
    "zip bomb": (
        zipped(("a/data.pkl", b"\x80\x02}" + b"K\x00Ns" * 10**7 + b"."), ("a/version", b"3\n")),
        "it is a zip archive that would unpack to 40,000,006 bytes",
    ),
    "legacy cut at the end": (OLD[:-8], "unexpected EOF, expected 8 more bytes"),
    "pickle.dump of weights": (
        pickle.dumps(WEIGHTS),
        "cannot be loaded: UnpicklingError: Unsupported operand",
    ),
    "module without a field of its class": (
        saved_bytes(nn.LSTM(3, 4)).replace(b"_flat_weights_names", b"_flat_weights_other"),
        "holds a broken LSTM: it lacks parts",
    ),
}
CHANGED: dict[str, tuple[Maker, str]] = {
    "pickle with a strange reference": (
        _rezipped(**{"data.pkl": b"\x80\x02K\x01Q."}),
        "cannot be loaded: AssertionError",
    ),
    "more elements than bytes": (
        _lying(b"K\x10t", b"M\x10\x27t"),
        "cannot be loaded: RuntimeError: record size (64 bytes) does not match",
    ),
    "directory": (other(Path.mkdir), ""),
    "FIFO": (other(os.mkfifo), ""),
}
SAFETENSORS: dict[str, tuple[Maker, str]] = {
    "safetensors header of terabytes": (_safetensors({"w": _tensor()}, length=2**39), HEADER),
    "safetensors header 100,000 deep": (_safetensors(b'{"w":' + b"[" * 100_000), HEADER),
    "safetensors of too many": (
        _safetensors({"w": _tensor(shape=(2**40, 2**40))}),
        f"{HEADER}overflow",
    ),
}
SHARDS: dict[str, tuple[Maker, str]] = {
    "shard outside": (_shard("../../etc/passwd"), "names passwd, which is not beside it"),
    "shard of two lines": (_shard("a\nerror: b"), "names a\\nerror: b, which is not"),
    "shard that is an index": (
        _shard("b.index.json", **{"b.index.json": b'{"weight_map": {}}'}),
        "names b.index.json, which is not beside it",
    ),
    "shard that is text": (
        _shard("a.pth", **{"a.pth": b"words"}),
        "a.pth is no checkpoint: it is a text file",
    ),
    "shards without end": (index_of_shards(b"[" * 100_000), NO_INDEX),
}
CONTENTS: dict[str, tuple[Callable[[], object], str]] = {
    "dict of numbers": (
        lambda: {"epoch": 3, "loss": 0.5},
        "holds no weights: keys 'epoch', 'loss'",
    ),
    "dict within itself": (_itself, "holds no weights: keys 'epoch', 'model', 'state_dict'"),
    "dict within itself 400 times": (_mesh, "holds no weights: keys 'state_dict'"),
    "module without its fields": (
        lambda: nn.Linear.__new__(nn.Linear),
        "holds a broken Linear: it lacks parts",
    ),
    "head of a billion classes": (
        _expanded,
        "holds a tensor of shape [1000000000, 512, 1, 1] without its data",
    ),
}
BROKEN: dict[str, tuple[Maker, str]] = {
    **{name: (written(data), words) for name, (data, words) in NO_CHECKPOINTS.items()},
    **CHANGED,
    **SAFETENSORS,
    **SHARDS,
    **{
        name: (lambda folder, make=make: written(saved_bytes(make()))(folder), words)
        for name, (make, words) in CONTENTS.items()
    },
}
"""Each ends in one line, with these words in it."""


INDEX = {"weight_map": {"w": "a.pth"}}


def _odd_shard(make: Callable[[Path], object]) -> Maker:
    def place(folder: Path) -> Path:
        make(folder / "a.pth")
        return index_of_shards(INDEX)(folder)

    return place


ODD_SHARDS: dict[str, tuple[Maker, str]] = {
    "a shard of a name that sets a terminal's title": (_shard(f"a{TITLE}"), "names a\\x1b]0;"),
    "an index that is a FIFO": (other(os.mkfifo, "model.index.json"), ""),
    "an index that is a device": (other(device, "model.index.json"), ""),
    "a shard that calls": (
        index_of_shards(INDEX, **{"a.pth": around(call(named(LINEAR), 30000, 30000))}),
        "calls Linear",
    ),
    "a shard that is a FIFO": (_odd_shard(os.mkfifo), "names a.pth, which is not beside it"),
    "a shard that links to a secret": (
        _odd_shard(lambda path: path.symlink_to("../secret/id_secret")),
        "a.pth is no checkpoint: it is a text file",
    ),
}


def _config(architecture: str) -> Maker:
    return written(json.dumps({"architecture": architecture}).encode(), "config.json")


CONFIGS: dict[str, Maker] = {
    "that is a FIFO": other(os.mkfifo, "config.json"),
    "whose architecture sets a terminal's title": _config(TITLE),
    "whose architecture is a path": _config("../../secret/id_secret"),
}
"""What may lie beside honest weights."""


def _given(name: str, make: Maker, file: str, lines: list[str], *expect: str) -> Attack:
    def place(box: Sandbox) -> None:
        surroundings(box, file)
        make(box.given)

    return Attack(name, place, lines, *expect, own_code=("given/net.py",))


def all_attacks() -> Iterator[Attack]:
    lines = everywhere("model.index.json")[:1]
    for name, (make, words) in ODD_SHARDS.items():  # SHARDS are tests/models/test_hostile.py's
        yield _given(f"shards: {name}", make, "model.index.json", lines, "refused", words)
    weights = saved_bytes({"0.weight": torch.zeros(4, 3, 3, 3), "0.bias": torch.zeros(4)})
    for name, make in CONFIGS.items():

        def both(folder: Path, make: Maker = make) -> Path:
            make(folder)
            return written(weights)(folder)

        lines = everywhere("model.pth")[:2]
        yield _given(f"beside: a config.json {name}", both, "model.pth", lines, "any")
