"""The forward pass of one input with its interventions, and if gradients are wanted, the
backward pass. Also the likeliest classes of an output, and the largest change between two
outputs."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from featviz.errors import LayoutError, UsageError
from featviz.gradients import families, interventions, targets
from featviz.gradients.answers import NothingFoundError
from featviz.gradients.families import Reading
from featviz.gradients.interventions import Intervention
from featviz.gradients.targets import Target, TargetValue, output_at
from featviz.hooks import selectors
from featviz.hooks.capture import Recorder, Sink, forward, recording, tensors
from featviz.hooks.eval_mode import in_eval_mode, kept_attributes, kept_rng
from featviz.hooks.functions import FunctionMode
from featviz.hooks.layers import computed_by, is_in_place, list_layers
from featviz.layout import channel_axis, to_floats
from featviz.layout.tracing.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.options import PassOptions
from featviz.records import KINDS, CaptureSite, ClassScore, Layer, Outcome
from featviz.text import counted, layer_named, listed, quoted

log = logging.getLogger(__name__)

# a prediction has at most this many classes
_MOST_CLASSES = 5


@dataclass(frozen=True)
class PassPlan:
    """The options of a pass, matched with a model's layers."""

    options: PassOptions
    target: Target
    target_layer: Layer | None
    """The layer whose output has the target; None if the model's output has it."""
    changes: Mapping[Layer, Sequence[Intervention]]
    """The interventions of each layer, in the order of the options."""
    backward: bool
    """Whether gradients are wanted."""
    changes_values: bool
    """Whether an intervention changes values; `grad*X` changes only gradients."""


def plan(
    model: LoadedModel, options: PassOptions, blank: Sequence[Tensor], book: HintBook
) -> PassPlan:
    """Match the options with a model's layers. If there are interventions or gradients,
    the model runs once on zeros, so that options that cannot work are refused before
    anything is written. A warning names the options that changed nothing.

    Args:
        options: as the user gave them; interventions and target are text.
        blank: the model's arguments, zeros.
        book: the hints for inputs of the shape of `blank`; the pass on zeros may fill it.

    Raises:
        UsageError: there is no such layer or target, a change cannot be made, or the model
            runs in ONNX Runtime, which has no gradients and takes no changes.
        ForwardError: the model fails on zeros.
    """
    # all layers, since an intervention may change a layer that is not drawn
    layers = list_layers(model.module)
    runtime = computed_by(model.module)
    if runtime is not None and (options.gradients or options.interventions):
        raise UsageError(
            f"{runtime} runs this model: it has no gradients, and takes no changes",
            "the model in PyTorch has them: .pth, .pt2",
        )
    changes = defaultdict[Layer, list[Intervention]](list)
    changes_values = False
    for option, text in options.interventions:
        change = interventions.parse(option, text)
        changes_values = changes_values or change.operation != "grad"
        for layer in _changed_layers(change, layers):
            changes[layer].append(change)
    target = targets.parse(options.target)
    plan = PassPlan(
        options=options,
        target=target,
        target_layer=_target_layer(target, layers),
        changes=dict(changes),
        backward=options.gradients,
        changes_values=changes_values,
    )
    if plan.backward or changes:
        # stays empty if a detector finds no object in zeros, which is no error here
        outcome = Outcome()
        with (
            suppress(NothingFoundError),
            in_eval_mode(model.module, plan.backward),
            watched(model, plan, []) as hooks,
        ):
            outcome, _ = hooks.show(blank, book, lambda site, tensor: None)
        for message in outcome.idle:
            log.warning("%s", message)
    return plan


def _changed_layers(change: Intervention, layers: Sequence[Layer]) -> Sequence[Layer]:
    """The layers that an intervention changes. If only some of its selectors match a layer,
    a warning names the others.

    Args:
        layers: all layers of the model.

    Raises:
        UsageError: no selector matches a layer, or one selects functions.
    """
    parsed = selectors.parse(change.selectors)
    if selectors.of_functions(parsed):
        raise change.error(
            ": functions cannot be changed, only modules",
            "name the module that calls the function",
        )
    chosen = selectors.select(layers, parsed)
    if not chosen:
        raise change.error(
            f": no layer matches {change.selectors!r}", selectors.remedy(layers, parsed)
        )
    selectors.warn_of_unmatched(layers, parsed, option=change.title)
    return chosen


