"""`featviz.run`: the feature maps of images, read from the run when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from PIL import Image
from torch import Tensor, nn

from featviz import pipeline
from featviz.api import showing
from featviz.api.keywords import Layers, Model, Picture, keywords_of, names_of
from featviz.api.lending import Feeding, Room, as_files, lent, selectors, take_model
from featviz.api.showing import Page, ShownPicture
from featviz.errors import StoreError, UsageError
from featviz.files.urls import Url
from featviz.gradients.options import for_drawing
from featviz.models.load import LoadedModel
from featviz.options import (
    DrawOptions,
    InputOptions,
    ModelOptions,
    PassOptions,
    RunOptions,
    declared,
    no_option,
    read,
    read_from,
    take,
)
from featviz.pipeline.options import at_place
from featviz.records import (
    STAT_COLUMNS,
    Floats,
    Guess,
    ImageResult,
    Outcome,
    RunResult,
    Skip,
)
from featviz.rundir import INPUT_FILE
from featviz.rundir.image import ReadImage, read_image
from featviz.rundir.schema import Capture
from featviz.rundir.store import copy_image
from featviz.text import by, counted

_COLUMNS = np.dtype([(name, np.float32) for name in STAT_COLUMNS])


@dataclass(frozen=True, repr=False, eq=False)
class FeatureMaps:
    """A drawn tensor of a layer, for one image."""

    of: RunImage
    row: Capture
    """All that the manifest says of it."""

    @property
    def layer(self) -> str:
        """Qualified name of the layer; empty for the model itself."""
        return self.row.layer

    @property
    def type(self) -> str:
        """Class name of the layer, or `fn:NAME` of a function."""
        return self.row.type

    @property
    def kind(self) -> str:
        """`output`, `input`, `grad` or `grad-input`."""
        return self.row.kind

    @property
    def call(self) -> int:
        """Which call of the layer, from 0."""
        return self.row.call

    @property
    def key(self) -> str:
        """Where in a tuple, list or dict the tensor stood."""
        return self.row.key

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, as the layer gave it."""
        return tuple(self.row.shape)

    @property
    def layout(self) -> str:
        """How the tensor was read: `nchw`, `tokens`, ..."""
        return self.row.layout

    @property
    def channels(self) -> list[int]:
        """The channel of each tile, in tile order; none where all channels became one tile."""
        return self.row.drawn

    @property
    def range(self) -> tuple[float | None, float | None] | None:
        """The values that are drawn darkest and brightest; None where each map has its own range,
        which `stats` tells."""
        return None if self.row.range is None else (self.row.range[0], self.row.range[1])

    @property
    def file(self) -> Path:
        """The picture."""
        return self.of.read.path / self.row.file

    @property
    def image(self) -> Image.Image:
        """The picture: mode L, P or RGB; a tile for each map.

        Raises:
            StoreError: its file is missing or broken.
        """
        return self.of.read.picture(self.row.file)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor as the layer gave it, where `tensors=True` kept it; else None.

        Raises:
            StoreError: its file is missing or broken.
        """
        array = self.of.read.tensor(self.row)
        return None if array is None else torch.from_numpy(np.array(array))

    @property
    def stats(self) -> np.ndarray:
        """Statistics of each channel: a structured array [channels] with the columns min, max,
        mean, std, zero_fraction (0..1) and nonfinite (a count), all float32.

        Raises:
            StoreError: their file is missing or broken.
        """
        values: Floats = np.ascontiguousarray(self.of.read.stats()[self.row.place.stats_key])
        table: np.ndarray = values.view(_COLUMNS)[:, 0]
        return table

    def __repr__(self) -> str:
        row = self.row
        what = f"{row.label} ({row.type}) {row.place.stem}"
        return f"<FeatureMaps of {what}: {counted(row.maps, 'map')}, {by(row.shape)}>"

    def _repr_html_(self) -> str:
        return showing.render(Page([self._figure(showing.LARGE)]))

    def _figure(self, side: int) -> ShownPicture:
        row = self.row
        words = f"{row.label} ({row.type}) {row.place.stem}, {by(row.shape)}"
        return showing.figure(lambda: self.image, words, side)


@dataclass(frozen=True, repr=False, eq=False)
class RunImage:
    """An image of a run."""

    name: str
    """Its path relative to the argument it came from; `image-0.png` for one in memory."""
    folder: str
    """Its folder, relative to the run directory."""
    error: str | None
    """What went wrong; None for a complete image."""
    hint: str | None
    outcome: Outcome
    """What the model said, and what interventions and gradients did."""
    skipped: tuple[Skip, ...]
    """What selected layers gave that could not be drawn, each with the reason."""
    never_ran: tuple[str, ...]
    """Selected layers that did not run."""
    kept: bool
    """It was complete before, and `resume` left it as it was."""
    pictures: int
    """How many there are."""
    root: Path | Url = field(repr=False)
    """The run directory, or its URL."""
    room: Room | None = field(repr=False)

    @classmethod
    def of(cls, result: ImageResult, root: Path | Url, room: Room | None) -> RunImage:
        """An image of a run that has ended."""
        return cls(
            result.image,
            result.folder,
            result.error,
            result.hint,
            result.outcome,
            result.skipped,
            result.never_ran,
            result.kept,
            len(result.captures),
            root,
            room,
        )

    @property
    def prediction(self) -> tuple[Guess, ...]:
        """The likeliest classes, where the model is a classifier."""
        return self.outcome.prediction

    @cached_property
    def read(self) -> ReadImage:
        """The image as the run directory has it.

        Raises:
            StoreError: it failed, or its files are missing or broken.
        """
        if self.error is not None:
            raise StoreError(f"{self.name} failed: {self.error}", self.hint)
        if isinstance(self.root, Url):
            return read_image(self._copy.path, self.folder, hold=True)
        return read_image(self.root, self.folder, hold=True)

    @cached_property
    def _copy(self) -> Room:
        """A temporary folder with the image's files, which lie in a store."""
        room = Room()
        if isinstance(self.root, Url):
            copy_image(self.root, self.folder, room.path)
        return room

    @property
    def captures(self) -> tuple[FeatureMaps, ...]:
        """What was drawn, in the order in which the model came to it; nothing of an image that
        failed.

        Raises:
            StoreError: its files are missing or broken.
        """
        if self.error is not None:
            return ()
        return tuple(FeatureMaps(self, row) for row in self.read.manifest.captures)

    @property
    def input(self) -> Image.Image:
        """What the model saw, un-normalised.

        Raises:
            StoreError: the image failed, or its files are missing or broken.
        """
        return self.read.picture(INPUT_FILE)

    def __repr__(self) -> str:
        state = "failed" if self.error else counted(self.pictures, "picture")
        return f"<RunImage {self.name!r}: {state}>"

    def _repr_html_(self) -> str:
        return showing.render(Page(self._figures(), [self._words()]))

    def _figures(self) -> list[ShownPicture]:
        if self.error is not None:
            return []
        said = self.prediction[0].words if self.prediction else "input"
        shown = showing.figure(lambda: self.input, f"{self.name}: {said}")
        return [shown, *(maps._figure(showing.SMALL) for maps in self.captures[: showing.MOST])]

    def _words(self) -> str:
        if self.error is not None:
            return f"{self.name} failed: {self.error}"
        left = self.pictures - showing.MOST
        return f"{self.name}: {left} more in .captures" if left > 0 else ""


