"""Receptive fields: what each value of a tensor sees of the input, followed through
functions.

A value sees a box of pixels. The four edges of all boxes stand in four tables of the
tensor's shape, each written so that the box around two boxes is the smaller number of
both:

             left          right           tops, lefts          first row, first column - FAR
       top    +--------------+             bottoms, rights    - last row,  - last column - FAR
              |   the box    |
    bottom    +--------------+             around(a, b) = minimum(a, b), on each edge

0 stands for a value that sees no pixel (padding, parameters): it is more than all
others, so that a minimum leaves it out. What moves values does the same to the tables,
and what mixes values takes the minimum of all that it mixes. What has no rule is not
guessed.

These are theoretical fields, as in Araujo, Norris and Sim, "Computing Receptive Fields
of Convolutional Neural Networks" (distill.pub, 2019), but measured value by value: at
borders, through branches, windows of tokens and attention, where no formula of strides
holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from featviz.layout.tracing.calls import (
    MISFITS,
    FollowedCall,
    Tables,
    einsum_factors,
    varies,
)

_FAR = 2.0**20
"""Beyond every pixel; float32 counts exactly so far."""


class FieldTables(NamedTuple):
    """Edges of the boxes that the values of a tensor see, float32 of its shape each, written
    as the module says."""

    tops: Tensor
    lefts: Tensor
    bottoms: Tensor
    rights: Tensor


Constant: TypeAlias = tuple[()]
Fields: TypeAlias = FieldTables | Constant
"""What a tensor sees: CONSTANT if it is made of parameters and constants alone."""
CONSTANT: Constant = ()
"""It sees nothing; no tables, so that it is false."""


def of_image(shape: Sequence[int]) -> FieldTables:
    """The fields of an image, of which each pixel sees itself.

    Args:
        shape: [..., H, W].
    """
    rows = torch.arange(shape[-2], dtype=torch.float32)[:, None]
    columns = torch.arange(shape[-1], dtype=torch.float32)
    edges = FieldTables(tops=rows, lefts=columns, bottoms=-rows, rights=-columns)
    return FieldTables._make((edge - _FAR).expand(*shape) for edge in edges)


class PixelBox(NamedTuple):
    """A rectangle of pixels; right and bottom are excluded."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.right - self.left, self.bottom - self.top


@dataclass(frozen=True)
class ReceptiveField:
    """What each position of a map [H, W] sees of the input, all channels together."""

    edges: Tensor
    """float32 [4, H, W]: for each position the numbers of `FieldTables`, in its order.
    """

    def box(self, row: int, column: int) -> PixelBox | None:
        """What the position at this row and column of the map sees; None where it sees
        only padding."""
        return _to_box(self.edges[:, row, column].tolist())

    @cached_property
    def largest(self) -> tuple[int, int]:
        """Height and width in pixels of what a position sees at most."""
        tops, lefts, bottoms, rights = self.edges
        # see `_to_box`; of a position that sees nothing they are far below zero
        heights = 1 - 2 * _FAR - bottoms - tops
        widths = 1 - 2 * _FAR - rights - lefts
        return max(0, int(heights.max())), max(0, int(widths.max()))

    def lines(self, size: Sequence[int]) -> list[int] | None:
        """The field as six numbers, `rundir.schema.Capture.receptive_field`.

        Args:
            size: height and width of the input.

        Returns:
            None where rows and columns do not step evenly, as of windows.
        """
        numbers = []
        for axis in (0, 1):
            begins = self.edges[axis] + _FAR
            ends = 1 - _FAR - self.edges[2 + axis]
            across = 1 - axis
            if varies(begins, across) or varies(ends, across):
                return None
            # the first column is that of all, or the first row
            line = _line(
                begins.select(across, 0).numpy(),
                ends.select(across, 0).numpy(),
                size[axis],
            )
            if line is None:
                return None
            numbers += line
        return numbers


def _line(begins: np.ndarray, ends: np.ndarray, size: int) -> list[int] | None:
    """Three numbers that stand for the fields of a row of units, which step evenly.

    Args:
        begins, ends: pixels of each unit's field [begin, end), cut off at the picture's
            edges; at least one unit.
        size: pixels of the picture along this axis.

    Returns:
        Where the first unit's field would begin and end without the picture's edges,
        and the step from one unit to the next; None where they do not step evenly.
    """
    # at an edge of the picture nobody sees how far a field would reach beyond
    seen_begins = np.flatnonzero(begins > 0)
    seen_ends = np.flatnonzero(ends < size)
    if len(seen_begins) > 1:
        step = begins[seen_begins[1]] - begins[seen_begins[0]]
    elif len(seen_ends) > 1:
        step = ends[seen_ends[1]] - ends[seen_ends[0]]
    else:
        # of a field that is nearly as large as the picture no two edges are seen
        step = round(size / len(begins))
    moved = step * np.arange(len(begins))
    # where no edge is seen, any place beyond the picture will do
    first_begin = (
        (begins - moved)[seen_begins[0]] if len(seen_begins) else -moved[-1] - step
    )
    first_end = (ends - moved)[seen_ends[0]] if len(seen_ends) else size
    are_begins = begins == np.maximum(0, first_begin + moved)
    are_ends = ends == np.minimum(size, first_end + moved)
    if not (are_begins & are_ends).all():
        return None
    return [int(first_begin), int(first_end), int(step)]


