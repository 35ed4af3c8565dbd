"""Run directories, read back: the one reader of all commands. A run directory comes
from anywhere: an image that does not fit is left out and named. Nothing here needs
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
from featviz.text import counted, quoted, safe_way

log = logging.getLogger(__name__)

DEEPEST, _MOST_NAMED = 100, 20
"""Folders inside one another in which images are looked for; images that warnings name.
"""


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
    """Its number among all images, from 0, where that is told."""


@dataclass(frozen=True)
class RunRecord:
    """run.json, as far as it is looked at."""

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
    """A run directory; images in the order of the run."""

    root: Path
    record: Mapping[str, Any]
    """The content of run.json; what `schema.RunRecord` names of it fits."""
    images: Mapping[str, ReadImage]
    incomplete: Mapping[str, str]
    """Images without a manifest, by name, or folder where no name is known, and what is
    missing: their run was killed, or they were copied in part."""
    damaged: Mapping[str, str]
    """Images with a manifest that does not fit, or that their files do not fit; and
    why."""
    url: Url | None = None
    """Where the user finds it, if `root` is a copy."""

    @property
    def place(self) -> Path | Url:
        """Where the user finds it."""
        return self.url or self.root

    @property
    def failures(self) -> dict[str, str]:
        """Images that failed, with what was said of each."""
        return {row["image"]: row["error"] for row in self.record["failures"]}

    @property
    def left_out(self) -> dict[str, str]:
        """All images that are not whole, sorted, and why."""
        return dict(sorted({**self.incomplete, **self.damaged}.items()))

    @property
    def missing(self) -> int:
        """Images that the run was to have and that it neither has nor names."""
        known = len(self.images) + len(self.failures) + len(self.left_out)
        return max(0, int(self.record["images"]["total"]) - known)


def read_record(root: Path) -> RunRecord:
    """What run.json of a run directory says; StoreError where it is none of a run."""
    return _checked(root, schema.read_json(root / RUN_FILE))


def _checked(root: Path, record: Mapping[str, Any]) -> RunRecord:
    if (kind := record.get("kind", "run")) != "run":
        raise StoreError(
            f"{quoted(str(root))} holds {quoted(str(kind))}, not the feature maps of"
            " a run",
            "give a folder that featviz run wrote",
        )
    try:
        known: RunRecord = schema.convert(record, RunRecord)
    except ValueError as error:
        raise StoreError(f"{quoted(str(root / RUN_FILE))}: {error}") from error
    return known


def read_run(root: Path, hold: bool = False) -> ReadRun:
    """Read a run directory: run.json, all manifests, and of all other files whether
    they fit; with `hold` all statistics are kept in memory."""
    record = schema.read_json(root / RUN_FILE)
    known = _checked(root, record)
    folders = {safe_way(name): name for name in known.images.complete}
    images: dict[str, ReadImage] = {}
    incomplete: dict[str, str] = {}
    damaged: dict[str, str] = {}
    for folder, reason in image_folders(root):
        name = folders.get(folder, folder)
        if reason is not None:
            incomplete[name] = reason
            continue
        try:
            image = read_image(root, folder, keep_stats=hold)
            if safe_way(image.name) != folder:
                words = (
                    f"image.path is {quoted(image.name)}, expected {quoted(folder)!r}"
                )
                raise StoreError(f"{quoted(folder)}/{MANIFEST_FILE}: {words}")
        except StoreError as error:
            damaged[name] = error.message
        else:
            # its files have been compared with those that are there
            images[image.name] = replace(
                image, manifest=replace(image.manifest, files=[])
            )
    listed = {name: n for n, name in enumerate(known.images.complete)}
    for name in listed.keys() - images.keys() - incomplete.keys() - damaged.keys():
        incomplete[name] = "run.json calls it complete, its folder is missing"
    order = sorted(
        images, key=lambda name: (listed.get(name, len(listed)), name.split("/"))
    )
    ordered = {name: images[name] for name in order}
    return ReadRun(root, record, ordered, dict(sorted(incomplete.items())), damaged)


def warn_of(images: Mapping[str, str], before: str = "", behind: str = "") -> None:
    """Warn of images that are not whole, and what each lacks: of the first ones by
    name, with words around each line, and how many more there are."""
    for name, reason in islice(images.items(), _MOST_NAMED):
        log.warning("%s%s is incomplete (%s)%s", before, name, reason, behind)
    if (more := len(images) - _MOST_NAMED) > 0:
        log.warning(
            "%s%s more are incomplete%s", before, counted(more, "image"), behind
        )


def image_folders(root: Path) -> Iterator[tuple[str, str | None]]:
    """Folders of images, relative to the run directory, and what those that are not
    whole lack.

    Images may lie in folders of their own. A folder with the model's input, with
    statistics, or with a file that was being written, but without a manifest, is
    incomplete. Links are not followed."""
    for path, folders, names in os.walk(root):
        here = Path(path).relative_to(root).as_posix()
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        whole = MANIFEST_FILE in names
        begun = not {INPUT_FILE, STATS_FILE}.isdisjoint(names) or any(
            map(is_hidden, names)
        )
        if here != "." and (whole or begun):
            yield here, None if whole else f"it has no {MANIFEST_FILE}"
            folders.clear()
        elif here.count("/") >= DEEPEST:
            folders.clear()
