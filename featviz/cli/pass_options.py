"""Options for what is captured, and changed, while an image passes through the model."""

from __future__ import annotations

import click

from featviz.cli import options as opts
from featviz.records import KINDS, PassOptions
from featviz.records.checking import choices

pass_options = opts.stacked(
    click.option(
        "--capture",
        default="output",
        show_default=True,
        metavar="KINDS",
        help="Draw these tensors of each layer: "
        f"{', '.join(kind.help for kind in KINDS.values())}; commas separate them.",
    ),
    click.option(
        "--target",
        metavar="TARGET",
        show_default="top1",
        help="Take gradients of this value: top1, class:N, class:NAME, sum, mean, norm, "
        "output[KEY]:sum|mean|norm, layer:NAME or layer:NAME:CHANNEL.",
    ),
    click.option(
        "--grad-rule",
        type=click.Choice(choices(PassOptions, "grad_rule")),
        default="plain",
        show_default=True,
        help="Let gradients pass ReLUs by this rule.",
    ),
    click.option(
        "--ablate",
        multiple=True,
        metavar="SELECTORS:C,C",
        help="Set these channels of the outputs of layers to zero; repeatable.",
    ),
    click.option(
        "--scale-channel",
        multiple=True,
        metavar="SELECTORS:C=FACTOR",
        help="Multiply this channel of the outputs of layers by a factor; repeatable.",
    ),
    click.option(
        "--clamp",
        multiple=True,
        metavar="SELECTORS:LO,HI",
        help="Limit the outputs of layers to LO..HI; repeatable.",
    ),
    click.option(
        "--noise",
        multiple=True,
        metavar="SELECTORS:STD",
        help="Add Gaussian noise of this deviation to the outputs of layers; repeatable.",
    ),
    click.option(
        "--grad-scale",
        multiple=True,
        metavar="SELECTORS:FACTOR",
        help="Multiply the gradients at the outputs of layers by a factor; repeatable.",
    ),
)