def _to_box(edges: Sequence[float]) -> PixelBox | None:
    """The box of four edges, top, left, bottom and right as `FieldTables` has them."""
    if min(edges) == 0:
        return None
    # exact, since float32 counts whole numbers to 2 ** 24
    top, left, bottom, right = (int(edge + _FAR) for edge in edges)
    return PixelBox(left, top, 1 - right, 1 - bottom)


# What functions do to receptive fields.

FieldRule: TypeAlias = Callable[[FollowedCall, Sequence[Fields]], Sequence[Fields]]
"""Takes a call and what its tensors see. Returns what its results see."""

EdgeRule: TypeAlias = Callable[[FollowedCall, Tables], Sequence[Tensor]]
"""The same for one of the four edges: takes the table of each tensor, None for one that
sees nothing; returns the table of each result."""


def apply_rule(
    rule: FieldRule | None, call: FollowedCall, seen: Sequence[Fields | None]
) -> list[Fields | None]:
    """What each result of a call sees; None where nobody knows, since the function has no
    rule, the rule does not understand the call, or nobody knows what a tensor sees.

    Args:
        rule: of the function; None for one in no table.
        seen: what each of the call's tensors sees; None where nobody knows.
    """
    result_tables: list[Fields | None] = [None] * len(call.results)
    arguments = [fields for fields in seen if fields is not None]
    is_known = len(arguments) == len(seen)
    # of constants every function makes a constant, also one without a rule
    if rule is see_nothing or (is_known and not any(arguments)):
        return [CONSTANT] * len(call.results)
    if rule is None or not is_known:
        return result_tables
    try:
        fields = rule(call, arguments)
    except MISFITS:
        return result_tables
    # a rule may return fewer than there are results
    for index, (result, tables) in enumerate(zip(call.results, fields, strict=False)):
        if all(table.shape == result.shape for table in tables):
            result_tables[index] = tables
    return result_tables


def see_nothing(call: FollowedCall, seen: Sequence[Fields]) -> Sequence[Fields]:
    """The rule of functions that take a tensor for its shape or type alone."""
    return [CONSTANT] * len(call.results)


def _on_each_edge(rule: EdgeRule) -> FieldRule:
    """A rule for receptive fields from a rule for one table, which is asked for each of
    the four edges; of a tensor that is CONSTANT it gets None."""

    def fields(call: FollowedCall, seen: Sequence[Fields]) -> Sequence[Fields]:
        edges = []
        for edge in range(4):
            edges.append(
                rule(call, [tables[edge] if tables else None for tables in seen])
            )
        return [FieldTables._make(tables) for tables in zip(*edges, strict=True)]

    return fields


def _only(tables: Tables) -> Tensor:
    """The table of the first tensor; ValueError where it sees nothing, or another tensor
    sees something, too."""
    seen = [table for table in tables if table is not None]
    if len(seen) > 1 or tables[0] is None:
        raise ValueError("its first tensor alone must see something")
    return tables[0]


def _around(tables: Iterable[Tensor | None]) -> Tensor:
    """The boxes around those of several tables, whose shapes are broadcast; None is left
    out."""
    seen = [table for table in tables if table is not None]
    # not torch.broadcast_shapes, which imports sympy: a second of the first picture
    shape = np.broadcast_shapes(*[table.shape for table in seen])
    # what is expanded stays so: channels, which all see the same, cost no time
    slim = []
    for table in seen:
        for axis, stride in enumerate(table.stride()):
            if stride == 0:
                table = table.narrow(axis, 0, 1)
        slim.append(table)
    return reduce(torch.minimum, slim).expand(shape)


def _slim(table: Tensor) -> Tensor:
    """A table in less memory: along axes where nothing changes it is expanded."""
    # where an axis is expanded already, it is slim enough: to compare takes time
    if 0 not in table.stride():
        for axis in range(table.ndim):
            if not varies(table, axis):
                table = table.narrow(axis, 0, 1).expand(table.shape)
    return table


