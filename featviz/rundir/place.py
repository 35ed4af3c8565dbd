"""Where a result is written: apart from what is read, in a hidden folder beside its place, and in
the place of an earlier result only if featviz wrote all that is there.

A folder is ours if our record in it says what our writers always say. A file in it is ours if that
record, or the manifest of one of its images, lists it; if its hidden name says that its command was
killed; or, for a page or JUnit XML, if its head says so. Records are not held against `schema`: the
owner of a run that cannot be shown must be able to replace it.

A folder is locked for as long as a command writes it, by the system's own lock (flock, by filelock)
on a file in it: it ends with its process, and says who holds it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import struct
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeAlias

from filelock import FileLock, SoftFileLock, Timeout

from featviz.errors import FileError, StoreError, UsageError
from featviz.files import Folder, open_regular, read_bytes, real
from featviz.records import FORMATS, KINDS, Shard
from featviz.rundir import (
    AUDIT_FILE,
    DIFF_FILE,
    EXEMPLARS_FILE,
    INDEX_FILE,
    INPUT_FILE,
    LOCK_FILE,
    MANIFEST_FILE,
    REPORT,
    REPORT_RECORD,
    RUN_FILE,
    SHARD_LOCKS,
    SHARDS_LOCK,
    STATS_FILE,
)
from featviz.rundir.atomic import atomic, part_name, part_of, remove, reported
from featviz.text import counted, listed, quoted, safe_way

_HEAD, _LARGEST = 1000, 2**28
"""Bytes within which a file says who wrote it, and those of a record."""
_EVENTS = "events.out.tfevents."
"""How the names of TensorBoard's files begin, which stay where they are."""
_LAYER_FILE = re.compile(
    rf"(\d{{3,}}_[^/]+/({'|'.join([*KINDS, 'kernel'])})([.-][^/]*)?|[^/]+__\d{{3,}}_[^/]+)"
    rf"\.({'|'.join(FORMATS)}|npy)"
)
"""A file of a layer in an image's folder."""

PATIENCE = 600.0
"""Seconds for which a shard waits for others that begin or end."""
MOST_WORDS = 4096
"""Bytes that are read of what a lock says."""
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
"""To write into a file that is there, and is no link; nothing of it is lost by opening it."""


RUN, AUDIT, DIFF, EXEMPLARS = RUN_FILE, AUDIT_FILE, DIFF_FILE, EXEMPLARS_FILE
REPORT_FOLDER = REPORT_RECORD
"""Kinds of results that have a folder of their own, by the record which says that the folder is
ours, and lists the others."""

_LISTINGS = (AUDIT_FILE, DIFF_FILE, EXEMPLARS_FILE, REPORT_RECORD)
_SAYS: dict[str, dict[str, type]] = {
    **{name: {"featviz": str, "files": list} for name in _LISTINGS},
    RUN_FILE: {"featviz": str, "torch": str, "model": dict, "options": dict, "layers": list},
    MANIFEST_FILE: {"files": list},
}
"""What our records hold beside their version."""


def look(root: Path) -> tuple[list[str], list[str], int]:
    """Tell what is ours in a folder from the others, and how many complete images there are. Locks
    and TensorBoard's events are neither. Ours are in the order in which they are to go: manifests
    and records last, by which the rest is known to be ours."""
    files = {path: regular for path, regular in walk(root) if not is_lock(path)}
    named, complete = set[str](), 0
    for name in (*_LISTINGS, f"{REPORT}/{REPORT_RECORD}"):
        if (record := _record(root, name)) is not None:
            named |= {name, *_files(record, name.rpartition("/")[0])}
    if holds_run(root):
        named.add(RUN_FILE)
        for name in [name for name in files if name.rpartition("/")[2] == MANIFEST_FILE]:
            manifest = _record(root, name) or {}
            folder, image = name.rpartition("/")[0], manifest.get("image")
            stated = image.get("path") if isinstance(image, dict) else None
            if manifest and folder == (safe_way(stated) if isinstance(stated, str) else ""):
                complete += 1
                named |= {name, *_files(manifest, folder)}
    ours, others = list[str](), list[str]()
    for name, regular in files.items():
        page = {".html": PAGE, ".zip": PAGE, ".xml": JUNIT}.get(PurePosixPath(name).suffix)
        if regular and (
            name in named
            or any(map(part_of, name.split("/")))
            or (page is not None and _is_ours(root / name, page))
        ):
            ours.append(name)
        elif not name.rpartition("/")[2].startswith(_EVENTS):
            others.append(name)
    ours.sort(key=lambda way: (way in _SAYS, way.endswith(f"/{MANIFEST_FILE}")))
    return ours, others, complete


