"""The story of `layers`: every module with its type, parameters, output shape and calls."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from featviz.errors import ForwardError
from featviz.hooks.layers import list_layers, modules_by_name
from featviz.hooks.selectors import parse, wants_functions
from featviz.inspection.summary import count, guess_of_size, initialised
from featviz.models.load import LoadedModel, ModelOptions, load_model
from featviz.models.preprocess import InputOptions
from featviz.pipeline import dry_pass
from featviz.pipeline.dry_pass import Probe, choose_layers, probe
from featviz.records import Layer, TextTable
from featviz.text import by

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerRow:
    """One module in one place, or a function that it calls."""

    index: int
    name: str
    type: str
    aliases: tuple[str, ...]
    parameters: int
    """Numbers in the module's parameters and those of the modules inside it, each shared one once:
    as `summary` counts them. 0 for a function."""
    output_shape: list[int] | None
    """Shape of the first tensor of the first call; None where it returned none or did not run."""
    calls: int | None
    """None where the model could not be run."""
    selected: bool


@dataclass(frozen=True)
class Listing:
    """All modules of a model."""

    rows: tuple[LayerRow, ...]
    modules: int
    """Their number, each shared one once."""
    total_parameters: int
    """Each shared one once."""
    above: tuple[str, ...] = ()
    """Lines above the table."""

    @property
    def footer(self) -> str:
        """The last line of the table."""
        chosen = sum(row.selected for row in self.rows)
        functions = sum(row.type.startswith("fn:") for row in self.rows)
        called = f", {functions} functions" * bool(functions)
        return (
            f"{self.modules} modules{called}, {self.total_parameters:,} parameters; "
            f"* {chosen} taken by the selectors"
        )

    @property
    def table(self) -> TextTable:
        """For people."""
        headings = ("", "index", "name", "type", "parameters", "output shape", "calls")
        numbers = ("index", "parameters", "output shape", "calls")
        rows = [_cells(row) for row in self.rows]
        return TextTable(headings, numbers, rows, (), [self.footer], self.above)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "layers": [asdict(row) for row in self.rows],
            "total_parameters": self.total_parameters,
        }


def list_model(
    options: ModelOptions | LoadedModel,
    inputs: InputOptions,
    selectors: str | None,
    functions: bool = False,
) -> Listing:
    """List a model's modules; one that cannot be run on zeros is listed without shapes.

    Args:
        functions: list the functions that modules call as well.

    Raises:
        FeatvizError: no such model, or no layer matches.
    """
    model = load_model(options, inputs)
    blank = model.preprocess.blank()
    layers = list_layers(model.module)
    functions |= selectors is not None and wants_functions(parse(selectors))
    try:
        layers += dry_pass.functions(model, blank) if functions else []
        seen: Probe | None = probe(model, blank, layers)
    except ForwardError as error:
        log.warning("no shapes: %s (%s)", error.message, error.hint)
        seen = None
    taken: set[Layer] = set()
    if selectors is not None or seen is not None:
        taken = set(choose_layers(model, selectors, blank))
    modules = modules_by_name(model.module)
    layers.sort(key=lambda layer: layer.index)  # functions behind their module
    rows = [_row(layer, modules.get(layer.name), seen, layer in taken) for layer in layers]
    number = sum(1 for _ in model.module.modules())
    above = guess_of_size(model.preprocess, blank) if seen is not None else ()
    return Listing(tuple(rows), number, count(initialised(model.module)), above)


def _row(layer: Layer, module: nn.Module | None, seen: Probe | None, selected: bool) -> LayerRow:
    return LayerRow(
        index=layer.index,
        name=layer.name,
        type=layer.type,
        aliases=layer.aliases,
        parameters=count(initialised(module)) if module is not None else 0,
        output_shape=seen.shape(layer) if seen else None,
        calls=seen.calls[layer.name] if seen else None,
        selected=selected,
    )


def _cells(row: LayerRow) -> tuple[str, ...]:
    return (
        "*" if row.selected else "",
        str(row.index),
        row.name + (f" (also {', '.join(row.aliases)})" if row.aliases else ""),
        row.type,
        f"{row.parameters:,}",
        by(row.output_shape or ()),
        "" if row.calls is None else str(row.calls),
    )
