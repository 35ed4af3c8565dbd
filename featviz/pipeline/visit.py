"""The loop over images: hooks draw what the model makes of one, while encoders write the files of
the one before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any, TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from featviz import layout
from featviz.drawing import colormap, figure
from featviz.drawing.drawer import Drawer
from featviz.drawing.picture import (
    GridPicture,
    caption,
    describe,
    encode,
    to_png,
    warn_of_size,
    write_png,
)
from featviz.drawing.tensorboard import Board, Post, as_make_grid, histogram, note
from featviz.errors import (
    FeatvizError,
    ForwardError,
    ImageError,
    LayoutError,
    StoreError,
    UploadError,
    UsageError,
)
from featviz.gradients import passes
from featviz.gradients.passes import PassPlan
from featviz.hooks.capture import Recorder
from featviz.hooks.eval_mode import in_eval_mode
from featviz.images.decode import DecodedImage
from featviz.layout.hints import HintBook
from featviz.pipeline.encoders import Background, read_ahead, shared_cores
from featviz.pipeline.prepare import Prepared, ground_of, read_input, readers_for, shown_of
from featviz.pipeline.resume import kept
from featviz.records import Floats, ImageResult, Outcome, Sample, Site, finite
from featviz.rundir import INPUT_FILE
from featviz.rundir.schema import Capture
from featviz.rundir.write import ImageFolder, RunDirectory, manifest_rows
from featviz.text import in_bytes

T = TypeVar("T")

log = logging.getLogger(__name__)

MOST_LOST = 3
"""Images in a row that a store did not take, after all tries, at which the run ends."""

Input: TypeAlias = tuple[DecodedImage, list[Tensor]]
"""A picture, and what the model's forward gets."""


@dataclass
class Visit:
    """What the images of a run share, and what is counted from one to the next."""

    prepared: Prepared
    store: RunDirectory
    fingerprint: str
    """Of the model and the options, for the manifests."""
    board: Board | None = None
    books: dict[tuple[int, ...], HintBook] = field(default_factory=dict)
    """Hints on layouts, by shape of the input; a series has the same for all of its steps."""
    lost: int = 0
    """Images in a row that a store did not take."""
    written: int = 0
    """Bytes in the folders of the images."""

    def __post_init__(self) -> None:
        self.drawer = Drawer(self.prepared.options.draw)
        self.steps = {sample.name: step for step, sample in enumerate(self.prepared.samples)}

    def read(self, sample: Sample) -> ImageResult | Input:
        """Decode and prepare an image, unless an earlier run has completed it: then its result.

        Raises:
            ImageError: it cannot be read.
        """
        options = self.prepared.options
        if options.resume:
            folder = self.store.image(sample.name)
            if (result := kept(folder, sample, self.fingerprint)) is not None:
                return result
        return read_input(sample, self.prepared.model.preprocess, options.inputs)

    def begin(
        self, sample: Sample, load: Callable[[], ImageResult | Input], encoders: Background
    ) -> ImageWriter | ImageResult:
        """Show an image to the model; the result is there at once if it was kept or has failed."""
        try:
            given = load()
        except ImageError as error:
            given = self.fail(sample, error)
        if isinstance(given, ImageResult) and given.kept:
            return given
        if self.prepared.options.resume:
            self.store.image(sample.name).discard()
        if isinstance(given, ImageResult):
            return given
        try:
            return self._show(sample, *given, encoders)
        except (ForwardError, UsageError) as error:
            return self.fail(sample, error)

    def _show(
        self, sample: Sample, picture: DecodedImage, args: list[Tensor], encoders: Background
    ) -> ImageWriter:
        prepared, shape = self.prepared, tuple(args[0].shape)
        if shape not in self.books:
            book = prepared.hint_book(args)
            if self.books:
                book.settle_as(next(iter(self.books.values())))
            self.books[shape] = book
        image = ImageWriter(self, sample, picture, args, encoders)
        try:
            sink = passes.paired(image.take) if prepared.options.draw.weighs else image.take
            outcome, recorder = passes.run(
                prepared.model, prepared.plan, args, image.hints, prepared.layers, sink
            )
            image.done(outcome, recorder)
        except BaseException:
            image.abandon()
            raise
        return image

    def fail(self, sample: Sample, error: FeatvizError) -> ImageResult:
        """The result of an image that has failed."""
        log.debug("%s failed", sample.name, exc_info=error)
        folder = self.store.image(sample.name).name
        return ImageResult(sample.name, folder, error=error.message, hint=error.hint)

    def finish(self, image: ImageWriter | ImageResult) -> ImageResult:
        """Wait until the files of an image are written.

        Raises:
            StoreError: they cannot be, or would take the run over its limit.
        """
        if isinstance(image, ImageResult):
            if image.kept:
                self._count(self.store.folder(image.folder))
            return image
        try:
            result = image.result()
        except UploadError as error:
            self.lost += 1
            if self.lost == MOST_LOST:
                raise
            return self.fail(image.sample, error)
        self.lost = 0
        try:
            self._count(image.folder)
        except StoreError:
            image.abandon()
            raise
        if self.board is not None:
            self.board.post(image.posts, self.steps[result.image])
        return result

    def _count(self, folder: ImageFolder) -> None:
        """Stop above --max-output-size, image by image: so the same run stops at the same image,
        whatever is under way."""
        most = self.prepared.options.max_output_size
        if most is not None:
            self.written += folder.size
            if self.written > most:
                raise StoreError(
                    f"{folder.name} would take the run over --max-output-size {in_bytes(most)}",
                    "what is complete stays complete; --resume with a larger limit goes on",
                )


