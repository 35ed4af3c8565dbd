"""Running a model in eval mode, and giving it back exactly as it was."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_COMPILED = "_compiled_call_impl"
"""Where nn.Module.compile puts the compiled call."""


@contextmanager
def in_eval_mode(model: nn.Module, gradients: bool = False) -> Iterator[None]:
    """Put the model into eval mode, and into inference mode unless gradients are wanted, for a
    while.

    Modules that were compiled in place, and nn.MultiheadAttention's fast path, would run past hooks
    that come later; they are set aside. Afterwards, also when the block raised, these two, training
    modes, parameters that `eval` has changed, buffers and RNG state are as before. What forward has
    made for its next call stays, as after any other call, and can take part in gradients.
    """
    with ExitStack() as stack:
        for keep in (_kept_ordinary, _mode, _buffers, _uncompiled):
            stack.enter_context(keep(model))
        for keep_global in (kept_rng, _no_attention_fast_path):
            stack.enter_context(keep_global())
        stack.enter_context(torch.inference_mode(not gradients and not _is_lazy(model)))
        stack.enter_context(torch.set_grad_enabled(gradients))
        model.eval()
        yield


@contextmanager
def _mode(model: nn.Module) -> Iterator[None]:
    """Go back to training where modules trained, by their own `train` where they have one: it may
    have merged weights into others for eval, which are put back bit by bit."""
    before = [(module, module.training) for module in model.modules()]
    own = [module for module, _ in before if _has_own_train(module)]
    weights = [
        (weight, weight.detach().clone())
        for module in own
        for weight in module.parameters(recurse=False)
        if _has_values(weight)
    ]
    try:
        yield
    finally:
        modes = dict(before)
        for module in own:
            if modes[module] and not module.training:
                module.train()
        for module, training in before:
            module.training = training
        for weight, value in weights:
            if not torch.equal(weight, value):
                weight.data.copy_(value)


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


def _put_back(module: nn.Module, name: str, buffer: Tensor, value: Tensor) -> None:
    if module._buffers.get(name) is not buffer:
        module._buffers[name] = buffer
    if not torch.equal(buffer, value):
        buffer.copy_(value)


@contextmanager
def _kept_ordinary(model: nn.Module) -> Iterator[None]:
    """Make tensors ordinary that forward made in inference mode and keeps for its next call, as the
    anchors of a detector: autograd refuses the others."""
    try:
        yield
    finally:
        seen: set[int] = set()
        for module in model.modules():
            for held in (vars(module), module._parameters, module._buffers):
                for name, value in list(held.items()):
                    if (plain := _ordinary(value, seen)) is not value:
                        held[name] = plain


def _ordinary(value: Any, seen: set[int]) -> Any:
    """A tensor or a tuple without inference tensors; in other containers they are exchanged."""
    if isinstance(value, Tensor):
        return _clone(value) if not is_lazy(value) and value.is_inference() else value
    if not isinstance(value, (tuple, list, dict, set, deque)) or id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, dict):
        for key in list(value):
            if (plain := _ordinary(value[key], seen)) is not value[key]:
                value[key] = plain
        return value
    items = [_ordinary(item, seen) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(items)
    return value


def _clone(tensor: Tensor) -> Tensor:
    plain = tensor.detach().clone()
    return nn.Parameter(plain, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else plain


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


def _has_own_train(module: nn.Module) -> bool:
    return type(module).train is not nn.Module.train


def _is_lazy(model: nn.Module) -> bool:
    """Whether the first input makes parameters or buffers."""
    return any(map(is_lazy, (*model.parameters(), *model.buffers())))


def _has_values(tensor: Tensor) -> bool:
    """A lazy module's tensor has no shape yet, and one on the meta device no values."""
    return not is_lazy(tensor) and not tensor.is_meta


@contextmanager
def kept_rng() -> Iterator[None]:
    """Put the state of the random number generators back after the block."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=devices):
        yield


_fast_path_lock = Lock()
_fast_path_waits: list[bool] = []
"""Of each block that is without the fast path, in any thread, how it was when the first began."""


@contextmanager
def _no_attention_fast_path() -> Iterator[None]:
    """The switch is the process's: the last block that ends puts it back."""
    mha = torch.backends.mha
    with _fast_path_lock:
        _fast_path_waits.append(
            _fast_path_waits[0] if _fast_path_waits else mha.get_fastpath_enabled()
        )
        mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _fast_path_lock:
            before = _fast_path_waits.pop()
            mha.set_fastpath_enabled(before and not _fast_path_waits)
