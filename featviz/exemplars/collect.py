"""Of each channel the images that excite it most, with the value and the place of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from featviz.errors import LayoutError
from featviz.hooks.capture import Recorder, hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.forward import forward
from featviz.layout import Maps, to_maps
from featviz.layout.hints import HintBook
from featviz.layout.layouts import LAYOUTS
from featviz.models.load import LoadedModel
from featviz.records import Floats, Integers, Layer, Site
from featviz.run.visit import Batch

_NONE = 2**62
"""Stands for the number of an image where there is none; comes after all."""


@dataclass(frozen=True)
class Top:
    """The best K images of C channels, best first; of equal values the lower number is better."""

    values: Floats
    """float32 [C, K]; -inf where there is no image."""
    images: Integers
    """Numbers among the samples, [C, K]."""
    places: Integers
    """Row, column, and how many rows and columns the map has, [C, K, 4]; -1 where the layer gives
    no map of the input, or the whole map is meant."""

    @classmethod
    def none(cls, channels: int, count: int) -> Top:
        """Before the first image."""
        return cls(
            np.full((channels, count), -np.inf, np.float32),
            np.full((channels, count), _NONE),
            np.full((channels, count, 4), -1),
        )

    @property
    def is_image(self) -> np.ndarray:
        """Where there is an image, [C, K]."""
        return np.isfinite(self.values)

    def with_image(self, number: int, values: Floats, places: Integers) -> Top:
        """One more image.

        Args:
            values: [C]; what is not finite excites nothing.
            places: [C, 4].
        """
        values = np.where(np.isfinite(values), values, np.float32(-np.inf))
        if not (values >= self.values[:, -1]).any():
            return self
        numbers = np.where(np.isfinite(values), number, _NONE)
        values = np.concatenate([self.values, values[:, None]], 1)
        images = np.concatenate([self.images, numbers[:, None]], 1)
        places = np.concatenate([self.places, places[:, None]], 1)
        order = np.lexsort((images, -values))[:, :-1]
        return Top(
            np.take_along_axis(values, order, 1),
            np.take_along_axis(images, order, 1),
            np.take_along_axis(places, order[..., None], 1),
        )


By = Literal["max", "mean"]
_BOOKS = 8


@dataclass(frozen=True)
class ExemplarSource:
    """A tensor of a layer whose channels are looked at."""

    site: Site
    layout: str
    shape: tuple[int, ...]
    """For the first image."""
    channels: int


@dataclass(frozen=True)
class ExemplarPlan:
    """The tensors of a model's layers that are looked at."""

    targets: Mapping[Site, ExemplarSource]
    skipped: Mapping[str, str]
    """Layers that give nothing with channels, and why."""
    never_ran: tuple[str, ...]
    book: HintBook


def plan_targets(
    model: LoadedModel, layers: Sequence[Layer], blank: Sequence[Tensor]
) -> ExemplarPlan:
    """Run the model once on `blank`, and list the outputs of the layers."""
    targets, book = dict[Site, ExemplarSource](), HintBook(model.module, blank[0].shape)

    def sink(site: Site, tensor: Tensor) -> None:
        for key, maps in to_maps(tensor, book.at(site, tensor)).items():
            shape, inner = tuple(tensor.shape), site.inside(key)
            targets[inner] = ExemplarSource(inner, maps.layout, shape, len(maps.data))

    with (
        in_eval_mode(model.module),
        book.traced(model.module, layers),
        hooked(model.module, layers, sink) as recorder,
    ):
        forward(model.module, [arg.to(model.device) for arg in blank], recorder)
    skipped = {_label(skip.layer or skip.type, skip.call): skip.reason for skip in recorder.skipped}
    never = tuple(layer.label for layer in recorder.never_ran)
    return ExemplarPlan(targets, skipped, never, book)


