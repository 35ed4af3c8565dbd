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
_EVENTS = "events.out.tfevents."
"""How the names of TensorBoard's files begin, which stay where they are."""
_LAYER_FILE = re.compile(
    rf"(\d{{3,}}_[^/]+/({'|'.join([*KINDS, 'kernel'])})([.-][^/]*)?|[^/]+__\d{{3,}}_[^/]+)"
    rf"\.({'|'.join(FORMATS)}|npy)"
)
"""A file of a layer in an image's folder."""


class _Listing(msgspec.Struct):
    """What the record of an audit, a comparison, exemplars or a report's folder always
    says."""

    schema_version: _Version
    featviz: str
    files: list[Any]


class _ImageRecord(msgspec.Struct):
    """What a manifest always says."""

    schema_version: _Version
    files: list[Any]
    image: dict[str, Any] = {}


class _RunRecord(msgspec.Struct):
    """What run.json always says; `kind` is only in that of kernels."""

    schema_version: _Version
    featviz: str
    torch: str
    model: dict[str, Any]
    options: dict[str, Any]
    layers: list[Any]
    kind: Literal["kernels"] | msgspec.UnsetType = msgspec.UNSET
    images: dict[str, Any] = {}
    failures: list[Any] | msgspec.UnsetType = msgspec.UNSET


_RECORDS: dict[str, Any] = {
    **dict.fromkeys((AUDIT_FILE, DIFF_FILE, EXEMPLARS_FILE, REPORT_RECORD), _Listing),
    MANIFEST_FILE: _ImageRecord,
    RUN_FILE: _RunRecord,
}


def record_of(root: Path, name: str) -> Any:
    """The record of this name in a folder, if it says what our records always say; None
    where it is another program's, or cannot be read."""
    folder, _, file = name.rpartition("/")
    try:
        with ReadFolder.below(root, folder) as opened:
            content = opened.read_json(file, _LARGEST_RECORD)
        record = msgspec.convert(content, _RECORDS[file])
    except (OSError, FileError, msgspec.ValidationError):
        return None
    if isinstance(record, _RunRecord) and record.kind is msgspec.UNSET:
        is_run = isinstance(record.images.get("complete"), list)
        return record if is_run and record.failures is not msgspec.UNSET else None
    return record


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
    complete_images: int


def look(root: Path) -> Contents:
    """Tell what is ours in a folder from what is not."""
    files = {path: regular for path, regular in walk(root) if not is_lock(path)}
    listed = set[str]()
    for name in (
        AUDIT_FILE,
        DIFF_FILE,
        EXEMPLARS_FILE,
        REPORT_RECORD,
        f"{REPORT}/{REPORT_RECORD}",
    ):
        record = record_of(root, name)
        if record is not None:
            listed |= {name, *_files(record, name)}
    complete_images = 0
    if holds_run(root):
        listed.add(RUN_FILE)
        for name in files:
            if PurePosixPath(name).name != MANIFEST_FILE:
                continue
            manifest = record_of(root, name)
            if manifest is not None and _folder_of(manifest) == name.rpartition("/")[0]:
                complete_images += 1
                listed |= {name, *_files(manifest, name)}
    ours: list[str] = []
    others: list[str] = []
    for name, is_regular in files.items():
        if is_regular and (
            name in listed or _is_left_over(name) or _is_our_page(root / name)
        ):
            ours.append(name)
        elif not is_events(name):
            others.append(name)
    ours.sort(key=lambda name: (name in _RECORDS, name.endswith(f"/{MANIFEST_FILE}")))
    return Contents(ours, others, complete_images)


def _files(record: Any, name: str) -> Iterator[str]:
    """The files that a record lists, by names or, in a manifest, by rows."""
    folder = name.rpartition("/")[0]
    for row in record.files:
        file = row.get("file") if isinstance(row, dict) else row
        if isinstance(file, str):
            yield f"{folder}/{file}".lstrip("/")


def _folder_of(manifest: _ImageRecord) -> str:
    """The folder of the image that a manifest names; none for that of kernels."""
    path = manifest.image.get("path")
    return safe_way(path) if isinstance(path, str) else ""


def is_events(name: str) -> bool:
    """Whether a file is one of TensorBoard's."""
    return PurePosixPath(name).name.startswith(_EVENTS)


def is_own_name(inside: str) -> bool:
    """Whether a file in an image's folder has a name that featviz gives."""
    if inside in (MANIFEST_FILE, STATS_FILE, INPUT_FILE):
        return True
    return _LAYER_FILE.fullmatch(inside) is not None


def _is_left_over(name: str) -> bool:
    return any(map(is_hidden, name.split("/")))


def walk(root: Path) -> Iterator[tuple[str, bool]]:
    """All files below a folder, links and the like among them, and whether they are
    regular: the folder's own by name, then those of the folders in it."""
    waiting = [""]
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(root / here) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        # it is gone, or closed to this user: nothing in it can be removed
        except OSError:
            continue
        inner = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        waiting += [f"{here}{name}/" for name in reversed(inner)]
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield f"{here}{entry.name}", entry.is_file(follow_symlinks=False)


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


def is_of_kind(path: Path, kind: FileKind) -> bool:
    """Whether a file is one that featviz wrote, by its head."""
    broken = (
        FileError,
        ValueError,
        KeyError,
        RuntimeError,
        EOFError,
        OSError,
        struct.error,
    )
    with suppress(*broken, zipfile.BadZipFile, zlib.error), open_regular(path) as file:
        head = file.read(_HEAD)
        if head.startswith(b"PK"):
            with zipfile.ZipFile(file) as packed, packed.open(INDEX_FILE) as page:
                head = page.read(_HEAD)
        return kind.head is not None and kind.head in head
    return False


def _is_our_page(path: Path) -> bool:
    kind = _PAGES.get(path.suffix)
    return kind is not None and is_of_kind(path, kind)
