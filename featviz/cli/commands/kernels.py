"""`featviz kernels`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import options as opts
from featviz.cli import output, run_options
from featviz.cli.command import DRAWING, Command
from featviz.cli.values import given_or_config
from featviz.text import counted

if TYPE_CHECKING:
    from featviz.inspection.kernels import KernelsResult

log = logging.getLogger(__name__)


@click.command("kernels", cls=Command, context_settings={"default_map": {"normalize": "symmetric"}})
@opts.model_argument
@opts.layers_option(
    "Draw the convolutions that these selectors match, as in `featviz run`.",
    default="all convolutions",
)
@opts.option(
    "--all-slices",
    is_flag=True,
    group=DRAWING,
    first=True,
    help="Draw a tile for each input channel, in a row for each output channel.",
)
@opts.out_option("Write the pictures into this folder.", "featviz-kernels")
@opts.overwrite_option("the kernels")
@opts.json_option()
@run_options.draw_options
@run_options.tensorboard_option
@opts.model_options
@opts.config_option
@opts.verbosity_options
@click.pass_context
def command(ctx: click.Context, /, model: str | None, **given: Any) -> int:
    """Draw the kernels of a model's convolutions, one picture for each.

    Tile i is output channel i, as in the grids of `featviz run`. Kernels of
    three inputs are in colour, others are the mean over their inputs; zero is
    mid-grey.

    {MODEL}

    \b
    Examples:
      featviz kernels resnet18
      featviz kernels model.pth --layers 'Conv2d#0' --out first
      featviz kernels model.pth --layers 'layer4.*' --all-slices --max-maps 32
      featviz kernels weights.safetensors --json | jq '.captures[].file'
    \f
    With --all-slices each input is drawn by itself. 1-D kernels are strips; the
    time steps of 3-D kernels stand side by side.
    """
    source = opts.to_model_options(given_or_config(ctx, "model", model), given)
    from featviz.inspection.kernels import KernelOptions, draw_kernels

    options = KernelOptions(
        layers=opts.selectors(given),
        draw=run_options.to_draw_options(given),
        **{name: given[name] for name in ("out", "overwrite", "all_slices", "tensorboard")},
    )
    result = draw_kernels(source, options)
    _say(result)
    if given["as_json"]:
        output.document(result.as_json())
    return 0


def _say(result: KernelsResult) -> None:
    for skip in result.skipped:
        log.warning("skipped: %s: %s", skip.layer or skip.type, skip.reason)
    log.info("kernels of %s in %s", counted(len(result.rows), "layer"), result.out)
