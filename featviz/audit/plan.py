"""Which calls of a model are audited, and where each is judged: the graph of a forward pass."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from featviz.errors import LayoutError, UsageError
from featviz.hooks import selectors
from featviz.hooks.capture import Recorder, forward, tensors
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.functions import placed, unwatched
from featviz.hooks.layers import class_names, function_in, list_layers, modules_by_name
from featviz.layout import channel_axis, recognise
from featviz.layout.tracing.follow import MadeBy
from featviz.layout.tracing.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.records import Layer
from featviz.run.choose import choose_layers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """One call of a module or a function in a forward pass."""

    name: str
    type: str
    index: int = 0

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


@dataclass(frozen=True)
class Part:
    """What a module or function is to the channels that pass through it."""

    role: Literal["maker", "activation", "channelwise", "mixing", "other"]
    """maker: a convolution or linear module. channelwise: channel i depends on channel i alone.
    mixing: the others have a say in it (GroupNorm)."""
    axis: int | None = None
    """Where the channels are in its output; None where its input decides."""
    activation: Activation | None = None


# Activations and other parts: a wrong guess here is a wrong verdict, hence a table by hand

_NEAR = 1e-3  # share of the range between two bounds within which a value is at one of them


def _clipped(low: float, high: float) -> Activation:
    """Hardtanh with its own ends: from zero up it is a ReLU with a ceiling."""
    if low == 0:
        return Activation(zero=True, bounds=(high,), margin=_NEAR * high)
    return Activation(bounds=(low, high), margin=_NEAR * (high - low))


RELU, RELU6, TANH = Activation(zero=True), _clipped(0.0, 6.0), _clipped(-1.0, 1.0)
UNIT = Activation(bounds=(0.0, 1.0), margin=_NEAR)
SMOOTH = Activation()  # neither exact zeros nor a bound: whether it varies is the right question

_CHANNELWISE, _OTHER = Part("channelwise"), Part("other")

PARTS: dict[str, Part] = {
    name: known if isinstance(known, Part) else Part("activation", activation=known)
    for known, names in (
        (RELU, "ReLU relu"),
        (RELU6, "ReLU6 relu6"),
        (UNIT, "Sigmoid Hardsigmoid HardSigmoid sigmoid hardsigmoid"),
        (TANH, "Tanh Hardtanh tanh hardtanh"),
        (SMOOTH, "SiLU Swish silu GELU GELUTanh QuickGELU gelu Mish HardMish mish"),
        (SMOOTH, "Hardswish HardSwish hardswish LeakyReLU leaky_relu PReLU prelu RReLU rrelu"),
        (SMOOTH, "ELU elu CELU celu SELU selu Softplus softplus Softsign softsign"),
        (SMOOTH, "LogSigmoid logsigmoid"),
        (Part("maker", axis=1), "_ConvNd"),
        (Part("maker", axis=-1), "Linear"),
        (_CHANNELWISE, "_BatchNorm FrozenBatchNorm2d batch_norm _InstanceNorm instance_norm"),
        (_CHANNELWISE, "_DropoutNd StochasticDepth DropPath dropout dropout2d"),
        (_CHANNELWISE, "_MaxPoolNd max_pool2d _AdaptiveMaxPoolNd adaptive_max_pool2d"),
        (_CHANNELWISE, "_AvgPoolNd avg_pool2d _AdaptiveAvgPoolNd adaptive_avg_pool2d"),
        (_CHANNELWISE, "Upsample upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"),
        (_CHANNELWISE, "interpolate Identity contiguous clone detach float to"),
        (Part("mixing"), "GroupNorm group_norm LayerNorm layer_norm RMSNorm rms_norm"),
    )
    for name in names.split()
}
"""What can be asked of an activation, or what another part does to channels: modules by class name
anywhere in the MRO, and functions of torch, torch.nn.functional and Tensor."""


# The graph of a forward pass


@dataclass(frozen=True)
class Node:
    """One call."""

    call: Call
    part: Part
    axis: int | None  # the axis of its output that counts channels, if that is known
    sources: tuple[int, ...]  # nodes whose tensors it takes
    users: list[int]  # nodes that take its tensors, in the order of their calls


@dataclass(frozen=True)
class Spot:
    """A call whose output is counted."""

    call: Call
    axis: int
    activation: Activation | None = None
    dead_at: Spot | None = None
    """The activation at which `dead` is judged; None where there is none, with the reason."""
    reason: str = ""


class AuditPlan:
    """The calls of a model that are audited, in the graph of one forward pass: a node for each, an
    edge where one takes the very tensor that another returned, or was the last to change."""

    def __init__(self, model: nn.Module) -> None:
        self.targets: list[Spot] = []  # in the order in which they finish in a forward pass
        self.skipped: list[tuple[str, str]] = []  # layers and reasons
        self.never_ran: list[str] = []
        self.parts: dict[str, Part] = {}  # modules that are known, and not looked into
        self.nodes: list[Node] = []
        self.given_by: dict[Call, int] = {}
        """The node whose tensor a call gave; of a container, the last one inside it."""
        self.shapes: dict[Call, tuple[int, ...]] = {}
        """Shapes of the outputs of calls that returned one tensor."""
        self.gave: dict[Call, str] = {}
        """Class name of what each call gave, in the order in which they finished."""
        self.layers = list_layers(model)
        """Modules, and activation functions as layers of type `fn:relu`."""
        for name, module in modules_by_name(model).items():
            kinds = class_names(module)
            if isinstance(module, nn.Hardtanh):
                ends = _clipped(module.min_val, module.max_val)
                self.parts[name] = Part("activation", activation=ends)
                continue
            # an exported Hardtanh is looked into: its function has the ends
            known = [PARTS[kind] for kind in kinds if kind in PARTS]
            if known and next(module.children(), None) is None and kinds[0] != "Hardtanh":
                self.parts[name] = known[0]

    @property
    def spots(self) -> dict[Call, Spot]:
        """All calls to watch."""
        spots = (spot for target in self.targets for spot in (target, target.dead_at) if spot)
        return {spot.call: spot for spot in spots}

    def take(
        self,
        layer: Layer,
        number: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Any,
        made_by: MadeBy,
    ) -> int | None:
        """Take a call from the follower; its node, if it has one."""
        if layer.is_function and layer.owner in self.parts:
            return None
        call = Call(layer.name, layer.type, number)
        nested = isinstance(output, Tensor) and output.is_nested
        self.gave[call] = "nested tensor" if nested else type(output).__name__
        node, function = None, function_in(call.name)
        part = self.parts.get(call.name) if function is None else PARTS.get(function, _OTHER)
        if function == "hardtanh":
            given = dict(zip(("min_val", "max_val"), args[1:3], strict=False)) | dict(kwargs)
            ends = given.get("min_val", -1.0), given.get("max_val", 1.0)
            part = Part("activation", activation=_clipped(*ends))
        if part is not None:
            node = self._add(call, part, map(made_by, tensors([args, kwargs])), output)
            if function is not None and part.activation is not None and call.index == 0:
                self.layers.append(Layer(len(self.layers), call.name, call.type, (call.type,)))
        if isinstance(output, Tensor) and not nested:  # a container's was made by one inside it
            self.shapes[call] = tuple(output.shape)
            maker = made_by(output) if node is None else node
            if maker is not None:
                self.given_by[call] = maker
        if not call.name:
            made = map(made_by, tensors(output)) if node is None else [node]
            self._add(Call("the model's output", ""), _OTHER, made, output)
        return node

    def _add(
        self, call: Call, part: Part, sources: Iterable[int | None], output: Any
    ) -> int | None:
        """Add a node; a call that returns no tensor (a size, say) has none."""
        if not tensors(output):
            return None
        number, axis = len(self.nodes), part.axis
        known = tuple(dict.fromkeys(source for source in sources if source is not None))
        keeps = part.role in ("activation", "channelwise", "mixing")
        if axis is None and keeps and len(known) == 1:
            axis = self.nodes[known[0]].axis
        self.nodes.append(Node(call, part, axis, known, []))
        for source in known:
            self.nodes[source].users.append(number)
        return number

    def add_target(self, call: Call, book: HintBook) -> None:
        """Audit a call. `dead` is judged at the activation that its tensor reaches first, maybe
        itself; only what keeps channels apart (normalisation, pooling) may stand between."""
        if call not in self.shapes:
            raise LayoutError(f"gives a {self.gave[call]}, not a tensor")
        spot, judge, reason = self._spot(call, book), None, ""
        start = at = self.given_by.get(call)
        while at is not None and self.nodes[at].part.role != "activation":
            if at != start and self.nodes[at].part.role not in ("channelwise", "mixing"):
                reason, at = f"{self.nodes[at].call.label} comes before any activation", None
            elif not self.nodes[at].users:
                reason, at = "nothing takes its output", None
            else:
                at = self.nodes[at].users[0]
        if start is None:
            reason = "no call that was seen makes its output"
        elif at is not None:
            judge, label = self._spot(self.nodes[at].call, book), self.nodes[at].call.label
            if judge.activation is None or not judge.activation.zero:
                reason = f"{'it' if at == start else label} gives no exact zeros"
            elif self.shapes[judge.call][judge.axis] != self.shapes[call][spot.axis]:
                reason = f"{label}, which follows, has other channels"
        self.targets.append(replace(spot, dead_at=None if reason else judge, reason=reason))

    def _spot(self, call: Call, book: HintBook) -> Spot:
        number = self.given_by.get(call)
        node = None if number is None else self.nodes[number]
        axis = None if node is None else node.axis
        if axis is None:  # the layers before do not determine it: by the layout of the output
            shape = self.shapes[call]
            layer = next(layer for layer in self.layers if layer.name == call.name)
            hints = book.of_shape(layer, shape)
            axis = channel_axis(shape, hints) if len(shape) > 1 else None
            if axis is None or recognise(shape, hints).layout == "sequence":  # of anchors, maybe
                raise LayoutError(f"shape {list(shape)} has no axis known to count channels")
        return Spot(call, axis, None if node is None else node.part.activation)

    def maker_of(self, activation: int) -> Call | str:
        """The call of the convolution or linear module whose channels, and no others, feed an
        activation, each on its own way, and can be cut out; or why there is none."""
        at = activation
        while True:
            sources = self.nodes[at].sources
            if len(sources) != 1:
                return f"{self.nodes[at].call.label} takes {len(sources)} tensors of other layers"
            before, node = sources[0], self.nodes[sources[0]]
            if node.users != [at]:
                return f"the output of {node.call.label} is used elsewhere, too"
            if node.part.role == "maker":
                return node.call
            if node.part.role != "channelwise":
                return f"{node.call.label} mixes channels or tensors"
            at = before

    @contextmanager
    def watching(
        self, model: nn.Module, sink: Callable[[Call, Any], None], calls: Iterable[Call]
    ) -> Iterator[None]:
        """Hand outputs of some calls, which each forward pass numbers anew, to a sink."""
        counts, names = Counter[str](), {call.name for call in calls}

        def leave(layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
            call = Call(layer.name, layer.type, counts[layer.name])
            counts[layer.name] += 1
            with unwatched():
                sink(call, output)

        def wanted(layer: Layer) -> bool:
            return layer.name in names

        first = model.register_forward_pre_hook(lambda module, args: counts.clear())
        modules = [layer for layer in list_layers(model) if wanted(layer)]
        functions = wanted if any(map(function_in, names)) else None
        try:
            watched = placed(
                *(model, leave, None, modules, functions), opaque=self.parts, first=True
            )
            with watched as mode, mode:
                yield
        finally:
            first.remove()


def choose(model: LoadedModel, text: str | None, blank: Sequence[Tensor]) -> AuditPlan:
    """The layers that the selectors take; without any, all activations (modules and functions), or,
    in a model without, its convolutions or linear layers. UsageError where nothing of it ran."""
    plan, book = AuditPlan(model.module), HintBook(model.module, blank[0].shape)
    with in_eval_mode(model.module), book.traced(model.module, (), listener=plan.take):
        forward(model.module, [arg.to(model.device) for arg in blank])
    chosen: Sequence[Layer] = plan.layers
    if text is None:
        names = [node.call.name for node in plan.nodes if node.part.activation is not None]
        for kind in ("_ConvNd", "Linear"):
            names = names or [layer.name for layer in plan.layers if kind in layer.classes]
        if not names:
            words = "the model has neither activations nor convolutions nor linear layers"
            raise UsageError(words, "--layers says what to look at")
    else:
        wanted = selectors.parse(text, plan.layers)
        chosen = selectors.select(plan.layers, wanted) or choose_layers(model, text, blank)
        for idle in (one.text for one in wanted if not one.pick(plan.layers)):
            log.warning("selector %r matches no layer", idle)
        names = [layer.name for layer in chosen]
    names = list(dict.fromkeys(names))
    for call in (call for call in plan.gave if call.name in names):
        try:
            plan.add_target(call, book)
        except LayoutError as error:
            plan.skipped.append((call.name, error.message))
    ran = {call.name for call in plan.gave}.intersection(names)
    asked = [layer for layer in chosen if layer.name in names]
    silent = Recorder(asked, [], modules_by_name(model.module), calls=Counter(ran))
    plan.never_ran = [layer.name for layer in silent.never_ran]
    if not plan.targets:
        reasons = [f"{layer} {reason}" for layer, reason in plan.skipped[:3]]
        raise UsageError(
            f"none of the {len(names)} selected layers gives a tensor with channels",
            "; ".join([*reasons, *(f"{name} never ran" for name in plan.never_ran[:3])]),
        )
    return plan
