"""How blocks cut their map into windows: read from the attributes of torchvision's and timm's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import nn

from featviz.records import Windows


def read(model: nn.Module) -> dict[str, Windows | None]:
    """The windows that stand in the output of each module, by qualified name."""
    inside: dict[str, Windows | None] = {}
    found: dict[str, Windows | None] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, own = name.rpartition(".")
        inherited = inside.get(parent) if name and not _is_bias(own) else None
        block = model.get_submodule(parent) if name else model
        found[name] = _of_child(block, own) or inherited
        inside[name] = _of_block(module, found[name])
    return found


def _is_bias(own: str) -> bool:
    """A network for the positions in a window sees no map."""
    return "rel_pos" in own or "cpb" in own


def _of_block(module: nn.Module, inherited: Windows | None) -> Windows | None:
    """How the layers inside this module see their map."""
    for reader in (_maxvit_of_torchvision, _maxvit_of_timm, _swin):
        if (cut := reader(module)) is not None:
            return _with_shift(module, cut, inherited)
    return inherited


def _with_shift(module: nn.Module, cut: Windows, inherited: Windows | None) -> Windows:
    """Swin's block knows of the shift, the attention in it only of the windows."""
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


def _of_child(block: nn.Module, own: str) -> Windows | None:
    """Children that alone see the windows of their block."""
    reader = _CHILDREN.get((type(block).__name__, own))
    return None if reader is None else reader(block)


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
"""By the class of the block and the name of its child."""


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
