"""What a unit sees, measured: the pixels on which its gradient is not zero."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from featviz.errors import LayoutError
from featviz.hooks.containers import leaves
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.forward import forward
from featviz.hooks.functions import unwatched, watching
from featviz.layout import to_maps
from featviz.models.load import LoadedModel
from featviz.records import Hints, Layer, Site

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels of the input, right and bottom excluded."""

_DRAWS = 3
"""Inputs of noise: a maximum passes a gradient on to one of its places only."""


class GradientProbe:
    """The gradients of tensors of layers; keeps the graphs of a few passes on noise."""

    def __init__(
        self, model: LoadedModel, sites: Mapping[Site, Hints], args: Sequence[Tensor]
    ) -> None:
        """Run the model on noise.

        Args:
            sites: the tensors, with hints at their layouts.
            args: the model's arguments, the image first; of the image only the shape matters.

        Raises:
            ForwardError: the model cannot take them.
        """
        self._random = torch.Generator().manual_seed(0)
        self._sites = {(at.layer.name, at.call, at.key): at for at in sites}
        self._hints = sites
        self._drawn: list[tuple[Tensor, dict[Site, Tensor]]] = []
        for _ in range(_DRAWS):
            image = torch.randn(args[0].shape, generator=self._random).to(model.device)
            image.requires_grad_()
            with in_eval_mode(model.module, gradients=True):
                self._drawn.append((image, self._sums(model, [image, *args[1:]])))

    def follows(self, site: Site) -> bool:
        """Whether autograd has followed a tensor."""
        return all(site in sums and sums[site].requires_grad for _, sums in self._drawn)

    def map_size(self, site: Site) -> tuple[int, int]:
        """Rows and columns of a tensor's map."""
        rows, columns = self._drawn[0][1][site].shape
        return rows, columns

    def box(self, site: Site, row: int, column: int) -> Box | None:
        """The smallest rectangle around all pixels that a place of the map sees; None for none."""
        seen = torch.zeros(self._drawn[0][0].shape[-2:], dtype=torch.bool)
        for image, sums in self._drawn:
            (gradient,) = torch.autograd.grad(
                sums[site][row, column], image, retain_graph=True, allow_unused=True
            )
            if gradient is not None:
                seen |= (gradient != 0).flatten(0, -3).any(0).cpu()
        rows, columns = (torch.nonzero(seen.any(axis)).flatten() for axis in (1, 0))
        if not len(rows):
            return None
        return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1

    def _sums(self, model: LoadedModel, args: Sequence[Tensor]) -> dict[Site, Tensor]:
        """Of each tensor a weighted sum of its channels, [H, W]."""
        calls, sums = Counter[str](), dict[Site, Tensor]()

        def leave(layer: Layer, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
            call = calls[layer.name]
            calls[layer.name] += 1
            for key, value in leaves(output):
                site = self._sites.get((layer.name, call, key))
                if site is not None and isinstance(value, Tensor):
                    with unwatched(), suppress(LayoutError):
                        sums[site] = self._summed(value, self._hints[site])

        layers = {site.layer for site in self._sites.values()}
        functions = {layer.name for layer in layers if layer.is_function}
        wanted = (lambda layer: layer.name in functions) if functions else None
        modules = [layer for layer in layers if not layer.is_function]
        with watching(model.module, leave, layers=modules, functions=wanted):
            forward(model.module, args)
        return sums

    def _summed(self, value: Tensor, hints: Hints) -> Tensor:
        data = to_maps(value, hints)[""].data
        weights = torch.randn(len(data), generator=self._random).to(data.device)
        return torch.einsum("c,cshw->hw", weights, data)
