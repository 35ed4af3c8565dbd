"""Options for how maps are drawn, and the record they parse into."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from featviz.cli import options as opts
from featviz.cli.types import FOLDER, AutoInt, no_auto
from featviz.drawing.normalize import MODES
from featviz.layout.layouts import CHOICES
from featviz.records import FORMATS, REDUCTIONS, DrawOptions
from featviz.records.checking import choices

DRAW = DrawOptions()

draw_options = opts.stacked(
    click.option(
        "--normalize",
        default=DRAW.normalize,
        show_default=True,
        metavar="MODE",
        help="Turn values into brightness in this mode. "
        + "; ".join(f"{mode.spelling}: {mode.words}" for mode in MODES.values())
        + "; auto: map, for gradients symmetric.",
    ),
    click.option(
        "--cmap",
        default=DRAW.cmap,
        show_default=True,
        metavar="CMAP",
        help="Colour maps with auto (grey; coolwarm for gradients), grey, or a colormap of "
        "matplotlib.",
    ),
    click.option(
        "--nrow",
        type=AutoInt(),
        default="auto",
        show_default=True,
        help="Put N maps in a row; auto makes the picture about square.",
    ),
    click.option(
        "--padding",
        type=int,
        default=DRAW.padding,
        show_default=True,
        metavar="N",
        help="Leave N pixels around each map.",
    ),
    click.option(
        "--pad-value",
        type=float,
        default=DRAW.pad_value,
        show_default=True,
        metavar="GREY",
        help="Fill the pixels around maps with this grey, from 0 (black) to 1 (white).",
    ),
    click.option(
        "--scale",
        type=AutoInt(),
        default="auto",
        show_default=True,
        help="Enlarge maps N times; auto enlarges those smaller than --min-tile.",
    ),
    click.option(
        "--min-tile",
        type=int,
        default=DRAW.min_tile,
        show_default=True,
        metavar="N",
        help="With --scale auto, enlarge maps that are smaller than N pixels.",
    ),
    click.option("--max-maps", type=int, metavar="N", help="Draw at most N maps of each layer."),
    click.option(
        "--max-slices",
        type=int,
        default=DRAW.max_slices,
        show_default=True,
        metavar="N",
        help="Draw at most N time steps or regions of each map of a clip or batch.",
    ),
    click.option(
        "--tensor-layout",
        multiple=True,
        metavar="[SELECTORS=]LAYOUT",
        help="Read tensors in this layout instead of the guessed one: "
        f"{', '.join(f'{layout.name} {layout.shape}' for layout in CHOICES)}. "
        "tokens:14x20+1 names the grid of the tokens, behind one other token. Repeatable.",
    ),
    click.option(
        "--pick",
        type=click.Choice(choices(DrawOptions, "pick")),
        default=DRAW.pick,
        show_default=True,
        help="With --max-maps, draw the first maps, those of highest mean, or evenly spread ones.",
    ),
    click.option(
        "--order",
        type=click.Choice(choices(DrawOptions, "order")),
        default=DRAW.order,
        show_default=True,
        help="Sort tiles by channel, by mean (largest first), or by similarity.",
    ),
    click.option(
        "--collapse",
        type=float,
        metavar="R",
        help="Let maps that correlate by R or more, such as 0.98, share one tile, marked ×N.",
    ),
    click.option("--labels", is_flag=True, help="Write the channel on each tile."),
    click.option(
        "--format",
        type=click.Choice(choices(DrawOptions, "format")),
        default=DRAW.format,
        show_default=True,
        help="Write pictures in this format: "
        + "; ".join(f"{f.name}, {f.words}" for f in FORMATS.values())
        + ".",
    ),
)
"""How a grid of maps looks, in `run` and in `kernels`."""


view_options = opts.stacked(
    click.option(
        "--reduce",
        type=click.Choice(choices(DrawOptions, "reduce")),
        help="Draw one picture of all channels. "
        + "; ".join(f"{name}: {reduction.help}" for name, reduction in REDUCTIONS.items())
        + ".",
    ),
    click.option(
        "--shared-basis",
        is_flag=True,
        help="With --reduce pca, use the same components of a layer for all images.",
    ),
    click.option(
        "--overlay",
        type=float,
        metavar="ALPHA",
        help="Blend each map with the input: 0 shows the input alone, 1 the map alone.",
    ),
    click.option(
        "--figure",
        is_flag=True,
        help="Also draw a figure with a title, the input and a colour bar.",
    ),
    click.option(
        "--first", type=int, metavar="N", show_default="16", help="Show N maps in each figure."
    ),
)
"""Views of feature maps beside the grid, in `run` alone."""

tensorboard_option = click.option(
    "--tensorboard",
    type=FOLDER,
    metavar="LOGDIR",
    help="Also write grids, scalars and histograms for TensorBoard into this folder.",
)


def to_draw_options(given: dict[str, Any]) -> DrawOptions:
    """The drawing options as a record; options that a command lacks keep their defaults."""
    values = {f.name: given[f.name] for f in fields(DrawOptions) if f.name in given}
    return DrawOptions(**{**values, **{k: no_auto(values[k]) for k in ("nrow", "scale")}})
