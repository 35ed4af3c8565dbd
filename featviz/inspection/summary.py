"""The story of `summary`: parameters, multiply-accumulates and memory, per layer and in total."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import Parameter, UninitializedParameter

from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.forward import forward
from featviz.hooks.layers import list_layers, modules_by_name
from featviz.inspection.macs import FLOPS_PER_MAC, Usage, metered
from featviz.models.load import LoadedModel, ModelOptions, load_model
from featviz.models.preprocess import InputOptions, Preprocess
from featviz.pipeline.dry_pass import choose_layers
from featviz.records import Layer, TextTable
from featviz.text import by, listed, printable

log = logging.getLogger(__name__)

_NAMED = 6
"""Operators without a formula that the table's footer names; `as_json` has them all."""


@dataclass(frozen=True)
class SummaryRow:
    """One module in one place, the modules inside it included."""

    index: int
    name: str
    type: str
    aliases: tuple[str, ...]
    input_shape: list[int] | None
    """Shape of the first tensor of the first call; None where it took none, or a nested one, or did
    not run."""
    output_shape: list[int] | None
    calls: int
    parameters: int
    """Each shared one once."""
    trainable: int
    """Those of them that require gradients."""
    macs: int
    """Multiply-accumulates of all calls."""
    own_macs: int
    """Without those of the modules inside: over all rows they sum to the total."""
    flops: int
    activation_bytes: int
    """Outputs of the calls inside which no other module ran."""

    @property
    def depth(self) -> int:
        """0 for the model itself, 1 for its children."""
        return self.name.count(".") + 1 if self.name else 0


@dataclass(frozen=True)
class Totals:
    """The figures of the whole model, whichever rows are shown."""

    modules: int
    parameters: int
    trainable: int
    parameter_bytes: int
    macs: int
    flops: int
    activation_bytes: int


