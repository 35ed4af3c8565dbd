"""The options of what happens while an image goes through the model, and back."""

from __future__ import annotations

import click

from featviz.cli import options as opts
from featviz.records import KINDS, PassOptions
from featviz.records.checking import choices

pass_options = opts.stacked(
    [
        click.option(
            "--capture",
            default="output",
            show_default=True,
            metavar="KINDS",
            help="What to capture of each layer, separated by commas: "
            f"{', '.join(kind.help for kind in KINDS.values())}.",
        ),
        click.option(
            "--target",
            metavar="T",
            help="What gradients are of: top1 (default), class:N, class:NAME, sum, mean, norm, "
            "output[KEY]:sum|mean|norm, layer:NAME, layer:NAME:CHANNEL.",
        ),
        click.option(
            "--grad-rule",
            type=click.Choice(choices(PassOptions, "grad_rule")),
            default="plain",
            show_default=True,
            help="How gradients pass a ReLU.",
        ),
        click.option(
            "--ablate", multiple=True, metavar="L:C,C", help="Set channels of layers to zero."
        ),
        click.option(
            "--scale-channel", multiple=True, metavar="L:C=F", help="Multiply channels by a factor."
        ),
        click.option("--clamp", multiple=True, metavar="L:LO,HI", help="Limit what layers give."),
        click.option(
            "--noise",
            multiple=True,
            metavar="L:STD",
            help="Add Gaussian noise to what layers give (--seed).",
        ),
        click.option(
            "--grad-scale", multiple=True, metavar="L:F", help="Multiply the gradient at layers."
        ),
    ]
)