def holds_run(root: Path) -> bool:
    """Whether a folder holds a run, or kernels, by its run.json alone."""
    return _record(root, RUN_FILE) is not None


def is_lock(way: str) -> bool:
    """Whether a file of a folder is the lock of who writes it, or of a shard."""
    return way == LOCK_FILE or SHARD_LOCKS.fullmatch(way) is not None


def is_own_name(inside: str) -> bool:
    """Whether a file in an image's folder has a name that featviz gives."""
    own = (MANIFEST_FILE, STATS_FILE, INPUT_FILE)
    return inside in own or _LAYER_FILE.fullmatch(inside) is not None


def _record(root: Path, name: str) -> dict[str, Any] | None:
    """A record in a folder, if it says what our records of this name always say; None where it is
    another program's, or cannot be read."""
    folder, _, file = name.rpartition("/")
    content: Any = None
    with suppress(OSError, FileError), Folder(root, folder) as opened:
        content = opened.read_json(file, _LARGEST)
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key), kind) for key, kind in _SAYS[file].items()
    ):
        return None
    if name == RUN_FILE and content.get("kind") != "kernels":
        images, failures = content.get("images"), content.get("failures")
        complete = images.get("complete") if isinstance(images, dict) else None
        if "kind" in content or not isinstance(complete, list) or not isinstance(failures, list):
            return None
    version = content.get("schema_version")
    return content if type(version) is int and version >= 1 else None


def _files(record: Mapping[str, Any], folder: str) -> Iterator[str]:
    """The files that the record of a folder lists, by names or, in a manifest, by rows."""
    for row in record["files"]:
        name = row.get("file") if isinstance(row, dict) else row
        if isinstance(name, str):
            yield f"{folder}/{name}".lstrip("/")


def walk(root: Path) -> Iterator[tuple[str, bool]]:
    """All files below a folder, links and the like among them, and whether they are regular: the
    folder's own by name, then those of the folders in it."""
    waiting = [""]
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(root / here) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except OSError:  # it is gone, or closed to this user: nothing in it can be removed
            continue
        inner = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        waiting += [f"{here}{name}/" for name in reversed(inner)]
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield f"{here}{entry.name}", entry.is_file(follow_symlinks=False)


def check_free(root: Path, kind: str, overwrite: bool) -> list[str] | None:
    """Say before the work that a folder cannot become the result's; the files of the earlier
    result, which is to be replaced.

    Args:
        kind: the result's record.
    """
    noun = kind.removesuffix(".json")
    if root.exists() and not root.is_dir():
        raise StoreError(f"--out {root} is a file, not a folder", "name another with --out")
    if (record := _record(root, kind)) is None:
        for way, _ in walk(root):
            top, name = way.partition("/")[0], way.rpartition("/")[2]
            if not (is_lock(way) or part_of(top) or name.startswith(_EVENTS)):
                words = f"--out {root} is not empty and holds no {noun} of featviz"
                if (root / kind).exists():
                    words += f": its {kind} is none that featviz wrote"
                raise StoreError(words, "name another folder with --out")
        return None
    ours, others, complete = look(root)
    if not overwrite and (complete or kind != RUN):
        hint = "--overwrite replaces it, --out names another folder"
        if kind == RUN and "kind" not in record:
            words = f"--out {root} holds a run, {counted(complete, 'image')} complete"
            raise StoreError(words, f"`run --resume` goes on with it, {hint}")
        raise StoreError(f"--out {root} holds another {noun}", hint)
    if others:
        least = sorted(others, key=lambda way: (way.count("/"), way))
        names = listed([quoted(name, 80) for name in least], 3)
        raise StoreError(
            f"--out {root} holds files that featviz did not write: {names}",
            "move them away, or name another folder with --out",
        )
    return ours


