"""Hostile and broken model files: nothing in them runs, and each ends in one clear line."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import functools
import gzip
import importlib
import io
import json
import operator
import os
import pickle
import shlex
import signal
import socket
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.datasets.utils
from conftest import Outcome
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision import models

from featviz.errors import LoadError
from featviz.models.files import checkpoint

SMALL = "squeezenet1_1"
LONGEST = 20  # seconds; more is a hang

Maker = Callable[[Path], Path]
"""Writes a file into a folder and returns its path; a payload would leave `folder / "marker"`."""


# Payloads ----------------------------------------------------------------------------------


class Call:
    """Pickles as a call, whose result may be called in turn."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call

    def __call__(self) -> None:
        """Only so that pickle takes it for a function."""


class SlyDict(collections.OrderedDict):  # type: ignore[type-arg]
    """Runs code when its state is put back."""

    def __reduce__(self) -> tuple[Any, ...]:
        return SlyDict, (), {"command": self["command"]}

    def __setstate__(self, state: dict[str, str]) -> None:
        os.system(state["command"])


class SlyModule(nn.Module):
    """Runs code when its state is put back."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        os.system(state["command"])


def _touch(folder: Path) -> str:
    return f"touch '{folder / 'marker'}'"


def _open(folder: Path) -> str:
    return f"open({str(folder / 'marker')!r}, 'w')"


def _sly_dict(folder: Path) -> SlyDict:
    return SlyDict(command=_touch(folder))


def _sly_module(folder: Path) -> SlyModule:
    module = SlyModule()
    module.command = _touch(folder)
    return module


def _imported_by_name(folder: Path) -> Call:
    mkdir = Call(getattr, Call(__import__, "os"), "mkdir")
    return Call(mkdir, str(folder / "marker"))


def _attribute_getter(folder: Path) -> Call:
    mkdir = Call(operator.attrgetter("mkdir"), Call(importlib.import_module, "os"))
    return Call(mkdir, str(folder / "marker"))


def _hub(folder: Path) -> Call:
    (folder / "hubconf.py").write_text(f"{_open(folder)}\ndef entry():\n    pass\n")
    return Call(functools.partial(torch.hub.load, str(folder), "entry", source="local"))


def _downloaded(folder: Path) -> dict[str, Any]:
    (folder / "source").write_text("x")
    url = (folder / "source").as_uri()
    fetch = Call(torchvision.datasets.utils.download_url, url, str(folder), "marker")
    return {"conv1.weight": fetch, "conv1.bias": torch.zeros(1)}


def _inner(folder: Path) -> bytes:
    file = io.BytesIO()
    torch.save(Call(os.mkdir, str(folder / "marker")), file)
    return file.getvalue()


def _load_again(folder: Path) -> Call:
    (folder / "inner").write_bytes(_inner(folder))
    return Call(functools.partial(torch.load, weights_only=False), str(folder / "inner"))


def _graph(folder: Path) -> Call:
    body = {"_code": "def forward(self): pass", "_graphmodule_cls_name": "G"}
    return Call(torch.fx.graph_module.reduce_graph_module, body, f"{_open(folder)}\n")


def _subclass(folder: Path) -> Call:
    rebuild = torch._tensor._rebuild_from_type_v2
    return Call(rebuild, os.mkdir, torch.Tensor, (str(folder / "marker"),), {})


def _noted(folder: Path) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.note = Call(os.mkdir, str(folder / "marker"))  # type: ignore[attr-defined]
    return parameter


def _layer(field: str, value: Any) -> nn.Module:
    layer = nn.Conv2d(3, 2, 1)
    layer.__dict__[field] = value
    return nn.Sequential(layer)


def leave(marker: Path, *arguments: object) -> None:
    """What a hook may be: it takes whatever it is given."""
    marker.touch()


def _leaves(folder: Path) -> Callable[..., None]:
    return functools.partial(leave, folder / "marker")


def _hook(field: str) -> Callable[[Path], nn.Module]:
    def make(folder: Path) -> nn.Module:
        return _layer(field, collections.OrderedDict({0: _leaves(folder)}))

    return make


def _forward(folder: Path) -> nn.Module:
    return _layer("forward", _leaves(folder))


PAYLOADS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "system": (lambda f: Call(os.system, _touch(f)), f"{os.system.__module__}.system"),
    "exec": (lambda f: Call(exec, _open(f)), "builtins.exec"),
    "eval": (lambda f: [{"a": (Call(eval, _open(f)),)}], "builtins.eval"),
    "import and getattr": (_imported_by_name, "builtins.__import__, builtins.getattr"),
    "attrgetter": (_attribute_getter, "operator.attrgetter"),
    "partial": (
        lambda f: Call(functools.partial(os.mkdir, str(f / "marker"))),
        f"{os.mkdir.__module__}.mkdir",
    ),
    "torch.hub": (_hub, "torch.hub.load"),
    "download as a weight": (_downloaded, "torchvision.datasets.utils.download_url"),
    "torch.load": (_load_again, "torch.serialization.load"),
    "storage": (
        lambda f: Call(torch.storage._load_from_bytes, _inner(f)),
        "torch.storage._load_from_bytes",
    ),
    "fx graph": (_graph, "torch.fx.graph_module.reduce_graph_module"),
    "tensor subclass": (_subclass, f"{os.mkdir.__module__}.mkdir"),
    "parameter with a note": (_noted, f"{os.mkdir.__module__}.mkdir"),
    "object array": (
        lambda f: np.array([Call(os.mkdir, str(f / "marker"))], dtype=object),
        "multiarray._reconstruct",
    ),
    "dict of its own": (_sly_dict, f"{__name__}.SlyDict"),
    "module of its own": (_sly_module, f"{__name__}.SlyModule"),
    "reconstructor": (
        lambda f: Call(copyreg._reconstructor, SlyDict, dict, Call(os.system, _touch(f))),
        "copyreg._reconstructor",
    ),
    "forward hook": (_hook("_forward_hooks"), f"{__name__}.leave"),
    "forward pre-hook": (_hook("_forward_pre_hooks"), f"{__name__}.leave"),
    "load_state_dict hook": (_hook("_load_state_dict_pre_hooks"), f"{__name__}.leave"),
    "state_dict hook": (_hook("_state_dict_hooks"), f"{__name__}.leave"),
    "forward replaced": (_forward, f"{__name__}.leave"),
}
"""What would run, and the name by which it is refused."""


def _saved(payload: str, zipped: bool) -> Maker:
    def make(folder: Path) -> Path:
        path = folder / "model.pth"
        content = PAYLOADS[payload][0](folder)
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        return path

    return make


# Pickles by hand ---------------------------------------------------------------------------


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def _global(name: str) -> bytes:
    module, _, attribute = name.partition(":")
    return f"c{module}\n{attribute}\n".encode()


def _called(name: str, *arguments: str, protocol: int = 2) -> bytes:
    """The pickle of `name(*arguments)`, for a name such as `os:system`."""
    values = b"".join(_text(argument) for argument in arguments)
    return b"\x80" + bytes([protocol]) + _global(name) + b"(" + values + b"tR."


def _zip(folder: Path, members: dict[str, bytes], name: str = "model.pth") -> Path:
    with zipfile.ZipFile(folder / name, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return folder / name


def _around(pickled: bytes, **more: bytes) -> Maker:
    """The zip that torch.save would make around a pickle."""
    return lambda folder: _zip(folder, {"a/data.pkl": pickled, "a/version": b"3\n", **more})


def _bytes(data: bytes, name: str = "model.pth") -> Maker:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def _stack_global(folder: Path) -> Path:
    """STACK_GLOBAL, whose names come from the memo in the wrong order."""
    names = _text("system") + b"\x94" + _text("posix") + b"\x940" + b"0h\x01h\x00\x93"
    return _bytes(b"\x80\x04" + names + _text(_touch(folder)) + b"\x85R.")(folder)


def _instance(folder: Path) -> Path:
    """INST, an opcode of protocol 0, which names a class beside GLOBAL."""
    return _bytes(b"\x80\x02(" + _text(_touch(folder)) + b"iposix\nsystem\n.")(folder)


def _two_pickles(folder: Path) -> Path:
    """Two members of the same name, of which zipfile lists one and torch may take the other."""
    path = folder / "model.pth"
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", _called("posix:system", _touch(folder)))
        archive.writestr("a/data.pkl", b"\x80\x02}.")
        archive.writestr("a/version", b"3\n")
    return path


def _zip_behind_a_pickle(folder: Path) -> Path:
    """A harmless zip at the end of a hostile pickle."""
    path = _around(b"\x80\x02}.")(folder)
    path.write_bytes(_called("posix:system", _touch(folder)) + path.read_bytes())
    return path


def _tar(first: str) -> Maker:
    def make(folder: Path) -> Path:
        data = _called("posix:system", _touch(folder))
        with tarfile.open(
            folder / "model.pth", "w", format=tarfile.GNU_FORMAT, encoding="latin-1"
        ) as archive:
            for name in (first, "storages", "tensors", "pickle"):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return folder / "model.pth"

    return make


def _trap(name: str) -> Maker:
    """A module that leaves the marker when it is imported."""

    def make(folder: Path) -> Path:
        (folder / "user_trap.py").write_text(f"{_open(folder)}\nclass Net:\n    pass\n")
        return _around(b"\x80\x02" + _global(name) + b".")(folder)

    return make


def _one_by_hand(protocol: int, name: str) -> Maker:
    def make(folder: Path) -> Path:
        return _around(_called(name, _touch(folder), protocol=protocol))(folder)

    return make


HOSTILE: dict[str, tuple[Maker, str]] = {
    **{f"{name}, zip": (_saved(name, True), words) for name, (_, words) in PAYLOADS.items()},
    **{f"{name}, legacy": (_saved(name, False), words) for name, (_, words) in PAYLOADS.items()},
    "name from the memo": (_stack_global, "which could run any code"),
    "INST": (_instance, "Unsupported operand"),
    "two pickles in a zip": (_two_pickles, "holds two records of one name"),
    "zip behind a pickle": (_zip_behind_a_pickle, "posix.system"),
    "tar": (_tar("sys"), "it is a tar archive"),
    "tar that begins like a pickle": (_tar("\x80\x02]."), "it is a tar archive"),
    "import on sight": (_trap("user_trap:Net"), "user_trap.Net"),
    "dotted through torchvision": (
        _one_by_hand(4, "torchvision.datasets.utils:os.system"),
        "datasets.utils.os.system",
    ),
    "dotted through torch.nn": (
        _one_by_hand(4, "torch.nn.modules.module:torch.os.system"),
        "modules.module.torch.os.system",
    ),
}
"""Each would leave the marker where it is loaded without care."""

NAMED = [
    "torch.utils.model_zoo:load_url",
    "torch.jit._serialization:load",
    "torch.jit._script:RecursiveScriptModule",
    "torch.package.package_importer:PackageImporter",
    "torch.distributed.rpc.api:rpc_sync",
    "torch.fx.graph_module:GraphModule",
    "torchvision.models.feature_extraction:DualGraphModule",
    "torchvision.models._api:get_model",
    "torchvision.models.resnet:resnet18",
    "torch._utils:_import_dotted_name",
    "torch.nn.functional:boolean_dispatch",
    "torch.nn.antigravity:Linear",
    "torchvision.antigravity:fly",
    "antigravity:fly",
    "this:s",
    "webbrowser:open",
    "torch.nn..modules:Linear",
    "torch.nn.modules/../../../evil:Net",
    "torch.nn.\x1b[31m:Linear",
    "torch.nn.\u2028error.x:Linear",
]
"""Names that a file could call, none of which may be imported or called."""


# Files that are no checkpoints, or broken ones ---------------------------------------------


def _picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, kind)
    return file.getvalue()


def _torch(content: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def _content(make: Callable[[], object], **options: Any) -> Maker:
    return lambda folder: _bytes(_torch(make(), **options))(folder)


WEIGHTS = {"weight": torch.arange(16.0)}
WHOLE, OLD = _torch(WEIGHTS), _torch(WEIGHTS, _use_new_zipfile_serialization=False)


def _rezipped(change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> Maker:
    """The members of a good file, changed and zipped again with right checksums."""

    def make(folder: Path) -> Path:
        with zipfile.ZipFile(io.BytesIO(WHOLE)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        return _zip(folder, change(members))

    return make


def _without(ending: str) -> Maker:
    return _rezipped(lambda members: {n: d for n, d in members.items() if not n.endswith(ending)})


def _with(ending: str, data: bytes) -> Maker:
    return _rezipped(lambda m: {n: data if n.endswith(ending) else d for n, d in m.items()})


def _lying(old: bytes, new: bytes, last: bool = False) -> Maker:
    """A tensor that is not as large as the file says."""

    def change(members: dict[str, bytes]) -> dict[str, bytes]:
        name = next(name for name in members if name.endswith("data.pkl"))
        head, found, tail = members[name].rpartition(old) if last else members[name].partition(old)
        assert found == old
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
    path = _bytes(WHOLE)(folder)
    path.chmod(0)
    return path


def _safetensors(header: object, data: bytes = bytes(64), length: int | None = None) -> Maker:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return _bytes(size.to_bytes(8, "little") + text + data, "model.safetensors")


def _tensor(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> object:
    return {"dtype": dtype, "shape": [16] if shape is None else shape, "data_offsets": [begin, end]}


def _shards(index: object, **others: bytes) -> Maker:
    def make(folder: Path) -> Path:
        for name, data in others.items():
            (folder / name).write_bytes(data)
        text = index if isinstance(index, bytes) else json.dumps(index).encode()
        return _bytes(text, "model.index.json")(folder)

    return make


def _shard(name: object, **others: bytes) -> Maker:
    return _shards({"weight_map": {"weight": name}}, **others)


def _itself() -> object:
    content: dict[str, Any] = {"epoch": 3}
    content["model"] = content["state_dict"] = content
    return content


def _mesh() -> object:
    """400 ways out of each dict, each back to it: 400 to the power of the depth."""
    inner: dict[str, Any] = {}
    inner.update({str(number): inner for number in range(400)})
    return {"state_dict": inner}


def _with_state(**state: object) -> Callable[[], nn.Module]:
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
    weights = {name: torch.zeros(()).expand(t.shape) for name, t in _small().items()}
    for name in ("classifier.1.weight", "classifier.1.bias"):
        weights[name] = torch.zeros(()).expand(1_000_000_000, *weights[name].shape[1:])
    return weights


def _small() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return dict(models.get_model(SMALL, weights=None).state_dict())


PICKLE = "cannot be loaded: its pickle is broken, or not as torch.save writes it"
HEADER = "cannot be loaded: Error while deserializing header: "
UNKNOWN = "is no checkpoint: it is no format that featviz knows"
NOTHING = "holds no weights: nothing"
NO_INDEX = "is no index of shards"

BROKEN: dict[str, tuple[Maker, str]] = {
    "empty": (_bytes(b""), "is no checkpoint: it is empty"),
    "one byte": (_bytes(b"\x80"), UNKNOWN),
    "PNG": (_bytes(_picture("png")), "it is a PNG image"),
    "JPEG": (_bytes(_picture("jpeg")), "it is a JPEG image"),
    "GIF": (_bytes(_picture("gif")), "it is a GIF image"),
    "HTML": (_bytes(b"<!DOCTYPE html><html>404</html>"), "it is a web page"),
    "JSON": (_bytes(b'{"error": "not found"}'), "it is a JSON file"),
    "text": (_bytes(b"just some words"), "it is a text file"),
    "LFS pointer": (
        _bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "it is a Git LFS pointer, not the file itself",
    ),
    "ONNX": (_bytes(b"\x08\x07\x12\x07pytorch"), "it is an ONNX model"),
    "HDF5": (_bytes(b"\x89HDF\r\n\x1a\n" + bytes(40)), "it is an HDF5 file"),
    "gzip": (_bytes(gzip.compress(WHOLE)), "it is a gzip archive; unpack it first"),
    "zeros": (_bytes(bytes(4096)), UNKNOWN),
    "zip cut in the middle": (
        _bytes(WHOLE[: len(WHOLE) // 2]),
        "it is a zip archive that is truncated or damaged",
    ),
    "zip cut at the end": (_bytes(WHOLE[:-10]), "it is a zip archive that is truncated or damaged"),
    "zip without its beginning": (_bytes(WHOLE[30:]), UNKNOWN),
    "zip of something else": (
        lambda f: _zip(f, {"readme.txt": b"hello"}),
        "it is a zip archive that is no checkpoint",
    ),
    "zip without data.pkl": (_without("data.pkl"), "it is a zip archive that is no checkpoint"),
    "zip without a tensor's data": (_without("data/0"), "lacks its record 'data/0'"),
    "zip with half of a tensor": (
        _with("data/0", bytes(32)),
        "holds 32 bytes of a tensor's data, expected 64",
    ),
    "zip of a later version": (
        _bytes(WHOLE.replace(b"PK\x01\x02\0\0\0\0", b"PK\x01\x02\0\0\xff\0")),
        "it is a zip archive that is truncated or damaged",
    ),
    "zip bomb": (_bomb, "it is a zip archive that would unpack to 40,000,006 bytes"),
    "zip that climbs out": (_around(b"\x80\x02}.", **{"a/../../../marker": b"x"}), NOTHING),
    "zip rooted above": (
        lambda f: _zip(f, {"../../data.pkl": b"\x80\x02}.", "../marker": b""}),
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
    "legacy cut in the middle": (_bytes(OLD[: len(OLD) // 2]), PICKLE),
    "legacy cut at the end": (_bytes(OLD[:-8]), "ends 8 bytes too early"),
    "legacy with a huge string": (_bytes(b"\x80\x04\x8e" + (2**62).to_bytes(8, "little")), PICKLE),
    "pickle.dump of weights": (
        _bytes(pickle.dumps(WEIGHTS)),
        "needs torch.storage._load_from_bytes, which could run any code",
    ),
    "pickle.dump of protocol 0": (_bytes(pickle.dumps(WEIGHTS, protocol=0)), UNKNOWN),
    "pickle.dump of numbers": (_bytes(pickle.dumps({"a": 1})), PICKLE),
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
        _shard("a.pth", **{"a.pth": _torch([1, 2])}),
        "names a.pth, which holds no dict of tensors",
    ),
    "shard that is text": (
        _shard("a.pth", **{"a.pth": b"words"}),
        "a.pth is no checkpoint: it is a text file",
    ),
    "shards in a list": (_shards([1]), NO_INDEX),
    "shards nowhere": (_shards({"metadata": {}}), NO_INDEX),
    "shards of nothing": (_shards({"weight_map": {}}), NOTHING),
    "shards without end": (_shards(b"[" * 100_000), NO_INDEX),
    "shards not in UTF-8": (_shards(b"\xff\xfe{}"), NO_INDEX),
    "list": (_content(lambda: [1, 2]), "holds no weights: a list"),
    "number": (_content(lambda: 5), "holds no weights: a int"),
    "string": (_content(lambda: "weights"), "holds no weights: a str"),
    "None": (_content(lambda: None), "holds no weights: a NoneType"),
    "tensor": (_content(lambda: torch.zeros(3)), "holds no weights: a Tensor"),
    "empty dict": (_content(dict), NOTHING),
    "dict of numbers": (
        _content(lambda: {"epoch": 3, "loss": 0.5}),
        "holds no weights: keys 'epoch', 'loss'",
    ),
    "dict with long keys": (_content(lambda: {"k" * 100_000: 1}), "holds no weights: keys 'kkk"),
    "dict with keys of several lines": (
        _content(lambda: {torch.zeros(4, 4): 1}),
        "holds no weights: keys a Tensor",
    ),
    "dict with a module for a key": (
        _content(lambda: {nn.Sequential(nn.ReLU()): 1}),
        "holds no weights: keys a Sequential",
    ),
    "dict within itself": (
        _content(_itself),
        "holds no weights: keys 'epoch', 'model', 'state_dict'",
    ),
    "dict within itself 400 times": (_content(_mesh), "holds no weights: keys 'state_dict'"),
    "module without its fields": (_content(_bare), "holds a broken Linear: it lacks parts"),
    "module without a field of its class": (
        _bytes(_torch(nn.LSTM(3, 4)).replace(b"_flat_weights_names", b"_flat_weights_other")),
        "holds a broken LSTM: it lacks parts",
    ),
    "module without a mode": (
        _content(lambda: _stripped(nn.ReLU(), "training")),
        "holds a broken ReLU: it lacks parts",
    ),
    "module with numbers for parameters": (
        _content(_with_state(_parameters=5)),
        "holds a broken Conv2d: it lacks parts",
    ),
    "module with numbers for modules": (
        _content(_with_state(_modules=5)),
        "holds a broken Conv2d: it lacks parts",
    ),
    "module with numbers for hooks": (
        _content(_with_state(_forward_hooks=5)),
        "holds a broken Conv2d: it lacks parts",
    ),
    "module with a number for a module": (
        _content(_with_state(_modules={"a": 5})),
        "holds a broken Conv2d: it lacks parts",
    ),
    "module with a number for a parameter": (
        _content(_with_state(_parameters={"a": 5})),
        "holds a broken Conv2d: it lacks parts",
    ),
    "module within itself": (_content(_within_itself), "holds a broken Sequential: it lacks parts"),
    "broken module in a dict": (
        _content(lambda: {"model": _bare()}),
        "holds a broken Linear: it lacks parts",
    ),
    "broken module within itself in a dict": (
        _content(lambda: {"model": _within_itself()}),
        "holds a broken Sequential: it lacks parts",
    ),
    "weights of no data": (
        _content(_small),
        "holds a tensor of shape [64, 3, 3, 3] without its data",
    ),
    "head of a billion classes": (
        _content(_expanded),
        "holds a tensor of shape [1000000000, 512, 1, 1] without its data",
    ),
}
"""Each ends in one line, with these words in it."""


# Files that load ---------------------------------------------------------------------------


def _weights(**special: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(t.shape, 0.01) for name, t in _small().items()} | {
        name: torch.full(_small()[name].shape, value) for name, value in special.items()
    }


def _whole_resnet() -> nn.Module:
    with torch.device("meta"):
        module = models.resnet18()
    module.to_empty(device="cpu")
    for tensor in module.state_dict().values():
        tensor.fill_(1)
    return module


def _with_partial() -> nn.Module:
    return _with_state(norm=functools.partial(nn.LayerNorm, eps=1e-6))()


def _saved_safely(folder: Path) -> Path:
    save_file(_weights(), folder / "model.safetensors")
    return folder / "model.safetensors"


def _sharded(folder: Path) -> Path:
    weights = _weights()
    for number, names in enumerate([[*weights][:20], [*weights][20:]]):
        torch.save({name: weights[name] for name in names}, folder / f"{number}.bin")
    index = {name: f"{n > 19:d}.bin" for n, name in enumerate(weights)}
    return _shards({"weight_map": index})(folder)


GOOD: dict[str, tuple[Maker, str]] = {
    "state dict": (_content(_weights), "it is squeezenet1_1 with 1000 classes"),
    "legacy state dict": (
        _content(_weights, _use_new_zipfile_serialization=False),
        "it is squeezenet1_1",
    ),
    "protocol 4": (_content(_weights, pickle_protocol=4), "it is squeezenet1_1"),
    "nested state dict": (_content(lambda: {"epoch": 1, "model": _weights()}), "took 'model'"),
    "safetensors": (_saved_safely, "it is squeezenet1_1"),
    "shards": (_sharded, "it is squeezenet1_1"),
    "NaN": (_content(lambda: _weights(**{"features.0.bias": float("nan")})), "it is squeezenet1_1"),
    "whole resnet18": (_content(_whole_resnet), "it is resnet18"),
    "module with a partial": (_content(_with_partial), "nearest: nothing"),
}
"""What the same commands must go on to read, and what `identify` says of it."""


# The tests ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """A hang is a failure."""

    def late(*args: object) -> None:
        pytest.fail(f"no answer within {LONGEST} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody reaches for the network, not even in vain."""
    tried: list[object] = []

    def refuse(*args: object, **kwargs: object) -> None:
        tried.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert tried == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the file is, deep enough to climb out of; modules are found there."""
    inner = tmp_path / "one" / "two"
    inner.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(inner), *sys.path])
    yield inner
    sys.modules.pop("user_trap", None)


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    stats = {path: path.lstat() for path in folder.rglob("*")}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def _one_clear_line(outcome: Outcome, path: Path, words: str) -> None:
    """Exit code 1 (2 where there is no such file), an error line with its file, maybe a hint."""
    lines = outcome.err.splitlines()
    assert outcome.code == 1 or (outcome.code == 2 and not path.is_file())
    assert outcome.out == ""
    assert lines[0].startswith("error: ")
    assert [line.split()[0] for line in lines[1:]] in ([], ["hint:"])
    assert all(line.isprintable() and len(line) < 600 for line in lines)
    assert path.name in lines[0] or path.name.endswith(".index.json")
    assert words in lines[0]
    assert "weights_only" not in outcome.err


def _refused(featviz: Callable[..., Outcome], path: Path, words: str, image: Path) -> None:
    """`run` and `identify` make nothing of the file, and leave no trace of it."""
    root = image.parent
    before, modules = _listing(root), set(sys.modules)
    for command in (["run", path, image, "--out", root / "out"], ["identify", path]):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            _one_clear_line(featviz(*command), path, words)
        assert [str(warning.message) for warning in warned] == []
        assert _listing(root) == before
    assert not {"user_trap", "antigravity", "this"} & (set(sys.modules) - modules)


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_in_a_hostile_file_runs(
    name: str, folder: Path, picture: Path, featviz: Callable[..., Outcome]
) -> None:
    """No disguise of a call gets it executed; the line names what was refused."""
    make, words = HOSTILE[name]
    path = make(folder)
    _refused(featviz, path, words, picture)
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_the_hostile_files_are_armed(name: str, folder: Path) -> None:
    """Read and used without care, each of them leaves its marker: the test above can fail."""
    path = HOSTILE[name][0](folder)
    assert not (folder / "marker").exists()
    with contextlib.suppress(Exception):
        found = torch.load(path, weights_only=False)
        with contextlib.suppress(Exception):
            found.load_state_dict(found.state_dict())
        found(torch.zeros(1, 3, 4, 4))
    assert (folder / "marker").exists()


@pytest.mark.parametrize("name", NAMED)
def test_no_function_is_lent_to_a_file(
    name: str, folder: Path, picture: Path, featviz: Callable[..., Outcome]
) -> None:
    """Names in and near the packages whose classes are trusted are refused, and not imported."""
    path = _around(_called(name))(folder)
    _refused(featviz, path, "which could run any code; nothing was executed", picture)
    with pytest.raises(LoadError) as caught:  # before the console takes escapes away
        checkpoint.read(path)
    assert f"{caught.value.message}{caught.value.hint}".isprintable()


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_ends_in_one_clear_line(
    name: str, folder: Path, picture: Path, featviz: Callable[..., Outcome]
) -> None:
    """It says what the file looks like or what is wrong with it; no hang, no traceback."""
    make, words = BROKEN[name]
    _refused(featviz, make(folder), words, picture)


@pytest.mark.parametrize("name", GOOD)
def test_good_files_still_load(
    name: str, folder: Path, picture: Path, featviz: Callable[..., Outcome]
) -> None:
    """After a hostile file was refused, in the same process, good ones are drawn and known."""
    (folder / "evil").mkdir()
    _refused(featviz, HOSTILE["partial, zip"][0](folder / "evil"), "mkdir", picture)
    make, words = GOOD[name]
    path, out = make(folder), folder / "out"
    done = featviz("run", path, picture, "--layers", "Conv2d#0", "--out", out)
    assert done.code == 0 and "error: " not in done.err
    assert len([*out.rglob("output.png")]) == 1
    assert ("NaN or infinite" in done.err) == (name == "NaN")
    assert words in featviz("identify", path).out


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(BROKEN["pickle.dump of numbers"][0], id="protocol 4"),
        pytest.param(HOSTILE["exec, zip"][0], id="exec"),
        pytest.param(BROKEN["module within itself"][0], id="recursion"),
    ],
)
def test_a_process_of_its_own_says_no_more(
    path: Maker, folder: Path, picture: Path, shell: Callable[..., Outcome]
) -> None:
    """Nothing but the two lines is on stderr, where the warnings of libraries would show."""
    file = path(folder)
    found = shell("run", file, picture, "--out", folder / "out", cwd=folder)
    _one_clear_line(found, file, "model.pth")
    assert not (folder / "out").exists() and not (folder / "marker").exists()


def test_many_names_are_counted(folder: Path) -> None:
    """A file that names a thousand functions does not fill the screen."""
    path = _around(b"\x80\x02" + b"".join(_global(f"m{n:04}:f") for n in range(1000)) + b".")(
        folder
    )
    with pytest.raises(LoadError, match=r"needs m0000\.f, .*, m0019\.f and 980 more, which") as e:
        checkpoint.read(path)
    assert str(e.value.hint).count("--allow-global") == 20


def test_a_hint_is_safe_to_paste(folder: Path) -> None:
    """A name is one word to the shell, whatever is in it."""
    path = _around(_called("torch.nn;touch marker:$(touch marker)"))(folder)
    with pytest.raises(LoadError) as caught:
        checkpoint.read(path)
    options = str(caught.value.hint).removeprefix("if you trust the file: ").split(" (or")[0]
    assert shlex.split(options) == [
        "--allow-global",
        "torch.nn;touch marker.$(touch marker)",
    ]
