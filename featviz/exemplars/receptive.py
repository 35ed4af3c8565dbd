"""What the units of chosen layers see of the input: computed from the functions that ran, measured
by gradients where these do not tell it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from featviz.errors import ForwardError
from featviz.exemplars.collecting import ExemplarSource
from featviz.exemplars.fields import Field
from featviz.exemplars.probe import GradientProbe
from featviz.exemplars.sights import Seen, Sight
from featviz.exemplars.tiles import Box
from featviz.exemplars.walk import follow
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.forward import forward
from featviz.layout.layouts import LAYOUTS
from featviz.layout.overrides import HintBook
from featviz.models.load import LoadedModel
from featviz.records import Site

log = logging.getLogger(__name__)

How = Literal["computed", "measured", "unknown", "no place"]
"""How a receptive field is known: from the functions that ran; by gradients; not at all; or the
layer gives no map of the input. In the last two cases a unit is shown with the whole input."""


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
        preprocess = model.preprocess
        self._model, self._targets = model, targets
        self._args = [torch.zeros_like(arg, device=model.device) for arg in args]
        self._is_picture = preprocess.frames is None and preprocess.inputs == 1
        layers = list({target.site.layer.name: target.site.layer for target in targets}.values())
        self._seen = follow(model.module, layers, self._args) if self._is_picture else {}
        self._measured: dict[tuple[Site, int, int], Box] = {}
        height, width = args[0].shape[-2:]
        self.whole: Box = (0, 0, width, height)
        """The box of the whole input."""

    def how(self, target: ExemplarSource) -> How:
        """How the receptive fields of a tensor's units are known."""
        if not self._has_place(target):
            return "no place"
        if self._computed(target) is not None:
            return "computed"
        return "measured" if self._probe and self._probe.follows(target.site) else "unknown"

    def box(self, target: ExemplarSource, row: int, column: int) -> Box | None:
        """What a unit sees, clipped to the input; None where it sees only padding."""
        how, seen = self.how(target), self._computed(target)
        if how == "measured":
            return self._measure(target.site, row, column)
        if how == "computed" and isinstance(seen, Field):
            return seen.box(row, column)
        return self.whole

    def size(self, target: ExemplarSource) -> tuple[int, int]:
        """Height and width of what a unit sees at most; of measured ones, of that in the middle."""
        how, seen = self.how(target), self._computed(target)
        if how == "computed" and isinstance(seen, Field):
            return seen.rows.size, seen.columns.size
        box = self.whole
        if how == "measured" and self._probe:
            rows, columns = self._probe.map_size(target.site)
            box = self._measure(target.site, rows // 2, columns // 2)
        return box[3] - box[1], box[2] - box[0]

    def _has_place(self, target: ExemplarSource) -> bool:
        return self._is_picture and LAYOUTS[target.layout].aligned

    def _computed(self, target: ExemplarSource) -> Seen | None:
        """The table of a tensor, or that it sees all; None where the functions do not tell it."""
        site, layout = target.site, LAYOUTS[target.layout]
        seen = self._seen.get((site.layer.name, site.call, site.key))
        if isinstance(seen, Field) and layout.spatial_axes is not None:
            axes = tuple(axis - layout.dimensions[0] for axis in layout.spatial_axes)
            return seen if seen.axes == axes else None
        return seen if seen is Sight.WHOLE else None

    @cached_property
    def _probe(self) -> GradientProbe | None:
        """The gradients of all tensors of which the functions do not tell what they see."""
        book = HintBook(self._model.module, self._args[0].shape)
        open_ones = [t for t in self._targets if self._has_place(t) and self._computed(t) is None]
        module = self._model.module
        try:
            with in_eval_mode(module), book.traced(module, [t.site.layer for t in open_ones]):
                forward(module, self._args)
            hints = {t.site: book.of_shape(t.site.layer, t.shape) for t in open_ones}
            return GradientProbe(self._model, hints, self._args)
        except (ForwardError, RuntimeError) as error:
            log.debug("no gradients", exc_info=error)
            return None

    def _measure(self, site: Site, row: int, column: int) -> Box:
        """One unit's box; if that in the middle sees all, all do."""
        assert self._probe is not None
        rows, columns = self._probe.map_size(site)
        for place in ((rows // 2, columns // 2), (row, column)):
            key = (site, *place)
            if key not in self._measured:
                self._measured[key] = self._probe.box(site, *place) or self.whole
            if self._measured[key] == self.whole:
                return self.whole
        return self._measured[site, row, column]
