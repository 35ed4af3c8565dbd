"""From a layer's tensor to maps [C, S, H, W].

A wrong guess would draw noise without complaint, so a shape that no layout fits is refused with a
reason instead.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from featviz.errors import LayoutError
from featviz.layout.layouts import LAYOUTS, Arrangement, Maps
from featviz.layout.tracing.guess import channel_axis, map_size, recognise
from featviz.records import Hints

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Maps", "channel_axis", "map_size", "recognise", "to_floats", "to_maps"]


def to_maps(tensor: Tensor, hints: Hints | None = None) -> dict[str, Maps]:
    """Find the layout of a tensor and turn it into maps, under the empty key. Tokens before and
    behind the grid are under their names (`class_token`): each is a vector, several of a name its
    rows. LayoutError: the tensor has no real, dense values, or no layout fits its shape."""
    values, hints = to_floats(tensor), hints or Hints()
    form: Arrangement = hints.arrangement or recognise(list(values.shape), hints)
    found = {"": Maps(form.layout, LAYOUTS[form.layout].to_maps(values, form))}
    if not form.prefix + form.suffix:
        return found
    places = defaultdict[str, list[int]](list)
    for place, name in enumerate(form.prefix):
        places[name].append(place)
    for place, name in enumerate(form.suffix, -len(form.suffix)):
        places[name].append(place)
    if form.trace is not None:  # in front of each piece
        *pieces, axis = form.trace.axes
        channels = [i for i in range(values.ndim) if i not in form.trace.axes]
        tokens = values.permute(axis, *pieces, *channels)
        tokens = tokens.reshape(*tokens.shape[: 1 + len(pieces)], -1)
    else:
        axis = LAYOUTS[form.layout].token_axis or 0
        tokens = values.movedim(axis, 1)[0].flatten(1)
    for name, at in places.items():
        rows = tokens[at].flatten(0, -2)
        found[name] = Maps("vector", LAYOUTS["vector"].to_maps(rows, Arrangement("vector")))
    return found


def to_floats(tensor: Tensor) -> Tensor:
    """The values of a tensor of any kind as float32, in its shape, dequantised; LayoutError for
    complex numbers, and for a tensor that is not dense or has no values."""
    if tensor.is_complex():
        raise LayoutError(f"holds complex numbers ({tensor.dtype})")
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_nested:
        raise LayoutError("is a nested tensor, not a dense one")
    if (storage := str(tensor.layout)) != "torch.strided":
        raise LayoutError(f"is stored as {storage}, not as a dense tensor")
    if tensor.is_meta:
        raise LayoutError("is on the device meta, where tensors have no values")
    try:
        return tensor.float().resolve_neg()
    except RuntimeError:  # NotImplementedError, too
        raise LayoutError(f"holds {tensor.dtype}, which torch cannot turn into floats") from None
