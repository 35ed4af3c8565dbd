"""Which activation follows a layer, and which layer makes an activation's channels.

A forward pass is written down as a graph: a node for each call, an edge where one takes the very
tensor that another gave. Tensors are told by identity and held while the pass lasts, so that no
address is used twice; an in-place operation gives the tensor it was given, and from then on that
tensor is its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from featviz.records import Call, Part

_PASSING = ("channelwise", "mixing")


@dataclass(frozen=True)
class Node:
    """One call."""

    call: Call
    part: Part
    axis: int | None
    """Where the channels are in its output, if that is known."""
    sources: tuple[int, ...]
    """Nodes whose tensors it takes."""


@dataclass(frozen=True)
class Found:
    """A node, or the reason why there is none."""

    node: int | None
    reason: str = ""


class Graph:
    """The calls of one forward pass, in order."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.users: list[list[int]] = []
        """For each node, the nodes that take its tensors, in the order of their calls."""
        self.given_by: dict[Call, int] = {}
        """The node whose tensor a call gave; of a container, the last one inside it."""
        self.shapes: dict[Call, tuple[int, ...]] = {}
        """Of the calls that gave one tensor."""
        self._owner: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def note(self, call: Call, part: Part, inputs: Any, output: Any) -> None:
        """Write down a call; one that gives no tensor (a size, say) is none."""
        given = list(_tensors(output))
        if not given:
            return
        known = (self._owner.get(id(tensor)) for tensor in _tensors(inputs))
        sources = tuple(dict.fromkeys(node for node in known if node is not None))
        axis = part.axis if part.axis is not None else self._inherited(part, sources)
        number = len(self.nodes)
        self.nodes.append(Node(call, part, axis, sources))
        self.users.append([])
        for source in sources:
            self.users[source].append(number)
        for tensor in given:
            self._owner[id(tensor)] = number
            self._alive.append(tensor)
        self.note_outer(call, output)

    def note_outer(self, call: Call, output: Any) -> None:
        """Write down a module with others inside: what it gives, one of them gave."""
        if isinstance(output, Tensor) and not output.is_nested:
            self.shapes[call] = tuple(output.shape)
            if id(output) in self._owner:
                self.given_by[call] = self._owner[id(output)]

    def release(self) -> None:
        """The pass is over: let go of its tensors."""
        self._owner.clear()
        self._alive.clear()

    def activation_after(self, start: int) -> Found:
        """The activation that the tensor of a node reaches, itself included.

        It goes by the order of calls: of several that take the tensor, the first one. Only what
        keeps channels apart (normalisation, pooling, dropout) may stand between.
        """
        at = start
        while self.nodes[at].part.role != "activation":
            if at != start and self.nodes[at].part.role not in _PASSING:
                return Found(None, f"{self.nodes[at].call.label} comes before any activation")
            if not self.users[at]:
                return Found(None, "nothing takes its output")
            at = self.users[at][0]
        return Found(at)

    def maker_of(self, activation: int) -> Found:
        """The convolution or linear module whose channels, and no others, feed an activation.

        Between them each channel must go its own way, and nothing else may take a tensor: then a
        channel that is always zero behind the activation can be cut out from the maker on.
        """
        at = activation
        while True:
            sources = self.nodes[at].sources
            if len(sources) != 1:
                label = self.nodes[at].call.label
                return Found(None, f"{label} takes {len(sources)} tensors of other layers")
            before = sources[0]
            node = self.nodes[before]
            if self.users[before] != [at]:
                return Found(None, f"the output of {node.call.label} is used elsewhere, too")
            if node.part.role == "maker":
                return Found(before)
            if node.part.role != "channelwise":
                return Found(None, f"{node.call.label} mixes channels or tensors")
            at = before

    def _inherited(self, part: Part, sources: tuple[int, ...]) -> int | None:
        if part.role in ("activation", *_PASSING) and len(sources) == 1:
            return self.nodes[sources[0]].axis
        return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
