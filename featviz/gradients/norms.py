"""Norms of gradients along the depth of a model: where they vanish, and where they explode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from featviz.records import Capture

VANISHING, EXPLODING = 1e-3, 1e3
"""Ratios to the layer nearest the output, below and above which a gradient is named."""


def norms(rows: Iterable[Capture]) -> dict[str, float]:
    """The length of the gradient at each layer's output, by layer.

    The Euclidean norm over all values of a call, from each row's count, mean and std; of several
    calls the last, which is the nearest to the target.

    Args:
        rows: of one image, in the order in which gradients arrive: from the target to the input.
            Rows of other kinds than `grad` are left out.

    Returns:
        Layers in the order in which the forward pass left them.
    """
    squares: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.kind == "grad" and row.mean is not None and row.std is not None:
            calls = squares.setdefault(row.layer or row.type, {})
            length = _values(row) * (row.mean**2 + row.std**2)
            calls[row.call] = calls.get(row.call, 0.0) + length
    lengths = {layer: math.sqrt(calls[max(calls)]) for layer, calls in squares.items()}
    return dict(reversed(lengths.items()))


def report(rows: Sequence[Capture]) -> str | None:
    """One line that names vanishing and exploding layers with their ratios; None where fewer than
    two layers have a gradient."""
    lengths = norms(rows)
    last = next((layer for layer in reversed(lengths) if lengths[layer] > 0), None)
    if last is None or len(lengths) < 2:
        return None
    ratios = {layer: norm / lengths[last] for layer, norm in lengths.items()}
    parts = [
        _named("vanishing", {k: v for k, v in ratios.items() if v < VANISHING}),
        _named("exploding", {k: v for k, v in ratios.items() if v > EXPLODING}),
    ]
    named = "; ".join(part for part in parts if part) or "none vanishes or explodes"
    least, most = min(ratios.values()), max(ratios.values())
    return f"gradient norms are {least:.2g} to {most:.2g} of that at {last}; {named}"


def _named(what: str, ratios: dict[str, float]) -> str:
    layers = ", ".join(f"{layer} ({ratio:.2g})" for layer, ratio in ratios.items())
    return f"{what}: {layers}" if layers else ""


def _values(row: Capture) -> int:
    """The finite values of a row: its maps, the slices of each, and the pixels of a slice."""
    if row.constant is not None:
        return row.maps * math.prod(row.constant)
    tile: Any = row.grid["tile"]
    scale: Any = row.grid["scale"]
    down, across = scale if isinstance(scale, list) else (scale, scale)
    slices = row.slices[1] if row.slices else 1
    return int(row.maps * slices * (tile[0] // down) * (tile[1] // across) - row.nonfinite)
