"""The result of a comparison as one static page, readable without script and without style."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape
from urllib.parse import quote

from featviz.diff.documents import HEADINGS, cells, only_words, verdict_words
from featviz.diff.result import DiffResult, Map

_LAYERS = 50
"""Rows of the table at most; the JSON document has them all."""

STYLE = """\
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem }
table { border-collapse: collapse }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .5rem; text-align: left }
figure { margin: 1.5rem 0 }
img { image-rendering: pixelated; max-width: 100% }
"""


def document(result: DiffResult, maps: str) -> str:
    """The page.

    Args:
        maps: where the folder of the maps is, seen from the page, with forward slashes.
    """
    parts = [
        *_head(maps),
        f"<p>{escape(verdict_words(result))}</p>",
        _table(("", "run"), [("BASE", str(result.base)), ("NEW", str(result.new))]),
        *_figures(result.maps, maps),
        *_layers(result),
        *_listed("Only in BASE", only_words(result.only_in_base)),
        *_listed("Only in NEW", only_words(result.only_in_new)),
        *(
            line
            for side, names in result.incomplete.items()
            for line in _listed(f"Incomplete in {side.upper()}", names)
        ),
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _head(maps: str) -> list[str]:
    return [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        "<title>featviz diff</title>",
        f'<link rel="stylesheet" href="{_link(maps, "style.css")}">',
        "</head>",
        "<body>",
        "<h1>featviz diff</h1>",
    ]


def _layers(result: DiffResult) -> Iterable[str]:
    """The layers that differ, in the order of the model: the first is where it began."""
    found = result.differing
    if not found:
        return
    yield "<h2>Layers that differ</h2>"
    yield _table(HEADINGS, [cells(layer) for layer in found[:_LAYERS]])
    if len(found) > _LAYERS:
        yield f"<p>and {len(found) - _LAYERS} more</p>"


def _figures(found: Sequence[Map], maps: str) -> Iterable[str]:
    if not found:
        return
    yield "<h2>Difference maps</h2>"
    yield (
        f"<p>NEW - BASE, relative to the value and the layer’s largest: blue is lower in NEW, red "
        f"is higher, from -{found[0].limit:.3g} to {found[0].limit:.3g} in all pictures. Magenta: "
        "NaN or infinite on one side. Each layer is shown in the image in which it differs most."
        "</p>"
    )
    for one in found:
        title = f"{one.label} {one.stem}, {one.image}"
        yield "<figure>"
        yield f'<img src="{_link(maps, one.file)}" alt="{escape(title)}">'
        yield f"<figcaption>{escape(_words(one, title))}</figcaption>"
        yield "</figure>"


def _words(one: Map, title: str) -> str:
    return f"{title}: channels {', '.join(map(str, one.channels))} (from {one.source})"


def _listed(title: str, lines: Sequence[str]) -> Iterable[str]:
    if lines:
        yield f"<h2>{escape(title)}</h2>"
        yield "<ul>"
        yield from (f"<li>{escape(line)}</li>" for line in lines)
        yield "</ul>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(tag: str, values: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(value)}</{tag}>" for value in values) + "</tr>"

    return "\n".join(
        ["<table>", line("th", headings), *(line("td", row) for row in rows), "</table>"]
    )


def _link(folder: str, name: str) -> str:
    return escape(quote(os.fsencode(f"{folder}/{name}")))
