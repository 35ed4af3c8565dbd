"""`featviz merge`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command
from featviz.cli.values import EXISTING_PLACE
from featviz.files.urls import Url
from featviz.options import MergeOptions
from featviz.text import counted

log = logging.getLogger(__name__)


@click.command("merge", cls=Command)
@click.argument("parts", nargs=-1, required=True, metavar="DIR...", type=EXISTING_PLACE)
@opts.options_of(MergeOptions)
@opts.json_option()
@opts.general_options
def command(parts: Sequence[Path | Url], out: Path, overwrite: bool, as_json: bool) -> int:
    """Join parts of a run into one run directory.

    The parts must have the same model, layers and options; an image that several parts have
    must be the same in all of them. The parts stay as they are; on one disk, a joined run takes no
    further room.

    \b
    Examples:
      featviz merge part1 part2 part3 --out whole
      featviz merge shards/* --out whole --overwrite

    Exit codes: 0 done, 1 failed or refused, 2 usage, 3 some images are failed or missing.
    """
    from featviz.rundir import merge
    from featviz.rundir.read import warn_of

    result = merge.merge(parts, out, overwrite)
    warn_of(dict.fromkeys(result.incomplete, "it has no manifest"), behind=", and left out")
    log.info("%d of %s in %s", len(result.images), counted(result.total, "image"), result.out)
    if as_json:
        names = ("images", "failures", "incomplete")
        lists = {name: list(getattr(result, name)) for name in names}
        output.document({"out": str(result.out), "total": result.total, **lists})
    return result.exit_code
