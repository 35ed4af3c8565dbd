"""Which calls of a model are audited, and the activation at which each is judged for `dead`.

A forward pass on zeros is followed as a graph, which tells what follows a layer and what feeds it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from featviz.errors import LayoutError, UsageError
from featviz.hooks import selectors
from featviz.hooks.capture import forward, never_ran, tensors
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.functions import unwatched, watching
from featviz.hooks.layers import (
    class_names,
    function_in,
    list_layers,
    modules_by_name,
)
from featviz.layout import channel_axis, recognise
from featviz.layout.follow import MadeBy
from featviz.layout.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.records import Activation, Call, Layer, Part, Skip
from featviz.run.choose import choose_layers

log = logging.getLogger(__name__)

# Activations and other parts: a wrong guess here is a wrong verdict, hence a table by hand

_NEAR = 1e-3
"""Share of the range between two bounds within which a value is at one of them."""


def _clipped(low: float, high: float) -> Activation:
    """Hardtanh with its own ends: from zero up it is a ReLU with a ceiling."""
    if low == 0:
        return Activation(zero=True, bounds=(high,), margin=_NEAR * high)
    return Activation(bounds=(low, high), margin=_NEAR * (high - low))


RELU, RELU6, TANH = Activation(zero=True), _clipped(0.0, 6.0), _clipped(-1.0, 1.0)
UNIT = Activation(bounds=(0.0, 1.0), margin=_NEAR)
SMOOTH = Activation()
"""Neither exact zeros nor a bound: whether it varies is the right question."""

_CHANNELWISE, _OTHER = Part("channelwise"), Part("other")
_DROPOUT = "_DropoutNd StochasticDepth DropPath"
_POOLS = "_MaxPoolNd _AvgPoolNd _AdaptiveMaxPoolNd _AdaptiveAvgPoolNd"
_POOL_FUNCTIONS = "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d"
_UPSAMPLING = "interpolate upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"

_KNOWN: tuple[tuple[Activation | Part, str, str], ...] = (
    (RELU, "ReLU", "relu"),
    (RELU6, "ReLU6", "relu6"),
    (UNIT, "Sigmoid Hardsigmoid HardSigmoid", "sigmoid hardsigmoid"),
    (TANH, "Tanh Hardtanh", "tanh hardtanh"),
    (SMOOTH, "SiLU Swish GELU GELUTanh QuickGELU", "silu gelu"),
    (SMOOTH, "Hardswish HardSwish Mish HardMish", "hardswish mish"),
    (SMOOTH, "LeakyReLU PReLU RReLU", "leaky_relu prelu rrelu"),
    (SMOOTH, "ELU CELU SELU", "elu celu selu"),
    (SMOOTH, "Softplus Softsign LogSigmoid", "softplus softsign logsigmoid"),
    (Part("maker", axis=1), "_ConvNd", ""),
    (Part("maker", axis=-1), "Linear", ""),
    (_CHANNELWISE, "_BatchNorm FrozenBatchNorm2d _InstanceNorm", "batch_norm instance_norm"),
    (_CHANNELWISE, _DROPOUT, "dropout dropout2d"),
    (_CHANNELWISE, _POOLS, _POOL_FUNCTIONS),
    (_CHANNELWISE, "Upsample", _UPSAMPLING),
    (_CHANNELWISE, "Identity", "contiguous clone detach float to"),
    (Part("mixing"), "GroupNorm LayerNorm RMSNorm", "group_norm layer_norm rms_norm"),
)
"""What can be asked of an activation, or what another part does to channels; its modules by class
name anywhere in the MRO (torch.nn's, and those that timm and torchvision add), and the same as
functions of torch, torch.nn.functional and Tensor."""


def _by_name(column: int) -> dict[str, Part]:
    return {
        name: row[0] if isinstance(row[0], Part) else Part("activation", activation=row[0])
        for row in _KNOWN
        for name in str(row[column]).split()
    }


MODULES, FUNCTIONS = _by_name(1), _by_name(2)


def _part_of_module(module: nn.Module) -> Part | None:
    """None for a module that is looked into: it has parts of its own, or is none that is known."""
    if next(module.children(), None) is not None:
        return None
    if isinstance(module, nn.Hardtanh):
        return Part("activation", activation=_clipped(module.min_val, module.max_val))
    names = class_names(module)
    if names[0] == "Hardtanh":  # an exported one, whose function has the ends
        return None
    return next((MODULES[name] for name in names if name in MODULES), None)


def _part_of_function(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Part:
    if name == "hardtanh":
        given = dict(zip(("min_val", "max_val"), args[1:3], strict=False)) | dict(kwargs)
        ends = given.get("min_val", -1.0), given.get("max_val", 1.0)
        return Part("activation", activation=_clipped(*ends))
    return FUNCTIONS.get(name, _OTHER)


# The graph of a forward pass


@dataclass(frozen=True)
class Node:
    """One call."""

    call: Call
    part: Part
    axis: int | None
    """The axis of its output that counts channels, if that is known."""
    sources: tuple[int, ...]
    """Nodes whose tensors it takes."""


class Trace:
    """The calls of one forward pass, as the follower reports them: a node for each, an edge where a
    call takes the very tensor that another one returned. A tensor that is changed in place belongs
    to the call that changed it."""

    def __init__(self, model: nn.Module) -> None:
        parts = {name: _part_of_module(part) for name, part in modules_by_name(model).items()}
        self.atoms = {name: part for name, part in parts.items() if part is not None}
        """Modules that are not looked into, and what they are."""
        self.nodes: list[Node] = []
        self.users: list[list[int]] = []
        """For each node, the nodes that take its tensors, in the order of their calls."""
        self.given_by: dict[Call, int] = {}
        """The node whose tensor a call gave; of a container, the last one inside it."""
        self.shapes: dict[Call, tuple[int, ...]] = {}
        """Shapes of the outputs of calls that returned one tensor."""
        self.gave: dict[Call, str] = {}
        """Class name of what each call gave, in the order in which they finished."""
        self.layers = list_layers(model)
        """Modules, and activation functions as layers of type `fn:relu`."""

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
        if layer.is_function and layer.owner in self.atoms:
            return None
        call = Call(layer.name, layer.type, number)
        nested = isinstance(output, Tensor) and output.is_nested
        self.gave[call] = "nested tensor" if nested else type(output).__name__
        node, function = None, function_in(call.name)
        if function is None:
            part = self.atoms.get(call.name)
        else:
            part = _part_of_function(function, args, kwargs)
            if part.activation is not None and call.index == 0:
                self.layers.append(Layer(len(self.layers), call.name, call.type, (call.type,)))
        if part is not None:
            node = self._add(call, part, map(made_by, tensors([args, kwargs])), output)
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
        self.nodes.append(Node(call, part, axis, known))
        self.users.append([])
        for source in known:
            self.users[source].append(number)
        return number

    def activation_after(self, start: int) -> int | str:
        """The activation that a node's tensor reaches, itself included; or why it reaches none.

        It goes by the order of calls: of several that take the tensor, the first one. Only what
        keeps channels apart (normalisation, pooling, dropout) may stand between.
        """
        at = start
        while self.nodes[at].part.role != "activation":
            if at != start and self.nodes[at].part.role not in ("channelwise", "mixing"):
                return f"{self.nodes[at].call.label} comes before any activation"
            if not self.users[at]:
                return "nothing takes its output"
            at = self.users[at][0]
        return at

    def maker_of(self, activation: int) -> int | str:
        """The convolution or linear module whose channels, and no others, feed an activation; or
        why there is none.

        Between them each channel must go its own way, and nothing else may take a tensor: then a
        channel that is always zero behind the activation can be cut out from the maker on.
        """
        at = activation
        while True:
            sources = self.nodes[at].sources
            if len(sources) != 1:
                return f"{self.nodes[at].call.label} takes {len(sources)} tensors of other layers"
            before, node = sources[0], self.nodes[sources[0]]
            if self.users[before] != [at]:
                return f"the output of {node.call.label} is used elsewhere, too"
            if node.part.role == "maker":
                return before
            if node.part.role != "channelwise":
                return f"{node.call.label} mixes channels or tensors"
            at = before


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


# What is audited


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
    traced, book = Trace(model.module), HintBook(model.module, blank[0].shape)
    with in_eval_mode(model.module), book.traced(model.module, (), listener=traced.take):
        forward(model.module, [arg.to(model.device) for arg in blank])
    names = _default(traced) if text is None else _selected(model, text, blank, traced)
    skipped, targets = [], []
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
    names = [node.call.name for node in traced.nodes if node.part.activation is not None]
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
    chosen = selectors.select(traced.layers, wanted) or choose_layers(model, text, blank)
    for idle in selectors.idle(traced.layers, wanted):
        log.warning("selector %r matches no layer", idle)
    return [layer.name for layer in chosen]


def _target(traced: Trace, call: Call, book: HintBook) -> AuditTarget:
    if call not in traced.shapes:
        raise LayoutError(f"gives a {traced.gave[call]}, not a tensor")
    node = traced.given_by.get(call)
    spot = _spot(traced, call, node, book)
    if node is None:
        return AuditTarget(spot, None, "no call that was seen makes its output")
    after = traced.activation_after(node)
    if isinstance(after, str):
        return AuditTarget(spot, None, after)
    at = traced.nodes[after].call
    judge = _spot(traced, at, after, book)
    if judge.activation is None or not judge.activation.zero:
        label = "it" if after == node else at.label
        return AuditTarget(spot, None, f"{label} gives no exact zeros")
    if traced.shapes[judge.call][judge.axis] != traced.shapes[call][spot.axis]:
        return AuditTarget(spot, None, f"{at.label}, which follows, has other channels")
    return AuditTarget(spot, judge)


def _spot(traced: Trace, call: Call, node: int | None, book: HintBook) -> Spot:
    known = None if node is None else traced.nodes[node]
    axis = None if known is None else known.axis
    if axis is None:  # the layers before do not determine it: by the layout of the output
        shape = traced.shapes[call]
        layer = next(layer for layer in traced.layers if layer.name == call.name)
        hints = book.of_shape(layer, shape)
        axis = channel_axis(shape, hints) if len(shape) > 1 else None
        if axis is None or recognise(shape, hints).layout == "sequence":  # its rows may be anchors
            raise LayoutError(f"shape {list(shape)} has no axis that is known to count channels")
    return Spot(call, axis, None if known is None else known.part.activation)
