"""Images inside tar and zip files.

`photos.tar` holds images like a folder, `photos.tar::a/b.jpg` is one of them. Nothing is unpacked:
a member is read into memory when its turn comes. Archives may lie in stores (`s3://b/photos.tar`).
"""

from __future__ import annotations

import logging
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, TypeAlias

from featviz import files
from featviz.errors import FileError
from featviz.files import urls
from featviz.files.urls import Remote

log = logging.getLogger(__name__)

Place: TypeAlias = Path | Remote

SEPARATOR = "::"
_SUFFIX = r"\.(?:tar|tar\.gz|tgz|tar\.bz2|tbz2|tar\.xz|txz|zip)"
_ARCHIVE = re.compile(rf".*{_SUFFIX}", re.IGNORECASE | re.DOTALL)
_MEMBER = re.compile(rf"(.+?{_SUFFIX}){SEPARATOR}(.+)", re.IGNORECASE | re.DOTALL)

MAX_MEMBER_BYTES = 512 * 2**20
"""A member that unpacks to more is no picture, but a bomb."""

MAX_FILE_BYTES = 2**30
"""A larger file is no picture that Pillow would open."""

_MODES: Any = {b"\x1f\x8b": "r:gz", b"BZ": "r:bz2", b"\xfd7": "r:xz"}
"""How tarfile opens a compressed file, by its first two bytes."""

DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,
    ValueError,
    FileError,
)
"""What the readers raise, beside OSError, on files that are broken, encrypted, or compressed in
a way that is not read."""


def is_archive(path: Place) -> bool:
    """Whether a file's name says that it is an archive of files."""
    return _ARCHIVE.fullmatch(path.name) is not None and split(path) is None


def split(path: Place) -> tuple[Place, str] | None:
    """The archive and the member that a path leads to; None where it leads to a plain file."""
    if isinstance(path, Remote):
        return None if path.member is None else (replace(path, member=None), path.member)
    match = _MEMBER.fullmatch(str(path))
    plain = match is None or os.path.lexists(path)  # a plain file may be called `x.tar::y.png`
    return None if match is None or plain else (Path(match[1]), _normal(match[2]))


def member(archive: Place, name: str) -> Place:
    """The path of a file in an archive."""
    if isinstance(archive, Remote):
        return replace(archive, member=_normal(name))
    return Path(f"{archive}{SEPARATOR}{name}")


def members(path: Place) -> list[str]:
    """Names of the files in an archive, in their order (a compressed tar is then read once),
    without hidden ones; OSError or one of DAMAGED if it cannot be read. An archive in a store is
    opened anew, and taken to stay as it is until the next call."""
    if isinstance(path, Remote):
        _opened.cache_clear()
    return [name for name in _open(path).members if not is_hidden(name)]


def exists(path: Place) -> bool:
    """Whether there is such a file or member of an archive; of one in a store, reading tells."""
    archive, name = split(path) or (path, None)
    there = isinstance(archive, Remote) or os.path.isfile(archive)  # noqa: PTH113 - takes any name
    return there and (name is None or name in _open(archive).members)


def read(path: Place) -> bytes:
    """The bytes of a file, on its own or in an archive; OSError or one of DAMAGED if it cannot be
    read, has more than MAX_FILE_BYTES, or unpacks to more than MAX_MEMBER_BYTES."""
    if inside := split(path):
        return _open(inside[0]).read(inside[1])
    if isinstance(path, Remote):
        return urls.read(path, MAX_FILE_BYTES)
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


class _Archive:
    """A tar or zip file. If two members have one name the later one counts, as when it is
    unpacked."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.members: dict[str, Any] = {}
        self._last: tuple[str, bytes] = ("", b"")
        self._lock = Lock()
        if name.lower().endswith(".zip"):
            self.file: Any = zipfile.ZipFile(file)
            infos = [info for info in self.file.infolist() if not info.is_dir()]
            self.members = {_normal(info.filename): info for info in infos}
            return
        mode = _MODES.get(file.read(2), "r:")
        file.seek(0)
        self.file = tarfile.open(fileobj=file, mode=mode)  # noqa: SIM115 - stays as long as cached
        links = 0
        for info in self.file:
            links += info.issym() or info.islnk()
            if info.isfile():
                self.members.pop(_normal(info.name), None)
                self.members[_normal(info.name)] = info
        unpacked = self.file.fileobj
        unpacked.seek(self.file.offset)  # tarfile takes a damaged header for the end of the file
        if unpacked.read(512).strip(b"\0"):
            raise tarfile.ReadError(f"damaged at byte {self.file.offset}")
        if links:
            log.warning("%s: %d links are left out", name, links)

    def read(self, name: str) -> bytes:
        """The last member is held: going back in a compressed tar means starting anew."""
        info = self.members[name]
        is_tar = isinstance(info, tarfile.TarInfo)
        size = info.size if is_tar else info.file_size
        if size > MAX_MEMBER_BYTES:
            raise OSError(
                f"it unpacks to {size} bytes, more than the {MAX_MEMBER_BYTES} of any image"
            )
        if not is_tar and info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise NotImplementedError("it is neither stored nor deflated")
        with self._lock:
            if self._last[0] != name:
                # a zip gives no more than the size, whatever is there
                with self.file.extractfile(info) if is_tar else self.file.open(info) as opened:
                    self._last = (name, opened.read())
            return self._last[1]


def _open(path: Place) -> _Archive:
    """An archive that was opened before is opened anew only if the file has changed; for one in a
    store see `members`."""
    if isinstance(path, Remote):
        return _opened(path)
    state = path.stat()
    return _opened(path, state.st_mtime_ns, state.st_size, state.st_ino)


@lru_cache(maxsize=4)
def _opened(path: Place, *state: int) -> _Archive:
    if isinstance(path, Remote):
        return _Archive(urls.open_parts(path), str(path))
    return _Archive(files.open_regular(path), str(path))
