"""Layers of a model: its modules, and the functions that they call.

A module that stands in several places (one activation object of a whole network) is a
layer in each place from which it is called. A place is the module that calls it, and
for one inside a plain nn.Sequential its position there. Several names in one place are
one layer. Names are the same in a model and in a program exported from one, whose
modules know the class that they stand for."""

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
"""What torch.export.unflatten puts behind the name of a module at its second and later
calls."""


class ModelLayers(NamedTuple):
    """The layers of a model, by where they are called."""

    layers: Sequence[Layer]
    """In the order of their first names in `named_modules(remove_duplicate=False)`."""
    callers: Sequence[int]
    """For each layer the index of the one that calls it; 0 is the model itself."""
    of_module: Mapping[int, Sequence[Layer]]
    """The layers that a module is, by its id."""


@dataclass
class _Entry:
    """A module where one caller calls it: a layer, before all its names are known."""

    module: nn.Module
    caller: int
    names: dict[str, None] = field(default_factory=dict)
    """In their order; the keys alone count."""


_cache: WeakKeyDictionary[nn.Module, tuple[object, ModelLayers]] = WeakKeyDictionary()
"""What was read of a model, behind the modules that it had then."""


def read_table(model: nn.Module) -> ModelLayers:
    """Find every layer of a model; once, until it has other modules."""
    named = modules_by_name(model)
    # the model may have been changed since: the table holds for these very modules
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
    """The layers of a model by where they are called.

    Args:
        modules: by all their names, each behind the module that it is in.
    """
    entries: list[_Entry] = []
    index_of_key: dict[tuple[int, int, str], int] = {}
    index_of_name: dict[str, int] = {}
    for name, module in modules.items():
        caller = _caller_of(name, index_of_name, entries)
        # in a Sequential each position is a caller of its own; elsewhere names of one
        # module that one caller has are aliases
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
    """The index of the innermost layer around a name that can be called; lists cannot."""
    # from the inside out; what stands in no such layer the model itself calls
    while name:
        name = name.rpartition(".")[0]
        index = index_of_name[name]
        if not isinstance(entries[index].module, (nn.ModuleList, nn.ModuleDict)):
            return index
    return 0


def list_layers(model: nn.Module) -> list[Layer]:
    """Every module in every place from which it is called, in `named_modules()` order."""
    return list(read_table(model).layers)


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by qualified name; a shared one under all its names."""
    return dict(model.named_modules(remove_duplicate=False))


def function_layer(module: Layer, function: str) -> Layer:
    """A function that a module calls, as a layer: `layer1.0/fn:relu`."""
    # a slash, which no name of a module has: `layer1.0.fn:relu` could be one
    type_name = _FUNCTION + function
    name = f"{module.name}/{type_name}" if module.name else type_name
    return Layer(module.index, name, type_name, (type_name,), module.aliases)


def function_in(name: str) -> str | None:
    """`relu` of the layer name `layer1.0/fn:relu`; None for the name of a module."""
    # a module may be called `fn:x`, but not behind a slash
    head, mark, function = name.rpartition(_FUNCTION)
    if not mark or (head and not head.endswith("/")):
        return None
    return function


def computed_by(model: nn.Module) -> str | None:
    """What computes a model, if it is not torch: `ONNX Runtime`. Its layers call no
    functions, and have no gradients; what hooks return to them is lost."""
    return getattr(model, "computed_by", None)


def like_module(function: str, class_name: str) -> bool:
    """Whether a function does what a module class does: `max_pool2d` and `MaxPool2d`."""
    return function.replace("_", "").lower() == class_name.replace("_", "").lower()


EXPORTED = "torch.export.unflatten"
"""Where the class of an exported program's modules is, each of which stands for another
class."""

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
"""The function that does what an operator does; `__radd__` and `__iadd__` are
`__add__`."""

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
    """Names of a module's class and of its base classes. A module of an exported program
    has those of the class that it stands for; where that is not imported, its name and
    `Module`."""
    original = _class_of(module)
    if isinstance(original, str):
        return (original.rpartition(".")[2], nn.Module.__name__)
    return tuple(c.__name__ for c in original.__mro__ if c is not object)


def home_of(module: nn.Module) -> str:
    """The Python module in which the forward of a module is written: of an exported one,
    that of the class that it stands for."""
    original = _class_of(module)
    if isinstance(original, str):
        return original.rpartition(".")[0]
    return str(getattr(original, "forward", original).__module__)


def _class_of(module: nn.Module) -> type | str:
    """The class of a module, or that for which a module of an exported program stands:
    its full name, where it is not imported."""
    # no other module is said to be of another class than it is
    if type(module).__module__ != EXPORTED:
        return type(module)
    # the root of an unflattened program has no type_name before torch 2.10
    type_name: Any = getattr(module, "type_name", None)
    original = type_name() if type_name is not None else None
    if not original:
        return type(module)
    home, _, name = str(original).rpartition(".")
    # a file says the name: nothing is imported for it
    imported = vars(sys.modules.get(home, object)).get(name)
    return imported if isinstance(imported, type) else str(original)


@lru_cache(maxsize=1024)
def function_name(function: Callable[..., Any]) -> str:
    """One name for a function, its tensor method, its in-place variant and its
    operator: `relu`, and `add` for `+`, `+=`, `Tensor.add_` and `aten.add.Tensor` in an
    exported program."""
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
    """Whether a function's name says that it changes what it is given: `relu_`, not
    `__add__`."""
    name = getattr(function, "__name__", "").partition(".")[0]
    return name.endswith("_") and not name.endswith("__")
