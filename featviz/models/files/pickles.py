"""What the names in a pickled model stand for, and which of them may be used at all.

Nothing that a file names is called. Classes of modules are those of nn.Module in torch,
torchvision and Ultralytics, made empty and filled with their state; a few functions and classes,
listed here one by one, may be kept as values; what `rebuilding` has makes tensors and containers,
and what `kept_values` has the rest of a training script's state. Of anything else exactly as much
is used as the user allows.
"""

from __future__ import annotations

import _compat_pickle  # the standard library's own tables
import importlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featviz.errors import LoadError, UsageError
from featviz.models.files.kept_values import KEPT
from featviz.models.files.rebuilding import MAKERS, TYPES
from featviz.models.importing import SCRIPT, from_script, importable, tamed, where_looked
from featviz.models.requirements import require_torchvision
from featviz.text import listed, quoted

_YOLO = ("ultralytics.nn.modules.", "ultralytics.nn.tasks.")
_PACKAGES = ("torch.nn.", "torch.ao.nn.", "torchvision.", *_YOLO)
_MODULES = (
    "torch.optim.swa_utils.AveragedModel",
    "torch.ao.quantization.stubs.DeQuantStub",
    "torch.ao.quantization.stubs.QuantStub",
    "torch.ao.quantization.stubs.QuantWrapper",
)
"""Classes of modules outside the packages above."""

_SETTERS = ("module", "activation", "conv", "pooling", "rnn", "transformer", "upsampling")
"""Files of torch.nn.modules whose `__setstate__` was read: they only fill in what old files lack.
Those of recurrent modules count up to `num_layers`, which `module_state` bounds first."""

_FILLS_IN = ("ultralytics.nn.modules.block",)
"""Files elsewhere of which the same holds; `module_state` bounds what is multiplied there."""

_HELPERS = (
    "torchvision.models.detection._utils.BalancedPositiveNegativeSampler",
    "torchvision.models.detection._utils.BoxCoder",
    "torchvision.models.detection._utils.BoxLinearCoder",
    "torchvision.models.detection._utils.Matcher",
    "torchvision.models.detection._utils.SSDMatcher",
    "torchvision.ops.poolers.LevelMapper",
    "torchvision.transforms.transforms.Compose",
    "torchvision.transforms.transforms.ToTensor",
)
"""Plain classes: their instances hold numbers and modules, and are made empty and filled as modules
are."""

_VALUES = (
    "torch.Tensor",
    "torch._C._nn.gelu",
    "torch.nn.functional.gelu",
    "torch.nn.functional.relu",
    "torch.nn.functional.silu",
    "torchvision.models.optical_flow.raft._pass_through_h",
    "torchvision.ops.boxes.box_iou",
)
"""Functions and classes that models keep; kept here too, and never called while loading."""

_RENAMED = {
    "ultralytics.nn.modules.block.Silence": "torch.nn.modules.linear.Identity",
    "ultralytics.nn.tasks.YOLOv10DetectionModel": "ultralytics.nn.tasks.DetectionModel",
}
"""Names of older files, and what has taken the place of the class."""

_MOST_IMPORTS = 2000
"""Names that are looked up in the packages, which may be slow."""

_SHOWN = 20
"""Names that a message lists before it says how many more there are."""


_SCRIPT_OBJECT = "torch.ScriptObject"
"""Holds the packed weights of layers that torch.ao.quantization.quantize_dynamic has made."""

_ANY = re.compile(r".*", re.DOTALL)