def _target_layer(target: Target, layers: Sequence[Layer]) -> Layer | None:
    """The layer that a target names, by its name or an alias; None for a target in the
    model's output.

    Raises:
        UsageError: there is no such layer.
    """
    if target.layer is None:
        return None
    for layer in layers:
        if target.layer in (layer.name, *layer.aliases):
            return layer
    close = selectors.nearest(layers, selectors.parse(target.layer))
    hint = "featviz layers MODEL lists them"
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    raise target.error(f": no layer is called {target.layer!r}", hint)


@contextmanager
def watched(
    model: LoadedModel, plan: PassPlan, layers: Sequence[Layer]
) -> Iterator[Watched]:
    """In this block, have hooks on a model that capture layers, make interventions, and keep
    the output of the target's layer. Any number of inputs can be shown.

    Args:
        plan: the plan that was made of this model.
        layers: the layers to capture; may be empty.
    """
    hooks = Watched(model, plan, layers)
    # `Watched.change` also keeps the output of the target's layer
    changed = set(plan.changes)
    if plan.backward and plan.target_layer is not None:
        changed.add(plan.target_layer)
    changes = {layer: partial(hooks.change, layer) for layer in changed}
    # a box below the detector's threshold may be the target, too
    of_output = plan.target.layer is None and not plan.target.keys
    candidates: AbstractContextManager[float | None] = nullcontext()
    if plan.backward and of_output:
        candidates = families.weak_boxes_too(model.module)
    capture = plan.options.capture
    with (
        candidates as hooks.threshold,
        recording(model.module, layers, capture, changes=changes) as hooks.recorder,
    ):
        yield hooks


