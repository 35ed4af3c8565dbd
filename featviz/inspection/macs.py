"""The cost of a forward pass: multiply-accumulates and activation memory of each module.

torch's FlopCounterMode counts operators; what it has counted when a module is entered and when it
is left tells the module's share, whatever the module does in place. It does not see inside
nn.MultiheadAttention's fast path, which must be off.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from featviz.hooks.containers import tensors
from featviz.hooks.running import Running
from featviz.records import Layer

FLOPS_PER_MAC = 2
"""One multiplication and one addition; FlopCounterMode leaves the addition of a bias out."""

_MOVES = """
    _local_scalar_dense _to_copy _unsafe_index _unsafe_view alias arange as_strided bernoulli cat
    clone col2im constant_pad_nd copy detach embedding empty empty_like empty_strided eye fill flip
    full full_like gather im2col index index_fill index_put index_select lift_fresh linspace
    masked_fill narrow_copy native_channel_shuffle new_empty new_empty_strided new_full new_ones
    new_zeros nonzero normal ones ones_like pixel_shuffle pixel_unshuffle rand rand_like randint
    randn randn_like randperm reflection_pad1d reflection_pad2d reflection_pad3d repeat
    repeat_interleave replication_pad1d replication_pad2d replication_pad3d resize roll
    scalar_tensor scatter select_scatter slice_scatter split_with_sizes_copy stack take tril triu
    uniform upsample_nearest1d upsample_nearest2d upsample_nearest3d where zero zeros zeros_like
"""
MOVES = frozenset(_MOVES.split())
"""Operators that make, move or choose values without computing with them, in place or not."""


@dataclass(frozen=True)
class Usage:
    """The cost of all calls of one module, modules inside it included."""

    calls: int = 0
    macs: int = 0
    own_macs: int = 0
    """Without those of the modules that it called."""
    memory: int = 0
    """Bytes returned by the calls inside which no other module ran, which may be this one."""
    input_shape: list[int] | None = None
    """Shape of the first tensor that the first call took; None where it took none, or a nested one,
    which has no shape."""
    output_shape: list[int] | None = None
    """Shape of the first tensor that the first call returned."""


@dataclass
class _Frame:
    """A module that is running: the counts when it was entered, and what ran inside it."""

    macs: int
    memory: int
    input_shape: list[int] | None
    macs_inside: int = 0
    """Those that are in the usage of some module."""
    alone: bool = True


class Meter:
    """Reads the counts at every module's entry and exit."""

    def __init__(self) -> None:
        self.usage: dict[int, Usage] = {}
        """By layer index; a layer that did not run is not in it."""
        self.memory = 0
        """Bytes returned so far by calls inside which no other module ran."""
        self.flops = FlopCounterMode(display=False)
        self.operators = _Uncounted()
        self._running: list[_Frame] = []

    @property
    def macs(self) -> int:
        """Multiply-accumulates so far."""
        total: int = self.flops.get_total_flops()
        return total // FLOPS_PER_MAC

    @property
    def uncounted(self) -> Mapping[str, int]:
        """Operators that compute and have no formula, with their calls, most frequent first."""
        return dict(sorted(self.operators.calls.items(), key=lambda item: (-item[1], item[0])))

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook."""
        if self._running:
            self._running[-1].alone = False
        shape = _shape_of_first(tensors([args, kwargs]))
        self._running.append(_Frame(self.macs, self.memory, shape))

    def leave(self, now: Callable[[], Layer], module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook; `now` tells the layer to which the call belongs."""
        index = now().index
        frame, given = self._running[-1], tensors(output)
        if frame.alone:
            self.memory += sum(_bytes(tensor) for tensor in given)
        macs = self.macs - frame.macs
        own = macs - frame.macs_inside
        frame.macs_inside = macs
        before = self.usage.get(index) or Usage(
            input_shape=frame.input_shape, output_shape=_shape_of_first(given)
        )
        self.usage[index] = replace(
            before,
            calls=before.calls + 1,
            macs=before.macs + macs,
            own_macs=before.own_macs + own,
            memory=before.memory + self.memory - frame.memory,
        )

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook behind `leave` that is always called: a call in which an exception was
        raised is none of the module's, and its own work counts as its caller's."""
        frame = self._running.pop()
        if self._running:
            self._running[-1].macs_inside += frame.macs_inside


@contextmanager
def metered(model: nn.Module, layers: Sequence[Layer]) -> Iterator[Meter]:
    """Measure what the layers of a model take, all of them; every hook is removed, whatever
    happens."""
    meter, running = Meter(), Running(model)
    with ExitStack() as stack:
        for module in model.modules():
            now = partial(running.now, running.places(module))
            enter = module.register_forward_pre_hook(meter.enter, prepend=True, with_kwargs=True)
            leave = module.register_forward_hook(partial(meter.leave, now))
            end = module.register_forward_hook(meter.end, always_call=True)
            for hook in (enter, leave, end):
                stack.callback(hook.remove)
        stack.enter_context(running.followed({layer.name for layer in layers}))
        # the inner one decomposes what the outer one sees
        with meter.operators, meter.flops:
            yield meter


class _Uncounted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that compute and have no formula."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._overloadpacket not in flop_registry and _computes(func):
            self.calls[plain_name(_name(func))] += 1
        return func(*args, **(kwargs or {}))


def _computes(func: Any) -> bool:
    moves = func.namespace == "prim" or _name(func) in MOVES
    return not (func.is_view or moves)


def _name(func: Any) -> str:
    """`relu` for `aten::relu` and `aten::relu_`, `torchvision::deform_conv2d` as it is."""
    name = str(func._overloadpacket.__name__).rstrip("_")
    return name if func.namespace == "aten" else f"{func.namespace}::{name}"


_VARIANT = re.compile(
    r"_?(?:native_|cudnn_|mkldnn_|miopen_)?(\w+?)(?:_legit)?(?:_no_training)?(?:_with_indices)?"
)


def plain_name(name: str) -> str:
    """`batch_norm` for torch's `_native_batch_norm_legit_no_training`, `softmax` for `_softmax`."""
    variant = _VARIANT.fullmatch(name)
    return variant[1] if variant else name


def _shape_of_first(given: Sequence[Tensor]) -> list[int] | None:
    return list(given[0].shape) if given and not given[0].is_nested else None


def _bytes(tensor: Tensor) -> int:
    """The size of a tensor's values; those of a nested one are counted part by part."""
    parts = tensor.unbind() if tensor.is_nested else [tensor]
    return sum(part.numel() * part.element_size() for part in parts)
