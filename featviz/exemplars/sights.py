"""A call of a function, and what the tensors that it takes see of the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from featviz.exemplars.fields import Field
from featviz.records import Integers


class Sight(Enum):
    """What a tensor sees of the input, where that is no table."""

    WHOLE = "whole"
    """All of it, at every position."""
    UNKNOWN = "unknown"
    CONSTANT = "constant"
    """Nothing: a parameter, or what is computed of parameters."""


Seen = Field | Sight


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function, and what the tensors that it takes see."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    fields: tuple[Field, ...]
    """Of the tensors that see something of the input, in the order of the arguments."""
    output: Tensor
    """The result, or the first tensor of several."""

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument by position or by one of its names."""
        if position < len(self.args):
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    @property
    def input(self) -> Tensor:
        """The first argument."""
        tensor: Tensor = self.argument(0, "input", "self", "query")
        return tensor

    @property
    def field(self) -> Field:
        """That of the one tensor."""
        return self.fields[0]

    def on_map(self, rows: Integers, columns: Integers) -> Seen:
        """The views behind a layer whose positions look at these: each [m, k]."""
        return self.field.through(rows, columns)