@contextmanager
def replacing(root: Path, kind: str) -> Iterator[Path]:
    """A folder beside `root` to write into, which takes its place if the block succeeds: the result
    appears whole or not at all. Meanwhile `root` is locked.

    What killed processes have left beside it goes: folders that were to take its place, and what is
    ours in those that have stood there.
    """
    final = real(root)
    fresh = final.with_name(part_name(final.name))
    old, name = fresh.with_suffix(".old"), part_of(fresh.name)
    try:
        with held(root), reported(root, "choose another place with --out, or make room"):
            for path in [path for path in final.parent.iterdir() if part_of(path.name) == name]:
                if path.suffix == ".part" and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.is_dir() and not path.is_symlink():
                    with suppress(StoreError):
                        remove(path, [LOCK_FILE, *look(path)[0]])
            fresh.mkdir(parents=True)
            yield fresh
            # the earlier result is looked for anew: the work before may have taken hours
            earlier = check_free(final, kind, True)
            ours = look(final)[0] if earlier is None else earlier
            if final.exists():
                final.replace(old)
            try:
                fresh.replace(final)
            except OSError:
                if old.exists():
                    old.replace(final)
                raise
            for way, _ in walk(old):
                if PurePosixPath(way).name.startswith(_EVENTS):  # a board goes on with them
                    (final / way).parent.mkdir(parents=True, exist_ok=True)
                    (old / way).replace(final / way)
            remove(old, [LOCK_FILE, *ours])
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


FileKind: TypeAlias = tuple[str, bytes | None]
"""A kind of file that featviz writes, for messages, and the words in its head, or in that of its
first page, that say so."""
_GENERATOR = b'<meta name="generator" content="featviz'
PAGE: FileKind = ("page of featviz", _GENERATOR)
REPORT_ALONE: FileKind = ("report of featviz", _GENERATOR)
JUNIT: FileKind = ("JUnit XML of featviz", b'<testsuites name="featviz ')
PRUNING: FileKind = ("file that says featviz wrote it", None)  # lists of numbers do not


def picture_of(command: str) -> FileKind:
    """A PNG that a command wrote, by its text chunk `Software`."""
    return f"picture of featviz {command}", b"Software\0featviz " + command.encode()


def check_file(out: Path, kind: FileKind, option: str = "--out", overwrite: bool = False) -> None:
    """Refuse a place that holds something else than an earlier file of the same kind."""
    if out.is_dir():
        raise StoreError(f"{option} {out} is a folder, not a file", f"name a file with {option}")
    if not overwrite and out.exists() and not _is_ours(out, kind):
        raise StoreError(
            f"{option} {out} is there and is no {kind[0]}",
            f"--overwrite replaces it; or name another file with {option}",
        )


@contextmanager
def writing(
    out: Path, kind: FileKind, option: str = "--out", overwrite: bool = False
) -> Iterator[BinaryIO]:
    """Write a file of a kind, which takes its place when all is written."""
    check_file(out, kind, option, overwrite)
    with atomic(out) as file:
        yield file


def _is_ours(path: Path, kind: FileKind) -> bool:
    with (
        suppress(OSError, FileError, ValueError, KeyError, RuntimeError, EOFError),
        suppress(zipfile.BadZipFile, zlib.error, struct.error),
        open_regular(path) as file,
    ):
        head = file.read(_HEAD)
        if head.startswith(b"PK"):
            with zipfile.ZipFile(file) as packed, packed.open(INDEX_FILE) as page:
                head = page.read(_HEAD)
        return kind[1] is not None and kind[1] in head
    return False


def check_apart(out: Path, option: str, inputs: Iterable[Path]) -> None:
    """Refuse to write where an input is: over it, or into a folder that holds it."""
    place = os.path.realpath(out)
    within = place.rstrip(os.sep) + os.sep
    real_folder = cache(os.path.realpath)  # of 10,000 images there are few
    for path in inputs:
        whole = path.absolute()
        stands = Path(real_folder(whole.parent), whole.name)
        forms = {str(stands)}
        if whole.name == ".." or stands.is_symlink():  # where it leads, too
            forms.add(os.path.realpath(stands))
        if any(form == place or form.startswith(within) for form in forms):
            what = "is" if place in forms else "holds"
            raise UsageError(
                f"{option} {quoted(str(out))} {what} the input {quoted(str(path))}",
                f"name another place with {option}",
            )


