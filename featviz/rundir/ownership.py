"""What featviz wrote: what `--overwrite` may remove, and what must stay.

A folder is ours if our record in it says what our writers always say. A file in it is
ours if that record, or the manifest of one of its images, lists it; if its hidden name
says that its command was killed; or, for a page or JUnit XML, if its head says so.
Records are not held against the schema of their readers: the owner of a run that cannot
be shown must be able to replace it."""

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
from featviz.text import safe_way

_HEAD = 1000
"""Bytes within which a file says who wrote it."""
_LARGEST_RECORD = 2**28
_Version = Annotated[int, Meta(ge=1)]
_LISTINGS = (AUDIT_FILE, DIFF_FILE, EXEMPLARS_FILE, REPORT_RECORD)
_EVENTS = "events.out.tfevents."
"""How the names of TensorBoard's files begin, which stay where they are."""
_LAYER_FILE = re.compile(
    rf"(\d{{3,}}_[^/]+/({'|'.join([*KINDS, 'kernel'])})([.-][^/]*)?|[^/]+__\d{{3,}}_[^/]+)"
    rf"\.({'|'.join(FORMATS)}|npy)"
)
"""A file of a layer in an image's folder."""


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


class CompleteImages(msgspec.Struct):
    """`images` of run.json, as far as it is always there."""

    complete: list[Any]


class WrittenRun(WrittenSettings):
    """What the run.json of a run always says."""

    images: CompleteImages
    failures: list[Any]
    kind: Literal["run"] = "run"
    """The run.json of a run has no `kind`; that of another result names its own."""


_RECORDS: dict[str, list[type[msgspec.Struct]]] = {
    AUDIT_FILE: [WrittenListing],
    DIFF_FILE: [WrittenListing],
    EXEMPLARS_FILE: [WrittenListing],
    REPORT_RECORD: [WrittenListing],
    MANIFEST_FILE: [WrittenManifest],
    RUN_FILE: [WrittenRun, WrittenKernels],
}
"""What a record of a name says: one of these."""


def record_of(root: Path, path: str) -> msgspec.Struct | None:
    """The record of a result, if it says what our records always say.

    Args:
        root: the folder of the result.
        path: of the record in it, with forward slashes. Its name is a key of `_RECORDS`.

    Returns:
        None where there is no such file, where it cannot be read (it is damaged, a
        link, too large), and where it is another program's.
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
    """What is in a folder; locks and TensorBoard's events are left out."""

    ours: list[str]
    """Paths of the files that featviz wrote, in the order in which they are to go:
    manifests and records last, by which the rest is known to be ours."""
    others: list[str]
    """Paths of all other files."""
    drawn_images: int
    """Complete images of which there is a picture of some layer."""


def look(root: Path) -> Contents:
    """Tell what is ours in a folder from what is not.

    Args:
        root: any folder; nothing is in one that does not exist.
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
    # killed on the way, --overwrite must still know what is ours
    ours.sort(key=lambda path: (path in _RECORDS, path.endswith(f"/{MANIFEST_FILE}")))
    return Contents(ours, foreign, drawn_images)


def _manifest_at(root: Path, path: str) -> WrittenManifest | None:
    """The manifest of an image; None where the path is not that of a manifest, or it
    names an image of another folder."""
    folder, _, name = path.rpartition("/")
    if name != MANIFEST_FILE:
        return None
    manifest = record_of(root, path)
    if not isinstance(manifest, WrittenManifest):
        return None
    # a manifest that was copied elsewhere says nothing of the files it lies beside
    image = manifest.image.get("path", "")  # none in the manifest of kernels
    if not isinstance(image, str) or safe_way(image) != folder:
        return None
    return manifest


def _files(record: WrittenListing | WrittenManifest, path: str) -> Iterator[str]:
    """The paths of the files that a record lists, by names or, in a manifest, by rows.

    Args:
        path: of the record.
    """
    folder = path.rpartition("/")[0]
    for row in record.files:
        file = row.get("file") if isinstance(row, dict) else row
        if isinstance(file, str):
            yield f"{folder}/{file}".lstrip("/")


def is_events(name: str) -> bool:
    """Whether a file is one of TensorBoard's."""
    return PurePosixPath(name).name.startswith(_EVENTS)


def is_own_name(inside: str) -> bool:
    """Whether a file in an image's folder has a name that featviz gives."""
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
    """What stands in its first bytes, or in those of its first page; None where nothing
    does."""


_GENERATOR = b'<meta name="generator" content="featviz'
PAGE = FileKind("page of featviz", _GENERATOR)
REPORT_ALONE = FileKind("report of featviz", _GENERATOR)
JUNIT = FileKind("JUnit XML of featviz", b'<testsuites name="featviz ')
PRUNING = FileKind("file that says featviz wrote it", None)  # lists of numbers do not
_PAGES = {".html": PAGE, ".zip": PAGE, ".xml": JUNIT}


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
    """Whether a file is one that featviz wrote, by its head; not where it cannot be
    read."""
    try:
        return file_kind.head is not None and file_kind.head in _head(path)
    except _UNREADABLE:
        return False


def _head(path: Path) -> bytes:
    """The first bytes of a file, or of the first page of a report that is a zip file."""
    with open_regular(path) as file:
        head = file.read(_HEAD)
        # as every zip file with something in it begins
        if not head.startswith(b"PK"):
            return head
        with zipfile.ZipFile(file) as archive, archive.open(INDEX_FILE) as page:
            return page.read(_HEAD)


def _says_so_itself(root: Path, path: str) -> bool:
    """Whether a file is ours by its name, where its command was killed, or by its
    head."""
    if any(map(is_hidden, path.split("/"))):
        return True
    file_kind = _PAGES.get(PurePosixPath(path).suffix)
    return file_kind is not None and is_of_kind(root / path, file_kind)
