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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath, PurePosixPath
from typing import BinaryIO

from featviz.errors import StoreError
from featviz.text import quoted

_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(?:part|old)", re.DOTALL)
"""Names of what is being written, `.NAME.<16 hex digits>.part` beside NAME, and of what has stood
there. Where one is left, the process that made it was killed."""
_BUFFER = 2**16
"""Bytes of a file's write buffer, small enough to be used again for the next file."""
_LONGEST = 200
"""Bytes of a file's name that its hidden name keeps."""
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _CLOEXEC


@contextmanager
def opened(folder: Path, below: Path | None, made: int | None = None) -> Iterator[int]:
    """A descriptor of a folder: what is done by it happens in this folder, whatever is put in its
    place meanwhile. What lies below `below` is opened component by component, following no link.

    Args:
        made: how many of the last components are made where they are missing; None for all.
    """
    base = folder if below is None else below
    parts = PurePosixPath(os.path.relpath(folder, base)).parts
    if ".." in parts:
        raise OSError(errno.EINVAL, f"it lies outside {base}")
    if made is None:
        base.mkdir(parents=True, exist_ok=True)
    fds = [os.open(base, _DIRECTORY)]
    try:
        for number, part in enumerate(parts):
            if made is None or number >= len(parts) - made:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=fds[-1])
            try:
                fds.append(os.open(part, _DIRECTORY | _NOFOLLOW, dir_fd=fds[-1]))
            except OSError:
                if (path := base.joinpath(*parts[: number + 1])).is_symlink():
                    raise _through_link(path) from None
                raise
        yield fds[-1]
    finally:
        for fd in fds:
            os.close(fd)


@contextmanager
def new_file(folder: int, name: str, final: str | None = None) -> Iterator[BinaryIO]:
    """Open a file that is not there yet, and give it its final name, if it has another, when all
    is written; removed if the block fails.

    Args:
        folder: the descriptor of its folder.
    """
    descriptor = os.open(name, _NEW, 0o666, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb", buffering=_BUFFER) as file:
            yield file
        if final is not None:
            os.replace(name, final, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        raise


@contextmanager
def atomic(path: Path, below: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file beside its final name; move it there if the block succeeds.

    Folders that are missing are made. A link in the file's place is replaced, not followed.

    Args:
        below: a folder that the path lies in. Then no folder on the way from it to the file may be
            a symbolic link.
    """
    with (
        reported(path),
        opened(path.parent, below) as folder,
        new_file(folder, part_name(path.name), path.name) as file,
    ):
        yield file


def part_name(name: str) -> str:
    """An unguessable name for what is being written and will have this one."""
    cut = os.fsdecode(os.fsencode(name)[:_LONGEST])
    return f".{cut}.{secrets.token_hex(8)}.part"


def part_of(name: str) -> str | None:
    """The name that belongs to a hidden one, cut where it is long; None for any other name."""
    hidden = _HIDDEN.fullmatch(name)
    return None if hidden is None else hidden[1]


def refuse_links(root: Path, paths: Iterable[str]) -> None:
    """Say before the work that something below a folder is a symbolic link.

    Args:
        paths: relative to the folder, with forward slashes; what is not there is no link.
    """
    seen: set[PurePosixPath] = set()
    for relative in map(PurePosixPath, paths):
        for part in (*reversed(relative.parents), relative):
            if part.parts and part not in seen and (root / part).is_symlink():
                raise _through_link(root / part)
            seen.add(part)


def remove(root: Path, paths: Iterable[str]) -> None:
    """Remove files below a folder, in this order, then the folders that this has emptied; what is
    gone already, or has become a folder, is passed over."""
    folders: set[PurePath] = set()
    for relative in paths:
        path = root / relative
        with reported(path), suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            with opened(path.parent, root, made=0) as folder:
                os.unlink(path.name, dir_fd=folder)
            folders.update(PurePosixPath(relative).parents)
    _remove_emptied(root, folders)


def remove_folder(folder: Path, root: Path) -> None:
    """Remove a folder with all that is in it, and those above it that this empties, up to one that
    it lies in. No link is followed."""
    with (
        reported(folder),
        suppress(FileNotFoundError),
        opened(folder.parent, root, made=0) as above,
    ):
        shutil.rmtree(folder.name, ignore_errors=True, dir_fd=above)
    _remove_emptied(root, folder.relative_to(root).parents)


def _remove_emptied(root: Path, paths: Iterable[PurePath]) -> None:
    for relative in sorted(paths, key=lambda path: len(path.parts), reverse=True):
        if relative.parts:
            folder = root / relative
            with suppress(OSError, StoreError), opened(folder.parent, root, made=0) as above:
                os.rmdir(folder.name, dir_fd=above)


def remove_empty(folder: Path) -> None:
    """Remove a folder and those below it, as far as they hold no files."""
    if not folder.is_symlink():
        for inner, _, _ in os.walk(folder, topdown=False):
            with suppress(OSError):
                Path(inner).rmdir()


def _through_link(path: str | Path) -> StoreError:
    return StoreError(
        f"{quoted(str(path))} is a symbolic link, and nothing is written through one",
        "remove it, or name another folder with --out",
    )


_GO_ON = "what is complete stays complete; --resume when it works, or another --out"


@contextmanager
def reported(path: str | Path, hint: str = _GO_ON) -> Iterator[None]:
    """Turn what the system says of a path into a StoreError that names it."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}", hint) from error
