"""Gates: `dead>5%`, `layer3.*:constant>2`, and nothing worse than a baseline.

They read the layers of audit.json, whoever wrote it: a mapping with `layer`, `label`, `type`,
`channels` and `findings` {name: [channels]} for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from featviz.errors import UsageError
from featviz.records import Verdict
from featviz.records.findings import FINDINGS
from featviz.records.gates import Gate
from featviz.text import listed

Layers = Sequence[Mapping[str, Any]]

_NAMED = 8
"""Channels of a layer that a message names."""


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
