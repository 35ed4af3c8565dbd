"""Files that somebody else wrote, opened only where they should be; and what a path may
mean."""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Self

from featviz.errors import FileError, UsageError
from featviz.text import quoted

SMALL = 16 * 2**20
"""Bytes that a file of text may have, where nothing else is said."""
DEEPEST = 100
"""Levels of lists and objects inside one another that a JSON document may have."""

_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\Z)|[\[{\]}]', re.DOTALL)
"""Strings, also one that does not end, and the brackets between them."""

BY_DESCRIPTOR = os.open in os.supports_dir_fd
"""Whether a folder can be held by a descriptor; not on Windows, which has none of these
flags."""
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_READ |= getattr(os, "O_NONBLOCK", 0)
"""O_NONBLOCK: a FIFO that takes the file's place after the check does not block either.
"""
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)

_JUNCTION = 0xA0000003
"""What Windows says of a junction, its link to a folder (IO_REPARSE_TAG_MOUNT_POINT)."""

_IRREGULAR = "it is no regular file"
_LINKED = "it, or a folder on the way to it, is a symbolic link"
_LINK_ERRORS = {errno.ELOOP: _LINKED, errno.ENOTDIR: f"{_LINKED} or no folder"}
"""What is said for errors of links: of links in a circle, and, where links are not
followed, of any link. There a link to a folder gives the same error as a file in its
place."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Links are followed (see `ReadFolder`).

    Raises:
        FileNotFoundError: there is no such file.
        FileError: it cannot be opened, or is a FIFO, a device, a socket or a folder.
    """
    with _errors_named(str(path)):
        return _opened(str(path), path.stat())


def real(path: Path) -> Path:
    """The absolute path without links; of links in a circle, the path as it stands."""
    return Path(os.path.realpath(path))


def is_inside(relative: str) -> bool:
    """Whether a name from a file leads to a place below its folder, on every system:
    relative, with forward slashes, without empty, `.` or `..` components, drives and
    NUL."""
    parts = relative.split("/")
    return not set(parts) & {"", ".", ".."} and not set(relative) & {"\\", "\0", ":"}


