"""A run that is planned once, and made again and again as its model is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from featviz.drawing.tensorboard import Board
from featviz.hooks.eval_mode import in_eval_mode
from featviz.layout.overrides import HintBook
from featviz.models.load import LoadedModel
from featviz.pipeline.dealing import with_next
from featviz.pipeline.encoders import Background
from featviz.pipeline.options import RunOptions
from featviz.pipeline.place import in_any_case
from featviz.pipeline.prepare import find_images, prepare
from featviz.pipeline.processes import ALONE
from featviz.pipeline.resume import RunDocument, run_record
from featviz.pipeline.session import Session
from featviz.records import ImageResult
from featviz.rundir.write import RunDirectory

_JOBS = 2
"""Encoder threads."""
_QUEUE_BYTES = 64 * 2**20
"""Tiles that may wait for an encoder."""


class SeriesDrawer:
    """Draws the same images by the same model, whose weights change."""

    def __init__(self, model: LoadedModel, images: Sequence[str], options: RunOptions) -> None:
        """Find the images, and choose the layers by a forward pass on zeros.

        Raises:
            FeatvizError: a bad option, the images do not fit the model, or no layer is chosen.
        """
        self.prepared = prepare(model, find_images(images, options), options)
        self._books: dict[tuple[int, ...], HintBook] = {}

    def draw(self, model: LoadedModel, folder: Path, board: Board | None) -> list[ImageResult]:
        """Draw all images into a folder, which is empty and becomes a run directory.

        Args:
            model: the same as before, with new weights, maybe on another device.
            board: what TensorBoard is to show of this step.

        Raises:
            StoreError: it cannot be written. What goes wrong with one image is in its result.
        """
        options = replace(self.prepared.options, out=folder)
        prepared = replace(self.prepared, model=model, options=options)
        document = RunDocument(run_record(prepared), prepared.samples)
        store, results = RunDirectory(folder), list[ImageResult]()
        noted = results.append, board, ALONE, self._books
        session = Session(prepared, store, document.fingerprint, *noted)
        with (
            in_eval_mode(model.module),
            Background(_JOBS, _QUEUE_BYTES) as background,
            session.ahead,
            in_any_case(session.settle),
        ):
            for sample, following in with_next(prepared.samples, session.readers):
                session.visit(sample, background, following)
        for result in results:
            document.add(result)
        document.write(store)
        return results
