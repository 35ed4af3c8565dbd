"""What an audit knows of calls and channels, what can be wrong with them, and gates on that."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from featviz.errors import UsageError

if TYPE_CHECKING:  # the help of the command line imports this, and has no time for numpy
    import numpy as np
    from numpy.typing import NDArray

    from featviz.options import Thresholds


@dataclass(frozen=True)
class Call:
    """One call of a module or a function in a forward pass."""

    name: str
    """`layer1.0.relu` for a module, `layer1.0/fn:relu` for a function that layer1.0 calls."""
    type: str
    """Class name, or `fn:relu`."""
    index: int = 0
    """0 for the first call with this name in a forward pass."""

    @property
    def label(self) -> str:
        """For people: `layer1.0.relu`, and `layer1.0.relu.call1` for its second call."""
        return (self.name or self.type) + (f".call{self.index}" if self.index else "")


@dataclass(frozen=True)
class Activation:
    """What can be asked of an activation function's output."""

    zero: bool = False
    """Gives exact zeros below a threshold, and nothing below zero: it can be dead."""
    bounds: tuple[float, ...] = ()
    """Values at which it saturates: a ceiling, or the lower and the upper end."""
    margin: float = 0.0
    """A value this near to a bound, or beyond it, is at it."""


RECTIFIERS = frozenset({"ReLU", "ReLU6", "fn:relu", "fn:relu6"})
"""Types of calls whose output is zero below a threshold, whatever the model: a channel that is zero
there in all images is dead."""

Role = Literal["maker", "activation", "channelwise", "mixing", "other"]
"""maker: a convolution or linear module. channelwise: output channel i depends on input channel i
alone. mixing: channel i stays channel i, but the others have a say (GroupNorm)."""


@dataclass(frozen=True)
class Part:
    """What a module or function is to the channels that pass through it."""

    role: Role
    axis: int | None = None
    """Where the channels are in its output; None where its input decides."""
    activation: Activation | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether a gate held, with its figure in words."""

    gate: str
    """As it was written: `dead>5%`."""
    held: bool
    words: str


Flags: TypeAlias = "NDArray[np.bool_]"
Doubles: TypeAlias = "NDArray[np.float64]"

_ROUNDING = 2.0**-20
"""Values that differ by less than this share of the largest are equal but for rounding."""

_FEWEST = 10
"""Values below which a correlation says nothing."""


@dataclass(frozen=True)
class Evidence:
    """What is known of a layer's C channels over all images; arrays [C]."""

    count: Doubles
    low: Doubles
    high: Doubles
    nonfinite: Doubles
    saturated: Doubles | None = None
    """Share of values at a bound; None where the layer has none."""
    ceiling: Doubles | None = None
    """Largest value at the activation by which `dead` is judged; None where there is none."""
    correlation: Doubles | None = field(default=None, repr=False)
    """[C, C]; None where it was not computed."""


Rule: TypeAlias = "Callable[[Evidence, Thresholds], Flags | None]"
"""Says of each channel whether a finding holds; None where the layer cannot be judged for it."""


@dataclass(frozen=True)
class ChannelFinding:
    """One thing that can be wrong with a channel."""

    name: str
    """As in audit.json, in gates and as the heading of its column in the table."""
    definition: str
    rule: Rule
    severity: int
    """Suspects are drawn in this order: 0 is the worst, and drawn first."""
    gate: str
    """An example of a gate on it, for help texts and messages."""
    remedy: str = "ask for another finding"
    """The hint of the message about a gate on layers that cannot be judged for this finding."""
    yields_to: tuple[str, ...] = ("nonfinite",)
    """A channel that has one of these findings has not this one as well."""


