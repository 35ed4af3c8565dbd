"""`featviz diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import echo, tables
from featviz.cli import options as opts

if TYPE_CHECKING:
    from featviz.diff import DiffResult

_RUN = click.Path(exists=True, file_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("diff")
@click.argument("base", type=_RUN)
@click.argument("new", type=_RUN)
@click.option(
    "--tolerance",
    type=float,
    default=1e-4,
    show_default=True,
    help="A value differs by more than this share of itself plus its layer's largest.",
)
@click.option(
    "--max-diff-ratio",
    type=float,
    default=0.0,
    show_default=True,
    help="Share of all channels that may differ, 0..1.",
)
@click.option("--ignore-added", is_flag=True, help="Layers and images only NEW has are fine.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("--junit", type=_FILE, help="Write a test case for each layer as JUnit XML.")
@click.option("--html", type=_FILE, help="Write a page, and the difference maps beside it.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the difference maps (with --html alone: beside the page).",
)
@opts.config_option
@opts.verbosity_options
def command(base: Path, new: Path, as_json: bool, **given: Any) -> int:
    """Compare two run directories, layer by layer.

    Images are matched by name, tensors by layer, kind, call and key. Where both runs kept the
    tensors (run --tensors npy) these are compared; else the statistics, and the values behind the
    pixels of PNGs, which show differences down to about 1/250 of a map's range.

    Two values are equal if they are no further apart than TOLERANCE times the sum of the larger
    one and the layer's largest magnitude. The default lets pass what another number of threads or
    another CPU library changes; comparing a CPU with a GPU may need 1e-3. NaN equals NaN.

    Runs whose images, preprocessing or scale mode are not the same are refused.

    \b
    Examples:
      featviz diff runs/main runs/branch
      featviz diff before after --html diff.html --junit diff.xml
      featviz diff before after --json | jq .first_divergence

    Exit codes: 0 equal, 1 failed or refused, 2 usage, 4 different.
    """
    from featviz import diff

    asked = diff.DiffThresholds(
        **{name: given[name] for name in ("tolerance", "max_diff_ratio", "ignore_added")}
    )
    outputs = diff.Outputs(**{name: given[name] for name in ("out", "html", "junit")})
    result = diff.diff(base, new, asked, outputs)
    if as_json:
        from featviz.diff.documents import as_json as document

        echo.document(document(result))
    else:
        _table(result)
    return result.exit_code


def _table(result: DiffResult) -> None:
    from featviz.diff import documents

    footer = [
        *(f"only in BASE: {line}" for line in documents.only_words(result.only_in_base)),
        *(f"only in NEW: {line}" for line in documents.only_words(result.only_in_new)),
        documents.verdict_words(result),
    ]
    if not result.differing:
        for line in footer:
            echo.line(line)
        return
    numbers = {"images", "channels", "absolute", "relative", "cosine"}
    tables.print_table(documents.HEADINGS, numbers, map(documents.cells, result.differing), footer)
