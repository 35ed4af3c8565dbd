"""Digests for run.json: of a module, of the user's own code, of values. What was edited since is
told from what ran."""

from __future__ import annotations

import hashlib
import pickle
import re
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

SHOWN_DIGITS = 16
"""Digits of a digest that stand in words for people; 64 bits tell any two apart."""
_OF_NO_USE = (
    *("__module__", "__doc__", "__dict__", "__weakref__", "__firstlineno__"),
    "__static_attributes__",
)
"""Attributes of a class that say where it stands, or what others say too."""

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


def of_module(module: nn.Module) -> str | None:
    """sha256 of a module: names, classes and settings (`extra_repr`) of what it consists of,
    parameters and buffers, but not the code of the classes; None where a tensor does not tell its
    values. Takes about a second for each gigabyte."""
    sha256 = hashlib.sha256()
    for name, part in module.named_modules():
        try:
            settings = _ADDRESS.sub("0x", str(part.extra_repr()))
        except Exception:  # the user's own code
            settings = ""
        words = f"{name}: {type(part).__qualname__}({settings})\n"
        sha256.update(words.encode("utf-8", "backslashreplace"))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        sha256.update(f"{name}: {tensor.dtype}\n".encode())
        if not (is_lazy(tensor) or tensor.is_meta):
            sha256.update(f"{list(tensor.shape)}\n".encode())
            try:
                _add(tensor, sha256)
            except Exception:  # a tensor of somebody else's class
                return None
    return sha256.hexdigest()


def of_tensor(tensor: Tensor) -> str:
    """sha256 of a tensor's values, without its shape and type."""
    sha256 = hashlib.sha256()
    _add(tensor, sha256)
    return sha256.hexdigest()


def of_value(value: Any) -> str:
    """sha256 of a value. A function or class counts by its bytecode, with default and bound values,
    but not globals and the functions that it calls. A part that cannot be pickled counts by its
    class; what holds itself by its `repr` and its own bytecode."""
    sha256 = hashlib.sha256()
    pickler = _Told(SimpleNamespace(write=sha256.update))
    pickler.fast = True  # whether equal parts are the same object makes no difference
    try:
        pickler.dump(value)
    except Exception:  # it holds itself
        code = getattr(value, "__code__", None)
        words = _ADDRESS.sub("0x", repr([value, code and (code.co_code, code.co_consts)]))
        sha256 = hashlib.sha256(words.encode("utf-8", "backslashreplace"))
    return sha256.hexdigest()


class _Told(pickle.Pickler):
    """Pickles functions and classes as what they run, and tensors as their values."""

    def reducer_override(self, value: Any) -> Any:
        """What stands for a value."""
        if isinstance(value, Tensor) and not value.is_meta:
            return str, (f"{value.dtype} {list(value.shape)} {of_tensor(value)}",)
        if isinstance(value, CodeType):
            consts = value.co_consts
            kept = [sorted(map(repr, v)) if isinstance(v, frozenset) else v for v in consts]
            return str, (value.co_code, value.co_names, kept)
        if isinstance(value, FunctionType):
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            held = [v.__qualname__ if isinstance(v, type) else v for v in held]  # its own class
            return str, (value.__code__, value.__defaults__, value.__kwdefaults__, held)
        if isinstance(value, type) and value.__module__ != "builtins":
            own: dict[str, Any] = {}
            for name, part in vars(value).items():
                part = getattr(part, "__func__", getattr(part, "fget", part))
                if hasattr(part, "__code__"):
                    own[name] = part.__code__
                elif isinstance(part, (int, float, str, bytes)) and name not in _OF_NO_USE:
                    own[name] = part
            return str, (value.__qualname__, own)
        if isinstance(value, type):
            return NotImplemented
        try:
            value.__reduce_ex__(2)
        except Exception:  # a module, a lock, a generator: all around it still counts
            return str, (type(value).__qualname__, getattr(value, "__name__", ""))
        return NotImplemented


def _add(tensor: Tensor, sha256: Any) -> None:
    """Add a tensor's bytes, or those of the tensors that it consists of (torchao's)."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, settings = tensor.__tensor_flatten__()
        sha256.update(_ADDRESS.sub("0x", repr(settings)).encode())
        for name in names:
            _add(getattr(tensor, name), sha256)
        return
    tensor = tensor.detach().cpu()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    sha256.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
