"""One pass through a model that follows what every tensor sees of the input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from featviz.exemplars.fields import Field, Reach
from featviz.exemplars.rules import sight_of
from featviz.exemplars.sights import FunctionCall, Seen, Sight
from featviz.hooks.containers import leaves, tensors
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.forward import forward
from featviz.hooks.functions import unwatched, watching
from featviz.hooks.layers import function_in
from featviz.records import Layer

Key = tuple[str, int, str]
"""Name of a layer, number of its call, and path of a tensor in its output."""

_OTHER_FORM = (TypeError, ValueError, IndexError, AttributeError, LookupError)
"""What a rule raises on a form of the call that it does not know."""


def follow(model: nn.Module, layers: Sequence[Layer], args: Sequence[Tensor]) -> dict[Key, Seen]:
    """What each tensor that these layers give sees of the first argument, an image [1, C, H, W].

    Tensors are told apart by identity, and kept while the pass lasts. All functions are heard,
    those in torch's own modules too.

    Raises:
        ForwardError: the model cannot take the arguments.
    """
    walk = _Walk(model, [layer.name for layer in layers], args)
    chosen = [layer for layer in layers if not layer.is_function]
    with (
        in_eval_mode(model, gradients=True),
        torch.no_grad(),  # unlike inference mode, it tells views
        watching(model, walk.leave, walk.enter, chosen, lambda layer: True, lambda name, m: False),
    ):
        forward(model, args)
    return walk.found


class _Walk:
    """What is known so far while a pass runs."""

    def __init__(self, model: nn.Module, names: Sequence[str], args: Sequence[Tensor]) -> None:
        self.found: dict[Key, Seen] = {}
        self._names, self._calls = frozenset(names), Counter[str]()
        self._sights: dict[int, Seen] = {}
        self._alive: list[Tensor] = []
        for tensor in (*model.parameters(), *model.buffers()):
            self._note(tensor, Sight.CONSTANT)
        height, width = args[0].shape[-2:]
        self._note(args[0], Field(Reach.of_input(height), Reach.of_input(width), (-2, -1)))

    def enter(self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An assignment to a part of a tensor returns nothing, and mixes what was there before."""
        if function_in(layer.name) == "setitem":
            self._spoil(args[0])

    def leave(
        self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """A function or a chosen module has returned."""
        with unwatched():
            if (function := function_in(layer.name)) is not None:
                self._apply(function, args, kwargs, output)
            if layer.name in self._names:
                self._find(layer.name, output)

    def _apply(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        given, gave = tensors([args, kwargs]), tensors(out)
        sights = [self._sights.get(id(tensor), Sight.UNKNOWN) for tensor in given]
        known = tuple(sight for sight in sights if isinstance(sight, Field))
        try:
            sight = sight_of(FunctionCall(name, args, kwargs, known, gave[0]), sights)
        except _OTHER_FORM:
            sight = Sight.UNKNOWN
        if given and gave[0] is given[0] and sight is not sights[0]:
            self._spoil(given[0])  # in place: a tensor of which it is a view has changed, too
        for tensor in gave:
            self._note(tensor, sight if _fits(sight, tensor) else Sight.UNKNOWN)

    def _find(self, name: str, output: Any) -> None:
        call = self._calls[name]
        self._calls[name] += 1
        for key, value in leaves(output):
            if isinstance(value, Tensor):
                self.found[name, call, key] = self._sights.get(id(value), Sight.UNKNOWN)

    def _note(self, tensor: Tensor, sight: Seen) -> None:
        self._sights[id(tensor)] = sight
        self._alive.append(tensor)

    def _spoil(self, tensor: Tensor) -> None:
        """A part of a tensor changes, and with it the tensor of which it is a part."""
        self._note(tensor, Sight.UNKNOWN)
        if tensor._is_view() and tensor._base is not None:
            self._note(tensor._base, Sight.UNKNOWN)


def _fits(sight: Seen, tensor: Tensor) -> bool:
    """Whether a table has the rows and columns that its tensor has."""
    if not isinstance(sight, Field):
        return True
    counts = [tensor.shape[axis] for axis in sight.axes if -axis <= tensor.dim()]
    return counts == [len(sight.rows), len(sight.columns)]
