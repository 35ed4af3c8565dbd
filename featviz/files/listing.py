"""Folders in stores, walked one by one; those of web servers are read from their pages."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from glob import has_magic
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin

from featviz.errors import FileError
from featviz.files import SMALL
from featviz.files.fetch import NoSuchFileError, children, read
from featviz.files.stores import Remote
from featviz.files.urls import WEB
from featviz.text import quoted

log = logging.getLogger(__name__)

DEEPEST = 32
"""Folders inside one another that are searched."""
MOST_FOLDERS = 10_000
MOST_FILES = 10_000_000


def below(folder: Remote) -> Iterator[tuple[str, Remote]]:
    """The files below a folder with their relative names, sorted as on disk; a folder is listed
    when its turn comes.

    Raises:
        FileError: the store does not answer, or has more folders or files than are searched.
    """
    folders = files = 0
    waiting = [("", folder, True)]
    while waiting:
        name, place, is_folder = waiting.pop()
        if not is_folder:
            files += 1
            yield name, place
        elif name.count("/") < DEEPEST:
            folders += 1
            waiting += reversed(list(_entries(place, name)))
        if folders > MOST_FOLDERS or files > MOST_FILES:
            raise FileError(f"{quoted(str(folder))} has no end: {folders} folders were searched")


def matching(pattern: Remote) -> Iterator[tuple[str, Remote]]:
    """The files that a glob matches, with their names below the part of it without wildcards.

    Raises:
        FileError: as `below`.
    """
    from fsspec.utils import glob_translate

    web = pattern.protocol in WEB
    parts = (pattern.path.partition("?")[0] if web else pattern.path).split("/")
    fixed = next(number for number, part in enumerate(parts) if has_magic(part))
    tail = "/".join(parts[fixed:])
    wanted = re.compile(glob_translate(unquote(tail) if web else tail))
    for name, place in below(replace(pattern, path="/".join(parts[:fixed]))):
        if wanted.match(name):
            yield name, place


def _entries(folder: Remote, name: str) -> Iterator[tuple[str, Remote, bool]]:
    """The relative name and place of what lies directly in a folder, and whether it is one."""
    is_web = folder.protocol in WEB
    base = folder.path.rstrip("/") + "/"
    for path, is_folder in _links(folder, base) if is_web else children(folder):
        own = path.removeprefix(base).rstrip("/")
        shown = unquote(own) if is_web else own
        if path.rstrip("/") == base.rstrip("/"):
            continue  # the marker that some programs leave for a folder
        if not path.startswith(base) or "/" in shown or shown in ("", ".", ".."):
            log.warning("%s: %s is left out: it lies elsewhere", quoted(str(folder)), quoted(shown))
            continue
        yield f"{name}{shown}{'/' * is_folder}", replace(folder, path=path), is_folder


class _Page(HTMLParser):
    """The links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note where a link leads."""
        self.links += [value for name, value in attrs if (tag, name) == ("a", "href") and value]


def _links(folder: Remote, base: str) -> list[tuple[str, bool]]:
    """What a server's page of a folder leads to directly below it; other links are its own."""
    page = _Page()
    try:
        page.feed(read(replace(folder, path=base), SMALL).decode("utf-8", "replace"))
    except NoSuchFileError:
        return []
    links = {urljoin(base, link) for link in page.links if "?" not in link and "#" not in link}
    below = [link for link in links if link.startswith(base) and "/" not in link[len(base) : -1]]
    return sorted((link, link.endswith("/")) for link in below)
