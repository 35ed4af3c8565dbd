"""URLs of stores that fsspec reaches (s3://, https:// and others), and files there. No
message shows the user's credentials."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from glob import has_magic
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote

from featviz.errors import FileError, UsageError
from featviz.text import quoted

T = TypeVar("T")

WEB = ("http", "https")
_PIECE = 2**20
"""Bytes of a file that are requested at once."""
_BLOCK = 4 * 2**20
"""Bytes of an archive that are requested at once, and kept for the next read."""
_NO_STORE = re.compile(
    "arrow_hdfs|async_?wrapper|blockcache|cached|dask|data|dir|file|filecache|generic|git|jlab|"
    "jupyter|libarchive|local|reference|simplecache|tar|zip"
)
"""Protocols of fsspec that read this machine, wrap other protocols, or keep files on
disk."""

_URL = re.compile(
    r"(?:[a-z0-9+._-]+::)*([a-z][a-z0-9+.-]*)://", re.IGNORECASE | re.ASCII
)
_SECRET = re.compile(r"(?<=://)[^/\s]*@")
"""`user:password@` before the host."""
_QUERY = re.compile(r"\?[^\s'\")>]+")


def is_url(value: object) -> bool:
    """Whether something is the text of a URL, and no path on this machine:
    `s3://bucket/maps`."""
    return isinstance(value, str) and bool(_URL.match(value))


@dataclass(frozen=True, repr=False)
class Url:
    """A run directory, a file, or a file in an archive; as text without user, password
    and query."""

    whole: str
    """The URL as the user gave it, credentials and all."""
    at: str | None = None
    member: str | None = None
    """The file's name in an archive."""

    @classmethod
    def of_file(cls, text: str) -> Url:
        """The URL of something to read; UsageError where no store can be asked for it."""
        url = cls(text)
        if "::" in text:
            message = (
                f"{quoted(str(url))!r} chains protocols, and featviz reads stores"
                " directly"
            )
            hint = "give the last URL alone; photos.tar::a.jpg is a file in an archive"
            raise UsageError(message, hint)
        return replace(url, at=url.key)

    @classmethod
    def of_run(cls, text: str) -> Url:
        """The URL of a run directory; UsageError where it is of a kind in which there
        can be no run."""
        url = cls(text.rstrip("/"))
        if "::" in text or url.protocol in (*WEB, "file", "local", "data", ""):
            raise UsageError(
                f"{quoted(scrubbed(text))} is no place in an object store",
                "for example s3://bucket/maps, gs://bucket/maps, az://container/maps; "
                "a folder of this machine is given as its path",
            )
        return replace(url, at=url.key)

    @property
    def protocol(self) -> str:
        """`s3` of `S3://bucket/a.jpg`."""
        match = _URL.match(self.whole)
        return match[1].lower() if match else ""

    @property
    def is_web(self) -> bool:
        """Whether it is on a web server, which has no folders."""
        return self.protocol in WEB

    @property
    def key(self) -> str:
        """What fsspec calls the place in its store: `bucket/maps`, or the URL of a web
        server."""
        if self.at is not None:
            return self.at
        return str(_class_for(self.protocol)._strip_protocol(self.whole))

    @property
    def place(self) -> str:
        """`bucket/photos/a.jpg`: without protocol, user, password, and the query of a
        URL."""
        path = _URL.sub("", self.whole if self.at is None else self.at, count=1).lstrip(
            "/"
        )
        if self.is_web:
            path = unquote(re.split("[?#]", path, maxsplit=1)[0])
        host, slash, rest = path.partition("/")
        inside = "" if self.member is None else f"::{self.member}"
        return f"{host.rpartition('@')[2]}{slash}{rest}{inside}"

    @property
    def name(self) -> str:
        """The last part of the place: `a.jpg`."""
        return self.place.rstrip("/").rpartition("/")[2].rpartition("::")[2]

    def __str__(self) -> str:
        return f"{self.protocol}://{self.place}"

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    def without_secrets(self, text: str) -> str:
        """A text in which neither user nor password of this or of another URL stands as
        a word."""
        secret = _SECRET.search(self.whole)
        if secret is None:
            return scrubbed(text)
        # a library quotes them as they stand in the URL (`p%40ss`), or as it sends them
        # (`p@ss`)
        quoted_pair = secret[0].removesuffix("@")
        for pair in {quoted_pair, unquote(quoted_pair)}:
            # the pair before its halves: the longest first, so that none is left in
            # pieces
            for name in sorted([pair, *pair.split(":", 1)], key=len, reverse=True):
                if name:
                    text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", text)
        return scrubbed(text)

    def filesystem(self) -> Any:
        """fsspec's filesystem of the store, one for all threads; what it raises is its
        own."""
        options = _class_for(self.protocol)._get_kwargs_from_urls(self.whole)
        try:
            return _connected(
                self.protocol, tuple(sorted(options.items())), os.getpid()
            )
        # of the package, whose options may be in a file of its own
        except Exception as error:
            reason = quoted(self.without_secrets(str(error)))
            message = f"{quoted(str(self))} cannot be reached: {reason}"
            hint = (
                "the options come from the URL and from fsspec's configuration"
                " (FSSPEC_...)"
            )
            raise UsageError(message, hint) from error


