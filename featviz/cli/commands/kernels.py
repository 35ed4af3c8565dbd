"""`featviz kernels`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import complete, echo
from featviz.cli import options as opts
from featviz.cli.draw_options import draw_options, tensorboard_option, to_draw_options

if TYPE_CHECKING:
    from featviz.inspection.kernels import KernelsResult

log = logging.getLogger(__name__)


@click.command("kernels", context_settings={"default_map": {"normalize": "symmetric"}})
@click.argument("model", required=False, shell_complete=complete.models)
@click.option(
    "--layers",
    multiple=True,
    metavar="SELECTORS",
    help="Which convolutions, as for run. Without it, all.",
)
@click.option("--all-slices", is_flag=True, help="A tile for each input; a row for each output.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("featviz-kernels"),
    show_default=True,
    help="The folder to write.",
)
@click.option("--overwrite", is_flag=True, help="Replace what featviz wrote in --out.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
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
    model = opts.given_or_config(ctx, "model", model)
    from featviz.models.requirements import require_torch

    require_torch()
    from featviz.inspection.kernels import KernelOptions, draw_kernels

    options = KernelOptions(
        layers=",".join(given["layers"]) or None,
        out=given["out"],
        overwrite=given["overwrite"],
        all_slices=given["all_slices"],
        tensorboard=given["tensorboard"],
        draw=to_draw_options(given),
    )
    result = draw_kernels(opts.to_model_options(str(model), given), options)
    _say(result)
    if given["as_json"]:
        echo.document(result.as_json())
    return 0


def _say(result: KernelsResult) -> None:
    for skip in result.skipped:
        log.warning("skipped: %s: %s", skip.layer or skip.type, skip.reason)
    log.info("kernels of %d layers in %s", len(result.rows), result.out)
