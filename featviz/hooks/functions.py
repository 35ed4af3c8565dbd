"""Calls of functions inside forward, which module hooks do not see: torch's function mode does.

A call of a module belongs to the place from which it was called (`Running`). There is one function
mode: capturing, auditing and listing functions watch calls through it, and the rules for ReLU
replace functions with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from featviz.hooks.layers import function_layer, function_name, home_of, read_places
from featviz.records import Layer

Enter = Callable[[Layer, Sequence[Any], Mapping[str, Any]], None]
Leave = Callable[[Layer, Sequence[Any], Mapping[str, Any], Any], None]
Replacement = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Computes the result of a call in the function's place; takes the function and its arguments."""


class Running:
    """Knows to which layer each call of a module belongs, while `followed` lasts."""

    def __init__(self, model: nn.Module) -> None:
        """Read the places of the model's modules."""
        self._model, (_, self._callers, self.of_module) = model, read_places(model)
        self.frames: list[tuple[Layer, bool, Counter[int]]] = []
        """Calls that have not returned: the layer, whether its functions are reported, and its
        calls of each shared module so far, by id."""
        self._candidates: dict[tuple[int, int], Sequence[Layer]] = {}

    def now(self, places: Sequence[Layer]) -> Layer:
        """The layer to which a call belongs; asked from a hook of the module in these places."""
        return places[0] if len(places) == 1 else self.frames[-1][0]

    @contextmanager
    def followed(
        self, names: Collection[str], functions: bool = False, opaque: Collection[str] | None = None
    ) -> Iterator[None]:
        """Follow the calls of modules, as far as the layers of these names need it, or functions
        whose calls are reported; see `placed`. A call is over behind all hooks that were there
        before."""
        shared = (p for p in self.of_module.values() if len(p) > 1)
        needed = functions or any(layer.name in names for p in shared for layer in p)

        def pop(module: nn.Module, args: Any, output: Any) -> None:
            self.frames.pop()

        with ExitStack() as stack:
            for module in self._model.modules() if needed else ():
                is_heard = functions and self.of_module[id(module)][0].name not in (opaque or ())
                if functions and opaque is None:
                    is_heard = not home_of(module).startswith(("torch.nn.", "torch.ao.nn."))

                def push(
                    _: nn.Module, args: Any, own: nn.Module = module, is_heard: bool = is_heard
                ) -> None:  # a copy of the module has this hook, too
                    self.frames.append((self._reached(own), is_heard, Counter()))

                before = module.register_forward_pre_hook(push, prepend=True)  # others may raise
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(pop, always_call=True).remove)
            yield

    def _reached(self, module: nn.Module) -> Layer:
        """The layer that a module is where it is called now: the places from which the caller calls
        it, in the order of the calls. Where the caller reaches into a module that is not called
        itself those nearest to it, and without any the first place."""
        places, key = self.of_module[id(module)], id(module)
        if len(places) == 1 or not self.frames:
            return places[0]
        caller, _, called = self.frames[-1]
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


@dataclass(eq=False)
class FunctionMode(TorchFunctionMode):
    """Reports the torch functions and tensor methods that modules call, and may replace some.

    `enter` hears of calls that are `wanted` before each, `leave` after each that returns tensors;
    without `running` nobody does. `replacements` are in force outside of modules as well."""

    leave: Leave = lambda layer, args, kwargs, result: None
    enter: Enter | None = None
    wanted: Callable[[Layer], bool] = lambda layer: True
    replacements: Mapping[str, Replacement] = field(default_factory=dict)
    running: Running | None = None
    _layers: dict[tuple[str, str], Layer] = field(default_factory=dict)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, frames = kwargs or {}, self.running.frames if self.running is not None else ()
        module = frames[-1][0] if frames and frames[-1][1] else None
        if module is None and not self.replacements:
            return func(*args, **kwargs)
        name, layer = function_name(func), None
        if module is not None and name and (layer := self._layers.get((module.name, name))) is None:
            layer = self._layers[module.name, name] = function_layer(module, name)
        if layer is not None and self.enter is not None and self.wanted(layer):
            self.enter(layer, args, kwargs)
        replacement = self.replacements.get(name)
        result = replacement(func, args, kwargs) if replacement else func(*args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        gives_tensors = any(isinstance(item, Tensor) for item in results)  # not that of `x.shape`
        if layer is not None and gives_tensors and self.wanted(layer):
            self.leave(layer, args, kwargs, result)
        return result


@contextmanager
def placed(
    model: nn.Module,
    leave: Leave,
    enter: Enter | None = None,
    layers: Sequence[Layer] = (),
    functions: Callable[[Layer], bool] | None = None,
    opaque: Collection[str] | None = None,
    changes: Sequence[tuple[Layer, Callable[[Any], Any]]] = (),
    first: bool = False,
) -> Iterator[AbstractContextManager[Any]]:
    """Place hooks that report the calls of modules, for any number of passes, and remove them;
    yields what is to be entered around each pass, so that its functions are reported.

    Args:
        functions: asked at each call of a function whether it is reported; None watches none. What
            a function calls inside is not reported.
        opaque: names of modules whose calls of functions are not reported. None means those whose
            forward torch wrote, inherited or not: a ReLU module is reported as a module.
        changes: functions whose results take the place of layers' outputs; None leaves them.
        first: report before all hooks that are there already.
    """
    running, names = Running(model), {layer.name for layer in (*layers, *(at for at, _ in changes))}
    reported, change = {layer.name for layer in layers}, dict(changes)

    def before(places: Sequence[Layer], module: nn.Module, args: Any, kwargs: Any) -> None:
        layer = running.now(places) if places[1:] else places[0]
        if enter is not None and layer.name in reported:
            enter(layer, args, kwargs)

    def after(
        places: Sequence[Layer], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        layer, changed = running.now(places) if places[1:] else places[0], None
        if change and layer in change:
            with unwatched():
                changed = change[layer](output)
        if layer.name in reported:
            leave(layer, args, kwargs, output if changed is None else changed)
        return changed

    with ExitStack() as stack:
        for module in model.modules():
            places, how = running.of_module[id(module)], {"with_kwargs": True, "prepend": first}
            if any(layer.name in names for layer in places):
                hook = module.register_forward_hook(partial(after, places), **how)
                stack.callback(hook.remove)
                if enter is not None:
                    hook = module.register_forward_pre_hook(partial(before, places), **how)
                    stack.callback(hook.remove)
        stack.enter_context(running.followed(names, functions is not None, opaque))
        mode = FunctionMode(leave, enter, functions, running=running) if functions else None
        yield mode or nullcontext()


def list_functions(model: nn.Module, args: Sequence[Any]) -> dict[Layer, int]:
    """The functions that modules call in one forward pass, in the order of their first calls."""
    calls: Counter[Layer] = Counter()

    def count(layer: Layer, args: Any, kwargs: Any, result: Any) -> None:
        calls[layer] += 1

    with placed(model, count, functions=lambda layer: True, first=True) as mode, mode:
        model(*args)
    return dict(calls)


unwatched: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""A block that belongs to no module: what hooks compute is not reported."""