@dataclass
class Watched:
    """A model with its hooks in place; `watched` makes it."""

    model: LoadedModel
    plan: PassPlan
    layers: Sequence[Layer]
    """The layers that are captured."""
    recorder: Recorder = field(init=False)
    reading: Reading | None = None
    """The last output as its family reads it; None for a model of no family."""
    threshold: float | None = None
    """What `families.weak_boxes_too` has yielded; None if it is not used."""
    _book: HintBook | None = None
    """The hints of the current pass; None in the pass without interventions."""
    _noise: torch.Generator = field(default_factory=torch.Generator)
    _ran: set[Layer] = field(default_factory=set)
    """The layers that were changed in the current pass."""
    _target_outputs: list[Any] = field(default_factory=list)
    """The outputs of the calls of the target's layer in the current pass."""

    def change(self, layer: Layer, output: Any) -> Any:
        """Make the interventions of a layer in its output. If the layer is that of the
        target, keep a copy of the output.

        Returns:
            The changed output; or None, which for a forward hook of torch means that the
            output stays as it is.

        Raises:
            UsageError: the change cannot be made to this output.
        """
        if self._book is None:  # the pass without interventions
            return None
        changes = self.plan.changes.get(layer, ())
        if changes:
            axis_of = partial(_channel_axis, self._book, layer)
            output = interventions.intervene(
                changes, layer_named(layer.label), output, axis_of, self._noise
            )
            self._ran.add(layer)
        if layer == self.plan.target_layer:
            target_output = output
            if isinstance(output, Tensor):
                # copied, since a later operation may change the output in place
                target_output = output.clone()
            self._target_outputs.append(target_output)
        return output if changes else None

    def show(
        self, args: Sequence[Tensor], book: HintBook, sink: Sink
    ) -> tuple[Outcome, Recorder]:
        """Run the model on an input with its interventions, and if gradients are wanted,
        backward from the target. If interventions change values, the model first runs
        without them, and the two outputs are compared.

        Args:
            args: the model's arguments, on any device.
            book: the hints for inputs of the shape of `args`.
            sink: takes what the hooks capture.

        Returns:
            The model's answer, and the recorder of the hooks with the counts of this input.

        Raises:
            UsageError: the output has no such target, or a change cannot be made.
            NothingFoundError: the output has no such target, but that of another image may
                have it.
            ForwardError: the model fails.
        """
        model = self.model
        plan = self.plan
        inputs = [arg.to(model.device) for arg in args]
        undisturbed = self._undisturbed_output(inputs, book) if plan.changes else None
        target_value = None
        with self._one_pass(book, sink) as relu_calls:
            if plan.backward:
                # Attributes are put back only after the backward pass: it runs checkpointed
                # parts of the model again, which read the attributes of the forward pass.
                with kept_attributes(model.module):
                    output, target_value = self._forward_and_back(inputs, book)
            else:
                output = forward(model.module, inputs, self.recorder)
        if target_value is None:  # `_forward_and_back` has read its output already
            self.reading = families.read(model, output, inputs[0], self.threshold)
        outcome = self._outcome(output, undisturbed)
        if target_value is not None:
            outcome = replace(
                outcome,
                target=float(target_value.number.detach()),
                target_title=target_value.title,
                focus=target_value.focus,
            )
        if plan.changes or relu_calls is not None:
            outcome = replace(
                outcome, idle=tuple(_idle_messages(plan, self._ran, relu_calls))
            )
        return outcome, self.recorder

    @contextmanager
    def _one_pass(self, book: HintBook, sink: Sink) -> Iterator[Counter[str] | None]:
        """In this block, which runs one pass, let the hooks capture and change outputs.

        Args:
            book: the hints for inputs of this shape; if it is empty, the pass fills it.
            sink: takes what the hooks capture.

        Yields:
            How often a ReLU was called, under `relu`; None for `--grad-rule plain`.
        """
        self._book = book
        self._ran = set()
        self._target_outputs = []
        # each image gets the same noise, so that its pictures do not depend on others
        self._noise.manual_seed(self.plan.options.seed)
        following: AbstractContextManager[Any] = nullcontext()
        # only the first image fills the book
        if not book.is_traced:
            following = book.traced(self.model.module, self.layers)
        rule: AbstractContextManager[Counter[str] | None] = nullcontext()
        if self.plan.options.grad_rule != "plain":
            rule = relu_rule(self.plan.options.grad_rule)
        try:
            with following, rule as relu_calls, self.recorder.functions:
                self.recorder.begin(sink)
                yield relu_calls
        finally:
            self._book = None
            self._target_outputs = []
            self.recorder.begin(None)

    def _outcome(self, output: Any, undisturbed: Any) -> Outcome:
        """The classes, boxes or regions of an output, and how much interventions have
        changed it.

        Args:
            undisturbed: the output without interventions; None if these change no values.
        """
        model = self.model
        outcome = Outcome(top_classes(output, model.categories, model.scores))
        if self.reading is not None:
            outcome = replace(
                outcome,
                detections=self.reading.detections,
                regions=self.reading.regions,
                remark=self.reading.remark,
            )
        if self.plan.changes_values:
            largest, nonfinite = largest_change(tensors(undisturbed), tensors(output))
            outcome = replace(
                outcome,
                intervened=True,
                largest_change=largest,
                nonfinite=nonfinite,
                before=top_classes(undisturbed, model.categories, model.scores),
            )
        return outcome

    def _undisturbed_output(self, inputs: Sequence[Tensor], book: HintBook) -> Any:
        """Run the model without interventions, from the same random numbers, and return its
        output; None if no intervention changes values. An empty book is filled here, since
        the image cannot be followed through the new tensors of interventions."""
        if book.is_traced and not self.plan.changes_values:
            return None
        module = self.model.module
        self.recorder.begin(None)
        with torch.no_grad(), kept_rng(), book.traced(module, self.layers):
            output = forward(module, [arg.clone() for arg in inputs])
        return output if self.plan.changes_values else None

    def _forward_and_back(
        self, args: Sequence[Tensor], book: HintBook
    ) -> tuple[Any, TargetValue]:
        """Run the model forward, and backward from the target. Hooks on tensors take the
        gradients; the `grad` of parameters is not touched.

        The input requires gradients, so that even a frozen model has a graph. The model
        gets a copy of the input, since torch allows no in-place change of a leaf.

        Args:
            args: the model's arguments, on the model's device.
            book: the hints of this pass.

        Returns:
            The model's output, and the target in it.

        Raises:
            UsageError: the output has no such target, or no gradient flows back.
            ForwardError: the model fails.
        """
        model = self.model
        target = self.plan.target
        # the leaves of the graph, at which the backward pass ends
        inputs = [arg.clone() for arg in args]
        for arg in inputs:  # tensors of indices and masks can have no gradient
            arg.requires_grad_(arg.is_floating_point() or arg.is_complex())
        output = forward(model.module, [arg.clone() for arg in inputs], self.recorder)
        self.reading = families.read(model, output, args[0], self.threshold)
        value = None
        if self.reading is not None:
            value = self.reading.value(target)
        if value is None:
            target_output = output
            if target.layer is not None:
                target_output = self._target_output(book)
            value = target.value(target_output, model.categories, model.scores)
        if not value.number.requires_grad:
            raise target.error(
                ": no gradient flows back from it",
                "the model is quantized, or detaches it, or computes it under"
                " torch.no_grad",
            )
        self.recorder.back(value.number, [arg for arg in inputs if arg.requires_grad])
        return output, value

    def _target_output(self, book: HintBook) -> Any:
        """The output of the last call of the target's layer, or the channel of this output
        that the target names.

        Raises:
            UsageError: the layer did not run, or has no such channel.
        """
        target = self.plan.target
        if not self._target_outputs or self.plan.target_layer is None:
            raise target.error(
                ": the layer does not run", "`featviz layers MODEL` counts calls"
            )
        # the last call is the nearest to the model's output
        output = self._target_outputs[-1]
        if target.channel is None or not isinstance(output, Tensor):
            return output
        axis = _channel_axis(book, self.plan.target_layer, output, target)
        if target.channel >= output.shape[axis]:
            raise target.error(
                f": the layer has channels 0 to {output.shape[axis] - 1}",
                "`featviz layers MODEL` shows the channels of each layer",
            )
        return output.select(axis, target.channel)


