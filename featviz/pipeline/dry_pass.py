"""A forward pass on zeros: which layers run, in which order, with which shapes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from featviz.errors import ForwardError, UsageError
from featviz.hooks import first_look, selectors
from featviz.hooks.capture import hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.first_look import Ran
from featviz.hooks.forward import faults, forward
from featviz.hooks.functions import list_functions
from featviz.hooks.layers import like_module, list_layers, modules_by_name
from featviz.hooks.selectors import Selector
from featviz.layout import map_size
from featviz.layout.overrides import HintBook
from featviz.models.load import LoadedModel
from featviz.records import Layer, Site

log = logging.getLogger(__name__)

LayerCall = tuple[Layer, int]
"""A layer, and the number of its call from 0."""


@dataclass(frozen=True)
class Probe:
    """What ran on zeros, in the order in which the layers finished."""

    given: dict[LayerCall, list[list[int]]] = field(default_factory=dict)
    """Shapes of the tensors that each call of a layer gave."""
    taken: dict[LayerCall, list[list[int]]] = field(default_factory=dict)
    """Shapes of the tensors of floats that each call took, where that was asked for."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls by name of the layer."""

    @property
    def outputs(self) -> list[tuple[Layer, list[int]]]:
        """Every tensor that a layer gave, with its shape."""
        return [(layer, shape) for (layer, _), shapes in self.given.items() for shape in shapes]

    def shape(self, layer: Layer) -> list[int] | None:
        """Shape of the first tensor of the layer's first call."""
        return next((shape for at, shape in self.outputs if at == layer), None)


def probe(
    model: LoadedModel,
    blank: Sequence[Tensor],
    layers: Sequence[Layer],
    kinds: Sequence[str] = ("output",),
) -> Probe:
    """Run the model once on `blank` with these layers hooked.

    Args:
        kinds: `output`, and `input` where the shapes that layers take are asked for.

    Raises:
        ForwardError: the model cannot take it.
    """
    ran = Probe()
    shapes = {"output": ran.given, "input": ran.taken}

    def sink(site: Site, tensor: Tensor) -> None:
        if tensor.is_nested or (site.kind == "input" and not tensor.is_floating_point()):
            return  # has no shape, or is a mask
        of_call = shapes[site.kind].setdefault((site.layer, site.call), [])
        of_call.append(list(tensor.shape))

    with in_eval_mode(model.module), hooked(model.module, layers, sink, kinds) as recorder:
        forward(model.module, [arg.to(model.device) for arg in blank], recorder)
        ran.calls.update(recorder.calls)
    return ran


def functions(model: LoadedModel, blank: Sequence[Tensor]) -> dict[Layer, int]:
    """The functions that the model's modules call, as layers with the number of their calls.

    Raises:
        ForwardError: the model cannot take `blank`.
    """
    args = [arg.to(model.device) for arg in blank]
    with in_eval_mode(model.module), faults(model.module, args):
        return list_functions(model.module, args)


def choose_layers(
    model: LoadedModel, text: str | None, blank: Sequence[Tensor], tensor_layout: Sequence[str] = ()
) -> list[Layer]:
    """The layers that the selectors take; without any, one for each stage of the model.

    A selector that matches nothing beside others that do is warned of.

    Args:
        tensor_layout: `--tensor-layout` values, which decide what is a map.

    Raises:
        UsageError: nothing matches; lists the types present, and functions that do the same.
        ForwardError: no selectors or one for functions, and the model cannot take `blank`.
    """
    if text is None:
        return _first_look(model, blank, tensor_layout)
    layers, wanted = list_layers(model.module), selectors.parse(text)
    if selectors.wants_functions(wanted):
        layers += functions(model, blank)
    chosen = selectors.select(layers, wanted)
    if not chosen:
        raise _no_match(model, text, wanted, layers, blank)
    for idle in selectors.idle(layers, wanted):
        meant = selectors.meant(layers, selectors.parse(idle))
        log.warning("selector %r matches no layer%s", idle, f"; {meant}" if meant else "")
    return chosen


def _first_look(
    model: LoadedModel, blank: Sequence[Tensor], tensor_layout: Sequence[str]
) -> list[Layer]:
    layers, book = list_layers(model.module), HintBook(model.module, blank[0].shape, tensor_layout)
    with book.traced(model.module, layers):
        ran = probe(model, blank, layers, ("output", "input"))
    height, width = book.of(layers[0]).input_size or blank[0].shape[-2:]
    learned = {
        name
        for name, module in modules_by_name(model.module).items()
        if next(module.parameters(), None) is not None
    }
    calls = []
    for (layer, number), given in ran.given.items():
        taken = ran.taken.get((layer, number), ())
        beside_image = [shape for shape in taken if shape[-2:] != [height, width]]  # and its mask
        maps = [size for size in _sizes(beside_image, book, layer, "input") if size is not None]
        several = len(maps) > 2 or len(set(maps)) > 1
        sizes = _sizes(given, book, layer, "output")
        size = sizes[0] if several else next((size for size in sizes if size is not None), None)
        calls.append(Ran(layer, size, several, layer.name in learned))
    chosen = first_look.stages(calls, (height, width))
    return chosen or first_look.vectors(ran.outputs)


def _sizes(
    shapes: Iterable[Sequence[int]], book: HintBook, layer: Layer, side: str
) -> list[first_look.Size | None]:
    """Height and width of each tensor's maps; None where they are no maps, or have one place."""
    sizes = (map_size(shape, book.of_shape(layer, shape, side)) for shape in shapes)
    return [size[1:] if size is not None and size[1] * size[2] > 1 else None for size in sizes]


def _no_match(
    model: LoadedModel,
    text: str,
    wanted: list[Selector],
    layers: list[Layer],
    blank: Sequence[Tensor],
) -> UsageError:
    more = _functions_instead(model, wanted, blank)
    if selectors.wants_functions(wanted):
        called = [layer for layer in layers if layer.is_function]
        more.append(f"functions here: {selectors.types_present(called)}")
    hint = selectors.remedy(layers, wanted, *more)
    return UsageError(f"no layer matches --layers {text!r}", hint)


def _functions_instead(
    model: LoadedModel, wanted: list[Selector], blank: Sequence[Tensor]
) -> list[str]:
    try:
        layers = functions(model, blank)
    except ForwardError:
        return []
    names: Counter[str] = Counter()
    for layer, calls in layers.items():
        names[layer.type.removeprefix("fn:")] += calls
    return [
        f"the model calls the function {name} {count} times, which is no module: --layers fn:{name}"
        for selector in wanted
        for name, count in names.items()
        if like_module(name, selector.text)
    ]
