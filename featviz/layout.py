"""From a layer's tensor to maps [N, H, W]: one function for each shape family.

A wrong guess would draw noise without complaint, so a shape that no layout knows is refused with
a reason instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featviz.errors import LayoutError


@dataclass(frozen=True)
class Maps:
    """The maps of one tensor; `data` is float32 [N, H, W] and may be a view of the tensor."""

    layout: str
    data: Tensor
    strip: bool = False
    """Drawn as one row without padding: the numbers of a vector."""


Size = tuple[int, int]


def to_maps(tensor: Tensor, input_size: Size | None = None) -> Maps:
    """Find the layout of a tensor and turn it into maps.

    Args:
        input_size: height and width of the model's input, which tell channels-first from
            channels-last; without it [1, A, B, C] is taken as [1, C, H, W].

    Raises:
        LayoutError: complex, sparse or empty tensors, and shapes that no layout knows.
    """
    values = _real(tensor)
    return LAYOUTS[guess(list(values.shape), input_size)](values)


def nchw(tensor: Tensor) -> Maps:
    """[1, C, H, W] to C maps [H, W], the rows of torchvision's [C, 1, H, W]."""
    return Maps("nchw", tensor[0])


def vector(tensor: Tensor) -> Maps:
    """[1, F] or [F] to F maps of one number each, drawn as one strip."""
    return Maps("vector", tensor.reshape(-1, 1, 1), strip=True)


def nhwc(tensor: Tensor) -> Maps:
    """[1, H, W, C], as in Swin, to C maps [H, W]."""
    return Maps("nhwc", tensor[0].permute(2, 0, 1).contiguous())


LAYOUTS: dict[str, Callable[[Tensor], Maps]] = {"nchw": nchw, "nhwc": nhwc, "vector": vector}


def guess(shape: Sequence[int], input_size: Size | None = None) -> str:
    """The layout of a shape.

    Channels-last is told by proportion: its first two sizes have the input's, as maps do, and its
    last two have not.

    Raises:
        LayoutError: no values, or no layout that fits.
    """
    if 0 in shape:
        raise LayoutError(f"shape {list(shape)} holds no values")
    if len(shape) == 1 or (len(shape) == 2 and shape[0] == 1):
        return "vector"
    if len(shape) == 4 and shape[0] == 1:
        last = _in_proportion(shape[1], shape[2], input_size)
        return "nhwc" if last and not _in_proportion(shape[2], shape[3], input_size) else "nchw"
    raise LayoutError(f"shape {list(shape)} is neither [1, C, H, W] nor [1, F]")


def channels_first(shape: Sequence[int], input_size: Size | None) -> list[int]:
    """A shape as [1, C, H, W], whichever of the two it is; others as they are."""
    known = len(shape) == 4 and shape[0] == 1 and 0 not in shape
    if known and guess(shape, input_size) == "nhwc":
        return [1, shape[3], shape[1], shape[2]]
    return list(shape)


def _in_proportion(height: int, width: int, input_size: Size | None) -> bool:
    """Whether a map has the input's proportions, but for a pixel of rounding."""
    if input_size is None:
        return False
    return abs(width - height * input_size[1] / input_size[0]) <= 1


def _real(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        raise LayoutError(f"holds complex numbers ({tensor.dtype})")
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        raise LayoutError(f"is stored as {tensor.layout}, not as a dense tensor")
    return tensor.float().resolve_neg()
