"""From a layer's tensor to maps [N, H, W]: one function for each shape family.

A wrong guess would draw noise without complaint, so a shape that no layout knows is refused with
a reason instead.
"""

from __future__ import annotations

from collections.abc import Callable
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


def to_maps(tensor: Tensor) -> Maps:
    """Find the layout of a tensor and turn it into maps.

    Raises:
        LayoutError: complex, sparse or empty tensors, and shapes that no layout knows.
    """
    values = _real(tensor)
    layout = _guess(values)
    return LAYOUTS[layout](values)


def nchw(tensor: Tensor) -> Maps:
    """[1, C, H, W] to C maps [H, W], the rows of torchvision's [C, 1, H, W]."""
    return Maps("nchw", tensor[0])


def vector(tensor: Tensor) -> Maps:
    """[1, F] or [F] to F maps of one number each, drawn as one strip."""
    return Maps("vector", tensor.reshape(-1, 1, 1), strip=True)


LAYOUTS: dict[str, Callable[[Tensor], Maps]] = {"nchw": nchw, "vector": vector}


def _guess(tensor: Tensor) -> str:
    shape = list(tensor.shape)
    if tensor.numel() == 0:
        raise LayoutError(f"shape {shape} holds no values")
    if tensor.dim() == 1:
        return "vector"
    if tensor.dim() in (2, 4) and shape[0] == 1:
        return "nchw" if tensor.dim() == 4 else "vector"
    raise LayoutError(f"shape {shape} is neither [1, C, H, W] nor [1, F]")


def _real(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        raise LayoutError(f"holds complex numbers ({tensor.dtype})")
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        raise LayoutError(f"is stored as {tensor.layout}, not as a dense tensor")
    return tensor.float().resolve_neg()
