"""Follow an image through the first forward pass: which tensors are made of its places.

A count of tokens proves nothing: a hundred queries of a DETR are no 10 × 10 picture, and an
attention's 256 tokens of 256 channels are no weights. So the functions that a model calls are
watched once for each shape of input, and the places of the image go with the values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from featviz.hooks.capture import given_tensors
from featviz.hooks.containers import leaves, tensors
from featviz.hooks.functions import unwatched
from featviz.hooks.layers import function_in
from featviz.layout import places
from featviz.layout.source_maps import SourceMaps
from featviz.records import Layer, Origin

_ATTENTIONS = ("multi_head_attention_forward",)
"""Functions whose second result is an attention's weights."""


class Tracer:
    """Hears of the calls of a forward pass, and knows the origin of what layers take and give."""

    def __init__(
        self,
        wanted: Collection[str],
        mixers: Collection[str],
        in_attention: Callable[[Layer], bool],
    ) -> None:
        """Begin before the model is called.

        Args:
            wanted: names of the layers whose tensors will be asked for.
            mixers: names of the layers that mix tokens, and give as many back.
            in_attention: whether a layer is an attention, or inside one.
        """
        self.origins: dict[tuple[str, tuple[int, ...]], dict[tuple[str, str], Origin]] = {}
        """By name of the layer and shape, then by side (`input` or `output`) and key."""
        self._wanted, self._mixers, self._in_attention = wanted, mixers, in_attention
        self._maps = SourceMaps()
        self._tables = WeakTensorKeyDictionary()
        self._weights = WeakTensorKeyDictionary()
        self._origins = WeakTensorKeyDictionary()
        """By table: many tensors share one."""

    def enter(self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A layer is called."""
        if layer.is_function:
            return
        with unwatched(), torch.no_grad():
            if layer.index == 0:
                self._begin(args)
            for key, tensor in given_tensors(args, kwargs) if layer.name in self._wanted else ():
                self._note(layer, "input", key, tensor)

    def leave(
        self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """A layer or a function has returned."""
        with unwatched(), torch.no_grad():
            if layer.is_function:
                self._follow(layer, function_in(layer.name) or "", args, kwargs, output)
            elif layer.name in self._mixers and isinstance(output, Tensor):
                self._place(output, self._alike("", _dense(args), output))
            for key, tensor in leaves(output) if layer.name in self._wanted else ():
                if isinstance(tensor, Tensor):
                    self._note(layer, "output", key, tensor)

    def _begin(self, images: Sequence[Any]) -> None:
        """The values of the model's inputs [1, C, H, W] or [1, C, T, H, W] lie where they lie."""
        for image in _dense(images):
            if image.ndim in (4, 5):
                self._tables[image] = self._maps.table(image.shape)

    def _note(self, layer: Layer, side: str, key: str, tensor: Tensor) -> None:
        if tensor.is_nested:
            return
        found = self.origins.setdefault((layer.name, tuple(tensor.shape)), {})
        if (side, key) not in found:
            found[side, key] = self._origin(tensor)

    def _origin(self, tensor: Tensor) -> Origin:
        table = self._table(tensor)
        if table is None:
            origin = Origin()
        else:
            if table not in self._origins:
                self._origins[table] = self._maps.origin(table)
            origin = self._origins[table]
        return replace(origin, weights=True) if tensor in self._weights else origin

    def _follow(
        self, layer: Layer, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Give the results of a function their places."""
        results, before = _dense(output), _dense([args, kwargs])
        tables = self._results(name, before, args, kwargs, results)
        is_weights = self._gives_weights(layer, name, before, args, kwargs, results)
        for result, table in zip(results, tables, strict=True):
            self._place(result, table)
        for result, yes in zip(results, is_weights, strict=True):
            if yes:
                self._weights[result] = True

    def _table(self, tensor: Tensor) -> Tensor | None:
        """The places of a tensor's values; None where they are not known."""
        table: Tensor | None = self._tables.get(tensor)  # type: ignore[no-untyped-call]
        return table

    def _place(self, tensor: Tensor, table: Tensor | None) -> None:
        if table is not None and table.shape == tensor.shape:
            self._tables[tensor] = table
        elif tensor in self._tables:  # it was changed in place
            del self._tables[tensor]

    def _results(
        self,
        name: str,
        before: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """Places of each result; None where they are not known."""
        if name in places.JOINS:
            made: Any = self._joined(name, args, kwargs)
        elif name in places.RULES:
            made = self._by_rule(name, before, args, kwargs, results)
        else:
            made = [self._alike(name, before, result) for result in results]
        found = [made] if made is None or isinstance(made, Tensor) else list(made)
        return (found + [None] * len(results))[: len(results)]

    def _joined(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        parts = args[0] if args else kwargs.get("tensors", ())
        tables = [self._table(part) for part in parts]
        if all(table is None for table in tables):
            return None
        zeros = (torch.zeros(1, dtype=torch.float64).expand(part.shape) for part in parts)
        filled = [z if table is None else table for z, table in zip(zeros, tables, strict=True)]
        joined: Tensor = places.JOINS[name](filled, *args[1:], **_without(kwargs, "tensors"))
        return joined

    def _by_rule(
        self,
        name: str,
        before: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[Tensor],
    ) -> Any:
        tables = [self._table(tensor) for tensor in before[:2]]
        if not tables or not results:
            return None
        if not args:
            args, kwargs = (before[0],), _without(kwargs, "input", "self")
        made = None
        if tables[0] is not None:
            made = places.try_rule(name, self._maps, tables[0], results[0], args, kwargs)
        elif name in places.MAPS and results[0].ndim in (4, 5) and len(results[0]) == 1:
            made = self._maps.table(results[0].shape)
        if made is None and name in places.PRODUCTS and tables[-1] is not None:
            made = places.columns(tables[-1], results[0])
        return made

    def _alike(self, name: str, before: Sequence[Tensor], result: Tensor) -> Tensor | None:
        """A function that keeps a shape keeps places; a smaller operand is spread out."""
        known = [table for table in map(self._table, before) if table is not None]
        if name in places.LOST:
            return None
        same = [table for table in known if table.shape == result.shape]
        smaller = [table for table in known if _spreads(table.shape, result.shape)]
        return next(iter([*same, *(table.expand(result.shape) for table in smaller)]), None)

    def _gives_weights(
        self,
        layer: Layer,
        name: str,
        before: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[Tensor],
    ) -> list[bool]:
        """Whether each result is an attention's weights."""
        if name in _ATTENTIONS:
            return [place == 1 for place in range(len(results))]
        if name == "softmax":
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            yes = self._in_attention(layer) and dim in (-1, results[0].ndim - 1)
            return [yes] * len(results)
        kept = name not in places.RULES or name in places.MOVES
        weights = kept and bool(before) and before[0] in self._weights
        return [weights and result.numel() == before[0].numel() for result in results]


def _dense(value: Any) -> list[Tensor]:
    """The tensors in a value that have a shape; nested ones have none."""
    return [tensor for tensor in tensors(value) if not tensor.is_nested]


def _without(kwargs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in names}


def _spreads(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a shape can be broadcast to another one."""
    if len(shape) > len(target):
        return False
    ends = zip(reversed(shape), reversed(target), strict=False)
    return all(side in (1, other) for side, other in ends)
