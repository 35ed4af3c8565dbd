"""Images inside tar and zip files.

`photos.tar` holds images like a folder, `photos.tar::a/b.jpg` is one of them.
"""

from __future__ import annotations

import tarfile
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import IO, Protocol

SEPARATOR = "::"
_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")

DAMAGED = (tarfile.TarError, zipfile.BadZipFile, EOFError, NotImplementedError)
"""What the readers raise, beside OSError, on files that are broken or encrypted."""


class _Archive(Protocol):
    names: list[str]

    def read(self, name: str) -> bytes: ...


def is_archive(path: Path) -> bool:
    """Whether a file's name says that it is an archive of files."""
    return path.name.lower().endswith(_SUFFIXES) and SEPARATOR not in str(path)


def members(path: Path) -> list[str]:
    """Names of the files in an archive, in their order: a compressed tar is then read once.

    Raises:
        OSError: or one of DAMAGED, if it cannot be read.
    """
    return list(_open(path).names)


def is_member(path: Path) -> bool:
    """Whether a path leads into an archive."""
    return SEPARATOR in str(path)


def member(archive: Path, name: str) -> Path:
    """The path of a file in an archive."""
    return Path(f"{archive}{SEPARATOR}{name}")


def exists(path: Path) -> bool:
    """Whether there is such a file, on its own or in an archive."""
    if not is_member(path):
        return path.is_file()
    archive, _, name = str(path).partition(SEPARATOR)
    return Path(archive).is_file() and name in _open(Path(archive)).names


def read(path: Path) -> bytes:
    """The bytes of a file, on its own or in an archive.

    Raises:
        OSError: or one of DAMAGED, if it cannot be read.
    """
    if not is_member(path):
        return path.read_bytes()
    archive, _, name = str(path).partition(SEPARATOR)
    return _open(Path(archive)).read(name)


class _Tar:
    def __init__(self, path: Path) -> None:
        self.file = tarfile.open(path)  # noqa: SIM115 - stays open as long as it is cached
        self.infos = {info.name: info for info in self.file.getmembers() if info.isfile()}
        self.names = list(self.infos)

    def read(self, name: str) -> bytes:
        opened: IO[bytes] | None = self.file.extractfile(self.infos[name])
        assert opened is not None
        return opened.read()


class _Zip:
    def __init__(self, path: Path) -> None:
        self.file = zipfile.ZipFile(path)
        self.names = [info.filename for info in self.file.infolist() if not info.is_dir()]

    def read(self, name: str) -> bytes:
        try:
            return self.file.read(name)
        except RuntimeError as error:  # encrypted
            raise OSError(str(error)) from error


@lru_cache(maxsize=4)
def _open(path: Path) -> _Archive:
    return _Zip(path) if path.name.lower().endswith(".zip") else _Tar(path)
