"""The calls of one forward pass as a graph: a node for each call whose part is known,
an edge where one takes the very tensor that another returned, or was the last to change
in place.

    x ── conv1 ── bn1 ── relu ── conv2 ── bn2 ── add ── relu.call1
           └───────────── shortcut ──────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from featviz.audit.parts import Call, Part, function_part, module_parts
from featviz.hooks.capture import tensors
from featviz.hooks.layers import list_layers
from featviz.layout.tracing.follow import MadeBy
from featviz.records import Layer
from featviz.text import layer_named

_KEEPS_CHANNELS_APART = ("channelwise", "mixing")


@dataclass(frozen=True)
class CallNode:
    """A call in the graph."""

    call: Call
    part: Part
    channel_axis: int | None
    """The axis of its output that counts channels; None where that is not known."""
    sources: tuple[int, ...]
    """Nodes whose tensors it takes."""
    users: list[int]
    """Nodes that take its tensors, in the order of their calls."""


class CallGraph:
    """The calls of a forward pass; its `add` listens to the follower of `layout`."""

    def __init__(self, model: nn.Module) -> None:
        """Read the modules of the model, and begin without a call."""
        self.nodes: list[CallNode] = []
        self.node_of: dict[Call, int] = {}
        """The node whose tensor a call returned; for a container, of the last call
        inside it."""
        self.shapes: dict[Call, tuple[int, ...]] = {}
        """Shapes of the outputs of calls that returned one tensor."""
        self.output_types: dict[Call, str] = {}
        """Class names of the outputs of all calls, in the order in which they finished.
        """
        self.module_parts = module_parts(model)
        """Modules by name; the functions that they call are not looked at."""
        self.layers = list_layers(model)
        """Modules, and behind them activation functions that were called."""

    def add(
        self,
        layer: Layer,
        number: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Any,
        made_by: MadeBy,
    ) -> int | None:
        """Add a call.

        Args:
            layer: a module, or a function by the module that calls it.
            number: which call of its layer it is, from 0.
            args: with `kwargs` what it was called with.
            output: what it returned, a tensor or anything.
            made_by: the node that made a tensor, or None.

        Returns:
            Its node; None where calls inside it made the output.
        """
        # a ReLU module calls relu: the module is the node
        if layer.is_function and layer.owner in self.module_parts:
            return None
        call = Call(layer.name, layer.type, number)
        # a nested tensor holds tensors of several sizes: asked for its shape it raises
        is_nested = isinstance(output, Tensor) and output.is_nested
        self.output_types[call] = (
            "nested tensor" if is_nested else type(output).__name__
        )
        call_part = function_part(call, args, kwargs)
        call_part = call_part or self.module_parts.get(call.name)
        node = None
        if call_part is not None:
            sources = map(made_by, tensors([args, kwargs]))
            node = self._add_node(call, call_part, sources, output)
            if layer.is_function and call_part.activation is not None:
                self._list_activation(call)
        # a container makes nothing itself: the last call inside it has made its output
        makers = [node] if node is not None else list(map(made_by, tensors(output)))
        if isinstance(output, Tensor) and not is_nested:
            self.shapes[call] = tuple(output.shape)
            if makers[0] is not None:
                self.node_of[call] = makers[0]
        # The output of the model itself is a node: else nothing would use the tensors of
        # the last layers.
        if not call.name:
            self._add_node(
                Call("the model's output", ""), Part("other"), makers, output
            )
        return node

    def _list_activation(self, call: Call) -> None:
        """Add an activation function to the layers, at its first call."""
        if call.index == 0:
            self.layers.append(
                Layer(len(self.layers), call.name, call.type, (call.type,))
            )

    def _add_node(
        self, call: Call, call_part: Part, sources: Iterable[int | None], output: Any
    ) -> int | None:
        """Add a node, and return its number; None, and no node, for a call that returns no
        tensor (a size, say)."""
        if not tensors(output):
            return None
        number = len(self.nodes)
        known_sources = tuple(
            dict.fromkeys(node for node in sources if node is not None)
        )
        # A ReLU has its channels where its input has them. What has several inputs (an
        # addition) may join other axes, and is left to the layout of its output.
        axis = call_part.axis
        keeps_axis = call_part.role in ("activation", *_KEEPS_CHANNELS_APART)
        if axis is None and keeps_axis and len(known_sources) == 1:
            axis = self.nodes[known_sources[0]].channel_axis
        self.nodes.append(CallNode(call, call_part, axis, known_sources, users=[]))
        for source in known_sources:
            self.nodes[source].users.append(number)
        return number

    def activation_behind(self, start: int) -> int | str:
        """The node of the activation that a node's tensor reaches first, maybe the node
        itself; or the reason why no activation is reached. Only what keeps channels apart
        (normalisation, pooling) may stand between."""
        number = start
        while self.nodes[number].part.role != "activation":
            node = self.nodes[number]
            if number != start and node.part.role not in _KEEPS_CHANNELS_APART:
                return f"{layer_named(node.call.label)} comes before any activation"
            if not node.users:
                return "nothing takes its output"
            # the first user: in a pre-activation block the shortcut is a later one
            number = node.users[0]
        return number

    def maker_of(self, activation: int) -> Call | str:
        """The convolution or linear module whose channels, and no others, feed an
        activation, and can be cut out because nothing else takes them; or the reason why
        there is no such module.

        Args:
            activation: its node.
        """
        # Backwards: each node on the way must have one source, and be its only user. A
        # shortcut or a second head would miss the channel; GroupNorm would give other
        # numbers without it.
        user = activation
        while True:
            sources = self.nodes[user].sources
            if len(sources) != 1:
                taker = layer_named(self.nodes[user].call.label)
                return f"{taker} takes {len(sources)} tensors of other layers"
            node = self.nodes[sources[0]]
            label = layer_named(node.call.label)
            if node.users != [user]:
                return f"the output of {label} is used elsewhere, too"
            if node.part.role == "maker":
                return node.call
            if node.part.role != "channelwise":
                return f"{label} mixes channels or tensors"
            user = sources[0]
