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
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from featviz.errors import StoreError
from featviz.text import quoted

_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(?:part|old)", re.DOTALL)
"""Names of what is being written, `.NAME.<16 hex digits>.part` beside NAME, and of what has stood
there. Where one is left, the process that made it was killed."""
BUFFER = 2**16
"""Bytes of a file's write buffer, small enough to be used again for the next file."""
_LONGEST = 200
"""Bytes of a file's name that its hidden name keeps."""
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""For a file that is not there yet."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def opened(folder: Path, below: Path | None, make: bool = True) -> Iterator[int]:
    """A descriptor of a folder: what is done by it happens in this folder, whatever is put in its
    place meanwhile. What lies below `below` is opened component by component, following no link;
    folders that are missing are made."""
    base = folder if below is None else below
    parts = PurePosixPath(os.path.relpath(folder, base)).parts
    if ".." in parts:
        raise OSError(errno.EINVAL, f"it lies outside {base}")
    if make:
        base.mkdir(parents=True, exist_ok=True)
    fds = [os.open(base, _DIRECTORY)]
    try:
        for number, part in enumerate(parts):
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=fds[-1])
            try:
                fds.append(os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fds[-1]))
            except OSError:
                if (path := base.joinpath(*parts[: number + 1])).is_symlink():
                    where = quoted(str(path))
                    raise StoreError(
                        f"{where} is a symbolic link, and nothing is written through one",
                        "remove it, or name another folder with --out",
                    ) from None
                raise
        yield fds[-1]
    finally:
        for fd in fds:
            os.close(fd)


@contextmanager
def atomic(path: Path, below: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file beside its final name; move it there if the block succeeds.

    Folders that are missing are made. A link in the file's place is replaced, not followed.

    Args:
        below: a folder that the path lies in. Then no folder on the way from it to the file may be
            a symbolic link.
    """
    with reported(path), opened(path.parent, below) as folder:
        part = part_name(path.name)
        fd = os.open(part, NEW, 0o666, dir_fd=folder)
        try:
            with os.fdopen(fd, "w+b", BUFFER) as file:
                yield file
            os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
            raise


def part_name(name: str) -> str:
    """An unguessable name for what is being written and will have this one."""
    cut = os.fsdecode(os.fsencode(name)[:_LONGEST])
    return f".{cut}.{secrets.token_hex(8)}.part"


def part_of(name: str) -> str | None:
    """The name that belongs to a hidden one, cut where it is long; None for any other name."""
    hidden = _HIDDEN.fullmatch(name)
    return None if hidden is None else hidden[1]


def remove(root: Path, paths: Iterable[str]) -> None:
    """Remove files below a folder, in this order, then all folders that hold nothing, and it too;
    what is gone already, or has become a folder, is passed over."""
    for relative in paths:
        path = root / relative
        with (
            reported(path),
            suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError),
            opened(path.parent, root, make=False) as folder,
        ):
            os.unlink(path.name, dir_fd=folder)
    if not root.is_symlink():
        for inner, _, _ in os.walk(root, topdown=False):
            with suppress(OSError):
                Path(inner).rmdir()


def remove_whole(path: Path, root: Path) -> None:
    """Remove a file or a folder with all that is in it, and the folders above that this empties, up
    to one that it lies in. No link is followed."""
    with (
        reported(path),
        suppress(FileNotFoundError),
        opened(path.parent, root, make=False) as above,
    ):
        shutil.rmtree(path.name, ignore_errors=True, dir_fd=above)
        with suppress(OSError):
            os.unlink(path.name, dir_fd=above)
    for folder in path.parents[: len(path.relative_to(root).parts) - 1]:
        with suppress(OSError, StoreError), opened(folder.parent, root, make=False) as above:
            os.rmdir(folder.name, dir_fd=above)


_GO_ON = "what is complete stays complete; --resume when it works, or another --out"


@contextmanager
def reported(path: str | Path, hint: str = _GO_ON) -> Iterator[None]:
    """Turn what the system says of a path into a StoreError that names it."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}", hint) from error
