"""Running a model in eval mode and as it is written, and giving it back exactly as it
was."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

_COMPILED = "_compiled_call_impl"
"""Where nn.Module.compile puts the compiled call."""


@contextmanager
def in_eval_mode(model: nn.Module, gradients: bool = False) -> Iterator[None]:
    """Put the model into eval mode for a while.

    Compiled calls of modules (`nn.Module.compile`) and nn.MultiheadAttention's fast
    path would run past hooks that come later, so both are switched off. The caller's
    inference mode is switched off, too: parameters that a lazy module makes in the
    block may be trained later.

    Afterwards, also when the block raised, all of this is as before, and so are
    training modes, parameters that `eval` has changed, buffers, attributes (see
    `kept_attributes`) and the state of random number generators.

    Args:
        gradients: whether autograd records in the block.
    """
    # in this order: `train` and `eval` may set attributes, which go back last
    with (
        kept_attributes(model),
        _kept_values(model),
        _without_compiled_calls(model),
        kept_rng(),
        as_written(),
        torch.inference_mode(False),
        torch.set_grad_enabled(gradients),
    ):
        model.eval()
        yield


@contextmanager
def _without_compiled_calls(model: nn.Module) -> Iterator[None]:
    """Let modules that were compiled in place run as they are written."""
    # also of lazy modules, whose attributes `kept_attributes` leaves alone
    compiled_calls = {
        module: vars(module)[_COMPILED]
        for module in model.modules()
        if vars(module).get(_COMPILED) is not None
    }
    for module in compiled_calls:
        vars(module)[_COMPILED] = None
    try:
        yield
    finally:
        for module, compiled_call in compiled_calls.items():
            vars(module)[_COMPILED] = compiled_call


@contextmanager
def _kept_values(model: nn.Module) -> Iterator[None]:
    """Put buffers and weights back bit by bit, and modules that have a `train` of their
    own back to training by it: their `eval` may have merged weights, as that of a LoRA
    layer does."""
    modes = {module: module.training for module in model.modules()}
    with_own_train = [
        module for module in modes if type(module).train is not nn.Module.train
    ]
    buffer_values = _copies(model.buffers())
    weight_values = _copies(
        weight
        for module in with_own_train
        for weight in module.parameters(recurse=False)
    )
    try:
        yield
    finally:
        try:
            _put_back(buffer_values)
        finally:  # of a buffer that was resized, copy_ raises
            for module in [m for m in with_own_train if modes[m] and not m.training]:
                module.train()
            # those of lazy modules, too, whose other attributes stay as they have become
            for module, is_training in modes.items():
                module.training = is_training
            _put_back(weight_values)


def _copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Tensors with copies of them. Left out are those of a lazy module, which have no
    shape yet, and those on the meta device, which have no values."""
    return [
        (tensor, tensor.detach().clone())
        for tensor in tensors
        if not is_lazy(tensor) and not tensor.is_meta
    ]


def _put_back(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give tensors the values of their copies. By `data`, since the user's own backward
    pass may still come, and refuses tensors that were changed in between."""
    for tensor, values in copies:
        if not torch.equal(tensor, values):
            tensor.data.copy_(values)


class _KeptAttributes(NamedTuple):
    """What a module had before a block."""

    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Tensor | None]
    hooks: set[int]
    """Keys of its forward hooks."""


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Put back what the attributes and buffers of modules refer to, after the block.

    A recurrent state (`self.h = ...`) would make what is drawn of one image depend on
    the one before, and a cache would stay behind. Changes inside of what they refer to
    (`self.seen.append`) are not undone: to copy everything would cost more than the
    pass. Lazy modules stay as their first input has made them. Hooks that a model
    places on itself go, too: transformers keeps in an attribute that it has placed
    them, and would place them again."""
    before = [
        _KeptAttributes(
            module,
            attributes=dict(vars(module)),
            buffers=dict(module._buffers),
            hooks=set(module._forward_hooks),
        )
        for module in model.modules()
        if not isinstance(module, LazyModuleMixin)
    ]
    try:
        yield
    finally:
        # Not by `setattr`, which modules may override: the dictionaries themselves.
        for module, attributes, buffers, hooks in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
            for hook in set(module._forward_hooks) - hooks:
                del module._forward_hooks[hook]


@contextmanager
def kept_rng() -> Iterator[None]:
    """Put the state of the random number generators back after the block."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=devices):
        yield


@dataclass
class _Blocks:
    """The blocks, in any thread, that run models as they are written."""

    count: int = 0
    lock: Any = field(default_factory=Lock)
    undo: ExitStack = field(default_factory=ExitStack)
    """What the last of them does when it ends."""


_blocks = _Blocks()


@contextmanager
def as_written() -> Iterator[None]:
    """The whole process runs models as they are written while any block, in any thread,
    needs that: without nn.MultiheadAttention's fast path, and uncompiled, since both
    run past hooks."""
    with _blocks.lock:
        _blocks.count += 1
        if _blocks.count == 1:
            mha = torch.backends.mha
            _blocks.undo.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
            # the compiler takes a second to import; while it compiles a caller's
            # function it allows no change of its stance
            is_loaded = "torch._dynamo" in sys.modules
            if is_loaded and not torch.compiler.is_dynamo_compiling():
                _blocks.undo.enter_context(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _blocks.lock:
            _blocks.count -= 1
            if _blocks.count == 0:
                _blocks.undo.close()


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper; any other as it is."""
    inner = getattr(module, "_orig_mod", None)
    return uncompiled(inner) if isinstance(inner, nn.Module) else module
