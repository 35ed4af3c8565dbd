"""Files that somebody else wrote, opened only where they should be; and what a path may mean."""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from featviz.errors import FileError
from featviz.text import quoted

SMALL, DEEPEST = 16 * 2**20, 100

_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\Z)|[\[{\]}]', re.DOTALL)
"""Strings, also one that does not end, and the brackets between them."""

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""O_NONBLOCK: a FIFO that takes the file's place after the check does not block either."""

_IRREGULAR = "it is no regular file"
_LINKED = "it, or a folder on the way to it, is a symbolic link"
_LINK_ERRORS = {errno.ELOOP: _LINKED, errno.ENOTDIR: f"{_LINKED} or no folder"}
"""Where links are not followed: a link to a folder gives the same error as a file in its place."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; no FIFO, device, socket or folder. Links are followed (see
    `Folder`). FileNotFoundError where there is no such file, else FileError."""
    with _errors_named(str(path)):
        return _opened(path)


def real(path: Path) -> Path:
    """The absolute path without links; of links in a circle, the path as it stands."""
    return Path(os.path.realpath(path))


def is_inside(relative: str) -> bool:
    """Whether a name from a file leads to a place below its folder, on every system: relative, with
    forward slashes, without empty, `.` or `..` components, drives and NUL."""
    parts = relative.split("/")
    return not set(parts) & {"", ".", ".."} and not set(relative) & {"\\", "\0", ":"}


class Folder(ExitStack):
    """A folder whose files somebody else has named, as `is_inside` allows: each is opened without
    following a link."""

    def __init__(self, root: Path, relative: str = "") -> None:
        """Open it, FileNotFoundError or FileError where there is none; links on the way to `root`
        are the user's own and are followed, those in `relative` are not."""
        super().__init__()
        self.name = relative
        with _errors_named("."), ExitStack() as opened:
            below = relative.split("/") if relative else []
            self._at = _descend(opened, None, [str(root), *below])
            self.callback(opened.pop_all().close)

    def open(self, relative: str) -> BinaryIO:
        """Open a regular file for reading; as `open_regular`, but through no link."""
        with _errors_named(relative), ExitStack() as opened:
            if not is_inside(relative):
                raise OSError("it lies outside its folder")
            *folders, name = relative.split("/")
            return _opened(name, _descend(opened, self._at, folders))

    def read(self, relative: str, most: int) -> bytes:
        """The content of a file of at most `most` bytes; raises as `open` does."""
        content, size = self.head(relative, most)
        if size > most:
            raise FileError(f"{quoted(relative)} has more than the {most:,} bytes it may have")
        return content

    def read_json(self, relative: str, most: int) -> Any:
        """The value of a JSON file that `parse_json` takes; raises as `read` does."""
        with _errors_named(relative):
            return parse_json(self.read(relative, most).decode("utf-8"))

    def head(self, relative: str, most: int) -> tuple[bytes, int]:
        """The first bytes of a file, at most `most`, and how many it has; raises as `open` does."""
        with self.open(relative) as file, _errors_named(relative):
            size = os.fstat(file.fileno()).st_size
            return file.read(min(size, most)), size

    def size(self, relative: str) -> int:
        """Bytes of a regular file; raises as `open` does."""
        return self.head(relative, 0)[1]


def _descend(opened: ExitStack, at: int | None, folders: Iterable[str]) -> int:
    """Open these folders, one in the other; only the first is one of the user's own."""
    for folder in folders:
        at = os.open(folder, _FOLDER if at is None else _FOLDER | os.O_NOFOLLOW, dir_fd=at)
        opened.callback(os.close, at)
    assert at is not None
    return at


def _opened(name: str | Path, folder: int | None = None) -> BinaryIO:
    """Open what is a regular file before, since opening a device can do something, and after; in a
    folder through no link."""
    mode = os.stat(name, dir_fd=folder, follow_symlinks=folder is None).st_mode
    if stat.S_ISREG(mode):
        flags = _READ if folder is None else _READ | os.O_NOFOLLOW
        descriptor = os.open(name, flags, dir_fd=folder)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    raise OSError(_LINKED if stat.S_ISLNK(mode) else _IRREGULAR)


def read_bytes(path: Path, most: int = SMALL) -> bytes:
    """Read a regular file of at most `most` bytes; raises as `open_regular` does."""
    with open_regular(path) as file, _errors_named(str(path)):
        size = os.fstat(file.fileno()).st_size  # to read more would allocate more
        content = file.read(min(size, most) + 1)
    if len(content) > most:
        raise FileError(f"{quoted(str(path))} has more than the {most:,} bytes it may have")
    return content


def read_text(path: Path, most: int = SMALL) -> str:
    """Read a UTF-8 file of at most `most` bytes; raises as `open_regular` does."""
    with _errors_named(str(path)):
        return read_bytes(path, most).decode("utf-8")


def read_json(path: Path, most: int = SMALL) -> Any:
    """Read a JSON file that `parse_json` takes; raises as `read_bytes` does."""
    with _errors_named(str(path)):
        return parse_json(read_bytes(path, most).decode("utf-8"))


def parse_json(text: str) -> Any:
    """Parse a JSON document; ValueError where it is none, has more than DEEPEST levels, or a number
    that JSON has not (NaN, Infinity) or of more digits than Python reads."""
    depth = 0
    for token in _BRACKETS.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} levels inside one another")

    def refuse(constant: str) -> Any:
        raise ValueError(f"JSON has no number {constant}")

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from error


@contextmanager
def _errors_named(name: str) -> Iterator[None]:
    """Turn errors of the system into those of a file of this name."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, error.strerror, name) from None
    except (OSError, ValueError) as error:
        reason = quoted(str(error)) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            reason = _LINK_ERRORS.get(error.errno or 0, error.strerror)
        raise FileError(f"{quoted(name)} cannot be read: {reason}") from error


_MOST_NAMES, _LONGEST_NAME = 5000, 80
"""Entries of a folder that are compared, and letters of each."""


def misspelt(path: Path) -> Path | None:
    """The file or folder of a like name that a path may mean: `cat.jpg` for `Cta.jpg`."""
    try:
        with os.scandir(path.parent) as entries:
            names = {entry.name.lower(): entry.name for entry in islice(entries, _MOST_NAMES)}
    except (OSError, ValueError):
        return None
    wanted = path.name[:_LONGEST_NAME].lower()
    close = difflib.get_close_matches(wanted, names, 1, 0.75)
    close = close or sorted(name for name in names if PurePath(name).stem == wanted)
    near = path.parent / names[close[0]] if wanted and close else path
    return None if near == path else near


def hint_of(path: Path, near: Path | None) -> str:
    """What helps: the path that was meant (`near`), or where the way to this one ends."""
    if near is not None:
        return f"did you mean {quoted(str(near))}?"
    folders = [one for one in path.parents if os.path.isdir(one)]  # noqa: PTH112
    folder = folders[0] if folders else Path()
    missing = path.relative_to(folder).parts[0] if folders else str(path)
    if os.path.lexists(folder / missing):
        return f"check the path: {quoted(str(folder / missing))!r} is no folder"
    where = "the current folder" if folder == Path() else f"the folder {quoted(str(folder))!r}"
    return f"check the path: {where} has no {quoted(missing)!r}"
