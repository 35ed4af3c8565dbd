"""What training scripts keep beside weights, made without calling what a file names: methods of
modules, arguments, single numbers of numpy, paths, ways to interpolate.

Checkpoints of Ultralytics hold all of these. A fused convolution has its `forward_fuse` in the
place of `forward`, which a pickle writes as a getattr; the older heads keep `Detect.forward`.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
from torch import nn

from featviz.models.files.rebuilding import Budget, Maker, RefusedError
from featviz.models.requirements import require_torchvision

FORWARDS = ("forward", "forward_fuse")
"""Methods that may be kept as values; nothing calls them while a file is read."""

_NUMBER = re.compile(r"[<>=|]?(f[248]|[iu][1248]|b1)")
_MOST_PARTS = 100


@dataclass(frozen=True)
class NumberType:
    """What a file calls `numpy.dtype`: the type of single numbers."""

    code: str
    """As numpy writes it: `f8`."""


def attribute(owner: Any, name: Any) -> Any:
    """What `getattr` would give: a forward method of a module or of a class of modules, or a way to
    interpolate. None for anything else. No attribute of an object is looked up."""
    if owner is _INTERPOLATION:
        return next((way for way in _ways_to_interpolate() if way.name == name), None)
    kind = owner if isinstance(owner, type) else type(owner)
    if name not in FORWARDS or not issubclass(kind, nn.Module):
        return None
    attribute = inspect.getattr_static(kind, name, None)
    if isinstance(attribute, staticmethod):
        return attribute.__func__
    if not isinstance(attribute, FunctionType):
        return None
    return attribute if owner is kind else MethodType(attribute, owner)


def is_own_forward(value: Any, module: nn.Module) -> bool:
    """Whether a value is one of the module's own forward methods, as `attribute` makes it."""
    if not isinstance(value, (FunctionType, MethodType)):
        return False
    return any(value == attribute(module, name) for name in FORWARDS)


def _taken(budget: Budget, owner: Any, name: Any) -> Any:
    return attribute(owner, name)


def _arguments(budget: Budget) -> SimpleNamespace:
    return SimpleNamespace()


def _number_type(budget: Budget, code: str, *more: object) -> NumberType:
    if type(code) is not str or not _NUMBER.fullmatch(code):
        raise RefusedError("holds a type of numpy that is none of plain numbers")
    return NumberType(code)


def _number(budget: Budget, kind: NumberType, content: bytes) -> Any:
    """A single number of numpy as Python's own."""
    if not isinstance(kind, NumberType) or type(content) is not bytes:
        raise RefusedError("holds a number of numpy that is none")
    dtype = np.dtype(kind.code)
    if len(content) != dtype.itemsize:
        raise RefusedError(f"holds a number of {len(content)} bytes, expected {dtype.itemsize}")
    return np.frombuffer(content, dtype)[0].item()


def _path(budget: Budget, *parts: str) -> str:
    if len(parts) > _MOST_PARTS or not all(type(part) is str for part in parts):
        raise RefusedError("holds a path that is none")
    budget.bytes.take(sum(map(len, parts)))
    return "/".join(parts)


def _ways_to_interpolate() -> tuple[Any, ...]:
    require_torchvision()
    from torchvision.transforms import InterpolationMode

    return tuple(InterpolationMode)


def _interpolation(budget: Budget, value: Any) -> Any:
    known = {way.value: way for way in _ways_to_interpolate()}
    if type(value) is not str or value not in known:
        raise RefusedError("holds a way to interpolate that torchvision has not")
    return known[value]


GETATTR = Maker(_taken)
_INTERPOLATION = Maker(_interpolation)

KEPT: dict[str, Maker] = {
    "builtins.getattr": GETATTR,
    "numpy.dtype": Maker(_number_type),
    "numpy.core.multiarray.scalar": Maker(_number),
    "numpy._core.multiarray.scalar": Maker(_number),
    "torchvision.transforms.functional.InterpolationMode": _INTERPOLATION,
    "ultralytics.utils.IterableSimpleNamespace": Maker(_arguments),
    "ultralytics.yolo.utils.IterableSimpleNamespace": Maker(_arguments),
    **{
        f"{home}.{kind}": Maker(_path)
        for home in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "WindowsPath")
    },
}
"""By the name in a file: what is made where the file would call it."""
