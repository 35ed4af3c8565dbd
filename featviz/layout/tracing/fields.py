"""Receptive fields: what each value of a tensor sees of the input, followed through
functions.

A value sees a box of pixels. A tensor has four tables of its own shape, one for each
edge: a table holds that edge of the box of each value. Edges are written so that the
edge of the box around two boxes is the smaller of their two numbers:

             left          right           tops, lefts          first row, first column - FAR
       top    +--------------+             bottoms, rights    - last row,  - last column - FAR
              |   the box    |
    bottom    +--------------+             around(a, b) = minimum(a, b), on each edge

0 stands for a value that sees no pixel (padding, parameters): all edges are below 0, so
that a minimum leaves it out. A function that moves values is applied to the tables, too.
For a function that mixes values, a table takes the minimum over the mixed values. If a
function has no rule, nothing is guessed.

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
    """The boxes that the values of a tensor see: a table for each edge, float32 of the
    tensor's shape, written as the module's docstring says."""

    tops: Tensor
    lefts: Tensor
    bottoms: Tensor
    rights: Tensor


Constant: TypeAlias = tuple[()]
Fields: TypeAlias = FieldTables | Constant
"""What a tensor sees: CONSTANT if it depends only on parameters and constants."""
CONSTANT: Constant = ()
"""What a tensor without pixels sees: no tables, so that it is false in an `if`."""


def of_image(shape: Sequence[int]) -> FieldTables:
    """The fields of an image: each pixel sees itself.

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
    """float32 [4, H, W]: the four tables of `FieldTables`, in their order."""

    def box(self, row: int, column: int) -> PixelBox | None:
        """The pixels that the position at this row and column of the map sees; None if it
        sees only padding."""
        return _to_box(self.edges[:, row, column].tolist())

    @cached_property
    def largest(self) -> tuple[int, int]:
        """The largest height and the largest width of a box, in pixels."""
        tops, lefts, bottoms, rights = self.edges
        # as in `_to_box`; far below zero for a position that sees nothing
        heights = 1 - 2 * _FAR - bottoms - tops
        widths = 1 - 2 * _FAR - rights - lefts
        return max(0, int(heights.max())), max(0, int(widths.max()))

    def lines(self, size: Sequence[int]) -> list[int] | None:
        """The field as six numbers, as `rundir.schema.Capture.receptive_field` explains.

        Args:
            size: height and width of the input in pixels.

        Returns:
            None if rows or columns do not step evenly, as in a model with windows.
        """
        numbers = []
        for axis in (0, 1):
            begins = self.edges[axis] + _FAR
            ends = 1 - _FAR - self.edges[2 + axis]
            across = 1 - axis
            if varies(begins, across) or varies(ends, across):
                return None
            # all columns (or rows) are alike: the first stands for all
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
    """Describe the fields of a row of units by three numbers.

    Args:
        begins, ends: pixels of each unit's field [begin, end), cut off at the picture's
            edges; at least one unit.
        size: pixels of the picture along this axis.

    Returns:
        Where the first unit's field would begin and end if the picture had no edges,
        and the step from one unit to the next. None if the fields do not step evenly.
    """
    # a field that begins or ends at an edge of the picture may have been cut off there
    seen_begins = np.flatnonzero(begins > 0)
    seen_ends = np.flatnonzero(ends < size)
    if len(seen_begins) > 1:
        step = begins[seen_begins[1]] - begins[seen_begins[0]]
    elif len(seen_ends) > 1:
        step = ends[seen_ends[1]] - ends[seen_ends[0]]
    else:
        # the fields are nearly as large as the picture, and no two edges are inside it
        step = round(size / len(begins))
    moved = step * np.arange(len(begins))
    # if no field begins (or ends) inside the picture, any number beyond it will do
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
    """The box of four edges, top, left, bottom and right as `FieldTables` has them; None
    if it has no pixel."""
    if min(edges) == 0:
        return None
    # exact, since float32 counts whole numbers to 2 ** 24
    top, left, bottom, right = (int(edge + _FAR) for edge in edges)
    return PixelBox(left, top, 1 - right, 1 - bottom)


# What functions do to receptive fields.

FieldRule: TypeAlias = Callable[[FollowedCall, Sequence[Fields]], Sequence[Fields]]
"""Takes a call and the fields of its tensors. Returns the fields of its results."""

EdgeRule: TypeAlias = Callable[[FollowedCall, Tables], Sequence[Tensor]]
"""A rule for one of the four edges. Takes a call and the edge's table for each of its
tensors, None for a tensor that sees no pixel. Returns the edge's table for each result."""


