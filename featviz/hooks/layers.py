"""Layers of a model: its modules, and the functions that they call."""

from __future__ import annotations

import re

from torch import nn

from featviz.hooks.naming import class_names
from featviz.records import Layer

_FUNCTION = "fn:"

_CALL = re.compile(r"@\d+")
"""What torch.export.unflatten puts behind the name of a module at its second and later calls."""


def list_layers(model: nn.Module) -> list[Layer]:
    """Every module once, in `named_modules()` order, with all names of a shared one."""
    names: dict[int, dict[str, None]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), {}).update(dict.fromkeys((name, _CALL.sub("", name))))
    return [
        Layer(
            index=index,
            name=name,
            type=class_names(module)[0],
            classes=class_names(module),
            aliases=tuple(alias for alias in names[id(module)] if alias != name),
        )
        for index, (name, module) in enumerate(model.named_modules())
    ]


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