def refuse_url(value: object) -> None:
    """Say that an option takes a path of this machine only."""
    if isinstance(value, str) and is_url(value):
        raise UsageError(
            f"{quoted(str(Url(value)))} is a URL, and only a path of this machine can"
            " stand here",
            "give a path, and copy between it and the store (`aws s3 cp --recursive`)",
        )


def scrubbed(text: str) -> str:
    """Text without the user, the password and the query of URLs in it."""
    return _QUERY.sub("", _SECRET.sub("", text))


def _class_for(protocol: str) -> Any:
    import fsspec
    from fsspec.registry import known_implementations

    if protocol not in fsspec.available_protocols() or _NO_STORE.fullmatch(protocol):
        message = f"{quoted(protocol)}:// is no store that featviz knows"
        raise UsageError(message, "for example s3://bucket/photos/ or gs://bucket/maps")
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        # fsspec raises an ImportError of its own from the one that names the missing
        # module
        missing = getattr(error.__cause__ or error, "name", None)
        module = missing or known_implementations[protocol]["class"]
        package = module.partition(".")[0]
        message = f"{protocol}:// needs the package {package}, which is not installed"
        raise UsageError(message, f"pip install {package}") from None


@lru_cache(maxsize=16)
def _connected(
    protocol: str, options: tuple[tuple[str, Any], ...], process: int
) -> Any:
    """fsspec's own instances are one for each thread; this one is shared by all.

    Args:
        options: names and values from the URL; they go before those of fsspec's
            configuration.
        process: its number, since a connection does not outlive a fork.
    """
    import fsspec

    all_options = {**fsspec.config.conf.get(protocol, {}), **dict(options)}
    return _class_for(protocol)(**all_options, skip_instance_cache=True)


def tried(url: Url, task: Callable[[], T]) -> T:
    """Run a task that reads from a store, or writes there.

    Args:
        url: whose credentials are kept out of messages.

    Raises:
        FileNotFoundError: as the task raises it, or for the status 404.
        FileExistsError: as the task raises it.
        FileError: the task's own; or what the store's library raised, whatever its type
            is.
    """
    try:
        return task()
    except (FileNotFoundError, FileExistsError, FileError):
        raise
    except Exception as error:
        message = _failure_text(url, error) or type(error).__name__
        if _status(error) == 404:
            raise FileNotFoundError(message) from error
        raise FileError(message) from error


