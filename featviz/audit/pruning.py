"""Which layers make the dead channels, and how far the model's output changes without
them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from featviz.audit.findings import AuditedRow
from featviz.audit.parts import Call
from featviz.audit.plan import AuditPlan
from featviz.gradients.passes import largest_change
from featviz.hooks.capture import forward, tensors
from featviz.models.load import LoadedModel
from featviz.run.study import Batch


@dataclass(frozen=True)
class Prunable:
    """The dead channels that can be cut out of a model."""

    layers: dict[str, list[int]] = field(default_factory=dict)
    """Channels by name of the convolution or linear module that makes them."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why dead channels of an activation cannot be cut out, by label of the activation."""
    zeroed: dict[Call, list[int]] = field(default_factory=dict)
    """The channels of `layers` by activation. To set them to zero in the activation's output
    has the effect of cutting them out."""


def find_prunable(plan: AuditPlan, rows: Sequence[AuditedRow]) -> Prunable:
    """Follow dead channels back to the layers that make them. If a layer runs several
    times, a channel can be cut out only if it is dead after each call of the layer.

    Args:
        rows: the entry `layers` of audit.json; `findings.dead` of a row lists the dead
            channels.
    """
    prunable = Prunable()
    graph = plan.graph
    dead_by_label = {row["label"]: row["findings"].get("dead") for row in rows}
    # of each maker, by its name: the activation that follows each of its calls
    activations_of: dict[str, dict[Call, Call]] = {}
    dead_channels = {}  # by activation
    for target in plan.targets:
        channels = dead_by_label.get(target.call.label)
        if target.dead_at is None or not channels:
            continue
        activation = target.dead_at.call
        maker = graph.maker_of(graph.node_of[activation])
        if isinstance(maker, str):
            prunable.refused[activation.label] = maker
        else:
            dead_channels[activation] = channels
            activations_of.setdefault(maker.name, {})[maker] = activation
    # the makers of all calls: a call without a dead activation after it needs the channel
    called_names = [node.call.name for node in graph.nodes]
    for name, activations in activations_of.items():
        dead_sets = [set(dead_channels[call]) for call in activations.values()]
        dead_everywhere = sorted(set.intersection(*dead_sets))
        if dead_everywhere and len(activations) == called_names.count(name):
            prunable.layers[name] = dead_everywhere
            for activation in activations.values():
                prunable.zeroed[activation] = dead_everywhere
    return prunable


def prove(
    model: LoadedModel,
    plan: AuditPlan,
    zeroed: Mapping[Call, list[int]],
    batches: Iterable[Batch],
) -> dict[str, Any]:
    """Compare a model's output with and without some channels, for the entry `verify` of
    audit.json.

    Args:
        plan: the plan that was made of this model.
        zeroed: the channels to set to zero, by the activation whose output has them.
        batches: the images; there may be none.

    Returns:
        `images`: how many images there were. `largest_change`: the largest change of a
        value of the output; 0 without images, None if outputs cannot be compared.
        `nonfinite`: how many values are NaN or infinite in one output, and something else
        in the other; left out if that is 0.
    """
    counted = plan.counted_calls

    def set_to_zero(call: Call, output: Any) -> None:
        """Set the channels to zero in place, so that the rest of the pass takes zeros."""
        if call in zeroed:
            channels = torch.tensor(zeroed[call], device=output.device)
            output.index_fill_(counted[call].channel_axis, channels, 0)

    images = 0
    nonfinite = 0
    largest = 0.0
    comparable = True
    for batch in batches:
        inputs = [arg.to(model.device) for arg in batch.inputs]
        # copied, since a model may return a tensor that its next pass overwrites
        before = [tensor.clone() for tensor in tensors(forward(model.module, inputs))]
        with plan.watching(model.module, set_to_zero, zeroed):
            after = tensors(forward(model.module, inputs))
        change, newly_nonfinite = largest_change(before, after)
        images += len(batch.images)
        nonfinite += newly_nonfinite
        # the outputs differ in number or shape, as where a detector finds fewer boxes
        if change is None:
            comparable = False
        else:
            largest = max(largest, change)
    proof = {
        "images": images,
        "largest_change": largest if comparable else None,
    }
    if nonfinite:
        proof["nonfinite"] = nonfinite
    return proof
