"""The story of `diff`: read two runs, match them, compare what both have, write the result."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from featviz.diff import documents, maps
from featviz.diff.compare import measure
from featviz.diff.pairing import Pairing, check_alike, pair_up, tensor_pairs
from featviz.diff.result import DiffResult, DiffThresholds, Finding, LayerFindings
from featviz.diff.values import ImagePair
from featviz.errors import UsageError
from featviz.files.urls import Url
from featviz.records import Comparison, Place
from featviz.rundir import DIFF_FILE, destination, junit
from featviz.rundir.atomic import atomic
from featviz.rundir.image import DamagedError, ReadImage
from featviz.rundir.read import ReadRun, read_run
from featviz.rundir.store.fetch import here
from featviz.rundir.write import write_json

log = logging.getLogger(__name__)

__all__ = ["DiffResult", "DiffThresholds", "Outputs", "compare_runs", "diff"]


class Render(Protocol):
    """What turns a comparison into HTML."""

    def __call__(
        self, found: Comparison, base: ReadRun, new: ReadRun, page: Path, maps: Path
    ) -> tuple[str, Mapping[str, str]]:
        """The text of a page, and the texts of files that are to lie with the maps, by name."""


@dataclass(frozen=True)
class Outputs:
    """Files to write beside the result."""

    out: Path | None = None
    """Folder of the difference maps, with the result as diff.json."""
    html: Path | None = None
    """The page; without `out`, the maps go to a folder beside it."""
    junit: Path | None = None
    """The verdicts as JUnit XML."""
    render: Render | None = None
    """Turns the comparison into a page and the files beside it; needed for `html`."""

    def __post_init__(self) -> None:
        if self.html is not None and self.render is None:
            raise ValueError("html needs render, which turns the comparison into a page")

    @property
    def folder(self) -> Path | None:
        """The folder of the maps; None where nobody asked for them."""
        if self.out is not None or self.html is None:
            return self.out
        return self.html.with_name(f"{self.html.stem}-maps")

    @property
    def files(self) -> list[Path]:
        """The files that were asked for by name; they may be inside the folder."""
        return [path for path in (self.html, self.junit) if path is not None]


def diff(
    base: Path | Url, new: Path | Url, thresholds: DiffThresholds, outputs: Outputs
) -> DiffResult:
    """Compare two run directories, here or in object stores.

    Raises:
        FeatvizError: a run cannot be read, the runs cannot be compared, or a file cannot be
            written.
    """
    check_thresholds(thresholds)
    for place in (base, new):
        if isinstance(place, Url) and outputs.html is not None:
            raise UsageError(
                f"the page of --html shows pictures where they are, and {place} is no folder",
                "leave --html out, or copy the run here first (`aws s3 cp --recursive`)",
            )
    with here(base) as one, here(new) as two:
        _check_outputs(outputs, (one, two))
        return _diff(_read("BASE", one, base), _read("NEW", two, new), thresholds, outputs)


def compare_runs(base: ReadRun, new: ReadRun) -> Comparison:
    """What `diff` finds by its own thresholds, for who has read both runs.

    Raises:
        CompareError: the runs cannot be compared.
    """
    return documents.comparison(_diff(base, new, DiffThresholds(), Outputs()))


def _check_outputs(outputs: Outputs, inputs: Sequence[Path]) -> None:
    options = ("--out", outputs.folder), ("--html", outputs.html), ("--junit", outputs.junit)
    for option, path in options:
        if path is not None:
            destination.check_apart(path, option, inputs)
    if outputs.folder is not None:
        destination.check_free(outputs.folder, destination.DIFF, True, outputs.files)


def _diff(
    before: ReadRun, after: ReadRun, thresholds: DiffThresholds, outputs: Outputs
) -> DiffResult:
    pairing = pair_up(before, after)
    damage = check_alike(before, after)
    findings: dict[str, list[Finding]] = {}
    for name in pairing.images:
        images = before.images[name], after.images[name]
        try:
            findings[name] = list(_findings(*images, thresholds.tolerance))
        except DamagedError as error:
            damage.append(error)
    if damage:
        before, after = _without("BASE", before, damage), _without("NEW", after, damage)
        pairing = pair_up(before, after)
    result = DiffResult(
        before.place,
        after.place,
        thresholds,
        pairing.images,
        _layers(pairing, findings),
        pairing.only_in_base,
        pairing.only_in_new,
        {"base": tuple(before.left_out), "new": tuple(after.left_out)},
    )
    return _write(result, before, after, outputs)


def check_thresholds(thresholds: DiffThresholds) -> None:
    """Refuse bad values before any work.

    Raises:
        UsageError: a value is outside its range; names the option, the value and the range.
    """
    tolerance, ratio = thresholds.tolerance, thresholds.max_diff_ratio
    for name, value in (("tolerance", tolerance), ("max-diff-ratio", ratio)):
        if not 0 <= value <= 1:
            raise UsageError(f"--{name} {value:g} is outside 0..1", "0 takes no difference at all")


def _read(side: str, root: Path, place: Path | Url) -> ReadRun:
    """Read a run, and warn of the images that are incomplete or missing in it."""
    run = replace(read_run(root), url=None if isinstance(place, Path) else place)
    for name, reason in run.left_out.items():
        _warn(side, name, reason)
    if run.missing:
        log.warning("%s: the run did not come to %d more images", side, run.missing)
    return run


def _without(side: str, run: ReadRun, damage: Sequence[DamagedError]) -> ReadRun:
    """Leave out, with a warning, the images of which a file turned out to be broken."""
    names = {id(image): name for name, image in run.images.items()}
    broken = {names[id(e.image)]: e.message for e in damage if id(e.image) in names}
    for name, reason in broken.items():
        _warn(side, name, reason)
    left = {name: image for name, image in run.images.items() if name not in broken}
    return replace(run, images=left, damaged={**run.damaged, **broken})


def _warn(side: str, name: str, reason: str) -> None:
    log.warning("%s: %s is incomplete (%s), and left out", side, name, reason)


def _layers(pairing: Pairing, by_image: Mapping[str, list[Finding]]) -> tuple[LayerFindings, ...]:
    """The findings by layer, in the order in which the model came to the layers."""
    layers: dict[Place, list[Finding]] = {place: [] for place in pairing.order}
    for name in pairing.images:
        for finding in by_image[name]:
            layers[finding.place].append(finding)
    return tuple(LayerFindings(tuple(group)) for group in layers.values() if group)


def _findings(base: ReadImage, new: ReadImage, tolerance: float) -> Iterator[Finding]:
    images = ImagePair.read(base, new)
    for pair in tensor_pairs(base, new):
        yield measure(images, pair, tolerance)


def _write(result: DiffResult, base: ReadRun, new: ReadRun, outputs: Outputs) -> DiffResult:
    """Draw the maps, then write the files that were asked for."""
    page = None
    if outputs.folder is not None:
        with destination.replacing(outputs.folder, destination.DIFF, outputs.files) as fresh:
            result = replace(result, maps=tuple(maps.draw(result.layers, base, new, fresh)))
            write_json(fresh / DIFF_FILE, documents.as_json(result))
            if outputs.html and outputs.render:
                found, where = documents.comparison(result), (outputs.html, outputs.folder)
                page, beside = outputs.render(found, base, new, *where)
                for name, text in beside.items():
                    _file(fresh / name, text)
    if outputs.html and page is not None:
        _file(outputs.html, page)
    if outputs.junit is not None:
        with atomic(outputs.junit) as file:
            file.write(junit.document({str(result.new): documents.verdicts(result)}, "diff"))
    return result


def _file(path: Path, text: str) -> None:
    with atomic(path) as file:
        file.write(text.encode("utf-8", "replace"))