def _mix(table: Tensor, *axes: int) -> Tensor:
    """The boxes around all values along these axes, each of which has length 1 then."""
    for axis in axes:
        if table.stride(axis) == 0 and table.shape[axis] > 0:
            table = table.narrow(axis, 0, 1)  # expanded: all are the same
        else:
            table = table.amin(axis, keepdim=True)
    return table


def move_fields(function: Callable[..., Any]) -> FieldRule:
    """A rule for a function that moves values and changes none."""
    return _on_each_edge(
        lambda call, tables: [
            _slim(table) for table in call.repeat(function, _only(tables))
        ]
    )


def join_fields(function: Callable[..., Any]) -> FieldRule:
    """A rule for a function that joins tensors."""
    nothing = torch.zeros(())
    return _on_each_edge(
        lambda call, tables: [
            _slim(table) for table in call.join(function, tables, nothing)
        ]
    )


def mix_fields(axes_of: Callable[[FollowedCall, Tensor], Iterable[int]]) -> FieldRule:
    """A rule for a function of one tensor that mixes values along some axes and keeps
    the shape, or makes another size of the last axis.

    Args:
        axes_of: takes a call and a table of its tensor; returns the axes.
    """

    def mix(call: FollowedCall, tables: Tables) -> Sequence[Tensor]:
        table = _only(tables)
        return [_mix(table, *axes_of(call, table)).expand(call.shape)] * len(
            call.results
        )

    return _on_each_edge(mix)


@_on_each_edge
def unite(call: FollowedCall, tables: Tables) -> Sequence[Tensor]:
    """The rule of functions whose result at a position comes from that position alone."""
    return [_around(tables).expand(call.shape)]


@_on_each_edge
def reduce_fields(call: FollowedCall, tables: Tables) -> Sequence[Tensor]:
    """The rule of a mean, a sum or a maximum over axes, or of the larger of two
    tensors."""
    # torch.max(x, y)
    if len(call.tensors) == 2:
        return [_around(tables).expand(call.shape)]
    table = _only(tables)
    axes = call.argument(1, "dim")
    if axes is None:
        axes = range(table.ndim)
    elif isinstance(axes, int):
        axes = [axes]
    mixed = _mix(table, *axes)
    if len(call.shape) != table.ndim:
        mixed = mixed.squeeze(tuple(axes))
    return [mixed.expand(call.shape)] * len(call.results)


@_on_each_edge
def halve(call: FollowedCall, tables: Tables) -> Sequence[Tensor]:
    """The rule of gated linear units."""
    return [_around(_only(tables).chunk(2, call.argument(1, "dim", -1)))]


@_on_each_edge
def multiply_fields(call: FollowedCall, tables: Tables) -> Sequence[Tensor]:
    """The rule of products: rows of the first matrix with columns of the second."""
    first, second = tables
    boxes = []
    if first is not None:
        boxes.append(_mix(first, -1))
    if second is not None:
        boxes.append(_mix(second, -2))
    return [_around(boxes).expand(call.shape)]


@_on_each_edge
def einsum_fields(call: FollowedCall, tables: Tables) -> Sequence[Tensor]:
    """The rule of torch.einsum."""
    return [_around(einsum_factors(call, tables, _mix)).expand(call.shape)]


def attend(token_axis: int) -> FieldRule:
    """A rule for attention functions, where each query sees all keys and values.

    Args:
        token_axis: the axis of keys and values that counts tokens.
    """

    def fields(call: FollowedCall, tables: Tables) -> Sequence[Tensor]:
        query, *keys_and_values = tables[:3]
        boxes = [] if query is None else [_mix(query, -1)]
        for table in keys_and_values:
            if table is not None:
                boxes.append(_mix(table, token_axis, -1))
        return [_around(boxes).expand(call.shape)]

    return _on_each_edge(fields)


def slide(call: FollowedCall, seen: Sequence[Fields]) -> Sequence[Fields]:
    """The rule of convolutions, poolings and resizing. Along each axis, the function
    itself says of each position of the result which positions it takes: it is called on
    as many rows of numbers as the argument has positions, each of which is 1 at one
    position and 0 elsewhere.

        kernel 3, stride 2 on 5 positions    takes     0 1 2          position 0 of the result
                                                           2 3 4      position 1

    Each of the four tables is then gathered at these positions, one axis after the
    other, and its minimum over them is an edge of the box around what they see.

    Args:
        call: of tensors [N, C, ...].
        seen: the receptive fields of the call's tensors, in order; only the first one
            slides.

    Raises:
        ValueError: the first tensor sees nothing; `apply_rule` then knows nothing of
            the result.
    """
    tables: Sequence[Tensor] = seen[0]
    if not tables:
        raise ValueError("its first tensor must see something")
    if "conv" in call.name:  # of groups, too: their channels see the same pixels
        tables = [_mix(table, 1) for table in tables]
    for axis in range(2, len(call.shape)):
        index = _taken(call, axis, tables[0].shape[axis])
        tables = [_gathered(table, axis, index) for table in tables]
    edges = FieldTables._make(table.expand(call.shape) for table in tables)
    return [edges] * len(call.results)


