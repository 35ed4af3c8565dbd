"""What the units of chosen layers see of the input, as it was followed through a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from featviz.exemplars.collect import ExemplarSource
from featviz.hooks.capture import forward
from featviz.hooks.eval_mode import in_eval_mode
from featviz.layout import channel_axis, recognise
from featviz.layout.hints import HintBook
from featviz.layout.layouts import LAYOUTS
from featviz.layout.views import to_box
from featviz.models.load import LoadedModel
from featviz.records import Hints, Site

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels of the input, right and bottom excluded."""

How = Literal["computed", "unknown", "no place"]
"""How a receptive field is known: from the functions that ran; not at all; or the layer gives no
map of the input. In the last two cases a unit is shown with the whole input."""


class ReceptiveFields:
    """The receptive fields of layers of a model, for inputs of one shape."""

    def __init__(
        self, model: LoadedModel, targets: Sequence[ExemplarSource], args: Sequence[Tensor]
    ) -> None:
        """Follow one pass of the model.

        Args:
            args: the model's arguments, the image first. Values do not matter.

        Raises:
            ForwardError: the model cannot take them.
        """
        self._is_picture = model.preprocess.frames is None and model.preprocess.inputs == 1
        height, width = args[0].shape[-2:]
        self._whole: Box = (0, 0, width, height)
        self._sides: dict[Site, Tensor] = {}
        """Of each layer's map, [4, H, W] as in `layout.views`."""
        book = HintBook(model.module, args[0].shape)
        layers = [target.site.layer for target in targets]
        blank = [torch.zeros_like(arg, device=model.device) for arg in args]
        if self._is_picture:
            with in_eval_mode(model.module), book.traced(model.module, layers, views=True):
                forward(model.module, blank)
        for target in targets:
            tables = book.views(target.site)
            if tables and LAYOUTS[target.layout].aligned:
                maps = [_maps(table, book.at(target.site, table)) for table in tables]
                if maps[0].shape[1] == 1:
                    self._sides[target.site] = torch.stack([one.amin(0)[0] for one in maps])

    def how(self, target: ExemplarSource) -> How:
        """How the receptive fields of a tensor's units are known."""
        if not self._is_picture or not LAYOUTS[target.layout].aligned:
            return "no place"
        return "computed" if target.site in self._sides else "unknown"

    def box(self, target: ExemplarSource, row: int, column: int) -> Box | None:
        """What a unit sees, clipped to the input; None where it sees only padding."""
        sides = self._sides.get(target.site)
        return self._whole if sides is None else to_box(sides[:, row, column].tolist())

    def size(self, target: ExemplarSource) -> tuple[int, int]:
        """Height and width of what a unit sees at most."""
        sides = self._sides.get(target.site)
        if sides is None:
            return self._whole[3], self._whole[2]
        boxes = [box for box in map(to_box, sides.flatten(1).T.tolist()) if box is not None]
        return (
            max((bottom - top for _, top, _, bottom in boxes), default=0),
            max((right - left for left, _, right, _ in boxes), default=0),
        )


def _maps(table: Tensor, hints: Hints) -> Tensor:
    """A table as the layer's maps are drawn, [C, S, H, W]: its channels, or two that stand for
    all where they are the same."""
    form, axis = recognise(table.shape, hints), channel_axis(table.shape, hints)
    if axis is not None and table.stride(axis) == 0:
        table = table.narrow(axis, 0, min(2, table.shape[axis]))
    return LAYOUTS[form.layout].to_maps(table, form)
