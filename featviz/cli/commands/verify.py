"""`featviz verify`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command
from featviz.cli.values import EXISTING_PLACE
from featviz.files.urls import Url
from featviz.options import VerifyOptions
from featviz.text import counted, listed, quoted

if TYPE_CHECKING:
    from featviz.rundir.verify import RunVerdict, Verified

log = logging.getLogger(__name__)

_NAMED = 5
"""Files that nothing lists which a warning names."""


@click.command("verify", cls=Command)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=EXISTING_PLACE)
@opts.options_of(VerifyOptions)
@opts.json_option()
@opts.general_options
def command(runs: Sequence[Path | Url], jobs: int | None, as_json: bool) -> int:
    """Check that every file of a run is as it was written.

    Each file of each image is read and held against the size and the SHA-256 in the image's
    manifest, and the manifest against its own. Nothing is changed: remove the folder of an image
    that does not fit, and `featviz run ... --resume` draws it again. The settings in run.json are
    held against those in the manifests. Files that nothing lists are named, and are no fault.

    The folder of a series, which featviz.Watcher writes as a model is trained,
    stands for the run of each of its steps.

    \b
    Examples:
      featviz verify featviz-out
      featviz verify featviz-series
      featviz verify shards/* --json | jq '.runs[].faults'

    Exit codes: 0 all is whole, 1 no run, 2 usage, 4 something does not fit.
    """
    from featviz.rundir import verify

    with output.progress_bar() as advance:
        verdict = verify.verify(runs, jobs, advance)
    for series, group in groupby(verdict.runs, key=lambda run: run.series):
        steps = [_say(run) for run in group]
        if series is not None:
            _say_series(series, steps)
    if as_json:
        output.document(_document(verdict))
    return verdict.exit_code


def _say(run: RunVerdict) -> bool:
    """Say what was found of a run, and return whether it is whole."""
    for fault in run.faults:
        output.error(f"{run.root}: {fault}")
    for image in run.images:
        for fault in image.faults:
            output.error(f"{run.root}: {fault}")
    if run.unlisted:
        names = listed([quoted(way) for way in run.unlisted], _NAMED)
        log.warning("%s: nothing lists %s", run.root, names)
    damaged = sum(bool(image.faults) for image in run.images)
    files, size = sum(i.files for i in run.images), sum(i.bytes for i in run.images)
    what = f"{_images(len(run.images))}, {counted(files, 'file')}, {size / 1e6:.1f} MB"
    missing = f"; {_images(run.missing)} failed or not drawn yet" if run.missing else ""
    found = f"{_images(damaged)} damaged" if damaged else "whole" if run.is_whole else "damaged"
    log.info("%s: %s: %s%s", run.root, what, found, missing)
    return run.is_whole


def _say_series(root: Path, steps: Sequence[bool]) -> None:
    """Say what was found of the series of a training, from whether each step is whole."""
    found = f"{counted(steps.count(False), 'step')} damaged" if not all(steps) else "whole"
    log.info("%s: a series of %s: %s", root, counted(len(steps), "step"), found)


def _images(count: int) -> str:
    return counted(count, "image")


def _document(verdict: Verified) -> dict[str, Any]:
    return {"whole": verdict.exit_code == 0, "runs": [_row(run) for run in verdict.runs]}


def _row(run: RunVerdict) -> dict[str, Any]:
    faults = [{"image": None, "fault": fault} for fault in run.faults]
    faults += [
        {"image": image.name, "fault": fault} for image in run.images for fault in image.faults
    ]
    return {
        "run": str(run.root),
        "series": None if run.series is None else str(run.series),
        "images": len(run.images),
        "files": sum(image.files for image in run.images),
        "bytes": sum(image.bytes for image in run.images),
        "missing": run.missing,
        "unlisted": list(run.unlisted),
        "faults": faults,
    }