def _taken(call: FollowedCall, axis: int, size: int) -> Tensor:
    """Which positions of the argument each position of the result takes along an axis:
    int64 [positions of the result, the most that one takes], filled up with `size`.

    Args:
        size: of the argument along the axis.
    """
    # bilinear weights next to zero are rounding
    takes = _responses(call, axis, size)[:, 0].T.abs() > 1e-6
    width = int(takes.sum(1).max())
    # the positions that are taken first
    order = takes.int().argsort(1, descending=True)[:, :width]
    return torch.where(takes.gather(1, order), order, size)


def _gathered(table: Tensor, axis: int, index: Tensor) -> Tensor:
    """The boxes around the values that are taken along an axis.

    Args:
        index: [positions of the result, n], as from `_taken`.
    """
    # behind the last value one that sees nothing, for positions that take fewer
    padding = [0, 0] * (table.ndim - 1 - axis) + [0, 1]
    padded = functional.pad(table, padding)
    rows = padded.index_select(axis, index.flatten())
    shape = (*table.shape[:axis], *index.shape, *table.shape[axis + 1 :])
    return rows.reshape(shape).amin(axis + 1)


def _responses(call: FollowedCall, axis: int, size: int) -> Tensor:
    """Which positions along an axis take each position of the argument: what a function
    makes of impulses, rows that are 1 at one position and 0 at all others.

    Args:
        axis: of [N, C, ...], from 2 on.
        size: of the argument along the axis.

    Returns:
        float32 [size, 1, positions of the result]; not 0 where a position of the result
        takes the position of the impulse.
    """
    # the rows of a unit matrix
    impulses = torch.eye(size)[:, None]
    # conv2d and conv3d take the same arguments
    name = call.name.rstrip("d123")
    if name == "interpolate":
        # The other axes have one position each, of which it may make several alike.
        lengths = [1] * (len(call.shape) - 2)
        lengths[axis - 2] = size
        rows = impulses.reshape(size, 1, *lengths)
        (resized,) = call.repeat(functional.interpolate, rows)
        along = resized.transpose(2, axis)
        return along.reshape(size, 1, along.shape[2], -1)[..., 0]
    if name.startswith("adaptive"):
        length = call.argument_along(axis, 1, "output_size") or size
        return functional.adaptive_avg_pool1d(impulses, length)
    if "conv" in name:
        return _convolved(call, axis, impulses)
    return _pooled(call, axis, impulses)


def _convolved(call: FollowedCall, axis: int, impulses: Tensor) -> Tensor:
    """What a convolution along one axis makes of impulses [size, 1, size]. Its weights
    are taken as 1, since a weight of 0 would hide what is taken."""
    kernel = torch.ones(1, 1, call.argument(1, "weight").shape[axis])
    stride = call.argument_along(axis, 3, "stride", 1)
    padding = call.argument_along(axis, 4, "padding", 0)
    if not call.name.startswith("conv_transpose"):
        dilation = call.argument_along(axis, 5, "dilation", 1)
        return functional.conv1d(impulses, kernel, None, stride, padding, dilation)
    return functional.conv_transpose1d(
        impulses,
        kernel,
        stride=stride,
        padding=padding,
        output_padding=call.argument_along(axis, 5, "output_padding", 0),
        dilation=call.argument_along(axis, 7, "dilation", 1),
    )


def _pooled(call: FollowedCall, axis: int, impulses: Tensor) -> Tensor:
    """What an average or a maximum over windows along one axis makes of impulses
    [size, 1, size]."""
    kernel_size = call.argument_along(axis, 1, "kernel_size")
    stride = call.argument_along(axis, 2, "stride") or kernel_size
    padding = call.argument_along(axis, 3, "padding", 0)
    if call.name.startswith("avg_pool"):
        ceil_mode = call.argument(4, "ceil_mode", False)
        return functional.avg_pool1d(impulses, kernel_size, stride, padding, ceil_mode)
    dilation = call.argument_along(axis, 4, "dilation", 1)
    ceil_mode = call.argument(5, "ceil_mode", False)
    return functional.max_pool1d(
        impulses, kernel_size, stride, padding, dilation, ceil_mode
    )
