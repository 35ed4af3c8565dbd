"""Hints at the layout of tensors, read from a model's modules.

Only the model knows whether the first token stands for a class, and only the block that cut a map
into windows knows how they lie. Attributes are read by the names under which torchvision and timm
keep them; a module that has none gives no hint.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil, prod
from typing import Any, Literal

from torch import Tensor, nn

from featviz.layout import windows
from featviz.records import Hints

_PREFIX_TOKENS = {
    "class_token": re.compile(r"(cls|class)(_?(token|embedding|embed))?"),
    "distillation_token": re.compile(r"dist(illation)?_?token"),
    "register_tokens": re.compile(r"(reg|register|storage)_?tokens?"),
}
"""Names of parameters that become tokens in front of the grid, in the order in which they stand."""

_CHANNELS_FIRST = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.GroupNorm,
)
"""torch's own modules whose channels are the axis behind the batch."""

_FEATURES_LAST = ("Linear", "LayerNorm", "RMSNorm")
"""Ends of the names of classes whose last axis are features, timm's and transformers' included."""

_ATTENTION = ("attn", "attention", "crpe")
"""In the names of attentions, and of CoaT's positional encoding, which takes what they do."""

_POSITION_NETWORK = re.compile(r"(cpb_|rel_pos\.)mlp")
"""In the names of networks that turn offsets between tokens, [1, h, w, 2], into biases."""


def read(model: nn.Module, input_shape: tuple[int, ...]) -> dict[str, Hints]:
    """Read the hints for every module of a model, by qualified name.

    Args:
        input_shape: [1, C, H, W], or [1, C, T, H, W] for a clip.
    """
    first = next((m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d))), None)
    time = -(-input_shape[2] // _temporal_stride(first)) if len(input_shape) == 5 else None
    size = _seen_size(model, (input_shape[-2], input_shape[-1]))
    base = Hints(
        input_size=size,
        time=time,
        patch=_patch(first),
        prefix=_prefix(model),
        tokens=_none_in_heads(model),
    )
    cuts = windows.read(model)
    by_name: dict[str, Hints] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent = by_name.get(name.rpartition(".")[0], base) if name else base
        by_name[name] = replace(
            parent,
            windows=cuts[name],
            attention=parent.attention or _is_attention(name, module),
            tokens=None if name == "backbone" else _mixed(name, module) or parent.tokens,
            unrolled=_unrolled(model, name) or parent.unrolled,
            channels=_channels(name, module),
            features_last=type(module).__name__.endswith(_FEATURES_LAST),
        )
    return by_name


def _detector(model: nn.Module) -> nn.Module | None:
    """The module of torchvision's detectors that resizes and pads images; None in other models."""
    name = "GeneralizedRCNNTransform"
    return next((part for part in model.children() if type(part).__name__ == name), None)


def _none_in_heads(model: nn.Module) -> int | None:
    """0 tokens in a detector, whose heads return rows of boxes, [1, N, 4]; else None: unknown."""
    return None if _detector(model) is None else 0


def _seen_size(model: nn.Module, size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the image as the layers see it."""
    transform = _detector(model)
    return size if transform is None else _as_detectors_resize(transform, size)


def _as_detectors_resize(transform: Any, size: tuple[int, int]) -> tuple[int, int]:
    if transform.fixed_size is not None:
        width, height = transform.fixed_size
    else:
        shortest, longest = transform.min_size[-1], transform.max_size
        factor = min(shortest / min(size), longest / max(size))
        height, width = int(size[0] * factor), int(size[1] * factor)
    step = transform.size_divisible
    return ceil(height / step) * step, ceil(width / step) * step


def _prefix(model: nn.Module) -> tuple[str, ...]:
    """A name for each token in front of the grid, from the model's parameters."""
    parameters = [(name.rpartition(".")[2].lower(), p) for name, p in model.named_parameters()]
    names: list[str] = []
    for token, pattern in _PREFIX_TOKENS.items():
        counts = [_rows(p) for name, p in parameters if pattern.fullmatch(name)]
        names += [token] * (counts[0] if counts else 0)
    return tuple(names)


def _rows(parameter: Tensor) -> int:
    """How many tokens a parameter [D], [K, D] or [1, K, D] stands for."""
    return parameter.shape[-2] if parameter.ndim > 1 else 1


def _temporal_stride(first: nn.Conv2d | nn.Conv3d | None) -> int:
    return first.stride[0] if isinstance(first, nn.Conv3d) else 1


def _patch(first: nn.Conv2d | nn.Conv3d | None) -> tuple[int, int] | None:
    """Sides of the patches that a first convolution cuts; None if its windows overlap."""
    if first is None or first.stride != first.kernel_size:
        return None
    return first.stride[-2], first.stride[-1]


def _is_attention(name: str, module: nn.Module) -> bool:
    child = name.rpartition(".")[2]
    return "Attention" in type(module).__name__ or any(word in child for word in _ATTENTION)


def _channels(name: str, module: nn.Module) -> Literal["first", "last"] | None:
    if isinstance(module, _CHANNELS_FIRST):
        return "first"
    return "last" if _POSITION_NETWORK.search(name) else None


def _mixed(name: str, module: nn.Module) -> int | None:
    """How many tokens a module mixes (`mlp_tokens`, `linear_tokens` in the MLP-Mixers)."""
    if not name.endswith("_tokens"):
        return None
    first = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
    return None if first is None else first.in_features


def _unrolled(model: nn.Module, name: str) -> tuple[int, int] | None:
    """Height and width of the grid that is left after the last pooling, where a module holds tokens
    in the order in which they are pooled, as Hiera's blocks do; else None."""
    unroll = getattr(model, "unroll", None)
    size, schedule = (getattr(unroll, key, None) for key in ("size", "schedule"))
    if name not in ("unroll", "blocks") or size is None or schedule is None or len(size) != 2:
        return None
    high, wide = (size[i] // prod(strides[i] for strides in schedule) for i in (0, 1))
    return high, wide
