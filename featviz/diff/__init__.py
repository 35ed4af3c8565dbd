"""The story of `diff`: two run directories, set side by side."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from featviz.diff import documents, maps
from featviz.diff.findings import DiffResult, DiffThresholds, Finding, LayerFindings
from featviz.diff.pairing import Pairing, check_alike, pair_up, pairs
from featviz.diff.sides import Sides
from featviz.errors import UsageError
from featviz.rundir import DIFF_FILE, destination, junit
from featviz.rundir.atomic import atomic
from featviz.rundir.read import DamagedError, ReadRun, read_run
from featviz.rundir.schema import Place
from featviz.rundir.write import write_json

log = logging.getLogger(__name__)

__all__ = ["DiffResult", "DiffThresholds", "Outputs", "diff"]


@dataclass(frozen=True)
class Outputs:
    """Files to write beside the result."""

    out: Path | None = None
    """Folder of the difference maps, with the result as diff.json; beside the page, where only
    that is asked for."""
    html: Path | None = None
    junit: Path | None = None
    render: Callable[[Mapping[str, Any]], str] | None = None
    """Turns what `documents.page` says into HTML; needed for `html`."""
    style: str = ""
    """The style sheet of the page, which lies with the maps."""

    @property
    def folder(self) -> Path | None:
        """Where the maps go; None where nobody asked for them."""
        if self.out is not None or self.html is None:
            return self.out
        return self.html.with_name(f"{self.html.stem}-maps")

    @property
    def named(self) -> list[Path]:
        """The files that have a place of their own, be it in the folder."""
        return [path for path in (self.html, self.junit) if path is not None]


def diff(base: Path, new: Path, asked: DiffThresholds, outputs: Outputs) -> DiffResult:
    """Compare two run directories.

    Raises:
        FeatvizError: they cannot be read, or not be compared; a file cannot be written.
    """
    check_asked(asked)
    named = ("--out", outputs.folder), ("--html", outputs.html), ("--junit", outputs.junit)
    for option, path in named:
        if path is not None:
            destination.check_apart(path, option, (base, new))
    if outputs.folder is not None:
        destination.check_free(outputs.folder, destination.DIFF, True, outputs.named)
    before, after = (_read(side, path) for side, path in (("BASE", base), ("NEW", new)))
    pairing = pair_up(before, after)
    damage = check_alike(before, after)
    found: dict[str, list[Finding]] = {}
    for name in pairing.images:
        try:
            found[name] = list(_findings(before, after, name, asked.tolerance))
        except DamagedError as error:
            damage.append(error)
    if damage:
        before, after = _without("BASE", before, damage), _without("NEW", after, damage)
        pairing = pair_up(before, after)
    result = DiffResult(
        base,
        new,
        asked,
        pairing.images,
        _layers(pairing, found),
        pairing.only_in_base,
        pairing.only_in_new,
        {"base": tuple(before.left_out), "new": tuple(after.left_out)},
    )
    return _write(result, before, after, outputs)


def check_asked(asked: DiffThresholds) -> None:
    """Refuse bad values before any work.

    Raises:
        UsageError: names the option, its value and what it takes.
    """
    for name, value in (("tolerance", asked.tolerance), ("max-diff-ratio", asked.max_diff_ratio)):
        if not 0 <= value <= 1:
            raise UsageError(f"--{name} {value:g} is outside 0..1", "0 takes no difference at all")


def _read(side: str, path: Path) -> ReadRun:
    """Read a run, and name what is not whole in it."""
    run = read_run(path)
    for name, reason in run.left_out.items():
        _warn(side, name, reason)
    if run.missing:
        log.warning("%s: the run did not come to %d more images", side, run.missing)
    return run


def _without(side: str, run: ReadRun, damage: Sequence[DamagedError]) -> ReadRun:
    """Without the images of which a file turned out to be broken; they are named."""
    own = {id(image): name for name, image in run.images.items()}
    broken = {own[id(e.image)]: e.message for e in damage if id(e.image) in own}
    for name, reason in broken.items():
        _warn(side, name, reason)
    left = {name: image for name, image in run.images.items() if name not in broken}
    return replace(run, images=left, damaged={**run.damaged, **broken})


def _warn(side: str, name: str, reason: str) -> None:
    log.warning("%s: %s is incomplete (%s), and left out", side, name, reason)


def _layers(pairing: Pairing, found: Mapping[str, list[Finding]]) -> tuple[LayerFindings, ...]:
    """What both have, compared, in the order in which the model came to it."""
    layers: dict[Place, list[Finding]] = {place: [] for place in pairing.order}
    for name in pairing.images:
        for finding in found[name]:
            layers[finding.place].append(finding)
    return tuple(LayerFindings(tuple(own)) for own in layers.values() if own)


def _findings(base: ReadRun, new: ReadRun, image: str, tolerance: float) -> Iterator[Finding]:
    sides = Sides.of(base.images[image], new.images[image])
    for pair in pairs(sides.base, sides.new):
        yield sides.measure(pair, tolerance)


def _write(result: DiffResult, base: ReadRun, new: ReadRun, outputs: Outputs) -> DiffResult:
    """Draw the maps, then write what was asked for."""
    if outputs.folder is not None:
        with destination.replacing(outputs.folder, destination.DIFF, outputs.named) as fresh:
            result = replace(result, maps=tuple(maps.draw(result.layers, base, new, fresh)))
            write_json(fresh / DIFF_FILE, documents.as_json(result))
            _file(fresh / "style.css", outputs.style)
    if outputs.html is not None and outputs.folder is not None and outputs.render is not None:
        beside = Path(os.path.relpath(outputs.folder, outputs.html.parent)).as_posix()
        _file(outputs.html, outputs.render(documents.page(result, beside)))
    if outputs.junit is not None:
        with atomic(outputs.junit) as file:
            file.write(junit.document({str(result.new): documents.verdicts(result)}, "diff"))
    return result


def _file(path: Path, text: str) -> None:
    with atomic(path) as file:
        file.write(text.encode("utf-8", "replace"))