def apply_rule(
    rule: FieldRule | None, call: FollowedCall, seen: Sequence[Fields | None]
) -> list[Fields | None]:
    """The fields of each result of a call.

    Args:
        rule: the function's rule; None if it has none.
        seen: the fields of each of the call's tensors; None for unknown ones.

    Returns:
        None for a result whose fields are unknown: those of a tensor are, the function
        has no rule, or the rule does not understand the call.
    """
    result_fields: list[Fields | None] = [None] * len(call.results)
    arguments = [fields for fields in seen if fields is not None]
    is_known = len(arguments) == len(seen)
    # from constants every function makes a constant, even one without a rule
    if rule is see_nothing or (is_known and not any(arguments)):
        return [CONSTANT] * len(call.results)
    if rule is None or not is_known:
        return result_fields
    try:
        made = rule(call, arguments)
    except MISFITS:
        return result_fields
    # a rule may return fewer fields than there are results
    for index, (result, fields) in enumerate(zip(call.results, made, strict=False)):
        if all(table.shape == result.shape for table in fields):
            result_fields[index] = fields
    return result_fields


def see_nothing(call: FollowedCall, seen: Sequence[Fields]) -> Sequence[Fields]:
    """The rule of functions that use only a tensor's shape or type, not its values."""
    return [CONSTANT] * len(call.results)


def _on_each_edge(rule: EdgeRule) -> FieldRule:
    """A rule for receptive fields, from a rule for one edge, which is called for each of
    the four edges."""

    def field_rule(call: FollowedCall, seen: Sequence[Fields]) -> Sequence[Fields]:
        """Call `rule` for each edge. A CONSTANT tensor has None as its table."""
        edges = []
        for edge in range(4):
            edges.append(
                rule(call, [fields[edge] if fields else None for fields in seen])
            )
        return [FieldTables._make(tables) for tables in zip(*edges, strict=True)]

    return field_rule


def _only(tables: Tables) -> Tensor:
    """The table of the first tensor. ValueError if this tensor sees no pixel, or another
    tensor sees some, too."""
    seen = [table for table in tables if table is not None]
    if len(seen) > 1 or tables[0] is None:
        raise ValueError("its first tensor alone must see something")
    return tables[0]


def _around(tables: Iterable[Tensor | None]) -> Tensor:
    """One edge of the boxes around the boxes of several tensors.

    Args:
        tables: that edge's table of each tensor; their shapes are broadcast. None is
            left out, but not all may be None.
    """
    seen = [table for table in tables if table is not None]
    # not torch.broadcast_shapes, which imports sympy: a second of the first picture
    shape = np.broadcast_shapes(*[table.shape for table in seen])
    # expanded axes stay expanded: channels, which all see the same, then cost no time
    slim = []
    for table in seen:
        for axis, stride in enumerate(table.stride()):
            if stride == 0:
                table = table.narrow(axis, 0, 1)
        slim.append(table)
    return reduce(torch.minimum, slim).expand(shape)


def _slim(table: Tensor) -> Tensor:
    """A table in less memory: axes along which no number changes become expanded ones."""
    # a table with an expanded axis is small enough already, and comparing takes time
    if 0 not in table.stride():
        for axis in range(table.ndim):
            if not varies(table, axis):
                table = table.narrow(axis, 0, 1).expand(table.shape)
    return table


def _mix(table: Tensor, *axes: int) -> Tensor:
    """One edge of the boxes around the boxes of all values along some axes.

    Args:
        table: that edge's table.
        axes: axes of the table; in the result they have length 1.
    """
    for axis in axes:
        if table.stride(axis) == 0 and table.shape[axis] > 0:
            table = table.narrow(axis, 0, 1)  # expanded: all numbers are the same
        else:
            table = table.amin(axis, keepdim=True)
    return table


def move_fields(function: Callable[..., Any]) -> FieldRule:
    """A rule for a function that moves values and changes none: it is applied to the
    tables."""
    return _on_each_edge(
        lambda call, tables: [
            _slim(table) for table in call.repeat(function, _only(tables))
        ]
    )


def join_fields(function: Callable[..., Any]) -> FieldRule:
    """A rule for a function that joins tensors: it is applied to their tables."""
    nothing = torch.zeros(())
    return _on_each_edge(
        lambda call, tables: [
            _slim(table) for table in call.join(function, tables, nothing)
        ]
    )


def mix_fields(axes_of: Callable[[FollowedCall, Tensor], Iterable[int]]) -> FieldRule:
    """A rule for a function of one tensor that mixes values along some axes. The shape
    stays, except that the last axis may get another length.

    Args:
        axes_of: takes a call and a table of its tensor; returns the axes along which the
            function mixes values.
    """

    def mix(call: FollowedCall, tables: Tables) -> Sequence[Tensor]:
        """The same table for each result of the call."""
        table = _only(tables)
        return [_mix(table, *axes_of(call, table)).expand(call.shape)] * len(
            call.results
        )

    return _on_each_edge(mix)


@_on_each_edge
def unite(call: FollowedCall, tables: Tables) -> Sequence[Tensor]:
    """The rule of functions whose result at a position comes only from the values at that
    position."""
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
    mixed = []
    if first is not None:
        mixed.append(_mix(first, -1))
    if second is not None:
        mixed.append(_mix(second, -2))
    return [_around(mixed).expand(call.shape)]


