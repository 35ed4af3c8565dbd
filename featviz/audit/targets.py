"""What an audit looks at: the selected layers' calls, and the activation that judges each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from featviz.audit import activations
from featviz.audit.call_graph import Graph, watching_calls
from featviz.errors import LayoutError, UsageError
from featviz.hooks import selectors
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.forward import forward
from featviz.hooks.layers import function_in, list_layers
from featviz.layout import recognise
from featviz.models.load import LoadedModel
from featviz.pipeline.dry_pass import choose_layers
from featviz.records import Activation, Call, Hints, Layer, Part, Skip

log = logging.getLogger(__name__)

Size = tuple[int, int]


@dataclass(frozen=True)
class Spot:
    """A call whose output is looked at."""

    call: Call
    axis: int
    """Where the channels are."""
    activation: Activation | None = None


@dataclass(frozen=True)
class AuditTarget:
    """One call of a selected layer."""

    spot: Spot
    dead_at: Spot | None
    """The activation behind which `dead` is judged; None where there is none."""
    reason: str = ""
    """Why there is none."""


@dataclass(frozen=True)
class Trace:
    """One forward pass, written down."""

    graph: Graph
    layers: tuple[Layer, ...]
    """Modules, and activation functions as layers of type `fn:relu`."""
    size: Size
    """Height and width of the input."""
    atoms: frozenset[str]
    """Modules that are not looked into."""
    gave: Mapping[Call, str]
    """Class name of what each call gave, in the order in which they finished."""


@dataclass(frozen=True)
class AuditPlan:
    """What is looked at in a model."""

    targets: tuple[AuditTarget, ...]
    """In the order in which they finish in a forward pass."""
    skipped: tuple[Skip, ...]
    never_ran: tuple[str, ...]
    trace: Trace

    @property
    def spots(self) -> dict[Call, Spot]:
        """All calls to watch."""
        spots = [spot for t in self.targets for spot in (t.spot, t.dead_at) if spot is not None]
        return {spot.call: spot for spot in spots}


def trace(model: LoadedModel, blank: Sequence[Tensor]) -> Trace:
    """Run the model once on `blank` and write down every call.

    Raises:
        ForwardError: the model cannot take it.
    """
    modules = dict(model.module.named_modules())
    parts = {name: activations.of_module(module) for name, module in modules.items()}
    graph, gave = Graph(), dict[Call, str]()

    def sink(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        nested = isinstance(output, Tensor) and output.is_nested
        gave[call] = "nested tensor" if nested else type(output).__name__
        part = parts.get(call.name)
        if (function := function_in(call.name)) is not None:
            part = activations.of_function(function, args, kwargs)
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
    layers = [*list_layers(model.module), *_functions(graph, len(modules))]
    size = (blank[0].shape[-2], blank[0].shape[-1])
    return Trace(graph, tuple(layers), size, atoms, gave)


def choose(model: LoadedModel, text: str | None, blank: Sequence[Tensor]) -> AuditPlan:
    """The layers that the selectors take; without any, all activations (modules and functions),
    or, in a model without, its convolutions or linear layers.

    Raises:
        UsageError: nothing matches, or nothing of it ran.
        ForwardError: the model cannot take `blank`.
    """
    found = trace(model, blank)
    names = _default(found) if text is None else _selected(model, text, blank, found)
    skipped, targets = [], []
    for call in (call for call in found.gave if call.name in names):
        try:
            targets.append(_target(found, call))
        except LayoutError as error:
            skipped.append(Skip(call.name, call.type, 0, "output", call.index, "", error.message))
    called = {call.name for call in found.gave}
    never_ran = tuple(name for name in names if name not in called)
    if not targets:
        reasons = [f"{skip.layer} {skip.reason}" for skip in skipped[:3]]
        raise UsageError(
            f"none of the {len(names)} selected layers gives a tensor with channels",
            "; ".join([*reasons, *(f"{name} never ran" for name in never_ran[:3])]),
        )
    return AuditPlan(tuple(targets), tuple(skipped), never_ran, found)


def _functions(graph: Graph, first: int) -> list[Layer]:
    """Activation functions that the pass called, as layers."""
    found = {
        node.call.name: node.call.type
        for node in graph.nodes
        if node.part.activation is not None and function_in(node.call.name) is not None
    }
    return [
        Layer(first + number, name, type, (type,))
        for number, (name, type) in enumerate(found.items())
    ]


def _default(found: Trace) -> list[str]:
    nodes = found.graph.nodes
    names = [node.call.name for node in nodes if node.part.activation is not None]
    for kind in ("_ConvNd", "Linear"):
        names = names or [layer.name for layer in found.layers if kind in layer.classes]
    if not names:
        raise UsageError(
            "the model has neither activations nor convolutions nor linear layers",
            "--layers says what to look at",
        )
    return list(dict.fromkeys(names))


def _selected(model: LoadedModel, text: str, blank: Sequence[Tensor], found: Trace) -> list[str]:
    wanted = selectors.parse(text)
    names = [layer.name for layer in selectors.select(found.layers, wanted)]
    if not names:
        names = [layer.name for layer in choose_layers(model, text, blank)]
    for idle in selectors.idle(found.layers, wanted):
        log.warning("selector %r matches no layer", idle)
    return names


def _target(found: Trace, call: Call) -> AuditTarget:
    graph = found.graph
    if call not in graph.shapes:
        raise LayoutError(f"gives a {found.gave[call]}, not a tensor")
    node = graph.given_by.get(call)
    spot = _spot(found, call, node)
    if node is None:
        return AuditTarget(spot, None, "no call that was seen makes its output")
    after = graph.activation_after(node)
    if after.node is None:
        return AuditTarget(spot, None, after.reason)
    at = graph.nodes[after.node]
    judge = _spot(found, at.call, after.node)
    if judge.activation is None or not judge.activation.zero:
        own = after.node == node
        return AuditTarget(spot, None, f"{'it' if own else at.call.label} gives no exact zeros")
    if _channels(found, judge) != _channels(found, spot):
        return AuditTarget(spot, None, f"{at.call.label}, which follows, has other channels")
    return AuditTarget(spot, judge)


def _spot(found: Trace, call: Call, node: int | None) -> Spot:
    shape = found.graph.shapes[call]
    known = None if node is None else found.graph.nodes[node]
    axis = _guess(shape, found.size) if known is None or known.axis is None else known.axis
    return Spot(call, axis, None if known is None else known.part.activation)


def _channels(found: Trace, spot: Spot) -> int:
    return found.graph.shapes[spot.call][spot.axis]


def _guess(shape: Sequence[int], size: Size) -> int:
    """Where the channels are, where the layers before do not tell."""
    if len(shape) == 4:
        hints = Hints(input_size=size)
        return -1 if recognise([1, *shape[1:]], hints).layout == "nhwc" else 1
    if len(shape) not in (2, 3, 5):
        raise LayoutError(f"shape {list(shape)} has no channels")
    return -1 if len(shape) == 3 else 1
