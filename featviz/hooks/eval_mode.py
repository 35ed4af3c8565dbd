"""Run a model in eval mode and without shortcuts that bypass hooks, and leave it exactly
as it was."""

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
"""The attribute in which nn.Module.compile keeps the compiled call."""


@contextmanager
def in_eval_mode(model: nn.Module, gradients: bool = False) -> Iterator[None]:
    """A context in which the model is in eval mode.

    Compiled calls of modules (`nn.Module.compile`) and the fast path of
    nn.MultiheadAttention bypass hooks, so both are switched off. The caller's inference
    mode is switched off, too, since parameters that a lazy module makes in the block may be
    trained later.

    After the block, also after an error, all of this is as before. So are training modes,
    parameters that `eval` has changed, buffers, attributes (see `kept_attributes`) and the
    state of random number generators.

    Args:
        model: The model.
        gradients: Whether autograd records operations in the block.
    """
    # attributes are put back last, since `train` and `eval` may set some
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
    """A context in which modules that were compiled in place run uncompiled."""
    # `kept_attributes` would not put back those of lazy modules
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
    """A context after which buffers, weights and training modes are as before. Modules with
    their own `train` are put back by it, and then their weights bit by bit: their `eval` may
    have changed weights, as a LoRA layer's does."""
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
        finally:  # `_put_back` raises for a buffer that was resized
            for module in [m for m in with_own_train if modes[m] and not m.training]:
                module.train()
            # also for lazy modules, whose other attributes are not put back
            for module, is_training in modes.items():
                module.training = is_training
            _put_back(weight_values)


def _copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Tensors, each with a copy. Left out are tensors of lazy modules, which have no shape
    yet, and tensors on the meta device, which have no values."""
    return [
        (tensor, tensor.detach().clone())
        for tensor in tensors
        if not is_lazy(tensor) and not tensor.is_meta
    ]


def _put_back(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give tensors the values of their copies again. This is done through `data`, which
    autograd does not notice: otherwise the user's own backward pass might fail later."""
    for tensor, values in copies:
        if not torch.equal(tensor, values):
            tensor.data.copy_(values)


class _KeptAttributes(NamedTuple):
    """The attributes, buffers and hooks of a module before a block."""

    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Tensor | None]
    hooks: set[int]
    """The keys of its forward hooks."""


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """A context after which the attributes and buffers of all modules refer to the same
    objects as before.

    With a recurrent state (`self.h = ...`), the maps of an image would otherwise depend on
    the image before. Changes inside these objects (`self.seen.append`) are not undone, since
    copying all of them would take longer than the pass. Lazy modules are left out: they stay
    as their first input has made them. Hooks that a model has placed on itself in the block
    are removed: transformers notes in an attribute that it has placed them, and would place
    them once more."""
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
        # The dictionaries are changed themselves, since modules may override `setattr`.
        for module, attributes, buffers, hooks in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
            for hook in set(module._forward_hooks) - hooks:
                del module._forward_hooks[hook]


@contextmanager
def kept_rng() -> Iterator[None]:
    """A context after which the state of the random number generators is as before."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=devices):
        yield


@dataclass
class _Blocks:
    """The blocks of `as_written` that are running, in all threads."""

    count: int = 0
    lock: Any = field(default_factory=Lock)
    undo: ExitStack = field(default_factory=ExitStack)
    """Closed at the end of the last block, to restore torch's settings."""


_blocks = _Blocks()


@contextmanager
def as_written() -> Iterator[None]:
    """A context in which models run without nn.MultiheadAttention's fast path, and
    uncompiled, since both bypass hooks. These settings are those of the whole process; they
    are restored when the last such block, in any thread, ends."""
    with _blocks.lock:
        _blocks.count += 1
        if _blocks.count == 1:
            mha = torch.backends.mha
            _blocks.undo.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
            # the compiler is not imported just for this, which takes a second; and while
            # it compiles a function of the caller, its stance cannot be changed
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
    """The module inside torch.compile's wrapper; a module without one is returned as it is."""
    inner = getattr(module, "_orig_mod", None)
    return uncompiled(inner) if isinstance(inner, nn.Module) else module
