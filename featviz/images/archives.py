"""Images inside tar and zip files.

`photos.tar` holds images like a folder, `photos.tar::a/b.jpg` is one of them. Nothing is unpacked:
a member is read into memory when its turn comes.
"""

from __future__ import annotations

import bz2
import gzip
import io
import logging
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from featviz import files
from featviz.errors import FileError

log = logging.getLogger(__name__)

SEPARATOR = "::"
_SUFFIX = r"\.(?:tar|tar\.gz|tgz|tar\.bz2|tbz2|tar\.xz|txz|zip)"
_ARCHIVE = re.compile(rf".*{_SUFFIX}", re.IGNORECASE | re.DOTALL)
_MEMBER = re.compile(rf"(.+?{_SUFFIX}){SEPARATOR}(.+)", re.IGNORECASE | re.DOTALL)

MAX_MEMBER_BYTES = 512 * 2**20
"""A member that unpacks to more is no picture, but a bomb."""

MAX_FILE_BYTES = 2**30
"""A larger file is no picture that Pillow would open."""

MAX_UNPACKED_BYTES = 2**30
"""A compressed tar may unpack to this beside MOST_TIMES its own size."""
MOST_TIMES = 200
MAX_MEMBERS = 100_000
"""A compressed tar may have so many beside one for each kilobyte of its size."""

MAX_HEADER_BYTES = 2**20
"""A header in a compressed tar has its name and attributes: tarfile reads all of it at once."""

_BLOCK = 512
"""Bytes of a header in a tar file."""
_COMPRESSED: Mapping[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZ": bz2.open,
    b"\xfd7": lzma.open,
}
"""Readers of compressed tar files, by the first two bytes."""
_SLOW = (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
"""Methods whose readers unpack all of a piece, however much it becomes."""
_PIECE = 4096
"""Bytes of such a piece."""

DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    FileError,
)
"""What the readers raise, beside OSError, on files that are broken, encrypted, or compressed in
a way that Python lacks."""


class _Archive(Protocol):
    @property
    def members(self) -> Mapping[str, Any]:
        """The files by normal name, in their order in the archive."""

    def read(self, name: str) -> bytes: ...


def is_archive(path: Path) -> bool:
    """Whether a file's name says that it is an archive of files."""
    return _ARCHIVE.fullmatch(path.name) is not None and split(path) is None


def split(path: Path) -> tuple[Path, str] | None:
    """The archive and the member that a path leads to; None where it leads to a plain file."""
    match = _MEMBER.fullmatch(str(path))
    return None if match is None else (Path(match[1]), _normal(match[2]))


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
        return os.path.isfile(path)  # noqa: PTH113 - no name is too long for it
    return place[0].is_file() and place[1] in _open(place[0]).members


def read(path: Path) -> bytes:
    """The bytes of a file, on its own or in an archive.

    Raises:
        OSError: or one of DAMAGED, if it cannot be read, has more than MAX_FILE_BYTES, or unpacks
            to more than MAX_MEMBER_BYTES.
    """
    place = split(path)
    if place is not None:
        return _open(place[0]).read(place[1])
    with files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise OSError(f"it has {size} bytes, more than the {MAX_FILE_BYTES} of any image")
        return file.read(size)


def _normal(name: str) -> str:
    """One spelling for `a/b.jpg`, `./a/b.jpg` and `/a//b.jpg`."""
    return "/".join(part for part in name.replace("\\", "/").split("/") if part not in ("", "."))


def _is_hidden(name: str) -> bool:
    parts = [part for part in name.split("/") if part != ".."]
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


class _Tar:
    """A tar file. If two members have one name the later one counts, as when tar unpacks them."""

    def __init__(self, path: Path) -> None:
        stream, most = _unpacked(path)
        self.file = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115 - stays as long as cached
        self.members: dict[str, tarfile.TarInfo] = {}
        links = 0
        for count, info in enumerate(self.file):
            if most is not None and count > most:
                raise tarfile.ReadError(f"it has more than {most} members, packed into a few bytes")
            links += info.issym() or info.islnk()
            if info.isfile():
                self.members.pop(_normal(info.name), None)
                self.members[_normal(info.name)] = info
        self._check_end()
        if isinstance(stream, _Bounded):
            stream.longest = MAX_MEMBER_BYTES
        if links:
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


class _Bounded(io.RawIOBase):
    """A compressed file that is read unpacked, and refused once it unpacks to too much."""

    def __init__(self, stream: BinaryIO, most: int) -> None:
        self.stream, self.most, self.longest = stream, most, MAX_HEADER_BYTES

    def seekable(self) -> bool:
        """It goes back by starting anew."""
        return True

    def readable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Bytes from the start."""
        return self.stream.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        if whence == os.SEEK_SET:
            self._check(offset)
        return self.stream.seek(offset, whence)

    def read(self, size: int | None = -1) -> bytes:
        """Read so many bytes."""
        size = self.longest if size is None or size < 0 else size
        if size > self.longest:
            raise tarfile.ReadError(f"it has a header of {size} bytes")
        self._check(self.tell())
        return self.stream.read(size)

    def _check(self, place: int) -> None:
        if place > self.most:
            raise tarfile.ReadError(
                f"it unpacks to more than {self.most} bytes, far beyond its size"
            )


def _unpacked(path: Path) -> tuple[BinaryIO, int | None]:
    """The tar file in a file, and how many members it may have; a plain one has no more than its
    size allows."""
    file = files.open_regular(path)
    opener = _COMPRESSED.get(file.read(2))
    file.seek(0)
    if opener is None:
        return file, None
    size = os.fstat(file.fileno()).st_size
    stream = _Bounded(opener(file, "rb"), MAX_UNPACKED_BYTES + MOST_TIMES * size)
    return cast(BinaryIO, stream), MAX_MEMBERS + size // 1000


class _Zip:
    def __init__(self, path: Path) -> None:
        self.file = zipfile.ZipFile(files.open_regular(path))
        infos = [info for info in self.file.infolist() if not info.is_dir()]
        self.members = {_normal(info.filename): info for info in infos}

    def read(self, name: str) -> bytes:
        info = self.members[name]
        _check_size(info.file_size)
        step = _PIECE if info.compress_type in _SLOW else 2**20
        with self.file.open(info) as opened:
            return b"".join(iter(partial(opened.read, step), b""))


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
