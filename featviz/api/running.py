"""`featviz.run`: the feature maps of images, read from the run when they are asked for; `diff` and
`report` of runs that are there; and how results show themselves in a notebook."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from msgspec import structs
from PIL import Image
from torch import Tensor, nn

from featviz.api.keywords import Layers, Model, Order, Pictures, Room, keywords_of, ordered
from featviz.diff import compare_runs, maps_folder
from featviz.diff import diff as diff_runs
from featviz.diff.comparison import Comparison
from featviz.diff.output import as_json, diff_table
from featviz.errors import StoreError, UsageError
from featviz.files.urls import Url, is_url
from featviz.gradients.targets import for_drawing
from featviz.options import (
    ModelOptions,
    RunOptions,
    declared,
    every_option,
    no_option,
    read,
    read_from,
)
from featviz.options.commands import DiffFiles, DiffThresholds, ReportOptions
from featviz.records import STAT_COLUMNS, ClassScore, Floats, ImageResult, RunResult
from featviz.report import ReportResult, build_report
from featviz.report.comparison_page import render_comparison
from featviz.report.engine import NotebookFigure, NotebookPage, render_notebook
from featviz.run import run as pipeline
from featviz.rundir import INPUT_FILE
from featviz.rundir.image import ReadImage, read_image
from featviz.rundir.schema import Capture
from featviz.text import TextTable, by, counted, quoted

_COLUMNS = np.dtype([(name, np.float32) for name in STAT_COLUMNS])


SMALL, LARGE, PAGE = 240, 960, 1800
"""The longest side, in pixels, of a picture in a gallery, of one that stands alone, and of one with
letters on it."""
MOST = 24
MOST_ROWS = 60
MOST_BYTES = 3 * 2**20
"""What all pictures of one page may take as text."""

Shots: TypeAlias = Iterable[tuple[Callable[[], Image.Image], str]]
"""What reads each picture, and the words below it."""


class Shown:
    """A result that shows itself in a notebook."""

    side = SMALL
    """The longest side of its pictures."""

    def _pictures(self) -> Shots:
        return ()

    def _lines(self) -> Sequence[str]:
        """What stands below the pictures."""
        return ()

    def _table(self) -> TextTable | None:
        return None

    def _repr_html_(self) -> str:
        """The first pictures, as data URIs; a large one is made smaller, a small one is shown
        larger by a whole factor, and one that cannot be read says so."""
        figures: list[NotebookFigure] = []
        room, side = MOST_BYTES, self.side
        lines = [quoted(line) for line in self._lines()]
        for load, words in self._pictures():
            try:
                picture = load()
            except StoreError as error:
                text = quoted(f"{words}: {error.message}")
                figures.append(NotebookFigure("", text, (side, side)))
                continue
            picture = picture if picture.mode in ("L", "RGB") else picture.convert("RGB")
            picture.thumbnail((side, side), Image.Resampling.BOX)
            file = io.BytesIO()
            picture.save(file, "png")
            data = base64.b64encode(file.getvalue()).decode()
            room -= len(data)
            if room < 0 or len(figures) == MOST:
                lines.append("there are more pictures")
                break
            factor = max(1, side // (2 * max(picture.size)))
            size = picture.width * factor, picture.height * factor
            address = f"data:image/png;base64,{data}"
            figures.append(NotebookFigure(address, quoted(words), size))
        table = self._table()
        if table is not None and (more := len(table.rows) - MOST_ROWS) > 0:
            footer = (f"{more} more rows", *table.footer)
            table = table._replace(rows=table.rows[:MOST_ROWS], footer=footer)
        return render_notebook(NotebookPage(figures, table, lines))


@dataclass(frozen=True, repr=False, eq=False)
class FeatureMaps(Shown):
    """A drawn tensor of a layer, for one image.

    What the manifest says of it are attributes: `layer` (the qualified name, empty for the model
    itself), `type`, `kind` (`output`, `input`, `grad`, `grad-input`), `call` (from 0), `key`,
    `layout`, `maps`, `range` (drawn darkest and brightest; None where each map has its own), `min`,
    `max`, `mean`, `std`, ...
    """

    of: RunImage
    row: Capture
    side = LARGE

    def __getattr__(self, name: str) -> Any:
        if name in Capture.__slots__:
            return getattr(self.row, name)
        raise AttributeError(f"FeatureMaps has no attribute {name!r}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.row.shape)

    @property
    def channels(self) -> list[int]:
        """The channel of each tile, in tile order; none where all channels became one tile."""
        return self.row.drawn

    @property
    def file(self) -> Path:
        """The picture."""
        return self.of.read.path / self.row.file

    @property
    def image(self) -> Image.Image:
        """The picture: mode L, P or RGB; a tile for each map. StoreError if its file is broken."""
        return self.of.read.picture(self.row.file)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor as the layer gave it, where `tensors=True` kept it; else None."""
        array = self.of.read.tensor(self.row)
        return None if array is None else torch.from_numpy(np.array(array))

    @property
    def stats(self) -> np.ndarray:
        """Statistics of each channel: a structured array [channels] with the columns min, max,
        mean, std, zero_fraction (0..1) and nonfinite (a count), all float32."""
        values: Floats = np.ascontiguousarray(self.of.read.stats()[self.row.place.stats_key])
        table: np.ndarray = values.view(_COLUMNS)[:, 0]
        return table

    def _pictures(self) -> Shots:
        words = f"{self.row.label} ({self.row.type}) {self.row.place.stem}, {by(self.shape)}"
        yield lambda: self.image, words

    def __repr__(self) -> str:
        what, maps = f"{self.row.label} ({self.type}) {self.row.place.stem}", self.row.maps
        return f"<FeatureMaps of {what}: {counted(maps, 'map')}, {by(self.shape)}>"


