"""The pictures of exemplars on the pages of layers and channels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from featviz.errors import StoreError
from featviz.report import words
from featviz.report.views import LayerPage, PictureView
from featviz.rundir.exemplars import ExemplarChannel, ExemplarLayer, ExemplarRecord
from featviz.rundir.image import ReadImage
from featviz.text import by, counted, quoted


@dataclass(frozen=True)
class ExemplarView:
    """The exemplars of a tensor; with `--per-class`, those of one class."""

    title: str
    """The name of the class; else empty."""
    sheet: PictureView
    words: str
    """By what, of how many images, and what a unit sees."""
    channels: Mapping[int, PictureView]


Exemplars = Mapping[tuple[str, str], Sequence[ExemplarView]]
"""By the page of a layer, and the stem of a tensor."""


def exemplar_views(
    pages: Sequence[LayerPage], record: ExemplarRecord, pictures: ReadImage
) -> Exemplars:
    """Sort exemplars to the pages of layers.

    Raises:
        StoreError: no layer of theirs has a page.
    """
    ids = {(page.name, group.stem): page.id for page in pages for group in page.groups}
    found: dict[tuple[str, str], list[ExemplarView]] = {}
    for number, layer in enumerate(record.layers):
        id = ids.get((layer.label, layer.stem))
        if id is not None:
            shown = _view(number, layer, record, pictures, id)
            found.setdefault((id, layer.stem), []).append(shown)
    if not found:
        raise StoreError(
            f"{quoted(str(pictures.root))} has exemplars of no layer of this run",
            "give featviz exemplars the --layers of the run",
        )
    return found


def _view(
    number: int, layer: ExemplarLayer, record: ExemplarRecord, pictures: ReadImage, page: str
) -> ExemplarView:
    def view(id: str, file: str, alt: str) -> PictureView:
        return PictureView(id, pictures, file, pictures.pixels[file], alt, page)

    sheet = view(f"e{number}", layer.sheet, f"Exemplars of all channels of {layer.label}")
    return ExemplarView(
        layer.class_name or "",
        sheet,
        _words(layer, record),
        {
            row.channel: view(f"e{number}-{row.channel}", row.file, _alt(row, layer.label))
            for row in layer.channels
            if row.file
        },
    )


def _words(layer: ExemplarLayer, record: ExemplarRecord) -> str:
    images = counted(record.images.seen, "image")
    by_what = "value" if record.options["by"] == "max" else "mean"
    parts = [f"of {images} those with the largest {by_what}"]
    if layer.receptive_field.how in ("computed", "measured"):
        parts.append(f"a unit sees {by(layer.receptive_field.size)} pixels of the input")
    return "; ".join(parts)


def _alt(row: ExemplarChannel, label: str) -> str:
    return f"What excites channel {row.channel} of {label} most: " + ", ".join(_best(row))


def _best(row: ExemplarChannel) -> Iterator[str]:
    return (f"{one.image} {words.number(one.value)}" for one in row.exemplars)
