"""What featviz draws of each layer of a model, beside clones that independent hooks
took."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

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
        generator = torch.Generator().manual_seed(1)
        image = torch.randn(1, 3, height, width, generator=generator)
    layers = list_layers(model)
    book = HintBook(model, image.shape)
    drawn: dict[tuple[str, str], layout.Maps] = {}
    clones: dict[tuple[str, str], Tensor] = {}

    def draw(site: CaptureSite, tensor: Tensor) -> None:
        maps = layout.to_maps(tensor, book.of_tensor(site, tensor))[""]
        copy = layout.Maps(maps.layout, maps.data.clone())
        drawn.setdefault((site.layer.name, site.key), copy)

    def keep(name: str, module: nn.Module, inputs: object, output: object) -> None:
        for key, value in leaves(output):
            if isinstance(value, Tensor):
                clones.setdefault((name, key), value.detach().clone())

    with ExitStack() as stack:
        for name, module in model.named_modules():
            hook = module.register_forward_hook(partial(keep, name))
            stack.callback(hook.remove)
        stack.enter_context(in_eval_mode(model))
        if trace:
            stack.enter_context(book.traced(model, layers))
        stack.enter_context(hooked(model, layers, draw))
        model(image)
    return {
        key: Seen(drawn[key].layout, drawn[key].data.squeeze(1), clones[key])
        for key in drawn.keys() & clones.keys()
    }


def drawn_as(model: nn.Module, height: int, width: int, layer: str) -> Seen:
    """The same, of the output of a layer."""
    return followed(model, height, width)[layer, ""]
