"""Follow an image through one forward pass: a tag for each tensor.

A count of tokens proves nothing: a hundred queries of a DETR are no 10 × 10 picture. So
the functions that a model calls are watched, once for each shape of input:

    image --conv--> map --flatten, transpose--> tokens --linear--> q --@ k, softmax-->
    weights
    tag:  positions 1..N, of a new map          1..N along axis 1  1..N                is_weights

`enter` and `leave` hear of each call of a layer or a function. A function passes the
tags of its tensors on to its results, by its rules in `FUNCTIONS`; what a layer takes
and returns is summed up as traces, which say how to draw it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from featviz.hooks.capture import given_tensors, leaves, tensors
from featviz.hooks.functions import unwatched
from featviz.layout.tracing.calls import MISFITS, FollowedCall
from featviz.layout.tracing.fields import (
    CONSTANT,
    Fields,
    FieldTables,
    apply_rule,
    of_image,
)
from featviz.layout.tracing.functions import FUNCTIONS, FollowedFunction
from featviz.layout.tracing.positions import SourceMaps, shared_positions
from featviz.records import Layer, Trace

MadeBy: TypeAlias = Callable[[Tensor], int | None]
"""The number of the call that made a tensor; None where no call did."""

Listener: TypeAlias = Callable[
    [Layer, int, Sequence[Any], Mapping[str, Any], Any, MadeBy], int | None
]
"""Takes a layer, which of its calls it is (from 0), its arguments and its output, and a
MadeBy for its tensors. Returns a number for the call, or None where calls inside it made
the output."""


class TraceKey(NamedTuple):
    """Which tensor of a layer a trace is of: the first one of this shape in all calls."""

    side: str
    """`input` or `output`."""
    key: str
    """Path inside a tuple, list or dict, as in `CaptureSite`."""
    shape: tuple[int, ...]


@dataclass(slots=True)
class Tag:
    """What is known of one tensor."""

    positions: Tensor | None = None
    """Its table of positions; None where it lies nowhere in the image."""
    is_weights: bool = False
    """Whether a softmax inside an attention made it."""
    fields: Fields | None = None
    """What its values see; None where nobody knows."""
    step: int = 0
    """The step of the pass at which `fields` was known."""
    made_by: int | None = None
    """The listener's number of the call that made it."""


class StorageChange(NamedTuple):
    """A change of a storage in a way that is not followed."""

    step: int
    storage: StorageWeakRef
    """Keeps another storage from getting the address meanwhile."""


