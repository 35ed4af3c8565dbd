"""Hints at the layout of each layer's tensors: they are read from the model's modules,
overridden by `--tensor-layout`, and completed by traces from a forward pass.

Only the model knows whether the first token is a class token. Parameters and modules are
recognised by the names that torchvision and timm give them; a module without such a name
gives no hint."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from featviz.errors import LayoutError
from featviz.hooks import selectors
from featviz.hooks.functions import watch_calls
from featviz.hooks.layers import computed_by, list_layers
from featviz.layout.layouts import LAYOUTS, Size
from featviz.layout.tracing import guess
from featviz.layout.tracing.fields import ReceptiveField
from featviz.layout.tracing.follow import Follower, Listener, TraceKey
from featviz.records import KINDS, CaptureSite, Hints, Layer, Trace

log = logging.getLogger(__name__)

_PREFIX_TOKENS = {
    "class_token": re.compile(r"(cls|class)(_?(token|embedding|embed))?"),
    "distillation_token": re.compile(r"dist(illation)?_?token"),
    "register_tokens": re.compile(r"(reg|register|storage)_?tokens?"),
}
"""Names of parameters that become tokens in front of the grid, in the order of these
tokens."""

_CHANNELS_FIRST = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
)

_FEATURES_LAST = ("Linear", "LayerNorm", "RMSNorm")
"""Ends of the names of classes whose outputs have features along the last axis, also in
timm and transformers."""

_ATTENTION = re.compile("attn|attention|crpe")
"""Found in the names of attention modules, and of CoaT's positional encoding, which takes
the same tensors."""

_OFFSETS = re.compile(r"(cpb_|rel_pos\.)mlp")
"""Found in the names of networks that turn offsets between tokens, [1, h, w, 2], into
biases."""


class HintBook:
    """The hints for each layer of a model that sees inputs of one shape."""

    def __init__(
        self,
        model: nn.Module,
        input_shape: Sequence[int],
        overrides: Sequence[str] = (),
    ) -> None:
        """Read the hints of a model's modules.

        Args:
            input_shape: [1, C, H, W], or [1, C, T, H, W] or [1, T, C, H, W] of a clip; the
                first convolution tells which (see `_channel_axis`).
            overrides: values of `--tensor-layout`; the last that matches a layer
                counts.
        """
        self.input_shape = tuple(input_shape)
        self._by_module = read_hints(model, self.input_shape)
        self._overrides = [guess.parse_override(text) for text in overrides]
        self._by_layer: dict[str, Hints] = {}
        self._by_tensor: dict[tuple[str, str, str, torch.Size], Hints] = {}
        self._explained: set[tuple[str, str, str, torch.Size]] = set()
        """Tensors whose layout was logged."""
        self._follower: Follower | None = None
        self.follows_fields = False
        """Whether `traced` is to fill `field_lines`; the caller sets it before `traced`."""
        self.field_lines: dict[tuple[str, int, str], list[int]] = {}
        """Receptive fields as `Capture.receptive_field`, by layer, call and key of an
        output."""
        self.is_traced = False
        """Whether a forward pass has been followed, or none needs to be."""
        self.depends_on_traces = False
        """Whether `of_tensor` was called for a tensor whose layout its trace decides."""

    def of_layer(self, layer: Layer) -> Hints:
        """The hints for all tensors of a layer: those of its module, and of
        `--tensor-layout`, without traces."""
        if layer.name in self._by_layer:
            return self._by_layer[layer.name]
        hints = self._by_module.get(layer.owner, Hints())
        if layer.is_function:
            # a function inside a convolution module may return anything, for example
            # its weights in another shape
            hints = replace(hints, channels=None, border=1, features_last=False)
        for override in self._overrides:
            chosen = override.selectors
            if chosen is None or selectors.select([layer], chosen):
                hints = replace(hints, override=override.layout)
        self._by_layer[layer.name] = hints
        return hints

    def of_tensor(self, site: CaptureSite, tensor: Tensor) -> Hints:
        """The hints for one tensor of a layer, with its trace and its arrangement. If no
        layout fits, the arrangement is missing.

        Args:
            site: where the tensor was captured. The number of the call does not count: the
                tensors of one shape are read alike in all calls.
            tensor: only its shape counts. A nested tensor has none, and gets the hints of
                its layer.
        """
        if tensor.is_nested:
            return self.of_layer(site.layer)
        shape = tensor.shape
        name = (site.layer.name, site.kind, site.key, shape)
        if name in self._by_tensor:
            return self._by_tensor[name]
        hints = self.of_layer(site.layer)
        key = TraceKey(side=KINDS[site.kind].of, key=site.key, shape=tuple(shape))
        trace = self._traces(site.layer).get(key)
        if trace is not None:
            hints = replace(hints, trace=trace)
            self.depends_on_traces |= _is_decided_by_trace(shape, hints, trace)
        reason = "no layout fits"
        with suppress(LayoutError):  # `to_maps` will raise it again
            arrangement, reason = guess.decide(shape, hints)
            hints = replace(hints, arrangement=arrangement)
            reason = f"{arrangement.layout}, since {reason}"
        if name not in self._explained:
            self._explained.add(name)
            log.debug("%s %s %s: %s", site.layer.label, site.stem, list(shape), reason)
        # until the followed pass has ended, a later call may still bring a trace
        if self.is_traced:
            self._by_tensor[name] = hints
        return hints

    def of_shape(
        self, layer: Layer, shape: Sequence[int], side: str = "output"
    ) -> Hints:
        """The hints for a layer's tensor of this shape, with the trace of the first such
        tensor.

        Args:
            side: `output`, or `input` for a tensor among the layer's arguments.
        """
        hints = self.of_layer(layer)
        for key, trace in self._traces(layer).items():
            if key.side == side and key.shape == tuple(shape):
                return replace(hints, trace=trace)
        return hints

    def receptive_field(self, site: CaptureSite) -> ReceptiveField | None:
        """What each position of an output's maps sees of the image, all channels
        together.

        Returns:
            None if a function on the way cannot be followed, for clips, and if `traced`
            did not follow receptive fields.

        Raises:
            LayoutError: the output makes no maps.
        """
        fields = {} if self._follower is None else self._follower.fields
        edges = []
        for table in fields.get((site.layer.name, site.call, site.key), ()):
            hints = self.of_tensor(site, table)
            arrangement = guess.recognise(table.shape, hints)
            axis = guess.channel_axis(table.shape, hints)
            if axis is not None and table.stride(axis) == 0:
                # expanded: all channels are the same. Two are kept, since one might not
                # be seen as a channel axis.
                table = table.narrow(axis, 0, min(2, table.shape[axis]))
            maps = LAYOUTS[arrangement.layout].to_maps(table, arrangement)
            if maps.shape[1] == 1:
                edges.append(
                    maps.amin(0)[0]
                )  # the box around the boxes of all channels
        return ReceptiveField(torch.stack(edges)) if edges else None

    def settle_as(self, other: HintBook) -> None:
        """Let `traced` follow no pass, if the other book, for another input shape, followed
        one, and no layout depended on it: following a pass takes as long as the pass."""
        self.is_traced = other.is_traced and not other.depends_on_traces

    @contextmanager
    def traced(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        fields: bool = False,
        listener: Listener | None = None,
    ) -> Iterator[None]:
        """Follow the image through the forward pass that runs in this block. Only the first
        block follows a pass; later ones do nothing. Hooks that need hints must be placed
        inside the block: then they run after the hooks that follow.

        Args:
            layers: layers whose tensors need hints.
            fields: whether `receptive_field` will be called, too.
            listener: is told of all calls of modules and functions.
        """
        # a model that another library computes (ONNX) calls no functions of torch: its
        # layouts are read from shapes
        is_followed = computed_by(model) is None
        if self.is_traced or not (is_followed or listener):
            self.is_traced = True
            yield
            return
        follower = self._new_follower(model, layers, fields, listener)
        self._follower = follower if is_followed else None
        # hooks cost time: without a listener, only the layers in question get some
        modules = list_layers(model)
        if listener is None:
            names = {"", *follower.layer_names, *follower.mixer_names}
            modules = [layer for layer in modules if layer.name in names]
        placing = watch_calls(
            model,
            follower.leave,
            follower.enter,
            modules,
            functions=lambda layer: True,
            opaque=(),
            first=True,
        )
        with placing as mode, mode:
            yield
        self.is_traced = True
        if self.follows_fields:
            self._keep_lines(follower, layers)

    def _new_follower(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        fields: bool,
        listener: Listener | None,
    ) -> Follower:
        """A follower for one pass. The arguments are those of `traced`."""
        constants = None
        if fields or self.follows_fields:
            constants = set(map(id, (*model.parameters(), *model.buffers())))
        return Follower(
            layer_names={layer.name for layer in layers},
            mixer_names={
                name for name, hints in self._by_module.items() if hints.token_count
            },
            in_attention=lambda layer: self.of_layer(layer).in_attention,
            channel_axis=_channel_axis(_first_convolution(model), self.input_shape),
            constants=constants,
            listener=listener,
        )

    def _keep_lines(self, follower: Follower, layers: Sequence[Layer]) -> None:
        """Keep the receptive field of each output as six numbers (`ReceptiveField.lines`),
        and drop the follower's tables, which take much memory."""
        by_name = {layer.name: layer for layer in layers}
        for name, call, key in follower.fields:
            site = CaptureSite(by_name[name], "output", call, key)
            with suppress(LayoutError):  # an output without maps has no field
                field = self.receptive_field(site)
                lines = None if field is None else field.lines(self.input_shape[-2:])
                if lines is not None:
                    self.field_lines[name, call, key] = lines
        follower.fields.clear()

    def _traces(self, layer: Layer) -> dict[TraceKey, Trace]:
        """The traces of a layer's tensors; none before a pass was followed."""
        if self._follower is None:
            return {}
        return self._follower.traces.get(layer.name, {})


