"""One input's way through the model and, where gradients are wanted, back."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from featviz import layout
from featviz.errors import UsageError
from featviz.gradients import interventions, predictions
from featviz.gradients.options import PassPlan
from featviz.hooks.capture import Recorder, Sink, hooked, tensors
from featviz.hooks.eval_mode import in_eval_mode, kept_rng
from featviz.hooks.forward import back, forward
from featviz.hooks.functions import FunctionMode, Running, unwatched
from featviz.hooks.layers import class_names, is_exported, is_in_place, modules_by_name
from featviz.layout.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.records import KINDS, Layer, Outcome, Site
from featviz.rundir.schema import Capture
from featviz.text import listed

log = logging.getLogger(__name__)

VANISHING, EXPLODING = 1e-3, 1e3
"""Ratios to the layer nearest the output, below and above which a gradient is named."""


def try_out(model: LoadedModel, plan: PassPlan, blank: Sequence[Tensor], book: HintBook) -> None:
    """Go there and back once on zeros, so that what cannot work is said before anything is
    written; warn of options that change nothing.

    Raises:
        UsageError: the target does not fit the output, or a layer has no such channel.
        ForwardError: the model cannot take the input, or its backward pass fails.
    """
    if plan.options.gradients or plan.changes:
        with in_eval_mode(model.module, plan.options.gradients):
            outcome, _ = run(model, plan, blank, book, [], lambda site, tensor: None)
        for words in outcome.idle:
            log.warning("%s", words)


def run(
    model: LoadedModel,
    plan: PassPlan,
    args: Sequence[Tensor],
    book: HintBook,
    layers: Sequence[Layer],
    sink: Sink,
) -> tuple[Outcome, Recorder]:
    """Run the model on an input, with its interventions, and back from the target.

    Args:
        args: what the model's forward takes, on any device.
        layers: what to capture, into `sink`.

    Raises:
        UsageError: the target does not fit the output.
        ForwardError: the model raised.
    """
    given = [arg.to(model.device) for arg in args]
    before = _undisturbed(model, plan, given, book, layers)
    with (
        book.traced(model.module, layers),
        _intervened(model, plan, book) as ran,
        relu_rule(plan.options.grad_rule) as rule,
        hooked(model.module, layers, sink, plan.options.capture) as recorder,
    ):
        if plan.options.gradients:
            output, value = _there_and_back(model, plan, given, book, recorder)
        else:
            output, value = forward(model.module, given, recorder), None
        _check_rule(model, plan, rule)
    named = plan.target.title(output, model.categories, model.scores) if value is not None else ""
    largest, nonfinite = predictions.largest_change(tensors(before), tensors(output))
    outcome = Outcome(
        prediction=predictions.top_classes(output, model.categories, model.scores),
        before=predictions.top_classes(before, model.categories, model.scores),
        intervened=plan.changes_values,
        largest_change=largest,
        nonfinite=nonfinite,
        target=value,
        target_title=named,
        idle=tuple(_idle(plan, ran, rule)),
    )
    return outcome, recorder


def _undisturbed(
    model: LoadedModel,
    plan: PassPlan,
    given: Sequence[Tensor],
    book: HintBook,
    layers: Sequence[Layer],
) -> Any:
    """The output without interventions, from the same random numbers; None where they change no
    values. The image is followed here, since what an intervention returns is another tensor."""
    if not plan.changes or (book.is_traced and not plan.changes_values):
        return None
    with torch.no_grad(), kept_rng(), book.traced(model.module, layers):
        output = forward(model.module, [arg.clone() for arg in given])
    return output if plan.changes_values else None


@contextmanager
def _intervened(model: LoadedModel, plan: PassPlan, book: HintBook) -> Iterator[set[str]]:
    """Let the interventions change what layers give, while the block runs.

    Yields:
        The names of the layers whose output was changed, as they run.
    """
    ran = set[str]()
    if not plan.changes:
        yield ran
        return
    noise = torch.Generator().manual_seed(plan.options.seed)
    hooks: dict[Layer, Callable[..., Any]] = {}
    for name, (layer, changes) in plan.changes.items():
        axis_of = partial(_axis, book=book, layer=layer)
        change = interventions.applied(changes, layer.label, axis_of, noise)

        def changed(
            module: Any, args: Any, output: Any, name: str = name, change: Any = change
        ) -> Any:
            result = change(module, args, output)
            ran.add(name)
            return result

        hooks[layer] = changed
    with _with_hooks(model, hooks):
        yield ran


@contextmanager
def _with_hooks(model: LoadedModel, hooks: Mapping[Layer, Callable[..., Any]]) -> Iterator[None]:
    """Forward hooks for calls of layers by their names, which no other hook sees at work."""
    if not hooks:
        yield
        return
    running, modules = Running(model.module), modules_by_name(model.module)

    def unseen(hook: Callable[..., Any], module: Any, args: Any, output: Any) -> Any:
        with unwatched():
            return hook(module, args, output)

    with ExitStack() as stack:
        for layer, hook in hooks.items():
            only = running.only(layer, partial(unseen, hook))
            stack.callback(modules[layer.name].register_forward_hook(only).remove)
        stack.enter_context(running.followed([layer.name for layer in hooks]))
        yield


def _there_and_back(
    model: LoadedModel, plan: PassPlan, given: Sequence[Tensor], book: HintBook, recorder: Recorder
) -> tuple[Any, float]:
    """Forward and backward; hooks on tensors take the gradients. Parameters get none.

    The input requires gradients, so that a frozen model has a graph; the model gets a copy of it,
    since an in-place operation is not allowed on the input itself.
    """
    inputs = [arg.clone() for arg in given]
    for arg in inputs:  # indices and masks can have no gradient
        arg.requires_grad_(arg.is_floating_point() or arg.is_complex())
    kept: list[Any] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        # a copy, since a later in-place operation would change what the target is
        kept.append(output.clone() if isinstance(output, Tensor) else output)

    with _with_hooks(model, {plan.target_layer: keep} if plan.target_layer else {}):
        output = forward(model.module, [arg.clone() for arg in inputs], recorder)
    value = _value(model, plan, output, kept, book)
    if not value.requires_grad:
        raise plan.target.error(
            ": no gradient flows back from it",
            "the model is quantized, or detaches it, or computes it under torch.no_grad",
        )
    back(value, [arg for arg in inputs if arg.requires_grad], recorder)
    return output, float(value.detach())


def _value(
    model: LoadedModel, plan: PassPlan, output: Any, kept: list[Any], book: HintBook
) -> Tensor:
    """The target's number, by the model's output or by those of the target's layer."""
    target, layer = plan.target, plan.target_layer
    if layer is None:
        return target.value(output, model.categories, model.scores)
    if not kept:
        raise target.error(": the layer does not run")
    tensor = kept[-1]
    if target.channel is not None and isinstance(tensor, Tensor):
        axis = _axis(tensor, book, layer, f"target {target.text!r}")
        if target.channel >= tensor.shape[axis]:
            raise target.error(f": the layer has channels 0 to {tensor.shape[axis] - 1}")
        tensor = tensor.select(axis, target.channel)
    return target.value(tensor)


