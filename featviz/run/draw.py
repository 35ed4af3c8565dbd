"""Drawing the images of a run: hooks draw what the model makes of one, while encoders write the
files of the one before."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from threading import Event
from typing import Any

import numpy as np
from torch import Tensor

from featviz import layout
from featviz.drawing import colormap
from featviz.drawing.drawer import draw, magnitude_and_phase
from featviz.drawing.picture import GridPicture, caption, describe, encode, to_png, write_png
from featviz.drawing.tensorboard import Board, as_make_grid, histogram
from featviz.drawing.values import to_pixels
from featviz.errors import LayoutError
from featviz.records import CaptureSite, Floats, Hints, ImageResult, Sample, finite
from featviz.run.encoders import Background, shared_cores
from featviz.run.prepare import ModelInput, Prepared, Show, read_input
from featviz.run.resume import kept
from featviz.run.visit import Visit, visit
from featviz.rundir import INPUT_FILE
from featviz.rundir.schema import Capture
from featviz.rundir.write import RunDirectory, manifest_rows

Drawn = Visit["ImageResult | ModelInput", "ImageResult | ImageWriter"]
"""An image of a run: one that was kept, or one that is drawn."""


def draw_all(
    run: Drawing, samples: Sequence[Sample], stop: Event
) -> Generator[ImageResult, None, None]:
    """Draw and write each image and yield its result, in order, until `stop` is set.

    Image n is yielded when image n + 1 has been through the model. Whatever ends the loop, encoders
    complete the image that they have, unless the one before could not be written."""
    drawn: Drawn | None = None
    with (
        run.prepared.watched() as run.show_model,
        shared_cores(run.prepared.options.jobs) as run.encoders,
        closing(visit(samples, run.read, run.show, stop=stop)) as visits,
    ):
        for following in chain(visits, [None]):
            if drawn is not None:
                name, result, error = drawn.sample.name, drawn.result, drawn.error
                try:
                    if isinstance(result, ImageWriter):
                        writer, result = result, run.encoders.result(result.closing)
                        if run.board is not None:
                            run.board.post(chain(*writer.posts), run.steps[name])
                except Exception:
                    if following is not None and isinstance(following.result, ImageWriter):
                        following.result.abandon()  # it has no better chance
                    raise
                if error is not None:
                    folder = run.store.image(name).name
                    result = ImageResult(name, folder, error=error.message, hint=error.hint)
                assert isinstance(result, ImageResult), "an image has a result or an error"
                yield result
            drawn = following


class Drawing:
    """What the images of a run share."""

    show_model: Show
    encoders: Background

    def __init__(
        self, prepared: Prepared, store: RunDirectory, fingerprint: str, board: Board | None = None
    ) -> None:
        """Begin with no image; the fingerprint, for the manifests, is that of model and options."""
        self.prepared, self.store = prepared, store
        self.fingerprint, self.board = fingerprint, board
        self.steps = {sample.name: step for step, sample in enumerate(prepared.samples)}

    def read(self, sample: Sample) -> ImageResult | ModelInput:
        """Decode and prepare an image, unless an earlier run has completed it: then its result."""
        options = self.prepared.options
        if options.resume:
            folder = self.store.image(sample.name)
            if result := kept(folder, sample, self.fingerprint):
                return result
            folder.discard()
        return read_input(sample, self.prepared.model.preprocess, options.inputs)

    def show(self, images: Sequence[Drawn]) -> ImageWriter | ImageResult:
        """Show an image to the model, unless it was kept, and leave its files to the encoders."""
        image, sample = images[0].image, images[0].sample
        if isinstance(image, ImageResult):
            return image
        assert image is not None, "images that cannot be read are not shown"
        writer = ImageWriter(self, sample, image)
        try:
            outcome, recorder = self.show_model(image.args, writer.hints, writer.take)
            result = ImageResult(
                sample.name,
                writer.folder.name,
                skipped=tuple(recorder.skipped),
                never_ran=tuple(layer.name for layer in recorder.never_ran),
                outcome=outcome,
            )
            writer.closing = self.encoders.submit(0, partial(writer.close, result))
        except BaseException:
            writer.abandon()
            raise
        return writer


class ImageWriter:
    """Draws what hooks take of one image; encoders write the files, the manifest last."""

    closing: Future[ImageResult]

    def __init__(self, run: Drawing, sample: Sample, image: ModelInput) -> None:
        """Make the folder."""
        self.run, self.sample, self.image = run, sample, image
        self.options = run.prepared.options.draw
        self.hints = run.prepared.hints(image.args)
        self.tasks: list[Future[Any]] = []
        """What encoders do for this image before they write its manifest."""
        self.posts: list[Iterator[dict[str, Any]]] = []
        self._rows: list[Future[Capture]] = []  # the same for the pictures, which are rows of it
        self._stats: dict[str, Floats] = {}
        self._sites: set[CaptureSite] = set()
        # before the model may change it in place: frames and several images side by side
        self._shown = to_pixels(image.preprocess.shown(image.args)[0])
        background = [] if self.options.overlay is None else image.background()
        self._drawn_over = background, image.window, [arg.shape for arg in image.args]
        self.folder = run.store.new_image(sample.name)
        self._file = partial(self.folder.file, image=sample.name if self.options.flat else None)
        """The path of a layer's file in the image's folder."""

    def take(
        self,
        site: CaptureSite,
        tensor: Tensor,
        gradient: Tensor | None = None,
        hints: Hints | None = None,
    ) -> None:
        """Draw a tensor now, and leave the rest to the encoders. The gradient at the tensor is for
        class activation maps."""
        hints = hints or self.hints.of_tensor(site, tensor)
        if tensor.is_complex() and gradient is None:
            for place, numbers, facts in magnitude_and_phase(site, tensor, hints, self.options):
                self.take(place, numbers, hints=facts)
            return
        parts = draw(self.options, site, tensor, hints, *self._drawn_over, gradient)
        sites = {site, *map(site.inside, parts)}
        if taken := sites & self._sites:  # {"a": {"b": x}, "a.b": y} has two of one name
            raise LayoutError(f"another part of this {taken.pop().kind} has the same name")
        self._sites |= sites
        submit, raw = self.run.encoders.submit, None
        if self.options.tensors == "npy":
            try:  # a copy that no later operation can change
                array = np.array(tensor.cpu().resolve_neg().numpy(), copy=True)
            except (TypeError, RuntimeError):  # numpy lacks bfloat16, float8 and quantised values
                array = np.array(layout.to_floats(tensor).cpu().numpy(), copy=True)
            raw = self._file(site.layer, f"{site.stem}.npy")
            self.tasks.append(submit(tensor.nbytes, partial(self._write_tensor, raw, array)))
        for key, picture in parts.items():
            at = site.inside(key)
            work = partial(self._write_picture, picture, at, tensor.shape, raw)
            self._rows.append(submit(picture.tiles.nbytes, work))
            self._stats[at.stats_key] = picture.stats
            if self.run.board is not None:
                plain = as_make_grid(picture, self.options)
                counts = None if key else histogram(layout.to_floats(tensor))
                drawn = submit(plain.tiles.nbytes, partial(to_png, plain))
                self.tasks.append(drawn)
                shown = picture.stats, len(plain.drawn)
                self.posts.append(
                    self.run.board.values(at, drawn.result, *shown, counts, self.sample.name)
                )

    def abandon(self) -> None:
        """Remove the folder once encoders have let go of it."""
        if closing := vars(self).get("closing"):
            closing.cancel() or closing.exception()
        self._discard()

    def _discard(self) -> None:
        for task in (*self.tasks, *self._rows):
            task.cancel() or task.exception()
        self.folder.discard()

    # What follows is run by encoders

    def close(self, result: ImageResult) -> ImageResult:
        """Write the input, and the manifest once all files are there, which were begun before."""
        height, width, channels = self._shown.shape
        plan, outcome = self.run.prepared.plan, result.outcome
        try:
            with self.folder.writing(INPUT_FILE) as file:
                write_png(file, (height, width), [self._shown.reshape(height, width * channels)])
            for task in self.tasks:
                task.result()
            result = replace(result, rows=tuple(row.result() for row in self._rows))
            size = dict(zip(("width", "height"), self.image.images[0].size, strict=True))
            image = {"path": self.sample.name, "sha256": self.image.sha256, "size": size}
            if len(self.sample.paths) > 1:
                image["files"] = [path.name for path in self.sample.paths]
            shapes = [list(arg.shape) for arg in self.image.args]
            shape = shapes[0] if len(shapes) == 1 else shapes
            said: dict[str, Any] = {}
            if outcome.prediction:
                said["prediction"] = [asdict(guess) for guess in outcome.prediction]
            if plan.backward:
                value, rule = finite(outcome.target), plan.options.grad_rule
                said["target"] = {"of": plan.target.text, "value": value, "grad_rule": rule}
            if plan.changes:
                changes = plan.options.interventions
                said["interventions"] = [{"kind": kind, "what": what} for kind, what in changes]
            if outcome.intervened:
                said["effect"] = outcome.effect
            manifest = {
                "image": image,
                "input": {"shape": shape, "preprocessing": self.image.words},
                "fingerprint": self.run.fingerprint,
                **said,
                **manifest_rows(result.rows, result.skipped),
                "never_ran": list(result.never_ran),
            }
            self.folder.finish(manifest, self._stats)
        except BaseException:
            self._discard()
            raise
        return result

    def _write_tensor(self, name: str, array: np.ndarray) -> None:
        with self.folder.writing(name) as file:
            np.save(file, array)

    def _write_picture(
        self, picture: GridPicture, site: CaptureSite, shape: Sequence[int], raw: str | None
    ) -> Capture:
        """Write a picture, and its figure if there is to be one; gives the manifest's row."""
        file = self._file(site.layer, f"{site.stem}.{self.options.format}")
        row = describe(picture, site, shape, file)
        if raw is not None:
            row = replace(row, tensor=raw)
        name = self.sample.name
        with self.folder.writing(file) as opened:
            encode(picture, opened, self.options.format, caption(row))
        if not self.options.figure:
            return row
        from featviz.drawing import page

        title = f"{name}   {site.layer.label} ({site.layer.type})   {site.stem}"
        cmap = colormap.resolved(self.options.cmap, site.kind, True, self.options.reduce)
        cmap = picture.cmap or cmap
        panels = page.figure_panels(picture, cmap)
        file = self._file(site.layer, f"{site.stem}.figure.png")
        with self.folder.writing(file) as opened:
            page.write_figure(opened, title, self._shown, panels, cmap, caption(row))
        return replace(row, figure=file)