class Captures(tuple[FeatureMaps, ...]):
    """Feature maps in the order of the model. Where a failed image has none, an index raises its
    error."""

    error: StoreError | None = None

    def __getitem__(self, index: Any) -> Any:
        if self.error is not None and not self:
            raise self.error
        return super().__getitem__(index)


@dataclass(frozen=True, repr=False, eq=False)
class RunImage(Shown, ImageResult):
    """An image of a run, whose files are read when they are asked for."""

    pictures: int = 0
    root: Path = field(default=Path(), repr=False)
    room: Room | None = field(default=None, repr=False)

    @classmethod
    def of(cls, result: ImageResult, root: Path, room: Room | None = None) -> RunImage:
        """An image of a run that has ended."""
        fields = {**vars(result), "rows": (), "pictures": len(result.rows)}
        return cls(**fields, root=root, room=room)

    @property
    def prediction(self) -> tuple[ClassScore, ...]:
        """The likeliest classes, where the model is a classifier."""
        return self.outcome.prediction

    @property
    def failure(self) -> StoreError | None:
        """Why there are no maps of it; None for a complete image."""
        if self.error is None:
            return None
        return StoreError(f"{self.name} failed: {self.error}", self.hint)

    @cached_property
    def read(self) -> ReadImage:
        """The image as the run directory has it; StoreError if it failed, or a file is broken."""
        if self.failure is not None:
            raise self.failure
        return read_image(self.root, self.folder, hold=True)

    @property
    def captures(self) -> Captures:
        """What was drawn, in the order in which the model came to it; nothing if it failed."""
        rows = self.read.manifest.captures if self.error is None else ()
        found = Captures(FeatureMaps(self, row) for row in rows)
        found.error = self.failure
        return found

    @property
    def input(self) -> Image.Image:
        """What the model saw, un-normalised."""
        return self.read.picture(INPUT_FILE)

    def __repr__(self) -> str:
        state = "failed" if self.error else counted(self.pictures, "picture")
        return f"<RunImage {self.name!r}: {state}>"

    def _lines(self) -> list[str]:
        return [] if self.error is None else [f"{self.name} failed: {self.error}"]

    def _pictures(self) -> Shots:
        if self.error is None:
            said = self.prediction[0].text if self.prediction else "input"
            yield lambda: self.input, f"{self.name}: {said}"
            for maps in self.captures:
                yield from maps._pictures()


