"""Calls of functions inside forward, which module hooks do not see: torch's function mode does.

A call of a module belongs to the place from which it was called (`Running`). There is one function
mode: capturing, auditing and listing functions watch calls through it, and the rules for ReLU
replace functions with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from featviz.hooks.layers import (
    function_layer,
    function_name,
    gives_tensors,
    home_of,
    read_places,
)
from featviz.records import Layer

Enter = Callable[[Layer, Sequence[Any], Mapping[str, Any]], None]
Leave = Callable[[Layer, Sequence[Any], Mapping[str, Any], Any], None]
Replacement = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Computes the result of a call in the function's place; takes the function and its arguments."""


class Running:
    """Knows to which layer each call of a module belongs, while `followed` lasts."""

    def __init__(self, model: nn.Module) -> None:
        """Read the places of the model's modules."""
        self._model, (_, self._callers, self._of_module) = model, read_places(model)
        self._frames: list[tuple[Layer, bool, Counter[int]]] = []
        """Calls that have not returned: the layer, whether its functions are heard, and its calls
        of each shared module so far, by id."""
        self._candidates: dict[tuple[int, int], Sequence[Layer]] = {}

    @property
    def heard(self) -> Layer | None:
        """The innermost layer; None outside of all, and in one whose functions are not heard."""
        return self._frames[-1][0] if self._frames and self._frames[-1][1] else None

    def places(self, module: nn.Module) -> Sequence[Layer]:
        """The layers that a module is, one for each place in which it stands."""
        return self._of_module[id(module)]

    def now(self, places: Sequence[Layer]) -> Layer:
        """The layer to which a call belongs; asked from a hook of the module in these places."""
        return places[0] if len(places) == 1 else self._frames[-1][0]

    @contextmanager
    def followed(
        self, names: Collection[str], heard: Callable[[nn.Module], bool] | None = None
    ) -> Iterator[None]:
        """Follow the calls of modules, as far as the layers of these names, or those who hear the
        functions of modules, need it. A call is over behind all hooks that were there before."""
        shared = (p for p in self._of_module.values() if len(p) > 1)
        needed = heard is not None or any(layer.name in names for p in shared for layer in p)

        def pushing(module: nn.Module) -> Callable[..., None]:
            """A hook that knows of which module it is: a copy of the module has it, too."""
            is_heard = heard is not None and heard(module)

            def push(_: nn.Module, args: Any) -> None:
                self._frames.append((self._reached(module), is_heard, Counter()))

            return push

        def pop(module: nn.Module, args: Any, output: Any) -> None:
            self._frames.pop()

        with ExitStack() as stack:
            for module in self._model.modules() if needed else ():
                push = pushing(module)
                before = module.register_forward_pre_hook(push, prepend=True)  # others may raise
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(pop, always_call=True).remove)
            yield

    def _reached(self, module: nn.Module) -> Layer:
        """The layer that a module is where it is called now: the places from which the caller calls
        it, in the order of the calls. Where the caller reaches into a module that is not called
        itself those nearest to it, and without any the first place."""
        places, key = self.places(module), id(module)
        if len(places) == 1 or not self._frames:
            return places[0]
        caller, _, called = self._frames[-1]
        if (key, caller.index) not in self._candidates:
            found = [p for p in places if self._callers[p.index] == caller.index]
            if not found:
                prefix = f"{caller.name}." if caller.name else ""
                inside = [place for place in places if place.name.startswith(prefix)]
                depth = min((place.name.count(".") for place in inside), default=0)
                found = [place for place in inside if place.name.count(".") == depth]
            self._candidates[key, caller.index] = found or places[:1]
        candidates, number = self._candidates[key, caller.index], called[key]
        called[key] += 1
        return candidates[min(number, len(candidates) - 1)]