def _is_decided_by_trace(shape: Sequence[int], hints: Hints, trace: Trace) -> bool:
    """Whether the trace might decide on another layout than the shape alone. Then a pass
    has to be followed for each input shape."""
    # tokens, and what may be the weights of an attention
    if len(shape) == 3 or trace.is_weights or hints.in_attention:
        return True
    # the shape shows a map whose rows and columns are those of the image, but windows
    # need the trace
    sizes = (tuple(shape[1:3]), tuple(shape[2:4]))
    return trace.grid is not None and (shape[0] > 1 or trace.grid[1:] not in sizes)


# From modules


def read_hints(model: nn.Module, input_shape: tuple[int, ...]) -> dict[str, Hints]:
    """Read the hints for every module of a model, by qualified name.

    Args:
        input_shape: see `HintBook`.
    """
    by_name = {"": _of_model(model, input_shape)}
    border_before = 1
    for name, module in model.named_modules(remove_duplicate=False):
        outer = by_name[name.rpartition(".")[0]]
        hints = _of_module(name, module, outer)
        # an activation or a norm takes the maps of the convolution before it
        border = _border(module) or border_before
        by_name[name] = replace(hints, border=border)
        if not list(module.children()):
            border_before = border
    return by_name


def _of_model(model: nn.Module, input_shape: tuple[int, ...]) -> Hints:
    """The hints that hold for all modules.

    Args:
        input_shape: see `HintBook`.
    """
    first = _first_convolution(model)
    time_steps = patch_size = None
    if len(input_shape) == 5:
        stride = first.stride[0] if isinstance(first, nn.Conv3d) else 1
        time_steps = ceil(input_shape[3 - _channel_axis(first, input_shape)] / stride)
    # only a convolution whose windows do not overlap makes patches
    if first is not None and first.stride == first.kernel_size:
        patch_size = first.stride[-2], first.stride[-1]
    transform = _detection_transform(model)
    return Hints(
        input_size=_input_size(input_shape, transform),
        time_steps=time_steps,
        patch_size=patch_size,
        prefix_tokens=_prefix_tokens(model),
        # 0: the heads of detectors return rows of boxes [1, N, 4], which are not tokens
        token_count=None if transform is None else 0,
    )


