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

    text: str
    """The URL as the user gave it, credentials and all."""
    inner_key: str | None = None
    """The `key` of what was found below that URL; None for the URL itself."""
    member: str | None = None
    """The file's name in an archive; None where it is in none."""

    @classmethod
    def of_file(cls, text: str) -> Url:
        """The URL of something to read; UsageError where no store can be asked for it."""
        url = cls(text)
        if "::" in text:
            raise UsageError(
                f"{quoted(str(url))!r} chains protocols, and featviz reads stores"
                " directly",
                "give the last URL alone; photos.tar::a.jpg is a file in an archive",
            )
        return url.at_key(url.key)

    @classmethod
    def of_run(cls, text: str) -> Url:
        """The URL of a run directory; UsageError where it is of a kind in which there
        can be no run."""
        url = cls(text)
        if "::" in text or url.protocol in (*WEB, "file", "local", "data", ""):
            raise UsageError(
                f"{quoted(scrubbed(text))} is no place in an object store",
                "for example s3://bucket/maps, gs://bucket/maps, az://container/maps; "
                "a folder of this machine is given as its path",
            )
        return url.at_key(url.key)

    def at_key(self, key: str) -> Url:
        """Another file or folder of the same store, with the same credentials."""
        return replace(self, inner_key=key)

    @property
    def protocol(self) -> str:
        """`s3` of `S3://bucket/a.jpg`."""
        match = _URL.match(self.text)
        if match:
            return match[1].lower()
        return ""

    @property
    def is_web(self) -> bool:
        """Whether it is on a web server, which has no folders."""
        return self.protocol in WEB

    @property
    def key(self) -> str:
        """What fsspec calls it in its store: `bucket/maps`, or the URL of a web server."""
        if self.inner_key is not None:
            return self.inner_key
        return str(_class_for(self.protocol)._strip_protocol(self.text))

    @property
    def shown_path(self) -> str:
        """What messages and names say of it: `bucket/photos/a.jpg`, or `host/a.tar::b.jpg`
        of a file in an archive; without protocol, user, password and query."""
        path = self.text if self.inner_key is None else self.inner_key
        path = _URL.sub("", path, count=1).lstrip("/")
        if self.is_web:
            path = unquote(re.split("[?#]", path, maxsplit=1)[0])
        # of a URL with `user:password@host`
        host, slash, rest = path.partition("/")
        host = host.rpartition("@")[2]
        suffix = "" if self.member is None else f"::{self.member}"
        return f"{host}{slash}{rest}{suffix}"

    @property
    def name(self) -> str:
        """The name of the file or folder: `a.jpg`."""
        return self.shown_path.rstrip("/").rpartition("/")[2].rpartition("::")[2]

    def __str__(self) -> str:
        return f"{self.protocol}://{self.shown_path}"

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    def without_secrets(self, text: str) -> str:
        """A text in which neither user nor password of this or of another URL stands as
        a word."""
        secret = _SECRET.search(self.text)
        if secret is None:
            return scrubbed(text)
        # a library quotes them as they stand in the URL (`p%40ss`), or as it sends them
        # (`p@ss`)
        quoted_pair = secret[0].removesuffix("@")
        for pair in (quoted_pair, unquote(quoted_pair)):
            # the longest first: with its halves gone, the pair itself would not be found
            for name in sorted([pair, *pair.split(":", 1)], key=len, reverse=True):
                if name:
                    text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", text)
        return scrubbed(text)

    def filesystem(self) -> Any:
        """fsspec's filesystem of the store, one for all threads. What its methods raise is
        fsspec's own: call them through `attempt` or `ask`."""
        options = _class_for(self.protocol)._get_kwargs_from_urls(self.text)
        try:
            return _connected(
                self.protocol, tuple(sorted(options.items())), os.getpid()
            )
        # The store's package (s3fs) may raise anything, for example because of a
        # configuration file of its own.
        except Exception as error:
            reason = quoted(self.without_secrets(str(error)))
            raise UsageError(
                f"{quoted(str(self))} cannot be reached: {reason}",
                "options come from the URL and fsspec's configuration (FSSPEC_...)",
            ) from error


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
    """fsspec's class for the files of a protocol, such as `s3`.

    Raises:
        UsageError: fsspec does not know the protocol, or its package is not installed.
    """
    import fsspec
    from fsspec.registry import known_implementations

    if protocol not in fsspec.available_protocols() or _NO_STORE.fullmatch(protocol):
        raise UsageError(
            f"{quoted(protocol)}:// is no store that featviz knows",
            "for example s3://bucket/photos/ or gs://bucket/maps",
        )
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        # fsspec raises an ImportError of its own from the one that names the missing
        # module
        missing = getattr(error.__cause__ or error, "name", None)
        module = missing or known_implementations[protocol]["class"]
        package = module.partition(".")[0]
        raise UsageError(
            f"{protocol}:// needs the package {package}, which is not installed",
            f"pip install {package}",
        ) from None


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

    # what a user has set for all of fsspec's programs holds here, too
    all_options = {**fsspec.config.conf.get(protocol, {}), **dict(options)}
    return _class_for(protocol)(**all_options, skip_instance_cache=True)


