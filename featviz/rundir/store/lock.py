"""One writer at a time below a URL: an object that only one process can make.

A store has no lock that ends with its process. So the object says who made it; where that process
ran on this machine and is gone, it is taken over, else the user has to say so by removing it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from featviz.errors import StoreError
from featviz.rundir import LOCK_FILE
from featviz.rundir.lock import signature
from featviz.rundir.store.objects import ObjectStore, is_refusal
from featviz.text import quoted

log = logging.getLogger(__name__)

_MOST = 4096
"""Bytes that are read of a lock."""
_POLL = 1.0
"""Seconds between two tries to make a lock that another process has."""
_VANISHING = 5
"""How often a lock may be gone, or empty, when it is looked at, before it counts as held."""
_PAUSE = 0.01
"""Seconds before it is looked at again, doubled each time: a store may say for a while that there
is an object, and that there is none."""
_PROCESS = re.compile(r"process (\d{1,9}) on ")

_HELD: set[bytes] = set()
"""The locks of this process: one of its number that is not here is of an earlier process."""

_NO_GUARD = (
    "%s: this store does not make an object only where there is none, so nothing keeps away a "
    "second run that begins there at the same moment"
)


@contextmanager
def held(store: ObjectStore, wait: float) -> Iterator[None]:
    """Be the only process that writes below a URL, as far as its store can tell.

    Args:
        wait: seconds to wait for another process that does.

    Raises:
        StoreError: another process does, with its host, its number and when it began; or the
            store cannot be written.
    """
    words = f"{signature()}\n{_whereabouts()} {secrets.token_hex(8)}\n".encode()
    _HELD.add(words)
    try:
        _acquire(store, words, wait)
        yield
    finally:
        _HELD.remove(words)
        with suppress(StoreError):
            if store.head(LOCK_FILE, _MOST) == words:
                store.remove([LOCK_FILE])


def _acquire(store: ObjectStore, words: bytes, wait: float) -> None:
    end, told, vanished = time.monotonic() + wait, False, 0
    while not _made(store, words):
        holder = store.head(LOCK_FILE, _MOST)
        if holder == words:  # the answer to an earlier try was lost
            break
        if not holder and vanished < _VANISHING:  # its process has ended meanwhile
            vanished += 1
            time.sleep(_PAUSE * 2**vanished)
            continue
        if _take_over(store, holder):
            continue
        if time.monotonic() >= end:
            raise _taken(store, holder)
        if not told:
            log.warning("--out %s is being written by %s; waiting", store.url, _name(holder))
            told = True
        time.sleep(_POLL)
    if not store.creates or _made(store, words):  # a store that ignores the condition makes it
        log.warning(_NO_GUARD, store.url)


def _made(store: ObjectStore, words: bytes) -> bool:
    try:
        return store.create(LOCK_FILE, words)
    except StoreError as error:
        if not is_refusal(error.__cause__):
            raise
    store.write(LOCK_FILE, words)
    return True


def _name(holder: bytes) -> str:
    """Who has a lock, on one line."""
    lines = holder.decode("utf-8", "backslashreplace").splitlines()
    return quoted(lines[0]) if lines else "another process"


def _taken(store: ObjectStore, holder: bytes) -> StoreError:
    lock = quoted(f"{store.url}/{LOCK_FILE}")
    return StoreError(
        f"--out {quoted(str(store.url))} is being written by {_name(holder)}",
        f"--wait SECONDS waits for it; if it was killed, remove {lock} (`aws s3 rm` and the like) "
        "and give --resume",
    )


def _take_over(store: ObjectStore, holder: bytes) -> bool:
    """Remove the lock of a process that ran on this machine and is gone.

    Processes of one machine do so one after the other: else the second to see the old lock would
    remove the first one's new one.
    """
    if not _is_gone(holder):
        return False
    folder = user_cache_path("featviz")
    name = hashlib.sha256(store.url.whole.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    with suppress(OSError, Timeout):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{name}.lock", timeout=10):
            if store.head(LOCK_FILE, _MOST) == holder:
                log.warning("%s has ended without removing its lock", _name(holder))
                store.remove([LOCK_FILE])
            return True
    return False


def _is_gone(holder: bytes) -> bool:
    """Whether a lock was made by a process that this machine has no more; False where that cannot
    be known."""
    lines = holder.decode("utf-8", "replace").splitlines()
    found = _PROCESS.match(lines[0]) if len(lines) > 1 else None
    place = lines[1].split(" ")[0] if found else ""
    if found is None or not place or place != _whereabouts():
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return int(found[1]) == os.getpid() and holder not in _HELD


def _whereabouts() -> str:
    """What numbers of processes belong to: this start of this machine, and this container; empty
    where the system does not say."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - no file has this path
        return hashlib.sha256(f"{boot}{space}".encode()).hexdigest()[:16]
    return ""