@dataclass(frozen=True, repr=False, eq=False)
class Run(Shown, RunResult):
    """The feature maps of images."""

    images: tuple[RunImage, ...] = ()
    room: Room | None = None

    @property
    def out(self) -> Path | None:
        """The run directory; None where it is temporary."""
        return self.root if self.room is None else None

    @property
    def captures(self) -> Captures:
        """What was drawn of all images, one after the other."""
        found = Captures(maps for image in self.images for maps in image.captures)
        found.error = next((image.failure for image in self.images if image.failure), None)
        return found

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        pictures = counted(self.pictures, "picture")
        return f"<Run of {counted(len(self.images), 'image')}{failed}: {pictures}>"

    def _pictures(self) -> Shots:
        for image in self.images:
            yield from image._pictures()

    def _lines(self) -> list[str]:
        failed = [line for image in self.images for line in image._lines()]
        return [repr(self).strip("<>"), *failed]


@keywords_of(RunOptions, ModelOptions)
def run(
    model: Model,
    images: Pictures,
    layers: Layers | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> Run:
    """Draw the feature maps of images, like the command `featviz run`.

    Args:
        model: a MODEL string (`"resnet18"`, a file), or a module, which is given back as it was.
        images: files, folders or globs; PIL images; arrays [H, W] or [H, W, C]; tensors [H, W],
            [C, H, W] or [N, C, H, W]; or a list of these. What is in memory is an image before any
            preprocessing: uint8, or floats in 0..1, which are rounded to 8 bits (as by
            `torchvision.transforms.functional.to_pil_image`), and is called `image-0.png`,
            `image-1.png`, ... in the run. Tensors [F] and [1, F] are vectors of numbers as they
            are; a mapping of tensors by the names of forward's arguments takes the place of images.
        layers: selectors; a class of modules (`torch.nn.Conv2d`); or a list of these. None takes
            one layer for each stage.
        out: the run directory; of a URL (`"s3://bucket/maps"`) the folder `maps`, which is copied
            there. None leaves
            nothing behind: the pictures are in a temporary folder for as long as the result, or one
            of its captures, is in use.
        options: those below. `transform` may be a function from a PIL image to a tensor [C, H, W]
            or to a dict of tensors, and `forward_args` a mapping, both by forward's arguments.

    Returns:
        The images, and what was drawn of each, which is read when it is asked for. What goes wrong
        with one image is in its `error`.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> result = featviz.run(model, torch.rand(3, 16, 16), "Conv2d", size=16, tensors=True)
        >>> result
        <Run of 1 image: 1 picture>
        >>> maps = result.captures[0]
        >>> maps
        <FeatureMaps of 0 (Conv2d) output: 4 maps, 1×4×14×14>
        >>> maps.image.mode, maps.tensor.shape, maps.stats["mean"].shape
        ('L', torch.Size([1, 4, 14, 14]), (4,))
    """
    for name in ("overwrite", "resume"):
        if options.get(name) is True and out is None:
            raise UsageError(f"{name} is for a run directory, and there is no out", "out='maps'")
    order = order_run(model, options, layers, out)
    done: list[RunImage] = []

    def keep(image: ImageResult, total: int) -> None:
        done.append(RunImage.of(image, order.options.folder, order.room))

    result = order.given_to(partial(pipeline.run, progress=keep), images)
    return Run(**{**vars(result), "images": tuple(done)}, room=order.room)


def order_run(model: Any, options: Mapping[str, Any], layers: Any, out: Any) -> Order[RunOptions]:
    """Read the keywords of `run`; `seed` is also that of noise, which a module may have, too."""
    given = dict(options)
    seed = declared(ModelOptions)["seed"].value(given.get("seed", 0))
    if isinstance(model, nn.Module) and "noise" in str(given.get("edit")):
        given.pop("seed", None)
    order = ordered(RunOptions, model, given, layers, place="run", out=out)
    asked = order.options
    if asked.jobs is None and (isinstance(model, nn.Module) or callable(options.get("transform"))):
        # what an object of the caller's keeps (counters, lists) would be lost with a process
        asked = structs.replace(asked, jobs=1)
    passes = for_drawing(asked.passes, asked.draw, seed)
    return replace(order, options=structs.replace(asked, passes=passes))


@dataclass(frozen=True, repr=False)
class RunDifference(Shown, Comparison):
    """How two runs differ; shows itself as a table."""

    out: Path | None = None

    @property
    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return as_json(self)

    def __repr__(self) -> str:
        return f"<RunDifference: {self.summary}>"

    def _table(self) -> TextTable:
        return diff_table(self)


@keywords_of(DiffThresholds, DiffFiles)
def diff(base: str | Path | Run, new: str | Path | Run, **options: Any) -> RunDifference:
    """Compare two runs, layer by layer.

    Args:
        base, new: run directories or their URLs (`"s3://bucket/maps"`), or what `featviz.run` gave.
        options: those below.

    Returns:
        A record with `document` (what `--json` prints), `equal`, `ratio`, `first` (the first layer
        that differs) and `layers`.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> before = featviz.run(model, torch.ones(3, 8, 8), size=8)
        >>> featviz.diff(before, featviz.run(model, torch.ones(3, 8, 8), size=8)).equal
        True
    """
    given = dict(options)
    asked, files = read_from(DiffThresholds, given), read_from(DiffFiles, given)
    if given:
        raise no_option(given, every_option(DiffThresholds, DiffFiles))
    found = diff_runs(_root(base), _root(new), asked, files, render_comparison)
    return RunDifference(**vars(found), out=maps_folder(files))


@keywords_of(ReportOptions)
def report(run: str | Path | Run, out: str | Path | None = None, **options: Any) -> ReportResult:
    """Write an HTML report of a run: the network as a picture, its images, layers and channels; or
    one page of an audit or of kernels.

    Args:
        run: a run directory or its URL, which needs `out` and `single_file` or `zip`; or what
            `featviz.run` gave; or the folder of an audit or of kernels.
        out: the folder of the report, or its file with `single_file` or `zip`. None is `report`,
            `report.html` or `report.zip` in the run directory.
        options: those below; `compare` may be what `featviz.run` gave.

    Returns:
        A record with `page`, `files` and `incomplete`.

    Example:
        >>> import featviz, tempfile, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> result = featviz.run(model, torch.rand(3, 8, 8), size=8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     featviz.report(result, f"{folder}/a.html", single_file=True).page.name
        'a.html'
    """
    other = options.get("compare")
    temporary = [one for one in (run, other) if isinstance(one, Run) and one.room is not None]
    if temporary and (out is None or not options.get("single_file")):
        raise UsageError(
            "the pictures of a run without out are gone with it, and the report would show none",
            "give the run an out, or the report out='maps.html', single_file=True",
        )
    given = {**options, "out": out, "compare": None if other is None else _root(other)}
    return build_report(_root(run), read(ReportOptions, given), compare_runs)


def _root(run: Any) -> Path | Url:
    """The run directory, or its URL."""
    if isinstance(run, Run):
        return run.root
    if isinstance(run, str) and is_url(run):
        return Url.of_run(run)
    if isinstance(run, (str, Path)):
        return Path(run)
    raise UsageError(f"{type(run).__name__!r} is no run", "a run directory, or featviz.run(...)")
