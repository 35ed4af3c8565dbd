"""URLs of stores that fsspec can read (s3://, https:// and others), and the files in these
stores. No message shows the user's credentials."""

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
"""How many bytes of a file each request fetches."""
_BLOCK = 4 * 2**20
"""How many bytes of an archive each request fetches; they are kept for later reads."""
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
    """Whether a value is the text of a URL, such as `s3://bucket/maps`; False for a path on
    this machine."""
    return isinstance(value, str) and bool(_URL.match(value))


@dataclass(frozen=True, repr=False)
class Url:
    """The URL of a run directory, a file, or a file in an archive. `str` and `repr` show it
    without user, password and query."""

    text: str
    """The URL as the user gave it, with credentials."""
    inner_key: str | None = None
    """The `key` of a file or folder that was found below that URL; None for the URL itself."""
    member: str | None = None
    """The name of a file in an archive; None if the file is in no archive."""

    @classmethod
    def of_file(cls, text: str) -> Url:
        """The URL of a file, folder or glob to read.

        Raises:
            UsageError: Where the URL is of no store that featviz can read.
        """
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
        """The URL of a run directory.

        Raises:
            UsageError: Where the URL is of no object store that featviz can use.
        """
        url = cls(text)
        if "::" in text or url.protocol in (*WEB, "file", "local", "data", ""):
            raise UsageError(
                f"{quoted(without_credentials(text))} is no place in an object store",
                "for example s3://bucket/maps, gs://bucket/maps, az://container/maps; "
                "a folder of this machine is given as its path",
            )
        return url.at_key(url.key)

    def at_key(self, key: str) -> Url:
        """The URL of another file or folder in the same store, with the same credentials."""
        return replace(self, inner_key=key)

    @property
    def protocol(self) -> str:
        """The protocol: `s3` for `S3://bucket/a.jpg`; empty if the text is no URL."""
        match = _URL.match(self.text)
        if match:
            return match[1].lower()
        return ""

    @property
    def is_web(self) -> bool:
        """Whether the URL is of a web server, which has no folders."""
        return self.protocol in WEB

    @property
    def key(self) -> str:
        """fsspec's name for the file or folder: `bucket/maps`; on a web server the URL."""
        if self.inner_key is not None:
            return self.inner_key
        return str(_class_for(self.protocol)._strip_protocol(self.text))

    @property
    def shown_path(self) -> str:
        """The path for messages and names: `bucket/photos/a.jpg`, or `host/a.tar::b.jpg` for
        a file in an archive; without protocol, user, password and query."""
        path = self.text if self.inner_key is None else self.inner_key
        path = _URL.sub("", path, count=1).lstrip("/")
        if self.is_web:
            path = unquote(re.split("[?#]", path, maxsplit=1)[0])
        # the host may be `user:password@host`
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
        """A text (an error message) without this URL's user and password, wherever they are
        whole words, and without those in other URLs."""
        secret = _SECRET.search(self.text)
        if secret is None:
            return without_credentials(text)
        # a library may quote them as in the URL (`p%40ss`), or decoded (`p@ss`)
        quoted_pair = secret[0].removesuffix("@")
        for pair in (quoted_pair, unquote(quoted_pair)):
            # the pair first: once its halves are replaced, it would not be found
            for name in sorted([pair, *pair.split(":", 1)], key=len, reverse=True):
                if name:
                    text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", text)
        return without_credentials(text)

    def filesystem(self) -> Any:
        """fsspec's filesystem for the store, which all threads share. Its methods may raise
        anything, so call them through `attempt` or `ask`.

        Raises:
            UsageError: Where the store's package is missing, or cannot connect.
        """
        options = _class_for(self.protocol)._get_kwargs_from_urls(self.text)
        try:
            return _connect(self.protocol, tuple(sorted(options.items())), os.getpid())
        # The store's package (s3fs) may raise anything, for example because of a
        # configuration file of its own.
        except Exception as error:
            reason = quoted(self.without_secrets(str(error)))
            raise UsageError(
                f"{quoted(str(self))} cannot be reached: {reason}",
                "options come from the URL and fsspec's configuration (FSSPEC_...)",
            ) from error


def refuse_url(value: object) -> None:
    """Raise a UsageError if a value is a URL, for options that only take a path on this
    machine."""
    if isinstance(value, str) and is_url(value):
        raise UsageError(
            f"{quoted(str(Url(value)))} is a URL, and only a path of this machine can"
            " stand here",
            "give a path, and copy between it and the store (`aws s3 cp --recursive`)",
        )


def without_credentials(text: str) -> str:
    """A text without the user, the password and the query of any URL in it."""
    return _QUERY.sub("", _SECRET.sub("", text))


