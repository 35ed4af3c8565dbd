"""Options for what is captured and how it is drawn, and the records they parse into."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from featviz.cli import options as opts
from featviz.cli.types import AutoInt, no_auto
from featviz.drawing.normalize import MODES
from featviz.records import FORMATS, DrawOptions
from featviz.records.checking import choices

DRAW = DrawOptions()

draw_options = opts.stacked(
    [
        click.option(
            "--normalize",
            default=DRAW.normalize,
            show_default=True,
            metavar="MODE",
            help="How values become brightness. "
            + "; ".join(f"{mode.spelling}: {mode.words}" for mode in MODES.values())
            + "; auto: map, for gradients symmetric.",
        ),
        click.option(
            "--cmap",
            default=DRAW.cmap,
            show_default=True,
            help="Colours of the maps: grey, or a colormap of matplotlib; auto: grey, coolwarm for "
            "gradients, viridis over the input.",
        ),
        click.option(
            "--nrow",
            type=AutoInt(),
            default="auto",
            show_default=True,
            help="Maps in a row of a picture; auto makes the picture about square.",
        ),
        click.option(
            "--padding",
            type=int,
            default=DRAW.padding,
            show_default=True,
            help="Pixels between maps, and around them.",
        ),
        click.option(
            "--pad-value",
            type=float,
            default=DRAW.pad_value,
            show_default=True,
            help="Grey of the padding between maps: 0 is black, 1 white.",
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
        click.option(
            "--max-maps",
            type=int,
            help="Draw at most so many maps of a layer; the others are counted, not drawn.",
        ),
        click.option(
            "--max-slices",
            type=int,
            default=DRAW.max_slices,
            show_default=True,
            help="Draw at most so many time steps of a clip, or regions of a batch, of each map.",
        ),
        click.option(
            "--tensor-layout",
            multiple=True,
            metavar="[SELECTORS=]LAYOUT",
            help="Instead of the guess: nchw, nhwc, tokens, tokens:14x20+1, ncl, heads, "
            "attention, vector, batch, ncthw or nthwc; repeatable.",
        ),
        click.option(
            "--pick",
            type=click.Choice(choices(DrawOptions, "pick")),
            default=DRAW.pick,
            show_default=True,
            help="Maps that --max-maps keeps: the first, those of highest mean (top), or evenly "
            "spread ones.",
        ),
        click.option(
            "--order",
            type=click.Choice(choices(DrawOptions, "order")),
            default=DRAW.order,
            show_default=True,
            help="Order of a layer's maps: by channel (index), by mean (largest first), or like "
            "beside like.",
        ),
        click.option(
            "--collapse",
            type=float,
            metavar="R",
            help="Maps whose correlation is at least R (0.98) share one tile, marked ×N.",
        ),
        click.option("--labels", is_flag=True, help="Write the channel's number on each map."),
        click.option(
            "--format",
            type=click.Choice(choices(DrawOptions, "format")),
            default=DRAW.format,
            show_default=True,
            help="Format of the pictures. "
            + ", ".join(f"{f.name}: {f.words}" for f in FORMATS.values())
            + ".",
        ),
    ]
)
"""Options that say how a picture of maps or kernels looks."""


view_options = opts.stacked(
    [
        click.option(
            "--reduce",
            type=click.Choice(choices(DrawOptions, "reduce")),
            help="One picture of all channels; pca: three components as red, green and blue.",
        ),
        click.option(
            "--shared-basis",
            is_flag=True,
            help="With --reduce pca: one basis for each layer, for all images.",
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
        click.option(
            "--first",
            type=int,
            metavar="N",
            help="Maps that --figure shows of each layer.  [default: 16]",
        ),
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
    """The drawing options as a record; options that a command lacks keep their defaults."""
    values = {f.name: given[f.name] for f in fields(DrawOptions) if f.name in given}
    return DrawOptions(**{**values, **{k: no_auto(values[k]) for k in ("nrow", "scale")}})
