"""Open files that somebody else wrote, only in the folders where they should be; and find
the file that a mistyped path may mean."""

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
"""The most bytes of a text file, unless a caller says otherwise."""
DEEPEST = 100
"""The most levels of nested lists and objects in a JSON document."""

_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\Z)|[\[{\]}]', re.DOTALL)
"""Matches strings of JSON (also one without an end), and the brackets outside of them."""

BY_DESCRIPTOR = os.open in os.supports_dir_fd
"""Whether a folder can be opened as a descriptor. On Windows it cannot, and the flags
below do not exist there."""
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_READ |= getattr(os, "O_NONBLOCK", 0)
"""With O_NONBLOCK, `os.open` does not wait if a FIFO has replaced the file since it was
checked."""
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)

_JUNCTION = 0xA0000003
"""The tag of a junction, Windows' link to a folder (IO_REPARSE_TAG_MOUNT_POINT)."""

_IRREGULAR = "it is no regular file"
_LINKED = "it, or a folder on the way to it, is a symbolic link"
_LINK_ERRORS = {errno.ELOOP: _LINKED, errno.ENOTDIR: f"{_LINKED} or no folder"}
"""Messages for the errors of links. ELOOP: links in a circle, or any link if links are not
followed. ENOTDIR: if links are not followed, a link to a folder, or a file in the place of
a folder."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Links are followed; `ReadFolder` does not follow
    them.

    Raises:
        FileNotFoundError: There is no such file.
        FileError: It cannot be opened, or is a FIFO, a device, a socket or a folder.
    """
    with _name_errors(str(path)):
        return _open_checked(str(path), path.stat())


def real(path: Path) -> Path:
    """The absolute path with all links resolved, except for links in a circle."""
    return Path(os.path.realpath(path))


def is_inside(relative: str) -> bool:
    """Whether a relative path that a file names stays below its folder on every system. It
    has forward slashes, and no empty, `.` or `..` parts, no drive and no NUL."""
    parts = relative.split("/")
    return not set(parts) & {"", ".", ".."} and not set(relative) & {"\\", "\0", ":"}


