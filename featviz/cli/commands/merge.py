"""`featviz merge`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import click

from featviz.cli import echo
from featviz.cli import options as opts

log = logging.getLogger(__name__)


@click.command("merge")
@click.argument(
    "parts",
    nargs=-1,
    required=True,
    metavar="DIR...",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("featviz-out"),
    show_default=True,
    help="The run directory that they become.",
)
@click.option("--overwrite", is_flag=True, help="Replace the run in --out.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@opts.config_option
@opts.verbosity_options
def command(parts: Sequence[Path], out: Path, overwrite: bool, as_json: bool) -> int:
    """Join parts of a run that were made apart into one run directory.

    The parts must be of one model, with the same layers and options; an image that is in several
    must be the same in all. The parts stay; on one disk the result takes no further room.

    \b
    Examples:
      featviz merge part1 part2 part3 --out whole
      featviz merge shards/* --out whole --overwrite

    Exit codes: 0 done, 1 failed or refused, 2 usage, 3 some images are failed or missing.
    """
    from featviz.rundir import merge

    result = merge.merge(parts, out, overwrite)
    for name in result.incomplete:
        log.warning("%s is incomplete (no manifest), and left out", name)
    log.info("%d of %d images in %s", len(result.images), result.total, result.out)
    if as_json:
        names = ("images", "failures", "incomplete")
        lists = {name: list(getattr(result, name)) for name in names}
        echo.document({"out": str(result.out), "total": result.total, **lists})
    return result.exit_code
