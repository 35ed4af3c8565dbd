"""From counted channels to findings, and gates on the layers of audit.json: `dead>5%`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from featviz.audit.gates import FINDINGS, Evidence, Flags, Gate, correlated
from featviz.errors import UsageError
from featviz.options.commands import Thresholds
from featviz.records import Verdict
from featviz.text import listed

if TYPE_CHECKING:
    from featviz.audit.counting import Tally
    from featviz.audit.plan import Call, Spot

log = logging.getLogger(__name__)

Row = Mapping[str, Any]  # one entry of `layers` in audit.json


def judge(evidence: Evidence, thresholds: Thresholds) -> dict[str, list[int]]:
    """The channels of each finding; one for which this layer cannot be judged is left out."""
    seen = evidence.count + evidence.nonfinite > 0
    rules = {name: one.rule(evidence, thresholds) for name, one in FINDINGS.items()}
    flags: dict[str, Flags] = {n: holds & seen for n, holds in rules.items() if holds is not None}
    for name in flags:
        for stronger in flags.keys() & FINDINGS[name].yields_to:
            flags[name] = flags[name] & ~flags[stronger]
    return {name: np.flatnonzero(holds).tolist() for name, holds in flags.items()}


def groups(evidence: Evidence, thresholds: Thresholds) -> list[list[int]]:
    """Redundant channels in connected components."""
    linked = correlated(evidence, thresholds)
    if linked is None:
        return []
    left, components = np.asarray(linked.any(1)), []
    while left.any():
        group, more = left & False, np.arange(len(left)) == left.argmax()
        while (more & ~group).any():
            group, more = group | more, linked[more].any(0)
        components.append(np.flatnonzero(group).tolist())
        left &= ~group
    return components


def row_of(target: Spot, tallies: Mapping[Call, Tally], thresholds: Thresholds) -> dict[str, Any]:
    """Judge a call by what was counted of it. Of no channels it is judged for what it can be."""
    call, tally, ceiling, apoz = target.call, tallies[target.call], None, None
    if target.dead_at is not None and target.dead_at.call in tallies:
        behind = tallies[target.dead_at.call]
        # NaN and infinity are not known to stay at zero
        ceiling = np.where(behind.sums[:, 6] > 0, np.inf, behind.sums[:, 2])
        # average percentage of zeros, 0..1: H. Hu, R. Peng, Y.-W. Tai, C.-K. Tang, "Network
        # Trimming", arXiv 1607.03250, equation 1, averaged over the channels
        apoz = float((behind.sums[:, 5] / behind.values).mean()) if len(behind.sums) else 0.0
    count, low, high, *_, nonfinite, reached = tally.sums.T
    bounded = target.activation is not None and target.activation.bounds
    known = (reached / tally.values if bounded else None, ceiling, tally.correlation())
    evidence = Evidence(count, low, high, nonfinite, *known)
    row = {
        "layer": call.name,
        "call": call.index,
        "label": call.label,
        "type": call.type,
        "channels": len(tally.sums),
        "dead_at": None if target.dead_at is None else target.dead_at.call.label,
        "not_judged": {"dead": target.reason} if target.dead_at is None else {},
        "findings": judge(evidence, thresholds),
        "values": int(tally.values.max(initial=0)),
        "apoz": apoz,
    }
    return row | ({"groups": groups(evidence, thresholds)} if thresholds.redundant_at else {})


def totals(layers: Sequence[Row]) -> dict[str, Any]:
    """All layers together: channels, how many have each finding and are judged for it, and APoZ."""
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


def covered(gate: Gate, layers: Sequence[Row]) -> list[Row]:
    """The layers that a gate speaks of and that are judged for its finding."""
    keys = ("layer", "label", "type")
    named = [row for row in layers if any(fnmatchcase(str(row[k]), gate.where) for k in keys)]
    judged = [layer for layer in named if gate.finding in layer["findings"]]
    if not named:
        words = f"--fail-on {gate.text!r}: no audited layer is called {gate.where!r}"
        raise UsageError(words, f"there is {', '.join(str(row['label']) for row in layers[:8])}")
    if not judged:
        words = f"--fail-on {gate.text!r}: no layer here can be judged for {gate.finding}"
        raise UsageError(words, FINDINGS[gate.finding].remedy)
    return judged


def check(gate: Gate, layers: Sequence[Row]) -> Verdict:
    """Hold a gate against the layers together, not against each one."""
    judged = covered(gate, layers)
    channels = sum(int(layer["channels"]) for layer in judged)
    count = sum(len(layer["findings"][gate.finding]) for layer in judged)
    figure = 100 * count / channels if gate.percent else float(count)
    holds = figure < gate.limit if gate.inclusive else figure <= gate.limit
    words = f"{count} of {channels} channels {gate.finding} ({100 * count / channels:.2f} %)"
    return Verdict(gate.text, holds, words)


def worse(layers: Sequence[Row], earlier: Mapping[str, Mapping[str, Sequence[int]]]) -> Verdict:
    """Whether a layer has more channels of a finding than in the baseline; and which."""
    unknown = [str(layer["label"]) for layer in layers if layer["label"] not in earlier]
    if unknown:
        log.warning("the baseline lacks %d layers, %s first", len(unknown), unknown[0])
    worsened = []
    for layer in layers:
        for name, now in layer["findings"].items():
            before = earlier.get(layer["label"], {}).get(name)
            if before is not None and len(now) > len(before):
                new = listed([str(channel) for channel in sorted({*now} - {*before})], 8)
                words = f"{len(now)} {name}, {len(before)} in the baseline (new: {new})"
                worsened.append(f"{layer['label']}: {words}")
    return Verdict("baseline", not worsened, "; ".join(worsened) or "nothing got worse")
