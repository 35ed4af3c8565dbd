"""One input's way through the model and, where gradients are wanted, back."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from featviz import layout
from featviz.errors import UsageError
from featviz.gradients import interventions, predictions, targets
from featviz.gradients.interventions import Intervention
from featviz.gradients.targets import Target
from featviz.hooks import selectors
from featviz.hooks.capture import Recorder, Sink, hooked, tensors
from featviz.hooks.eval_mode import in_eval_mode, kept_rng
from featviz.hooks.forward import back, forward
from featviz.hooks.functions import FunctionMode, Running, unwatched
from featviz.hooks.layers import (
    class_names,
    is_exported,
    is_in_place,
    list_layers,
    modules_by_name,
)
from featviz.layout.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.options import PassOptions
from featviz.records import KINDS, Layer, Outcome, Site
from featviz.text import listed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassPlan:
    """The options of a pass, matched with a model's layers."""

    options: PassOptions
    target: Target
    target_layer: Layer | None = None
    """The layer whose mean activation is the target; None where the output is."""
    changes: Mapping[Layer, Sequence[Intervention]] = field(default_factory=dict)

    @property
    def changes_values(self) -> bool:
        """Whether some intervention changes what a layer gives, not only gradients."""
        return any(change.kind != "grad" for changes in self.changes.values() for change in changes)


