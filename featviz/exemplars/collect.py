"""The images that excite each channel most, and where; and what units see of the input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from featviz.errors import LayoutError
from featviz.hooks.capture import Recorder, forward, hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.layout import Maps, channel_axis, recognise, to_maps
from featviz.layout.hints import HintBook
from featviz.layout.layouts import LAYOUTS
from featviz.layout.views import to_box
from featviz.models.load import LoadedModel
from featviz.records import CaptureSite, Floats, Integers, Layer, Skip
from featviz.run.study import Batch

By = Literal["max", "mean"]

Top = tuple[Floats, Integers, Integers]
"""The best K images of C channels, best first; of equal values the lower number is better: their
values [C, K], -inf where there is no image; their numbers among the samples [C, K]; and row,
column, rows and columns of the map [C, K, 4], -1 where the layer gives no map of the input, or the
whole map is meant."""

_NONE = 2**62  # stands for the number of an image where there is none; comes after all
_SHAPES = 8  # shapes of input whose hints are held


@dataclass(frozen=True)
class ExemplarSource:
    """A tensor of a layer whose channels are looked at."""

    site: CaptureSite
    layout: str
    shape: tuple[int, ...]  # for the first image
    channels: int


class ExemplarCollector:
    """The best images of each channel, by class; of an image that failed, nothing stays."""

    def __init__(
        self,
        model: LoadedModel,
        layers: Sequence[Layer],
        blank: Sequence[Tensor],
        by: By = "max",
        top: int = 1,
        classes: Sequence[str | None] = (None,),
    ) -> None:
        """Run the model once on `blank`; `classes` has that of each sample."""
        self.targets: dict[CaptureSite, ExemplarSource] = {}
        self.skipped: dict[str, str] = {}  # layers that give nothing with channels, and why
        self.recorder: Recorder | None = None
        book = HintBook(model.module, blank[0].shape)
        self._model, self._first, self._book, self._by = model, book, book, by
        self._books = {book.input_shape: book}
        self._classes, self._batch = classes, Batch((), [])
        self._found: list[tuple[int, CaptureSite, Floats, Integers]] = []

        def sink(site: CaptureSite, tensor: Tensor) -> None:
            for key, maps in to_maps(tensor, book.at(site, tensor)).items():
                shape, inner = tuple(tensor.shape), site.inside(key)
                self.targets[inner] = ExemplarSource(inner, maps.layout, shape, len(maps.data))

        with (
            in_eval_mode(model.module),
            book.traced(model.module, layers),
            hooked(model.module, layers, sink) as recorder,
        ):
            forward(model.module, [arg.to(model.device) for arg in blank], recorder)
        self._skip(recorder.skipped)
        self.never_ran = [layer.label for layer in recorder.never_ran]
        self.tops: dict[tuple[CaptureSite, str | None], Top] = {}
        for site, target in self.targets.items():
            size = target.channels, top
            none = np.full(size, -np.inf, np.float32), np.full(size, _NONE), np.full((*size, 4), -1)
            self.tops |= {(site, name): none for name in sorted({*classes}, key=str)}

    def _skip(self, skipped: Sequence[Skip]) -> None:
        for skip in skipped:
            label = (skip.layer or skip.type) + (f".call{skip.call}" if skip.call else "")
            self.skipped.setdefault(label, skip.reason)

    @property
    def fault(self) -> Exception | None:
        """A bug of ours, to tell it from a fault of the model."""
        return None if self.recorder is None else self.recorder.fault

    def begin(self, batch: Batch) -> None:
        """Start a batch; of one of a new shape, an image may go through the model once more."""
        self._batch, self._found = Batch((), []), []
        shape, module = (1, *batch.inputs[0].shape[1:]), self._model.module
        if shape not in self._books:
            book = HintBook(module, shape)
            book.settle_as(self._first)
            if not book.is_traced:
                with book.traced(module, [site.layer for site in self.targets]):
                    forward(module, [arg[:1].to(self._model.device) for arg in batch.inputs])
            if len(self._books) > _SHAPES:
                self._books = {self._first.input_shape: self._first}
            self._books[shape] = book
        self._book, self._batch = self._books[shape], batch
        if self.recorder is not None:
            self.recorder.calls.clear()
            self.recorder.skipped.clear()

    def commit(self) -> None:
        """Rank the batch, which the model has taken; what is not finite excites nothing."""
        for number, site, found, places in self._found:
            top, finite = self.tops[site, self._classes[number]], np.isfinite(found)
            values = np.where(finite, found, np.float32(-np.inf))
            if not (values >= top[0][:, -1]).any():
                continue
            numbers = np.where(finite, number, _NONE)
            values = np.concatenate([top[0], values[:, None]], 1)
            images = np.concatenate([top[1], numbers[:, None]], 1)
            places = np.concatenate([top[2], places[:, None]], 1)
            order = np.lexsort((images, -values))[:, :-1]
            self.tops[site, self._classes[number]] = (
                np.take_along_axis(values, order, 1),
                np.take_along_axis(images, order, 1),
                np.take_along_axis(places, order[..., None], 1),
            )
        self._skip([] if self.recorder is None else self.recorder.skipped)
        self._found = []

    def take(self, site: CaptureSite, tensor: Tensor) -> None:
        """The sink of the hooks; it takes nothing while hints are learnt."""
        numbers, whole = self._batch.images, self.targets.get(site)
        if len(numbers) > 1:  # the first axis must count images, or windows of them
            count = tensor.shape[0]
            alone = whole is not None and whole.shape[0] == 1 and count == len(numbers)
            windows = whole is not None and whole.layout == "windows" and count % len(numbers) == 0
            if not (alone or windows):
                words = f"shape {list(tensor.shape)} is no batch of {len(numbers)}"
                raise LayoutError(f"{words}: --batch-size 1")
        parts = tensor.chunk(len(numbers)) if len(numbers) > 1 else (tensor,)
        for number, part in zip(numbers, parts, strict=False):
            for key, maps in to_maps(part, self._book.at(site, part)).items():
                inner = site.inside(key)
                target = self.targets.get(inner)
                if target is None or len(maps.data) != target.channels:
                    raise LayoutError(f"gives {list(part.shape)} for some images only")
                self._found.append((number, inner, *strongest(maps, self._by)))


def strongest(maps: Maps, by: By) -> tuple[Floats, Integers]:
    """The finite value that ranks each channel, and its place, as in `Top`."""
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


# What units see of the input

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels of the input, right and bottom excluded."""


