"""Layers of a model: its modules, and the functions that they call.

A module that stands in several places (one activation object of a whole network, say) is a layer
in each place from which it is called. A place is the module that calls it, and for one inside a
plain nn.Sequential its position there, since the order of those calls is known. Several names in
one place are one layer, as nobody can tell which of them the caller's code used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from featviz.hooks.naming import class_names
from featviz.records import Layer

_FUNCTION = "fn:"

_CALL = re.compile(r"@\d+")
"""What torch.export.unflatten puts behind the name of a module at its second and later calls."""


@dataclass(frozen=True)
class Places:
    """The layers of a model, and how they belong to its modules."""

    layers: Sequence[Layer]
    """In the order of their first names in `named_modules(remove_duplicate=False)`."""
    callers: Sequence[int]
    """For each layer the index of the layer that calls it; 0 for the model itself."""
    of_module: Mapping[int, Sequence[Layer]]
    """The layers of each module, by its id."""


_Modules = tuple[tuple[str, int, type], ...]
"""The names of a model's modules, with the id and class of each."""

_known: WeakKeyDictionary[nn.Module, tuple[_Modules, Places]] = WeakKeyDictionary()


def read_places(model: nn.Module) -> Places:
    """Find every place of every module of a model; once, until it has other modules."""
    named = modules_by_name(model)
    modules = tuple((name, id(module), type(module)) for name, module in named.items())
    before = _known.get(model)
    if before is None or before[0] != modules:
        before = _known[model] = modules, _places(named)
    return before[1]


def _places(named: Mapping[str, nn.Module]) -> Places:
    names: list[dict[str, None]] = []
    callers: list[int] = []
    modules: list[nn.Module] = []
    known: dict[tuple[int, int, str], int] = {}
    index_of: dict[str, int] = {}
    for name, module in named.items():
        caller = _caller(name, index_of, modules)
        key = (id(module), caller, _position(name, modules[caller] if name else None))
        if key not in known:
            known[key] = len(names)
            names.append({})
            callers.append(caller)
            modules.append(module)
        index_of[name] = known[key]
        names[known[key]].update(dict.fromkeys((name, _CALL.sub("", name))))
    layers = [_layer(i, list(names[i]), module) for i, module in enumerate(modules)]
    of_module: dict[int, list[Layer]] = {}
    for layer, module in zip(layers, modules, strict=True):
        of_module.setdefault(id(module), []).append(layer)
    return Places(layers, callers, of_module)


def list_layers(model: nn.Module) -> list[Layer]:
    """Every module in every place from which it is called, in `named_modules()` order."""
    return list(read_places(model).layers)


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by qualified name; a shared one under all its names."""
    return dict(model.named_modules(remove_duplicate=False))


def _layer(index: int, names: Sequence[str], module: nn.Module) -> Layer:
    classes = class_names(module)
    return Layer(index, names[0], classes[0], classes, tuple(names[1:]))


def _caller(name: str, index_of: Mapping[str, int], modules: Sequence[nn.Module]) -> int:
    """The index of the innermost layer around a name that can be called; lists cannot."""
    while name:
        name = name.rpartition(".")[0]
        if not isinstance(modules[index_of[name]], (nn.ModuleList, nn.ModuleDict)):
            return index_of[name]
    return 0


def _position(name: str, caller: nn.Module | None) -> str:
    """The last part of a name where the caller is a plain nn.Sequential; else empty."""
    in_order = getattr(type(caller), "forward", None) is nn.Sequential.forward
    return name.rpartition(".")[2] if in_order else ""


def function_layer(module: Layer, function: str) -> Layer:
    """A function that a module calls, as a layer: `layer1.0/fn:relu`."""
    kind = _FUNCTION + function
    name = f"{module.name}/{kind}" if module.name else kind
    return Layer(module.index, name, kind, (kind,), module.aliases)


def function_in(name: str) -> str | None:
    """`relu` of the layer name `layer1.0/fn:relu`; None for the name of a module."""
    head, mark, function = name.rpartition(_FUNCTION)
    return function if mark and (not head or head.endswith("/")) else None


def like_module(function: str, class_name: str) -> bool:
    """Whether a function does what a module class does: `max_pool2d` and `MaxPool2d`."""
    return function.replace("_", "").lower() == class_name.replace("_", "").lower()
