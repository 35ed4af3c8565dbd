"""One input's way through the model and, where gradients are wanted, back; and its output in words:
the most likely classes, and how far two outputs are apart."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from featviz.errors import LayoutError, UsageError
from featviz.gradients import targets
from featviz.gradients.targets import Intervention, Target, output_at
from featviz.hooks import selectors
from featviz.hooks.capture import Recorder, Sink, forward, recording, tensors
from featviz.hooks.eval_mode import in_eval_mode, kept_attributes, kept_rng
from featviz.hooks.functions import FunctionMode
from featviz.hooks.layers import is_in_place, list_layers
from featviz.layout import channel_axis, to_floats
from featviz.layout.tracing.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.options import PassOptions
from featviz.records import KINDS, CaptureSite, ClassScore, Layer, Outcome
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
    backward: bool = False
    """Whether gradients are wanted."""

    @property
    def changes_values(self) -> bool:
        """Whether some intervention changes what a layer gives, not only gradients."""
        return any(kind != "grad" for changes in self.changes.values() for _, kind, *_ in changes)


def plan(
    model: LoadedModel, options: PassOptions, blank: Sequence[Tensor], book: HintBook
) -> PassPlan:
    """Match the options with a model's layers. Goes there and back once on zeros, so that what
    cannot work is said before anything is written; warns of options that change nothing."""
    layers, changes = list_layers(model.module), dict[Layer, list[Intervention]]()
    for change in (targets.parse_intervention(*change) for change in options.interventions):
        option, _, text, *_ = change
        wanted = selectors.parse(text, layers)
        if selectors.of_functions(wanted):
            raise UsageError(f"{option}: functions cannot be changed, only modules")
        chosen = selectors.select(layers, wanted)
        if not chosen:
            words = f"{option}: no layer matches {text!r}"
            raise UsageError(words, selectors.remedy(layers, wanted))
        for layer in chosen:
            changes.setdefault(layer, []).append(change)
    target, at = targets.parse(options.target), None
    if target.layer is not None:
        at = next((one for one in layers if target.layer in (one.name, *one.aliases)), None)
        if at is None:
            close = selectors.nearest(layers, selectors.parse(target.layer))
            hint = f"did you mean {' or '.join(close)}?" if close else ""
            words = f": no layer is called {target.layer!r}"
            raise target.error(words, hint or "featviz layers MODEL lists them")
    plan = PassPlan(options, target, at, changes, options.gradients)
    if plan.backward or changes:
        with in_eval_mode(model.module, plan.backward), watched(model, plan, []) as hooks:
            outcome, _ = hooks.show(blank, book, lambda site, tensor: None)
        for words in outcome.idle:
            log.warning("%s", words)
    return plan


@contextmanager
def watched(model: LoadedModel, plan: PassPlan, layers: Sequence[Layer]) -> Iterator[Watched]:
    """Place the hooks that capture layers, and those of interventions and of the target, for any
    number of inputs; all are removed afterwards."""
    hooks, changed = Watched(model, plan, layers), dict.fromkeys(plan.changes)
    if plan.backward and plan.target_layer is not None:
        changed[plan.target_layer] = None
    changes = [(layer, partial(hooks.change, layer)) for layer in changed]
    with recording(model.module, layers, plan.options.capture, changes=changes) as hooks.recorder:
        yield hooks


@dataclass
class Watched:
    """A model with its hooks in place."""

    model: LoadedModel
    plan: PassPlan
    layers: Sequence[Layer]
    recorder: Recorder = field(init=False)
    _book: HintBook | None = None
    """Of the input under way; None where nothing is changed."""
    _noise: torch.Generator = field(default_factory=torch.Generator)
    _ran: set[Layer] = field(default_factory=set)
    _there: list[Any] = field(default_factory=list)
    """The outputs of the target's layer."""

    def change(self, layer: Layer, output: Any) -> Any:
        """Change a layer's output, or keep it for the target; None where it stays as it is."""
        if self._book is None:
            return None
        if changes := self.plan.changes.get(layer):
            axis_of = partial(_channel_axis, self._book, layer)
            output = targets.intervene(changes, layer.label, output, axis_of, self._noise)
            self._ran.add(layer)
        if layer == self.plan.target_layer:
            # a copy, since a later in-place operation would change what the target is
            self._there.append(output.clone() if isinstance(output, Tensor) else output)
        return output if changes else None

    def show(self, args: Sequence[Tensor], book: HintBook, sink: Sink) -> tuple[Outcome, Recorder]:
        """Run the model on an input, with its interventions, and back from the target."""
        model, plan, recorder = self.model, self.plan, self.recorder
        given = [arg.to(model.device) for arg in args]
        before = self._undisturbed(given, book) if plan.changes else None
        self._book, self._ran, self._there = book, set(), []
        self._noise.manual_seed(plan.options.seed)
        value, named, rule = None, "", plan.options.grad_rule
        try:
            with (
                nullcontext() if book.is_traced else book.traced(model.module, self.layers),
                nullcontext() if rule == "plain" else relu_rule(rule) as relus,
                recorder.functions,
            ):
                recorder.begin(sink)
                if plan.backward:  # which may run parts of the model again (checkpointing)
                    with kept_attributes(model.module):
                        output, value, named = self._there_and_back(given, book)
                else:
                    output = forward(model.module, given, recorder)
        finally:
            self._book, self._there = None, []
            recorder.begin(None)
        found = top_classes(output, model.categories, model.scores)
        outcome = Outcome(found, target=value, target_title=named)
        if plan.changes or relus is not None:
            outcome = replace(outcome, idle=tuple(_idle(plan, self._ran, relus)))
        if plan.changes and plan.changes_values:
            largest, nonfinite = largest_change(tensors(before), tensors(output))
            outcome = replace(outcome, largest_change=largest, nonfinite=nonfinite, intervened=True)
            likely = top_classes(before, model.categories, model.scores)
            outcome = replace(outcome, before=likely)
        return outcome, recorder

    def _undisturbed(self, given: Sequence[Tensor], book: HintBook) -> Any:
        """The output without interventions, from the same random numbers; None where they change no
        values. The image is followed here, since what an intervention returns is another tensor."""
        if book.is_traced and not self.plan.changes_values:
            return None
        module = self.model.module
        self.recorder.begin(None)
        with torch.no_grad(), kept_rng(), book.traced(module, self.layers):
            output = forward(module, [arg.clone() for arg in given])
        return output if self.plan.changes_values else None

    def _there_and_back(self, given: Sequence[Tensor], book: HintBook) -> tuple[Any, float, str]:
        """Forward and backward; hooks on tensors take the gradients. Parameters get none. The
        input requires gradients, so that a frozen model has a graph; the model gets a copy of it,
        since an in-place operation is not allowed on the input itself."""
        model, plan = self.model, self.plan
        inputs = [arg.clone() for arg in given]
        for arg in inputs:  # indices and masks can have no gradient
            arg.requires_grad_(arg.is_floating_point() or arg.is_complex())
        output = forward(model.module, [arg.clone() for arg in inputs], self.recorder)
        target, layer, there = plan.target, plan.target_layer, output
        if layer is not None:
            if not self._there:
                raise target.error(": the layer does not run")
            there = self._there[-1]
            if target.channel is not None and isinstance(there, Tensor):
                axis = _channel_axis(book, layer, there, f"target {target.text!r}")
                if target.channel >= there.shape[axis]:
                    raise target.error(f": the layer has channels 0 to {there.shape[axis] - 1}")
                there = there.select(axis, target.channel)
        value, named = target.value(there, model.categories, model.scores)
        if not value.requires_grad:
            hint = "the model is quantized, or detaches it, or computes it under torch.no_grad"
            raise target.error(": no gradient flows back from it", hint)
        self.recorder.back(value, [arg for arg in inputs if arg.requires_grad])
        return output, float(value.detach()), named