class Unknown:
    """Stands for a name that may not be used, and for all that a file would make of it."""

    def __init__(self, name: str | None, parts: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.parts = parts
        """What the file would call, and with what."""


class Vocabulary:
    """The names that a file may use: those of this program, and those that the user allows."""

    def __init__(self, allowed: Mapping[str, Any], among: re.Pattern[str] = _ANY) -> None:
        """
        Args:
            allowed: what the user allows, by name.
            among: the names of this program that the file may use, where it may not use all.
        """
        self.allowed = allowed
        self._among = among
        self.unknown: set[str] = set()
        """Names met that may not be used."""
        self._met: dict[str, Any] = {}
        self._trusted = {id(value) for value in allowed.values()}
        self._made: list[Any] = []

    def find(self, module: str, name: str) -> Any:
        """What a name in a file stands for, an Unknown included."""
        full = _today(module, name)
        if full not in self._met:
            self._met[full] = self._look_up(full)
        return self._met[full]

    def trusts(self, value: Any) -> bool:
        """Whether the user allowed this very value, its class, or the call that made it."""
        return id(value) in self._trusted or id(type(value)) in self._trusted

    def refused(self, name: str, parts: tuple[Any, ...]) -> Unknown:
        """Note a name that may not be used in this way, and what stands for what it would make."""
        self.unknown.add(name)
        return Unknown(name, parts)

    def trust(self, value: Any) -> Any:
        """Remember what a call made that the user allows."""
        self._made.append(value)  # kept, so that nothing else gets its id
        self._trusted.add(id(value))
        return value

    def _look_up(self, name: str) -> Any:
        if name in self.allowed:
            return self.allowed[name]
        meaning = None
        if len(self._met) <= _MOST_IMPORTS and self._among.fullmatch(name):
            if name in _HELPERS or name in _VALUES:
                return _attribute(name)
            meaning = MAKERS.get(name) or KEPT.get(name) or TYPES.get(name) or _module_class(name)
        return self.refused(name, ()) if meaning is None else meaning


def is_module_class(value: Any) -> bool:
    """Whether a value is a class of modules, to be made empty."""
    return isinstance(value, type) and issubclass(value, nn.Module)


def is_helper(value: Any) -> bool:
    """Whether a value is one of torchvision's plain classes, to be made empty."""
    return isinstance(value, type) and f"{value.__module__}.{value.__qualname__}" in _HELPERS


def allowed(names: Sequence[str], path: Path) -> dict[str, Any]:
    """What the user allows by name, imported; the folder of the model file counts.

    Raises:
        UsageError: there is no such module, or nothing of that name in it.
    """
    return {name: _import(name, path) for name in names}


def refusal(path: Path, names: Iterable[str]) -> LoadError:
    """The error for names that may not be used, with the options that would allow them."""
    ordered = sorted(names)
    if any(_is_packed(name) for name in ordered):
        return LoadError(
            f"{path.name} is a statically quantised model saved whole, which torch cannot load",
            "save its state_dict(), or the float model that it was made from",
        )
    if _SCRIPT_OBJECT in ordered:
        return LoadError(
            f"{path.name} is a model that was quantised dynamically, or an LSTM's weights of one: "
            "they are packed in a script object, which could run any code; nothing was executed",
            "torch.save(model.state_dict(), FILE) and --arch with the float model draw its linear "
            "layers; if you trust the file, --trust",
            add=("--trust",),
        )
    if own := [quoted(name) for name in ordered if name.startswith("torchao.")]:
        return LoadError(
            f"{path.name} holds weights of torchao ({listed(own, 3)}), which only its own code "
            "unpacks; nothing was executed",
            "where torchao is installed, save them as floats: tensor.dequantize() of each",
        )
    if lacking := [quoted(name) for name in ordered if _lacks_package(name)]:
        return LoadError(
            f"{path.name} is a model of Ultralytics, and needs the package ultralytics for "
            f"{listed(lacking, 3)}",
            "pip install ultralytics, or a newer one (-U) if it is there",
        )
    shown = [quoted(name) for name in ordered]
    options = " ".join(f"--allow-global {shlex.quote(name)}" for name in shown[:_SHOWN])
    return LoadError(
        f"{path.name} needs {listed(shown, _SHOWN)}, which could run any code; "
        "nothing was executed",
        f"{options} lets it use these names alone; if you trust the file, --trust",
        add=("--trust",),
    )


def _import(name: str, path: Path) -> Any:
    try:
        with importable(path.parent):
            if name.startswith(f"{SCRIPT}."):
                return from_script(name.removeprefix(f"{SCRIPT}."), path.parent)
            return _attribute(name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        hint = "pkg.mod.Class"
        if isinstance(error, ModuleNotFoundError):
            hint = where_looked(str(error.name), path.parent)
        raise UsageError(f"--allow-global {name!r} cannot be found: {error}", hint) from error


def _attribute(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    if name.startswith("torchvision."):
        require_torchvision()
    with tamed() if name.startswith(_YOLO) else nullcontext():
        return getattr(importlib.import_module(module), attribute)


def _module_class(name: str) -> type[nn.Module] | None:
    """The nn.Module class of torch, torchvision or Ultralytics with this very name, else None."""
    if not name.startswith(_PACKAGES) and name not in _MODULES:
        return None
    try:
        kind = _attribute(name)
    except (ImportError, AttributeError):
        return None
    if not is_module_class(kind) or not _is_home(kind.__module__, name.rpartition(".")[0]):
        return None
    setter = kind.__setstate__.__module__
    of_torch = setter.rpartition(".")[0] == "torch.nn.modules" and setter.endswith(_SETTERS)
    read = of_torch or setter in _FILLS_IN
    read = read or kind.__setstate__ is nn.Module.__setstate__  # torch.compile puts its own there
    plain = kind.__new__ is object.__new__ and not issubclass(kind, torch.fx.GraphModule)
    return kind if read and plain and kind.__module__ != "torch.nn.cpp" else None


def _is_home(home: str, named: str) -> bool:
    """Whether a class that lives in a module is meant by the name in a file: in Ultralytics before
    8.0.100 all lived in one."""
    return home == named or (named == "ultralytics.nn.modules" and home.startswith(f"{named}."))


def _lacks_package(name: str) -> bool:
    """Whether a name is of a class that Ultralytics would have, and is not there."""
    if not name.startswith(_YOLO):
        return False
    try:
        _attribute(name)
    except (ImportError, AttributeError):
        return True
    return False


def _is_packed(name: str) -> bool:
    """Quantised convolutions, whose `__setstate__` sets attributes that torch never made."""
    return name.startswith("torch.ao.nn.") and ".quantized." in name and "Conv" in name


def _today(module: str, name: str) -> str:
    """Names of Python 2, which pickles of protocol 2 keep to, as the unpickler maps them."""
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    module = _compat_pickle.IMPORT_MAPPING.get(module, module)
    full = f"{'torch._tensor' if module == 'torch.tensor' else module}.{name}"
    return _RENAMED.get(full, full)
