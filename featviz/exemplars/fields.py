"""What the units of a layer see of the input: their receptive fields, as boxes of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from featviz.exemplars.collect import ExemplarSource
from featviz.hooks.capture import forward
from featviz.hooks.eval_mode import in_eval_mode
from featviz.layout import channel_axis, recognise
from featviz.layout.layouts import LAYOUTS
from featviz.layout.tracing.fields import to_box
from featviz.layout.tracing.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.records import CaptureSite


class PixelBox(NamedTuple):
    """A rectangle of pixels; right and bottom are excluded."""

    left: int
    top: int
    right: int
    bottom: int


def is_map_of_input(model: LoadedModel, source: ExemplarSource) -> bool:
    """Whether the units of a tensor stand for positions in one image."""
    one_image = model.preprocess.frames is None and model.preprocess.inputs == 1
    return one_image and LAYOUTS[source.layout].aligned


@dataclass(frozen=True)
class ReceptiveField:
    """What each unit of a map [H, W] sees of the input."""

    edges: Tensor
    """[4, H, W]: the edges of each unit's box, as `layout.views.to_box` reads them."""

    def box(self, row: int, column: int) -> PixelBox | None:
        """What the unit at a position sees; None where it sees only padding."""
        box = to_box(self.edges[:, row, column].tolist())
        return None if box is None else PixelBox(*box)

    @cached_property
    def largest(self) -> tuple[int, int]:
        """Height and width of what a unit sees at most."""
        heights = [0]
        widths = [0]
        for edges in self.edges.flatten(1).T.tolist():
            box = to_box(edges)
            if box is not None:
                left, top, right, bottom = box
                heights.append(bottom - top)
                widths.append(right - left)
        return max(heights), max(widths)


def receptive_fields(
    model: LoadedModel, sources: Sequence[ExemplarSource], args: Sequence[Tensor]
) -> dict[CaptureSite, ReceptiveField]:
    """Follow the pixels through one forward pass to what each unit sees.

    Args:
        args: arguments of the model; only their shapes count.

    Returns:
        The field of each tensor that is a map of the input. Those behind a function that cannot be
        followed are missing.
    """
    aligned = [source for source in sources if is_map_of_input(model, source)]
    if not aligned:
        return {}
    book = HintBook(model.module, args[0].shape)
    layers = [source.site.layer for source in aligned]
    with in_eval_mode(model.module), book.traced(model.module, layers, views=True):
        forward(model.module, [torch.zeros_like(arg, device=model.device) for arg in args])
    fields = {}
    for source in aligned:
        edge_maps = [_edge_maps(book, source.site, table) for table in book.views(source.site)]
        if edge_maps and edge_maps[0].shape[1] == 1:  # one slice in [C, S, H, W]: no clip
            # edges are written so that the box around all channels is their minimum
            edges = torch.stack([maps.amin(0)[0] for maps in edge_maps])
            fields[source.site] = ReceptiveField(edges)
    return fields


def _edge_maps(book: HintBook, site: CaptureSite, table: Tensor) -> Tensor:
    """One edge of the boxes that a tensor's values see, laid out as its maps [C, S, H, W]."""
    hints = book.of_tensor(site, table)
    form = recognise(table.shape, hints)
    axis = channel_axis(table.shape, hints)
    if axis is not None and table.stride(axis) == 0:  # expanded: all channels are the same
        table = table.narrow(axis, 0, min(2, table.shape[axis]))
    return LAYOUTS[form.layout].to_maps(table, form)
