"""URLs of stores that fsspec reaches (s3://, gs://, https://, hf:// and others): which are taken,
how each is shown, and how its store is connected to. Nothing is kept on disk, and the user's
credentials stand in no message."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from featviz.errors import UsageError
from featviz.text import quoted

SILENCE = 30.0
"""Seconds without a byte after which an attempt has failed (http and s3)."""
_CONNECT = 10.0
"""Seconds in which a server has to answer at all."""
WEB = ("http", "https")
"""Protocols of web servers, whose folders are pages."""
_S3 = ("s3", "s3a")
_FOLDERS = ("file", "local")
_NO_STORE = frozenset(
    (
        *_FOLDERS,
        *("arrow_hdfs", "async_wrapper", "asyncwrapper", "blockcache", "cached", "dask", "data"),
        *("dir", "filecache", "generic", "git", "jlab", "jupyter", "libarchive"),
        *("reference", "simplecache", "tar", "zip"),
    )
)
"""Protocols of fsspec that read this machine, wrap other protocols, or keep files on disk."""

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE | re.ASCII)
_CHAINED = re.compile(r"(?:[a-z0-9+._-]+::)+[a-z][a-z0-9+.-]*://", re.IGNORECASE | re.ASCII)
_SECRET = re.compile(r"(?<=://)[^/\s]*@")
"""`user:password@` before the host."""
_QUERY = re.compile(r"\?[^\s'\")>]+")


def is_url(place: object) -> bool:
    """Whether something is the text of a URL, and no path on this machine: `s3://bucket/maps`."""
    return isinstance(place, str) and bool(_SCHEME.match(place) or _CHAINED.match(place))


@dataclass(frozen=True)
class Url:
    """A URL of a store. As text it shows neither user nor password."""

    whole: str = field(repr=False)
    """The URL as the user gave it, credentials and all: it leads to the store."""

    @classmethod
    def of_file(cls, text: str) -> Url:
        """Read the URL of something to read.

        Raises:
            UsageError: it chains protocols, there is no such store, or its package is missing.
        """
        url = cls(text)
        if "::" in text:
            raise UsageError(
                f"{quoted(str(url))!r} chains protocols, and featviz reads stores directly",
                "give the last URL alone; photos.tar::a.jpg is a file in an archive",
            )
        _class_for(url.protocol)
        return url

    @classmethod
    def of_run(cls, text: str) -> Url:
        """Read the URL of a run directory, without slashes at its end.

        Raises:
            UsageError: it is of a kind in which there can be no run.
        """
        url = cls(text.rstrip("/"))
        if "::" in text:
            raise UsageError(f"{quoted(str(url))} is a chain of URLs", "name one store")
        if url.protocol in _FOLDERS:
            path = text.partition("://")[2]
            raise UsageError(
                f"{quoted(str(url))} is a folder of this machine",
                f"give the path: {quoted(path)}",
            )
        if url.protocol in (*WEB, "data") or not url.path:
            raise UsageError(
                f"{quoted(str(url))} is no place in an object store",
                "for example s3://bucket/maps, gs://bucket/maps, az://container/maps",
            )
        return url

    @property
    def protocol(self) -> str:
        """`s3` of `S3://bucket/a.jpg`, in small letters."""
        match = _SCHEME.match(self.whole)
        return match[1].lower() if match else ""

    @property
    def path(self) -> str:
        """What stands behind `s3://`, without user and password."""
        return str(self).partition("://")[2].strip("/")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def key(self) -> str:
        """What fsspec calls the place in its store: `bucket/maps`, or the URL of a web server."""
        return str(_class_for(self.protocol)._strip_protocol(self.whole))

    def __str__(self) -> str:
        """The URL without user and password, and that of a web server without its query."""
        if self.protocol in (*WEB, ""):
            return scrubbed(self.whole)
        return _SECRET.sub("", self.whole)

    def without_secrets(self, words: str) -> str:
        """A text in which neither user nor password of this URL stands, nor those of another URL
        in it."""
        secret = _SECRET.search(self.whole)
        for form in {secret[0][:-1], unquote(secret[0][:-1])} if secret else ():
            for part in sorted({form, *form.split(":", 1)}, key=len, reverse=True):
                words = words.replace(part, "…") if part else words
        return scrubbed(words)

    def filesystem(self) -> Any:
        """fsspec's filesystem of the store, one for all threads, which waits for no answer for
        ever; what it raises is its own.

        Raises:
            UsageError: there is no such store, its package is missing, or the URL or the
                configuration of fsspec has an option that the package does not take.
        """
        given = _class_for(self.protocol)._get_kwargs_from_urls(self.whole)
        try:
            return _connected(self.protocol, tuple(sorted(given.items())), os.getpid())
        except Exception as error:  # of the package, whose options may be in a file of its own
            words = quoted(self.without_secrets(str(error)))
            raise UsageError(
                f"{quoted(str(self))} cannot be reached: {words}",
                "the options come from the URL and from fsspec's configuration (FSSPEC_...)",
            ) from error


def refuse_url(place: object, option: str = "") -> None:
    """Say that an option takes a path of this machine only.

    Args:
        option: its name, where the message is to begin with it.

    Raises:
        UsageError: it is a URL.
    """
    if isinstance(place, str) and is_url(place):
        words = f"{option} {quoted(str(Url(place)))} is a URL".strip()
        raise UsageError(
            f"{words}, and only a path of this machine can stand here",
            "give a path, and copy between it and the store (`aws s3 cp --recursive`)",
        )


def local_path(url: str) -> str | None:
    """The path of a `file://` URL; None for any other URL.

    Raises:
        UsageError: it names another machine.
    """
    if Url(url).protocol not in _FOLDERS:
        return None
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(
            f"{quoted(url)!r} is a file of the machine {quoted(parts.netloc)!r}",
            "file:///folder/a.jpg has three slashes",
        )
    return url2pathname(parts.path)


def scrubbed(text: str) -> str:
    """Text without the user, the password and the query of URLs in it."""
    return _QUERY.sub("", _SECRET.sub("", text))


def _class_for(protocol: str) -> Any:
    """fsspec's class for a protocol."""
    import fsspec

    known = fsspec.available_protocols()
    if protocol not in known or protocol in _NO_STORE:
        raise UsageError(
            f"{quoted(protocol)}:// is no store that featviz knows",
            "for example s3://bucket/photos/ or gs://bucket/maps",
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


@lru_cache(maxsize=16)
def _connected(protocol: str, given: tuple[tuple[str, Any], ...], process: int) -> Any:
    """fsspec's own instances are one for each thread; this one is shared by all."""
    import fsspec

    configured = fsspec.config.conf.get(protocol, {})
    options = {**_limits_of(protocol), **configured, **dict(given)}
    made = _class_for(protocol)(**options, skip_instance_cache=True)
    if protocol in _S3:
        made.retries = 1  # attempts are counted in one place: `attempts`
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
