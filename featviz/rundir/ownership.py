"""Which files featviz wrote, so that `--overwrite` may remove them; all others must stay.
"Ours" below means: written by featviz.

A folder is ours if it holds a record with the fields that featviz always writes. A file
in it is ours if that record, or the manifest of an image, lists the file; if the file has
a hidden name, which a killed command has left; or, for a page or JUnit XML, if its first
bytes name featviz. The records here have fewer fields than those in `read.py`: a user
must be able to replace even a run that can no longer be read."""

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
"""A page or JUnit XML names featviz within this many of its first bytes."""
_LARGEST_RECORD = 2**28
"""The most bytes that a record may have."""
_Version = Annotated[int, Meta(ge=1)]
_LISTINGS = (AUDIT_FILE, DIFF_FILE, EXEMPLARS_FILE, REPORT_RECORD)
EVENTS = "events.out.tfevents."
"""How the names of TensorBoard's files begin. featviz never removes these."""
_LAYER_FILE = re.compile(
    rf"(\d{{3,}}_[^/]+/({'|'.join([*KINDS, 'kernel'])})([.-][^/]*)?|[^/]+__\d{{3,}}_[^/]+)"
    rf"\.({'|'.join(FORMATS)}|npy)"
)
"""The path of a layer's file in an image's folder: `004_conv1/output.png`, or without a
folder `cat__004_conv1.png`."""


class WrittenListing(msgspec.Struct):
    """The fields that the record of an audit, a comparison, exemplars or a report's folder
    always has."""

    schema_version: _Version
    featviz: str
    files: list[Any]


class WrittenManifest(msgspec.Struct):
    """The fields of a manifest by which it is recognised, and `captures`."""

    schema_version: _Version
    files: list[Any]
    image: dict[str, Any] = {}
    """Empty in the manifest of kernels."""
    captures: Any = None
    """Empty where no layer could be drawn."""


class WrittenSettings(msgspec.Struct):
    """The fields that run.json always has, for a run and for kernels."""

    schema_version: _Version
    featviz: str
    torch: str
    model: dict[str, Any]
    options: dict[str, Any]
    layers: list[Any]


class WrittenKernels(WrittenSettings):
    """The fields that the run.json of `featviz kernels` always has."""

    kind: Literal["kernels"]


class WrittenRun(WrittenSettings):
    """The fields that the run.json of a run always has."""

    images: dict[str, Any]
    failures: list[Any]
    kind: Literal["run"] = "run"
    """The run.json of a run has no `kind`, that of any other result has one."""


_RECORDS: dict[str, tuple[type[msgspec.Struct], ...]] = {
    **dict.fromkeys(_LISTINGS, (WrittenListing,)),
    MANIFEST_FILE: (WrittenManifest,),
    RUN_FILE: (WrittenRun, WrittenKernels),
}
"""The types that a record may have, by the name of its file."""


def record_of(root: Path, path: str) -> msgspec.Struct | None:
    """Read the record of a result, if featviz wrote it.

    Args:
        root: the folder of the result.
        path: the path of the record, relative to `root`, with forward slashes. Its last
            part is a key of `_RECORDS`.

    Returns:
        The record. None if there is no such file; if it cannot be read (damaged, a link,
        too large); or if it lacks a field that our records always have.
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
    """Whether a folder holds the run.json of a run, or of kernels."""
    return record_of(root, RUN_FILE) is not None


class Contents(NamedTuple):
    """The files below a folder, but for locks."""

    ours: list[str]
    """Paths of the files that featviz wrote, in the order in which they are removed:
    manifests and then records come last, since they tell which files are ours."""
    others: list[str]
    """Paths of all other files, but for TensorBoard's events."""
    drawn_images: int
    """How many complete images have a picture of some layer."""


