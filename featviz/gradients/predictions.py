"""A model's output in words: the most likely classes, and how far two outputs are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from featviz.gradients.targets import names_of, output_at
from featviz.records import Guess


def top_classes(
    output: Any, categories: Sequence[str] | None = None, scores: str | None = "", count: int = 5
) -> tuple[Guess, ...]:
    """The likeliest classes of an output [1, K], K > 1; empty for any other output.

    Args:
        scores: where in the output the scores of classes are, as `LoadedModel.scores` says.
    """
    if scores is None:
        return ()
    output = output_at(output, scores)
    if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[0] != 1:
        return ()
    values = output[0].detach().float().cpu()
    if len(values) < 2 or not values.isfinite().all():
        return ()
    names = names_of(len(values), categories)
    shares, order = values.softmax(0), values.topk(min(count, len(values))).indices.tolist()
    return tuple(
        Guess(i, names[i] if names else None, float(values[i]), float(shares[i])) for i in order
    )


def largest_change(before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[float | None, int]:
    """Compare the tensors of two outputs.

    Returns:
        The largest absolute difference of the values that are finite in both, None where there are
        no tensors or their shapes differ; and how many values are NaN or infinite in one of the
        outputs and something else in the other.
    """
    if [t.shape for t in before] != [t.shape for t in after]:
        return None, 0
    pairs = zip(before, after, strict=True)
    changes = [_difference(a.detach().cpu().double(), b.detach().cpu().double()) for a, b in pairs]
    largest = max((change for change, _ in changes), default=None)
    return largest, sum(unlike for _, unlike in changes)


def _difference(before: Tensor, after: Tensor) -> tuple[float, int]:
    finite = before.isfinite() & after.isfinite()
    same = (before == after) | (before.isnan() & after.isnan())
    change = (before - after).abs()[finite]
    return float(change.max()) if len(change) else 0.0, int((~finite & ~same).sum())
