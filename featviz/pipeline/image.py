"""One image of a run: tensors become tiles in the hooks, and tiles files in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from featviz import layout
from featviz.drawing import colormap, figure, png
from featviz.drawing.drawer import Drawer
from featviz.drawing.picture import GridPicture, caption, describe, encode, to_png
from featviz.drawing.tensorboard import Post, as_make_grid, histogram
from featviz.drawing.titles import titled
from featviz.errors import LayoutError
from featviz.gradients import forward_backward, norms
from featviz.gradients.options import PassPlan
from featviz.gradients.pairs import paired
from featviz.hooks.capture import Sink
from featviz.images.decode import DecodedImage
from featviz.layout.overrides import HintBook
from featviz.models.letterbox import Window
from featviz.models.preprocess import Preprocess
from featviz.pipeline.encoders import Background
from featviz.pipeline.prepare import Prepared, ground_of, shown_of
from featviz.records import Bytes, Capture, Floats, ImageResult, Outcome, Sample, Site, Skip, finite
from featviz.rundir.write import ImageFolder, manifest_rows

log = logging.getLogger(__name__)


class ImageWriter:
    """Writes an image's files: `sink` is that of the hooks, and turns tensors into tiles at once;
    encoders turn the tiles into files while the model goes on."""

    def __init__(
        self,
        sample: Sample,
        folder: ImageFolder,
        drawer: Drawer,
        background: Background,
        hints: HintBook,
        preprocess: Preprocess,
        args: Sequence[Tensor],
        boarded: bool = False,
        window: Window | None = None,
    ) -> None:
        """Begin with the picture of the input.

        Args:
            args: what the model's forward gets.
            boarded: whether the pictures are for TensorBoard as well.
            window: where the image lies in a padded input.
        """
        self.sample, self.folder, self.background = sample, folder, background
        self.drawer, self.draw, self.hints = drawer, drawer.options, hints
        self.boarded, self.window = boarded, window
        self.files: list[Future[Any]] = []
        self.rows: list[Future[Capture]] = []
        self.posts: list[Post] = []
        """For TensorBoard, in the order in which the layers ran."""
        self.stats: dict[str, Floats] = {}
        """Statistics of the channels by `Site.stats_key`: float32 [channels, 6]."""
        self._sites: set[Site] = set()
        self._inputs = [arg.shape for arg in args]
        self._shown = shown_of(preprocess, args)
        self._ground = [] if self.draw.overlay is None else ground_of(preprocess, args)
        self._later(self._shown, partial(_save_input, folder))

    @property
    def sink(self) -> Sink:
        """What the hooks fill."""
        return paired(self.take) if self.draw.weighs else self.take

    def take(self, site: Site, tensor: Tensor, gradient: Tensor | None = None) -> None:
        """Draw a tensor now, and leave the rest to the background.

        Args:
            gradient: of the target at the tensor, for class activation maps.

        Raises:
            LayoutError: it cannot be drawn, or its files would have the names of other ones.
        """
        hints = self.hints.at(site, tensor)
        drawn_over = (self._ground, self.window, self._inputs)
        parts = self.drawer.draw(site, tensor, hints, *drawn_over, gradient)
        self._name({site, *map(site.inside, parts)})
        kept = None
        if self.draw.tensors == "npy":
            kept = self._file(site, ".npy")
            self._later(_to_numpy(tensor), partial(_save_tensor, self.folder, kept))
        for key, picture in parts.items():
            at = site.inside(key)
            shown = self._titled(picture, at, tensor.shape)
            work = partial(self._finish_picture, shown, at, tensor.shape, kept)
            self.rows.append(self.background.submit(picture.tiles.nbytes, work))
            self.stats[at.stats_key] = picture.stats
            if self.boarded:
                self._post(picture, at, None if key else tensor)

    def _titled(self, picture: GridPicture, site: Site, shape: Sequence[int]) -> GridPicture:
        if not self.draw.titles:
            return picture
        return titled(picture, site, shape, self.draw.format, self.sample.name)

    def _name(self, sites: set[Site]) -> None:
        """Note the parts that get files of their own: `{"a": {"b": x}, "a.b": y}` has two of one
        name."""
        if taken := sites & self._sites:
            raise LayoutError(f"another part of this {taken.pop().kind} has the same name")
        self._sites |= sites

    def close(
        self, about: Mapping[str, Any], skipped: Sequence[Skip], never_ran: Sequence[str]
    ) -> Future[tuple[Capture, ...]]:
        """Let an encoder write the manifest once the files are written; its rows of the pictures.

        The future raises StoreError where a file could not be written.

        Args:
            about: the manifest's words on the image, the input, and what the model said.
        """
        files, ends = tuple(self.files), {"never_ran": list(never_ran)}
        closing = self.background.submit(0, partial(self._close, files, about, skipped, ends))
        self.files.append(closing)
        return closing

    def _close(
        self,
        files: Sequence[Future[None]],
        about: Mapping[str, Any],
        skipped: Sequence[Skip],
        ends: Mapping[str, Any],
    ) -> tuple[Capture, ...]:
        """Runs in the background, where all that this waits for was begun before."""
        for future in files:
            future.result()
        rows = tuple(future.result() for future in self.rows)
        self.folder.finish({**about, **manifest_rows(rows, skipped), **ends}, self.stats)
        return rows

    def abandon(self) -> None:
        """Wait for what is under way and remove it: a failed image leaves no files."""
        futures: list[Future[Any]] = [*self.rows, *(p.picture for p in self.posts), *self.files]
        for future in futures:
            future.cancel() or future.exception()
        self.folder.discard()

    def _file(self, site: Site, ending: str) -> str:
        """The way of a tensor's file in the image's folder."""
        image = self.sample.name if self.draw.flat else None
        return self.folder.file(site.layer, f"{site.stem}{ending}", image)

    def _later(self, array: np.ndarray, task: Callable[[np.ndarray], None]) -> None:
        self.files.append(self.background.submit(array.nbytes, partial(task, array)))

    def _post(self, picture: GridPicture, site: Site, tensor: Tensor | None) -> None:
        """Draw the grid for TensorBoard, with a histogram of the whole tensor."""
        plain = as_make_grid(picture, self.draw)
        counts = None if tensor is None else histogram(layout.to_floats(tensor))
        future = self.background.submit(picture.tiles.nbytes, partial(to_png, plain))
        size, name = (plain.plan.height, plain.plan.width), self.sample.name
        self.posts.append(Post(site, future, size, picture.stats, picture.values, counts, name))

    def _finish_picture(
        self,
        picture: GridPicture,
        site: Site,
        shape: Sequence[int],
        kept: str | None,
    ) -> Capture:
        """Make the manifest's row, then write the file; runs in the background."""
        file = self._file(site, f".{self.draw.format}")
        row = describe(picture, site, shape, file)
        where = f"{site.layer.label} {site.stem} of {self.sample.name}"
        png.warn_of_size(where, picture.plan.pixels)
        if kept is not None:
            row = replace(row, tensor=kept)
        with self.folder.writing(file) as opened:
            encode(picture, opened, self.draw.format, caption(row))
        return self._add_figure(picture, site, row) if self.draw.figure else row

    def _add_figure(self, picture: GridPicture, site: Site, row: Capture) -> Capture:
        """Write the figure beside the picture, and name it in the manifest's row."""
        title = f"{self.sample.name}   {site.layer.label} ({site.layer.type})   {site.stem}"
        cmap = colormap.resolved(self.draw.cmap, site.kind, True, self.draw.reduce)
        page = figure.page(picture, cmap, self.draw.first, title, self._shown)
        file = self._file(site, ".figure.png")
        with self.folder.writing(file) as opened:
            figure.write_figure(opened, page, caption(row))
        return replace(row, figure=file)


