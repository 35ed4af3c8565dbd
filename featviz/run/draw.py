"""Draws the images of a run. While the model runs on an image, and hooks draw its tensors,
encoders write the files of the image before.

    draw_images             in this process (draw_all), or in worker processes
      visit                 reads the next images
        Drawing.show        runs the model; hooks call ImageWriter.draw for each tensor
          ImageWriter.draw  draws a tensor, and gives its file to an encoder
      Drawing.result_of     waits for the files of an image; the manifest is the last
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import partial
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
    write_pixels,
)
from featviz.drawing.tensorboard import Board, as_make_grid, histogram
from featviz.drawing.values import to_pixels
from featviz.errors import FeatvizError, ImageError, LayoutError, StoreError
from featviz.gradients import interventions
from featviz.gradients.passes import PassPlan
from featviz.images import decode
from featviz.records import CaptureSite, Floats, Hints, Outcome, Sample, finite
from featviz.run import workers
from featviz.run.encoders import Encoders, InRows, encoder_threads
from featviz.run.prepare import ModelInput, Prepared, Show, read_input
from featviz.run.results import ImageResult
from featviz.run.visit import ImageJob, visit
from featviz.rundir import INPUT_FILE
from featviz.rundir.schema import Capture
from featviz.rundir.write import RunDirectory, manifest_rows


def draw_images(
    run: Drawing, samples: Sequence[Sample], stop: Event
) -> Generator[ImageResult, None, None]:
    """Draw and write images, and yield their results in order, until `stop` is set. A long
    run on a CPU is divided among worker processes, of which each draws and writes whole
    images; any other run is drawn in this process."""
    count = _process_count(run, samples)
    if count == 1:
        return draw_all(run, samples, stop)
    return _draw_side_by_side(run, samples, stop, count)


def _draw_side_by_side(
    run: Drawing, samples: Sequence[Sample], stop: Event, count: int
) -> Generator[ImageResult, None, None]:
    """Draw the first image in this process, and all others in worker processes.

    Args:
        samples, stop: as for `draw_images`.
        count: the most workers; there are fewer if the memory is not enough.
    """

    def work(numbers: Iterator[int]) -> Iterator[ImageResult]:
        """Draw the samples with these numbers. This runs in a worker process, so its
        changes of `run` do not reach the parent."""
        kept = run.kept if run.prepared.options.resume else None
        encoders = InRows()
        run.encoders = encoders
        with run.prepared.watched() as run.show_model:
            for number in numbers:
                for job in visit([samples[number]], run.read, run.show, kept=kept):
                    encoders.run()
                    yield run.result_of(job)

    return workers.side_by_side(
        draw_all(run, samples[:1], stop),
        len(samples),
        work,
        count,
        stop,
        lost=lambda number, error: run.failed(samples[number], error),
    )


def _process_count(run: Drawing, samples: Sequence[Sample]) -> int:
    """How many worker processes draw the images; 1 stands for drawing in this process.

    The number depends only on the command and the machine, so that the same command
    gives the same bytes. Any number of workers above 1 gives the same bytes, too."""
    options = run.prepared.options
    # only one process can write TensorBoard's events
    if len(samples) < 2 or run.board is not None or options.mirror is not None:
        return 1
    # the user starts one process for each shard, and these divide the cores
    if options.shard is not None and options.jobs is None:
        return 1
    # all samples of the run count, also with --resume, which draws only some of them
    prepared = run.prepared
    return workers.worker_count(
        prepared.model, prepared.samples, options.jobs, prepared.plan.backward
    )


def draw_all(
    run: Drawing, samples: Sequence[Sample], stop: Event
) -> Generator[ImageResult, None, None]:
    """Draw and write images in this process, and yield their results in order, until
    `stop` is set.

    The result of an image is yielded when the model is through with the next image. If
    the loop ends early, encoders still complete the images that they have; but if one
    cannot be written, the next one is given up."""
    kept = run.kept if run.prepared.options.resume else None
    drawn = None
    with (
        run.prepared.watched() as run.show_model,
        encoder_threads() as run.encoders,
        closing(visit(samples, run.read, run.show, kept=kept, stop=stop)) as jobs,
    ):
        # the None at the end lets the loop yield the last image, too
        for following in chain(jobs, [None]):
            if drawn is not None:
                yield run.result_of(drawn, following)
            drawn = following


class Drawing:
    """What the images of a run share."""

    show_model: Show
    encoders: Encoders

    def __init__(
        self,
        prepared: Prepared,
        run_directory: RunDirectory,
        fingerprint: str,
        board: Board | None,
    ) -> None:
        """Begin with no image.

        Args:
            run_directory: the run directory that images are written into. It has a hidden
                name if it replaces an earlier run at the end.
            fingerprint: the fingerprint of the settings, for the manifests.
            board: TensorBoard's events, with a step for each image; None writes none.
        """
        self.prepared = prepared
        self.root = prepared.options.folder
        """The run directory as the user named it."""
        self.run_directory = run_directory
        self.fingerprint = fingerprint
        self.board = board
        # TensorBoard sorts by step, not by name
        self.steps = {sample.name: step for step, sample in enumerate(prepared.samples)}
        self.read = partial(
            read_input,
            preprocess=prepared.model.preprocess,
            inputs=prepared.options.inputs,
        )

    def kept(self, sample: Sample) -> ImageResult | None:
        """The result that an earlier run has written for an image. If that result is
        incomplete, or was drawn from another file or with other settings, its folder is
        removed, and this returns None.

        Raises:
            StoreError: the folder also holds files that featviz did not write.
        """
        folder = self.run_directory.image(sample.name)
        with suppress(StoreError, ImageError):
            manifest = folder.manifest()
            has_same_settings = manifest.fingerprint == self.fingerprint
            # the checksum comes second, since it reads the whole file
            if has_same_settings and manifest.image.sha256 == decode.digest(sample):
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
        folder.discard()
        return None

    def show(self, jobs: Sequence[DrawnJob]) -> ImageWriter:
        """Show an image to the model, and give its files to the encoders.

        Args:
            jobs: the job of one image: a run shows images one by one.

        Returns:
            The writer of the image. Its task `closing` writes the last file.

        Raises:
            FeatvizError: the model fails, or a file cannot be written. The image's folder
                has been removed then.
        """
        sample = jobs[0].sample
        image = jobs[0].input
        assert image is not None, "images that cannot be read are not shown"
        writer = ImageWriter(self, sample, image)
        try:
            outcome, recorder = self.show_model(image.args, writer.hints, writer.draw)
            # Of a detection or a segmentation, a run keeps only the boxes. Masks are
            # large, and worker processes would have to send them to this process.
            outcome = replace(outcome, regions=None, focus=None)
            if outcome.detections:
                boxes = image.in_file(outcome.detections)
                outcome = replace(outcome, detections=boxes)
            result = ImageResult(
                name=sample.name,
                folder=writer.folder.name,
                root=self.root,
                skipped=tuple(recorder.skipped),
                never_ran=tuple(layer.name for layer in recorder.never_ran),
                outcome=outcome,
            )
            writer.closing = self.encoders.submit(0, partial(writer.close, result))
        # BaseException: after Ctrl-C, too, no hidden folder may stay behind
        except BaseException:
            writer.abandon()
            raise
        return writer

    def result_of(
        self, job: DrawnJob, following: DrawnJob | None = None
    ) -> ImageResult:
        """Wait until encoders have written the files of an image, and return its result.

        Args:
            job: the image.
            following: the next image, which the model is through with, too. If the files
                of `job` cannot be written, the next image is given up: it would meet the
                same full disk, or the same bug.

        Raises:
            Exception: any exception of an encoder that wrote the files.
        """
        if job.kept is not None:
            return job.kept
        if job.error is not None:
            return self.failed(job.sample, job.error)
        writer = job.result
        assert writer is not None, "an image has a result or an error"
        assert writer.closing is not None, "show submits it"
        try:
            result = writer.closing.result()
        except Exception:
            if following is not None and following.result is not None:
                following.result.abandon()
            raise
        if self.board is not None:
            self.board.post(chain(*writer.posts), self.steps[result.name])
        return result

    def failed(self, sample: Sample, error: FeatvizError) -> ImageResult:
        """The result of an image that could not be drawn.

        Args:
            error: the reason.
        """
        return ImageResult(
            name=sample.name,
            folder=self.run_directory.image(sample.name).name,
            root=self.root,
            error=error.message,
            hint=error.hint,
        )


class ImageWriter:
    """Draws the tensors that hooks take from a forward pass of one image. Encoders write
    the files, the manifest last."""

    closing: Future[ImageResult] | None = None
    """The task that writes the manifest; None until the model is through with the
    image."""

    def __init__(self, run: Drawing, sample: Sample, image: ModelInput) -> None:
        """Make the folder of an image. The model must not have run on the image yet.

        Args:
            sample: the sample that the image was read from.
            image: the image as the model gets it.

        Raises:
            UsageError: --overlay is given, and the input is not an image.
            StoreError: the folder cannot be made.
        """
        self.run = run
        self.sample = sample
        self.image = image
        self.options = run.prepared.options.draw
        self.hints = run.prepared.hints(image.args)
        is_clip = image.preprocess.frames is not None
        self.hints.follows_fields = (
            not is_clip and image.args[0].shape == run.prepared.blank[0].shape
        )
        self.posts: list[Iterator[dict[str, Any]]] = []
        """Values for TensorBoard, which are posted when the image is complete."""
        # The tasks that encoders must finish before they write the manifest. The task of
        # a picture returns the picture's row in the manifest.
        self._pictures: list[Future[Capture]] = []
        self._other_tasks: list[Future[Any]] = []
        self._stats: dict[str, Floats] = {}
        self._sites: set[CaptureSite] = set()
        # The picture for input.png, in which frames and several inputs are side by side.
        # It is made here, since the model may change its input in place.
        self._shown = to_pixels(image.preprocess.shown(image.args)[0])
        self._background = [] if self.options.overlay is None else image.background()
        self.folder = run.run_directory.new_image(sample.name)
        name_in_files = sample.name if self.options.flat else None
        self._file = partial(self.folder.file, image=name_in_files)
        """The path of a layer's file, relative to the image's folder."""

    def draw(
        self,
        site: CaptureSite,
        tensor: Tensor,
        gradient: Tensor | None = None,
        hints: Hints | None = None,
    ) -> None:
        """Draw a tensor, and give its files to the encoders. The hooks call this method.

        Args:
            site: the capture that gave the tensor.
            tensor: any tensor. One of complex numbers becomes two pictures, of the
                magnitude and of the phase.
            gradient: the gradient at the tensor, for class activation maps.
            hints: hints on the tensor's layout; None looks them up.

        Raises:
            LayoutError: the tensor cannot be drawn, or another file has the name of its
                file.
        """
        hints = hints or self.hints.of_tensor(site, tensor)
        if tensor.is_complex() and gradient is None:
            for real in magnitude_and_phase(site, tensor, hints, self.options):
                self.draw(real.site, real.tensor, hints=real.hints)
            return
        # `draw` makes the pixels at once, since the model may change the tensor later.
        # The key of a picture is empty for the whole tensor, else the name of a part.
        pictures = draw(
            self.options,
            site,
            tensor,
            hints,
            background=self._background,
            window=self.image.window,
            inputs=[arg.shape for arg in self.image.args],
            gradient=gradient,
        )
        sites = {site, *map(site.inside, pictures)}
        # the output {"a": {"b": x}, "a.b": y} has two parts named "a.b"
        if not sites.isdisjoint(self._sites):
            raise LayoutError(f"another part of this {site.kind} has the same name")
        self._sites |= sites
        tensor_file = self._keep(site, tensor) if self.options.tensors else None
        for key, picture in pictures.items():
            picture_site = site.inside(key)
            write = partial(
                self._write_picture, picture, picture_site, tensor.shape, tensor_file
            )
            row = self.run.encoders.submit(picture.tiles.nbytes, write)
            self._pictures.append(row)
            self._stats[picture_site.stats_key] = picture.stats
            self._stats[picture_site.deviations_key] = picture.deviations
            if self.run.board is not None:
                # only the picture of the whole tensor gets a histogram
                whole_tensor = None if key else tensor
                self._prepare_post(self.run.board, picture_site, picture, whole_tensor)

    def _keep(self, site: CaptureSite, tensor: Tensor) -> str:
        """Copy a tensor, since the model may change it later, and let an encoder write
        the copy into an npy file.

        Returns:
            The path of the file in the image's folder.
        """
        try:
            array = np.array(tensor.cpu().resolve_neg().numpy(), copy=True)
        # numpy lacks bfloat16, float8 and quantised values
        except (TypeError, RuntimeError):
            array = np.array(layout.to_floats(tensor).cpu().numpy(), copy=True)
        name = self._file(site.layer, f"{site.stem}.npy")

        def write() -> None:
            with self.folder.writing(name) as file:
                np.save(file, array)

        self._other_tasks.append(self.run.encoders.submit(tensor.nbytes, write))
        return name

    def _prepare_post(
        self,
        board: Board,
        site: CaptureSite,
        picture: GridPicture,
        tensor: Tensor | None,
    ) -> None:
        """Prepare the values for TensorBoard: the picture, in the layout of torchvision's
        `make_grid`, and its statistics. `Drawing.result_of` posts them when the image is
        complete.

        Args:
            board: TensorBoard's events.
            site: the capture, or the part of a capture, that the picture shows.
            tensor: the tensor of the histogram, which is made here, since the model may
                change the tensor later; None for no histogram.
        """
        plain = as_make_grid(picture, self.options)
        counts = None
        if tensor is not None:
            counts = histogram(layout.to_floats(tensor))
        png = self.run.encoders.submit(plain.tiles.nbytes, partial(to_png, plain))
        self._other_tasks.append(png)
        channels = len(plain.drawn)
        # `values` is a generator, which waits for the PNG only when it is posted
        values = board.values(
            site, png.result, picture.stats, channels, counts, self.sample.name
        )
        self.posts.append(values)

    def abandon(self) -> None:
        """Give up the image: cancel its tasks, or wait for those that have begun, and
        remove its folder."""
        if self.closing is not None and not self.closing.cancel():
            self.closing.exception()
        self._discard()

    def _discard(self) -> None:
        """Cancel the tasks that write files, and remove the folder."""
        # a task that has begun is waited for: else it would write into a removed folder
        for task in (*self._other_tasks, *self._pictures):
            if not task.cancel():
                task.exception()  # waits
        self.folder.discard()

    # What follows is run by encoders

    def close(self, result: ImageResult) -> ImageResult:
        """Write input.png, wait for all other files, and write the manifest. The tasks of
        these files were submitted before this one, so each of them has a thread already:
        the wait cannot last forever.

        Args:
            result: the result of the image, without the rows of its pictures.

        Returns:
            The result with these rows.
        """
        try:
            with self.folder.writing(INPUT_FILE) as file:
                write_pixels(file, self._shown)
            for task in self._other_tasks:
                task.result()
            rows = []
            for picture in self._pictures:
                row = picture.result()
                if row.kind == "output":
                    key = (row.layer, row.call, row.key)
                    lines = self.hints.field_lines.get(key)
                    row = replace(row, receptive_field=lines)
                rows.append(row)
            result = replace(result, rows=tuple(rows), pictures=len(rows))
            self.folder.finish(self._manifest(result), self._stats)
        except BaseException:
            self._discard()
            raise
        return result

    def _manifest(self, result: ImageResult) -> dict[str, Any]:
        """The entries of manifest.json but for those that `ImageFolder.finish` adds."""
        outcome = result.outcome
        # the size of the decoded file, before any resizing
        width, height = self.image.images[0].size
        image: dict[str, Any] = {
            "path": self.sample.name,
            "sha256": self.image.sha256,
            "size": {"width": width, "height": height},
        }
        if len(self.sample.paths) > 1:
            image["files"] = [path.name for path in self.sample.paths]
        shapes = [list(arg.shape) for arg in self.image.args]
        shape = shapes[0] if len(shapes) == 1 else shapes
        manifest: dict[str, Any] = {
            "image": image,
            "input": {"shape": shape, "preprocessing": self.image.words},
            "fingerprint": self.run.fingerprint,
        }
        if self.image.preprocess.frames_first:
            manifest["input"]["frames"] = self.image.preprocess.frames
        if outcome.detections:
            manifest["input"]["window"] = list(self.image.placement)
        manifest |= _pass_fields(self.run.prepared.plan, outcome)
        manifest |= manifest_rows(result.rows, result.skipped)
        manifest["never_ran"] = list(result.never_ran)
        return manifest

    def _write_picture(
        self,
        picture: GridPicture,
        site: CaptureSite,
        shape: Sequence[int],
        tensor_file: str | None,
    ) -> Capture:
        """Write a picture, and with --figure also its figure.

        Args:
            site: the capture, or the part of a capture, that the picture shows.
            shape: the shape of the tensor that was drawn.
            tensor_file: the path of the npy file of the tensor; None without such a file.

        Returns:
            The picture's row in the manifest.
        """
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
        """Write the figure of a picture: the input, and the first maps with colour bars.

        Args:
            site: the capture, or the part of a capture, that the picture shows.
            row: the row of the picture in the manifest, for the caption.

        Returns:
            The path of the figure in the image's folder.
        """
        # matplotlib is slow to import, and few runs draw figures
        from featviz.drawing import page
        from featviz.drawing.sheet import Tile

        layer = site.layer
        title = f"{self.sample.name}   {layer.label} ({layer.type})   {site.stem}"
        cmap = picture.cmap or colormap.decide_cmap(
            self.options.cmap, site.kind, True, self.options.reduce
        )
        tiles = page.figure_tiles(picture, cmap)
        file = self._file(layer, f"{site.stem}.figure.png")
        with self.folder.writing(file) as opened:
            page.write_figure(
                opened, title, Tile("input", self._shown), tiles, cmap, caption(row)
            )
        return file


def _pass_fields(plan: PassPlan, outcome: Outcome) -> dict[str, Any]:
    """The entries of a manifest on the forward and backward pass: the prediction,
    detections, the target and interventions, each only if the pass had it."""
    content: dict[str, Any] = {}
    if outcome.prediction:
        content["prediction"] = [asdict(score) for score in outcome.prediction]
    if outcome.detections:
        content["detections"] = [asdict(box) for box in outcome.detections]
    if plan.backward:
        content["target"] = {
            "of": plan.target.text,
            "value": finite(outcome.target),
            "grad_rule": plan.options.grad_rule,
        }
    if plan.changes:
        content["interventions"] = _intervention_fields(plan)
    if outcome.intervened:
        content["effect"] = outcome.effect
    return content


def _intervention_fields(plan: PassPlan) -> list[dict[str, Any]]:
    """The rows `interventions` of a manifest, in the order in which they are made."""
    rows = []
    for option, text in plan.options.interventions:
        change = interventions.parse(option, text)
        fields: dict[str, Any] = {"kind": option, "what": text}
        fields["layers"] = {
            layer.name: layer.index
            for layer, changes in plan.changes.items()
            if change in changes
        }
        fields["zeroed"] = list(change.zeroed)
        rows.append(fields)
    return rows


DrawnJob: TypeAlias = ImageJob[ModelInput, ImageWriter]
"""An image of a run on its way through the model and to its files."""
