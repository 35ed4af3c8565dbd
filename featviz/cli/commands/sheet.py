"""`featviz sheet`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command
from featviz.cli.values import FILE, PLACE
from featviz.files.urls import Url
from featviz.text import counted

log = logging.getLogger(__name__)


@click.command("sheet", cls=Command)
@click.argument("run", type=PLACE)
@opts.option(
    "--layer", required=True, metavar="NAME", help="Draw the layer of this qualified name."
)
@opts.option(
    "--tensor",
    "stem",
    default="output",
    metavar="FILE",
    help="Cut the tiles from this picture of the layer: its file name without the ending, such as "
    "output.call1 or output.boxes.",
)
@opts.option(
    "--channels",
    metavar="LIST",
    show_default="all that the run drew",
    help="Show these channels, such as 0-31 or 3,7,12-15.",
)
@opts.option(
    "--sort",
    type=click.Choice(["index", "mean", "max", "variance", "zeros"]),
    default="index",
    help="Sort channels by number, or by a statistic averaged over the images, largest first.",
)
@opts.option(
    "--transpose", is_flag=True, help="Draw a row for each image and a column for each channel."
)
@opts.out_option("Write the sheet into this PNG file.", type=FILE, show_default="sheet-NAME.png")
@opts.json_option()
@opts.config_option
@opts.verbosity_options
def command(run: Path | Url, as_json: bool, **given: Any) -> int:
    """Draw one picture of a layer: a column for each image of a run, a row for each channel.

    The tiles are cut from the pictures of the run, and keep the scale with which they were drawn.

    \b
    Examples:
      featviz sheet featviz-out --layer layer4 --channels 0-31
      featviz sheet featviz-out --layer conv1 --sort zeros --out conv1.png
      featviz sheet featviz-out --layer relu --tensor output.call1 --transpose
    """
    from featviz.report.contact_sheet import SheetOptions, make_sheet

    result = make_sheet(run, SheetOptions(**given))
    for name, reason in result.left_out.items():
        log.warning("%s is incomplete (%s), and left out", name, reason)
    if as_json:
        content = {
            "file": str(result.path),
            "images": list(result.images),
            "channels": list(result.channels),
        }
        output.document(content)
    else:
        channels = counted(len(result.channels), "channel")
        what = channels if result.channels else "the tile of all channels"
        log.info("%s of %s in %s", what, counted(len(result.images), "image"), result.path)
    return 0
