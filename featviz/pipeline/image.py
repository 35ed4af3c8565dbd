"""One image in a model: collects captures in the hooks, then the files they became."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from featviz import layout
from featviz.drawing import draw, dress, figure, png
from featviz.drawing.draw import Drawer
from featviz.drawing.tensorboard import Post, histogram
from featviz.drawing.tiles import Drawing
from featviz.gradients import norms
from featviz.gradients.options import PassPlan
from featviz.hooks.capture import Recorder
from featviz.images import DecodedImage
from featviz.layout.overrides import HintBook
from featviz.pipeline.encoders import Background
from featviz.records import Bytes, Capture, Floats, ImageResult, Outcome, Sample, Site, Skip, finite
from featviz.rundir.write import ImageFolder, manifest_rows

log = logging.getLogger(__name__)


class ImageRun:
    """One image in a model: collects captures in the hooks, then the files they became."""

    def __init__(
        self,
        sample: Sample,
        folder: ImageFolder,
        drawer: Drawer,
        background: Background,
        boarded: bool = False,
    ) -> None:
        self.sample, self.folder, self.background = sample, folder, background
        self.drawer, self.draw, self.boarded = drawer, drawer.options, boarded
        self.files: list[Future[None]] = []
        self.rows: list[Future[Capture]] = []
        self.posts: list[Post] = []
        """For TensorBoard, in the order in which the layers ran."""
        self.stats: dict[str, Floats] = {}
        self.hints: HintBook | None = None
        self._shown: Bytes = np.zeros((0, 0, 3), np.uint8)
        self._ground: tuple[Bytes, ...] = ()
        self._image: dict[str, Any] = {}
        self._skipped: tuple[Skip, ...] = ()
        self._never_ran: tuple[str, ...] = ()
        self._outcome = Outcome()

    def take(self, site: Site, tensor: Tensor) -> None:
        """The sink of the hooks: draw the tensor now, leave the rest to the background."""
        hints = self.hints.of(site.layer) if self.hints else None
        parts = self.drawer.draw(site, tensor, hints, self._ground)
        kept = f"{site.stem}.npy" if self.draw.tensors == "npy" else None
        if kept is not None:
            file = self.folder.file(site.layer, kept)
            self._later(_to_numpy(tensor), partial(_save_tensor, self.folder, file))
        for key, picture in parts.items():
            at = site.inside(key)
            work = partial(self._finish_picture, picture, at, tensor.shape, kept)
            self.rows.append(self.background.submit(picture.tiles.nbytes, work))
            self.stats[at.stats_key] = picture.stats
            if self.boarded:
                self._post(picture, at, None if key else tensor)

    def begin(self, shown: Tensor, pictures: Sequence[Tensor], hints: HintBook) -> None:
        """Draw what the model saw, and note what is known of the layers.

        Args:
            shown: [1, C, H, W] in 0..1.
            pictures: the same for the maps to lie over: one, or the frames of a clip.
        """
        self.hints, self._shown = hints, _pixels(shown)
        if self.draw.overlay is not None:
            self._ground = tuple(_in_colour(_pixels(picture)) for picture in pictures)
        self._later(self._shown, partial(_save_input, self.folder))

    def close(
        self, picture: DecodedImage, args: Sequence[Tensor], words: str, recorder: Recorder
    ) -> None:
        """Note the rest of the manifest; the model is done with this image."""
        width, height = picture.size
        self._image = {
            "image": {
                "path": self.sample.name,
                "sha256": picture.sha256,
                "size": {"width": width, "height": height},
            },
            "input": {"shape": _shape(args), "preprocessing": words},
        }
        if len(self.sample.paths) > 1:
            self._image["image"]["files"] = [path.name for path in self.sample.paths]
        self._skipped = tuple(recorder.skipped)
        self._never_ran = tuple(layer.name for layer in recorder.never_ran)

    def note(self, outcome: Outcome, plan: PassPlan, fingerprint: str) -> None:
        """Note what the model said, and what was done to it."""
        self._outcome = outcome
        self._image["fingerprint"] = fingerprint
        if outcome.prediction:
            self._image["prediction"] = [asdict(guess) for guess in outcome.prediction]
        if plan.options.gradients:
            self._image["target"] = {
                "of": plan.target.text,
                "value": finite(outcome.target),
                "grad_rule": plan.options.grad_rule,
            }
        if plan.changes:
            self._image["interventions"] = [
                {"kind": kind, "what": what} for kind, what in plan.options.interventions
            ]
        if outcome.intervened:
            self._image["effect"] = outcome.effect

    def settle(self) -> ImageResult:
        """Wait for the files, then write the manifest.

        Raises:
            StoreError: a file could not be written.
        """
        for future in self.files:
            future.result()
        rows = tuple(future.result() for future in self.rows)
        if line := norms.report(rows):
            log.debug("%s: %s", self.sample.name, line)
        manifest = {
            **self._image,
            **manifest_rows(rows, self._skipped),
            "never_ran": list(self._never_ran),
        }
        self.folder.finish(manifest, self.stats)
        name, folder = self.sample.name, self.folder.name
        return ImageResult(
            name,
            folder,
            rows,
            self._skipped,
            self._never_ran,
            outcome=self._outcome,
        )

    def abandon(self) -> None:
        """Wait for what is under way and remove it: a failed image leaves no files."""
        futures: list[Future[Any]] = [*self.files, *self.rows, *(p.picture for p in self.posts)]
        for future in futures:
            future.cancel() or future.exception()
        self.folder.discard()

    def _later(self, array: np.ndarray, task: Callable[[np.ndarray], None]) -> None:
        self.files.append(self.background.submit(array.nbytes, partial(task, array)))

    def _post(self, picture: Drawing, site: Site, tensor: Tensor | None) -> None:
        """For TensorBoard: the grid, with a histogram of the whole tensor."""
        board = dress.as_make_grid(picture, self.draw)
        counts = None if tensor is None else histogram(layout.to_floats(tensor))
        future = self.background.submit(picture.tiles.nbytes, partial(draw.to_png, board))
        size = (board.plan.height, board.plan.width)
        self.posts.append(Post(site, future, size, picture.stats, picture.values, counts))

    def _finish_picture(
        self,
        picture: Drawing,
        site: Site,
        shape: Sequence[int],
        kept: str | None,
    ) -> Capture:
        """In the background: the manifest's row, then the file."""
        _warn_of(picture, site, self.sample)
        file = self.folder.file(site.layer, f"{site.stem}.{self.draw.format}")
        row = draw.describe(picture, site, shape, file)
        if kept is not None:
            row = replace(row, tensor=self.folder.file(site.layer, kept))
        with self.folder.writing(file) as opened:
            draw.encode(picture, opened, self.draw.format, draw.caption(row))
        return self._add_figure(picture, site, row) if self.draw.figure else row

    def _add_figure(self, picture: Drawing, site: Site, row: Capture) -> Capture:
        """Write the figure beside the picture, and name it in the manifest's row."""
        title = f"{self.sample.name}   {site.layer.label} ({site.layer.type})   {site.stem}"
        sheet = dress.sheet(picture, self.drawer.of(site.kind)[0], title, self._shown)
        file = self.folder.file(site.layer, f"{site.stem}.figure.png")
        with self.folder.writing(file) as opened:
            figure.write_figure(opened, sheet, draw.caption(row))
        return replace(row, figure=file)


