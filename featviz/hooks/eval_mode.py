"""Running a model in eval mode, and giving it back exactly as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

_COMPILED = "_compiled_call_impl"
"""Where nn.Module.compile puts the compiled call."""


@contextmanager
def in_eval_mode(model: nn.Module, gradients: bool = False) -> Iterator[None]:
    """Put the model into eval mode, and into inference mode unless gradients are wanted, for a
    while.

    Modules that were compiled in place, and nn.MultiheadAttention's fast path, would run past hooks
    that come later; they are set aside. Training flags, buffers, RNG state and these two are as
    before afterwards, also when the block raised. Tensors that
    modules keep in attributes can take part in gradients afterwards.
    """
    with ExitStack() as stack:
        for keep in (_flags, _buffers, _attributes, _uncompiled):
            stack.enter_context(keep(model))
        for keep_global in (kept_rng, _no_attention_fast_path):
            stack.enter_context(keep_global())
        stack.enter_context(torch.inference_mode(not gradients))
        stack.enter_context(torch.set_grad_enabled(gradients))
        model.eval()
        yield


@contextmanager
def _flags(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _buffers(model: nn.Module) -> Iterator[None]:
    before = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and _has_values(buffer)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in before:
                _put_back(module, name, buffer, value)


@contextmanager
def _attributes(model: nn.Module) -> Iterator[None]:
    """Make tensors ordinary that forward made in inference mode and keeps for its next call, as the
    anchors of a detector: autograd refuses the others."""
    try:
        yield
    finally:
        for module in model.modules():
            for name, value in vars(module).items():
                if type(value) is Tensor:
                    vars(module)[name] = _ordinary(value)
                elif type(value) is list:
                    value[:] = map(_ordinary, value)


@contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Run modules on which `compile` was called as they are written."""
    compiled = [
        (module, call)
        for module in model.modules()
        if (call := vars(module).get(_COMPILED)) is not None
    ]
    try:
        for module, _ in compiled:
            vars(module)[_COMPILED] = None
        yield
    finally:
        for module, call in compiled:
            vars(module)[_COMPILED] = call


def _ordinary(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _has_values(buffer: Tensor) -> bool:
    """A lazy module's buffer has no shape yet, and one on the meta device no values."""
    return not isinstance(buffer, UninitializedBuffer) and not buffer.is_meta


def _put_back(module: nn.Module, name: str, buffer: Tensor, value: Tensor) -> None:
    if module._buffers.get(name) is not buffer:
        module._buffers[name] = buffer
    if not torch.equal(buffer, value):
        buffer.copy_(value)


@contextmanager
def kept_rng() -> Iterator[None]:
    """Put the state of the random number generators back after the block."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def _no_attention_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