class FunctionMode(TorchFunctionMode):
    """Reports the torch functions and tensor methods that modules call, and may replace some."""

    def __init__(
        self,
        leave: Leave = lambda layer, args, kwargs, result: None,
        enter: Enter | None = None,
        wanted: Callable[[Layer], bool] = lambda layer: True,
        replacements: Mapping[str, Replacement] | None = None,
        running: Running | None = None,
    ) -> None:
        """Say who hears of calls that are `wanted`: `enter` before each, `leave` after each that
        returns tensors; without `running`, which knows the calling module, nobody does.
        `replacements`, by the name of the function, are in force outside of modules as well."""
        super().__init__()
        self.leave, self.enter, self.wanted = leave, enter, wanted
        self.replacements = replacements or {}
        self.running = running
        self._layers: dict[tuple[str, str], Layer] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        module = self.running.heard if self.running is not None else None
        if module is None and not self.replacements:
            return func(*args, **kwargs)
        name = function_name(func)
        layer = None
        if module is not None and name and (layer := self._layers.get((module.name, name))) is None:
            layer = self._layers[module.name, name] = function_layer(module, name)
        if layer is not None and self.enter is not None and self.wanted(layer):
            self.enter(layer, args, kwargs)
        replacement = self.replacements.get(name)
        result = replacement(func, args, kwargs) if replacement else func(*args, **kwargs)
        if layer is not None and gives_tensors(result) and self.wanted(layer):
            self.leave(layer, args, kwargs, result)
        return result


@contextmanager
def watching(
    model: nn.Module,
    leave: Leave,
    enter: Enter | None = None,
    layers: Sequence[Layer] = (),
    functions: Callable[[Layer], bool] | None = None,
    opaque: Callable[[str, nn.Module], bool] | None = None,
) -> Iterator[None]:
    """Report the calls of modules and functions to `leave` and `enter` in this block, before all
    hooks that are there already; see `placed`."""
    with placed(model, leave, enter, layers, functions, opaque, first=True) as mode, mode:
        yield


@contextmanager
def placed(
    model: nn.Module,
    leave: Leave,
    enter: Enter | None = None,
    layers: Sequence[Layer] = (),
    functions: Callable[[Layer], bool] | None = None,
    opaque: Callable[[str, nn.Module], bool] | None = None,
    changes: Sequence[tuple[Layer, Callable[[Any], Any]]] = (),
    first: bool = False,
) -> Iterator[AbstractContextManager[Any]]:
    """Place hooks that report the calls of modules, for any number of passes, and remove them;
    yields what is to be entered around each pass, so that its functions are reported.

    Args:
        layers: the modules whose calls are reported.
        functions: asked at each call of a function whether it is reported; None watches none. What
            a function calls inside is not reported.
        opaque: takes a module's name and the module, and says whether the functions that it calls
            are not reported. By default they are not where torch wrote the forward, inherited or
            not: a ReLU module is reported as a module.
        changes: layers, and functions whose results take the place of their outputs before
            these are reported; None leaves an output as it is.
        first: report before all hooks that are there already.
    """
    running, names = Running(model), {layer.name for layer in (*layers, *(at for at, _ in changes))}
    reported = {layer.name for layer in layers}

    def heard(module: nn.Module) -> bool:
        if opaque is not None:
            return not opaque(running.places(module)[0].name, module)
        return not home_of(module).startswith(("torch.nn.", "torch.ao.nn."))

    def hooks_of(places: Sequence[Layer]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        only = places[0] if len(places) == 1 else None
        change = {at: how for at, how in changes if at in places}

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            layer = only or running.now(places)
            if enter is not None and layer.name in reported:
                enter(layer, args, kwargs)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            layer, changed = only or running.now(places), None
            if layer in change:
                with unwatched():
                    changed = change[layer](output)
            if layer.name in reported:
                leave(layer, args, kwargs, output if changed is None else changed)
            return changed

        return before, after

    with ExitStack() as stack:
        for module in model.modules():
            if any(layer.name in names for layer in running.places(module)):
                before, after = hooks_of(running.places(module))
                hook = module.register_forward_hook(after, with_kwargs=True, prepend=first)
                stack.callback(hook.remove)
                if enter is not None:
                    hook = module.register_forward_pre_hook(before, with_kwargs=True, prepend=first)
                    stack.callback(hook.remove)
        stack.enter_context(running.followed(names, heard if functions is not None else None))
        mode = FunctionMode(leave, enter, functions, running=running) if functions else None
        yield mode or nullcontext()


def list_functions(model: nn.Module, args: Sequence[Any]) -> dict[Layer, int]:
    """The functions that modules call in one forward pass, in the order of their first calls."""
    calls: Counter[Layer] = Counter()

    def count(layer: Layer, args: Any, kwargs: Any, result: Any) -> None:
        calls[layer] += 1

    with watching(model, count, functions=lambda layer: True):
        model(*args)
    return dict(calls)


unwatched: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""A block that belongs to no module: what hooks compute is not reported."""
