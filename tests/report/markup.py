"""What stands on a page of a report, and in its script."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

HOSTILE = "<img src=x onerror=alert(1)>.png"
EVIL = '"><script>alert(1)</script>'


class Markup(HTMLParser):
    """Collects what the tests ask of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.inline = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else self._inside

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.inline += data
        else:
            self.text += data

    def of(self, name: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of a name."""
        return [attributes for tag, attributes in self.tags if tag == name]


def read(page: Path) -> Markup:
    return Markup(page.read_text("utf-8"))


def pages(root: Path) -> dict[str, Markup]:
    return {path.name: read(path) for path in sorted((root / "report").glob("*.html"))}


def script(path: Path) -> dict[str, dict[str, Any]]:
    """The grids in a script, by their ids."""
    text = path.read_text("utf-8")
    start, end = "window.FEATVIZ = Object.assign(window.FEATVIZ || {}, ", ");\n"
    assert text.startswith(start) and text.endswith(end)
    grids: dict[str, dict[str, Any]] = json.loads(text[len(start) : -len(end)])
    return grids


def loaded(root: Path, page: str) -> dict[str, dict[str, Any]]:
    """The grids in the scripts that a page loads."""
    names = [str(tag["src"]) for tag in read(root / "report" / page).of("script")]
    paths = [root / "report" / name for name in names if name.startswith("grids-")]
    return {id: grid for path in paths for id, grid in script(path).items()}


def numbers(grid: dict[str, Any]) -> np.ndarray:
    """The statistics of a grid in a script, float32 [maps, 6]: a column of one number holds for
    all channels."""
    columns = [np.frombuffer(base64.b64decode(text), "<f4") for text in grid["stats"]]
    assert all(len(column) in (1, grid["maps"]) for column in columns)
    return np.stack([np.broadcast_to(column, grid["maps"]) for column in columns], axis=1)
