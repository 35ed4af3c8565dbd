"""Which layers make the dead channels, and the proof that the model's output does
without them."""

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
    """Reasons by label of the activation whose dead channels cannot be cut out of one
    layer."""
    zeroed: dict[Call, list[int]] = field(default_factory=dict)
    """Channels by activation: set to zero there, they have the same effect as cut out.
    """


def find_prunable(plan: AuditPlan, rows: Sequence[AuditedRow]) -> Prunable:
    """Follow dead channels back to the layers that make them. A layer that runs several
    times loses a channel only if it is dead behind each of its calls.

    Args:
        rows: `layers` of audit.json, where `findings.dead` lists the dead channels.
    """
    prunable = Prunable()
    graph = plan.graph
    dead_by_label = {row["label"]: row["findings"].get("dead") for row in rows}
    activations_of: dict[str, dict[Call, Call]] = {}
    """By the maker's name and call the activation behind it."""
    dead_channels = {}
    """By activation."""
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
    # calls that no activation follows count, too: they need the channel
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
    """Compare a model's output with and without channels, for `verify` of audit.json.

    Args:
        zeroed: channels by the activation behind which they are set to zero.
        batches: the images; without any the largest change is 0.

    Returns:
        `images`; `largest_change`, None where outputs cannot be compared; and, only
        above 0, `nonfinite`: how many values are NaN or infinite in one output, and
        something else in the other.
    """
    counted = plan.counted_calls

    def set_to_zero(call: Call, output: Any) -> None:
        """In place, so that the rest of the pass sees a model without these channels."""
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
