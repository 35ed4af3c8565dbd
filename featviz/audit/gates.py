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
    high: Doubles
    nonfinite: Doubles
    """How many values were NaN or infinite."""
    saturated: Doubles | None = None
    """Share of values at a bound; None where the layer has none."""
    ceiling: Doubles | None = None
    """Largest value at the activation by which `dead` is judged; None where there is
    none."""
    correlation: Doubles | None = field(default=None, repr=False)
    """[C, C], Pearson's r; None where it was not measured."""


@dataclass(frozen=True)
class ChannelFinding:
    """One thing that can be wrong with a channel; docs/audit.md says what it means."""

    name: str
    rule: Callable[[Evidence, Thresholds], Flags | None]
    """Says of each channel whether it holds; None where the layer cannot be judged for
    it."""
    rank: int
    """Suspects are drawn in this order: 0 is the worst."""
    remedy: str = "ask for another finding"
    """The hint of the message about a gate on layers that cannot be judged for it."""
    yields_to: tuple[str, ...] = ("nonfinite",)
    """A channel that has one of these findings has not this one as well."""


def _dead(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """Which channels are never above `eps` at the activation, bool [C]; None where the
    layer has no activation to judge by."""
    if evidence.ceiling is None:
        return None
    return evidence.ceiling <= thresholds.eps


def _constant(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """Which channels have one value everywhere, but for rounding; bool [C]."""
    import numpy as np

    # Two positions that compute the same may be off by a rounding. Without any finite
    # value the span is -inf, which looks flat, and one value is flat by itself: hence
    # the count.
    size = np.maximum(abs(evidence.low), abs(evidence.high))
    with np.errstate(invalid="ignore"):
        flat = evidence.high - evidence.low <= np.maximum(
            thresholds.eps, _ROUNDING * size
        )
    return np.asarray(flat & (evidence.count > 1))


def _saturated(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """Which channels are at a bound of the activation more often than the threshold
    says, bool [C]; None where the activation has no bound."""
    if evidence.saturated is None:
        return None
    return evidence.saturated > thresholds.saturated_at


def _nonfinite(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    return evidence.nonfinite.astype(bool)


def _redundant(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    linked = correlated(evidence, thresholds)
    return None if linked is None else linked.max(axis=1, initial=False)


def correlated(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """Which pairs of channels [C, C] correlate above the threshold, of channels with
    enough values and finite ones only; None where correlations were not asked for."""
    import numpy as np

    if evidence.correlation is None or thresholds.redundant_at is None:
        return None
    # a channel is not redundant with itself; what is not finite was counted as zero,
    # and says nothing
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
"""By name, in the order of audit.json, of the table and of help texts. Each makes a
picture of its channels, and gates take each."""


_GATE = re.compile(
    r"(?:(?P<any>any):)?(?:(?P<layers>.+):)?(?P<finding>[A-Za-z]+)\s*(?P<sign>>=?)\s*(?P<number>\d+(?:\.\d+)?)"
    r"\s*(?P<percent>%)?"
)


@dataclass(frozen=True)
class Gate:
    """A limit on the channels with a finding; beyond it the gate fails."""

    text: str
    finding: str
    limit: float
    is_share: bool
    """Whether the limit is a share of the channels, in percent; else it is a count."""
    fails_at_limit: bool
    layers: str = "*"
    """A pattern of names, labels or types."""
    is_of_each: bool = False
    """Whether the limit is one for each layer; else it is for all of them together."""


def parse_gate(text: str) -> Gate:
    """Read `[any:][LAYERS:]FINDING>NUMBER[%]`.

    Args:
        text: as behind `--fail-on`; LAYERS is a pattern, `*` where it is left out.

    Raises:
        UsageError: another form, no such finding, or a share above 100 %.
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
    # a gate that cannot fail looks like one that holds
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
