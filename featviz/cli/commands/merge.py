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
from featviz.text import counted

log = logging.getLogger(__name__)


@click.command("merge", cls=Command)
@click.argument("parts", nargs=-1, required=True, metavar="DIR...", type=EXISTING_PLACE)
@opts.out_option("Write the joined run into this folder.", "featviz-out")
@opts.overwrite_option("the run")
@opts.json_option()
@opts.config_option
@opts.verbosity_options
def command(parts: Sequence[Path | Url], out: Path, overwrite: bool, as_json: bool) -> int:
    """Join parts of a run into one run directory, or parts of exemplars into one folder.

    The parts must have the same model, layers and options; an image that several parts of a run
    have must be the same in all of them. The parts stay as they are; on one disk, a joined run
    takes no further room. Of exemplars all parts I/N of --shard must be there.

    \b
    Examples:
      featviz merge part1 part2 part3 --out whole
      featviz merge shards/* --out whole --overwrite

    Exit codes: 0 done, 1 failed or refused, 2 usage, 3 some images are failed or missing.
    """
    from featviz.rundir import EXEMPLARS_FILE, merge

    folders = [part for part in parts if isinstance(part, Path)]
    if len(folders) == len(parts) and all((part / EXEMPLARS_FILE).is_file() for part in folders):
        return _merge_exemplars(folders, out, overwrite, as_json)

    result = merge.merge(parts, out, overwrite)
    for name in result.incomplete:
        log.warning("%s is incomplete (it has no manifest), and left out", name)
    log.info("%d of %s in %s", len(result.images), counted(result.total, "image"), result.out)
    if as_json:
        names = ("images", "failures", "incomplete")
        lists = {name: list(getattr(result, name)) for name in names}
        output.document({"out": str(result.out), "total": result.total, **lists})
    return result.exit_code


def _merge_exemplars(parts: Sequence[Path], out: Path, overwrite: bool, as_json: bool) -> int:
    from featviz.exemplars.merging import merge_exemplars

    record = merge_exemplars(parts, out, overwrite)
    log.info("exemplars of %s in %s", counted(record.images.seen, "image"), out)
    if as_json:
        output.document(record.as_json())
    return 3 if record.images.failures else 0
