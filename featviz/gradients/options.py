"""The options of a pass through the model: read, checked, and matched with the model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from featviz.errors import UsageError
from featviz.gradients import interventions, targets
from featviz.gradients.interventions import Intervention
from featviz.gradients.targets import Target
from featviz.hooks import selectors
from featviz.hooks.layers import list_layers
from featviz.models.load import LoadedModel
from featviz.options import PassOptions
from featviz.records import Layer


@dataclass(frozen=True)
class PassPlan:
    """The options of a pass, matched with a model's layers."""

    options: PassOptions
    target: Target
    target_layer: Layer | None = None
    """The layer whose mean activation is the target; None where the output is."""
    changes: dict[str, tuple[Layer, list[Intervention]]] = field(default_factory=dict)

    @property
    def changes_values(self) -> bool:
        """Whether some intervention changes what a layer gives, not only gradients."""
        every = chain.from_iterable(changes for _, changes in self.changes.values())
        return any(change.kind != "grad" for change in every)


def check_options(options: PassOptions) -> None:
    """Refuse bad values before any work.

    Raises:
        UsageError: names the option, its value and what it takes.
    """
    targets.parse(options.target)
    changes = [interventions.parse(*change) for change in options.interventions]
    asked = {
        "target": options.target is not None,
        "grad_rule": options.grad_rule != "plain",
        "edit=grad": any(change.kind == "grad" for change in changes),
    }
    for name, given in asked.items():
        if given and not options.gradients:
            raise UsageError(
                f"{name} does nothing without gradients",
                "add --capture output,grad, or --reduce gradcam",
            )


def plan(model: LoadedModel, options: PassOptions) -> PassPlan:
    """Match the options with a model's layers.

    Raises:
        UsageError: a selector of an intervention, or the target's layer, matches nothing, or the
            model can have no gradients.
    """
    layers = list_layers(model.module)
    changes: dict[str, tuple[Layer, list[Intervention]]] = {}
    for change in (interventions.parse(*change) for change in options.interventions):
        for layer in _selected(change, layers):
            changes.setdefault(layer.name, (layer, []))[1].append(change)
    for name, tensor in chain(model.module.named_parameters(), model.module.named_buffers()):
        if options.gradients and tensor.is_inference():
            raise UsageError(
                f"there are no gradients: {name} was made under torch.inference_mode",
                "make or load the model outside of it",
            )
    target = targets.parse(options.target)
    return PassPlan(options, target, _target_layer(target, layers), changes)


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
