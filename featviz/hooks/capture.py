"""Capturing: hooks hand every tensor that a layer takes or returns to a sink, as it
happens; and calling a model, with errors that name the module in which it failed.

    recording(model, layers)            places the hooks, once a run
        recorder.begin(sink)            one pass begins
        forward(model, args)            each call of a layer: enter, then leave
                enter: arguments    ->  sink(site, tensor), before the layer runs
                leave: result       ->  sink(site, tensor), before the next layer runs
        recorder.back(target, inputs)   gradients: sink(site, gradient), as they come
        recorder.begin(None)            the pass is over

The sink must be done with the tensor when it returns, since a later in-place operation
may overwrite it (pytorch#95617). Gradients are taken by hooks on the tensors
themselves, which such an operation does not disturb; full backward hooks refuse it
(pytorch#61519)."""

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
"""Takes a tensor while it is true; raises LayoutError for one that cannot be drawn."""

TakesFunction = Callable[[Layer], bool]
"""Whether the calls of a function are captured."""


@contextmanager
def hooked(
    model: nn.Module,
    layers: Sequence[Layer],
    sink: Sink,
    capture_kinds: Sequence[str] = ("output",),
    takes_function: TakesFunction | None = None,
) -> Iterator[Recorder]:
    """`recording`, with a pass begun, and functions entered for the whole block. A second
    pass in the block needs `Recorder.begin`.

    Args:
        sink: takes what the hooks capture.
        model, layers, capture_kinds, takes_function: as of `recording`.
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
    """Hook the layers of a model for any number of passes; every hook is removed,
    whatever happens.

    Each pass calls `Recorder.begin`, and enters `Recorder.functions`.

    Args:
        layers: modules, and functions.
        capture_kinds: names of `KINDS`.
        takes_function: asked at each call of a function; without it those among
            `layers` are taken.
        changes: see `watch_calls`.
    """
    # a function mode costs each call of a function; without functions there is none
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
            # its callers ask for no weights, and torch then does not compute them
            if isinstance(module, nn.MultiheadAttention):
                hook = module.register_forward_pre_hook(
                    _ask_for_weights, with_kwargs=True
                )
                stack.callback(hook.remove)
        yield recorder


def _kinds_of(of: str, names: Sequence[str]) -> list[CaptureKind]:
    """The capture kinds of these names that are of a layer's `input`, or `output`."""
    return [kind for kind in KINDS.values() if kind.of == of and kind.name in names]


