"""The sink of the pass: each image's value and place in each channel, into the tops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from featviz.errors import LayoutError
from featviz.exemplars.top import Top
from featviz.hooks.capture import Recorder, hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.forward import forward
from featviz.layout import Maps, to_maps
from featviz.layout.layouts import LAYOUTS
from featviz.layout.overrides import HintBook
from featviz.models.load import LoadedModel
from featviz.pipeline.batches import Batch
from featviz.records import Floats, Integers, Layer, Site

By = Literal["max", "mean"]
"""What of a channel's map counts: its largest value, or its mean."""

_NO_PLACE = -1
_BOOKS = 8
"""Input shapes whose hints are kept."""


@dataclass(frozen=True)
class ExemplarSource:
    """A tensor of a layer whose channels are looked at."""

    site: Site
    layout: str
    """A name of `layouts.LAYOUTS`."""
    shape: tuple[int, ...]
    """For the first image."""
    channels: int
    rows: int
    """Sizes of its first axis that belong to one image."""


@dataclass(frozen=True)
class ExemplarPlan:
    """The tensors of a model's layers that are looked at."""

    targets: Mapping[Site, ExemplarSource]
    """In the order in which the layers give them."""
    skipped: Mapping[str, str]
    """Layers that give nothing with channels, and why."""
    never_ran: tuple[str, ...]
    book: HintBook
    """The hints for inputs of the first shape."""


class _Hints:
    """The hints for inputs of any shape."""

    def __init__(self, model: LoadedModel, plan: ExemplarPlan) -> None:
        self._model, self._layers = model, [site.layer for site in plan.targets]
        self._first = plan.book
        self._books: dict[tuple[int, ...], HintBook] = {}

    def learn(self, inputs: Sequence[Tensor]) -> HintBook:
        """The hints for inputs of this shape; where layouts depend on it, the first image of a
        batch goes through the model once more.

        Raises:
            ForwardError: the model cannot take it; the next image of this shape is tried anew.
        """
        shape = (1, *inputs[0].shape[1:])
        if shape == self._first.input_shape:
            return self._first
        if shape not in self._books:
            if len(self._books) == _BOOKS:
                self._books.pop(next(iter(self._books)))
            book = HintBook(self._model.module, shape)
            book.settle_as(self._first)
            if not book.is_traced:
                _follow(self._model, book, self._layers, [given[:1] for given in inputs])
            self._books[shape] = book
        return self._books[shape]


def _follow(
    model: LoadedModel, book: HintBook, layers: Sequence[Layer], args: Sequence[Tensor]
) -> None:
    with book.traced(model.module, layers):
        forward(model.module, [arg.to(model.device) for arg in args])


def plan_targets(
    model: LoadedModel, layers: Sequence[Layer], blank: Sequence[Tensor]
) -> ExemplarPlan:
    """Run the model once on `blank`, and note what the layers give.

    Raises:
        ForwardError: the model cannot take it.
    """
    targets, book = dict[Site, ExemplarSource](), HintBook(model.module, blank[0].shape)

    def sink(site: Site, tensor: Tensor) -> None:
        for inner, maps in _parts(site, tensor, book):
            shape = tuple(tensor.shape)
            targets[inner] = ExemplarSource(
                inner, maps.layout, shape, len(maps.data), tensor.shape[0]
            )

    with (
        in_eval_mode(model.module),
        book.traced(model.module, layers),
        hooked(model.module, layers, sink) as recorder,
    ):
        forward(model.module, [arg.to(model.device) for arg in blank], recorder)
    skipped = {_label(skip.layer or skip.type, skip.call): skip.reason for skip in recorder.skipped}
    never = tuple(layer.label for layer in recorder.never_ran)
    return ExemplarPlan(targets, skipped, never, book)


@dataclass
class _Found:
    """What one image gave to one tensor's channels."""

    number: int
    site: Site
    values: Floats
    places: Integers


