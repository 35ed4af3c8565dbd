"""The story of `report`: from a run directory to a static gallery in HTML."""

from __future__ import annotations

import gc
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from featviz.errors import StoreError, UsageError
from featviz.files.urls import Url
from featviz.report import audited, beside, kernels, pages, series, shrinking
from featviz.report.links import FolderLinks, InlineLinks, Links, PackedLinks
from featviz.report.words import megabytes
from featviz.rundir import (
    REPORT_FILE,
    REPORT_ZIP,
    archive,
    destination,
    ownership,
)
from featviz.rundir.atomic import atomic
from featviz.rundir.audits import is_audit, read_audit
from featviz.rundir.kernels import is_kernels, read_kernels
from featviz.rundir.read import ReadRun, read_run
from featviz.rundir.series import read_steps
from featviz.rundir.store.fetch import here

MOST_BYTES = 25_000_000
"""Bytes of a report in one file, where nothing else is asked for: what usual mail servers take."""
_ATTEMPTS = 7
"""How often a report of one file is made smaller."""

_OVERHEAD = 4 / 3
"""Base64."""


Render = Callable[[Links], Iterator[tuple[str, Iterable[str]]]]
"""Yields the name and text of each file of a report, whose pictures are where the links say."""


@dataclass(frozen=True)
class ReportOptions:
    """The options of `report`."""

    out: Path | None = None
    """The folder or file; None is `report`, `report.html` or `report.zip` in RUN."""
    single_file: bool = False
    max_size: int = MOST_BYTES
    """Bytes that a report of one file may have; figures are left out, large maps have fewer pixels,
    and each layer shows fewer tiles to stay within."""
    zip: bool = False
    """Whether the report and its pictures become one zip file."""
    compare: Path | Url | None = None
    """Another run, whose pictures are shown beside this one's."""
    kernels: Path | None = None
    """A folder that `kernels` wrote, whose pictures are shown beside the channels they make."""
    exemplars: Path | None = None
    """A folder that `exemplars` wrote, whose pictures are shown with the channels."""
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
    tiles: int | None = None
    """The most tiles that a layer shows, where they are fewer so that one file stays small."""
    smaller: bool = False
    """Whether large maps have fewer pixels, so that one file stays small."""


def build_report(
    place: Path | Url, options: ReportOptions, judge: beside.Judge | None = None
) -> ReportResult:
    """Write the report of a run, here or in an object store, of an audit, of kernels, or of a
    series of runs.

    Args:
        judge: compares the run with that of `compare`, for a verdict on the first page.

    Raises:
        StoreError: `place` or `compare` is no run, or is damaged while it is read; what is in the
            way is no report, or it cannot be written, or a single file would be too large.
        UsageError: options that exclude one another, that only a run has, or pages that would show
            pictures in a store.
    """
    if options.zip and options.single_file:
        raise UsageError("--zip and --single-file are two forms", "give one of them")
    for one in (place, options.compare):
        if isinstance(one, Url) and not (options.out and (options.zip or options.single_file)):
            raise UsageError(
                f"the pages of a report show pictures where they are, and {one} is no folder",
                "--single-file --out maps.html, or --zip --out maps.zip",
            )
    if not isinstance(place, Url):
        if is_audit(place):
            return _build_audit(place, options)
        if is_kernels(place):
            return _build_kernels(place, options)
        if read_steps(place):
            return _build_series(place, options)
    with here(place) as root, here(options.compare or root) as other:
        return _build((root, place), (other, options.compare), options, judge)


def _build(
    one: tuple[Path, Path | Url],
    two: tuple[Path, Path | Url | None],
    options: ReportOptions,
    judge: beside.Judge | None,
) -> ReportResult:
    """Write the report of a run.

    Args:
        one: where the run is read, and where the user finds it; so `two`, to compare it with.
    """
    with _uncollected():
        run = _read(*one)
        other = None if two[1] is None else _read(two[0], two[1])
        shown = beside.read(run, options.audit, options.kernels, options.exemplars)
        if other is not None and judge is not None:
            shown = shown.judged(run, other, judge)
        arranged = None if options.single_file else shown.arrange(run, other)
    with _frozen():
        if arranged is None:
            return _write_single(run, other, shown, options)
        write = _write_zip if options.zip else _write_folder
        page, written = write(partial(pages.render_folder, arranged), run.root, options)
    return ReportResult(page, tuple(written), run.left_out)


def _read(root: Path, place: Path | Url) -> ReadRun:
    run = read_run(root)
    return replace(run, url=place) if isinstance(place, Url) else run


def _beside_run(options: ReportOptions) -> str | None:
    """The first given option that shows something beside a run."""
    names = ("compare", "kernels", "exemplars", "audit")
    return next((name for name in names if getattr(options, name) is not None), None)


def _build_audit(root: Path, options: ReportOptions) -> ReportResult:
    """Write the page of an audit."""
    _refuse_beside(root, "audit", options)
    if (read := read_audit(root, None)) is None:
        raise StoreError(f"{root} holds no audit any more", "give a folder that stays as it is")
    return _build_page(
        partial(pages.render_alone, "Audit", "audited", audited.arrange(read)), root, options
    )


