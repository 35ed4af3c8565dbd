"""The objects below a URL: read, written and removed, with a few tries and plain words."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from featviz.errors import StoreError, UsageError
from featviz.files.urls import Url
from featviz.text import quoted

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSES = (0.5, 2.0)
"""Seconds before each further try of a request; s3fs and gcsfs try some times themselves."""
MOST_OBJECTS = 2_000_000
"""Objects below a URL: 50,000 images of 40 files."""
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
        self._fs, self._root = _connected(url)

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
        sources = [str(path) for path in files.values()]
        goals = [self._path(name) for name in files]
        self._told(next(iter(files), ""), "written", lambda: self._fs.put(sources, goals))

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
            raise self._error(name, what, error) from error

    def _tried(self, name: str, what: str, task: Callable[[], T]) -> T:
        """Do something, with pauses and further tries where that may help.

        Libraries raise what they like, botocore's errors and those of aiohttp among it, so all is
        taken for the store's answer.

        Raises:
            FileNotFoundError: there is no such object or bucket.
            FileExistsError: there is one already.
            StoreError: anything else, with the name, `what` it was to be, and the reason.
        """
        for pause in (*PAUSES, None):
            try:
                return task()
            except (FileNotFoundError, FileExistsError):
                raise
            except Exception as error:
                if pause is None or not _may_pass(error):
                    raise self._error(name, what, error) from error
                said = self.url.without_secrets(repr(error))
                log.debug("%s/%s: %s; once more in %g s", self.url, name, said, pause)
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _error(self, name: str, what: str, error: Exception) -> StoreError:
        where = quoted(f"{self.url}/{name}".rstrip("/"))
        lines = self.url.without_secrets(str(error)).strip().splitlines()
        reason = quoted(lines[0]) if lines else type(error).__name__
        return StoreError(f"{where} cannot be {what}: {reason}", _remedy(what, error))


def _may_pass(error: Exception) -> bool:
    """Whether the same request may be answered in another way a little later."""
    return not isinstance(error, _FINAL) and "Credentials" not in type(error).__name__


def _remedy(what: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            "make the bucket first" if what == "written" else "it was removed meanwhile; try again"
        )
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return (
            "give credentials that may list, read, write and delete there, as the store's library "
            "takes them (for s3: AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
        )
    return "what is complete stays complete; --resume when the store answers"


def is_refusal(error: BaseException | None) -> bool:
    """Whether a store said that it does not know how to do what it was asked for."""
    unknown = isinstance(error, OSError) and error.errno == errno.ENOSYS
    return unknown or isinstance(error, (NotImplementedError, TypeError))


def _connected(url: Url) -> tuple[Any, str]:
    import fsspec

    try:
        fs, root = fsspec.core.url_to_fs(url.whole)
    except ImportError as error:
        raise UsageError(
            f"{url.protocol}:// needs a package that is not installed: {quoted(str(error))}",
            _to_install(url.protocol),
        ) from error
    except Exception as error:  # of the library, whose arguments may be in its own configuration
        words = quoted(url.without_secrets(str(error)))
        raise UsageError(
            f"{quoted(str(url))} cannot be reached: {words}", "for example s3://bucket/maps"
        ) from error
    return fs, str(root).rstrip("/")


def _to_install(protocol: str) -> str:
    """How to get the package that speaks a protocol, as far as fsspec knows it: s3fs for s3."""
    from fsspec.registry import known_implementations

    module = str(known_implementations.get(protocol, {}).get("class", "fsspec"))
    package = module.partition(".")[0]
    return "install what it names" if package == "fsspec" else f"pip install {package}"
