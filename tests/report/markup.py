"""What stands on a page of a report, and in its script; and what is shown beside a run."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rundirs import write_run

from featviz.options.commands import ReportOptions
from featviz.report import build_report

HOSTILE = "<img src=x onerror=alert(1)>.png"
EVIL = '"><script>alert(1)</script>'


class Markup(HTMLParser):
    """Collects what the tests ask of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self._texts: list[str] = []
        self._inside = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.inline += data
        else:
            self._texts.append(data)

    @property
    def text(self) -> str:
        """What can be read, with single spaces."""
        return " ".join("".join(self._texts).split())

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of a tag."""
        return [attributes for name, attributes in self.tags if name == tag]

    def values(self, tag: str, attribute: str) -> list[str]:
        """An attribute of the elements of a tag that have it."""
        return [str(tag[attribute]) for tag in self.of(tag) if attribute in tag]

    def pictures(self, text: str) -> list[dict[str, str | None]]:
        """The pictures whose alternative text has these words."""
        return [image for image in self.of("img") if text in str(image["alt"])]

    @property
    def ids(self) -> list[str]:
        """The ids of all elements."""
        return [
            str(attributes["id"]) for _, attributes in self.tags if "id" in attributes
        ]


def built(root: Path, *images: Any, **record: Any) -> Path:
    """A run (`rundirs.write_run`) with its report."""
    write_run(root, *images, **record)
    build_report(root, ReportOptions())
    return root


def read(path: Path) -> Markup:
    return Markup(path.read_text("utf-8"))


def source(root: Path, name: str = "index.html") -> str:
    """The HTML of a page of a run's report."""
    return (root / "report" / name).read_text("utf-8")


def page_of(root: Path, name: str = "index.html") -> Markup:
    """A page of a run's report."""
    return Markup(source(root, name))


def assert_says(text: str, *passages: str) -> None:
    """Each passage stands in the text."""
    for passage in passages:
        assert passage in text, passage


def pages(root: Path) -> dict[str, Markup]:
    """All pages of a run's report."""
    return {path.name: read(path) for path in sorted((root / "report").glob("*.html"))}


def script(path: Path) -> dict[str, dict[str, Any]]:
    """The grids in a script, by their ids."""
    text = path.read_text("utf-8")
    start = "window.FEATVIZ = Object.assign(window.FEATVIZ || {}, "
    end = ");\n"
    assert text.startswith(start)
    assert text.endswith(end)
    grids: dict[str, dict[str, Any]] = json.loads(text[len(start) : -len(end)])
    return grids


def loaded(root: Path, name: str) -> dict[str, dict[str, Any]]:
    """The grids in the scripts that a page loads."""
    grids: dict[str, dict[str, Any]] = {}
    for address in page_of(root, name).values("script", "src"):
        if address.startswith("grids-"):
            grids |= script(root / "report" / address)
    return grids


def numbers(grid: dict[str, Any]) -> np.ndarray:
    """The statistics of a grid in a script, float32 [maps, 6]: a column of one number
    holds for all channels."""
    columns = []
    for text in grid["stats"]:
        column = np.frombuffer(base64.b64decode(text), "<f4")
        assert len(column) in (1, grid["maps"])
        columns.append(np.broadcast_to(column, grid["maps"]))
    return np.stack(columns, axis=1)


def write_audit(root: Path, **changed: Any) -> Path:
    """A folder as `featviz audit` writes it: of two layers one has suspects, channels 4
    and 1."""
    (root / "suspects").mkdir(parents=True)
    Image.effect_noise((300, 42 + 2 * 112), 90).save(root / "suspects" / "relu.png")
    image = {"image": "a.png", "tile": [160, 42, 60, 40], "map": [230, 42, 60, 40]}
    suspect = {"finding": "dead", "range": [-1.5, 0], "images": [image]}
    drawn = {
        "layer": "relu",
        "shown": "conv1",
        "channels": [{"channel": 4, **suspect}, {"channel": 1, **suspect}],
        "suspects": 3,
        "file": "suspects/relu.png",
    }
    row = {"type": "ReLU", "channels": 6, "call": 0}
    findings = {"dead": [1, 4], "constant": [5]}
    layers = [
        {**row, "layer": "relu", "label": "relu", "findings": findings, "apoz": 0.375},
        {**row, "layer": EVIL, "label": EVIL, "findings": {"dead": []}, "apoz": None},
    ]
    content = {
        "schema_version": 1,
        "featviz": "0",
        "torch": "2.15.0",
        "device": "cpu",
        "model": {"file": "net.pth", "sha256": "f" * 64},
        "preprocessing": "RGB, as it is",
        "options": {"eps": 0.5, "layers": None},
        "images": {"total": 9, "seen": 9},
        "layers": layers,
        "total": {},
        "drawn": [{**drawn, **changed}],
        "files": ["suspects/relu.png"],
    }
    (root / "audit.json").write_text(json.dumps(content))
    return root


BEST = {
    "image": EVIL,
    "number": 0,
    "value": 2.5,
    "place": None,
    "map": None,
    "box": None,
}
CHANNEL = {"channel": 0, "file": "001_conv1/output/c00000.png", "exemplars": [BEST]}


def write_exemplars(
    root: Path,
    layer: str = "conv1",
    record: dict[str, Any] | None = None,
    **changed: Any,
) -> Path:
    """A folder as `featviz exemplars` writes it: two channels, of which the second has
    none."""
    folder = root / "001_conv1" / "output"
    folder.mkdir(parents=True)
    Image.new("RGB", (50, 30)).save(root / "001_conv1" / "output.png")
    Image.new("RGB", (70, 40)).save(folder / "c00000.png")
    channels = [CHANNEL, {"channel": 1, "file": None, "exemplars": []}]
    layer_row = {
        "layer": layer,
        "type": "Conv2d",
        "index": 1,
        "call": 0,
        "key": "",
        "class_name": None,
        "shape": [1, 2, 4, 4],
        "layout": "nchw",
        "sheet": "001_conv1/output.png",
        "receptive_field": {"how": "computed", "size": [3, 5]},
        "channels": channels,
    }
    content = {
        "schema_version": 1,
        "featviz": "1",
        "torch": "2",
        "torchvision": "0",
        "device": "cpu",
        "model": {},
        "preprocessing": "",
        "options": {"by": "max", "top": 9},
        "images": {"total": 4, "seen": 4, "failures": []},
        "skipped": [],
        "never_ran": [],
        "layers": [layer_row | changed],
        **(record or {}),
    }
    (root / "exemplars.json").write_text(json.dumps(content))
    return root
