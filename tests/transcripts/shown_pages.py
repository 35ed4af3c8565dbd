"""What a story shows of a report: its pages as a reader finds them, and the numbers that
their scripts have."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import shown

_BLOCKS = re.compile(
    "address|article|aside|body|caption|details|d[dlt]|div|fig(ure|caption)|footer|h[1-4]"
    "|header|li|main|nav|[ou]l|p|section|summary|table|tr"
)
"""Elements that begin a line of their own."""
_UNSEEN = ("filter", "label", "script", "select", "style", "title")
"""Elements of which nothing is shown: controls that a script turns on, and colours."""
_VOID = ("br", "img", "input", "link", "meta", "rect", "wbr")
"""Elements without an end."""
_SAID = ("title", "aria-current", "open", "rel", "colspan")
"""Attributes that are shown, beside those of data."""


class _Page(HTMLParser):
    """Collects lines of text, links, pictures, bars and data."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._line = ""
        self._unseen = 0
        """How many elements of which nothing is shown are open."""
        self._links: list[str] = []

    def end_line(self) -> None:
        """Whatever comes begins a line."""
        line = " ".join(self._line.split())
        if line:
            self.lines.append(line)
        self._line = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if self._unseen or tag in _UNSEEN:
            self._unseen += tag not in _VOID
            return
        if _BLOCKS.fullmatch(tag):
            self.end_line()
        if tag == "a":
            self._links.append(attributes.get("href", ""))
        self._line += _of_element(tag, attributes)

    def handle_endtag(self, tag: str) -> None:
        if self._unseen:
            self._unseen -= tag not in _VOID
            return
        if _BLOCKS.fullmatch(tag):
            self.end_line()
        elif tag == "a":
            self._line += f" ({self._links.pop()}) "
        elif tag in ("td", "th", "small", "span", "option", "button"):
            self._line += " "

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self._line += data


def _of_element(tag: str, attributes: dict[str, str]) -> str:
    """What is shown of an element beside its text."""
    text = _of_attributes(attributes)
    classes = attributes.get("class", "").split()
    if tag == "img":
        text += _of_image(attributes)
    elif tag == "rect":
        text += _of_rectangle(attributes, "part" in classes)
    elif tag == "svg" and "crop" in classes:
        text += f" {{{attributes['viewbox']}}} "
    return text


def _of_attributes(attributes: dict[str, str]) -> str:
    said = [
        f"{name}={value}" if value else name
        for name, value in attributes.items()
        if name in _SAID or name.startswith("data-")
    ]
    return f" <{' '.join(said)}> " if said else ""


def _of_image(attributes: dict[str, str]) -> str:
    size = f"{attributes.get('width')}x{attributes.get('height')}"
    # bytes of a picture within a page depend on the version of what packed them
    source = re.sub(r",.*", "", attributes.get("src", ""))
    return f" [{source} {size} {attributes.get('alt', '')}] "


def _of_rectangle(attributes: dict[str, str], is_part: bool) -> str:
    if is_part:  # of a bar
        return f" |{attributes.get('x', '0')}+{attributes['width']}| "
    return f" {attributes['fill']} " if "fill" in attributes else ""


def page(file: str, until: str = "") -> Iterator[str]:
    """The title of a page, and the lines of its main part, up to one."""
    text = Path(file).read_text("utf-8")
    title = re.search(r"<title>(.*?)</title>", text, re.DOTALL)
    assert title is not None
    yield f"= {title[1].strip()}"
    begin = text.index("<main")
    reader = _Page()
    reader.feed(text[begin : text.index("</main>", begin)])
    reader.end_line()
    for line in reader.lines:
        if line == until:
            return
        yield shown.with_short_numbers(line)


def script(file: str) -> Iterator[str]:
    """The values that a script of a report holds, with statistics as numbers."""
    text = Path(file).read_text("utf-8")
    begin = text.find("{}, {")
    begin = text.index("{") if begin < 0 else begin + 4
    values = json.loads(text[begin : text.rindex("}") + 1])
    yield from shown.pretty(shown.without_volatile(_decoded(values)))


def _decoded(value: Any) -> Any:
    """A value whose `stats` are lists of numbers."""
    if isinstance(value, list):
        return [_decoded(part) for part in value]
    if not isinstance(value, dict):
        return value
    decoded = {name: _decoded(part) for name, part in value.items()}
    if "stats" in decoded:
        decoded["stats"] = [
            np.frombuffer(base64.b64decode(text), np.float32).tolist()
            for text in decoded["stats"]
        ]
    return decoded
