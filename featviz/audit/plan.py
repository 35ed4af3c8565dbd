"""Which calls of a model are audited, and at which activation each is judged for
`dead`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from featviz.audit.graph import CallGraph
from featviz.audit.parts import Activation, Call
from featviz.errors import LayoutError, UsageError
from featviz.hooks.capture import Recorder, forward
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.functions import unwatched, watch_calls
from featviz.hooks.layers import function_in, list_layers, modules_by_name
from featviz.layout import channel_axis, recognise
from featviz.layout.tracing.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.records import Layer
from featviz.run.choose import choose_layers, no_channels
from featviz.text import layer_named


@dataclass(frozen=True)
class CountedCall:
    """A call whose output is counted."""

    call: Call
    channel_axis: int
    """The axis of the output that counts channels."""
    activation: Activation | None = None
    """Which activation function the call is; None for another call."""
    dead_at: CountedCall | None = None
    """The activation where the call's channels are judged for `dead`, which may be the call
    itself; None if they are not judged for `dead`."""
    reason: str = ""
    """Why they are not judged for `dead`; empty if they are."""


class SkippedCall(NamedTuple):
    """A call that cannot be counted, as an entry of `skipped` in audit.json."""

    layer: str
    reason: str


@dataclass(frozen=True)
class AuditPlan:
    """Which calls of a model are audited; made by one forward pass on a blank input."""

    graph: CallGraph
    targets: list[CountedCall] = field(default_factory=list)
    """The audited calls, in the order in which they finish in a forward pass."""
    skipped: list[SkippedCall] = field(default_factory=list)
    never_ran: list[str] = field(default_factory=list)
    """Names of selected layers that the pass did not reach."""

    @property
    def counted_calls(self) -> dict[Call, CountedCall]:
        """The audited calls, and the activations where they are judged for `dead`."""
        counted = {}
        for target in self.targets:
            counted[target.call] = target
            if target.dead_at is not None:
                counted[target.dead_at.call] = target.dead_at
        return counted

    @contextmanager
    def watching(
        self, model: nn.Module, sink: Callable[[Call, Any], None], calls: Iterable[Call]
    ) -> Iterator[None]:
        """During this block, hand the outputs of some layers to a sink. In each forward
        pass the calls of a layer are numbered from 0.

        Args:
            model: the module that the plan was made of.
            sink: takes a call and the output of the call, before a later operation can
                change the output in place.
            calls: the layers of these calls are watched. The sink gets all calls of these
                layers.
        """
        names = {call.name for call in calls}
        next_call = Counter[str]()

        def leave(layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
            """Number a call that has finished, and hand its output to the sink."""
            call = Call(layer.name, layer.type, next_call[layer.name])
            next_call[layer.name] += 1
            # functions of torch that the sink calls are no calls of the model
            with unwatched():
                sink(call, output)

        def is_watched(layer: Layer) -> bool:
            return layer.name in names

        # at the start of each pass, since a pass that raises does not reach its end
        restart = model.register_forward_pre_hook(
            lambda module, args: next_call.clear()
        )
        try:
            hooks = watch_calls(
                model,
                leave,
                layers=[layer for layer in list_layers(model) if is_watched(layer)],
                functions=is_watched if any(map(function_in, names)) else None,
                opaque=self.graph.module_parts,
                first=True,
            )
            with hooks as mode, mode:
                yield
        finally:
            restart.remove()


def plan_audit(
    model: LoadedModel, text: str | None, blank: Sequence[Tensor]
) -> AuditPlan:
    """Plan the audit of a model by a forward pass.

    Args:
        text: selectors as in `--layers`; None for the layers of `_default_names`.
        blank: arguments of the model, whose values do not matter.

    Raises:
        UsageError: a selector cannot be read or matches nothing; no selected layer can be
            counted; or `text` is None, and the model has no activation, convolution or
            linear layer.
    """
    graph = CallGraph(model.module)
    book = HintBook(model.module, blank[0].shape)
    with (
        in_eval_mode(model.module),
        book.traced(model.module, (), listener=graph.note_call),
    ):
        forward(model.module, [arg.to(model.device) for arg in blank])
    if text is None:
        names = _default_names(graph)
        layers = [layer for layer in graph.layers if layer.name in names]
    else:
        layers = choose_layers(model, text, blank)
        names = {layer.name for layer in layers}
        # the graph does not list functions that are not activations
        graph.layers += layers
    plan = AuditPlan(graph)
    # in the order in which the calls finished
    ran = Counter[str]()
    for call in graph.output_types:
        if call.name not in names:
            continue
        ran[call.name] += 1
        try:
            plan.targets.append(_judged_call(graph, call, book))
        except LayoutError as error:
            plan.skipped.append(SkippedCall(call.name, error.message))
    recorder = Recorder(layers, modules_by_name(model.module), calls=ran)
    plan.never_ran.extend(layer.name for layer in recorder.never_ran)
    if not plan.targets:
        raise no_channels(len(names), dict(plan.skipped), plan.never_ran)
    return plan


def _default_names(graph: CallGraph) -> set[str]:
    """Names of the layers that are audited if the user selects none: all activations,
    modules and functions; in a model without activations, all convolutions; in a model
    without convolutions, too, all linear layers.

    Raises:
        UsageError: the model has no layer of these kinds.
    """
    names = {node.call.name for node in graph.nodes if node.part.activation is not None}
    for class_name in ("_ConvNd", "Linear"):
        if names:
            break
        names = {layer.name for layer in graph.layers if class_name in layer.classes}
    if not names:
        raise UsageError(
            "the model has neither activations nor convolutions nor linear layers",
            "--layers says what to look at",
        )
    return names


def _judged_call(graph: CallGraph, call: Call, book: HintBook) -> CountedCall:
    """Find the activation where a call is judged for `dead`, or the reason why there is
    none.

    Raises:
        LayoutError: the output of the call is not a tensor with channels, and cannot be
            counted.
    """
    if call not in graph.shapes:
        raise LayoutError(f"gives a {graph.output_types[call]}, not a tensor")
    counted = _counted_call(graph, call, book)
    start = graph.node_of.get(call)
    if start is None:
        return replace(counted, reason="no call that was seen makes its output")
    number = graph.activation_behind(start)
    if isinstance(number, str):
        return replace(counted, reason=number)
    judge = _counted_call(graph, graph.nodes[number].call, book)
    if judge.activation is None or not judge.activation.zero:
        label = "it" if number == start else layer_named(judge.call.label)
        return replace(counted, reason=f"{label} gives no exact zeros")
    # after a reshape between the two, channel i of one is not channel i of the other
    channels = graph.shapes[call][counted.channel_axis]
    if graph.shapes[judge.call][judge.channel_axis] != channels:
        reason = f"{layer_named(judge.call.label)}, which follows, has other channels"
        return replace(counted, reason=reason)
    return replace(counted, dead_at=judge)


def _counted_call(graph: CallGraph, call: Call, book: HintBook) -> CountedCall:
    """A call with its channel axis, which comes from the graph, or else from the layout of
    the output. `dead_at` and `reason` are not set.

    Raises:
        LayoutError: no axis is known to count channels.
    """
    activation = None
    axis = None
    if call in graph.node_of:
        node = graph.nodes[graph.node_of[call]]
        activation = node.part.activation
        axis = node.channel_axis
    if axis is None:
        shape = graph.shapes[call]
        layer = next(layer for layer in graph.layers if layer.name == call.name)
        hints = book.of_shape(layer, shape)
        if len(shape) > 1:
            axis = channel_axis(shape, hints)
        # a sequence may be a list of anchors, which are not channels
        if axis is None or recognise(shape, hints).layout == "sequence":
            raise LayoutError(
                f"shape {list(shape)} has no axis known to count channels"
            )
    return CountedCall(call, axis, activation)
