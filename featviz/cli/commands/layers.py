"""`featviz layers`."""

from __future__ import annotations

from typing import Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command
from featviz.options import InputOptions, ListOptions, ModelOptions


@click.command("layers", cls=Command)
@opts.model_argument
@opts.options_of(ListOptions, InputOptions, ModelOptions)
@opts.json_option()
@opts.general_options
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> int:
    """List a model's modules: output shapes, parameters, multiply-accumulates.

    Figures come from one forward pass on zeros, for one image. The figures of
    a module include those of the modules inside it. A star marks what the
    selectors take.

    \b
    parameters   a shared one counts once; so do modules that are used twice
    MACs         multiply-accumulates in convolutions, matrix products and
                 attention; 1 MAC = 2 FLOP; what has no formula is named below
    activations  bytes that all calls return inside which no other module ran

    {MODEL}

    \b
    Examples:
      featviz layers resnet18 --weights none
      featviz layers model.pth --layers 'Conv2d@layer3.*' --size 512
      featviz layers inception_v3 --weights none --functions
      featviz layers weights.safetensors --json | jq .totals
    """
    source = opts.to_model_options(ctx, given)
    from featviz.inspection import layers

    asked, inputs = opts.record(ListOptions, given), opts.record(InputOptions, given)
    listed = layers.list_model(source, inputs, asked.layers, asked.functions, asked.tree)
    if given["as_json"]:
        output.document(listed.as_json())
    else:
        output.table(*listed.table)
    return 0
