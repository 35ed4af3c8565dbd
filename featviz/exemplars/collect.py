"""The images that excite each channel most, ranked while batches go through the model.

For each channel, only the numbers of its best K images are kept, so memory does not grow
with the number of images. `crops` reads these images again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from featviz.errors import LayoutError
from featviz.hooks.capture import Recorder, forward, hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.layout import Maps, to_maps
from featviz.layout.layouts import LAYOUTS
from featviz.layout.tracing.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.records import CaptureSite, Floats, Integers, Layer, Skip
from featviz.run.study import Batch

RankBy = Literal["max", "mean"]

_NO_IMAGE = 2**62
"""Stands for "no image" among the numbers of images: of equal values, it comes last."""
_MAX_BOOKS = 8
"""Input shapes whose hints are kept at most, besides that of the first image."""


@dataclass(frozen=True)
class ExemplarSource:
    """A tensor of a layer whose channels get exemplars."""

    site: CaptureSite
    layout: str
    """A name of LAYOUTS."""
    shape: tuple[int, ...]
    """The tensor's shape for the first image."""
    channels: int
    """How many channels the tensor has."""


class Strongest(NamedTuple):
    """The value that ranks an image in each of C channels."""

    values: Floats
    """[C]; NaN or -inf for a channel without a finite value."""
    positions: Integers
    """[C, 4]: row and column of the value in the map, then the numbers of rows and columns
    of the map. All are -1 if the mean of the map ranks images, if the tensor is not a map
    of the input, or if it has several slices."""
    is_zero: np.ndarray
    """bool [C]: whether the whole map is zero."""


class TopImages(NamedTuple):
    """The best K images of each of C channels so far, the best first; of equal values, the
    earlier image first."""

    values: Floats
    """[C, K]; -inf for a rank without an image."""
    images: Integers
    """[C, K]: numbers of images among the samples; _NO_IMAGE for a rank without an image."""
    positions: Integers
    """[C, K, 4]; see `Strongest.positions`."""
    is_zero: np.ndarray
    """bool [C]: whether the map was zero in all images so far, the best and all others."""

    @classmethod
    def empty(cls, channels: int, top: int) -> TopImages:
        """The ranking before the first image.

        Args:
            channels: number of channels, C.
            top: how many images are kept for each channel, K.
        """
        return cls(
            values=np.full((channels, top), -np.inf, np.float32),
            images=np.full((channels, top), _NO_IMAGE),
            positions=np.full((channels, top, 4), -1),
            is_zero=np.ones(channels, np.bool_),
        )

    def with_image(self, image: int, strongest: Strongest) -> TopImages:
        """The ranking after one more image. Channels in which the image's value is not
        finite do not rank it.

        Args:
            image: number of the image among the samples, higher than all before.
            strongest: the image's values in all C channels.
        """
        finite = np.isfinite(strongest.values)
        new_values = np.where(finite, strongest.values, np.float32(-np.inf))
        is_zero = self.is_zero & strongest.is_zero
        # after some hundred images, most change nothing
        if not (new_values >= self.values[:, -1]).any():
            return self._replace(is_zero=is_zero)
        new_images = np.where(finite, image, _NO_IMAGE)
        values = np.concatenate([self.values, new_values[:, None]], axis=1)
        images = np.concatenate([self.images, new_images[:, None]], axis=1)
        positions = np.concatenate(
            [self.positions, strongest.positions[:, None]], axis=1
        )
        # stable: of equal values, the earlier image stays first. The last of K + 1 is
        # dropped.
        order = np.argsort(-values, axis=1, kind="stable")[:, :-1]
        return TopImages(
            np.take_along_axis(values, order, 1),
            np.take_along_axis(images, order, 1),
            np.take_along_axis(positions, order[..., None], 1),
            is_zero,
        )


class _Candidate(NamedTuple):
    """An image's values at a tensor. It is ranked when the whole batch has gone through
    the model."""

    image: int
    """Number of the image among the samples."""
    site: CaptureSite
    strongest: Strongest


class TakenOfBatch(NamedTuple):
    """What the hooks took of a batch."""

    candidates: list[_Candidate]
    skipped: Sequence[Skip]


