"""What a model's modules say of the layout of the tensors inside them.

A token is a token: only the model knows whether the first one stands for a class, and only the
block that cut a map into windows knows how they lie. Attributes are read by the names under which
torchvision and timm keep them; a module that has none gives no hint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from featviz.records import Hints, Windows

_PREFIX_TOKENS = {
    "class_token": re.compile(r"(cls|class)(_?(token|embedding|embed))?"),
    "distillation_token": re.compile(r"dist(illation)?_?token"),
    "register_tokens": re.compile(r"(reg|register|storage)_?tokens?"),
}
"""Names of parameters that become tokens in front of the grid, in the order in which they stand."""


@dataclass(frozen=True)
class Arrangement:
    """The hints for every module of a model, by qualified name."""

    by_name: dict[str, Hints]

    def hints(self, name: str) -> Hints:
        """Of the module with this qualified name."""
        return self.by_name.get(name, Hints())


def read(model: nn.Module, frames: int | None = None) -> Arrangement:
    """Read what a model's modules say.

    Args:
        frames: time steps of the clip that the model is shown; None for a picture.
    """
    first = next((m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d))), None)
    time = None if frames is None else -(-frames // _temporal_stride(first))
    base = Hints(time=time, patch=_patch(first), prefix=_prefix(model))
    found: dict[str, Hints] = {}
    windows: dict[str, Windows | None] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, own = name.rpartition(".")
        inherited = windows.get(parent) if name else None
        windows[name] = _inside(module, inherited)
        at = _before_swap(model, parent, own) or inherited
        hints = found.get(parent, base) if name else base
        attention = hints.attention or _is_attention(own, module)
        found[name] = replace(base, windows=at, attention=attention)
    return Arrangement(found)


def _prefix(model: nn.Module) -> tuple[str, ...]:
    parameters = [(name.rpartition(".")[2].lower(), p) for name, p in model.named_parameters()]
    names: list[str] = []
    for token, pattern in _PREFIX_TOKENS.items():
        counts = [_rows(p) for name, p in parameters if pattern.fullmatch(name)]
        names += [token] * (counts[0] if counts else 0)
    return tuple(names)


def _rows(parameter: Tensor) -> int:
    """Tokens that a parameter [D], [K, D] or [1, K, D] stands for."""
    return parameter.shape[-2] if parameter.ndim > 1 else 1


def _temporal_stride(first: nn.Conv2d | nn.Conv3d | None) -> int:
    return first.stride[0] if isinstance(first, nn.Conv3d) else 1


def _patch(first: nn.Conv2d | nn.Conv3d | None) -> tuple[int, int] | None:
    """Sides of the patches that a first convolution cuts; None if its windows overlap."""
    if first is None or first.stride != first.kernel_size:
        return None
    return first.stride[-2], first.stride[-1]


def _is_attention(name: str, module: nn.Module) -> bool:
    return "Attention" in type(module).__name__ or "attn" in name or "attention" in name


def _inside(module: nn.Module, inherited: Windows | None) -> Windows | None:
    """How what is inside this module sees its map: as the module cuts it, else as around it.

    Swin's attention repeats its block's window size; only the block knows the shift.
    """
    repeats = inherited is not None and not hasattr(module, "shift_size")
    return inherited if repeats else _cut_by(module) or inherited


def _cut_by(module: nn.Module) -> Windows | None:
    """How the layers inside this module see their map; None if it cuts none."""
    for reader in (_maxvit_of_torchvision, _maxvit_of_timm, _swin):
        if (windows := reader(module)) is not None:
            return windows
    return None


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
    return Windows((g, g), strided=True) if kind == "grid" else Windows((p, p))


def _before_swap(model: nn.Module, parent: str, own: str) -> Windows | None:
    """torchvision's MaxViT cuts neighbouring windows for its grid, and then swaps two axes."""
    if own not in ("partition_op", "departition_swap"):
        return None
    block = model.get_submodule(parent)
    p = getattr(block, "p", None)
    return Windows((p, p)) if isinstance(p, int) else None


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
