"""Running a model in eval mode, and giving it back exactly as it was."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_COMPILED = "_compiled_call_impl"
"""Where nn.Module.compile puts the compiled call."""

_OF_TORCH = vars(nn.Module()).keys() - {"_buffers", "_modules"}
"""Attributes of every module that are not its model's: hooks, which those take away who have added
them; and the mode and parameters, which are put back by themselves."""


@contextmanager
def in_eval_mode(model: nn.Module, gradients: bool = False) -> Iterator[None]:
    """Put the model into eval mode, and into inference mode unless gradients are wanted, for a
    while.

    Modules that were compiled in place, and nn.MultiheadAttention's fast path, would run past hooks
    that come later; they are set aside. Afterwards, also when the block raised, these two, training
    modes, parameters that `eval` has changed, buffers, what modules keep in attributes (whatever
    forward has put there in inference mode would end gradients later), and RNG state are as before.
    Only lazy modules stay what the first input has made of them.
    """
    with ExitStack() as stack:
        for keep in (_attributes, _parameters, _mode, _buffers, _uncompiled):
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
def _parameters(model: nn.Module) -> Iterator[None]:
    """Take away parameters that the first input has made; others may change their form meanwhile,
    where they are sharded."""
    of_modules = [vars(module).get("_parameters", {}) for module in model.modules()]
    before = [(own, {name: own[name] is None for name in own}) for own in of_modules]
    try:
        yield
    finally:
        for own, were_none in before:
            for name in list(own):
                if name not in were_none:
                    del own[name]
                elif were_none[name]:
                    own[name] = None


@contextmanager
def _buffers(model: nn.Module) -> Iterator[None]:
    """Give buffers their values back; which there are, `_attributes` does."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers() if _has_values(buffer)]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def _attributes(model: nn.Module) -> Iterator[None]:
    """Put back what modules keep for their next call, as the anchors of a detector; lists, sets and
    dicts with what was in them, however deep."""
    attributes = [vars(module) for module in model.modules()]
    before = [(own, {k: own[k] for k in own.keys() - _OF_TORCH}) for own in attributes]
    kept = list(_containers(value for _, values in before for value in values.values()))
    try:
        yield
    finally:
        for own, values in before:
            for name in own.keys() - _OF_TORCH - values.keys():
                del own[name]
            own.update(values)
        for container, content in kept:
            _refill(container, content)


def _containers(values: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Each mutable container among values, and in containers among them, with a copy."""
    waiting, seen = deque(values), set[int]()
    while waiting:
        value = waiting.popleft()
        if not isinstance(value, (dict, list, set, deque, tuple)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            yield value, dict(value)
            waiting.extend(value.values())
        else:
            if not isinstance(value, tuple):
                yield value, list(value)
            waiting.extend(value)


def _refill(container: Any, content: Any) -> None:
    """Give a container its content back, unless it has it."""
    if isinstance(container, dict):
        pairs = [(id(k), id(v)) for k, v in container.items()]
        if pairs != [(id(k), id(v)) for k, v in content.items()]:
            container.clear()
            container.update(content)
    elif list(map(id, container)) != list(map(id, content)):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(content)


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