class OpenFolder:
    """A folder that is open: what is done by it happens in this folder, whatever comes
    to stand in its place meanwhile. Everything here raises OSError.

    Where the system takes descriptors of folders (`os.supports_dir_fd`) that holds
    without a gap. Elsewhere (Windows) a folder is its path, and before each step it is
    compared with the folder that was there when it was opened."""

    def __init__(self, path: Path, above: OpenFolder | None = None) -> None:
        """Open a folder.

        Args:
            path: Of the folder.
            above: The folder in which it is, by the last part of its path; then it may
                be no link. Without it the path is one of the user's own, and its links
                are followed.

        Raises:
            OSError: Where it is missing, no folder, or, below another, a link.
        """
        self.path = path
        self.close: weakref.finalize[..., OpenFolder]
        self.descriptor: int | None = None
        """For the parameter `dir_fd` of functions of `os`, with a name from `at`."""
        name = str(path)
        flags = _FOLDER
        descriptor_above = None
        if above is not None:
            name = above.at(path.name)
            flags |= NO_LINK
            descriptor_above = above.descriptor
        if BY_DESCRIPTOR:
            self.descriptor = os.open(name, flags, dir_fd=descriptor_above)
            self.close = weakref.finalize(self, os.close, self.descriptor)
        else:
            self.close = weakref.finalize(self, int, 0)  # there is nothing to close
            self._first_stat = Path(name).stat(follow_symlinks=above is None)
            mode = self._first_stat.st_mode
            is_junction = getattr(self._first_stat, "st_reparse_tag", 0) == _JUNCTION
            if above is not None and (stat.S_ISLNK(mode) or is_junction):
                raise OSError(errno.ELOOP, _LINKED)
            if not stat.S_ISDIR(mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    @property
    def identity(self) -> os.stat_result:
        """The folder that is open, whatever stands at its path by now."""
        if self.descriptor is None:
            return self._first_stat
        return os.fstat(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def at(self, name: str) -> str:
        """What functions of `os` take for a file or folder in this one, with `dir_fd`."""
        if self.descriptor is not None:
            return name
        if not self.is_in_place():
            raise OSError(errno.ESTALE, "its folder was replaced meanwhile")
        return str(self.path / name)

    def is_in_place(self) -> bool:
        """Whether its path still leads to it."""
        with suppress(OSError):
            return os.path.samestat(self.identity, self.path.stat())
        return False

    def stat(self, name: str) -> os.stat_result:
        """What there is of this name; of a link it is the link itself."""
        return os.stat(self.at(name), dir_fd=self.descriptor, follow_symlinks=False)

    def child(self, name: str) -> Self:
        """Open a folder in this one; OSError for a link."""
        return type(self)(self.path / name, self)

    def entries(self) -> list[os.DirEntry[str]]:
        """All that is in it, by name."""
        # by the descriptor, which stays with the folder, where there is one
        folder = self.at("") if self.descriptor is None else self.descriptor
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)

    def open_regular(self, name: str) -> BinaryIO:
        """Open a regular file of this folder for reading; through no link.

        Raises:
            OSError: Where it is missing, a link, no regular file, or was replaced
                meanwhile.
        """
        before = self.stat(name)
        if stat.S_ISLNK(before.st_mode):
            raise OSError(_LINKED)
        file = _opened(self.at(name), before, self.descriptor, NO_LINK)
        if os.path.samestat(before, os.fstat(file.fileno())):
            return file
        file.close()
        raise OSError(errno.ESTALE, "it was replaced meanwhile")


class ReadFolder(OpenFolder):
    """A folder whose files somebody else has named, as `is_inside` allows: each is
    opened without following a link. What goes wrong is a FileNotFoundError or a
    FileError."""

    def __init__(self, path: Path, above: OpenFolder | None = None) -> None:
        """Open a folder of the user's own, whose links are followed."""
        with _errors_named("."):
            super().__init__(path, above)
        self.name = ""
        """Its path below the folder of the user's own, for messages."""

    @classmethod
    def below(cls, root: Path, relative: str) -> ReadFolder:
        """Open a folder in one of the user's own; links are followed on the way to
        `root` alone."""
        folder = cls(root)
        for name in relative.split("/") if relative else []:
            folder = folder.child(name)
        folder.name = relative
        return folder

    def open(self, relative: str) -> BinaryIO:
        """Open a regular file for reading.

        Raises:
            FileNotFoundError: there is no such file.
            FileError: it, or a folder on the way to it, is a link; it lies outside this
                folder; it cannot be opened, or is not a regular file.
        """
        with _errors_named(relative):
            if not is_inside(relative):
                raise OSError("it lies outside its folder")
            *folders, name = relative.split("/")
            folder: OpenFolder = self
            for folder_name in folders:
                folder = OpenFolder(folder.path / folder_name, folder)
            return folder.open_regular(name)

    def read(self, relative: str, most: int) -> bytes:
        """The content of a file.

        Raises:
            FileNotFoundError: there is no such file.
            FileError: it has more than `most` bytes, or cannot be read.
        """
        with self.open(relative) as file:
            return _content(file, relative, most)

    def read_json(self, relative: str, most: int) -> Any:
        """The value in a JSON file.

        Raises:
            FileNotFoundError: there is no such file.
            FileError: it has more than `most` bytes, is not JSON that `parse_json`
                takes, or cannot be read.
        """
        with _errors_named(relative):
            return parse_json(self.read(relative, most).decode("utf-8"))

    def head(self, relative: str, most: int) -> tuple[bytes, int]:
        """The first bytes of a file, at most `most`, and how many it has in all.

        Raises:
            FileNotFoundError: there is no such file.
            FileError: it cannot be read.
        """
        with self.open(relative) as file, _errors_named(relative):
            size = os.fstat(file.fileno()).st_size
            return file.read(min(size, most)), size

    def size(self, relative: str) -> int:
        """How many bytes a file has; FileNotFoundError or FileError as from `head`."""
        return self.head(relative, 0)[1]


def _opened(
    name: str, before: os.stat_result, folder: int | None = None, flags: int = 0
) -> BinaryIO:
    """Open a regular file for reading. It is looked at before it is opened, since to open
    a device can do something, and after that, since it may have been replaced.

    Args:
        name: Of the file, or its path.
        before: What `stat` said of it before.
        folder: The descriptor of the folder that it is in.
        flags: Of `os.open`, beside those of reading.

    Raises:
        OSError: Where it is not a regular file.
    """
    if stat.S_ISREG(before.st_mode):
        descriptor = os.open(name, _READ | flags, dir_fd=folder)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    raise OSError(_IRREGULAR)


def read_bytes(path: Path, most: int = SMALL) -> bytes:
    """Read a regular file.

    Raises:
        FileNotFoundError: there is no such file.
        FileError: it has more than `most` bytes, cannot be read, or is not a regular
            file.
    """
    with open_regular(path) as file:
        return _content(file, str(path), most)


def _content(file: BinaryIO, name: str, most: int) -> bytes:
    """All that is in a file; FileError where it has more than `most` bytes, or cannot be
    read."""
    with _errors_named(name):
        size = os.fstat(file.fileno()).st_size  # to read more would allocate more
        content = file.read(min(size, most) + 1)
    if len(content) > most:
        raise FileError(f"{quoted(name)} has more than the {most:,} bytes it may have")
    return content


def read_text(path: Path, most: int = SMALL) -> str:
    """Read a file of text.

    Raises:
        FileNotFoundError: there is no such file.
        FileError: it has more than `most` bytes, is not UTF-8, or cannot be read.
    """
    with _errors_named(str(path)):
        return read_bytes(path, most).decode("utf-8")


def read_json(path: Path, most: int = SMALL) -> Any:
    """Read a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        FileError: it has more than `most` bytes, is not JSON that `parse_json` takes,
            or cannot be read.
    """
    with _errors_named(str(path)):
        return parse_json(read_text(path, most))


def parse_json(text: str) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: Where the text is not JSON, has more than DEEPEST levels, a number
            that JSON does not have (NaN, Infinity), or one of more digits than Python
            reads.
    """
    # the parser recurses, and ends the process where the stack ends
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
    """Turn errors of the system into those of a file of this name: FileNotFoundError
    where it is missing, for which callers have a way of their own, else FileError."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, error.strerror, name) from None
    except (OSError, ValueError) as error:
        reason = quoted(str(error)) or type(error).__name__
        # str(error) also has the number of the error and the path
        if isinstance(error, OSError) and error.strerror:
            reason = _LINK_ERRORS.get(error.errno or 0, error.strerror)
        raise FileError(f"{quoted(name)} cannot be read: {reason}") from error


_MOST_NAMES, _LONGEST_NAME = 5000, 80
"""Entries of a folder that are compared, and letters of each."""


def misspelt(path: Path) -> Path | None:
    """The file or folder of a like name that a path may mean: `cat.jpg` for `Cta.jpg`."""
    try:
        with os.scandir(path.parent) as entries:
            # enough of them: a folder may hold millions of files
            names = {
                entry.name.lower(): entry.name for entry in islice(entries, _MOST_NAMES)
            }
    except (OSError, ValueError):
        return None
    name = path.name[:_LONGEST_NAME].lower()
    close = difflib.get_close_matches(name, names, 1, 0.75)
    # a name without its suffix is not close, if it is short: `net` for `net.py`
    close = close or sorted(file for file in names if PurePath(file).stem == name)
    if not name or not close or names[close[0]] == path.name:
        return None
    return path.parent / names[close[0]]


def check_exists(path: Path, noun: str = "Directory") -> None:
    """Refuse a path that leads nowhere: UsageError, with the names that are like it.

    Args:
        noun: what it should be, as the message begins.
    """
    if not path.exists():
        text = str(path)
        raise missing_file(f"{noun} {quoted(text)!r} does not exist.", text)


def missing_file(message: str, text: str, otherwise: str = "") -> UsageError:
    """The error for a path that leads nowhere; its hint names the file or folder of a
    like name.

    Args:
        message: What is not there.
        text: The path, as it was typed.
        otherwise: The hint where nothing has a like name; by default it says where the
            way to the path ends.
    """
    path = Path(text)
    # of a link whose target is gone the name is right
    if os.path.lexists(path):
        return UsageError(message, otherwise or "check the path")
    near = misspelt(path)
    if near is not None:
        return UsageError(
            message, f"did you mean {quoted(str(near))}?", replace=(text, str(near))
        )
    return UsageError(message, otherwise or _where_it_ends(path))


def _where_it_ends(path: Path) -> str:
    """A hint with the last folder on the way to a path, and what it lacks."""
    folder = path.parent
    while not os.path.isdir(folder) and folder != folder.parent:  # noqa: PTH112
        folder = folder.parent
    missing = path.relative_to(folder).parts[0]
    if os.path.lexists(folder / missing):
        return f"check the path: {quoted(str(folder / missing))!r} is no folder"
    title = f"the folder {quoted(str(folder))!r}"
    if folder == Path():
        title = "the current folder"
    return f"check the path: {title} has no {quoted(missing)!r}"
