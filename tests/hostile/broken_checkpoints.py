"""Files that are no checkpoints, or broken ones, and what the line that refuses each says."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_payloads import Maker, around, saved_bytes, written, zip_file
from PIL import Image
from torch import nn
from torchvision import models

SMALL = "squeezenet1_1"


def _picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, kind)
    return file.getvalue()


def saved_content(make: Callable[[], object], **options: Any) -> Maker:
    """A file that torch.save writes of what `make` gives."""
    return lambda folder: written(saved_bytes(make(), **options))(folder)


WEIGHTS = {"weight": torch.arange(16.0)}
WHOLE, OLD = saved_bytes(WEIGHTS), saved_bytes(WEIGHTS, _use_new_zipfile_serialization=False)


def _rezipped(change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> Maker:
    """The members of a good file, changed and zipped again with right checksums."""

    def make(folder: Path) -> Path:
        with zipfile.ZipFile(io.BytesIO(WHOLE)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        return zip_file(folder, change(members))

    return make


def _without(ending: str) -> Maker:
    return _rezipped(lambda members: {n: d for n, d in members.items() if not n.endswith(ending)})


def _with(ending: str, data: bytes) -> Maker:
    return _rezipped(lambda m: {n: data if n.endswith(ending) else d for n, d in m.items()})


def _lying(old: bytes, new: bytes, last: bool = False) -> Maker:
    """A tensor that is not as large as the file says."""

    def change(members: dict[str, bytes]) -> dict[str, bytes]:
        name = next(name for name in members if name.endswith("data.pkl"))
        pickled = members[name]
        head, middle, tail = pickled.rpartition(old) if last else pickled.partition(old)
        assert middle == old
        return {**members, name: head + new + tail}

    return _rezipped(change)


def _bomb(folder: Path) -> Path:
    path = folder / "model.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + b"}" + b"K\x00Ns" * 10_000_000 + b".")
        archive.writestr("a/version", b"3\n")
    return path


def _directory(folder: Path) -> Path:
    (folder / "model.pth").mkdir()
    return folder / "model.pth"


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "model.pth")
    return folder / "model.pth"


def _dangling(folder: Path) -> Path:
    (folder / "model.pth").symlink_to(folder / "nowhere")
    return folder / "model.pth"


def _unreadable(folder: Path) -> Path:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    path = written(WHOLE)(folder)
    path.chmod(0)
    return path


def _safetensors(header: object, data: bytes = bytes(64), length: int | None = None) -> Maker:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return written(size.to_bytes(8, "little") + text + data, "model.safetensors")


def _tensor(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> object:
    return {"dtype": dtype, "shape": [16] if shape is None else shape, "data_offsets": [begin, end]}


def index_of_shards(index: object, **others: bytes) -> Maker:
    """An index, and other files beside it."""

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


def module_with_state(**state: object) -> Callable[[], nn.Module]:
    """A convolution with some of its fields replaced."""

    def make() -> nn.Module:
        layer = nn.Conv2d(3, 2, 1)
        layer.__dict__.update(state)
        return layer

    return make


def _bare() -> nn.Module:
    return nn.Linear.__new__(nn.Linear)


def _stripped(module: nn.Module, field: str) -> nn.Module:
    del module.__dict__[field]
    return module


def _within_itself() -> nn.Module:
    module = nn.Sequential(nn.Conv2d(3, 2, 1))
    module.append(module)
    return module


def _expanded() -> object:
    """A head of a billion classes in four bytes."""
    weights = {name: torch.zeros(()).expand(t.shape) for name, t in small_weights().items()}
    for name in ("classifier.1.weight", "classifier.1.bias"):
        weights[name] = torch.zeros(()).expand(1_000_000_000, *weights[name].shape[1:])
    return weights


def small_weights() -> dict[str, torch.Tensor]:
    """The state dict of SMALL, without data."""
    with torch.device("meta"):
        return dict(models.get_model(SMALL, weights=None).state_dict())


PICKLE = "cannot be loaded: its pickle is broken, or not as torch.save writes it"
HEADER = "cannot be loaded: Error while deserializing header: "
UNKNOWN = "is no checkpoint: it is no format that featviz knows"
NOTHING = "holds no weights: nothing"
NO_INDEX = "is no index of shards"

BROKEN: dict[str, tuple[Maker, str]] = {
    "empty": (written(b""), "is no checkpoint: it is empty"),
    "one byte": (written(b"\x80"), UNKNOWN),
    "PNG": (written(_picture("png")), "it is a PNG image"),
    "JPEG": (written(_picture("jpeg")), "it is a JPEG image"),
    "GIF": (written(_picture("gif")), "it is a GIF image"),
    "HTML": (written(b"<!DOCTYPE html><html>404</html>"), "it is a web page"),
    "JSON": (written(b'{"error": "not found"}'), "it is a JSON file"),
    "text": (written(b"just some words"), "it is a text file"),
    "LFS pointer": (
        written(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "it is a Git LFS pointer, not the file itself",
    ),
    "ONNX": (written(b"\x08\x07\x12\x07pytorch"), "it is an ONNX model"),
    "HDF5": (written(b"\x89HDF\r\n\x1a\n" + bytes(40)), "it is an HDF5 file"),
    "gzip": (written(gzip.compress(WHOLE)), "it is a gzip archive; unpack it first"),
    "zeros": (written(bytes(4096)), UNKNOWN),
    "zip cut in the middle": (
        written(WHOLE[: len(WHOLE) // 2]),
        "it is a zip archive that is truncated or damaged",
    ),
    "zip cut at the end": (
        written(WHOLE[:-10]),
        "it is a zip archive that is truncated or damaged",
    ),
    "zip without its beginning": (written(WHOLE[30:]), UNKNOWN),
    "zip of something else": (
        lambda f: zip_file(f, {"readme.txt": b"hello"}),
        "it is a zip archive that is no checkpoint",
    ),
    "zip without data.pkl": (_without("data.pkl"), "it is a zip archive that is no checkpoint"),
    "zip without a tensor's data": (_without("data/0"), "lacks its record 'data/0'"),
    "zip with half of a tensor": (
        _with("data/0", bytes(32)),
        "holds 32 bytes of a tensor's data, expected 64",
    ),
    "zip of a later version": (
        written(WHOLE.replace(b"PK\x01\x02\0\0\0\0", b"PK\x01\x02\0\0\xff\0")),
        "it is a zip archive that is truncated or damaged",
    ),
    "zip bomb": (_bomb, "it is a zip archive that would unpack to 40,000,006 bytes"),
    "zip that climbs out": (around(b"\x80\x02}.", **{"a/../../../marker": b"x"}), NOTHING),
    "zip rooted above": (
        lambda f: zip_file(f, {"../../data.pkl": b"\x80\x02}.", "../marker": b""}),
        "holds 0 records data.pkl, expected 1",
    ),
    "empty pickle": (_with("data.pkl", b""), f"{PICKLE} (EOFError)"),
    "pickle of garbage": (_with("data.pkl", b"garbage"), PICKLE),
    "pickle that ends early": (_with("data.pkl", b"\x80\x02X\x05"), f"{PICKLE} (error: unpack"),
    "pickle with nothing on the stack": (_with("data.pkl", b"\x80\x02."), f"{PICKLE} (IndexError"),
    "pickle with a strange reference": (
        _with("data.pkl", b"\x80\x02K\x01Q."),
        f"{PICKLE} (UnpicklingError",
    ),
    "pickle with an odd reference": (
        _with("data.pkl", b"\x80\x02X\x01\0\0\0aQ."),
        f"{PICKLE} (UnpicklingError",
    ),
    "pickle that asks for much memory": (
        _with("data.pkl", b"\x80\x02cbuiltins\nbytearray\n\x8a\x08" + bytes(6) + b"\xff\x00\x85R."),
        "has a int where torch.save writes something else",
    ),
    "byte order of its own": (
        _rezipped(lambda m: {**m, "archive/byteorder": b"middle"}),
        "is of an unknown byte order",
    ),
    "legacy cut in the middle": (written(OLD[: len(OLD) // 2]), PICKLE),
    "legacy cut at the end": (written(OLD[:-8]), "ends 8 bytes too early"),
    "legacy with a huge string": (written(b"\x80\x04\x8e" + (2**62).to_bytes(8, "little")), PICKLE),
    "pickle.dump of weights": (
        written(pickle.dumps(WEIGHTS)),
        "needs torch.storage._load_from_bytes, which could run any code",
    ),
    "pickle.dump of protocol 0": (written(pickle.dumps(WEIGHTS, protocol=0)), UNKNOWN),
    "pickle.dump of numbers": (written(pickle.dumps({"a": 1})), PICKLE),
    "more elements than bytes": (
        _lying(b"K\x10t", b"M\x10\x27t"),
        "holds 64 bytes of a tensor's data, expected 40,000",
    ),
    "size beyond the storage": (
        _lying(b"K\x10\x85", b"J\xff\xff\xff\x7f\x85"),
        "that lies outside of its data",
    ),
    "negative size": (
        _lying(b"K\x10\x85", b"J\xff\xff\xff\xff\x85"),
        "holds a tensor with sizes, strides or an offset that no tensor has",
    ),
    "negative stride": (
        _lying(b"K\x01\x85", b"J\xff\xff\xff\xff\x85"),
        "holds a tensor with sizes, strides or an offset that no tensor has",
    ),
    "offset beyond the storage": (
        _lying(b"QK\x00", b"QJ\xff\xff\xff\x7f"),
        "that lies outside of its data",
    ),
    "negative offset": (
        _lying(b"QK\x00", b"QJ\xff\xff\xff\xff"),
        "holds a tensor with sizes, strides or an offset that no tensor has",
    ),
    "storage of no type": (
        _lying(b"torch\nFloatStorage", b"collections\nCounter"),
        f"{PICKLE} (UnpicklingError",
    ),
    "directory": (_directory, ""),
    "FIFO": (_fifo, ""),
    "dangling link": (_dangling, ""),
    "not to be read": (_unreadable, "cannot be read: Permission denied"),
    "safetensors cut": (_safetensors({"weight": _tensor(0, 64)}, bytes(32)), HEADER),
    "safetensors with more": (_safetensors({"weight": _tensor(0, 64)}, bytes(99)), HEADER),
    "safetensors header beyond the end": (
        _safetensors({"weight": _tensor(0, 64)}, length=2**20),
        HEADER,
    ),
    "safetensors header of terabytes": (_safetensors({"w": _tensor(0, 64)}, length=2**39), HEADER),
    "safetensors header cut short": (
        _safetensors({"weight": _tensor(0, 64)}, length=20),
        f"{HEADER}invalid JSON",
    ),
    "safetensors negative offset": (
        _safetensors({"weight": _tensor(-64, 0)}),
        f"{HEADER}invalid JSON",
    ),
    "safetensors backwards": (_safetensors({"weight": _tensor(64, 0)}), f"{HEADER}invalid offset"),
    "safetensors overlapping": (
        _safetensors({"a": _tensor(0, 64), "b": _tensor(0, 64)}),
        f"{HEADER}invalid offset",
    ),
    "safetensors with a hole": (
        _safetensors({"a": _tensor(64, 128)}, bytes(128)),
        f"{HEADER}invalid offset",
    ),
    "safetensors of no dtype": (
        _safetensors({"weight": _tensor(0, 64, "F31")}),
        f"{HEADER}invalid JSON",
    ),
    "safetensors of another dtype": (
        _safetensors({"weight": _tensor(0, 64, "F64")}),
        f"{HEADER}invalid shape, data type, or offset",
    ),
    "safetensors of too many": (
        _safetensors({"w": _tensor(0, 64, shape=[2**40, 2**40])}),
        f"{HEADER}overflow",
    ),
    "safetensors without JSON": (_safetensors(b"{weight: [16]}"), f"{HEADER}invalid JSON"),
    "safetensors with a list": (_safetensors({"weight": [1, 2]}), f"{HEADER}invalid JSON"),
    "safetensors of nothing": (_safetensors({}, b""), NOTHING),
    "safetensors named .pth": (lambda f: _safetensors({}, b"")(f).rename(f / "model.pth"), NOTHING),
    "shard outside": (_shard("../../etc/passwd"), "names passwd, which is not beside it"),
    "shard absolute": (_shard("/etc/passwd"), "names passwd, which is not beside it"),
    "shard missing": (
        _shard("model-1.safetensors"),
        "names model-1.safetensors, which is not beside it",
    ),
    "shard without a name": (_shard(""), NO_INDEX),
    "shard above": (_shard(".."), "names .., which is not beside it"),
    "shard number": (_shard(7), "names 7, which is not beside it"),
    "shard list": (_shard(["a"]), NO_INDEX),
    "shard with a NUL": (_shard("a\0b"), "names a\\x00b, which is not"),
    "shard of two lines": (_shard("a\nerror: b"), "names a\\nerror: b, which is not"),
    "shard with a long name": (_shard("a" * 5000), "aaa…, which is not beside it"),
    "shard that is its index": (
        _shard("model.index.json"),
        "names model.index.json, which is not beside it",
    ),
    "shard that is an index": (
        _shard("b.index.json", **{"b.index.json": b'{"weight_map": {}}'}),
        "names b.index.json, which is not beside it",
    ),
    "shard that is a list": (
        _shard("a.pth", **{"a.pth": saved_bytes([1, 2])}),
        "names a.pth, which holds no dict of tensors",
    ),
    "shard that is text": (
        _shard("a.pth", **{"a.pth": b"words"}),
        "a.pth is no checkpoint: it is a text file",
    ),
    "shards in a list": (index_of_shards([1]), NO_INDEX),
    "shards nowhere": (index_of_shards({"metadata": {}}), NO_INDEX),
    "shards of nothing": (index_of_shards({"weight_map": {}}), NOTHING),
    "shards without end": (index_of_shards(b"[" * 100_000), NO_INDEX),
    "shards not in UTF-8": (index_of_shards(b"\xff\xfe{}"), NO_INDEX),
    "list": (saved_content(lambda: [1, 2]), "holds no weights: a list"),
    "number": (saved_content(lambda: 5), "holds no weights: a int"),
    "string": (saved_content(lambda: "weights"), "holds no weights: a str"),
    "None": (saved_content(lambda: None), "holds no weights: a NoneType"),
    "tensor": (saved_content(lambda: torch.zeros(3)), "holds no weights: a Tensor"),
    "empty dict": (saved_content(dict), NOTHING),
    "dict of numbers": (
        saved_content(lambda: {"epoch": 3, "loss": 0.5}),
        "holds no weights: keys 'epoch', 'loss'",
    ),
    "dict with long keys": (
        saved_content(lambda: {"k" * 100_000: 1}),
        "holds no weights: keys 'kkk",
    ),
    "dict with keys of several lines": (
        saved_content(lambda: {torch.zeros(4, 4): 1}),
        "holds no weights: keys a Tensor",
    ),
    "dict with a module for a key": (
        saved_content(lambda: {nn.Sequential(nn.ReLU()): 1}),
        "holds no weights: keys a Sequential",
    ),
    "dict within itself": (
        saved_content(_itself),
        "holds no weights: keys 'epoch', 'model', 'state_dict'",
    ),
    "dict within itself 400 times": (saved_content(_mesh), "holds no weights: keys 'state_dict'"),
    "module without its fields": (saved_content(_bare), "holds a broken Linear: it lacks parts"),
    "module without a field of its class": (
        written(saved_bytes(nn.LSTM(3, 4)).replace(b"_flat_weights_names", b"_flat_weights_other")),
        "holds a broken LSTM: it lacks parts",
    ),
    "module without a mode": (
        saved_content(lambda: _stripped(nn.ReLU(), "training")),
        "holds a broken ReLU: it lacks parts",
    ),
    "module with numbers for parameters": (
        saved_content(module_with_state(_parameters=5)),
        "holds a broken Conv2d: it lacks parts",
    ),
    "module with numbers for modules": (
        saved_content(module_with_state(_modules=5)),
        "holds a broken Conv2d: it lacks parts",
    ),
    "module with numbers for hooks": (
        saved_content(module_with_state(_forward_hooks=5)),
        "holds a broken Conv2d: it lacks parts",
    ),
    "module with a number for a module": (
        saved_content(module_with_state(_modules={"a": 5})),
        "holds a broken Conv2d: it lacks parts",
    ),
    "module with a number for a parameter": (
        saved_content(module_with_state(_parameters={"a": 5})),
        "holds a broken Conv2d: it lacks parts",
    ),
    "module within itself": (
        saved_content(_within_itself),
        "holds a broken Sequential: it lacks parts",
    ),
    "broken module in a dict": (
        saved_content(lambda: {"model": _bare()}),
        "holds a broken Linear: it lacks parts",
    ),
    "broken module within itself in a dict": (
        saved_content(lambda: {"model": _within_itself()}),
        "holds a broken Sequential: it lacks parts",
    ),
    "weights of no data": (
        saved_content(small_weights),
        "holds a tensor of shape [64, 3, 3, 3] without its data",
    ),
    "head of a billion classes": (
        saved_content(_expanded),
        "holds a tensor of shape [1000000000, 512, 1, 1] without its data",
    ),
}
"""Each ends in one line, with these words in it."""
