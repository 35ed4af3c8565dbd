"""The calls of a forward pass: which activation follows a layer, and which layer feeds it.

A forward pass is recorded as a graph: a node for each call, an edge where a call takes the very
tensor that another one returned. Tensors are compared by identity and kept while the pass lasts, so
that no address is used twice. An in-place operation returns the tensor that it was given; from then
on the tensor belongs to the operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from featviz.audit.activations import of_function, of_module
from featviz.hooks.containers import tensors
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.forward import forward
from featviz.hooks.functions import unwatched, watching
from featviz.hooks.layers import function_in, list_layers, modules_by_name
from featviz.models.load import LoadedModel
from featviz.records import Call, Layer, Part

_PASSING = ("channelwise", "mixing")


@dataclass(frozen=True)
class Node:
    """One call."""

    call: Call
    part: Part
    axis: int | None
    """The axis of its output that counts channels, if that is known."""
    sources: tuple[int, ...]
    """Nodes whose tensors it takes."""


@dataclass(frozen=True)
class Reached:
    """The node to which a way through the graph leads, or the reason why it leads to none."""

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
        """Shapes of the outputs of calls that returned one tensor."""
        self._owner: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def note(self, call: Call, part: Part, inputs: Any, output: Any) -> None:
        """Record a call; one that returns no tensor (a size, say) is left out."""
        given = tensors(output)
        if not given:
            return
        known = (self._owner.get(id(tensor)) for tensor in tensors(inputs))
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
        """Record a module with others inside: one of them made the tensor that it returns."""
        if isinstance(output, Tensor) and not output.is_nested:
            self.shapes[call] = tuple(output.shape)
            if id(output) in self._owner:
                self.given_by[call] = self._owner[id(output)]

    def release(self) -> None:
        """The pass is over: let go of its tensors."""
        self._owner.clear()
        self._alive.clear()

    def activation_after(self, start: int) -> Reached:
        """The activation that the tensor of a node reaches, itself included.

        It goes by the order of calls: of several that take the tensor, the first one. Only what
        keeps channels apart (normalisation, pooling, dropout) may stand between.
        """
        at = start
        while self.nodes[at].part.role != "activation":
            if at != start and self.nodes[at].part.role not in _PASSING:
                return Reached(None, f"{self.nodes[at].call.label} comes before any activation")
            if not self.users[at]:
                return Reached(None, "nothing takes its output")
            at = self.users[at][0]
        return Reached(at)

    def maker_of(self, activation: int) -> Reached:
        """The convolution or linear module whose channels, and no others, feed an activation.

        Between them each channel must go its own way, and nothing else may take a tensor: then a
        channel that is always zero behind the activation can be cut out from the maker on.
        """
        at = activation
        while True:
            sources = self.nodes[at].sources
            if len(sources) != 1:
                label = self.nodes[at].call.label
                return Reached(None, f"{label} takes {len(sources)} tensors of other layers")
            before = sources[0]
            node = self.nodes[before]
            if self.users[before] != [at]:
                return Reached(None, f"the output of {node.call.label} is used elsewhere, too")
            if node.part.role == "maker":
                return Reached(before)
            if node.part.role != "channelwise":
                return Reached(None, f"{node.call.label} mixes channels or tensors")
            at = before

    def _inherited(self, part: Part, sources: tuple[int, ...]) -> int | None:
        if part.role in ("activation", *_PASSING) and len(sources) == 1:
            return self.nodes[sources[0]].axis
        return None


@dataclass(frozen=True)
class Trace:
    """One forward pass, recorded."""

    graph: Graph
    layers: tuple[Layer, ...]
    """Modules, and activation functions as layers of type `fn:relu`."""
    atoms: frozenset[str]
    """Modules that are not looked into."""
    gave: Mapping[Call, str]
    """Class name of what each call gave, in the order in which they finished."""


def trace(model: LoadedModel, blank: Sequence[Tensor]) -> Trace:
    """Run the model once on `blank` and record every call.

    Raises:
        ForwardError: the model cannot take it.
    """
    modules = modules_by_name(model.module)
    parts = {name: of_module(module) for name, module in modules.items()}
    graph, gave = Graph(), dict[Call, str]()

    def sink(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        nested = isinstance(output, Tensor) and output.is_nested
        gave[call] = "nested tensor" if nested else type(output).__name__
        part = parts.get(call.name)
        if (function := function_in(call.name)) is not None:
            part = of_function(function, args, kwargs)
        if part is None:
            graph.note_outer(call, output)
        else:
            graph.note(call, part, [args, kwargs], output)
        if not call.name:
            graph.note(Call("the model's output", ""), Part("other"), [output], output)

    atoms = frozenset(name for name, part in parts.items() if part is not None)
    with in_eval_mode(model.module), watching_calls(model.module, sink, atoms=atoms):
        forward(model.module, [arg.to(model.device) for arg in blank])
    graph.release()
    layers = list_layers(model.module)
    layers += _functions(graph, len(layers))
    return Trace(graph, tuple(layers), atoms, gave)


def _functions(graph: Graph, first: int) -> list[Layer]:
    """Activation functions that the pass called, as layers."""
    types = {
        node.call.name: node.call.type
        for node in graph.nodes
        if node.part.activation is not None and function_in(node.call.name) is not None
    }
    return [
        Layer(first + number, name, type, (type,))
        for number, (name, type) in enumerate(types.items())
    ]


CallSink = Callable[[Call, Sequence[Any], Mapping[str, Any], Any], None]
"""Takes a call, its arguments and its result; must be done with the tensors when it returns."""


@contextmanager
def watching_calls(
    model: nn.Module,
    sink: CallSink,
    names: Collection[str] | None = None,
    atoms: Container[str] = frozenset(),
) -> Iterator[None]:
    """Hand every call of a module or a function to a sink; calls are numbered in each forward pass.

    Args:
        names: of the modules and functions whose calls are handed on; None for all. Functions are
            watched only where one of the names is one, as it costs some microseconds a call.
        atoms: names of modules whose inside is not looked into for functions.
    """
    counts: Counter[str] = Counter()

    def wanted(layer: Layer) -> bool:
        return names is None or layer.name in names

    def leave(layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        call = Call(layer.name, layer.type, counts[layer.name])
        counts[layer.name] += 1
        with unwatched():
            sink(call, args, kwargs, output)

    first = model.register_forward_pre_hook(lambda module, args: counts.clear())
    modules = [layer for layer in list_layers(model) if wanted(layer)]
    functions = names is None or any(function_in(name) is not None for name in names)
    try:
        with watching(
            model,
            leave,
            layers=modules,
            functions=wanted if functions else None,
            opaque=lambda name, module: name in atoms,
        ):
            yield
    finally:
        first.remove()
