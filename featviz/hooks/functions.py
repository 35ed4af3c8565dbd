"""Watch the calls of modules, and of functions inside forward. Module hooks do not see
functions, so a function mode of torch is used for them.

Which layer a call of a module belongs to depends on its caller (`CallStack`). There is
one class of function modes: capturing, auditing and listing functions watch calls with
it, and the rules for ReLU replace functions with it."""

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
"""Packages of modules that are shown instead of the functions that they call."""

Enter = Callable[[Layer, Sequence[Any], Mapping[str, Any]], None]
Leave = Callable[[Layer, Sequence[Any], Mapping[str, Any], Any], None]
Replacement = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Computes the result of a call instead of a function; it takes that function and the
arguments of the call."""


class Frame(NamedTuple):
    """A call of a module that has not returned yet."""

    layer: Layer
    reports_functions: bool
    """Whether the functions that the module calls are reported."""
    calls: Counter[int]
    """How often it has called each shared module so far, by the id of that module."""


class CallStack:
    """The calls of modules that have not returned, recorded while `followed` lasts. They
    show to which layer a call belongs: one activation object may be used in 77 places of a
    YOLO, and only its caller tells in which place it is called."""

    def __init__(self, model: nn.Module) -> None:
        """Read the layers of the model."""
        table = read_table(model)
        self._model = model
        self._callers = table.callers
        self.of_module = table.of_module
        self.frames: list[Frame] = []
        """The calls that have not returned, the innermost last."""
        self._candidates: dict[tuple[int, int], Sequence[Layer]] = {}
        """A cache of `_called_by`, by the id of the called module and the index of the
        calling layer."""

    def layer_of_call(self, layers: Sequence[Layer]) -> Layer:
        """The layer of the module whose call is running.

        Args:
            layers: All layers of that module (`of_module`).
        """
        return layers[0] if len(layers) == 1 else self.frames[-1].layer

    @contextmanager
    def followed(
        self,
        names: Collection[str],
        functions: bool = False,
        opaque: Collection[str] | None = None,
    ) -> Iterator[None]:
        """A context in which the calls of modules are recorded by hooks, if that is needed
        to distinguish layers. A call counts as running until all hooks that were placed
        before this context are done.

        Args:
            names: The names of the layers that are watched.
            functions: Whether calls of functions are reported; then the calls of all
                modules are recorded.
            opaque: See `watch_calls`.
        """
        # recording is only needed if a watched layer shares its module with other layers
        shared = [layers for layers in self.of_module.values() if len(layers) > 1]
        needed = functions or any(
            layer.name in names for layers in shared for layer in layers
        )
        if computed_by(self._model) is not None:
            needed = False

        def pop(module: nn.Module, args: Any, output: Any) -> None:
            """The hook after a module's call: note that it has returned."""
            self.frames.pop()

        with ExitStack() as stack:
            for module in self._model.modules() if needed else ():
                if not functions:
                    reports_functions = False
                elif opaque is None:
                    reports_functions = not home_of(module).startswith(_TORCHS_OWN)
                else:
                    reports_functions = self.of_module[id(module)][0].name not in opaque

                # `original` is bound here, since a copy of the module has the same hooks,
                # and its calls count as calls of the original
                def push(
                    _: nn.Module,
                    args: Any,
                    original: nn.Module = module,
                    reports_functions: bool = reports_functions,
                ) -> None:
                    """The hook before a module's call: note that it is running."""
                    self.frames.append(
                        Frame(
                            self._layer_called_now(original),
                            reports_functions,
                            Counter(),
                        )
                    )

                # this hook runs first, so that `pop` always has a frame to remove, even if
                # another hook raises
                before = module.register_forward_pre_hook(push, prepend=True)
                stack.callback(before.remove)
                stack.callback(
                    module.register_forward_hook(pop, always_call=True).remove
                )
            yield

    def _layer_called_now(self, module: nn.Module) -> Layer:
        """The layer of a module whose call begins now. If the module has several layers with
        the same caller, the caller's first call is the first of them, and so on."""
        layers = self.of_module[id(module)]
        # a call from outside of the model belongs to the first layer
        if len(layers) == 1 or not self.frames:
            return layers[0]
        frame = self.frames[-1]
        key = id(module), frame.layer.index
        if key not in self._candidates:
            self._candidates[key] = self._called_by(frame.layer, layers)
        candidates = self._candidates[key]
        # further calls (of a loop) belong to the last layer
        number = frame.calls[id(module)]
        frame.calls[id(module)] += 1
        return candidates[min(number, len(candidates) - 1)]

    def _called_by(self, caller: Layer, layers: Sequence[Layer]) -> Sequence[Layer]:
        """The layers of a module that its caller may mean, at least one.

        Args:
            caller: The layer in whose forward the module was called.
            layers: All layers of the module.
        """
        # mostly the module is an attribute of its caller
        direct = [
            layer for layer in layers if self._callers[layer.index] == caller.index
        ]
        if direct:
            return direct
        # The caller may also call a module inside one of its modules, as in
        # `self.block.act(x)`: then the layers nearest to the caller are meant. If none is
        # inside the caller, it got the module from elsewhere, and the first layer is taken.
        prefix = f"{caller.name}." if caller.name else ""
        inside = [layer for layer in layers if layer.name.startswith(prefix)]
        depth = min((layer.name.count(".") for layer in inside), default=0)
        return [layer for layer in inside if layer.name.count(".") == depth] or layers[
            :1
        ]