@dataclass(frozen=True, repr=False, eq=False)
class Run:
    """The feature maps of images."""

    result: RunResult
    """The run directory, and how the run ended."""
    images: tuple[RunImage, ...]
    """In the order of the run."""
    room: Room | None

    @property
    def out(self) -> Path | Url | None:
        """The run directory or its URL; None where it is temporary."""
        return self.result.out if self.room is None else None

    @property
    def exit_code(self) -> int:
        """What the command ends with: 0 all complete, 3 some failed, 1 all failed, stopped at one
        or drew nothing, 130 interrupted."""
        return self.result.exit_code

    @property
    def missing(self) -> tuple[str, ...]:
        """Images that were not reached: the run was stopped."""
        return self.result.missing

    @property
    def captures(self) -> tuple[FeatureMaps, ...]:
        """What was drawn of all images, one after the other.

        Raises:
            StoreError: files are missing or broken.
        """
        return tuple(maps for image in self.images for maps in image.captures)

    @property
    def failures(self) -> tuple[RunImage, ...]:
        """The images that failed."""
        return tuple(image for image in self.images if image.error is not None)

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        pictures = counted(self.result.pictures, "picture")
        return f"<Run of {counted(len(self.images), 'image')}{failed}: {pictures}>"

    def _repr_html_(self) -> str:
        figures: list[ShownPicture] = []
        lines = [repr(self).strip("<>")]
        out = self.result.out
        for image in self.images if isinstance(out, Path) and not out.is_file() else ():
            if len(figures) < showing.MOST:
                figures += image._figures()
            lines += [image._words()] if image.error is not None else []
        if (left := self.result.pictures + len(self.images) - showing.MOST) > 0:
            lines.append(f"{left} more pictures")
        return showing.render(Page(figures[: showing.MOST], lines))