def visit_all(
    run: Visit, samples: Sequence[Sample], stop: Event
) -> Generator[ImageResult, None, None]:
    """Run each image through the model and yield its result, in order, until `stop` is set.

    Image n is yielded when image n + 1 has been through the model. Whatever ends the loop, encoders
    complete the image that they have, unless the one before could not be written.

    Raises:
        StoreError: the run cannot be written, or would become too large. What goes wrong with one
            image is in its result.
    """
    options = run.prepared.options
    previous: ImageWriter | ImageResult | None = None
    readers = readers_for(samples)
    with (
        in_eval_mode(run.prepared.model.module, options.passes.gradients),
        shared_cores(options.jobs) as encoders,
        read_ahead(samples, run.read, readers, readers) as inputs,
    ):
        for sample, load in inputs:
            if stop.is_set():
                break
            try:
                current = run.begin(sample, load, encoders)
            except BaseException:  # the image before is told to the board, which has it once only
                if previous is not None:
                    with suppress(Exception):
                        run.finish(previous)
                raise
            try:
                if previous is not None:
                    yield run.finish(previous)
            except Exception:  # where one image cannot be written, the next has no better chance
                if isinstance(current, ImageWriter):
                    current.abandon()
                raise
            previous = current
        if previous is not None:
            yield run.finish(previous)


