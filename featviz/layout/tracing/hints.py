"""Hints at the layout of each layer's tensors: read from the model's modules, overridden by
`--tensor-layout`, with what was followed in a forward pass.

Only the model knows whether the first token stands for a class. Parameters and modules are known by
the names under which torchvision and timm keep them; a module that has none gives no hint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor, nn

from featviz.errors import LayoutError
from featviz.hooks import selectors
from featviz.hooks.functions import placed
from featviz.hooks.layers import list_layers
from featviz.layout.tracing import guess
from featviz.layout.tracing.fields import Views
from featviz.layout.tracing.follow import Follower, Listener
from featviz.records import KINDS, CaptureSite, Hints, Layer, Trace

_PREFIX_TOKENS = {
    "class_token": re.compile(r"(cls|class)(_?(token|embedding|embed))?"),
    "distillation_token": re.compile(r"dist(illation)?_?token"),
    "register_tokens": re.compile(r"(reg|register|storage)_?tokens?"),
}
"""Names of parameters that become tokens in front of the grid, in the order in which they stand."""

_CHANNELS_FIRST = (
    *(nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm),
    *(nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd),
    *(nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd),
)

_FEATURES_LAST = ("Linear", "LayerNorm", "RMSNorm")
"""Ends of the names of classes whose last axis are features, timm's and transformers' included."""

_ATTENTION = ("attn", "attention", "crpe")
"""In the names of attentions, and of CoaT's positional encoding, which takes what they do."""

_OFFSETS = re.compile(r"(cpb_|rel_pos\.)mlp")
"""In the names of networks that turn offsets between tokens, [1, h, w, 2], into biases."""


class HintBook:
    """The hints for each layer of a model that sees inputs of one shape."""

    def __init__(
        self, model: nn.Module, input_shape: Sequence[int], overrides: Sequence[str] = ()
    ) -> None:
        """Read the hints of a model's modules, for an input [1, C, H, W], or a clip [1, C, T, H, W]
        or, where the first convolution says so, [1, T, C, H, W]; and values of `--tensor-layout`.
        """
        self.input_shape = tuple(input_shape)
        self._by_module = read_hints(model, self.input_shape)
        self._overrides = [guess.parse_override(text) for text in overrides]
        self._by_layer: dict[str, Hints] = {}
        self._by_tensor: dict[tuple[str, str, str, torch.Size], Hints] = {}
        self._origins: dict[tuple[str, tuple[int, ...]], dict[tuple[str, str], Trace]] = {}
        self._views: dict[tuple[str, int, str], Views] = {}
        """What was followed: see `Follower`."""
        self.is_traced = False
        """Whether a forward pass has been followed, or need not be."""
        self.depends_on_origins = False
        """Whether a tensor was asked for whose layout its trace decides."""

    def of_layer(self, layer: Layer) -> Hints:
        """The hints for a layer's tensors, as far as its module gives them."""
        if layer.name not in self._by_layer:
            hints = self._by_module.get(layer.owner, Hints())
            if layer.is_function:
                hints = replace(hints, channels=None, features_last=False)
            for chosen, name in self._overrides:
                if chosen is None or selectors.select([layer], chosen):
                    hints = replace(hints, override=name)
            self._by_layer[layer.name] = hints
        return self._by_layer[layer.name]

    def of_tensor(self, site: CaptureSite, tensor: Tensor) -> Hints:
        """The hints for one tensor of a layer, with what was followed in a forward pass."""
        if tensor.is_nested:  # has no shape
            return self.of_layer(site.layer)
        shape = tensor.shape
        name = (site.layer.name, site.kind, site.key, shape)
        if name not in self._by_tensor:
            hints = self.of_layer(site.layer)
            known = self._origins.get((site.layer.name, tuple(shape)), {})
            trace = known.get((KINDS[site.kind].of, site.key))
            if trace is not None:
                sides, grid = (tuple(shape[1:3]), tuple(shape[2:4])), trace.grid
                in_pieces = grid is not None and (shape[0] > 1 or grid[1:] not in sides)
                self.depends_on_origins |= in_pieces or len(shape) == 3
                self.depends_on_origins |= trace.is_weights or hints.in_attention
                hints = replace(hints, trace=trace)
            with suppress(LayoutError):
                hints = replace(hints, arrangement=guess.recognise(shape, hints))
            if not self.is_traced:
                return hints
            self._by_tensor[name] = hints
        return self._by_tensor[name]

    def of_shape(self, layer: Layer, shape: Sequence[int], side: str = "output") -> Hints:
        """The hints for the first tensor of this shape that a layer gave, or took (`input`)."""
        found = self._origins.get((layer.name, tuple(shape)), {})
        origins = (trace for (at, _), trace in found.items() if at == side)
        return replace(self.of_layer(layer), trace=next(origins, None))

    def views(self, site: CaptureSite) -> Views:
        """What each value of an output sees of the image; empty where nobody knows."""
        return self._views.get((site.layer.name, site.call, site.key), ())

    def settle_as(self, other: HintBook) -> None:
        """Follow no pass of this shape, where one of another shape was followed and the layout of
        no layer depends on it."""
        self.is_traced = other.is_traced and not other.depends_on_origins

    @contextmanager
    def traced(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        views: bool = False,
        listener: Listener | None = None,
    ) -> Iterator[None]:
        """Follow the image through the forward pass in this block, once for all passes, as far as
        tensors of these layers (and `views`, of what they see) will be asked for. Hooks that ask
        are placed inside the block, so that they are called later; `listener` takes all calls."""
        if self.is_traced:
            yield
            return
        wanted = {layer.name for layer in layers}
        mixers = {name for name, hints in self._by_module.items() if hints.token_count}
        follower = Follower(
            wanted,
            mixers,
            lambda layer: self._by_module.get(layer.owner, Hints()).in_attention,
            _channel_axis(model, self.input_shape)[1],
            {id(x) for x in (*model.parameters(), *model.buffers())} if views else None,
            listener,
        )
        self._origins, self._views = follower.origins, follower.views
        modules = list_layers(model)
        if listener is None:
            modules = [x for x in modules if x.name in wanted | mixers or not x.index]
        hear = follower.leave, follower.enter, modules, lambda layer: True
        with placed(model, *hear, opaque=(), first=True) as mode, mode:
            yield
        self.is_traced = True


