"""Whether runs are whole: every file of every image is read and held against its manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from featviz.errors import CHECK_FAILED, StoreError
from featviz.files.urls import Url
from featviz.rundir import MANIFEST_FILE, RUN_FILE
from featviz.rundir.image import ReadImage, read_image
from featviz.rundir.read import image_folders, read_record
from featviz.rundir.schema import MOST_RECORD
from featviz.rundir.series import read_steps, step_folders
from featviz.rundir.store.fetch import check_run, files_here
from featviz.rundir.store.listing import StoredTree
from featviz.rundir.store.objects import ObjectStore
from featviz.rundir.sums import is_sealed, sum_of
from featviz.text import quoted, safe_way

Progress = Callable[[int], None]
"""Called after each image with how many there are in all."""


@dataclass(frozen=True)
class ImageVerdict:
    """What was found of one image."""

    name: str
    """By run.json; where it does not list the image, by the manifest, or else by the folder."""
    faults: tuple[str, ...] = ()
    """What does not fit, with the file; none where it is whole."""
    files: int = 0
    """Files that were read."""
    bytes: int = 0
    summed: bool = True
    """Whether its manifest has checksums; those of schema version 1 have none."""


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
    """The series of which it is a step."""

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

    Raises:
        StoreError: one of the places is no run.
    """
    found = [run for root in roots for run in _found(root)]
    total = sum(len(run.folders) for run in found)
    with ThreadPoolExecutor(jobs, "featviz-verify") as pool:
        return Verified(tuple(run.verdict(pool, partial(progress, total)) for run in found))


def _found(root: Path | Url) -> Iterator[_FoundRun]:
    """The run of a place, or those of the steps of a series."""
    if isinstance(root, Path) and not (root / RUN_FILE).exists() and read_steps(root):
        yield from (_FoundRun.of_step(step, root) for step in step_folders(root).values())
    else:
        yield _FoundRun.of(root)


_Scanned: TypeAlias = Callable[[Mapping[str, str]], dict[str, str | None]]
"""Finds the folders of images, given those that run.json lists, with what each lacks."""
_Opened: TypeAlias = Callable[[str], AbstractContextManager[Path]]
"""Gives the run directory in which the image of a folder can be read."""


def _opened_in(root: Path) -> _Opened:
    return lambda folder: nullcontext(root)


@dataclass(frozen=True)
class _FoundRun:
    """A run whose images are still to be read."""

    root: Path | Url
    opened: _Opened
    folders: dict[str, str | None]
    """Of images, and what those that are not complete lack."""
    listed: dict[str, str]
    """What run.json calls complete: names of images by their folders."""
    total: int
    faults: tuple[str, ...]
    series: Path | None = None

    @classmethod
    def of_step(cls, place: Path, series: Path) -> _FoundRun:
        """The run of a step; one of which nothing is left is a fault of the series."""
        try:
            return replace(cls.of(place), series=series)
        except StoreError as error:
            return cls(place, _opened_in(place), {}, {}, 0, (error.message,), series)

    @classmethod
    def of(cls, place: Path | Url) -> _FoundRun:
        if isinstance(place, Path):

            def scanned(listed: Mapping[str, str]) -> dict[str, str | None]:
                return dict(image_folders(place, listed)) if place.is_dir() else {}

            return cls._read(place, place, scanned, _opened_in(place))
        store = ObjectStore(place)
        tree = StoredTree.of(store.sizes())
        check_run(place, tree)

        def brought(folder: str) -> AbstractContextManager[Path]:
            return files_here(store, tree.files_of(folder))

        with files_here(store, tree.run_files) as root:
            return cls._read(place, root, tree.folders, brought)

    @classmethod
    def _read(cls, place: Path | Url, root: Path, scanned: _Scanned, opened: _Opened) -> _FoundRun:
        try:
            _, record = read_record(root)
        except StoreError as error:
            folders = scanned({})
            if not any(reason is None for reason in folders.values()):
                raise
            words = error.message.replace(str(root), str(place))
            return cls(place, opened, folders, {}, 0, (f"{words}; --resume writes it anew",))
        listed = {safe_way(name): name for name in record.images.complete}
        return cls(place, opened, scanned(listed), listed, record.images.total, ())

    def verdict(self, pool: ThreadPoolExecutor, advance: Callable[[], None]) -> RunVerdict:
        images = []
        for verdict in pool.map(self._image, self.folders):
            images.append(verdict)
            advance()
        lost = [self.listed[way] for way in self.listed if way not in self.folders]
        faults = [
            f"{RUN_FILE} calls {quoted(name)} complete, its folder is missing" for name in lost
        ]
        missing = max(0, self.total - len(images) - len(lost))
        faults = [*self.faults, *faults]
        return RunVerdict(self.root, tuple(images), tuple(faults), missing, self.series)

    def _image(self, folder: str) -> ImageVerdict:
        name, lacks = self.listed.get(folder), self.folders[folder]
        if lacks is not None:
            return ImageVerdict(name or folder, (f"{quoted(folder)}: {lacks}",))
        try:
            with self.opened(folder) as root:
                return _verdict(read_image(root, folder), folder, name)
        except StoreError as error:
            return ImageVerdict(name or folder, (error.message,))


def _verdict(image: ReadImage, folder: str, name: str | None) -> ImageVerdict:
    faults = list(faults_of(image))
    if name is not None and image.name != name:
        faults.insert(0, f"{quoted(folder)} holds {quoted(image.name)}, not {quoted(name)}")
    sizes = [row.bytes for row in image.manifest.files or ()]
    summed = image.manifest.files is not None
    return ImageVerdict(name or image.name, tuple(faults), len(sizes) + 1, sum(sizes), summed)


def faults_of(image: ReadImage) -> Iterator[str]:
    """The files of an image that are not what was written; nothing where its manifest has no
    checksums (schema version 1)."""
    if image.manifest.files is None:
        return
    with image.open(MANIFEST_FILE) as file:
        if not is_sealed(file.read(MOST_RECORD)):
            yield f"{_where(image, MANIFEST_FILE)} is not as it was written"
    for row in image.manifest.files:
        try:
            with image.open(row.file) as file:
                found = sum_of(file).sha256
        except (StoreError, OSError) as error:
            yield f"{_where(image, row.file)} cannot be read: {quoted(str(error))}"
            continue
        if found != row.sha256:
            yield f"{_where(image, row.file)} has SHA-256 {found[:12]}…, not {row.sha256[:12]}…"


def _where(image: ReadImage, name: str) -> str:
    return quoted(f"{image.folder}/{name}")
