"""The story of `report`: from a run directory to a static gallery in HTML."""

from __future__ import annotations

import gc
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from featviz.errors import StoreError, UsageError
from featviz.files.urls import Url
from featviz.report import excited, pages, shrinking, views
from featviz.report.links import FolderLinks, PackedLinks
from featviz.report.words import megabytes
from featviz.rundir import (
    INPUT_FILE,
    REPORT_FILE,
    REPORT_ZIP,
    archive,
    destination,
    ownership,
)
from featviz.rundir.atomic import atomic
from featviz.rundir.exemplars import ExemplarRecord, read_pictures, read_record
from featviz.rundir.image import ReadImage
from featviz.rundir.kernels import read_kernels
from featviz.rundir.read import ReadRun, read_audit, read_run
from featviz.rundir.schema import Audit
from featviz.rundir.store.fetch import here

MOST_BYTES = 25_000_000
"""Bytes of a report in one file, where nothing else is asked for: what usual mail servers take."""
_ATTEMPTS = 5
"""How often a report of one file is made smaller."""

_OVERHEAD = 4 / 3
"""Base64."""


@dataclass(frozen=True)
class ReportOptions:
    """The options of `report`."""

    out: Path | None = None
    """The folder or file; None is `report`, `report.html` or `report.zip` in RUN."""
    single_file: bool = False
    max_size: int = MOST_BYTES
    """Bytes that a report of one file may have; each layer shows fewer tiles to stay within."""
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


def build_report(place: Path | Url, options: ReportOptions) -> ReportResult:
    """Write the report of a run, here or in an object store.

    Raises:
        StoreError: `place` or `compare` is no run, or is damaged while it is read; what is in the
            way is no report, or it cannot be written, or a single file would be too large.
        UsageError: two forms are asked for, or pages that would show pictures in a store.
    """
    if options.zip and options.single_file:
        raise UsageError("--zip and --single-file are two forms", "give one of them")
    for one in (place, options.compare):
        if isinstance(one, Url) and not (options.out and (options.zip or options.single_file)):
            raise UsageError(
                f"the pages of a report show pictures where they are, and {one} is no folder",
                "--single-file --out maps.html, or --zip --out maps.zip",
            )
    with here(place) as root, here(options.compare or root) as other:
        return _build(root, None if options.compare is None else other, options)


def _build(root: Path, compare: Path | None, options: ReportOptions) -> ReportResult:
    with _uncollected():
        run = read_run(root)
        other = None if compare is None else read_run(compare)
        kernels = None if options.kernels is None else read_kernels(options.kernels)
        record = None if options.exemplars is None else read_record(options.exemplars)
        pictures = None if record is None else read_pictures(options.exemplars or root, record)
        beside = _Beside(read_audit(root, options.audit), kernels, record, pictures)
    with _frozen():
        if options.single_file:
            return _write_single(run, other, beside, options)
        write = _write_zip if options.zip else _write_folder
        page, written = write(beside.arrange(run, other), options)
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
        for name, text in pages.render_folder(arranged, FolderLinks(out.absolute())):
            (folder / name).write_bytes(_encoded(text))
            written.append(out / name)
    return out / "index.html", written


def _write_zip(arranged: views.ReportViews, options: ReportOptions) -> tuple[Path, list[Path]]:
    """The pages and the pictures that they show, in one file that is to be unpacked."""
    out = options.out or arranged.run.root / REPORT_ZIP
    if out.exists() and not ownership.is_archive_of_report(out):
        raise _taken(out)
    links = PackedLinks()
    with atomic(out) as file, zipfile.ZipFile(file, "w") as packed:
        for name, text in pages.render_folder(arranged, links):
            archive.add(packed, name, _encoded(text), compress=True)
        for name, view in links.pictures.items():
            archive.add(packed, name, view.image.content(view.file), compress=False)
    return out, [out]


@dataclass(frozen=True)
class _Beside:
    """What is shown beside a run."""

    audit: Audit | None
    kernels: tuple[ReadImage, Mapping[str, Any]] | None
    """With the options by which they were drawn."""
    exemplars: ExemplarRecord | None
    pictures: ReadImage | None
    """Those of the exemplars."""

    def arrange(self, run: ReadRun, other: ReadRun | None) -> views.ReportViews:
        """The pages of a run, of one to compare it with, and of what is shown beside."""
        arranged = views.arrange(run, other, self.audit, self.kernels)
        if self.exemplars is None or self.pictures is None:
            return arranged
        found = excited.exemplar_views(arranged.layers, self.exemplars, self.pictures)
        return replace(arranged, exemplars=found)


def _write_single(
    run: ReadRun, other: ReadRun | None, beside: _Beside, options: ReportOptions
) -> ReportResult:
    """One file, with as many tiles of each layer as it has room for."""
    out = options.out or run.root / REPORT_FILE
    if out.exists() and not ownership.is_page(out):
        raise _taken(out)
    runs = [one for one in (run, other) if one is not None]
    for tiles, room in _attempts(runs, options.max_size):
        shown = runs
        if tiles is not None:
            channels = shrinking.telling_channels(run, tiles)
            shown = [shrinking.with_fewer_tiles(one, channels) for one in runs]
        arranged = beside.arrange(shown[0], shown[1] if other else None)
        arranged = replace(arranged, tiles=tiles, max_size=options.max_size)
        content = _encoded(pages.render_single(arranged))
        if len(content) <= options.max_size:
            with atomic(out) as file:
                file.write(content)
            return ReportResult(out, (out,), run.left_out, tiles)
        room.append(room[-1] - 1.1 * (len(content) - options.max_size) / _OVERHEAD)
    raise _too_large(options.max_size)


def _attempts(runs: list[ReadRun], most: int) -> Iterator[tuple[int | None, list[float]]]:
    """How many tiles a layer may have, None for all, and the bytes that its pictures then have, to
    which the caller adds a smaller number if that was too much."""
    images = [image for run in runs for image in run.images.values()]
    inputs = sum(image.sizes[INPUT_FILE] for image in images)
    tiles = max((len(row.drawn) for i in images for row in i.captures.values()), default=0) + 1
    all_tiles, room = tiles - 1, [most / _OVERHEAD - inputs]
    for _ in range(_ATTEMPTS):
        tiles = min(tiles - 1, shrinking.tiles_within(runs, room[-1]))
        if room[-1] < 0 or tiles < min(shrinking.FEWEST, all_tiles):
            return
        yield (None if tiles == all_tiles else tiles), room


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
