"""Calls that a forward pass made, and what tables of positions and of receptive fields
have in common.

A table belongs to a followed tensor. It has the tensor's shape, and holds one number for
each of the tensor's values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

MISFITS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""The errors that a function's rule raises if it does not understand a call."""

Tables: TypeAlias = Sequence[Tensor | None]
"""A table for each tensor of a call; None for a tensor without one."""


@dataclass(frozen=True)
class FollowedCall:
    """A call of a torch function that has returned."""

    name: str
    """Name of the function, without the underscore of in-place variants: `relu`, `conv2d`.
    """
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]
    """The tensors among the arguments, without nested ones."""
    results: Sequence[Tensor]
    """The tensors that the function returned, without nested ones."""

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the first result."""
        return self.results[0].shape

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument of the call.

        Args:
            index: its place if it was given by position.
            name: its name if it was given by keyword.
            default: its value if the call leaves it out.
        """
        if len(self.args) > index:
            return self.args[index]
        return self.kwargs.get(name, default)

    def argument_along(
        self, axis: int, index: int, name: str, default: Any = None
    ) -> Any:
        """What an argument such as `stride` says for one axis. The argument is one number
        for all spatial axes, or a number for each.

        Args:
            axis: one of the spatial axes of [N, C, ...], 2 or more.
            index, name, default: see `argument`.
        """
        value = self.argument(index, name, default)
        if isinstance(value, (tuple, list)):
            return value[(axis - 2) % len(value)]
        return value

    def repeat(self, function: Callable[..., Any], table: Any) -> Sequence[Tensor]:
        """Call a function with this call's arguments, but a table in place of the first.

        Args:
            function: the torch function of this call, or one that does the same to
                tables.
            table: one table, or a list of them for a function that joins tensors.

        Returns:
            The tensors that the function returned.
        """
        kwargs = dict(self.kwargs)
        # the first argument was given by keyword, under one of torch's names for it
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
        """The tables of the results of a call that joins tensors.

        Args:
            function: the one that was called, such as `torch.cat`.
            tables: one for each tensor of the call; None for a tensor without a table.
            nothing: one value: a tensor without a table gets a table filled with it.
        """
        filled = []
        for tensor, table in zip(self.tensors, tables, strict=True):
            filled.append(nothing.expand(tensor.shape) if table is None else table)
        return self.repeat(function, filled)


def varies(table: Tensor, axis: int) -> bool:
    """Whether the numbers of a table differ along an axis."""
    # An expanded axis has stride 0: its numbers are one. To compare them would take most
    # of the time of a pass.
    if table.shape[axis] < 2 or table.stride(axis) == 0:
        return False
    return not torch.equal(table, table.narrow(axis, 0, 1).expand_as(table))


def einsum_factors(
    call: FollowedCall, tables: Tables, sum_over: Callable[..., Tensor]
) -> list[Tensor]:
    """The tables of the factors of torch.einsum, with the axes of its output.

    In `bhid,bhjd->bhij`, the first table keeps its axes b, h and i, and the second b, h
    and j; d is summed over.

    Args:
        call: of torch.einsum; its first argument is the equation.
        tables: one for each factor; None for a factor without a table.
        sum_over: takes a table and the axes that are summed over; returns the table with
            length 1 along these axes.

    Returns:
        A table for each factor that has one. If a factor lacks an axis of the output, the
        axis has length 1.
    """
    inputs, _, output = call.args[0].replace(" ", "").partition("->")
    factors = []
    for letters, table in zip(inputs.split(","), tables, strict=True):
        if table is None:
            continue
        # einsum sums over the letters that the output lacks
        summed = [axis for axis, letter in enumerate(letters) if letter not in output]
        table = sum_over(table, *summed).squeeze(tuple(summed))
        # in the order of the output, with an axis of length 1 for each missing letter
        kept = [letter for letter in letters if letter in output]
        table = table.permute([kept.index(x) for x in output if x in kept])
        axes = [slice(None) if letter in kept else None for letter in output]
        factors.append(table[tuple(axes)])
    return factors