class ExemplarCollector:
    """The tops of all tensors, and of each class apart; of an image that failed, nothing stays."""

    def __init__(
        self,
        model: LoadedModel,
        plan: ExemplarPlan,
        classes: Sequence[str | None],
        by: By,
        top: int,
    ) -> None:
        """Begin without images.

        Args:
            classes: that of each sample; None puts all into one top.
        """
        self.tops: dict[tuple[Site, str | None], Top] = {
            (site, name): Top.none(target.channels, top)
            for site, target in plan.targets.items()
            for name in sorted({*classes}, key=str)
        }
        self.skipped: dict[str, str] = {}
        self.recorder: Recorder | None = None
        self._plan, self._classes, self._by = plan, classes, by
        self._hints, self._book = _Hints(model, plan), plan.book
        self._batch: Batch | None = None
        self._found: list[_Found] = []

    @property
    def fault(self) -> Exception | None:
        """A bug of ours, to tell it from a fault of the model."""
        return None if self.recorder is None else self.recorder.fault

    @property
    def nbytes(self) -> int:
        """Size of what is held between two images."""
        return sum(top.nbytes for top in self.tops.values())

    def begin(self, batch: Batch) -> None:
        """The next tensors come from these images.

        Raises:
            ForwardError: the first of them is shown to the model, which cannot take it.
        """
        self._batch = None
        self._book = self._hints.learn(batch.inputs)
        self._batch, self._found = batch, []
        if self.recorder is not None:
            self.recorder.calls.clear()
            self.recorder.skipped.clear()

    def commit(self) -> None:
        """The model is through with them: keep what excites a channel most."""
        for found in self._found:
            key = (found.site, self._classes[found.number])
            self.tops[key] = self.tops[key].with_image(found.number, found.values, found.places)
        for skip in self.recorder.skipped if self.recorder is not None else ():
            self.skipped.setdefault(_label(skip.layer or skip.type, skip.call), skip.reason)
        self._found = []

    def take(self, site: Site, tensor: Tensor) -> None:
        """The sink of the hooks."""
        if self._batch is None:  # the hints are being learnt
            return
        numbers, book = self._batch.images, self._book
        _check_batch(self._plan.targets.get(site), tensor, len(numbers))
        parts = tensor.chunk(len(numbers)) if len(numbers) > 1 else (tensor,)
        for number, part in zip(numbers, parts, strict=True):
            for inner, maps in _parts(site, part, book):
                target = self._plan.targets.get(inner)
                if target is None or len(maps.data) != target.channels:
                    raise LayoutError(f"gives {list(part.shape)} for some images only")
                values, places = strongest(maps, self._by)
                self._found.append(_Found(number, inner, values, places))


def strongest(maps: Maps, by: By) -> tuple[Floats, Integers]:
    """Of each channel the value that counts and its place: float32 [C], and int64 [C, 4] as in
    `Top.places`.

    NaN and infinities are left out; -inf where nothing else is there. Of equal values the first in
    reading order counts.
    """
    flat = maps.data.flatten(1)
    places = np.full((len(flat), 4), _NO_PLACE)
    if by == "mean":
        return _means(flat).cpu().numpy(), places
    values, at = flat.max(1)
    if not values.isfinite().all():
        values, at = torch.where(flat.isfinite(), flat, -torch.inf).max(1)
    slices, height, width = maps.data.shape[1:]
    if LAYOUTS[maps.layout].aligned and slices == 1:
        index = at.cpu().numpy()
        places[:] = np.stack(
            [
                index // width,
                index % width,
                np.full_like(index, height),
                np.full_like(index, width),
            ],
            axis=1,
        )
    return values.cpu().numpy(), places


def _means(flat: Tensor) -> Tensor:
    """Means of the finite values of rows; -inf where there are none."""
    finite = flat.isfinite()
    if finite.all():
        return flat.mean(1)
    count = finite.sum(1)
    means = torch.where(finite, flat, 0).sum(1) / count
    return torch.where(count > 0, means, -torch.inf)


def _parts(site: Site, tensor: Tensor, book: HintBook) -> Iterator[tuple[Site, Maps]]:
    """The maps of one image's tensor, and the tokens in front of them, each under its own name."""
    for key, maps in to_maps(tensor, book.at(site, tensor)).items():
        yield site.inside(key), maps


def _check_batch(target: ExemplarSource | None, tensor: Tensor, images: int) -> None:
    """Whether the first axis of a tensor counts the images of a batch.

    Raises:
        LayoutError: it does not.
    """
    if images == 1:
        return
    alone = target is not None and target.rows == 1 and tensor.shape[0] == images
    windows = target is not None and target.layout == "windows" and tensor.shape[0] % images == 0
    if not (alone or windows):
        raise LayoutError(f"shape {list(tensor.shape)} is no batch of {images}: --batch-size 1")


def _label(layer: str, call: int) -> str:
    return layer + (f".call{call}" if call else "")
