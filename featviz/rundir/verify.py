"""`verify` compares every file of a run with the manifest of its image, and the manifests
with run.json. `merge` joins the parts of a run into one run directory."""

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
"""Called after each image with the number of all images."""
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')
"""The end of a manifest: the SHA-256 of all bytes before it."""


def verify(
    roots: Sequence[Path | Url], progress: Progress = lambda total: None
) -> list[dict[str, Any]]:
    """Compare all files of all images of runs with their checksums.

    Args:
        roots: run directories, on this machine or in object stores. The folder of a
            series stands for the runs of all its steps.
        progress: called after each image.

    Returns:
        A row for each run, with the fields of `_Verdict`.

    Raises:
        FeatvizError: a location has neither images nor a run.json that fits, or a store
            cannot be read. If it has images, a missing run.json is only a fault.
    """
    # threads help: hashing lets other threads run, and a disk serves several in parallel
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
    """A run to be verified."""

    location: Path | Url
    """The folder or URL that the user named; for a step of a series, its folder."""
    series: str | None
    """The folder of the series; None for a run that is not a step of a series."""
    run: ReadRun | str
    """The run. If run.json is missing or does not fit, a text that says so."""


def _subjects(location: Path | Url, root: Path) -> list[_Subject]:
    """The run at a location, or the runs of all steps of a series.

    Args:
        location: the folder or URL that the user named.
        root: the same folder; for a URL, the copy of the run.

    Raises:
        StoreError: the location holds neither a run nor a series.
    """
    # only a folder of this machine can hold a series, and a series has no run.json
    if root == location and not (root / RUN_FILE).exists() and read_steps(root):
        return [
            _Subject(step, str(root), _read(step, is_step=True))
            for step in step_folders(root).values()
        ]
    return [_Subject(location, None, _read(root))]


def _read(root: Path, is_step: bool = False) -> ReadRun | str:
    """Read a run.

    Args:
        is_step: whether the folder is a step of a series, and so certainly holds a run.

    Returns:
        The run. If run.json is missing or does not fit, a text that says so.

    Raises:
        StoreError: run.json is missing or does not fit, and nothing else shows that the
            folder holds a run: it has no complete image, and is not a step.
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
    """One fault of a run: a row of `faults`."""

    image: str | None
    """The name of the image; None for a fault of the whole run."""
    fault: str
    """The fault, as a sentence."""


@dataclass
class _Verdict:
    """The result of `verify` for a run."""

    run: str
    """The location of the run."""
    series: str | None = None
    """The folder of the series; None for a run that is not a step of a series."""
    images: int = 0
    """How many images were begun, complete or not."""
    files: int = 0
    """How many files the complete images have, manifests included."""
    bytes: int = 0
    """The size of these files but for manifests."""
    missing: int = 0
    """How many images failed, or were not begun. They are no fault, since `--resume` goes
    on with them."""
    unlisted: list[str] = field(default_factory=list)
    """Files that no record lists. They are no fault, but with them `--overwrite` refuses
    the folder."""
    faults: list[_Fault] = field(default_factory=list)


class _ImageCheck(NamedTuple):
    """The result of checking one image."""

    files: int
    """How many files the image has, the manifest included; 0 if the image cannot be read.
    """
    bytes: int
    """The size of all files but the manifest."""
    faults: list[str]


def _verdict(
    subject: _Subject, pool: ThreadPoolExecutor, advance: Callable[[], None]
) -> _Verdict:
    """Check all images of a run, and compare the settings and numbers in run.json with
    them.

    Args:
        subject: the run. If it could not be read, this is its only fault.
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
    """The faults of a run that are known without comparing checksums."""
    for reason in _faults_of_record(run):
        yield _Fault(None, reason)
    for name, reason in run.incomplete.items():
        yield _Fault(name, f"{quoted(name)}: {reason}")
    for name, reason in run.damaged.items():
        yield _Fault(name, reason)


