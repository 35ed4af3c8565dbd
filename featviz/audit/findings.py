"""What is wrong with a channel: the findings, each with its definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
Doubles = NDArray[np.float64]

_ROUNDING = 2.0**-20
"""Values that differ by less than this share of the largest are equal but for rounding."""

_FEWEST = 10
"""Values below which a correlation says nothing."""


@dataclass(frozen=True)
class Thresholds:
    """What the findings go by."""

    eps: float = 0.0
    """dead: never above this. constant: values no further apart than this are one."""
    saturated_at: float = 0.99
    """Share of values at a bound."""
    redundant_at: float | None = None
    """Correlation with another channel; None does not ask."""


@dataclass(frozen=True)
class Evidence:
    """What is known of a layer's C channels over all images; arrays [C]."""

    count: Doubles
    """Finite values."""
    low: Doubles
    high: Doubles
    nonfinite: Doubles
    saturated: Doubles | None = None
    """Share of values at a bound; None where the layer has none."""
    ceiling: Doubles | None = None
    """Largest value at the activation by which `dead` is judged; None where there is none."""
    correlation: Doubles | None = field(default=None, repr=False)
    """[C, C]; None where it was not asked for."""


def judge(evidence: Evidence, thresholds: Thresholds) -> dict[str, list[int]]:
    """The channels of each finding; a finding that cannot be asked of this layer is left out.

    A channel with NaN or infinite values is `nonfinite` and nothing else, and one that is dead or
    saturated is not called constant as well.
    """
    whole = (evidence.nonfinite == 0) & (evidence.count > 0)
    flags: dict[str, Flags] = {}
    for name, rule in RULES.items():
        if (found := rule(evidence, thresholds)) is not None:
            flags[name] = found if name == "nonfinite" else found & whole
    for stronger in ("dead", "saturated"):
        if stronger in flags:
            flags["constant"] &= ~flags[stronger]
    return {name: np.flatnonzero(found).tolist() for name, found in flags.items()}


def dead(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """Never above eps behind the ReLU or ReLU6: in no image, at no position."""
    if evidence.ceiling is None:
        return None
    return np.asarray(evidence.ceiling <= thresholds.eps)


def constant(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """One value over all images and positions, but for rounding; two values at least were seen."""
    size = np.maximum(abs(evidence.low), abs(evidence.high))
    with np.errstate(invalid="ignore"):
        flat = evidence.high - evidence.low <= np.maximum(thresholds.eps, _ROUNDING * size)
    return np.asarray(flat & (evidence.count > 1))


def saturated(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """At a bound of the activation for more than this share of values."""
    if evidence.saturated is None:
        return None
    return np.asarray(evidence.saturated > thresholds.saturated_at)


def nonfinite(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """NaN or infinite somewhere."""
    return np.asarray(evidence.nonfinite > 0)


def redundant(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """Correlated with another channel above the threshold; ten values at least were seen."""
    linked = _linked(evidence, thresholds)
    return None if linked is None else np.asarray(linked.any(1))


def groups(evidence: Evidence, thresholds: Thresholds) -> list[list[int]]:
    """Redundant channels in connected components: each is linked to some other of its group, not
    to all of them."""
    linked = _linked(evidence, thresholds)
    if linked is None:
        return []
    left, found = set(np.flatnonzero(linked.any(1)).tolist()), []
    while left:
        group, edge = set(), {min(left)}
        while edge:
            group |= edge
            edge = set(np.flatnonzero(linked[sorted(edge)].any(0)).tolist()) - group
        found.append(sorted(group))
        left -= group
    return found


def _linked(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    if evidence.correlation is None or thresholds.redundant_at is None:
        return None
    linked = evidence.correlation > thresholds.redundant_at
    np.fill_diagonal(linked, False)
    asked = (evidence.nonfinite == 0) & (evidence.count >= _FEWEST)
    return np.asarray(linked & asked[:, None] & asked[None, :])


Rule = Callable[[Evidence, Thresholds], Flags | None]
RULES: Mapping[str, Rule] = {
    "dead": dead,
    "constant": constant,
    "saturated": saturated,
    "nonfinite": nonfinite,
    "redundant": redundant,
}
"""A finding's name, and the rule that says of each channel whether it holds."""