class ImageWriter:
    """Draws what hooks take of one image; encoders write the files, the manifest last."""

    def __init__(
        self,
        run: Visit,
        sample: Sample,
        picture: DecodedImage,
        args: Sequence[Tensor],
        encoders: Background,
    ) -> None:
        """Make the folder; `args` is the picture, as the model's forward gets it.

        Raises:
            StoreError: it cannot be made, or the run directory is no longer there.
        """
        preprocess = run.prepared.model.preprocess
        self.sample, self.encoders = sample, encoders
        self.drawer, self.draw = run.drawer, run.drawer.options
        self.hints = run.books[tuple(args[0].shape)]
        self.tasks: list[Future[Any]] = []
        """All that encoders do for this image before they write its manifest."""
        self.closing: Future[ImageResult] | None = None
        self.posts: list[Post] = []
        """For TensorBoard, in the order in which the layers ran."""
        self._rows: list[Future[Capture]] = []
        self._stats: dict[str, Floats] = {}
        self._sites: set[Site] = set()
        self._shapes = [arg.shape for arg in args]
        self._window = preprocess.window(picture.size)
        self._shown = shown_of(preprocess, args)
        self._ground = [] if self.draw.overlay is None else ground_of(preprocess, args)
        self._plan, self._posting = run.prepared.plan, run.board is not None
        words = preprocess.words_for(picture.words)
        self._about = _input_words(sample, picture, args, words) | {"fingerprint": run.fingerprint}
        self.folder = run.store.new_image(sample.name)

    def take(self, site: Site, tensor: Tensor, gradient: Tensor | None = None) -> None:
        """Draw a tensor now, and leave the rest to the encoders.

        Args:
            gradient: of the target at the tensor, for class activation maps.

        Raises:
            LayoutError: it cannot be drawn, or its files would have the names of other ones.
        """
        hints = self.hints.at(site, tensor)
        drawn_over = (self._ground, self._window, self._shapes)
        parts = self.drawer.draw(site, tensor, hints, *drawn_over, gradient)
        sites = {site, *map(site.inside, parts)}
        if taken := sites & self._sites:  # {"a": {"b": x}, "a.b": y} has two of one name
            raise LayoutError(f"another part of this {taken.pop().kind} has the same name")
        self._sites |= sites
        raw = None
        if self.draw.tensors == "npy":
            raw, array = self._file(site, ".npy"), _to_numpy(tensor)
            self._later(array.nbytes, partial(self._write_tensor, raw, array))
        for key, picture in parts.items():
            at = site.inside(key)
            work = partial(self._write_picture, picture, at, tensor.shape, raw)
            self._rows.append(self._later(picture.tiles.nbytes, work))
            self._stats[at.stats_key] = picture.stats
            if self._posting:
                plain = as_make_grid(picture, self.draw)
                counts = None if key else histogram(layout.to_floats(tensor))
                drawn = self._later(plain.tiles.nbytes, partial(to_png, plain))
                about = note(plain), self.sample.name
                self.posts.append(Post(at, drawn.result, picture.stats, counts, *about))

    def done(self, outcome: Outcome, recorder: Recorder) -> None:
        """The model is through: have the manifest written once all files are."""
        result = ImageResult(
            self.sample.name,
            self.folder.name,
            skipped=tuple(recorder.skipped),
            never_ran=tuple(layer.name for layer in recorder.never_ran),
            outcome=outcome,
        )
        self._later(self._shown.nbytes, self._write_input)
        self.closing = self.encoders.submit(0, partial(self._close, result))

    def result(self) -> ImageResult:
        """Wait until all files are written, and help.

        Raises:
            StoreError: one cannot be; the folder is gone.
        """
        assert self.closing is not None, "done comes first"
        return self.encoders.result(self.closing)

    def abandon(self) -> None:
        """Remove the folder once encoders have let go of it."""
        if self.closing is not None:
            self.closing.cancel() or self.closing.exception()
        self._discard()

    def _discard(self) -> None:
        for task in self.tasks:
            task.cancel() or task.exception()
        self.folder.discard()

    def _later(self, size: int, work: Callable[[], T]) -> Future[T]:
        task = self.encoders.submit(size, work)
        self.tasks.append(task)
        return task

    def _file(self, site: Site, ending: str) -> str:
        """The path of a tensor's file in the image's folder."""
        image = self.sample.name if self.draw.flat else None
        return self.folder.file(site.layer, f"{site.stem}{ending}", image)

    # What follows is run by encoders

    def _close(self, result: ImageResult) -> ImageResult:
        """Write the manifest; all that this waits for was begun before."""
        try:
            for task in self.tasks:
                task.result()
            result = replace(result, captures=tuple(row.result() for row in self._rows))
            manifest = {
                **self._about,
                **_outcome_words(result.outcome, self._plan),
                **manifest_rows(result.captures, result.skipped),
                "never_ran": list(result.never_ran),
            }
            self.folder.finish(manifest, self._stats)
        except BaseException:
            self._discard()
            raise
        return result

    def _write_input(self) -> None:
        height, width, channels = self._shown.shape
        with self.folder.writing(INPUT_FILE) as file:
            write_png(file, (height, width), [self._shown.reshape(height, width * channels)])

    def _write_tensor(self, name: str, array: np.ndarray) -> None:
        with self.folder.writing(name) as file:
            np.save(file, array)

    def _write_picture(
        self, picture: GridPicture, site: Site, shape: Sequence[int], raw: str | None
    ) -> Capture:
        """Write a picture, and its figure if there is to be one; gives the manifest's row."""
        file = self._file(site, f".{self.draw.format}")
        row = describe(picture, site, shape, file)
        if raw is not None:
            row = replace(row, tensor=raw)
        name = self.sample.name
        warn_of_size(f"{site.layer.label} {site.stem} of {name}", picture.plan.pixels)
        with self.folder.writing(file) as opened:
            encode(picture, opened, self.draw.format, caption(row))
        if not self.draw.figure:
            return row
        title = f"{name}   {site.layer.label} ({site.layer.type})   {site.stem}"
        cmap = colormap.resolved(self.draw.cmap, site.kind, True, self.draw.reduce)
        page = figure.page(picture, cmap, title, self._shown)
        file = self._file(site, ".figure.png")
        with self.folder.writing(file) as opened:
            figure.write_figure(opened, page, caption(row))
        return replace(row, figure=file)


def _input_words(
    sample: Sample, picture: DecodedImage, args: Sequence[Tensor], preprocessing: str
) -> dict[str, Any]:
    """The manifest's words on the image and the model's input."""
    width, height = picture.size
    size = {"width": width, "height": height}
    image = {"path": sample.name, "sha256": picture.sha256, "size": size}
    if len(sample.paths) > 1:
        image["files"] = [path.name for path in sample.paths]
    shapes = [list(arg.shape) for arg in args]
    shape = shapes[0] if len(shapes) == 1 else shapes
    return {"image": image, "input": {"shape": shape, "preprocessing": preprocessing}}


def _outcome_words(outcome: Outcome, plan: PassPlan) -> dict[str, Any]:
    """The manifest's words on what the model said, and on what was done to it."""
    words: dict[str, Any] = {}
    options = plan.options
    if outcome.prediction:
        words["prediction"] = [asdict(guess) for guess in outcome.prediction]
    if options.gradients:
        value = finite(outcome.target)
        words["target"] = {"of": plan.target.text, "value": value, "grad_rule": options.grad_rule}
    if plan.changes:
        words["interventions"] = [{"kind": k, "what": what} for k, what in options.interventions]
    if outcome.intervened:
        words["effect"] = outcome.effect
    return words


def _to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy that no later operation can change; what numpy lacks (bfloat16, float8) becomes
    float32, and so do quantised values."""
    try:
        return np.array(tensor.cpu().resolve_neg().numpy(), copy=True)
    except (TypeError, RuntimeError):
        return np.array(layout.to_floats(tensor).cpu().numpy(), copy=True)
