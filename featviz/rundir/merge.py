"""The story of `merge`: parts of a run that were made apart, as one run directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from featviz.errors import CompareError, StoreError, UsageError
from featviz.files import real
from featviz.files.urls import Url
from featviz.rundir import MANIFEST_FILE
from featviz.rundir.image import ReadImage, read_image, same_content
from featviz.rundir.place import RUN, check_free, replacing
from featviz.rundir.read import ReadRun, read_run
from featviz.rundir.store import here
from featviz.rundir.verify import faults_of
from featviz.rundir.write import RunDirectory
from featviz.text import quoted

_PER_PART = ("images", "failures", "schema_version")
"""Entries of run.json that parts do not have in common, or that are written anew."""


@dataclass(frozen=True)
class MergeResult:
    """What was joined."""

    out: Path
    images: tuple[str, ...]
    failures: tuple[str, ...]
    incomplete: tuple[str, ...]
    """Named in the parts, but without a manifest there: left out."""
    total: int

    @property
    def exit_code(self) -> int:
        """0 where all images are there, else 3."""
        return 0 if len(self.images) == self.total else 3


def merge(parts: Sequence[Path | Url], out: Path, overwrite: bool = False) -> MergeResult:
    """Join parts of a run, here or in object stores; the result is what one run over all their
    images writes.

    Files are hard links to those of the parts where the file system has them, else copies.

    Raises:
        FeatvizError: the parts are not of one run, or disagree on an image; a file cannot be read
            or written. Then nothing is left under `out`.
    """
    urls = [part for part in parts if isinstance(part, Url)]
    if twice := [url for url in urls if urls.count(url) > 1]:
        raise UsageError(f"{twice[0]} is named twice", "name each part once")
    with ExitStack() as stack:
        return _merge([stack.enter_context(here(part)) for part in parts], out, overwrite)


def _merge(parts: Sequence[Path], out: Path, overwrite: bool) -> MergeResult:
    _check_apart(parts, out)
    check_free(out, RUN, overwrite)
    runs = [_read(part) for part in parts]
    for run in runs[1:]:
        _check_alike(runs[0], run)
    images = _images(runs)
    record = _record(runs, images)
    with replacing(out, RUN) as fresh:
        for image in images.values():
            _check_whole(image)
            _bring(image, fresh / image.folder)
        RunDirectory(fresh).write_run(record)
    lost = sorted({name for run in runs for name in run.incomplete} - set(images))
    failures = tuple(row["image"] for row in record["failures"])
    complete, total = record["images"]["complete"], record["images"]["total"]
    return MergeResult(out, tuple(complete), failures, tuple(lost), total)


def _check_apart(parts: Sequence[Path], out: Path) -> None:
    """Whether no folder is named twice, or would be written into."""
    seen: dict[Path, Path] = {}
    for part in parts:
        where = real(part)
        if where in seen:
            raise UsageError(f"{seen[where]} and {part} are one folder", "name each part once")
        if real(out).is_relative_to(where) or where.is_relative_to(real(out)):
            raise UsageError(f"--out {out} and the part {part} overlap", "name another --out")
        seen[where] = part


def _read(part: Path) -> ReadRun:
    """Read a part, all of whose complete images must be whole: a merged run takes their place.

    Raises:
        StoreError: it is no run, or names the first image that does not fit its manifest.
    """
    run = read_run(part)
    for reason in run.damaged.values():
        raise StoreError(f"{quoted(str(part))}: {reason}", "take this image out, or run it again")
    return run


def _check_whole(image: ReadImage) -> None:
    """Whether the files of an image are what was written.

    Raises:
        StoreError: names the first that is not.
    """
    for fault in faults_of(read_image(image.root, image.folder)):
        raise StoreError(
            f"{quoted(str(image.root))}: {fault}", "take this image out, or run it again"
        )


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
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict) and name not in _PER_PART:
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        elif name not in _PER_PART:
            flat[name] = value
    return flat


def _images(runs: Sequence[ReadRun]) -> dict[str, ReadImage]:
    """All complete images.

    Raises:
        CompareError: parts have the same image with different results.
    """
    images: dict[str, ReadImage] = {}
    for run in runs:
        for name, image in run.images.items():
            earlier = images.setdefault(name, image)
            both = (earlier, MANIFEST_FILE), (image, MANIFEST_FILE)
            if earlier is not image and not same_content(*both):
                raise CompareError(
                    f"{name} is not the same in {earlier.path} and {image.path}",
                    "take it out of one of them",
                )
    return images


def _record(runs: Sequence[ReadRun], complete: Collection[str]) -> dict[str, Any]:
    """The content of run.json: an image that failed in one part and is complete in another is
    complete."""
    parts = [_names(run) for run in runs]
    order = _in_order(parts, [set(run.record["images"].get("missing", [])) for run in runs])
    errors = {name: error for run in reversed(runs) for name, error in run.failures.items()}
    failed = [name for name in order if name in errors and name not in complete]
    twice = sum(map(len, parts)) - len(order)
    images = {
        # a part may have images that were among its inputs once
        "total": max(sum(int(run.record["images"]["total"]) for run in runs) - twice, len(order)),
        "complete": [name for name in order if name in complete],
    }
    if any("missing" in run.record["images"] for run in runs):
        images["missing"] = [n for n in order if n not in complete and n not in errors]
    shared = {name: value for name, value in runs[0].record.items() if name not in _PER_PART}
    failures = [{"image": name, "error": errors[name]} for name in failed]
    return {**shared, "images": images, "failures": failures}


def _names(run: ReadRun) -> list[str]:
    """All images that a part knows of, as far as it tells in their order."""
    listed = run.record["images"]
    complete = dict.fromkeys([*listed["complete"], *run.images])
    names = list(complete | dict.fromkeys([*run.failures, *listed.get("missing", [])]))
    return sorted(names, key=_by_parts) if _is_sorted(list(complete)) else names


def _in_order(parts: Sequence[Sequence[str]], missing: Sequence[Collection[str]]) -> list[str]:
    """The names of all parts, in the order in which one run would have come to them.

    A folder's images come in the order of their paths, and the parts' too. Where images were
    listed otherwise, the parts are taken for every n-th image each, in the order of the parts, if
    their lengths are those of such parts; else one follows the other. What a part lists as missing,
    it may just have left to another.
    """
    if all(map(_is_sorted, parts)) and max(map(len, parts)) > 1:
        return sorted({name for part in parts for name in part}, key=_by_parts)
    pairs = zip(parts, missing, strict=True)
    present = [[name for name in part if name not in absent] for part, absent in pairs]
    counts = [len(part) for part in present]
    dealt = sorted(counts, reverse=True) == counts and counts[0] - counts[-1] <= 1
    rows = zip_longest(*present) if dealt else present
    order = [name for row in rows for name in row if name is not None]
    return list(dict.fromkeys([*order, *(name for part in parts for name in part)]))


def _is_sorted(names: Sequence[str]) -> bool:
    return all(one <= two for one, two in pairwise(map(_by_parts, names)))


def _bring(image: ReadImage, target: Path) -> None:
    """An image's files, as far as its manifest names them."""
    for name in image.files:
        goal = target / name
        with image.open(name) as source:
            try:
                goal.parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(image.path / name, source, goal)
            except OSError as error:
                path = quoted(str(image.path / name))
                raise StoreError(f"{path} cannot be brought to {goal}: {error.strerror}") from error


def _link_or_copy(path: Path, source: BinaryIO, target: Path) -> None:
    """A hard link to the file that is open; a copy where there are none (another disk, a file
    system without), or where something else has taken the file's place."""
    try:
        os.link(path, target, follow_symlinks=False)
        if os.path.samestat(target.lstat(), os.fstat(source.fileno())):
            return
        target.unlink()
    except OSError:
        pass
    with target.open("xb") as copy:
        shutil.copyfileobj(source, copy)


def _by_parts(name: str) -> str:
    """Orders names as paths, folder by folder, in a fraction of the time of PurePosixPath."""
    return name.replace("/", "\0")
