"""`featviz report`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from featviz.cli import echo
from featviz.cli import options as opts

log = logging.getLogger(__name__)


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder to write; a file with --single-file.  [default: RUN/report or RUN/report.html]",
)
@click.option(
    "--compare",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Show the pictures of another run beside those of this one.",
)
@click.option(
    "--audit",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="Findings to show: an audit.json or its folder.  [default: RUN/audit.json]",
)
@click.option("--single-file", is_flag=True, help="One HTML file with everything inside.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@opts.verbosity_options
def command(run: Path, as_json: bool, **given: Any) -> int:
    """Make a gallery in HTML of a run: a page for each image, each layer, and the run.

    RUN is a folder that `featviz run` wrote. Pictures stay where they are, so keep the report with
    its run; --single-file makes one file of at most 25 MB instead. An earlier report is replaced.

    \b
    Examples:
      featviz report featviz-out
      featviz report new --compare old
      featviz report featviz-out --single-file --out maps.html
    """
    from featviz.report import ReportOptions, build_report

    result = build_report(run, ReportOptions(**given))
    for name, reason in result.incomplete.items():
        log.warning("%s is incomplete (%s); the report names it but does not show it", name, reason)
    if as_json:
        paths = {"page": str(result.page), "files": [str(path) for path in result.files]}
        echo.document(paths)
    else:
        log.info("report in %s", result.page)
    return 0
