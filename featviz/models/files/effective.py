"""Weights as a model computes with them, from what pruning, norms and wrappers keep instead.

The arithmetic is that of torch.nn.utils: `prune`, `weight_norm` and `spectral_norm` of both
generations, in eval mode; and that of quantised tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from featviz.text import counted

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch.compile, FSDP and activation checkpointing put into the names of a part."""

_PARALLEL = ".module."
"""What DataParallel puts into the names of a part of a model, if that part alone is in it."""

_PARAMETRIZED = ".parametrizations."
"""What torch.nn.utils.parametrize puts before the name of a tensor."""

Tensors = dict[str, Tensor]


def unwrapped_names(tensors: Mapping[str, Tensor]) -> tuple[Tensors, list[str]]:
    """Names without the wrappers of parts of the model; also returns what was done, in words."""
    return _without(tensors, _WRAPPERS)


def without_parallel(tensors: Mapping[str, Tensor]) -> tuple[Tensors, list[str]]:
    """Names without DataParallel around parts of the model; also returns what was done."""
    renamed, steps = {k.replace(_PARALLEL, "."): v for k, v in tensors.items()}, []
    if len(renamed) != len(tensors) or renamed.keys() == tensors.keys():
        return dict(tensors), []
    steps.append("took 'module.' out of names")
    return renamed, steps


_PACKED = "._packed_params._packed_params"
"""What stands for weight and bias of a linear layer that quantize_dynamic has packed."""
_BESIDE_PACKED = (".scale", ".zero_point", "._packed_params.dtype")


def unpacked(content: Any) -> tuple[Any, list[str]]:
    """A state dict whose linear layers torch.ao.quantization.quantize_dynamic has packed, with
    their weights as floats; also returns what was done. Any other content stays as it is."""
    if not isinstance(content, Mapping):
        return content, []
    packed = {k: v for k, v in content.items() if isinstance(k, str) and k.endswith(_PACKED)}
    static = any(isinstance(v, Tensor) and v.is_quantized for v in content.values())
    if static or not packed or not all(map(_is_packed_pair, packed.values())):
        return content, []
    layers = {key.removesuffix(_PACKED): pair for key, pair in packed.items()}
    gone = {f"{layer}{end}" for layer in layers for end in (_PACKED, *_BESIDE_PACKED)}
    plain = {key: value for key, value in content.items() if key not in gone}
    for layer, (weight, bias) in layers.items():
        plain[f"{layer}.weight"] = _float(weight)
        if bias is not None:
            plain[f"{layer}.bias"] = bias
    return plain, [f"dequantised {counted(len(layers), 'weight')}"]


def _is_packed_pair(value: Any) -> bool:
    pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor)
    return pair and (value[1] is None or isinstance(value[1], Tensor))


def _float(weight: Tensor) -> Tensor:
    return weight.dequantize() if weight.is_quantized else weight.float()


def effective(
    tensors: Mapping[str, Tensor], transposed: Collection[str] = ()
) -> tuple[Tensors, list[str]]:
    """Pruned, weight-normed and spectral-normed weights as the model uses them.

    What does not have the shapes that torch.nn.utils gives it stays as it is.

    Args:
        transposed: names of weights of transposed convolutions, whose spectral norm is that of the
            matrix of their output channels, which are their second axis.

    Returns:
        The tensors, and what was done, in words.
    """
    plain = dict(tensors)
    counts: dict[str, int] = defaultdict(int)
    for name, parts in _groups(tensors).items():
        for words, needs, compute in _KINDS:
            if parts.keys() == needs:
                weight = compute({k: tensors[v] for k, v in parts.items()}, name in transposed)
                if weight is not None:
                    for part in parts.values():
                        del plain[part]
                    plain[name] = weight
                    counts[words] += 1
    return plain, [words.format(counted(count, "weight")) for words, count in counts.items()]


def _without(tensors: Mapping[str, Tensor], wrappers: tuple[str, ...]) -> tuple[Tensors, list[str]]:
    renamed, steps = dict(tensors), []
    for wrapper in wrappers:
        if any(wrapper in name for name in renamed):
            renamed = {name.replace(wrapper, ""): v for name, v in renamed.items()}
            steps.append(f"took {wrapper!r} out of names")
    return (renamed, steps) if len(renamed) == len(tensors) else (dict(tensors), [])


def _groups(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, str]]:
    """What is kept in place of each weight: its name, to kinds of parts and their names."""
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for name in tensors:
        before, new, rest = name.rpartition(_PARAMETRIZED)
        if new:
            weight, _, part = rest.partition(".")
            groups[f"{before}.{weight}"][f".{part}"] = name
            continue
        weight, underscore, part = name.rpartition("_")
        if underscore and part in _SUFFIXES:
            groups[weight][part] = name
    return groups


_SUFFIXES = ("orig", "mask", "u", "v", "g")


def _masked(parts: Mapping[str, Tensor], transposed: bool) -> Tensor | None:
    weight, mask = parts["orig"], parts["mask"]
    return weight * mask.to(weight.dtype) if weight.shape == mask.shape else None


def _normed(direction: Tensor, length: Tensor) -> Tensor | None:
    """v · g / ‖v‖: the norm is over the axes along which g has one value."""
    if not (direction.is_floating_point() and length.is_floating_point()):
        return None
    if length.ndim == 0:
        whole: Tensor = torch.linalg.vector_norm(direction)
        return direction * (length / whole)
    if length.ndim != direction.ndim:
        return None
    sizes = list(zip(length.shape, direction.shape, strict=True))
    if any(a not in (1, b) for a, b in sizes):
        return None
    axes = [axis for axis, (a, _) in enumerate(sizes) if a == 1]
    norm = torch.linalg.vector_norm(direction, dim=axes, keepdim=True) if axes else direction.abs()
    return direction * (length / norm)


def _divided(weight: Tensor, u: Tensor, v: Tensor, transposed: bool) -> Tensor | None:
    """W / σ with σ = uᵀ W v, W as a matrix of its output channels."""
    if not weight.is_floating_point() or u.ndim != 1 or v.ndim != 1:
        return None
    axes = (1, 0) if transposed else (0, 1)
    for axis in axes[: weight.ndim]:
        if (
            axis < weight.ndim
            and weight.shape[axis] == len(u)
            and len(u) * len(v) == weight.numel()
        ):
            matrix = weight.movedim(axis, 0).reshape(len(u), -1)
            sigma = torch.dot(u.to(matrix.dtype), torch.mv(matrix, v.to(matrix.dtype)))
            return weight / sigma
    return None


_MASKED = "multiplied {} by the masks of pruning"
_NORMED = "computed {} of weight norm"
_DIVIDED = "divided {} by their spectral norm"

_KINDS = (
    (_MASKED, {"orig", "mask"}, _masked),
    (_NORMED, {"g", "v"}, lambda p, transposed: _normed(p["v"], p["g"])),
    (_DIVIDED, {"orig", "u", "v"}, lambda p, t: _divided(p["orig"], p["u"], p["v"], t)),
    (
        _NORMED,
        {".original0", ".original1"},
        lambda p, transposed: _normed(p[".original1"], p[".original0"]),
    ),
    (
        _DIVIDED,
        {".original", ".0._u", ".0._v"},
        lambda p, t: _divided(p[".original"], p[".0._u"], p[".0._v"], t),
    ),
)
"""What is done, the parts that are kept in place of a weight, and the weight of them."""
