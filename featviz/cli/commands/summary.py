"""`featviz summary`."""

from __future__ import annotations

from typing import Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import OUTPUT, Command
from featviz.cli.values import given_or_config


@click.command("summary", cls=Command)
@opts.model_argument
@opts.layers_option(
    "Show the modules that these selectors match, as in `featviz run`; totals count all.",
    default="all modules",
)
@opts.option(
    "--depth",
    type=click.IntRange(min=0),
    metavar="N",
    group=OUTPUT,
    first=True,
    help="Show N levels of modules inside one another; 0 shows the totals alone.",
)
@opts.option(
    "--sort",
    type=click.Choice(["index", "params", "macs", "memory"]),
    default="index",
    group=OUTPUT,
    first=True,
    help="Sort rows by their place in the model, or by a figure with the largest first.",
)
@opts.json_option()
@opts.option(
    "--csv",
    "as_csv",
    is_flag=True,
    group=OUTPUT,
    first=True,
    help="Print comma-separated lines on stdout.",
)
@opts.input_options
@opts.model_options
@opts.config_option
@opts.verbosity_options
@click.pass_context
def command(ctx: click.Context, /, model: str | None, **given: Any) -> int:
    """Count a model's parameters, multiply-accumulates and activation memory.

    Figures come from one forward pass on zeros, for one image. The figures of
    a module include those of the modules inside it.

    \b
    parameters   a shared one counts once; so do modules that are used twice
    MACs         multiply-accumulates in convolutions, matrix products and
                 attention; 1 MAC = 2 FLOP; what has no formula is named below
    activations  bytes that all calls return inside which no other module ran

    {MODEL}

    \b
    Examples:
      featviz summary resnet18 --weights none
      featviz summary model.pth --depth 2 --size 512
      featviz summary vit_b_16 --weights none --layers Linear --sort macs
      featviz summary weights.safetensors --json | jq .totals
    """
    if given["as_json"] and given["as_csv"]:
        raise click.UsageError("--json and --csv exclude each other", ctx)
    source = opts.to_model_options(given_or_config(ctx, "model", model), given)
    from featviz.inspection import summary

    counts = summary.summarise(
        source, opts.to_input_options(given), opts.selectors(given), given["depth"], given["sort"]
    )
    if given["as_json"]:
        output.document(counts.as_json())
    elif given["as_csv"]:
        output.text(counts.as_csv())
    else:
        output.table(*counts.table)
    return 0
