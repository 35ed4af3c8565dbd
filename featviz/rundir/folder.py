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
"""Bytes of a file's write buffer, small enough to be used again for the next file."""
_EXISTING = (
    os.O_RDWR | NO_LINK | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)
_NEW = _EXISTING | os.O_CREAT | os.O_EXCL
"""For a file that is there, and for one that is not there yet; neither may be a link.
"""


class Folder(OpenFolder):
    """A folder that featviz writes into. What is done by it happens in this folder,
    whatever somebody puts in its place meanwhile; links in it are neither followed nor
    written through.

    Names may be paths with forward slashes, relative to the folder. All raises OSError,
    and StoreError where a link is in the way."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a folder of the user's own, whose links are followed, and make it where
        it is missing."""
        path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @contextmanager
    def folder(self, relative: str, make: bool = False) -> Iterator[Self]:
        """Hold a folder below this one open for a block.

        Args:
            relative: its path; empty for this folder itself.
            make: whether folders that are missing are made.

        Raises:
            OSError: the path leads out of this folder, or the folder is missing or a
                link.
        """
        names = PurePosixPath(relative).parts
        if not {"..", "/"}.isdisjoint(names):
            raise OSError(errno.EINVAL, f"it lies outside {self.path}")
        folder = self
        try:
            # One name at a time, each by the descriptor of the folder before: the system
            # itself would follow links within a longer path.
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
        """Say that a folder in this one could not be opened since it is a link.

        Raises:
            StoreError: it is a symbolic link.
        """
        with suppress(FileNotFoundError):
            if stat.S_ISLNK(self.stat(name).st_mode):
                raise StoreError(
                    f"{quoted(self.path / name)} is a symbolic link, and nothing"
                    " is written through one",
                    "remove it, or name another folder with --out",
                )

    def new(self, name: str) -> Self:
        """Make a folder in this one and open it, for the caller to close;
        FileExistsError where something is there."""
        os.mkdir(self.at(name), dir_fd=self.descriptor)
        return self.child(name)

    def create(self, relative: str) -> BinaryIO:
        """Open a new file for writing; for a folder that is itself hidden until it is
        whole.

        Args:
            relative: its path; folders that are missing are made.

        Raises:
            FileExistsError: something is there.
        """
        above, _, name = relative.rpartition("/")
        with self.folder(above, make=True) as folder:
            descriptor = os.open(folder.at(name), _NEW, 0o666, dir_fd=folder.descriptor)
        return os.fdopen(descriptor, "w+b", _BUFFER)

    def rewrite(self, name: str) -> BinaryIO:
        """Open a file that is there for writing; nothing of it is lost by that."""
        descriptor = os.open(self.at(name), _EXISTING, dir_fd=self.descriptor)
        return os.fdopen(descriptor, "wb", buffering=0)

    @contextmanager
    def write(self, relative: str) -> Iterator[BinaryIO]:
        """Open a file for writing under a hidden name; it gets the name that was asked for
        when the block succeeds. An earlier file of that name is replaced, and so is a
        link, which is not followed. Errors are StoreErrors that name the file."""
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
        """Rename something in this folder; it takes the place of a file, or of an empty
        folder."""
        if not BY_DESCRIPTOR:  # on Windows an empty folder is in the way
            self.remove_empty(new)
        os.replace(
            self.at(old),
            self.at(new),
            src_dir_fd=self.descriptor,
            dst_dir_fd=self.descriptor,
        )

    def take(self, source_folder: Folder, relative: str) -> None:
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
        """Give a hidden folder in this one its final name. Nothing gets that name if
        somebody has put something else in place of the hidden folder.

        Raises:
            StoreError: the hidden folder was replaced meanwhile.
        """
        # A name may be given to something else between two system calls; so it is
        # compared before the rename and after it.
        hidden = new.path.name
        if new.is_as(self, hidden):
            self.replace(hidden, name)
            if new.is_as(self, name):
                return
            self.replace(name, hidden)
        where = quoted(new.path)
        raise StoreError(
            f"{where} was replaced while featviz wrote into it", "try again"
        )

    def is_as(self, above: OpenFolder, name: str) -> bool:
        """Whether this folder is what has this name in another one."""
        with suppress(OSError):
            return os.path.samestat(above.stat(name), self.identity)
        return False

    def remove(self, relative: str) -> None:
        """Remove a file, or a folder with all that is in it, and the folders on the way
        to it that are empty then; what is not there, or cannot be removed, stays. No
        link is followed."""
        first, _, rest = relative.partition("/")
        if rest:
            with suppress(OSError), self.child(first) as folder:
                folder.remove(rest)
            self.remove_empty(first)
            return
        # a link to a folder is none itself, and is unlinked
        with suppress(OSError):
            if stat.S_ISDIR(self.stat(first).st_mode):
                # by descriptors where the system has them, so that no link is followed
                shutil.rmtree(
                    self.at(first), ignore_errors=True, dir_fd=self.descriptor
                )
            else:
                os.unlink(self.at(first), dir_fd=self.descriptor)

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove files, in this order, then all folders in this one that hold nothing.
        What is gone already, or has become a folder or a link to one, is passed
        over."""
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
        """Remove the folders in this one that hold nothing but such folders."""
        for entry in self.entries():
            if entry.is_dir(follow_symlinks=False):
                with suppress(OSError), self.child(entry.name) as folder:
                    folder._remove_empty_folders()
                self.remove_empty(entry.name)

    def remove_empty(self, name: str) -> None:
        """Remove a folder in this one, if nothing is in it."""
        with suppress(OSError):
            os.rmdir(self.at(name), dir_fd=self.descriptor)


def hidden_name(name: str, ending: str = PART) -> str:
    """An unguessable name for what is being written and will have this one, or has had
    it."""
    # cut in bytes, which may split a character: a name need not be text
    cut = os.fsdecode(os.fsencode(name)[:_LONGEST])
    return f".{cut}.{_digest(name)}.{secrets.token_hex(8)}{ending}"


def is_hidden(name: str) -> bool:
    """Whether it is a name from `hidden_name`: where it is left, a process was killed."""
    return _HIDDEN.fullmatch(name) is not None


def hides(hidden: str, name: str) -> bool:
    """Whether a hidden name belongs to what has, or will have, this one."""
    match = _HIDDEN.fullmatch(hidden)
    return match is not None and match[1] == _digest(name)


def _digest(name: str) -> str:
    """A digest of the full name, which a hidden name has in it."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


_GO_ON = (
    "make room, or name another place; of a run, what is complete stays complete, and"
    " --resume goes on"
)


@contextmanager
def reported(path: str | Path, hint: str = _GO_ON) -> Iterator[None]:
    """Turn what the system says of a path into a StoreError that names it."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {error.strerror or error}", hint
        ) from error
