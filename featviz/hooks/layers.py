"""Layers of a model: its modules, and the functions that they call.

A module may be used in several places, such as one activation object for a whole network.
It is one layer for each module that calls it, and in a plain nn.Sequential one for each
position. If it has several names in the same place, they belong to one layer. A program
that was exported from a model has the same names; its modules know the classes that they
stand for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from featviz.records import Layer

_FUNCTION = "fn:"
_CALL = re.compile(r"@\d+")
"""torch.export.unflatten adds this to the name of a module for its second and later
calls."""


class ModelLayers(NamedTuple):
    """The layers of a model and their callers."""

    layers: Sequence[Layer]
    """The layers, in the order of their first names in
    `named_modules(remove_duplicate=False)`."""
    callers: Sequence[int]
    """For each layer the index of the layer that calls it; 0 is the model itself."""
    of_module: Mapping[int, Sequence[Layer]]
    """The layers of each module, by the module's id."""


@dataclass
class _Entry:
    """A module and one of its callers: a layer whose names are still being collected."""

    module: nn.Module
    caller: int
    names: dict[str, None] = field(default_factory=dict)
    """The layer's names in their order; the values are not used."""


_cache: WeakKeyDictionary[nn.Module, tuple[object, ModelLayers]] = WeakKeyDictionary()
"""For each model, the modules that it had when it was read, and its layers."""


def read_table(model: nn.Module) -> ModelLayers:
    """Find all layers of a model. The result is cached until the model's modules change."""
    named = modules_by_name(model)
    # the cached table is only valid for these very modules
    identity = [(name, id(module), type(module)) for name, module in named.items()]
    cached = _cache.get(model)
    if cached is not None and cached[0] == identity:
        return cached[1]
    entries = _entries(named)
    layers = []
    of_module: dict[int, list[Layer]] = {}
    for index, entry in enumerate(entries):
        first, *aliases = entry.names
        classes = class_names(entry.module)
        layer = Layer(index, first, classes[0], classes, tuple(aliases))
        layers.append(layer)
        of_module.setdefault(id(entry.module), []).append(layer)
    table = ModelLayers(layers, [entry.caller for entry in entries], of_module)
    _cache[model] = identity, table
    return table


def _entries(modules: Mapping[str, nn.Module]) -> list[_Entry]:
    """Group the names of a model's modules to layers, by module and caller.

    Args:
        modules: The modules by all their names; each module comes after the module that
            contains it.
    """
    entries: list[_Entry] = []
    index_of_key: dict[tuple[int, int, str], int] = {}
    index_of_name: dict[str, int] = {}
    for name, module in modules.items():
        caller = _caller_of(name, index_of_name, entries)
        # in a Sequential, each position is another layer; elsewhere, several names of a
        # module in the same caller are aliases
        position = ""
        caller_class = type(entries[caller].module) if name else None
        if getattr(caller_class, "forward", None) is nn.Sequential.forward:
            position = name.rpartition(".")[2]
        index = index_of_key.setdefault((id(module), caller, position), len(entries))
        if index == len(entries):
            entries.append(_Entry(module, caller))
        index_of_name[name] = index
        entries[index].names.update(dict.fromkeys((name, _CALL.sub("", name))))
    return entries


def _caller_of(
    name: str, index_of_name: Mapping[str, int], entries: Sequence[_Entry]
) -> int:
    """The index of the layer that calls the module of a name: the innermost around it that
    is not a list or dict of modules, which cannot be called. 0, the model, if there is none.
    """
    while name:
        name = name.rpartition(".")[0]
        index = index_of_name[name]
        if not isinstance(entries[index].module, (nn.ModuleList, nn.ModuleDict)):
            return index
    return 0


