"""What `run` gives: what became of each image, and its feature maps, read from the run
directory when they are asked for."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from featviz.errors import StoreError
from featviz.records import STAT_COLUMNS, ClassScore, Detection, Floats, Outcome, Skip
from featviz.rundir import INPUT_FILE
from featviz.rundir.image import ReadImage, read_image
from featviz.rundir.schema import Capture
from featviz.text import by, counted

if TYPE_CHECKING:
    from torch import Tensor

_COLUMNS = np.dtype([(name, np.float32) for name in STAT_COLUMNS])


class TemporaryFolder:
    """A folder that is removed when the last object that refers to this one is gone."""

    def __init__(self) -> None:
        # not tempfile.TemporaryDirectory, which warns where nobody has closed it
        self.path = Path(tempfile.mkdtemp(prefix="featviz-"))
        self._end = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True, repr=False, eq=False)
class FeatureMaps:
    """A drawn tensor of a layer, for one image: its picture, its values and their
    statistics."""

    of: ImageResult
    """The image."""
    row: Capture
    """All that the manifest says of it, also how it was drawn: `normalize`, `grid`,
    `cmap`, ..."""

    @property
    def layer(self) -> str:
        """Qualified name; empty for the model itself."""
        return self.row.layer

    @property
    def type(self) -> str:
        """The class of the layer, or `fn:relu` for a function."""
        return self.row.type

    @property
    def index(self) -> int:
        """Position of the layer in `model.named_modules()`."""
        return self.row.index

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
        """Path inside a tuple, list or dict (`0`, `boxes`); empty for a plain tensor."""
        return self.row.key

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.row.shape)

    @property
    def layout(self) -> str:
        """How its axes stand: `nchw`, `tokens`, `nhwc`, `vector`, `attention`, ..."""
        return self.row.layout

    @property
    def maps(self) -> int:
        """How many maps it holds."""
        return self.row.maps

    @property
    def range(self) -> Sequence[float | None] | None:
        """The values drawn darkest and brightest; None where each map has its own."""
        return self.row.range

    @property
    def min(self) -> float | None:
        """The smallest finite value; None where there is none, as for the next three."""
        return self.row.min

    @property
    def max(self) -> float | None:
        """The largest finite value."""
        return self.row.max

    @property
    def mean(self) -> float | None:
        """The mean of the finite values."""
        return self.row.mean

    @property
    def std(self) -> float | None:
        """The standard deviation of the finite values."""
        return self.row.std

    @property
    def zero_fraction(self) -> float:
        """The share of zeros, 0..1."""
        return self.row.zero_fraction

    @property
    def nonfinite(self) -> int:
        """How many values are NaN or infinite."""
        return self.row.nonfinite

    @property
    def channels(self) -> list[int]:
        """The channel of each tile, in tile order; none where all channels became one
        tile."""
        return self.row.drawn

    @property
    def file(self) -> Path:
        """The picture's file."""
        return self.of.read.path / self.row.file

    @property
    def image(self) -> Image.Image:
        """The picture: mode L, P or RGB; a tile for each map. StoreError if its file is
        broken."""
        return self.of.read.picture(self.row.file)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor as the layer gave it, where `tensors=True` kept it; else None."""
        array = self.of.read.tensor(self.row)
        if array is None:
            return None
        import torch  # who reads results need not have it

        # a copy: what is read from a file may not be written to, which torch warns of
        return torch.from_numpy(np.array(array))

    @property
    def stats(self) -> np.ndarray:
        """Statistics of each channel: a structured array [channels] with the columns
        min, max, mean, std, zero_fraction (0..1) and nonfinite (a count), all
        float32."""
        values: Floats = np.ascontiguousarray(
            self.of.read.stats()[self.row.capture_key.stats_key]
        )
        table: np.ndarray = values.view(_COLUMNS)[:, 0]
        return table

    @property
    def title(self) -> str:
        """For people: `layer1.0.conv1 (Conv2d) output, 1×64×56×56`."""
        return f"{self._name}, {by(self.shape)}"

    @property
    def _name(self) -> str:
        return f"{self.row.label} ({self.type}) {self.row.capture_key.stem}"

    def __repr__(self) -> str:
        return (
            f"<FeatureMaps of {self._name}: {counted(self.maps, 'map')},"
            f" {by(self.shape)}>"
        )


class Captures(tuple[FeatureMaps, ...]):
    """Feature maps in the order of the model. Where a failed image has none, an index
    raises its error."""

    error: StoreError | None = None

    def __getitem__(self, index: Any) -> Any:
        # `captures[0]` of a failed image would say "index out of range"
        if self.error is not None and not self:
            raise self.error
        return super().__getitem__(index)


@dataclass(frozen=True, repr=False, eq=False)
class ImageResult:
    """What became of one image. Its files are read when they are asked for: that raises
    StoreError where the image failed, or a file is broken or gone."""

    name: str
    """Relative to the argument that it came from, with forward slashes."""
    folder: str
    """Its folder, relative to the run directory."""
    root: Path
    """The run directory."""
    rows: tuple[Capture, ...] = ()
    """The captures of its manifest. A run that is over has let go of them, and `captures`
    reads them."""
    pictures: int = 0
    """How many feature maps were drawn."""
    skipped: tuple[Skip, ...] = ()
    never_ran: tuple[str, ...] = ()
    error: str | None = None
    hint: str | None = None
    outcome: Outcome = field(default_factory=Outcome)
    kept: bool = False
    """Whether it was complete before, so that `resume` left it as it was."""
    temporary: TemporaryFolder | None = None
    """What holds the run directory, where the caller named none."""

    @property
    def prediction(self) -> tuple[ClassScore, ...]:
        """The likeliest classes, where the model is a classifier."""
        return self.outcome.prediction

    @property
    def detections(self) -> tuple[Detection, ...]:
        """The boxes of a detector in pixels of the file's image, as `box:N` numbers
        them."""
        return self.outcome.detections

    @property
    def failure(self) -> StoreError | None:
        """Why there are no maps of it; None for a complete image."""
        if self.error is None:
            return None
        return StoreError(f"{self.name} failed: {self.error}", self.hint)

    @cached_property
    def read(self) -> ReadImage:
        """The image as the run directory has it; StoreError if it failed, or a file is
        broken."""
        if self.failure is not None:
            raise self.failure
        # statistics are small, and asked for map by map
        return read_image(self.root, self.folder, keep_stats=True)

    @property
    def captures(self) -> Captures:
        """What was drawn, in the order in which the model came to it; nothing if it
        failed."""
        rows = self.read.manifest.captures if self.error is None else ()
        captures = Captures(FeatureMaps(self, row) for row in rows)
        captures.error = self.failure
        return captures

    @property
    def input(self) -> Image.Image:
        """What the model saw, un-normalised."""
        return self.read.picture(INPUT_FILE)

    def __repr__(self) -> str:
        state = "failed" if self.error else counted(self.pictures, "picture")
        return f"<ImageResult {self.name!r}: {state}>"


@dataclass(frozen=True, repr=False, eq=False)
class RunResult:
    """What became of a run: its images, and their feature maps."""

    root: Path
    """The run directory."""
    images: tuple[ImageResult, ...] = ()
    missing: tuple[str, ...] = ()
    """Names of the images that were not begun."""
    interrupted: bool = False
    pictures: int = 0
    """How many feature maps were drawn."""
    whole: bool = True
    """Whether no image of the run is missing, those of other shards included."""
    all_failures: int = 0
    """How many images failed, those of other shards included."""
    names: tuple[str, ...] = ()
    """Names of all images of the run in their order, those of other shards included."""
    temporary: TemporaryFolder | None = None
    """What holds the run directory, where the caller named none."""

    @property
    def out(self) -> Path | None:
        """The run directory; None where it is temporary."""
        return self.root if self.temporary is None else None

    @property
    def captures(self) -> Captures:
        """What was drawn of all images, one after the other."""
        captures = Captures(maps for image in self.images for maps in image.captures)
        if self.failures:
            captures.error = self.failures[0].failure
        return captures

    @property
    def failures(self) -> tuple[ImageResult, ...]:
        """The images that failed."""
        return tuple(image for image in self.images if image.error is not None)

    @property
    def drew_nothing(self) -> bool:
        """Whether images are complete, and none has a picture."""
        return len(self.failures) < len(self.images) and not self.pictures

    @property
    def exit_code(self) -> int:
        """0 all complete, 3 some failed, 1 all failed or drew nothing, 130
        interrupted."""
        # 128 + SIGINT, as a shell has it
        if self.interrupted:
            return 130
        if self.drew_nothing:
            return 1
        if not self.failures:
            return 0
        if len(self.failures) == len(self.images):
            return 1
        return 3

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        images = counted(len(self.images), "image")
        return f"<RunResult of {images}{failed}: {counted(self.pictures, 'picture')}>"