def _channel_axis(
    book: HintBook, layer: Layer, tensor: Tensor, asking: Intervention | Target
) -> int:
    """The axis of a layer's output that counts channels.

    Args:
        tensor: the output; only its shape is read.
        asking: the intervention or the target that names a channel, for the error.

    Raises:
        UsageError: it is not known which axis that is.
    """
    shape = list(tensor.shape)
    axis = channel_axis(shape, book.of_layer(layer))
    if axis is None:
        raise asking.error(
            f": it is unknown which axis of {layer_named(layer.label)} {shape}"
            " counts channels",
            "--tensor-layout says it",
        )
    return axis


def _idle_messages(
    plan: PassPlan, ran: set[Layer], relu_calls: Counter[str] | None
) -> Iterator[str]:
    """A message for each option that changed nothing in a pass.

    Args:
        ran: the layers whose output was changed.
        relu_calls: what `_one_pass` has yielded.
    """
    if relu_calls is not None and not relu_calls:
        yield (
            f"--grad-rule {plan.options.grad_rule} changes nothing: the model calls no"
            " ReLU"
        )
    idle = defaultdict[str, list[str]](list)
    for layer, changes in plan.changes.items():
        if layer not in ran:
            for change in changes:
                idle[change.title].append(layer_named(layer.label))
    for title, names in idle.items():
        yield f"{title}: {listed(names, 1)} did not run"


# An output with its gradient


def paired(take: Callable[[CaptureSite, Tensor, Tensor], None]) -> Sink:
    """A sink for hooks that capture `targets.PAIRED`, outputs and their gradients. It
    keeps a copy of each output until its gradient comes, since a later operation may
    change the output in place.

    Args:
        take: called with the site of each output, the output, and its gradient; may
            raise LayoutError.
    """
    # only here is a float tensor kept after its hook has returned
    outputs = {}

    def sink(site: CaptureSite, tensor: Tensor) -> None:
        """Keep an output, or hand a gradient to `take` together with its output."""
        kind = KINDS[site.kind]
        if not kind.backward:
            outputs[site] = tensor.clone()
            return
        output_site = site._replace(kind=kind.of)
        take(output_site, outputs.pop(output_site), tensor)

    return sink


# How a gradient passes a ReLU


