"""What featviz wrote: what `--overwrite` may remove, and what must stay.

A folder is ours if our record in it says what our writers always say. A file in it is
ours if that record, or the manifest of one of its images, lists it; if its hidden name
says that its command was killed; or, for a page or JUnit XML, if its head says so.
The records here have fewer fields than those of the readers: the owner of a run that
cannot be shown must be able to replace it."""

from __future__ import annotations

import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from featviz.errors import FileError
from featviz.files import ReadFolder, open_regular
from featviz.records import FORMATS, KINDS
from featviz.rundir import (
    AUDIT_FILE,
    DIFF_FILE,
    EXEMPLARS_FILE,
    INDEX_FILE,
    INPUT_FILE,
    MANIFEST_FILE,
    REPORT,
    REPORT_RECORD,
    RUN_FILE,
    STATS_FILE,
)
from featviz.rundir.folder import is_hidden
from featviz.rundir.locks import is_lock
from featviz.text import safe_path

_HEAD = 1000
"""Bytes within which a file says who wrote it."""
_LARGEST_RECORD = 2**28
"""Bytes of a record."""
_Version = Annotated[int, Meta(ge=1)]
_LISTINGS = (AUDIT_FILE, DIFF_FILE, EXEMPLARS_FILE, REPORT_RECORD)
EVENTS = "events.out.tfevents."
"""How the names of TensorBoard's files begin, which are left alone."""
_LAYER_FILE = re.compile(
    rf"(\d{{3,}}_[^/]+/({'|'.join([*KINDS, 'kernel'])})([.-][^/]*)?|[^/]+__\d{{3,}}_[^/]+)"
    rf"\.({'|'.join(FORMATS)}|npy)"
)
"""The path of a layer's file in an image's folder: `004_conv1/output.png`, or without a
folder `cat__004_conv1.png`."""


class WrittenListing(msgspec.Struct):
    """What the record of an audit, a comparison, exemplars or a report's folder always
    says."""

    schema_version: _Version
    featviz: str
    files: list[Any]


class WrittenManifest(msgspec.Struct):
    """What a manifest always says."""

    schema_version: _Version
    files: list[Any]
    image: dict[str, Any] = {}
    """Empty in that of kernels."""
    captures: Any = None
    """Empty where no layer could be drawn."""


class WrittenSettings(msgspec.Struct):
    """What run.json always says, whatever was drawn."""

    schema_version: _Version
    featviz: str
    torch: str
    model: dict[str, Any]
    options: dict[str, Any]
    layers: list[Any]


class WrittenKernels(WrittenSettings):
    """What the run.json of `featviz kernels` always says."""

    kind: Literal["kernels"]


class WrittenRun(WrittenSettings):
    """What the run.json of a run always says."""

    images: dict[str, Any]
    failures: list[Any]
    kind: Literal["run"] = "run"
    """The run.json of a run has no `kind`; that of another result names its own."""


_RECORDS: dict[str, tuple[type[msgspec.Struct], ...]] = {
    **dict.fromkeys(_LISTINGS, (WrittenListing,)),
    MANIFEST_FILE: (WrittenManifest,),
    RUN_FILE: (WrittenRun, WrittenKernels),
}
"""What a record says, by its file's name: one of these."""


def record_of(root: Path, path: str) -> msgspec.Struct | None:
    """Read the record of a result, if featviz wrote it.

    Args:
        root: the folder of the result.
        path: of the record in it, with forward slashes. Its last part is a key of
            `_RECORDS`.

    Returns:
        The record; None where there is no such file, it cannot be read (it is damaged,
        a link, too large), or does not say what our records always say.
    """
    folder, _, name = path.rpartition("/")
    try:
        with ReadFolder.below(root, folder) as opened:
            content = opened.read_json(name, _LARGEST_RECORD)
    except (OSError, FileError):
        return None
    for record_type in _RECORDS[name]:
        with suppress(msgspec.ValidationError):
            return msgspec.convert(content, record_type)
    return None


def holds_run(root: Path) -> bool:
    """Whether a folder holds a run, or kernels, by its run.json alone."""
    return record_of(root, RUN_FILE) is not None


class Contents(NamedTuple):
    """The files below a folder, but for locks."""

    ours: list[str]
    """Paths of the files that featviz wrote, in the order in which they are to be
    removed: manifests and then records come last, since they tell what is ours."""
    others: list[str]
    """Paths of all other files, but for TensorBoard's events."""
    drawn_images: int
    """How many complete images have a picture of some layer."""


def look(root: Path) -> Contents:
    """Tell the files below a folder that featviz wrote from those that it did not.

    Args:
        root: any folder; one that does not exist counts as empty.
    """
    is_regular = {path: regular for path, regular in walk(root) if not is_lock(path)}
    listed = set[str]()
    for path in (*_LISTINGS, f"{REPORT}/{REPORT_RECORD}"):
        record = record_of(root, path)
        if isinstance(record, WrittenListing):
            listed |= {path, *_files(record, path)}
    drawn_images = 0
    # a manifest alone proves nothing: other programs have files of this name
    if holds_run(root):
        listed.add(RUN_FILE)
        for path in is_regular:
            manifest = _manifest_at(root, path)
            if manifest is not None:
                listed |= {path, *_files(manifest, path)}
                drawn_images += manifest.captures != []
    ours = []
    foreign = []
    for path, regular in is_regular.items():
        # featviz writes regular files alone: a link with a listed name is somebody's
        if regular and (path in listed or _says_so_itself(root, path)):
            ours.append(path)
        elif not is_events(path):
            foreign.append(path)
    # Where the removal is killed, the records that are left still tell what is ours.
    ours.sort(key=lambda path: (path in _RECORDS, path.endswith(f"/{MANIFEST_FILE}")))
    return Contents(ours, foreign, drawn_images)


