"""How results look in a notebook: HTML with pictures, a table and lines of text."""

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

# At most this many pixels has the longer side of one of many pictures (SMALL), of a single
# picture (LARGE), and of a page with letters on it (PAGE).
SMALL = 240
LARGE = 960
PAGE = 1800
_GAP = 8
"""Between two tiles of a sheet there are at least this many white rows or columns."""
UPPER_END = 480
"""At most this many rows of pixels of a sheet are shown."""

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
    """Lines of text below the pictures and the table."""
    table: TextTable | None = None
    table_first: bool = False
    """Whether the table stands above the pictures."""
    link: str = ""
    """The path of a page, for a result that is a page; else empty."""
    side: int = SMALL
    """The longer side of each picture has at most this many pixels."""


def html_of(result: Any) -> str:
    """A result of the public functions as HTML, with its pictures as data URIs.

    A large picture is made smaller; a small one is shown larger by a whole factor. If a
    picture cannot be read, its caption says so. At most MOST_PICTURES pictures and MOST_ROWS
    rows of a table are shown; a line says if there are more.

    Args:
        result: an object of a class in VIEWS.

    Raises:
        KeyError: the result is of another class.
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
        side: the longer side gets at most this many pixels.

    Returns:
        The figure. If the picture is damaged or gone, it has no picture, and its caption
        says so.
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
    # BOX, since a sharper filter would draw bright and dark lines at the borders of tiles
    picture.thumbnail((side, side), Image.Resampling.BOX)
    file = io.BytesIO()
    picture.save(file, "png")
    data = base64.b64encode(file.getvalue()).decode()
    # The browser enlarges a small picture to at most half of `side`, by a whole factor, so
    # that pixels stay squares.
    factor = max(1, side // (2 * max(picture.size)))
    size = (picture.width * factor, picture.height * factor)
    return NotebookFigure(
        address=f"data:image/png;base64,{data}", text=quoted(shot.caption), size=size
    )


def _result_line(result: Any) -> str:
    """A result in one line: `RunResult of 1 image: 1 picture`."""
    return repr(result).strip("<>")


# The view of each result


def _maps_shot(maps: FeatureMaps) -> Shot:
    return Shot(lambda: maps.image, maps.title)


def _image_shots(image: ImageResult) -> Iterator[Shot]:
    """The input and the feature maps of an image; nothing if the image failed."""
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
    return View(shots, [_result_line(run), *_failure_lines(run.images)])


def _page_view(page: LookResult | Sheet | FieldResult) -> View:
    return View([Shot(lambda: page.image, _result_line(page))], side=PAGE)


def _cam_view(cams: ClassMaps) -> View:
    """The maps of all images at all layers, and why images failed."""
    failures = [f"{name} failed: {reason}" for name, reason in cams.failures.items()]
    shots = []
    for image in cams.images:
        for cam in image.maps:
            # a function, since `cam.image` would make the picture at once
            load = partial(getattr, cam, "image")
            shots.append(Shot(load, f"{image.title} at {cam.name}"))
    # large enough to see the image below the map
    side = LARGE if len(shots) == 1 else LARGE // 2
    return View(shots, [_result_line(cams), *failures], side=side)


def _kernel_view(kernels: KernelPicture) -> View:
    return View(
        [
            Shot(
                lambda: kernels.image,
                _result_line(kernels).removeprefix("KernelPicture "),
            )
        ],
        side=LARGE,
    )


def _study_view(study: StudyResult) -> View:
    """The pictures of a study. Kernels are shown as a whole. A study with a table has sheets
    of pictures: only their upper ends are shown, so that letters can be read."""
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
    """The upper left part of a picture, cut between two tiles."""
    picture = study.picture(file)
    is_white = np.asarray(picture.convert("L")) == 255
    width = _shown_lines(is_white.all(0), LARGE)
    height = _shown_lines(is_white.all(1), UPPER_END)
    return picture.crop((0, 0, width, height))


def _shown_lines(lines: np.ndarray, limit: int) -> int:
    """How many rows or columns of a sheet are shown: all, or those up to the last gap
    between tiles that lies before `limit`.

    Args:
        lines: whether each row or column of pixels is white, bool [N].
        limit: the largest number that is shown.
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
    """Pictures of one size, joined into one picture from left to right."""
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
    # A notebook calls this method of an object. It is added here, since the records are in
    # folders that may not import `api`.
    record._repr_html_ = html_of  # type: ignore[attr-defined]
