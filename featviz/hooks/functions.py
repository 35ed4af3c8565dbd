"""Calls of functions inside forward, which module hooks do not see: torch's function mode does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Seen = Callable[[str, str, Any], None]
"""Takes the qualified name of the module that is running, the function's name, and its result."""

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


def like_module(function: str, class_name: str) -> bool:
    """Whether a function does what a module class does: `max_pool2d` and `MaxPool2d`."""
    return function.replace("_", "").lower() == class_name.replace("_", "").lower()


@contextmanager
def watching(model: nn.Module, seen: Seen) -> Iterator[None]:
    """Report every call of a torch function or tensor method that gives tensors.

    What torch's own modules call is theirs (a ReLU module is hooked as a module), and what a
    function calls inside is the function's: neither is reported.
    """
    stack: list[str] = []
    own = {name for name, m in model.named_modules() if _is_torchs(m)}

    def report(name: str, result: Any) -> None:
        if stack and stack[-1] not in own:
            seen(stack[-1], name, result)

    handles = []
    try:
        for name, module in model.named_modules():
            push, pop = _entering(stack, name), _leaving(stack)
            handles.append(module.register_forward_pre_hook(push))
            handles.append(module.register_forward_hook(pop, always_call=True))
        with _Mode(report):
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Mode(TorchFunctionMode):
    def __init__(self, report: Callable[[str, Any], None]) -> None:
        super().__init__()
        self.report = report

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = name_of(func)
        if name and _holds_tensors(result):
            self.report(name, result)
        return result


def _holds_tensors(result: Any) -> bool:
    items = result if isinstance(result, (tuple, list)) else (result,)
    return any(isinstance(item, Tensor) for item in items)


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")


def _entering(stack: list[str], name: str) -> Callable[[nn.Module, Any], None]:
    def push(module: nn.Module, args: Any) -> None:
        stack.append(name)

    return push


def _leaving(stack: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def pop(module: nn.Module, args: Any, output: Any) -> None:
        if stack:  # a forward pass that failed half way may have left it shorter
            stack.pop()

    return pop