def plan(model: LoadedModel, options: PassOptions) -> PassPlan:
    """Match the options with a model's layers.

    Raises:
        UsageError: a selector of an intervention, or the target's layer, matches nothing, or the
            model can have no gradients.
    """
    layers, changes = list_layers(model.module), dict[Layer, list[Intervention]]()
    for change in (interventions.parse(*change) for change in options.interventions):
        wanted = selectors.parse(change.selectors)
        if selectors.wants_functions(wanted):
            raise UsageError(f"{change.option}: functions cannot be changed, only modules")
        chosen = selectors.select(layers, wanted)
        if not chosen:
            words = f"{change.option}: no layer matches {change.selectors!r}"
            raise UsageError(words, selectors.remedy(layers, wanted))
        for layer in chosen:
            changes.setdefault(layer, []).append(change)
    for name, tensor in chain(model.module.named_parameters(), model.module.named_buffers()):
        if options.gradients and tensor.is_inference():
            raise UsageError(
                f"there are no gradients: {name} was made under torch.inference_mode",
                "make or load the model outside of it",
            )
    target, at = targets.parse(options.target), None
    if target.layer is not None:
        at = next((one for one in layers if target.layer in (one.name, *one.aliases)), None)
        if at is None:
            close = selectors.nearest(layers, selectors.parse(target.layer))
            hint = f"did you mean {' or '.join(close)}?" if close else ""
            words = f": no layer is called {target.layer!r}"
            raise target.error(words, hint or "featviz layers MODEL lists them")
    return PassPlan(options, target, at, changes)


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
    ran, kept = set[Layer](), list[Any]()
    with (
        book.traced(model.module, layers),
        _with_hooks(model, _hooks(plan, book, ran, kept)),
        relu_rule(plan.options.grad_rule) as relus,
        hooked(model.module, layers, sink, plan.options.capture) as recorder,
    ):
        value, named = None, ""
        if plan.options.gradients:
            output, value, named = _there_and_back(model, plan, given, kept, book, recorder)
        else:
            output = forward(model.module, given, recorder)
    largest, nonfinite = predictions.largest_change(tensors(before), tensors(output))
    outcome = Outcome(
        prediction=predictions.top_classes(output, model.categories, model.scores),
        before=predictions.top_classes(before, model.categories, model.scores),
        intervened=plan.changes_values,
        largest_change=largest,
        nonfinite=nonfinite,
        target=value,
        target_title=named,
        idle=tuple(_idle(model, plan, ran, relus)),
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


def _hooks(
    plan: PassPlan, book: HintBook, ran: set[Layer], kept: list[Any]
) -> list[tuple[Layer, Callable[..., Any]]]:
    """Forward hooks that make the interventions, and one that keeps what the target's layer gives.

    Args:
        ran: gets the layers whose output was changed, as they run.
        kept: gets the outputs of the target's layer.
    """
    noise = torch.Generator().manual_seed(plan.options.seed)

    def change(layer: Layer, changes: Sequence[Intervention], output: Any) -> Any:
        axis_of = partial(_channel_axis, book, layer)
        output = interventions.apply(changes, layer.label, output, axis_of, noise)
        ran.add(layer)
        return output

    def keep(output: Any) -> None:
        # a copy, since a later in-place operation would change what the target is
        kept.append(output.clone() if isinstance(output, Tensor) else output)

    hooks: list[tuple[Layer, Callable[..., Any]]]
    hooks = [(layer, partial(change, layer, changes)) for layer, changes in plan.changes.items()]
    if plan.options.gradients and plan.target_layer is not None:
        hooks.append((plan.target_layer, keep))
    return hooks


@contextmanager
def _with_hooks(
    model: LoadedModel, hooks: Sequence[tuple[Layer, Callable[..., Any]]]
) -> Iterator[None]:
    """Let hooks take the outputs of layers by their names; no other hook sees them at work."""
    if not hooks:
        yield
        return
    running, modules = Running(model.module), modules_by_name(model.module)

    def unseen(hook: Callable[..., Any], module: Any, args: Any, output: Any) -> Any:
        with unwatched():
            return hook(output)

    with ExitStack() as stack:
        for layer, hook in hooks:
            only = running.only(layer, partial(unseen, hook))
            stack.callback(modules[layer.name].register_forward_hook(only).remove)
        stack.enter_context(running.followed([layer.name for layer, _ in hooks]))
        yield


def _there_and_back(
    model: LoadedModel,
    plan: PassPlan,
    given: Sequence[Tensor],
    kept: Sequence[Any],
    book: HintBook,
    recorder: Recorder,
) -> tuple[Any, float, str]:
    """Forward and backward; hooks on tensors take the gradients. Parameters get none.

    The input requires gradients, so that a frozen model has a graph; the model gets a copy of it,
    since an in-place operation is not allowed on the input itself.

    Returns:
        The model's output, the target's value, and the target for people.
    """
    inputs = [arg.clone() for arg in given]
    for arg in inputs:  # indices and masks can have no gradient
        arg.requires_grad_(arg.is_floating_point() or arg.is_complex())
    output = forward(model.module, [arg.clone() for arg in inputs], recorder)
    target, layer, there = plan.target, plan.target_layer, output
    if layer is not None:
        if not kept:
            raise target.error(": the layer does not run")
        there = kept[-1]
        if target.channel is not None and isinstance(there, Tensor):
            axis = _channel_axis(book, layer, there, f"target {target.text!r}")
            if target.channel >= there.shape[axis]:
                raise target.error(f": the layer has channels 0 to {there.shape[axis] - 1}")
            there = there.select(axis, target.channel)
    value, named = target.value(there, model.categories, model.scores)
    if not value.requires_grad:
        raise target.error(
            ": no gradient flows back from it",
            "the model is quantized, or detaches it, or computes it under torch.no_grad",
        )
    back(value, [arg for arg in inputs if arg.requires_grad], recorder)
    return output, float(value.detach()), named


def _channel_axis(book: HintBook, layer: Layer, tensor: Tensor, what: str) -> int:
    axis = layout.channel_axis(list(tensor.shape), book.of(layer))
    if axis is None:
        raise UsageError(
            f"{what}: it is unknown which axis of {layer.label} {list(tensor.shape)} counts "
            "channels",
            "--tensor-layout says it",
        )
    return axis


def _idle(
    model: LoadedModel, plan: PassPlan, ran: set[Layer], relus: Counter[str] | None
) -> Iterator[str]:
    """Words for each option that changed nothing.

    Raises:
        UsageError: a rule for ReLUs met none of those that an exported program has: somebody
            decomposed them.
    """
    rule = plan.options.grad_rule
    if relus is not None and not relus:
        there = [part for part in model.module.modules() if "ReLU" in class_names(part)]
        if any(map(is_exported, there)):
            raise UsageError(
                f"--grad-rule {rule}: the exported program has {len(there)} ReLU modules and calls "
                "no relu in them",
                "export it without decompositions of relu, or leave the rule out",
            )
        yield f"--grad-rule {rule} changes nothing: the model calls no ReLU"
    idle: dict[str, list[str]] = {}
    for layer, changes in plan.changes.items():
        for change in changes if layer not in ran else ():
            idle.setdefault(change.option, []).append(layer.label)
    for option, names in idle.items():
        yield f"{option}: {listed(names, 1)} did not run"


# An output with its gradient


def paired(take: Callable[[Site, Tensor, Tensor], None]) -> Sink:
    """A sink for hooks that capture `options.PAIRED`: it hands on each output with its gradient.

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


@contextmanager
def relu_rule(name: str) -> Iterator[Counter[str] | None]:
    """Let gradients pass every ReLU, module or function, by a rule (plain, guided or deconv) while
    the block runs; the model itself is not touched.

    Enter it before whatever else watches functions, which then sees the ReLU and not what the rule
    makes of it.

    Yields:
        How many calls of `relu` it has met so far; None under `plain`.
    """
    if name == "plain":
        yield None
        return
    met = Counter[str]()

    def relu(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        met["relu"] += 1
        x = args[0] if args else kwargs.get("input", kwargs.get("self"))
        inplace = is_in_place(func) or kwargs.get("inplace", args[1] if args[1:] else False)
        return ReluFunction.apply(x, bool(inplace), name == "guided")

    with FunctionMode(replacements={"relu": relu}):
        yield met
