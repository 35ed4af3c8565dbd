"""Layers of a model: its modules, and the functions that they call.

A module that stands in several places (one activation object of a whole network) is a layer in each
place from which it is called. A place is the module that calls it, and for one inside a plain
nn.Sequential its position there. Several names in one place are one layer. Names are the same in a
model and in a program exported from one, whose modules know the class that they stand for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from featviz.records import Layer

_FUNCTION, _IN_ORDER = "fn:", nn.Sequential.forward
_CALL = re.compile(r"@\d+")
"""What torch.export.unflatten puts behind the name of a module at its second and later calls."""
Places = tuple[Sequence[Layer], Sequence[int], Mapping[int, Sequence[Layer]]]
"""The layers of a model, in the order of their first names in
`named_modules(remove_duplicate=False)`; for each the index of the layer that calls it, 0 for the
model itself; and the layers that a module is, by its id."""
_known: WeakKeyDictionary[nn.Module, tuple[object, Places]] = WeakKeyDictionary()


def read_places(model: nn.Module) -> Places:
    """Find every place of every module of a model; once, until it has other modules."""
    named = modules_by_name(model)
    identity = [(name, id(module), type(module)) for name, module in named.items()]
    before = _known.get(model)
    if before is not None and before[0] == identity:
        return before[1]
    names: list[dict[str, None]] = []
    callers: list[int] = []
    modules: list[nn.Module] = []
    known: dict[tuple[int, int, str], int] = {}
    index_of: dict[str, int] = {}
    for name, module in named.items():
        caller, around = 0, name
        while around:  # the innermost layer around a name that can be called; lists cannot
            around = around.rpartition(".")[0]
            if not isinstance(modules[index_of[around]], (nn.ModuleList, nn.ModuleDict)):
                caller = index_of[around]
                break
        in_order = name and getattr(type(modules[caller]), "forward", None) is _IN_ORDER
        key = (id(module), caller, name.rpartition(".")[2] if in_order else "")
        if key not in known:
            known[key] = len(names)
            names.append({})
            callers.append(caller)
            modules.append(module)
        index_of[name] = known[key]
        names[known[key]].update(dict.fromkeys((name, _CALL.sub("", name))))
    layers: list[Layer] = []
    of_module: dict[int, list[Layer]] = {}
    for index, module in enumerate(modules):
        (first, *aliases), classes = names[index], class_names(module)
        layers.append(Layer(index, first, classes[0], classes, tuple(aliases)))
        of_module.setdefault(id(module), []).append(layers[-1])
    _known[model] = identity, (layers, callers, of_module)
    return layers, callers, of_module


def list_layers(model: nn.Module) -> list[Layer]:
    """Every module in every place from which it is called, in `named_modules()` order."""
    return list(read_places(model)[0])


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by qualified name; a shared one under all its names."""
    return dict(model.named_modules(remove_duplicate=False))


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


EXPORTED = "torch.export.unflatten"
"""Where the class of an exported program's modules is, each of which stands for another class."""

_OPERATORS = {name: name for name in ("add", "sub", "mul", "div", "pow", "matmul")} | {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pos": "positive",
}
"""The function that does what an operator does; `__radd__` and `__iadd__` are `__add__`."""

_ALIASES = {
    **{"absolute": "abs", "clip": "clamp", "multiply": "mul", "negative": "neg"},
    **dict.fromkeys(("concat", "concatenate"), "cat"),
    **dict.fromkeys(("divide", "true_divide"), "div"),
    **dict.fromkeys(("rsub", "subtract"), "sub"),
}


def class_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the module's class and its bases, or of those that an exported one stands for; of a
    class that is not imported the name alone is known."""
    original = _class_of(module)
    if isinstance(original, str):
        return (original.rpartition(".")[2], nn.Module.__name__)
    return tuple(c.__name__ for c in original.__mro__ if c is not object)


def home_of(module: nn.Module) -> str:
    """The Python module in which the forward of a module, or of what it stands for, is written."""
    original = _class_of(module)
    if isinstance(original, str):
        return original.rpartition(".")[0]
    return str(getattr(original, "forward", original).__module__)


def _class_of(module: nn.Module) -> type | str:
    """What a module is, or stands for; the full name of a class that is not imported."""
    # (the root of an unflattened program has no type_name before torch 2.10)
    is_exported = type(module).__module__ == EXPORTED
    original = getattr(module, "type_name", lambda: None)() if is_exported else None
    if not original:
        return type(module)
    home, _, name = str(original).rpartition(".")
    imported = vars(sys.modules.get(home, object)).get(name)
    return imported if isinstance(imported, type) else str(original)


@lru_cache(maxsize=1024)
def function_name(function: Callable[..., Any]) -> str:
    """One name for a function, its tensor method, its in-place variant and its operator: `relu`,
    and `add` for `+`, `+=`, `Tensor.add_` and `aten.add.Tensor` in an exported program."""
    raw = getattr(function, "__name__", "")
    if raw == "__get__":
        raw = getattr(getattr(function, "__self__", None), "__name__", "")
    raw = raw.partition(".")[0]
    name = raw.strip("_")
    if raw.startswith("__") and raw.endswith("__"):
        sided = name[1:] if name[:1] in ("i", "r") else ""
        return _OPERATORS.get(name) or _OPERATORS.get(sided) or name
    return _ALIASES.get(name, name)


def is_in_place(function: Callable[..., Any]) -> bool:
    """Whether a function's name says that it changes what it is given: `relu_`, not `__add__`."""
    name = getattr(function, "__name__", "").partition(".")[0]
    return name.endswith("_") and not name.endswith("__")
