"""The story of `layers`: every module with its type, shapes, parameters,
multiply-accumulates and calls, and the totals of the model.

torch's FlopCounterMode counts operators. The count when a module is left, less the count
when it was entered, is that of the module and the modules inside it. The fast path of
nn.MultiheadAttention, which the mode does not see, is switched off."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn, ops
from torch.nn.parameter import Parameter, UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from featviz.errors import ForwardError
from featviz.hooks.capture import forward, tensors
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.functions import CallStack
from featviz.hooks.layers import list_layers, modules_by_name
from featviz.hooks.selectors import of_functions, parse
from featviz.models.load import LoadedModel, load_model
from featviz.models.onnx_model import OnnxLayer
from featviz.options import ModelOptions
from featviz.options.commands import ListOptions
from featviz.records import Layer
from featviz.run import choose
from featviz.run.choose import choose_layers
from featviz.run.stages import probe
from featviz.text import TextTable, by, counted, listed

log = logging.getLogger(__name__)

FLOPS_PER_MAC = 2
"""One multiplication and one addition; the addition of a bias is left out."""


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOPs of an attention, from the shapes of query, key and value."""
    flops: int = sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
    return flops


_CPU_ATTENTION = {ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
"""An operator for which torch before 2.15 has no formula."""


@dataclass(frozen=True)
class LayerRow:
    """A module, with the modules inside it; or a function that a module calls, which has 0
    parameters and no MACs. Fields that come from a forward pass are None if the model could
    not be run."""

    index: int
    name: str
    type: str
    aliases: tuple[str, ...]
    parameters: int
    """How many numbers all parameters have; a shared parameter counts once."""
    trainable: int
    """How many of these numbers require gradients."""
    selected: bool
    input_shape: list[int] | None = None
    """The shape of the first tensor in the first call; None also if there is no tensor, or
    a nested one."""
    output_shape: list[int] | None = None
    calls: int | None = None
    macs: int | None = None
    """Multiply-accumulates of all its calls."""
    own_macs: int | None = None
    """`macs` without those of the modules that it called. The sum over all rows is the total
    of the model."""
    flops: int | None = None
    activation_bytes: int | None = None
    """Bytes of the outputs of leaf calls in it: calls, its own among them, that call no
    other module."""


@dataclass(frozen=True)
class Totals:
    """The figures of the whole model, in which a shared module counts once. Figures that
    come from a forward pass are None if the model could not be run."""

    modules: int
    parameters: int
    trainable: int
    parameter_bytes: int
    macs: int | None
    flops: int | None
    activation_bytes: int | None


@dataclass(frozen=True, repr=False)
class Listing:
    """All modules of a model."""

    out: ClassVar[None] = None
    """Nothing is written."""
    rows: tuple[LayerRow, ...]
    totals: Totals
    input_shape: list[int]
    not_counted: Mapping[str, int]
    """By name of the operator: how often it was called. These operators, from outside torch
    or in graphs, have no formula, and the figures leave them out."""
    tree: bool
    """Whether the table indents names below the names of their parents."""

    @property
    def table(self) -> TextTable:
        """The listing for people."""
        numbers = ("output shape", "parameters", "MACs", "calls")
        rows = [_cells(row, self.tree) for row in self.rows]
        return TextTable(
            ("", "name", "type", *numbers), numbers, rows, footer=self._footer()
        )

    def _footer(self) -> list[str]:
        """The lines below the table: totals of the model, and what is not counted."""
        total = self.totals
        size = _with_prefix(total.parameter_bytes, "B")
        lines = [
            "",
            f"input        {by(self.input_shape)}",
            (
                f"parameters   {total.parameters:,} ({total.trainable:,} trainable),"
                f" {size}"
            ),
        ]
        if total.macs is not None:
            flops = _with_prefix(FLOPS_PER_MAC * total.macs)
            lines.append(f"MACs         {_with_prefix(total.macs)} = {flops} FLOPs")
            lines.append(
                f"activations  {_with_prefix(total.activation_bytes or 0, 'B')}"
            )
        # without this line, a sum that leaves out an operator would be wrong
        if self.not_counted:
            operators = [f"{name} {calls}" for name, calls in self.not_counted.items()]
            lines.append(f"not counted  {listed(operators, 6)}")
        functions = sum(row.type.startswith("fn:") for row in self.rows)
        called = f", {counted(functions, 'function')}" if functions else ""
        selected = sum(row.selected for row in self.rows)
        lines.append(
            f"{counted(total.modules, 'module')}{called}; * {selected} taken by the"
            " selectors"
        )
        return lines

    def __repr__(self) -> str:
        total = self.totals
        macs = "" if total.macs is None else f", {total.macs:,} MACs"
        modules = counted(total.modules, "module")
        return f"<Listing: {modules}, {counted(total.parameters, 'parameter')}{macs}>"

    def __str__(self) -> str:
        return str(self.table)

    @property
    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "input_shape": self.input_shape,
            "layers": list(map(asdict, self.rows)),
            "total_parameters": self.totals.parameters,
            "totals": asdict(self.totals),
            "not_counted": dict(self.not_counted),
        }


