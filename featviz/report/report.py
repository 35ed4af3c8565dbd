"""The story of `report`: from a run directory to a static gallery in HTML."""

from __future__ import annotations

import gc
import logging
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from featviz.diff.comparison import Comparison
from featviz.errors import CompareError, UsageError
from featviz.files import real
from featviz.files.urls import Url
from featviz.options.commands import ReportOptions
from featviz.report import beside, pages, words
from featviz.report.fitting import fitted
from featviz.report.views import Links, arrange
from featviz.rundir import REPORT_FILE, REPORT_RECORD, REPORT_ZIP, SERIES_ASSETS
from featviz.rundir import place as outputs
from featviz.rundir.mirror import copied
from featviz.rundir.read import ReadRun, read_run
from featviz.rundir.studies import is_audit, is_kernels, read_audit, read_kernels, read_steps
from featviz.rundir.write import write_record

log = logging.getLogger(__name__)

Render = Callable[[Links], pages.Files]
Judge = Callable[[ReadRun, ReadRun], Comparison]


@dataclass(frozen=True)
class ReportResult:
    """What was written."""

    page: Path
    files: tuple[Path, ...]
    incomplete: Mapping[str, str]
    """Images that the report names but cannot show, and why."""


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
            why = f"the pages of a report show pictures where they are, and {one} is no folder"
            raise UsageError(why, "--single-file --out maps.html, or --zip --out maps.zip")
    name = REPORT_ZIP if options.zip else REPORT_FILE if options.single_file else "report"
    out = options.out or (Path() if isinstance(place, Url) else place) / name
    if one_file:
        outputs.check_file(out, outputs.REPORT_ALONE, "--out", options.overwrite)
    else:
        outputs.check_free(out, outputs.REPORT_FOLDER, overwrite=True)
    if not isinstance(place, Url) and (alone := _alone(place, options)):
        render, left_out = alone
        return ReportResult(*_write(render, out, options), left_out)
    with copied(place) as root, copied(options.compare or root) as other:
        run = replace(read_run(root), url=place if isinstance(place, Url) else None)
        base, verdict, not_compared = None, None, ""
        if options.compare is not None:
            url = options.compare if isinstance(options.compare, Url) else None
            base = replace(read_run(other), url=url)
        if base is not None and judge is not None:
            try:
                verdict = judge(base, run)
            except CompareError as error:
                not_compared = error.message
        tiles = None
        if options.single_file:
            (run, *others), tiles = fitted([run, *([base] if base else [])])
            base = others[0] if others else None
        if tiles is not None:
            words_of = "each layer shows at most %d of its maps, so that one file stays small"
            log.warning(f"{words_of}; --zip has all", tiles)
        images, layers = arrange(run, base)
        extras, audit = beside.read_extras(run, layers, options)
        told = verdict, not_compared, audit, extras
        whole = pages.RunReport(run, base, images, layers, *told, tiles)
        gc.freeze()  # the search for cycles of templates passes the records over,
        gc.collect()  # and what else the process holds does not delay it
        try:
            return ReportResult(*_write(whole.render, out, options), run.left_out)
        finally:
            gc.unfreeze()


def _alone(root: Path, options: ReportOptions) -> tuple[Render, Mapping[str, str]] | None:
    """The page of an audit, of kernels or of a series, and what it leaves out; None for a run."""
    kind = "audit" if is_audit(root) else "kernels" if is_kernels(root) else "series"
    if kind == "series" and not read_steps(root):
        return None
    for name in ("compare", "kernels", "exemplars", "audit"):
        if getattr(options, name) is not None:
            what = f"--{name} goes with a run, and {root} holds {'an ' * (kind == 'audit')}{kind}"
            raise UsageError(what, f"featviz report RUN --{name} ...")
    views: Any
    left_out: Mapping[str, str] = {}
    about: dict[str, Any] = {"template": kind, "title": kind.capitalize()}
    if kind == "series":
        views = beside.series_views(root)
        record = views["steps"][-1][1].record.get("model") or {}
        model, left_out = str(record.get("type") or words.name_of(record)), views["left_out"]
        about |= {"assets": SERIES_ASSETS, "title": real(root).name}
    elif kind == "kernels":
        record, pictures = read_kernels(root)
        views, model = {"record": record, "pictures": pictures}, words.name_of(record["model"])
        about["extras"] = [extra for _, extra in beside.kernel_pictures((record, pictures))]
    else:
        if (audit := read_audit(root, None)) is None:
            return None
        views, model = beside.AuditViews.of_record(audit), words.name_of(audit[0].model)
        about["template"] = "audited"
    return partial(pages.render_alone, views=views, model=model, **about), left_out


def _write(render: Render, out: Path, options: ReportOptions) -> tuple[Path, tuple[Path, ...]]:
    """Write a report in its form; the page to open first, and all files."""

    def encoded(parts: Iterable[str]) -> Iterator[bytes]:
        # a byte of a name that is no UTF-8 stands as it does in the manifest
        return (part.encode("utf-8", "backslashreplace") for part in parts)

    if not (options.zip or options.single_file):
        written = []
        with outputs.replacing(out, outputs.REPORT_FOLDER) as folder:
            for name, parts in render(Links(out.absolute())):
                with folder.write(name) as page:
                    page.writelines(encoded(parts))
                written.append(out / name)
            write_record(folder, REPORT_RECORD, {})
        return out / "index.html", (*written, out / REPORT_RECORD)
    with outputs.writing(out, outputs.REPORT_ALONE, "--out", options.overwrite) as file:
        if options.single_file:
            ((_, parts),) = render(Links())
            file.writelines(encoded(parts))
            return out, (out,)
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
    return out, (out,)
