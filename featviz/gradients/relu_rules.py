"""Other ways for a gradient to pass a ReLU: guided backpropagation and deconvnet.

Both replace the gradient at every ReLU, module or function, while the block runs; the model itself
is not touched. With x the ReLU's input and g the gradient at its output:

- plain: g where x > 0
- guided: g where x > 0 and g > 0 (Springenberg et al., arXiv 1412.6806, section 3.4)
- deconv: g where g > 0 (Zeiler and Fergus, arXiv 1311.2901, section 2.1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from featviz.hooks.functions import FunctionMode
from featviz.hooks.naming import is_in_place


class _Rule(torch.autograd.Function):
    """ReLU, with a backward pass of another rule."""

    guided: bool

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
        result = x.clamp_(min=0) if inplace else x.clamp(min=0)
        if cls.guided:
            ctx.save_for_backward(result)
        return result

    @classmethod
    def backward(cls, ctx: Any, *gradients: Any) -> Any:
        passed = gradients[0].clamp(min=0)
        if cls.guided:
            (result,) = ctx.saved_tensors
            passed = passed * (result > 0)
        return passed, None


class _Guided(_Rule):
    guided = True


class _Deconv(_Rule):
    guided = False


class Rule:
    """A rule in force: computes calls of ReLU in the function's place."""

    def __init__(self, function: type[_Rule]) -> None:
        self.function = function
        self.met = 0
        """Calls of ReLU."""

    def __call__(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Compute a call of ReLU, with a backward pass by the rule."""
        self.met += 1
        x = args[0] if args else kwargs.get("input", kwargs.get("self"))
        inplace = is_in_place(func) or kwargs.get("inplace", args[1] if args[1:] else False)
        return self.function.apply(x, bool(inplace))


RULES: dict[str, type[_Rule] | None] = {"plain": None, "guided": _Guided, "deconv": _Deconv}


@contextmanager
def rule(name: str) -> Iterator[Rule | None]:
    """Let gradients pass every ReLU by a rule of RULES, while the block runs.

    Enter it before whatever else watches functions, which then sees the ReLU and not what the rule
    makes of it.
    """
    function = RULES[name]
    if function is None:
        yield None
    else:
        replacement = Rule(function)
        with FunctionMode(replacements={"relu": replacement}):
            yield replacement
