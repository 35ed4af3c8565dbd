"""Stores that fsspec reaches (s3://, gs://, https://, hf:// and others), and the names of files in
them. Nothing is kept on disk, and the user's credentials stand in no message."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from featviz.errors import UsageError
from featviz.text import quoted

SILENCE = 30.0
"""Seconds without a byte after which an attempt has failed (http and s3)."""
_S3 = ("s3", "s3a")
_CONNECT = 10.0
"""Seconds in which a server has to answer at all."""
WEB = ("http", "https")
"""Protocols of web servers, whose folders are pages."""
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE | re.ASCII)
_CHAINED = re.compile(r"(?:[a-z0-9+._-]+::)+[a-z][a-z0-9+.-]*://", re.IGNORECASE | re.ASCII)
_NO_STORE = frozenset(
    (
        *("arrow_hdfs", "async_wrapper", "asyncwrapper", "blockcache", "cached", "dask", "data"),
        *("dir", "file", "filecache", "generic", "git", "jlab", "jupyter", "libarchive", "local"),
        *("reference", "simplecache", "tar", "zip"),
    )
)
"""Protocols of fsspec that read this machine, wrap other protocols, or keep files on disk."""


@dataclass(frozen=True, repr=False)
class Remote:
    """A file in a store, or a file in an archive there. As text it is without credentials."""

    url: str
    """The URL as the user gave it, credentials and all: it leads to the store."""
    path: str
    """The file, or the archive, as fsspec calls it in that store."""
    member: str | None = None
    """The file's name in the archive."""
    span: tuple[int, int] | None = None
    """In a tar that is not compressed: where the member begins, and how many bytes it has."""

    @property
    def protocol(self) -> str:
        """`s3` of `s3://bucket/a.jpg`."""
        return _protocol(self.url)

    @property
    def place(self) -> str:
        """`bucket/photos/a.jpg`: without protocol, user, password, and the query of a URL."""
        way = self.path.lstrip("/")
        if self.protocol in WEB:
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
        return f"{self.protocol}://{self.place}"

    def __repr__(self) -> str:
        return f"Remote({str(self)!r})"


def is_url(text: str) -> bool:
    """Whether an argument is a URL, and no path on this machine."""
    return bool(_URL.match(text) or _CHAINED.match(text))


def local_path(url: str) -> str | None:
    """The path of a `file://` URL; None for any other URL.

    Raises:
        UsageError: it names another machine.
    """
    if _protocol(url) not in ("file", "local"):
        return None
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(
            f"{quoted(url)!r} is a file of the machine {quoted(parts.netloc)!r}",
            "file:///folder/a.jpg has three slashes",
        )
    return url2pathname(parts.path)


def at(url: str) -> Remote:
    """The file that a URL leads to; the store is not asked.

    Raises:
        UsageError: there is no such protocol, it is none of a store, or its package is missing.
    """
    if _CHAINED.match(url) or "::" in url:
        raise UsageError(
            f"{quoted(shown(url))!r} chains protocols, and featviz reads stores directly",
            "give the last URL alone; photos.tar::a.jpg is a file in an archive",
        )
    return Remote(url, _class_for(_protocol(url))._strip_protocol(url))


def _protocol(url: str) -> str:
    match = _URL.match(url)
    return match[1].lower() if match else ""


def _class_for(protocol: str) -> Any:
    """fsspec's class for a protocol."""
    import fsspec

    known = fsspec.available_protocols()
    if protocol not in known or protocol in _NO_STORE:
        raise UsageError(
            f"{quoted(protocol)}:// is no store that featviz reads",
            "for example s3://bucket/photos/, gs://bucket/a.jpg or https://host/a.jpg",
        )
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = getattr(error.__cause__ or error, "name", None)
        package = (package or _package(protocol)).partition(".")[0]
        raise UsageError(
            f"{protocol}:// needs the package {package}, which is not installed",
            f"pip install {package}",
        ) from None


def _package(protocol: str) -> str:
    from fsspec.registry import known_implementations

    return str(known_implementations[protocol]["class"])


def filesystem(place: Remote) -> Any:
    """fsspec's filesystem of the store, one for all threads; what it raises is its own."""
    implementation = _class_for(place.protocol)
    given = implementation._get_kwargs_from_urls(place.url)
    return _connected(place.protocol, tuple(sorted(given.items())), os.getpid())


@lru_cache(maxsize=16)
def _connected(protocol: str, given: tuple[tuple[str, Any], ...], process: int) -> Any:
    """fsspec's own instances are one for each thread; this one is shared by all readers."""
    import fsspec

    configured = fsspec.config.conf.get(protocol, {})
    options = {**_limits_of(protocol), **configured, **dict(given)}
    made = _class_for(protocol)(**options, skip_instance_cache=True)
    if protocol in _S3:
        made.retries = 1  # attempts are counted in one place: `fetch`
    return made


def _limits_of(protocol: str) -> Mapping[str, Any]:
    """Options of a store's filesystem that bound how long it waits."""
    if protocol in WEB:
        import aiohttp

        limits = aiohttp.ClientTimeout(
            total=None, connect=_CONNECT, sock_connect=_CONNECT, sock_read=SILENCE
        )
        return {"client_kwargs": {"timeout": limits}}
    if protocol in _S3:
        once = {"retries": {"total_max_attempts": 1}}
        return {"config_kwargs": {"connect_timeout": _CONNECT, "read_timeout": SILENCE, **once}}
    return {}


def shown(url: str) -> str:
    """A URL without user and password, and of a web server without its query."""
    return scrubbed(url) if _protocol(url) in (*WEB, "") else re.sub(r"://[^/\s]*@", "://", url)


def scrubbed(text: str) -> str:
    """Text without the user, the password and the query of URLs in it."""
    return re.sub(r"\?[^\s'\")>]+", "", re.sub(r"://[^/\s]*@", "://", text))
