"""One writer at a time: a folder is locked for as long as a command writes it.

The lock is the system's own (flock, by filelock) on a file in the folder: it ends with
its process, and the file says who holds it."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from featviz.errors import FileError, StoreError
from featviz.files import BY_DESCRIPTOR, read_bytes, real
from featviz.records import Shard
from featviz.rundir import LOCK_FILE, SHARD_LOCKS, SHARDS_LOCK
from featviz.rundir.folder import OLD, Folder, hides, reported
from featviz.text import quoted

fcntl: Any = None
with suppress(ImportError):  # Windows has none
    fcntl = import_module("fcntl")

PATIENCE = 600.0
"""Seconds for which a shard waits for others that begin or end."""
_LONGEST_SIGNATURE = 4096
"""Bytes that are read of what a lock says."""


@contextmanager
def held(out: Path, shard: Shard | None = None) -> Iterator[None]:
    """Lock a folder while this command writes into it. The folder is made if it is
    missing, and removed at the end if it is empty. Locks that killed processes left are
    removed, and an earlier result that one of them had moved away comes back.

    Args:
        out: the folder; a file is let pass, since `check_free` refuses it.
        shard: what this command draws of the run, where it is divided: other shards of
            the same division may write into the folder at the same time, nobody else
            may. None lets nobody else write.

    Raises:
        StoreError: another process writes into it.
    """
    if out.exists() and not out.is_dir():
        yield
        return
    holder = f"--out {quoted(out)}"
    # locks that stay until the end, and those of the moment in which a shard begins
    with ExitStack() as until_end, ExitStack() as until_begun:
        _bring_back(out, holder)
        if shard is None:
            until_end.enter_context(locked(out / LOCK_FILE, holder))
        else:
            of_shard = out / f".featviz.{shard.index + 1}-of-{shard.count}.lock"
            until_end.enter_context(locked(of_shard, f"shard {shard} of {holder}"))
            # a run that is not divided must not begin at the same moment
            until_begun.enter_context(among_shards(out))
            until_begun.enter_context(locked(out / LOCK_FILE, holder))
        for path in sorted(out.glob(".featviz.*.lock")):
            lock = SHARD_LOCKS.fullmatch(path.name)
            if lock is None or lock["count"] is None:
                continue
            # shards of the same division may go on, and take their own locks
            if shard is None or int(lock["count"]) != shard.count:
                end_lock(path, holder)
        until_begun.close()
        yield


def _bring_back(out: Path, holder: str) -> None:
    """Give an earlier result the name `out` back, which a killed process has taken from it:
    a folder is replaced by two renames, and it ended between them.

    Raises:
        StoreError: the process still runs, and holds the lock of the earlier result.
    """
    final = real(out)
    if os.path.lexists(final) or not final.parent.is_dir():
        return
    with reported(final), Folder(final.parent) as above:
        for entry in above.entries():
            is_earlier = entry.name.endswith(OLD) and hides(entry.name, final.name)
            if is_earlier and entry.is_dir(follow_symlinks=False):
                end_lock(final.parent / entry.name / LOCK_FILE, holder)
                above.replace(entry.name, final.name)
                return


@contextmanager
def locked_new(folder: Folder, holder: str) -> Iterator[None]:
    """Hold the lock of a folder that was just made, for as long as it is hidden. Its
    file is made and locked by descriptors, since a link may have come to stand under
    the folder's name."""
    if not BY_DESCRIPTOR or not hasattr(fcntl, "flock"):
        with locked(folder.path / LOCK_FILE, holder):
            yield
        return
    with folder.create(LOCK_FILE) as file:
        # nobody can have it yet; so it is not waited for
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(_signature())
        file.flush()
        yield


@contextmanager
def among_shards(out: Path) -> Iterator[None]:
    """Be the only shard that begins or ends, which takes a moment; the others wait."""
    with locked(out / SHARDS_LOCK, f"--out {quoted(out)}", PATIENCE):
        yield


def is_lock(relative_path: str) -> bool:
    """Whether a file of a folder is the lock of who writes it, or of a shard."""
    return (
        relative_path == LOCK_FILE or SHARD_LOCKS.fullmatch(relative_path) is not None
    )


@contextmanager
def locked(path: Path, holder: str, patience: float = 0.0) -> Iterator[None]:
    """Hold one lock file; the folders that it needs are made, and go again if they are
    empty.

    Args:
        holder: what is locked, for the message of a process that is refused.
        patience: seconds to wait for another process.
    """
    # thread_local: a generator may be closed by another thread than began it
    lock = FileLock(path, thread_local=False)
    made: list[Path] = []  # the innermost first
    try:
        with reported(path.parent, "name another place"):
            while not lock.is_locked:
                above = (path.parent, *path.parent.parents)
                made[:0] = [folder for folder in above if not folder.exists()]
                path.parent.mkdir(parents=True, exist_ok=True)
                _acquire(lock, path, holder, patience)
        # what was locked, to tell it from what may stand under its name in the end
        identity = None
        try:
            if not isinstance(lock, SoftFileLock):  # which writes its own text
                _sign(path)
            with suppress(OSError):
                identity = path.lstat()
            yield
        finally:
            # while it is held: who waits for it sees that it has gone, and makes a new
            # one
            if identity is not None:
                _remove(path, identity)
            lock.release()
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _remove(path: Path, identity: os.stat_result) -> None:
    """Remove a lock file, unless the folder was replaced since, and another process has
    made a lock there."""
    with suppress(OSError), Folder(path.parent) as folder:
        if os.path.samestat(folder.stat(path.name), identity):
            folder.remove(path.name)


def end_lock(path: Path, holder: str) -> None:
    """Remove a lock that a killed process has left; StoreError where it still runs."""
    with locked(path, holder):
        pass


def _acquire(lock: BaseFileLock, path: Path, holder: str, patience: float) -> None:
    """Acquire a lock. Where another process has just removed its folder it stays without,
    and the caller tries again.

    Args:
        path: the lock file.
        holder: what is locked, for the message.
        patience: seconds to wait for another process.

    Raises:
        StoreError: another process has it for longer, or the file is not a lock.
    """
    try:
        if os.path.lexists(path):
            _check(path, path.lstat())
        lock.acquire(timeout=patience, poll_interval=0.1)
    except FileNotFoundError:
        return
    except Timeout:
        signature = ""
        with suppress(OSError, FileError):
            content = read_bytes(path, _LONGEST_SIGNATURE)
            text = content.decode(errors="backslashreplace")
            signature = quoted(" ".join(text.split()))
        raise StoreError(
            f"{holder} is being written by {signature or 'another process'}",
            "wait until it is done, or name another place",
        ) from None


def _sign(path: Path) -> None:
    """Write into a lock who holds it; on a full disk there is room for the lock alone."""
    with (
        suppress(OSError),
        Folder(path.parent) as folder,
        folder.rewrite(path.name) as file,
    ):
        _check(path, os.fstat(file.fileno()))  # a link may have come since
        file.truncate()
        file.write(_signature())


def _signature() -> bytes:
    """Who holds a lock: process, machine and since when."""
    # for people who find a lock: what ends it is the system
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"process {os.getpid()} on {socket.gethostname()} since {began}\n".encode()


def _check(path: Path, status: os.stat_result) -> None:
    """Refuse a lock that is somebody's file under another name."""
    # a hard link to somebody's notes would be truncated and signed
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise StoreError(
            f"{quoted(path)} is no lock of featviz: it is a link, or no regular file",
            "remove it",
        )
