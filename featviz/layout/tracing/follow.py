"""Follow an image through one forward pass: a tag for each tensor.

The number of tokens proves nothing: a hundred queries of a DETR are not a 10 × 10
picture. So the functions that a model calls are watched, once for each shape of input:

    image --conv--> map --flatten, transpose--> tokens --linear--> q --@ k, softmax-->
    weights
    tag:  positions 1..N, of a new map          1..N along axis 1  1..N                is_weights

`enter` and `leave` are called for each call of a layer or a function. The results of a
function get tags from the tags of its arguments, by the function's rules in `FUNCTIONS`.
The tags of tensors that a layer takes and returns are summed up as traces, which say how
to draw these tensors."""

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
"""Takes a tensor. Returns the number of the call that made it; None if no call did."""

Listener: TypeAlias = Callable[
    [Layer, int, Sequence[Any], Mapping[str, Any], Any, MadeBy], int | None
]
"""Takes a layer, the number of its call (from 0), the call's arguments, keyword arguments
and output, and a MadeBy for the tensors in these. Returns a number for the call, or None
if calls inside it made the output."""


class TraceKey(NamedTuple):
    """Which tensor of a layer a trace describes: the first one of this shape in all calls."""

    side: str
    """`input` or `output`."""
    key: str
    """Path inside a tuple, list or dict, as in `CaptureSite`."""
    shape: tuple[int, ...]


@dataclass(slots=True)
class Tag:
    """What is known of one tensor."""

    positions: Tensor | None = None
    """Its table of positions; None if it lies nowhere in the image."""
    is_weights: bool = False
    """Whether it is the weights of an attention."""
    fields: Fields | None = None
    """What its values see; None if unknown."""
    step: int = 0
    """`Follower._step` when the tensor got this tag."""
    made_by: int | None = None
    """The listener's number of the call that made the tensor."""


class StorageChange(NamedTuple):
    """A change of a storage in a way that is not followed."""

    step: int
    """`Follower._step` after the change."""
    storage: StorageWeakRef
    """While this reference lives, no other storage gets the same address."""


