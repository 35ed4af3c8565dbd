"""One input's way through the model and, where gradients are wanted, back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from featviz import gradient_rules, interventions, layout, prediction, select, targets
from featviz.borrowed import borrowed
from featviz.errors import UsageError
from featviz.hints import HintBook
from featviz.hooks import KINDS, Recorder, Sink, faults, forward, hooked, list_layers
from featviz.interventions import Intervention
from featviz.models.load import LoadedModel
from featviz.records import Hints, Layer, Outcome, PassOptions, Site
from featviz.targets import Target


@dataclass(frozen=True)
class Plan:
    """The options of a pass, read and held against a model."""

    options: PassOptions
    target: Target
    target_module: nn.Module | None = None
    changes: dict[str, tuple[Layer, list[Intervention]]] = field(default_factory=dict)
    """By layer name, in the order in which they were given."""


def check_options(options: PassOptions) -> None:
    """Refuse bad values before any work.

    Raises:
        UsageError: names the option, its value and what it takes.
    """
    if wrong := [kind for kind in options.capture if kind not in KINDS]:
        raise UsageError(f"--capture {wrong[0]!r} is nothing to capture", f"of {', '.join(KINDS)}")
    if not options.capture:
        raise UsageError("--capture is empty", f"of {', '.join(KINDS)}")
    targets.parse(options.target)
    changes = [interventions.parse(kind, text) for kind, text in options.interventions]
    needless = [
        name
        for name, given in (
            ("--target", options.target is not None),
            ("--grad-rule", options.grad_rule != "plain"),
            ("--grad-scale", any(change.kind == "grad-scale" for change in changes)),
        )
        if given and not options.gradients
    ]
    if needless:
        raise UsageError(
            f"{needless[0]} does nothing without gradients", "add --capture output,grad"
        )


def plan(model: LoadedModel, options: PassOptions) -> Plan:
    """Hold the options against a model.

    Raises:
        UsageError: a selector of an intervention, or the target's layer, matches nothing.
    """
    layers = list_layers(model.module)
    modules = dict(model.module.named_modules())
    changes: dict[str, tuple[Layer, list[Intervention]]] = {}
    for kind, text in options.interventions:
        change = interventions.parse(kind, text)
        for layer in _selected(change, layers):
            changes.setdefault(layer.name, (layer, []))[1].append(change)
    target = targets.parse(options.target)
    if target.layer is not None and target.layer not in modules:
        raise UsageError(f"--target {target.text}: no layer is called {target.layer!r}")
    module = None if target.layer is None else modules[target.layer]
    return Plan(options, target, module, changes)


def try_out(model: LoadedModel, plan: Plan, blank: Sequence[Tensor]) -> None:
    """Go there and back once on zeros, so that what cannot work is said before anything is written.

    Raises:
        UsageError: the target does not fit the output, or a layer has no such channel.
        ForwardError: the model cannot take the input.
    """
    if plan.options.gradients or plan.changes:
        book = HintBook(model.module, blank[0].shape)
        with borrowed(model.module, plan.options.gradients):
            run(model, plan, blank, book, [], _ignore)


def run(
    model: LoadedModel,
    plan: Plan,
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
    before = _undisturbed(model, plan, given)
    with (
        _intervened(model, plan, book),
        hooked(model.module, layers, sink, plan.options.capture) as recorder,
    ):
        if plan.options.gradients:
            output, value = _there_and_back(model, plan, given, book, recorder)
        else:
            output, value = forward(model.module, given, recorder), None
    top, top_before = (prediction.top_classes(o, model.categories) for o in (output, before))
    change = None if before is None else prediction.largest_change(before, output)
    return Outcome(top, top_before, change, value), recorder


def _there_and_back(
    model: LoadedModel,
    plan: Plan,
    given: Sequence[Tensor],
    book: HintBook,
    recorder: Recorder,
) -> tuple[Any, float]:
    """Forward and backward; hooks on tensors take the gradients. Parameters get none.

    The input requires gradients, so that a frozen model has a graph; the model gets a copy of it,
    since an in-place operation is not allowed on the input itself.
    """
    leaves = [arg.clone().requires_grad_() for arg in given]
    with gradient_rules.rule(plan.options.grad_rule), _kept(plan.target_module) as kept:
        output = forward(model.module, [leaf.clone() for leaf in leaves], recorder)
    value = _value(model, plan, output, kept, book)
    if not value.requires_grad:
        raise UsageError(f"--target {plan.target.text} does not depend on the input")
    with faults(model.module, given, recorder):
        torch.autograd.grad(value, leaves, allow_unused=True)
    recorder.close()
    return output, float(value.detach())


def _value(model: LoadedModel, plan: Plan, output: Any, kept: list[Any], book: HintBook) -> Tensor:
    target = plan.target
    if target.layer is None:
        return target.value(output, model.categories)
    if not kept:
        raise UsageError(f"--target {target.text}: the layer did not run")
    found = kept[-1]
    if target.channel is not None and isinstance(found, Tensor):
        axis = _axis(found, book.of_name(target.layer))
        if target.channel >= found.shape[axis]:
            raise UsageError(
                f"--target {target.text}: the layer has channels 0 to {found.shape[axis] - 1}"
            )
        found = found.select(axis, target.channel)
    return target.value(found)


def _undisturbed(model: LoadedModel, plan: Plan, given: Sequence[Tensor]) -> Any:
    """The output without interventions; None where there are none."""
    if not plan.changes:
        return None
    with torch.no_grad():
        return forward(model.module, given)


@contextmanager
def _intervened(model: LoadedModel, plan: Plan, book: HintBook) -> Iterator[None]:
    """Let the interventions change what layers give, while the block runs."""
    modules = dict(model.module.named_modules())
    with ExitStack() as stack:
        for name, (layer, changes) in plan.changes.items():
            axis_of = partial(_axis, hints=book.of(layer))
            hook = interventions.applied(changes, axis_of, plan.options.seed)
            stack.callback(modules[name].register_forward_hook(hook).remove)
        yield


@contextmanager
def _kept(module: nn.Module | None) -> Iterator[list[Any]]:
    """What a module gives, for a target that is a layer."""
    found: list[Any] = []
    if module is None:
        yield found
        return

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        # a copy, since a later in-place operation would change what the target is
        found.append(output.clone() if isinstance(output, Tensor) else output)

    handle = module.register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


def _selected(change: Intervention, layers: Sequence[Layer]) -> list[Layer]:
    found = select.select(layers, select.parse(change.selectors))
    if not found:
        raise UsageError(
            f"--{change.kind} {change.text!r}: no layer matches {change.selectors!r}",
            f"types here: {select.types_present(layers)}",
        )
    return found


def _axis(tensor: Tensor, hints: Hints) -> int:
    axis = layout.channel_axis(list(tensor.shape), hints)
    if axis is None:
        raise UsageError(f"the channels of a tensor {list(tensor.shape)} are unknown")
    return axis


def _ignore(site: Site, tensor: Tensor) -> None:
    pass