@dataclass(frozen=True)
class Summary:
    """Parameters, multiply-accumulates and memory of a model, for one forward pass."""

    input_shape: list[int]
    rows: tuple[SummaryRow, ...]
    totals: Totals
    not_counted: Mapping[str, int]
    """Operators that compute and are in no figure, since there is no formula for them: calls."""
    above: tuple[str, ...] = ()
    """Lines above the table."""

    @property
    def table(self) -> TextTable:
        """For people."""
        figures = ("input", "output", "calls", "parameters", "trainable", "MACs", "activations")
        headings = ("index", "name", "type", *figures)
        rows = [_words(row) for row in self.rows]
        return TextTable(headings, {"index", *figures}, rows, (), ["", *_footer(self)], self.above)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "input_shape": self.input_shape,
            "layers": [asdict(row) for row in self.rows],
            "totals": asdict(self.totals),
            "not_counted": dict(self.not_counted),
        }

    def as_csv(self) -> str:
        """A header and a line for each row; shapes as `1x64x56x56`, aliases apart by spaces."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(SummaryRow))
        for row in self.rows:
            writer.writerow([printable(c) if isinstance(c, str) else c for c in _cells(row)])
        return file.getvalue()


SORTS: dict[str, Callable[[SummaryRow], int]] = {
    "index": lambda row: row.index,
    "params": lambda row: -row.parameters,
    "macs": lambda row: -row.macs,
    "memory": lambda row: -row.activation_bytes,
}
"""Orders of the rows; of equals, the one that comes first in the model."""


def summarise(
    options: ModelOptions | LoadedModel,
    inputs: InputOptions,
    selectors: str | None = None,
    depth: int | None = None,
    sort: str = "index",
) -> Summary:
    """Measure one forward pass on zeros; rows are those selected, at most `depth` levels down.

    Raises:
        FeatvizError: no such model, no layer matches, or the model cannot take the zeros.
    """
    model = load_model(options, inputs)
    blank = model.preprocess.blank()
    taken = None if selectors is None else set(choose_layers(model, selectors, blank))
    with in_eval_mode(model.module):
        measured = measure(model, blank)
    rows = [
        row
        for layer, row in zip(list_layers(model.module), measured.rows, strict=True)
        if (taken is None or layer in taken) and (depth is None or row.depth <= depth)
    ]
    rows.sort(key=SORTS[sort])
    return replace(measured, rows=tuple(rows), above=guess_of_size(model.preprocess, blank))


def guess_of_size(preprocess: Preprocess, blank: Sequence[Tensor]) -> tuple[str, ...]:
    """Words for above a table, and a warning, where the size of the input is a guess."""
    if not preprocess.size_guessed:
        return ()
    shape = by(blank[0].shape)
    log.warning("the input's size is a guess, %s: shapes and MACs follow it; --size says it", shape)
    return (f"input {shape}: its size is a guess; --size says it",)


def measure(model: LoadedModel, blank: Sequence[Tensor]) -> Summary:
    """The figures of every module, in model order, for one input [1, C, H, W].

    The caller has put the model into eval mode and switched nn.MultiheadAttention's fast path off,
    whose operators have no formula.

    Raises:
        ForwardError: the model cannot take it.
    """
    layers = list_layers(model.module)
    with metered(model.module, layers) as meter:
        forward(model.module, [arg.to(model.device) for arg in blank])
    modules = modules_by_name(model.module)
    rows = [_row(at, modules[at.name], meter.usage.get(at.index, Usage())) for at in layers]
    totals = _totals(model.module, rows)
    return Summary(list(blank[0].shape), tuple(rows), totals, meter.uncounted)


def _row(layer: Layer, module: nn.Module, usage: Usage) -> SummaryRow:
    parameters = initialised(module)
    return SummaryRow(
        index=layer.index,
        name=layer.name,
        type=layer.type,
        aliases=layer.aliases,
        input_shape=usage.input_shape,
        output_shape=usage.output_shape,
        calls=usage.calls,
        parameters=count(parameters),
        trainable=count([p for p in parameters if p.requires_grad]),
        macs=usage.macs,
        own_macs=usage.own_macs,
        flops=usage.macs * FLOPS_PER_MAC,
        activation_bytes=usage.memory,
    )


def _totals(module: nn.Module, rows: Sequence[SummaryRow]) -> Totals:
    """The figures of the first row, which is the model itself."""
    names = ("parameters", "trainable", "macs", "flops", "activation_bytes")
    return Totals(
        modules=sum(1 for _ in module.modules()),
        parameter_bytes=sum(p.numel() * p.element_size() for p in initialised(module)),
        **{name: getattr(rows[0], name) for name in names},
    )


def initialised(module: nn.Module) -> list[Parameter]:
    """Parameters, each shared one once; lazy ones that saw no input have no size."""
    return [p for p in module.parameters() if not isinstance(p, UninitializedParameter)]


def count(parameters: Sequence[Parameter]) -> int:
    """The numbers in all of them."""
    return sum(parameter.numel() for parameter in parameters)


def _cells(row: SummaryRow) -> list[Any]:
    values = asdict(row)
    for name in ("input_shape", "output_shape"):
        values[name] = "x".join(map(str, values[name] or []))
    return list({**values, "aliases": " ".join(row.aliases)}.values())


def _words(row: SummaryRow) -> tuple[str, ...]:
    return (
        str(row.index),
        row.name + (f" (also {', '.join(row.aliases)})" if row.aliases else ""),
        row.type,
        by(row.input_shape or ()),
        by(row.output_shape or ()),
        str(row.calls),
        f"{row.parameters:,}",
        f"{row.trainable:,}",
        _scaled(row.macs),
        _scaled(row.activation_bytes, "B"),
    )


def _footer(counts: Summary) -> Iterator[str]:
    total = counts.totals
    yield f"input        {by(counts.input_shape)}"
    yield (
        f"parameters   {total.parameters:,} ({total.trainable:,} trainable), "
        f"{_scaled(total.parameter_bytes, 'B')}"
    )
    yield f"MACs         {_scaled(total.macs)} = {_scaled(total.flops)} FLOPs"
    yield f"activations  {_scaled(total.activation_bytes, 'B')}"
    if counts.not_counted:
        named = [f"{name} {calls}" for name, calls in counts.not_counted.items()]
        yield f"not counted  {listed(named, _NAMED)}{' (--json)' if named[_NAMED:] else ''}"


def _scaled(value: int, unit: str = "") -> str:
    """1814073344 to `1.814 G`, in powers of a thousand."""
    for factor, prefix in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= factor:
            return f"{value / factor:.3f} {prefix}{unit}"
    return f"{value} {unit}".rstrip()