def _class_for(protocol: str) -> Any:
    """fsspec's class for the files of a protocol, such as `s3`.

    Raises:
        UsageError: Where the protocol is of no store that fsspec knows, or its package is
            not installed.
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
        # fsspec's own ImportError has the one that names the module as its cause
        missing = getattr(error.__cause__ or error, "name", None)
        module = missing or known_implementations[protocol]["class"]
        package = module.partition(".")[0]
        raise UsageError(
            f"{protocol}:// needs the package {package}, which is not installed",
            f"pip install {package}",
        ) from None


@lru_cache(maxsize=16)
def _connect(protocol: str, options: tuple[tuple[str, Any], ...], process: int) -> Any:
    """A filesystem of fsspec for a store. It is cached and shared by all threads, while
    fsspec itself makes one for each thread.

    Args:
        protocol: The protocol, such as `s3`.
        options: Names and values from the URL; they win over fsspec's configuration.
        process: The id of this process, so that a forked process connects anew.
    """
    import fsspec

    # fsspec's configuration holds for all programs that use it
    all_options = {**fsspec.config.conf.get(protocol, {}), **dict(options)}
    return _class_for(protocol)(**all_options, skip_instance_cache=True)


def attempt(url: Url, task: Callable[[], T]) -> T:
    """Run a task that reads from a store, or writes to it, and return its result.

    Args:
        url: The URL, whose credentials are kept out of messages.
        task: The task.

    Raises:
        FileNotFoundError: Where the task raises it, or the server answers 404.
        FileExistsError: Where the task raises it.
        FileError: Where the task raises it, or raises anything else.
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
    """The message for an exception of a store's library; empty if the exception has none.

    Args:
        url: The URL, whose credentials are left out.
        error: The exception.
    """
    if is_access_denied(error):
        return "the store refuses access: are the credentials there?"
    # each library has its own class for a timeout
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "the store did not answer in time"
    status = _status(error)
    if not status:
        return quoted(url.without_secrets(str(error)).strip())
    # str() of an HTTP error contains the URL; its `message` is that of the server
    reason = quoted(url.without_secrets(str(getattr(error, "message", ""))).strip())
    return f"the server answers {status} {reason}".strip()


def is_access_denied(error: BaseException | None) -> bool:
    """Whether an exception says that a store refused access, or that its library has no
    credentials."""
    # NoCredentialsError of botocore, and similar classes, are no PermissionError
    is_named_so = (
        isinstance(error, PermissionError) or "Credentials" in type(error).__name__
    )
    return is_named_so or _status(error) in (401, 403)


def _status(error: BaseException | None) -> int:
    """The HTTP status in an exception; 0 if it has none."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    if isinstance(status, int):
        return status
    return 0


# Files in stores. If a store has no such file, or refuses access, the error is a FileError
# whose message shows no credentials.


def read(url: Url, most: int) -> bytes:
    """The bytes of a file. Not more than `most` bytes are fetched, even if the server gives a
    wrong length.

    Raises:
        FileError: Where the file has more bytes, or cannot be read.
    """
    content = io.BytesIO()
    ask(url, lambda: copy(url, content, most))
    return content.getvalue()


def copy(url: Url, target: BinaryIO, limit: int) -> None:
    """Copy a file from a store, piece by piece. The store's library may raise anything, so
    call this through `attempt` or `ask`.

    Args:
        url: The URL of the file.
        target: The open file to write to. If the source is too large, its beginning is
            written all the same.
        limit: The most bytes that the source may have.

    Raises:
        FileError: Where it has more bytes.
    """
    options = {}
    if url.is_web:
        # These options make fsspec read the file as a stream. Otherwise it asks for the size
        # first, which many servers do not tell.
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
    """Open a file in a store so that it can be read from any position, as archives need it.

    Raises:
        FileError: Where it cannot be opened, or the server only sends whole files.
    """
    blocks = {
        "cache_type": "blockcache",
        "cache_options": {"maxblocks": 4},
        "block_size": _BLOCK,
    }
    file = ask(url, lambda: url.filesystem().open(url.key, "rb", **blocks))
    # the directory of a zip file is at the end, which a stream only reaches by reading all
    if not isinstance(getattr(file, "size", None), int) or not file.seekable():
        raise FileError(
            "the server gives no parts of files, which an archive needs",
            "download the archive, and give the file",
        )
    return file


def files_below(folder: Url, pattern: str = "**") -> Iterator[tuple[str, Url]]:
    """The files in a folder of a store and in all folders below it. For each file, yield its
    path relative to the folder, with forward slashes, and its URL. They are sorted by the
    parts of the path, like files on disk.

    Args:
        folder: The URL of the folder, with or without a slash at the end.
        pattern: A glob for the relative paths: `*` within a folder, `**` across folders.

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
        # the name becomes a path below --out, and a key in a store may contain `..`
        leaves_folder = not set(name.split("/")).isdisjoint({"", ".", ".."})
        if is_match(name) and not leaves_folder:
            yield name, folder.at_key(base + name)


def files_matching(pattern: Url) -> Iterator[tuple[str, Url]]:
    """The files that a glob matches. Their names are relative to the folders before the first
    wildcard."""
    parts = pattern.key.split("/")
    count = 0  # the number of parts before the first wildcard
    while not has_magic(parts[count]):
        count += 1
    folder = pattern.at_key("/".join(parts[:count]))
    return files_below(folder, "/".join(parts[count:]))


def ask(url: Url, task: Callable[[], T]) -> T:
    """Run a task that reads from a store, and return its result.

    Raises:
        FileError: Where the store does not answer, refuses, or has no such file.
    """
    try:
        return attempt(url, task)
    except FileNotFoundError:
        raise FileError("there is no such file in the store") from None
    except FileError as error:  # its cause, the library's error, may show credentials
        raise error from None
