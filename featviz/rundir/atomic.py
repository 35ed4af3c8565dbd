"""Files and folders that featviz writes: how they come to stand under their names.

A file, or a folder with all that is in it, is written under an unguessable name beside its final
one and moved there. Nothing is written or removed through a symbolic link below the folder that the
user named. Nothing here needs torch.
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
from pathlib import Path, PurePath, PurePosixPath
from typing import BinaryIO, NamedTuple

from featviz.errors import StoreError
from featviz.text import quoted

_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(?:part|old)", re.DOTALL)
"""Names of what is being written, `.NAME.<16 hex digits>.part` beside NAME, and of what has stood
there. Where one is left, the process that made it was killed."""
_TRIES = 10
"""How often a hidden folder is made where another process removes the empty folder above it."""
_BUFFER = 2**16
"""Bytes of a file's write buffer, small enough to be used again for the next file."""
_LONGEST = 200
"""Bytes of a file's name that its hidden name keeps."""
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _CLOEXEC | getattr(os, "O_BINARY", 0)
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

    def has_link(self, name: str) -> bool:
        mode = os.stat(self.name(name), dir_fd=self.fd, follow_symlinks=False).st_mode
        return stat.S_ISLNK(mode)


@contextmanager
def _opened(folder: Path, below: Path | None, made: int | None = None) -> Iterator[_Place]:
    """Open a folder; what lies below `below` component by component, following no link.

    Args:
        made: how many of the last components are made where they are missing; None for all.
    """
    base = folder if below is None else below
    parts = PurePosixPath(os.path.relpath(folder, base).replace(os.sep, "/")).parts
    if ".." in parts:
        raise OSError(errno.EINVAL, f"it lies outside {base}")
    if made is None:
        base.mkdir(parents=True, exist_ok=True)
    fds = [os.open(base, _DIRECTORY)] if _HAS_PLACES else []
    try:
        place = _Place(str(base), fds[0] if fds else None)
        for number, part in enumerate(parts):
            path = f"{place.path}/{part}"
            if made is None or number >= len(parts) - made:
                with suppress(FileExistsError):
                    os.mkdir(place.name(part), dir_fd=place.fd)
            try:
                if fds:
                    flags = _DIRECTORY | _NOFOLLOW
                    fds.append(os.open(part, flags, dir_fd=place.fd))
                elif place.has_link(part):
                    raise _through_link(path)
            except OSError:
                if place.has_link(part):
                    raise _through_link(path) from None
                raise
            place = _Place(path, fds[-1] if fds else None)
        yield place
    finally:
        for fd in fds:
            os.close(fd)


@contextmanager
def _new_file(place: _Place, name: str, final: str | None = None) -> Iterator[BinaryIO]:
    """Open a file that is not there yet, and give it its final name, if it has another, when all
    is written; removed if the block fails."""
    descriptor = os.open(place.name(name), _NEW, 0o666, dir_fd=place.fd)
    try:
        with os.fdopen(descriptor, "wb", buffering=_BUFFER) as file:
            yield file
        if final is not None:
            _move(place, name, final)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(place.name(name), dir_fd=place.fd)
        raise


def _move(place: _Place, name: str, final: str) -> None:
    os.replace(place.name(name), place.name(final), src_dir_fd=place.fd, dst_dir_fd=place.fd)


