"""Files of stores are read within bounds of bytes, attempts and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar

from featviz.errors import FileError
from featviz.files import attempts
from featviz.files.stores import Remote
from featviz.files.urls import WEB
from featviz.text import quoted

T = TypeVar("T")

_PIECE = 2**20


class NoSuchFileError(FileError):
    """There is nothing of that name in the store."""


def read(place: Remote, most: int) -> bytes:
    """The bytes of a file of at most `most` bytes.

    Raises:
        FileError: it is not there, larger, or could not be read in a few attempts.
    """
    return _tried(place, lambda until: _read(place, most, until))


def read_part(place: Remote, start: int, size: int) -> bytes:
    """`size` bytes of a file, from `start` on.

    Raises:
        FileError: they could not be read in a few attempts.
    """
    return _tried(place, lambda until: _read_part(place, start, size, until))


def size_of(place: Remote) -> int:
    """Bytes of a file.

    Raises:
        FileError: it is not there, or the store does not say.
    """
    size = _tried(place, lambda until: place.url.filesystem().info(place.path).get("size"))
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
    return bool(_tried(place, lambda until: place.url.filesystem().isdir(place.path)))


def children(place: Remote) -> list[tuple[str, bool]]:
    """The paths directly below a folder, and whether each is a folder, sorted; none where there is
    no such folder. A server of web pages is not asked, but its page read: see `links`.

    Raises:
        FileError: the store does not answer.
    """
    try:
        rows = _tried(place, lambda until: list(place.url.filesystem().ls(place.path, detail=True)))
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
    return place.url.filesystem().open(place.path, "rb", **options)


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
                raise FileError(
                    "the server gives no parts of files, which an archive needs",
                    "download the archive, and give the file",
                )
            content = _read_pieces(file, size, until)
    else:
        content = bytes(place.url.filesystem().cat_file(place.path, start=start, end=end))
    if len(content) != size:
        raise OSError(f"{len(content)} bytes came where {size} were asked for")
    return content


def _tried(place: Remote, task: Callable[[float], T]) -> T:
    """Do something over a network; `task` gets the time at which it has to end."""
    try:
        return attempts.tried(place.url, task)
    except FileNotFoundError:
        raise NoSuchFileError("there is no such file in the store") from None
    except FileError as error:
        raise error from None
