"""The story of `merge`: parts of a run that were made apart, as one run directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from featviz.errors import CompareError, StoreError, UsageError
from featviz.files import real
from featviz.files.urls import Url
from featviz.rundir import MANIFEST_FILE
from featviz.rundir.image import ReadImage, read_image, same_content
from featviz.rundir.place import RUN, check_free, replacing
from featviz.rundir.read import ReadRun, read_run
from featviz.rundir.schema import GROWING, differences
from featviz.rundir.store import here
from featviz.rundir.verify import faults_of
from featviz.rundir.write import RunDirectory
from featviz.text import quoted


def merge(parts: Sequence[Path | Url], out: Path, overwrite: bool = False) -> dict[str, Any]:
    """Join parts of a run, here or in object stores; the result is what one run over all their
    images writes.

    Files are hard links to those of the parts where the file system has them, else copies.

    Returns:
        `out`, the `total` of images, and the names of the complete `images`, of the `failures` and
        of those that are `incomplete`: named in the parts, but without a manifest there.

    Raises:
        FeatvizError: the parts are not of one run, or disagree on an image; a file cannot be read
            or written. Then nothing is left under `out`.
    """
    if twice := [part for part in parts if isinstance(part, Url) and parts.count(part) > 1]:
        raise UsageError(f"{twice[0]} is named twice", "name each part once")
    with ExitStack() as stack:
        folders = [stack.enter_context(here(part)) for part in parts]
        seen: dict[Path, Path] = {}
        for part in folders:
            where = real(part)
            if where in seen:
                raise UsageError(f"{seen[where]} and {part} are one folder", "name each part once")
            if real(out).is_relative_to(where) or where.is_relative_to(real(out)):
                raise UsageError(f"--out {out} and the part {part} overlap", "name another --out")
            seen[where] = part
        check_free(out, RUN, overwrite)
        runs = [read_run(folder) for folder in folders]
        for run in runs:
            for reason in run.damaged.values():  # a merged run takes the place of its parts
                raise _not_whole(run.root, reason)
        settings = [{k: v for k, v in r.record.items() if k not in GROWING} for r in runs]
        for run, other in zip(runs[1:], settings[1:], strict=True):
            for words in differences(settings[0], other):
                raise CompareError(
                    f"{runs[0].root} and {run.root} are not parts of one run: {words}",
                    "run the parts with the same model, layers and options",
                )
        images = _images(runs)
        record = {**settings[0], **_outcome(runs, images)}
        with replacing(out, RUN) as fresh:
            for image in images.values():
                for fault in faults_of(read_image(image.root, image.folder)):
                    raise _not_whole(image.root, fault)
                _bring(image, fresh / image.folder)
            RunDirectory(fresh).write_run(record)
    lost = sorted({name for run in runs for name in run.incomplete} - set(images))
    return {
        "out": str(out),
        "total": record["images"]["total"],
        "images": record["images"]["complete"],
        "failures": [row["image"] for row in record["failures"]],
        "incomplete": lost,
    }


def _not_whole(part: Path, fault: str) -> StoreError:
    return StoreError(f"{quoted(str(part))}: {fault}", "take this image out, or run it again")


def _images(runs: Sequence[ReadRun]) -> dict[str, ReadImage]:
    """All complete images; those that are in two parts must be the same."""
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


def _outcome(runs: Sequence[ReadRun], complete: Collection[str]) -> dict[str, Any]:
    """`images` and `failures` of run.json, in the order of the images' paths: an image that failed
    in one part and is complete in another is complete."""
    names, others = set(complete), 0
    for run in runs:
        images = run.record["images"]
        own = {*images["complete"], *run.images, *run.failures, *images.get("missing", [])}
        others += int(images["total"]) - len(own)  # a part may have had images as inputs once
        names |= own
    order = sorted(names, key=lambda name: name.split("/"))
    errors = {name: error for run in reversed(runs) for name, error in run.failures.items()}
    left = [name for name in order if name not in complete]
    return {
        "images": {
            "total": len(order) + max(0, others),
            "complete": [name for name in order if name in complete],
            "missing": [name for name in left if name not in errors],
        },
        "failures": [{"image": name, "error": errors[name]} for name in left if name in errors],
    }


def _bring(image: ReadImage, target: Path) -> None:
    """An image's files, as far as its manifest names them: hard links to the files that were
    opened; copies where there are none (another disk, a file system without), or where something
    else has taken a file's place."""
    for name in (*image.manifest.named, MANIFEST_FILE):
        path, goal = image.path / name, target / name
        with image.open(name) as source:
            try:
                goal.parent.mkdir(parents=True, exist_ok=True)
                with suppress(OSError):
                    os.link(path, goal, follow_symlinks=False)
                    if os.path.samestat(goal.lstat(), os.fstat(source.fileno())):
                        continue
                    goal.unlink()
                with goal.open("xb") as copy:
                    shutil.copyfileobj(source, copy)
            except OSError as error:
                words = f"{quoted(str(path))} cannot be brought to {goal}: {error.strerror}"
                raise StoreError(words) from error
