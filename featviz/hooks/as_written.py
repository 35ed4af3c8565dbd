"""What torch.compile has compiled runs as it is written, so that hooks are called."""

from __future__ import annotations

import sys
from threading import Lock
from typing import Any

import torch
from torch import nn


class _AsWritten:
    """Counts the blocks that need it, in all threads: while any runs, nothing is compiled, and what
    was compiled before is set aside."""

    def __init__(self) -> None:
        self._lock, self._count = Lock(), 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            self._stance = self._stance or _eager()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if self._stance is not None and not self._count:
                self._stance.__exit__(None, None, None)
                self._stance = None


as_written = _AsWritten()
"""To be entered while hooks are in place: compiled code runs past those that came later."""


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper; any other as it is."""
    inner = getattr(module, "_orig_mod", None)
    return uncompiled(inner) if isinstance(inner, nn.Module) else module


def _eager() -> Any:
    """The stance in which torch runs everything uncompiled; None where nothing was compiled yet
    (the compiler takes a second to import), and inside of what is being compiled."""
    if "torch._dynamo" in sys.modules and not torch.compiler.is_dynamo_compiling():
        return torch.compiler.set_stance("force_eager")
    return None
