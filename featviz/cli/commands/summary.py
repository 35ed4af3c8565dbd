"""`featviz summary`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import complete, echo, tables
from featviz.cli import options as opts
from featviz.text import listed

if TYPE_CHECKING:
    from featviz.inspection.summary import Summary, SummaryRow

_NAMED = 6
"""Operators without a formula that the footer names; --json has them all."""


@click.command("summary")
@click.argument("model", required=False, shell_complete=complete.models)
@click.option(
    "--layers", multiple=True, metavar="SELECTORS", help="Show only these; the totals stay whole."
)
@click.option("--depth", type=click.IntRange(min=0), metavar="N", help="Show N levels; 0: totals.")
@click.option(
    "--sort",
    type=click.Choice(["index", "params", "macs", "memory"]),
    default="index",
    show_default=True,
    help="Order of the rows: as in the model, or the largest first.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated lines on stdout.")
@opts.input_options
@opts.model_options
@opts.config_option
@opts.verbosity_options
@click.pass_context
def command(ctx: click.Context, /, model: str | None, **given: Any) -> int:
    """Count a model's parameters, multiply-accumulates and activation memory.

    Figures come from one forward pass on zeros, for one image. Those of a module include the
    modules inside it.

    \b
    parameters   a shared one counts once; so do modules that are used twice
    MACs         multiply-accumulates of all calls, in convolutions, matrix products
                 and attention; 1 MAC = 2 FLOP; what has no formula is named below
    activations  bytes of the outputs of all calls inside which no other module ran
                 (an in-place module's output counts like any other)

    \b
    Examples:
      featviz summary resnet18 --weights none
      featviz summary model.pth --depth 2 --size 512
      featviz summary vit_b_16 --weights none --layers Linear --sort macs
      featviz summary weights.safetensors --json | jq .totals
    """
    model = opts.given_or_config(ctx, "model", model)
    if given["as_json"] and given["as_csv"]:
        raise click.UsageError("--json and --csv exclude each other", ctx)
    from featviz.models.requirements import require_torch

    require_torch()
    from featviz.inspection import summary

    found = summary.summarise(
        opts.to_model_options(str(model), given),
        opts.to_input_options(given),
        ",".join(given["layers"]) or None,
        given["depth"],
        given["sort"],
    )
    if given["as_json"]:
        echo.document(found.as_json())
    elif given["as_csv"]:
        click.echo(found.as_csv(), nl=False)
    else:
        _table(found)
    return 0


def _table(found: Summary) -> None:
    figures = ("input", "output", "calls", "parameters", "trainable", "MACs", "activations")
    headings = ("index", "name", "type", *figures)
    rows = map(_cells, found.rows)
    tables.print_table(headings, {"index", *figures}, rows, ["", *_footer(found)])


def _cells(row: SummaryRow) -> tuple[str, ...]:
    return (
        str(row.index),
        row.name + (f" (also {', '.join(row.aliases)})" if row.aliases else ""),
        row.type,
        tables.shape(row.input_shape),
        tables.shape(row.output_shape),
        str(row.calls),
        f"{row.parameters:,}",
        f"{row.trainable:,}",
        _scaled(row.macs),
        _scaled(row.activation_bytes, "B"),
    )


def _footer(found: Summary) -> Iterator[str]:
    total = found.totals
    yield f"input        {tables.shape(found.input_shape)}"
    yield (
        f"parameters   {total.parameters:,} ({total.trainable:,} trainable), "
        f"{_scaled(total.parameter_bytes, 'B')}"
    )
    yield f"MACs         {_scaled(total.macs)} = {_scaled(total.flops)} FLOPs"
    yield f"activations  {_scaled(total.activation_bytes, 'B')}"
    if found.not_counted:
        named = [f"{name} {calls}" for name, calls in found.not_counted.items()]
        yield f"not counted  {listed(named, _NAMED)}{' (--json)' if named[_NAMED:] else ''}"


def _scaled(value: int, unit: str = "") -> str:
    """1814073344 to `1.814 G`, in powers of a thousand."""
    for factor, prefix in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= factor:
            return f"{value / factor:.3f} {prefix}{unit}"
    return f"{value} {unit}".rstrip()
