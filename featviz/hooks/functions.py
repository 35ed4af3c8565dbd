"""Calls of functions inside forward, which module hooks do not see: torch's function
mode does.

A call of a module belongs to the place from which it was called (`CallStack`). There is
one function mode: capturing, auditing and listing functions watch calls through it, and
the rules for ReLU replace functions with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from featviz.hooks.layers import (
    computed_by,
    function_layer,
    function_name,
    home_of,
    read_table,
)
from featviz.records import Layer

_TORCHS_OWN = ("torch.nn.", "torch.ao.nn.")
"""Where modules are written that stand for the function that they call."""

Enter = Callable[[Layer, Sequence[Any], Mapping[str, Any]], None]
Leave = Callable[[Layer, Sequence[Any], Mapping[str, Any], Any], None]
Replacement = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Computes the result of a call in the function's place; takes the function and its
arguments."""


class Frame(NamedTuple):
    """The call of a module, until it returns."""

    layer: Layer
    reports_functions: bool
    calls: Counter[int]
    """How often it has called each shared module so far, by the module's id."""


class CallStack:
    """The calls of modules that have not returned, while `followed` lasts; they tell to
    which layer each call belongs.

    One activation object may stand in 77 places of a YOLO. Which of them a call belongs
    to follows from who calls, so the calls that have not returned are kept, as Python
    keeps its stack."""

    def __init__(self, model: nn.Module) -> None:
        """Read the layers of the model."""
        table = read_table(model)
        self._model = model
        self._callers = table.callers
        self.of_module = table.of_module
        self.frames: list[Frame] = []
        """Calls that have not returned, the innermost last."""
        self._candidates: dict[tuple[int, int], Sequence[Layer]] = {}
        """Which layers a caller may mean, by the id of the module that it calls and its
        own index."""

    def layer_of_call(self, layers: Sequence[Layer]) -> Layer:
        """Which of its layers a module is in the call that is running.

        Args:
            layers: those that the module is (`of_module`).
        """
        return layers[0] if len(layers) == 1 else self.frames[-1].layer

    @contextmanager
    def followed(
        self,
        names: Collection[str],
        functions: bool = False,
        opaque: Collection[str] | None = None,
    ) -> Iterator[None]:
        """Follow the calls of modules in this block, where that is needed to tell layers
        apart. A call ends after all hooks that were there before.

        Args:
            names: of the layers that are asked for.
            functions: whether calls of functions are reported, for which all modules are
                followed.
            opaque: as of `watch_calls`.
        """
        # the calls need following only where a module is several layers, of which one
        # is asked for
        shared = [layers for layers in self.of_module.values() if len(layers) > 1]
        needed = functions or any(
            layer.name in names for layers in shared for layer in layers
        )
        if computed_by(self._model) is not None:
            needed = False

        def pop(module: nn.Module, args: Any, output: Any) -> None:
            self.frames.pop()

        with ExitStack() as stack:
            for module in self._model.modules() if needed else ():
                if not functions:
                    reports_functions = False
                elif opaque is None:
                    reports_functions = not home_of(module).startswith(_TORCHS_OWN)
                else:
                    reports_functions = self.of_module[id(module)][0].name not in opaque

                # a copy of the module has these hooks, too, and belongs where the
                # original does
                def push(
                    _: nn.Module,
                    args: Any,
                    original: nn.Module = module,
                    reports_functions: bool = reports_functions,
                ) -> None:
                    """The hook before a module's call: note that it is running."""
                    self.frames.append(
                        Frame(self._reached(original), reports_functions, Counter())
                    )

                # first of all: what is pushed is popped even where another hook raises
                before = module.register_forward_pre_hook(push, prepend=True)
                stack.callback(before.remove)
                stack.callback(
                    module.register_forward_hook(pop, always_call=True).remove
                )
            yield

    def _reached(self, module: nn.Module) -> Layer:
        """Which layer a module is in the call that begins now. Where the caller may mean
        several, its first call is the first of them, and so on."""
        layers = self.of_module[id(module)]
        # called from outside of the model, it is the layer of its first name
        if len(layers) == 1 or not self.frames:
            return layers[0]
        frame = self.frames[-1]
        key = id(module), frame.layer.index
        if key not in self._candidates:
            self._candidates[key] = self._called_by(frame.layer, layers)
        candidates = self._candidates[key]
        # a loop calls the last one again and again
        number = frame.calls[id(module)]
        frame.calls[id(module)] += 1
        return candidates[min(number, len(candidates) - 1)]

    def _called_by(self, caller: Layer, layers: Sequence[Layer]) -> Sequence[Layer]:
        """Which layers of one module a caller may mean, at least one.

        Args:
            caller: the layer in whose forward the module was called.
            layers: all layers of the module, one for each place where it stands.
        """
        # the ordinary case: the module is an attribute of its caller
        direct = [
            layer for layer in layers if self._callers[layer.index] == caller.index
        ]
        if direct:
            return direct
        # The caller may reach into a module that is not called itself, as in
        # `self.block.act(x)`: then the layers nearest to the caller. Where none is inside
        # the caller, which was given the module by another one: the first.
        prefix = f"{caller.name}." if caller.name else ""
        inside = [layer for layer in layers if layer.name.startswith(prefix)]
        depth = min((layer.name.count(".") for layer in inside), default=0)
        return [layer for layer in inside if layer.name.count(".") == depth] or layers[
            :1
        ]


