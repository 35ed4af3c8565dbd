"""The story of `merge`: parts of a run that were made apart, as one run directory."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from featviz import staging
from featviz.errors import CompareError, StoreError, UsageError
from featviz.runs import ReadImage, ReadRun, read_run, same_content
from featviz.store import MANIFEST_FILE, RUN_FILE, RunDirectory

log = logging.getLogger(__name__)

_PART = re.compile(r"\..*\.part")
"""Files that were being written when their run was killed."""

_OWN = ("images", "failures")
"""Of run.json: what parts of one run do not share."""


@dataclass(frozen=True)
class MergeResult:
    """What was joined."""

    out: Path
    images: tuple[str, ...]
    failures: tuple[str, ...]
    incomplete: tuple[str, ...]
    """Named in the parts, but without a manifest there: left out."""
    total: int
    """Images that the run was to have."""

    @property
    def exit_code(self) -> int:
        """0 where all images are there, else 3."""
        return 0 if len(self.images) == self.total else 3


def merge(parts: Sequence[Path], out: Path, overwrite: bool = False) -> MergeResult:
    """Join parts of a run; the result is what one run over all their images writes.

    Files are hard links to those of the parts where the file system has them, else copies.

    Raises:
        FeatvizError: the parts are not of one run, or disagree on an image; a file cannot be read
            or written. Then nothing is left under `out`.
    """
    _check_apart(parts, out)
    staging.check_free(out, overwrite, [RUN_FILE])
    runs = [read_run(part) for part in parts]
    for run in runs[1:]:
        _check_alike(runs[0], run)
    images = _images(runs)
    record = _record(runs, images)
    with staging.replacing(out) as fresh:
        for image in images.values():
            _bring(image.path, fresh / image.folder)
        RunDirectory(fresh).write_run(record)
    lost = sorted({name for run in runs for name in run.incomplete} - set(images))
    failures = tuple(row["image"] for row in record["failures"])
    return MergeResult(out, tuple(images), failures, tuple(lost), record["images"]["total"])


def _check_apart(parts: Sequence[Path], out: Path) -> None:
    """Whether no folder is named twice, or would be written into."""
    seen: dict[Path, Path] = {}
    for part in parts:
        where = part.resolve()
        if where in seen:
            raise UsageError(f"{seen[where]} and {part} are one folder", "name each part once")
        if out.resolve().is_relative_to(where) or where.is_relative_to(out.resolve()):
            raise UsageError(f"--out {out} and the part {part} overlap", "name another --out")
        seen[where] = part


def _check_alike(first: ReadRun, other: ReadRun) -> None:
    """Whether two parts are of one run.

    Raises:
        CompareError: names the first entry of run.json that differs.
    """
    one, two = _flat(first.record), _flat(other.record)
    for name in one | two:
        if one.get(name) != two.get(name):
            raise CompareError(
                f"{first.root} and {other.root} are not parts of one run: {name} is "
                f"{one.get(name)!r} in the first and {two.get(name)!r} in the second",
                "run the parts with the same model, layers and options",
            )


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """`options.normalize` and the like, to their values."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict) and name not in _OWN:
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        elif name not in _OWN:
            found[name] = value
    return found


def _images(runs: Sequence[ReadRun]) -> dict[str, ReadImage]:
    """All complete images, in the order of the whole run.

    Raises:
        CompareError: parts have the same image with different results.
    """
    found: dict[str, ReadImage] = {}
    for run in runs:
        for name, image in run.images.items():
            earlier = found.setdefault(name, image)
            if not _same(earlier, image):
                raise CompareError(
                    f"{name} is not the same in {earlier.path} and {image.path}",
                    "take it out of one of them",
                )
    return {name: found[name] for name in _ordered([list(run.images) for run in runs])}


def _same(one: ReadImage, other: ReadImage) -> bool:
    return one is other or same_content(one.path / MANIFEST_FILE, other.path / MANIFEST_FILE)


def _ordered(names: Sequence[Sequence[str]]) -> list[str]:
    """Names of several parts in the order of the whole.

    A folder's images come in the order of their paths; where each part is in that order, so is
    the whole. Images that were listed otherwise stay as they are, one part after the other.
    """
    found = list(dict.fromkeys(name for part in names for name in part))
    if all(list(part) == sorted(part, key=PurePosixPath) for part in names):
        return sorted(found, key=PurePosixPath)
    return found


def _record(runs: Sequence[ReadRun], images: Mapping[str, ReadImage]) -> dict[str, Any]:
    """The content of run.json: an image that failed in one part and is complete in another is
    complete."""
    failed = _ordered([list(run.failures) for run in runs])
    errors = {name: error for run in reversed(runs) for name, error in run.failures.items()}
    failures = [{"image": n, "error": errors[n]} for n in failed if n not in images]
    named = sum(len({*run.images, *run.failures}) for run in runs)
    twice = named - len(images) - len(failures)
    total = sum(int(run.record["images"]["total"]) for run in runs) - twice
    own = {"images": {"total": total, "complete": list(images)}, "failures": failures}
    shared = {name: value for name, value in runs[0].record.items() if name != "schema_version"}
    return {**shared, **own}


def _bring(source: Path, target: Path) -> None:
    """An image's folder, with everything in it."""
    for path in _files(source):
        goal = target / path.relative_to(source)
        try:
            goal.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(path, goal)
        except OSError as error:
            raise StoreError(f"{path} cannot be brought to {goal}: {error.strerror}") from error


def _files(folder: Path) -> Iterator[Path]:
    for place, _, files in os.walk(folder):
        yield from (Path(place) / name for name in files if not _PART.fullmatch(name))


def _link_or_copy(source: Path, target: Path) -> None:
    """A hard link; a copy where there are none (another disk, a file system without)."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
