"""Files that run code where a model file is loaded without care, for the tests of models."""

from __future__ import annotations

import collections
import copyreg
import functools
import importlib
import io
import operator
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.datasets.utils
from torch import nn

Maker = Callable[[Path], Path]
"""Writes a file into a folder and returns its path; a payload would leave `folder / "marker"`."""


class Call:
    """Pickles as a call, whose result may be called in turn."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call

    def __call__(self) -> None:
        """Only so that pickle takes it for a function."""


def saved_bytes(content: object, **options: Any) -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


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


def _mkdir(folder: Path) -> Call:
    return Call(os.mkdir, str(folder / "marker"))


def _partial(folder: Path) -> Call:
    return Call(functools.partial(os.mkdir, str(folder / "marker")))


def _evaluated(folder: Path) -> Call:
    return Call(eval, _open(folder))


def _extracted(folder: Path) -> Call:
    with zipfile.ZipFile(folder / "source.zip", "w") as archive:
        archive.writestr("marker", "x")
    function = torchvision.datasets.utils.extract_archive
    return Call(function, str(folder / "source.zip"), str(folder))


CALLS: list[tuple[Callable[[Path], Call], str]] = [
    (_mkdir, f"{os.mkdir.__module__}.mkdir"),
    (_evaluated, "builtins.eval"),
    (_extracted, "torchvision.datasets.utils.extract_archive"),
    (_hub, "torch.hub.load"),
    (_partial, f"{os.mkdir.__module__}.mkdir"),
]
"""Objects whose pickle calls a function, and the name by which it is refused."""


def _downloaded(folder: Path) -> dict[str, Any]:
    (folder / "source").write_text("x")
    url = (folder / "source").as_uri()
    fetch = Call(torchvision.datasets.utils.download_url, url, str(folder), "marker")
    return {"conv1.weight": fetch, "conv1.bias": torch.zeros(1)}


def _inner(folder: Path) -> bytes:
    return saved_bytes(Call(os.mkdir, str(folder / "marker")))


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
    "partial": (_partial, f"{os.mkdir.__module__}.mkdir"),
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


def text_opcode(value: str) -> bytes:
    """BINUNICODE: a text."""
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def global_opcode(name: str) -> bytes:
    """GLOBAL: a name such as `os:system`."""
    module, _, attribute = name.partition(":")
    return f"c{module}\n{attribute}\n".encode()


def called(name: str, *arguments: str, protocol: int = 2) -> bytes:
    """The pickle of `name(*arguments)`, for a name such as `os:system`."""
    values = b"".join(text_opcode(argument) for argument in arguments)
    return b"\x80" + bytes([protocol]) + global_opcode(name) + b"(" + values + b"tR."


def zip_file(folder: Path, members: dict[str, bytes], name: str = "model.pth") -> Path:
    """A zip file of these members."""
    with zipfile.ZipFile(folder / name, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return folder / name


def around(pickled: bytes, **more: bytes) -> Maker:
    """The zip that torch.save would make around a pickle."""
    return lambda folder: zip_file(folder, {"a/data.pkl": pickled, "a/version": b"3\n", **more})


def written(data: bytes, name: str = "model.pth") -> Maker:
    """A file of these bytes."""

    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def _stack_global(folder: Path) -> Path:
    """STACK_GLOBAL, whose names come from the memo in the wrong order."""
    names = text_opcode("system") + b"\x94" + text_opcode("posix") + b"\x940" + b"0h\x01h\x00\x93"
    return written(b"\x80\x04" + names + text_opcode(_touch(folder)) + b"\x85R.")(folder)


def _instance(folder: Path) -> Path:
    """INST, an opcode of protocol 0, which names a class beside GLOBAL."""
    return written(b"\x80\x02(" + text_opcode(_touch(folder)) + b"iposix\nsystem\n.")(folder)


def _two_pickles(folder: Path) -> Path:
    """Two members of the same name, of which zipfile lists one and torch may take the other."""
    path = folder / "model.pth"
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", called("posix:system", _touch(folder)))
        archive.writestr("a/data.pkl", b"\x80\x02}.")
        archive.writestr("a/version", b"3\n")
    return path


def _zip_behind_a_pickle(folder: Path) -> Path:
    """A harmless zip at the end of a hostile pickle."""
    path = around(b"\x80\x02}.")(folder)
    path.write_bytes(called("posix:system", _touch(folder)) + path.read_bytes())
    return path


def _tar(first: str) -> Maker:
    def make(folder: Path) -> Path:
        data = called("posix:system", _touch(folder))
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
        return around(b"\x80\x02" + global_opcode(name) + b".")(folder)

    return make


def _one_by_hand(protocol: int, name: str) -> Maker:
    def make(folder: Path) -> Path:
        return around(called(name, _touch(folder), protocol=protocol))(folder)

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