def _of_module(name: str, module: nn.Module, outer: Hints) -> Hints:
    """The hints for a module, without `border`.

    Args:
        name: the module's qualified name.
        outer: the hints for the module that contains it, most of which it inherits.
    """
    class_name = type(module).__name__
    child_name = name.rpartition(".")[2]
    channels = getattr(module, "channel_order", None)
    if isinstance(module, _CHANNELS_FIRST):
        channels = "first"
    elif _OFFSETS.search(name):
        channels = "last"
    token_count = None if name == "backbone" else outer.token_count
    if name.endswith("_tokens"):  # mlp_tokens and linear_tokens of MLP-Mixers
        for inner in module.modules():
            if isinstance(inner, nn.Linear):
                token_count = inner.in_features
                break
    is_attention = "Attention" in class_name or bool(_ATTENTION.search(child_name))
    return replace(
        outer,
        in_attention=outer.in_attention or is_attention,
        token_count=token_count,
        channels=channels,
        features_last=class_name.endswith(_FEATURES_LAST),
    )


def _border(module: nn.Module) -> int:
    """How far padding reaches into the maps of a module, in pixels of these maps: half of
    the kernel's extent, summed over all convolutions in the module; 0 without any."""
    border = 0
    for inner in module.modules():
        if isinstance(inner, nn.modules.conv._ConvNd):
            axes = zip(inner.kernel_size, inner.dilation, inner.stride, strict=True)
            border += max(
                ceil(dilation * (size - 1) // 2 / stride)
                for size, dilation, stride in axes
            )
    return border


def _prefix_tokens(model: nn.Module) -> tuple[str, ...]:
    """A name for each of the model's own tokens: `class_token`, four times
    `register_tokens`."""
    names = []
    for token, pattern in _PREFIX_TOKENS.items():
        for name, parameter in model.named_parameters():
            if pattern.fullmatch(name.rpartition(".")[2].lower()):
                # [D], [K, D] or [1, K, D]
                names += [token] * (parameter.shape[-2] if parameter.ndim > 1 else 1)
                break
    return tuple(names)


def _detection_transform(model: nn.Module) -> Any:
    """The module that resizes and pads images in torchvision's detectors; None in other
    models."""
    for child in model.children():
        if type(child).__name__ == "GeneralizedRCNNTransform":
            return child
    return None


def _input_size(input_shape: tuple[int, ...], transform: Any) -> Size | None:
    """Height and width in pixels of the image that the layers see; None if the input is
    not an image.

    Args:
        input_shape: shape of the model's input.
        transform: torchvision's GeneralizedRCNNTransform, with which a detector resizes
            and pads its input; None in other models.
    """
    height, width = input_shape[-2:] if len(input_shape) > 3 else (1, 1)
    if (height, width) == (1, 1):
        return None
    if transform is None:
        return height, width
    if transform.fixed_size:
        width, height = transform.fixed_size
    else:
        shorter, longer = sorted((height, width))
        factor = min(transform.min_size[-1] / shorter, transform.max_size / longer)
        height = int(height * factor)
        width = int(width * factor)
    step = transform.size_divisible
    return ceil(height / step) * step, ceil(width / step) * step


def _first_convolution(model: nn.Module) -> nn.Conv2d | nn.Conv3d | None:
    """The first convolution in the order of modules, which probably sees the image.
    Transposed convolutions do not count, as in `models.presets.first_layer`."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            return module
    return None


def _channel_axis(
    first: nn.Conv2d | nn.Conv3d | None, input_shape: Sequence[int]
) -> int:
    """The axis of the input's channels: 2 for clips [1, T, C, H, W], as transformers has
    them, else 1.

    Args:
        first: the model's first convolution, which knows how many channels it takes; None
            if the model has none.
        input_shape: see `HintBook`.
    """
    if first is None or len(input_shape) != 5 or input_shape[2] != first.in_channels:
        return 1
    # Both axes may have the length of the channels. A Conv2d sees frames, a Conv3d clips
    # [1, C, T, H, W].
    is_ambiguous = input_shape[1] == first.in_channels
    return 1 if is_ambiguous and isinstance(first, nn.Conv3d) else 2
