"""The story of `report`: from a run directory to a static gallery in HTML."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from featviz.errors import StoreError
from featviz.report import pages, views
from featviz.rundir import INPUT_FILE, destination, ownership
from featviz.rundir.atomic import atomic
from featviz.rundir.kernels import read_kernels
from featviz.rundir.read import ReadRun, read_audit, read_run

LARGEST_SINGLE = 25_000_000
"""Bytes of a report in one file: what usual mail servers take."""

_OVERHEAD = 4 / 3
"""Base64."""


@dataclass(frozen=True)
class ReportOptions:
    """The options of `report`."""

    out: Path | None = None
    """The folder, or the file of a single-file report; None is `report` or `report.html` in RUN."""
    single_file: bool = False
    compare: Path | None = None
    """Another run, whose pictures are shown beside this one's."""
    kernels: Path | None = None
    """A folder that `kernels` wrote, whose pictures are shown beside the channels they make."""
    audit: Path | None = None
    """An audit.json, or the folder of one; None takes the one in the run, if there is one."""


@dataclass(frozen=True)
class ReportResult:
    """What was written."""

    page: Path
    """The page to open first."""
    files: tuple[Path, ...]
    incomplete: Mapping[str, str]
    """Images that the report names but cannot show, and why."""


def build_report(root: Path, options: ReportOptions) -> ReportResult:
    """Write the report of a run.

    Raises:
        StoreError: `root` or `compare` is no run, or is damaged while it is read; what is in the
            way is no report, or it cannot be written, or a single file would be too large.
    """
    with _uncollected():
        run = read_run(root)
        other = None if options.compare is None else read_run(options.compare)
        kernels = None if options.kernels is None else read_kernels(options.kernels)
        arranged = views.arrange(run, other, read_audit(root, options.audit), kernels)
    with _frozen():
        write = _write_single if options.single_file else _write_folder
        page, written = write(arranged, options)
    return ReportResult(page, tuple(written), run.left_out)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the search for reference cycles: the records have none and live to the end, and
    going through them again and again costs as much as 40 % more (0.84 s of CPU instead of 0.59 for
    200 images of 100 layers, `benchmarks/report.py`)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _frozen() -> Iterator[None]:
    """With the search for reference cycles, but not among the records: the templates leave cycles
    behind, which took 20 MB for 20,000 grids. `gc.freeze` sets the records aside."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _write_folder(arranged: views.ReportViews, options: ReportOptions) -> tuple[Path, list[Path]]:
    out = options.out or arranged.run.root / "report"
    destination.check_free(out, destination.REPORT_FOLDER, overwrite=True)
    written = []
    with destination.replacing(out, destination.REPORT_FOLDER) as folder:
        for name, text in pages.render_folder(arranged, out.absolute()):
            (folder / name).write_bytes(_encoded(text))
            written.append(out / name)
    return out / "index.html", written


def _write_single(arranged: views.ReportViews, options: ReportOptions) -> tuple[Path, list[Path]]:
    out = options.out or arranged.run.root / "report.html"
    if out.exists() and not ownership.is_page(out):
        raise StoreError(
            f"{out} is there and is no report of featviz", "name another place with --out"
        )
    _check_size(_picture_bytes(arranged))
    content = _encoded(pages.render_single(arranged))
    _check_size(len(content))
    with atomic(out) as file:
        file.write(content)
    return out, [out]


def _encoded(text: str) -> bytes:
    """UTF-8; a byte of a name that is none stands as it does in the manifest."""
    return text.encode("utf-8", "backslashreplace")


def _picture_bytes(arranged: views.ReportViews) -> int:
    """What the pictures alone would take, known before anything is read."""
    runs: list[ReadRun] = [run for run in (arranged.run, arranged.other) if run is not None]
    images = [image for run in runs for image in run.images.values()]
    names = [
        (i, name)
        for i in images
        for name in (INPUT_FILE, *(row.file for row in i.captures.values()))
    ]
    return int(sum(image.sizes[name] for image, name in names) * _OVERHEAD)


def _check_size(size: int) -> None:
    if size > LARGEST_SINGLE:
        raise StoreError(
            f"the report would be one file of {size / 1e6:.0f} MB, more than "
            f"{LARGEST_SINGLE / 1e6:.0f} MB",
            "leave out --single-file, or run with fewer layers or images",
        )
