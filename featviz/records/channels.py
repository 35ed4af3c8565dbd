"""What an audit knows of calls, activations and gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Call:
    """One call of a module or a function in a forward pass."""

    name: str
    """`layer1.0.relu` for a module, `layer1.0/fn:relu` for a function that layer1.0 calls."""
    type: str
    """Class name, or `fn:relu`."""
    index: int = 0
    """0 for the first call with this name in a forward pass."""

    @property
    def label(self) -> str:
        """For people: `layer1.0.relu`, and `layer1.0.relu.call1` for its second call."""
        return (self.name or self.type) + (f".call{self.index}" if self.index else "")


@dataclass(frozen=True)
class Activation:
    """What can be asked of an activation function's output."""

    zero: bool = False
    """Gives exact zeros below a threshold, and nothing below zero: it can be dead."""
    bounds: tuple[float, ...] = ()
    """Values at which it saturates: a ceiling, or the lower and the upper end."""
    margin: float = 0.0
    """A value this near to a bound, or beyond it, is at it."""


RECTIFIERS = frozenset({"ReLU", "ReLU6", "fn:relu", "fn:relu6"})
"""Types of calls whose output is zero below a threshold, whatever the model: a channel that is zero
there in all images is dead."""

Role = Literal["maker", "activation", "channelwise", "mixing", "other"]
"""maker: a convolution or linear module. channelwise: output channel i depends on input channel i
alone. mixing: channel i stays channel i, but the others have a say (GroupNorm)."""


@dataclass(frozen=True)
class Part:
    """What a module or function is to the channels that pass through it."""

    role: Role
    axis: int | None = None
    """Where the channels are in its output; None where its input decides."""
    activation: Activation | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether a gate held, with its figure in words."""

    gate: str
    """As it was written: `dead>5%`."""
    held: bool
    words: str
