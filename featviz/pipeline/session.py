"""One run under way: images visit the model one by one, while encoders finish the one before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor

from featviz.drawing.drawer import Drawer
from featviz.drawing.tensorboard import Board
from featviz.errors import FeatvizError, ForwardError, ImageError, UploadError, UsageError
from featviz.images.decode import DecodedImage
from featviz.layout.overrides import HintBook
from featviz.pipeline.dealing import Counter
from featviz.pipeline.encoders import Background, ReadAhead
from featviz.pipeline.image import ImageRun, ImageWriter, run_image
from featviz.pipeline.limits import check_written
from featviz.pipeline.prepare import Prepared, read_input, readers_for
from featviz.pipeline.processes import ALONE, World
from featviz.pipeline.resume import kept
from featviz.pipeline.shared_basis import read_bases
from featviz.records import ImageResult, Limits, Sample, Written
from featviz.rundir.write import ImageFolder, RunDirectory

log = logging.getLogger(__name__)

MOST_LOST = 3
"""Images in a row that a store did not take, after all tries, at which the run ends."""

Input: TypeAlias = tuple[DecodedImage, list[Tensor]]
"""A picture, and what the model's forward gets."""


class Session:
    """Visits an image while the encoders finish the one before; reports each when it is done."""

    def __init__(
        self,
        prepared: Prepared,
        store: RunDirectory,
        fingerprint: str,
        report: Callable[[ImageResult], None],
        board: Board | None = None,
        team: World = ALONE,
        books: dict[tuple[int, ...], HintBook] | None = None,
    ) -> None:
        """Begin with the bases that all images share, if they do.

        Args:
            fingerprint: of the model and the options, for the manifests.
            report: called with each image when its files are written, or when it has failed.
            team: the processes that the limits hold for together.
            books: hint books by shape of the input, which an earlier session of the same model has
                begun; they are added to.
        """
        self.prepared, self.store, self.fingerprint = prepared, store, fingerprint
        self.report, self.board = report, board
        self._drawer = Drawer(prepared.options.draw, read_bases(store, prepared.options))
        self._steps = {sample.name: step for step, sample in enumerate(prepared.samples)}
        self._books = {} if books is None else books
        """Hint books by shape of the input."""
        self._pending: ImageRun | None = None
        self.readers = readers_for(prepared.samples, prepared.options.inputs)
        self.ahead = ReadAhead(self._read, self.readers)
        """To be entered while images are visited."""
        self._written = Counter(team, "files"), Counter(team, "bytes")
        self._lost = 0
        """Images in a row that a store did not take."""

    def visit(
        self, sample: Sample, background: Background, following: Sequence[Sample] = ()
    ) -> None:
        """Show one image to the model; draw what its layers make of it.

        Args:
            following: what is visited next, of which `readers` images are read meanwhile.
        """
        try:
            image = self._show(sample, background, following)
        except (ImageError, ForwardError, UsageError) as error:
            self.settle()
            self._report_failed(sample, error)
        else:
            before, self._pending = self._pending, image
            self._finish(before)

    def _report_failed(self, sample: Sample, error: FeatvizError) -> None:
        folder = self.store.image(sample.name).name
        self.report(ImageResult(sample.name, folder, error=error.message, hint=error.hint))
        log.debug("%s failed", sample.name, exc_info=error)

    def keep(self, sample: Sample) -> bool:
        """Leave an image as it is if an earlier run has completed it, and posted it where there is
        a board; else clear what it left."""
        folder = self.store.image(sample.name)
        result = kept(folder, sample, self.fingerprint, self.prepared.options.verify)
        step = self._steps[sample.name]
        unposted = self.board is not None and self.board.lacks(step, sample.name)
        if result is None or unposted:
            folder.discard()
            return False
        self.settle()
        self._count(folder)
        self.report(result)
        return True

    def settle(self) -> None:
        """Wait for the files of the last image, and write its manifest."""
        last, self._pending = self._pending, None
        self._finish(last)

    def _read(self, sample: Sample) -> Input:
        return read_input(sample, self.prepared.model.preprocess, self.prepared.options.inputs)

    def _take(self, sample: Sample, following: Sequence[Sample]) -> Input:
        """What was read ahead of this sample, or it is read now; the next ones are begun."""
        try:
            return self.ahead.take(sample)
        finally:
            for other in following[: self.readers]:
                if not self.store.image(other.name).is_complete:
                    self.ahead.begin(other)

    def _show(
        self, sample: Sample, background: Background, following: Sequence[Sample]
    ) -> ImageRun:
        prepared, preprocess = self.prepared, self.prepared.model.preprocess
        picture, args = self._take(sample, following)
        shape = tuple(args[0].shape)
        if shape not in self._books:
            book = prepared.hint_book(args)
            if self._books:
                book.settle_as(next(iter(self._books.values())))
            self._books[shape] = book
        folder = self.store.new_image(sample.name)
        with _discarded_on_failure(folder.discard):
            writer = ImageWriter(
                sample,
                folder,
                self._drawer,
                background,
                self._books[shape],
                preprocess,
                args,
                self.board is not None,
                preprocess.window(picture.size),
            )
        with _discarded_on_failure(writer.abandon):
            return run_image(prepared, writer, picture, args, self.fingerprint)

    def _finish(self, image: ImageRun | None) -> None:
        if image is None:
            return
        try:
            with _discarded_on_failure(image.writer.abandon):
                result = image.finish()
                self._count(image.writer.folder)
        except UploadError as error:
            self._report_failed(image.writer.sample, error)
            self._lost += 1
            if self._lost == MOST_LOST:
                self._abandon_last()
                raise
            return
        except BaseException:
            # where one image could not be written, the next one has no better chance
            self._abandon_last()
            raise
        self._lost = 0
        self.report(result)
        if self.board is not None:
            self.board.post(image.writer.posts, self._steps[result.image])

    def _abandon_last(self) -> None:
        last, self._pending = self._pending, None
        if last is not None:
            last.writer.abandon()

    def _count(self, folder: ImageFolder) -> None:
        """Hold what the run has written against its limits, image by image: so the same run in one
        process stops at the same image, whatever is under way."""
        limits = self.prepared.options.limits
        if limits != Limits():
            files, size = self._written
            new = folder.size
            written = Written(files.add(new.files), size.add(new.bytes))
            check_written(limits, written, folder.name)


@contextmanager
def _discarded_on_failure(discard: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        discard()
        raise
