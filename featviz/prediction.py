"""What a model says of an image: its most likely classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

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


def largest_change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float | None:
    """Largest absolute difference between the tensors of two outputs; None where their number or
    shapes differ, or there are none."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return None
    pairs = zip(before, after, strict=True)
    changes = [(a.cpu().double() - b.cpu().double()).abs() for a, b in pairs if a.numel()]
    return max((float(change.max()) for change in changes), default=None)
