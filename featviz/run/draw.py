"""Drawing the images of a run: hooks draw what the model makes of one, while encoders
write the files of the one before."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from itertools import chain
from threading import Event
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from featviz import layout
from featviz.drawing import colormap
from featviz.drawing.drawer import draw, magnitude_and_phase
from featviz.drawing.picture import (
    GridPicture,
    caption,
    describe,
    encode,
    to_png,
    write_png,
)
from featviz.drawing.tensorboard import Board, as_make_grid, histogram
from featviz.drawing.values import to_pixels
from featviz.errors import FeatvizError, LayoutError
from featviz.files.urls import Url
from featviz.records import CaptureSite, Floats, Hints, Outcome, Sample, finite
from featviz.run import workers
from featviz.run.encoders import AtOnce, Background, shared_cores, usable_cores
from featviz.run.prepare import LOOPS, ModelInput, Prepared, Show, read_input
from featviz.run.results import ImageResult
from featviz.run.resume import kept_manifest
from featviz.run.visit import ImageJob, visit
from featviz.rundir import INPUT_FILE
from featviz.rundir.schema import Capture
from featviz.rundir.write import RunDirectory, manifest_rows


def draw_images(
    run: Drawing, samples: Sequence[Sample], stop: Event
) -> Generator[ImageResult, None, None]:
    """Draw and write each image and yield its result, in order, until `stop` is set: in
    this process, or side by side in worker processes, of which each draws and writes
    whole images.

    The command and the machine alone decide which: so the same command gives the same
    bytes."""
    jobs = _process_count(run, samples)
    if jobs == 1:
        yield from draw_all(run, samples, stop)
        return
    with workers.one_torch_thread():
        # A worker that is forked while the thread of `prepare` imports would wait for
        # it for ever.
        import_module(LOOPS)
        # The first image shows how much memory one takes, and leaves workers what it
        # found out.
        with workers.measured_memory() as memory:
            yield from draw_all(run, samples[:1], stop)

        def work(numbers: Iterator[int]) -> Iterator[ImageResult]:
            kept = run.kept if run.prepared.options.resume else None
            run.encoders = AtOnce()
            with run.prepared.watched() as run.show_model:
                for number in numbers:
                    for job in visit([samples[number]], run.read, run.show, kept=kept):
                        yield run.result_of(job)

        def lost(number: int, error: workers.WorkerDiedError) -> ImageResult:
            return run.failed(samples[number], error)

        count = workers.fitting(min(jobs, len(samples) - 1), memory.bytes_taken)
        rest = range(1, len(samples))
        with closing(workers.in_processes(rest, work, count, stop, lost)) as results:
            yield from results


def _process_count(run: Drawing, samples: Sequence[Sample]) -> int:
    """How many processes draw the images.

    One where there is little to gain (a few images), or something that cannot be
    divided: a GPU, TensorBoard's events, connections to a store, whose reader waits for
    the network in threads."""
    options = run.prepared.options
    is_remote = options.mirror is not None or any(
        isinstance(path, Url) for sample in samples[:1] for path in sample.paths
    )
    is_divisible = run.board is None and not is_remote and workers.can_fork()
    is_on_cpu = run.prepared.model.device.type == "cpu"
    # of the whole run: what --resume draws later must not depend on how much is left
    is_long = len(run.prepared.samples) >= workers.FEWEST_IMAGES and len(samples) > 1
    if not (is_divisible and is_on_cpu and is_long):
        return 1
    if options.jobs is not None:
        return options.jobs
    # each shard is one of several processes, which are to use the cores together
    return 1 if options.shard is not None else usable_cores()


def draw_all(
    run: Drawing, samples: Sequence[Sample], stop: Event
) -> Generator[ImageResult, None, None]:
    """Draw and write each image here, and yield its result, in order, until `stop` is
    set.

    Image n is yielded when image n + 1 has been through the model. Whatever ends the
    loop, encoders complete the image that they have, unless the one before could not be
    written."""
    kept = run.kept if run.prepared.options.resume else None
    drawn: DrawnJob | None = None
    with (
        run.prepared.watched() as run.show_model,
        shared_cores() as encoders,
        closing(visit(samples, run.read, run.show, kept=kept, stop=stop)) as jobs,
    ):
        run.encoders = encoders
        for following in chain(jobs, [None]):
            if drawn is not None:
                try:
                    result = run.result_of(drawn)
                except Exception:
                    # the image behind it would meet the same full disk, or the same bug
                    if following is not None and following.result is not None:
                        following.result.abandon()
                    raise
                yield result
            drawn = following


class Drawing:
    """What the images of a run share."""

    show_model: Show
    encoders: Background | AtOnce

    def __init__(
        self,
        prepared: Prepared,
        store: RunDirectory,
        fingerprint: str,
        board: Board | None = None,
    ) -> None:
        """Begin with no image.

        Args:
            fingerprint: of the model and the options, for the manifests.
            board: TensorBoard's events, each image a step of its own; None writes none.
        """
        self.prepared = prepared
        self.root = prepared.options.folder
        """The run directory as the user named it; `store` may be a hidden one beside
        it."""
        self.store = store
        self.fingerprint = fingerprint
        self.board = board
        self.steps = {sample.name: step for step, sample in enumerate(prepared.samples)}
        inputs = prepared.options.inputs
        self.read = partial(
            read_input, preprocess=prepared.model.preprocess, inputs=inputs
        )

    def kept(self, sample: Sample) -> ImageResult | None:
        """What an earlier run made of an image; None where that is not whole, and then
        it goes."""
        folder = self.store.image(sample.name)
        manifest = kept_manifest(folder, sample, self.fingerprint)
        if manifest is None:
            folder.discard()
            return None
        return ImageResult(
            name=sample.name,
            folder=folder.name,
            root=self.root,
            rows=tuple(manifest.captures),
            pictures=len(manifest.captures),
            skipped=tuple(manifest.skipped),
            never_ran=tuple(manifest.never_ran),
            outcome=Outcome(
                prediction=tuple(manifest.prediction),
                detections=tuple(manifest.detections),
            ),
            kept=True,
        )

    def show(self, jobs: Sequence[DrawnJob]) -> ImageWriter:
        """Show an image to the model, and leave its files to the encoders."""
        sample = jobs[0].sample
        image = jobs[0].input
        assert image is not None, "images that cannot be read are not shown"
        writer = ImageWriter(self, sample, image)
        try:
            outcome, recorder = self.show_model(image.args, writer.hints, writer.take)
            # The boxes are all that a run keeps of a detection or a segmentation: the
            # masks of regions would go from worker processes to this one.
            outcome = replace(
                outcome,
                detections=image.in_file(outcome.detections),
                regions=None,
                focus=None,
            )
            result = ImageResult(
                name=sample.name,
                folder=writer.folder.name,
                root=self.root,
                skipped=tuple(recorder.skipped),
                never_ran=tuple(layer.name for layer in recorder.never_ran),
                outcome=outcome,
            )
            writer.closing = self.encoders.submit(0, partial(writer.close, result))
        except BaseException:
            writer.abandon()
            raise
        return writer

    def result_of(self, job: DrawnJob) -> ImageResult:
        """What became of an image, once encoders have written its files.

        Raises:
            Exception: of its encoders.
        """
        if job.kept is not None:
            return job.kept
        writer = job.result
        if writer is not None and writer.closing is not None:
            result = self.encoders.result(writer.closing)
            if self.board is not None:
                self.board.post(chain(*writer.posts), self.steps[result.name])
            return result
        error = job.error
        assert error is not None, "an image has a result or an error"
        return self.failed(job.sample, error)

    def failed(self, sample: Sample, error: FeatvizError) -> ImageResult:
        """The result of an image that has no pictures."""
        return ImageResult(
            name=sample.name,
            folder=self.store.image(sample.name).name,
            root=self.root,
            error=error.message,
            hint=error.hint,
        )


class ImageWriter:
    """Draws what hooks take of one image; encoders write the files, the manifest last."""

    closing: Future[ImageResult] | None = None
    """The task that writes the manifest; None before the model is through with the
    image."""

    def __init__(self, run: Drawing, sample: Sample, image: ModelInput) -> None:
        """Make the folder."""
        self.run = run
        self.sample = sample
        self.image = image
        self.options = run.prepared.options.draw
        self.hints = run.prepared.hints(image.args)
        self.tasks: list[Future[Any]] = []
        """What encoders do for this image before they write its manifest."""
        self.posts: list[Iterator[dict[str, Any]]] = []
        """For TensorBoard, when the image is complete."""
        # the same for the pictures, which are rows of it
        self._rows: list[Future[Capture]] = []
        self._stats: dict[str, Floats] = {}
        self._sites: set[CaptureSite] = set()
        # before the model may change it in place: frames and several images side by
        # side
        self._shown = to_pixels(image.preprocess.shown(image.args)[0])
        background = [] if self.options.overlay is None else image.background()
        self._drawn_over = background, image.window, [arg.shape for arg in image.args]
        self.folder = run.store.new_image(sample.name)
        self._file = partial(
            self.folder.file, image=sample.name if self.options.flat else None
        )
        """The path of a layer's file in the image's folder."""

    def take(
        self,
        site: CaptureSite,
        tensor: Tensor,
        gradient: Tensor | None = None,
        hints: Hints | None = None,
    ) -> None:
        """Draw a tensor now, and leave the rest to the encoders.

        Args:
            gradient: at the tensor, for class activation maps.
            hints: on its layout; None looks them up.

        Raises:
            LayoutError: it cannot be drawn, or its file would have another one's name.
        """
        hints = hints or self.hints.of_tensor(site, tensor)
        if tensor.is_complex() and gradient is None:
            for half, numbers, facts in magnitude_and_phase(
                site, tensor, hints, self.options
            ):
                self.take(half, numbers, hints=facts)
            return
        pictures = draw(self.options, site, tensor, hints, *self._drawn_over, gradient)
        sites = {site, *map(site.inside, pictures)}
        taken = sites & self._sites
        if taken:  # {"a": {"b": x}, "a.b": y} has two of one name
            raise LayoutError(
                f"another part of this {taken.pop().kind} has the same name"
            )
        self._sites |= sites
        tensor_file = (
            self._keep(site, tensor) if self.options.tensors == "npy" else None
        )
        for key, picture in pictures.items():
            at = site.inside(key)
            work = partial(self._write_picture, picture, at, tensor.shape, tensor_file)
            self._rows.append(self.run.encoders.submit(picture.tiles.nbytes, work))
            self._stats[at.stats_key] = picture.stats
            self._stats[at.deviations_key] = picture.deviations
            if self.run.board is not None:
                self._post(self.run.board, at, picture, None if key else tensor)

    def _keep(self, site: CaptureSite, tensor: Tensor) -> str:
        """Have a copy of a tensor written, which no later operation can change; its
        file."""
        try:
            array = np.array(tensor.cpu().resolve_neg().numpy(), copy=True)
        # numpy lacks bfloat16, float8 and quantised values
        except (TypeError, RuntimeError):
            array = np.array(layout.to_floats(tensor).cpu().numpy(), copy=True)
        file = self._file(site.layer, f"{site.stem}.npy")
        work = partial(self._write_tensor, file, array)
        self.tasks.append(self.run.encoders.submit(tensor.nbytes, work))
        return file

    def _post(
        self,
        board: Board,
        site: CaptureSite,
        picture: GridPicture,
        tensor: Tensor | None,
    ) -> None:
        """Have a picture drawn as `make_grid` would, and its values ready for
        TensorBoard, with a histogram of the tensor that it shows as a whole."""
        plain = as_make_grid(picture, self.options)
        counts = None if tensor is None else histogram(layout.to_floats(tensor))
        drawn = self.run.encoders.submit(plain.tiles.nbytes, partial(to_png, plain))
        self.tasks.append(drawn)
        maps = len(plain.drawn)
        name = self.sample.name
        self.posts.append(
            board.values(site, drawn.result, picture.stats, maps, counts, name)
        )

    def abandon(self) -> None:
        """Remove the folder once encoders have let go of it."""
        if self.closing is not None and not self.closing.cancel():
            self.closing.exception()
        self._discard()

    def _discard(self) -> None:
        for task in (*self.tasks, *self._rows):
            if not task.cancel():
                task.exception()
        self.folder.discard()

    # What follows is run by encoders

    def close(self, result: ImageResult) -> ImageResult:
        """Write the input, and the manifest once all files are there, which were begun
        before."""
        try:
            height, width, channels = self._shown.shape
            with self.folder.writing(INPUT_FILE) as file:
                write_png(
                    file,
                    (height, width),
                    [self._shown.reshape(height, width * channels)],
                )
            for task in self.tasks:
                task.result()
            rows = tuple(row.result() for row in self._rows)
            result = replace(result, rows=rows, pictures=len(rows))
            self.folder.finish(self._manifest(result), self._stats)
        except BaseException:
            self._discard()
            raise
        return result

    def _manifest(self, result: ImageResult) -> dict[str, Any]:
        """The content of manifest.json, but for what the folder knows itself: its
        files."""
        plan = self.run.prepared.plan
        outcome = result.outcome
        width, height = self.image.images[0].size
        size = {"width": width, "height": height}
        image = {"path": self.sample.name, "sha256": self.image.sha256, "size": size}
        if len(self.sample.paths) > 1:
            image["files"] = [path.name for path in self.sample.paths]
        shapes = [list(arg.shape) for arg in self.image.args]
        manifest: dict[str, Any] = {
            "image": image,
            "input": {
                "shape": shapes[0] if len(shapes) == 1 else shapes,
                "preprocessing": self.image.words,
            },
            "fingerprint": self.run.fingerprint,
        }
        if self.image.preprocess.frames_first:
            manifest["input"]["frames"] = self.image.preprocess.frames
        if outcome.prediction:
            manifest["prediction"] = [asdict(guess) for guess in outcome.prediction]
        if outcome.detections:
            manifest["detections"] = [asdict(box) for box in outcome.detections]
            manifest["input"]["window"] = list(self.image.placement)
        if plan.backward:
            manifest["target"] = {
                "of": plan.target.text,
                "value": finite(outcome.target),
                "grad_rule": plan.options.grad_rule,
            }
        if plan.changes:
            changes = plan.options.interventions
            manifest["interventions"] = [
                {"kind": kind, "what": what} for kind, what in changes
            ]
        if outcome.intervened:
            manifest["effect"] = outcome.effect
        manifest |= manifest_rows(result.rows, result.skipped)
        manifest["never_ran"] = list(result.never_ran)
        return manifest

    def _write_tensor(self, name: str, array: np.ndarray) -> None:
        with self.folder.writing(name) as file:
            np.save(file, array)

    def _write_picture(
        self,
        picture: GridPicture,
        site: CaptureSite,
        shape: Sequence[int],
        tensor_file: str | None,
    ) -> Capture:
        """Write a picture, and its figure if there is to be one; gives the manifest's
        row."""
        file = self._file(site.layer, f"{site.stem}.{self.options.format}")
        row = describe(picture, site, shape, file)
        if tensor_file is not None:
            row = replace(row, tensor=tensor_file)
        with self.folder.writing(file) as opened:
            encode(picture, opened, self.options.format, caption(row))
        if self.options.figure:
            row = replace(row, figure=self._write_figure(picture, site, row))
        return row

    def _write_figure(
        self, picture: GridPicture, site: CaptureSite, row: Capture
    ) -> str:
        """Write the first maps with axes and a colour bar, beside the input; the file."""
        from featviz.drawing import page

        title = (
            f"{self.sample.name}   {site.layer.label} ({site.layer.type})   {site.stem}"
        )
        cmap = picture.cmap or colormap.resolved(
            self.options.cmap, site.kind, True, self.options.reduce
        )
        tiles = page.figure_tiles(picture, cmap)
        file = self._file(site.layer, f"{site.stem}.figure.png")
        with self.folder.writing(file) as opened:
            page.write_figure(opened, title, self._shown, tiles, cmap, caption(row))
        return file


DrawnJob: TypeAlias = ImageJob[ModelInput, ImageWriter]
"""An image of a run on its way through the model and to its files."""
