"""Capturing: hooks hand every tensor that a layer takes or returns to a sink, as it happens; and
calling a model, with errors that name the module in which it failed.

The sink must be done with the tensor when it returns, since a later in-place operation may
overwrite it. Gradients are taken by hooks on the tensors themselves, which such an operation does
not disturb (full backward hooks refuse it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from featviz.errors import FeatvizError, ForwardError, LayoutError
from featviz.hooks.functions import placed, unwatched
from featviz.hooks.layers import class_names, modules_by_name
from featviz.records import KINDS, CaptureSite, Layer, Skip
from featviz.records.tables import CaptureKind

Sink = Callable[[CaptureSite, Tensor], None]
"""Takes a tensor while it is true; raises LayoutError for one that cannot be drawn."""

Wanted = Callable[[Layer], bool]


@contextmanager
def hooked(
    model: nn.Module,
    layers: Sequence[Layer],
    sink: Sink,
    kinds: Sequence[str] = ("output",),
    wanted: Wanted | None = None,
) -> Iterator[Recorder]:
    """Hook the layers of a model for one pass; see `recording`."""
    with recording(model, layers, kinds, wanted) as recorder, recorder.functions:
        recorder.begin(sink)
        yield recorder


@contextmanager
def recording(
    model: nn.Module,
    layers: Sequence[Layer],
    kinds: Sequence[str] = ("output",),
    wanted: Wanted | None = None,
    changes: Sequence[tuple[Layer, Callable[[Any], Any]]] = (),
) -> Iterator[Recorder]:
    """Hook the layers of a model for any number of passes, each of which calls `Recorder.begin` and
    enters `Recorder.functions`; every hook is removed, whatever happens. `wanted` is asked at each
    call of a function; without it the functions among `layers` are captured. See `placed` for
    `changes`."""
    names = {layer.name for layer in layers if layer.is_function}
    chosen = [layer for layer in layers if not layer.is_function]
    functions = wanted or ((lambda layer: layer.name in names) if names else None)
    modules, known = modules_by_name(model), [KINDS[kind] for kind in KINDS if kind in kinds]
    of = {side: [kind for kind in known if kind.of == side] for side in ("input", "output")}
    recorder = Recorder(layers, of, modules)
    enter = recorder.enter if of["input"] else None
    with ExitStack() as stack:
        stack.callback(recorder.begin, None)
        recorder.functions = stack.enter_context(
            placed(model, recorder.leave, enter, chosen, functions, changes=changes)
        )

        def ask_for_weights(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            """[1, heads, T, T], where its caller says `need_weights=False`; the other result is the
            same but for rounding."""
            if kwargs.get("need_weights") is False:
                return args, {**kwargs, "need_weights": True, "average_attn_weights": False}
            return None

        for layer in chosen:
            if isinstance(module := modules[layer.name], nn.MultiheadAttention):
                ask = module.register_forward_pre_hook(ask_for_weights, with_kwargs=True)
                stack.callback(ask.remove)
        yield recorder


@dataclass
class Recorder:
    """Counts the calls of hooked layers, and hands what they take and return to a sink. It sleeps
    until `begin`."""

    layers: Sequence[Layer]
    kinds: Mapping[str, Sequence[CaptureKind]]
    """What to take of a layer's `input` and of its `output`."""
    modules: Mapping[str, nn.Module]
    functions: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """To be entered around a pass, so that functions are captured, too."""
    sink: Sink | None = None
    calls: Counter[str] = field(default_factory=Counter)
    skipped: list[Skip] = field(default_factory=list)
    fault: Exception | None = None
    """The exception that the sink raised, which is not a failure of the model."""
    _forward: bool = False
    _entered: Counter[str] = field(default_factory=Counter)
    _handles: list[RemovableHandle] = field(default_factory=list)
    _awaited: dict[CaptureSite, GradientEdge] = field(default_factory=dict)

    def begin(self, sink: Sink | None) -> None:
        """Begin a pass, of which nothing is known yet. None ends it, or sleeps through it: the
        hooks go off the tensors, of which the model may keep some."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._awaited = [], {}
        self.sink, self._forward = sink, sink is not None
        if sink is not None:
            self.calls, self._entered = Counter(), Counter()
            self.skipped, self.fault = [], None

    @property
    def never_ran(self) -> list[Layer]:
        """Hooked layers that did not fire, as far as that is news: not that of a mere list of
        modules (nothing can call it, or the model calls what is in it one by one), unless nothing
        fired; nor that of a module in one place, if it was called from another. A module that was
        called from none of its places is named once."""
        seen = {id(self.modules[name]) for name in self.calls if name in self.modules}
        news = []
        for layer in (layer for layer in self.layers if layer.name not in self.calls):
            module = self.modules.get(layer.name)
            forward = type(module).forward if module is not None else None
            is_list = forward is nn.Module.forward and "forward" not in vars(module)
            if forward is nn.Sequential.forward:
                is_list = any(other.startswith(f"{layer.name}.") for other in self.calls)
            if not (self.calls and is_list) and (module is None or id(module) not in seen):
                news.append(layer)
                seen.add(id(module))
        return news

    def enter(self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take the arguments of a layer's call."""
        if not self._forward:
            return
        call = self._entered[layer.name]
        self._entered[layer.name] += 1
        given = given_tensors(args, kwargs)
        for kind in self.kinds["input"]:
            for key, value in given:
                self._take(CaptureSite(layer, kind.name, call, key), value, kind.backward)
            if not given:
                self._skip(CaptureSite(layer, kind.name, call, ""), "takes no tensor")

    def leave(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        """Take the result of a layer's call; a None beside a tensor is no result."""
        if not self._forward:
            return
        call = self.calls[layer.name]
        self.calls[layer.name] += 1
        given = [("", output)] if isinstance(output, Tensor) else list(leaves(output))
        drawn = any(isinstance(value, Tensor) for _, value in given)
        for key, value in given:
            for kind in self.kinds["output"] if value is not None or not drawn else ():
                self._take(CaptureSite(layer, kind.name, call, key), value, kind.backward)

    def back(self, target: Tensor, inputs: Sequence[Tensor]) -> None:
        """Go back from a target to the inputs; hooks on tensors take the gradients. ForwardError
        where the backward pass fails.

        Layers that run from now on are recomputed (activation checkpointing), and have been seen.
        What hangs on parameters only (a table of positions) takes a second way back.
        """
        self._forward = False
        try:
            torch.autograd.grad(target, inputs, retain_graph=True, allow_unused=True)
            if aside := dict(self._awaited):
                gradients = torch.autograd.grad(target, list(aside.values()), allow_unused=True)
                for site, gradient in zip(aside, gradients, strict=True):
                    self._arrived(site, gradient)
        except Exception as error:
            if self.fault is error:
                raise
            hint = "without grad and grad-input in --capture none is needed; -v shows the traceback"
            raise ForwardError(f"the backward pass failed: {_first_line(error)}", hint) from error
        why = "has no gradient: the target does not depend on it, or it was changed in place"
        for site in self._awaited:
            self._skip(site, why)
        self._awaited.clear()

    def _take(self, site: CaptureSite, value: Any, backward: bool = False) -> None:
        """Give a tensor to the sink, or await its gradient."""
        with unwatched():
            if not isinstance(value, Tensor) or (backward and not value.requires_grad):
                self._skip(site, _why_none(value))
                return
            if backward:
                self._awaited[site] = get_gradient_edge(value)
                if not value.is_leaf:  # parameters stay without hooks
                    hook = partial(self._arrived, site)
                    self._handles.append(value.register_hook(hook))  # type: ignore[no-untyped-call]
                return
            assert self.sink is not None, "begin comes first"
            try:
                self.sink(site, value.detach())
            except LayoutError as error:
                self._skip(site, error.message)
            except Exception as error:
                self.fault = error
                raise

    def _arrived(self, site: CaptureSite, gradient: Tensor | None) -> None:
        if gradient is not None and self._awaited.pop(site, None) is not None:
            self._take(site, gradient)

    def _skip(self, site: CaptureSite, reason: str) -> None:
        at = site.layer
        self.skipped.append(
            Skip(at.name, at.type, at.index, site.kind, site.call, site.key, reason)
        )


def given_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors among the arguments of a call: under the empty key where one argument holds
    tensors, else by position or name; what is no tensor is left out."""
    everything = leaves({**dict(enumerate(args)), **kwargs})
    given = [(key, value) for key, value in everything if isinstance(value, Tensor)]
    if len({key.partition(".")[0] for key, _ in given}) == 1:
        given = [(key.partition(".")[2], value) for key, value in given]
    return given


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten tuples, lists, dicts and dataclasses: pairs of (path, what stands there)."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (tuple, list)):
        items = list(enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        items = [(one.name, getattr(value, one.name)) for one in fields(value)]
    if not items:
        yield key, value
    for name, item in items:
        yield from leaves(item, f"{key}.{name}" if key else str(name))


def tensors(value: Any, dense: bool = False) -> list[Tensor]:
    """The tensors among `leaves`, in their order; `dense` leaves out nested ones."""
    found = [item for _, item in leaves(value) if isinstance(item, Tensor)]
    return [tensor for tensor in found if not tensor.is_nested] if dense else found


def _why_none(tensor: Any) -> str:
    if tensor is None:
        return "is None, not a tensor"
    if not isinstance(tensor, Tensor):
        empty = isinstance(tensor, (tuple, list, Mapping))  # `leaves` takes others apart
        return f"is {'an empty' if empty else 'a'} {type(tensor).__name__}, not a tensor"
    why = "it does not depend on the input, or is cut off from it (detach, no_grad)"
    why = why if tensor.is_floating_point() else f"it holds {tensor.dtype}"
    return f"has no gradient: {why}"


# Calling a model


def forward(
    model: nn.Module,
    args: Sequence[Any],
    recorder: Recorder | None = None,
    call: Callable[..., Any] | None = None,
) -> Any:
    """Call the model, or what calls it for the caller; ForwardError names the innermost module at
    fault."""
    try:
        return (call or model)(*args)
    except FeatvizError:
        raise
    except Exception as error:
        if recorder is not None and recorder.fault is error:
            raise
        names: dict[int, list[str]] = {}
        for name, module in modules_by_name(model).items():
            names.setdefault(id(module), []).append(name)
        at, place, trace = "", class_names(model)[0], error.__traceback__
        while trace is not None:  # to the innermost module
            owner = trace.tb_frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and any(known := names.get(id(owner), [])):
                at = next((name for name in known if name.startswith(f"{at}.")), known[0])
                place = f"{at} ({class_names(owner)[0]})"
            trace = trace.tb_next
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors(list(args)))
        words = f"the model failed in {place}: {_first_line(error)}"
        hint = "--size, --crop and --channels change it, -v shows the traceback"
        raise ForwardError(words, f"the input was {shapes}; {hint}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