def _shape(args: Sequence[Tensor]) -> list[int] | list[list[int]]:
    """Of the input; a list of shapes where the model takes several images."""
    shapes = [list(arg.shape) for arg in args]
    return shapes[0] if len(shapes) == 1 else shapes


def _save_tensor(folder: ImageFolder, name: str, array: np.ndarray) -> None:
    with folder.writing(name) as file:
        np.save(file, array)


def _pixels(picture: Tensor) -> Bytes:
    """[1, C, H, W] in 0..1 to [H, W, C] in 0..255."""
    pixels: Bytes = (picture[0] * 255 + 0.5).to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return pixels


def _in_colour(pixels: Bytes) -> Bytes:
    return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels


def _save_input(folder: ImageFolder, pixels: Bytes) -> None:
    height, width, channels = pixels.shape
    rows = np.pad(pixels.reshape(height, width * channels), ((0, 0), (1, 0)))
    with folder.writing("input.png") as file:
        png.write_png(file, (height, width), [rows])


def _to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy that no later operation can change; what numpy lacks (bfloat16, float8) becomes
    float32, and so do quantised values."""
    try:
        return np.array(tensor.cpu().resolve_neg().numpy(), copy=True)
    except (TypeError, RuntimeError):
        return np.array(layout.to_floats(tensor).cpu().numpy(), copy=True)


def _warn_of(picture: Drawing, site: Site, sample: Sample) -> None:
    where = f"{site.layer.label} {site.stem} of {sample.name}"
    nonfinite = int(picture.stats[:, 5].sum())
    if nonfinite:
        log.warning("%s holds %d NaN or infinite values, shown in magenta", where, nonfinite)
    if picture.plan.pixels > png.MAX_PIXELS:
        log.warning(
            "%s makes a picture of %d megapixels, more than Pillow opens; --max-maps, --scale 1",
            where,
            picture.plan.pixels // 1_000_000,
        )