def _channel_axis(book: HintBook, layer: Layer, tensor: Tensor, what: str) -> int:
    axis, shape = channel_axis(list(tensor.shape), book.of_layer(layer)), list(tensor.shape)
    if axis is None:
        words = f"{what}: it is unknown which axis of {layer.label} {shape} counts channels"
        raise UsageError(words, "--tensor-layout says it")
    return axis


def _idle(plan: PassPlan, ran: set[Layer], relus: Counter[str] | None) -> Iterator[str]:
    """Words for each option that changed nothing."""
    if relus is not None and not relus:
        yield f"--grad-rule {plan.options.grad_rule} changes nothing: the model calls no ReLU"
    idle: dict[str, list[str]] = {}
    for layer, changes in plan.changes.items():
        for change in changes if layer not in ran else ():
            idle.setdefault(change[0], []).append(layer.label)
    for option, names in idle.items():
        yield f"{option}: {listed(names, 1)} did not run"


# An output with its gradient


def paired(take: Callable[[CaptureSite, Tensor, Tensor], None]) -> Sink:
    """A sink for hooks that capture `targets.PAIRED`: it hands each output, and its site, on with
    its gradient; `take` may raise LayoutError. The output is copied when the layer gives it, since
    a later in-place operation may change it, until its gradient has come."""
    outputs: dict[CaptureSite, Tensor] = {}

    def sink(site: CaptureSite, tensor: Tensor) -> None:
        if not KINDS[site.kind].backward:
            outputs[site] = tensor.clone()
            return
        of = site._replace(kind=KINDS[site.kind].of)
        take(of, outputs.pop(of), tensor)

    return sink


