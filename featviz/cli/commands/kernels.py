"""`featviz kernels`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command
from featviz.options import DrawOptions, KernelOptions, ModelOptions
from featviz.text import counted

if TYPE_CHECKING:
    from featviz.inspection.kernels import KernelsResult

log = logging.getLogger(__name__)


@click.command("kernels", cls=Command)
@opts.model_argument
@opts.options_of(
    *(KernelOptions, DrawOptions, ModelOptions),
    but=("overlay", "reduce", "figure", "flat", "tensors"),
    normalize="symmetric",
)
@opts.json_option()
@opts.general_options
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> int:
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
    source = opts.to_model_options(ctx, given)
    from featviz.inspection.kernels import draw_kernels

    draw = opts.record(DrawOptions, given)
    result = draw_kernels(source, opts.record(KernelOptions, given, draw=draw))
    _say(result)
    if given["as_json"]:
        output.document(result.as_json())
    return 0


def _say(result: KernelsResult) -> None:
    for skip in result.skipped:
        log.warning("skipped: %s: %s", skip.layer or skip.type, skip.reason)
    log.info("kernels of %s in %s", counted(len(result.rows), "layer"), result.out)