class ExemplarCollector:
    """Ranks the images that excite each channel most, with a ranking for each class.

    First the caller sets `recorder`, whose hooks call `keep_candidates`. Then, for each
    batch, `Study.show` calls `begin_batch`; runs the model, whose hooks pass tensors to
    `keep_candidates`; and passes the result of `taken_of_batch` to `add_batch`. An image
    that failed is not ranked."""

    is_large = False
    """Only six numbers for each channel are kept of an image."""

    def __init__(
        self,
        model: LoadedModel,
        layers: Sequence[Layer],
        blank: Sequence[Tensor],
        rank_by: RankBy = "max",
        top: int = 1,
        classes: Sequence[str | None] = (None,),
    ) -> None:
        """Run the model once, to learn which tensors have channels.

        Args:
            layers: the layers whose tensors rank images.
            blank: the model's arguments for the first image's shape, [1, C, H, W] each.
            rank_by: `max` ranks an image by the largest value of its map, `mean` by the
                mean.
            top: how many images are kept for each channel.
            classes: the class of each sample; a None for each without `--per-class`.
        """
        self.sources: dict[CaptureSite, ExemplarSource] = {}
        """The tensors whose channels rank images."""
        self.skipped: dict[str, str] = {}
        """The reasons why calls of layers are skipped, by label and call: `relu.call1`."""
        self.recorder: Recorder | None = None
        """The recorder whose hooks call `keep_candidates`; set before the first batch."""
        self._model = model
        self._first_book = HintBook(model.module, blank[0].shape)
        self._book = self._first_book
        self._books = {self._book.input_shape: self._book}
        self._rank_by = rank_by
        self._classes = classes
        self._batch = Batch((), [])
        """The batch that goes through the model. While it is empty, `keep_candidates` does
        nothing."""
        self._candidates: list[_Candidate] = []
        with (
            in_eval_mode(model.module),
            self._book.traced(model.module, layers),
            hooked(model.module, layers, self._add_sources) as recorder,
        ):
            forward(model.module, [arg.to(model.device) for arg in blank], recorder)
        self._note_skipped(recorder.skipped)
        self.never_ran = [layer.label for layer in recorder.never_ran]
        self.class_names = sorted(set(classes), key=str)
        """Each class once; [None] without `--per-class`."""
        self.tops: dict[tuple[CaptureSite, str | None], TopImages] = {}
        """The rankings, by tensor and class."""
        for source in self.sources.values():
            for class_name in self.class_names:
                self.tops[source.site, class_name] = TopImages.empty(
                    source.channels, top
                )

    def _add_sources(self, site: CaptureSite, tensor: Tensor) -> None:
        """Called by the hooks of the first pass: add a tensor, and parts of it such as a
        class token, to `sources`.

        Raises:
            LayoutError: the tensor has no channels. The recorder keeps this as the reason
                why the layer is skipped.
        """
        for key, maps in to_maps(tensor, self._book.of_tensor(site, tensor)).items():
            source = ExemplarSource(
                site=site.inside(key),
                layout=maps.layout,
                shape=tuple(tensor.shape),
                channels=len(maps.data),
            )
            self.sources[source.site] = source

    def _note_skipped(self, skipped: Sequence[Skip]) -> None:
        """Add reasons to `skipped`. The first reason of a call counts."""
        for skip in skipped:
            call = f".call{skip.call}" if skip.call else ""
            self.skipped.setdefault(skip.label + call, skip.reason)

    @property
    def fault(self) -> Exception | None:
        """An error inside a hook of featviz, as opposed to one inside the model; None if
        there was none."""
        return None if self.recorder is None else self.recorder.fault

    def begin_batch(self, batch: Batch) -> None:
        """Begin a batch, and forget the candidates of the batch before, which may have
        failed. For the first batch of an input shape, one more pass may be run, which
        follows the image to learn the layouts of tensors."""
        self._batch = Batch((), [])  # `keep_candidates` does nothing in that pass
        self._candidates = []
        self._book = self._book_of(batch)
        self._batch = batch
        if self.recorder is not None:
            self.recorder.calls.clear()
            self.recorder.skipped.clear()

    def _book_of(self, batch: Batch) -> HintBook:
        """The hints for inputs of the batch's shape. They are kept for the next batches."""
        module = self._model.module
        shape = (1, *batch.inputs[0].shape[1:])
        if shape in self._books:
            return self._books[shape]
        book = HintBook(module, shape)
        book.settle_as(self._first_book)
        if not book.is_traced:
            with book.traced(module, [site.layer for site in self.sources]):
                forward(
                    module, [arg[:1].to(self._model.device) for arg in batch.inputs]
                )
        # photos may all have different sizes: do not keep hints for all of them
        if len(self._books) > _MAX_BOOKS:
            self._books = {self._first_book.input_shape: self._first_book}
        self._books[shape] = book
        return book

    def taken_of_batch(self) -> TakenOfBatch:
        """The candidates of the batch, and the reasons why calls of layers were skipped."""
        skipped = [] if self.recorder is None else self.recorder.skipped
        return TakenOfBatch(self._candidates, skipped)

    def add_batch(self, taken: TakenOfBatch) -> None:
        """Rank the images of a batch that has gone through the model. Batches must come in
        the order of the images."""
        for candidate in taken.candidates:
            key = candidate.site, self._classes[candidate.image]
            self.tops[key] = self.tops[key].with_image(
                candidate.image, candidate.strongest
            )
        self._note_skipped(taken.skipped)

    def keep_candidates(self, site: CaptureSite, tensor: Tensor) -> None:
        """Called by the hooks: keep the values of each image of the batch at a tensor, as
        candidates.

        Args:
            site: where the tensor was captured.
            tensor: the tensor of the whole batch. Only six numbers for each channel and
                image are kept.

        Raises:
            LayoutError: the tensor cannot be divided among the images of the batch, or
                its channels are not those of the first image.
        """
        if not self._batch.images:  # this is the pass of `begin_batch`
            return
        tensors = self._image_tensors(site, tensor)
        for image, image_tensor in zip(self._batch.images, tensors, strict=True):
            hints = self._book.of_tensor(site, image_tensor)
            for key, maps in to_maps(image_tensor, hints).items():
                source = self.sources.get(site.inside(key))
                if source is None or len(maps.data) != source.channels:
                    shape = list(image_tensor.shape)
                    raise LayoutError(f"gives {shape} for some images only")
                strongest = strongest_values(maps, self._rank_by)
                self._candidates.append(_Candidate(image, source.site, strongest))

    def _image_tensors(self, site: CaptureSite, tensor: Tensor) -> Sequence[Tensor]:
        """Divide a tensor among the images of the batch. Its first axis must count images,
        or windows of images.

        Raises:
            LayoutError: there are several images, and the first axis counts something
                else, or the tensor is not one of `sources`.
        """
        images = len(self._batch.images)
        if images == 1:
            return (tensor,)
        source = self.sources.get(site)
        rows = tensor.shape[0]
        if source is None:
            divisible = False
        elif source.layout == "windows":
            divisible = rows % images == 0
        else:
            divisible = source.shape[0] == 1 and rows == images
        if not divisible:
            shape = list(tensor.shape)
            raise LayoutError(f"shape {shape} is no batch of {images}: --batch-size 1")
        return tensor.chunk(images)


