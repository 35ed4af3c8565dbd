"""The options of a pass through the model: read, checked, and matched with the model's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import nn

from featviz.errors import UsageError
from featviz.gradients import interventions, pairs, targets
from featviz.gradients.interventions import Intervention
from featviz.gradients.targets import Target
from featviz.hooks import selectors
from featviz.hooks.layers import list_layers
from featviz.models.load import LoadedModel
from featviz.records import CLASS_MAPS, INTERVENTIONS, KINDS, Layer, PassOptions
from featviz.records.checking import read_texts


@dataclass(frozen=True)
class PassPlan:
    """The options of a pass, matched with a model's layers."""

    options: PassOptions
    target: Target
    target_layer: Layer | None = None
    """The layer whose mean activation is the target; None where the output is."""
    changes: dict[str, tuple[Layer, list[Intervention]]] = field(default_factory=dict)
    """Interventions by layer name, in the order in which they were given."""

    @property
    def changes_values(self) -> bool:
        """Whether some intervention changes what a layer gives, not only gradients."""
        every = chain.from_iterable(changes for _, changes in self.changes.values())
        return any(change.kind != "grad-scale" for change in every)


def read_options(given: Mapping[str, Any]) -> PassOptions:
    """Options as one types them, by name with underscores; several values as a sequence, or for
    `capture` separated by commas. A class activation map (`reduce`) is made of an output and its
    gradient, so it captures both in place of the output."""
    capture, target = given.get("capture") or (), given.get("target")
    kinds = ",".join(read_texts("--capture", capture)).split(",")
    if given.get("reduce") in CLASS_MAPS and kinds == ["output"]:
        kinds = list(pairs.CAPTURE)
    changes = [
        (kind, text)
        for kind in INTERVENTIONS
        for text in read_texts(f"--{kind}", given.get(kind.replace("-", "_")))
    ]
    return PassOptions(
        tuple(dict.fromkeys(kind.strip() for kind in kinds if kind.strip())),
        None if target is None else str(target),
        given.get("grad_rule", "plain"),
        tuple(changes),
        given.get("seed", 0),
    )


def check_options(options: PassOptions) -> None:
    """Refuse bad values before any work.

    Raises:
        UsageError: names the option, its value and what it takes.
    """
    kinds = f"give some of {', '.join(KINDS)}, separated by commas"
    if wrong := [kind for kind in options.capture if kind not in KINDS]:
        raise UsageError(f"--capture {wrong[0]!r} is nothing to capture", kinds)
    if not options.capture:
        raise UsageError("--capture is empty", kinds)
    targets.parse(options.target)
    changes = [interventions.parse(kind, text) for kind, text in options.interventions]
    if not options.gradients:
        _refuse_needless(options, changes)


def plan(model: LoadedModel, options: PassOptions) -> PassPlan:
    """Match the options with a model's layers.

    Raises:
        UsageError: a selector of an intervention, or the target's layer, matches nothing, or the
            model can have no gradients.
    """
    layers = list_layers(model.module)
    changes: dict[str, tuple[Layer, list[Intervention]]] = {}
    for kind, text in options.interventions:
        change = interventions.parse(kind, text)
        for layer in _selected(change, layers):
            changes.setdefault(layer.name, (layer, []))[1].append(change)
    if options.gradients:
        _check_gradients(model.module)
    target = targets.parse(options.target)
    return PassPlan(options, target, _target_layer(target, layers), changes)


_GRADIENTS = "add --capture output,grad, or --reduce gradcam"


def _refuse_needless(options: PassOptions, changes: Sequence[Intervention]) -> None:
    """Refuse options for gradients where no gradients are captured."""
    asked = {
        "--target": options.target is not None,
        "--grad-rule": options.grad_rule != "plain",
        "--grad-scale": any(change.kind == "grad-scale" for change in changes),
    }
    for name, given in asked.items():
        if given:
            raise UsageError(f"{name} does nothing without gradients", _GRADIENTS)


def _selected(change: Intervention, layers: Sequence[Layer]) -> list[Layer]:
    wanted = selectors.parse(change.selectors)
    if selectors.wants_functions(wanted):
        raise UsageError(f"{change.option}: functions cannot be changed, only modules")
    chosen = selectors.select(layers, wanted)
    if not chosen:
        raise UsageError(
            f"{change.option}: no layer matches {change.selectors!r}",
            selectors.remedy(layers, wanted),
        )
    return chosen


def _target_layer(target: Target, layers: Sequence[Layer]) -> Layer | None:
    if target.layer is None:
        return None
    for layer in layers:
        if target.layer in (layer.name, *layer.aliases):
            return layer
    close = selectors.nearest(layers, selectors.parse(target.layer))
    raise target.error(
        f": no layer is called {target.layer!r}",
        f"did you mean {' or '.join(close)}?" if close else "featviz layers MODEL lists them",
    )


def _check_gradients(model: nn.Module) -> None:
    """Tensors that were made in inference mode cannot take part in a backward pass."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_inference():
            raise UsageError(
                f"there are no gradients: {name} was made under torch.inference_mode",
                "make or load the model outside of it",
            )
