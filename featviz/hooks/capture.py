"""Capturing: while a model runs, hooks pass each tensor that a layer takes or returns to
a function, the sink. And calling a model, with errors that name the module that failed.

    recording(model, layers)            places the hooks, once a run
        recorder.begin(sink)            one pass begins
        forward(model, args)            each call of a layer: enter, then leave
                enter: arguments    ->  sink(site, tensor), before the layer runs
                leave: result       ->  sink(site, tensor), before the next layer runs
        recorder.back(target, inputs)   gradients: sink(site, gradient), as they come
        recorder.begin(None)            the pass is over

The sink must not use the tensor after it has returned, since a later in-place operation
may overwrite the tensor (pytorch#95617). Gradients are taken by hooks on the tensors
themselves, which work in spite of in-place operations; full backward hooks of modules
fail then (pytorch#61519)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from featviz.errors import FeatvizError, ForwardError, LayoutError
from featviz.hooks.eval_mode import kept_attributes
from featviz.hooks.functions import unwatched, watch_calls
from featviz.hooks.layers import class_names, modules_by_name
from featviz.records import KINDS, CaptureSite, Layer, Skip
from featviz.records.tables import CaptureKind
from featviz.text import first_line

Sink = Callable[[CaptureSite, Tensor], None]
"""Takes a captured tensor, which is only valid during the call. It raises LayoutError for
a tensor that cannot be drawn."""

TakesFunction = Callable[[Layer], bool]
"""Says whether the calls of a function are captured."""


@contextmanager
def hooked(
    model: nn.Module,
    layers: Sequence[Layer],
    sink: Sink,
    capture_kinds: Sequence[str] = ("output",),
    takes_function: TakesFunction | None = None,
) -> Iterator[Recorder]:
    """Hook the layers of a model for one pass, which has already begun. A second pass in
    the block needs `Recorder.begin`. The other parameters are those of `recording`.

    Args:
        sink: The function that gets each captured tensor.
    """
    with (
        recording(model, layers, capture_kinds, takes_function) as recorder,
        recorder.functions,
    ):
        recorder.begin(sink)
        yield recorder


@contextmanager
def recording(
    model: nn.Module,
    layers: Sequence[Layer],
    capture_kinds: Sequence[str],
    takes_function: TakesFunction | None = None,
    changes: Mapping[Layer, Callable[[Any], Any]] | None = None,
) -> Iterator[Recorder]:
    """Hook the layers of a model for any number of passes. At the end of the block all hooks
    are removed, also after an error.

    For each pass the caller calls `Recorder.begin`, and enters `Recorder.functions`.

    Args:
        model: The model.
        layers: The layers to capture: modules and functions.
        capture_kinds: What to capture of them: names of `KINDS`.
        takes_function: Called at each call of a function, to say whether it is captured.
            By default the functions among `layers` are captured.
        changes: Functions that change outputs of layers; see `watch_calls`.
    """
    # a function mode slows down all calls of functions, so without functions it is not used
    function_names = {layer.name for layer in layers if layer.is_function}
    if takes_function is None and function_names:

        def takes_function(layer: Layer) -> bool:
            return layer.name in function_names

    hooked_modules = [layer for layer in layers if not layer.is_function]
    modules = modules_by_name(model)
    recorder = Recorder(
        layers,
        modules,
        input_kinds=_kinds_of("input", capture_kinds),
        output_kinds=_kinds_of("output", capture_kinds),
    )
    with ExitStack() as stack:
        # hooks on tensors go, too: a model may keep its output
        stack.callback(recorder.begin, None)
        recorder.functions = stack.enter_context(
            watch_calls(
                model,
                leave=recorder.leave,
                enter=recorder.enter if recorder.input_kinds else None,
                layers=hooked_modules,
                functions=takes_function,
                changes=changes,
            )
        )
        for layer in hooked_modules:
            module = modules[layer.name]
            # mostly it is called with need_weights=False, and computes no weights
            if isinstance(module, nn.MultiheadAttention):
                hook = module.register_forward_pre_hook(
                    _ask_for_weights, with_kwargs=True
                )
                stack.callback(hook.remove)
        yield recorder


def _kinds_of(of: str, names: Sequence[str]) -> list[CaptureKind]:
    """The capture kinds with these names that are of a layer's `input` or of its `output`,
    whichever `of` says."""
    return [kind for kind in KINDS.values() if kind.of == of and kind.name in names]


def _ask_for_weights(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A forward-pre-hook of an nn.MultiheadAttention that is called without `need_weights`: it
    lets it return its weights, [1, heads, T, T], too. Its other output differs only by
    rounding."""
    if kwargs.get("need_weights") is not False:
        return None
    return args, {**kwargs, "need_weights": True, "average_attn_weights": False}


