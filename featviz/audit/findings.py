"""Which findings channels have, and whether gates hold."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from featviz.audit.gates import FINDINGS, Evidence, Gate, correlated
from featviz.errors import UsageError
from featviz.options.commands import Thresholds
from featviz.records import Verdict
from featviz.text import counted, layer_named, listed

log = logging.getLogger(__name__)

# layers that the message of a gate names
_NAMED = 3

AuditedRow: TypeAlias = Mapping[str, Any]
"""An entry of `layers` in audit.json."""


def judge(evidence: Evidence, thresholds: Thresholds) -> dict[str, list[int]]:
    """Judge the channels of a layer.

    Returns:
        By name of each finding for which the layer can be judged: the channels that have
        it, ascending; an empty list if none has it.
    """
    # a channel without values is not dead: nothing is known of it
    seen = evidence.count + evidence.nonfinite > 0
    flags = {}
    for name, finding in FINDINGS.items():
        holds = finding.rule(evidence, thresholds)
        if holds is not None:
            flags[name] = holds & seen
    # of several findings that say the same of a channel, one is kept (`yields_to`)
    for name in flags:
        for stronger in flags.keys() & FINDINGS[name].yields_to:
            flags[name] = flags[name] & ~flags[stronger]
    return {name: np.flatnonzero(holds).tolist() for name, holds in flags.items()}


def redundant_groups(evidence: Evidence, thresholds: Thresholds) -> list[list[int]]:
    """Groups of redundant channels. The channels of a group correlate, directly or through
    other channels of the group. Channels and groups are in ascending order. Empty if
    correlations were not asked for."""
    linked = correlated(evidence, thresholds)
    if linked is None:
        return []
    # `first` begins with each channel's own number. In each round a channel takes the
    # lowest number among those of the channels that it correlates with. At the end all
    # channels of a group have the number of the group's first channel.
    np.fill_diagonal(linked, True)
    first = np.arange(len(linked))
    is_settled = False
    while not is_settled:
        lower = np.where(linked, first, len(linked)).min(axis=1, initial=len(linked))
        is_settled = np.array_equal(lower, first)
        first = lower
    numbers, sizes = np.unique(first, return_counts=True)
    return [np.flatnonzero(first == number).tolist() for number in numbers[sizes > 1]]


def total_row(rows: Sequence[AuditedRow]) -> dict[str, Any]:
    """The entry `total` of audit.json: how many channels there are, how many have each
    finding, how many are judged for it, and the mean APoZ (average percentage of zeros).

    Args:
        rows: the entry `layers` of audit.json.
    """
    # Two counts for each finding: not all channels are judged for it (those of a Conv2d
    # before an addition are not judged for dead), and a gate's percentage is a share of
    # the judged ones.
    counts = {}
    judged_channels = {}
    for name in FINDINGS:
        judged = [row for row in rows if name in row["findings"]]
        if judged:
            counts[name] = sum(len(row["findings"][name]) for row in judged)
            judged_channels[name] = sum(row["channels"] for row in judged)
    # the mean over all channels, as if they were one layer
    zeros = 0.0
    channels = 0
    for row in rows:
        if row["apoz"] is not None:
            zeros += row["apoz"] * row["channels"]
            channels += row["channels"]
    return {
        "channels": sum(row["channels"] for row in rows),
        "findings": counts,
        "judged": judged_channels,
        "apoz": zeros / channels if channels else None,
    }


def judged_rows(gate: Gate, rows: Sequence[AuditedRow]) -> list[AuditedRow]:
    """The rows of the layers that a gate names and that are judged for its finding.

    Args:
        rows: the entry `layers` of audit.json.

    Raises:
        UsageError: there is no such layer. Then the gate could never fail.
    """
    matching = []
    for row in rows:
        names = (row["layer"], row["label"], row["type"])
        if any(fnmatchcase(name, gate.layers) for name in names):
            matching.append(row)
    if not matching:
        raise UsageError(
            f"--fail-on {gate.text!r}: no audited layer is called {gate.layers!r}",
            f"there is {', '.join(row['label'] for row in rows[:8])}",
        )
    judged = [row for row in matching if gate.finding in row["findings"]]
    if not judged:
        raise UsageError(
            f"--fail-on {gate.text!r}: no layer here can be judged for {gate.finding}",
            FINDINGS[gate.finding].remedy,
        )
    return judged


def check_gate(gate: Gate, rows: Sequence[AuditedRow]) -> Verdict:
    """Whether a gate holds for the sum of its layers, or with `any:` for each of them.

    Args:
        rows: the entry `layers` of audit.json.

    Raises:
        UsageError: the gate could never fail; see `judged_rows`.
    """
    judged = judged_rows(gate, rows)
    if not gate.is_of_each:
        together = _gate_figure(gate, judged)
        return Verdict(gate.text, not together.exceeds(gate), together.text)
    # if the gate holds, its message names the layer that is nearest to the limit
    exceeding = []
    largest = _GateFigure("", 0, 1, gate.finding)
    for row in judged:
        figure = _gate_figure(gate, [row])
        if figure.exceeds(gate):
            exceeding.append(f"{layer_named(row['label'])}: {figure.text}")
        if figure.of(gate) >= largest.of(gate):
            largest = figure
    message = listed(exceeding, _NAMED, "; ")
    if not exceeding:
        message = f"at most {largest.text} in {layer_named(largest.label)}"
    return Verdict(gate.text, not exceeding, message)


class _GateFigure(NamedTuple):
    """How many channels of some layers have a finding."""

    label: str
    """The label of the first of the layers."""
    affected: int
    """How many channels have the finding."""
    channels: int
    """How many channels the layers have."""
    finding: str

    @property
    def percent(self) -> float:
        """The share of the channels in per cent."""
        return 100 * self.affected / self.channels

    @property
    def text(self) -> str:
        """`4 of 64 channels dead (6.25 %)`."""
        return (
            f"{self.affected} of {counted(self.channels, 'channel')} {self.finding}"
            f" ({self.percent:.2f} %)"
        )

    def of(self, gate: Gate) -> float:
        """The number that the gate limits: the share in per cent, or the count."""
        return self.percent if gate.is_share else float(self.affected)

    def exceeds(self, gate: Gate) -> bool:
        """Whether this number fails a gate."""
        if gate.fails_at_limit:
            return self.of(gate) >= gate.limit
        return self.of(gate) > gate.limit


def _gate_figure(gate: Gate, rows: Sequence[AuditedRow]) -> _GateFigure:
    """Count the channels that have the gate's finding in these layers, of which there is
    at least one."""
    affected = 0
    channels = 0
    for row in rows:
        affected += len(row["findings"][gate.finding])
        channels += row["channels"]
    return _GateFigure(rows[0]["label"], affected, channels, gate.finding)


def check_baseline(
    rows: Sequence[AuditedRow], baseline: Mapping[str, Mapping[str, Sequence[int]]]
) -> Verdict:
    """Whether no layer has more channels with a finding than in the baseline.

    Args:
        rows: the entry `layers` of this audit.
        baseline: the channels of each finding, by label of the layer. Layers that are
            not in the baseline are not judged, and a warning names the first of them. If
            no layer is in the baseline, the verdict is that the gate failed.
    """
    missing = [row["label"] for row in rows if row["label"] not in baseline]
    # for example the baseline of another model: as a gate it could never fail
    if len(missing) == len(rows):
        return Verdict("baseline", False, "it has none of these layers")
    if missing:
        layers = counted(len(missing), "layer")
        log.warning("the baseline lacks %s, %s first", layers, missing[0])
    worsened = []
    for row in rows:
        before = baseline.get(row["label"], {})
        for name, channels in row["findings"].items():
            # The audit of the baseline may not have looked for this finding. And as long
            # as there are no more channels than before, nothing got worse, even if they
            # are other channels.
            if name not in before or len(channels) <= len(before[name]):
                continue
            new = list(map(str, sorted({*channels} - {*before[name]})))
            worsened.append(
                f"{layer_named(row['label'])}: {len(channels)} {name}, {len(before[name])} in the"
                f" baseline (new: {listed(new, 8)})"
            )
    return Verdict("baseline", not worsened, "; ".join(worsened) or "nothing got worse")