def _cells(row: LayerRow, tree: bool) -> list[str]:
    """A row of the table; with `tree` its name is indented below its parents."""
    name = row.name
    # a function stands below the module that calls it: `layer1.0/fn:relu`
    if tree and name:
        *parents, last = name.replace("/fn:", ".fn:").split(".")
        name = "  " * (len(parents) + 1) + last
    if row.aliases:
        name += f" (also {', '.join(row.aliases)})"
    return [
        "*" if row.selected else "",
        name,
        row.type,
        by(row.output_shape or ()),
        f"{row.parameters:,}",
        "" if row.macs is None else _with_prefix(row.macs),
        "" if row.calls is None else str(row.calls),
    ]


def list_model(source: ModelOptions | LoadedModel, options: ListOptions) -> Listing:
    """List a model's modules, with the figures of one forward pass on zeros. A model that
    cannot be run on zeros is listed without shapes and without functions, with a warning.

    Args:
        options: without `layers`, the rows of one layer of each stage are marked. With
            selectors of functions in `layers`, functions are listed, too.

    Raises:
        FeatvizError: no such model, or the selectors match nothing.
    """
    model = load_model(source, options.inputs)
    blank = model.preprocess.blank()
    selectors = options.layers
    meter = None
    try:
        meter = measure(model, blank)
    except ForwardError as error:  # modules and parameters can still be listed
        log.warning("no shapes: %s (%s)", error.message, error.hint)
    selected: set[Layer] = set()
    # without selectors stages are chosen, for which the shapes of a pass are needed
    if selectors is not None or meter is not None:
        selected = set(choose_layers(model, selectors, blank))
    rows = _module_rows(model.module, meter, selected)
    totals = _totals(model.module, rows[0])
    has_functions = options.functions
    if selectors is not None and of_functions(parse(selectors)):
        has_functions = True
    if has_functions and meter is not None:
        rows += _function_rows(model, blank, selected)
        # the sort is stable, so that functions follow the module that calls them
        rows.sort(key=lambda row: row.index)
    if meter is not None and model.preprocess.size_guessed:
        message = (
            "the input's size is a guess, %s: shapes and MACs follow it; --size says it"
        )
        log.warning(message, by(blank[0].shape))
    return Listing(
        rows=tuple(rows),
        totals=totals,
        input_shape=list(blank[0].shape),
        not_counted={} if meter is None else dict(meter.uncounted.most_common()),
        tree=options.tree,
    )


