"""What a model says of an image: its most likely classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from featviz.hooks import leaves
from featviz.records import Guess


def top_classes(
    output: Any, categories: Sequence[str] | None = None, count: int = 5
) -> tuple[Guess, ...]:
    """The likeliest classes of an output [1, K], K > 1; empty for any other output."""
    if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[0] != 1:
        return ()
    scores = output[0].detach().float().cpu()
    if len(scores) < 2 or not scores.isfinite().all():
        return ()
    names = categories if categories and len(categories) == len(scores) else None
    shares, order = scores.softmax(0), scores.topk(min(count, len(scores))).indices.tolist()
    return tuple(
        Guess(i, names[i] if names else None, float(scores[i]), float(shares[i])) for i in order
    )


def largest_change(before: Any, after: Any) -> float | None:
    """Largest absolute difference between two outputs; None where their shapes differ."""
    pairs = list(zip(_tensors(before), _tensors(after), strict=False))
    if not pairs or any(a.shape != b.shape for a, b in pairs):
        return None
    return max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs)


def _tensors(output: Any) -> Iterator[Tensor]:
    for _, value in leaves(output):
        if isinstance(value, Tensor):
            yield value.detach().double()