@dataclass(frozen=True)
class ImageRun:
    """An image that has been through the model, and whose files are on their way."""

    writer: ImageWriter
    closing: Future[tuple[Capture, ...]]
    """The manifest's rows, once it is written."""
    outcome: Outcome
    skipped: tuple[Skip, ...]
    never_ran: tuple[str, ...]

    def finish(self) -> ImageResult:
        """Wait until the files and the manifest are written.

        Raises:
            StoreError: a file could not be written.
        """
        sample, folder = self.writer.sample, self.writer.folder
        rows = self.writer.background.result(self.closing)
        if line := norms.report(rows):
            log.debug("%s: %s", sample.name, line)
        return ImageResult(
            sample.name, folder.name, rows, self.skipped, self.never_ran, outcome=self.outcome
        )


def run_image(
    prepared: Prepared,
    writer: ImageWriter,
    picture: DecodedImage,
    args: Sequence[Tensor],
    fingerprint: str,
) -> ImageRun:
    """Show one image to the model, and back where gradients are wanted.

    Args:
        args: what the model's forward gets: the picture, preprocessed.
        fingerprint: of the model and the options, for the manifest.

    Raises:
        ForwardError: the model raised.
        UsageError: the target does not fit the output.
    """
    model, plan = prepared.model, prepared.plan
    outcome, recorder = forward_backward.run(
        model, plan, args, writer.hints, prepared.layers, writer.sink
    )
    never_ran = tuple(layer.name for layer in recorder.never_ran)
    about = {
        **_input_words(writer.sample, picture, args, model.preprocess.words_for(picture.words)),
        "fingerprint": fingerprint,
        **_outcome_words(outcome, plan),
    }
    skipped = tuple(recorder.skipped)
    closing = writer.close(about, skipped, never_ran)
    return ImageRun(writer, closing, outcome, skipped, never_ran)


