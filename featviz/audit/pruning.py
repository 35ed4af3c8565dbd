"""Which layers compute the dead channels, and the proof that the output does without them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from featviz.audit.call_graph import watching_calls
from featviz.audit.plan import AuditPlan, AuditTarget, Spot
from featviz.gradients.predictions import largest_change
from featviz.hooks.containers import tensors
from featviz.hooks.forward import forward
from featviz.models.load import LoadedModel
from featviz.pipeline.batches import Batch
from featviz.pipeline.processes import World
from featviz.records import Call

Dead = Sequence[tuple[AuditTarget, Sequence[int]]]
"""Targets with their dead channels."""


@dataclass(frozen=True)
class Pruning:
    """Channels that can be cut out, and where forcing them to zero has the same effect."""

    layers: Mapping[str, list[int]]
    """Output channels of convolutions and linear layers, by the layer's name."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Activations whose dead channels cannot be cut out of one layer, with the reason."""
    forced: Mapping[Call, list[int]] = field(default_factory=dict)
    """Calls of activations, with the channels to force to zero."""

    @property
    def channels(self) -> int:
        """How many channels can be cut out in all."""
        return sum(len(channels) for channels in self.layers.values())


def find_prunable(plan: AuditPlan, dead: Dead) -> Pruning:
    """The convolutions and linear layers that make dead channels.

    A layer that runs several times loses a channel only if it is dead behind each of its calls.
    """
    graph, refused = plan.trace.graph, {}
    behind: dict[Call, tuple[Call, set[int]]] = {}
    for target, channels in dead:
        if target.dead_at is None or not channels:
            continue
        at = target.dead_at.call
        maker = graph.maker_of(graph.given_by[at])
        if maker.node is None:
            refused[at.label] = maker.reason
        else:
            behind[graph.nodes[maker.node].call] = at, set(channels)
    layers: dict[str, list[int]] = {}
    forced: dict[Call, list[int]] = {}
    for name, calls in _by_name(plan, behind).items():
        common = sorted(set.intersection(*(behind[call][1] for call in calls)))
        if common:
            layers[name] = common
            forced |= {behind[call][0]: common for call in calls}
    return Pruning(layers, refused, forced)


def _by_name(plan: AuditPlan, behind: Iterable[Call]) -> dict[str, list[Call]]:
    """Calls of each layer, where every call of the layer is among them."""
    grouped: defaultdict[str, list[Call]] = defaultdict(list)
    for call in behind:
        grouped[call.name].append(call)
    runs = [node.call.name for node in plan.trace.graph.nodes]
    return {name: calls for name, calls in grouped.items() if len(calls) == runs.count(name)}


@dataclass
class Verification:
    """Compares a model's output with and without the channels, image after image."""

    model: LoadedModel
    plan: AuditPlan
    pruning: Pruning
    images: int = 0
    largest: float | None = 0.0
    """Largest change of any finite value of the output; None where the two outputs
    cannot be compared (UNLIKE_OUTPUTS)."""
    nonfinite: int = 0
    """Values of the output that are NaN or infinite in one of the two runs, or in both but not
    alike."""

    def show(self, batch: Batch) -> None:
        """Run a batch twice.

        Raises:
            ForwardError: the model failed.
        """
        inputs = [arg.to(self.model.device) for arg in batch.inputs]
        plain = [value.clone() for value in tensors(forward(self.model.module, inputs))]
        names = frozenset(call.name for call in self.pruning.forced)
        with watching_calls(self.model.module, self._force, names, self.plan.trace.atoms):
            changed = tensors(forward(self.model.module, inputs))
        change, nonfinite = largest_change(plain, changed)
        self.images += len(batch.images)
        self.nonfinite += nonfinite
        if self.largest is not None:
            self.largest = None if change is None else max(self.largest, change)

    def join(self, team: World) -> None:
        """Take in what the other processes have seen, so that all agree."""
        parts = team.gather((self.images, self.largest, self.nonfinite))
        changes = [largest for _, largest, _ in parts if largest is not None]
        self.images = sum(images for images, *_ in parts)
        self.largest = max(changes) if len(changes) == len(parts) else None
        self.nonfinite = sum(nonfinite for *_, nonfinite in parts)

    def as_json(self) -> dict[str, Any]:
        """`verify` of audit.json; `nonfinite` is in it only where there are such values."""
        document = {
            "channels": self.pruning.channels,
            "images": self.images,
            "largest_change": self.largest,
        }
        return {**document, "nonfinite": self.nonfinite} if self.nonfinite else document

    def _force(self, call: Call, args: Any, kwargs: Any, output: Any) -> None:
        """An intervention, in place: the activation's own output, behind which nothing differs
        from a model that lacks these channels."""
        if call in self.pruning.forced:
            spot: Spot = self.plan.spots[call]
            chosen = torch.tensor(self.pruning.forced[call], device=output.device)
            output.index_fill_(spot.axis % output.dim(), chosen, 0)
