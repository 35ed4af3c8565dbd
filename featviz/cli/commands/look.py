"""`featviz look`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import options as opts
from featviz.cli import output, terminal
from featviz.cli.command import DRAWING, LAYERS, OUTPUT, Command
from featviz.cli.values import FILE, given_or_config
from featviz.records import PageOptions
from featviz.text import counted, listed

if TYPE_CHECKING:
    from featviz.inspection.look import LookResult

log = logging.getLogger(__name__)

_of_page = partial(opts.field_option, PageOptions, first=True)

_NAMED = 3
"""Layers without a row that are named on stderr; --json names them all."""


@click.command("look", cls=Command)
@opts.model_argument
@opts.images_argument
@opts.layers_option(
    opts.select_layers, default="one layer for each stage, at most 10", first=opts.select_in_short
)
@_of_page("--maps", "Show N maps of each layer.", group=LAYERS)
@_of_page(
    "--by",
    "Show the maps whose values vary most from place to place, or those of highest mean.",
    group=LAYERS,
)
@_of_page(
    "--cmap", "Colour maps with grey, or a colormap of matplotlib.", metavar="CMAP", group=DRAWING
)
@opts.out_option(
    "Write the picture into this PNG file, in place of an earlier picture of look.",
    type=FILE,
    show_default="look-IMAGE.png",
)
@opts.overwrite_option("any file")
@opts.open_option("Open the picture.")
@opts.option(
    "--show/--no-show",
    default=True,
    group=OUTPUT,
    help="Also show the picture in the terminal, if stdout is one, or only write the file.",
)
@opts.null_option
@opts.json_option()
@opts.input_options
@opts.model_options
@opts.config_option
@opts.verbosity_options
@click.pass_context
def command(ctx: click.Context, /, model: str | None, images: Sequence[str], **given: Any) -> int:
    """Draw one quick picture of what a model makes of an image.

    It has the input, the prediction, and a row for each layer with the maps
    that tell most, with their channels and values.

    {MODEL}

    \b
    Examples:
      featviz look resnet18 cat.jpg
      featviz look model.pth cat.jpg --layers 'layer1.*' --maps 12
      featviz look vit_b_16 cat.jpg --out vit.png --open
    \f
    IMAGE is what `featviz run` takes; of several images, the first is shown.
    Of maps that look alike one is shown; each runs from its least value (dark)
    to its greatest (bright), and one that is constant is left out.
    A terminal that knows sixel or kitty graphics shows the picture itself with
    the extra featviz[terminal]; any other one shows it in coloured blocks.

    Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted.
    """
    source = opts.to_model_options(given_or_config(ctx, "model", model), given)
    images = given_or_config(ctx, "images", images)
    from featviz.inspection.look import LookOptions, look

    options = LookOptions(
        layers=opts.selectors(given),
        out=given["out"],
        overwrite=given["overwrite"],
        nul_separated=given["nul"],
        page=PageOptions(**opts.fields_of(PageOptions, given)),
        inputs=opts.to_input_options(given),
    )
    result = look(source, images, options)
    if given["as_json"]:
        output.document(result.as_json())
    elif given["show"] and sys.stdout.isatty():
        terminal.show(result)
    _say(result)
    output.written(counted(len(result.layers), "layer"), result.path, given["open"])
    return 0


def _say(result: LookResult) -> None:
    for skip in result.skipped:
        log.warning("skipped: %s (%s)", skip.layer or skip.type, skip.reason)
    if result.never_ran:
        log.warning("never ran: %s", listed(result.never_ran, _NAMED))
    if result.prediction:
        words = ", ".join(guess.words for guess in result.prediction)
        log.info("%s: %s", result.image, words)