def _axis(tensor: Tensor, book: HintBook, layer: Layer, what: str) -> int:
    axis = layout.channel_axis(list(tensor.shape), book.of(layer))
    if axis is None:
        raise UsageError(
            f"{what}: it is unknown which axis of {layer.label} {list(tensor.shape)} counts "
            "channels",
            "--tensor-layout says it",
        )
    return axis


def _idle(plan: PassPlan, ran: set[str], rule: ReluRule | None) -> Iterator[str]:
    """Words for each option that changed nothing."""
    if rule is not None and not rule.met:
        yield f"--grad-rule {plan.options.grad_rule} changes nothing: the model calls no ReLU"
    idle: dict[str, list[str]] = {}
    for name, (layer, changes) in plan.changes.items():
        for change in changes if name not in ran else ():
            idle.setdefault(change.option, []).append(layer.label)
    for option, layers in idle.items():
        yield f"{option}: {listed(layers, 1)} did not run"


# An output with its gradient


def paired(take: Callable[[Site, Tensor, Tensor], None]) -> Sink:
    """A sink for hooks that capture `targets.PAIRED`: it hands on each output with its gradient.

    `take` gets the site of the output, and may raise LayoutError where nothing is to be drawn. The
    output is copied when the layer gives it, since a later in-place operation may change it,
    and the copy goes when its gradient has come, or with the sink.
    """
    outputs: dict[Site, Tensor] = {}

    def sink(site: Site, tensor: Tensor) -> None:
        if not KINDS[site.kind].backward:
            outputs[site] = tensor.clone()
            return
        of = replace(site, kind=KINDS[site.kind].of)
        take(of, outputs.pop(of), tensor)

    return sink


# How a gradient passes a ReLU


