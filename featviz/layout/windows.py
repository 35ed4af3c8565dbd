"""Windows: how a model's blocks cut a map into them, and how they are put back into the map.

The first half reads the attributes of torchvision's and timm's blocks, the second knows shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from featviz.layout.token_grids import Size, TokenGrid, map_sizes
from featviz.records import Origin, Windows

if TYPE_CHECKING:
    from torch import Tensor, nn


def read(model: nn.Module) -> dict[str, Windows | None]:
    """How the output of each module is cut into windows, if it is, by qualified name."""
    inside: dict[str, Windows | None] = {}
    by_name: dict[str, Windows | None] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, child = name.rpartition(".")
        inherited = inside.get(parent) if name and not _is_bias(child) else None
        block = model.get_submodule(parent) if name else model
        reader = _CHILDREN.get((type(block).__name__, child))
        by_name[name] = (reader(block) if reader is not None else None) or inherited
        inside[name] = _in_block(module, by_name[name])
    return by_name


def _is_bias(name: str) -> bool:
    """Whether a module is a network for the positions in a window, which sees no map."""
    return "rel_pos" in name or "cpb" in name


def _in_block(module: nn.Module, inherited: Windows | None) -> Windows | None:
    """How the layers inside a module see their map."""
    for reader in (_maxvit_of_torchvision, _maxvit_of_timm, _swin):
        if (cut := reader(module)) is not None:
            return _with_shift(module, cut, inherited)
    return inherited


def _with_shift(module: nn.Module, cut: Windows, inherited: Windows | None) -> Windows:
    """Add the shift of Swin's block to the windows of the attention inside it, which lacks it."""
    if hasattr(module, "shift_size") or inherited is None or inherited.size != cut.size:
        return cut
    return replace(cut, shift=inherited.shift)


def _swin(module: nn.Module) -> Windows | None:
    """timm's Swin (all versions), and others that keep their `window_size` in this way."""
    size = _pair(getattr(module, "window_size", None))
    shift = _pair(getattr(module, "shift_size", 0))
    if size is None or shift is None:
        return None
    return Windows(size, shift=shift)


def _maxvit_of_timm(module: nn.Module) -> Windows | None:
    size = _pair(getattr(module, "partition_size", None))
    block = getattr(module, "partition_block", None)
    if size is None or not isinstance(block, bool):
        return None
    return Windows(size, strided=not block)


def _maxvit_of_torchvision(module: nn.Module) -> Windows | None:
    kind, p, g = (getattr(module, name, None) for name in ("partition_type", "p", "g"))
    if kind not in ("grid", "window") or not isinstance(p, int) or not isinstance(g, int):
        return None
    if kind == "grid":
        return Windows((g, g), strided=True, axes="1nsc")
    return Windows((p, p), axes="1nsc")


def _before_swap(block: nn.Module) -> Windows | None:
    """torchvision's MaxViT cuts neighbouring windows for its grid, and then swaps two axes."""
    p = getattr(block, "p", None)
    return Windows((p, p), axes="1nsc") if isinstance(p, int) else None


def _nest(block: nn.Module) -> Windows | None:
    size = _pair(getattr(block, "block_size", None))
    return None if size is None else Windows(size, axes="1nsc")


def _mobilevit(block: nn.Module) -> Windows | None:
    size = _pair(getattr(block, "patch_size", None))
    return None if size is None else Windows(size, axes="snc")


def _mobilevit_v2(block: nn.Module) -> Windows | None:
    size = _pair(getattr(block, "patch_size", None))
    return None if size is None else Windows(size, axes="1csn")


_CHILDREN: dict[tuple[str, str], Callable[[nn.Module], Windows | None]] = {
    ("PartitionAttentionLayer", "partition_op"): _before_swap,
    ("PartitionAttentionLayer", "departition_swap"): _before_swap,
    ("NestLevel", "transformer_encoder"): _nest,
    ("MobileVitBlock", "transformer"): _mobilevit,
    ("MobileVitBlock", "norm"): _mobilevit,
    ("MobileVitV2Block", "transformer"): _mobilevit_v2,
    ("MobileVitV2Block", "norm"): _mobilevit_v2,
}
"""Children that alone see the windows of their block, by the class of the block and their name."""