@contextmanager
def relu_rule(name: str) -> Iterator[Counter[str]]:
    """In this block, let gradients pass every ReLU, module or function, by another rule. The
    model itself is not changed. With x as the input of a ReLU and g as the gradient at its
    output, the gradient at its input is as follows, and elsewhere 0:

    - plain: g where x > 0
    - guided: g where x > 0 and g > 0 (Springenberg et al., arXiv 1412.6806, section
      3.4)
    - deconv: g where g > 0 (Zeiler and Fergus, arXiv 1311.2901, section 2.1)

    Enter this block before any other block that watches functions. Such a block then sees
    the ReLU, and not the functions that `relu` below calls.

    Args:
        name: `guided` or `deconv`; without this block the rule is plain.

    Yields:
        How often a ReLU was called, under `relu`.
    """
    calls = Counter[str]()
    # The hook of a node gets two lists: the gradients at its input, which torch has set to 0
    # where x <= 0 (index 0), and those at its output (index 1).
    index = {"guided": 0, "deconv": 1}[name]

    def rectify(*gradients: Sequence[Tensor]) -> tuple[Tensor]:
        return (gradients[index][0].clamp(min=0),)

    def relu(
        func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Stand in for torch's ReLU: count the call, and send the gradient through
        `rectify`."""
        calls["relu"] += 1
        # relu(input, inplace), relu_(input), Tensor.relu(self)
        x = args[0] if args else kwargs.get("input", kwargs.get("self"))
        flag = args[1] if len(args) > 1 else kwargs.get("inplace", False)
        result = torch.relu(x)
        if result.grad_fn is not None:
            result.grad_fn.register_hook(rectify)
        if is_in_place(func) or flag:
            return x.copy_(result)
        return result

    with FunctionMode(replacements={"relu": relu}):
        yield calls


# What a model's output says


def check_names(model: LoadedModel, blank: Sequence[Tensor]) -> None:
    """Refuse a file of --classes if it does not have a name for each class of the
    classifier: then none of its names would be used.

    Args:
        blank: the model's arguments, zeros.

    Raises:
        UsageError: the numbers of names and classes differ.
        ForwardError: the model fails.
    """
    if not model.names_file:
        return
    with in_eval_mode(model.module):
        output = forward(model.module, [arg.to(model.device) for arg in blank])
    logits = _logits(output, model.scores)
    if logits is not None and len(logits) != len(model.categories):
        names = counted(len(model.categories), "name")
        raise UsageError(
            f"--classes {quoted(model.names_file)} has {names}, and the model"
            f" {counted(len(logits), 'class')}",
            "a name for each class, in their order",
        )


def top_classes(
    output: Any,
    categories: Sequence[str] = (),
    scores: str | None = "",
) -> tuple[ClassScore, ...]:
    """The likeliest classes of an output, at most five, the likeliest first.

    Args:
        output: the output of a model.
        categories: names of the model's classes; ignored unless there are K of them.
        scores: the key at which the output has its scores [1, K]; empty for the output
            itself, None if it has no scores.

    Returns:
        The classes; none if the output has no scores, if K is 1, or if not all scores are
        finite.
    """
    logits = _logits(output, scores)
    if logits is None:
        return ()
    names: Sequence[str | None] = [None] * len(logits)
    # another number of names belongs to another head of the model
    if len(categories) == len(logits):
        names = categories
    # also for scores that are probabilities already: they cannot be told from logits
    probabilities = logits.softmax(0)
    classes = []
    for index in logits.topk(min(_MOST_CLASSES, len(logits))).indices.tolist():
        score = float(logits[index])
        probability = float(probabilities[index])
        classes.append(ClassScore(index, names[index], score, probability))
    return tuple(classes)


def _logits(output: Any, scores: str | None) -> Tensor | None:
    """The scores of a classifier's classes, float [K] on the CPU; None if the output has no
    scores, if K is 1, or if not all scores are finite.

    Args:
        scores: as in `top_classes`.
    """
    if scores is None:
        return None
    if scores:
        output = output_at(output, scores)
    if not isinstance(output, Tensor) or output.ndim != 2:
        return None
    try:
        rows = to_floats(output.detach()).cpu()
    except LayoutError:
        return None
    if rows.shape[0] != 1 or rows.shape[1] < 2 or not rows.isfinite().all():
        return None
    return rows[0]


def largest_change(
    before: Sequence[Tensor], after: Sequence[Tensor]
) -> tuple[float | None, int]:
    """Compare the tensors of two outputs. Both must have the same number of tensors, at
    least one, of the same shapes, and all of real numbers.

    Args:
        before: the tensors of one output, in their order.
        after: the tensors of the other output.

    Returns:
        The largest absolute difference of values that are finite in both outputs, and how
        many values are NaN or infinite in one output, and something else in the other. If
        the outputs cannot be compared, None and 0.
    """
    try:
        old_values = [_as_doubles(tensor) for tensor in before]
        new_values = [_as_doubles(tensor) for tensor in after]
    except LayoutError:
        return None, 0
    shapes = [values.shape for values in old_values]
    if not shapes or shapes != [values.shape for values in new_values]:
        return None, 0
    old = torch.cat([values.flatten() for values in old_values])
    new = torch.cat([values.flatten() for values in new_values])
    finite = old.isfinite() & new.isfinite()
    largest = 0.0
    if finite.any():
        largest = float((old - new)[finite].abs().max())
    # inf in both is no change, and inf - inf is NaN
    same = (old == new) | (old.isnan() & new.isnan())
    return largest, int((~finite & ~same).sum())


def _as_doubles(tensor: Tensor) -> Tensor:
    """The values of a tensor in float64, on the CPU.

    Raises:
        LayoutError: the tensor is not of real numbers.
    """
    values = tensor.detach()
    floats = to_floats(values)
    if tensor.is_quantized:
        values = floats
    return values.cpu().double()