def _faults_of_record(run: ReadRun) -> Iterator[str]:
    """The contradictions between run.json and the images, and between numbers in run.json:
    a sentence for each."""
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
    """Compare the files of an image with their checksums.

    Args:
        image: the image from `read_run`.
    """
    try:
        # The image is read once more: its files may have changed, and `read_run` has
        # dropped the rows with the checksums.
        current = read_image(image.root, image.folder)
        faults = list(faults_of(current))
    except StoreError as error:
        return _ImageCheck(files=0, bytes=0, faults=[error.message])
    rows = current.manifest.files
    return _ImageCheck(
        len(rows) + 1, bytes=sum(row.bytes for row in rows), faults=faults
    )


def faults_of(image: ReadImage) -> Iterator[str]:
    """Compare the files of an image with their checksums. Yields a sentence for each file
    that differs, or cannot be read.

    Args:
        image: the image from `read_image`; its manifest must have the rows of `files`.

    Raises:
        DamagedError: the manifest cannot be opened.
    """

    def where(name: str) -> str:
        """The path of a file, for messages."""
        return quoted(f"{image.folder}/{name}")

    # the manifest has the checksums of all other files and, at its end, its own
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
    """Join the parts of a run into one run directory, with the same content as one run
    over all their images.

    Args:
        locations: the parts: run directories, on this machine or in object stores.
        out: the run directory that is written.
        overwrite: whether an earlier run in `out` may be replaced.

    Returns:
        An object with the path `out`, the number `total` of all images, and the names of
        complete images (`images`), of failed images (`failures`), and of images that are
        incomplete in some part and complete in no part (`incomplete`).

    Raises:
        FeatvizError: the parts are not of one run, an image is not the same in two parts,
            or a file cannot be read or written. `out` is unchanged then.
    """
    with ExitStack() as copies:
        folders = [copies.enter_context(copied(location)) for location in locations]
        _check_folders(folders, out)
        # Reading the parts may take long, so `out` is checked before; `replacing` checks
        # it once more.
        check_free(out, RUN, overwrite)
        runs = [read_run(folder) for folder in folders]
        _check_one_run(runs)
        images = _images(runs)
        record = {**settings_of(runs[0].record), **_outcome(runs, images)}
        with replacing(out, RUN, overwrite) as folder:
            for image in images.values():
                _copy(image, folder)
            RunDirectory(folder).write_run(record)
    # an image that is incomplete in one part may be complete in another
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
    """Refuse a part that is named twice, and a result folder that lies in a part or holds
    a part.

    Raises:
        UsageError: the message names both folders.
    """
    # links are resolved, since two paths may lead to one folder
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
    """Refuse parts with damaged images, since users may delete the parts afterwards; and
    parts with other settings than the first part.

    Raises:
        StoreError: a part has a damaged image.
        CompareError: a part has other settings.
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
    """The error for a part with a damaged image.

    Args:
        part: the folder of the part.
        fault: what is wrong with the image, as a sentence.
    """
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
            # two parts may have the same image, if a shard was run with another count
            first = images.setdefault(name, image)
            if first is image:
                continue
            # equal manifests mean equal files, since a manifest has their checksums
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
        runs: the parts.
        complete: the names of the images that are complete in some part.
    """
    names = set(complete)
    errors: dict[str, str] = {}
    unnamed = 0  # how many images the parts count, but do not name
    for run in runs:
        part = run.record["images"]
        names_of_run = {*part["complete"], *run.images, *run.failures}
        names_of_run.update(part.get("missing", []))
        # this may be negative: a part may have images that are no longer its inputs
        unnamed += int(part["total"]) - len(names_of_run)
        names |= names_of_run
        errors = {
            **run.failures,
            **errors,
        }  # of two errors, that of the first part stays
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
    # images without a name are missing, too
    total = len(names) + max(0, unnamed)
    images = {"total": total, "complete": complete_in_order, "missing": missing}
    return {"images": images, "failures": failures}


def _copy(image: ReadImage, run: Folder) -> None:
    """Copy an image into another run: the files that its manifest names, then the
    manifest.

    Args:
        image: the image.
        run: the folder of the other run.

    Raises:
        StoreError: a file does not have its checksum, or cannot be copied.
    """
    # users may delete the parts afterwards, so the copy must be complete
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
