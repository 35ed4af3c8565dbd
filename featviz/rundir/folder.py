"""The folders that featviz writes into. `Folder` is the only code that opens, makes,
replaces or removes anything below a destination.

A file, or a folder with all that is in it, is written under a hidden name beside its
final one and moved there when it is whole:

    maps/                                          the result
    .maps.<digest of "maps">.<random>.part         is being written, and will take its place
    .maps.<digest of "maps">.<random>.old          has stood there, and will be removed

The digest is that of the full name, since a long one is cut. Nothing is written or
removed through a symbolic link below the folder that the user named. Nothing here needs
torch."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self

from featviz.errors import StoreError
from featviz.files import BY_DESCRIPTOR, NO_LINK, OpenFolder
from featviz.text import quoted

PART = ".part"
OLD = ".old"
_HIDDEN = re.compile(r"\..+\.([0-9a-f]{16})\.[0-9a-f]{16}\.(?:part|old)", re.DOTALL)
# 200 + 16 + 16 digits, dots and the ending are less than the 255 bytes of a file system
_LONGEST = 200
"""Bytes of a file's name that its hidden name shows: systems take 255 in all."""
_BUFFER = 2**16
"""Bytes of a file's write buffer: an allocator keeps one of this size for the next file."""
_EXISTING = (
    os.O_RDWR | NO_LINK | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)
_NEW = _EXISTING | os.O_CREAT | os.O_EXCL
"""Flags of `os.open` for a file that is there, and for one that is not there yet; neither
may be a link."""


