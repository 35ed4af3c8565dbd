"""From a layer's tensor to maps [C, S, H, W].

A wrong guess would draw noise without complaint, so a shape that no layout knows is refused with
a reason instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from featviz.errors import LayoutError
from featviz.layout.families import FAMILIES, Maps, beside
from featviz.layout.guess import channel_axis, check_layout, map_size, recognise
from featviz.records import Hints

__all__ = ["Maps", "channel_axis", "check_layout", "map_size", "recognise", "to_floats", "to_maps"]


def to_maps(tensor: Tensor, hints: Hints | None = None) -> dict[str, Maps]:
    """Find the layout of a tensor and turn it into maps.

    Returns:
        The maps under the empty key; tokens that are not part of the grid, drawn as vectors,
        under their names (`class_token`).

    Raises:
        LayoutError: tensors without real, dense values, and shapes that no layout knows.
    """
    values = to_floats(tensor)
    form = recognise(list(values.shape), hints or Hints())
    return {"": FAMILIES[form.layout](values, form), **beside(values, form)}


def to_floats(tensor: Tensor) -> Tensor:
    """The values of a tensor of any kind as float32, in its shape; dequantised.

    Raises:
        LayoutError: complex numbers, or a tensor that is not dense or has no values.
    """
    if tensor.is_complex():
        raise LayoutError(f"holds complex numbers ({tensor.dtype})")
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_nested:
        raise LayoutError("is a nested tensor, not a dense one")
    if tensor.layout != torch.strided:
        raise LayoutError(f"is stored as {tensor.layout}, not as a dense tensor")
    if tensor.is_meta:
        raise LayoutError("is on the device meta, where tensors have no values")
    try:
        return tensor.float().resolve_neg()
    except RuntimeError:  # NotImplementedError, too
        raise LayoutError(f"holds {tensor.dtype}, which torch cannot turn into floats") from None
