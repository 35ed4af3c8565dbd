"""Which layers make the dead channels, and how far the model's output changes without
them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from featviz.audit.findings import AuditedRow
from featviz.audit.graph import CallGraph
from featviz.audit.parts import Call
from featviz.audit.plan import AuditPlan
from featviz.gradients.passes import largest_change
from featviz.hooks.capture import forward, tensors
from featviz.models.load import LoadedModel
from featviz.run.study import Batch
from featviz.text import layer_named


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
    """Follow dead channels back to the layers that make them, and on to those that read
    them. If a layer runs several times, a channel can be cut out only if it is dead after
    each call of the layer.

    Args:
        rows: the entry `layers` of audit.json; `findings.dead` of a row lists the dead
            channels.
    """
    graph = plan.graph
    refused: dict[str, str] = {}
    groups = _cuts_by_maker(plan, rows, refused)
    prunable = Prunable(refused=refused)
    for name, group in groups.items():
        shared = _called_elsewhere(graph, set(group.activations))
        shared = shared or _called_elsewhere(graph, group.others)
        dead_everywhere = sorted(set.intersection(*group.dead_sets.values()))
        if shared:
            reason = f"{layer_named(shared)} runs elsewhere, too"
            for activation in group.dead_sets:
                refused[activation.label] = reason
        elif dead_everywhere:
            prunable.layers[name] = dead_everywhere
            for activation in group.dead_sets:
                prunable.zeroed[activation] = dead_everywhere
    return prunable


@dataclass(frozen=True)
class _MakerCuts:
    """What is cut with the channels of one convolution or linear module."""

    activations: dict[Call, Call] = field(default_factory=dict)
    """The activation that follows each call of the module."""
    dead_sets: dict[Call, set[int]] = field(default_factory=dict)
    """The dead channels of each activation."""
    others: set[Call] = field(default_factory=set)
    """`Cut.others` after all calls."""


def _cuts_by_maker(
    plan: AuditPlan, rows: Sequence[AuditedRow], refused: dict[str, str]
) -> dict[str, _MakerCuts]:
    """What is cut with the dead channels of each convolution and linear module, by its
    name.

    Args:
        rows: those of `find_prunable`.
        refused: gets the reasons for activations whose channels cannot be cut out.
    """
    graph = plan.graph
    dead_by_label = {row["label"]: row["findings"].get("dead") for row in rows}
    groups: dict[str, _MakerCuts] = {}
    for target in plan.targets:
        channels = dead_by_label.get(target.call.label)
        if target.dead_at is None or not channels:
            continue
        activation = target.dead_at.call
        cut = graph.cut_at(graph.node_of[activation])
        if isinstance(cut, str):
            refused[activation.label] = cut
            continue
        group = groups.setdefault(cut.maker.name, _MakerCuts())
        group.activations[cut.maker] = activation
        group.dead_sets[activation] = set(channels)
        group.others.update(cut.others)
    return groups


def _called_elsewhere(graph: CallGraph, calls: set[Call]) -> str | None:
    """The name of a layer that runs in these calls and in others, which need the channel
    that is cut out of it; None if there is no such layer."""
    names = {call.name for call in calls}
    for node in graph.nodes:
        if node.call.name in names and node.call not in calls:
            return node.call.name
    return None


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