@dataclass(eq=False)
class FunctionMode(TorchFunctionMode):
    """Reports the torch functions and tensor methods that modules call. It may replace some
    of them; these are also replaced outside of modules."""

    leave: Leave = lambda layer, args, kwargs, result: None
    """Called after each reported call that returns tensors."""
    enter: Enter | None = None
    """Called before each reported call."""
    is_reported: Callable[[Layer], bool] = lambda layer: True
    """Says for each call whether it is reported; it gets the function's layer."""
    replacements: Mapping[str, Replacement] = field(default_factory=dict)
    """Functions that are called instead of others, by the `function_name` of these."""
    running: CallStack | None = None
    """Tells which module is running; None reports no calls."""
    _layers: dict[tuple[str, str], Layer] = field(default_factory=dict)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Report or replace a call. torch calls this instead of each function that is called
        while the mode is on, and takes its result as that of the call; see
        https://pytorch.org/docs/stable/torch.overrides.html."""
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
        # some functions return several tensors (torch.split), some none (`x.shape`)
        results = result if isinstance(result, (tuple, list)) else (result,)
        gives_tensors = any(isinstance(item, Tensor) for item in results)
        if gives_tensors and self.is_reported(layer):
            self.leave(layer, args, kwargs, result)
        return result

    def _layer_of(self, function: Callable[..., Any]) -> Layer | None:
        """The layer for a function and the module that calls it; None if the module's calls of
        functions are not reported."""
        frames = self.running.frames if self.running is not None else ()
        # a call outside of all modules, such as in a hook, is not reported
        if not frames or not frames[-1].reports_functions:
            return None
        module = frames[-1].layer
        name = function_name(function)
        if not name:
            return None
        # cached, since making a Layer takes longer than many functions
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
    """A context with hooks that report the calls of modules, for any number of passes. It
    yields a second context, which the caller enters around each pass, so that calls of
    functions are reported.

    Args:
        model: The model.
        leave: Called after each reported call, with its layer, arguments and result.
        enter: Called before each reported call, if it is given.
        layers: The modules whose calls are reported.
        functions: Called at each call of a function, to say whether it is reported. With
            None, no functions are reported. Functions that a function calls are never
            reported.
        opaque: The names of modules whose functions are not reported. By default these are
            the modules whose forward is torch's own: a ReLU module is reported only as a
            module.
        changes: For some layers a function that gets their output, and returns another
            output, or None to keep it.
        first: Report calls before all hooks that are already in place.
    """
    running = CallStack(model)
    reported = {layer.name for layer in layers}
    change_of = dict(changes or {})
    names = reported | {layer.name for layer in change_of}

    # a module has one hook for all its layers; `running` tells which of them is called
    def before(
        of_module: Sequence[Layer], module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        """The hook before a module's call; `of_module` has all layers of the module."""
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
        """The hook after a module's call; `of_module` has all layers of the module. It returns
        a new output, or None to keep the module's."""
        layer = running.layer_of_call(of_module)
        changed = None
        if layer in change_of:
            # functions that a change calls are not calls of the model
            with unwatched():
                changed = change_of[layer](output)
        if layer.name in reported:
            leave(layer, args, kwargs, output if changed is None else changed)
        return changed

    with ExitStack() as stack:
        # only watched modules get a hook, since it slows down each call of its module
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
"""Makes a context in which no calls of functions are reported; for what hooks compute."""