class Leaf(NamedTuple):
    """A value inside nested tuples, lists, dicts and dataclasses."""

    key: str
    """The path to the value: `0`, `boxes`, `0.feat`; empty if it is in no container."""
    value: Any


@dataclass
class Recorder:
    """Counts the calls of hooked layers, and passes the tensors that they take and return to
    a sink. It captures nothing before `begin` is called."""

    layers: Sequence[Layer]
    modules: Mapping[str, nn.Module]
    """The model's modules, by all their names."""
    input_kinds: Sequence[CaptureKind] = ()
    """What is captured of the tensors that a layer takes: themselves, their gradients."""
    output_kinds: Sequence[CaptureKind] = ()
    """What is captured of the tensors that a layer returns."""
    functions: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """A context that the caller enters around each pass, so that functions are captured."""
    sink: Sink | None = None
    """The sink of this pass; None between passes."""
    calls: Counter[str] = field(default_factory=Counter)
    """How many times each layer was called in this pass, by its name."""
    skipped: list[Skip] = field(default_factory=list)
    """What could not be captured in this pass, with reasons."""
    fault: Exception | None = None
    """The exception that the sink raised in this pass; it is no failure of the model."""
    _goes_forward: bool = False
    """Whether calls are captured: not before `begin`, and not in a backward pass."""
    _entered: Counter[str] = field(default_factory=Counter)
    """How many calls of each layer have begun, by its name."""
    _handles: list[RemovableHandle] = field(default_factory=list)
    """The handles of the hooks on tensors."""
    _awaited: dict[CaptureSite, GradientEdge] = field(default_factory=dict)
    """The tensors whose gradients have not arrived yet, as edges of autograd's graph."""

    def begin(self, sink: Sink | None) -> None:
        """Begin a pass, and forget the pass before. With None, end the pass: its counts and
        skips can still be read. Hooks on tensors are removed in both cases, since the model
        may keep tensors.

        Args:
            sink: The function that gets each captured tensor. With None, nothing is
                captured until the next pass begins.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._awaited = {}
        self.sink = sink
        self._goes_forward = sink is not None
        if sink is not None:
            self.calls = Counter()
            self._entered = Counter()
            self.skipped = []
            self.fault = None

    @property
    def never_ran(self) -> list[Layer]:
        """Layers that were not called in this pass. Left out are containers that the model
        only iterates over (unless no layer was called), and further names of a module that
        is called or listed under one name."""
        # by id, since a module that was called under one of its names has run
        seen = {id(self.modules[name]) for name in self.calls if name in self.modules}
        # a function has no module, so only its name is looked up
        silent = []
        for layer in self.layers:
            module = self.modules.get(layer.name)
            if layer.name in self.calls or (module is not None and id(module) in seen):
                continue
            if self.calls and module is not None and self._is_iterated(layer, module):
                continue
            silent.append(layer)
            seen.add(id(module))
        return silent

    def _is_iterated(self, layer: Layer, module: nn.Module) -> bool:
        """Whether the model only iterates over a module: it has no forward of its own, or is
        a Sequential that was not called, although modules in it were."""
        forward = type(module).forward
        if forward is nn.Sequential.forward:
            return any(name.startswith(f"{layer.name}.") for name in self.calls)
        return forward is nn.Module.forward and "forward" not in vars(module)

    def enter(
        self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """The hook before a layer's call: capture the tensors among its arguments, `args` by
        position and `kwargs` by name. If there are none, that is noted in `skipped`."""
        if not self._goes_forward:
            return
        # counted apart from `calls`: a recursive layer is entered again before it returns
        call = self._entered[layer.name]
        self._entered[layer.name] += 1
        # arguments that are no tensors (numbers, None) are not captured
        arguments = given_tensors(args, kwargs)
        for capture_kind in self.input_kinds:
            for key, value in arguments:
                site = CaptureSite(layer, capture_kind.name, call, key)
                self._capture(site, value, capture_kind.backward)
            if not arguments:
                site = CaptureSite(layer, capture_kind.name, call, "")
                self.skipped.append(Skip.of(site, "takes no tensor"))

    def leave(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        """The hook after a layer's call: capture the tensors in its output. Other values in the
        output are noted in `skipped`; but if there is a tensor, None is ignored. `args` and
        `kwargs`, the arguments of the call, are not used."""
        if not self._goes_forward:
            return
        call = self.calls[layer.name]
        self.calls[layer.name] += 1
        results = [Leaf("", output)]
        if not isinstance(output, Tensor):  # most are tensors, and `leaves` takes time
            results = list(leaves(output))
            if any(isinstance(result.value, Tensor) for result in results):
                results = [result for result in results if result.value is not None]
        for key, value in results:
            for capture_kind in self.output_kinds:
                site = CaptureSite(layer, capture_kind.name, call, key)
                self._capture(site, value, capture_kind.backward)

    def back(self, target: Tensor, inputs: Sequence[Tensor]) -> None:
        """Run the backward pass, from a target to the inputs. Hooks on tensors pass the
        gradients to the sink; tensors without a gradient are noted in `skipped`.

        From now on, calls of layers are not captured: activation checkpointing calls them
        again in the backward pass.

        Args:
            target: One number that was computed in this pass.
            inputs: The model's inputs, which require gradients.

        Raises:
            ForwardError: The backward pass fails.
            Exception: The sink fails; its exception is raised as it is.
        """
        self._goes_forward = False
        try:
            # retain_graph, since the gradients that are missing need a second pass
            torch.autograd.grad(target, inputs, retain_graph=True, allow_unused=True)
            # a tensor that depends only on parameters (a table of positions) is on no way
            # from the target to the inputs
            aside = dict(self._awaited)
            if aside:
                gradients = torch.autograd.grad(
                    target, list(aside.values()), allow_unused=True
                )
                for site, gradient in zip(aside, gradients, strict=True):
                    self._take_gradient(site, gradient)
        except Exception as error:
            # raised by a sink, inside of a hook on a tensor
            if self.fault is error:
                raise
            raise ForwardError(
                f"the backward pass failed: {first_line(error)}",
                "without grad and grad-input in --capture none is needed; -v shows the"
                " traceback",
            ) from error
        reason = (
            "has no gradient: the target does not depend on it, or it was changed in"
            " place"
        )
        for site in self._awaited:
            self.skipped.append(Skip.of(site, reason))
        self._awaited.clear()

    def _capture(self, site: CaptureSite, value: Any, backward: bool = False) -> None:
        """Pass a tensor to the sink; or, with `backward`, prepare to capture its gradient.

        Args:
            site: The layer, kind and call of the capture.
            value: A value that a layer took or returned, or a gradient that has arrived.
                If it is not a tensor, that is noted in `skipped`.
            backward: Whether the gradient is captured instead of the tensor. A tensor that
                requires no gradient is noted in `skipped`.

        Raises:
            Exception: The sink fails. The exception is also kept in `fault`; but a
                LayoutError is only noted in `skipped`.
        """
        with unwatched():
            if not isinstance(value, Tensor) or (backward and not value.requires_grad):
                self.skipped.append(Skip.of(site, _why_none(value)))
                return
            if backward:
                # the edge does not keep the tensor in memory
                self._awaited[site] = get_gradient_edge(value)
                # Leaves (parameters) get no hook, which would stay with the model; `back`
                # gets their gradients by the edge.
                if not value.is_leaf:
                    hook = partial(self._take_gradient, site)
                    self._handles.append(value.register_hook(hook))  # type: ignore[no-untyped-call]
                return
            assert self.sink is not None, "begin comes first"
            try:
                # detached, so that autograd does not record what the sink computes
                self.sink(site, value.detach())
            except LayoutError as error:
                self.skipped.append(Skip.of(site, error.message))
            # `forward` distinguishes errors of the sink (a full disk) from the model's
            except Exception as error:
                self.fault = error
                raise

    def _take_gradient(self, site: CaptureSite, gradient: Tensor | None) -> None:
        """Pass a gradient to the sink, unless that was done before, or there is none."""
        if gradient is not None and self._awaited.pop(site, None) is not None:
            self._capture(site, gradient)


def given_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Leaf]:
    """The tensors among the arguments of a call. The key of each is the argument's position
    or name and the path inside the argument (`1`, `mask`, `features.0`). If only one
    argument has tensors, the key is only the path (empty for a plain tensor)."""
    # the arguments as one dict, which `leaves` flattens
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    tensor_leaves = [
        leaf for leaf in leaves(arguments) if isinstance(leaf.value, Tensor)
    ]
    if len({leaf.key.partition(".")[0] for leaf in tensor_leaves}) != 1:
        return tensor_leaves
    # the name of the only argument is left out: `0`, not `boxes.0`
    return [Leaf(leaf.key.partition(".")[2], leaf.value) for leaf in tensor_leaves]


def leaves(value: Any, key: str = "") -> Iterator[Leaf]:
    """Flatten nested tuples, lists, dicts and dataclasses. An empty one is a leaf itself.

    Args:
        value: Any value.
        key: The path that leads to `value`; the keys of the leaves begin with it.
    """
    items = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (tuple, list)):
        items = list(enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        items = [(item.name, getattr(value, item.name)) for item in fields(value)]
    if not items:  # a tensor, any other value, or an empty container
        yield Leaf(key, value)
    for name, item in items:
        yield from leaves(item, f"{key}.{name}" if key else str(name))


def tensors(value: Any) -> list[Tensor]:
    """The tensors among `leaves`, in their order."""
    return [leaf.value for leaf in leaves(value) if isinstance(leaf.value, Tensor)]


def _why_none(value: Any) -> str:
    """The reason for `skipped` why a value was not captured: it is no tensor (`is None, not
    a tensor`), or it is a tensor without a gradient."""
    if value is None:
        return "is None, not a tensor"
    if not isinstance(value, Tensor):
        # a container here is empty: `leaves` takes all others apart
        article = "an empty" if isinstance(value, (tuple, list, Mapping)) else "a"
        return f"is {article} {type(value).__name__}, not a tensor"
    if not value.is_floating_point():
        return f"has no gradient: it holds {value.dtype}"
    return (
        "has no gradient: it does not depend on the input, or is cut off from it"
        " (detach, no_grad)"
    )


# Calling a model


def forward(
    model: nn.Module,
    args: Sequence[Any],
    recorder: Recorder | None = None,
) -> Any:
    """Call the model, and return its output.

    Without gradients, the model's attributes are put back right after the call. With
    gradients, the caller puts them back: a backward pass may run layers again, and these
    read what forward has left in attributes.

    Args:
        model: The model.
        args: The arguments of the model, on its device.
        recorder: The recorder whose hooks are in place, if there is one. An exception of
            its sink is raised as it is.

    Raises:
        ForwardError: The model fails. The message names the innermost module.
        FeatvizError: Raised inside the model, for example by an intervention.
    """
    keeping = nullcontext() if torch.is_grad_enabled() else kept_attributes(model)
    try:
        with keeping:
            return model(*args)
    except FeatvizError:  # of an intervention, for example
        raise
    except Exception as error:
        if recorder is not None and recorder.fault is error:
            raise
        shapes = [tensor.shape for tensor in tensors(list(args))]
        sizes = "".join(map(_usual_sizes, shapes[:1])) or "--size, "
        raise ForwardError(
            f"the model failed in {_at_fault(model, error)}: {first_line(error)}",
            f"the input was {', '.join(str(list(shape)) for shape in shapes)}; {sizes}"
            "--crop and --input-channels change it, -v shows the traceback",
        ) from error


def list_functions(model: nn.Module, args: Sequence[Any]) -> dict[Layer, int]:
    """Run the model, and count the calls of the functions that its modules call. The
    functions are in the order of their first calls.

    Args:
        model: The model.
        args: The arguments of the model, on its device.

    Raises:
        ForwardError: The model fails.
    """
    calls: Counter[Layer] = Counter()

    def count(layer: Layer, args: Any, kwargs: Any, result: Any) -> None:
        calls[layer] += 1

    with (
        watch_calls(model, count, functions=lambda layer: True, first=True) as mode,
        mode,
    ):
        forward(model, args)
    return dict(calls)


def _usual_sizes(shape: Sequence[int]) -> str:
    """Options that would give an input a size which many models want: square, or multiples
    of 32. It is the beginning of a hint; empty if the size is so already, or the input is
    not [N, C, H, W]."""
    if len(shape) != 4:
        return ""
    height, width = shape[2:]
    remedies = ""
    if height != width:
        side = min(height, width)
        remedies = f"--size {side}x{side} makes it square, "
    # a U-Net joins halved and doubled maps, which fit only if all halves are whole
    whole = [max(32, round(side / 32) * 32) for side in (height, width)]
    if whole != [height, width]:
        remedies += f"--size {whole[0]}x{whole[1]} lets it be halved five times, "
    return remedies


def _at_fault(model: nn.Module, error: Exception) -> str:
    """The innermost module of a model in whose method an error was raised: `layer1
    (Block)`. If it has several names, the name inside the module that called it is taken."""
    # by id, since the `self` of a frame may be an object without a hash
    names: dict[int, list[str]] = {}
    for name, module in modules_by_name(model).items():
        names.setdefault(id(module), []).append(name)
    innermost = ""
    label = class_names(model)[0]
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        aliases = names.get(id(owner), [])
        # the model itself has the empty name
        if isinstance(owner, nn.Module) and any(aliases):
            inside = [name for name in aliases if name.startswith(f"{innermost}.")]
            innermost = (inside or aliases)[0]
            label = f"{innermost} ({class_names(owner)[0]})"
        trace = trace.tb_next
    return label
