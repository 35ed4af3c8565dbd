"""One writer at a time: a folder is locked for as long as a command writes it.

The lock is the system's own (flock, by filelock): it ends with its process, however that ends. It
lies in the folder, so that all see it under whatever path they have mounted it. The lock file says
who holds it, and goes when the command ends.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from featviz import files
from featviz.errors import FileError, StoreError
from featviz.records import Shard
from featviz.rundir import LOCK_FILE, SHARD_LOCKS, SHARDS_LOCK
from featviz.rundir.atomic import reported
from featviz.text import quoted

PATIENCE = 600.0
"""Seconds for which a shard waits for others that begin or end."""
MOST_WORDS = 4096
"""Bytes that are read of what a lock says."""
_POLL = 0.1
"""Seconds between two looks at a lock that another process holds."""
_WRITE = os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
"""To write into a file that is there, and is no link; nothing of it is lost by opening it."""


@contextmanager
def held(out: Path, shard: Shard | None = None) -> Iterator[None]:
    """Hold a folder that this command writes, or one shard of it, into which others write theirs.
    The folder is made if it is missing; at the end it goes again if it is empty.

    What is no folder is not locked: writing into it is refused anyway.
    """
    what = f"--out {quoted(str(out))}"
    if out.exists() and not out.is_dir():
        yield
    elif shard is None:
        with _locked(out / LOCK_FILE, what):
            _refuse_shards(out, what)
            yield
    else:
        with _locked(out / name_of(shard), f"shard {shard} of {what}"):
            with among_shards(out), _locked(out / LOCK_FILE, what):
                _refuse_shards(out, what, shard.count)
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


def _refuse_shards(out: Path, what: str, count: int = 0) -> None:
    """Refuse a folder into which shards write, but for those of one division into `count`. The
    locks of processes that were killed are removed."""
    for path in sorted(out.glob(".featviz.*.lock")):
        match = SHARD_LOCKS.fullmatch(path.name)
        if match and not match[1].endswith((f"-of-{count}", "shards")):
            with _locked(path, what):
                pass


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
                        lock.acquire(timeout=patience, poll_interval=_POLL)
                    except Timeout:
                        raise _taken(path, what) from None
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


def _taken(path: Path, what: str) -> StoreError:
    """The refusal of what another process holds, by what the lock file says, on one line."""
    holder = ""
    with suppress(OSError, FileError):
        said = files.read_bytes(path, MOST_WORDS).decode("utf-8", "backslashreplace")
        holder = quoted(" ".join(said.split()))
    return StoreError(
        f"{what} is being written by {holder or 'another process'}",
        "wait until it is done, or name another place",
    )