def strongest_values(maps: Maps, rank_by: RankBy) -> Strongest:
    """The value that ranks an image in each channel, and its position. Only finite
    values count.

    Args:
        maps: the maps of one image, [C, S, H, W], on any device.
        rank_by: `max`; or `mean` of the whole map, which has no position.
    """
    flat = maps.data.flatten(1)
    positions = np.full((len(flat), 4), -1)
    is_zero = (~flat.any(1)).cpu().numpy()  # NaN counts as a value
    if rank_by == "mean":
        means = flat.mean(1)
        finite = flat.isfinite()
        # one NaN would make the mean NaN
        if not finite.all():
            means = torch.where(finite, flat, 0).sum(1) / finite.sum(1)
        return Strongest(means.cpu().numpy(), positions, is_zero)
    values, at = flat.max(1)
    # the maximum of a map with NaN is NaN
    if not values.isfinite().all():
        values, at = torch.where(flat.isfinite(), flat, -torch.inf).max(1)
    slices, height, width = maps.data.shape[1:]
    if LAYOUTS[maps.layout].aligned and slices == 1:
        index = at.cpu().numpy()
        positions[:, 0] = index // width
        positions[:, 1] = index % width
        positions[:, 2:] = (height, width)
    return Strongest(values.cpu().numpy(), positions, is_zero)