@contextmanager
def atomic(path: Path, below: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file beside its final name; move it there if the block succeeds.

    Folders that are missing are made. A link in the file's place is replaced, not followed.

    Args:
        below: a folder that the path lies in. Then no folder on the way from it to the file may be
            a symbolic link.

    Raises:
        StoreError: the file cannot be written; names it.
    """
    with (
        reported(path),
        _opened(path.parent, below) as place,
        _new_file(place, part_name(path.name), path.name) as file,
    ):
        yield file


class HiddenFolder:
    """A folder that is written under an unguessable name beside its final one, and moved there when
    all is in it: under its final name it is whole."""

    def __init__(self, path: Path, below: Path) -> None:
        """Make it, and the folders that are missing on the way.

        Args:
            path: where it is to stand.
            below: a folder that the path lies in. No folder on the way from it to the path may be a
                symbolic link.

        Raises:
            StoreError: it cannot be made; names `path`.
        """
        self.path, self.below = path, below
        self.hidden = path.with_name(part_name(path.name))
        with reported(path):
            for left in reversed(range(_TRIES)):
                try:
                    with _opened(path.parent, below) as above:
                        os.mkdir(above.name(self.hidden.name), dir_fd=above.fd)
                    return
                except FileNotFoundError:
                    if not left:
                        raise

    @contextmanager
    def writing(self, relative: str) -> Iterator[BinaryIO]:
        """Open a new file of this folder, `name` or `folder/name`; removed if the block fails.

        Raises:
            StoreError: it cannot be written; names it.
        """
        *folders, name = relative.split("/")
        with (
            reported(f"{self.path}/{relative}"),
            _opened(self.hidden.joinpath(*folders), self.below, made=len(folders)) as place,
            _new_file(place, name) as file,
        ):
            yield file

    def publish(self) -> None:
        """Move the folder to its place.

        Raises:
            StoreError: it cannot be moved: a link, a file, or files of others are in its place.
        """
        with reported(self.path), _opened(self.path.parent, self.below, made=0) as above:
            try:
                _move(above, self.hidden.name, self.path.name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                words = f"{quoted(str(self.path))} holds files that featviz did not write"
                raise StoreError(words, "move them away; --resume goes on") from None

    def discard(self) -> None:
        """Remove it, and the folders above that this has emptied.

        Raises:
            StoreError: its place cannot be reached any more, or has come to lie behind a link.
        """
        remove_folder(self.hidden, self.below)


def part_name(name: str) -> str:
    """An unguessable name for what is being written and will have this one."""
    cut = os.fsdecode(os.fsencode(name)[:_LONGEST])
    return f".{cut}.{secrets.token_hex(8)}.part"


def part_of(name: str) -> str | None:
    """The name that belongs to a hidden one, cut where it is long; None for any other name."""
    hidden = _HIDDEN.fullmatch(name)
    return None if hidden is None else hidden[1]


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
    folders: set[PurePath] = set()
    for way in ways:
        path = root / way
        with reported(path), suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            with _opened(path.parent, root, made=0) as place:
                os.unlink(place.name(path.name), dir_fd=place.fd)
            folders.update(PurePosixPath(way).parents)
    _remove_empty(root, folders)


def remove_folder(folder: Path, root: Path) -> None:
    """Remove a folder with all that is in it, and those above it that this empties, up to one that
    it lies in. No link is followed.

    Raises:
        StoreError: it cannot be reached, or has come to lie behind a link.
    """
    place = _opened(folder.parent, root, made=0)
    with reported(folder), suppress(FileNotFoundError), place as above:
        shutil.rmtree(above.name(folder.name), ignore_errors=True, dir_fd=above.fd)
    _remove_empty(root, folder.relative_to(root).parents)


def _remove_empty(root: Path, ways: Iterable[PurePath]) -> None:
    for way in sorted(ways, key=lambda way: len(way.parts), reverse=True):
        if way.parts:
            folder = root / way
            with suppress(OSError, StoreError), _opened(folder.parent, root, made=0) as place:
                os.rmdir(place.name(folder.name), dir_fd=place.fd)


def remove_empty(folder: Path) -> None:
    """Remove a folder and those below it, as far as they hold no files."""
    if not folder.is_symlink():
        for place, _, _ in os.walk(folder, topdown=False):
            with suppress(OSError):
                Path(place).rmdir()


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
    except RecursionError:  # of Path.mkdir
        words = f"{quoted(str(path), 80)} cannot be written: too many folders inside one another"
        raise StoreError(words, "name another place") from None
