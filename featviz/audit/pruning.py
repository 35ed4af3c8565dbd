"""Which layers make the dead channels, and the proof that the model does not miss them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from featviz.audit import counting
from featviz.audit.targets import AuditPlan, AuditTarget, Spot
from featviz.hooks.containers import leaves
from featviz.hooks.forward import forward
from featviz.models.load import LoadedModel
from featviz.records import Call

Dead = Sequence[tuple[AuditTarget, Sequence[int]]]
"""Targets with their dead channels."""


@dataclass(frozen=True)
class Pruning:
    """Channels that can be cut out, and where forcing them to zero has the same effect."""

    layers: Mapping[str, list[int]]
    """Of each convolution or linear layer, the output channels."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Activations whose dead channels have no layer of their own, with the reason."""
    forced: Mapping[Call, list[int]] = field(default_factory=dict)
    """Calls of activations, with the channels to force to zero."""

    @property
    def channels(self) -> int:
        """How many in all."""
        return sum(len(own) for own in self.layers.values())


def find(plan: AuditPlan, dead: Dead) -> Pruning:
    """The convolutions and linear layers that make dead channels.

    A layer that runs several times loses a channel only if it is dead behind each of its calls.
    """
    graph, refused = plan.trace.graph, {}
    behind: dict[Call, tuple[Call, set[int]]] = {}
    for target, own in dead:
        if target.dead_at is None or not own:
            continue
        at = target.dead_at.call
        found = graph.maker_of(graph.given_by[at])
        if found.node is None:
            refused[at.label] = found.reason
        else:
            behind[graph.nodes[found.node].call] = at, set(own)
    layers: dict[str, list[int]] = {}
    forced: dict[Call, list[int]] = {}
    for name, own_calls in _by_name(plan, behind).items():
        common = sorted(set.intersection(*(behind[call][1] for call in own_calls)))
        if common:
            layers[name] = common
            forced |= {behind[call][0]: common for call in own_calls}
    return Pruning(layers, refused, forced)


def _by_name(plan: AuditPlan, behind: Iterable[Call]) -> dict[str, list[Call]]:
    """Calls of each layer, where every call of the layer is among them."""
    grouped: defaultdict[str, list[Call]] = defaultdict(list)
    for call in behind:
        grouped[call.name].append(call)
    runs = [node.call.name for node in plan.trace.graph.nodes]
    return {name: own for name, own in grouped.items() if len(own) == runs.count(name)}


@dataclass
class Verification:
    """Compares a model's output with and without the channels, image after image."""

    model: LoadedModel
    plan: AuditPlan
    pruning: Pruning
    images: int = 0
    largest: float = 0.0
    """Largest change of any number in the output; inf where its shape changed."""

    def show(self, batch: counting.Batch) -> None:
        """Run a batch twice.

        Raises:
            ForwardError: the model failed.
        """
        inputs = [arg.to(self.model.device) for arg in batch.inputs]
        plain = [value.clone() for value in _numbers(forward(self.model.module, inputs))]
        names = frozenset(call.name for call in self.pruning.forced)
        with counting.watching(self.model.module, self.plan, names, self._force):
            changed = _numbers(forward(self.model.module, inputs))
        self.images += len(batch.images)
        self.largest = max(self.largest, _change(plain, changed))

    def _force(self, call: Call, args: Any, kwargs: Any, output: Any) -> None:
        """An intervention, in place: the activation's own output, behind which nothing differs
        from a model that lacks these channels."""
        if call in self.pruning.forced:
            spot: Spot = self.plan.spots[call]
            chosen = torch.tensor(self.pruning.forced[call], device=output.device)
            output.index_fill_(spot.axis % output.dim(), chosen, 0)


def _numbers(output: Any) -> list[Tensor]:
    return [value for _, value in leaves(output) if isinstance(value, Tensor)]


def _change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    if [t.shape for t in before] != [t.shape for t in after]:
        return float("inf")
    differences = [_largest(a.double(), b.double()) for a, b in zip(before, after, strict=True)]
    return max(differences, default=0.0)


def _largest(before: Tensor, after: Tensor) -> float:
    """Largest distance; equal values, infinite ones and NaN included, have none."""
    same = (before == after) | (before.isnan() & after.isnan())
    distance = torch.where(same, 0.0, (before - after).abs()).nan_to_num(torch.inf, torch.inf)
    return float(distance.max()) if distance.numel() else 0.0
