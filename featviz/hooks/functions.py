"""Calls of functions inside forward, which module hooks do not see: torch's function mode does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Seen = Callable[[str, str, Any], None]
"""Takes the qualified name of the module that is running, the function's name, and its result."""
Entering = Callable[[str, str, Any, Any], None]
"""The same before the call, with the function's arguments."""

_SAME = {
    "iadd": "add",
    "radd": "add",
    "isub": "sub",
    "rsub": "sub",
    "imul": "mul",
    "rmul": "mul",
    "itruediv": "div",
    "truediv": "div",
    "rdiv": "div",
    "rtruediv": "div",
    "rmatmul": "matmul",
}
"""Operators under the name of the function that does the same."""


def name_of(function: Callable[..., Any]) -> str:
    """One name for a function, its tensor method, its in-place variant and its operator.

    `torch.relu`, `torch.nn.functional.relu`, `Tensor.relu_` are all `relu`; `+`, `+=` and
    `Tensor.add_` are `add`. Properties such as `Tensor.shape` have none.
    """
    raw = getattr(function, "__name__", "")
    name = "" if raw == "__get__" else raw.strip("_")
    return _SAME.get(name, name)


def function_name(owner: str, function: str) -> str:
    """The name of a function that the module `owner` calls: `layer1.0/fn:add`."""
    return f"{owner}/fn:{function}" if owner else f"fn:{function}"


def like_module(function: str, class_name: str) -> bool:
    """Whether a function does what a module class does: `max_pool2d` and `MaxPool2d`."""
    return function.replace("_", "").lower() == class_name.replace("_", "").lower()


@contextmanager
def watching(model: nn.Module, seen: Seen, entering: Entering | None = None) -> Iterator[None]:
    """Report every call of a torch function or tensor method that gives tensors.

    What torch's own modules call is theirs (a ReLU module is hooked as a module), and what a
    function calls inside is the function's: neither is reported.
    """
    watch = _Watch(model, seen, entering)
    handles = []
    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(watch.pushing(name)))
            handles.append(module.register_forward_hook(watch.popping(), always_call=True))
        with _Mode(watch):
            yield
    finally:
        for handle in handles:
            handle.remove()


def unwatched() -> AbstractContextManager[None]:
    """A block that belongs to no module: what hooks compute is not reported."""
    block: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return block


class _Watch:
    """Knows which module is running."""

    def __init__(self, model: nn.Module, seen: Seen, entering: Entering | None) -> None:
        self.stack: list[str] = []
        self.seen, self.entering = seen, entering
        self.torchs = {name for name, module in model.named_modules() if _is_torchs(module)}

    @property
    def owner(self) -> str | None:
        """The module whose functions count now."""
        return self.stack[-1] if self.stack and self.stack[-1] not in self.torchs else None

    def pushing(self, name: str) -> Callable[[nn.Module, Any], None]:
        """A forward pre-hook."""

        def push(module: nn.Module, args: Any) -> None:
            self.stack.append(name)

        return push

    def popping(self) -> Callable[[nn.Module, Any, Any], None]:
        """A forward hook."""

        def pop(module: nn.Module, args: Any, output: Any) -> None:
            if self.stack:  # a forward pass that failed half way may have left it shorter
                self.stack.pop()

        return pop


class _Mode(TorchFunctionMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, owner = name_of(func), self.watch.owner
        if name and owner is not None and self.watch.entering is not None:
            self.watch.entering(owner, name, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if name and owner is not None and _holds_tensors(result):
            self.watch.seen(owner, name, result)
        return result


def _holds_tensors(result: Any) -> bool:
    items = result if isinstance(result, (tuple, list)) else (result,)
    return any(isinstance(item, Tensor) for item in items)


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")
