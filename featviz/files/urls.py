"""URLs of places that are no folders: object stores, reached through fsspec. Nothing here connects
to one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote

from featviz.errors import UsageError
from featviz.files import stores
from featviz.text import quoted

_SECRET = re.compile(r"\A[^/@]*@")
"""`user:password@` before the host."""

_FOLDERS = ("file", "local")
_READ_ONLY = ("http", "https", "data")


def is_url(place: object) -> bool:
    """Whether a text is a URL, and no path: `s3://bucket/maps`."""
    return isinstance(place, str) and stores.is_url(place)


@dataclass(frozen=True)
class Url:
    """A place in an object store: `s3://bucket/maps`. As text it shows no password."""

    whole: str = field(repr=False)
    """As it was given, without slashes at its end."""

    @classmethod
    def of(cls, text: str) -> Url:
        """Read a URL.

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
        if url.protocol in _READ_ONLY or not url.path:
            raise UsageError(
                f"{quoted(str(url))} is no place in an object store",
                "for example s3://bucket/maps, gs://bucket/maps, az://container/maps",
            )
        return url

    @property
    def protocol(self) -> str:
        """`s3`, in small letters."""
        return self.whole.partition("://")[0].lower()

    @property
    def path(self) -> str:
        """What stands behind `s3://`, without user and password."""
        return _SECRET.sub("", self.whole.partition("://")[2]).strip("/")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.protocol}://{self.path}"

    def without_secrets(self, words: str) -> str:
        """A text in which neither user nor password of the URL stands."""
        secret = _SECRET.match(self.whole.partition("://")[2])
        for form in {secret[0][:-1], unquote(secret[0][:-1])} if secret else ():
            for part in sorted({form, *form.split(":", 1)}, key=len, reverse=True):
                words = words.replace(part, "…") if part else words
        return words


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
