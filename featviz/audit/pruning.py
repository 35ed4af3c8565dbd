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
    """Why dead channels of an activation cannot be cut out of one layer, by its label."""
    zeroed: dict[Call, list[int]] = field(default_factory=dict)
    """The same channels by activation: to set them to zero there has the effect of cutting
    them out."""


def find_prunable(plan: AuditPlan, rows: Sequence[AuditedRow]) -> Prunable:
    """Follow dead channels back to the layers that make them. A channel of a layer that
    runs several times can be cut out only if it is dead behind each of its calls.

    Args:
        rows: `layers` of audit.json, where `findings.dead` lists the dead channels.
    """
    prunable = Prunable()
    graph = plan.graph
    dead_by_label = {row["label"]: row["findings"].get("dead") for row in rows}
    # the activation behind each call of a maker, by the maker's name and its call
    activations_of: dict[str, dict[Call, Call]] = {}
    # by activation
    dead_channels = {}
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
    # of all calls: one that no dead activation follows needs the channel
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
    """Compare a model's output with and without some channels, for `verify` of
    audit.json.

    Args:
        plan: of this model.
        zeroed: channels that are set to zero, by the activation whose output has them.
        batches: the images; without any the largest change is 0.

    Returns:
        `images`, their number; `largest_change` of a value of the output, None where
        outputs cannot be compared; and only where it is above 0, `nonfinite`: how many
        values are NaN or infinite in one output, and something else in the other.
    """
    counted = plan.counted_calls

    def set_to_zero(call: Call, output: Any) -> None:
        """Sets the channels of a call to zero, in place: the rest of the pass sees it."""
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
        # another number or shape of outputs, as of a detector that finds fewer boxes
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
