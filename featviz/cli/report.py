"""The commands that read runs: `featviz report`, `merge` and `verify`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from featviz.cli import output
from featviz.cli.options import (
    RUN,
    ClickOption,
    Values,
    click_option,
    command,
    existing_run,
    run_arguments,
)
from featviz.errors import CHECK_FAILED
from featviz.options import OUTPUT, RunOptions, declared_options, read_from
from featviz.options.commands import (
    KernelOptions,
    ReportOptions,
)
from featviz.text import counted, listed, quoted, size_text

log = logging.getLogger(__name__)

_NAMED = 5  # files that a message names


@command(
    ReportOptions,
    arguments=[RUN],
    flags=[
        ClickOption(
            "Open the report in the browser.", "--open", group=OUTPUT, first=True
        )
    ],
)
def report(values: Values) -> int:
    """Build an HTML report of a run, an audit or kernels: pictures, numbers and
    findings.

    RUN is a folder that `featviz run`, `featviz audit` or `featviz kernels` wrote, or a
    series of featviz.Watcher. A run has a page for itself, for each image and for
    each layer. Each channel has an address (layer-003.html#c17). The pages link the
    pictures of the run, so keep the report with its run, or send one file:
    --single-file writes one of about 25 MB at most, --zip all pages and pictures.
    An earlier report is replaced.

    \b
    Examples:
      featviz report featviz-out --open
      featviz report new --compare old
      featviz report featviz-out --kernels kernels --audit featviz-audit
      featviz report featviz-out --single-file --out maps.html
    """
    from featviz.report import build_report
    from featviz.rundir.read import warn_of

    # the same message as for a RUN that does not exist
    for name in ("compare", "kernels", "exemplars", "audit"):
        if values[name] is not None:
            existing_run(str(values[name]))
    result = build_report(values["run"], read_from(ReportOptions, dict(values)))
    warn_of(result.incomplete, behind="; the report names it but does not show it")
    if values["json"]:
        files = [str(path) for path in result.files]
        output.document({"page": str(result.page), "files": files})
    if values["open"] or not values["json"]:
        output.log_written("report", result.page, values["open"])
    return 0


@command(
    arguments=[run_arguments("parts", metavar="DIR...")],
    flags=[
        click_option(
            replace(
                declared_options(KernelOptions)["out"],
                help="Write the joined run into this folder.",
                default=Path("featviz-out"),
            )
        ),
        click_option(declared_options(RunOptions)["overwrite"]),
    ],
)
def merge(values: Values) -> int:
    """Join parts of a run into one run directory.

    The parts must have the same model, layers and options. The joined run is a copy:
    the parts stay as they are.

    \b
    Examples:
      featviz merge shards/* --out whole --overwrite

    Exit codes: 0 done, 1 failed or refused, 2 usage, 3 some images are failed or
    missing."""
    from featviz.rundir.read import warn_of
    from featviz.rundir.verify import merge

    result = merge(values["parts"], values["out"], values["overwrite"])
    complete = len(result["images"])
    warn_of(
        dict.fromkeys(result["incomplete"], "it has no manifest"),
        behind=", and left out",
    )
    log.info(
        "%d of %s in %s", complete, counted(result["total"], "image"), result["out"]
    )
    if values["json"]:
        output.document(result)
    return 0 if complete == result["total"] else 3


@command(arguments=[run_arguments("runs", metavar="RUN...")])
def verify(values: Values) -> int:
    """Check that every file of a run is as it was written.

    verify compares each file with the size and the SHA-256 in its image's manifest, and
    the settings in run.json with those in the manifests. It changes nothing. Remove
    the folder of a damaged image, and `featviz run ... --resume` draws it again.
    Files that nothing lists are named, but are no faults. Of a series of
    featviz.Watcher, the run of each step is checked.

    \b
    Examples:
      featviz verify featviz-out
      featviz verify shards/* --json | jq '.runs[].faults'

    Exit codes: 0 all is whole, 1 no run, 2 usage, 4 something is not as it was.
    """
    from featviz.rundir.verify import verify

    with output.progress_bar() as advance:
        runs = verify(values["runs"], progress=advance)
    # the steps of a series stand together; a line about the whole series follows them
    for series, group in groupby(runs, key=lambda run: run["series"]):
        are_whole = [_print_faults(run) for run in group]
        if series is not None:
            damaged = are_whole.count(False)
            state = "whole"
            if damaged:
                state = f"{counted(damaged, 'step')} damaged"
            log.info(
                "%s: a series of %s: %s", series, counted(len(are_whole), "step"), state
            )
    all_whole = not any(run["faults"] for run in runs)
    if values["json"]:
        output.document({"whole": all_whole, "runs": runs})
    return 0 if all_whole else CHECK_FAILED


def _print_faults(run: Mapping[str, Any]) -> bool:
    """Print the faults of a run, and return whether it is whole."""
    root = run["run"]
    for row in run["faults"]:
        output.error(f"{root}: {row['fault']}")
    if run["unlisted"]:
        names = [quoted(relative_path) for relative_path in run["unlisted"]]
        log.warning("%s: nothing lists %s", root, listed(names, _NAMED))
    state = "whole"
    if run["faults"]:
        damaged = {row["image"] for row in run["faults"] if row["image"] is not None}
        state = "damaged"
        if damaged:  # a fault of run.json belongs to no image
            state = f"{counted(len(damaged), 'image')} damaged"
    if run["missing"]:
        state += f"; {counted(run['missing'], 'image')} failed or not drawn yet"
    images = counted(run["images"], "image")
    files = counted(run["files"], "file")
    size = size_text(run["bytes"])
    log.info("%s: %s, %s, %s: %s", root, images, files, size, state)
    return not run["faults"]