class ExemplarCollector:
    """The best images of all tensors, and of each class apart; of an image that failed, nothing
    stays."""

    def __init__(
        self,
        model: LoadedModel,
        plan: ExemplarPlan,
        classes: Sequence[str | None],
        by: By,
        top: int,
    ) -> None:
        """Begin without images; `classes` has that of each sample, or None."""
        self.tops: dict[tuple[Site, str | None], Top] = {
            (site, name): Top.none(target.channels, top)
            for site, target in plan.targets.items()
            for name in sorted({*classes}, key=str)
        }
        self.skipped: dict[str, str] = {}
        self.recorder: Recorder | None = None
        self._plan, self._classes, self._by = plan, classes, by
        self._model, self._book = model, plan.book
        self._books: dict[tuple[int, ...], HintBook] = {}
        self._batch: Batch | None = None
        self._found: list[tuple[int, Site, Floats, Integers]] = []

    @property
    def fault(self) -> Exception | None:
        """A bug of ours, to tell it from a fault of the model."""
        return None if self.recorder is None else self.recorder.fault

    def begin(self, batch: Batch) -> None:
        """Start a batch; where its shape is new, its first image may go through the model."""
        self._batch = None
        self._book = self._learn(batch.inputs)
        self._batch, self._found = batch, []
        if self.recorder is not None:
            self.recorder.calls.clear()
            self.recorder.skipped.clear()

    def commit(self) -> None:
        """Rank the batch, which the model has taken."""
        for number, site, values, places in self._found:
            key = site, self._classes[number]
            self.tops[key] = self.tops[key].with_image(number, values, places)
        for skip in self.recorder.skipped if self.recorder is not None else ():
            self.skipped.setdefault(_label(skip.layer or skip.type, skip.call), skip.reason)
        self._found = []

    def _learn(self, inputs: Sequence[Tensor]) -> HintBook:
        """The hints for inputs of this shape; where layouts depend on it, the first image of a
        batch goes through the model once more."""
        shape, first = (1, *inputs[0].shape[1:]), self._plan.book
        if shape == first.input_shape:
            return first
        if shape not in self._books:
            if len(self._books) == _BOOKS:
                self._books.pop(next(iter(self._books)))
            book, module = HintBook(self._model.module, shape), self._model.module
            book.settle_as(first)
            if not book.is_traced:
                with book.traced(module, [site.layer for site in self._plan.targets]):
                    forward(module, [arg[:1].to(self._model.device) for arg in inputs])
            self._books[shape] = book
        return self._books[shape]

    def take(self, site: Site, tensor: Tensor) -> None:
        """The sink of the hooks."""
        if self._batch is None:  # the hints are being learnt
            return
        numbers, whole = self._batch.images, self._plan.targets.get(site)
        if len(numbers) > 1:  # the first axis must count images, or windows of them
            count = tensor.shape[0]
            alone = whole is not None and whole.shape[0] == 1 and count == len(numbers)
            windows = whole is not None and whole.layout == "windows" and count % len(numbers) == 0
            if not (alone or windows):
                words = f"shape {list(tensor.shape)} is no batch of {len(numbers)}"
                raise LayoutError(f"{words}: --batch-size 1")
        parts = tensor.chunk(len(numbers)) if len(numbers) > 1 else (tensor,)
        for number, part in zip(numbers, parts, strict=True):
            for key, maps in to_maps(part, self._book.at(site, part)).items():
                inner = site.inside(key)
                target = self._plan.targets.get(inner)
                if target is None or len(maps.data) != target.channels:
                    raise LayoutError(f"gives {list(part.shape)} for some images only")
                self._found.append((number, inner, *strongest(maps, self._by)))


def strongest(maps: Maps, by: By) -> tuple[Floats, Integers]:
    """The value that ranks each channel and its place: float32 [C], and int64 [C, 4] as in
    `Top.places`. NaN and infinities are left out; -inf where nothing else is there."""
    flat = maps.data.flatten(1)
    places = np.full((len(flat), 4), -1)
    if by == "mean":
        means, finite = flat.mean(1), flat.isfinite()
        if not finite.all():
            count = finite.sum(1)
            means = torch.where(finite, flat, 0).sum(1) / count
            means = torch.where(count > 0, means, -torch.inf)
        return means.cpu().numpy(), places
    values, at = flat.max(1)
    if not values.isfinite().all():
        values, at = torch.where(flat.isfinite(), flat, -torch.inf).max(1)
    slices, height, width = maps.data.shape[1:]
    if LAYOUTS[maps.layout].aligned and slices == 1:
        index = at.cpu().numpy()
        places[:, 0], places[:, 1], places[:, 2:] = index // width, index % width, (height, width)
    return values.cpu().numpy(), places


def _label(layer: str, call: int) -> str:
    return layer + (f".call{call}" if call else "")
