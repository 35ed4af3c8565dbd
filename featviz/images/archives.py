"""Images inside tar and zip files.

`photos.tar` holds images like a folder, `photos.tar::a/b.jpg` is one of them. Nothing is unpacked:
a member is read into memory when its turn comes.
"""

from __future__ import annotations

import logging
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger(__name__)

SEPARATOR = "::"
_SUFFIX = r"\.(?:tar|tar\.gz|tgz|tar\.bz2|tbz2|tar\.xz|txz|zip)"
_ARCHIVE = re.compile(rf".*{_SUFFIX}", re.IGNORECASE | re.DOTALL)
_MEMBER = re.compile(rf"(.+?{_SUFFIX}){SEPARATOR}(.+)", re.IGNORECASE | re.DOTALL)

MAX_MEMBER_BYTES = 512 * 2**20
"""A member that unpacks to more is no picture, but a bomb."""

_BLOCK = 512
"""Bytes of a header in a tar file."""

DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    RuntimeError,
)
"""What the readers raise, beside OSError, on files that are broken, encrypted, or compressed in
a way that Python lacks."""


class _Archive(Protocol):
    @property
    def members(self) -> Mapping[str, Any]:
        """By normal name, in the order in which they stand in the file."""

    def read(self, name: str) -> bytes: ...


def is_archive(path: Path) -> bool:
    """Whether a file's name says that it is an archive of files."""
    return _ARCHIVE.fullmatch(path.name) is not None and split(path) is None


def split(path: Path) -> tuple[Path, str] | None:
    """The archive and the member that a path leads to; None where it leads to a plain file."""
    found = _MEMBER.fullmatch(str(path))
    return None if found is None else (Path(found[1]), _normal(found[2]))


def member(archive: Path, name: str) -> Path:
    """The path of a file in an archive."""
    return Path(f"{archive}{SEPARATOR}{name}")


def members(path: Path) -> list[str]:
    """Names of the files in an archive, in their order: a compressed tar is then read once.

    Hidden files are left out, as in folders, and so is what macOS adds to zip files.

    Raises:
        OSError: or one of DAMAGED, if it cannot be read.
    """
    return [name for name in _open(path).members if not _is_hidden(name)]


def exists(path: Path) -> bool:
    """Whether there is such a file, on its own or in an archive.

    Raises:
        OSError: or one of DAMAGED, if the archive cannot be read.
    """
    place = split(path)
    if place is None:
        return path.is_file()
    return place[0].is_file() and place[1] in _open(place[0]).members


def read(path: Path) -> bytes:
    """The bytes of a file, on its own or in an archive.

    Raises:
        OSError: or one of DAMAGED, if it cannot be read, or unpacks to more than
            MAX_MEMBER_BYTES.
    """
    place = split(path)
    return path.read_bytes() if place is None else _open(place[0]).read(place[1])


def _normal(name: str) -> str:
    """One spelling for `a/b.jpg`, `./a/b.jpg` and `/a//b.jpg`."""
    return "/".join(part for part in name.replace("\\", "/").split("/") if part not in ("", "."))


def _is_hidden(name: str) -> bool:
    parts = [part for part in name.split("/") if part != ".."]
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


class _Tar:
    """Of two members with one name the later one counts, as when tar unpacks them."""

    def __init__(self, path: Path) -> None:
        self.file = tarfile.open(path)  # noqa: SIM115 - stays open as long as it is cached
        self.members: dict[str, tarfile.TarInfo] = {}
        infos = self.file.getmembers()
        for info in infos:
            if info.isfile():
                self.members.pop(_normal(info.name), None)
                self.members[_normal(info.name)] = info
        self._check_end()
        if links := sum(info.issym() or info.islnk() for info in infos):
            log.warning("%s: %d links are left out", path, links)
        self._last: tuple[str, bytes] = ("", b"")

    def _check_end(self) -> None:
        """tarfile takes a damaged header for the end of the file."""
        assert self.file.fileobj is not None
        self.file.fileobj.seek(self.file.offset)
        if self.file.fileobj.read(_BLOCK).strip(b"\0"):
            raise tarfile.ReadError(f"damaged at byte {self.file.offset}")

    def read(self, name: str) -> bytes:
        """The last member is held: going back in a compressed file means starting anew."""
        if self._last[0] != name:
            info = self.members[name]
            _check_size(info.size)
            opened = self.file.extractfile(info)
            assert opened is not None
            self._last = (name, opened.read())
        return self._last[1]


class _Zip:
    def __init__(self, path: Path) -> None:
        self.file = zipfile.ZipFile(path)
        infos = [info for info in self.file.infolist() if not info.is_dir()]
        self.members = {_normal(info.filename): info for info in infos}

    def read(self, name: str) -> bytes:
        _check_size(self.members[name].file_size)
        return self.file.read(self.members[name])


def _check_size(size: int) -> None:
    if size > MAX_MEMBER_BYTES:
        raise OSError(f"it unpacks to {size} bytes, more than the {MAX_MEMBER_BYTES} of any image")


def _open(path: Path) -> _Archive:
    """An archive that was opened before is opened anew only if the file has changed."""
    state = path.stat()
    return _opened(path, state.st_mtime_ns, state.st_size, state.st_ino)


@lru_cache(maxsize=4)
def _opened(path: Path, *state: int) -> _Archive:
    return _Zip(path) if path.name.lower().endswith(".zip") else _Tar(path)
