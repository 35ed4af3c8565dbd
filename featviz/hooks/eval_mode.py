"""Running a model in eval mode and as it is written, and giving it back exactly as it
was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

_COMPILED = "_compiled_call_impl"
"""Where nn.Module.compile puts the compiled call."""


@contextmanager
def in_eval_mode(model: nn.Module, gradients: bool = False) -> Iterator[None]:
    """Put the model into eval mode for a while, with or without gradients.

    Modules that were compiled in place, and nn.MultiheadAttention's fast path, would
    run past hooks that come later; they are set aside. Afterwards, also when the block
    raised, these two, training modes, parameters that `eval` has changed, buffers,
    attributes (see `kept_attributes`) and RNG state are as before: modules go back to
    training by their own `train` where they have one, which may have merged weights for
    eval, and weights are put back bit by bit. It leaves the caller's inference mode,
    since what a lazy module makes of its first input may be trained with."""
    modes = {module: module.training for module in model.modules()}
    with_own_train = [
        module for module in modes if type(module).train is not nn.Module.train
    ]
    weights = [
        (weight, weight.detach().clone())
        for module in with_own_train
        for weight in module.parameters(recurse=False)
        if _has_values(weight)
    ]
    buffers = [
        (buffer, buffer.clone())
        for module in modes
        for buffer in module.buffers(recurse=False)
        if _has_values(buffer)
    ]
    with kept_attributes(model):
        try:
            for module in modes:
                if vars(module).get(_COMPILED) is not None:
                    vars(module)[_COMPILED] = None
            grad = torch.set_grad_enabled
            with kept_rng(), as_written(), torch.inference_mode(False), grad(gradients):
                model.eval()
                yield
        finally:
            try:
                with torch.no_grad():
                    for buffer, value in buffers:
                        if not torch.equal(buffer, value):
                            buffer.copy_(value)
            finally:  # of a buffer that was resized, copy_ raises
                for module in with_own_train:
                    if modes[module] and not module.training:
                        module.train()
                for weight, value in weights:
                    if not torch.equal(weight, value):
                        weight.data.copy_(value)


def _has_values(tensor: Tensor) -> bool:
    """A lazy module's tensor has no shape yet, and one on the meta device no values."""
    return not is_lazy(tensor) and not tensor.is_meta


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
        (module, dict(vars(module)), dict(module._buffers), set(module._forward_hooks))
        for module in model.modules()
        if not isinstance(module, LazyModuleMixin)
    ]
    try:
        yield
    finally:
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


_blocks = [0]
"""How many blocks, in any thread, run models as they are written."""
_lock, _undo = Lock(), ExitStack()


@contextmanager
def as_written() -> Iterator[None]:
    """The whole process runs models as they are written while any block, in any thread,
    needs that: without nn.MultiheadAttention's fast path, and uncompiled, since both
    run past hooks."""
    with _lock:
        _blocks[0] += 1
        if _blocks[0] == 1:
            mha = torch.backends.mha
            _undo.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
            # the compiler takes a second to import, and allows nothing of the kind
            # inside
            if (
                "torch._dynamo" in sys.modules
                and not torch.compiler.is_dynamo_compiling()
            ):
                _undo.enter_context(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            _blocks[0] -= 1
            if not _blocks[0]:
                _undo.close()


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper; any other as it is."""
    inner = getattr(module, "_orig_mod", None)
    return uncompiled(inner) if isinstance(inner, nn.Module) else module
