"""Options for what is captured and how it is drawn, and the records they parse into."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from featviz.cli import options as opts
from featviz.cli.types import AutoInt, no_auto
from featviz.layout.layouts import CHOICES
from featviz.records import DrawOptions
from featviz.records.checking import choices

DRAW = DrawOptions()

draw_options = opts.stacked(
    [
        click.option(
            "--normalize",
            default=DRAW.normalize,
            show_default=True,
            metavar="MODE",
            help="auto (map; symmetric for gradients), map, layer, none, range:LO,HI, symmetric or "
            "percentile:LO,HI.",
        ),
        click.option(
            "--cmap",
            default=DRAW.cmap,
            show_default=True,
            help="auto (grey; coolwarm for gradients), grey, or a colormap of matplotlib.",
        ),
        click.option(
            "--nrow", type=AutoInt(), default="auto", show_default=True, help="Maps in a row."
        ),
        click.option(
            "--padding",
            type=int,
            default=DRAW.padding,
            show_default=True,
            help="Pixels around maps.",
        ),
        click.option(
            "--pad-value",
            type=float,
            default=DRAW.pad_value,
            show_default=True,
            help="Its grey, 0..1.",
        ),
        click.option(
            "--scale",
            type=AutoInt(),
            default="auto",
            show_default=True,
            help="Factor by which maps are enlarged; auto enlarges small ones.",
        ),
        click.option(
            "--min-tile",
            type=int,
            default=DRAW.min_tile,
            show_default=True,
            help="Pixels below which --scale auto enlarges a map.",
        ),
        click.option("--max-maps", type=int, help="Draw at most so many maps of a layer."),
        click.option(
            "--max-slices",
            type=int,
            default=DRAW.max_slices,
            show_default=True,
            help="Of clips and batches, draw at most so many steps or regions of each map.",
        ),
        click.option(
            "--tensor-layout",
            multiple=True,
            metavar="[SELECTORS=]LAYOUT",
            help="Read tensors in this layout instead of guessing one: "
            f"{', '.join(f'{layout.name} {layout.shape}' for layout in CHOICES)}. "
            "tokens:14x20+1 names the grid of the tokens, behind one other token. Repeatable.",
        ),
        click.option(
            "--pick",
            type=click.Choice(choices(DrawOptions, "pick")),
            default=DRAW.pick,
            show_default=True,
            help="Which ones: the first, those of highest mean, or evenly spread.",
        ),
        click.option(
            "--order",
            type=click.Choice(choices(DrawOptions, "order")),
            default=DRAW.order,
            show_default=True,
            help="Of the tiles: by channel, by mean (largest first), or like beside like.",
        ),
        click.option(
            "--collapse",
            type=float,
            metavar="R",
            help="Maps whose correlation is at least R (0.98) share one tile, marked ×N.",
        ),
        click.option("--labels", is_flag=True, help="Write the channel on each tile."),
        click.option(
            "--format",
            type=click.Choice(choices(DrawOptions, "format")),
            default=DRAW.format,
            show_default=True,
            help="Of the pictures.",
        ),
    ]
)
"""Those of DrawOptions that say how a picture looks; `kernels` takes them too."""


view_options = opts.stacked(
    [
        click.option(
            "--reduce",
            type=click.Choice(choices(DrawOptions, "reduce")),
            help="One picture of all channels; pca: three components as red, green and blue.",
        ),
        click.option(
            "--shared-basis", is_flag=True, help="One basis a layer for all images (--reduce pca)."
        ),
        click.option(
            "--overlay",
            type=float,
            metavar="ALPHA",
            help="Lay each map over the input: 0 the input alone, 1 the map alone.",
        ),
        click.option(
            "--figure",
            is_flag=True,
            help="Also draw a titled figure with the input and a colour bar.",
        ),
        click.option("--first", type=int, metavar="N", help="Maps in a figure (16)."),
    ]
)
"""Views of feature maps, beside the grid."""

tensorboard_option = click.option(
    "--tensorboard",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="LOGDIR",
    help="Also write grids, scalars and histograms for TensorBoard.",
)


def to_draw_options(given: dict[str, Any]) -> DrawOptions:
    """How maps become a picture, as a record; options that a command lacks keep their defaults."""
    values = {f.name: given[f.name] for f in fields(DrawOptions) if f.name in given}
    return DrawOptions(**{**values, **{k: no_auto(values[k]) for k in ("nrow", "scale")}})
