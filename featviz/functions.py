"""Which functions a forward pass calls; module hooks do not see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


class _Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.counts[getattr(func, "__name__", "").rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


def count_functions(module: nn.Module, args: Sequence[Any]) -> Counter[str]:
    """Names of torch functions and tensor methods called in one forward pass, with counts.

    In-place variants count with their plain name: `relu_` is `relu`.
    """
    with _Counting() as mode:
        module(*args)
    counts: Counter[str] = mode.counts
    return counts


def like_module(function: str, class_name: str) -> bool:
    """Whether a function does what a module class does: `max_pool2d` and `MaxPool2d`."""
    return function.replace("_", "").lower() == class_name.replace("_", "").lower()
