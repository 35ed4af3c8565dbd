"""`featviz.diff` and `featviz.report`: runs that are there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featviz.api import showing
from featviz.api.keywords import keywords_of
from featviz.api.running import Run
from featviz.diff import Outputs, compare_runs
from featviz.diff import diff as diff_runs
from featviz.diff.output import as_json, diff_table
from featviz.errors import UsageError
from featviz.files.urls import Url, is_url
from featviz.options import (
    DiffFiles,
    DiffThresholds,
    ReportOptions,
    every_option,
    no_option,
    read,
    read_from,
)
from featviz.records import Comparison
from featviz.report import ReportResult, build_report
from featviz.report.compare import render


@dataclass(frozen=True, repr=False)
class RunDifference(Comparison):
    """How two runs differ; shows itself as a table."""

    out: Path | None = None

    @property
    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return as_json(self)

    def __repr__(self) -> str:
        return f"<RunDifference: {self.words}>"

    def _repr_html_(self) -> str:
        return showing.render(table=diff_table(self))


@keywords_of(DiffThresholds, DiffFiles)
def diff(base: str | Path | Run, new: str | Path | Run, **options: Any) -> RunDifference:
    """Compare two runs, layer by layer.

    Args:
        base, new: run directories or their URLs (`"s3://bucket/maps"`), or what `featviz.run` gave.
        options: those below.

    Returns:
        A record with `document` (what `--json` prints), `equal`, `ratio`, `first` (the first layer
        that differs) and `layers`.

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
    given = dict(options)
    asked, files = read_from(DiffThresholds, given), read_from(Outputs, given, render=render)
    if given:
        raise no_option(given, every_option(DiffThresholds, DiffFiles))
    found = diff_runs(_root(base), _root(new), asked, files)
    return RunDifference(**vars(found), out=files.folder)


@keywords_of(ReportOptions)
def report(run: str | Path | Run, out: str | Path | None = None, **options: Any) -> ReportResult:
    """Write an HTML report of a run: the network as a picture, its images, layers and channels; or
    one page of an audit or of kernels.

    Args:
        run: a run directory or its URL, which needs `out` and `single_file` or `zip`; or what
            `featviz.run` gave; or the folder of an audit or of kernels.
        out: the folder of the report, or its file with `single_file` or `zip`. None is `report`,
            `report.html` or `report.zip` in the run directory.
        options: those below; `compare` may be what `featviz.run` gave.

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
    other = options.get("compare")
    temporary = [one for one in (run, other) if isinstance(one, Run) and one.room is not None]
    if temporary and (out is None or not options.get("single_file")):
        raise UsageError(
            "the pictures of a run without out are gone with it, and the report would show none",
            "give the run an out, or the report out='maps.html', single_file=True",
        )
    given = {**options, "out": out, "compare": None if other is None else _root(other)}
    return build_report(_root(run), read(ReportOptions, given), compare_runs)


def _root(run: Any) -> Path | Url:
    """The run directory, or its URL."""
    if isinstance(run, Run):
        return run.root
    if isinstance(run, str) and is_url(run):
        return Url.of_run(run)
    if isinstance(run, (str, Path)):
        return Path(run)
    raise UsageError(f"{type(run).__name__!r} is no run", "a run directory, or featviz.run(...)")
