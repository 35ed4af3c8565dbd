"""`featviz layers`."""

from __future__ import annotations

from typing import Any

import click

from featviz.cli import complete, echo, tables
from featviz.cli import options as opts


@click.command("layers")
@click.argument("model", required=False, shell_complete=complete.models)
@opts.layer_option
@click.option("--functions", is_flag=True, help="List the functions that modules call as well.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@opts.input_options
@opts.model_options
@opts.config_option
@opts.verbosity_options
@click.pass_context
def command(ctx: click.Context, /, model: str | None, **given: Any) -> int:
    """List the modules of a model, and which of them the selectors take.

    Output shapes and calls come from one forward pass on zeros.

    \b
    Examples:
      featviz layers resnet18 --weights none
      featviz layers model.pth --layers 'Conv2d@layer3.*'
      featviz layers inception_v3 --weights none --functions
      featviz layers vit_b_16 --weights none --json | jq '.layers[].type'
    """
    model = opts.given_or_config(ctx, "model", model)
    from featviz.models.requirements import require_torch

    require_torch()
    from featviz.inspection import layers

    found = layers.list_model(
        opts.to_model_options(str(model), given),
        opts.to_input_options(given),
        ",".join(given["layers"]) or None,
        given["functions"],
    )
    if given["as_json"]:
        echo.document(found.as_json())
    else:
        _table(found)
    return 0


def _table(found: Any) -> None:
    rows = (
        (
            "*" if row.selected else "",
            str(row.index),
            row.name + (f" (also {', '.join(row.aliases)})" if row.aliases else ""),
            row.type,
            f"{row.parameters:,}",
            tables.shape(row.output_shape),
            "" if row.calls is None else str(row.calls),
        )
        for row in found.rows
    )
    headings = ("", "index", "name", "type", "parameters", "output shape", "calls")
    numbers = ("index", "parameters", "output shape", "calls")
    tables.print_table(headings, numbers, rows, [found.footer])
