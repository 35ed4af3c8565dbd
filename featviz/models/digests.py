"""Digests for run.json: of a module, of the user's own code, of values. What was edited since is
told from what ran."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

SHOWN_DIGITS = 16
"""Digits of a digest that stand in words for people; 64 bits tell any two apart."""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
"""Where an object lies in memory, as `repr` says it: another place in every process."""


def of_module(module: nn.Module) -> str:
    """sha256 of a module: names, classes and settings (`extra_repr`) of what it consists of,
    parameters and buffers. The code of the classes is no part of it.

    Takes about a second for each gigabyte.
    """
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
            sha256.update(_plain(tensor).numpy().data)
    return sha256.hexdigest()


def of_function(function: Callable[..., Any]) -> str:
    """sha256 of a function or callable object: its source, or where there is none the bytecode,
    with its default and bound values. Globals and the functions that it calls are no part of it.
    """
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    return of_text("\n".join([_code(inner), *_bound(inner), _words(function)]))


def of_text(text: str) -> str:
    """sha256 of a text, in which there may be any characters."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def of_tensor(tensor: Tensor) -> str:
    """sha256 of a tensor's values, without its shape and type."""
    return hashlib.sha256(_plain(tensor).numpy().data).hexdigest()


def in_full(value: Any) -> str:
    """A value as `repr` says it, but for tensors and arrays in lists, tuples and dicts: those are
    told by the digest of all their values, which `repr` rounds and leaves out."""
    try:
        return _in_full(value)
    except RuntimeError:  # a list that holds itself, or a tensor that lies in no plain memory
        return repr(value)


def _in_full(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest = hashlib.sha256(value.tobytes()).hexdigest()
        return f"array {value.dtype} {list(value.shape)} {digest}"
    if isinstance(value, Tensor) and not value.is_meta:
        return f"tensor {value.dtype} {list(value.shape)} {of_tensor(value)}"
    if type(value) is dict:
        pairs = (f"{_in_full(key)}: {_in_full(one)}" for key, one in value.items())
        return "{" + ", ".join(pairs) + "}"
    if type(value) is list:
        return f"[{', '.join(map(_in_full, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(_in_full, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def _words(value: Any) -> str:
    """A value in full, the same in every process; a function by its code."""
    if inspect.isfunction(value):
        return _code(value)
    try:
        return _ADDRESS.sub("0x", in_full(value))
    except Exception:  # the user's own code
        return type(value).__qualname__


def _code(function: Any) -> str:
    """The source of a function, a class, or the class of an object. That of a lambda is the whole
    line, in which all else may change."""
    named = inspect.isroutine(function) or isinstance(function, type)
    target: Any = function if named else type(function)
    if target.__name__ != "<lambda>":
        with suppress(OSError, TypeError, SyntaxError):
            return inspect.getsource(target)
    functions = vars(target).values() if isinstance(target, type) else [target]
    return "\n".join(_bytecode(one.__code__) for one in functions if hasattr(one, "__code__"))


def _bytecode(code: CodeType) -> str:
    """What code does, without the names of files and numbers of lines."""
    constants = [
        _bytecode(value)
        if isinstance(value, CodeType)
        else repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
        for value in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _bound(function: Any) -> Iterator[str]:
    """The default values of a function, and those that it has from the function around it."""
    if not inspect.isroutine(function):
        return
    for name in ("__defaults__", "__kwdefaults__"):
        yield _words(getattr(function, name, None))
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # one that is still empty
            yield _words(cell.cell_contents)


def _plain(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 [N]."""
    tensor = tensor.detach().cpu()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.contiguous().reshape(-1).view(torch.uint8)