def _module_rows(
    network: nn.Module, meter: Meter | None, selected: set[Layer]
) -> list[LayerRow]:
    """A row for each module, the network itself first.

    Args:
        meter: what a forward pass has counted; None if there was none.
        selected: the layers whose rows are marked.
    """
    modules = modules_by_name(network)
    rows = []
    for layer in list_layers(network):
        parameters = _sized_parameters(modules[layer.name])
        row = LayerRow(
            index=layer.index,
            name=layer.name,
            type=layer.type,
            aliases=layer.aliases,
            parameters=sum(p.numel() for p in parameters),
            trainable=sum(p.numel() for p in parameters if p.requires_grad),
            selected=layer in selected,
        )
        if meter is not None:
            # a module that never ran has zeros
            usage = meter.usage.get(layer.index, Usage())
            row = replace(
                row,
                input_shape=usage.input_shape,
                output_shape=usage.output_shape,
                calls=usage.calls,
                macs=usage.macs,
                own_macs=usage.own_macs,
                flops=FLOPS_PER_MAC * usage.macs,
                activation_bytes=usage.activation_bytes,
            )
        rows.append(row)
    return rows


def _totals(network: nn.Module, row: LayerRow) -> Totals:
    """The figures of a network.

    Args:
        row: the row of the network itself, which includes all modules inside it.
    """
    sizes = [p.numel() * p.element_size() for p in _sized_parameters(network)]
    return Totals(
        # like the parameters, `modules()` has each shared module once
        modules=len(list(network.modules())),
        parameters=row.parameters,
        trainable=row.trainable,
        parameter_bytes=sum(sizes),
        macs=row.macs,
        flops=row.flops,
        activation_bytes=row.activation_bytes,
    )


def _function_rows(
    model: LoadedModel, blank: Sequence[Tensor], selected: set[Layer]
) -> list[LayerRow]:
    """A row for each function that a module calls, with the shape of its first output.

    Args:
        blank: arguments with which the model is run.
        selected: the layers whose rows are marked.
    """
    calls = choose.functions(model, blank)
    first_shapes: dict[Layer, list[int] | None] = {}
    for side, shapes in probe(model, blank, list(calls)).items():
        # all calls of a function make one row, with the shape of the first call
        first_shapes.setdefault(side.layer, shapes[0])
    rows = []
    for layer, count in calls.items():
        row = LayerRow(
            index=layer.index,
            name=layer.name,
            type=layer.type,
            aliases=layer.aliases,
            parameters=0,
            trainable=0,
            selected=layer in selected,
            output_shape=first_shapes.get(layer),
            calls=count,
        )
        rows.append(row)
    return rows


def measure(model: LoadedModel, blank: Sequence[Tensor]) -> Meter:
    """Run a model on one input, and measure MACs, bytes, shapes and calls of every module.
    The hooks are removed at the end.

    Args:
        blank: the model's arguments, zeros as from `Preprocess.blank`.

    Raises:
        ForwardError: the model cannot be run on these arguments.
    """
    meter = Meter()
    running = CallStack(model.module)
    names = {layer.name for layer in list_layers(model.module)}
    with in_eval_mode(model.module), ExitStack() as stack:
        # A module may have two names, and so two rows. `running` knows under which name it
        # was called.
        for module in model.module.modules():
            now = partial(running.layer_of_call, running.of_module[id(module)])
            enter = module.register_forward_pre_hook(
                meter.enter, prepend=True, with_kwargs=True
            )
            stack.callback(enter.remove)
            stack.callback(
                module.register_forward_hook(partial(meter.leave, now)).remove
            )
        stack.enter_context(running.followed(names))
        # Of two modes the inner one gets each operator first. `flops` takes apart an
        # operator without a formula, and the meter outside of it sees the parts.
        with meter, meter.flops:
            forward(model.module, [arg.to(model.device) for arg in blank])
    return meter


def _sized_parameters(module: nn.Module) -> list[Parameter]:
    """The parameters of a module, each shared one once, without lazy ones that have no size
    yet."""
    return [p for p in module.parameters() if not isinstance(p, UninitializedParameter)]


def _with_prefix(value: int, unit: str = "") -> str:
    """A number with a prefix for a power of a thousand: `1.814 G` for 1814073344."""
    for factor, prefix in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= factor:
            return f"{value / factor:.3f} {prefix}{unit}"
    return f"{value} {unit}".rstrip()


# What a forward pass costs


