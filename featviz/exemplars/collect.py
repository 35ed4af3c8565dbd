"""The images that excite each channel most, ranked while batches go through the model.

For each channel only the numbers of the best K images are kept, so memory goes with the
channels and not with the images; `crops` reads those images again."""

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
"""The number of an image where there is none: of equal values it comes last."""
_MAX_BOOKS = 8
"""Input shapes whose hints are kept, besides that of the first image."""


@dataclass(frozen=True)
class ExemplarSource:
    """A tensor of a layer whose channels get exemplars."""

    site: CaptureSite
    layout: str
    """A name of LAYOUTS."""
    shape: tuple[int, ...]
    """The tensor's shape for the first image."""
    channels: int
    """How many channels its maps have."""


class Strongest(NamedTuple):
    """The value with which an image is ranked in each of C channels."""

    values: Floats
    """[C]; NaN or -inf where the channel has no finite value."""
    positions: Integers
    """[C, 4]: row and column of the value in the map, rows and columns of the map; -1
    where the whole map counts, where the tensor is not a map of the input, and where it
    has several slices."""
    is_zero: np.ndarray
    """bool [C]: whether the whole map is zero."""


class TopImages(NamedTuple):
    """The best K images of C channels so far, the best first; of equal values the
    earlier image first."""

    values: Floats
    """[C, K]; -inf where there is no image."""
    images: Integers
    """[C, K]: numbers among the samples; _NO_IMAGE where there is none."""
    positions: Integers
    """[C, K, 4], as in `Strongest`."""
    is_zero: np.ndarray
    """bool [C]: whether the map was zero in every image, also in those not among the best."""

    @classmethod
    def empty(cls, channels: int, top: int) -> TopImages:
        """The ranking before the first image.

        Args:
            top: how many images are kept for each channel.
        """
        return cls(
            values=np.full((channels, top), -np.inf, np.float32),
            images=np.full((channels, top), _NO_IMAGE),
            positions=np.full((channels, top, 4), -1),
            is_zero=np.ones(channels, np.bool_),
        )

    def with_image(self, image: int, strongest: Strongest) -> TopImages:
        """The ranking with one image more; not in channels whose value of it is not
        finite.

        Args:
            image: its number among the samples, above those of all before.
            strongest: its values in all C channels.
        """
        finite = np.isfinite(strongest.values)
        new_values = np.where(finite, strongest.values, np.float32(-np.inf))
        is_zero = self.is_zero & strongest.is_zero
        # the common case after some hundred images: nothing to sort
        if not (new_values >= self.values[:, -1]).any():
            return self._replace(is_zero=is_zero)
        new_images = np.where(finite, image, _NO_IMAGE)
        values = np.concatenate([self.values, new_values[:, None]], axis=1)
        images = np.concatenate([self.images, new_images[:, None]], axis=1)
        positions = np.concatenate(
            [self.positions, strongest.positions[:, None]], axis=1
        )
        # stable, so that of equal values the earlier image stays first; K + 1 become K
        order = np.argsort(-values, axis=1, kind="stable")[:, :-1]
        return TopImages(
            np.take_along_axis(values, order, 1),
            np.take_along_axis(images, order, 1),
            np.take_along_axis(positions, order[..., None], 1),
            is_zero,
        )


class _Candidate(NamedTuple):
    """An image's values at a tensor, until the model is through with its batch."""

    image: int
    """Its number among the samples."""
    site: CaptureSite
    strongest: Strongest


class TakenOfBatch(NamedTuple):
    """What the hooks took of a batch."""

    candidates: list[_Candidate]
    skipped: Sequence[Skip]


