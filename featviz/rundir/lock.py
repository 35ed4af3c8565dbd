"""One writer at a time: a folder or file is locked for as long as a command writes it.

The lock is the system's own (flock, by filelock): it ends with its process, however that ends. A
folder's lock lies in the folder, so that all see it under whatever path they have mounted it; a
file's lies beside the file. The lock file says who holds it, and goes when the command ends.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from featviz import files
from featviz.errors import FileError, StoreError
from featviz.rundir import LOCK_FILE
from featviz.rundir.atomic import cut_name, reported
from featviz.text import quoted

log = logging.getLogger(__name__)

_MOST = 4096
"""Bytes that are read of what a lock file says."""

_POLL = 0.1
"""Seconds between two looks at a lock that another process holds."""


@contextmanager
def held(out: Path, wait: float | None = None, option: str = "--out") -> Iterator[None]:
    """Hold a folder that this command writes, which is made if it is missing; at the end it goes
    again if it is empty.

    What is no folder is not locked: writing into it is refused anyway.

    Args:
        wait: seconds to wait for another process that holds it; None where the command has no
            option for it.
        option: by which the folder was named.

    Raises:
        StoreError: another process holds it, with its host, its number and when it began; or the
            lock cannot be made.
    """
    if out.exists() and not out.is_dir():
        yield
        return
    with _locked(out / LOCK_FILE, f"{option} {quoted(str(out))}", wait):
        yield


@contextmanager
def held_file(path: Path, wait: float | None, option: str) -> Iterator[None]:
    """Hold a file that this command writes: as `held`, by a lock beside it."""
    lock = path.absolute().with_name(f".{cut_name(path.name)}.lock")
    with _locked(lock, f"{option} {quoted(str(path))}", wait):
        yield


@contextmanager
def _locked(path: Path, what: str, wait: float | None) -> Iterator[None]:
    made: list[Path] = []
    try:
        with reported(path.parent, "name another place"):
            lock = _acquired(path, what, wait, made)
        mine = _sign(path, lock)
        try:
            yield
        finally:
            _release(path, lock, mine)
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _acquired(path: Path, what: str, wait: float | None, made: list[Path]) -> FileLock:
    """Take the lock; the folders that this has to make are added to `made`, the innermost first."""
    lock = FileLock(path, thread_local=False)
    end = time.monotonic() + (wait or 0)
    told = False
    while True:
        made[:0] = _made(path.parent)
        try:
            lock.acquire(timeout=0)
            return lock
        except Timeout:
            if time.monotonic() >= end:
                raise _taken(what, path, wait is not None) from None
            if not told:
                log.warning("%s is being written by %s; waiting", what, _holder(path))
                told = True
            time.sleep(_POLL)
        except FileNotFoundError:
            continue  # the process that made the folder has just removed it


def _made(folder: Path) -> list[Path]:
    """Make a folder and those above it that are missing; those that were made, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _sign(path: Path, lock: FileLock) -> os.stat_result | None:
    """Write who holds the lock, and tell which file it is; where the system has no flock, filelock
    has written it itself."""
    with suppress(OSError):  # a full disk has room for the lock, and not for the words
        if not isinstance(lock, SoftFileLock):
            path.write_text(f"{signature()}\n", "utf-8")
    with suppress(OSError):
        return path.lstat()
    return None


def signature() -> str:
    """Who holds what this process is about to lock: its number, host and the time."""
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"process {os.getpid()} on {socket.gethostname()} since {began}"


def _release(path: Path, lock: FileLock, mine: os.stat_result | None) -> None:
    """Remove the lock file while it is held: who waits for it sees that it has gone, and makes a
    new one. A lock that another process has made since the folder was replaced stays."""
    with suppress(OSError):
        if mine is not None and os.path.samestat(path.lstat(), mine):
            path.unlink()
    lock.release()


def _taken(what: str, path: Path, can_wait: bool) -> StoreError:
    ways = "--wait SECONDS waits for it" if can_wait else "wait until it is done"
    return StoreError(
        f"{what} is being written by {_holder(path)}", f"{ways}, or name another place"
    )


def _holder(path: Path) -> str:
    """What the lock file says, on one line."""
    with suppress(OSError, FileError):
        words = files.read_bytes(path, _MOST).decode("utf-8", "backslashreplace")
        return quoted(" ".join(words.split())) or "another process"
    return "another process"
