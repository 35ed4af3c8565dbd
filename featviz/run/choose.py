"""Chooses the layers that are drawn."""

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
    """Run the model on zeros, and list the functions that its modules call.

    Args:
        blank: zeros in the shapes of the model's inputs: a tensor [1, ...] for each.

    Returns:
        The functions as layers, each with the number of its calls.

    Raises:
        ForwardError: the model fails.
    """
    with in_eval_mode(model.module):
        return list_functions(model.module, [arg.to(model.device) for arg in blank])


def choose_layers(
    model: LoadedModel,
    text: str | None,
    blank: Sequence[Tensor],
    tensor_layout: Sequence[str] = (),
) -> list[Layer]:
    """The layers that the selectors match. Warns of a selector that matches nothing, if
    another one matches something.

    Args:
        text: the selectors; None chooses the layers of a first look (`first_look`).
        blank: zeros in the shapes of the model's inputs: a tensor [1, ...] for each.
        tensor_layout: the values of `--tensor-layout`, for the first look.

    Raises:
        UsageError: a selector cannot be read, or no layer matches. The hint names the
            types of the model's layers, and functions that do the same as a selected
            type.
        ForwardError: the model fails on zeros, and a first look or a selector of
            functions needs a forward pass.
    """
    if text is None:
        from featviz.run.stages import first_look

        return first_look(model, blank, tensor_layout)
    layers = list_layers(model.module)
    parsed = selectors.parse(text)
    # only a forward pass tells which functions a model calls
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
    """The error for selected layers of which none has a tensor with channels.

    Args:
        count: how many layers were selected.
        skipped: why layers were skipped, by their labels.
        never_ran: the labels of layers that never ran.
    """
    return UsageError(
        f"no tensor with channels in {counted(count, 'selected layer')}",
        "; ".join(gaps(skipped, never_ran)),
    )


def _functions_like(
    model: LoadedModel, blank: Sequence[Tensor], parsed: Sequence[selectors.Selector]
) -> list[str]:
    """Notes for the hint of an error: each names a function that the model calls, and that
    does the same as a selected class of modules. Empty if the model fails on zeros.

    Args:
        blank: zeros in the shapes of the model's inputs: a tensor [1, ...] for each.
        parsed: the selectors, which match no layer.
    """
    # an error of the model is dropped: the user is to learn that the selectors are wrong
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
