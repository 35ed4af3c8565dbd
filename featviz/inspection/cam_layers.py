"""Which layers `cam` takes by itself: they are found by a pass before the first image."""

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
    """The layers that explain a target, which are found by a pass forward and back.

    Of a detector they are those whose maps enter its head, as its family names them. Of
    a segmentation it is the last map before the scores of classes, which would show
    themselves, and of a model of no library (a U-Net) also the last map of the lowest
    resolution. Of other models it is the last map."""
    model = prepared.model
    layers = list_layers(model.module)
    seen = _maps_seen(prepared, layers)
    reading = seen.reading
    if reading is None or prepared.plan.target.layer is not None:
        return [seen.last()]
    of_family = _named(layers, reading.family.layers(model.module))
    if of_family:
        return of_family
    # layers that give the scores stand at the end, and are none of the maps before them
    while len(seen.ran) > 1 and seen.channels[seen.ran[-1]] == reading.score_channels:
        seen.ran.pop()
    last = seen.last()
    if not reading.family.has_bottleneck:
        return [last]
    # the last of the smallest maps: min takes the first of several
    bottleneck = min(reversed(seen.ran), key=lambda layer: seen.sizes[layer])
    return [last] if bottleneck == last else [bottleneck, last]


def _named(layers: Sequence[Layer], names: Sequence[str]) -> list[Layer]:
    """The layers that have one of these names as their first or a further one."""
    return [
        layer for layer in layers if not {layer.name, *layer.aliases}.isdisjoint(names)
    ]


def _maps_seen(prepared: Prepared, layers: Sequence[Layer]) -> _MapsSeen:
    """Show zeros to the model, or noise where no gradient passes at zeros."""
    seen = _seen(prepared, layers, prepared.blank)
    if seen.reached:
        return seen
    # With biases of zero, zeros stay zeros, at which a ReLU lets no gradient pass (YOLOS
    # as it is initialised).
    noise = torch.Generator().manual_seed(0)
    args = [_noise(arg, noise) for arg in prepared.blank]
    return _seen(prepared, layers, args)


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Noise of a tensor's shape and type; indices and masks stay as they are."""
    if not like.is_floating_point():
        return like
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def _seen(
    prepared: Prepared, layers: Sequence[Layer], args: Sequence[Tensor]
) -> _MapsSeen:
    """Show an input without an image to the model, and go back from the target.

    Args:
        layers: all of the model.
        args: the model's arguments: zeros, or noise.
    """
    model = prepared.model
    shape = args[0].shape
    book = HintBook(model.module, shape, prepared.options.draw.tensor_layout)
    seen = _MapsSeen(book)
    useful = []
    for layer in layers:
        # index 0 is the model itself, whose output is the answer and no evidence for it
        if layer.index and not ADDS_NOTHING.intersection(layer.classes):
            useful.append(layer)
    with (
        in_eval_mode(model.module, gradients=True),
        passes.watched(model, prepared.plan, useful) as hooks,
        suppress(NothingFoundError),  # there is no object
    ):
        hooks.show(args, book, seen.take)
    seen.reading = hooks.reading
    return seen


@dataclass
class _MapsSeen:
    """The layers that give maps with several places, in the order in which they ran."""

    book: HintBook
    ran: list[Layer] = field(default_factory=list)
    """Each as often as it ran."""
    reached: set[Layer] = field(default_factory=set)
    """Those whose gradient is not zero at every place."""
    sizes: dict[Layer, tuple[int, int]] = field(default_factory=dict)
    """Height and width of their maps."""
    channels: dict[Layer, int] = field(default_factory=dict)
    reading: Reading | None = None
    """What the model answered, where it is of a family of its own."""

    def take(self, site: CaptureSite, tensor: Tensor) -> None:
        """The sink of the hooks: note from an output that its layer gives maps, and from a
        gradient that the target depends on them."""
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
        """The layer that explains the target best: one on which the target depends, outside
        of attentions, that runs once; of several the last. What no layer fulfils is
        waived, the last condition first.

        Behind the last attention of a vision transformer that reads its class token,
        the target depends on no other token, so its last layer is one before that
        attention.

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
        """What makes a layer better than another, the weightiest first.

        Args:
            numbered: its place in `ran`, and the layer.
        """
        number, layer = numbered
        is_outside = not self.book.of_layer(layer).in_attention
        runs_once = is_outside and self.ran.count(layer) == 1
        # The target has no gradient at a layer that it does not depend on, such as the
        # head of another task: its map would be black.
        return layer in self.reached, is_outside + runs_once, number
