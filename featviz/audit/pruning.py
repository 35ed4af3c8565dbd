"""Which layers compute the dead channels, and the proof that the output does without them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from featviz.audit.plan import AuditPlan, AuditTarget, watching_calls
from featviz.gradients.predictions import largest_change
from featviz.hooks.capture import tensors
from featviz.hooks.forward import forward
from featviz.models.load import LoadedModel
from featviz.records import Call
from featviz.run.visit import Batch


@dataclass(frozen=True)
class Pruning:
    """Channels that can be cut out, and where forcing them to zero has the same effect."""

    layers: Mapping[str, list[int]]
    """Output channels of convolutions and linear layers, by the layer's name."""
    refused: Mapping[str, str]
    """Activations whose dead channels cannot be cut out of one layer, with the reason."""
    forced: Mapping[Call, list[int]]
    """Calls of activations, with the channels to force to zero."""


def find_prunable(plan: AuditPlan, dead: Sequence[tuple[AuditTarget, Sequence[int]]]) -> Pruning:
    """The convolutions and linear layers that make the dead channels of targets.

    A layer that runs several times loses a channel only if it is dead behind each of its calls.
    """
    traced, refused = plan.trace, {}
    behind: defaultdict[str, dict[Call, tuple[Call, Sequence[int]]]] = defaultdict(dict)
    """By the maker's name and call: the activation behind it, and the channels dead there."""
    for target, channels in dead:
        if target.dead_at is None or not channels:
            continue
        at = target.dead_at.call
        maker = traced.maker_of(traced.given_by[at])
        if isinstance(maker, str):
            refused[at.label] = maker
        else:
            call = traced.nodes[maker].call
            behind[call.name][call] = at, channels
    layers: dict[str, list[int]] = {}
    forced: dict[Call, list[int]] = {}
    runs = [node.call.name for node in traced.nodes]
    for name, calls in behind.items():
        if len(calls) < runs.count(name):
            continue
        if common := sorted(set.intersection(*({*channels} for _, channels in calls.values()))):
            layers[name] = common
            forced |= {at: common for at, _ in calls.values()}
    return Pruning(layers, refused, forced)


def verify(
    model: LoadedModel, plan: AuditPlan, cut: Pruning, batches: Iterable[Batch]
) -> dict[str, Any]:
    """Compare a model's output with and without the channels that can be cut out.

    Returns:
        `verify` of audit.json: the largest change is None where the outputs cannot be compared
        (UNLIKE_OUTPUTS), and `nonfinite` is in it only where such values are not alike.
    """
    spots, names = plan.spots, frozenset(call.name for call in cut.forced)

    def force(call: Call, args: Any, kwargs: Any, output: Any) -> None:
        """An intervention, in place: the activation's own output, behind which nothing differs
        from a model that lacks these channels."""
        if call in cut.forced:
            chosen = torch.tensor(cut.forced[call], device=output.device)
            output.index_fill_(spots[call].axis % output.dim(), chosen, 0)

    images, nonfinite, largest, comparable = 0, 0, 0.0, True
    for batch in batches:
        inputs = [arg.to(model.device) for arg in batch.inputs]
        plain = [value.clone() for value in tensors(forward(model.module, inputs))]
        with watching_calls(model.module, force, names, plan.trace.atoms):
            changed = tensors(forward(model.module, inputs))
        change, count = largest_change(plain, changed)
        images, nonfinite = images + len(batch.images), nonfinite + count
        comparable &= change is not None
        largest = max(largest, change or 0.0)
    proof = {
        "channels": sum(len(channels) for channels in cut.layers.values()),
        "images": images,
        "largest_change": largest if comparable else None,
    }
    return {**proof, "nonfinite": nonfinite} if nonfinite else proof