# How a gradient passes a ReLU


@contextmanager
def relu_rule(name: str) -> Iterator[Counter[str]]:
    """Let gradients pass every ReLU, module or function, by a rule in this block; the model itself
    is not touched. With x the input of a ReLU and g the gradient at its output:

    - plain: g where x > 0
    - guided: g where x > 0 and g > 0 (Springenberg et al., arXiv 1412.6806, section 3.4)
    - deconv: g where g > 0 (Zeiler and Fergus, arXiv 1311.2901, section 2.1)

    Enter it before whatever else watches functions, which then sees the ReLU and not what the rule
    makes of it.
    """
    met, at = Counter[str](), ("guided", "deconv").index(name)

    def relu(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        met["relu"] += 1
        x = args[0] if args else kwargs.get("input", kwargs.get("self"))
        inplace = is_in_place(func) or kwargs.get("inplace", args[1] if args[1:] else False)
        result = torch.relu(x)
        if result.grad_fn is not None:  # whose hooks take the gradients at its input and its output
            result.grad_fn.register_hook(lambda *gradients: (gradients[at][0].clamp(min=0),))
        return x.copy_(result) if inplace else result

    with FunctionMode(replacements={"relu": relu}):
        yield met


# A model's output in words


def top_classes(
    output: Any, categories: Sequence[str] | None = None, scores: str | None = "", count: int = 5
) -> tuple[ClassScore, ...]:
    """The likeliest classes of an output [1, K], K > 1, whose scores are where `LoadedModel.scores`
    says; empty for any other output, and for one that has no finite real scores."""
    if scores != "":
        output = None if scores is None else output_at(output, scores)
    if not isinstance(output, Tensor) or output.ndim != 2:
        return ()
    try:
        rows = to_floats(output.detach()).cpu()
    except LayoutError:
        return ()
    if rows.shape[0] != 1 or rows.shape[1] < 2 or not rows.isfinite().all():
        return ()
    values, many = rows[0], rows.shape[1]
    names = categories if categories and len(categories) == many else [None] * many
    shares, order = values.softmax(0), values.topk(min(count, many)).indices.tolist()
    return tuple(ClassScore(i, names[i], float(values[i]), float(shares[i])) for i in order)


def largest_change(before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[float | None, int]:
    """The largest absolute difference of two outputs' values that are finite in both, and how many
    are NaN or infinite in one and something else in the other. None and 0 where there are no
    tensors, their shapes differ, or one has no real, dense values."""
    dense: list[Tensor] = []
    try:
        for tensor in (*before, *after):
            floats = to_floats(tensor.detach())
            dense.append((floats if tensor.is_quantized else tensor.detach()).cpu().double())
    except LayoutError:
        return None, 0
    if not before or [x.shape for x in before] != [x.shape for x in after]:
        return None, 0
    largest, unlike = 0.0, 0
    for one, other in zip(dense[: len(before)], dense[len(before) :], strict=True):
        finite = one.isfinite() & other.isfinite()
        same = (one == other) | (one.isnan() & other.isnan())
        if finite.any():
            largest = max(largest, float((one - other).abs()[finite].max()))
        unlike += int((~finite & ~same).sum())
    return largest, unlike