class OpenFolder:
    """An open folder: its methods work in this very folder, even if another folder or a link
    has replaced it meanwhile. All of them may raise OSError.

    On systems with descriptors of folders (`os.supports_dir_fd`) this always holds.
    Elsewhere (Windows) the path is used, and before each step the folder at the path is
    compared with the folder that was opened."""

    def __init__(self, path: Path, above: OpenFolder | None = None) -> None:
        """Open a folder.

        Args:
            path: The path of the folder.
            above: The open folder that contains it; then it must not be a link, and only
                the last part of `path` is used. None for a path that the user has given,
                whose links are followed.

        Raises:
            OSError: Where the folder is missing, is no folder, or is a link in `above`.
        """
        self.path = path
        self.close: weakref.finalize[..., OpenFolder]
        self.descriptor: int | None = None
        """The argument `dir_fd` of functions of `os`, together with a name from `at`."""
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
            self.close = weakref.finalize(self, int, 0)  # does nothing
            self._first_stat = Path(name).stat(follow_symlinks=above is None)
            mode = self._first_stat.st_mode
            is_junction = getattr(self._first_stat, "st_reparse_tag", 0) == _JUNCTION
            if above is not None and (stat.S_ISLNK(mode) or is_junction):
                raise OSError(errno.ELOOP, _LINKED)
            if not stat.S_ISDIR(mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    @property
    def identity(self) -> os.stat_result:
        """The stat of the folder that was opened, even if another is at its path now."""
        if self.descriptor is None:
            return self._first_stat
        return os.fstat(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def at(self, name: str) -> str:
        """The path of a file or folder in this one, for functions of `os` which also get
        `dir_fd=self.descriptor`."""
        if self.descriptor is not None:
            return name
        if not self.is_in_place():
            raise OSError(errno.ESTALE, "its folder was replaced meanwhile")
        return str(self.path / name)

    def is_in_place(self) -> bool:
        """Whether the path still leads to the folder that was opened."""
        with suppress(OSError):
            return os.path.samestat(self.identity, self.path.stat())
        return False

    def stat(self, name: str) -> os.stat_result:
        """The stat of a file or folder in this one; for a link, that of the link itself."""
        return os.stat(self.at(name), dir_fd=self.descriptor, follow_symlinks=False)

    def child(self, name: str) -> Self:
        """Open a folder in this one. A link raises OSError."""
        return type(self)(self.path / name, self)

    def entries(self) -> list[os.DirEntry[str]]:
        """All files and folders in this one, sorted by name."""
        # a descriptor always means the folder that was opened, a path may not
        folder = self.at("") if self.descriptor is None else self.descriptor
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)

    def open_regular(self, name: str) -> BinaryIO:
        """Open a regular file of this folder for reading.

        Raises:
            OSError: Where the file is missing, a link or no regular file, or was replaced
                while it was opened.
        """
        before = self.stat(name)
        if stat.S_ISLNK(before.st_mode):
            raise OSError(_LINKED)
        file = _open_checked(self.at(name), before, self.descriptor, NO_LINK)
        if os.path.samestat(before, os.fstat(file.fileno())):
            return file
        file.close()
        raise OSError(errno.ESTALE, "it was replaced meanwhile")


class ReadFolder(OpenFolder):
    """An open folder for reading files by relative paths that somebody else has written.
    Paths that are not `is_inside`, and links, are refused. All errors are FileNotFoundError
    or FileError."""

    def __init__(self, path: Path, above: OpenFolder | None = None) -> None:
        """Open a folder that the user has named. Without `above`, links are followed."""
        with _name_errors("."):
            super().__init__(path, above)
        self.name = ""
        """The path below the folder that the user has named, for messages."""

    @classmethod
    def below(cls, root: Path, relative: str) -> ReadFolder:
        """Open a folder below one that the user has named. Links are followed only on the way
        to `root`.

        Args:
            root: The folder that the user has named.
            relative: The path below it, with forward slashes; empty for `root` itself.
        """
        folder = cls(root)
        for name in relative.split("/") if relative else []:
            folder = folder.child(name)
        folder.name = relative
        return folder

    def open(self, relative: str) -> BinaryIO:
        """Open a regular file for reading.

        Raises:
            FileNotFoundError: There is no such file.
            FileError: The file, or a folder on the way to it, is a link; the path leads
                out of this folder; or the file cannot be opened, or is not regular.
        """
        with _name_errors(relative):
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
            FileNotFoundError: There is no such file.
            FileError: It has more than `most` bytes, or cannot be read.
        """
        with self.open(relative) as file:
            return _read_at_most(file, relative, most)

    def read_json(self, relative: str, most: int) -> Any:
        """The value in a JSON file.

        Raises:
            FileNotFoundError: There is no such file.
            FileError: It has more than `most` bytes, is not JSON that `parse_json` takes,
                or cannot be read.
        """
        with _name_errors(relative):
            return parse_json(self.read(relative, most).decode("utf-8"))

    def head(self, relative: str, most: int) -> tuple[bytes, int]:
        """The first bytes of a file, at most `most`, and how many bytes it has in all.

        Raises:
            FileNotFoundError: There is no such file.
            FileError: It cannot be read.
        """
        with self.open(relative) as file, _name_errors(relative):
            size = os.fstat(file.fileno()).st_size
            return file.read(min(size, most)), size

    def size(self, relative: str) -> int:
        """How many bytes a file has. It raises what `head` raises."""
        return self.head(relative, 0)[1]


def _open_checked(
    name: str, before: os.stat_result, folder: int | None = None, flags: int = 0
) -> BinaryIO:
    """Open a regular file for reading. Its type is checked before it is opened, since opening
    a device can have an effect, and again afterwards, since it may have been replaced.

    Args:
        name: The path of the file, relative to `folder` if that is given.
        before: The stat of the file, from before it is opened.
        folder: The descriptor of the folder that contains the file, if there is one.
        flags: Further flags of `os.open`, besides those for reading.

    Raises:
        OSError: Where the file is not regular, or cannot be opened.
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
        FileNotFoundError: There is no such file.
        FileError: It has more than `most` bytes, cannot be read, or is not a regular
            file.
    """
    with open_regular(path) as file:
        return _read_at_most(file, str(path), most)


def _read_at_most(file: BinaryIO, name: str, most: int) -> bytes:
    """The whole content of an open file.

    Args:
        file: The file.
        name: Its name, for messages.
        most: The most bytes that it may have.

    Raises:
        FileError: Where it has more bytes, or cannot be read.
    """
    with _name_errors(name):
        # `read` allocates as many bytes as it is asked for
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, most) + 1)
    if len(content) > most:
        raise FileError(f"{quoted(name)} has more than the {most:,} bytes it may have")
    return content


def read_text(path: Path, most: int = SMALL) -> str:
    """Read a file of text.

    Raises:
        FileNotFoundError: There is no such file.
        FileError: It has more than `most` bytes, is not UTF-8, or cannot be read.
    """
    with _name_errors(str(path)):
        return read_bytes(path, most).decode("utf-8")


def read_json(path: Path, most: int = SMALL) -> Any:
    """Read a JSON file.

    Raises:
        FileNotFoundError: There is no such file.
        FileError: It has more than `most` bytes, is not JSON that `parse_json` takes,
            or cannot be read.
    """
    with _name_errors(str(path)):
        return parse_json(read_text(path, most))


def parse_json(text: str) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: Where the text is not JSON, or has more than DEEPEST levels, NaN,
            Infinity, or a number with more digits than Python reads.
    """
    # json recurses for each level: too many would overflow the stack, and end the process
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
def _name_errors(name: str) -> Iterator[None]:
    """A context in which an error of the system becomes one that names a file. A missing file
    stays a FileNotFoundError, which callers treat in another way; any other error becomes a
    FileError."""
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
"""How many names in a folder are compared with a mistyped name, and how many of its letters.
"""


def similar_path(path: Path) -> Path | None:
    """The file or folder with a similar name that a mistyped path may mean: `cat.jpg` for
    `Cta.jpg`. None if there is none."""
    try:
        with os.scandir(path.parent) as entries:
            # not all names, since a folder may have millions of files
            names = {
                entry.name.lower(): entry.name for entry in islice(entries, _MOST_NAMES)
            }
    except (OSError, ValueError):
        return None
    name = path.name[:_LONGEST_NAME].lower()
    close = difflib.get_close_matches(name, names, 1, 0.75)
    # a short name without its suffix is not a close match: `net` for `net.py`
    close = close or sorted(file for file in names if PurePath(file).stem == name)
    if not name or not close or names[close[0]] == path.name:
        return None
    return path.parent / names[close[0]]


def check_exists(path: Path, noun: str = "Directory") -> None:
    """Raise a UsageError for a path that does not exist; the hint names a similar path.

    Args:
        path: The path.
        noun: The beginning of the message: what should be at the path.
    """
    if not path.exists():
        text = str(path)
        raise missing_file(f"{noun} {quoted(text)!r} does not exist.", text)


def missing_file(message: str, text: str, otherwise: str = "") -> UsageError:
    """The error for a path that does not exist. Its hint names a file or folder with a similar
    name.

    Args:
        message: The message, which says what is missing.
        text: The path, as it was typed.
        otherwise: The hint if nothing has a similar name. By default it names the last
            folder on the way to the path that exists.
    """
    path = Path(text)
    # if this is a link without a target, the name itself is right
    if os.path.lexists(path):
        return UsageError(message, otherwise or "check the path")
    near = similar_path(path)
    if near is not None:
        return UsageError(
            message, f"did you mean {quoted(str(near))}?", replace=(text, str(near))
        )
    return UsageError(message, otherwise or _where_it_ends(path))


def _where_it_ends(path: Path) -> str:
    """A hint that names the last folder on the way to a path that exists, and the part of the
    path that is missing in it."""
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
