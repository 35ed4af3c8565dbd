"""How results look in a notebook: pictures, a table and lines of text, in one piece of
HTML."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from PIL import Image

from featviz.api.studies import ClassMaps, KernelPicture, StudyResult
from featviz.diff.comparison import Comparison
from featviz.diff.output import diff_table
from featviz.errors import StoreError
from featviz.inspection.layers import Listing
from featviz.inspection.look import LookResult
from featviz.report.engine import NotebookFigure, NotebookPage, render_notebook
from featviz.run.results import FeatureMaps, ImageResult, RunResult
from featviz.sheets.sheets import Sheet
from featviz.text import TextTable, quoted

# The longest side in pixels of a picture in a gallery, of one that stands alone, and of
# a page with letters on it.
SMALL = 240
LARGE = 960
PAGE = 1800

MOST_PICTURES = 24
MOST_ROWS = 60


class Shot(NamedTuple):
    """A picture that is read when it is shown."""

    load: Callable[[], Image.Image]
    caption: str


@dataclass(frozen=True)
class View:
    """What a notebook shows of a result."""

    shots: Sequence[Shot] | Iterator[Shot] = ()
    lines: Sequence[str] = ()
    """Below the pictures."""
    table: TextTable | None = None
    side: int = SMALL
    """The longest side of its pictures, in pixels."""


def html_of(result: Any) -> str:
    """A result of the public functions as HTML, its pictures as data URIs.

    Args:
        result: of a class in VIEWS; KeyError for another.

    A large picture is made smaller, a small one is shown larger by a whole factor, and
    one that cannot be read says so. It ends with a line where there are more than
    MOST_PICTURES."""
    view = VIEWS[type(result)](result)
    lines = [quoted(line) for line in view.lines]
    figures: list[NotebookFigure] = []
    for shot in view.shots:
        # a notebook keeps all of them in its file
        if len(figures) == MOST_PICTURES:
            lines.append("there are more pictures")
            break
        figures.append(_figure(shot, view.side))
    # a model may have thousands of layers, and a notebook shows each row for good
    table = view.table
    if table is not None and len(table.rows) > MOST_ROWS:
        footer = (f"{len(table.rows) - MOST_ROWS} more rows", *table.footer)
        table = table._replace(rows=table.rows[:MOST_ROWS], footer=footer)
    return render_notebook(NotebookPage(figures, table, lines))


def _figure(shot: Shot, side: int) -> NotebookFigure:
    """Read and encode one picture.

    Args:
        side: pixels that its longer side has at most.

    Returns:
        The figure; where the picture was changed or is gone since, one without a
        picture, whose caption says so.
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
    # a box filter takes the mean of the pixels that it joins; a sharper filter would
    # draw bright and dark lines along the tiles' borders
    picture.thumbnail((side, side), Image.Resampling.BOX)
    file = io.BytesIO()
    picture.save(file, "png")
    data = base64.b64encode(file.getvalue()).decode()
    # The browser enlarges small maps, by a whole factor, so that pixels stay square; up
    # to half of `side`, so that a small map takes less room than a large one.
    factor = max(1, side // (2 * max(picture.size)))
    size = (picture.width * factor, picture.height * factor)
    return NotebookFigure(
        address=f"data:image/png;base64,{data}", text=quoted(shot.caption), size=size
    )


def _title(result: Any) -> str:
    """`RunResult of 1 image: 1 picture`."""
    return repr(result).strip("<>")


# What is shown of each result


def _maps_shot(maps: FeatureMaps) -> Shot:
    return Shot(lambda: maps.image, maps.title)


def _image_shots(image: ImageResult) -> Iterator[Shot]:
    """The input and the feature maps, unless the image failed."""
    if image.error is None:
        prediction = image.prediction[0].text if image.prediction else "input"
        yield Shot(lambda: image.input, f"{image.name}: {prediction}")
        yield from map(_maps_shot, image.captures)


def _failure_lines(images: Sequence[ImageResult]) -> list[str]:
    return [
        f"{image.name} failed: {image.error}"
        for image in images
        if image.error is not None
    ]


def _run_view(run: RunResult) -> View:
    # read as they are shown: a run may have thousands of pictures
    shots = chain.from_iterable(map(_image_shots, run.images))
    return View(shots, [_title(run), *_failure_lines(run.images)])


def _image_view(image: ImageResult) -> View:
    return View(_image_shots(image), _failure_lines([image]))


def _maps_view(maps: FeatureMaps) -> View:
    return View([_maps_shot(maps)], side=LARGE)


def _page_view(page: LookResult | Sheet) -> View:
    return View([Shot(lambda: page.image, _title(page))], side=PAGE)


def _cam_view(cams: ClassMaps) -> View:
    """The maps of all images at all layers, and why images failed."""
    failures = [f"{name} failed: {reason}" for name, reason in cams.failures.items()]
    shots = []
    for image in cams.images:
        for cam in image.maps:
            # a property, which reads the picture: not before it is shown
            load = partial(getattr, cam, "image")
            shots.append(Shot(load, f"{image.title} at {cam.name}"))
    # a heat map has to be compared with what it lies over
    side = LARGE if len(shots) == 1 else LARGE // 2
    return View(shots, [_title(cams), *failures], side=side)


def _kernel_view(kernels: KernelPicture) -> View:
    return View(
        [Shot(lambda: kernels.image, _title(kernels).removeprefix("KernelPicture "))],
        side=LARGE,
    )


def _study_view(study: StudyResult) -> View:
    shots = [
        Shot(partial(study.picture, file), title) for file, title in study.files.items()
    ]
    return View(shots, [study.title, *study.lines], study.table)


VIEWS: Mapping[type, Callable[[Any], View]] = {
    RunResult: _run_view,
    ImageResult: _image_view,
    FeatureMaps: _maps_view,
    LookResult: _page_view,
    Sheet: _page_view,
    ClassMaps: _cam_view,
    KernelPicture: _kernel_view,
    StudyResult: _study_view,
    Listing: lambda listing: View(table=listing.table),
    Comparison: lambda comparison: View(table=diff_table(comparison)),
}
"""By the class of a result."""

for record in VIEWS:
    # A notebook asks an object for this method. The records stand on floors below this
    # one, and know nothing of pages.
    record._repr_html_ = html_of  # type: ignore[attr-defined]
