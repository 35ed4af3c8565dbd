"""The result of `run`: for each image its feature maps, or its error. Feature maps are
read from the run directory at each access."""

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
        # tempfile.TemporaryDirectory would warn if it is not closed
        self.path = Path(tempfile.mkdtemp(prefix="featviz-"))
        self._end = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True, repr=False, eq=False)
class FeatureMaps:
    """A drawn tensor of a layer, for one image: its picture, its values and their
    statistics."""

    of: ImageResult
    """The image."""
    row: Capture
    """The row of the manifest, which also has the settings of the picture: `normalize`,
    `grid`, `cmap`, ..."""

    @property
    def layer(self) -> str:
        """The qualified name of the layer; empty for the model itself."""
        return self.row.layer

    @property
    def type(self) -> str:
        """The class of the layer, or `fn:relu` for a function."""
        return self.row.type

    @property
    def index(self) -> int:
        """The position of the layer in `model.named_modules()`, from 0."""
        return self.row.index

    @property
    def kind(self) -> str:
        """What the tensor is to the layer: `output`, `input`, `grad` or `grad-input`."""
        return self.row.kind

    @property
    def call(self) -> int:
        """The number of the call of the layer, from 0."""
        return self.row.call

    @property
    def key(self) -> str:
        """The path of the tensor in a tuple, list or dict (`0`, `boxes`); empty for a
        plain tensor."""
        return self.row.key

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.row.shape)

    @property
    def layout(self) -> str:
        """What its axes mean: `nchw`, `tokens`, `nhwc`, `vector`, `attention`, ..."""
        return self.row.layout

    @property
    def maps(self) -> int:
        """How many maps the tensor holds, drawn or not."""
        return self.row.maps

    @property
    def range(self) -> Sequence[float | None] | None:
        """The values drawn darkest and brightest; None if each map has its own."""
        return self.row.range

    @property
    def min(self) -> float | None:
        """The smallest finite value; None if no value is finite."""
        return self.row.min

    @property
    def max(self) -> float | None:
        """The largest finite value; None if no value is finite."""
        return self.row.max

    @property
    def mean(self) -> float | None:
        """The mean of the finite values; None if no value is finite."""
        return self.row.mean

    @property
    def std(self) -> float | None:
        """The standard deviation of the finite values; None if no value is finite."""
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
        """The channel of each tile, in the order of the tiles; empty if one tile shows
        all channels (`--reduce`)."""
        return self.row.drawn

    @property
    def file(self) -> Path:
        """The picture's file."""
        return self.of.read.path / self.row.file

    @property
    def image(self) -> Image.Image:
        """The picture, with a tile for each map: mode L, P or RGB. StoreError if the file
        is broken."""
        return self.of.read.picture(self.row.file)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor as the layer gave it; None unless the run kept it
        (`tensors=True`)."""
        array = self.of.read.tensor(self.row)
        if array is None:
            return None
        import torch  # imported here, so that reading results does not need torch

        # a copy, since torch warns of an array from a file, which is read-only
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
        """A description for people: `layer1.0.conv1 (Conv2d) output, 1×64×56×56`."""
        return f"{self._name}, {by(self.shape)}"

    @property
    def _name(self) -> str:
        """A name for people: `layer1.0.conv1 (Conv2d) output`."""
        return f"{self.row.label} ({self.type}) {self.row.capture_key.stem}"

    def __repr__(self) -> str:
        return (
            f"<FeatureMaps of {self._name}: {counted(self.maps, 'map')},"
            f" {by(self.shape)}>"
        )


class Captures(tuple[FeatureMaps, ...]):
    """Feature maps, in the order in which they were captured. If there are none, since the
    image failed, `captures[0]` raises the error of the image."""

    error: StoreError | None = None
    """The error of the failed image, or of the first failed image of a run."""

    def __getitem__(self, index: Any) -> Any:
        # `captures[0]` of a failed image would say "index out of range"
        if self.error is not None and not self:
            raise self.error
        return super().__getitem__(index)


@dataclass(frozen=True, repr=False, eq=False)
class ImageResult:
    """The result of one image. An access to its files raises StoreError if the image
    failed, or if a file is broken or gone."""

    name: str
    """The path of the image's file, relative to the argument that it came from, with
    forward slashes."""
    folder: str
    """The image's folder, relative to the run directory."""
    root: Path
    """The run directory."""
    rows: tuple[Capture, ...] = ()
    """The captures of the manifest, for `progress` during a run. Empty in the result of a
    run: `captures` reads the manifest."""
    pictures: int = 0
    """How many feature maps were drawn."""
    skipped: tuple[Skip, ...] = ()
    """The tensors that could not be drawn, with reasons."""
    never_ran: tuple[str, ...] = ()
    """The names of selected layers that never ran."""
    error: str | None = None
    """Why the image failed; None for a complete image."""
    hint: str | None = None
    """What helps against the error."""
    outcome: Outcome = field(default_factory=Outcome)
    kept: bool = False
    """Whether an earlier run had drawn the image, and `resume` kept it."""
    temporary: TemporaryFolder | None = None
    """Keeps the temporary run directory, if the caller named none; it is removed when no
    result refers to it any more."""

    @property
    def prediction(self) -> tuple[ClassScore, ...]:
        """The likeliest classes, the likeliest first; empty if the model is not a
        classifier."""
        return self.outcome.prediction

    @property
    def detections(self) -> tuple[Detection, ...]:
        """The boxes of a detector, in pixels of the file's image; `--target box:N` means
        the box with index N."""
        return self.outcome.detections

    @property
    def failure(self) -> StoreError | None:
        """The error for a failed image; None for a complete one."""
        if self.error is None:
            return None
        return StoreError(f"{self.name} failed: {self.error}", self.hint)

    @cached_property
    def read(self) -> ReadImage:
        """The image, read from the run directory; StoreError if the image failed, or a
        file is broken."""
        if self.failure is not None:
            raise self.failure
        # statistics are small, and callers ask for them map by map
        return read_image(self.root, self.folder, keep_stats=True)

    @property
    def captures(self) -> Captures:
        """The feature maps of the image, in the order in which they were captured; empty
        if the image failed."""
        rows = self.read.manifest.captures if self.error is None else ()
        captures = Captures(FeatureMaps(self, row) for row in rows)
        captures.error = self.failure
        return captures

    @property
    def input(self) -> Image.Image:
        """The picture of the model's input, without the normalisation."""
        return self.read.picture(INPUT_FILE)

    def __repr__(self) -> str:
        state = "failed" if self.error else counted(self.pictures, "picture")
        return f"<ImageResult {self.name!r}: {state}>"


