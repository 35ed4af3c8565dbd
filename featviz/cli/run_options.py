"""Options for what is captured while an image passes through the model, and how it is drawn."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from featviz.cli import command as cmd
from featviz.cli.options import checked, field_option, fields_of, option, stacked
from featviz.cli.values import AUTO_INT, FILE, FOLDER, BytesType
from featviz.drawing.normalize import MODES, parse_scale
from featviz.layout.layouts import CHOICES
from featviz.records import FORMATS, KINDS, REDUCTIONS, DrawOptions, PassOptions
from featviz.records.checking import filled
from featviz.records.options import PAD_GREY

_of_draw = partial(field_option, DrawOptions)
_repeatable = partial(option, multiple=True)

pass_options = stacked(
    option(
        "--capture",
        default="output",
        metavar="KINDS",
        group=cmd.GRADIENTS,
        help="Draw these tensors of each layer: "
        f"{', '.join(kind.help for kind in KINDS.values())}; commas separate them.",
    ),
    field_option(
        PassOptions,
        "--target",
        "Take gradients of this value: top1, class:N, class:NAME, sum, mean, norm, "
        "output[KEY]:sum|mean|norm, layer:NAME or layer:NAME:CHANNEL.",
        metavar="TARGET",
        show_default="top1",
        group=cmd.GRADIENTS,
    ),
    field_option(
        PassOptions,
        "--grad-rule",
        "Pass gradients through ReLUs by this rule.",
        group=cmd.GRADIENTS,
    ),
    _repeatable(
        "--ablate",
        metavar="SELECTORS:C,C",
        help="Set these channels of the outputs of layers to zero; repeatable.",
    ),
    _repeatable(
        "--scale-channel",
        metavar="SELECTORS:C=FACTOR",
        help="Multiply this channel of the outputs of layers by a factor; repeatable.",
    ),
    _repeatable(
        "--clamp",
        metavar="SELECTORS:LO,HI",
        help="Limit the outputs of layers to LO..HI; repeatable.",
    ),
    _repeatable(
        "--noise",
        metavar="SELECTORS:STD",
        help="Add Gaussian noise of this deviation to the outputs of layers; repeatable.",
    ),
    _repeatable(
        "--grad-scale",
        metavar="SELECTORS:FACTOR",
        group=cmd.GRADIENTS,
        help="Multiply the gradients at the outputs of layers by a factor; repeatable.",
    ),
    group=cmd.INTERVENTIONS,
)
"""What is captured, and changed, while an image passes through the model."""

layout_option = _of_draw(
    "--tensor-layout",
    "Read tensors in this layout instead of the guessed one: "
    f"{', '.join(f'{layout.name} {layout.shape}' for layout in CHOICES)}. "
    "tokens:14x20+1 names the grid of the tokens, behind one other token. Repeatable.",
    metavar="[SELECTORS=]LAYOUT",
    multiple=True,
    group=cmd.DRAWING,
)

draw_options = stacked(
    _of_draw(
        "--normalize",
        "Scale values to brightness in this mode. "
        + "; ".join(f"{mode.spelling}: {mode.words}" for mode in MODES.values())
        + "; auto: map, for gradients symmetric-percentile:99.",
        callback=checked(parse_scale),
        metavar="MODE",
        first="Scale values to brightness: map, layer, symmetric, range:LO,HI, "
        "percentile:LO,HI, none.",
    ),
    _of_draw(
        "--cmap",
        "Colour maps with auto (grey; coolwarm for gradients), grey, or a colormap of matplotlib.",
        metavar="CMAP",
        first="Colour maps with grey, viridis, coolwarm or another colormap of matplotlib.",
    ),
    _of_draw(
        "--nrow",
        "Put N maps in a row; auto makes the picture about square.",
        type=AUTO_INT,
        default="auto",
    ),
    _of_draw("--padding", "Leave N pixels around each map.", type=int, show_default="2"),
    _of_draw(
        "--pad-value",
        "Fill the pixels around maps with this grey, from 0 (black) to 1 (white).",
        metavar="GREY",
        type=float,
        show_default=f"{PAD_GREY}, with --padding 0",
    ),
    _of_draw(
        "--scale",
        "Enlarge maps N times; auto enlarges those smaller than --min-tile.",
        type=AUTO_INT,
        default="auto",
    ),
    _of_draw("--min-tile", "With --scale auto, enlarge maps that are smaller than N pixels."),
    _of_draw("--max-maps", "Draw at most N maps of each layer.", type=int, first=True),
    _of_draw(
        "--max-slices",
        "Draw at most N slices of each map of a clip, volume or batch: evenly spread ones, of a "
        "batch the first.",
    ),
    layout_option,
    _of_draw(
        "--pick",
        "With --max-maps, draw the first maps, those of highest mean, or evenly spread ones.",
    ),
    _of_draw("--order", "Sort tiles by channel, by mean (largest first), or by similarity."),
    _of_draw(
        "--collapse",
        "Draw maps that correlate by R or more, such as 0.98, as one tile, marked ×N.",
        type=float,
        metavar="R",
    ),
    _of_draw("--labels", "Write the channel on each tile."),
    _of_draw("--titles", "Write image, layer, shape and scale in a line above each grid."),
    option(
        "--marks/--no-marks",
        default=DrawOptions.marks,
        help="Cross out maps that are zero everywhere, strike through other constant ones, and "
        "draw a strip of values where all maps are constant; or draw nothing but the maps.",
    ),
    _of_draw(
        "--format",
        "Write pictures in this format: "
        + "; ".join(f"{f.name}, {f.words}" for f in FORMATS.values())
        + ".",
        group=cmd.OUTPUT,
    ),
    group=cmd.DRAWING,
)
"""How a grid of maps looks, in `run` and in `kernels`."""

view_options = stacked(
    _of_draw(
        "--reduce",
        "Draw one picture of all channels. "
        + "; ".join(f"{name}: {reduction.help}" for name, reduction in REDUCTIONS.items())
        + ".",
        type=click.Choice(list(REDUCTIONS)),
        metavar="REDUCTION",
    ),
    _of_draw(
        "--shared-basis", "With --reduce pca, use the same components of a layer for all images."
    ),
    _of_draw(
        "--overlay",
        "Blend each map with the input: 0 shows the input alone, 1 the map alone.",
        type=float,
        metavar="ALPHA",
    ),
    _of_draw("--figure", "Also draw a figure with a title, the input and a colour bar."),
    _of_draw("--first", "Show N maps in each figure.", type=int, show_default="16"),
    group=cmd.VIEWS,
)
"""Views of feature maps beside the grid, in `run` alone."""

writing_options = stacked(
    option("--report", is_flag=True, help="Build an HTML report of the run at its end."),
    option("--resume", is_flag=True, help="Continue the run in --out where it stopped."),
    option(
        "--verify",
        is_flag=True,
        help="With --resume, read the files of complete images and draw again what does not fit.",
    ),
    option(
        "--prune",
        is_flag=True,
        help="With --resume, remove images that are no longer among the inputs.",
    ),
    option(
        "--durable",
        is_flag=True,
        help="Wait for the disk before an image counts as complete, for machines that may lose "
        "power.",
    ),
    option(
        "--wait",
        type=click.FloatRange(0),
        default=0.0,
        metavar="SECONDS",
        help="Wait up to SECONDS for another process that writes into --out.",
    ),
    option("--archive", type=FILE, help="Write the run as one zip file instead of a folder."),
    option("--dry-run", is_flag=True, help="Print what would be written, and write nothing."),
    group=cmd.OUTPUT,
)
"""What a run leaves."""

limit_options = stacked(
    option("--fail-fast", is_flag=True, help="Stop at the first image that fails."),
    option(
        "--max-output-size",
        type=BytesType(),
        help="Refuse a run that would write more than this (500MB, 2GB), and stop one that does.",
    ),
    option(
        "--max-files",
        type=click.IntRange(0),
        metavar="N",
        help="Refuse a run that would write more than N files, and stop one that does.",
    ),
    option(
        "--jobs",
        type=int,
        show_default="a quarter of the cores, at least 2",
        help="Encode pictures in N threads.",
    ),
    group=cmd.LIMITS,
)
"""Where a run stops, and how much of the machine it takes."""

tensors_option = stacked(
    _of_draw("--tensors", "Also keep the raw tensors, in this format."),
    _of_draw(
        "--flat",
        "Write the pictures of an image into one folder, with image and layer in each name: "
        "cat__004_layer1.0.conv1.png.",
    ),
    group=cmd.OUTPUT,
)

tensorboard_option = option(
    "--tensorboard",
    type=FOLDER,
    metavar="LOGDIR",
    group=cmd.OUTPUT,
    help="Also write grids and histograms for TensorBoard into a folder of this one, named like "
    "--out.",
)

step_option = option(
    "--step",
    type=int,
    group=cmd.OUTPUT,
    help="With --tensorboard, write into LOGDIR itself, as training step N, scalars included.",
)


def to_draw_options(given: dict[str, Any]) -> DrawOptions:
    """The drawing options as a record; options that a command lacks keep their defaults."""
    return filled(DrawOptions, fields_of(DrawOptions, given))
