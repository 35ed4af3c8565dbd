"""From a layer's tensor to maps [C, S, H, W].

A wrong guess would draw noise without complaint, so a shape that no layout fits is
refused with a reason instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from featviz.errors import LayoutError
from featviz.layout.layouts import LAYOUTS, Arrangement, Maps
from featviz.layout.tracing.guess import channel_axis, map_size, recognise
from featviz.records import Hints

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Maps", "channel_axis", "map_size", "recognise", "to_floats", "to_maps"]


def to_maps(tensor: Tensor, hints: Hints | None = None) -> dict[str, Maps]:
    """Find the layout of a tensor and turn it into maps.

    Args:
        tensor: of any real type, of one image.
        hints: on its layout; those of a `HintBook` hold the layout that was decided on.

    Returns:
        The maps under the key "". Tokens before and behind the grid are under their names
        (`class_token`), as vectors: several tokens of one name are the rows of one.

    Raises:
        LayoutError: the values are complex or not dense, or no layout fits the shape.
    """
    values = to_floats(tensor)
    hints = hints or Hints()
    # in a run, only the first tensor of a shape has to be recognised
    arrangement = hints.arrangement or recognise(values.shape, hints)
    layout = LAYOUTS[arrangement.layout]
    by_name = {"": Maps(layout.name, layout.to_maps(values, arrangement))}
    if arrangement.prefix or arrangement.suffix:
        by_name |= _tokens_beside(values, arrangement)
    return by_name


def _tokens_beside(values: Tensor, arrangement: Arrangement) -> dict[str, Maps]:
    """The tokens before and behind the grid, by name, as vectors: several tokens of one
    name are the rows of one."""
    if arrangement.trace is None:
        token_axis = LAYOUTS[arrangement.layout].token_axis or 0
        tokens = values.movedim(token_axis, 1)[0].flatten(1)
    else:  # each piece has such tokens in front
        *piece_axes, token_axis = arrangement.trace.axes
        axes = [token_axis, *piece_axes]
        tokens = values.movedim(axes, list(range(len(axes))))
        tokens = tokens.reshape(*tokens.shape[: len(axes)], -1)
    numbered = [
        *enumerate(arrangement.prefix),
        *enumerate(arrangement.suffix, -len(arrangement.suffix)),
    ]
    vector = LAYOUTS["vector"]
    by_name = {}
    for name in dict.fromkeys(arrangement.prefix + arrangement.suffix):
        rows = [number for number, other in numbered if other == name]
        vectors = tokens[rows].flatten(0, -2)
        maps = vector.to_maps(vectors, Arrangement(vector.name))
        by_name[name] = Maps(vector.name, maps)
    return by_name


def to_floats(tensor: Tensor) -> Tensor:
    """The values of a tensor of any real type as float32, in its shape, dequantised.

    Raises:
        LayoutError: the tensor holds complex numbers, is not dense, or has no values. The
            message is the rest of a sentence that begins with the tensor's name.
    """
    if tensor.is_complex():
        raise LayoutError(f"holds complex numbers ({tensor.dtype})")
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_nested:
        raise LayoutError("is a nested tensor, not a dense one")
    if str(tensor.layout) != "torch.strided":
        raise LayoutError(f"is stored as {tensor.layout}, not as a dense tensor")
    if tensor.is_meta:
        raise LayoutError("is on the device meta, where tensors have no values")
    try:
        # torch negates lazily: without this, numpy would see the numbers unnegated
        return tensor.float().resolve_neg()
    except RuntimeError:  # NotImplementedError, too
        raise LayoutError(
            f"holds {tensor.dtype}, which torch cannot turn into floats"
        ) from None
