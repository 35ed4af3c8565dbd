"""Images inside tar and zip files, here or in stores: `photos.tar` holds images like a folder,
`photos.tar::a/b.jpg` is one of them. Nothing is unpacked: a member is read when its turn comes."""

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
from typing import Any, TypeAlias

from featviz import files
from featviz.errors import FileError
from featviz.files import urls
from featviz.files.urls import Url

log = logging.getLogger(__name__)

Place: TypeAlias = Path | Url

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

_READING = Lock()
"""An archive has one place where it is read."""

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
    if isinstance(path, Url):
        return None if path.member is None else (replace(path, member=None), path.member)
    match = _MEMBER.fullmatch(str(path))
    plain = match is None or os.path.lexists(path)  # a plain file may be called `x.tar::y.png`
    return None if match is None or plain else (Path(match[1]), _normal(match[2]))


def member(archive: Place, name: str) -> Place:
    """The path of a file in an archive."""
    if isinstance(archive, Url):
        return replace(archive, member=_normal(name))
    return Path(f"{archive}{SEPARATOR}{name}")


def members(path: Place) -> list[str]:
    """Names of the files in an archive, in their order (a compressed tar is then read once);
    OSError or one of DAMAGED if it cannot be read. An archive in a store is opened anew, and taken
    to stay as it is until the next call."""
    if isinstance(path, Url):
        _opened.cache_clear()
        _content.cache_clear()
    return [*_opened(path, *_state(path))[1]]


def read(path: Place) -> bytes:
    """The bytes of a file, on its own or in an archive; OSError, KeyError or one of DAMAGED if it
    cannot be read, has more than MAX_FILE_BYTES, or unpacks to more than MAX_MEMBER_BYTES."""
    if inside := split(path):
        with _READING:
            return _content(*inside, *_state(inside[0]))
    if isinstance(path, Url):
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


def _state(path: Place) -> tuple[int, ...]:
    """What changes with a file of this machine."""
    if isinstance(path, Url):
        return ()
    state = path.stat()
    return state.st_mtime_ns, state.st_size, state.st_ino


@lru_cache(maxsize=4)
def _opened(path: Place, *state: int) -> tuple[Any, dict[str, Any]]:
    """A tar or zip file and its members. If two have one name the later one counts, as when it is
    unpacked."""
    file = urls.open_parts(path) if isinstance(path, Url) else files.open_regular(path)
    if path.name.lower().endswith(".zip"):
        archive: Any = zipfile.ZipFile(file)
        infos = [info for info in archive.infolist() if not info.is_dir()]
        return archive, {_normal(info.filename): info for info in infos}
    mode = _MODES.get(file.read(2), "r:")
    file.seek(0)
    archive = tarfile.open(fileobj=file, mode=mode)  # noqa: SIM115 - stays as long as cached
    links, found = 0, dict[str, Any]()
    for info in archive:
        links += info.issym() or info.islnk()
        if info.isfile():
            found.pop(_normal(info.name), None)
            found[_normal(info.name)] = info
    archive.fileobj.seek(archive.offset)  # tarfile takes a damaged header for the end of the file
    if archive.fileobj.read(512).strip(b"\0"):
        raise tarfile.ReadError(f"damaged at byte {archive.offset}")
    if links:
        log.warning("%s: %d links are left out", path, links)
    return archive, found


@lru_cache(maxsize=1)
def _content(path: Place, name: str, *state: int) -> bytes:
    """A member; the last one is held: going back in a compressed tar means starting anew."""
    archive, found = _opened(path, *state)
    info = found[name]
    is_tar = isinstance(info, tarfile.TarInfo)
    size = info.size if is_tar else info.file_size
    if size > MAX_MEMBER_BYTES:
        raise OSError(f"it unpacks to {size} bytes, more than the {MAX_MEMBER_BYTES} of any image")
    if not is_tar and info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise NotImplementedError("it is neither stored nor deflated")
    # a zip gives no more than the size, whatever is there
    with archive.extractfile(info) if is_tar else archive.open(info) as opened:
        return opened.read()  # type: ignore[no-any-return]
