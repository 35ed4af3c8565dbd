"""Files that are no checkpoints, broken ones, weights that lead elsewhere: what each
holds, and what the line that refuses it says."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hostile_harness import TITLE, Attack, Sandbox
from hostile_images import encoded, saved_bytes, zipped
from hostile_pickles import LINEAR, around, call, everywhere, surroundings
from torch import nn
from torchvision import models

Maker = Callable[[Path], Path]
"""Writes a file into a folder and returns its path."""


def written(data: bytes, name: str = "model.pth") -> Maker:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


WEIGHTS = {"weight": torch.arange(16.0)}
WHOLE = saved_bytes(WEIGHTS)
OLD = saved_bytes(WEIGHTS, _use_new_zipfile_serialization=False)
with zipfile.ZipFile(io.BytesIO(WHOLE)) as _archive:
    MEMBERS = {
        name.partition("/")[2]: _archive.read(name) for name in _archive.namelist()
    }
"""What a good file holds."""


def _rezipped(code: bytes) -> Maker:
    """The members of a good file around another pickle, zipped again with right
    checksums."""
    members = {**MEMBERS, "data.pkl": code}
    return written(
        zipped(*((f"a/{n}", data) for n, data in members.items()), packed=False)
    )


def _tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("sys_info"))
    return file.getvalue()


def _saved(make: Callable[[], object]) -> Maker:
    return lambda folder: written(saved_bytes(make()))(folder)


def other(make: Callable[[Path], object], name: str = "model.pth") -> Maker:
    def place(folder: Path) -> Path:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        return folder / name

    return place


def _safetensors(
    header: object, data: bytes = bytes(64), length: int | None = None
) -> Maker:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return written(size.to_bytes(8, "little") + text + data, "model.safetensors")


def _tensor(*shape: int) -> object:
    return {"dtype": "F32", "shape": shape or (16,), "data_offsets": [0, 64]}


INDEX = "model.index.json"


def _index(shard: str, make: Callable[[Path], object] = lambda path: None) -> Maker:
    """An index that names this one shard, and the shard beside it."""

    def place(folder: Path) -> Path:
        make(folder / shard)
        return written(json.dumps({"weight_map": {"w": shard}}).encode(), INDEX)(folder)

    return place


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

CHECKPOINTS: dict[str, tuple[Maker, str]] = {
    "empty": (written(b""), "is no checkpoint: it is empty"),
    "PNG": (written(encoded("PNG")), "it is a PNG image"),
    "half a file": (written(WHOLE[: len(WHOLE) // 2]), "that is truncated or damaged"),
    "HTML": (written(b"<!DOCTYPE html><html>404</html>"), "it is a web page"),
    "LFS pointer": (
        written(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "it is a Git LFS pointer, not the file itself",
    ),
    "zip of something else": (
        written(zipped(("readme.txt", b"hello"), packed=False)),
        "it is a zip archive that is no checkpoint",
    ),
    "zip bomb": (
        written(
            zipped(
                ("a/data.pkl", b"\x80\x02}" + b"K\0Ns" * 10**7 + b"."),
                ("a/version", b"3"),
            )
        ),
        "it is a zip archive that would unpack to 40,000,005 bytes",
    ),
    "legacy cut at the end": (
        written(OLD[:-8]),
        "unexpected EOF, expected 8 more bytes",
    ),
    "pickle.dump of a number": (written(pickle.dumps(7)), "holds no weights: a int"),
    "tar archive": (written(_tarred()), "it is a tar archive (of torch before 0.1.10"),
    "module without a field of its class": (
        written(
            saved_bytes(nn.LSTM(3, 4)).replace(
                b"_flat_weights_names", b"_flat_weights_other"
            )
        ),
        "holds a broken LSTM: it lacks parts",
    ),
    "pickle with a strange reference": (
        _rezipped(b"\x80\x02K\x01Q."),
        "a persistent id that is none",
    ),
    "more elements than bytes": (
        _rezipped(MEMBERS["data.pkl"].replace(b"K\x10t", b"M\x10\x27t", 1)),
        "cannot be loaded: RuntimeError: record size (64 bytes) does not match",
    ),
    "directory": (other(Path.mkdir), ""),
    "FIFO": (other(os.mkfifo), ""),
    "dict of numbers": (_saved(lambda: {"epoch": 3}), "holds no weights: keys 'epoch'"),
    "dict within itself": (_saved(_itself), "holds a value that contains itself"),
    "dict within itself 400 times": (
        _saved(_mesh),
        "holds a value that contains itself",
    ),
    "module without its fields": (
        _saved(lambda: nn.Linear.__new__(nn.Linear)),
        "holds a broken Linear: it lacks parts",
    ),
    "head of a billion classes": (
        _saved(_expanded),
        "holds a tensor of shape [1000000000, 512, 1, 1] without its data",
    ),
}
SAFETENSORS: dict[str, tuple[Maker, str]] = {
    "safetensors header of terabytes": (
        _safetensors({"w": _tensor()}, length=2**39),
        HEADER,
    ),
    "safetensors header 100,000 deep": (
        _safetensors(b'{"w":' + b"[" * 100_000),
        HEADER,
    ),
    "safetensors of too many": (
        _safetensors({"w": _tensor(2**40, 2**40)}),
        f"{HEADER}overflow",
    ),
}
NOT_BESIDE = "which is not beside it"
SHARDS: dict[str, tuple[Maker, str]] = {
    "shard outside": (_index("../../etc/passwd"), f"names passwd, {NOT_BESIDE}"),
    "shard of two lines": (_index("a\nerror: b"), f"names a\\nerror: b, {NOT_BESIDE}"),
    "shard that sets a terminal's title": (_index(f"a{TITLE}"), "names a\\x1b]0;"),
    "shard that is an index": (
        _index("b.index.json", lambda shard: shard.write_bytes(b'{"weight_map": {}}')),
        f"names b.index.json, {NOT_BESIDE}",
    ),
    "shard that is text": (
        _index("a.pth", lambda shard: shard.write_bytes(b"words")),
        "a.pth is no checkpoint: it is a text file",
    ),
    "shard that is a FIFO": (_index("a.pth", os.mkfifo), f"names a.pth, {NOT_BESIDE}"),
    "shard that links to a secret": (
        _index("a.pth", lambda shard: shard.symlink_to("../secret/id_secret")),
        "a.pth",
    ),
    "shard that calls": (
        _index("a.pth", lambda p: p.write_bytes(around(call(LINEAR, 30000, 30000)))),
        "needs torch.nn.modules.linear.Linear, which could",
    ),
    "shards without end": (written(b"[" * 100_000, INDEX), "is no index of shards"),
    "index that is a FIFO": (other(os.mkfifo, INDEX), ""),
    "index that is a device": (
        other(lambda path: path.symlink_to("/dev/zero"), INDEX),
        "",
    ),
}
BROKEN = {**CHECKPOINTS, **SAFETENSORS, **SHARDS}
"""Each ends in one line, with these words in it."""


def _placed(make: Maker, file: str) -> Callable[[Sandbox], object]:
    def place(box: Sandbox) -> None:
        surroundings(box, file)
        make(box.given)

    return place


def _beside(architecture: str) -> Callable[[Sandbox], object]:
    """Honest weights, and a config.json beside them."""
    weights = saved_bytes(
        {"0.weight": torch.zeros(4, 3, 3, 3), "0.bias": torch.zeros(4)}
    )
    config = json.dumps({"architecture": architecture}).encode()

    def place(box: Sandbox) -> None:
        _placed(written(weights), "model.pth")(box)
        written(config, "config.json")(box.given)

    return place


def all_attacks() -> Iterator[Attack]:
    changed_files = ("given/net.py",)
    tables = (
        ("model.pth", CHECKPOINTS),
        ("model.safetensors", SAFETENSORS),
        (INDEX, SHARDS),
    )
    for file, table in tables:
        for name, (make, message) in table.items():
            line = everywhere(file)[zlib.crc32(name.encode()) % 3]
            attempt = _placed(make, file)
            yield Attack(
                f"broken: {name}",
                attempt,
                [line],
                "refused",
                message,
                own_code=changed_files,
            )
    for name in (TITLE, "../../secret/id_secret"):
        lines = everywhere("model.pth")[:2]
        yield Attack(
            f"beside: the config.json of {name!a}",
            _beside(name),
            lines,
            own_code=changed_files,
        )
