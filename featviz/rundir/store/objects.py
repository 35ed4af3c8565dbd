"""The objects below a URL: read, written and removed, with a few tries and plain words."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from featviz.errors import FileError, StoreError
from featviz.files import attempts
from featviz.files.urls import Url
from featviz.text import quoted

T = TypeVar("T")

MOST_OBJECTS = 2_000_000
"""Objects below a URL: 50,000 images of 40 files."""
_AT_ONCE = 16
"""Files that are written at once."""
_PIECE = 8 * 2**20
"""Bytes that are read of an object at a time."""

_CONDITIONAL = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"}
"""Protocols of stores that make an object only where there is none, in one step, if asked to."""

_FINAL = (FileExistsError, FileNotFoundError, PermissionError, NotImplementedError, TypeError)
"""Errors that a second try does not mend."""


class ObjectStore:
    """The objects below a URL, by their names relative to it, with forward slashes."""

    def __init__(self, url: Url) -> None:
        """Find the library that speaks with the store; nothing is asked of the store yet.

        Raises:
            UsageError: there is no such kind of store, or its library is not installed.
        """
        self.url = url
        self._fs, self._root = url.filesystem(), url.key.rstrip("/")

    @property
    def creates(self) -> bool:
        """Whether `create` is one step in this kind of store."""
        return self.url.protocol in _CONDITIONAL

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Bytes of all objects in a folder, by their names relative to it, as the store tells them.

        Raises:
            StoreError: they cannot be listed, or there are more than MOST_OBJECTS.
        """
        self._fs.invalidate_cache()
        path = self._path(folder).rstrip("/")
        with suppress(FileNotFoundError):
            found = self._tried(folder, "listed", lambda: self._fs.find(path, detail=True))
            self._fs.invalidate_cache()  # which holds as much again
            return self._relative(found, f"{path}/")
        return {}

    def _relative(self, found: Mapping[str, Mapping[str, Any]], above: str) -> dict[str, int]:
        if len(found) > MOST_OBJECTS:
            raise StoreError(
                f"{self.url} holds {len(found):,} objects, more than {MOST_OBJECTS:,}",
                "name the run itself; --shard divides a larger one",
            )
        return {
            path.removeprefix(above): int(info.get("size") or 0)
            for path, info in found.items()
            if path.startswith(above) and info.get("type") == "file" and not path.endswith("/")
        }

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        """The first `size` bytes of an object, in pieces.

        Raises:
            StoreError: it cannot be read.
        """
        for start in range(0, size, _PIECE):
            yield self._piece(name, start, min(start + _PIECE, size))

    def _piece(self, name: str, start: int, end: int) -> bytes:
        def read() -> bytes:
            return bytes(self._fs.cat_file(self._path(name), start=start, end=end))

        return self._told(name, "read", read)

    def head(self, name: str, most: int) -> bytes:
        """The first bytes of an object, at most `most`; nothing where there is none.

        Raises:
            StoreError: it cannot be read.
        """
        self._fs.invalidate_cache()  # of listings, in which a lock of another process is not
        with suppress(FileNotFoundError):
            size = self._tried(name, "read", lambda: self._fs.size(self._path(name)))
            return b"".join(self.pieces(name, min(int(size or 0), most)))
        return b""

    def put(self, files: Mapping[str, Path]) -> None:
        """Write files of this machine as objects of these names, several at once.

        Raises:
            StoreError: one cannot be written.
        """
        with ThreadPoolExecutor(_AT_ONCE, "featviz-put") as pool:
            for written in [pool.submit(self._put, *named) for named in files.items()]:
                written.result()

    def _put(self, name: str, file: Path) -> None:
        self._told(name, "written", lambda: self._fs.put_file(str(file), self._path(name)))

    def create(self, name: str, data: bytes) -> bool:
        """Make an object; False where there is one (see `creates`).

        Raises:
            StoreError: it cannot be made.
        """
        try:
            path = self._path(name)
            self._told(name, "written", lambda: self._fs.pipe_file(path, data, mode="create"))
        except FileExistsError:
            return False
        return True

    def write(self, name: str, data: bytes) -> None:
        """Make an object or replace it.

        Raises:
            StoreError: it cannot be written.
        """
        self._told(name, "written", lambda: self._fs.pipe_file(self._path(name), data))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects in this order; what is gone already is passed over.

        Raises:
            StoreError: one cannot be removed.
        """
        for name in names:
            with suppress(FileNotFoundError):
                self._tried(name, "removed", partial(self._fs.rm_file, self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _told(self, name: str, what: str, task: Callable[[], T]) -> T:
        """Do something for which an object or a bucket that is missing is an error like others."""
        try:
            return self._tried(name, what, task)
        except FileNotFoundError as error:
            reason = attempts.words(self.url, error)
            raise self._error(name, what, reason, error) from error

    def _tried(self, name: str, what: str, task: Callable[[], T]) -> T:
        """Do something, with pauses and further tries where that may help.

        Raises:
            FileNotFoundError: there is no such object or bucket.
            FileExistsError: there is one already.
            StoreError: anything else, with the name, `what` it was to be, and the reason; the
                library's error is its cause.
        """
        try:
            return attempts.tried(self.url, lambda until: task())
        except FileError as error:
            raise self._error(name, what, error.message, error.__cause__) from error.__cause__

    def _error(self, name: str, what: str, reason: str, cause: BaseException | None) -> StoreError:
        where = quoted(f"{self.url}/{name}".rstrip("/"))
        return StoreError(f"{where} cannot be {what}: {reason}", _remedy(what, cause))


def _remedy(what: str, error: BaseException | None) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            "make the bucket first" if what == "written" else "it was removed meanwhile; try again"
        )
    if attempts.lacks_rights(error):
        return (
            "give credentials that may list, read, write and delete there, as the store's library "
            "takes them (for s3: AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
        )
    return "what is complete stays complete; --resume when the store answers"


def is_refusal(error: BaseException | None) -> bool:
    """Whether a store said that it does not know how to do what it was asked for."""
    unknown = isinstance(error, OSError) and error.errno == errno.ENOSYS
    return unknown or isinstance(error, (NotImplementedError, TypeError))
