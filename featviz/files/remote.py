"""Files in stores: their names, and how they are read and listed, within bounds."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from glob import has_magic
from typing import Any
from urllib.parse import unquote

from featviz.errors import FileError
from featviz.files.urls import WEB, Url, tried
from featviz.text import quoted

log = logging.getLogger(__name__)

_PIECE = 2**20
_BLOCK = 4 * 2**20
"""Bytes of an archive that are asked for at once."""
_DEEPEST, _MOST_FOLDERS = 32, 10_000
"""Folders inside one another, and folders, that are searched."""


class NoSuchFileError(FileError):
    """There is nothing of that name in the store."""


@dataclass(frozen=True, repr=False)
class Remote:
    """A file in a store, or a file in an archive there. As text it is without credentials."""

    url: Url
    """The URL as the user gave it, which leads to the store."""
    path: str
    """The file, or the archive, as fsspec calls it in that store."""
    member: str | None = None
    """The file's name in the archive."""

    @classmethod
    def at(cls, url: str) -> Remote:
        """The file that a URL leads to; the store is not asked.

        Raises:
            UsageError: as `Url.of_file`.
        """
        read = Url.of_file(url)
        return cls(read, read.key)

    @property
    def is_web(self) -> bool:
        """Whether it is on a web server, whose folders are pages."""
        return self.url.protocol in WEB

    @property
    def place(self) -> str:
        """`bucket/photos/a.jpg`: without protocol, user, password, and the query of a URL."""
        way = self.path.lstrip("/")
        if self.is_web:
            way = unquote(re.split("[?#]", way.partition("://")[2], maxsplit=1)[0])
        host, slash, path = way.partition("/")
        inside = "" if self.member is None else f"::{self.member}"
        return f"{host.rpartition('@')[2]}{slash}{path}{inside}"

    @property
    def name(self) -> str:
        """The last part of the place: `a.jpg`."""
        return self.place.rstrip("/").rpartition("/")[2].rpartition("::")[2]

    @property
    def parent(self) -> str:
        """The place of the folder, or the archive, that holds it."""
        return re.split("/|::", self.place[::-1], maxsplit=1)[-1][::-1]

    def __str__(self) -> str:
        return f"{self.url.protocol}://{self.place}"

    def __repr__(self) -> str:
        return f"Remote({str(self)!r})"


def read(place: Remote, most: int) -> bytes:
    """The bytes of a file of at most `most` bytes, whatever the server says of its length.

    Raises:
        FileError: it is not there, larger, or cannot be read.
    """
    # of a web server as it comes, unasked for its size
    options = {"block_size": 0, "size": 1} if place.is_web else {}

    def once() -> bytes:
        held = bytearray()
        with place.url.filesystem().open(place.path, "rb", **options) as file:
            while len(held) <= most and (piece := file.read(_PIECE)):
                held += piece
        return bytes(held)

    content: bytes = _asked(place, once)
    if len(content) > most:
        raise FileError(f"it has more than the {most} bytes that are read of it")
    return content


def open_parts(place: Remote) -> tuple[Any, int]:
    """A file to be read from any place, as archives need it, and its size.

    Raises:
        FileError: it is not there, or the server gives no parts of files.
    """
    blocks = {"cache_type": "blockcache", "cache_options": {"maxblocks": 4}, "block_size": _BLOCK}
    file = _asked(place, lambda: place.url.filesystem().open(place.path, "rb", **blocks))
    if not isinstance(getattr(file, "size", None), int) or not file.seekable():
        raise FileError(
            "the server gives no parts of files, which an archive needs",
            "download the archive, and give the file",
        )
    if cache := getattr(file, "cache", None):
        fetch = cache.fetcher  # a block that the store fails to give is asked for again
        cache.fetcher = lambda start, end: _asked(place, lambda: fetch(start, end))
    return file, file.size


def is_folder(place: Remote) -> bool:
    """Whether there are files below; a server of web pages is not asked.

    Raises:
        FileError: the store does not answer.
    """
    folder = not place.is_web and _asked(place, lambda: place.url.filesystem().isdir(place.path))
    return bool(folder)


def below(folder: Remote, pattern: str = "**") -> Iterator[tuple[str, Remote]]:
    """The files below a folder whose relative names match, with these, sorted as on disk. What a
    page or a listing names elsewhere is left out.

    Raises:
        FileError: the store does not answer, or has more folders than are searched.
    """
    from fsspec.utils import glob_translate

    wanted, base = re.compile(glob_translate(pattern)), folder.path.rstrip("/") + "/"
    found, folders = dict[str, str](), [base]
    for path in folders:  # to which those are added that this finds
        if len(folders) > _MOST_FOLDERS:
            raise FileError(f"{quoted(str(folder))} has no end: {len(folders)} folders were found")
        for row in _rows(folder, path):
            is_folder = row["type"] == "directory"
            name = row["name"].removeprefix(base).removesuffix("/" * is_folder)
            name = unquote(name) if folder.is_web else name
            if not row["name"].startswith(base) or set(name.split("/")) & {"", ".", ".."}:
                level = logging.DEBUG if folder.is_web else logging.WARNING  # pages have any links
                log.log(level, "%s: %s is left out: it lies elsewhere", folder, quoted(name))
            elif not is_folder:
                found[name] = row["name"]
            elif name.count("/") + 1 < _DEEPEST:
                folders.append(row["name"].rstrip("/") + "/")
    for name in sorted(found, key=lambda name: name.split("/")):
        if wanted.match(name):
            yield name, replace(folder, path=found[name])


def matching(pattern: Remote) -> Iterator[tuple[str, Remote]]:
    """The files that a glob matches, with their names below the part of it without wildcards.

    Raises:
        FileError: as `below`.
    """
    parts = (pattern.path.partition("?")[0] if pattern.is_web else pattern.path).split("/")
    fixed = next(number for number, part in enumerate(parts) if has_magic(part))
    tail = "/".join(parts[fixed:])
    folder = replace(pattern, path="/".join(parts[:fixed]))
    return below(folder, unquote(tail) if pattern.is_web else tail)


def _rows(folder: Remote, path: str) -> list[dict[str, Any]]:
    """What lies directly in a folder below this one, as the store lists it."""
    asked = path if folder.is_web else path.rstrip("/")
    try:
        rows = _asked(folder, lambda: list(folder.url.filesystem().ls(asked, detail=True)))
    except NoSuchFileError:
        return []
    ours = [row for row in rows if row["name"].rstrip("/") != path.rstrip("/")]  # no marker of it
    return [row for row in ours if not (folder.is_web and set(row["name"]) & {"?", "#"})]


def _asked(place: Remote, task: Any) -> Any:
    try:
        return tried(place.url, task)
    except FileNotFoundError:
        raise NoSuchFileError("there is no such file in the store") from None
    except FileError as error:  # of which the library's own error quotes the whole URL
        raise error from None
