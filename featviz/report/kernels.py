"""Kernels: on the pages of the layers of a run, and as a page of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from featviz.report import words
from featviz.report.legend import Entry, Key, key, legend
from featviz.report.views import LayerPage, PictureView
from featviz.rundir.kernels import ReadKernels
from featviz.rundir.schema import CaptureRow
from featviz.text import by, counted


@dataclass(frozen=True)
class KernelView:
    """The kernels of a convolution, a tile or a row of tiles for each channel that it makes."""

    id: str
    """Of its section on the page of the kernels."""
    picture: PictureView
    row: CaptureRow
    options: Mapping[str, Any]
    """By which they were drawn."""

    @property
    def words(self) -> str:
        """What a tile is."""
        inputs = self.row.shape[1] if len(self.row.shape) > 1 else 1
        what = "mean over the inputs, " if self.row.layout == "mean" else ""
        return f"{what}{counted(inputs, 'input')} to a channel"

    @property
    def brief(self) -> str:
        """How many there are, and the shape and range of their weights, on one line."""
        row, drawn = self.row, len(self.row.drawn)
        shown = f"{drawn} of " if drawn < row.maps else ""
        span = f"weights {words.number(row.min)} to {words.number(row.max)}"
        return f"{shown}{counted(row.maps, 'kernel')} · {by(row.shape)} · {span}"

    @property
    def key(self) -> Key:
        """What dark and bright are."""
        return key(self.row, self.options)


@dataclass(frozen=True)
class KernelPage:
    """The kernels of a model as a page of their own shows them."""

    kernels: ReadKernels
    layers: tuple[KernelView, ...]

    @property
    def name(self) -> str:
        """What the model is called."""
        return words.name_of(self.kernels.model)

    @property
    def total(self) -> int:
        """The kernels of all layers."""
        return sum(layer.row.maps for layer in self.layers)

    @property
    def legend(self) -> list[Entry]:
        """What the colours mean."""
        return legend(self.kernels.options, (layer.row for layer in self.layers))

    @property
    def facts(self) -> words.Facts:
        """What was drawn, for the foot of the page."""
        return words.run_facts({**self.kernels.record, "model": self.kernels.model})


def arrange(kernels: ReadKernels) -> KernelPage:
    """Sort kernels into a page of their own, in the order of the model."""
    return KernelPage(kernels, tuple(_views(kernels)))


def views_of(kernels: ReadKernels, layers: Iterable[LayerPage]) -> dict[str, KernelView]:
    """The kernels of the layers of a run, by the names of these, for the pages of the layers."""
    pages = {page.name: page.id for page in layers}
    return {
        view.row.layer: replace(view, picture=replace(view.picture, home=pages[view.row.layer]))
        for view in _views(kernels)
        if view.row.layer in pages
    }


def _views(kernels: ReadKernels) -> Iterator[KernelView]:
    for n, row in enumerate(kernels.pictures.captures.values()):
        size = (row.plan.width, row.plan.height)
        alt = f"{counted(row.maps, 'kernel')} of {row.label}"
        picture = PictureView(f"k{n}", kernels.pictures, row.file, size, alt, "")
        yield KernelView(f"kernels-{n:03d}", picture, row, kernels.options)
