"""The commands that read runs: `featviz report`, `sheet`, `diff`, `merge` and `verify`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from featviz.cli import output
from featviz.cli.options import ClickOption, Given, click_option, command, run_argument
from featviz.errors import CHECK_FAILED
from featviz.options import OUTPUT, RunOptions, declared, read_from
from featviz.options.commands import (
    DiffFiles,
    DiffThresholds,
    KernelOptions,
    ReportOptions,
    SheetOptions,
)
from featviz.text import counted, listed, quoted

log = logging.getLogger(__name__)

_NAMED = 5
_JOINED, _OUT = "Write the joined run into this folder.", Path("featviz-out")


@command(
    ReportOptions,
    arguments=[run_argument("run")],
    flags=[ClickOption("Open the report in the browser.", "--open", group=OUTPUT, first=True)],
)
def report(given: Given) -> int:
    """Build an HTML report of a run, an audit or kernels: pictures, numbers and findings.

    RUN is a folder that `featviz run`, `featviz audit` or `featviz kernels`
    wrote, or a series of featviz.Watcher. A run gets a page for itself, for
    each image and for each layer, whose channels have addresses of their own
    (layer-003.html#c17). The pages show the pictures where they are, so keep
    the report with its run, or move one file: --single-file writes one of
    about 25 MB, --zip all pages and pictures. An earlier report is replaced.

    \b
    Examples:
      featviz report featviz-out --open
      featviz report new --compare old
      featviz report featviz-out --kernels kernels --audit featviz-audit
      featviz report featviz-out --single-file --out maps.html
    """
    from featviz.diff import compare_runs
    from featviz.report import build_report
    from featviz.rundir.read import warn_of

    result = build_report(given["run"], read_from(ReportOptions, {**given}), compare_runs)
    warn_of(result.incomplete, behind="; the report names it but does not show it")
    if given["json"]:
        files = [str(path) for path in result.files]
        output.document({"page": str(result.page), "files": files})
    if given["open"] or not given["json"]:
        output.written("report", result.page, given["open"])
    return 0


@command(SheetOptions, arguments=[run_argument("run")])
def sheet(given: Given) -> int:
    """Draw one picture of a layer: a column for each image of a run, a row for each channel.

    The tiles are cut from the pictures of the run, and keep their scale.

    \b
    Examples:
      featviz sheet featviz-out --layer conv1 --order zeros --out conv1.png
      featviz sheet featviz-out --layer relu --tensor output.call1 --transpose
    """
    from featviz.report.sheet import make_sheet
    from featviz.rundir.read import warn_of

    path, images, channels, left_out = make_sheet(given["run"], read_from(SheetOptions, {**given}))
    warn_of(left_out, behind=", and left out")
    if given["json"]:
        output.document({"file": str(path), "images": images, "channels": channels})
    else:
        what = counted(len(channels), "channel") if channels else "the tile of all channels"
        log.info("%s of %s in %s", what, counted(len(images), "image"), path)
    return 0


@command(*(DiffThresholds, DiffFiles), arguments=[run_argument("base"), run_argument("new")])
def diff(given: Given) -> int:
    """Compare two run directories, layer by layer.

    \b
    Examples:
      featviz diff runs/main runs/branch
      featviz diff before after --html diff.html --junit diff.xml
      featviz diff before after --json | jq .first_divergence

    \b
    absolute   the largest |a - b|, for a value a of BASE and b of NEW
    relative   |a - b| / (the larger of |a| and |b| + the layer's largest), 0..1
    cosine     similarity of the layer's tensors as vectors, -1..1: 1 is alike

    Values are equal whose relative difference is at most --tolerance. The
    default accepts what another number of threads or another CPU library
    changes; a CPU beside a GPU may need 1e-3. NaN equals NaN.

    Where both runs kept tensors (`featviz run --tensors npy`), these are
    compared, else the statistics, and the pixels of PNGs. Runs of different
    images, preprocessing or scale modes are refused.

    Exit codes: 0 equal, 1 failed or refused, 2 usage, 4 different.
    """
    from featviz.diff import diff
    from featviz.diff.diff import as_json, diff_table
    from featviz.report.pages import render_comparison

    thresholds, files = read_from(DiffThresholds, {**given}), read_from(DiffFiles, {**given})
    result = diff(given["base"], given["new"], thresholds, files, render_comparison)
    if given["json"]:
        output.document(as_json(result))
    else:
        output.text(str(diff_table(result)))
    return result.exit_code


@command(
    arguments=[run_argument("parts", metavar="DIR...")],
    flags=[
        click_option(replace(declared(KernelOptions)["out"], words=_JOINED, default=_OUT)),
        click_option(declared(RunOptions)["overwrite"]),
    ],
)
def merge(given: Given) -> int:
    """Join parts of a run into one run directory.

    The parts must have the same model, layers and options, and stay as they are. The joined run is
    a copy.

    \b
    Examples:
      featviz merge shards/* --out whole --overwrite

    Exit codes: 0 done, 1 failed or refused, 2 usage, 3 some images are failed or missing.
    """
    from featviz.rundir.read import warn_of
    from featviz.rundir.verify import merge

    result = merge(given["parts"], given["out"], given["overwrite"])
    whole, total = len(result["images"]), result["total"]
    warn_of(dict.fromkeys(result["incomplete"], "it has no manifest"), behind=", and left out")
    log.info("%d of %s in %s", whole, counted(total, "image"), result["out"])
    if given["json"]:
        output.document(result)
    return 0 if whole == total else 3


@command(arguments=[run_argument("runs", metavar="RUN...")])
def verify(given: Given) -> int:
    """Check that every file of a run is as it was written.

    Each file is held against the size and the SHA-256 in its image's manifest, and the settings in
    run.json against those in the manifests. Nothing is changed: remove the folder of an image that
    does not fit, and `featviz run ... --resume` draws it again. Files that nothing lists are named,
    and are no fault. A series of featviz.Watcher stands for the run of each of its steps.

    \b
    Examples:
      featviz verify featviz-out
      featviz verify shards/* --json | jq '.runs[].faults'

    Exit codes: 0 all is whole, 1 no run, 2 usage, 4 something does not fit.
    """
    from featviz.rundir.verify import verify

    with output.progress_bar() as advance:
        runs = verify(given["runs"], progress=advance)
    for series, group in groupby(runs, key=lambda run: run["series"]):
        steps = [_is_whole(run) for run in group]
        if series is not None:
            damaged = steps.count(False)
            found = f"{counted(damaged, 'step')} damaged" if damaged else "whole"
            log.info("%s: a series of %s: %s", series, counted(len(steps), "step"), found)
    whole = not any(run["faults"] for run in runs)
    if given["json"]:
        output.document({"whole": whole, "runs": runs})
    return 0 if whole else CHECK_FAILED


def _is_whole(run: Mapping[str, Any]) -> bool:
    """Say what was found of a run, and return whether it is whole."""
    place = run["run"]
    for row in run["faults"]:
        output.error(f"{place}: {row['fault']}")
    if run["unlisted"]:
        names = listed([quoted(way) for way in run["unlisted"]], _NAMED)
        log.warning("%s: nothing lists %s", place, names)
    images, files = counted(run["images"], "image"), counted(run["files"], "file")
    what = f"{images}, {files}, {run['bytes'] / 1e6:.1f} MB"
    left = run["missing"]
    missing = f"; {counted(left, 'image')} failed or not drawn yet" if left else ""
    damaged = len({row["image"] for row in run["faults"]} - {None})
    found = f"{counted(damaged, 'image')} damaged" if damaged else "damaged"
    log.info("%s: %s: %s%s", place, what, found if run["faults"] else "whole", missing)
    return not run["faults"]
