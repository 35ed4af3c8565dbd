"""The story of `report`: from a run directory to a static gallery in HTML."""

from __future__ import annotations

import gc
import io
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from featviz.errors import CompareError, UsageError
from featviz.files import real
from featviz.files.urls import Url
from featviz.records import Place
from featviz.records.commands import ReportOptions
from featviz.records.findings import Comparison
from featviz.report import beside, pages, words
from featviz.report.network import is_numbers, most_varied
from featviz.report.views import Links, arrange
from featviz.rundir import REPORT_FILE, REPORT_RECORD, REPORT_ZIP, SERIES_ASSETS
from featviz.rundir import place as outputs
from featviz.rundir.image import ReadImage, format_of
from featviz.rundir.read import ReadRun, read_run
from featviz.rundir.schema import Capture
from featviz.rundir.store import here
from featviz.rundir.studies import is_audit, is_kernels, read_audit, read_kernels, read_steps
from featviz.rundir.write import write_record

MOST_BYTES = 25_000_000
"""About so many bytes has one file at most: what usual mail servers take."""
FEWEST = 4
"""Tiles of a layer below which it shows too little, however large the file becomes."""
_BASE64 = 4 / 3

Render = Callable[[Links], Iterator[tuple[str, Iterable[str]]]]
"""Yields the name and text of each file of a report, whose pictures are where the links say."""
Judge = Callable[[ReadRun, ReadRun], Comparison]

_Cuts = dict[tuple[Path, str], tuple[Capture, Capture]]
"""The row of a grid as its file is, and as it is shown with fewer tiles; by image and file."""


@dataclass(frozen=True)
class ReportResult:
    """What was written."""

    page: Path
    files: tuple[Path, ...]
    incomplete: Mapping[str, str]
    """Images that the report names but cannot show, and why."""
    tiles: int | None = None
    """The most tiles that a layer shows, where they are fewer so that one file stays small."""


def build_report(
    place: Path | Url, options: ReportOptions, judge: Judge | None = None
) -> ReportResult:
    """Write the report of a run, here or in an object store, of an audit, of kernels, or of a
    series of runs; `judge` compares a run with that of `compare`."""
    one_file = options.zip or options.single_file
    if options.zip and options.single_file:
        raise UsageError("--zip and --single-file are two forms", "give one of them")
    for one in (place, options.compare):
        if isinstance(one, Url) and not (options.out and one_file):
            raise UsageError(
                f"the pages of a report show pictures where they are, and {one} is no folder",
                "--single-file --out maps.html, or --zip --out maps.zip",
            )
    if one_file:
        outputs.check_file(*_single(Path() if isinstance(place, Url) else place, options))
    if not isinstance(place, Url) and (alone := _alone(place, options)):
        render, left_out = alone
        return ReportResult(*_write(render, Links, place, options), left_out)
    with here(place) as root, here(options.compare or root) as other:
        runs = [replace(read_run(root), url=place if isinstance(place, Url) else None)]
        if options.compare is not None:
            url = options.compare if isinstance(options.compare, Url) else None
            runs.append(replace(read_run(other), url=url))
        verdict, not_compared = None, ""
        if len(runs) > 1 and judge is not None:
            try:
                verdict = judge(runs[1], runs[0])
            except CompareError as error:
                not_compared = error.message
        tiles, cuts = _tiles_within(runs) if options.single_file else None, _Cuts()
        if tiles is not None:
            runs, cuts = _with_tiles(runs, tiles)
        views = replace(arrange(*runs), verdict=verdict, not_compared=not_compared, tiles=tiles)
        extras, audit = beside.read_extras(runs[0], views.layers, options)
        views = replace(views, extras=extras, audit=audit)
        gc.freeze()  # the search for cycles of templates passes the records over,
        gc.collect()  # and what else the process holds does not delay it
        try:
            links = partial(Links, content=partial(_content, cuts))
            written = _write(partial(pages.render, views), links, runs[0].root, options)
        finally:
            gc.unfreeze()
        return ReportResult(*written, runs[0].left_out, tiles)


def _alone(root: Path, options: ReportOptions) -> tuple[Render, Mapping[str, str]] | None:
    """The page of an audit, of kernels or of a series, and what it leaves out; None for a run."""
    kind = "audit" if is_audit(root) else "kernels" if is_kernels(root) else "series"
    if kind == "series" and not read_steps(root):
        return None
    for name in ("compare", "kernels", "exemplars", "audit"):
        if getattr(options, name) is not None:
            held = {"audit": "an audit", "series": "a series"}.get(kind, kind)
            step, run = f"{root}/step-000100 --{name} ...", f"RUN --{kind} {root}"
            raise UsageError(
                f"--{name} goes with a run, and {root} holds {held}",
                f"featviz report {step if kind == 'series' else run}",
            )
    views: Any
    if kind == "series":
        views = beside.series_views(root)
        record = views["steps"][-1][1].record.get("model") or {}
        model = str(record.get("type") or words.name_of(record))
        about: dict[str, Any] = {"template": "series", "assets": SERIES_ASSETS}
        about["title"] = real(root).name
        left_out = views["left_out"]
    elif kind == "kernels":
        (record, pictures), left_out = read_kernels(root), {}
        views, model = {"record": record, "pictures": pictures}, words.name_of(record["model"])
        extras = [extra for _, extra in beside.kernel_pictures((record, pictures))]
        about = {"template": "kernels", "title": "Kernels", "extras": extras}
    else:
        if (audit := read_audit(root, None)) is None:
            return None
        views, left_out = beside.AuditViews.of_record(audit), {}
        model = words.name_of(audit[0].model)
        about = {"template": "audited", "title": "Audit"}
    return partial(pages.render_alone, views=views, model=model, **about), left_out


