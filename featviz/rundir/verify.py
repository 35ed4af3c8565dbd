"""Runs as a whole: `verify` reads every file of every image and holds it against its manifest, and
these against run.json; `merge` joins parts of a run that were made apart."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from featviz.errors import CompareError, StoreError, UsageError
from featviz.files import real
from featviz.files.urls import Url
from featviz.rundir import MANIFEST_FILE, RUN_FILE
from featviz.rundir.folder import Folder, reported
from featviz.rundir.image import ReadImage, read_image, same_content
from featviz.rundir.mirror import copied
from featviz.rundir.ownership import holds_run, look
from featviz.rundir.place import RUN, check_free, replacing
from featviz.rundir.read import ReadRun, image_folders, read_run
from featviz.rundir.schema import GROWING, MOST_RECORD, differences, fingerprint
from featviz.rundir.studies import read_steps, step_folders
from featviz.rundir.write import RunDirectory
from featviz.text import listed, quoted

Progress = Callable[[int], None]
"""Called after each image with how many there are in all."""
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')
"""How a manifest ends: with the checksum of all that stands before."""


def verify(
    roots: Sequence[Path | Url], jobs: int | None = None, progress: Progress = lambda total: None
) -> list[dict[str, Any]]:
    """Read every file of every image of runs, and hold it against its checksum.

    Args:
        roots: run directories, here or in object stores; a folder with the series of a training
            stands for the run of each of its steps.
        jobs: threads that read; None takes as many as Python thinks good.

    Returns:
        For each run its `faults`, each of an `image` or of the whole run (None); how many `images`,
        `files` and `bytes` it has; how many images are `missing` (the run has not come to them, or
        they failed: no fault, `--resume` goes on); and `unlisted`, the files that nothing lists (no
        fault, but `--overwrite` would refuse them).
    """
    with ExitStack() as copies, ThreadPoolExecutor(jobs, "featviz-verify") as pool:
        found: list[tuple[Path | Url, Path | None, ReadRun | str]] = []
        for place in roots:
            root = copies.enter_context(copied(place))
            if root != place or (root / RUN_FILE).exists() or not read_steps(root):
                found.append((place, None, _read(root, place)))
            else:
                steps = step_folders(root).values()
                found += [(step, root, _read(step, step, is_step=True)) for step in steps]
        total = sum(len(run.images) for _, _, run in found if isinstance(run, ReadRun))
        verdicts = []
        for place, series, run in found:
            about = {"run": str(place), "series": None if series is None else str(series)}
            verdicts.append(about | _verdict(run, pool, partial(progress, total)))
        return verdicts


def _read(root: Path, place: Path | Url, is_step: bool = False) -> ReadRun | str:
    """A run; a fault where it has images, or is the step of a series, and no run.json."""
    try:
        return read_run(root)
    except StoreError as error:
        whole = root.is_dir() and any(lacks is None for _, lacks in image_folders(root))
        if not whole and not is_step:
            raise
        return f"{error.message.replace(str(root), str(place))}; --resume writes it anew"


def _verdict(
    run: ReadRun | str, pool: ThreadPoolExecutor, advance: Callable[[], None]
) -> dict[str, Any]:
    """Read the images, and hold run.json against them: its settings, and their number."""
    counts = {"images": 0, "files": 0, "bytes": 0, "missing": 0}
    if isinstance(run, str):
        return {**counts, "unlisted": [], "faults": [{"image": None, "fault": run}]}
    others, own = list[str](), fingerprint(run.record)
    found = [(name, f"{quoted(name)}: {words}") for name, words in run.incomplete.items()]
    found += run.damaged.items()
    counts["images"] = len(found) + len(run.images)
    for image, checked in zip(
        run.images.values(), pool.map(_checked, run.images.values()), strict=True
    ):
        files, size, faults = checked
        counts["files"] += files
        counts["bytes"] += size
        found += [(image.name, fault) for fault in faults]
        if image.manifest.fingerprint not in (None, own):
            others.append(quoted(image.name))
        advance()
    rows: list[dict[str, str | None]] = []
    if others:
        names = listed(others, 3)
        words = f"{RUN_FILE} does not tell the settings by which these were drawn: {names}"
        rows.append({"image": None, "fault": words})
    record = run.record["images"]
    total, missing = int(record["total"]), record.get("missing")
    named = len(record["complete"]) + len(run.record["failures"]) + len(missing or ())
    if missing is not None and named != total:
        words = f"{RUN_FILE} has images.total {total}, and names {named}"
        rows.append({"image": None, "fault": words})
    rows += [{"image": name, "fault": fault} for name, fault in found]
    counts["missing"] = max(0, total - counts["images"])
    unlisted = look(run.root).others if holds_run(run.root) else []
    return {**counts, "unlisted": unlisted, "faults": rows}


def _checked(image: ReadImage) -> tuple[int, int, list[str]]:
    """How many files and bytes an image has that seems whole, and what does not fit by its
    checksums, which the reader of a run lets go."""
    try:
        found = read_image(image.root, image.folder)
        faults = list(faults_of(found))
    except StoreError as error:
        return 0, 0, [error.message]
    rows = found.manifest.files
    return len(rows) + 1, sum(row.bytes for row in rows), faults


def faults_of(image: ReadImage) -> Iterator[str]:
    """The files of an image that are not what was written."""

    def where(name: str) -> str:
        return quoted(f"{image.folder}/{name}")

    with image.open(MANIFEST_FILE) as file:
        content = file.read(MOST_RECORD)
    seal = _SEAL.search(content)
    if seal is None or hashlib.sha256(content[: seal.start()]).hexdigest().encode() != seal[1]:
        yield f"{where(MANIFEST_FILE)} is not as it was written"
    for row in image.manifest.files:
        try:
            with image.open(row.file) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        except (StoreError, OSError) as error:
            yield f"{where(row.file)} cannot be read: {quoted(str(error))}"
            continue
        if found != row.sha256:
            yield f"{where(row.file)} has SHA-256 {found[:12]}…, not {row.sha256[:12]}…"


# Parts


def merge(parts: Sequence[Path | Url], out: Path, overwrite: bool = False) -> dict[str, Any]:
    """Join parts of a run; the result is what one run over all their images writes.

    Returns:
        `out`, the `total` of images, and the names of the complete `images`, of the `failures` and
        of those that are `incomplete`: named in the parts, but without a manifest there.

    Raises:
        FeatvizError: the parts are not of one run, or disagree on an image; a file cannot be read
            or written. Then nothing is left under `out`.
    """
    with ExitStack() as stack:
        folders = [stack.enter_context(copied(part)) for part in parts]
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
        with replacing(out, RUN, overwrite) as fresh:
            for image in images.values():
                for fault in faults_of(read_image(image.root, image.folder)):
                    raise _not_whole(image.root, fault)
                _copy(image, fresh)
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


def _copy(image: ReadImage, run: Folder) -> None:
    """Copy an image's files, as far as its manifest names them, into another run."""
    for name in (*image.manifest.named, MANIFEST_FILE):
        target = f"{image.folder}/{name}"
        with image.open(name) as source, reported(run.path / target), run.create(target) as copy:
            shutil.copyfileobj(source, copy)
