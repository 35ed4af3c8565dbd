"""Whether runs are whole: every file of every image is read and held against its manifest, and
these against run.json."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from featviz.errors import CHECK_FAILED, StoreError
from featviz.files.urls import Url
from featviz.rundir import MANIFEST_FILE, RUN_FILE
from featviz.rundir.image import ReadImage, read_image
from featviz.rundir.place import holds_run, look
from featviz.rundir.read import image_folders, read_record
from featviz.rundir.schema import MOST_RECORD, fingerprint
from featviz.rundir.series import read_steps, step_folders
from featviz.rundir.store import here
from featviz.rundir.write import is_sealed
from featviz.text import listed, quoted, safe_way

Progress = Callable[[int], None]
"""Called after each image with how many there are in all."""
_NAMED = 3
"""Images that a fault of the whole run names."""


@dataclass(frozen=True)
class ImageVerdict:
    """What was found of one image."""

    name: str
    """By run.json; where it does not list the image, by the manifest, or else by the folder."""
    faults: tuple[str, ...] = ()
    """What does not fit, with the file; none where it is whole."""
    files: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class RunVerdict:
    """What was found of one run."""

    root: Path | Url
    images: tuple[ImageVerdict, ...]
    faults: tuple[str, ...]
    """What does not fit beside the images."""
    missing: int
    """Images that the run has not come to, or that failed: no fault, `--resume` goes on."""
    series: Path | None = None
    unlisted: tuple[str, ...] = ()
    """Files in the folder that neither a manifest nor another record of featviz lists: no fault,
    but `--overwrite` would refuse them."""

    @property
    def is_whole(self) -> bool:
        """Whether all that the run calls complete is as it was written."""
        return not self.faults and not any(image.faults for image in self.images)


@dataclass(frozen=True)
class Verified:
    """What was found of several runs."""

    runs: tuple[RunVerdict, ...]

    @property
    def exit_code(self) -> int:
        """0 where all are whole, else 4."""
        return 0 if all(run.is_whole for run in self.runs) else CHECK_FAILED


def verify(
    roots: Sequence[Path | Url], jobs: int | None = None, progress: Progress = lambda total: None
) -> Verified:
    """Read every file of every image of runs, and hold it against its checksum.

    Args:
        roots: run directories, here or in object stores; a folder with the series of a training
            stands for the run of each of its steps.
        jobs: threads that read; None takes as many as Python thinks good.
    """
    with ExitStack() as copies, ThreadPoolExecutor(jobs, "featviz-verify") as pool:
        found = [run for root in roots for run in _found(copies.enter_context(here(root)), root)]
        total = sum(len(run.folders) for run in found)
        return Verified(tuple(run.verdict(pool, partial(progress, total)) for run in found))


def _found(root: Path, place: Path | Url) -> Iterator[_FoundRun]:
    """The run of a place, or those of the steps of a series; a step of which nothing is left is a
    fault of the series."""
    if root != place or (root / RUN_FILE).exists() or not read_steps(root):
        yield _FoundRun.of(root, place)
        return
    for step in step_folders(root).values():
        try:
            yield _FoundRun.of(step, step, root)
        except StoreError as error:
            yield _FoundRun(step, step, {}, faults=(error.message,), series=root)


@dataclass(frozen=True)
class _FoundRun:
    """A run whose images are still to be read."""

    root: Path
    """The run directory, or a copy of the one below a URL."""
    place: Path | Url
    folders: Mapping[str, str | None]
    """Of images, and what those that are not complete lack."""
    listed: Mapping[str, str] = field(default_factory=dict)
    """What run.json calls complete: names of images by their folders."""
    record: Mapping[str, Any] | None = None
    """The content of run.json, if that can be read."""
    faults: tuple[str, ...] = ()
    series: Path | None = None

    @classmethod
    def of(cls, root: Path, place: Path | Url, series: Path | None = None) -> _FoundRun:
        try:
            record, known = read_record(root)
        except StoreError as error:
            folders = dict(image_folders(root)) if root.is_dir() else {}
            if None not in folders.values():
                raise
            words = f"{error.message.replace(str(root), str(place))}; --resume writes it anew"
            return cls(root, place, folders, faults=(words,), series=series)
        listed = {safe_way(name): name for name in known.images.complete}
        return cls(root, place, dict(image_folders(root)), listed, record, series=series)

    def verdict(self, pool: ThreadPoolExecutor, advance: Callable[[], None]) -> RunVerdict:
        """Read the images, and hold run.json against them: its settings, and their number."""
        found, others, faults = [], [], list(self.faults)
        missing, unlisted = 0, list[str]()
        own = None if self.record is None else fingerprint(self.record)
        for verdict, drawn_by in pool.map(self._image, self.folders):
            found.append(verdict)
            others += [verdict.name] if own and drawn_by not in (None, own) else []
            advance()
        lost = [name for folder, name in self.listed.items() if folder not in self.folders]
        if others:
            names = listed([quoted(name) for name in others], _NAMED)
            words = f"{RUN_FILE} does not tell the settings by which these were drawn: {names}"
            faults.append(words)
        if self.record is not None:
            images = self.record["images"]
            named = len(images["complete"]) + len(self.record["failures"])
            named += len(images.get("missing", []))
            if "missing" in images and named != images["total"]:
                faults.append(f"{RUN_FILE} has images.total {images['total']}, and names {named}")
            missing = max(0, int(images["total"]) - len(found) - len(lost))
            unlisted = look(self.root).others if holds_run(self.root) else []
        faults += [f"{RUN_FILE} calls {quoted(n)} complete, its folder is missing" for n in lost]
        about = missing, self.series, tuple(unlisted)
        return RunVerdict(self.place, tuple(found), tuple(faults), *about)

    def _image(self, folder: str) -> tuple[ImageVerdict, str | None]:
        """What was found of an image, and the fingerprint of the settings by which it was drawn."""
        name, lacks = self.listed.get(folder), self.folders[folder]
        if lacks is not None:
            return ImageVerdict(name or folder, (f"{quoted(folder)}: {lacks}",)), None
        try:
            image = read_image(self.root, folder)
            faults = list(faults_of(image))
        except StoreError as error:
            return ImageVerdict(name or folder, (error.message,)), None
        if name is not None and image.name != name:
            faults.insert(0, f"{quoted(folder)} holds {quoted(image.name)}, not {quoted(name)}")
        rows = image.manifest.files
        size = sum(row.bytes for row in rows)
        verdict = ImageVerdict(name or image.name, tuple(faults), len(rows) + 1, size)
        return verdict, image.manifest.fingerprint


def faults_of(image: ReadImage) -> Iterator[str]:
    """The files of an image that are not what was written."""

    def where(name: str) -> str:
        return quoted(f"{image.folder}/{name}")

    with image.open(MANIFEST_FILE) as file:
        if not is_sealed(file.read(MOST_RECORD)):
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
