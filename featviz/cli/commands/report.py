"""`featviz report`."""

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
from featviz.options import ReportOptions

log = logging.getLogger(__name__)


@click.command("report", cls=Command)
@click.argument("run", type=PLACE)
@opts.options_of(ReportOptions)
@opts.open_option("Open the report in the browser.")
@opts.json_option()
@opts.general_options
def command(run: Path | Url, as_json: bool, open: bool, **given: Any) -> int:
    """Build an HTML report of a run, an audit or kernels: pictures, numbers and findings.

    RUN is a folder that `featviz run` wrote, or `featviz audit` or `featviz
    kernels`: these become one page. Of a run there is a page for the run, for
    each image and for each layer, whose channels have addresses of their own
    (layer-003.html#c17). The pages show the pictures where they are, so keep
    the report with its run, or move one file: --single-file writes one of
    about 25 MB, with fewer tiles where need be, --zip all pages and pictures,
    to be unpacked. An earlier report is replaced.

    Where RUN is a series, which featviz.Watcher writes as a model is trained,
    one page has a slider over its steps.

    \b
    Examples:
      featviz report featviz-out --open
      featviz report new --compare old
      featviz report featviz-out --kernels kernels --audit featviz-audit
      featviz report featviz-out --exemplars featviz-exemplars
      featviz report featviz-audit
      featviz report featviz-kernels --open
      featviz report featviz-out --single-file --out maps.html
    """
    from featviz.diff import compare_runs
    from featviz.report import build_report
    from featviz.rundir.read import warn_of

    result = build_report(run, opts.record(ReportOptions, given), compare_runs)
    warn_of(result.incomplete, behind="; the report names it but does not show it")
    if result.tiles is not None:
        log.warning(
            "each layer shows at most %d of its maps, so that one file stays small; --zip has all",
            result.tiles,
        )
    if as_json:
        paths = {"page": str(result.page), "files": [str(path) for path in result.files]}
        output.document(paths)
    if open or not as_json:
        output.written("report", result.page, open)
    return 0
