"""Follow an image through one forward pass: a tag for each tensor.

A count of tokens proves nothing: a hundred queries of a DETR are no 10 × 10 picture. So the
functions that a model calls are watched once for each shape of input. A tag says where the values
of a tensor lie in the image (`places`), whether they are an attention's weights, which call made
them and, where somebody asks, what they see of the image (`views`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from featviz.hooks.capture import given_tensors, leaves, tensors
from featviz.hooks.functions import unwatched
from featviz.layout.tracing.fields import Views, of_image, result_views
from featviz.layout.tracing.positions import (
    ATTENDING,
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
from featviz.records import Layer, Trace

MadeBy = Callable[[Tensor], int | None]
"""The number of the call that made a tensor; None where no call did."""

Listener = Callable[[Layer, int, Sequence[Any], Mapping[str, Any], Any, MadeBy], int | None]
"""Takes a layer, which of its calls it is, its arguments and its output. Returns a number for the
call, or None where calls inside it made the output."""


@dataclass(slots=True)
class Tag:
    """What is known of one tensor."""

    places: Tensor | None = None
    is_weights: bool = False
    views: Views | None = None
    step: int = 0
    """The step of the pass at which the views were known."""
    made_by: int | None = None


@dataclass
class Follower:
    """Hears of the calls of a forward pass, and tags the tensors that they take and return."""

    wanted: Collection[str]
    """Names of the layers whose tensors will be asked for; all with a listener."""
    mixers: Collection[str]
    """Names of the layers that mix tokens, and give as many back."""
    in_attention: Callable[[Layer], bool]
    """Whether a layer is an attention, or inside one."""
    channel_axis: int
    """The axis of the input that counts channels."""
    constants: Collection[int] | None
    """Of parameters and buffers the ids, where views are asked for; they take as long as the
    model's layers."""
    listener: Listener | None = None
    origins: dict[tuple[str, tuple[int, ...]], dict[tuple[str, str], Trace]] = field(
        default_factory=dict
    )
    """By name of the layer and shape, then by side (`input` or `output`) and key."""
    views: dict[tuple[str, int, str], Views] = field(default_factory=dict)
    """By name of the layer, number of its call and key; without outputs of unknown views."""
    _calls: Counter[str] = field(default_factory=Counter)
    _maps: SourceMaps = field(default_factory=SourceMaps)
    _tags: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _origins: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """By table of places: many tensors share one."""
    _changed: dict[int, tuple[int, StorageWeakRef]] = field(default_factory=dict)
    """By address of a storage the step at which it was changed: what its tensors saw before is
    unknown since then. The reference keeps another storage from having the address."""
    _step: int = 0

    def enter(self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A layer is called."""
        if layer.is_function:
            if self.constants is not None and layer.type == "fn:setitem":
                given = tensors([args, kwargs], dense=True)
                if any(self._views(tensor) != () for tensor in given):
                    self._change(given[0])
            return
        with unwatched(), torch.no_grad():
            for image in tensors(args, dense=True) if layer.index == 0 else ():
                if image.ndim in (4, 5):
                    places = self._maps.table(image.shape, self.channel_axis)
                    views = of_image(image.shape) if self.constants is not None else None
                    self._tags[image] = Tag(places, False, views, self._step)
            wanted = self.listener is not None or layer.name in self.wanted
            for key, tensor in given_tensors(args, kwargs) if wanted else ():
                self._note(layer, "input", key, tensor)

    def leave(
        self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """A layer or a function has returned."""
        number = self._calls[layer.name]
        self._calls[layer.name] += 1
        with unwatched(), torch.no_grad():
            if layer.is_function:
                name, given = layer.type.removeprefix("fn:"), tensors([args, kwargs], dense=True)
                results = tensors(output, dense=True)
                call = FollowedCall(name, args, kwargs, given, results, next(iter(results), None))
                self._follow(layer, call)
            elif layer.name in self.mixers and isinstance(output, Tensor):
                places = self._alike(tensors(args, dense=True), output)
                self._tags[output] = replace(self._tag(output), places=places)
            if self.listener is not None:
                made = self.listener(
                    layer, number, args, kwargs, output, lambda tensor: self._tag(tensor).made_by
                )
                for tensor in tensors(output) if made is not None else ():
                    self._tags[tensor] = replace(self._tag(tensor), made_by=made)
            wanted = self.listener is not None or layer.name in self.wanted
            for key, tensor in leaves(output) if wanted else ():
                if isinstance(tensor, Tensor):
                    self._note(layer, "output", key, tensor)
                    if self.constants is not None and (views := self._views(tensor)):
                        self.views[layer.name, number, key] = views

    def _note(self, layer: Layer, side: str, key: str, tensor: Tensor) -> None:
        """Sum up the places of a tensor, the first of its shape under its key."""
        if tensor.is_nested:
            return
        found = self.origins.setdefault((layer.name, tuple(tensor.shape)), {})
        if (side, key) not in found:
            tag, trace = self._tag(tensor), Trace()
            if tag.places is not None:
                if tag.places not in self._origins:
                    self._origins[tag.places] = self._maps.trace(tag.places)
                trace = self._origins[tag.places]
            found[side, key] = replace(trace, is_weights=True) if tag.is_weights else trace

    def _tag(self, tensor: Tensor) -> Tag:
        return self._tags.get(tensor) or Tag()  # type: ignore[no-untyped-call]

    def _follow(self, layer: Layer, call: FollowedCall) -> None:
        """Tag the results of a function."""
        made: Any = None
        if call.name in JOINS:
            tables = [self._tag(part).places for part in call.given]
            if any(table is not None for table in tables):
                made = call.joined(tables, torch.zeros(1, dtype=torch.float64))
        elif call.name in MOVES or call.name in RULES:
            made = self._by_rule(call)
        elif call.name not in LOST:
            made = [self._alike(call.given, result) for result in call.results]
        places = [made] if made is None or isinstance(made, Tensor) else list(made)
        places += [None] * len(call.results)
        kept = call.name not in RULES and bool(call.given) and self._tag(call.given[0]).is_weights
        weights = [kept and x.numel() == call.given[0].numel() for x in call.results]
        if call.name == MULTI_HEAD:
            weights = [place == 1 for place in range(len(call.results))]
        elif call.name == "softmax":
            attends, dim = self.in_attention(layer), call.argument(1, "dim")
            weights = [attends and dim in (-1, x.ndim - 1) for x in call.results]
        seen: Sequence[Views | None] = [None] * len(call.results)
        if self.constants is not None:
            given = [self._views(tensor) for tensor in call.given]
            seen = result_views(call, given)
            in_place = bool(call.given) and call.result is call.given[0]
            if in_place and (seen[0] is None or any(given[1:])):
                self._change(call.result)
        for result, table, yes, views in zip(call.results, places, weights, seen, strict=False):
            fits = table is not None and table.shape == result.shape
            made_by = self._tag(result).made_by  # it may be changed in place
            self._tags[result] = Tag(table if fits else None, yes, views, self._step, made_by)

    def _by_rule(self, call: FollowedCall) -> Any:
        tables = [self._tag(tensor).places for tensor in call.given[:2]]
        if not tables or not call.results:
            return None
        made, shape, factor = None, call.result.shape, tables[-1]
        if tables[0] is not None:
            with suppress(RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
                if call.name in MOVES:  # else in a way unknown to it
                    made = call.on(MOVES[call.name], tables[0])
                else:
                    made = RULES[call.name](self._maps, tables[0], call)
        elif call.name in MAPS and len(shape) in (4, 5) and shape[0] == 1:
            made = self._maps.table(shape)
        if made is None and call.name in PRODUCTS and factor is not None:
            rows_vary = varies(factor, factor.ndim - 2)  # else it has the second factor's columns
            made = None if rows_vary else factor[..., :1, :].expand(shape)
        elif made is not None and call.name in ATTENDING and factor is not None:
            # queries that are the same in each window stand where the window's tokens do
            in_windows = varies(factor, 0) and varies(factor, factor.ndim - 2)
            if in_windows and not varies(made, 0) and factor.shape[:-1] == shape[:-1]:
                made = factor[..., :1].expand(shape)
        return made

    def _alike(self, given: Sequence[Tensor], result: Tensor) -> Tensor | None:
        """A function that keeps a shape keeps places; a smaller operand is spread out."""
        tables = (self._tag(tensor).places for tensor in given)
        known = [table for table in tables if table is not None]
        if same := [table for table in known if table.shape == result.shape]:
            return same[0]
        for table in known:
            with suppress(RuntimeError):
                return table.expand(result.shape)
        return None

    def _views(self, tensor: Tensor) -> Views | None:
        """What a tensor's values see now; nothing, if it is a parameter."""
        if id(tensor) in (self.constants or ()):
            return ()
        tag = self._tag(tensor)
        changed, _ = self._changed.get(tensor.untyped_storage()._cdata, (0, None))
        return tag.views if tag.step >= changed else None

    def _change(self, tensor: Tensor) -> None:
        """A tensor was changed in a way that nobody knows."""
        self._step += 1
        storage = tensor.untyped_storage()
        self._changed[storage._cdata] = self._step, StorageWeakRef(storage)  # type: ignore[no-untyped-call]
