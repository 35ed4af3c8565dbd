"""What featviz draws of each layer of a model, beside clones that independent hooks
took."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from featviz import layout
from featviz.hooks.capture import hooked, leaves
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import list_layers
from featviz.layout.tracing.hints import HintBook
from featviz.records import CaptureSite


@dataclass
class Seen:
    """The first tensor that a layer gave under a key."""

    layout: str
    maps: Tensor
    """[C, H, W], or [C, S, H, W] of several slices."""
    tensor: Tensor
    """Cloned by a hook that is not featviz's."""


def followed(
    model: nn.Module,
    height: int,
    width: int,
    trace: bool = True,
    image: Tensor | None = None,
) -> dict[tuple[str, str], Seen]:
    """All that can be drawn of an image, a random one by default, by (layer, key);
    raises where one cannot.

    Args:
        trace: whether the image is followed through the model.
    """
    if image is None:
        image = torch.randn(
            1, 3, height, width, generator=torch.Generator().manual_seed(1)
        )
    layers = list_layers(model)
    book = HintBook(model, image.shape)
    drawn: dict[tuple[str, str], layout.Maps] = {}
    clones: dict[tuple[str, str], Tensor] = {}

    def sink(site: CaptureSite, tensor: Tensor) -> None:
        maps = layout.to_maps(tensor, book.of_tensor(site, tensor))[""]
        copy = layout.Maps(maps.layout, maps.data.clone())
        drawn.setdefault((site.layer.name, site.key), copy)

    def keep(name: str, output: object) -> None:
        for key, value in leaves(output):
            if isinstance(value, Tensor):
                clones.setdefault((name, key), value.detach().clone())

    with ExitStack() as stack:
        for name, module in model.named_modules():
            hook = module.register_forward_hook(
                lambda m, a, out, name=name: keep(name, out)
            )
            stack.callback(hook.remove)
        stack.enter_context(in_eval_mode(model))
        if trace:
            stack.enter_context(book.traced(model, layers))
        stack.enter_context(hooked(model, layers, sink))
        model(image)
    return {
        key: Seen(maps.layout, maps.data.squeeze(1), clones[key])
        for key, maps in drawn.items()
        if key in clones
    }