@dataclass
class Follower:
    """Is told of each call of a forward pass, and tags the tensors that the calls take
    and return."""

    layer_names: Collection[str]
    """Names of the layers whose tensors get traces. With a listener, all layers' do."""
    mixer_names: Collection[str]
    """Names of the layers that mix tokens, and return as many."""
    in_attention: Callable[[Layer], bool]
    """Whether a layer is an attention, or inside one."""
    channel_axis: int
    """The axis of the input that counts channels."""
    constants: Collection[int] | None
    """Ids of parameters and buffers. None if receptive fields are not wanted: following
    them takes as long as the model's layers."""
    listener: Listener | None
    traces: dict[str, dict[TraceKey, Trace]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """By name of the layer."""
    fields: dict[tuple[str, int, str], FieldTables] = field(default_factory=dict)
    """The fields of outputs, by name of the layer, number of its call, and key of the
    output. Outputs whose fields are unknown are missing."""
    _calls: Counter[str] = field(default_factory=Counter)
    _maps: SourceMaps = field(default_factory=SourceMaps)
    _tags: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _traces: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """Traces by table of positions: many tensors share one table."""
    _changes: dict[int, StorageChange] = field(default_factory=dict)
    """The last change of each storage, by the storage's address. The fields of tensors
    that were tagged before the change are unknown since then."""
    _step: int = 0

    def enter(
        self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Called before a layer or a function runs: note the tensors that a layer takes.
        The tensors that the model itself takes are images, which are tagged. Functions
        other than assignments wait for `leave`."""
        if layer.is_function:
            if layer.type == "fn:setitem" and self.constants is not None:
                # an assignment returns None, so `leave` is not called for it
                arguments = _tensors_with_shape([args, kwargs])
                if any(self._fields_of(tensor) != CONSTANT for tensor in arguments):
                    self._forget(arguments[0])
            if layer.type == "fn:setitem" and self.listener is not None:
                # it changes its first argument, which counts as its output
                made_by = self.listener(
                    layer, self._calls[layer.name], args, kwargs, args[0], self._made_by
                )
                self._calls[layer.name] += 1
                self._note_call(args[0], made_by)
            return
        with unwatched(), torch.no_grad():
            if layer.index == 0:
                for image in _tensors_with_shape(args):
                    self._begin(image)
            if self._is_traced(layer):
                for key, tensor in given_tensors(args, kwargs):
                    self._note(layer, "input", key, tensor)

    def leave(
        self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Called after a layer or a function has run: tag the output, and note the
        positions of a layer's output if the layer is among those that get traces."""
        number = self._calls[layer.name]
        self._calls[layer.name] += 1
        # unwatched: functions that are applied to tables are not calls of the model
        with unwatched(), torch.no_grad():
            if layer.is_function:
                arguments = _tensors_with_shape([args, kwargs])
                name = layer.type.removeprefix("fn:")
                call = FollowedCall(
                    name, args, kwargs, arguments, _tensors_with_shape(output)
                )
                self._pass_on(layer, call)
            elif layer.name in self.mixer_names and isinstance(output, Tensor):
                # tokens come out where they went in
                tables = [
                    self._tag(tensor).positions for tensor in _tensors_with_shape(args)
                ]
                positions = shared_positions(tables, output.shape)
                self._tags[output] = replace(self._tag(output), positions=positions)
            if self.listener is not None:
                made_by = self.listener(
                    layer, number, args, kwargs, output, self._made_by
                )
                self._note_call(output, made_by)
            if self._is_traced(layer):
                self._note_output(layer, number, output)

    def _note_call(self, output: Any, made_by: int | None) -> None:
        """Tag the tensors of an output with the number of the call that made them; None
        leaves their tags as they are."""
        if made_by is not None:
            for tensor in tensors(output):
                self._tags[tensor] = replace(self._tag(tensor), made_by=made_by)

    def _note_output(self, layer: Layer, number: int, output: Any) -> None:
        """Keep the traces and the fields of the tensors that a layer returned.

        Args:
            number: number of the layer's call, from 0.
            output: any object; tensors anywhere in it count.
        """
        for key, tensor in leaves(output):
            if not isinstance(tensor, Tensor):
                continue
            self._note(layer, "output", key, tensor)
            # CONSTANT, which has no tables, is left out
            fields = None if self.constants is None else self._fields_of(tensor)
            if fields:
                self.fields[layer.name, number, key] = fields

    def _begin(self, image: Tensor) -> None:
        """Tag an image [N, C, H, W] or a clip that the model takes; other arguments get no
        tag."""
        if image.ndim in (4, 5):
            fields = None if self.constants is None else of_image(image.shape)
            positions = self._maps.table(image.shape, self.channel_axis)
            self._tags[image] = Tag(positions, fields=fields, step=self._step)

    def _is_traced(self, layer: Layer) -> bool:
        """Whether the layer's tensors get traces."""
        return self.listener is not None or layer.name in self.layer_names

    def _tag(self, tensor: Tensor) -> Tag:
        """The tensor's tag; an empty one if it has none."""
        return self._tags.get(tensor) or Tag()  # type: ignore[no-untyped-call]

    def _made_by(self, tensor: Tensor) -> int | None:
        """The listener's number of the call that made a tensor; None if unknown."""
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
        # summing up sorts all positions: it is done once for a table that many tensors
        # share
        tag = self._tag(tensor)
        trace = Trace()
        if tag.positions is not None:
            if tag.positions not in self._traces:
                self._traces[tag.positions] = self._maps.trace(tag.positions)
            trace = self._traces[tag.positions]
        traces[trace_key] = replace(trace, is_weights=True) if tag.is_weights else trace

    def _pass_on(self, layer: Layer, call: FollowedCall) -> None:
        """Tag the results of a function that a layer called.

        The rules of the function in FUNCTIONS say what the results inherit. If the function
        is missing there, a result has the positions of a tensor of its shape, and unknown
        fields. If a rule does not understand the call, the results have no positions, or
        unknown fields.

        Args:
            layer: in which the function ran.
        """
        function = FUNCTIONS.get(call.name, FollowedFunction())
        positions = self._positions_of_results(function, call)
        fields = self._fields_of_results(function, call)
        # only the first argument counts: in values * weights, the result is values
        is_weights = bool(call.tensors) and self._tag(call.tensors[0]).is_weights
        weights = function.are_weights(call, is_weights, self.in_attention(layer))
        for index, result in enumerate(call.results):
            self._tags[result] = Tag(
                positions=positions[index],
                is_weights=weights[index],
                fields=fields[index],
                step=self._step,
                # a tensor that is changed in place keeps the call that made it
                made_by=self._made_by(result),
            )

    def _positions_of_results(
        self, function: FollowedFunction, call: FollowedCall
    ) -> list[Tensor | None]:
        """The table of each result of a call; None for a result that lies nowhere in the
        image, and for all results if the rule does not understand the call."""
        positions: list[Tensor | None] = [None] * len(call.results)
        if not call.tensors:
            return positions
        tables = [self._tag(tensor).positions for tensor in call.tensors]
        with suppress(*MISFITS):  # the rule does not understand the call
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
        """The fields of each result of a call; None for unknown ones.

        If the call changed a tensor in place, the fields of other tensors with the same
        storage may be wrong now, and are forgotten.
        """
        if self.constants is None:
            return [None] * len(call.results)
        seen = [self._fields_of(tensor) for tensor in call.tensors]
        fields = apply_rule(function.field_rule, call, seen)
        is_in_place = bool(seen and fields) and call.results[0] is call.tensors[0]
        if is_in_place and (fields[0] is None or any(seen[1:])):
            # x.add_(y): other views of x's storage now see y's pixels, too
            self._forget(call.tensors[0])
        return fields

    def _fields_of(self, tensor: Tensor) -> Fields | None:
        """The fields of a tensor: CONSTANT for a parameter or a buffer; None if unknown, as
        for a sparse tensor, or one whose storage was changed after it was tagged."""
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
        """From now on, the fields of all tensors that share this one's memory are unknown."""
        if not _has_storage(tensor):
            return
        self._step += 1
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._changes[storage._cdata] = StorageChange(self._step, reference)


def _tensors_with_shape(value: Any) -> list[Tensor]:
    """The tensors in a value, as `leaves` finds them, without nested tensors: these have
    no shape."""
    return [tensor for tensor in tensors(value) if not tensor.is_nested]


def _has_storage(tensor: Tensor) -> bool:
    """Whether a tensor's values lie in one storage, which it may share. Those of a sparse
    or nested tensor do not."""
    return tensor.layout == torch.strided and not tensor.is_nested
