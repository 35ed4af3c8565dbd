"""Reads run directories, for all commands. A run directory may come from anybody: an image
that does not fit its manifest is left out, and named in a message. Nothing here needs
torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from featviz.errors import StoreError
from featviz.files.urls import Url
from featviz.rundir import INPUT_FILE, MANIFEST_FILE, RUN_FILE, STATS_FILE, schema
from featviz.rundir.folder import is_hidden
from featviz.rundir.image import ReadImage, read_image
from featviz.rundir.schema import Count, Reason, Text
from featviz.text import counted, quoted, safe_path

log = logging.getLogger(__name__)

DEEPEST = 100
"""How many folders deep images are looked for."""
_MOST_NAMED = 20
"""How many incomplete images are named in warnings."""


@dataclass(frozen=True)
class Images:
    """`images` of run.json."""

    total: Count
    complete: list[Text]
    missing: list[Text] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """A row of `failures`."""

    image: Text
    error: Reason
    number: Count | None = None
    """The number of the image among all images, from 0; None in run.json."""


@dataclass(frozen=True)
class RunRecord:
    """The entries of run.json that featviz reads; others may be there."""

    images: Images
    failures: list[Failure]
    featviz: Text | None = None
    torch: Text | None = None
    torchvision: Text | None = None
    device: Text | None = None
    model: dict[Text, Any] | None = None
    preprocessing: Text | None = None
    layers: list[Text] | None = None
    options: dict[Text, Any] | None = None


@dataclass(frozen=True)
class ReadRun:
    """What was read of a run directory. The images are in the order of the run."""

    root: Path
    record: Mapping[str, Any]
    """The content of run.json; its entries that `RunRecord` names have these types."""
    images: Mapping[str, ReadImage]
    """Complete images, by name."""
    incomplete: Mapping[str, str]
    """The incomplete images, each with what is missing: their run was killed, or only
    some of their files were copied. By name; an image without a known name, by folder."""
    damaged: Mapping[str, str]
    """The images whose manifest or files do not fit, each with the reason. By name; an
    image without a known name, by folder."""
    url: Url | None = None
    """The URL that the user named, if `root` is a copy of a run in a store."""

    @property
    def location(self) -> Path | Url:
        """What the user named: the folder, or the URL."""
        return self.url or self.root

    @property
    def failures(self) -> dict[str, str]:
        """The errors of images that failed, by name."""
        return {row["image"]: row["error"] for row in self.record["failures"]}

    @property
    def left_out(self) -> dict[str, str]:
        """The incomplete and the damaged images, sorted by name, each with the reason why
        it is left out."""
        return dict(sorted({**self.incomplete, **self.damaged}.items()))

    @property
    def missing(self) -> int:
        """How many images of the run are neither complete, nor failed, nor left out: the
        run has not come to them."""
        known = len(self.images) + len(self.failures) + len(self.left_out)
        return max(0, int(self.record["images"]["total"]) - known)


def read_record(root: Path) -> RunRecord:
    """The run.json of a run directory.

    Raises:
        StoreError: it is missing, does not fit, or is of another command.
    """
    return _checked(root, schema.read_json(root / RUN_FILE))


def _checked(root: Path, content: Mapping[str, Any]) -> RunRecord:
    """The content of the run.json in `root` as a record.

    Raises:
        StoreError: another command wrote it, such as `kernels`, or it does not fit.
    """
    result = content.get("kind", "run")
    if result != "run":
        raise StoreError(
            f"{quoted(root)} holds {quoted(result)}, not the feature maps of a run",
            "give a folder that featviz run wrote",
        )
    try:
        record: RunRecord = schema.convert(content, RunRecord)
    except ValueError as error:
        raise StoreError(f"{quoted(root / RUN_FILE)}: {error}") from error
    return record


def read_run(root: Path, keep_stats: bool = False) -> ReadRun:
    """Read a run directory: run.json and all manifests. The other files are compared with
    the manifests, as `read_image` does.

    Args:
        root: the run directory.
        keep_stats: whether the statistics of all images stay in memory.

    Returns:
        The run. An image that cannot be used is no error: it is in `incomplete` or in
        `damaged`.

    Raises:
        StoreError: run.json is missing, cannot be read, or is of another command.
    """
    content = schema.read_json(root / RUN_FILE)
    listed_names = _checked(root, content).images.complete
    names = {safe_path(name): name for name in listed_names}  # by folder
    images = {}
    incomplete = {}
    damaged = {}
    for folder, reason in image_folders(root):
        name = names.get(folder, folder)
        if reason is not None:
            incomplete[name] = reason
            continue
        try:
            image = _image_of(root, folder, keep_stats)
        except StoreError as error:
            damaged[name] = error.message
        else:
            images[image.name] = image
    # If a run was killed between two writes of run.json, it has more images than run.json
    # names. If somebody removed folders, it has fewer.
    positions = {name: number for number, name in enumerate(listed_names)}
    for name in positions.keys() - images.keys() - incomplete.keys() - damaged.keys():
        incomplete[name] = "run.json calls it complete, its folder is missing"

    def in_run(name: str) -> tuple[int, list[str]]:
        """The key that sorts images in the order of the run. Images that run.json does
        not name come last, in the order of their paths."""
        return positions.get(name, len(positions)), name.split("/")

    return ReadRun(
        root=root,
        record=content,
        images={name: images[name] for name in sorted(images, key=in_run)},
        incomplete=dict(sorted(incomplete.items())),
        damaged=damaged,
    )


def _image_of(root: Path, folder: str, keep_stats: bool) -> ReadImage:
    """Read the image in a folder of a run.

    Args:
        root: the run directory.
        folder: the image's folder in it, a relative path.
        keep_stats: whether the image's statistics stay in memory.

    Raises:
        StoreError: the image cannot be read, or its folder has the name of another image.
    """
    image = read_image(root, folder, keep_stats)
    if safe_path(image.name) != folder:
        raise StoreError(
            f"{quoted(folder)}/{MANIFEST_FILE}: image.path is {quoted(image.name)},"
            f" expected {quoted(folder)!r}"
        )
    # The rows of `files` are dropped: a long run has millions, and nothing reads them
    # after `read_image` has compared them with the files.
    return replace(image, manifest=replace(image.manifest, files=[]))


def warn_of(images: Mapping[str, str], before: str = "", behind: str = "") -> None:
    """Warn of incomplete images: a line for each of the first ones, and a line with the
    number of the rest.

    Args:
        images: what is missing of each image, by name.
        before: the beginning of each line, such as `base: `.
        behind: the end of each line, such as `, and left out`.
    """
    for name, reason in islice(images.items(), _MOST_NAMED):
        log.warning("%s%s is incomplete (%s)%s", before, name, reason, behind)
    rest = len(images) - _MOST_NAMED
    if rest > 0:
        log.warning(
            "%s%s more are incomplete%s", before, counted(rest, "image"), behind
        )


def image_folders(root: Path) -> Iterator[tuple[str, str | None]]:
    """Find the folders of complete and incomplete images, up to DEEPEST folders deep.
    Links are not followed.

    A folder without a manifest is an incomplete image if it has an input.png, a stats.npz,
    or a hidden file, which a killed run has left.

    Yields:
        The folder, relative to the run directory, and what is missing in it; None instead
        if it has a manifest.
    """
    for path, folders, files in os.walk(root):
        folder = Path(path).relative_to(root).as_posix()
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        has_manifest = MANIFEST_FILE in files
        is_begun = INPUT_FILE in files or STATS_FILE in files
        is_begun = is_begun or any(map(is_hidden, files))
        # the run directory itself is not an image; kernels have a manifest there
        is_image = folder != "." and (has_manifest or is_begun)
        if is_image:
            yield folder, None if has_manifest else f"it has no {MANIFEST_FILE}"
        if is_image or folder.count("/") >= DEEPEST:
            folders.clear()  # os.walk goes no deeper
