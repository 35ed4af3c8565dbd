"""Gates: `dead>5%`, `layer3.*:constant>2`, and nothing worse than a baseline.

They read the layers of audit.json, whoever wrote it: a mapping with `layer`, `label`, `type`,
`channels` and `findings` {name: [channels]} for each.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from featviz.errors import UsageError
from featviz.records import Verdict
from featviz.records.findings import FINDINGS
from featviz.text import listed

Layers = Sequence[Mapping[str, Any]]

_FORM = re.compile(
    r"(?:(?P<where>.+):)?(?P<finding>[A-Za-z]+)\s*(?P<sign>>=?)\s*(?P<number>\d+(?:\.\d+)?)"
    r"\s*(?P<percent>%)?"
)
EXAMPLES = ", ".join(FINDINGS[name].gate for name in ("dead", "nonfinite", "constant"))

_NAMED = 8
"""Channels of a layer that a message names."""


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


def covered(gate: Gate, layers: Layers) -> list[Mapping[str, Any]]:
    """The layers that a gate speaks of and that are judged for its finding.

    Raises:
        UsageError: there are none, so that the gate would hold whatever happens.
    """
    named = [layer for layer in layers if _matches(gate.where, layer)]
    judged = [layer for layer in named if gate.finding in layer["findings"]]
    if not named:
        raise UsageError(
            f"--fail-on {gate.text!r}: no audited layer is called {gate.where!r}",
            f"there is {', '.join(str(layer['label']) for layer in layers[:_NAMED])}",
        )
    if not judged:
        raise UsageError(
            f"--fail-on {gate.text!r}: no layer here can be judged for {gate.finding}",
            FINDINGS[gate.finding].remedy,
        )
    return judged


def check(gate: Gate, layers: Layers) -> Verdict:
    """Hold a gate against the layers together, not against each one.

    Raises:
        UsageError: it speaks of no layer.
    """
    judged = covered(gate, layers)
    channels = sum(int(layer["channels"]) for layer in judged)
    count = sum(len(layer["findings"][gate.finding]) for layer in judged)
    figure = 100 * count / channels if gate.percent else float(count)
    holds = figure < gate.limit if gate.inclusive else figure <= gate.limit
    words = f"{count} of {channels} channels {gate.finding} ({100 * count / channels:.2f} %)"
    return Verdict(gate.text, holds, words)


def worse(layers: Layers, baseline: Layers) -> Verdict:
    """Whether any layer has more channels of any finding than it had in the baseline.

    Compared are the layers, and of each the findings, that both have; the words name the channels
    that are new.
    """
    before = {layer["label"]: layer["findings"] for layer in baseline}
    worsened = [
        f"{layer['label']}: {_more(name, now, before[layer['label']][name])}"
        for layer in layers
        if layer["label"] in before
        for name, now in layer["findings"].items()
        if name in before[layer["label"]] and len(now) > len(before[layer["label"]][name])
    ]
    return Verdict("baseline", not worsened, "; ".join(worsened) or "nothing got worse")


def incomparable(layers: Layers, baseline: Layers) -> list[str]:
    """Labels of the layers that the baseline has not."""
    before = {layer["label"] for layer in baseline}
    return [str(layer["label"]) for layer in layers if layer["label"] not in before]


def _more(name: str, now: Sequence[int], before: Sequence[int]) -> str:
    new = sorted(set(now) - set(before))
    channels = listed(list(map(str, new)), _NAMED)
    return f"{len(now)} {name}, {len(before)} in the baseline (new: {channels})"


def _matches(pattern: str, layer: Mapping[str, Any]) -> bool:
    return any(fnmatchcase(str(layer[key]), pattern) for key in ("layer", "label", "type"))
