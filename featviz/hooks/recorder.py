"""What hooks do with a tensor: count the call, name the site, hand it to the sink.

The sink must be done with the tensor when it returns, since a later in-place operation may
overwrite it. Gradients are taken by hooks on the tensors themselves, placed while the forward pass
runs: they belong to the value that the tensor has at that moment, so a later in-place operation
(which full backward hooks of modules refuse) does not disturb them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from featviz.errors import LayoutError
from featviz.hooks.functions import function_name
from featviz.hooks.structure import describe, leaves
from featviz.records import Layer, Site, Skip

Sink = Callable[[Site, Tensor], None]
"""Takes a tensor while it is true; raises LayoutError for one that cannot be drawn."""

KINDS = ("output", "input", "grad", "grad-input")
"""What can be taken of a layer."""


class Recorder:
    """Counts the calls of hooked layers and passes what they give, and get, to the sink."""

    def __init__(
        self, layers: Sequence[Layer], sink: Sink, kinds: Sequence[str] = ("output",)
    ) -> None:
        self.layers = layers
        self.sink = sink
        self.kinds = frozenset(kinds)
        self._functions = {layer.name: layer for layer in layers if layer.is_function}
        self.calls: Counter[str] = Counter()
        """By name of the layer."""
        self._entered: Counter[str] = Counter()
        self.skipped: list[Skip] = []
        self._awaited: dict[Site, None] = {}
        self.fault: Exception | None = None
        """What the sink raised, to tell a fault of ours from one of the model."""

    @property
    def never_ran(self) -> list[Layer]:
        """Hooked layers that did not fire."""
        return [layer for layer in self.layers if not self.calls[layer.name]]

    @property
    def takes_inputs(self) -> bool:
        """Whether layers must be watched before they run."""
        return bool(self.kinds & {"input", "grad-input"})

    def enter(self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take what goes into a layer: a single argument under the empty key, else by position
        or name; what is no tensor is left out."""
        call = self._entered[layer.name]
        self._entered[layer.name] += 1
        given: Any = {**dict(enumerate(args)), **kwargs}
        if len(given) == 1:
            (given,) = given.values()
        for key, value in leaves(given):
            if isinstance(value, Tensor):
                self._take_both(Site(layer, "input", call, key), value)

    def leave(self, layer: Layer, output: Any) -> None:
        """Take what a layer gives."""
        call = self.calls[layer.name]
        self.calls[layer.name] += 1
        for key, value in leaves(output):
            self._take_both(Site(layer, "output", call, key), value)

    def enter_function(self, owner: str, function: str, args: Any, kwargs: Any) -> None:
        """Take what goes into a function, if it is one of the layers."""
        if (layer := self._functions.get(function_name(owner, function))) is not None:
            self.enter(layer, args, kwargs)

    def leave_function(self, owner: str, function: str, result: Any) -> None:
        """Take what a function gave, if it is one of the layers."""
        if (layer := self._functions.get(function_name(owner, function))) is not None:
            self.leave(layer, result)

    def close(self) -> None:
        """The backward pass is over: gradients that did not come never will."""
        for site in self._awaited:
            self._skip(site, "has no gradient: the target does not depend on it")
        self._awaited.clear()

    def _take_both(self, site: Site, value: Any) -> None:
        if site.kind in self.kinds:
            self._take(site, value)
        kind = "grad" if site.kind == "output" else "grad-input"
        if kind in self.kinds and isinstance(value, Tensor):
            self._await(Site(site.layer, kind, site.call, site.key), value)

    def _await(self, site: Site, tensor: Tensor) -> None:
        if not tensor.requires_grad:
            self._skip(site, "has no gradient: it does not depend on the input")
            return
        self._awaited[site] = None
        tensor.register_hook(partial(self._arrived, site))  # type: ignore[no-untyped-call]

    def _arrived(self, site: Site, gradient: Tensor) -> None:
        self._awaited.pop(site, None)
        self._take(site, gradient)

    def _take(self, site: Site, value: Any) -> None:
        if not isinstance(value, Tensor):
            self._skip(site, f"is {describe(value)}, not a tensor")
            return
        try:
            self.sink(site, value.detach())
        except LayoutError as error:
            self._skip(site, error.message)
        except Exception as error:
            self.fault = error
            raise

    def _skip(self, site: Site, reason: str) -> None:
        at = site.layer
        self.skipped.append(
            Skip(at.name, at.type, at.index, site.kind, site.call, site.key, reason)
        )
