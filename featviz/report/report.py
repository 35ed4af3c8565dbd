"""Makes reports: pages of HTML from a run directory, an audit, kernels or a series."""

from __future__ import annotations

import gc
import logging
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from featviz.diff import maps
from featviz.diff.matching import compare_runs
from featviz.errors import CompareError, UsageError
from featviz.files import real
from featviz.files.urls import Url
from featviz.options.commands import ReportOptions
from featviz.report.audits import AuditView
from featviz.report.color_keys import LegendEntry, legend
from featviz.report.companions import kernel_extras, read_companions
from featviz.report.descriptions import model_name, model_title
from featviz.report.engine import ReportFiles, render_alone
from featviz.report.extras import Extra
from featviz.report.figures import arrange
from featviz.report.fitting import fit_into_one_file
from featviz.report.links import Links
from featviz.report.run_report import RunComparison, RunReport
from featviz.report.series import read_series
from featviz.rundir import (
    REPORT_FILE,
    REPORT_RECORD,
    REPORT_ZIP,
    SERIES_ASSETS,
)
from featviz.rundir import place as outputs
from featviz.rundir.mirror import copied
from featviz.rundir.read import ReadRun, read_run
from featviz.rundir.schema import Capture
from featviz.rundir.studies import (
    is_audit,
    is_kernels,
    read_audit,
    read_kernels,
    read_steps,
)
from featviz.rundir.write import write_record
from featviz.text import quoted

log = logging.getLogger(__name__)

Render = Callable[[Links], ReportFiles]
"""Renders the files of a report, with the addresses that the links give."""


@dataclass(frozen=True)
class ReportResult:
    """A report that was written."""

    page: Path
    """The first page, or the zip file."""
    files: tuple[Path, ...]
    incomplete: Mapping[str, str]
    """The images that cannot be shown, by name, each with the reason."""


@dataclass(frozen=True)
class KernelsPage:
    """What the template of kernels shows."""

    record: Mapping[str, Any]
    layers: list[tuple[Capture, Extra]]
    """The convolutions, each with the picture of its kernels."""
    legend: list[LegendEntry]


class _Report(NamedTuple):
    """A report, before it is written."""

    render: Render
    left_out: Mapping[str, str]
    """The images that cannot be shown, by name, each with the reason."""


def build_report(source: Path | Url, options: ReportOptions) -> ReportResult:
    """Write the report of a run, of an audit, of kernels, or of a series of runs.

    Args:
        source: a folder that a command has written, or the URL of a run in a store.
        options: the place and the form of the report, and further results to show in it.

    Raises:
        UsageError: options contradict each other, or need a run where the folder holds
            another result.
        CompareError: a further result is of another model.
        StoreError: the folder holds nothing to show, or the report cannot be written.
    """
    out = _check_output(source, options)
    # the results of other commands have a report of one page; only runs have URLs
    if isinstance(source, Path):
        report = _report_alone(source, options)
        if report is not None:
            return _write(report, out, options)
    # `copied` needs a location: without a run to compare with, this is the first folder,
    # which is not copied again
    with copied(source) as root, copied(options.compare or root) as base_root:
        run = replace(read_run(root), url=source if isinstance(source, Url) else None)
        comparison = None
        if options.compare is not None:
            url = options.compare if isinstance(options.compare, Url) else None
            base = replace(read_run(base_root), url=url)
            comparison = _compared(run, base)
        max_maps = None
        if options.single_file:
            run, comparison, max_maps = _fit_comparison(run, comparison)
        pages = arrange(run, None if comparison is None else comparison.other)
        companions = read_companions(run, pages.layers, options)
        run_report = RunReport(run, pages, companions, comparison, max_maps)
        # Rendering runs the garbage collector often. Freezing excludes all objects that
        # exist now, such as the rows of all images, which would make it slow.
        gc.freeze()
        gc.collect()
        try:
            return _write(_Report(run_report.render, run.left_out), out, options)
        finally:
            gc.unfreeze()


def _check_output(source: Path | Url, options: ReportOptions) -> Path:
    """Choose the path of the report, and refuse a wrong one before anything is read.

    Returns:
        A folder; or, with `--zip` or `--single-file`, a file. By default it lies inside
        `source`.

    Raises:
        UsageError: both forms of one file are given; or a run is in a store, and the
            report is to be a folder, whose pages cannot show pictures in a store.
        StoreError: another file, or other files, are at the path.
    """
    one_file = options.zip or options.single_file
    if options.zip and options.single_file:
        raise UsageError("--zip and --single-file are two forms", "give one of them")
    # pages in a folder show the pictures of the run by relative paths
    for origin in (source, options.compare):
        if isinstance(origin, Url) and not (options.out and one_file):
            raise UsageError(
                f"the pages of a report show pictures where they are, and {origin} is"
                " no folder",
                "--single-file --out maps.html, or --zip --out maps.zip",
            )
    name = "report"
    if options.zip:
        name = REPORT_ZIP
    elif options.single_file:
        name = REPORT_FILE
    out = options.out or (Path() if isinstance(source, Url) else source) / name
    if one_file:
        outputs.check_file(out, outputs.REPORT_ALONE, "--out", options.overwrite)
    else:
        outputs.check_free(out, outputs.REPORT_FOLDER, overwrite=True)
    return out


def _compared(run: ReadRun, base: ReadRun) -> RunComparison:
    """Compare a run with an earlier one, `base`, as `diff BASE RUN` does. If the runs
    cannot be compared, warn of it: the report then shows them side by side."""
    try:
        result = compare_runs(base, run)
    except CompareError as error:
        other = quoted(str(base.location))
        log.warning("not compared with %s: %s", other, error.message)
        return RunComparison(base, reason=error.message)
    tensors, pictures = maps.draw(result.layers, base, run)
    return RunComparison(base, replace(result, layers=tensors), pictures)


