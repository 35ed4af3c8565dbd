"""Which layers are drawn, of those that a forward pass on zeros meets."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from featviz.errors import ForwardError, UsageError
from featviz.hooks import selectors
from featviz.hooks.capture import forward
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.functions import list_functions
from featviz.hooks.layers import like_module, list_layers
from featviz.models.load import LoadedModel
from featviz.records import Layer

log = logging.getLogger(__name__)


def functions(model: LoadedModel, blank: Sequence[Tensor]) -> dict[Layer, int]:
    """The functions that the model's modules call, as layers with the number of their calls."""
    args, module = [arg.to(model.device) for arg in blank], model.module
    with in_eval_mode(module):
        found = forward(module, args, call=lambda *args: list_functions(module, args))
    return dict(found)


def choose_layers(
    model: LoadedModel, text: str | None, blank: Sequence[Tensor], tensor_layout: Sequence[str] = ()
) -> list[Layer]:
    """The layers that the selectors take; without any, one for each stage of the model. A selector
    that matches nothing beside others that do is warned of."""
    if text is None:
        from featviz.run.stages import first_look

        return first_look(model, blank, tensor_layout)
    layers = list_layers(model.module)
    wanted = selectors.parse(text, layers)
    if selectors.of_functions(wanted):
        layers += functions(model, blank)
    if chosen := selectors.select(layers, wanted):
        for idle in (one for one in wanted if not one.pick(layers)):
            meant = selectors.meant(layers, [idle])
            log.warning("selector %r matches no layer%s", idle.text, f"; {meant}" if meant else "")
        return chosen
    # the functions that do the same, and the types that there are
    names: Counter[str] = Counter()
    with suppress(ForwardError):
        for layer, calls in functions(model, blank).items():
            names[layer.type.removeprefix("fn:")] += calls
    more = [
        f"the model calls the function {name} {count} times, which is no module: --layers fn:{name}"
        for selector in wanted
        for name, count in names.items()
        if like_module(name, selector.text)
    ]
    if selectors.of_functions(wanted):
        called = [layer for layer in layers if layer.is_function]
        more.append(f"functions here: {selectors.types_present(called)}")
    hint = selectors.remedy(layers, wanted, *more)
    raise UsageError(f"no layer matches --layers {text!r}", hint)