def _build_kernels(root: Path, options: ReportOptions) -> ReportResult:
    """Write the page of kernels."""
    _refuse_beside(root, "kernels", options)
    arranged = kernels.arrange(read_kernels(root))
    return _build_page(partial(pages.render_alone, "Kernels", "kernels", arranged), root, options)


def _refuse_beside(root: Path, what: str, options: ReportOptions) -> None:
    """Say that something that a run has beside it stands alone here."""
    if name := _beside_run(options):
        held = f"{'an ' * (what == 'audit')}{what}"
        raise UsageError(
            f"--{name} goes with a run, and {root} holds {held}",
            f"give a run with --{what} {root}, or the {what} alone",
        )


def _build_page(render: Render, root: Path, options: ReportOptions) -> ReportResult:
    """Write a report that is one page."""
    if not options.single_file:
        write = _write_zip if options.zip else _write_folder
        page, written = write(render, root, options)
        return ReportResult(page, tuple(written), {})
    ((_, pieces),) = render(InlineLinks())
    out = _write_page("".join(pieces), root, options)
    return ReportResult(out, (out,), {})


def _build_series(root: Path, options: ReportOptions) -> ReportResult:
    """Write the page of a folder with a run for each training step."""
    if name := _beside_run(options):
        raise UsageError(
            f"--{name} is for the report of one step, and {root} holds a series of them",
            f"featviz report {root}/step-000100 --{name} ...",
        )
    shown = series.read_series(root)
    if options.single_file:
        out = _write_page(series.render_single(shown), root, options)
        return ReportResult(out, (out,), shown.left_out)
    write = _write_zip if options.zip else _write_folder
    page, written = write(partial(series.render_folder, shown), root, options)
    return ReportResult(page, tuple(written), shown.left_out)


def _write_page(text: str, root: Path, options: ReportOptions) -> Path:
    """Write a report of one file that cannot be made smaller.

    Raises:
        StoreError: it has more than `max_size` bytes, or cannot be written.
    """
    out = _free_file(root, options)
    content = _encoded(text)
    if len(content) > options.max_size:
        raise StoreError(
            f"the page has {megabytes(len(content))}, --max-size is {megabytes(options.max_size)}",
            "--zip packs it with its pictures, or --max-size allows more",
        )
    with atomic(out) as file:
        file.write(content)
    return out


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


def _write_folder(render: Render, root: Path, options: ReportOptions) -> tuple[Path, list[Path]]:
    out = options.out or root / "report"
    destination.check_free(out, destination.REPORT_FOLDER, overwrite=True)
    written = []
    with destination.replacing(out, destination.REPORT_FOLDER) as folder:
        for name, pieces in render(FolderLinks(out.absolute())):
            with (folder / name).open("wb") as file:
                file.writelines(map(_encoded, pieces))
            written.append(out / name)
    return out / "index.html", written


def _write_zip(render: Render, root: Path, options: ReportOptions) -> tuple[Path, list[Path]]:
    """The pages and the pictures that they show, in one file that is to be unpacked."""
    out = options.out or root / REPORT_ZIP
    if out.exists() and not ownership.is_archive_of_report(out):
        raise _taken(out)
    links = PackedLinks()
    with atomic(out) as file, zipfile.ZipFile(file, "w") as packed:
        for name, pieces in render(links):
            archive.add(packed, name, b"".join(map(_encoded, pieces)), compress=True)
        for name, view in links.pictures.items():
            archive.add(packed, name, view.image.content(view.file), compress=False)
    return out, [out]


def _write_single(
    run: ReadRun, other: ReadRun | None, extra: beside.Beside, options: ReportOptions
) -> ReportResult:
    """One file, with as much of the run as it has room for."""
    out = _free_file(run.root, options)
    runs = [one for one in (run, other) if one is not None]
    room = options.max_size / _OVERHEAD
    for _ in range(_ATTEMPTS):
        if (form := shrinking.form_within(runs, room)) is None:
            break
        shown = shrinking.shrunk(runs, form)
        arranged = extra.arrange(shown[0], shown[1] if other else None)
        arranged = replace(arranged, form=form, max_size=options.max_size)
        content = _encoded(pages.render_single(arranged))
        if len(content) <= options.max_size:
            with atomic(out) as file:
                file.write(content)
            return ReportResult(out, (out,), run.left_out, form.tiles, form.smaller)
        room = form.bytes - 1.1 * (len(content) - options.max_size) / _OVERHEAD
    raise _too_large(options.max_size)


def _free_file(root: Path, options: ReportOptions) -> Path:
    """Where a report of one file is written, in the place of an earlier one at most."""
    out = options.out or root / REPORT_FILE
    if out.exists() and not ownership.is_page(out):
        raise _taken(out)
    return out


def _taken(out: Path) -> StoreError:
    return StoreError(
        f"{out} is there and is no report of featviz", "name another place with --out"
    )


def _encoded(text: str) -> bytes:
    """UTF-8; a byte of a name that is none stands as it does in the manifest."""
    return text.encode("utf-8", "backslashreplace")


def _too_large(most: int) -> StoreError:
    return StoreError(
        f"the report does not fit into one file of {megabytes(most)}, not even with "
        f"{shrinking.FEWEST} tiles of each layer",
        "--zip packs it with all of its pictures, --max-size allows more, or run with fewer "
        "layers or images",
    )