class Folder(OpenFolder):
    """A folder that featviz writes into. Its methods act in the folder that was opened,
    even if somebody puts another in its place meanwhile. They neither follow links in it
    nor write through them.

    A parameter `relative` is a path in the folder, with forward slashes; a `name` is one
    entry of the folder itself. All methods raise OSError, and StoreError where a link is
    in the way."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a folder that the user named, and make it if it is missing. Links on the
        way to it are followed."""
        path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @contextmanager
    def folder(self, relative: str, make: bool = False) -> Iterator[Self]:
        """Open a folder below this one, and close it after the block.

        Args:
            relative: the path of the folder; empty for this folder itself, which stays
                open.
            make: whether missing folders on the path are made.

        Raises:
            OSError: the path leads out of this folder, or the folder is missing.
            StoreError: a folder on the path is a link.
        """
        names = PurePosixPath(relative).parts
        if relative.startswith("/") or ".." in names:
            raise OSError(errno.EINVAL, f"it lies outside {self.path}")
        folder = self
        try:
            # The folders of the path are opened one after the other, each by the
            # descriptor of the one above: given the whole path, the system would follow
            # links in it.
            for name in names:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(folder.at(name), dir_fd=folder.descriptor)
                try:
                    inner = folder.child(name)
                except OSError:
                    folder._refuse_link(name)
                    raise
                if folder is not self:
                    folder.close()
                folder = inner
            yield folder
        finally:
            if folder is not self:
                folder.close()

    def _refuse_link(self, name: str) -> None:
        """Raise a StoreError if an entry of this folder is a symbolic link. For a folder
        that could not be opened."""
        with suppress(FileNotFoundError):
            if stat.S_ISLNK(self.stat(name).st_mode):
                raise StoreError(
                    f"{quoted(self.path / name)} is a symbolic link, and nothing"
                    " is written through one",
                    "remove it, or name another folder with --out",
                )

    def new(self, name: str) -> Self:
        """Make a folder in this one and open it. The caller closes it.

        Raises:
            FileExistsError: the name is taken.
        """
        os.mkdir(self.at(name), dir_fd=self.descriptor)
        return self.child(name)

    def create(self, relative: str) -> BinaryIO:
        """Make a file and open it for writing. The file has its final name at once, so
        this is for folders that are hidden until all their files are there. `write` is
        for other folders.

        Args:
            relative: the path of the file; missing folders on it are made.

        Raises:
            FileExistsError: the name is taken.
        """
        above, _, name = relative.rpartition("/")
        with self.folder(above, make=True) as folder:
            descriptor = os.open(folder.at(name), _NEW, 0o666, dir_fd=folder.descriptor)
        return os.fdopen(descriptor, "w+b", _BUFFER)

    def rewrite(self, name: str) -> BinaryIO:
        """Open an existing file for writing at its beginning. This does not truncate the
        file."""
        descriptor = os.open(self.at(name), _EXISTING, dir_fd=self.descriptor)
        return os.fdopen(descriptor, "wb", buffering=0)

    @contextmanager
    def write(self, relative: str) -> Iterator[BinaryIO]:
        """Open a file for the block to write, under a hidden name. If the block succeeds,
        the file gets its final name, and replaces an earlier file, or a link, of that
        name. If the block fails, the file is removed.

        Args:
            relative: the path of the file; missing folders on it are made.

        Raises:
            StoreError: the file cannot be written; also for an OSError of the block.
        """
        above, _, name = relative.rpartition("/")
        with (
            reported(self.path / relative),
            self.folder(above, make=True) as folder,
        ):
            hidden = hidden_name(name)
            file = folder.create(hidden)
            try:
                with file:
                    yield file
                folder.replace(hidden, name)
            except BaseException:
                folder.remove(hidden)
                raise

    def replace(self, old: str, new: str) -> None:
        """Rename an entry of this folder. A file, or an empty folder, that has the new
        name is replaced."""
        if not BY_DESCRIPTOR:  # on Windows an empty folder is in the way
            self.remove_empty(new)
        os.replace(
            self.at(old),
            self.at(new),
            src_dir_fd=self.descriptor,
            dst_dir_fd=self.descriptor,
        )

    def move_from(self, source_folder: Folder, relative: str) -> None:
        """Move a file of another folder to the same path in this one."""
        above, _, name = relative.rpartition("/")
        with (
            source_folder.folder(above) as source,
            self.folder(above, make=True) as target,
        ):
            os.replace(
                source.at(name),
                target.at(name),
                src_dir_fd=source.descriptor,
                dst_dir_fd=target.descriptor,
            )

    def publish(self, new: Folder, name: str) -> None:
        """Give a folder in this one its final name.

        Args:
            new: the open folder, which has a hidden name.
            name: its final name.

        Raises:
            StoreError: another process has put something else under the hidden name.
        """
        # Another process may do so at any time; so the folder under the name is compared
        # with `new` before the rename and after it.
        hidden = new.path.name
        if new.is_entry_of(self, hidden):
            self.replace(hidden, name)
            if new.is_entry_of(self, name):
                return
            self.replace(name, hidden)
        where = quoted(new.path)
        raise StoreError(
            f"{where} was replaced while featviz wrote into it", "try again"
        )

    def is_entry_of(self, above: OpenFolder, name: str) -> bool:
        """Whether the entry `name` of the folder `above` is this very folder."""
        with suppress(OSError):
            return os.path.samestat(above.stat(name), self.identity)
        return False

    def remove(self, relative: str) -> None:
        """Remove a file, or a folder with everything in it; then the folders above it,
        below this one, that are empty by now. What cannot be removed stays, without an
        error. No link is followed."""
        first, _, rest = relative.partition("/")
        if rest:
            with suppress(OSError), self.child(first) as folder:
                folder.remove(rest)
            self.remove_empty(first)
            return
        # a link to a folder counts as a file here: only the link is removed
        with suppress(OSError):
            if stat.S_ISDIR(self.stat(first).st_mode):
                # with `dir_fd`, rmtree follows no link
                shutil.rmtree(
                    self.at(first), ignore_errors=True, dir_fd=self.descriptor
                )
            else:
                os.unlink(self.at(first), dir_fd=self.descriptor)

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove files in the given order, then all empty folders below this one. A file
        that is gone, or has become a folder, is passed over.

        Args:
            names: paths in this folder.

        Raises:
            StoreError: a file cannot be removed.
        """
        for name in names:
            above, _, last = name.rpartition("/")
            with (
                reported(self.path / name),
                suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError),
                self.folder(above) as folder,
            ):
                os.unlink(folder.at(last), dir_fd=folder.descriptor)
        self._remove_empty_folders()

    def _remove_empty_folders(self) -> None:
        """Remove all folders below this one that hold no file, at any depth."""
        for entry in self.entries():
            if entry.is_dir(follow_symlinks=False):
                with suppress(OSError), self.child(entry.name) as folder:
                    folder._remove_empty_folders()
                self.remove_empty(entry.name)

    def remove_empty(self, name: str) -> None:
        """Remove a folder in this one if it is empty; else do nothing."""
        with suppress(OSError):
            os.rmdir(self.at(name), dir_fd=self.descriptor)


def hidden_name(name: str, ending: str = PART) -> str:
    """A new hidden name, which nobody can guess.

    Args:
        name: the name that the file or folder will get (PART), or had before (OLD).
        ending: PART or OLD.
    """
    # the cut may split a character of several bytes: names need not be valid text
    cut = os.fsdecode(os.fsencode(name)[:_LONGEST])
    return f".{cut}.{_digest(name)}.{secrets.token_hex(8)}{ending}"


def is_hidden(name: str) -> bool:
    """Whether `hidden_name` made this name. A file or folder with such a name is being
    written or replaced, or a process was killed meanwhile and left it."""
    return _HIDDEN.fullmatch(name) is not None


def hides(hidden: str, name: str) -> bool:
    """Whether `hidden` is a name that `hidden_name` made for `name`."""
    match = _HIDDEN.fullmatch(hidden)
    return match is not None and match[1] == _digest(name)


def _digest(name: str) -> str:
    """The digest that the hidden names of a file or folder contain, in hexadecimal."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


_GO_ON = (
    "make room, or name another place; of a run, what is complete stays complete, and"
    " --resume goes on"
)


@contextmanager
def reported(path: str | Path, hint: str = _GO_ON) -> Iterator[None]:
    """Turn an OSError of the block into a StoreError that says that `path` cannot be
    written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        # The system's "No such file or directory" would mislead: missing folders are
        # made, and here that was not possible.
        if error.errno == errno.ENOENT:
            reason = "no file or folder can be made there"
        raise StoreError(f"{path} cannot be written: {reason}", hint) from error
