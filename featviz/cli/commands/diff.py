"""`featviz diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command
from featviz.cli.values import EXISTING_PLACE
from featviz.files.urls import Url
from featviz.options import DiffFiles, DiffThresholds

if TYPE_CHECKING:
    from featviz.records import Comparison


@click.command("diff", cls=Command)
@click.argument("base", type=EXISTING_PLACE)
@click.argument("new", type=EXISTING_PLACE)
@opts.options_of(DiffThresholds, DiffFiles)
@opts.json_option()
@opts.general_options
def command(base: Path | Url, new: Path | Url, as_json: bool, **given: Any) -> int:
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
    compared. Else the statistics are, and the pixels of PNGs, which show
    differences down to about 1/250 of a map's range. Runs of different images,
    preprocessing or scale modes are refused.

    Exit codes: 0 equal, 1 failed or refused, 2 usage, 4 different.
    """
    from featviz.diff import Outputs, diff
    from featviz.report.compare import render

    outputs = opts.record(Outputs, given, render=render)
    result = diff(base, new, opts.record(DiffThresholds, given), outputs)
    if as_json:
        from featviz.diff.output import as_json as document

        output.document(document(result))
    else:
        _table(result)
    return result.exit_code


def _table(result: Comparison) -> None:
    from featviz.diff.output import diff_table

    table = diff_table(result)
    if table.rows:
        output.table(*table)
        return
    for line in table.footer:
        output.line(line)