def _failure_text(url: Url, error: Exception) -> str:
    """What a message says of an exception of a store's library, without credentials."""
    if lacks_rights(error):
        return "the store refuses access: are the credentials there?"
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "the store did not answer in time"
    status = _status(error)
    if not status:
        return quoted(url.without_secrets(str(error)).strip())
    # str() of an HTTP error quotes the URL; its `message` is what the server says
    reason = quoted(url.without_secrets(str(getattr(error, "message", ""))).strip())
    return f"the server answers {status} {reason}".strip()


def lacks_rights(error: BaseException | None) -> bool:
    """Whether a store refused, or its library found no credentials to send."""
    # botocore's NoCredentialsError and its like are no PermissionError
    is_named_so = (
        isinstance(error, PermissionError) or "Credentials" in type(error).__name__
    )
    return is_named_so or _status(error) in (401, 403)


def _status(error: BaseException | None) -> int:
    """The status of an answer over HTTP that was an error; 0 for other errors."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    return status if isinstance(status, int) else 0


# Files in stores: what the store does not give, or refuses, is a FileError without
# credentials


def read(url: Url, most: int) -> bytes:
    """The bytes of a file of at most `most` bytes, whatever the server says of its
    length."""
    content = io.BytesIO()
    asked(url, lambda: copy(url, content, most))
    return content.getvalue()


def copy(url: Url, target: BinaryIO, limit: int) -> None:
    """Copy a file of at most `limit` bytes; for `tried` and `asked`, since it raises
    whatever the library of the store raises."""
    # of a web server as it comes, unasked for its size
    options = {"block_size": 0, "size": 1} if url.is_web else {}
    size = 0
    with url.filesystem().open(url.key, "rb", **options) as file:
        while piece := file.read(_PIECE):
            size += len(piece)
            if size > limit:
                raise FileError(
                    f"it has more than the {limit} bytes that are read of it"
                )
            target.write(piece)


def open_parts(url: Url) -> Any:
    """A file to be read from any place, as archives need it."""
    blocks = {
        "cache_type": "blockcache",
        "cache_options": {"maxblocks": 4},
        "block_size": _BLOCK,
    }
    file = asked(url, lambda: url.filesystem().open(url.key, "rb", **blocks))
    if not isinstance(getattr(file, "size", None), int) or not file.seekable():
        message = "the server gives no parts of files, which an archive needs"
        raise FileError(message, "download the archive, and give the file")
    return file


def below(folder: Url, pattern: str = "**") -> Iterator[tuple[str, Url]]:
    """The files below a folder whose relative names match a glob, with these names,
    sorted as on disk. What a listing names outside of the folder is left out."""
    from fsspec.utils import glob_translate

    is_match = re.compile(glob_translate(pattern)).match
    key = folder.key.rstrip("/")
    base = f"{key}/"
    paths = asked(folder, lambda: folder.filesystem().find(key))
    path_of = {path.removeprefix(base): path for path in paths if path.startswith(base)}
    for name in sorted(path_of, key=lambda name: name.split("/")):
        # an object's key may hold `..`, and the name becomes a path below --out
        leaves_folder = not set(name.split("/")).isdisjoint({"", ".", ".."})
        if is_match(name) and not leaves_folder:
            yield name, replace(folder, at=path_of[name])


def matching(pattern: Url) -> Iterator[tuple[str, Url]]:
    """The files that a glob matches, with their names below the part of it without
    wildcards."""
    names = pattern.key.split("/")
    fixed = 0
    while not has_magic(names[fixed]):
        fixed += 1
    return below(replace(pattern, at="/".join(names[:fixed])), "/".join(names[fixed:]))


def asked(url: Url, task: Callable[[], T]) -> T:
    """As `tried`; also that there is nothing is a FileError."""
    try:
        return tried(url, task)
    except FileNotFoundError:
        raise FileError("there is no such file in the store") from None
    except FileError as error:  # of which the library's own error quotes the whole URL
        raise error from None
