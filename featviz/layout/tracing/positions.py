"""Positions: which value of a tensor lies where in the image, followed through
functions.

A followed tensor has a table of positions beside it: float64 of its shape, 0 for a
value that lies nowhere in the image, else the number of a position in a map. Each
convolution that changes the resolution begins a map, whose positions get the next free
numbers:

    image [1, 3, 4, 4]       1  2  3  4        conv, stride 2: a map of its own     17 18
    (all channels alike)     5  6  7  8                                             19 20
                             9 10 11 12        flatten(2).transpose(1, 2):
                            13 14 15 16        tokens [1, 4, C] have 17 18 19 20 along axis 1

What moves values moves their positions in the same way. What mixes values keeps the
positions along the axes that stay apart. What is not understood gives results without
positions. At the end, the numbers in a layer's table say which axes are rows and
columns, in whatever order the model cut and rolled its windows (`SourceMaps.trace`).

It is the old trick for checking a reshape, done for a whole model: send `arange`
through it, and read off where each number went."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featviz.layout.tracing.calls import (
    FollowedCall,
    Tables,
    einsum_factors,
    varies,
)
from featviz.records import Trace


class SourceMap(NamedTuple):
    """A map of the image, as a convolution makes it."""

    first: int
    """Number of its first position; the others follow row by row, time step by time
    step."""
    time: int
    """Time steps; 1 for an image."""
    height: int
    width: int

    @property
    def end(self) -> int:
        """The number behind that of its last position."""
        return self.first + self.time * self.height * self.width


class SourceMaps:
    """The maps that a forward pass has made so far."""

    def __init__(self) -> None:
        """Without a map; the first position will have the number 1."""
        self._maps: list[SourceMap] = []

    def begin(self, size: Sequence[int]) -> Tensor:
        """Begin a map.

        Args:
            size: height and width, or time steps, height and width.

        Returns:
            Its positions, float64 of this shape. float64 counts exactly to 2**53, and
            is a type that all functions take.
        """
        first = self._maps[-1].end if self._maps else 1
        *time, height, width = size
        self._maps.append(SourceMap(first, prod(time), height, width))
        numbers = torch.arange(first, self._maps[-1].end, dtype=torch.float64)
        return numbers.reshape(*size)

    def table(self, shape: Sequence[int], channel_axis: int = 1) -> Tensor:
        """Positions of a new map for a tensor, of its shape, alike in all channels.

        Args:
            shape: [N, C, H, W], [N, C, T, H, W] or, with channel axis 2, [N, T, C, H, W].
            channel_axis: 1 or 2.
        """
        positions = self.begin([*shape[1:channel_axis], *shape[channel_axis + 1 :]])
        return positions.unsqueeze(channel_axis - 1).expand(*shape)

    def map_of(self, numbers: Tensor) -> SourceMap | None:
        """The one map to which all numbers but 0 belong; None where there are none or
        several.

        Args:
            numbers: of positions, of any shape.
        """
        numbers = numbers[numbers > 0]
        if numbers.numel() == 0:
            return None
        index = bisect_right(
            self._maps, int(numbers.min()), key=lambda source: source.first
        )
        source = self._maps[index - 1]
        return source if int(numbers.max()) < source.end else None

    def merge(self, table: Tensor) -> Tensor:
        """Positions in a new, coarser map, where a layer merges patches of a map to one
        value.

        Args:
            table: [..., P], the positions of the P values of each patch; 0 for padding.

        Returns:
            [..., 1], the position of each patch. Rows and columns are those of the
            patches' means.

        Raises:
            ValueError: the patches make no rows and columns.
        """
        source = self.map_of(table.flatten())
        if source is None or source.time > 1:
            raise ValueError("no patches of one image")
        in_image = (table > 0).double()
        count = in_image.sum(-1).clamp(min=1)
        # padding counts neither for the sum nor for the count
        index = table - source.first

        def means(values: Tensor) -> Tensor:
            # in steps of 1/1024, so that equal means are equal numbers
            return ((values * in_image).sum(-1) / count).mul(1024).round()

        # the distinct means, and the number of each among them
        row_means, rows = torch.unique(
            means(index // source.width), return_inverse=True
        )
        column_means, columns = torch.unique(
            means(index % source.width), return_inverse=True
        )
        # patches of a grid have each pair of a row and a column once
        cells = rows * len(column_means) + columns
        size = len(row_means), len(column_means)
        if prod(size) != cells.numel() or len(torch.unique(cells)) != cells.numel():
            raise ValueError("no rows and columns of patches")
        return self.begin(size).flatten()[cells][..., None]

    def trace(self, table: Tensor) -> Trace:
        """Sum up a table of positions: which axes go over the rows and columns of which
        map.

        Returns:
            An empty trace, unless the values lie at all positions of a map, or evenly
            spread over it, each once; or each row of the table is a patch of a map,
            whose values have not been mixed yet.
        """
        if not table.numel():  # the boxes of a detector that found none
            return Trace()
        axes = []
        numbers = table
        for axis in range(table.ndim):
            if varies(table, axis):
                axes.append(axis)
            else:
                numbers = numbers.narrow(axis, 0, 1)
        trace = self._trace_of(numbers.flatten(), tuple(axes))
        if trace.grid is not None or len(axes) != 2 or table.ndim != 3:
            return trace
        for axis in axes:
            with suppress(ValueError):
                patches = self.merge(table.movedim(axis, 0).flatten(1))
                return self._trace_of(patches.flatten(), (axis,))
        return trace

    def _trace_of(self, numbers: Tensor, axes: tuple[int, ...]) -> Trace:
        """The trace of positions that are all of a map's, or every n-th row and column
        of it, each once; an empty one for others.

        Args:
            numbers: [N], of positions; 0 for values that lie nowhere.
            axes: the axes of the tensor along which they stand.
        """
        source = self.map_of(numbers)
        if not axes or source is None:
            return Trace()
        in_image = numbers > 0
        positions = (numbers[in_image] - source.first).long()
        grid = (source.time, source.height, source.width)
        if len(positions) < prod(grid) and source.time == 1:
            # a slice with a step, x[:, ::2], keeps a coarser map
            kept_rows, rows = torch.unique(
                positions // source.width, return_inverse=True
            )
            kept_columns, columns = torch.unique(
                positions % source.width, return_inverse=True
            )
            is_even = _is_even(kept_rows, source.height)
            if not (is_even and _is_even(kept_columns, source.width)):
                return Trace()
            grid = (1, len(kept_rows), len(kept_columns))
            positions = rows * len(kept_columns) + columns
        count = prod(grid)
        if len(positions) != count or len(torch.unique(positions)) != count:
            return Trace()
        everywhere = torch.full_like(numbers, -1).long()
        everywhere[in_image] = positions
        return Trace(grid=grid, axes=axes, positions=everywhere.numpy())


def _is_even(kept: Tensor, length: int) -> bool:
    """Whether rows (or columns) are every n-th one of all, to the end.

    Args:
        kept: their numbers, [n], rising.
        length: how many there are.
    """
    first = int(kept[0])
    step = int(kept[1]) - first if len(kept) > 1 else length
    return first < step and torch.equal(kept, torch.arange(first, length, step))


# What functions do to positions.

PositionRule = Callable[[SourceMaps, FollowedCall, Tables], Sequence[Any]]
"""Takes the maps so far, a call, and the tables of its tensors. Returns the tables of
its results; None, or none at all, for those that lie nowhere in the image."""

FirstTableRule = Callable[[SourceMaps, FollowedCall, Tensor], Tensor | None]
"""Takes the table of the first tensor. Returns that of the first result."""


def by_first_table(rule: FirstTableRule) -> PositionRule:
    """A rule for functions whose first tensor alone says where the first result lies."""
    return lambda maps, call, tables: (
        [] if tables[0] is None else [rule(maps, call, tables[0])]
    )


def move_positions(function: Callable[..., Any]) -> PositionRule:
    """A rule for a function that moves values and changes none: it does the same to
    their positions."""
    return lambda maps, call, tables: (
        [] if tables[0] is None else call.repeat(function, tables[0])
    )


def join_positions(function: Callable[..., Any]) -> PositionRule:
    """A rule for a function that joins tensors: a class token lies nowhere, and the
    tokens behind it keep their positions."""
    nothing = torch.zeros(1, dtype=torch.float64)
    return lambda maps, call, tables: (
        []
        if all(table is None for table in tables)
        else call.join(function, tables, nothing)
    )


def lose_positions(maps: SourceMaps, call: FollowedCall, tables: Tables) -> Tables:
    """The rule of functions that put values where other values say."""
    return []


def keep_positions(maps: SourceMaps, call: FollowedCall, tables: Tables) -> Tables:
    """The rule of functions in no table: what keeps a shape keeps positions."""
    return [shared_positions(tables, result.shape) for result in call.results]


def shared_positions(tables: Tables, shape: Sequence[int]) -> Tensor | None:
    """The first table of this shape, or the first that can be expanded to it; None where
    there is none."""
    traced = [table for table in tables if table is not None]
    for table in traced:
        if table.shape == shape:
            return table
    # a smaller operand, which the function itself would broadcast
    for table in traced:
        with suppress(RuntimeError):
            return table.expand(shape)
    return None


def _keep_rows(maps: SourceMaps, call: FollowedCall, table: Tensor) -> Tensor:
    """The positions of the result of a function that mixes the last axis, such as a
    linear layer. Those along the other axes stay; where each row of the last axis is a
    patch, the patch gets one position. ValueError where the rows are no patches."""
    last = table.ndim - 1
    if not varies(table, last):
        return table[..., :1].expand(call.shape)
    is_along_last = not any(varies(table, axis) for axis in range(last))
    if is_along_last and table.shape == call.shape:
        # a layer that mixes the tokens themselves, [1, C, T], and returns as many
        return table
    return maps.merge(table).expand(call.shape)


keep_rows = by_first_table(_keep_rows)
"""What mixes the last axis, as a linear layer, keeps the others; or merges patches to
tokens."""


def keep_queries(
    maps: SourceMaps, call: FollowedCall, tables: Tables
) -> Sequence[Tensor | None]:
    """The rule of scaled_dot_product_attention: a result lies where its query does.
    Where all windows have the same queries, it lies where the keys of its window do.

    Args:
        tables: positions of queries, keys and values.
    """
    if tables[0] is None:
        return []
    rows = _keep_rows(maps, call, tables[0])
    return [_in_windows(rows, tables[1], call.shape)]


def multiply(maps: SourceMaps, call: FollowedCall, tables: Tables) -> Tables:
    """The rule of products of matrices: the result has the positions of the first
    factor's rows; where these lie nowhere, those of the second factor's columns."""
    # queries @ keys, scores @ values: a row of the product is that of a query
    first = tables[0]
    second = tables[-1]  # the same, where a tensor is multiplied with itself
    if first is not None and not varies(first, -1):
        with suppress(RuntimeError):  # the product with a vector has no such rows
            rows = first.narrow(-1, 0, 1).expand(call.shape)
            return [_in_windows(rows, second, call.shape)]
    if second is None or varies(second, -2):
        return []
    return [second[..., :1, :].expand(call.shape)]


def _in_windows(rows: Tensor, keys: Tensor | None, shape: Sequence[int]) -> Tensor:
    """The positions of what has a row for each query: an attention's result, or queries
    @ keys. Queries that are the same in each window, being a parameter, get the
    positions of the window's own keys.

    Args:
        rows: positions of the queries.
        keys: positions of the keys, [windows, ..., tokens, D]; None where they lie
            nowhere.
        shape: of the result.
    """
    if keys is None or keys.shape[:-1] != shape[:-1] or varies(rows, 0):
        return rows
    # only keys that differ from window to window, and within each
    if not varies(keys, 0) or not varies(keys, -2):
        return rows
    return keys[..., :1].expand(shape)


def _sum_over(table: Tensor, *axes: int) -> Tensor:
    """A table with one value along the axes that are summed over; ValueError where
    positions change along one of them."""
    for axis in axes:
        if varies(table, axis):
            raise ValueError("positions are mixed")
        table = table.narrow(axis, 0, 1)
    return table


@by_first_table
def multiply_by_letters(maps: SourceMaps, call: FollowedCall, table: Tensor) -> Tensor:
    """The rule of torch.einsum: its first factor says where the result lies."""
    # of `bij,bjd->bid` the first factor has the rows of the result, as in a product
    others = [None] * (len(call.tensors) - 1)
    factors = einsum_factors(call, [table, *others], _sum_over)
    return factors[0].expand(call.shape)


@by_first_table
def reduce_positions(
    maps: SourceMaps, call: FollowedCall, table: Tensor
) -> Tensor | None:
    """The rule of a mean or a maximum: along axes where positions do not change, or
    over patches, as Hiera pools its queries."""
    axes = call.argument(1, "dim")
    if isinstance(axes, Tensor):  # torch.max(x, y), the larger of two
        return table if table.shape == call.shape else None
    if isinstance(axes, int):
        axes = [axes]
    if not axes:  # of all values, which lie everywhere
        return None
    keepdim = table.ndim == len(call.shape)
    if not any(varies(table, axis) for axis in axes):
        return table.amax(list(axes), keepdim=keepdim)
    # what is alike along an axis need not be merged for each of its values
    for axis in range(table.ndim):
        if not varies(table, axis):
            table = table.narrow(axis, 0, 1)
    (axis,) = axes  # ValueError where there are several
    patches = maps.merge(table.movedim(axis, -1)).movedim(-1, axis)
    return (patches if keepdim else patches.squeeze(axis)).expand(call.shape)


def resample(maps: SourceMaps, call: FollowedCall, tables: Tables) -> Tables:
    """The rule of resizing: it keeps the positions, or makes a map of another
    resolution."""
    table = tables[0]
    shape = call.shape
    if table is None or table.ndim not in (4, 5):
        return []
    varies_by_channel = varies(table, 1)
    if table.shape[2:] == shape[2:] and not varies_by_channel:
        return [table[:, :1].expand(shape)]
    # a picture whose rows and columns are none of the image's
    if not varies(table, -1) or not varies(table, -2):
        return []
    if not varies(table, 0):  # one image, or heads of it
        return [maps.table(shape)]
    if _is_clip_of_frames(maps, table):
        return [maps.table([1, *shape], channel_axis=2)[0]]
    return [] if varies_by_channel else _shrink_pieces(maps, table, shape)


def _shrink_pieces(
    maps: SourceMaps, table: Tensor, shape: Sequence[int]
) -> Sequence[Tensor]:
    """Pieces of a map, each of which became smaller by whole factors: a value lies in
    the middle of the block of values that it was made of.

    Args:
        table: [pieces, C, H, W], alike in all channels.
        shape: of the result, [pieces, C, rows, columns].

    Returns:
        The table of the result; none where the factors are not whole.
    """
    count, _, height, width = table.shape
    rows, columns = shape[2:]
    if height % rows or width % columns:
        return []
    blocks = table[:, :1].reshape(
        count, 1, rows, height // rows, columns, width // columns
    )
    merged = maps.merge(blocks.transpose(3, 4).flatten(4))
    return [merged[..., 0].expand(shape)]


def _is_clip_of_frames(maps: SourceMaps, table: Tensor) -> bool:
    """Whether each item of a batch [N, C, H, W] is the next time step of one clip."""
    source = maps.map_of(table)
    if source is None or source.time != len(table):
        return False
    frames = (table.movedim(0, -1) - source.first) // (source.height * source.width)
    return torch.equal(frames, torch.arange(len(table)).expand_as(frames))


def convolve(maps: SourceMaps, call: FollowedCall, tables: Tables) -> Tables:
    """The rule of convolutions and poolings. Where the argument was not followed, what
    they make of a batch of one is a new map of the image."""
    if tables[0] is not None:
        return resample(maps, call, tables)
    # What was not followed up to here may be an image still; items of a batch may be
    # regions, whose positions nobody knows.
    is_map = len(call.shape) in (4, 5) and call.shape[0] == 1
    return [maps.table(call.shape)] if is_map else []