def model_files(*models: str | None) -> list[Path]:
    """The files and folders that MODEL strings lead to: `net.pth`, `net.py:make`, `hf:DIR`."""
    texts = list(filter(None, models))
    forms = [Path(f) for t in texts for f in (t, t.partition(":")[2], t.rpartition(":")[0]) if f]
    return [path for path in forms if path.is_file() or (path / "config.json").is_file()]


# One writer at a time


@contextmanager
def held(out: Path, shard: Shard | None = None) -> Iterator[None]:
    """Hold a folder that this command writes, or one shard of it, into which others of the same
    division write theirs. The folder is made if it is missing; at the end it goes again if it is
    empty. The locks of processes that were killed are removed.
    """
    if out.exists() and not out.is_dir():
        yield
        return
    what, mine = f"--out {quoted(str(out))}", out / LOCK_FILE
    same = () if shard is None else (f"-of-{shard.count}",)
    with ExitStack() as until, ExitStack() as beginning:
        if shard is not None:
            until.enter_context(_locked(out / name_of(shard), f"shard {shard} of {what}"))
            beginning.enter_context(among_shards(out))
        (until if shard is None else beginning).enter_context(_locked(mine, what))
        for path in sorted(out.glob(".featviz.*.lock")):
            match = SHARD_LOCKS.fullmatch(path.name)
            if match and match[1] != "shards" and not match[1].endswith(same):
                with _locked(path, what):
                    pass
        beginning.close()
        yield


@contextmanager
def among_shards(out: Path) -> Iterator[None]:
    """Be the only shard that begins or ends, which takes a moment; the others wait."""
    with _locked(out / SHARDS_LOCK, f"--out {quoted(str(out))}", PATIENCE):
        yield


def name_of(shard: Shard) -> str:
    """The lock of a shard: `.featviz.1-of-4.lock`."""
    return f".featviz.{shard.index + 1}-of-{shard.count}.lock"


def signature() -> str:
    """Who holds what this process is about to lock: its number, host and the time."""
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"process {os.getpid()} on {socket.gethostname()} since {began}"


@contextmanager
def _locked(path: Path, what: str, patience: float = 0.0) -> Iterator[None]:
    """Hold one lock file; the folders that it needs are made, and go again if they are empty."""
    lock, made, mine = FileLock(path, thread_local=False), list[Path](), None
    try:
        with reported(path.parent, "name another place"):
            while not lock.is_locked:
                made[:0] = [f for f in (path.parent, *path.parent.parents) if not f.exists()]
                path.parent.mkdir(parents=True, exist_ok=True)
                # not found: who made the folder has just removed it
                with suppress(FileNotFoundError):
                    if os.path.lexists(path):
                        _check(path, path.lstat())
                    try:
                        lock.acquire(timeout=patience, poll_interval=0.1)
                    except Timeout:
                        holder = ""
                        with suppress(OSError, FileError):
                            words = read_bytes(path, MOST_WORDS).decode(errors="backslashreplace")
                            holder = quoted(" ".join(words.split()))
                        raise StoreError(
                            f"{what} is being written by {holder or 'another process'}",
                            "wait until it is done, or name another place",
                        ) from None
        try:
            with suppress(OSError):  # a full disk has room for the lock, and not for the words
                if not isinstance(lock, SoftFileLock):  # which has written it itself
                    with os.fdopen(os.open(path, _WRITE), "wb", buffering=0) as file:
                        _check(path, os.fstat(file.fileno()))  # a link may have come since
                        file.truncate()
                        file.write(f"{signature()}\n".encode())
            with suppress(OSError):
                mine = path.lstat()
            yield
        finally:
            # while it is held: who waits for it sees that it has gone, and makes a new one; a lock
            # that another process has made since the folder was replaced stays
            with suppress(OSError):
                if mine is not None and os.path.samestat(path.lstat(), mine):
                    path.unlink()
            lock.release()
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _check(path: Path, found: os.stat_result) -> None:
    """Refuse a lock that is somebody's file under another name."""
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise StoreError(
            f"{quoted(str(path))} is no lock of featviz: it is a link, or no regular file",
            "remove it",
        )
