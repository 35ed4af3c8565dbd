"""Calls that a forward pass made, and what tables of positions and of receptive fields
have in common.

A table lies beside a followed tensor, has its shape, and says something of each of its
values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

MISFITS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What a rule for a function raises where it does not understand a call."""

Tables: TypeAlias = Sequence[Tensor | None]
"""A table for each tensor of a call; None for a tensor without one."""


@dataclass(frozen=True)
class FollowedCall:
    """A call of a torch function that has returned."""

    name: str
    """The function's, without the underscore of in-place variants: `relu`, `conv2d`.
    """
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]
    """The tensors among its arguments, but for nested ones."""
    results: Sequence[Tensor]
    """The tensors that it returned, but for nested ones."""

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the first result."""
        return self.results[0].shape

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument by its index among those given by position, else by its name.

        Args:
            default: the argument's value where the call leaves it out.
        """
        if len(self.args) > index:
            return self.args[index]
        return self.kwargs.get(name, default)

    def argument_along(
        self, axis: int, index: int, name: str, default: Any = None
    ) -> Any:
        """The number for one axis, of an argument such as `stride`: one number for all
        spatial axes, or a number for each.

        Args:
            axis: of [N, C, ...], from 2 on.
            index, name, default: as of `argument`.
        """
        value = self.argument(index, name, default)
        if isinstance(value, (tuple, list)):
            return value[(axis - 2) % len(value)]
        return value

    def repeat(self, function: Callable[..., Any], table: Any) -> Sequence[Tensor]:
        """The results of a function that takes a table in place of this call's first
        argument.

        Args:
            function: of torch, or the like.
            table: or several, for a function that joins tensors.
        """
        kwargs = dict(self.kwargs)
        # torch names its first argument in one of these ways
        if not self.args:
            for name in ("input", "self", "tensors"):
                kwargs.pop(name, None)
        result = function(table, *self.args[1:], **kwargs)
        return [result] if isinstance(result, Tensor) else result

    def join(
        self,
        function: Callable[..., Any],
        tables: Tables,
        nothing: Tensor,
    ) -> Sequence[Tensor]:
        """The table of the results of a call that joins tensors.

        Args:
            function: the one that was called, such as `torch.cat`.
            tables: of each tensor of the call; None for a tensor without a table.
            nothing: one value, which fills the table of a tensor without one.
        """
        filled = []
        for tensor, table in zip(self.tensors, tables, strict=True):
            filled.append(nothing.expand(tensor.shape) if table is None else table)
        return self.repeat(function, filled)


def varies(table: Tensor, axis: int) -> bool:
    """Whether a table says different things along an axis."""
    # what is expanded has stride 0; to compare it would take most of the time of a pass
    if table.shape[axis] < 2 or table.stride(axis) == 0:
        return False
    return not torch.equal(table, table.narrow(axis, 0, 1).expand_as(table))


def einsum_factors(
    call: FollowedCall, tables: Tables, sum_over: Callable[..., Tensor]
) -> list[Tensor]:
    """The tables of the factors of torch.einsum, with the axes of its output.

    `bhid,bhjd->bhij` leaves of the first factor its axes b, h and i, of the second b, h
    and j; d is summed over.

    Args:
        call: of torch.einsum; its first argument is the equation.
        tables: of each factor; None for a factor without.
        sum_over: takes a table and the axes that are summed over; leaves one value
            along each.

    Returns:
        The tables that there are. An axis of the output that a factor lacks has one
        value.
    """
    inputs, _, output = call.args[0].replace(" ", "").partition("->")
    factors = []
    for letters, table in zip(inputs.split(","), tables, strict=True):
        if table is None:
            continue
        # letters that the output lacks are summed over
        summed = [axis for axis, letter in enumerate(letters) if letter not in output]
        table = sum_over(table, *summed).squeeze(tuple(summed))
        # in the order of the output, with an axis of length 1 for what it lacks
        kept = [letter for letter in letters if letter in output]
        table = table.permute([kept.index(x) for x in output if x in kept])
        axes = [slice(None) if letter in kept else None for letter in output]
        factors.append(table[tuple(axes)])
    return factors