class _Fitted(NamedTuple):
    """Runs whose pictures fit into one file."""

    run: ReadRun
    comparison: RunComparison | None
    max_maps: int | None


def _fit_comparison(run: ReadRun, comparison: RunComparison | None) -> _Fitted:
    """Leave out maps, with a warning, if a report in one file would become too large."""
    runs = [run] if comparison is None else [run, comparison.other]
    fitted_runs, max_maps = fit_into_one_file(runs)
    if max_maps is not None:
        message = (
            "each layer shows at most %d of its maps, so that one file stays small;"
            " --zip "
        )
        log.warning(message + "has all", max_maps)
    if comparison is not None:
        comparison = replace(comparison, other=fitted_runs[1])
    return _Fitted(fitted_runs[0], comparison, max_maps)


# Reports of one page


def _report_alone(root: Path, options: ReportOptions) -> _Report | None:
    """The report of an audit, of kernels or of a series; None for any other folder.

    Raises:
        UsageError: an option is given that only the report of a run has.
        StoreError: the result in the folder cannot be read.
    """
    if is_audit(root):
        _check_alone(root, options, "an audit")
        return _audit_report(root)
    if is_kernels(root):
        _check_alone(root, options, "kernels")
        return _kernels_report(root)
    if read_steps(root):
        _check_alone(root, options, "series")
        return _series_report(root)
    return None


def _check_alone(root: Path, options: ReportOptions, content: str) -> None:
    """Refuse options that only the report of a run has.

    Args:
        root: the folder.
        content: the result in the folder, for the message, such as `an audit`.

    Raises:
        UsageError: such an option is given.
    """
    for name in ("compare", "kernels", "exemplars", "audit"):
        if getattr(options, name) is not None:
            message = f"--{name} goes with a run, and {root} holds {content}"
            raise UsageError(message, f"featviz report RUN --{name} ...")


def _audit_report(root: Path) -> _Report | None:
    """The report of an audit; None if the audit was removed meanwhile."""
    audit_and_pictures = read_audit(root, None)
    if audit_and_pictures is None:
        return None
    view = AuditView.of_record(*audit_and_pictures)
    model = model_title(view.record.model)
    return _Report(partial(render_alone, model, "audited", "Audit", view), {})


def _kernels_report(root: Path) -> _Report:
    """The report of a folder of kernels."""
    record, pictures = read_kernels(root)
    rows = list(pictures.captures.values())
    extras = [extra for _, extra in kernel_extras(record, pictures)]
    layers = list(zip(rows, extras, strict=True))
    page = KernelsPage(record, layers, legend(record["options"], rows))
    model = model_title(record["model"])
    return _Report(partial(render_alone, model, "kernels", "Kernels", page), {})


def _series_report(root: Path) -> _Report:
    """The report of a series. Steps and images that cannot be shown are left out."""
    page = read_series(root)
    record = page.steps[-1].run.record.get("model") or {}
    model = str(record.get("type") or model_name(record))
    render = partial(
        render_alone, model, "series", real(root).name, page, assets=SERIES_ASSETS
    )
    return _Report(render, page.left_out)


# Writing


def _write(report: _Report, out: Path, options: ReportOptions) -> ReportResult:
    """Write a report as a folder, as one file of HTML, or as a zip file.

    Args:
        out: the path of the folder or file, from `_check_output`.

    Raises:
        StoreError: the report cannot be written, or another process has put something
            else at the path.
    """
    if options.single_file or options.zip:
        with outputs.writing(
            out, outputs.REPORT_ALONE, "--out", options.overwrite
        ) as file:
            if options.zip:
                _write_zip(report.render, file)
            else:
                # links in this form give exactly one file, with everything in it
                ((_, pieces),) = report.render(Links())
                file.writelines(_encoded(pieces))
        return ReportResult(out, (out,), report.left_out)
    # the record is the last file; a folder without it counts as no report
    written = []
    with outputs.replacing(out, outputs.REPORT_FOLDER) as folder:
        for name, pieces in report.render(Links(out.absolute())):
            with folder.write(name) as page:
                page.writelines(_encoded(pieces))
            written.append(out / name)
        write_record(folder, REPORT_RECORD, {})
    files = (*written, out / REPORT_RECORD)
    return ReportResult(out / "index.html", files, report.left_out)


def _encoded(parts: Iterable[str | bytes]) -> Iterator[bytes]:
    """The pieces of a file as bytes, text as UTF-8. A byte of a name that is not UTF-8 is
    escaped, as in the manifest."""
    for part in parts:
        if isinstance(part, str):
            yield part.encode("utf-8", "backslashreplace")
        else:
            yield part


def _write_zip(render: Render, file: BinaryIO) -> None:
    """Write the pages into a zip file, then the pictures, without compressing these again.
    Entries have a fixed time, so that the same report has the same bytes."""

    def add(name: str, content: bytes, compression: int) -> None:
        """Add an entry to the archive."""
        info = zipfile.ZipInfo(name)
        info.compress_type = compression
        info.external_attr = 0o644 << 16
        archive.writestr(info, content)

    with zipfile.ZipFile(file, "w") as archive:
        # rendering the pages collects the pictures in `links.packed`
        links = Links(packed=True)
        for name, pieces in render(links):
            add(name, b"".join(_encoded(pieces)), zipfile.ZIP_DEFLATED)
        for name, view in links.packed.values():
            add(name, view.image.content(view.file), zipfile.ZIP_STORED)