@dataclass(eq=False)
class FunctionMode(TorchFunctionMode):
    """Reports the torch functions and tensor methods that modules call, and may replace
    some.

    Without `running` no call is reported; `replacements` are in force outside of
    modules as well."""

    leave: Leave = lambda layer, args, kwargs, result: None
    """Hears of a call after it has returned tensors."""
    enter: Enter | None = None
    """Hears of a call before."""
    is_reported: Callable[[Layer], bool] = lambda layer: True
    """Asked for each call, as the layer that the function is."""
    replacements: Mapping[str, Replacement] = field(default_factory=dict)
    """By the `function_name` of the functions that they replace."""
    running: CallStack | None = None
    """Tells which module calls."""
    _layers: dict[tuple[str, str], Layer] = field(default_factory=dict)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch for each function that is called while the mode is on; see
        https://pytorch.org/docs/stable/torch.overrides.html. What it returns is the
        result of the call."""
        kwargs = kwargs or {}
        layer = self._layer_of(func)
        if layer is not None and self.enter is not None and self.is_reported(layer):
            self.enter(layer, args, kwargs)
        replacement = (
            self.replacements.get(function_name(func)) if self.replacements else None
        )
        result = (
            replacement(func, args, kwargs) if replacement else func(*args, **kwargs)
        )
        if layer is None:
            return result
        # torch.split and the like return several
        results = result if isinstance(result, (tuple, list)) else (result,)
        # not that of `x.shape`
        gives_tensors = any(isinstance(item, Tensor) for item in results)
        if gives_tensors and self.is_reported(layer):
            self.leave(layer, args, kwargs, result)
        return result

    def _layer_of(self, function: Callable[..., Any]) -> Layer | None:
        """The layer that a function is in the module that calls it; None where its
        calls are not reported."""
        frames = self.running.frames if self.running is not None else ()
        # outside of any module, such as in a hook, a call is nobody's
        if not frames or not frames[-1].reports_functions:
            return None
        module = frames[-1].layer
        name = function_name(function)
        if not name:
            return None
        # a layer for each would take longer than many functions do
        key = module.name, name
        if key not in self._layers:
            self._layers[key] = function_layer(module, name)
        return self._layers[key]


@contextmanager
def watch_calls(
    model: nn.Module,
    leave: Leave,
    enter: Enter | None = None,
    layers: Sequence[Layer] = (),
    functions: Callable[[Layer], bool] | None = None,
    opaque: Collection[str] | None = None,
    changes: Mapping[Layer, Callable[[Any], Any]] | None = None,
    first: bool = False,
) -> Iterator[AbstractContextManager[Any]]:
    """Place hooks that report the calls of modules, for any number of passes, and
    remove them; yields what is to be entered around each pass, so that its functions
    are reported.

    Args:
        leave: called after each call that is reported, with its layer, arguments and
            result.
        enter: called before it; None where nobody asks.
        layers: modules whose calls are reported.
        functions: asked at each call of a function whether it is reported; None watches
            none. What a function calls inside is not reported.
        opaque: names of modules whose calls of functions are not reported. None means
            those whose forward torch wrote, inherited or not: a ReLU module is reported
            as a module.
        changes: functions whose results take the place of these layers' outputs; where
            one returns None, the output stays.
        first: report before all hooks that are there already.
    """
    running = CallStack(model)
    reported = {layer.name for layer in layers}
    change_of = dict(changes or {})
    names = reported | {layer.name for layer in change_of}

    # one hook a module, not one a layer: which of its layers runs, `running` knows
    def before(
        of_module: Sequence[Layer], module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        layer = running.layer_of_call(of_module)
        if enter is not None and layer.name in reported:
            enter(layer, args, kwargs)

    def after(
        of_module: Sequence[Layer],
        module: nn.Module,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> Any:
        """The hook after a module's call; returns the output that takes the place of the
        module's, None where that stays. `of_module` are the layers that the module is."""
        layer = running.layer_of_call(of_module)
        changed = None
        if layer in change_of:
            # what an intervention computes is not a call of the model's
            with unwatched():
                changed = change_of[layer](output)
        if layer.name in reported:
            leave(layer, args, kwargs, output if changed is None else changed)
        return changed

    with ExitStack() as stack:
        # only modules that somebody asks about: a hook slows down each call of its module
        for module in model.modules():
            of_module = running.of_module[id(module)]
            if not any(layer.name in names for layer in of_module):
                continue
            hook = module.register_forward_hook(
                partial(after, of_module), with_kwargs=True, prepend=first
            )
            stack.callback(hook.remove)
            if enter is not None:
                hook = module.register_forward_pre_hook(
                    partial(before, of_module), with_kwargs=True, prepend=first
                )
                stack.callback(hook.remove)
        stack.enter_context(running.followed(names, functions is not None, opaque))
        if functions is None:
            yield nullcontext()
        else:
            yield FunctionMode(leave, enter, functions, running=running)


unwatched: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""A block that belongs to no module: what hooks compute is not reported."""
