"""`featviz kernels`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import config, output
from featviz.cli import options as opts
from featviz.cli.draw_options import draw_options, tensorboard_option, to_draw_options
from featviz.text import counted

if TYPE_CHECKING:
    from featviz.inspection.kernels import KernelsResult

log = logging.getLogger(__name__)


@click.command("kernels", context_settings={"default_map": {"normalize": "symmetric"}})
@opts.model_argument
@opts.layers_option(
    "Draw the convolutions that these selectors match, as in `featviz run`.",
    default="all convolutions",
)
@click.option(
    "--all-slices",
    is_flag=True,
    help="Draw a tile for each input channel, in a row for each output channel.",
)
@opts.out_option("Write the pictures into this folder.", "featviz-kernels")
@opts.overwrite_option("the kernels")
@opts.json_option()
@draw_options
@tensorboard_option
@opts.model_options
@opts.config_option
@opts.verbosity_options
@click.pass_context
def command(ctx: click.Context, /, model: str | None, **given: Any) -> int:
    """Draw the kernels of a model's convolutions, one picture for each.

    Tile i is output channel i, as in the grids of `featviz run`. Kernels of three inputs are in
    colour, others are the mean over their inputs; zero is mid-grey. --all-slices draws each input
    by itself. 1-D kernels are strips; the time steps of 3-D ones stand side by side.

    \b
    Examples:
      featviz kernels resnet18
      featviz kernels model.pth --layers 'Conv2d#0' --out first
      featviz kernels model.pth --layers 'layer4.*' --all-slices --max-maps 32 --cmap coolwarm
      featviz kernels weights.safetensors --json | jq '.captures[].file'
    """
    model = config.given_or_config(ctx, "model", model)
    from featviz.models.requirements import require_torch

    require_torch()
    from featviz.inspection.kernels import KernelOptions, draw_kernels

    options = KernelOptions(
        layers=opts.selectors(given),
        out=given["out"],
        overwrite=given["overwrite"],
        all_slices=given["all_slices"],
        tensorboard=given["tensorboard"],
        draw=to_draw_options(given),
    )
    result = draw_kernels(opts.to_model_options(str(model), given), options)
    _say(result)
    if given["as_json"]:
        output.document(result.as_json())
    return 0


def _say(result: KernelsResult) -> None:
    for skip in result.skipped:
        log.warning("skipped: %s: %s", skip.layer or skip.type, skip.reason)
    log.info("kernels of %s in %s", counted(len(result.rows), "layer"), result.out)
