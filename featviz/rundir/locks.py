"""One writer at a time: a folder is locked for as long as a command writes it.

The lock is the system's own (flock, by filelock) on a file in the folder. It ends when
its process does. The file says which process holds it, for whoever finds it."""

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
"""Bytes that are read of a lock file."""


@contextmanager
def held(out: Path, shard: Shard | None = None) -> Iterator[None]:
    """Lock a folder while the block writes into it. The folder is made if it is missing,
    and removed at the end if it is empty. Locks of killed processes are removed. An
    earlier result that a killed process had moved away gets its name back.

    Args:
        out: the folder. If it is a file, nothing is locked: `check_free` refuses it.
        shard: the shard that this command draws. Shards of the same run, divided into as
            many parts, may write into the folder at the same time. None if the run is
            not divided: no other process may write then.

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
            # the locks of the same division are held by shards that still run
            if shard is None or int(lock["count"]) != shard.count:
                end_lock(path, holder)
        until_begun.close()
        yield


def _bring_back(out: Path, holder: str) -> None:
    """Give an earlier result its name back. A process replaces a result by two renames;
    if it is killed between them, the earlier result keeps a hidden name. Nothing is done
    if `out` exists.

    Args:
        out: the path of the result.
        holder: what is locked, for the message: `--out maps`.

    Raises:
        StoreError: the process was not killed, and still holds the lock of the earlier
            result; or the result cannot be renamed.
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
    """Hold the lock of a folder that was just made, and has a hidden name. The lock file
    is made and locked by descriptors, since somebody may have put a link in the place of
    the folder.

    Args:
        folder: the open folder.
        holder: what is locked, for the message: `--out maps`.
    """
    if not BY_DESCRIPTOR or not hasattr(fcntl, "flock"):
        with locked(folder.path / LOCK_FILE, holder):
            yield
        return
    with folder.create(LOCK_FILE) as file:
        # no other process can hold the lock of a new file, so there is no wait
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(_signature())
        file.flush()
        yield


@contextmanager
def among_shards(out: Path) -> Iterator[None]:
    """Run the block, in which a shard begins or ends, while no other shard begins or ends.
    Waits for other shards up to PATIENCE seconds.

    Raises:
        StoreError: another shard takes longer.
    """
    with locked(out / SHARDS_LOCK, f"--out {quoted(out)}", PATIENCE):
        yield


def is_lock(relative_path: str) -> bool:
    """Whether a path in a run directory is that of a lock file."""
    return (
        relative_path == LOCK_FILE or SHARD_LOCKS.fullmatch(relative_path) is not None
    )


@contextmanager
def locked(path: Path, holder: str, patience: float = 0.0) -> Iterator[None]:
    """Hold a lock file during the block. Folders above it that are missing are made, and
    removed at the end if they are empty.

    Args:
        path: the lock file, which is removed at the end.
        holder: what is locked, for the message: `--out maps`.
        patience: seconds to wait for another process that has the lock.

    Raises:
        StoreError: as from `_acquire`, or the folder cannot be written.
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
        # By the end, another process may have made a new lock file under this name. The
        # identity of the file that was locked tells the two apart.
        identity = None
        try:
            if not isinstance(lock, SoftFileLock):  # a SoftFileLock writes its own text
                _sign(path)
            with suppress(OSError):
                identity = path.lstat()
            yield
        finally:
            # The file is removed before the release: a process that waits for the lock
            # then sees that the file has gone, and makes a new one.
            if identity is not None:
                _remove(path, identity)
            lock.release()
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _remove(path: Path, identity: os.stat_result) -> None:
    """Remove a lock file, unless another process has made a new one in its place: the
    folder may have been replaced.

    Args:
        identity: `lstat` of the file that was locked.
    """
    with suppress(OSError), Folder(path.parent) as folder:
        if os.path.samestat(folder.stat(path.name), identity):
            folder.remove(path.name)


def end_lock(path: Path, holder: str) -> None:
    """Remove a lock that a killed process has left.

    Args:
        path: the lock file.
        holder: what is locked, for the message: `--out maps`.

    Raises:
        StoreError: a process still holds the lock.
    """
    with locked(path, holder):
        pass


def _acquire(lock: BaseFileLock, path: Path, holder: str, patience: float) -> None:
    """Acquire a lock. If another process has just removed the folder of the lock, this
    returns without the lock: the caller asks `lock.is_locked`, and tries again.

    Args:
        path, holder, patience: as for `locked`.

    Raises:
        StoreError: another process holds the lock for longer than `patience`, or the
            file is not a lock.
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
    """Write into a lock file which process holds it. If that fails, as on a full disk, the
    file stays empty, without an error.

    Raises:
        StoreError: the file is not a lock.
    """
    with (
        suppress(OSError),
        Folder(path.parent) as folder,
        folder.rewrite(path.name) as file,
    ):
        # since it was locked, somebody may have put a link in its place
        _check(path, os.fstat(file.fileno()))
        file.truncate()
        file.write(_signature())


def _signature() -> bytes:
    """A line that names this process, its machine and the time, for people who find a
    lock file."""
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"process {os.getpid()} on {socket.gethostname()} since {began}\n".encode()


def _check(path: Path, status: os.stat_result) -> None:
    """Refuse a lock file that is a link, or no regular file.

    Args:
        path: the lock file, for the message.
        status: the status of the file.

    Raises:
        StoreError: it is one of these.
    """
    # a hard link to somebody's notes would be truncated, and written into
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise StoreError(
            f"{quoted(path)} is no lock of featviz: it is a link, or no regular file",
            "remove it",
        )
