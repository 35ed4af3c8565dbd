"""Calls of functions inside forward, which module hooks do not see: torch's function mode does.

There is one function mode. Capturing, auditing and listing functions watch calls through it, and
the rules for ReLU replace functions with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from featviz.hooks.layers import function_layer
from featviz.hooks.naming import function_name, gives_tensors, home_of
from featviz.hooks.running import Running
from featviz.records import Layer

Enter = Callable[[Layer, Sequence[Any], Mapping[str, Any]], None]
"""Called before a module or function runs, with its arguments."""
Leave = Callable[[Layer, Sequence[Any], Mapping[str, Any], Any], None]
"""Called after a module or function ran, with its arguments and its result."""
Replacement = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Computes the result of a call in the function's place; takes the function and its arguments."""


class FunctionMode(TorchFunctionMode):
    """Reports the torch functions and tensor methods that modules call, and may replace some."""

    def __init__(
        self,
        leave: Leave = lambda layer, args, kwargs, result: None,
        enter: Enter | None = None,
        wanted: Callable[[Layer], bool] = lambda layer: True,
        replacements: Mapping[str, Replacement] | None = None,
        running: Running | None = None,
    ) -> None:
        """Say who hears of calls.

        Args:
            leave: called after each call that returns tensors.
            enter: called before each call.
            wanted: asked at each call that `leave` or `enter` would hear of whether they do.
            replacements: by the name of the function; in force outside of modules as well.
            running: knows which module calls; without it no calls are reported.
        """
        super().__init__()
        self.leave, self.enter, self.wanted = leave, enter, wanted
        self.replacements = replacements or {}
        self.running = running
        self._layers: dict[tuple[str, str], Layer] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        module = self.running.heard if self.running is not None else None
        if module is None and not self.replacements:
            return func(*args, **kwargs)
        name = function_name(func)
        layer = self._layer(module, name) if module is not None and name else None
        if layer is not None and self.enter is not None and self.wanted(layer):
            self.enter(layer, args, kwargs)
        replacement = self.replacements.get(name)
        result = replacement(func, args, kwargs) if replacement else func(*args, **kwargs)
        if layer is not None and gives_tensors(result) and self.wanted(layer):
            self.leave(layer, args, kwargs, result)
        return result

    def _layer(self, module: Layer, function: str) -> Layer:
        layer = self._layers.get((module.name, function))
        if layer is None:
            layer = self._layers[module.name, function] = function_layer(module, function)
        return layer


@contextmanager
def watching(
    model: nn.Module,
    leave: Leave,
    enter: Enter | None = None,
    layers: Sequence[Layer] = (),
    functions: Callable[[Layer], bool] | None = None,
    opaque: Callable[[str, nn.Module], bool] | None = None,
) -> Iterator[None]:
    """Report the calls of modules and functions for a while; all hooks are removed afterwards.

    The hooks return nothing, since a value that a forward hook returns replaces the output. What a
    function calls inside is not reported.

    Args:
        layers: the modules whose calls are reported.
        functions: asked at each call of a function whether it is reported; None watches none, which
            saves some microseconds a call.
        opaque: takes a module's name and the module, and says whether the functions that it calls
            are not reported. By default they are not where torch wrote the forward: a ReLU module
            is reported as a module.
    """
    running, names = Running(model), {layer.name for layer in layers}
    opaque = opaque or _is_torchs

    def heard(module: nn.Module) -> bool:
        return not opaque(running.places(module)[0].name, module)

    with ExitStack() as stack:
        for module in model.modules():
            places = running.places(module)
            if any(layer.name in names for layer in places):
                now = _reported(running, places, names)
                for handle in _reporting(module, now, leave, enter):
                    stack.callback(handle.remove)
        stack.enter_context(running.followed(names, heard if functions is not None else None))
        if functions is not None:
            stack.enter_context(FunctionMode(leave, enter, functions, running=running))
        yield


def list_functions(model: nn.Module, args: Sequence[Any]) -> dict[Layer, int]:
    """The functions that modules call in one forward pass, in the order of their first calls.

    Returns:
        Layers named `layer1.0/fn:add`, each with the number of its calls.
    """
    calls: Counter[Layer] = Counter()

    def count(layer: Layer, args: Any, kwargs: Any, result: Any) -> None:
        calls[layer] += 1

    with watching(model, count, functions=lambda layer: True):
        model(*args)
    return dict(calls)


def unwatched() -> AbstractContextManager[None]:
    """A block that belongs to no module: what hooks compute is not reported."""
    block: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return block


def _reported(
    running: Running, places: Sequence[Layer], names: Collection[str]
) -> Callable[[], Layer | None]:
    """Tells the layer to which the current call of a module belongs; None for one not reported."""

    def now() -> Layer | None:
        layer = running.now(places)
        return layer if layer.name in names else None

    return now


def _reporting(
    module: nn.Module, now: Callable[[], Layer | None], leave: Leave, enter: Enter | None
) -> Iterator[Any]:
    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if (layer := now()) is not None:
            leave(layer, args, kwargs, output)

    yield module.register_forward_hook(after, with_kwargs=True)
    if enter is not None:

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if (layer := now()) is not None:
                enter(layer, args, kwargs)

        yield module.register_forward_pre_hook(before, with_kwargs=True)


def _is_torchs(name: str, module: nn.Module) -> bool:
    """Whether the module's forward is one of torch's own, inherited or not; in an exported
    program, whether the module stands for a class of torch's."""
    return home_of(module).startswith(("torch.nn.", "torch.ao.nn."))
