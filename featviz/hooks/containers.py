"""Tuples, lists, dicts and dataclasses of tensors, flattened; and what is no tensor, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten tuples, lists, dicts and dataclasses: pairs of (path, what stands there)."""
    for name, item in _items(value):
        yield from leaves(item, f"{key}.{name}" if key else str(name))
    if not _is_container(value):
        yield key, value


def tensors(value: Any) -> list[Tensor]:
    """The tensors among `leaves`, in their order."""
    return [item for _, item in leaves(value) if isinstance(item, Tensor)]


def _is_container(value: Any) -> bool:
    if isinstance(value, (tuple, list, Mapping)):
        return len(value) > 0
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if _is_container(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return []


def describe(value: Any) -> str:
    """Words for a value where a tensor was expected: `None`, `an empty dict`, `a str`."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an empty {name}" if isinstance(value, (tuple, list, Mapping)) else f"a {name}"
