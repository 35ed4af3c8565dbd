"""One run under way: images visit the model one by one, while encoders finish the one before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from featviz import images
from featviz.drawing.drawer import Drawer
from featviz.drawing.tensorboard import Board
from featviz.errors import ForwardError, ImageError, UsageError
from featviz.gradients import forward_backward
from featviz.gradients.options import PassPlan
from featviz.layout.overrides import HintBook
from featviz.models.load import LoadedModel
from featviz.models.preprocess import InputOptions
from featviz.pipeline import resume
from featviz.pipeline.encoders import Background
from featviz.pipeline.image import ImageRun
from featviz.pipeline.limits import check_written
from featviz.records import ImageResult, Layer, Limits, Sample, Written
from featviz.rundir.read import read_stats
from featviz.rundir.write import ImageFolder, RunDirectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """What is to be done with each image."""

    model: LoadedModel
    layers: Sequence[Layer]
    plan: PassPlan
    drawer: Drawer
    inputs: InputOptions
    fingerprint: str
    """Of the model and the options, for the manifests."""
    limits: Limits
    board: Board | None = None
    """TensorBoard's, if asked for."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Position of each image among all, by name."""


class Session:
    """Visits an image while the encoders finish the one before; reports each when it is done."""

    def __init__(
        self, task: Task, store: RunDirectory, report: Callable[[ImageResult], None]
    ) -> None:
        self.task, self.store, self.report = task, store, report
        self._pending: ImageRun | None = None
        self._written = Written()
        self._books: dict[tuple[int, ...], HintBook] = {}

    def visit(self, sample: Sample, background: Background) -> None:
        """Show one image to the model; write what its layers make of it."""
        task, folder = self.task, self.store.image(sample.name)
        visit = ImageRun(sample, folder, task.drawer, background, task.board is not None)
        try:
            with _cleared_on_failure(visit):
                self._show(sample, visit)
        except (ImageError, ForwardError, UsageError) as error:
            self.settle()
            self.report(ImageResult(sample.name, folder.name, error=error.message, hint=error.hint))
            log.debug("%s failed", sample.name, exc_info=error)
        else:
            before, self._pending = self._pending, visit
            self._finish(before)

    def keep(self, sample: Sample) -> bool:
        """Leave an image as it is if an earlier run has completed it; else clear what it left."""
        folder = self.store.image(sample.name)
        result = resume.kept(folder, sample, self.task.fingerprint)
        if result is None:
            folder.discard()
            return False
        self.settle()
        self._count(folder)
        if self.task.board is not None:
            for key, stats in read_stats(folder.root, folder.name).items():
                self.task.board.remember(key, stats)
        self.report(result)
        return True

    def settle(self) -> None:
        """Wait for the files of the last image, and write its manifest."""
        last, self._pending = self._pending, None
        self._finish(last)

    def _finish(self, visit: ImageRun | None) -> None:
        if visit is not None:
            with _cleared_on_failure(visit, self._drop):
                result = visit.settle()
                self._count(visit.folder)
            self.report(result)
            if self.task.board is not None:
                for post in visit.posts:
                    self.task.board.post(post, self.task.steps[visit.sample.name])

    def _drop(self) -> None:
        """Where one image could not be written, the next one has no better chance."""
        last, self._pending = self._pending, None
        if last is not None:
            last.abandon()

    def _count(self, folder: ImageFolder) -> None:
        """Hold what the run has written against its limits, image by image: so the same run stops
        at the same image, whatever is under way."""
        if self.task.limits != Limits():
            self._written += folder.size
            check_written(self.task.limits, self._written, folder.name)

    def _show(self, sample: Sample, visit: ImageRun) -> None:
        task, options, preprocess = self.task, self.task.inputs, self.task.model.preprocess
        picture = images.decode(sample, options.exif, options.background, preprocess.frames)
        args = preprocess(picture.images)
        book = self._hints(tuple(args[0].shape))
        pictures = preprocess.pictures(args)
        ground = pictures if preprocess.frames else pictures[:1]
        visit.begin(preprocess.shown(args), ground, book)
        outcome, recorder = forward_backward.run(
            task.model, task.plan, args, book, task.layers, visit.take
        )
        visit.close(picture, args, preprocess.words, recorder)
        visit.note(outcome, task.plan, task.fingerprint)

    def _hints(self, shape: tuple[int, ...]) -> HintBook:
        """Read once for each shape of the input."""
        if shape not in self._books:
            told = self.task.drawer.options.tensor_layout
            self._books[shape] = HintBook(self.task.model.module, shape, told)
        return self._books[shape]


@contextmanager
def _cleared_on_failure(visit: ImageRun, then: Callable[[], None] = lambda: None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        visit.abandon()
        then()
        raise
