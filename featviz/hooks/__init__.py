"""Hooks: hand every tensor that a layer gives to a sink, the moment the layer gives it.

Layers are modules, or functions that modules call. The hooks return nothing, since a value that a
forward hook returns would replace the layer's output.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from featviz.hooks.containers import leaves
from featviz.hooks.forward import back, faults, forward
from featviz.hooks.functions import unwatched, watching
from featviz.hooks.naming import class_names
from featviz.hooks.recorder import KINDS, Recorder, Sink, Wanted
from featviz.records import Layer

__all__ = [
    "KINDS",
    "Recorder",
    "Sink",
    "back",
    "class_names",
    "faults",
    "forward",
    "hooked",
    "leaves",
    "list_functions",
    "list_layers",
    "unwatched",
]


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


def list_functions(model: nn.Module, args: Sequence[Any]) -> dict[Layer, int]:
    """The functions that modules call in one forward pass, in the order of their first calls.

    Returns:
        Layers named `layer1.0/fn:add`, each with the number of its calls.
    """
    found: Counter[Layer] = Counter()

    def seen(layer: Layer, result: Any) -> None:
        found[layer] += 1

    with watching(model, list_layers(model), seen):
        model(*args)
    return dict(found)


@contextmanager
def hooked(
    model: nn.Module,
    layers: Sequence[Layer],
    sink: Sink,
    kinds: Sequence[str] = ("output",),
    wanted: Wanted | None = None,
) -> Iterator[Recorder]:
    """Hook the layers of a model for a while; every hook is removed, whatever happens.

    Args:
        kinds: what to take of each layer, of KINDS. Gradients come when the caller runs a
            backward pass.
        wanted: asked at each call of a function, where it is not known beforehand which functions
            there are; otherwise those among `layers` are.
    """
    functions = {layer.name for layer in layers if layer.is_function}
    by_name: Wanted = lambda layer: layer.name in functions  # noqa: E731
    recorder = Recorder(layers, sink, kinds, wanted or by_name)
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        stack.callback(recorder.release)
        for layer in layers:
            if not layer.is_function:
                stack.enter_context(_hooks_on(modules[layer.name], layer, recorder))
        if functions or wanted:
            take = (recorder.leave_function, recorder.enter_function)
            stack.enter_context(watching(model, list_layers(model), *take))
        yield recorder


@contextmanager
def _hooks_on(module: nn.Module, layer: Layer, recorder: Recorder) -> Iterator[None]:
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        recorder.leave(layer, output)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        recorder.enter(layer, args, kwargs)

    with ExitStack() as stack:
        stack.callback(module.register_forward_hook(leave).remove)
        if recorder.takes_inputs:
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.enter_context(_weights_of(module))
        yield


@contextmanager
def _weights_of(module: nn.Module) -> Iterator[None]:
    """Let a hooked nn.MultiheadAttention give its weights [1, heads, T, T], where its caller says
    `need_weights=False`; its other result is the same but for rounding."""
    if not isinstance(module, nn.MultiheadAttention):
        yield
        return

    def ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("need_weights") is False:
            return args, {**kwargs, "need_weights": True, "average_attn_weights": False}
        return None

    handle = module.register_forward_pre_hook(ask, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
