"""A forward pass on zeros: which layers run, in which order, with which shapes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from featviz.errors import ForwardError, UsageError
from featviz.hooks import faults, forward, hooked, list_functions, list_layers
from featviz.hooks import selectors as select
from featviz.hooks.eval_mode import borrowed
from featviz.hooks.functions import like_module
from featviz.hooks.selectors import Selector
from featviz.layout import map_size
from featviz.layout.overrides import HintBook
from featviz.models.load import LoadedModel
from featviz.records import Layer, Site

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """What ran, in the order in which the layers finished."""

    outputs: list[tuple[Layer, list[int]]] = field(default_factory=list)
    """Every tensor that a layer gave, with its shape."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls by name of the layer."""

    def shape(self, layer: Layer) -> list[int] | None:
        """Shape of the first tensor of the layer's first call."""
        return next((shape for at, shape in self.outputs if at == layer), None)


def probe(model: LoadedModel, blank: Sequence[Tensor], layers: Sequence[Layer]) -> Probe:
    """Run the model once on `blank` with these layers hooked.

    Raises:
        ForwardError: the model cannot take it.
    """
    found = Probe()

    def sink(site: Site, tensor: Tensor) -> None:
        if not tensor.is_nested:  # has no shape
            found.outputs.append((site.layer, list(tensor.shape)))

    with borrowed(model.module), hooked(model.module, layers, sink) as recorder:
        forward(model.module, _on_device(model, blank), recorder)
        found.calls.update(recorder.calls)
    return found


def functions(model: LoadedModel, blank: Sequence[Tensor]) -> dict[Layer, int]:
    """The functions that the model's modules call, as layers with the number of their calls.

    Raises:
        ForwardError: the model cannot take `blank`.
    """
    args = _on_device(model, blank)
    with borrowed(model.module), faults(model.module, args):
        return list_functions(model.module, args)


def choose_layers(
    model: LoadedModel, text: str | None, blank: Sequence[Tensor], told: Sequence[str] = ()
) -> list[Layer]:
    """The layers that the selectors take; without any, one for each stage of the model.

    A selector that matches nothing beside others that do is warned of.

    Args:
        told: `--tensor-layout` values, which decide what is a map.

    Raises:
        UsageError: nothing matches; lists the types present, and functions that do the same.
        ForwardError: no selectors or one for functions, and the model cannot take `blank`.
    """
    if text is None:
        return _first_look(model, blank, told)
    layers, selectors = list_layers(model.module), select.parse(text)
    if select.wants_functions(selectors):
        layers += functions(model, blank)
    chosen = select.select(layers, selectors)
    if not chosen:
        raise _no_match(model, text, selectors, layers, blank)
    for idle in select.idle(layers, selectors):
        log.warning("selector %r matches no layer", idle)
    return chosen


def _first_look(model: LoadedModel, blank: Sequence[Tensor], told: Sequence[str]) -> list[Layer]:
    outputs = probe(model, blank, list_layers(model.module)).outputs
    book = HintBook(model.module, blank[0].shape, told)
    chosen = select.stages((at, map_size(shape, book.of(at))) for at, shape in outputs)
    return chosen or select.vectors(outputs)


def _no_match(
    model: LoadedModel,
    text: str,
    selectors: list[Selector],
    layers: list[Layer],
    blank: Sequence[Tensor],
) -> UsageError:
    close = select.nearest(layers, selectors)
    hints = [f"did you mean {' or '.join(close)}?"] if close else []
    hints += _functions_instead(model, selectors, blank)
    if select.wants_functions(selectors):
        hints.append(f"functions here: {select.types_present(x for x in layers if x.is_function)}")
    hints.append(f"types here: {select.types_present(x for x in layers if not x.is_function)}")
    return UsageError(f"no layer matches --layers {text!r}", "; ".join(hints))


def _functions_instead(
    model: LoadedModel, selectors: list[Selector], blank: Sequence[Tensor]
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
        for selector in selectors
        for name, count in names.items()
        if like_module(name, selector.text)
    ]


def _on_device(model: LoadedModel, blank: Sequence[Tensor]) -> list[Tensor]:
    return [arg.to(model.device) for arg in blank]
