"""`featviz sheet`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from featviz.cli import echo
from featviz.cli import options as opts

log = logging.getLogger(__name__)


@click.command("sheet")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--layer", required=True, metavar="NAME", help="Qualified name, as in the run.")
@click.option(
    "--tensor",
    "stem",
    default="output",
    show_default=True,
    metavar="FILE",
    help="Which picture of the layer, without its ending: output.call1, output.boxes.",
)
@click.option("--channels", metavar="LIST", help="0-31 or 3,7,12-15; without it, all drawn ones.")
@click.option(
    "--sort",
    type=click.Choice(["index", "mean", "max", "variance", "zeros"]),
    default="index",
    show_default=True,
    help="Order of the channels, largest first, by the mean over the images.",
)
@click.option("--transpose", is_flag=True, help="A row for each image, a column for each channel.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The PNG to write.  [default: sheet-NAME.png]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@opts.verbosity_options
def command(run: Path, as_json: bool, **given: Any) -> int:
    """Make one picture of one layer: a column for each image of a run, a row for each channel.

    The tiles are those of the run's grids, each drawn by the scale that it had there.

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
        echo.document(content)
    else:
        count = (
            f"{len(result.channels)} channels" if result.channels else "the tile of all channels"
        )
        log.info("%s of %d images in %s", count, len(result.images), result.path)
    return 0
