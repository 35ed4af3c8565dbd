"""Which layers are audited, and the activation by which each one is judged for `dead`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from featviz.audit.call_graph import Trace, trace
from featviz.errors import LayoutError, UsageError
from featviz.hooks import selectors
from featviz.hooks.capture import never_ran
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.forward import forward
from featviz.hooks.layers import modules_by_name
from featviz.layout import channel_axis, recognise
from featviz.layout.overrides import HintBook
from featviz.models.load import LoadedModel
from featviz.pipeline.dry_pass import choose_layers
from featviz.records import Activation, Call, Skip

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spot:
    """A call whose output is counted."""

    call: Call
    axis: int
    """The axis of its output that counts channels."""
    activation: Activation | None = None


@dataclass(frozen=True)
class AuditTarget:
    """One call of a selected layer."""

    spot: Spot
    dead_at: Spot | None
    """The activation behind which `dead` is judged; None where there is none."""
    reason: str = ""
    """Why `dead_at` is None."""


@dataclass(frozen=True)
class AuditPlan:
    """The calls of a model that are audited."""

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


def choose(model: LoadedModel, text: str | None, blank: Sequence[Tensor]) -> AuditPlan:
    """The layers that the selectors take; without any, all activations (modules and functions),
    or, in a model without, its convolutions or linear layers.

    Raises:
        UsageError: nothing matches, or nothing of it ran.
        ForwardError: the model cannot take `blank`.
    """
    traced = trace(model, blank)
    names = _default(traced) if text is None else _selected(model, text, blank, traced)
    skipped, targets = [], []
    book = HintBook(model.module, blank[0].shape)
    with in_eval_mode(model.module), book.traced(model.module, traced.layers):
        forward(model.module, [arg.to(model.device) for arg in blank])
    for call in (call for call in traced.gave if call.name in names):
        try:
            targets.append(_target(traced, call, book))
        except LayoutError as error:
            skipped.append(Skip(call.name, call.type, 0, "output", call.index, "", error.message))
    ran = {call.name for call in traced.gave}.intersection(names)
    silent = never_ran([n for n in names if n not in ran], ran, modules_by_name(model.module))
    if not targets:
        reasons = [f"{skip.layer} {skip.reason}" for skip in skipped[:3]]
        raise UsageError(
            f"none of the {len(names)} selected layers gives a tensor with channels",
            "; ".join([*reasons, *(f"{name} never ran" for name in silent[:3])]),
        )
    return AuditPlan(tuple(targets), tuple(skipped), tuple(silent), traced)


def _default(traced: Trace) -> list[str]:
    nodes = traced.graph.nodes
    names = [node.call.name for node in nodes if node.part.activation is not None]
    for kind in ("_ConvNd", "Linear"):
        names = names or [layer.name for layer in traced.layers if kind in layer.classes]
    if not names:
        raise UsageError(
            "the model has neither activations nor convolutions nor linear layers",
            "--layers says what to look at",
        )
    return list(dict.fromkeys(names))


def _selected(model: LoadedModel, text: str, blank: Sequence[Tensor], traced: Trace) -> list[str]:
    wanted = selectors.parse(text)
    names = [layer.name for layer in selectors.select(traced.layers, wanted)]
    if not names:
        names = [layer.name for layer in choose_layers(model, text, blank)]
    for idle in selectors.idle(traced.layers, wanted):
        log.warning("selector %r matches no layer", idle)
    return names


def _target(traced: Trace, call: Call, book: HintBook) -> AuditTarget:
    graph = traced.graph
    if call not in graph.shapes:
        raise LayoutError(f"gives a {traced.gave[call]}, not a tensor")
    node = graph.given_by.get(call)
    spot = _spot(traced, call, node, book)
    if node is None:
        return AuditTarget(spot, None, "no call that was seen makes its output")
    after = graph.activation_after(node)
    if after.node is None:
        return AuditTarget(spot, None, after.reason)
    at = graph.nodes[after.node]
    judge = _spot(traced, at.call, after.node, book)
    if judge.activation is None or not judge.activation.zero:
        label = "it" if after.node == node else at.call.label
        return AuditTarget(spot, None, f"{label} gives no exact zeros")
    if _channels(traced, judge) != _channels(traced, spot):
        return AuditTarget(spot, None, f"{at.call.label}, which follows, has other channels")
    return AuditTarget(spot, judge)


def _spot(traced: Trace, call: Call, node: int | None, book: HintBook) -> Spot:
    known = None if node is None else traced.graph.nodes[node]
    axis = None if known is None else known.axis
    if axis is None:
        axis = _channel_axis(traced, call, book)
    return Spot(call, axis, None if known is None else known.part.activation)


def _channels(traced: Trace, spot: Spot) -> int:
    return traced.graph.shapes[spot.call][spot.axis]


def _channel_axis(traced: Trace, call: Call, book: HintBook) -> int:
    """The axis that counts channels by the layout of a call's output, where the layers before do
    not determine it.

    Raises:
        LayoutError: no layout fits, as it is with the boxes or anchors of a detector, or that
            layout has no channels.
    """
    shape = traced.graph.shapes[call]
    layer = next(layer for layer in traced.layers if layer.name == call.name)
    hints = book.of_shape(layer, shape)
    axis = channel_axis(shape, hints) if len(shape) > 1 else None
    if axis is None or recognise(shape, hints).layout == "sequence":  # its rows may be anchors
        raise LayoutError(f"shape {list(shape)} has no axis that is known to count channels")
    return axis