@dataclass(frozen=True, repr=False, eq=False)
class RunResult:
    """The result of a run: its images, and their feature maps."""

    root: Path
    """The run directory."""
    images: tuple[ImageResult, ...] = ()
    """The images of this shard that were drawn, kept or failed, in order."""
    missing: tuple[str, ...] = ()
    """The names of the images of this shard that were not begun."""
    interrupted: bool = False
    """Whether a signal ended the run early."""
    pictures: int = 0
    """How many feature maps were drawn."""
    whole: bool = True
    """Whether no image of the run is missing, those of other shards included."""
    all_failures: int = 0
    """How many images failed, those of other shards included."""
    names: tuple[str, ...] = ()
    """Names of all images of the run in their order, those of other shards included."""
    temporary: TemporaryFolder | None = None
    """Keeps the temporary run directory, if the caller named none."""

    @property
    def out(self) -> Path | None:
        """The run directory; None where it is temporary."""
        return self.root if self.temporary is None else None

    @property
    def captures(self) -> Captures:
        """The feature maps of all images, in the order of the images."""
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
        """Whether some images are complete, but none of them has a picture."""
        return len(self.failures) < len(self.images) and not self.pictures

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 0 if all images are complete, 3 if some failed, 1
        if all failed or none has a picture, 130 if the run was interrupted."""
        # 130: 128 + SIGINT, as in a shell
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
