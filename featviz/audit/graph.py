"""The calls of one forward pass as a graph: a node for each call whose part is known
(`audit.parts`), and an edge where a call takes the tensor that another one has returned,
or was the last to change in place.

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

_KEEPS_CHANNELS = ("channelwise", "norm", "mixing")
"""Roles of parts whose output has the channels of the input, in their order."""


@dataclass(frozen=True)
class CallNode:
    """A call in the graph. The number of a node is its index in `CallGraph.nodes`."""

    call: Call
    part: Part
    channel_axis: int | None
    """The axis of the output that counts channels; None if that is not known."""
    sources: tuple[int, ...]
    """Numbers of the nodes whose tensors it takes."""
    users: list[int]
    """Numbers of the nodes that take its tensors, in the order of their calls."""


@dataclass(frozen=True)
class Cut:
    """The calls of modules that lose a channel if it is cut out of the model."""

    maker: Call
    """The convolution or linear module that makes the channel."""
    others: list[Call]
    """The norms that follow it, and the convolutions and linear modules that read the
    channel."""


class CallGraph:
    """The calls of a forward pass. During the pass, `note_call` is the listener of
    `HintBook.traced`."""

    def __init__(self, model: nn.Module) -> None:
        """Read the modules of the model, and begin without a call."""
        self.nodes: list[CallNode] = []
        self.node_of: dict[Call, int] = {}
        """Number of the node that made the tensor which a call returned: the node of the
        call, or for a container the node of a call inside it. Only for calls that returned
        one tensor."""
        self.shapes: dict[Call, tuple[int, ...]] = {}
        """Shapes of the outputs of calls that returned one tensor."""
        self.output_types: dict[Call, str] = {}
        """Class names of the outputs of all calls, in the order in which the calls
        finished."""
        self.module_parts = module_parts(model)
        """Modules whose part is known, by name. Each is one node; the functions that it
        calls are none."""
        self.layers = list_layers(model)
        """All modules, and after them the activation functions that were called."""

    def note_call(
        self,
        layer: Layer,
        number: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Any,
        made_by: MadeBy,
    ) -> int | None:
        """Note a call that has finished; calls inside it were noted before.

        Args:
            layer: a module, or a function as a layer of the module that calls it.
            number: which call of its layer it is, from 0.
            args: the arguments by position.
            kwargs: the arguments by name.
            output: what the call returned, of any type.
            made_by: takes a tensor, and returns the number of the node that made it; None
                if no node did.

        Returns:
            The number of the call's node. None if the call has no node: it is a container,
            its part is not known, or it returned no tensor.
        """
        # where a ReLU module calls relu, the module is the node
        if layer.is_function and layer.owner in self.module_parts:
            return None
        call = Call(layer.name, layer.type, number)
        call_part = function_part(call, args, kwargs)
        call_part = call_part or self.module_parts.get(call.name)
        node = None
        if call_part is not None:
            sources = map(made_by, tensors([args, kwargs]))
            node = self._add_node(call, call_part, sources, output)
            is_new_activation = number == 0 and call_part.activation is not None
            if layer.is_function and is_new_activation:
                self.layers.append(
                    Layer(len(self.layers), call.name, call.type, (call.type,))
                )
        # the output of a container was made by calls inside it
        makers = [node] if node is not None else list(map(made_by, tensors(output)))
        self._note_output(call, output, makers[0] if makers else None)
        # The output of the model is a node, too, so that the tensors of the last layers
        # have a user.
        if not call.name:
            self._add_node(
                Call("the model's output", ""), Part("other"), makers, output
            )
        return node

    def _note_output(self, call: Call, output: Any, maker: int | None) -> None:
        """Note the type of a call's output. If the output is a tensor, note its shape and
        the number of the node that made it, too.

        Args:
            maker: the number of this node; None if no node made the output.
        """
        # a nested tensor holds tensors of several sizes, and has no shape
        if isinstance(output, Tensor) and output.is_nested:
            self.output_types[call] = "nested tensor"
            return
        self.output_types[call] = type(output).__name__
        if isinstance(output, Tensor):
            self.shapes[call] = tuple(output.shape)
            if maker is not None:
                self.node_of[call] = maker

    def _add_node(
        self, call: Call, call_part: Part, sources: Iterable[int | None], output: Any
    ) -> int | None:
        """Add a node for a call, and return its number. A call that returned no tensor
        (but a size, say) gets no node, and the result is None.

        Args:
            sources: for each tensor that the call takes, the number of the node that made
                it; None for a tensor that no node made.
        """
        if not tensors(output):
            return None
        number = len(self.nodes)
        known_sources = tuple(
            dict.fromkeys(node for node in sources if node is not None)
        )
        # A ReLU has its channels on the axis where its input has them. With several inputs
        # (an addition) that is not sure: there the layout of the output decides later.
        axis = call_part.axis
        keeps_axis = call_part.role in ("activation", *_KEEPS_CHANNELS)
        if axis is None and keeps_axis and len(known_sources) == 1:
            axis = self.nodes[known_sources[0]].channel_axis
        self.nodes.append(CallNode(call, call_part, axis, known_sources, users=[]))
        for source in known_sources:
            self.nodes[source].users.append(number)
        return number

    def activation_behind(self, start: int) -> int | str:
        """Find the first activation that a node's tensor reaches through normalisation,
        pooling and the like.

        Args:
            start: number of the node. If the node is an activation, it is the result.

        Returns:
            The number of the activation's node; or as a text for people the reason why
            there is none.
        """
        number = start
        while self.nodes[number].part.role != "activation":
            node = self.nodes[number]
            if number != start and node.part.role not in _KEEPS_CHANNELS:
                return f"{layer_named(node.call.label)} comes before any activation"
            if not node.users:
                return "nothing takes its output"
            # in a pre-activation block the shortcut is a later user than the activation
            number = node.users[0]
        return number

    def cut_at(self, activation: int) -> Cut | str:
        """Find what loses a channel if one that is dead at an activation is cut out.

        Args:
            activation: number of the activation's node.

        Returns:
            As a text for people the reason why no channel can be cut out, if that is so.
        """
        # Go back from the activation to the maker. Each node on the way must have only
        # one source, and that source only one user: a shortcut or a second head would miss
        # the channel. Each node must also be channelwise: after a cut, GroupNorm would give
        # other numbers.
        norms = []
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
            if node.part.role not in ("maker", "channelwise", "norm"):
                return f"{label} mixes channels or tensors"
            if not node.part.can_be_cut and node.part.role != "channelwise":
                return f"no single channel can be cut out of {label}"
            if node.part.role == "maker":
                break
            if node.part.role == "norm":
                norms.append(node.call)
            user = sources[0]
        readers = self._readers_of(activation)
        if isinstance(readers, str):
            return readers
        return Cut(node.call, norms + readers)

    def _readers_of(self, activation: int) -> list[Call] | str:
        """Find the convolutions and linear modules that read the channels of an activation,
        each by input channels of its own.

        Returns:
            As a text for people the reason, if the channels are read in another way, too.
        """
        readers = []
        reached = [activation]
        for number in reached:
            source = self.nodes[number]
            if not source.users:
                return "nothing takes its output"
            for user in source.users:
                node = self.nodes[user]
                if self._keeps_apart(source, node):
                    reached.append(user)
                elif self._reads(source, node):
                    readers.append(node.call)
                else:
                    label = layer_named(node.call.label)
                    return f"{label} takes it, and may need every channel"
        return readers

    def _keeps_apart(self, source: CallNode, node: CallNode) -> bool:
        """Whether a call passes on the channels of its source one by one, and zeros as
        zeros."""
        if node.part.role == "flatten":
            return source.channel_axis == 1
        if node.part.role != "channelwise" or node.channel_axis is None:
            return False
        before = self.shapes.get(source.call)
        after = self.shapes.get(node.call)
        if before is None or after is None or len(before) != len(after):
            return False
        # pooling along the axis of channels would mix them
        return before[node.channel_axis] == after[node.channel_axis]

    def _reads(self, source: CallNode, node: CallNode) -> bool:
        """Whether a call is of a module that has input channels for those of its source."""
        shape = self.shapes.get(source.call)
        if node.part.role != "maker" or not node.part.can_be_cut or shape is None:
            return False
        if node.part.axis is None or source.channel_axis is None:
            return False
        # a linear module reads the last axis, of a map the columns
        return (node.part.axis - source.channel_axis) % len(shape) == 0