@dataclass
class Usage:
    """What the calls of a module took, together with the calls inside them."""

    input_shape: list[int] | None = None
    """The shape of the first tensor in the first call."""
    output_shape: list[int] | None = None
    calls: int = 0
    macs: int = 0
    own_macs: int = 0
    activation_bytes: int = 0


@dataclass
class _Frame:
    """A module that is running."""

    module: nn.Module
    input_shape: list[int] | None
    macs: int
    """The count of MACs when it was entered."""
    memory: int
    """The count of bytes when it was entered."""
    macs_inside: int = 0
    """MACs of the modules that it called."""
    is_leaf: bool = True
    """Whether it has called no module yet."""


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads the counts when a module is entered and left. It also counts calls of operators
    without a formula, from outside torch (`torchvision::deform_conv2d`) and in graphs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uncounted: Counter[str] = Counter()
        self.usage: dict[int, Usage] = {}
        """By the index of the layer."""
        self.memory = 0
        """Bytes of all outputs of leaf calls so far."""
        self.flops = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
        self._macs_of_nodes = 0
        self._running: list[_Frame] = []
        """The innermost module last."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The hook before a module's call: note that it runs, and the counts so far."""
        # the caller is no leaf: the output of this module counts in its place
        if self._running:
            self._running[-1].is_leaf = False
        input_shape = _shape_of_first(tensors([args, kwargs]))
        self._running.append(_Frame(module, input_shape, self._macs(), self.memory))

    def leave(
        self, now: Callable[[], Layer], module: nn.Module, args: Any, output: Any
    ) -> None:
        """The hook after a module's call: add the call to the usage of its layer.

        Args:
            now: returns the layer to which the call belongs.
            module: the module that was called.
            args: the arguments by position.
            output: what the module returned.
        """
        frame = self._running.pop()
        # This hook is not called for a module that raised. If its caller went on, its work
        # counts as the caller's own.
        while frame.module is not module:
            self._running[-1].macs_inside += frame.macs_inside
            frame = self._running.pop()
        outputs = tensors(output)
        if isinstance(module, OnnxLayer):
            self._count_node(module, args, output)
        if frame.is_leaf:
            self.memory += sum(map(_bytes, outputs))
        macs = self._macs() - frame.macs
        if self._running:
            self._running[-1].macs_inside += macs
        usage = self.usage.get(now().index)
        if usage is None:
            usage = Usage(frame.input_shape, _shape_of_first(outputs))
            self.usage[now().index] = usage
        usage.calls += 1
        usage.macs += macs
        usage.own_macs += macs - frame.macs_inside
        usage.activation_bytes += self.memory - frame.memory

    def _count_node(self, node: OnnxLayer, args: Any, output: Any) -> None:
        """Count the MACs of a node that ONNX Runtime has computed: torch sees no operator
        there."""
        macs = node.macs(args, output)
        if macs is None:
            self.uncounted[node.operator] += 1
        else:
            self._macs_of_nodes += macs

    def _macs(self) -> int:
        """The count of multiply-accumulates so far."""
        flops = int(self.flops.get_total_flops())
        return flops // FLOPS_PER_MAC + self._macs_of_nodes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator in torch's place, and note its name if its operations cannot be
        counted."""
        # Only names of other libraries are noted. torch's own operators without a formula
        # (additions, copies) count as 0, as in FlopCounterMode.
        has_formula = func._overloadpacket in self.flops.flop_registry
        if func.namespace not in ("aten", "prim") and not has_formula:
            self.uncounted[f"{func.namespace}::{func._overloadpacket.__name__}"] += 1
        return func(*args, **(kwargs or {}))


def _bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's values; for a nested tensor the sum over its parts."""
    if tensor.is_nested:
        return sum(map(_bytes, tensor.unbind()))
    return tensor.numel() * tensor.element_size()


def _shape_of_first(tensors: Sequence[Tensor]) -> list[int] | None:
    """The shape of the first tensor; None if there is none, or if it is nested."""
    if not tensors or tensors[0].is_nested:
        return None
    return list(tensors[0].shape)
