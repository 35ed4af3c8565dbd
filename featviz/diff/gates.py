"""Limits on how far layers may be apart, which the user sets: `sqnr<20`.

Gates take the place of the rule that nothing may differ: a quantized model differs in
every channel, and is good where no layer is worse than its limit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from featviz.diff.comparison import ComparedLayer, ImageChange
from featviz.errors import UsageError
from featviz.records import Verdict
from featviz.text import did_you_mean, listed

# layers that the message of a gate names
_NAMED = 3


@dataclass(frozen=True)
class Measure:
    """A number of a layer that gates limit from below."""

    of_layer: Callable[[ComparedLayer], float]
    """NaN where it is not known."""
    of_image: Callable[[ImageChange], float | None]
    unit: str
    remedy: str
    """How it becomes known."""


MEASURES = {
    "sqnr": Measure(
        # of pictures it is NaN: their grey levels have noise of their own
        of_layer=lambda layer: layer.sqnr,
        of_image=lambda image: image.sqnr,
        unit=" dB",
        remedy="run both with --tensors npy, which keeps the values themselves",
    ),
    "cosine": Measure(
        of_layer=lambda layer: layer.cosine,
        of_image=lambda image: image.cosine,
        unit="",
        remedy=(
            "run both with --tensors npy, or draw all channels of both as PNG, without"
            " numbers over a colour map (--labels, --cmap)"
        ),
    ),
}

_GATE = re.compile(
    r"(?:(?P<layers>.+):)?(?P<measure>[A-Za-z]+)\s*<\s*(?P<limit>-?\d*\.?\d+)\s*(?:dB)?"
)


@dataclass(frozen=True)
class DiffGate:
    """A limit below which no layer may fall."""

    text: str
    measure: str
    limit: float
    layers: str
    """A pattern of names or types."""


def parse_gate(text: str) -> DiffGate:
    """Read `[LAYERS:]MEASURE<NUMBER`.

    Args:
        text: as behind `--fail-on`; `dB` may stand behind the number.

    Raises:
        UsageError: another form, or no such measure.
    """
    match = _GATE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--fail-on {text!r} is no gate",
            "for example 'sqnr<20' or 'layer4.*:cosine<0.99'",
        )
    measure = match["measure"].lower()
    if measure not in MEASURES:
        raise UsageError(
            f"--fail-on {text!r}: there is no measure {match['measure']!r}",
            did_you_mean(measure, MEASURES, f"one of {', '.join(MEASURES)}"),
        )
    return DiffGate(
        text=text.strip(),
        measure=measure,
        limit=float(match["limit"]),
        layers=match["layers"] or "*",
    )


def check_gate(gate: DiffGate, layers: Sequence[ComparedLayer]) -> Verdict:
    """Whether no layer that a gate is about falls below its limit. A layer that could
    not be compared fails each gate: its shapes differ, or it differs in an image of
    which the number is not known.

    Raises:
        UsageError: there is no such layer, or the number of none is known, so that the
            gate could never fail.
    """
    measure = MEASURES[gate.measure]
    lowest = math.inf
    failed = []
    unknown_layers = []
    known_keys = set()
    for layer in _matching_layers(gate, layers):
        value = measure.of_layer(layer)
        fault = _fault_of(layer, value, gate.limit, measure.unit)
        if fault is not None:
            failed.append(f"{layer.label} ({fault})")
        elif _lacks(layer, measure):
            unknown_layers.append(layer)
        if not math.isnan(value):
            known_keys.add(layer.key)
            lowest = min(lowest, value)
    if not known_keys and not failed:
        raise UsageError(
            f"--fail-on {gate.text!r}: the {gate.measure} of no layer is known",
            measure.remedy,
        )
    note = ""
    for layer in unknown_layers:
        # No file shows a token beside a grid by itself: the tensor that it is a piece of
        # is judged without it.
        whole_key = layer.key._replace(key=layer.key.key.rpartition(".")[0])
        if whole_key != layer.key and whole_key in known_keys:
            note = f"; the {gate.measure} of single tokens is not known"
        else:
            failed.append(f"{layer.label} ({gate.measure} not known)")
            note = f"; {measure.remedy}"
    message = f"{listed(failed, _NAMED)} below {gate.limit:g}{measure.unit}"
    if not failed:
        message = f"lowest {lowest:.4g}{measure.unit}"
        if lowest == math.inf:
            message = "nothing differs"
    return Verdict(gate.text, not failed, message + note)


def _fault_of(
    layer: ComparedLayer, value: float, limit: float, unit: str
) -> str | None:
    """Why a layer fails a gate, for a message; None where it does not, as far as is
    known.

    Args:
        value: the gate's measure of the layer; NaN where it is not known.
        limit: below which the gate fails.
        unit: of both, with a space before it, or empty.
    """
    if layer.reason is not None:
        return layer.reason
    # both measures pass over such values
    if layer.channels.unlike.any():
        return "values that are finite in one run alone"
    if value < limit:
        return f"{value:.4g}{unit}"
    return None


def _lacks(layer: ComparedLayer, measure: Measure) -> bool:
    """Whether a layer differs in an image of which the number is not known."""
    images = layer.images.values()
    return any(image.differing and measure.of_image(image) is None for image in images)


def _matching_layers(
    gate: DiffGate, layers: Sequence[ComparedLayer]
) -> list[ComparedLayer]:
    """The layers that a gate is about; UsageError where there is none."""
    matching = []
    for layer in layers:
        # as a selector: `layer4.*` by name, `Conv2d` by type
        names = (layer.label, layer.type)
        if any(fnmatchcase(name, gate.layers) for name in names):
            matching.append(layer)
    if not matching:
        labels = listed([layer.label for layer in layers], 8)
        raise UsageError(
            f"--fail-on {gate.text!r}: no compared layer is called {gate.layers!r}",
            f"there is {labels}",
        )
    return matching
