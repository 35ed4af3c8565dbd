"""Files of stores are read within bounds of bytes, attempts and time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar

from featviz.errors import FileError
from featviz.files.stores import WEB, Remote, filesystem, scrubbed
from featviz.text import counted, quoted

log = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPTS = 4
"""How often something is asked for before it counts as failed."""
FIRST_WAIT = 0.5
"""Seconds before the second attempt; each further one waits twice as long."""
PATIENCE = 120.0
"""Seconds after which there is no further attempt, and a file that still comes in is given up."""

_PIECE = 2**20
_TRY_AGAIN = (408, 425, 429)
"""Answers of the 400s that are about the moment, and not about the request."""
_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ValueError,
    TypeError,
    FileError,
)
"""Errors that the next attempt would meet again."""


class NoSuchFileError(FileError):
    """There is nothing of that name in the store."""


def read(place: Remote, most: int) -> bytes:
    """The bytes of a file of at most `most` bytes.

    Raises:
        FileError: it is not there, larger, or could not be read in ATTEMPTS attempts.
    """
    return _retried(lambda until: _read(place, most, until))


def read_part(place: Remote, start: int, size: int) -> bytes:
    """`size` bytes of a file, from `start` on.

    Raises:
        FileError: they could not be read in ATTEMPTS attempts.
    """
    return _retried(lambda until: _read_part(place, start, size, until))


def size_of(place: Remote) -> int:
    """Bytes of a file.

    Raises:
        FileError: it is not there, or the store does not say.
    """
    size = _retried(lambda until: filesystem(place).info(place.path).get("size"))
    if not isinstance(size, int):
        raise FileError(f"{quoted(str(place))}: the server does not say how large it is")
    return size


def is_folder(place: Remote) -> bool:
    """Whether there are files below; a server of web pages is not asked.

    Raises:
        FileError: the store does not answer.
    """
    if place.protocol in WEB:
        return False
    return bool(_retried(lambda until: filesystem(place).isdir(place.path)))


def children(place: Remote) -> list[tuple[str, bool]]:
    """The paths directly below a folder, and whether each is a folder, sorted; none where there is
    no such folder. A server of web pages is not asked, but its page read: see `links`.

    Raises:
        FileError: the store does not answer.
    """
    try:
        rows = _retried(lambda until: list(filesystem(place).ls(place.path, detail=True)))
    except NoSuchFileError:
        return []
    return sorted((row["name"], row["type"] == "directory") for row in rows)


def _read(place: Remote, most: int, until: float) -> bytes:
    with closing(_opened(place)) as file:
        content = _read_pieces(file, most, until)
        size = getattr(file, "size", None)
    if isinstance(size, int) and place.protocol not in WEB and len(content) < size:
        raise OSError(f"it ends after {len(content)} of {size} bytes")
    return content


def _opened(place: Remote, **options: Any) -> Any:
    """A file to read once from its beginning: of a web server as it comes, unasked for its size."""
    if place.protocol in WEB:
        options |= {"block_size": 0, "size": 1}
    return filesystem(place).open(place.path, "rb", **options)


def _read_pieces(file: Any, most: int, until: float) -> bytes:
    """All that a file gives: what a server says of its size is not relied on."""
    pieces, held = [], 0
    while piece := file.read(_PIECE):
        held += len(piece)
        if held > most:
            raise FileError(f"it has more than the {most} bytes that are read of it")
        if time.monotonic() > until:
            raise TimeoutError
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _read_part(place: Remote, start: int, size: int, until: float) -> bytes:
    end = start + size
    if place.protocol in WEB:
        headers = {"Range": f"bytes={start}-{end - 1}"}
        with closing(_opened(place, headers=headers)) as file:
            if file.r.status != 206:
                raise FileError("the server gives no parts of files, which an archive needs")
            content = _read_pieces(file, size, until)
    else:
        content = bytes(filesystem(place).cat_file(place.path, start=start, end=end))
    if len(content) != size:
        raise OSError(f"{len(content)} bytes came where {size} were asked for")
    return content


def _retried(task: Callable[[float], T]) -> T:
    """Do something over a network, with growing pauses between the attempts.

    Args:
        task: gets the time, by `time.monotonic`, at which it has to end.
    """
    until, wait = time.monotonic() + PATIENCE, FIRST_WAIT
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return task(until)
        except Exception as error:  # each store's library has errors of its own
            if _is_final(error):
                raise _failure(error, 1) from None
            if attempt == ATTEMPTS or time.monotonic() + wait > until:
                raise _failure(error, attempt) from None
            log.debug("attempt %d of %d: %s", attempt, ATTEMPTS, _words(error))
        time.sleep(wait)
        wait *= 2
    raise AssertionError("unreachable")


def _is_final(error: Exception) -> bool:
    status = _status(error)
    if status is not None:
        return 400 <= status < 500 and status not in _TRY_AGAIN
    return isinstance(error, _FINAL) or "Credentials" in type(error).__name__


def _status(error: Exception) -> int | None:
    """The status of an answer over HTTP that was an error."""
    status = getattr(error, "status", None) or getattr(
        getattr(error, "response", None), "status_code", None
    )
    return status if isinstance(status, int) else None


def _failure(error: Exception, attempts: int) -> FileError:
    if isinstance(error, FileError):
        return error
    if isinstance(error, FileNotFoundError) or _status(error) == 404:
        return NoSuchFileError("there is no such file in the store")
    after = "" if attempts == 1 else f" ({counted(attempts, 'attempt')})"
    return FileError(_words(error) + after)


def _words(error: Exception) -> str:
    """What went wrong, without credentials: those stand in the URLs that libraries quote."""
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return "the store refuses access: are the credentials there?"
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "the store did not answer in time"
    if status := _status(error):
        return f"the server answers {status} {quoted(scrubbed(str(getattr(error, 'message', ''))))}"
    return quoted(scrubbed(str(error))) or type(error).__name__
