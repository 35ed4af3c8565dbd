"""Which layers `cam` takes without --layers: a pass before the first image finds them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from featviz import layout
from featviz.errors import UsageError
from featviz.gradients import passes
from featviz.gradients.answers import NothingFoundError
from featviz.gradients.families import Reading
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import list_layers
from featviz.layout.layouts import LAYOUTS
from featviz.layout.tracing.hints import HintBook
from featviz.records import KINDS, CaptureSite, Layer
from featviz.run.prepare import Prepared
from featviz.run.stages import ADDS_NOTHING


def default_layers(prepared: Prepared) -> list[Layer]:
    """The layers whose maps explain the target, found by a pass forward and back.

    For a detector: the layers whose maps enter its head, as its family names them. For a
    segmentation: the layer with the last map before the scores of classes (maps of the
    scores would only show the answer), and if the model is of no library (a U-Net), the
    last layer of the lowest resolution, too. For other models: the layer with the last
    map.

    Raises:
        UsageError: no layer gives maps of the image.
    """
    model = prepared.model
    layers = list_layers(model.module)
    seen = _find_maps(prepared, layers)
    reading = seen.reading
    if reading is None or prepared.plan.target.layer is not None:
        return [seen.last()]
    of_family = _layers_named(layers, reading.family.layers(model.module))
    if of_family:
        return of_family
    # leave out the layers at the end that give the scores of classes
    while len(seen.ran) > 1 and seen.channels[seen.ran[-1]] == reading.score_channels:
        seen.ran.pop()
    last = seen.last()
    if not reading.family.has_bottleneck:
        return [last]
    # `min` takes the first of several minima, so in reversed order the last layer
    bottleneck = min(reversed(seen.ran), key=lambda layer: seen.sizes[layer])
    return [last] if bottleneck == last else [bottleneck, last]


def _layers_named(layers: Sequence[Layer], names: Sequence[str]) -> list[Layer]:
    """The layers that have one of these names, as their name or as an alias."""
    return [
        layer for layer in layers if not {layer.name, *layer.aliases}.isdisjoint(names)
    ]


def _find_maps(prepared: Prepared, layers: Sequence[Layer]) -> _MapsSeen:
    """Show zeros to the model, and if no gradient reaches a layer, noise."""
    seen = _show_without_image(prepared, layers, prepared.blank)
    if seen.reached:
        return seen
    # If all biases are zero (as in a new YOLOS), zeros stay zeros, and a ReLU at zero lets
    # no gradient pass.
    noise = torch.Generator().manual_seed(0)
    args = [_noise(arg, noise) for arg in prepared.blank]
    return _show_without_image(prepared, layers, args)


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Noise of a tensor's shape and type. A tensor that is not of floats (indices, a mask)
    is returned as it is."""
    if not like.is_floating_point():
        return like
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def _show_without_image(
    prepared: Prepared, layers: Sequence[Layer], args: Sequence[Tensor]
) -> _MapsSeen:
    """Show an input without an image to the model, and go back from the target.

    Args:
        layers: all layers of the model.
        args: the model's arguments: zeros, or noise.
    """
    model = prepared.model
    shape = args[0].shape
    book = HintBook(model.module, shape, prepared.options.draw.tensor_layout)
    seen = _MapsSeen(book)
    useful = []
    for layer in layers:
        # index 0 is the model itself, whose output is the answer, not evidence for it
        if layer.index and not ADDS_NOTHING.intersection(layer.classes):
            useful.append(layer)
    with (
        in_eval_mode(model.module, gradients=True),
        passes.watched(model, prepared.plan, useful) as hooks,
        suppress(NothingFoundError),  # a detector finds no object in this input
    ):
        hooks.show(args, book, seen.take)
    seen.reading = hooks.reading
    return seen


@dataclass
class _MapsSeen:
    """The layers that give maps with several places."""

    book: HintBook
    ran: list[Layer] = field(default_factory=list)
    """In the order in which they ran, each as often as it ran."""
    reached: set[Layer] = field(default_factory=set)
    """The layers with a gradient that is not zero everywhere."""
    sizes: dict[Layer, tuple[int, int]] = field(default_factory=dict)
    """Height and width of their maps."""
    channels: dict[Layer, int] = field(default_factory=dict)
    reading: Reading | None = None
    """What the model answered; None if the model is of no family of `gradients.families`."""

    def take(self, site: CaptureSite, tensor: Tensor) -> None:
        """The sink of the hooks. An output tells that its layer gives maps; a gradient tells
        that the target depends on them."""
        hints = self.book.of_tensor(site, tensor)
        size = layout.map_size(list(tensor.shape), hints)
        if size is None or not LAYOUTS[size[0]].aligned or size[1:] == (1, 1):
            return
        if not KINDS[site.kind].backward:
            self.ran.append(site.layer)
            self.sizes[site.layer] = size[1:]
            self.channels[site.layer] = len(layout.to_maps(tensor, hints)[""].data)
        elif layout.to_maps(tensor, hints)[""].data.any():
            self.reached.add(site.layer)

    def last(self) -> Layer:
        """The layer that explains the target best: the last one on which the target depends,
        that is outside of attentions, and that runs once. If no layer fulfils all three
        conditions, the last condition is dropped, then the one before it.

        In a vision transformer that reads its class token, the target depends on no other
        token after the last attention. So the result is a layer before that attention.

        Raises:
            UsageError: no layer gives maps of the image.
        """
        if not self.ran:
            raise UsageError(
                "no layer gives maps of the image, which a class activation map lies on",
                "--layers names one, and --tensor-layout says how to read it; "
                "`featviz layers MODEL` lists them, with shapes",
            )
        _, layer = max(enumerate(self.ran), key=self._merits)
        return layer

    def _merits(self, numbered: tuple[int, Layer]) -> tuple[bool, int, int]:
        """A key by which the best layer is the greatest.

        Args:
            numbered: the position of the layer in `ran`, and the layer.
        """
        number, layer = numbered
        is_outside = not self.book.of_layer(layer).in_attention
        runs_once = is_outside and self.ran.count(layer) == 1
        # The gradient is zero at a layer on which the target does not depend, such as the
        # head of another task. The map of that layer would be black.
        return layer in self.reached, is_outside + runs_once, number