def attempt(url: Url, task: Callable[[], T]) -> T:
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
    """What a message says of an exception of a store's library; empty where that says
    nothing.

    Args:
        url: whose credentials are left out.
    """
    if lacks_rights(error):
        return "the store refuses access: are the credentials there?"
    # each library has a class of its own for it
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
    # botocore's NoCredentialsError and its like are not PermissionError
    is_named_so = (
        isinstance(error, PermissionError) or "Credentials" in type(error).__name__
    )
    return is_named_so or _status(error) in (401, 403)


def _status(error: BaseException | None) -> int:
    """The status of an answer over HTTP that was an error; 0 for other errors."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    if isinstance(status, int):
        return status
    return 0


# Files in stores: what the store does not give, or refuses, is a FileError without
# credentials


def read(url: Url, most: int) -> bytes:
    """The bytes of a file of at most `most` bytes, whatever the server says of its
    length."""
    content = io.BytesIO()
    ask(url, lambda: copy(url, content, most))
    return content.getvalue()


def copy(url: Url, target: BinaryIO, limit: int) -> None:
    """Copy a file, piece by piece; for `attempt` and `ask`, since it raises whatever the
    library of the store raises.

    Args:
        url: The file.
        target: Where it is written; of a larger file the beginning is there, too.
        limit: Bytes that it may have.

    Raises:
        FileError: Where it has more.
    """
    options = {}
    if url.is_web:
        # A file of which fsspec knows no size is read as a stream. Without these it would
        # ask for the size first, which many servers do not tell.
        options = {"block_size": 0, "size": 1}
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
    """A file to be read from any place, as archives need it.

    Raises:
        FileError: Where it cannot be opened, or the server gives only whole files.
    """
    blocks = {
        "cache_type": "blockcache",
        "cache_options": {"maxblocks": 4},
        "block_size": _BLOCK,
    }
    file = ask(url, lambda: url.filesystem().open(url.key, "rb", **blocks))
    # a zip has its directory at the end, so that a stream would be read as a whole
    if not isinstance(getattr(file, "size", None), int) or not file.seekable():
        raise FileError(
            "the server gives no parts of files, which an archive needs",
            "download the archive, and give the file",
        )
    return file


def files_below(folder: Url, pattern: str = "**") -> Iterator[tuple[str, Url]]:
    """The files of a store's folder and of all folders in it, sorted as on disk, each
    behind its name relative to the folder, with forward slashes.

    Args:
        folder: Its URL; a slash at the end makes no difference.
        pattern: A glob for the relative names: `*` within a folder, `**` across folders.

    Raises:
        FileError: Where the store does not answer, refuses, or has no such folder.
    """
    from fsspec.utils import glob_translate

    is_match = re.compile(glob_translate(pattern)).match
    key = folder.key.rstrip("/")
    base = f"{key}/"
    keys = ask(folder, lambda: folder.filesystem().find(key))
    names = [key.removeprefix(base) for key in keys if key.startswith(base)]
    for name in sorted(names, key=lambda name: name.split("/")):
        # an object's key may hold `..`, and the name becomes a path below --out
        leaves_folder = not set(name.split("/")).isdisjoint({"", ".", ".."})
        if is_match(name) and not leaves_folder:
            yield name, folder.at_key(base + name)


def matching(pattern: Url) -> Iterator[tuple[str, Url]]:
    """The files that a glob matches, with their names below the part of it without
    wildcards."""
    parts = pattern.key.split("/")
    count = 0  # of parts without wildcards
    while not has_magic(parts[count]):
        count += 1
    folder = pattern.at_key("/".join(parts[:count]))
    return files_below(folder, "/".join(parts[count:]))


def ask(url: Url, task: Callable[[], T]) -> T:
    """The result of a task, in which a store is asked for something.

    Raises:
        FileError: the store does not answer, refuses, or has nothing of this name.
    """
    try:
        return attempt(url, task)
    except FileNotFoundError:
        raise FileError("there is no such file in the store") from None
    except FileError as error:  # of which the library's own error quotes the whole URL
        raise error from None