def _input_words(
    sample: Sample, picture: DecodedImage, args: Sequence[Tensor], preprocessing: str
) -> dict[str, Any]:
    """The manifest's words on the image and the model's input."""
    width, height = picture.size
    image = {
        "path": sample.name,
        "sha256": picture.sha256,
        "size": {"width": width, "height": height},
    }
    if len(sample.paths) > 1:
        image["files"] = [path.name for path in sample.paths]
    shapes = [list(arg.shape) for arg in args]
    shape = shapes[0] if len(shapes) == 1 else shapes
    return {"image": image, "input": {"shape": shape, "preprocessing": preprocessing}}


def _outcome_words(outcome: Outcome, plan: PassPlan) -> dict[str, Any]:
    """The manifest's words on what the model said, and on what was done to it."""
    words: dict[str, Any] = {}
    if outcome.prediction:
        words["prediction"] = [asdict(guess) for guess in outcome.prediction]
    if plan.options.gradients:
        words["target"] = {
            "of": plan.target.text,
            "value": finite(outcome.target),
            "grad_rule": plan.options.grad_rule,
        }
    if plan.changes:
        words["interventions"] = [
            {"kind": kind, "what": what} for kind, what in plan.options.interventions
        ]
    if outcome.intervened:
        words["effect"] = outcome.effect
    return words


def _save_tensor(folder: ImageFolder, name: str, array: np.ndarray) -> None:
    with folder.writing(name) as file:
        np.save(file, array)


def _save_input(folder: ImageFolder, pixels: Bytes) -> None:
    height, width, channels = pixels.shape
    rows = pixels.reshape(height, width * channels)
    with folder.writing("input.png") as file:
        png.write_png(file, (height, width), [rows])


def _to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy that no later operation can change; what numpy lacks (bfloat16, float8) becomes
    float32, and so do quantised values."""
    try:
        return np.array(tensor.cpu().resolve_neg().numpy(), copy=True)
    except (TypeError, RuntimeError):
        return np.array(layout.to_floats(tensor).cpu().numpy(), copy=True)
