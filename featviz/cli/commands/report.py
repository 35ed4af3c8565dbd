"""`featviz report`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command
from featviz.cli.values import PATH, PLACE, BytesType
from featviz.files.urls import Url

log = logging.getLogger(__name__)


@click.command("report", cls=Command)
@click.argument("run", type=PLACE)
@opts.out_option(
    "Write the report into this folder, or with --single-file or --zip into this file.",
    show_default="RUN/report, RUN/report.html or RUN/report.zip",
)
@opts.option(
    "--compare",
    type=PLACE,
    metavar="RUN",
    help="Show the pictures of this other run beside those of RUN.",
)
@opts.option(
    "--kernels",
    type=PATH,
    metavar="DIR",
    help="Show the kernels in this folder, which featviz kernels wrote, with their channels.",
)
@opts.option(
    "--exemplars",
    type=PATH,
    metavar="DIR",
    help="Show the pictures in this folder, which featviz exemplars wrote, with their channels.",
)
@opts.option(
    "--audit",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    show_default="RUN/audit.json",
    help="Show the findings of this audit.json, or of the one in this folder with the pictures of "
    "its suspects.",
)
@opts.option("--single-file", is_flag=True, help="Write one HTML file that holds everything.")
@opts.option("--zip", is_flag=True, help="Write one zip file of the report and its pictures.")
@opts.option(
    "--max-size",
    type=BytesType(),
    default=25_000_000,
    show_default="25MB",
    help="With --single-file, leave out figures, and show smaller and fewer tiles of each "
    "layer, where all of them would be more.",
)
@opts.open_option("Open the report in the browser.")
@opts.json_option()
@opts.config_option
@opts.verbosity_options
def command(run: Path | Url, as_json: bool, open: bool, **given: Any) -> int:
    """Build an HTML report of a run, an audit or kernels: pictures, numbers and findings.

    RUN is a folder that `featviz run` wrote, or `featviz audit` or `featviz
    kernels`: these become one page. Of a run there is a page for the run, for
    each image and for each layer, whose channels have addresses of their own
    (layer-003.html#c17). The pages show the pictures where they are, so keep
    the report with its run, or move one file: --single-file writes one of at
    most --max-size, with smaller and fewer tiles where need be, --zip all
    pages and pictures, to be unpacked. An earlier report is replaced.

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
    from featviz.report import ReportOptions, build_report

    result = build_report(run, ReportOptions(**given), compare_runs)
    for name, reason in result.incomplete.items():
        log.warning("%s is incomplete (%s); the report names it but does not show it", name, reason)
    if result.tiles is not None:
        log.warning(
            "each layer shows at most %d of its maps, to stay within --max-size", result.tiles
        )
    elif result.smaller:
        log.warning("large maps have fewer pixels, to stay within --max-size")
    if as_json:
        paths = {"page": str(result.page), "files": [str(path) for path in result.files]}
        output.document(paths)
    if open or not as_json:
        output.written("report", result.page, open)
    return 0
