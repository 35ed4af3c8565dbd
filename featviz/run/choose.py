"""Which layers are drawn, of those that a forward pass on zeros meets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from torch import Tensor

from featviz.errors import ForwardError, UsageError
from featviz.hooks import selectors
from featviz.hooks.capture import list_functions
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import like_module, list_layers
from featviz.models.load import LoadedModel
from featviz.records import Layer
from featviz.text import counted, gaps


def functions(model: LoadedModel, blank: Sequence[Tensor]) -> dict[Layer, int]:
    """The functions that the model's modules call, as layers with the number of their
    calls; ForwardError where the model fails.

    Args:
        blank: zeros, as the model takes them: a tensor [1, ...] for each input.
    """
    with in_eval_mode(model.module):
        return list_functions(model.module, [arg.to(model.device) for arg in blank])


def choose_layers(
    model: LoadedModel,
    text: str | None,
    blank: Sequence[Tensor],
    tensor_layout: Sequence[str] = (),
) -> list[Layer]:
    """The layers that the selectors take; without any, one for each stage of the model.

    Args:
        text: the selectors. One that matches nothing beside others that do is warned
            of.
        blank: zeros, as the model takes them: a tensor [1, ...] for each input.
        tensor_layout: values of `--tensor-layout`, which a first look reads by.

    Raises:
        UsageError: a selector cannot be read, or no layer matches; the hint names the
            types that there are, and functions that do the same.
    """
    if text is None:
        from featviz.run.stages import first_look

        return first_look(model, blank, tensor_layout)
    layers = list_layers(model.module)
    parsed = selectors.parse(text)
    # which functions a model calls only a forward pass tells
    takes_functions = bool(selectors.of_functions(parsed))
    if takes_functions:
        layers += functions(model, blank)
    chosen = selectors.select(layers, parsed)
    if not chosen:
        notes = _functions_like(model, blank, parsed)
        if takes_functions:
            called = [layer for layer in layers if layer.is_function]
            notes.append(f"functions here: {selectors.types_present(called)}")
        raise UsageError(
            f"no layer matches --layers {text!r}",
            selectors.remedy(layers, parsed, *notes),
        )
    selectors.warn_of_unmatched(layers, parsed)
    return chosen


def no_channels(
    count: int, skipped: Mapping[str, str], never_ran: Collection[str]
) -> UsageError:
    """The error where no layer can be looked into channel by channel.

    Args:
        count: of the layers that were selected.
        skipped: reasons, by the label of the layer.
        never_ran: labels.
    """
    return UsageError(
        f"no tensor with channels in {counted(count, 'selected layer')}",
        "; ".join(gaps(skipped, never_ran)),
    )


def _functions_like(
    model: LoadedModel, blank: Sequence[Tensor], parsed: Sequence[selectors.Selector]
) -> list[str]:
    """Notes for the hint of an error: functions that the model calls and that do what
    modules of a selected class would do. None where the model fails on a blank input."""
    # a model that fails has an error of its own; here the selectors are at fault
    calls: Counter[str] = Counter()
    with suppress(ForwardError):
        for layer, count in functions(model, blank).items():
            calls[layer.type.removeprefix("fn:")] += count
    notes = []
    for selector in parsed:
        for name, count in calls.items():
            if like_module(name, selector.text):
                times = "once" if count == 1 else f"{count} times"
                notes.append(
                    f"the model calls the function {name} {times}, which is no"
                    f" module: --layers fn:{name}"
                )
    return notes
