"""Drawing the images of a run: hooks draw what the model makes of one, while encoders
write the files of the one before.

    draw_images             in this process (draw_all), or in worker processes
      visit                 reads each image ahead
        Drawing.show        runs the model, whose hooks call ...
          ImageWriter.draw  ... which draws a tensor, and leaves its file to an encoder
      Drawing.result_of     waits for the files; the manifest is the last
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
    """Draw and write each image and yield its result, in order, until `stop` is set: in
    this process, or side by side in worker processes, of which each draws and writes
    whole images.

    The command and the machine alone decide which: so the same command gives the same
    bytes."""
    count = _process_count(run, samples)
    if count == 1:
        return draw_all(run, samples, stop)
    return _draw_side_by_side(run, samples, stop, count)


def _draw_side_by_side(
    run: Drawing, samples: Sequence[Sample], stop: Event, count: int
) -> Generator[ImageResult, None, None]:
    """Draw the first image here, and the others in worker processes.

    Args:
        samples, stop: as for `draw_images`.
        count: of workers, as far as there is memory for them.
    """

    def work(numbers: Iterator[int]) -> Iterator[ImageResult]:
        """Draw the samples of these numbers, in a forked child: what it changes of `run`
        the parent does not see."""
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
    """How many processes draw the images: one where there is little to gain, or
    something that cannot be divided."""
    options = run.prepared.options
    # TensorBoard's events have one writer
    if len(samples) < 2 or run.board is not None or options.mirror is not None:
        return 1
    # each shard is one of several processes, which are to use the cores together
    if options.shard is not None and options.jobs is None:
        return 1
    # Counted for the whole run: what --resume draws later must not depend on how much is
    # left.
    # The bytes are the same with any number: each worker has one torch thread.
    prepared = run.prepared
    return workers.worker_count(
        prepared.model, prepared.samples, options.jobs, prepared.plan.backward
    )


def draw_all(
    run: Drawing, samples: Sequence[Sample], stop: Event
) -> Generator[ImageResult, None, None]:
    """Draw and write each image here, and yield its result, in order, until `stop` is
    set.

    Image n is yielded when image n + 1 has been through the model. Whatever ends the
    loop, encoders complete the image that they have, unless the one before could not be
    written."""
    kept = run.kept if run.prepared.options.resume else None
    drawn = None
    with (
        run.prepared.watched() as run.show_model,
        encoder_threads() as run.encoders,
        closing(visit(samples, run.read, run.show, kept=kept, stop=stop)) as jobs,
    ):
        # None: the last image has no other behind it, and is yielded all the same
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
            run_directory: where images are written; a hidden one where it is to
                replace an earlier run.
            fingerprint: of the model and the options, for the manifests.
            board: TensorBoard's events, each image a step of its own; None writes none.
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
        """What an earlier run made of an image. Where that is not whole, or was made of
        another file or with other settings, it is removed, and the result is None.

        Raises:
            StoreError: what is to be removed also holds files of others.
        """
        folder = self.run_directory.image(sample.name)
        with suppress(StoreError, ImageError):
            manifest = folder.manifest()
            has_same_settings = manifest.fingerprint == self.fingerprint
            # a checksum reads the whole file
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
        """Show an image to the model, and leave its files to the encoders.

        Args:
            jobs: the image alone; images of a run go one by one.

        Returns:
            What writes its files, with the task of the last one.

        Raises:
            FeatvizError: the model fails, or a file cannot be written; the image's
                folder has been removed.
        """
        sample = jobs[0].sample
        image = jobs[0].input
        assert image is not None, "images that cannot be read are not shown"
        writer = ImageWriter(self, sample, image)
        try:
            outcome, recorder = self.show_model(image.args, writer.hints, writer.draw)
            # The boxes are all that a run keeps of a detection or a segmentation: the
            # masks of regions would go from worker processes to this one.
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
        # also of Ctrl-C: a hidden folder would stay behind
        except BaseException:
            writer.abandon()
            raise
        return writer

    def result_of(
        self, job: DrawnJob, following: DrawnJob | None = None
    ) -> ImageResult:
        """What became of an image, once encoders have written its files.

        Args:
            following: the image that has been through the model meanwhile. It is given
                up where this one could not be written: it would meet the same full
                disk, or the same bug.

        Raises:
            Exception: whatever an encoder raised while it wrote the files.
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
        """The result of an image that has no pictures."""
        return ImageResult(
            name=sample.name,
            folder=self.run_directory.image(sample.name).name,
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
        """Make the folder.

        Args:
            sample: the image.
            image: what the model gets of it, before the model has run.

        Raises:
            UsageError: maps are to lie over an input that is not an image.
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
        """For TensorBoard, when the image is complete."""
        # What encoders do for this image before they write its manifest. A picture's
        # task gives its row.
        self._pictures: list[Future[Capture]] = []
        self._other_tasks: list[Future[Any]] = []
        self._stats: dict[str, Floats] = {}
        self._sites: set[CaptureSite] = set()
        # Taken now, since the model may change its input in place. Frames, and several
        # images, stand side by side.
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
        """Draw a tensor now, and leave its files to the encoders. The hooks call it.

        Args:
            site: which capture it is.
            tensor: of any shape and type; complex numbers become two pictures, of their
                magnitude and their phase.
            gradient: at the tensor, for class activation maps.
            hints: on its layout; None looks them up.

        Raises:
            LayoutError: it cannot be drawn, or its file would have another one's name.
        """
        hints = hints or self.hints.of_tensor(site, tensor)
        if tensor.is_complex() and gradient is None:
            for real in magnitude_and_phase(site, tensor, hints, self.options):
                self.draw(real.site, real.tensor, hints=real.hints)
            return
        # what is drawn is bytes by now: the tensor may change when this returns
        pictures = draw(  # the tensor's own under the key "", those of its parts
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
        if not sites.isdisjoint(self._sites):  # of {"a": {"b": x}, "a.b": y}
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
                # a histogram is of the tensor that a picture shows as a whole
                whole_tensor = None if key else tensor
                self._prepare_post(self.run.board, picture_site, picture, whole_tensor)

    def _keep(self, site: CaptureSite, tensor: Tensor) -> str:
        """Let an encoder write a copy of a tensor, which no later operation can change.

        Returns:
            The file's path in the image folder.
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
        """Prepare what TensorBoard gets: the picture as torchvision's `make_grid` would
        lay it out, and its values. `Drawing.result_of` posts it, once the image is
        complete.

        Args:
            site: which capture, or part of one, the picture is of.
            tensor: of which there is to be a histogram, made now, since the model may
                change it; None for no histogram.
        """
        plain = as_make_grid(picture, self.options)
        counts = None
        if tensor is not None:
            counts = histogram(layout.to_floats(tensor))
        png = self.run.encoders.submit(plain.tiles.nbytes, partial(to_png, plain))
        self._other_tasks.append(png)
        channels = len(plain.drawn)
        # a generator: it asks for the picture when it is posted
        values = board.values(
            site, png.result, picture.stats, channels, counts, self.sample.name
        )
        self.posts.append(values)

    def abandon(self) -> None:
        """Remove the folder once encoders have let go of it."""
        if self.closing is not None and not self.closing.cancel():
            self.closing.exception()
        self._discard()

    def _discard(self) -> None:
        """Remove the folder when no encoder writes into it any more."""
        # a task that has begun would write into a folder that is gone
        for task in (*self._other_tasks, *self._pictures):
            if not task.cancel():
                task.exception()  # waits
        self.folder.discard()

    # What follows is run by encoders

    def close(self, result: ImageResult) -> ImageResult:
        """Write the input, and the manifest once all files are there. Their tasks were
        submitted before this one, so that no thread waits for a task that has none.

        Args:
            result: of the pass; it is returned with the rows of the pictures.
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
        """The content of manifest.json, but for what the folder knows itself: its
        files."""
        outcome = result.outcome
        # of the file as it was decoded, before any resizing
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
        """Write a picture, and its figure if there is to be one.

        Args:
            site: which capture, or part of one, the picture is of.
            shape: of the tensor that was drawn.
            tensor_file: where its values are kept; None where they are not.

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
        """Write the figure of a picture: its first maps with colour bars, beside the input.

        Args:
            site: which capture, or part of one, the picture is of.
            row: of the picture in the manifest, for the caption.

        Returns:
            The file's path in the image folder.
        """
        # matplotlib is slow to import, and few runs draw figures
        from featviz.drawing import page
        from featviz.drawing.sheet import Tile

        layer = site.layer
        title = f"{self.sample.name}   {layer.label} ({layer.type})   {site.stem}"
        cmap = picture.cmap or colormap.resolved(
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
    """What the manifest says of an image's pass; each key only where the pass has it."""
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
    """What the manifest says of the interventions, in the order in which they are made."""
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
