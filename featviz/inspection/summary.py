"""The story of `summary`: parameters, multiply-accumulates and memory, per layer and in total."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import Parameter, UninitializedParameter

from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.forward import forward
from featviz.hooks.layers import list_layers, modules_by_name
from featviz.inspection.macs import FLOPS_PER_MAC, Usage, metered
from featviz.models.load import LoadedModel, ModelOptions, load_model
from featviz.models.preprocess import InputOptions
from featviz.pipeline.dry_pass import choose_layers
from featviz.records import Layer
from featviz.text import printable


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
    options: ModelOptions,
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
    return Summary(measured.input_shape, tuple(rows), measured.totals, measured.not_counted)


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
