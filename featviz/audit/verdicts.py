"""From counted channels to what audit.json says of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from featviz.audit import findings
from featviz.audit.counting import Census, Tally
from featviz.audit.findings import Evidence, Thresholds
from featviz.audit.targets import AuditPlan, AuditTarget

Row = Mapping[str, Any]
"""One entry of `layers` in audit.json."""


def rows(plan: AuditPlan, counted: Census, thresholds: Thresholds) -> dict[AuditTarget, Row]:
    """Judge the targets that gave something to count."""
    return {
        target: _judged(target, counted, thresholds)
        for target in plan.targets
        if target.spot.call in counted.tallies and target.spot.call not in counted.faults
    }


def expected(target: AuditTarget, thresholds: Thresholds) -> Row:
    """The row of a target before anything was counted: its findings are those it is judged for."""
    nothing = np.zeros(0)
    bounded = target.spot.activation is not None and bool(target.spot.activation.bounds)
    evidence = Evidence(
        count=nothing,
        low=nothing,
        high=nothing,
        nonfinite=nothing,
        saturated=nothing if bounded else None,
        ceiling=None if target.dead_at is None else nothing,
        correlation=None if thresholds.redundant_at is None else np.zeros((0, 0)),
    )
    return _row(target, 0, findings.judge(evidence, thresholds))


def total(layers: Sequence[Row]) -> dict[str, Any]:
    """Channels of all layers together, how many have each finding, and the mean APoZ.

    `channels` counts the channels that are judged for a finding; APoZ is the mean over them.
    """
    counts, asked = {}, {}
    for name in findings.RULES:
        judged = [row for row in layers if name in row["findings"]]
        if judged:
            counts[name] = sum(len(row["findings"][name]) for row in judged)
            asked[name] = sum(row["channels"] for row in judged)
    zeros = [(row["apoz"], row["channels"]) for row in layers if row["apoz"] is not None]
    apoz = sum(a * n for a, n in zeros) / sum(n for _, n in zeros) if zeros else None
    channels = sum(row["channels"] for row in layers)
    return {"channels": channels, "findings": counts, "judged": asked, "apoz": apoz}


def suspicious(row: Row) -> int:
    """Findings of a layer, all kinds together."""
    return sum(len(own) for own in row["findings"].values())


def _judged(target: AuditTarget, counted: Census, thresholds: Thresholds) -> Row:
    tally = counted.tallies[target.spot.call]
    behind = None if target.dead_at is None else counted.tallies.get(target.dead_at.call)
    evidence = _evidence(target, tally, behind)
    found = findings.judge(evidence, thresholds)
    more: dict[str, Any] = {"values": int(tally.stats.values.max()), "apoz": _apoz(behind)}
    if thresholds.redundant_at is not None:
        more["groups"] = findings.groups(evidence, thresholds)
    return {**_row(target, len(tally.stats.count), found), **more}


def _row(target: AuditTarget, channels: int, found: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    call = target.spot.call
    return {
        "layer": call.name,
        "call": call.index,
        "label": call.label,
        "type": call.type,
        "channels": channels,
        "dead_at": None if target.dead_at is None else target.dead_at.call.label,
        "not_judged": {} if target.dead_at is not None else {"dead": target.reason},
        "findings": dict(found),
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
