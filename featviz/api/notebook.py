"""How results look in a notebook: pictures, a table and lines of text, in one piece of
HTML."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from featviz.api.studies import ClassMaps, KernelPicture, StudyResult, picture_in
from featviz.diff.comparison import Comparison
from featviz.diff.output import diff_table
from featviz.errors import StoreError
from featviz.inspection.field import FieldResult
from featviz.inspection.layers import Listing
from featviz.inspection.look import LookResult
from featviz.report import ReportResult
from featviz.report.engine import NotebookFigure, NotebookPage, render_notebook
from featviz.run.results import FeatureMaps, ImageResult, RunResult
from featviz.sheets.sheets import Sheet
from featviz.text import TextTable, quoted

# The longest side in pixels of a picture: of one among many, of one alone, and of a page
# with letters on it.
SMALL = 240
LARGE = 960
PAGE = 1800
_GAP = 8
"""The least number of white rows or columns of pixels between two tiles of a sheet."""
UPPER_END = 480
"""Rows of pixels of a sheet that are shown at most."""

MOST_PICTURES = 24
MOST_ROWS = 60


class Shot(NamedTuple):
    """A picture, which is read only when it is shown."""

    load: Callable[[], Image.Image]
    caption: str


@dataclass(frozen=True)
class View:
    """What a notebook shows of a result."""

    shots: Sequence[Shot] | Iterator[Shot] = ()
    lines: Sequence[str] = ()
    """Below the pictures and the table."""
    table: TextTable | None = None
    table_first: bool = False
    """Whether the table stands above the pictures."""
    link: str = ""
    """The path of a page, for a result that is a page; else empty."""
    side: int = SMALL
    """The longest side of its pictures, in pixels."""


def html_of(result: Any) -> str:
    """A result of the public functions as HTML, with its pictures as data URIs.

    A large picture is made smaller, a small one is shown larger by a whole factor, and
    one that cannot be read says so. There are at most MOST_PICTURES pictures and MOST_ROWS
    rows of a table; a line says that there are more.

    Args:
        result: of a class in VIEWS.

    Raises:
        KeyError: it is of another class.
    """
    view = VIEWS[type(result)](result)
    lines = [quoted(line) for line in view.lines]
    figures: list[NotebookFigure] = []
    for shot in view.shots:
        # a notebook has all pictures in its file
        if len(figures) == MOST_PICTURES:
            lines.append("there are more pictures")
            break
        figures.append(_figure(shot, view.side))
    # a model may have thousands of layers
    table = view.table
    if table is not None and len(table.rows) > MOST_ROWS:
        footer = (f"{len(table.rows) - MOST_ROWS} more rows", *table.footer)
        table = table._replace(rows=table.rows[:MOST_ROWS], footer=footer)
    return render_notebook(
        NotebookPage(figures, table, lines, view.table_first, view.link)
    )


def _figure(shot: Shot, side: int) -> NotebookFigure:
    """Read and encode one picture.

    Args:
        side: pixels that its longer side has at most.

    Returns:
        The figure; if the picture is damaged or gone, a figure without a picture whose
        caption says so.
    """
    try:
        picture = shot.load()
    except StoreError as error:
        return NotebookFigure(
            address="",
            text=quoted(f"{shot.caption}: {error.message}"),
            size=(side, side),
        )
    if picture.mode not in ("L", "RGB"):
        picture = picture.convert("RGB")
    # a sharper filter would draw bright and dark lines along the borders of tiles
    picture.thumbnail((side, side), Image.Resampling.BOX)
    file = io.BytesIO()
    picture.save(file, "png")
    data = base64.b64encode(file.getvalue()).decode()
    # The browser enlarges a small picture: by a whole factor, so that pixels stay square,
    # and to at most half of `side`.
    factor = max(1, side // (2 * max(picture.size)))
    size = (picture.width * factor, picture.height * factor)
    return NotebookFigure(
        address=f"data:image/png;base64,{data}", text=quoted(shot.caption), size=size
    )


def _title(result: Any) -> str:
    """The line for a result: `RunResult of 1 image: 1 picture`."""
    return repr(result).strip("<>")


# The view of each result


def _maps_shot(maps: FeatureMaps) -> Shot:
    return Shot(lambda: maps.image, maps.title)


def _image_shots(image: ImageResult) -> Iterator[Shot]:
    """The input and the feature maps of an image; nothing of one that failed."""
    if image.error is None:
        prediction = image.prediction[0].text if image.prediction else "input"
        yield Shot(lambda: image.input, f"{image.name}: {prediction}")
        yield from map(_maps_shot, image.captures)


def _failure_lines(images: Sequence[ImageResult]) -> list[str]:
    """A line for each image that failed."""
    return [
        f"{image.name} failed: {image.error}"
        for image in images
        if image.error is not None
    ]


def _run_view(run: RunResult) -> View:
    # an iterator: a run may have thousands of pictures
    shots = chain.from_iterable(map(_image_shots, run.images))
    return View(shots, [_title(run), *_failure_lines(run.images)])


def _page_view(page: LookResult | Sheet | FieldResult) -> View:
    return View([Shot(lambda: page.image, _title(page))], side=PAGE)


def _cam_view(cams: ClassMaps) -> View:
    """The maps of all images at all layers, and why images failed."""
    failures = [f"{name} failed: {reason}" for name, reason in cams.failures.items()]
    shots = []
    for image in cams.images:
        for cam in image.maps:
            # not `cam.image`, which would read the picture now
            load = partial(getattr, cam, "image")
            shots.append(Shot(load, f"{image.title} at {cam.name}"))
    # large enough to see the image below the map
    side = LARGE if len(shots) == 1 else LARGE // 2
    return View(shots, [_title(cams), *failures], side=side)


def _kernel_view(kernels: KernelPicture) -> View:
    return View(
        [Shot(lambda: kernels.image, _title(kernels).removeprefix("KernelPicture "))],
        side=LARGE,
    )


def _study_view(study: StudyResult) -> View:
    """The pictures of kernels as a whole; of sheets, which are those of studies with a
    table, the upper ends, so that their letters can be read."""
    lines = [study.title, *study.lines]
    if study.table is None:
        shots = [
            Shot(partial(study.picture, file), title)
            for file, title in study.files.items()
        ]
        return View(shots, lines)
    shots = []
    for file, title in study.files.items():
        shots.append(Shot(partial(_upper_end, study, file), f"{title} ({file})"))
    if shots:
        lines.append("of large pictures the upper end; picture(file) has the whole")
    return View(shots, lines, study.table, study.table_first, side=LARGE)


def _upper_end(study: StudyResult, file: str) -> Image.Image:
    """The upper left part of a picture, which is cut between tiles."""
    picture = study.picture(file)
    is_white = np.asarray(picture.convert("L")) == 255
    width = _last_white(is_white.all(0), LARGE)
    height = _last_white(is_white.all(1), UPPER_END)
    return picture.crop((0, 0, width, height))


def _last_white(lines: np.ndarray, limit: int) -> int:
    """How many rows or columns of a sheet are shown: all, or those up to the last gap
    before `limit`.

    Args:
        lines: whether each row or column of pixels is white.
        limit: how many are shown at most.
    """
    if len(lines) <= limit:
        return len(lines)
    # a gap is wider than the white between letters
    is_gap = np.convolve(lines[:limit], np.ones(_GAP), "valid") == _GAP
    ends = np.flatnonzero(is_gap)
    return int(ends[-1]) + _GAP if len(ends) else limit


def _comparison_view(comparison: Comparison) -> View:
    """The table, and the maps that were written: before, after, and their difference."""
    shots = []
    for tensor in comparison.layers:
        maps = tensor.difference
        if comparison.out is not None and maps is not None:
            files = maps.before_file, maps.after_file, maps.file
            load = partial(_side_by_side, comparison.out, files)
            caption = f"{tensor.label} in {maps.image}: before, after, difference"
            shots.append(Shot(load, caption))
    lines = []
    if comparison.out is None and not comparison.equal:
        lines.append("with out='changes' pictures of the changed maps, too")
    table = diff_table(comparison)
    return View(shots, lines, table, table_first=True, side=LARGE)


def _side_by_side(folder: Path, files: Sequence[str]) -> Image.Image:
    """Pictures of one size, joined into one from left to right."""
    pictures = [np.asarray(picture_in(folder, file).convert("RGB")) for file in files]
    return Image.fromarray(np.concatenate(pictures, axis=1))


def _report_view(report: ReportResult) -> View:
    lines = [f"{name}: {reason}" for name, reason in report.incomplete.items()]
    return View(lines=lines, link=str(report.page))


VIEWS: Mapping[type, Callable[[Any], View]] = {
    RunResult: _run_view,
    ImageResult: lambda image: View(_image_shots(image), _failure_lines([image])),
    FeatureMaps: lambda maps: View([_maps_shot(maps)], side=LARGE),
    LookResult: _page_view,
    Sheet: _page_view,
    ClassMaps: _cam_view,
    KernelPicture: _kernel_view,
    StudyResult: _study_view,
    Listing: lambda listing: View(table=listing.table),
    Comparison: _comparison_view,
    FieldResult: _page_view,
    ReportResult: _report_view,
}
"""By the class of a result."""

for record in VIEWS:
    # A notebook asks an object for this method. It is added here, since the records are in
    # folders below `api`, which know nothing of HTML.
    record._repr_html_ = html_of  # type: ignore[attr-defined]
