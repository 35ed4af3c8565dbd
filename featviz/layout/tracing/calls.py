"""Calls that a forward pass made, and what tables of positions and of receptive fields
have in common.

A table lies beside a followed tensor, has its shape, and says something of each of its
values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class FollowedCall:
    """A call of a torch function that has returned."""

    name: str
    """Of the function, without the underscore of in-place variants: `relu`, `conv2d`.
    """
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]
    """The dense tensors among its arguments."""
    results: Sequence[Tensor]
    """The dense tensors that it returned."""

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the first result."""
        return self.results[0].shape

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument by its index or its name."""
        return (
            self.args[index]
            if len(self.args) > index
            else self.kwargs.get(name, default)
        )

    def repeat(self, function: Callable[..., Any], table: Any) -> Sequence[Tensor]:
        """The results of a function that takes a table in place of this call's first
        argument."""
        first = () if self.args else ("input", "self", "tensors")
        kwargs = {
            name: value for name, value in self.kwargs.items() if name not in first
        }
        result = function(table, *self.args[1:], **kwargs)
        return [result] if isinstance(result, Tensor) else result

    def join(
        self,
        function: Callable[..., Any],
        tables: Sequence[Tensor | None],
        nothing: Tensor,
    ) -> Sequence[Tensor]:
        """The table of joined tensors, filled with `nothing` where a tensor has no
        table."""
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


def spread(table: Tensor, shape: Sequence[int]) -> Tensor | None:
    """A table expanded to a shape, as a smaller operand is; None where it does not fit."""
    try:
        return table.expand(shape)
    except RuntimeError:
        return None


def einsum_factors(
    call: FollowedCall, tables: Sequence[Tensor | None], sum_over: Callable[..., Tensor]
) -> list[Tensor]:
    """The tables of the factors of torch.einsum, with the axes of its output.

    Args:
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
        summed = [axis for axis, letter in enumerate(letters) if letter not in output]
        table = sum_over(table, *summed)
        for axis in reversed(summed):
            table = table.squeeze(axis)
        kept = [letter for letter in letters if letter in output]
        table = table.permute(
            [kept.index(letter) for letter in output if letter in kept]
        )
        factors.append(table[tuple(slice(None) if x in kept else None for x in output)])
    return factors