@_on_each_edge
def einsum_fields(call: FollowedCall, tables: Tables) -> Sequence[Tensor]:
    """The rule of torch.einsum."""
    return [_around(einsum_factors(call, tables, _mix)).expand(call.shape)]


def attend(token_axis: int) -> FieldRule:
    """A rule for attention functions, where each query sees all keys and values.

    Args:
        token_axis: the axis of keys and values that counts tokens.
    """

    def attend_edge(call: FollowedCall, tables: Tables) -> Sequence[Tensor]:
        """The edge's table of the result. The first three tables are those of queries,
        keys and values; a mask may follow, which shows no pixels."""
        query, *keys_and_values = tables[:3]
        mixed = [] if query is None else [_mix(query, -1)]
        for table in keys_and_values:
            if table is not None:
                mixed.append(_mix(table, token_axis, -1))
        return [_around(mixed).expand(call.shape)]

    return _on_each_edge(attend_edge)


def slide(call: FollowedCall, seen: Sequence[Fields]) -> Sequence[Fields]:
    """The rule of convolutions, poolings and resizing. Which positions of the argument
    does a position of the result take? Along each axis, the function itself tells: it
    is called on rows of numbers that are 1 at one position and 0 elsewhere, one row for
    each position of the argument.

        kernel 3, stride 2 on 5 positions    takes     0 1 2          position 0 of the result
                                                           2 3 4      position 1

    Each of the four tables is then gathered at these positions, one axis after the
    other. The minimum over them is an edge of the box around all that they see.

    Args:
        call: a call with tensors [N, C, ...].
        seen: the receptive fields of the call's tensors, in order; only those of the
            first tensor count.

    Raises:
        ValueError: the first tensor sees no pixel. `apply_rule` then returns None, for
            unknown.
    """
    tables: Sequence[Tensor] = seen[0]
    if not tables:
        raise ValueError("its first tensor must see something")
    if "conv" in call.name:  # grouped ones, too: all channels see the same pixels
        tables = [_mix(table, 1) for table in tables]
    for axis in range(2, len(call.shape)):
        index = _taken_positions(call, axis, tables[0].shape[axis])
        tables = [_gather_boxes(table, axis, index) for table in tables]
    edges = FieldTables._make(table.expand(call.shape) for table in tables)
    return [edges] * len(call.results)


def _taken_positions(call: FollowedCall, axis: int, size: int) -> Tensor:
    """The positions of the argument that each position of the result takes along an axis.

    Args:
        size: positions of the argument along the axis.

    Returns:
        int64 [positions of the result, n]; n is the largest number of positions that one
        takes. Rows with fewer are filled up with `size`.
    """
    # a bilinear weight next to zero is a rounding error
    takes = _responses(call, axis, size)[:, 0].T.abs() > 1e-6
    width = int(takes.sum(1).max())
    # the positions that are taken first
    order = takes.int().argsort(1, descending=True)[:, :width]
    return torch.where(takes.gather(1, order), order, size)


def _gather_boxes(table: Tensor, axis: int, index: Tensor) -> Tensor:
    """One edge of the boxes around the values that are taken along an axis.

    Args:
        table: that edge's table of the argument.
        index: what `_taken_positions` returns for the axis.
    """
    # one more value, which sees no pixel, for the index `size`
    padding = [0, 0] * (table.ndim - 1 - axis) + [0, 1]
    padded = functional.pad(table, padding)
    rows = padded.index_select(axis, index.flatten())
    shape = (*table.shape[:axis], *index.shape, *table.shape[axis + 1 :])
    return rows.reshape(shape).amin(axis + 1)


def _responses(call: FollowedCall, axis: int, size: int) -> Tensor:
    """What a function makes of impulses: rows along one axis that are 1 at one position
    and 0 at all others.

    Args:
        axis: one of the spatial axes of [N, C, ...], 2 or more.
        size: positions of the argument along the axis.

    Returns:
        float32 [size, 1, positions of the result]: a row for each impulse. It is not 0
        at the positions of the result that take the impulse's position.
    """
    # the rows of a unit matrix
    impulses = torch.eye(size)[:, None]
    # conv2d and conv3d take the same arguments
    name = call.name.rstrip("d123")
    if name == "interpolate":
        # The other axes have one position each, from which `interpolate` may make
        # several equal ones: the first is kept.
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
        return _convolve_impulses(call, axis, impulses)
    return _pool_impulses(call, axis, impulses)


def _convolve_impulses(call: FollowedCall, axis: int, impulses: Tensor) -> Tensor:
    """What a convolution along one axis makes of impulses [size, 1, size]. All weights
    count as 1, since a weight of 0 would hide a position that is taken."""
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


def _pool_impulses(call: FollowedCall, axis: int, impulses: Tensor) -> Tensor:
    """What a pooling (average or maximum) along one axis makes of impulses
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