@dataclass
class Follower:
    """Hears of the calls of a forward pass, and tags the tensors that they take and
    return."""

    layer_names: Collection[str]
    """Names of the layers whose tensors will be asked for. With a listener, all are."""
    mixer_names: Collection[str]
    """Names of the layers that mix tokens, and return as many."""
    in_attention: Callable[[Layer], bool]
    """Whether a layer is an attention, or inside one."""
    channel_axis: int
    """The axis of the input that counts channels."""
    constants: Collection[int] | None
    """Ids of parameters and buffers; None where receptive fields are not asked for,
    since they take as long as the model's layers."""
    listener: Listener | None
    traces: dict[str, dict[TraceKey, Trace]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """By name of the layer."""
    fields: dict[tuple[str, int, str], FieldTables] = field(default_factory=dict)
    """By name of the layer, number of its call and key; without outputs of which nobody
    knows what they see."""
    _calls: Counter[str] = field(default_factory=Counter)
    _maps: SourceMaps = field(default_factory=SourceMaps)
    _tags: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _traces: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """By table of positions: many tensors share one."""
    _changes: dict[int, StorageChange] = field(default_factory=dict)
    """The last change of each storage, by its address: what its tensors saw before is
    unknown since then."""
    _step: int = 0

    def enter(
        self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Hear that a layer or a function is called. What a module takes is noted; what the
        model itself takes are images, which are tagged. Of functions, only assignments
        are heard of here."""
        if layer.is_function:
            if layer.type == "fn:setitem" and self.constants is not None:
                # it returns None, so that `leave` does not hear of it
                arguments = _shaped([args, kwargs])
                if any(self._fields_of(tensor) != CONSTANT for tensor in arguments):
                    self._forget(arguments[0])
            return
        with unwatched(), torch.no_grad():
            if layer.index == 0:
                for image in _shaped(args):
                    self._begin(image)
            if self._is_asked_for(layer):
                for key, tensor in given_tensors(args, kwargs):
                    self._note(layer, "input", key, tensor)

    def leave(
        self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Hear that a layer or a function has returned: tag its output, and note where it
        lies, if somebody will ask."""
        number = self._calls[layer.name]
        self._calls[layer.name] += 1
        # what is done to tables is not a call of the model's
        with unwatched(), torch.no_grad():
            if layer.is_function:
                arguments = _shaped([args, kwargs])
                name = layer.type.removeprefix("fn:")
                call = FollowedCall(name, args, kwargs, arguments, _shaped(output))
                self._pass_on(layer, call)
            elif layer.name in self.mixer_names and isinstance(output, Tensor):
                # tokens come out where they went in
                tables = [self._tag(tensor).positions for tensor in _shaped(args)]
                positions = shared_positions(tables, output.shape)
                self._tags[output] = replace(self._tag(output), positions=positions)
            if self.listener is not None:
                made_by = self.listener(
                    layer, number, args, kwargs, output, self._made_by
                )
                self._note_call(output, made_by)
            if self._is_asked_for(layer):
                self._note_output(layer, number, output)

    def _note_call(self, output: Any, made_by: int | None) -> None:
        """Remember which call made the tensors of an output; None for no new one."""
        if made_by is not None:
            for tensor in tensors(output):
                self._tags[tensor] = replace(self._tag(tensor), made_by=made_by)

    def _note_output(self, layer: Layer, number: int, output: Any) -> None:
        """Keep where the tensors that a layer returned lie, and what they see.

        Args:
            number: of the layer's call.
            output: of any type; tensors anywhere in it count.
        """
        for key, tensor in leaves(output):
            if not isinstance(tensor, Tensor):
                continue
            self._note(layer, "output", key, tensor)
            # what sees nothing has no tables
            fields = None if self.constants is None else self._fields_of(tensor)
            if fields:
                self.fields[layer.name, number, key] = fields

    def _begin(self, image: Tensor) -> None:
        """Tag an input [N, C, H, W] or a clip; others have no positions."""
        if image.ndim in (4, 5):
            fields = None if self.constants is None else of_image(image.shape)
            positions = self._maps.table(image.shape, self.channel_axis)
            self._tags[image] = Tag(positions, fields=fields, step=self._step)

    def _is_asked_for(self, layer: Layer) -> bool:
        """Whether somebody will ask where the layer's tensors lie."""
        return self.listener is not None or layer.name in self.layer_names

    def _tag(self, tensor: Tensor) -> Tag:
        """The tensor's tag; an empty one where it was not followed."""
        return self._tags.get(tensor) or Tag()  # type: ignore[no-untyped-call]

    def _made_by(self, tensor: Tensor) -> int | None:
        return self._tag(tensor).made_by

    def _note(self, layer: Layer, side: str, key: str, tensor: Tensor) -> None:
        """Sum up the positions of a layer's tensor, if it is the first of its shape.

        Args:
            side, key: as those of `TraceKey`.
        """
        if tensor.is_nested:
            return
        traces = self.traces[layer.name]
        trace_key = TraceKey(side, key, tuple(tensor.shape))
        if trace_key in traces:
            return
        # summing up sorts all positions, so it is done once for a table, which many
        # tensors share
        tag = self._tag(tensor)
        trace = Trace()
        if tag.positions is not None:
            if tag.positions not in self._traces:
                self._traces[tag.positions] = self._maps.trace(tag.positions)
            trace = self._traces[tag.positions]
        traces[trace_key] = replace(trace, is_weights=True) if tag.is_weights else trace

    def _pass_on(self, layer: Layer, call: FollowedCall) -> None:
        """Tag the results of a function that a layer called.

        The rules of the function in FUNCTIONS say what its results inherit. A function that
        is not there keeps the positions of a tensor of the result's shape, and nobody
        knows what its results see. Where a rule does not understand the call, its
        results lie nowhere, or nobody knows what they see.

        Args:
            layer: in which the function ran.
        """
        function = FUNCTIONS.get(call.name, FollowedFunction())
        positions = self._positions_of_results(function, call)
        fields = self._fields_of_results(function, call)
        # the first argument's alone: scores @ values are values
        is_weights = bool(call.tensors) and self._tag(call.tensors[0]).is_weights
        weights = function.are_weights(call, is_weights, self.in_attention(layer))
        for index, result in enumerate(call.results):
            self._tags[result] = Tag(
                positions=positions[index],
                is_weights=weights[index],
                fields=fields[index],
                step=self._step,
                # a tensor that was changed in place was made by whoever made it first
                made_by=self._made_by(result),
            )

    def _positions_of_results(
        self, function: FollowedFunction, call: FollowedCall
    ) -> list[Tensor | None]:
        """The table of each result of a call; None for those that lie nowhere in the
        image."""
        positions: list[Tensor | None] = [None] * len(call.results)
        if not call.tensors:
            return positions
        tables = [self._tag(tensor).positions for tensor in call.tensors]
        with suppress(*MISFITS):  # called in a way that the rule does not know
            # a rule may return fewer tables than there are results
            made = function.position_rule(self._maps, call, tables)
            pairs = zip(call.results, made, strict=False)
            for index, (result, table) in enumerate(pairs):
                if table is not None and table.shape == result.shape:
                    positions[index] = table
        return positions

    def _fields_of_results(
        self, function: FollowedFunction, call: FollowedCall
    ) -> list[Fields | None]:
        """What each result of a call sees; None where nobody knows.

        Where the call changed a tensor in place, and its views cannot know how, what
        they see is forgotten, too.
        """
        if self.constants is None:
            return [None] * len(call.results)
        seen = [self._fields_of(tensor) for tensor in call.tensors]
        fields = apply_rule(function.field_rule, call, seen)
        is_in_place = bool(seen and fields) and call.results[0] is call.tensors[0]
        if is_in_place and (fields[0] is None or any(seen[1:])):
            # x.add_(y): other views of x's storage do not learn what they see now
            self._forget(call.tensors[0])
        return fields

    def _fields_of(self, tensor: Tensor) -> Fields | None:
        """What a tensor's values see: CONSTANT, if it is a parameter or a buffer; None
        where nobody knows, as of a tensor that is sparse, or whose storage was changed
        since it was tagged."""
        if id(tensor) in (self.constants or ()):
            return CONSTANT
        if not _has_storage(tensor):
            return None
        tag = self._tag(tensor)
        change = self._changes.get(tensor.untyped_storage()._cdata)
        if change is not None and tag.step < change.step:
            return None
        return tag.fields

    def _forget(self, tensor: Tensor) -> None:
        """What shares memory with a tensor sees something unknown from now on."""
        if not _has_storage(tensor):
            return
        self._step += 1
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._changes[storage._cdata] = StorageChange(self._step, reference)


def _shaped(value: Any) -> list[Tensor]:
    """The tensors in a value, as `leaves` finds them, but for nested ones: these have no
    shape."""
    return [tensor for tensor in tensors(value) if not tensor.is_nested]


def _has_storage(tensor: Tensor) -> bool:
    """Whether a tensor's values lie in a storage of its own or one that it shares;
    those of a sparse or nested one do not."""
    return tensor.layout == torch.strided and not tensor.is_nested
