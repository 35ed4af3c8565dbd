"""A forward pass on zeros: which layers run, in which order, with which shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from featviz import select
from featviz.borrowed import borrowed
from featviz.errors import ForwardError, UsageError
from featviz.functions import count_functions, like_module
from featviz.hooks import forward, hooked, list_layers
from featviz.layout import channels_first
from featviz.models.load import LoadedModel
from featviz.records import Layer, Site


@dataclass(frozen=True)
class Probe:
    """What ran, in the order in which the layers finished."""

    outputs: list[tuple[Layer, list[int]]] = field(default_factory=list)
    """Every tensor that a layer gave, with its shape."""
    calls: Counter[int] = field(default_factory=Counter)
    """Calls by layer index."""

    def shape(self, layer: Layer) -> list[int] | None:
        """Shape of the first tensor of the layer's first call."""
        return next((shape for at, shape in self.outputs if at == layer), None)


def probe(model: LoadedModel, blank: Tensor) -> Probe:
    """Run the model once on `blank` with every layer hooked.

    Raises:
        ForwardError: the model cannot take it.
    """
    layers = list_layers(model.module)
    found = Probe()

    def sink(site: Site, tensor: Tensor) -> None:
        found.outputs.append((site.layer, list(tensor.shape)))

    with borrowed(model.module), hooked(model.module, layers, sink) as recorder:
        forward(model.module, [blank.to(model.device)], recorder)
        found.calls.update(recorder.calls)
    return found


def choose_layers(model: LoadedModel, text: str | None, blank: Tensor) -> list[Layer]:
    """The layers that the selectors take; without any, one for each stage of the model.

    Raises:
        UsageError: nothing matches; lists the types present, and functions that do the same.
        ForwardError: no selectors, and the model cannot take `blank`.
    """
    layers = list_layers(model.module)
    if text is None:
        size = (blank.shape[2], blank.shape[3])
        outputs = probe(model, blank).outputs
        return select.stages((at, channels_first(shape, size)) for at, shape in outputs)
    selectors = select.parse(text)
    chosen = select.select(layers, selectors)
    if not chosen:
        raise _no_match(model, text, selectors, layers, blank)
    return chosen


def _no_match(
    model: LoadedModel,
    text: str,
    selectors: list[select.Selector],
    layers: list[Layer],
    blank: Tensor,
) -> UsageError:
    close = select.nearest(layers, selectors)
    hints = [f"did you mean {' or '.join(close)}?"] if close else []
    hints += _functions_instead(model, selectors, blank)
    hints.append(f"types here: {select.types_present(layers)}")
    return UsageError(f"no layer matches --layers {text!r}", "; ".join(hints))


def _functions_instead(
    model: LoadedModel, selectors: list[select.Selector], blank: Tensor
) -> list[str]:
    try:
        with borrowed(model.module):
            counts = count_functions(model.module, [blank.to(model.device)])
    except (ForwardError, RuntimeError, TypeError, ValueError):
        return []
    return [
        f"the model calls the function {name} {count} times, which is no module"
        for selector in selectors
        for name, count in counts.items()
        if like_module(name, selector.text)
    ]
