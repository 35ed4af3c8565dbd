"""The layer of a class activation map, where nobody named one: the last that has places."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from featviz import layout
from featviz.errors import UsageError
from featviz.gradients import forward_backward
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.first_look import ADDS_NOTHING
from featviz.hooks.layers import list_layers
from featviz.layout.layouts import LAYOUTS
from featviz.layout.overrides import HintBook
from featviz.pipeline.prepare import Prepared
from featviz.records import KINDS, Layer, Site


@dataclass
class _Seen:
    """What a pass on zeros, there and back, shows of layers that give maps of the image."""

    book: HintBook
    calls: Counter[Layer] = field(default_factory=Counter)
    """How many outputs of each layer are maps with several places."""
    order: list[Layer] = field(default_factory=list)
    """The layers of these outputs, in the order in which they were given."""
    reached: set[Layer] = field(default_factory=set)
    """Those whose gradient is not zero at every place."""

    def take(self, site: Site, tensor: Tensor) -> None:
        """Note an output or a gradient."""
        hints = self.book.at(site, tensor)
        size = layout.map_size(list(tensor.shape), hints)
        if size is None or not LAYOUTS[size[0]].aligned or size[1:] == (1, 1):
            return
        if not KINDS[site.kind].backward:
            self.calls[site.layer] += 1
            self.order.append(site.layer)
        elif layout.to_maps(tensor, hints)[""].data.any():
            self.reached.add(site.layer)


def last_map(prepared: Prepared) -> Layer:
    """The last layer of a model whose output has places of the image on which the target depends.

    It is found by shapes and gradients of a pass on zeros, whose plan captures outputs and
    gradients. Behind the last attention of a vision transformer that reads its class token, the
    target depends on no other token, so its last layer is one before that attention. Poolings and
    the like add nothing to the layer before them; a layer inside an attention, or one that runs
    several times, is taken only where there is no other.

    Raises:
        UsageError: no layer gives maps, or the target does not fit the output.
        ForwardError: the model cannot take zeros, or its backward pass fails.
    """
    model, book = prepared.model, prepared.hint_book(prepared.blank)
    layers = [
        layer
        for layer in list_layers(model.module)
        if layer.index and not ADDS_NOTHING.intersection(layer.classes)
    ]
    seen = _Seen(book)
    with in_eval_mode(model.module, gradients=True):
        forward_backward.run(model, prepared.plan, prepared.blank, book, layers, seen.take)
    if not seen.order:
        raise UsageError(
            "no layer gives maps of the image, which a class activation map lies on",
            "--layers names one, and --tensor-layout says how to read it; "
            "`featviz layers MODEL` lists them, with shapes",
        )
    plain = [layer for layer in seen.order if not book.of(layer).attention]
    once = [layer for layer in plain if seen.calls[layer] == 1]
    reached = [[x for x in some if x in seen.reached] for some in (once, plain, seen.order)]
    return next(some[-1] for some in (*reached, once, plain, seen.order) if some)
