"""Gates: limits on how far layers may be apart, which the user sets: `sqnr<20`.

Gates replace the rule that nothing may differ. A quantized model differs in every channel,
and is still good if no layer is below its limit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from featviz.diff.comparison import ComparedTensor, ImageChange
from featviz.errors import UsageError
from featviz.records import Verdict
from featviz.text import did_you_mean, listed

# tensors that the message of a gate names
_NAMED = 3


@dataclass(frozen=True)
class Measure:
    """A number of a compared tensor that gates limit from below."""

    of_tensor: Callable[[ComparedTensor], float]
    """The number over all images; NaN if it is not known."""
    of_image: Callable[[ImageChange], float | None]
    """The number in one image; None if it is not known."""
    unit: str
    """The unit with a space before it; empty for none."""
    remedy: str
    """The hint of messages: what makes the number known."""


MEASURES = {
    "sqnr": Measure(
        # of pictures it is NaN: their grey levels have noise of their own
        of_tensor=lambda tensor: tensor.sqnr,
        of_image=lambda image: image.sqnr,
        unit=" dB",
        remedy="run both with --tensors npy, which keeps the values themselves",
    ),
    "cosine": Measure(
        of_tensor=lambda tensor: tensor.cosine,
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
    """A limit below which no tensor of some layers may fall."""

    text: str
    """As the user typed it."""
    measure: str
    """A key of MEASURES."""
    limit: float
    layers: str
    """A pattern (`fnmatch`) of names or types of layers; `*` is all of them."""


def parse_gate(text: str) -> DiffGate:
    """Read `[LAYERS:]MEASURE<NUMBER`.

    Args:
        text: a value of `--fail-on`; `dB` may stand behind the number.

    Raises:
        UsageError: the text has another form, or there is no such measure.
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


def check_gate(gate: DiffGate, tensors: Sequence[ComparedTensor]) -> Verdict:
    """Whether no tensor of the gate's layers is below the limit. A tensor also fails if it
    could not be compared, or if it differs in an image in which the number is not known.

    Args:
        tensors: all compared tensors.

    Raises:
        UsageError: the gate names none of their layers, or its number is known of none of
            them. Then the gate could never fail.
    """
    measure = MEASURES[gate.measure]
    failed = []
    unknown = []
    known_values = {}
    for tensor in _matching(gate, tensors):
        value = measure.of_tensor(tensor)
        fault = _fault_of(tensor, value, gate.limit, measure.unit)
        if fault is not None:
            failed.append(f"{tensor.label} ({fault})")
        elif _is_unknown_where_changed(tensor, measure):
            unknown.append(tensor)
        if not math.isnan(value):
            known_values[tensor.key] = value
    if not known_values and not failed:
        raise UsageError(
            f"--fail-on {gate.text!r}: the {gate.measure} of no layer is known",
            measure.remedy,
        )
    note = ""
    for tensor in unknown:
        # A single token has no file of its own, and its number is never known. If the
        # number of the rest of its tensor is known, only that decides.
        whole_key = tensor.key._replace(key=tensor.key.key.rpartition(".")[0])
        if whole_key != tensor.key and whole_key in known_values:
            note = f"; the {gate.measure} of single tokens is not known"
        else:
            failed.append(f"{tensor.label} ({gate.measure} not known)")
            note = f"; {measure.remedy}"
    message = f"{listed(failed, _NAMED)} below {gate.limit:g}{measure.unit}"
    if not failed:
        lowest = min(known_values.values())
        message = f"lowest {lowest:.4g}{measure.unit}"
        if lowest == math.inf:
            message = "nothing differs"
    return Verdict(gate.text, not failed, message + note)


def _fault_of(
    tensor: ComparedTensor, value: float, limit: float, unit: str
) -> str | None:
    """Why a tensor fails a gate, for a message; None if it does not fail, or if its value
    is not known.

    Args:
        value: the gate's measure of the tensor; NaN if it is not known.
        limit: the limit of the gate; a value below it fails.
        unit: the unit of `value` and `limit`, with a space before it; empty for none.
    """
    if tensor.reason is not None:
        return tensor.reason
    # cosine and SQNR are computed without values that are not finite
    if tensor.channels.unlike.any():
        return "values that are finite in one run alone"
    if value < limit:
        return f"{value:.4g}{unit}"
    return None


def _is_unknown_where_changed(tensor: ComparedTensor, measure: Measure) -> bool:
    """Whether a tensor differs in an image in which the measure is not known."""
    images = tensor.images.values()
    return any(image.differing and measure.of_image(image) is None for image in images)


def _matching(
    gate: DiffGate, tensors: Sequence[ComparedTensor]
) -> list[ComparedTensor]:
    """The tensors of the layers that a gate names.

    Raises:
        UsageError: there are none.
    """
    matching = []
    for tensor in tensors:
        # as selectors do: `layer4.*` by name, `Conv2d` by type
        names = (tensor.label, tensor.type)
        if any(fnmatchcase(name, gate.layers) for name in names):
            matching.append(tensor)
    if not matching:
        labels = listed([tensor.label for tensor in tensors], 8)
        raise UsageError(
            f"--fail-on {gate.text!r}: no compared layer is called {gate.layers!r}",
            f"there is {labels}",
        )
    return matching
