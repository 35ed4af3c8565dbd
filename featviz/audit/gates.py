"""What can be wrong with a channel, and limits on it that the user sets: `dead>5%`.

Gates are read together with the command line, before numpy is imported; functions
import it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from featviz.errors import UsageError
from featviz.options.commands import Thresholds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Flags: TypeAlias = "NDArray[np.bool_]"
Doubles: TypeAlias = "NDArray[np.float64]"

# values that differ by less than this share of the largest are equal but for rounding
_ROUNDING = 2.0**-20
# values of a channel from which on its correlation says something
_MIN_CORRELATED = 10


@dataclass(frozen=True)
class Evidence:
    """What is known of a layer's C channels over all images; arrays [C]."""

    count: Doubles
    """How many finite values were seen."""
    low: Doubles
    """The least finite value; inf without any."""
    high: Doubles
    """The greatest finite value; -inf without any."""
    nonfinite: Doubles
    """How many values were NaN or infinite."""
    saturated: Doubles | None = None
    """The share of values at a bound, 0..1; None if the layer has no bounds."""
    ceiling: Doubles | None = None
    """The largest value at the activation where `dead` is judged; inf for a channel with
    values that are not finite. None if there is no such activation."""
    correlation: Doubles | None = field(default=None, repr=False)
    """Pearson's r of each pair of channels, [C, C]; None if it was not asked for."""


@dataclass(frozen=True)
class ChannelFinding:
    """One thing that can be wrong with a channel; docs/audit.md says what it means."""

    name: str
    rule: Callable[[Evidence, Thresholds], Flags | None]
    """Takes what is known of a layer, and the limits. Returns whether each channel has the
    finding, bool [C]; None if the layer cannot be judged for it."""
    rank: int
    """Suspects are drawn in this order: 0 is the worst."""
    remedy: str = "ask for another finding"
    """The hint if no layer of a gate can be judged for the finding."""
    yields_to: tuple[str, ...] = ("nonfinite",)
    """Findings that take the place of this one in channels that have both."""


def _dead(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """Which channels are never above `eps` at the activation, bool [C]; None if there is
    no activation where the layer can be judged."""
    if evidence.ceiling is None:
        return None
    return evidence.ceiling <= thresholds.eps


def _constant(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """Which channels have one value everywhere, but for rounding; bool [C]."""
    import numpy as np

    # Rounding makes a small difference between values that should be equal. At least two
    # finite values are needed: a single one is always constant, and without any the span
    # is -inf.
    size = np.maximum(abs(evidence.low), abs(evidence.high))
    with np.errstate(invalid="ignore"):
        flat = evidence.high - evidence.low <= np.maximum(
            thresholds.eps, _ROUNDING * size
        )
    return np.asarray(flat & (evidence.count > 1))


def _saturated(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """Which channels have a larger share of values at a bound of the activation than the
    threshold allows, bool [C]; None if the activation has no bound."""
    if evidence.saturated is None:
        return None
    return evidence.saturated > thresholds.saturated_at


def _nonfinite(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    return evidence.nonfinite.astype(bool)


def _redundant(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    linked = correlated(evidence, thresholds)
    return None if linked is None else linked.max(axis=1, initial=False)


def correlated(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """Which pairs of channels correlate above the threshold, bool [C, C]; None if
    correlations were not asked for. A channel with few values, or with values that are not
    finite, correlates with no other."""
    import numpy as np

    if evidence.correlation is None or thresholds.redundant_at is None:
        return None
    # a channel is not redundant with itself
    linked = evidence.correlation > thresholds.redundant_at
    np.fill_diagonal(linked, False)
    judged = (evidence.nonfinite == 0) & (evidence.count >= _MIN_CORRELATED)
    return np.asarray(linked & judged[:, None] & judged[None, :])


FINDINGS: dict[str, ChannelFinding] = {
    finding.name: finding
    for finding in (
        ChannelFinding(
            name="dead",
            rule=_dead,
            rank=1,
            remedy=(
                "dead is judged at a ReLU or ReLU6; constant suits other activations"
            ),
        ),
        ChannelFinding(
            name="constant",
            rule=_constant,
            rank=3,
            yields_to=("nonfinite", "dead", "saturated"),
        ),
        ChannelFinding(
            name="saturated",
            rule=_saturated,
            rank=2,
            remedy="it is judged at ReLU6, Sigmoid, Tanh, Hardsigmoid and Hardtanh",
        ),
        ChannelFinding(
            name="nonfinite",
            rule=_nonfinite,
            rank=0,
            yields_to=(),
        ),
        ChannelFinding(
            name="redundant",
            rule=_redundant,
            rank=4,
            remedy="--redundant-at 0.98 asks for it",
        ),
    )
}
"""By name, in the order of audit.json, of the table and of help texts."""


_GATE = re.compile(
    r"(?:(?P<any>any):)?(?:(?P<layers>.+):)?(?P<finding>[A-Za-z]+)\s*(?P<sign>>=?)\s*(?P<number>\d+(?:\.\d+)?)"
    r"\s*(?P<percent>%)?"
)


@dataclass(frozen=True)
class Gate:
    """A limit on the channels with a finding; beyond it the gate fails."""

    text: str
    """As the user typed it."""
    finding: str
    """A key of FINDINGS."""
    limit: float
    is_share: bool
    """Whether the limit is a share of the channels, in percent; else it is a count."""
    fails_at_limit: bool
    """Whether it also fails at the limit itself (`>=`)."""
    layers: str
    """A pattern (`fnmatch`) of names, labels or types of layers."""
    is_of_each: bool
    """Whether each layer has to keep the limit by itself; else all of them together."""


def parse_gate(text: str) -> Gate:
    """Read `[any:][LAYERS:]FINDING>NUMBER[%]`.

    Args:
        text: a value of `--fail-on`; LAYERS is a pattern, and `*` if it is left out.

    Raises:
        UsageError: the text has another form, there is no such finding, or the limit is a
            share that cannot be exceeded.
    """
    match = _GATE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--fail-on {text!r} is no gate",
            "for example 'dead>5%', 'any:dead>5%' or 'layer3.*:constant>2'",
        )
    finding = match["finding"]
    limit = float(match["number"])
    if finding not in FINDINGS:
        close = difflib.get_close_matches(finding, FINDINGS, 1)
        raise UsageError(
            f"--fail-on {text!r}: there is no finding {finding!r}",
            f"did you mean {close[0]}?" if close else f"one of {', '.join(FINDINGS)}",
            replace=(text, text.replace(finding, close[0], 1)) if close else None,
        )
    fails_at_limit = match["sign"] == ">="
    # refused, since a gate that can never fail looks like one that holds
    is_beyond = limit > 100 or (limit == 100 and not fails_at_limit)
    if match["percent"] and is_beyond:
        raise UsageError(
            f"--fail-on {text!r} can never fail", "a share is at most 100%"
        )
    return Gate(
        text=text.strip(),
        finding=finding,
        limit=limit,
        is_share=bool(match["percent"]),
        fails_at_limit=fails_at_limit,
        layers=match["layers"] or "*",
        is_of_each=match["any"] is not None,
    )
