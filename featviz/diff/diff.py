"""The story of `diff`: read two runs, match them, compare what both have, write the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from featviz.diff import output
from featviz.diff.compare import Finding, TensorPair, measure
from featviz.errors import CompareError, UsageError
from featviz.files.urls import Url
from featviz.options import DiffFiles, DiffThresholds
from featviz.records import Comparison, OnlyIn, Place
from featviz.rundir import DIFF_FILE
from featviz.rundir.atomic import atomic
from featviz.rundir.image import DamagedError, ReadImage
from featviz.rundir.place import (
    DIFF,
    JUNIT,
    PAGE,
    FileKind,
    check_apart,
    check_file,
    check_free,
    replacing,
    writing,
)
from featviz.rundir.read import ReadRun, read_run, warn_of
from featviz.rundir.store import here
from featviz.rundir.studies import junit
from featviz.rundir.write import write_record
from featviz.text import by, listed

log = logging.getLogger(__name__)


Render = Callable[[Comparison, ReadRun, ReadRun, Path, Path], tuple[str, Mapping[str, str]]]
"""Takes a comparison, both runs, the page and the folder of the maps; gives the text of the page,
and the texts of files that are to lie with the maps, by name."""


def diff(
    base: Path | Url,
    new: Path | Url,
    thresholds: DiffThresholds,
    files: DiffFiles,
    render: Render | None = None,
) -> Comparison:
    """Compare two run directories, here or in object stores.

    Args:
        files: what to write beside the result.
        render: makes the page and the files beside it; needed for `html`.
    """
    for place in (base, new):
        if isinstance(place, Url) and files.html is not None:
            raise UsageError(
                f"the page of --html shows pictures where they are, and {place} is no folder",
                "leave --html out, or copy the run here first (`aws s3 cp --recursive`)",
            )
    with here(base) as one, here(new) as two:
        single = _single_files(files)
        for option, path, kind in single:
            check_apart(path, option, (one, two))
            check_file(path, kind, option, files.overwrite)
        if (folder := maps_folder(files)) is not None:
            check_apart(folder, "--out", (one, two))
            check_free(folder, DIFF, True)
        return _diff(_read("BASE", one, base), _read("NEW", two, new), thresholds, files, render)


def maps_folder(files: DiffFiles) -> Path | None:
    """The folder of the maps; None where nobody asked for them."""
    if files.out is not None or files.html is None:
        return files.out
    return files.html.with_name(f"{files.html.stem}-maps")


def _single_files(files: DiffFiles) -> list[tuple[str, Path, FileKind]]:
    """The option, place and kind of each single file; they may be inside the folder."""
    asked = ("--html", files.html, PAGE), ("--junit", files.junit, JUNIT)
    return [(option, path, kind) for option, path, kind in asked if path is not None]


def compare_runs(base: ReadRun, new: ReadRun) -> Comparison:
    """What `diff` finds by its own thresholds, for who has read both runs."""
    return _diff(base, new, DiffThresholds(), DiffFiles(), None)


def _diff(
    base: ReadRun,
    new: ReadRun,
    thresholds: DiffThresholds,
    files: DiffFiles,
    render: Render | None,
) -> Comparison:
    images, _ = _in_both(base, new)
    reason = _unlike(base, new, images)
    findings: dict[str, list[Finding]] = {}
    broken: tuple[dict[str, str], dict[str, str]] = {}, {}
    for name in images:
        a, b = base.images[name], new.images[name]
        try:
            if reason := reason or _inputs_unlike(a, b):
                raise CompareError(
                    f"these runs cannot be compared: {reason}",
                    "run both with the same images, preprocessing and --normalize",
                )
            found = [measure(pair, thresholds.tolerance) for pair in TensorPair.read(a, b)]
            findings[name] = found
        except DamagedError as error:
            broken[error.image is b][name] = error.message
    base, new = _without("BASE", base, broken[0]), _without("NEW", new, broken[1])
    images, order = _in_both(base, new)
    layers: dict[Place, list[Finding]] = {place: [] for place in order}
    for finding in (finding for name in images for finding in findings[name]):
        layers[finding.place].append(finding)
    result = Comparison(
        base.place,
        new.place,
        thresholds,
        images,
        tuple(output.summed_up(group) for group in layers.values() if group),
        _only_in(base, new, images),
        _only_in(new, base, images),
        {"base": tuple(base.left_out), "new": tuple(new.left_out)},
    )
    texts: dict[FileKind, bytes] = {}
    single = _single_files(files)
    if (folder := maps_folder(files)) is not None:
        with replacing(folder, DIFF) as fresh:
            result = replace(result, layers=output.draw(result.layers, base, new, fresh))
            if files.html and render:
                page, beside = render(result, base, new, files.html, folder)
                texts[PAGE] = page.encode("utf-8", "replace")
                for name, text in beside.items():
                    with atomic(fresh / name) as file:
                        file.write(text.encode("utf-8", "replace"))
            write_record(fresh, DIFF_FILE, output.as_json(result))
    texts[JUNIT] = junit({str(result.new): output.verdicts(result)}, "diff")
    for option, path, kind in single:
        if kind in texts:
            with writing(path, kind, option, files.overwrite) as file:
                file.write(texts[kind])
    return result


def _read(side: str, root: Path, place: Path | Url) -> ReadRun:
    """Read a run, and warn of the images that are incomplete or missing in it."""
    run = replace(read_run(root), url=None if isinstance(place, Path) else place)
    warn_of(run.left_out, f"{side}: ", ", and left out")
    if run.missing:
        log.warning("%s: the run did not come to %d more images", side, run.missing)
    return run


def _in_both(base: ReadRun, new: ReadRun) -> tuple[tuple[str, ...], tuple[Place, ...]]:
    """The names of the images that both runs have, and the places of BASE in these, in the order
    in which the model came to them.
    """
    images = tuple(name for name in base.images if name in new.images)
    if not images:
        raise CompareError(
            f"no image is in both runs: BASE has {_few(base.images)}, NEW has {_few(new.images)}",
            "compare runs of the same images",
        )
    order, other = (
        tuple(dict.fromkeys(place for name in images for place in run.images[name].captures))
        for run in (base, new)
    )
    if set(order).isdisjoint(other):
        old, now = (_few(dict.fromkeys(place.layer for place in one)) for one in (order, other))
        raise CompareError(
            f"no layer is in both runs: BASE has {old}, NEW has {now}",
            "compare runs with the same --layers",
        )
    return images, order


def _unlike(base: ReadRun, new: ReadRun, images: Sequence[str]) -> str | None:
    """What keeps two runs from being compared: other pictures were shown to their models, or other
    scales were drawn."""
    for name, what in (("preprocessing", "preprocessing"), ("normalize", "scale mode")):
        old, now = (
            run.record.get(name, (run.record.get("options") or {}).get(name)) for run in (base, new)
        )
        if old != now:
            return f"the {what} is {old!r} in BASE and {now!r} in NEW"
    sums = [[run.images[name].manifest.image.sha256 for run in (base, new)] for name in images]
    other = [name for name, (old, now) in zip(images, sums, strict=True) if old != now]
    return f"{_few(other)} is another file in NEW (its sha256 differs)" if other else None


def _inputs_unlike(a: ReadImage, b: ReadImage) -> str | None:
    """How the inputs made of an image differ; DamagedError where input.png cannot be read."""
    one, two = a.manifest.input, b.manifest.input
    if one.shape != two.shape:
        return f"the input made of {a.name} is {by(one.shape)} in BASE and {by(two.shape)} in NEW"
    if one.preprocessing != two.preprocessing:
        words = f"{one.preprocessing!r} in BASE and {two.preprocessing!r} in NEW"
        return f"the preprocessing of {a.name} is {words}"
    old, now = a.shown(), b.shown()
    # resizing varies by one level between machines
    if old.shape != now.shape or np.abs(old.astype(np.int16) - now).max(initial=0) > 1:
        return f"what the model saw of {a.name} (input.png) has other pixels in NEW"
    return None


def _only_in(one: ReadRun, other: ReadRun, images: Iterable[str]) -> OnlyIn:
    lacking = {}
    for name in (name for name in one.images if name not in other.images):
        lacking[name] = "incomplete" if name in other.left_out else "not there"
        if (failed := other.failures.get(name)) is not None:
            lacking[name] = f"failed: {failed}"
    places: dict[tuple[Place, str], str] = {}
    for name in images:
        there = other.images[name]
        ran = dict.fromkeys(there.manifest.never_ran, "never ran")
        skipped = {(s.layer, s.kind, s.call): s.reason for s in reversed(there.manifest.skipped)}
        for place, row in one.images[name].captures.items():
            if place in there.captures:
                continue
            reason = ran.get(place.layer, "not there")
            if (skip := skipped.get(place[:3])) is not None:
                reason = f"skipped: {skip}"
            places.setdefault((place, row.type), reason)
    return OnlyIn(lacking, places)


def _few(names: Iterable[str]) -> str:
    return listed(list(names), 3) or "none"


def _without(side: str, run: ReadRun, broken: Mapping[str, str]) -> ReadRun:
    """Leave out, with a warning, the images of which a file turned out to be broken."""
    warn_of(broken, f"{side}: ", ", and left out")
    left = {name: image for name, image in run.images.items() if name not in broken}
    return replace(run, images=left, damaged={**run.damaged, **broken})