class ReluFunction(torch.autograd.Function):
    """ReLU with a backward pass of another rule. With x its input and g the gradient at its output:

    - plain: g where x > 0
    - guided: g where x > 0 and g > 0 (Springenberg et al., arXiv 1412.6806, section 3.4)
    - deconv: g where g > 0 (Zeiler and Fergus, arXiv 1311.2901, section 2.1)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool, guided: bool) -> Tensor:
        """Compute the ReLU."""
        if inplace:
            ctx.mark_dirty(x)
        result = x.clamp_(min=0) if inplace else x.clamp(min=0)
        ctx.save_for_backward(*[result] * guided)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient at the input."""
        passed = gradients[0].clamp(min=0)
        for result in ctx.saved_tensors:
            passed = passed * (result > 0)
        return passed, None, None


class ReluRule:
    """A rule in force: computes calls of ReLU in the function's place."""

    def __init__(self, guided: bool) -> None:
        self.guided = guided
        self.met = 0
        """Calls of ReLU."""

    def __call__(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Compute a call of ReLU, with a backward pass by the rule."""
        self.met += 1
        x = args[0] if args else kwargs.get("input", kwargs.get("self"))
        inplace = is_in_place(func) or kwargs.get("inplace", args[1] if args[1:] else False)
        return ReluFunction.apply(x, bool(inplace), self.guided)


@contextmanager
def relu_rule(name: str) -> Iterator[ReluRule | None]:
    """Let gradients pass every ReLU, module or function, by a rule (plain, guided or deconv) while
    the block runs; the model itself is not touched.

    Enter it before whatever else watches functions, which then sees the ReLU and not what the rule
    makes of it.
    """
    if name == "plain":
        yield None
        return
    rule = ReluRule(name == "guided")
    with FunctionMode(replacements={"relu": rule}):
        yield rule


def _check_rule(model: LoadedModel, plan: PassPlan, rule: ReluRule | None) -> None:
    """Refuse gradients that a rule should have changed and could not: a program may compute a ReLU
    by another operator, if somebody decomposed it."""
    if rule is None or rule.met:
        return
    relus = [name for name, part in model.module.named_modules() if "ReLU" in class_names(part)]
    if any(is_exported(model.module.get_submodule(name)) for name in relus):
        raise UsageError(
            f"--grad-rule {plan.options.grad_rule}: the exported program has {len(relus)} ReLU "
            "modules and calls no relu in them",
            "export it without decompositions of relu, or leave the rule out",
        )


# Where gradients vanish along the depth of a model, and where they explode


def gradient_norms(rows: Iterable[Capture]) -> dict[str, float]:
    """The length of the gradient at each layer's output, by layer.

    The Euclidean norm over all values of a call, from each row's count, mean and std; of several
    calls the last, which is the nearest to the target.

    Args:
        rows: of one image, in the order in which gradients arrive: from the target to the input.
            Rows of other kinds than `grad` are left out.

    Returns:
        Layers in the order in which the forward pass left them.
    """
    squares: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.kind == "grad" and row.mean is not None and row.std is not None:
            calls = squares.setdefault(row.layer or row.type, {})
            length = _finite_values(row) * (row.mean**2 + row.std**2)
            calls[row.call] = calls.get(row.call, 0.0) + length
    lengths = {layer: math.sqrt(calls[max(calls)]) for layer, calls in squares.items()}
    return dict(reversed(lengths.items()))


def _finite_values(row: Capture) -> int:
    """The finite values of a row: its maps, the slices of each, and the pixels of a slice."""
    if row.constant is not None:
        return row.maps * math.prod(row.constant)
    tile: Any = row.grid["tile"]
    scale: Any = row.grid["scale"]
    down, across = scale if isinstance(scale, list) else (scale, scale)
    slices = row.slices[1] if row.slices else 1
    return int(row.maps * slices * (tile[0] // down) * (tile[1] // across) - row.nonfinite)


def norms_in_words(rows: Sequence[Capture]) -> str | None:
    """One line that names vanishing and exploding layers with their ratios; None where fewer than
    two layers have a gradient."""
    lengths = gradient_norms(rows)
    last = next((layer for layer in reversed(lengths) if lengths[layer] > 0), None)
    if last is None or len(lengths) < 2:
        return None
    ratios = {layer: norm / lengths[last] for layer, norm in lengths.items()}
    sides = {
        "vanishing": {k: v for k, v in ratios.items() if v < VANISHING},
        "exploding": {k: v for k, v in ratios.items() if v > EXPLODING},
    }
    parts = [
        f"{what}: " + ", ".join(f"{layer} ({ratio:.2g})" for layer, ratio in side.items())
        for what, side in sides.items()
        if side
    ]
    named = "; ".join(parts) or "none vanishes or explodes"
    least, most = min(ratios.values()), max(ratios.values())
    return f"gradient norms are {least:.2g} to {most:.2g} of that at {last}; {named}"