def has_places(model: LoadedModel, target: ExemplarSource) -> bool:
    """Whether the units of a tensor stand for places of one image."""
    one_image = model.preprocess.frames is None and model.preprocess.inputs == 1
    return one_image and LAYOUTS[target.layout].aligned


def receptive_fields(
    model: LoadedModel, targets: Sequence[ExemplarSource], args: Sequence[Tensor]
) -> dict[CaptureSite, Tensor]:
    """What the units of tensors see in inputs of these shapes, by one forward pass: of each map [4,
    H, W], as in `layout.views`. Tensors of which it is not known are left out."""
    found = {}
    book = HintBook(model.module, args[0].shape)
    aligned = [target for target in targets if has_places(model, target)]
    if aligned:
        layers = [target.site.layer for target in aligned]
        with in_eval_mode(model.module), book.traced(model.module, layers, views=True):
            forward(model.module, [torch.zeros_like(arg, device=model.device) for arg in args])
    for site in (target.site for target in aligned):
        maps = []
        for table in book.views(site):
            hints = book.at(site, table)
            form, axis = recognise(table.shape, hints), channel_axis(table.shape, hints)
            if axis is not None and table.stride(axis) == 0:  # all channels are the same
                table = table.narrow(axis, 0, min(2, table.shape[axis]))
            maps.append(LAYOUTS[form.layout].to_maps(table, form))
        if maps and maps[0].shape[1] == 1:
            found[site] = torch.stack([one.amin(0)[0] for one in maps])
    return found


def largest_view(sides: Tensor) -> tuple[int, int]:
    """Height and width of what a unit sees at most."""
    boxes = [box for box in map(to_box, sides.flatten(1).T.tolist()) if box is not None]
    return (
        max((bottom - top for _, top, _, bottom in boxes), default=0),
        max((right - left for left, _, right, _ in boxes), default=0),
    )