def _constant(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    import numpy as np

    size = np.maximum(abs(evidence.low), abs(evidence.high))
    with np.errstate(invalid="ignore"):
        flat = evidence.high - evidence.low <= np.maximum(thresholds.eps, _ROUNDING * size)
    return np.asarray(flat & (evidence.count > 1))


def _redundant(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    linked = correlated(evidence, thresholds)
    return None if linked is None else linked.max(axis=1, initial=False)


def correlated(evidence: Evidence, thresholds: Thresholds) -> Flags | None:
    """Which pairs of channels [C, C] correlate above the threshold, of those with finite values
    only, and ten of them at least; None where that was not asked."""
    import numpy as np

    if evidence.correlation is None or thresholds.redundant_at is None:
        return None
    linked = evidence.correlation > thresholds.redundant_at
    np.fill_diagonal(linked, False)
    judged = (evidence.nonfinite == 0) & (evidence.count >= _FEWEST)
    return np.asarray(linked & judged[:, None] & judged[None, :])


FINDINGS: dict[str, ChannelFinding] = {
    finding.name: finding
    for finding in (
        ChannelFinding(
            name="dead",
            definition="never above --eps behind a ReLU or ReLU6; of a layer before one, behind "
            "the activation that follows",
            rule=lambda seen, t: None if seen.ceiling is None else seen.ceiling <= t.eps,
            severity=1,
            gate="dead>5%",
            remedy="dead is judged at a ReLU or ReLU6; constant suits other activations",
        ),
        ChannelFinding(
            name="constant",
            definition="one value over all images and positions (and neither dead nor saturated)",
            rule=_constant,
            severity=3,
            gate="layer3.*:constant>2",
            yields_to=("nonfinite", "dead", "saturated"),
        ),
        ChannelFinding(
            name="saturated",
            definition="at the bound of ReLU6, Sigmoid, Tanh, Hardsigmoid or Hardtanh for more "
            "than --saturated-at of its values",
            rule=lambda seen, t: (
                None if seen.saturated is None else seen.saturated > t.saturated_at
            ),
            severity=2,
            gate="saturated>10%",
            remedy="it is judged at ReLU6, Sigmoid, Tanh, Hardsigmoid and Hardtanh",
        ),
        ChannelFinding(
            name="nonfinite",
            definition="NaN or infinite somewhere; such a channel is judged for nothing else",
            rule=lambda seen, t: seen.nonfinite.astype(bool),
            severity=0,
            gate="nonfinite>0",
            yields_to=(),
        ),
        ChannelFinding(
            name="redundant",
            definition="correlates with another above --redundant-at; groups are connected "
            "components",
            rule=_redundant,
            severity=4,
            gate="redundant>20%",
            remedy="--redundant-at 0.98 asks for it",
        ),
    )
}
"""By name, in the order of audit.json, of the table and of help texts. Each makes a picture of its
channels, and gates take each."""


_FORM = re.compile(
    r"(?:(?P<where>.+):)?(?P<finding>[A-Za-z]+)\s*(?P<sign>>=?)\s*(?P<number>\d+(?:\.\d+)?)"
    r"\s*(?P<percent>%)?"
)
GATE_EXAMPLES = ", ".join(FINDINGS[name].gate for name in ("dead", "nonfinite", "constant"))


@dataclass(frozen=True)
class Gate:
    """A limit on the channels with a finding; beyond it the gate is broken."""

    text: str
    finding: str
    limit: float
    percent: bool
    """The limit is a share of the channels, in percent; else a count."""
    inclusive: bool
    """`>=`: broken at the limit, too."""
    where: str = "*"
    """Glob over the layers' names, labels and types."""


def parse_gate(text: str) -> Gate:
    """Read `[LAYERS:]FINDING>NUMBER[%]`.

    Raises:
        UsageError: another form, no such finding, or a share above 100 %.
    """
    parts = _FORM.fullmatch(text.strip())
    if parts is None:
        raise UsageError(f"--fail-on {text!r} is no gate", f"for example {GATE_EXAMPLES}")
    finding, limit = parts["finding"], float(parts["number"])
    if finding not in FINDINGS:
        close = difflib.get_close_matches(finding, FINDINGS, 1)
        raise UsageError(
            f"--fail-on {text!r}: there is no finding {finding!r}",
            f"did you mean {close[0]}?" if close else f"one of {', '.join(FINDINGS)}",
        )
    if parts["percent"] and limit > 100:
        raise UsageError(f"--fail-on {text!r} can never break", "a share is at most 100%")
    return Gate(
        text.strip(), finding, limit, bool(parts["percent"]), parts["sign"] == ">=",
        parts["where"] or "*",
    )  # fmt: skip
