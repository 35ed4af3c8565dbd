"""Follow an image through the first forward pass: where values lie, and what they see of it.

A count of tokens proves nothing: a hundred queries of a DETR are no 10 × 10 picture, and an
attention's 256 tokens of 256 channels are no weights. So the functions that a model calls are
watched once for each shape of input, and every tensor is told where its values lie in the image
(`places`), whether it is an attention's weights and, where somebody asks, what it sees (`views`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from featviz.hooks.capture import given_tensors, leaves, tensors
from featviz.hooks.functions import unwatched
from featviz.hooks.layers import function_in
from featviz.layout.places import (
    JOINS,
    LOST,
    MAPS,
    MOVES,
    MULTI_HEAD,
    PRODUCTS,
    RULES,
    FollowedCall,
    SourceMaps,
    varies,
)
from featviz.layout.views import Views, of_image, result_views
from featviz.records import Layer, Origin


class Tracer:
    """Hears of the calls of a forward pass, and knows the origin of what layers take and give."""

    def __init__(
        self,
        wanted: Collection[str],
        mixers: Collection[str],
        in_attention: Callable[[Layer], bool],
        model: nn.Module | None = None,
    ) -> None:
        """Begin before the model is called.

        Args:
            wanted: names of the layers whose tensors will be asked for.
            mixers: names of the layers that mix tokens, and give as many back.
            in_attention: whether a layer is an attention, or inside one.
            model: the model, where views are asked for; they take as long as its layers.
        """
        self.origins: dict[tuple[str, tuple[int, ...]], dict[tuple[str, str], Origin]] = {}
        """By name of the layer and shape, then by side (`input` or `output`) and key."""
        self.views: dict[tuple[str, int, str], Views] = {}
        """By name of the layer, number of its call and key; without outputs of unknown views."""
        self._wanted, self._mixers, self._in_attention = wanted, mixers, in_attention
        self._maps = SourceMaps()
        self._tables = WeakTensorKeyDictionary()
        self._weights = WeakTensorKeyDictionary()
        self._origins = WeakTensorKeyDictionary()
        """By table: many tensors share one."""
        self._calls = Counter[str]()
        self._views = None if model is None else _ViewsOfTensors(model)

    def enter(self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A layer is called."""
        if layer.is_function:
            if self._views is not None and function_in(layer.name) == "setitem":
                self._views.assign(*_dense([args, kwargs]))
            return
        with unwatched(), torch.no_grad():
            # values of the model's inputs [1, C, H, W] or [1, C, T, H, W] lie where they lie
            for image in _dense(args) if layer.index == 0 else ():
                if image.ndim in (4, 5):
                    self._tables[image] = self._maps.table(image.shape)
                    if self._views is not None:
                        self._views.put(image, of_image(image.shape))
            for key, tensor in given_tensors(args, kwargs) if layer.name in self._wanted else ():
                self._note(layer, "input", key, tensor)

    def leave(
        self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """A layer or a function has returned."""
        with unwatched(), torch.no_grad():
            if layer.is_function:
                name, given = function_in(layer.name) or "", _dense([args, kwargs])
                call = FollowedCall(name, args, kwargs, given, _dense(output))
                self._follow(layer, call)
                if self._views is not None:
                    self._views.follow(call)
            elif layer.name in self._mixers and isinstance(output, Tensor):
                self._place(output, self._alike(_dense(args), output))
            if layer.name not in self._wanted:
                return
            for key, tensor in leaves(output):
                if isinstance(tensor, Tensor):
                    self._note(layer, "output", key, tensor)
                    if self._views is not None and (views := self._views.of(tensor)):
                        self.views[layer.name, self._calls[layer.name], key] = views
            self._calls[layer.name] += 1

    def _note(self, layer: Layer, side: str, key: str, tensor: Tensor) -> None:
        if tensor.is_nested:
            return
        found = self.origins.setdefault((layer.name, tuple(tensor.shape)), {})
        if (side, key) in found:
            return
        origin, table = Origin(), self._table(tensor)
        if table is not None:
            if table not in self._origins:
                self._origins[table] = self._maps.origin(table)
            origin = self._origins[table]
        found[side, key] = replace(origin, weights=True) if tensor in self._weights else origin

    def _follow(self, layer: Layer, call: FollowedCall) -> None:
        """Give the results of a function their places."""
        if call.name in JOINS:
            made: Any = self._joined(call)
        elif call.name in RULES:
            made = self._by_rule(call)
        elif call.name in LOST:
            made = None
        else:
            made = [self._alike(call.given, result) for result in call.results]
        tables = [made] if made is None or isinstance(made, Tensor) else list(made)
        tables += [None] * len(call.results)
        is_weights = self._gives_weights(layer, call)
        for result, table, yes in zip(call.results, tables, is_weights, strict=False):
            self._place(result, table)
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

    def _joined(self, call: FollowedCall) -> Tensor | None:
        parts = call.argument(0, "tensors") or ()
        tables = [self._table(part) for part in parts]
        if all(table is None for table in tables):
            return None
        zeros = (torch.zeros(1, dtype=torch.float64).expand(part.shape) for part in parts)
        filled = [z if table is None else table for z, table in zip(zeros, tables, strict=True)]
        joined: Tensor = call.on(JOINS[call.name], filled)
        return joined

    def _by_rule(self, call: FollowedCall) -> Any:
        tables = [self._table(tensor) for tensor in call.given[:2]]
        if not tables or not call.results:
            return None
        made, shape = None, call.result.shape
        if tables[0] is not None:
            with suppress(RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
                made = RULES[call.name](self._maps, tables[0], call)  # else in a way unknown to it
        elif call.name in MAPS and len(shape) in (4, 5) and shape[0] == 1:
            made = self._maps.table(shape)
        factor = tables[-1]
        if made is None and call.name in PRODUCTS and factor is not None:
            rows_vary = varies(factor, factor.ndim - 2)  # else it has the second factor's columns
            made = None if rows_vary else factor[..., :1, :].expand(shape)
        return made

    def _alike(self, given: Sequence[Tensor], result: Tensor) -> Tensor | None:
        """A function that keeps a shape keeps places; a smaller operand is spread out."""
        known = [table for table in map(self._table, given) if table is not None]
        same = [table for table in known if table.shape == result.shape]
        smaller = [table for table in known if _spreads(table.shape, result.shape)]
        return next(iter([*same, *(table.expand(result.shape) for table in smaller)]), None)

    def _gives_weights(self, layer: Layer, call: FollowedCall) -> list[bool]:
        """Whether each result is an attention's weights."""
        if call.name == MULTI_HEAD:
            return [place == 1 for place in range(len(call.results))]
        if call.name == "softmax":
            dim, attends = call.argument(1, "dim"), self._in_attention(layer)
            return [attends and dim in (-1, result.ndim - 1) for result in call.results]
        kept = call.name not in RULES or call.name in MOVES
        weights = kept and bool(call.given) and call.given[0] in self._weights
        return [weights and result.numel() == call.given[0].numel() for result in call.results]


def _dense(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors(value) if not tensor.is_nested]


def _spreads(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a shape can be broadcast to another one."""
    if len(shape) > len(target):
        return False
    ends = zip(reversed(shape), reversed(target), strict=False)
    return all(side in (1, other) for side, other in ends)


class _ViewsOfTensors:
    """What the tensors of a forward pass see, as far as that is known.

    Several tensors may share one storage: where one of them is changed, nothing is known any more
    of those that were there before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._constants = {id(value) for value in (*model.parameters(), *model.buffers())}
        self._known = WeakTensorKeyDictionary()
        """Of each tensor its views, and the number of the step at which it got them."""
        self._changed: dict[int, tuple[int, StorageWeakRef]] = {}
        """By address of a storage the step at which it was changed; the reference keeps another
        storage from having the address."""
        self._step = 0

    def of(self, tensor: Tensor) -> Views | None:
        """The views of a tensor; None where nobody knows them."""
        if id(tensor) in self._constants:
            return ()
        step, views = self._known.get(tensor, (0, None))  # type: ignore[no-untyped-call]
        changed, _ = self._changed.get(tensor.untyped_storage()._cdata, (0, None))
        known: Views | None = views if step >= changed else None
        return known

    def put(self, tensor: Tensor, views: Views | None) -> None:
        """Note the views of a tensor."""
        self._known[tensor] = self._step, views

    def follow(self, call: FollowedCall) -> None:
        """A function has returned."""
        given = [self.of(tensor) for tensor in call.given]
        made = result_views(call, given)
        in_place = bool(call.given) and call.result is call.given[0]
        if in_place and (made[0] is None or any(given[1:])):
            self._change(call.result)
        for result, views in zip(call.results, made, strict=True):
            self.put(result, views)

    def assign(self, target: Tensor, *values: Tensor) -> None:
        """Values are assigned to a part of a tensor."""
        if any(views is None or views for views in map(self.of, (target, *values))):
            self._change(target)

    def _change(self, tensor: Tensor) -> None:
        self._step += 1
        storage = tensor.untyped_storage()
        self._changed[storage._cdata] = self._step, StorageWeakRef(storage)  # type: ignore[no-untyped-call]