def _pair(value: object) -> tuple[int, int] | None:
    sides = tuple(_ints(value))
    if len(sides) == 1:
        return sides[0], sides[0]
    return (sides[0], sides[1]) if len(sides) == 2 else None


def _ints(value: object) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (tuple, list)) and all(isinstance(v, int) for v in value):
        yield from value


def count(shape: Sequence[int], windows: Windows) -> int:
    """How many windows a tensor of this shape holds; 0 if it does not hold such windows."""
    places, size = windows.size[0] * windows.size[1], windows.size
    if windows.axes:
        named = (
            dict(zip(windows.axes, shape, strict=True)) if len(windows.axes) == len(shape) else {}
        )
        fits = named.get("s") == places and named.get("1", 1) == 1
        return named["n"] if fits else 0
    rest = tuple(shape[1:])
    if (len(shape) == 3 and rest[0] == places) or (
        len(shape) == 4 and size in (rest[:2], rest[1:])
    ):
        return shape[0] if shape[0] > 1 else 0
    return 0


def channel_axis(shape: Sequence[int], windows: Windows) -> int:
    """The axis of a tensor of windows that counts channels."""
    if windows.axes:
        return windows.axes.index("c")
    return 1 if len(shape) == 4 and tuple(shape[1:3]) != windows.size else len(shape) - 1


def map_size(number: int, windows: Windows, input_size: Size) -> Size | None:
    """Height and width of the map that was cut into `number` windows, without its padding."""
    height, width = windows.size
    for high, wide in map_sizes(input_size):
        whole = high % height == 0 and wide % width == 0
        if -(-high // height) * -(-wide // width) == number and (whole or not windows.strided):
            return high, wide
    return None


def join(tensor: Tensor, windows: Windows, grid: TokenGrid) -> Tensor:
    """Put windows back into their map: [C, H, W].

    Neighbouring windows stand where they were cut out; strided ones are interleaved. What padded
    the map to whole windows is cut off, and a map that was rolled before is rolled back.
    """
    height, width = windows.size
    rows, columns = -(-grid.height // height), -(-grid.width // width)
    parts = _in_usual_order(tensor, windows).reshape(rows, columns, height, width, -1)
    order = (4, 2, 0, 3, 1) if windows.strided else (4, 0, 2, 1, 3)
    joined = parts.permute(order).reshape(-1, rows * height, columns * width)
    joined = joined[:, : grid.height, : grid.width]
    return joined.roll(windows.shift, (1, 2)) if any(windows.shift) else joined.contiguous()


def _in_usual_order(tensor: Tensor, windows: Windows) -> Tensor:
    """[n, a·b, C] or [n, a, b, C]: windows, their places, channels."""
    if windows.axes:
        places = [windows.axes.index(letter) for letter in "nsc"]
        return tensor.permute([i for i in range(tensor.ndim) if i not in places] + places)
    if tensor.ndim == 4 and tensor.shape[1:3] != windows.size:
        return tensor.permute(0, 2, 3, 1)
    return tensor


def channels_of_pieces(shape: Sequence[int], origin: Origin) -> int:
    """The axis of pieces of a map that counts channels."""
    return next(i for i in range(len(shape)) if i not in origin.axes and shape[i] > 1)


def join_pieces(tensor: Tensor, origin: Origin) -> Tensor:
    """Put each value of a tensor back into its place in the map: [C, H, W]; padding goes."""
    assert origin.grid is not None and origin.places is not None
    _, height, width = origin.grid
    channel = channels_of_pieces(tensor.shape, origin)
    rest = [i for i in range(tensor.ndim) if i not in origin.axes and i != channel]
    rows = tensor.permute(channel, *rest, *origin.axes).reshape(tensor.shape[channel], -1)
    known = origin.places >= 0
    joined = tensor.new_empty(len(rows), height * width)
    joined[:, origin.places[known]] = rows[:, known]
    return joined.reshape(-1, height, width)
