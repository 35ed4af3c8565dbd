"""The story of `layers`: every module with its type, shapes, parameters, multiply-accumulates and
calls, and the totals of the model.

torch's FlopCounterMode counts operators; what it has counted when a module is entered and when it
is left tells the module's share. nn.MultiheadAttention's fast path, which it cannot see, is off.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn, ops
from torch.nn.parameter import Parameter, UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from featviz.errors import ForwardError
from featviz.hooks.capture import forward, tensors
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.functions import Running
from featviz.hooks.layers import list_layers, modules_by_name
from featviz.hooks.selectors import of_functions, parse
from featviz.models.load import LoadedModel, load_model
from featviz.options import InputOptions, ModelOptions
from featviz.records import Layer
from featviz.run import choose
from featviz.run.choose import choose_layers
from featviz.run.stages import probe
from featviz.text import TextTable, by, counted, listed

log = logging.getLogger(__name__)

FLOPS_PER_MAC = 2  # one multiplication and one addition; the addition of a bias is left out


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops: int = sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
    return flops


_CPU_ATTENTION = {ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
"""An operator for which torch before 2.15 has no formula."""

_COUNTED = ("calls", "macs", "own_macs", "flops", "activation_bytes")


@dataclass(frozen=True)
class LayerRow:
    """One module in one place, the modules inside it included; or a function that it calls, which
    has parameters 0 and no MACs. The usage is None where the model could not be run."""

    index: int
    name: str
    type: str
    aliases: tuple[str, ...]
    parameters: int
    """Each shared one once."""
    trainable: int
    selected: bool
    input_shape: list[int] | None = None
    """Of the first tensor of the first call; None without one, or for a nested one."""
    output_shape: list[int] | None = None
    calls: int | None = None
    macs: int | None = None
    own_macs: int | None = None
    """Without those of the modules that it called: over all rows they sum to the total."""
    flops: int | None = None
    activation_bytes: int | None = None
    """Output bytes of its leaf calls, inside which no other module ran; it may be one."""


@dataclass(frozen=True)
class Totals:
    """The figures of the whole model, shared modules once; None where it could not be run."""

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
    not_counted: Mapping[str, int] = field(default_factory=dict)
    """Calls of operators from outside torch, which have no formula and are in no figure."""
    tree: bool = False

    @property
    def table(self) -> TextTable:
        """For people."""
        figures, total, rows = ("output shape", "parameters", "MACs", "calls"), self.totals, []
        for row in self.rows:
            name = row.name
            if self.tree and name:
                *above, last = name.replace("/fn:", ".fn:").split(".")
                name = "  " * (len(above) + 1) + last
            name += f" (also {', '.join(row.aliases)})" if row.aliases else ""
            macs = "" if row.macs is None else _scaled(row.macs)
            counts = macs, "" if row.calls is None else str(row.calls)
            shape = by(row.output_shape or ())
            chosen = "*" if row.selected else ""
            rows.append((chosen, name, row.type, shape, f"{row.parameters:,}", *counts))
        size, trainable = _scaled(total.parameter_bytes, "B"), f"{total.trainable:,} trainable"
        footer = [
            "",
            f"input        {by(self.input_shape)}",
            f"parameters   {total.parameters:,} ({trainable}), {size}",
        ]
        if total.macs is not None and total.flops is not None:
            footer.append(f"MACs         {_scaled(total.macs)} = {_scaled(total.flops)} FLOPs")
            footer.append(f"activations  {_scaled(total.activation_bytes or 0, 'B')}")
        if self.not_counted:
            named = [f"{name} {calls}" for name, calls in self.not_counted.items()]
            footer.append(f"not counted  {listed(named, 6)}")
        functions = sum(row.type.startswith("fn:") for row in self.rows)
        called = f", {counted(functions, 'function')}" if functions else ""
        taken = sum(row.selected for row in self.rows)
        footer.append(f"{total.modules} modules{called}; * {taken} taken by the selectors")
        return TextTable(("", "name", "type", *figures), figures, rows, (), footer)

    def __repr__(self) -> str:
        total = self.totals
        macs = "" if total.macs is None else f", {total.macs:,} MACs"
        return f"<Listing: {total.modules} modules, {total.parameters:,} parameters{macs}>"

    def __str__(self) -> str:
        return str(self.table)

    @property
    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "input_shape": self.input_shape,
            "layers": [asdict(row) for row in self.rows],
            "total_parameters": self.totals.parameters,
            "totals": asdict(self.totals),
            "not_counted": dict(self.not_counted),
        }


def list_model(
    options: ModelOptions | LoadedModel,
    inputs: InputOptions,
    selectors: str | None,
    functions: bool = False,
    tree: bool = False,
) -> Listing:
    """List a model's modules (and functions that they call) as one forward pass on zeros shows
    them; a model that cannot be run on zeros is listed without shapes."""
    model = load_model(options, inputs)
    blank = model.preprocess.blank()
    functions |= selectors is not None and bool(of_functions(parse(selectors)))
    called: dict[Layer, tuple[list[int] | None, int]] = {}
    try:
        meter: Meter | None = measure(model, blank)
        if functions:
            calls = choose.functions(model, blank)
            seen = probe(model, blank, list(calls))
            first = {layer: shapes[0] for (_, layer, _), shapes in reversed(seen.items())}
            called = {layer: (first.get(layer), n) for layer, n in calls.items()}
    except ForwardError as error:
        log.warning("no shapes: %s (%s)", error.message, error.hint)
        meter = None
    taken: set[Layer] = set()
    if selectors is not None or meter is not None:
        taken = set(choose_layers(model, selectors, blank))
    modules, rows = modules_by_name(model.module), []
    for at in list_layers(model.module):
        place, parameters = (at.index, at.name, at.type, at.aliases), _initialised(modules[at.name])
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        counts = (sum(p.numel() for p in parameters), trainable, at in taken)
        usage = {} if meter is None else meter.usage.get(at.index, dict.fromkeys(_COUNTED, 0))
        rows.append(LayerRow(*place, *counts, **usage))
    for at, (shape, n) in called.items():
        place = (at.index, at.name, at.type, at.aliases)
        rows.append(LayerRow(*place, 0, 0, at in taken, output_shape=shape, calls=n))
    rows.sort(key=lambda row: row.index)  # functions behind their module
    if meter is not None and model.preprocess.size_guessed:
        words = "the input's size is a guess, %s: shapes and MACs follow it; --size says it"
        log.warning(words, by(blank[0].shape))
    of_model = ("parameters", "trainable", "macs", "flops", "activation_bytes")  # in its row
    totals = Totals(
        modules=sum(1 for _ in model.module.modules()),
        parameter_bytes=sum(p.numel() * p.element_size() for p in _initialised(model.module)),
        **{name: getattr(rows[0], name) for name in of_model},
    )
    not_counted = {} if meter is None else dict(meter.uncounted.most_common())
    return Listing(tuple(rows), totals, list(blank[0].shape), not_counted, tree)


def measure(model: LoadedModel, blank: Sequence[Tensor]) -> Meter:
    """What every module takes for one input [1, C, H, W]; leaves no hook behind."""
    meter, running = Meter(), Running(model.module)
    layers = list_layers(model.module)
    with in_eval_mode(model.module), ExitStack() as stack:
        for module in model.module.modules():
            now = partial(running.now, running.of_module[id(module)])
            enter = module.register_forward_pre_hook(meter.enter, prepend=True, with_kwargs=True)
            stack.callback(enter.remove)
            stack.callback(module.register_forward_hook(partial(meter.leave, now)).remove)
        stack.enter_context(running.followed({layer.name for layer in layers}))
        # The inner mode is asked first, and takes apart an operator without a formula; the meter,
        # outside, sees what that is made of.
        with meter, meter.flops:
            forward(model.module, [arg.to(model.device) for arg in blank])
    return meter


def _initialised(module: nn.Module) -> list[Parameter]:
    """Parameters, each shared one once; lazy ones that saw no input have no size."""
    return [p for p in module.parameters() if not isinstance(p, UninitializedParameter)]


def _scaled(value: int, unit: str = "") -> str:
    """1814073344 to `1.814 G`, in powers of a thousand."""
    for factor, prefix in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= factor:
            return f"{value / factor:.3f} {prefix}{unit}"
    return f"{value} {unit}".rstrip()


# What a forward pass costs


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads the counts at every module's entry and exit; and counts operators from outside torch
    that have no formula, as `torchvision::deform_conv2d`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uncounted: Counter[str] = Counter()
        self.usage: dict[int, dict[str, Any]] = {}
        self.memory = 0
        self.flops = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
        self._running: list[dict[str, Any]] = []
        """For each module that is running: the counts when it was entered, the multiply-accumulates
        in the usage of modules inside it, whether it is a leaf, the shape of its input."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook."""
        # what a module inside gives counts as its own output, not as its parent's
        if self._running:
            self._running[-1]["leaf"] = False
        frame = {"module": module, "macs": self.flops.get_total_flops() // FLOPS_PER_MAC}
        frame |= {"memory": self.memory, "inside": 0, "leaf": True}
        self._running.append({**frame, "input_shape": _shape_of_first(tensors([args, kwargs]))})

    def leave(self, now: Callable[[], Layer], module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook; `now` tells the layer to which the call belongs."""
        frame, given = self._running.pop(), tensors(output)
        while frame["module"] is not module:  # raised, and was caught: its own work is its caller's
            self._running[-1]["inside"] += frame["inside"]
            frame = self._running.pop()
        if frame["leaf"]:
            parts = (p for t in given for p in (t.unbind() if t.is_nested else [t]))
            self.memory += sum(part.numel() * part.element_size() for part in parts)
        macs = self.flops.get_total_flops() // FLOPS_PER_MAC - frame["macs"]
        if self._running:
            self._running[-1]["inside"] += macs
        first = {"input_shape": frame["input_shape"], "output_shape": _shape_of_first(given)}
        usage = self.usage.setdefault(now().index, {**first, **dict.fromkeys(_COUNTED, 0)})
        own = macs - frame["inside"]
        counts = (1, macs, own, FLOPS_PER_MAC * macs, self.memory - frame["memory"])
        for name, count in zip(_COUNTED, counts, strict=True):
            usage[name] += count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = func._overloadpacket in self.flops.flop_registry
        if func.namespace not in ("aten", "prim") and not known:
            self.uncounted[f"{func.namespace}::{func._overloadpacket.__name__}"] += 1
        return func(*args, **(kwargs or {}))


def _shape_of_first(given: Sequence[Tensor]) -> list[int] | None:
    return list(given[0].shape) if given and not given[0].is_nested else None
