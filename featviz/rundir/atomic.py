"""Files and folders that featviz writes: how they come to stand under their names.

A file, or a folder with all that is in it, is written under an unguessable name beside its final
one and moved there. Nothing is written through a symbolic link below the folder that the user
named. Nothing here needs torch.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from featviz.errors import StoreError
from featviz.text import quoted

PART = re.compile(r"\.(.+?)(?:\.[0-9a-f]{16})?\.part", re.DOTALL)
"""Names of what is being written: `.NAME.<16 hex digits>.part` beside NAME (`.NAME.part` up to
0.1.0, and only files). Where one is left, the process that wrote it was killed."""

_FOLDER_PART = re.compile(r"\.(.+)\.[0-9a-f]{16}\.part", re.DOTALL)

_TRIES = 10
"""How often a hidden folder is made where another process removes the empty folder above it."""

_BUFFER = 2**16
"""Bytes of a file's write buffer, small enough to be used again for the next file; more than that
at once goes past it."""

_LONGEST = 200
"""Bytes of a file's name that its hidden name keeps."""
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NEW = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL
    | _NOFOLLOW
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
_FOLDER = _DIRECTORY | _NOFOLLOW
"""A folder, and no link to one."""
_HAS_PLACES = {os.open, os.mkdir, os.stat, os.unlink, os.rmdir} <= os.supports_dir_fd
"""Whether the system opens files relative to a folder that is open (Windows does not)."""


class _Place(NamedTuple):
    """A folder that is open: what is done by it happens in this folder, whatever is put in its
    place meanwhile."""

    path: str
    fd: int | None
    """None where the system has no such thing."""

    def name(self, file: str) -> str:
        return file if self.fd is not None else f"{self.path}/{file}"


