"""Calls of functions inside forward, which module hooks do not see: torch's function mode does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from featviz.hooks.naming import function_name, gives_tensors, home_of
from featviz.records import Layer

Seen = Callable[[Layer, Any], None]
"""Takes a function as a layer, `layer1.0/fn:add`, and what this call of it gave."""
Entering = Callable[[Layer, Any, Any], None]
"""The same before the call, with its arguments."""


def like_module(function: str, class_name: str) -> bool:
    """Whether a function does what a module class does: `max_pool2d` and `MaxPool2d`."""
    return function.replace("_", "").lower() == class_name.replace("_", "").lower()


def function_of(module: Layer, function: str) -> Layer:
    """A function that a module calls, as a layer."""
    kind = f"fn:{function}"
    name = f"{module.name}/{kind}" if module.name else kind
    return Layer(module.index, name, kind, (kind,), module.aliases)


@contextmanager
def watching(
    model: nn.Module, modules: Sequence[Layer], seen: Seen, entering: Entering | None = None
) -> Iterator[None]:
    """Report every call of a torch function or tensor method that gives tensors.

    What torch's own modules call is theirs (a ReLU module is hooked as a module), and what a
    function calls inside is the function's: neither is reported.

    Args:
        modules: all layers of the model that are modules.
    """
    stack: list[Layer | None] = []
    layers = {layer.name: layer for layer in modules}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            push = _entering(stack, None if _is_torchs(module) else layers[name])
            before = module.register_forward_pre_hook(push, prepend=True)  # others may raise
            hooks.callback(before.remove)
            pop = module.register_forward_hook(_leaving(stack), always_call=True)
            hooks.callback(pop.remove)
        with _Mode(stack, seen, entering):
            yield


def unwatched() -> AbstractContextManager[None]:
    """A block that belongs to no module: what hooks compute is not reported."""
    block: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return block


class _Mode(TorchFunctionMode):
    def __init__(self, stack: list[Layer | None], seen: Seen, entering: Entering | None) -> None:
        super().__init__()
        self.stack, self.seen, self.entering = stack, seen, entering

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        owner = self.stack[-1] if self.stack else None
        name = function_name(func) if owner is not None else ""
        layer = function_of(owner, name) if owner is not None and name else None
        if layer is not None and self.entering is not None:
            self.entering(layer, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if layer is not None and gives_tensors(result):
            self.seen(layer, result)
        return result


def _is_torchs(module: nn.Module) -> bool:
    """Whether the module's forward is one of torch's own, inherited or not; in an exported
    program, whether the module stands for a class of torch's."""
    return home_of(module).startswith(("torch.nn.", "torch.ao.nn."))


def _entering(stack: list[Layer | None], layer: Layer | None) -> Callable[[nn.Module, Any], None]:
    def push(module: nn.Module, args: Any) -> None:
        stack.append(layer)

    return push


def _leaving(stack: list[Layer | None]) -> Callable[[nn.Module, Any, Any], None]:
    def pop(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    return pop
