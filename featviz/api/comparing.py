"""`featviz.diff` and `featviz.report`: runs that are there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from featviz.api import showing
from featviz.api.results import Run
from featviz.api.showing import Page
from featviz.api.words import keyword_errors
from featviz.diff import DiffResult, DiffThresholds, Outputs, compare_runs
from featviz.diff import diff as diff_runs
from featviz.diff.documents import diff_table, verdict_words
from featviz.errors import UsageError
from featviz.files.urls import Url, is_url
from featviz.records.checking import filled
from featviz.report import ReportOptions, ReportResult, build_report
from featviz.report.comparing import render


@dataclass(frozen=True, repr=False)
class RunDifference(DiffResult):
    """How two runs differ; shows itself as a table."""

    def __repr__(self) -> str:
        return f"<RunDifference: {verdict_words(self)}>"

    def _repr_html_(self) -> str:
        return showing.render(Page(table=diff_table(self)))


@dataclass(frozen=True, repr=False)
class ReportPages(ReportResult):
    """A report that was written; shows itself as a link."""

    def __repr__(self) -> str:
        return f"<ReportPages: {self.page}>"

    def _repr_html_(self) -> str:
        lines = [f"{name} is incomplete: {reason}" for name, reason in self.incomplete.items()]
        way = Path(os.path.relpath(self.page)).as_posix()
        return showing.render(Page(lines=lines, link=quote(os.fsencode(way))))


@keyword_errors()
def diff(
    base: str | Path | Run,
    new: str | Path | Run,
    *,
    tolerance: float = 1e-4,
    max_diff_ratio: float = 0.0,
    ignore_added: bool = False,
    out: str | Path | None = None,
    html: str | Path | None = None,
    junit: str | Path | None = None,
) -> RunDifference:
    """Compare two runs, layer by layer.

    Args:
        base, new: run directories or their URLs (`"s3://bucket/maps"`), or what `featviz.run` gave.
        tolerance: relative differences up to this are accepted, 0..1.
        max_diff_ratio: share of all channels that may differ, 0..1.
        ignore_added: accept layers and images that only `new` has.
        out: folder for the difference maps and diff.json.
        html: file for an HTML page.
        junit: file for the verdicts as JUnit XML.

    Returns:
        A record with `equal`, `ratio`, `first` (the first layer that differs) and `layers`.

    Raises:
        FeatvizError: a run cannot be read, the runs cannot be compared, or a file cannot be
            written.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> before = featviz.run(model, torch.ones(3, 8, 8), size=8)
        >>> featviz.diff(before, featviz.run(model, torch.ones(3, 8, 8), size=8)).equal
        True
    """
    limits = {"tolerance": tolerance, "max_diff_ratio": max_diff_ratio}
    asked = filled(DiffThresholds, {**limits, "ignore_added": ignore_added})
    files = filled(Outputs, {"out": out, "html": html, "junit": junit, "render": render})
    return RunDifference(**vars(diff_runs(_root(base), _root(new), asked, files)))


@keyword_errors()
def report(
    run: str | Path | Run,
    out: str | Path | None = None,
    *,
    single_file: bool = False,
    max_size: int = ReportOptions.max_size,
    zip: bool = False,
    compare: str | Path | Run | None = None,
    kernels: str | Path | None = None,
    exemplars: str | Path | None = None,
    audit: str | Path | None = None,
) -> ReportPages:
    """Write an HTML report of a run: the network as a picture, its images, layers and channels; or
    one page of an audit or of kernels.

    Args:
        run: a run directory or its URL, which needs `out` and `single_file` or `zip`; or what
            `featviz.run` gave; or the folder of an audit or of kernels.
        out: the folder of the report, or its file with `single_file` or `zip`. None is `report`,
            `report.html` or `report.zip` in the run directory.
        single_file: write one file that holds everything.
        max_size: bytes that `single_file` may have; figures are left out, and tiles are smaller and
            fewer, to stay within.
        zip: pack the report with the pictures that it needs.
        compare: another run, whose pictures are shown beside this one's.
        kernels: a folder that `featviz.kernels` wrote, shown with the channels they make.
        exemplars: a folder that `featviz.exemplars` wrote, shown with the channels.
        audit: an audit.json, or its folder, whose findings and suspects are shown. None takes the
            one in the run directory, if there is one.

    Returns:
        A record with `page`, `files` and `incomplete`.

    Raises:
        StoreError: a run cannot be read, or the report cannot be written.
        UsageError: options that exclude one another, or that only a run has; a run without
            a run directory is to be shown where it will not be.

    Example:
        >>> import featviz, pathlib, tempfile, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> result = featviz.run(model, torch.rand(3, 8, 8), size=8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder) / "maps.html"
        ...     featviz.report(result, file, single_file=True).page == file
        True
    """
    temporary = [one for one in (run, compare) if isinstance(one, Run) and one.room is not None]
    if temporary and (out is None or not single_file):
        raise UsageError(
            "the pictures of a run without out are gone with it, and the report would show none",
            "give the run an out, or the report out='maps.html', single_file=True",
        )
    other = None if compare is None else _root(compare)
    given = {
        "out": out,
        "single_file": single_file,
        "max_size": max_size,
        "zip": zip,
        "compare": other,
        "kernels": kernels,
        "exemplars": exemplars,
        "audit": audit,
    }
    return ReportPages(**vars(build_report(_root(run), filled(ReportOptions, given), compare_runs)))


def _root(run: Any) -> Path | Url:
    """The run directory, or its URL.

    Raises:
        UsageError: it is neither a path nor a run.
    """
    if isinstance(run, Run):
        return run.result.out
    if isinstance(run, str) and is_url(run):
        return Url.of_run(run)
    if isinstance(run, (str, Path)):
        return Path(run)
    raise UsageError(f"{type(run).__name__!r} is no run", "a run directory, or featviz.run(...)")
