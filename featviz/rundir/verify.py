"""`verify` compares every file of a run with the manifest of its image, and the manifests
with run.json. `merge` joins parts of a run that were made apart."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from featviz.rundir.schema import MOST_RECORD, differences, fingerprint, settings_of
from featviz.rundir.studies import read_steps, step_folders
from featviz.rundir.write import RunDirectory
from featviz.text import listed, quoted

Progress = Callable[[int], None]
"""Is called after each image, with the number of all images."""
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')
"""The end of a manifest: the SHA-256 of all bytes before it."""


def verify(
    roots: Sequence[Path | Url], progress: Progress = lambda total: None
) -> list[dict[str, Any]]:
    """Compare every file of every image of runs with its checksum.

    Args:
        roots: run directories, here or in object stores; a folder with the series of a
            training stands for the run of each of its steps.
        progress: called after each image.

    Returns:
        A row for each run, with the fields of `_Verdict`.

    Raises:
        FeatvizError: a location has no images, and no run.json that fits; or a store
            cannot be read. With images, a run.json that does not fit is a fault.
    """
    # hashing lets other threads of Python run, and a disk serves several at once
    with (
        ExitStack() as copies,
        ThreadPoolExecutor(thread_name_prefix="featviz-verify") as pool,
    ):
        subjects = []
        for location in roots:
            root = copies.enter_context(copied(location))
            subjects += _subjects(location, root)
        runs = [subject.run for subject in subjects]
        total = sum(len(run.images) for run in runs if isinstance(run, ReadRun))
        advance = partial(progress, total)
        return [asdict(_verdict(subject, pool, advance)) for subject in subjects]


class _Subject(NamedTuple):
    """A run that is verified."""

    location: Path | Url
    """As the user named it, or the folder of a step."""
    series: str | None
    """The folder of the series that it is a step of; None for a run alone."""
    run: ReadRun | str
    """The run; or, where run.json is missing or does not fit, this fault in words."""


def _subjects(location: Path | Url, root: Path) -> list[_Subject]:
    """The run that a user names, or those of the steps of a series.

    Args:
        location: as the user named it.
        root: the folder, or a copy of it where `location` is a URL.

    Raises:
        StoreError: it is not a run.
    """
    # a folder of this machine without run.json may hold a series
    if root == location and not (root / RUN_FILE).exists() and read_steps(root):
        return [
            _Subject(step, str(root), _read(step, is_step=True))
            for step in step_folders(root).values()
        ]
    return [_Subject(location, None, _read(root))]


def _read(root: Path, is_step: bool = False) -> ReadRun | str:
    """Read a run.

    Args:
        is_step: whether the folder is the step of a series, and so is a run for certain.

    Returns:
        The run; or, where run.json is missing or does not fit, this fault in words.

    Raises:
        StoreError: run.json is missing or does not fit, and the folder neither holds a
            complete image nor is a step.
    """
    try:
        return read_run(root)
    except StoreError as error:
        has_images = root.is_dir() and any(
            reason is None for _, reason in image_folders(root)
        )
        if not has_images and not is_step:
            raise
        return f"{error.message}; --resume writes it anew"


@dataclass
class _Fault:
    """What is wrong with a run: a row of `faults`."""

    image: str | None
    """Its name; None for what is of the whole run."""
    fault: str


@dataclass
class _Verdict:
    """What `verify` says of a run."""

    run: str
    series: str | None = None
    """The folder of the series that it is a step of."""
    images: int = 0
    """How many were begun, complete or not."""
    files: int = 0
    bytes: int = 0
    """The size of all files but manifests and run.json."""
    missing: int = 0
    """Images that failed, or that the run has not come to: no fault, since `--resume`
    goes on with them."""
    unlisted: list[str] = field(default_factory=list)
    """Files that no record lists: no fault, but `--overwrite` would refuse them."""
    faults: list[_Fault] = field(default_factory=list)


class _ImageCheck(NamedTuple):
    """What was found in the files of one image."""

    files: int
    """How many there are, the manifest included; 0 where it cannot be read."""
    bytes: int
    """The size of all files but the manifest."""
    faults: list[str]


def _verdict(
    subject: _Subject, pool: ThreadPoolExecutor, advance: Callable[[], None]
) -> _Verdict:
    """Check all images of a run, and whether the settings and numbers in run.json fit
    them.

    Args:
        pool: threads that check images.
        advance: called after each image.
    """
    run = subject.run
    verdict = _Verdict(str(subject.location), subject.series)
    if isinstance(run, str):
        verdict.faults = [_Fault(None, run)]
        return verdict
    faults = [*_faults_of_run(run)]
    checks = pool.map(_check_image, run.images.values())
    for image, check in zip(run.images.values(), checks, strict=True):
        verdict.files += check.files
        verdict.bytes += check.bytes
        faults += [_Fault(image.name, text) for text in check.faults]
        advance()
    verdict.faults = faults
    verdict.images = len(run.images) + len(run.left_out)
    verdict.missing = max(0, int(run.record["images"]["total"]) - verdict.images)
    if holds_run(run.root):
        verdict.unlisted = look(run.root).others
    return verdict


def _faults_of_run(run: ReadRun) -> Iterator[_Fault]:
    """The faults of a run that are known without its checksums."""
    for reason in _faults_of_record(run):
        yield _Fault(None, reason)
    for name, reason in run.incomplete.items():
        yield _Fault(name, f"{quoted(name)}: {reason}")
    for name, reason in run.damaged.items():
        yield _Fault(name, reason)


def _faults_of_record(run: ReadRun) -> Iterator[str]:
    """What in run.json does not fit the images, or its own numbers: a sentence for
    each."""
    # run.json may have been edited, or copied from another run
    settings = fingerprint(run.record)
    unlike = [
        quoted(image.name)
        for image in run.images.values()
        if image.manifest.fingerprint not in (None, settings)
    ]
    if unlike:
        names = listed(unlike, 3)
        yield (
            f"{RUN_FILE} does not tell the settings by which these were drawn: {names}"
        )
    images = run.record["images"]
    named = len(images["complete"]) + len(run.record["failures"])
    named += len(images.get("missing", ()))
    if named != int(images["total"]):
        yield f"{RUN_FILE} has images.total {images['total']}, and names {named}"


def _check_image(image: ReadImage) -> _ImageCheck:
    """Compare an image, as `read_run` has read it, with its checksums."""
    try:
        # Once more: its files may have changed since, and `read_run` has dropped the
        # rows with the checksums.
        current = read_image(image.root, image.folder)
        faults = list(faults_of(current))
    except StoreError as error:
        return _ImageCheck(files=0, bytes=0, faults=[error.message])
    rows = current.manifest.files
    return _ImageCheck(
        len(rows) + 1, bytes=sum(row.bytes for row in rows), faults=faults
    )


def faults_of(image: ReadImage) -> Iterator[str]:
    """A sentence for each file of an image that is not as it was written.

    Args:
        image: as `read_image` reads it, with the rows of `files` in its manifest.
    """

    def where(name: str) -> str:
        return quoted(f"{image.folder}/{name}")

    # the manifest has the checksums of all other files, and at its end its own
    with image.open(MANIFEST_FILE) as file:
        content = file.read(MOST_RECORD)
    seal = _SEAL.search(content)
    sealed = content[: seal.start()] if seal is not None else content
    checksum = hashlib.sha256(sealed).hexdigest().encode()
    if seal is None or checksum != seal[1]:
        yield f"{where(MANIFEST_FILE)} is not as it was written"
    for row in image.manifest.files:
        try:
            with image.open(row.file) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        except (StoreError, OSError) as error:
            yield f"{where(row.file)} cannot be read: {quoted(error)}"
            continue
        if digest != row.sha256:
            yield (
                f"{where(row.file)} has SHA-256 {digest[:12]}…, not {row.sha256[:12]}…"
            )


# Parts


def merge(
    locations: Sequence[Path | Url], out: Path, overwrite: bool = False
) -> dict[str, Any]:
    """Join parts of a run; the result is what one run over all their images writes.

    Args:
        locations: run directories, here or in object stores.
        out: the run directory that is written.
        overwrite: replace an earlier run in `out`.

    Returns:
        `out`, the `total` of images, and the names of the complete `images`, of the
        `failures` and of those that are `incomplete`: begun, or named, in some part
        and complete in none.

    Raises:
        FeatvizError: the parts are not of one run, or disagree on an image; a file
            cannot be read or written. Then `out` is as it was.
    """
    with ExitStack() as copies:
        folders = [copies.enter_context(copied(location)) for location in locations]
        _check_folders(folders, out)
        # Before the parts are read, which may take long. `replacing` checks once more.
        check_free(out, RUN, overwrite)
        runs = [read_run(folder) for folder in folders]
        _check_one_run(runs)
        images = _images(runs)
        record = {**settings_of(runs[0].record), **_outcome(runs, images)}
        with replacing(out, RUN, overwrite) as folder:
            for image in images.values():
                _copy(image, folder)
            RunDirectory(folder).write_run(record)
    # an image that one part lacks may be whole in another
    incomplete: set[str] = set()
    for run in runs:
        incomplete.update(run.incomplete)
    return {
        "out": str(out),
        "total": record["images"]["total"],
        "images": record["images"]["complete"],
        "failures": [row["image"] for row in record["failures"]],
        "incomplete": sorted(incomplete.difference(images)),
    }


def _check_folders(folders: Sequence[Path], out: Path) -> None:
    """Refuse a part that is named twice, and a result that would lie in a part, or a part
    in it: UsageError."""
    # links resolved: a folder may be named in two ways
    destination = real(out)
    earlier: dict[Path, Path] = {}
    for path in folders:
        folder = real(path)
        if folder in earlier:
            raise UsageError(
                f"{earlier[folder]} and {path} are one folder", "name each part once"
            )
        if destination.is_relative_to(folder) or folder.is_relative_to(destination):
            raise UsageError(
                f"--out {out} and the part {path} overlap", "name another --out"
            )
        earlier[folder] = path


def _check_one_run(runs: Sequence[ReadRun]) -> None:
    """Refuse parts with damaged images, since the result may be all that is kept of
    them; and parts that were drawn by other settings than the first.

    Raises:
        StoreError: a part has a damaged image.
        CompareError: two parts have other settings.
    """
    for run in runs:
        for reason in run.damaged.values():
            raise _not_whole(run.root, reason)
    first = runs[0]
    for run in runs[1:]:
        for difference in differences(
            settings_of(first.record), settings_of(run.record)
        ):
            raise CompareError(
                f"{first.root} and {run.root} are not parts of one run: {difference}",
                "run the parts with the same model, layers and options",
            )


def _not_whole(part: Path, fault: str) -> StoreError:
    """The error for a part with an image that has this fault."""
    return StoreError(
        f"{quoted(part)}: {fault}", "take this image out, or run it again"
    )


def _images(runs: Sequence[ReadRun]) -> dict[str, ReadImage]:
    """The complete images of all parts, by name.

    Raises:
        CompareError: an image is not the same in two parts.
    """
    images: dict[str, ReadImage] = {}
    for run in runs:
        for name, image in run.images.items():
            # shards overlap where one was run again with another number of parts
            first = images.setdefault(name, image)
            if first is image:
                continue
            # a manifest has the checksums of all other files
            if not same_content((first, MANIFEST_FILE), (image, MANIFEST_FILE)):
                raise CompareError(
                    f"{name} is not the same in {first.path} and {image.path}",
                    "take it out of one of them",
                )
    return images


def _outcome(runs: Sequence[ReadRun], complete: Collection[str]) -> dict[str, Any]:
    """The entries `images` and `failures` of the run.json of the result, in the order of
    the images' paths. An image that failed in one part and is complete in another is
    complete.

    Args:
        runs: the parts, each with its own inputs.
        complete: names of the images that are complete in some part.
    """
    names = set(complete)
    errors: dict[str, str] = {}
    unnamed = 0  # inputs that the parts count, but do not name
    for run in runs:
        part = run.record["images"]
        names_of_run = {*part["complete"], *run.images, *run.failures}
        names_of_run.update(part.get("missing", []))
        # negative for a part with images that are not among its inputs any more
        unnamed += int(part["total"]) - len(names_of_run)
        names |= names_of_run
        errors = {**run.failures, **errors}  # the error of the first part counts
    complete_in_order = []
    missing = []
    failures = []
    for name in sorted(names, key=lambda name: name.split("/")):
        if name in complete:
            complete_in_order.append(name)
        elif name in errors:
            failures.append({"image": name, "error": errors[name]})
        else:
            missing.append(name)
    # inputs without a name are still missing
    total = len(names) + max(0, unnamed)
    images = {"total": total, "complete": complete_in_order, "missing": missing}
    return {"images": images, "failures": failures}


def _copy(image: ReadImage, run: Folder) -> None:
    """Copy an image into another run: its manifest, and the files that this names.

    Raises:
        StoreError: a file is not as it was written. The copy may be all that is kept, so
            it must be whole.
    """
    for fault in faults_of(read_image(image.root, image.folder)):
        raise _not_whole(image.root, fault)
    for name in (*image.manifest.named, MANIFEST_FILE):
        target = f"{image.folder}/{name}"
        with (
            image.open(name) as source,
            reported(run.path / target),
            run.create(target) as copy,
        ):
            shutil.copyfileobj(source, copy)
