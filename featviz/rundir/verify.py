"""Whether runs are whole: every file of every image is read and held against its manifest, and
these against run.json."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from featviz.errors import CHECK_FAILED, StoreError
from featviz.files.urls import Url
from featviz.rundir import MANIFEST_FILE, RUN_FILE
from featviz.rundir.image import ReadImage, read_image
from featviz.rundir.place import holds_run, look
from featviz.rundir.read import ReadRun, image_folders, read_run
from featviz.rundir.schema import MOST_RECORD, fingerprint
from featviz.rundir.store import here
from featviz.rundir.studies import read_steps, step_folders
from featviz.text import listed, quoted

Progress = Callable[[int], None]
"""Called after each image with how many there are in all."""
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')
"""How a manifest ends: with the checksum of all that stands before."""
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
        found: list[tuple[Path | Url, Path | None, ReadRun | str]] = []
        for place in roots:
            root = copies.enter_context(here(place))
            if root != place or (root / RUN_FILE).exists() or not read_steps(root):
                found.append((place, None, _read(root, place)))
            else:
                steps = step_folders(root).values()
                found += [(step, root, _read(step, step, is_step=True)) for step in steps]
        total = sum(len(run.images) for _, _, run in found if isinstance(run, ReadRun))
        advance = partial(progress, total)
        return Verified(tuple(_verdict(*one, pool, advance) for one in found))


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
    place: Path | Url,
    series: Path | None,
    run: ReadRun | str,
    pool: ThreadPoolExecutor,
    advance: Callable[[], None],
) -> RunVerdict:
    """Read the images, and hold run.json against them: its settings, and their number."""
    if isinstance(run, str):
        return RunVerdict(place, (), (run,), 0, series)
    lacking = {name: f"{quoted(name)}: {words}" for name, words in run.incomplete.items()}
    lacking.update(run.damaged)
    images = [ImageVerdict(name, (words,)) for name, words in lacking.items()]
    faults, others, own = list[str](), list[str](), fingerprint(run.record)
    checked = pool.map(_checked, run.images.values())
    for image, verdict in zip(run.images.values(), checked, strict=True):
        images.append(verdict)
        if image.manifest.fingerprint not in (None, own):
            others.append(quoted(image.name))
        advance()
    if others:
        names = listed(others, _NAMED)
        faults.append(f"{RUN_FILE} does not tell the settings by which these were drawn: {names}")
    record = run.record["images"]
    total, missing = int(record["total"]), record.get("missing")
    named = len(record["complete"]) + len(run.record["failures"]) + len(missing or ())
    if missing is not None and named != total:
        faults.append(f"{RUN_FILE} has images.total {total}, and names {named}")
    unlisted = look(run.root)[1] if holds_run(run.root) else []
    left = max(0, total - len(images))
    return RunVerdict(place, tuple(images), tuple(faults), left, series, tuple(unlisted))


def _checked(image: ReadImage) -> ImageVerdict:
    """What is found of an image that seems whole, by its checksums."""
    try:
        found = read_image(image.root, image.folder)  # with the checksums, which a run lets go
        faults = tuple(faults_of(found))
    except StoreError as error:
        return ImageVerdict(image.name, (error.message,))
    rows = found.manifest.files
    return ImageVerdict(image.name, faults, len(rows) + 1, sum(row.bytes for row in rows))


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