def _manifest_at(root: Path, path: str) -> WrittenManifest | None:
    """The manifest at a path in a run directory; None where the path is not that of a
    manifest, the file cannot be read, or it is of an image of another folder."""
    folder, _, name = path.rpartition("/")
    if name != MANIFEST_FILE:
        return None
    manifest = record_of(root, path)
    if not isinstance(manifest, WrittenManifest):
        return None
    # a manifest that was copied elsewhere says nothing of the files it lies beside
    image = manifest.image.get("path", "")  # none in the manifest of kernels
    if not isinstance(image, str) or safe_path(image) != folder:
        return None
    return manifest


def _files(record: WrittenListing | WrittenManifest, path: str) -> Iterator[str]:
    """The files that a record lists: paths relative to the folder of the result.

    Args:
        path: of the record, relative to the same folder.
    """
    folder = path.rpartition("/")[0]
    # a manifest has an object for each file, the other records its name
    for row in record.files:
        file = row.get("file") if isinstance(row, dict) else row
        if isinstance(file, str):
            yield f"{folder}/{file}".lstrip("/")


def is_events(name: str) -> bool:
    """Whether a file is one of TensorBoard's."""
    return PurePosixPath(name).name.startswith(EVENTS)


def is_own_name(inside: str) -> bool:
    """Whether featviz gives a file in an image's folder this name.

    Args:
        inside: its path relative to that folder.
    """
    if inside in (MANIFEST_FILE, STATS_FILE, INPUT_FILE):
        return True
    return _LAYER_FILE.fullmatch(inside) is not None


def walk(root: Path) -> Iterator[tuple[str, bool]]:
    """All files below a folder, sorted by name within each folder, the files of a folder
    before those of the folders in it. Folders that cannot be read are left out.

    Yields:
        The path relative to `root`, and whether it is a regular file: False for links,
        devices and the like.
    """
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(root / folder) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        # it is gone, or closed to this user: nothing in it can be removed
        except OSError:
            continue
        inner = []
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inner.append(f"{folder}{entry.name}/")
            else:
                yield f"{folder}{entry.name}", entry.is_file(follow_symlinks=False)
        # the last one waiting is next: in order of names, they wait in reverse
        waiting += reversed(inner)


# Single files


class FileKind(NamedTuple):
    """A kind of single file that featviz writes."""

    description: str
    """For messages."""
    head: bytes | None
    """Bytes that are among its first ones, or those of the first page of a zip file.
    None: no earlier file is recognised, and so none is replaced."""


_GENERATOR = b'<meta name="generator" content="featviz'
PAGE = FileKind("page of featviz", _GENERATOR)
REPORT_ALONE = FileKind("report of featviz", _GENERATOR)
JUNIT = FileKind("JUnit XML of featviz", b'<testsuites name="featviz ')
# a list of channels says nothing of who wrote it
PRUNING = FileKind("file that says featviz wrote it", None)
_PAGES = {".html": PAGE, ".zip": PAGE, ".xml": JUNIT}
"""Files that say themselves that featviz wrote them, by the endings of their names."""


def picture_of(command: str) -> FileKind:
    """A PNG that a command wrote, by its text chunk `Software`."""
    return FileKind(
        f"picture of featviz {command}", b"Software\0featviz " + command.encode()
    )


_UNREADABLE = (
    FileError,
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    EOFError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""What zipfile raises on files that are broken, encrypted, or no archives."""


def is_of_kind(path: Path, file_kind: FileKind) -> bool:
    """Whether featviz wrote a file as one of this kind, by its first bytes; False where
    it cannot be read."""
    try:
        return file_kind.head is not None and file_kind.head in _head(path)
    except _UNREADABLE:
        return False


def _head(path: Path) -> bytes:
    """The first bytes of a file; of a zip file, those of the `index.html` in it.

    Raises:
        One of `_UNREADABLE`.
    """
    with open_regular(path) as file:
        head = file.read(_HEAD)
        # as every zip file with something in it begins
        if not head.startswith(b"PK"):
            return head
        with zipfile.ZipFile(file) as archive, archive.open(INDEX_FILE) as page:
            return page.read(_HEAD)


def _says_so_itself(root: Path, path: str) -> bool:
    """Whether a file that no record lists is ours: its name, or that of a folder of it,
    is hidden, as where a command was killed; or its first bytes say so.

    Args:
        path: of the file, relative to `root`.
    """
    if any(map(is_hidden, path.split("/"))):
        return True
    file_kind = _PAGES.get(PurePosixPath(path).suffix)
    return file_kind is not None and is_of_kind(root / path, file_kind)
