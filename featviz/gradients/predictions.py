"""A model's output in words: the most likely classes, and how far two outputs are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from featviz.errors import LayoutError
from featviz.gradients.targets import output_at
from featviz.layout import to_floats
from featviz.records import Guess


def top_classes(
    output: Any, categories: Sequence[str] | None = None, scores: str | None = "", count: int = 5
) -> tuple[Guess, ...]:
    """The likeliest classes of an output [1, K], K > 1; empty for any other output, and for one
    that has no finite real scores.

    Args:
        scores: where in the output the scores of classes are, as `LoadedModel.scores` says.
    """
    if scores != "":
        output = None if scores is None else output_at(output, scores)
    if not isinstance(output, Tensor) or output.ndim != 2:
        return ()
    try:
        rows = to_floats(output.detach()).cpu()
    except LayoutError:
        return ()
    if rows.shape[0] != 1 or rows.shape[1] < 2 or not rows.isfinite().all():
        return ()
    values = rows[0]
    names = categories if categories and len(categories) == len(values) else None
    shares, order = values.softmax(0), values.topk(min(count, len(values))).indices.tolist()
    return tuple(
        Guess(i, names[i] if names else None, float(values[i]), float(shares[i])) for i in order
    )


def largest_change(before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[float | None, int]:
    """Compare the tensors of two outputs.

    Returns:
        The largest absolute difference of the values that are finite in both; and how many values
        are NaN or infinite in one of the outputs and something else in the other. None and 0 where
        there are no tensors, their shapes differ, or one is complex, sparse, nested or without
        values.
    """
    if not before:
        return None, 0
    try:
        first, second = ([_doubles(tensor) for tensor in output] for output in (before, after))
    except LayoutError:
        return None, 0
    if [tensor.shape for tensor in first] != [tensor.shape for tensor in second]:
        return None, 0
    largest, unlike = 0.0, 0
    for one, other in zip(first, second, strict=True):
        finite = one.isfinite() & other.isfinite()
        same = (one == other) | (one.isnan() & other.isnan())
        if finite.any():
            largest = max(largest, float((one - other).abs()[finite].max()))
        unlike += int((~finite & ~same).sum())
    return largest, unlike


def _doubles(tensor: Tensor) -> Tensor:
    """The values in float64, dequantised; raises LayoutError as `to_floats` does."""
    tensor = tensor.detach()
    floats = to_floats(tensor)
    return (floats if tensor.is_quantized else tensor).cpu().double()