@keywords_of(RunOptions, DrawOptions, PassOptions, InputOptions, ModelOptions)
def run(
    model: Model,
    images: Picture | list[Picture] | tuple[Picture, ...],
    layers: Layers | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> Run:
    """Draw the feature maps of images, like the command `featviz run`.

    Args:
        model: a MODEL string (`"resnet18"`, a file, `"file.py:factory"`), or a module, which is
            given back as it was.
        images: files, folders or globs; PIL images; arrays [H, W] or [H, W, C]; tensors [H, W],
            [C, H, W] or [N, C, H, W]; or a list of these. What is in memory is an image before any
            preprocessing: uint8, or floats in 0..1, which are rounded to 8 bits (as by
            `torchvision.transforms.functional.to_pil_image`), and is called `image-0.png`,
            `image-1.png`, ... in the run.
        layers: selectors; a class of modules (`torch.nn.Conv2d`); or a list of these. None takes
            one layer for each stage.
        out: the run directory, or a URL of an object store (`"s3://bucket/maps"`). None leaves
            nothing behind: the pictures are in a temporary folder for as long as the result, or one
            of its captures, is in use.
        options: those below. `transform` may be a function from a PIL image to a tensor [C, H, W]
            or to a dict of tensors by the names of forward's arguments, and `forward_args` a
            mapping of further arguments of forward by name.

    Returns:
        The images, and what was drawn of each: pictures, numbers and tensors are read when they are
        asked for.

    Raises:
        FeatvizError: nothing could be begun, or the run directory cannot be written. What goes
            wrong with one image is in its `error`.

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
    room = Room() if out is None else None
    asked, lend = read_order(model, options, layers, out if room is None else room.path / "run")
    finished: list[ImageResult] = []
    with as_files(images) as files, lend() as source:
        result = pipeline.run(source, files, asked, lambda image, total: finished.append(image))
    done = tuple(RunImage.of(image, result.out, room) for image in finished)
    return Run(result, done, room)


def read_order(
    model: Any, options: Mapping[str, Any], layers: Any, out: Any
) -> tuple[RunOptions, Callable[[], AbstractContextManager[ModelOptions | LoadedModel]]]:
    """The options of a run, and what lends its model, from the keywords of `run`.

    Raises:
        UsageError: a keyword that does not exist, or a bad value.
    """
    given = dict(options)
    feeding = Feeding.taken(given)
    seed = declared(ModelOptions)["seed"].value(given.get("seed", 0))
    noisy = isinstance(model, nn.Module) and "noise" in str(given.get("edit"))
    for_model = take_model(given, but=("seed",) if noisy else ())
    given.pop("seed", None)
    inputs = read_from(InputOptions, given)
    draw = read_from(DrawOptions, given)
    passes = read_from(PassOptions, given)
    asked = read(RunOptions, {**take(RunOptions, given), "layers": selectors(layers)})
    if given:
        kinds = InputOptions, DrawOptions, PassOptions, RunOptions, ModelOptions
        raise no_option(given, names_of(*kinds))
    passes = for_drawing(passes, draw, seed)
    place = at_place(declared(RunOptions)["out"].value(out))
    asked = structs.replace(asked, inputs=inputs, draw=draw, passes=passes, **place)
    return asked, partial(lent, model, for_model, inputs, feeding)