def _write(
    render: Render, links: Callable[..., Links], root: Path, options: ReportOptions
) -> tuple[Path, tuple[Path, ...]]:
    """Write a report in its form; the page to open first, and all files."""

    def encoded(parts: Iterable[str]) -> Iterator[bytes]:
        # a byte of a name that is no UTF-8 stands as it does in the manifest
        return (part.encode("utf-8", "backslashreplace") for part in parts)

    if options.zip or options.single_file:
        single = _single(root, options)
        with outputs.writing(*single) as file:
            if options.single_file:
                ((_, parts),) = render(links())
                file.writelines(encoded(parts))
                return single[0], (single[0],)
            with zipfile.ZipFile(file, "w") as packed:  # without times: the same bytes again

                def add(name: str, content: bytes, how: int) -> None:
                    info = zipfile.ZipInfo(name)
                    info.compress_type = how
                    info.external_attr = 0o644 << 16
                    packed.writestr(info, content)

                within = Links(packed=True)
                for name, parts in render(within):
                    add(name, b"".join(encoded(parts)), zipfile.ZIP_DEFLATED)
                for name, view in within.packed.values():
                    add(name, view.image.content(view.file), zipfile.ZIP_STORED)
        return single[0], (single[0],)
    out = options.out or root / "report"
    outputs.check_free(out, outputs.REPORT_FOLDER, overwrite=True)
    written = []
    with outputs.replacing(out, outputs.REPORT_FOLDER) as folder:
        for name, parts in render(Links(out.absolute())):
            with (folder / name).open("wb") as file:
                file.writelines(encoded(parts))
            written.append(out / name)
        write_record(folder, REPORT_RECORD, {})
    return out / "index.html", (*written, out / REPORT_RECORD)


def _single(root: Path, options: ReportOptions) -> tuple[Path, outputs.FileKind, str, bool]:
    """Where a report of one file is written, of which kind it is, and what may be replaced."""
    name = REPORT_ZIP if options.zip else REPORT_FILE
    return options.out or root / name, outputs.REPORT_ALONE, "--out", options.overwrite


def _tiles_within(runs: Sequence[ReadRun]) -> int | None:
    """The most tiles that a layer may show so that a file with the pictures of these runs has
    about MOST_BYTES, and at least FEWEST; None where all pictures fit."""
    images = [image for run in runs for image in run.images.values()]
    if sum(sum(image.sizes.values()) for image in images) * _BASE64 <= MOST_BYTES:
        return None
    grids = [(len(row.drawn), i.sizes[row.file]) for i in images for row in i.captures.values()]
    count = max((tiles for tiles, _ in grids), default=0)
    while (
        count > FEWEST
        and _BASE64 * sum(size * min(1, count / max(1, tiles)) for tiles, size in grids)
        > MOST_BYTES
    ):
        count //= 2
    return max(FEWEST, count)


def _with_tiles(runs: Sequence[ReadRun], count: int) -> tuple[list[ReadRun], _Cuts]:
    """Runs whose layers show so many tiles, the most varied channels of the first image that has
    them, and the rows of each grid that changed."""
    chosen: dict[Place, set[int | None]] = {}
    for image in runs[0].images.values():
        numbers = image.stats()
        for row in image.captures.values():
            if row.drawn and row.place not in chosen:
                chosen[row.place] = {*most_varied(row, numbers[row.place.stats_key], count)}
    cuts = _Cuts()

    def fewer(image: ReadImage, row: Capture) -> Capture:
        own = chosen.get(row.place, set())
        stay = [c for c in row.drawn if c in own] or row.drawn[: len(own)]
        if not stay or len(stay) == len(row.drawn) or is_numbers(row):
            return row
        columns = min(row.plan.columns, math.ceil(math.sqrt(len(stay))) * row.side)
        kept = {c: ids for c, ids in (row.collapsed or {}).items() if int(c) in stay}
        grid = row.grid.copy()
        grid["nrow"] = columns
        part = replace(row, channels=stay, grid=grid, collapsed=kept or None)
        cuts[image.path, row.file] = row, part
        return part

    shown = []
    for run in runs:
        images = {}
        for name, image in run.images.items():
            rows = [fewer(image, row) for row in image.captures.values()]
            images[name] = replace(image, manifest=replace(image.manifest, captures=rows))
        shown.append(replace(run, images=images))
    return shown, cuts


def _content(cuts: _Cuts, image: ReadImage, relative: str) -> bytes:
    """A picture's bytes; of a grid that has fewer tiles, of a new picture."""
    if (image.path, relative) not in cuts:
        return image.content(relative)
    (whole, part), drawn = cuts[image.path, relative], image.picture(relative)
    canvas = Image.new(drawn.mode, (part.plan.width, part.plan.height))
    if drawn.mode == "P":
        canvas.putpalette(drawn.getpalette() or [])
    if part.plan.padding:
        canvas.paste(drawn.getpixel((0, 0)), (0, 0, *canvas.size))  # type: ignore[arg-type]
    slots = {channel: slot for slot, channel in enumerate(whole.drawn)}
    for place, channel in enumerate(part.drawn):
        for slice in range(whole.side):
            left, top, width, height = whole.plan.box(slots[channel] * whole.side + slice)
            tile = drawn.crop((left, top, left + width, top + height))
            canvas.paste(tile, part.plan.box(place * whole.side + slice)[:2])
    target, kind = io.BytesIO(), format_of(relative)
    canvas.save(target, kind.pillow, **(kind.save or {"optimize": True}))
    return target.getvalue()
