"""The names of files in stores."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from featviz.files.urls import WEB, Url


@dataclass(frozen=True, repr=False)
class Remote:
    """A file in a store, or a file in an archive there. As text it is without credentials."""

    url: Url
    """The URL as the user gave it, which leads to the store."""
    path: str
    """The file, or the archive, as fsspec calls it in that store."""
    member: str | None = None
    """The file's name in the archive."""
    span: tuple[int, int] | None = None
    """In a tar that is not compressed: where the member begins, and how many bytes it has."""

    @classmethod
    def at(cls, url: str) -> Remote:
        """The file that a URL leads to; the store is not asked.

        Raises:
            UsageError: as `Url.of_file`.
        """
        read = Url.of_file(url)
        return cls(read, read.key)

    @property
    def protocol(self) -> str:
        """`s3` of `s3://bucket/a.jpg`."""
        return self.url.protocol

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
