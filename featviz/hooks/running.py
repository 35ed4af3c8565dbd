"""Which layers are running: a call of a module belongs to the place from which it was called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from featviz.hooks.layers import read_places
from featviz.records import Layer


class _UnderWay:
    """A call of a module that has not returned."""

    __slots__ = ("called", "heard", "layer")

    def __init__(self, layer: Layer, heard: bool) -> None:
        self.layer, self.heard = layer, heard
        self.called: Counter[int] = Counter()
        """The calls of each shared module out of this one so far, by its id."""


class Running:
    """Knows to which layer each call of a module belongs, while `followed` lasts."""

    def __init__(self, model: nn.Module) -> None:
        """Read the places of the model's modules."""
        self._model, self._places = model, read_places(model)
        self._frames: list[_UnderWay] = []
        self._candidates: dict[tuple[int, int], Sequence[Layer]] = {}

    @property
    def heard(self) -> Layer | None:
        """The innermost layer; None outside of all, and in one whose functions are not heard."""
        frame = self._frames[-1] if self._frames else None
        return frame.layer if frame is not None and frame.heard else None

    def places(self, module: nn.Module) -> Sequence[Layer]:
        """The layers that a module is, one for each place in which it stands."""
        return self._places.of_module[id(module)]

    def now(self, places: Sequence[Layer]) -> Layer:
        """The layer to which a call belongs; asked from a hook of the module in these places."""
        return places[0] if len(places) == 1 else self._frames[-1].layer

    def only(self, layer: Layer, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A forward hook of a layer's module that acts at the calls of this layer alone."""
        places = next(p for p in self._places.of_module.values() if layer in p)

        def at_its_calls(*args: Any) -> Any:
            return hook(*args) if self.now(places) == layer else None

        return at_its_calls

    @contextmanager
    def followed(
        self, names: Collection[str], heard: Callable[[nn.Module], bool] | None = None
    ) -> Iterator[None]:
        """Follow the calls of modules, as far as the layers of these names need it.

        Forward hooks that ask for layers are registered before: a call is over behind all hooks
        that were there when this was entered.

        Args:
            heard: whether somebody listens to the functions that a module calls; None where nobody
                listens to any.
        """
        shared = (p for p in self._places.of_module.values() if len(p) > 1)
        needed = heard is not None or any(layer.name in names for p in shared for layer in p)
        with ExitStack() as stack:
            for module in self._model.modules() if needed else ():
                for handle in self._follow(module, heard is not None and heard(module)):
                    stack.callback(handle.remove)
            yield

    def _follow(self, module: nn.Module, heard: bool) -> Iterator[Any]:
        places, key = self.places(module), id(module)

        def push(module: nn.Module, args: Any) -> None:
            layer = places[0] if len(places) == 1 else self._reached(key, places)
            self._frames.append(_UnderWay(layer, heard))

        def pop(module: nn.Module, args: Any, output: Any) -> None:
            self._frames.pop()

        yield module.register_forward_pre_hook(push, prepend=True)  # other hooks may raise
        yield module.register_forward_hook(pop, always_call=True)

    def _reached(self, key: int, places: Sequence[Layer]) -> Layer:
        """The place in which a shared module is being called now."""
        if not self._frames:
            return places[0]
        frame = self._frames[-1]
        at = (key, frame.layer.index)
        if at not in self._candidates:
            self._candidates[at] = self._within(frame.layer, places)
        candidates, number = self._candidates[at], frame.called[key]
        frame.called[key] += 1
        return candidates[min(number, len(candidates) - 1)]

    def _within(self, caller: Layer, places: Sequence[Layer]) -> Sequence[Layer]:
        """The places from which a layer calls a module, in the order of the calls.

        A layer may also reach into one that is not called itself: then these are the places nearest
        to it. Where there are none at all, the module's first place stands for them.
        """
        direct = [p for p in places if self._places.callers[p.index] == caller.index]
        if direct:
            return direct
        prefix = f"{caller.name}." if caller.name else ""
        inside = [place for place in places if place.name.startswith(prefix)]
        depth = min((place.name.count(".") for place in inside), default=0)
        return [place for place in inside if place.name.count(".") == depth] or places[:1]