# From modules


def read_hints(model: nn.Module, input_shape: tuple[int, ...]) -> dict[str, Hints]:
    """Read the hints for every module of a model, by qualified name."""
    first, axis = _channel_axis(model, input_shape)
    stride = first.stride[0] if isinstance(first, nn.Conv3d) else 1
    time = -(-input_shape[3 - axis] // stride) if len(input_shape) == 5 else None
    in_patches = first is not None and first.stride == first.kernel_size  # and do not overlap
    size: Any = tuple(input_shape[-2:])
    transforms = (x for x in model.children() if type(x).__name__ == "GeneralizedRCNNTransform")
    transform: Any = next(transforms, None)  # torchvision's detectors resize and pad images
    if len(input_shape) < 4 or size == (1, 1):  # no picture
        size = None
    elif transform is not None:
        sides = transform.fixed_size and transform.fixed_size[::-1]
        if sides is None:
            factor = min(transform.min_size[-1] / min(size), transform.max_size / max(size))
            sides = [int(side * factor) for side in size]
        step = transform.size_divisible
        size = tuple(ceil(side / step) * step for side in sides)
    parameters = [(name.rpartition(".")[2].lower(), p) for name, p in model.named_parameters()]
    prefix: list[str] = []
    for token, pattern in _PREFIX_TOKENS.items():
        found = (p for name, p in parameters if pattern.fullmatch(name))
        if (table := next(found, None)) is not None:  # [D], [K, D] or [1, K, D]
            prefix += [token] * (table.shape[-2] if table.ndim > 1 else 1)
    base = Hints(
        input_size=size,
        time_steps=time,
        patch_size=(first.stride[-2], first.stride[-1])
        if first is not None and in_patches
        else None,
        prefix_tokens=tuple(prefix),
        token_count=None if transform is None else 0,  # heads return rows of boxes, [1, N, 4]
    )
    by_name: dict[str, Hints] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, child = name.rpartition(".")
        above, kind = by_name.get(parent, base) if name else base, type(module).__name__
        channels: Literal["first", "last"] | None = "last" if _OFFSETS.search(name) else None
        is_attention = "Attention" in kind or any(word in child for word in _ATTENTION)
        tokens = None if name == "backbone" else above.token_count
        if name.endswith("_tokens"):  # mlp_tokens and linear_tokens of MLP-Mixers
            linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
            tokens = tokens if linear is None else linear.in_features
        by_name[name] = replace(
            above,
            in_attention=above.in_attention or is_attention,
            token_count=tokens,
            channels="first" if isinstance(module, _CHANNELS_FIRST) else channels,
            features_last=kind.endswith(_FEATURES_LAST),
        )
    return by_name


def _channel_axis(
    model: nn.Module, shape: Sequence[int]
) -> tuple[nn.Conv2d | nn.Conv3d | None, int]:
    """The first convolution, and the axis of the input's channels: 1, but 2 for clips
    [1, T, C, H, W], as transformers has them; a Conv2d sees frames."""
    first = next((m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d))), None)
    if first is None or len(shape) != 5 or shape[2] != first.in_channels:
        return first, 1
    return first, 2 if isinstance(first, nn.Conv2d) or shape[1] != first.in_channels else 1
