"""Images inside tar and zip files.

`photos.tar` holds images like a folder, `photos.tar::a/b.jpg` is one of them. Nothing is unpacked:
a member is read into memory when its turn comes. Archives may lie in stores (`s3://b/photos.tar`).
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
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Protocol, TypeAlias, cast

from featviz import files
from featviz.errors import FileError
from featviz.files import fetch
from featviz.files.seeking import RemoteCursor, RemoteFile
from featviz.files.stores import Remote

log = logging.getLogger(__name__)

Place: TypeAlias = Path | Remote
"""A file on this machine or in a store, or one in an archive there."""

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
MAX_REMOTE_MEMBERS = 1_000_000
"""A tar in a store may have so many, whatever size the server claims."""

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

    def span(self, name: str) -> tuple[int, int] | None:
        """Where a member that is not compressed begins in the file, and its bytes."""


def is_archive(path: Place) -> bool:
    """Whether a file's name says that it is an archive of files."""
    return _ARCHIVE.fullmatch(path.name) is not None and split(path) is None


def split(path: Place) -> tuple[Place, str] | None:
    """The archive and the member that a path leads to; None where it leads to a plain file."""
    if isinstance(path, Remote):
        return None if path.member is None else (replace(path, member=None, span=None), path.member)
    match = _MEMBER.fullmatch(str(path))
    return None if match is None else (Path(match[1]), _normal(match[2]))


def member(archive: Place, name: str) -> Place:
    """The path of a file in an archive.

    Raises:
        OSError: or one of DAMAGED, if an archive in a store cannot be read.
    """
    if isinstance(archive, Remote):
        return replace(archive, member=_normal(name), span=_open(archive).span(_normal(name)))
    return Path(f"{archive}{SEPARATOR}{name}")


def members(path: Place) -> list[str]:
    """Names of the files in an archive, in their order: a compressed tar is then read once.

    Hidden files are left out, as in folders, and so is what macOS adds to zip files. An archive in
    a store is opened anew, and taken to stay as it is until the next call.

    Raises:
        OSError: or one of DAMAGED, if it cannot be read.
    """
    if isinstance(path, Remote):
        _opened.cache_clear()
        _remote_file.cache_clear()
    return [name for name in _open(path).members if not is_hidden(name)]


def exists(path: Place) -> bool:
    """Whether there is such a file, on its own or in an archive; of one in a store, reading tells,
    or has told where in its archive it lies.

    Raises:
        OSError: or one of DAMAGED, if the archive cannot be read.
    """
    place = split(path)
    if place is None:
        return isinstance(path, Remote) or os.path.isfile(path)  # noqa: PTH113 - takes any name
    if isinstance(path, Remote) and path.span is not None:
        return True
    there = isinstance(place[0], Remote) or place[0].is_file()
    return there and place[1] in _open(place[0]).members


def read(path: Place) -> bytes:
    """The bytes of a file, on its own or in an archive.

    Raises:
        OSError: or one of DAMAGED, if it cannot be read, has more than MAX_FILE_BYTES, or unpacks
            to more than MAX_MEMBER_BYTES.
    """
    if isinstance(path, Remote) and path.span is not None:
        return _read_span(path, *path.span)
    place = split(path)
    if place is not None:
        return _open(place[0]).read(place[1])
    if isinstance(path, Remote):
        return fetch.read(path, MAX_FILE_BYTES)
    with files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise OSError(f"it has {size} bytes, more than the {MAX_FILE_BYTES} of any image")
        return file.read(size)


def _normal(name: str) -> str:
    """One spelling for `a/b.jpg`, `./a/b.jpg` and `/a//b.jpg`."""
    return "/".join(part for part in name.replace("\\", "/").split("/") if part not in ("", "."))


def is_hidden(name: str) -> bool:
    """Whether a file, or a folder that holds it, is hidden or one that macOS adds."""
    parts = [part for part in name.split("/") if part != ".."]
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