def look(root: Path) -> Contents:
    """Sort the files below a folder into those that featviz wrote and all others.

    Args:
        root: the folder; one that does not exist counts as empty.
    """
    is_regular = {path: regular for path, regular in walk(root) if not is_lock(path)}
    listed = set[str]()
    for path in (*_LISTINGS, f"{REPORT}/{REPORT_RECORD}"):
        record = record_of(root, path)
        if isinstance(record, WrittenListing):
            listed |= {path, *_files(record, path)}
    drawn_images = 0
    # without a run.json, a manifest proves nothing: other programs have manifest.json
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
        # featviz writes only regular files: somebody else made a link with a listed name
        if regular and (path in listed or _is_marked_as_ours(root, path)):
            ours.append(path)
        elif not is_events(path):
            foreign.append(path)
    # if the removal is killed, the records that are left still tell which files are ours
    ours.sort(key=lambda path: (path in _RECORDS, path.endswith(f"/{MANIFEST_FILE}")))
    return Contents(ours, foreign, drawn_images)


def _manifest_at(root: Path, path: str) -> WrittenManifest | None:
    """The manifest at a path in a run directory. None if no manifest has this path, the
    file cannot be read, or it is the manifest of an image of another folder."""
    folder, _, name = path.rpartition("/")
    if name != MANIFEST_FILE:
        return None
    manifest = record_of(root, path)
    if not isinstance(manifest, WrittenManifest):
        return None
    # a manifest that was copied into another folder does not list the files there
    image = manifest.image.get("path", "")  # the manifest of kernels has no path
    if not isinstance(image, str) or safe_path(image) != folder:
        return None
    return manifest


def _files(record: WrittenListing | WrittenManifest, path: str) -> Iterator[str]:
    """The files that a record lists: paths relative to the folder of the result.

    Args:
        path: the path of the record, relative to the folder of the result.
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
    """Whether featviz gives files in an image's folder such a name.

    Args:
        inside: the path of a file, relative to the image's folder.
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
        # the folder is gone, or this user may not read it
        except OSError:
            continue
        inner = []
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inner.append(f"{folder}{entry.name}/")
            else:
                yield f"{folder}{entry.name}", entry.is_file(follow_symlinks=False)
        # the last of `waiting` is next; reversed, folders come in the order of their names
        waiting += reversed(inner)


# Single files


class FileKind(NamedTuple):
    """A kind of single file that featviz writes."""

    description: str
    """What the kind is called in messages."""
    head: bytes | None
    """Bytes by which such a file is recognised. They are among the first bytes of the
    file; of a zip file, among the first bytes of its index.html. None if files of this
    kind cannot be recognised, and so are never replaced."""


_GENERATOR = b'<meta name="generator" content="featviz'
PAGE = FileKind("page of featviz", _GENERATOR)
REPORT_ALONE = FileKind("report of featviz", _GENERATOR)
JUNIT = FileKind("JUnit XML of featviz", b'<testsuites name="featviz ')
# nothing in a list of channels names the program that wrote it
PRUNING = FileKind("file that says featviz wrote it", None)
_PAGES = {".html": PAGE, ".zip": PAGE, ".xml": JUNIT}
"""The kinds of files that are recognised by their first bytes, by the endings of their
names."""


def picture_of(command: str) -> FileKind:
    """The kind of the PNG that a command writes, recognised by their text chunk
    `Software`.

    Args:
        command: the name of the command, such as `look`.
    """
    return FileKind(
        f"picture that says featviz {command} drew it",
        b"Software\0featviz " + command.encode(),
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
    """Whether the first bytes of a file say that featviz wrote it, as a file of this
    kind. False if the file cannot be read."""
    try:
        return file_kind.head is not None and file_kind.head in _head(path)
    except _UNREADABLE:
        return False


def _head(path: Path) -> bytes:
    """The first bytes of a file; for a zip file, the first bytes of its `index.html`.

    Raises:
        One of `_UNREADABLE`.
    """
    with open_regular(path) as file:
        head = file.read(_HEAD)
        # every zip file that is not empty begins so
        if not head.startswith(b"PK"):
            return head
        with zipfile.ZipFile(file) as archive, archive.open(INDEX_FILE) as page:
            return page.read(_HEAD)


def _is_marked_as_ours(root: Path, path: str) -> bool:
    """Whether a file that no record lists is ours. This is so if the file, or a folder on
    the way to it, has a hidden name, which a killed command has left; or if its first
    bytes say so.

    Args:
        path: the path of the file, relative to `root`.
    """
    if any(map(is_hidden, path.split("/"))):
        return True
    file_kind = _PAGES.get(PurePosixPath(path).suffix)
    return file_kind is not None and is_of_kind(root / path, file_kind)