@contextmanager
def atomic(path: Path, below: Path | None = None, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a file beside its final name; move it there if the block succeeds.

    Folders that are missing are made. A link in the file's place is replaced, not followed.

    Args:
        below: a folder that the path lies in. Then no folder on the way from it to the file may be
            a symbolic link.
        durable: wait until the disk has the file, and then its name.

    Raises:
        StoreError: the file cannot be written; names it.
    """
    with reported(path), _opened(path.parent, below) as place:
        part = part_name(path.name)
        descriptor = os.open(place.name(part), _NEW, 0o666, dir_fd=place.fd)
        try:
            with os.fdopen(descriptor, "wb", buffering=_BUFFER) as file:
                yield file
                _flush(file, durable)
            _move(place, part, path.name)
            _sync([place] if durable else [])
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(place.name(part), dir_fd=place.fd)
            raise


class HiddenFolder:
    """A folder that is written under an unguessable name beside its final one, and moved there when
    all is in it: one move for all of its files, and under its final name it is whole."""

    def __init__(self, path: Path, below: Path, durable: bool = False) -> None:
        """Make it, and the folders that are missing on the way.

        Args:
            path: where it is to stand.
            below: a folder that the path lies in. No folder on the way from it to the path may be a
                symbolic link.
            durable: wait until the disk has all files before the folder gets its name, and then
                until it has the name.

        Raises:
            StoreError: it cannot be made; names `path`.
        """
        self.path, self.below, self.durable = path, below, durable
        self._folders: set[str] = set()
        self._files: set[str] = set()
        self._name = part_name(path.name)
        with reported(path):
            self._place = self._made()

    def _made(self, tries: int = _TRIES) -> _Place:
        try:
            with _opened(self.path.parent, self.below) as above:
                return _new_folder(above, self._name)
        except FileNotFoundError:
            if tries == 1:
                raise
            return self._made(tries - 1)

    @contextmanager
    def writing(self, relative: str) -> Iterator[BinaryIO]:
        """Open a new file of this folder, `name` or `folder/name`; removed if the block fails.

        Raises:
            StoreError: it cannot be written; names it.
        """
        folder, _, name = relative.rpartition("/")
        with reported(f"{self.path}/{relative}"), self._inside(folder) as place:
            descriptor = os.open(place.name(name), _NEW, 0o666, dir_fd=place.fd)
            try:
                with os.fdopen(descriptor, "wb", buffering=_BUFFER) as file:
                    yield file
                    _flush(file, self.durable)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(place.name(name), dir_fd=place.fd)
                raise
        self._files.add(relative)

    def publish(self, last: str) -> None:
        """Move the folder to its place. What stands there already stays, but files of the same
        names are replaced.

        Args:
            last: the file that makes it whole, and comes last where files are moved one by one.

        Raises:
            StoreError: it cannot be moved, or a link is in its place.
        """
        with reported(self.path), _opened(self.path.parent, self.below) as above:
            if self.durable:
                self._sync_folders()
            try:
                _move(above, self._name, self.path.name)
            except OSError:
                if not _is_folder(above, self.path.name):
                    raise
                self._move_files(last)
                shutil.rmtree(above.name(self._name), dir_fd=above.fd)
            if self.durable:
                self._sync_above()
        self._close()

    def _sync_folders(self) -> None:
        for folder in self._folders:
            with self._inside(folder) as place:
                _sync([place])
        _sync([self._place])

    def _sync_above(self) -> None:
        """The folder that has the new name, and those above it, which may be new."""
        for folder in self.path.parents:
            with _opened(folder, self.below, make=False) as place:
                _sync([place])
            if folder == self.below:
                return

    def discard(self) -> None:
        """Remove it, and the folders above that this has emptied.

        Raises:
            StoreError: its place cannot be reached any more, or has come to lie behind a link.
        """
        self._close()
        place = _opened(self.path.parent, self.below, make=False)
        with reported(self.path), suppress(FileNotFoundError), place as above:
            shutil.rmtree(above.name(self._name), ignore_errors=True, dir_fd=above.fd)
        remove_above(self.path, self.below)

    def _close(self) -> None:
        if self._place.fd is not None:
            os.close(self._place.fd)
            self._place = _Place(self._place.path, None)

    @contextmanager
    def _inside(self, folder: str) -> Iterator[_Place]:
        """This folder, or one in it, which is made the first time."""
        if not folder:
            yield self._place
            return
        place = _enter(self._place, folder, make=folder not in self._folders)
        self._folders.add(folder)
        try:
            yield place
        finally:
            if place.fd is not None:
                os.close(place.fd)

    def _move_files(self, last: str) -> None:
        for way in sorted(self._files, key=lambda way: (way == last, way)):
            folder, _, name = way.rpartition("/")
            goal = _opened((self.path / way).parent, self.below)
            with self._inside(folder) as source, goal as target:
                _move(source, name, name, target)


def part_name(name: str) -> str:
    """An unguessable name for what is being written and will have this one."""
    return f".{cut_name(name)}.{secrets.token_hex(8)}.part"


def cut_name(name: str) -> str:
    """A name, or so much of a very long one that the system takes it with a few letters more."""
    return os.fsdecode(os.fsencode(name)[:_LONGEST])


def part_of(name: str) -> str | None:
    """The name of the file that was being written under a hidden one; None for any other name."""
    part = PART.fullmatch(name)
    return None if part is None else part[1]


def folder_part_of(name: str) -> str | None:
    """The name of the folder that was being written under a hidden one; None for any other name."""
    part = _FOLDER_PART.fullmatch(name)
    return None if part is None else part[1]


def refuse_links(root: Path, ways: Iterable[str]) -> None:
    """Say before the work that something below a folder is a symbolic link.

    Args:
        ways: paths relative to the folder, with forward slashes; what is not there is no link.

    Raises:
        StoreError: names the first link.
    """
    seen: set[Path] = set()
    for way in ways:
        path = root
        for part in PurePosixPath(way).parts:
            path = path / part
            if path not in seen and path.is_symlink():
                raise _through_link(path)
            seen.add(path)


def remove(root: Path, ways: Iterable[str]) -> None:
    """Remove files below a folder, in this order, then the folders that this has emptied; what is
    gone already, or has become a folder, is passed over.

    Raises:
        StoreError: a file cannot be removed, or has come to lie behind a link; names it.
    """
    folders: dict[Path, None] = {}
    for way in ways:
        path = root / way
        with reported(path), suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            with _opened(path.parent, root, make=False) as place:
                os.unlink(place.name(path.name), dir_fd=place.fd)
            folders |= dict.fromkeys(root.joinpath(*parts) for parts in _above(way))
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        with suppress(OSError), _opened(folder.parent, root, make=False) as place:
            os.rmdir(place.name(folder.name), dir_fd=place.fd)


def remove_empty(folder: Path) -> None:
    """Remove a folder and those below it, as far as they hold no files."""
    if not folder.is_symlink():
        for place, _, _ in os.walk(folder, topdown=False):
            with suppress(OSError):
                Path(place).rmdir()


def remove_above(path: Path, root: Path) -> None:
    """Remove the folders between a path and a folder that it lies in, as far as they are empty."""
    for folder in path.parents:
        if folder == root or root not in folder.parents:
            return
        with suppress(OSError), _opened(folder.parent, root, make=False) as place:
            os.rmdir(place.name(folder.name), dir_fd=place.fd)


def _above(way: str) -> Iterator[tuple[str, ...]]:
    parts = PurePosixPath(way).parts
    return (parts[:count] for count in range(1, len(parts)))


def _move(place: _Place, part: str, name: str, target: _Place | None = None) -> None:
    """Give a finished file or folder its name, in the folder it is in or in another one."""
    goal = target or place
    os.replace(place.name(part), goal.name(name), src_dir_fd=place.fd, dst_dir_fd=goal.fd)


def _flush(file: BinaryIO, durable: bool) -> None:
    """Hand a file to the system, or to the disk."""
    file.flush()
    if durable:
        os.fsync(file.fileno())


def _sync(places: Iterable[_Place]) -> None:
    """Wait until the disk has the names in these folders, where the system can tell."""
    for place in places:
        if place.fd is not None:
            os.fsync(place.fd)


def _is_folder(place: _Place, name: str) -> bool:
    """Whether a folder, and no link to one, has this name."""
    with suppress(FileNotFoundError):
        mode = os.stat(place.name(name), dir_fd=place.fd, follow_symlinks=False).st_mode
        return stat.S_ISDIR(mode)
    return False


def _new_folder(above: _Place, name: str) -> _Place:
    """Make a folder and open it."""
    os.mkdir(above.name(name), dir_fd=above.fd)
    try:
        return _enter(above, name, make=False)
    except BaseException:
        os.rmdir(above.name(name), dir_fd=above.fd)
        raise


@contextmanager
def _opened(folder: Path, below: Path | None, make: bool = True) -> Iterator[_Place]:
    """Open a folder; what lies below `below` component by component, following no link."""
    base = folder if below is None else below
    parts = PurePosixPath(os.path.relpath(folder, base).replace(os.sep, "/")).parts
    if ".." in parts:
        raise OSError(errno.EINVAL, f"it lies outside {base}")
    if make:
        base.mkdir(parents=True, exist_ok=True)
    place = _Place(str(base), os.open(base, _DIRECTORY) if _HAS_PLACES else None)
    try:
        for part in parts:
            inner = _enter(place, part, make)
            if place.fd is not None:
                os.close(place.fd)
            place = inner
        yield place
    finally:
        if place.fd is not None:
            os.close(place.fd)


def _enter(place: _Place, part: str, make: bool) -> _Place:
    """Open a folder in a folder; a link is refused."""
    if make:
        with suppress(FileExistsError):
            os.mkdir(place.name(part), dir_fd=place.fd)
    try:
        fd = None if place.fd is None else os.open(part, _FOLDER, dir_fd=place.fd)
    except OSError:
        _refuse_link(place, part)
        raise
    if fd is None:
        _refuse_link(place, part)
    return _Place(f"{place.path}/{part}", fd)


def _refuse_link(place: _Place, part: str) -> None:
    mode = os.stat(place.name(part), dir_fd=place.fd, follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        raise _through_link(f"{place.path}/{part}")


def _through_link(path: str | Path) -> StoreError:
    return StoreError(
        f"{quoted(str(path))} is a symbolic link, and nothing is written through one",
        "remove it, or name another folder with --out",
    )


_GO_ON = "what is complete stays complete; --resume when it works, or another --out"


@contextmanager
def reported(path: str | Path, hint: str = _GO_ON) -> Iterator[None]:
    """Turn what the system says of a path into a StoreError that names it.

    Raises:
        StoreError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}", hint) from error