class _Tar:
    """A tar file. If two members have one name the later one counts, as when tar unpacks them."""

    def __init__(self, path: Place) -> None:
        stream, most = _unpacked(path)
        self.packed = isinstance(stream, _Bounded)
        self.file = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115 - stays as long as cached
        self.members: dict[str, tarfile.TarInfo] = {}
        links = 0
        for count, info in enumerate(self.file):
            if most is not None and count > most:
                raise tarfile.ReadError(f"it has more than {most} members, far beyond its size")
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
        self._lock = Lock()

    def _check_end(self) -> None:
        """tarfile takes a damaged header for the end of the file."""
        assert self.file.fileobj is not None
        self.file.fileobj.seek(self.file.offset)
        if self.file.fileobj.read(_BLOCK).strip(b"\0"):
            raise tarfile.ReadError(f"damaged at byte {self.file.offset}")

    def read(self, name: str) -> bytes:
        """The last member is held: going back in a compressed file means starting anew."""
        with self._lock:
            if self._last[0] != name:
                info = self.members[name]
                _check_size(info.size)
                opened = self.file.extractfile(info)
                assert opened is not None
                self._last = (name, opened.read())
            return self._last[1]

    def span(self, name: str) -> tuple[int, int] | None:
        """Where a member begins, and its bytes, unless the tar is compressed or sparse."""
        info = self.members.get(name)
        if info is None or self.packed or info.issparse():
            return None
        return info.offset_data, info.size


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


def _unpacked(path: Place) -> tuple[BinaryIO, int | None]:
    """The tar file in a file, and how many members it may have; a plain one on this machine has no
    more than its size allows."""
    file, size = _bytes_of(path)
    opener = _COMPRESSED.get(file.read(2))
    file.seek(0)
    if opener is None:
        return file, MAX_REMOTE_MEMBERS if isinstance(path, Remote) else None
    stream = _Bounded(opener(file, "rb"), MAX_UNPACKED_BYTES + MOST_TIMES * size)
    return cast(BinaryIO, stream), MAX_MEMBERS + size // 1000


def _bytes_of(path: Place) -> tuple[BinaryIO, int]:
    """A file to be read from any place, and its size."""
    if isinstance(path, Remote):
        far = _remote_file(path)
        return cast(BinaryIO, RemoteCursor(far)), far.size
    file = files.open_regular(path)
    return file, os.fstat(file.fileno()).st_size


@lru_cache(maxsize=4)
def _remote_file(path: Remote) -> RemoteFile:
    return RemoteFile(path, MAX_MEMBER_BYTES)


def _read_span(path: Remote, start: int, size: int) -> bytes:
    """A part of a plain tar: neither its headers nor another member are asked for."""
    _check_size(size)
    return _remote_file(replace(path, member=None, span=None)).part(start, size)


class _Zip:
    def __init__(self, path: Place) -> None:
        self.file = zipfile.ZipFile(_bytes_of(path)[0])
        infos = [info for info in self.file.infolist() if not info.is_dir()]
        self.members = {_normal(info.filename): info for info in infos}

    def read(self, name: str) -> bytes:
        info = self.members[name]
        _check_size(info.file_size)
        step = _PIECE if info.compress_type in _SLOW else 2**20
        with self.file.open(info) as opened:
            return b"".join(iter(partial(opened.read, step), b""))

    def span(self, name: str) -> tuple[int, int] | None:
        """None: members are compressed."""
        return None


def _check_size(size: int) -> None:
    if size > MAX_MEMBER_BYTES:
        raise OSError(f"it unpacks to {size} bytes, more than the {MAX_MEMBER_BYTES} of any image")


def _open(path: Place) -> _Archive:
    """An archive that was opened before is opened anew only if the file has changed; for one in a
    store see `members`."""
    if isinstance(path, Remote):
        return _opened(path)
    state = path.stat()
    return _opened(path, state.st_mtime_ns, state.st_size, state.st_ino)


@lru_cache(maxsize=4)
def _opened(path: Place, *state: int) -> _Archive:
    return _Zip(path) if path.name.lower().endswith(".zip") else _Tar(path)
