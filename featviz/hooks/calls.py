"""Every call of a module or a function in a forward pass, handed to a sink as it happens.

Module hooks do not see functions, and a function inside a module that is one itself (the F.relu of
nn.ReLU) is no call of its own; so a TorchFunctionMode watches functions while hooks keep track of
the module that is being run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from featviz.hooks.naming import class_names, function_name, gives_tensors
from featviz.records import Call

Sink = Callable[[Call, Sequence[Any], Mapping[str, Any], Any], None]
"""Takes a call, its arguments, and what it gave; must be done with the tensors when it returns."""

_FUNCTION = "fn:"


def function_of(name: str) -> str | None:
    """`relu` of `layer1.0/fn:relu`; None for the name of a module."""
    head, mark, function = name.rpartition(_FUNCTION)
    return function if mark and (not head or head.endswith("/")) else None


@contextmanager
def watching(
    model: nn.Module,
    sink: Sink,
    wanted: Container[str] | None = None,
    atoms: Container[str] = frozenset(),
    functions: bool = True,
) -> Iterator[None]:
    """Watch the calls of a model for a while; all hooks are removed, whatever happens.

    Args:
        wanted: names of the modules and functions whose calls are handed on; None for all.
        atoms: names of modules whose inside is not looked into for functions.
        functions: watch functions too, at some microseconds for each.
    """
    watch = _Watch(sink, wanted, atoms, functions)
    with ExitStack() as stack:
        for name, module in model.named_modules():
            for handle in watch.hook(name, module):
                stack.callback(handle.remove)
        if functions:
            stack.enter_context(_Functions(watch))
        yield


class _Watch:
    def __init__(
        self, sink: Sink, wanted: Container[str] | None, atoms: Container[str], functions: bool
    ) -> None:
        self.sink, self.wanted, self.atoms, self.functions = sink, wanted, atoms, functions
        self.counts: Counter[str] = Counter()
        self.scopes: list[str] = []
        """Names of the modules that are being run, outermost first."""
        self.busy = False
        """The sink is at work; what it calls is none of the model's."""

    def hook(self, name: str, module: nn.Module) -> Iterator[Any]:
        if self.functions or not name:
            yield module.register_forward_pre_hook(partial(self._enter, name))
        if self.functions or self._wants(name):
            leave = partial(self._leave, name)
            yield module.register_forward_hook(leave, with_kwargs=True)

    def function(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        if self.busy or not self.scopes or self.scopes[-1] in self.atoms:
            return
        if not gives_tensors(out):
            return
        own, scope = function_name(func), self.scopes[-1]
        name = f"{scope}/{_FUNCTION}{own}" if scope else f"{_FUNCTION}{own}"
        if self._wants(name):
            self._hand_on(name, f"{_FUNCTION}{own}", args, kwargs, out)

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        if not name:
            self.counts.clear()
            self.scopes.clear()
        self.scopes.append(name)

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.functions:
            self.scopes.pop()
        if self._wants(name):
            self._hand_on(name, class_names(module)[0], args, kwargs, output)

    def _wants(self, name: str) -> bool:
        return self.wanted is None or name in self.wanted

    def _hand_on(self, name: str, type: str, args: Any, kwargs: Any, out: Any) -> None:
        call = Call(name, type, self.counts[name])
        self.counts[name] += 1
        self.busy = True
        try:
            self.sink(call, args, kwargs, out)
        finally:
            self.busy = False


class _Functions(TorchFunctionMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.watch.function(func, args, kwargs or {}, out)
        return out