def list_layers(model: nn.Module) -> list[Layer]:
    """The layers of a model that are modules, in the order of `named_modules()`. A module with
    several callers is several layers."""
    return list(read_table(model).layers)


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by qualified name; a shared module has all its names."""
    return dict(model.named_modules(remove_duplicate=False))


def function_layer(module: Layer, function: str) -> Layer:
    """The layer for a function that a module calls: `layer1.0/fn:relu`."""
    # with a slash, since `layer1.0.fn:relu` could be the name of a module
    type_name = _FUNCTION + function
    name = f"{module.name}/{type_name}" if module.name else type_name
    return Layer(module.index, name, type_name, (type_name,), module.aliases)


def function_in(name: str) -> str | None:
    """The function in the name of a layer: `relu` for `layer1.0/fn:relu`. None for the name
    of a module."""
    # a module may be called `fn:x`, but its name has no slash
    head, mark, function = name.rpartition(_FUNCTION)
    if not mark or (head and not head.endswith("/")):
        return None
    return function


def computed_by(model: nn.Module) -> str | None:
    """The library that computes a model, if it is not torch: `ONNX Runtime`. Then the layers
    call no functions and have no gradients, and outputs that hooks return are ignored."""
    return getattr(model, "computed_by", None)


def like_module(function: str, class_name: str) -> bool:
    """Whether a function does what a module class does: `max_pool2d` and `MaxPool2d`."""
    return function.replace("_", "").lower() == class_name.replace("_", "").lower()


EXPORTED = "torch.export.unflatten"
"""The Python module of the class of all modules in an exported program; each of them stands
for a module of another class."""

_OPERATORS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    "pow": "pow",
    "matmul": "matmul",
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pos": "positive",
}
"""By the names of operators without underscores (`__add__`), the functions that do the
same. `__radd__` and `__iadd__` are looked up as `add`."""

_ALIASES = {
    "absolute": "abs",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "multiply": "mul",
    "negative": "neg",
    "rsub": "sub",
    "subtract": "sub",
    "true_divide": "div",
}
"""torch's second names of functions."""


def class_names(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's class and of its base classes. For a module of an exported
    program these are the names of the class that it stands for; if that class is not
    imported, only its own name and `Module`."""
    original = _class_of(module)
    if isinstance(original, str):
        return (original.rpartition(".")[2], nn.Module.__name__)
    return tuple(c.__name__ for c in original.__mro__ if c is not object)


def home_of(module: nn.Module) -> str:
    """The Python module in which the forward of a module is written. For a module of an
    exported program it is that of the class that it stands for."""
    original = _class_of(module)
    if isinstance(original, str):
        return original.rpartition(".")[0]
    return str(getattr(original, "forward", original).__module__)


def _class_of(module: nn.Module) -> type | str:
    """The class of a module. For a module of an exported program it is the class that it
    stands for, or the full name of that class if it is not imported."""
    # only a module of an exported program may say that it is of another class
    if type(module).__module__ != EXPORTED:
        return type(module)
    # before torch 2.10, the root of an unflattened program has no type_name
    type_name: Any = getattr(module, "type_name", None)
    original = type_name() if type_name is not None else None
    if not original:
        return type(module)
    home, _, name = str(original).rpartition(".")
    # the name comes from a file, so nothing is imported for it
    imported = vars(sys.modules.get(home, object)).get(name)
    return imported if isinstance(imported, type) else str(original)


@lru_cache(maxsize=1024)
def function_name(function: Callable[..., Any]) -> str:
    """The name of a function, which is the same for its tensor method, its in-place variant
    and its operator: `add` for `torch.add`, `Tensor.add_`, `+`, `+=`, and `aten.add.Tensor`
    in an exported program. Empty if it has no name."""
    full_name = getattr(function, "__name__", "")
    if full_name == "__get__":  # an attribute of a tensor, such as `x.T`
        full_name = getattr(getattr(function, "__self__", None), "__name__", "")
    full_name = full_name.partition(".")[0]
    name = full_name.strip("_")
    if not full_name.startswith("__"):
        return _ALIASES.get(name, name)
    if name in _OPERATORS:
        return _OPERATORS[name]
    if name.startswith(("i", "r")):
        return _OPERATORS.get(name[1:], name)
    return name


def is_in_place(function: Callable[..., Any]) -> bool:
    """Whether a function changes its argument in place, by its name: True for `relu_`, False
    for `__add__`."""
    name = getattr(function, "__name__", "").partition(".")[0]
    return name.endswith("_") and not name.endswith("__")