class ExemplarCollector:
    """Ranks the images that excite each channel most, for each class apart.

    First `recorder` is set, the one whose hooks call `keep_candidates`. Then, for each
    batch, `Study.show` calls `begin_batch`, runs the model, whose hooks hand tensors to
    `keep_candidates`, and calls `taken_of_batch`, and `add_batch` with what that gave. Of
    an image that failed, nothing stays."""

    is_large = False
    """What is taken of an image is six numbers for each channel."""

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
            layers: those whose tensors are ranked.
            blank: the model's arguments for the first image's shape, [1, C, H, W] each.
            rank_by: the largest value of an image's map, or its mean.
            top: how many images are kept for each channel.
            classes: the class of each sample; None for all where classes are not told
                apart.
        """
        self.sources: dict[CaptureSite, ExemplarSource] = {}
        """The tensors that are ranked."""
        self.skipped: dict[str, str] = {}
        """Why calls of layers are not ranked, by the layer's label and the call."""
        self.recorder: Recorder | None = None
        """The recorder whose hooks call `keep_candidates`; set before the first batch."""
        self._model = model
        self._first_book = HintBook(model.module, blank[0].shape)
        self._book = self._first_book
        self._books = {self._book.input_shape: self._book}
        self._rank_by = rank_by
        self._classes = classes
        self._batch = Batch((), [])
        """The batch that goes through the model; empty where `keep_candidates` takes nothing."""
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
        """Each class once; None alone where classes are not told apart."""
        self.tops: dict[tuple[CaptureSite, str | None], TopImages] = {}
        """The rankings, by tensor and class."""
        for source in self.sources.values():
            for class_name in self.class_names:
                self.tops[source.site, class_name] = TopImages.empty(
                    source.channels, top
                )

    def _add_sources(self, site: CaptureSite, tensor: Tensor) -> None:
        """The sink of the first pass: add a tensor, and parts of it such as a class token,
        to `sources`.

        Raises:
            LayoutError: it has no channels, which the recorder notes as the reason why
                its layer is skipped.
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
        """Add reasons to `skipped`, where a call has none yet."""
        for skip in skipped:
            call = f".call{skip.call}" if skip.call else ""
            self.skipped.setdefault(skip.label + call, skip.reason)

    @property
    def fault(self) -> Exception | None:
        """A bug of featviz inside a hook, to tell it from a fault of the model."""
        return None if self.recorder is None else self.recorder.fault

    def begin_batch(self, batch: Batch) -> None:
        """Start a batch, and forget the candidates of the one before, which may have
        failed. For the first batch of each input shape, an image may go through the
        model once more, to follow where its values lie."""
        self._batch = Batch((), [])  # `keep_candidates` takes nothing in that pass
        self._candidates = []
        self._book = self._book_of(batch)
        self._batch = batch
        if self.recorder is not None:
            self.recorder.calls.clear()
            self.recorder.skipped.clear()

    def _book_of(self, batch: Batch) -> HintBook:
        """The hints for inputs of the batch's shape, made anew where none are kept."""
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
        # in a folder of photos each may have a size of its own, and a book for it
        if len(self._books) > _MAX_BOOKS:
            self._books = {self._first_book.input_shape: self._first_book}
        self._books[shape] = book
        return book

    def taken_of_batch(self) -> TakenOfBatch:
        """What the hooks took of the batch."""
        skipped = [] if self.recorder is None else self.recorder.skipped
        return TakenOfBatch(self._candidates, skipped)

    def add_batch(self, taken: TakenOfBatch) -> None:
        """Rank the images of a batch, now that the model is through with them. Batches
        come in the order of the images."""
        for candidate in taken.candidates:
            key = candidate.site, self._classes[candidate.image]
            self.tops[key] = self.tops[key].with_image(
                candidate.image, candidate.strongest
            )
        self._note_skipped(taken.skipped)

    def keep_candidates(self, site: CaptureSite, tensor: Tensor) -> None:
        """The sink of the hooks: keep the values of each image of the batch at a tensor,
        as candidates.

        Args:
            tensor: of the whole batch; only six numbers of each channel and image
                outlive the hook.

        Raises:
            LayoutError: the tensor cannot be divided among the images of the batch, or
                its channels are not those of the first image.
        """
        if not self._batch.images:  # hints are being learnt
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
        """The tensor of each image. The first axis must count images, or windows of
        images.

        Raises:
            LayoutError: there are several images, and it counts something else, or what
                it counts is unknown.
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
        maps: those of one image, [C, S, H, W], on any device.
        rank_by: `max`, or `mean` of the whole map, which has no position.
    """
    flat = maps.data.flatten(1)
    positions = np.full((len(flat), 4), -1)
    is_zero = (~flat.any(1)).cpu().numpy()  # NaN counts as a value
    if rank_by == "mean":
        means = flat.mean(1)
        finite = flat.isfinite()
        # one NaN in a map would hide what all its other values say
        if not finite.all():
            means = torch.where(finite, flat, 0).sum(1) / finite.sum(1)
        return Strongest(means.cpu().numpy(), positions, is_zero)
    values, at = flat.max(1)
    # NaN is the maximum of what holds one
    if not values.isfinite().all():
        values, at = torch.where(flat.isfinite(), flat, -torch.inf).max(1)
    slices, height, width = maps.data.shape[1:]
    if LAYOUTS[maps.layout].aligned and slices == 1:
        index = at.cpu().numpy()
        positions[:, 0] = index // width
        positions[:, 1] = index % width
        positions[:, 2:] = (height, width)
    return Strongest(values.cpu().numpy(), positions, is_zero)
