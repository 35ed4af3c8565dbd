"""`featviz layers`, `featviz kernels` and `featviz identify`."""

from __future__ import annotations

import logging

import click

from featviz.cli import output
from featviz.cli.options import MODEL, Given, click_option, command
from featviz.cli.values import FILE
from featviz.options import KernelOptions, ListOptions, ModelOptions, declared
from featviz.text import counted

log = logging.getLogger(__name__)


@command(ListOptions, ModelOptions, arguments=[MODEL])
def layers(given: Given) -> int:
    """List a model's modules: output shapes, parameters, multiply-accumulates.

    Figures come from one forward pass on zeros, for one image. The figures of
    a module include those of the modules inside it. A star marks what the
    selectors take.

    \b
    parameters   a shared one counts once; so do modules that are used twice
    MACs         multiply-accumulates in convolutions, matrix products and
                 attention; 1 MAC = 2 FLOP; operators from outside torch are named
    activations  output bytes of leaf modules, each call counted

    {MODEL}

    \b
    Examples:
      featviz layers resnet18 --weights none
      featviz layers model.pth --layers 'Conv2d@layer3.*' --size 512
      featviz layers inception_v3 --weights none --functions
      featviz layers weights.safetensors --json | jq .totals
    """
    from featviz.inspection.layers import list_model

    asked = given.record(ListOptions)
    listing = list_model(given.source, asked.inputs, asked.layers, asked.functions, asked.tree)
    if given["json"]:
        output.document(listing.as_json())
    else:
        output.table(listing.table)
    return 0


@command(
    *(KernelOptions, ModelOptions),
    arguments=[MODEL],
    but=("overlay", "reduce", "figure", "flat", "tensors"),
)
def kernels(given: Given) -> int:
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
    from featviz.inspection.kernels import draw_kernels

    result = draw_kernels(given.source, given.record(KernelOptions))
    output.left_out(result.skipped)
    log.info("kernels of %s in %s", counted(len(result.rows), "layer"), result.out)
    if given["json"]:
        output.document(result.as_json())
    return 0


@command(
    arguments=[click.Argument(["file"], type=FILE)],
    flags=[click_option(declared(ModelOptions)[name]) for name in ("key", "strip_prefix", "ema")],
)
def identify(given: Given) -> int:
    """Say what a file of weights is run as, and with which --arch.

    Names and shapes of the tensors tell the torchvision architecture, or the
    nearest ones; a whole model needs none.

    \b
    Examples:
      featviz identify weights.pth
      featviz identify checkpoint.ckpt --key state_dict --json
    """
    from featviz.models.requirements import require_torch

    require_torch(alone=True)
    from featviz.models.identify import identify_file

    words, document = identify_file(
        given["file"], given["key"], given["strip_prefix"], given["ema"]
    )
    if given["json"]:
        output.document(document)
    else:
        output.line(words)
    return 0