def _ask_for_weights(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Let an attention return its weights [1, heads, T, T] where its caller does not
    need them; its other result stays the same but for rounding."""
    if kwargs.get("need_weights") is not False:
        return None
    return args, {**kwargs, "need_weights": True, "average_attn_weights": False}


class Leaf(NamedTuple):
    """What stands at the end of a path through tuples, lists, dicts and dataclasses."""

    key: str
    """`0`, `boxes`, `0.feat`; empty where nothing is nested."""
    value: Any


@dataclass
class Recorder:
    """Counts the calls of hooked layers, and hands what they take and return to a sink.
    It sleeps until `begin`."""

    layers: Sequence[Layer]
    modules: Mapping[str, nn.Module]
    """The model's modules, by all their names."""
    input_kinds: Sequence[CaptureKind] = ()
    """What is captured of the tensors that a layer takes."""
    output_kinds: Sequence[CaptureKind] = ()
    """What is captured of those that it returns."""
    functions: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """To be entered around a pass, so that functions are captured, too."""
    sink: Sink | None = None
    calls: Counter[str] = field(default_factory=Counter)
    """How many times each layer was called in this pass, by its name."""
    skipped: list[Skip] = field(default_factory=list)
    fault: Exception | None = None
    """The exception that the sink raised, which is not a failure of the model."""
    _goes_forward: bool = False
    """Whether calls are captured: not before `begin`, and not in a backward pass."""
    _entered: Counter[str] = field(default_factory=Counter)
    """How many calls of each layer have begun, by its name."""
    _handles: list[RemovableHandle] = field(default_factory=list)
    """Of the hooks on tensors."""
    _awaited: dict[CaptureSite, GradientEdge] = field(default_factory=dict)
    """Where gradients have not come yet."""

    def begin(self, sink: Sink | None) -> None:
        """Begin a pass, and forget the one before; None ends the pass, and its counts
        and skips can still be read.

        Args:
            sink: takes what the hooks capture. None captures nothing until the next pass
                begins; hooks on tensors are removed, since the model may keep some of
                these.
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
        """Layers whose hook never fired. Left out are containers that the model only
        iterates over (unless nothing fired at all), and names of a module that ran
        under another name; one that ran under none is named once."""
        # ids: a module that ran under one of its names has run
        seen = {id(self.modules[name]) for name in self.calls if name in self.modules}
        # functions have no module, and are asked about by name alone
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
        """Whether a module has no forward of its own, or is a Sequential whose members
        were called one by one."""
        forward = type(module).forward
        if forward is nn.Sequential.forward:
            return any(name.startswith(f"{layer.name}.") for name in self.calls)
        return forward is nn.Module.forward and "forward" not in vars(module)

    def enter(
        self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """The hook before a layer's call: take the tensors among its arguments, `args` by
        position and `kwargs` by name. A call without any is noted in `skipped`."""
        if not self._goes_forward:
            return
        # counted apart from `calls`: a recursive layer is entered again before it leaves
        call = self._entered[layer.name]
        self._entered[layer.name] += 1
        # numbers, masks of None and the like are not captures
        arguments = given_tensors(args, kwargs)
        for capture_kind in self.input_kinds:
            for key, value in arguments:
                site = CaptureSite(layer, capture_kind.name, call, key)
                self._take(site, value, capture_kind.backward)
            if not arguments:
                site = CaptureSite(layer, capture_kind.name, call, "")
                self.skipped.append(Skip.of(site, "takes no tensor"))

    def leave(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        """The hook after a layer's call: take the tensors of its output. What else is in
        it is noted in `skipped`, but for a None beside a tensor. The arguments of the
        call (`args`, `kwargs`) are not looked at."""
        if not self._goes_forward:
            return
        call = self.calls[layer.name]
        self.calls[layer.name] += 1
        results = [Leaf("", output)]
        if not isinstance(output, Tensor):  # which most are, and `leaves` takes time
            results = list(leaves(output))
            if any(isinstance(result.value, Tensor) for result in results):
                results = [result for result in results if result.value is not None]
        for key, value in results:
            for capture_kind in self.output_kinds:
                site = CaptureSite(layer, capture_kind.name, call, key)
                self._take(site, value, capture_kind.backward)

    def back(self, target: Tensor, inputs: Sequence[Tensor]) -> None:
        """Go back from a target to the inputs; hooks on tensors take the gradients. Where
        none came is noted in `skipped`.

        Layers that run from now on are recomputed (activation checkpointing), and have
        been seen.

        Args:
            target: one number, of the pass that is under way.
            inputs: the model's, which require gradients.

        Raises:
            ForwardError: the backward pass fails.
            Exception: what the sink raised, as it is.
        """
        self._goes_forward = False
        try:
            # retain_graph: what is still awaited is asked for in a second pass
            torch.autograd.grad(target, inputs, retain_graph=True, allow_unused=True)
            # what hangs on parameters only (a table of positions) is not on the way to
            # an input
            aside = dict(self._awaited)
            if aside:
                gradients = torch.autograd.grad(
                    target, list(aside.values()), allow_unused=True
                )
                for site, gradient in zip(aside, gradients, strict=True):
                    self._arrived(site, gradient)
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

    def _take(self, site: CaptureSite, value: Any, backward: bool = False) -> None:
        """Give a tensor to the sink, or await its gradient.

        Args:
            site: the capture that it is.
            value: what a layer took or returned, or the gradient that has arrived;
                anything that is not a tensor is noted in `skipped`.
            backward: whether the gradient is captured, and not the tensor itself. A
                tensor that needs none is noted in `skipped`, too.

        Raises:
            Exception: what the sink raised, which is kept in `fault`; but a LayoutError
                is noted in `skipped`.
        """
        with unwatched():
            if not isinstance(value, Tensor) or (backward and not value.requires_grad):
                self.skipped.append(Skip.of(site, _why_none(value)))
                return
            if backward:
                # the edge holds no tensor, so that nothing of the image outlives the
                # pass
                self._awaited[site] = get_gradient_edge(value)
                # A hook on a leaf, such as a parameter, would stay with the model;
                # `back` asks for its gradient by the edge.
                if not value.is_leaf:
                    hook = partial(self._arrived, site)
                    self._handles.append(value.register_hook(hook))  # type: ignore[no-untyped-call]
                return
            assert self.sink is not None, "begin comes first"
            try:
                # detached, so that what the sink computes makes no graph
                self.sink(site, value.detach())
            except LayoutError as error:
                self.skipped.append(Skip.of(site, error.message))
            # kept, so that `forward` tells a fault of ours, or a full disk, from one of
            # the model
            except Exception as error:
                self.fault = error
                raise

    def _arrived(self, site: CaptureSite, gradient: Tensor | None) -> None:
        """Take a gradient that has come, unless it has been taken before."""
        if gradient is not None and self._awaited.pop(site, None) is not None:
            self._take(site, gradient)


def given_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Leaf]:
    """The tensors among the arguments of a call, with their keys: the argument's position
    or name, and the path inside of it (`1`, `mask`, `features.0`). Where only one argument
    holds tensors, the path alone (empty for a plain tensor)."""
    # under its position or its name, an argument is as the items of a container
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    tensor_leaves = [
        leaf for leaf in leaves(arguments) if isinstance(leaf.value, Tensor)
    ]
    if len({leaf.key.partition(".")[0] for leaf in tensor_leaves}) != 1:
        return tensor_leaves
    # keys inside of the only argument: `0`, not `boxes.0`
    return [Leaf(leaf.key.partition(".")[2], leaf.value) for leaf in tensor_leaves]


def leaves(value: Any, key: str = "") -> Iterator[Leaf]:
    """Flatten tuples, lists, dicts and dataclasses; an empty one is a leaf itself.

    Args:
        value: anything.
        key: the path that leads to `value`, with which the keys of its leaves begin.
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
    """Why a value could not be captured, or has no gradient, as the end of a sentence in
    `skipped`: `is None, not a tensor`. The caller knows that one of the two is so."""
    if value is None:
        return "is None, not a tensor"
    if not isinstance(value, Tensor):
        # `leaves` takes containers apart, but for those that hold nothing
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
    """Call the model, and return what it returns.

    Without gradients its attributes are put back at once; with them a backward pass may
    run layers again, which read what forward has left there, and whoever goes back puts
    them back.

    Args:
        args: of the model, on its device.
        recorder: of the hooks that are in place; what its sink raised is raised as it
            is, since that is no fault of the model.

    Raises:
        ForwardError: the model failed; names the innermost module at fault.
        FeatvizError: raised inside the model, for example by an intervention.
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
    """The functions that modules call in one forward pass, in the order of their first
    calls, with the number of their calls; ForwardError where the model fails.

    Args:
        args: of the model, on its device.
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
    """What gives an input [N, C, H, W] sizes that many models want, square ones and
    multiples of 32, as the beginning of a list; empty where it has them."""
    if len(shape) != 4:
        return ""
    height, width = shape[2:]
    remedies = ""
    if height != width:
        side = min(height, width)
        remedies = f"--size {side}x{side} makes it square, "
    # a U-Net halves its maps, doubles them, and joins both
    whole = [max(32, round(side / 32) * 32) for side in (height, width)]
    if whole != [height, width]:
        remedies += f"--size {whole[0]}x{whole[1]} lets it be halved five times, "
    return remedies


def _at_fault(model: nn.Module, error: Exception) -> str:
    """The innermost module of a model in whose method an error was raised: `layer1
    (Block)`.

    Of the names of a shared module the one counts that lies in the module that called
    it."""
    # by id: the `self` of a frame may be anything, also what has no hash
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
