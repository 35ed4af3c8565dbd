"""One input's way through the model and, where gradients are wanted, back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from featviz import layout
from featviz.errors import UsageError
from featviz.gradients import interventions, predictions, relu_rules
from featviz.gradients.options import PassPlan
from featviz.gradients.relu_rules import Rule
from featviz.hooks.capture import Recorder, Sink, hooked
from featviz.hooks.containers import tensors
from featviz.hooks.eval_mode import in_eval_mode, kept_rng
from featviz.hooks.forward import back, forward
from featviz.hooks.functions import unwatched
from featviz.hooks.layers import modules_by_name
from featviz.hooks.naming import class_names, is_exported
from featviz.hooks.running import Running
from featviz.layout.overrides import HintBook
from featviz.models.load import LoadedModel
from featviz.records import Layer, Outcome
from featviz.text import listed

log = logging.getLogger(__name__)


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
        relu_rules.rule(plan.options.grad_rule) as rule,
        hooked(model.module, layers, sink, plan.options.capture) as recorder,
    ):
        if plan.options.gradients:
            output, value = _there_and_back(model, plan, given, book, recorder)
        else:
            output, value = forward(model.module, given, recorder), None
        _check_rule(model, plan, rule)
    largest, nonfinite = predictions.largest_change(tensors(before), tensors(output))
    outcome = Outcome(
        prediction=predictions.top_classes(output, model.categories, model.scores),
        before=predictions.top_classes(before, model.categories, model.scores),
        intervened=plan.changes_values,
        largest_change=largest,
        nonfinite=nonfinite,
        target=value,
        idle=tuple(_idle(plan, ran, rule)),
    )
    return outcome, recorder


def _check_rule(model: LoadedModel, plan: PassPlan, rule: Rule | None) -> None:
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


def _there_and_back(
    model: LoadedModel,
    plan: PassPlan,
    given: Sequence[Tensor],
    book: HintBook,
    recorder: Recorder,
) -> tuple[Any, float]:
    """Forward and backward; hooks on tensors take the gradients. Parameters get none.

    The input requires gradients, so that a frozen model has a graph; the model gets a copy of it,
    since an in-place operation is not allowed on the input itself.
    """
    inputs = [arg.clone().requires_grad_(_has_gradient(arg)) for arg in given]
    with _kept(model, plan) as kept:
        output = forward(model.module, [arg.clone() for arg in inputs], recorder)
    value = _value(model, plan, output, kept, book)
    if not value.requires_grad:
        raise plan.target.error(
            ": no gradient flows back from it",
            "the model is quantized, or detaches it, or computes it under torch.no_grad",
        )
    back(value, [arg for arg in inputs if arg.requires_grad], recorder)
    return output, float(value.detach())


def _has_gradient(tensor: Tensor) -> bool:
    """Whether a tensor can have one; indices and masks cannot."""
    return tensor.is_floating_point() or tensor.is_complex()


def _value(
    model: LoadedModel, plan: PassPlan, output: Any, kept: list[Any], book: HintBook
) -> Tensor:
    target, layer = plan.target, plan.target_layer
    if layer is None:
        return target.value(output, model.categories, model.scores)
    if not kept:
        raise target.error(": the layer does not run")
    tensor = kept[-1]
    if target.channel is not None and isinstance(tensor, Tensor):
        axis = _axis(tensor, book, layer, f"--target {target.text!r}")
        if target.channel >= tensor.shape[axis]:
            raise target.error(f": the layer has channels 0 to {tensor.shape[axis] - 1}")
        tensor = tensor.select(axis, target.channel)
    return target.value(tensor)


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
    modules = modules_by_name(model.module)
    noise = torch.Generator().manual_seed(plan.options.seed)
    running = Running(model.module)
    with ExitStack() as stack:
        for name, (layer, changes) in plan.changes.items():
            axis_of = partial(_axis, book=book, layer=layer)
            change = interventions.applied(changes, layer.label, axis_of, noise)
            hook = running.only(layer, _unseen(change, partial(ran.add, name)))
            stack.callback(modules[name].register_forward_hook(hook).remove)
        stack.enter_context(running.followed(plan.changes))
        yield ran


def _unseen(change: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    def hook(module: Any, args: Any, output: Any) -> Any:
        with unwatched():
            changed = change(module, args, output)
        note()
        return changed

    return hook


@contextmanager
def _kept(model: LoadedModel, plan: PassPlan) -> Iterator[list[Any]]:
    """The outputs of the layer that is the target, one for each call."""
    outputs: list[Any] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        # a copy, since a later in-place operation would change what the target is
        with unwatched():
            outputs.append(output.clone() if isinstance(output, Tensor) else output)

    running, layer = Running(model.module), plan.target_layer
    with ExitStack() as stack:
        if layer is not None:
            module = model.module.get_submodule(layer.name)
            stack.callback(module.register_forward_hook(running.only(layer, keep)).remove)
            stack.enter_context(running.followed([layer.name]))
        yield outputs


def _idle(plan: PassPlan, ran: set[str], rule: Rule | None) -> Iterator[str]:
    """Words for each option that changed nothing."""
    if rule is not None and not rule.met:
        yield f"--grad-rule {plan.options.grad_rule} changes nothing: the model calls no ReLU"
    idle: dict[str, list[str]] = {}
    for name, (layer, changes) in plan.changes.items():
        for change in changes if name not in ran else ():
            idle.setdefault(change.option, []).append(layer.label)
    for option, layers in idle.items():
        yield f"{option}: {listed(layers, 1)} did not run"


def _axis(tensor: Tensor, book: HintBook, layer: Layer, what: str) -> int:
    axis = layout.channel_axis(list(tensor.shape), book.of(layer))
    if axis is None:
        raise UsageError(
            f"{what}: it is unknown which axis of {layer.label} {list(tensor.shape)} counts "
            "channels",
            "--tensor-layout says it",
        )
    return axis
