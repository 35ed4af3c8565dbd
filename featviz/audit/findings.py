"""From counted channels to findings: what audit.json says of each layer, and in total."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from featviz.records.findings import FINDINGS, Evidence, Flags, Thresholds, correlated

if TYPE_CHECKING:
    from featviz.audit.counting import Census, Tally
    from featviz.audit.plan import AuditPlan, AuditTarget

Row = Mapping[str, Any]
"""One entry of `layers` in audit.json."""


def judge(evidence: Evidence, thresholds: Thresholds) -> dict[str, list[int]]:
    """The channels of each finding; one for which this layer cannot be judged is left out."""
    seen = evidence.count + evidence.nonfinite > 0
    flags: dict[str, Flags] = {}
    for finding in FINDINGS.values():
        if (holds := finding.rule(evidence, thresholds)) is not None:
            flags[finding.name] = holds & seen
    for name in flags:
        for stronger in FINDINGS[name].yields_to:
            if stronger in flags:
                flags[name] = flags[name] & ~flags[stronger]
    return {name: np.flatnonzero(holds).tolist() for name, holds in flags.items()}


def groups(evidence: Evidence, thresholds: Thresholds) -> list[list[int]]:
    """Redundant channels in connected components: each is linked to some other of its group, not
    to all of them."""
    linked = correlated(evidence, thresholds)
    if linked is None:
        return []
    left, components = set(np.flatnonzero(linked.any(1)).tolist()), []
    while left:
        group, edge = set(), {min(left)}
        while edge:
            group |= edge
            edge = set(np.flatnonzero(linked[sorted(edge)].any(0)).tolist()) - group
        components.append(sorted(group))
        left -= group
    return components


def judged_rows(plan: AuditPlan, counted: Census, thresholds: Thresholds) -> dict[AuditTarget, Row]:
    """Judge the targets of which something was counted."""
    return {
        target: _judged(target, counted, thresholds)
        for target in plan.targets
        if target.spot.call in counted.tallies and target.spot.call not in counted.faults
    }


def expected_row(target: AuditTarget, thresholds: Thresholds) -> Row:
    """The row of a target before anything was counted: its findings are those it is judged for."""
    nothing = np.zeros(0)
    bounded = target.spot.activation is not None and bool(target.spot.activation.bounds)
    saturated = nothing if bounded else None
    ceiling = None if target.dead_at is None else nothing
    correlation = None if thresholds.redundant_at is None else np.zeros((0, 0))
    evidence = Evidence(nothing, nothing, nothing, nothing, saturated, ceiling, correlation)
    return _row(target, 0, judge(evidence, thresholds))


def totals(layers: Sequence[Row]) -> dict[str, Any]:
    """The channels of all layers together, how many have each finding, and the mean APoZ.

    `judged` counts the channels that are judged for a finding; APoZ is the mean over them.
    """
    counts, judged_channels = {}, {}
    for name in FINDINGS:
        judged = [row for row in layers if name in row["findings"]]
        if judged:
            counts[name] = sum(len(row["findings"][name]) for row in judged)
            judged_channels[name] = sum(row["channels"] for row in judged)
    zeros = [(row["apoz"], row["channels"]) for row in layers if row["apoz"] is not None]
    apoz = sum(a * n for a, n in zeros) / sum(n for _, n in zeros) if zeros else None
    channels = sum(row["channels"] for row in layers)
    return {"channels": channels, "findings": counts, "judged": judged_channels, "apoz": apoz}


def suspicious(row: Row) -> int:
    """How many findings the channels of a layer have, all kinds together."""
    return sum(len(channels) for channels in row["findings"].values())


def _judged(target: AuditTarget, counted: Census, thresholds: Thresholds) -> Row:
    tally = counted.tallies[target.spot.call]
    behind = None if target.dead_at is None else counted.tallies.get(target.dead_at.call)
    evidence = _evidence(target, tally, behind)
    more: dict[str, Any] = {"values": int(tally.stats.values.max()), "apoz": _apoz(behind)}
    if thresholds.redundant_at is not None:
        more["groups"] = groups(evidence, thresholds)
    return {**_row(target, tally.channels, judge(evidence, thresholds)), **more}


def _row(
    target: AuditTarget, channels: int, findings: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    call = target.spot.call
    return {
        "layer": call.name,
        "call": call.index,
        "label": call.label,
        "type": call.type,
        "channels": channels,
        "dead_at": None if target.dead_at is None else target.dead_at.call.label,
        "not_judged": {} if target.dead_at is not None else {"dead": target.reason},
        "findings": dict(findings),
    }


def _evidence(target: AuditTarget, tally: Tally, behind: Tally | None) -> Evidence:
    stats = tally.stats
    activation = target.spot.activation
    saturated = None
    if activation is not None and activation.bounds:
        saturated = stats.saturated / stats.values
    ceiling = None
    if behind is not None:  # NaN and infinity are not known to stay at zero
        ceiling = np.where(behind.stats.nonfinite > 0, np.inf, behind.stats.high)
    correlation = None if tally.covariance is None else tally.covariance.correlation()
    return Evidence(
        stats.count, stats.low, stats.high, stats.nonfinite, saturated, ceiling, correlation
    )


def _apoz(behind: Tally | None) -> float | None:
    """Average percentage of zeros, 0..1: H. Hu, R. Peng, Y.-W. Tai, C.-K. Tang, "Network Trimming",
    arXiv 1607.03250, equation 1, averaged over the channels."""
    if behind is None:
        return None
    return float((behind.stats.zeros / behind.stats.values).mean())
