"""`featviz sheet`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command
from featviz.cli.values import PLACE
from featviz.files.urls import Url
from featviz.options import SheetOptions
from featviz.text import counted

log = logging.getLogger(__name__)


@click.command("sheet", cls=Command)
@click.argument("run", type=PLACE)
@opts.options_of(SheetOptions)
@opts.json_option()
@opts.general_options
def command(run: Path | Url, as_json: bool, **given: Any) -> int:
    """Draw one picture of a layer: a column for each image of a run, a row for each channel.

    The tiles are cut from the pictures of the run, and keep the scale with which they were drawn.

    \b
    Examples:
      featviz sheet featviz-out --layer layer4 --pick 0-31
      featviz sheet featviz-out --layer conv1 --order zeros --out conv1.png
      featviz sheet featviz-out --layer relu --tensor output.call1 --transpose
    """
    from featviz.report.sheet import make_sheet
    from featviz.rundir.read import warn_of

    result = make_sheet(run, opts.record(SheetOptions, given))
    warn_of(result.left_out, behind=", and left out")
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
