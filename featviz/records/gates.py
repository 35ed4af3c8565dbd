"""Gates as one types them: `dead>5%`, `layer3.*:constant>2`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from featviz.errors import UsageError
from featviz.records.findings import FINDINGS

_FORM = re.compile(
    r"(?:(?P<where>.+):)?(?P<finding>[A-Za-z]+)\s*(?P<sign>>=?)\s*(?P<number>\d+(?:\.\d+)?)"
    r"\s*(?P<percent>%)?"
)
EXAMPLES = ", ".join(FINDINGS[name].gate for name in ("dead", "nonfinite", "constant"))


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


def parse(text: str) -> Gate:
    """Read `[LAYERS:]FINDING>NUMBER[%]`.

    Raises:
        UsageError: another form, no such finding, or a share above 100 %.
    """
    parts = _FORM.fullmatch(text.strip())
    if parts is None:
        raise UsageError(f"--fail-on {text!r} is no gate", f"for example {EXAMPLES}")
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
