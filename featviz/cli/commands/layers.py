"""`featviz layers`."""

from __future__ import annotations

from typing import Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import LAYERS, Command
from featviz.cli.values import given_or_config


@click.command("layers", cls=Command)
@opts.model_argument
@opts.layers_option(
    "Mark the layers that these selectors match, as in `featviz run`.",
    default="one layer for each stage",
)
@opts.option(
    "--functions",
    is_flag=True,
    group=LAYERS,
    first=True,
    help="Also list the functions that modules call.",
)
@opts.json_option()
@opts.input_options
@opts.model_options
@opts.config_option
@opts.verbosity_options
@click.pass_context
def command(ctx: click.Context, /, model: str | None, **given: Any) -> int:
    """List the modules of a model, and which of them the selectors take.

    Output shapes and calls come from one forward pass on zeros. The parameters
    of a module include those of the modules inside it, as in `featviz summary`.

    {MODEL}

    \b
    Examples:
      featviz layers resnet18 --weights none
      featviz layers model.pth --layers 'Conv2d@layer3.*'
      featviz layers inception_v3 --weights none --functions
      featviz layers vit_b_16 --weights none --json | jq '.layers[].type'
    """
    source = opts.to_model_options(given_or_config(ctx, "model", model), given)
    from featviz.inspection import layers

    listed = layers.list_model(
        source, opts.to_input_options(given), opts.selectors(given), given["functions"]
    )
    if given["as_json"]:
        output.document(listed.as_json())
    else:
        _table(listed)
    return 0


def _table(listed: Any) -> None:
    rows = (
        (
            "*" if row.selected else "",
            str(row.index),
            row.name + (f" (also {', '.join(row.aliases)})" if row.aliases else ""),
            row.type,
            f"{row.parameters:,}",
            output.shape(row.output_shape),
            "" if row.calls is None else str(row.calls),
        )
        for row in listed.rows
    )
    headings = ("", "index", "name", "type", "parameters", "output shape", "calls")
    numbers = ("index", "parameters", "output shape", "calls")
    output.table(headings, numbers, rows, footer=[listed.footer])
