"""Positions: where in the image each value of a tensor lies, followed through functions.

A followed tensor has a table of positions: float64 of the tensor's shape, 0 for a value
that lies nowhere in the image, else the number of a position in a map. Each convolution
that changes the resolution begins a new map, whose positions get the next free numbers:

    image [1, 3, 4, 4]       1  2  3  4        conv, stride 2: a map of its own     17 18
    (all channels alike)     5  6  7  8                                             19 20
                             9 10 11 12        flatten(2).transpose(1, 2):
                            13 14 15 16        tokens [1, 4, C] have 17 18 19 20 along axis 1

A function that moves values is applied to their positions, too. A function that mixes
values along some axes keeps the positions along the other axes. The results of a call
that is not understood have no positions. At the end, the numbers in a layer's table say
which axes are rows and columns, however the model cut and rolled its windows
(`SourceMaps.trace`).

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
    """Number of the map's first position; the others follow row by row, time step by time
    step."""
    time: int
    """Time steps; 1 for an image."""
    height: int
    width: int

    @property
    def end(self) -> int:
        """The number of the map's last position, plus 1."""
        return self.first + self.time * self.height * self.width


class SourceMaps:
    """The maps that a forward pass has made so far."""

    def __init__(self) -> None:
        """Begin without maps. The first position will have the number 1."""
        self._maps: list[SourceMap] = []

    def begin(self, size: Sequence[int]) -> Tensor:
        """Begin a map.

        Args:
            size: height and width, or time steps, height and width.

        Returns:
            The map's positions, float64 of shape `size`. float64 counts exactly to 2**53,
            and all functions take it.
        """
        first = self._maps[-1].end if self._maps else 1
        *time, height, width = size
        self._maps.append(SourceMap(first, prod(time), height, width))
        numbers = torch.arange(first, self._maps[-1].end, dtype=torch.float64)
        return numbers.reshape(*size)

    def table(self, shape: Sequence[int], channel_axis: int = 1) -> Tensor:
        """Begin a map for a tensor. All channels and all items N get the same positions.

        Args:
            shape: shape of the tensor: [N, C, H, W], [N, C, T, H, W] or, with channel axis
                2, [N, T, C, H, W].
            channel_axis: 1 or 2.

        Returns:
            The tensor's table of positions.
        """
        positions = self.begin([*shape[1:channel_axis], *shape[channel_axis + 1 :]])
        return positions.unsqueeze(channel_axis - 1).expand(*shape)

    def map_of(self, numbers: Tensor) -> SourceMap | None:
        """The map to which positions belong.

        Args:
            numbers: numbers of positions, of any shape; 0 does not count.

        Returns:
            None if they belong to several maps, or all are 0.
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
        """Begin a coarser map, whose positions are patches of a map: a layer makes one
        value of each patch.

        Args:
            table: [..., P], the positions of the P values of each patch; 0 for padding.

        Returns:
            [..., 1], the position of each patch in the new map. Its row and column there
            follow from the mean row and column of its values.

        Raises:
            ValueError: the patches do not form rows and columns, or are not of one image.
        """
        source = self.map_of(table.flatten())
        if source is None or source.time > 1:
            raise ValueError("no patches of one image")
        in_image = (table > 0).double()
        count = in_image.sum(-1).clamp(min=1)
        index = table - source.first

        def patch_means(values: Tensor) -> Tensor:
            """The mean of each patch without its padding, in steps of 1/1024: so small
            rounding errors do not make equal means differ."""
            return ((values * in_image).sum(-1) / count).mul(1024).round()

        # the distinct means, and the number of each among them
        row_means, rows = torch.unique(
            patch_means(index // source.width), return_inverse=True
        )
        column_means, columns = torch.unique(
            patch_means(index % source.width), return_inverse=True
        )
        # patches of a grid have each pair of a row and a column once
        cells = rows * len(column_means) + columns
        size = len(row_means), len(column_means)
        if prod(size) != cells.numel() or len(torch.unique(cells)) != cells.numel():
            raise ValueError("no rows and columns of patches")
        return self.begin(size).flatten()[cells][..., None]

    def trace(self, table: Tensor) -> Trace:
        """Sum up a table of positions: along which of its axes the rows and columns of a
        map stand.

        Returns:
            A trace with a grid in two cases: each position of a map (or every n-th row
            and column of it) comes once; or the table holds whole patches of a map,
            whose values have not been mixed yet, along one of its axes. An empty trace
            otherwise.
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
        """The trace of positions.

        Args:
            numbers: [N], numbers of positions; 0 for values that lie nowhere.
            axes: the axes of the tensor along which the positions change.

        Returns:
            An empty trace, unless each position of a map, or of every n-th row and
            column of it, comes once.
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
    """Whether the kept rows (or columns) are every n-th one of the map, to its end.

    Args:
        kept: numbers of the kept rows, [n], rising.
        length: how many rows the map has.
    """
    first = int(kept[0])
    step = int(kept[1]) - first if len(kept) > 1 else length
    return first < step and torch.equal(kept, torch.arange(first, length, step))


# What functions do to positions.

PositionRule = Callable[[SourceMaps, FollowedCall, Tables], Sequence[Any]]
"""Takes the maps so far, a call, and the tables of its tensors. Returns the tables of
the results, None for a result that lies nowhere in the image. The list may be shorter
than the results: those at the end lie nowhere."""

FirstTableRule = Callable[[SourceMaps, FollowedCall, Tensor], Tensor | None]
"""As PositionRule, but takes only the first tensor's table, and returns only the first
result's."""


def by_first_table(rule: FirstTableRule) -> PositionRule:
    """A rule for functions whose first tensor says where the first result lies. If this
    tensor has no table, the results have none."""
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
    """A rule for a function that joins tensors. A tensor without a table, such as a class
    token, lies nowhere; the tokens that are joined to it keep their positions."""
    nothing = torch.zeros(1, dtype=torch.float64)
    return lambda maps, call, tables: (
        []
        if all(table is None for table in tables)
        else call.join(function, tables, nothing)
    )


def lose_positions(maps: SourceMaps, call: FollowedCall, tables: Tables) -> Tables:
    """The rule of functions that move values as other values say, such as sorting. These
    moves are not followed."""
    return []


def keep_positions(maps: SourceMaps, call: FollowedCall, tables: Tables) -> Tables:
    """The rule of functions that are not in FUNCTIONS: a result has the positions of a
    tensor of its shape (see `shared_positions`)."""
    return [shared_positions(tables, result.shape) for result in call.results]


def shared_positions(tables: Tables, shape: Sequence[int]) -> Tensor | None:
    """The first table of this shape; else the first that can be expanded to it; None if
    there is neither."""
    traced = [table for table in tables if table is not None]
    for table in traced:
        if table.shape == shape:
            return table
    # the function may have broadcast a smaller tensor to this shape
    for table in traced:
        with suppress(RuntimeError):
            return table.expand(shape)
    return None


def _keep_rows(maps: SourceMaps, call: FollowedCall, table: Tensor) -> Tensor:
    """The positions of the result of a function that mixes values along the last axis,
    such as a linear layer. Positions along the other axes stay. If positions change along
    the last axis, each row of it is a patch, which gets one position.

    Raises:
        ValueError: positions change along the last axis, but the rows are not patches.
    """
    last = table.ndim - 1
    if not varies(table, last):
        return table[..., :1].expand(call.shape)
    is_along_last = not any(varies(table, axis) for axis in range(last))
    if is_along_last and table.shape == call.shape:
        # a layer that mixes tokens, [1, C, T], and returns as many of them
        return table
    return maps.merge(table).expand(call.shape)


keep_rows = by_first_table(_keep_rows)
"""The rule of `_keep_rows`, by the first tensor."""


def keep_queries(
    maps: SourceMaps, call: FollowedCall, tables: Tables
) -> Sequence[Tensor | None]:
    """The rule of scaled_dot_product_attention: a result lies where its query lies. If
    all windows have the same queries, it lies where the keys of its window lie.

    Args:
        tables: positions of queries, keys and values.
    """
    if tables[0] is None:
        return []
    rows = _keep_rows(maps, call, tables[0])
    return [_in_windows(rows, tables[1], call.shape)]


def multiply(maps: SourceMaps, call: FollowedCall, tables: Tables) -> Tables:
    """The rule of products of matrices: the result has the positions of the first
    factor's rows, or, if these have none, of the second factor's columns."""
    # queries @ keys, scores @ values: each row of the product belongs to a query
    first = tables[0]
    second = tables[-1]  # a tensor that is multiplied with itself comes only once
    if first is not None and not varies(first, -1):
        with suppress(RuntimeError):  # the product with a vector has no such rows
            rows = first.narrow(-1, 0, 1).expand(call.shape)
            return [_in_windows(rows, second, call.shape)]
    if second is None or varies(second, -2):
        return []
    return [second[..., :1, :].expand(call.shape)]


def _in_windows(rows: Tensor, keys: Tensor | None, shape: Sequence[int]) -> Tensor:
    """The positions of a result that has a row for each query: that of an attention, or
    queries @ keys. If the queries are a parameter, which is the same in each window, a
    row has the position of the key with its number in its window.

    Args:
        rows: positions of the queries, expanded to `shape`.
        keys: positions of the keys, [windows, ..., tokens, D]; None if they have none.
        shape: shape of the result.
    """
    if keys is None or keys.shape[:-1] != shape[:-1] or varies(rows, 0):
        return rows
    # only keys whose positions change from window to window, and inside each
    if not varies(keys, 0) or not varies(keys, -2):
        return rows
    return keys[..., :1].expand(shape)


def _sum_over(table: Tensor, *axes: int) -> Tensor:
    """A table with length 1 along the axes that are summed over; ValueError if positions
    change along one of them."""
    for axis in axes:
        if varies(table, axis):
            raise ValueError("positions are mixed")
        table = table.narrow(axis, 0, 1)
    return table


@by_first_table
def multiply_by_letters(maps: SourceMaps, call: FollowedCall, table: Tensor) -> Tensor:
    """The rule of torch.einsum: its first factor says where the result lies."""
    # in `bij,bjd->bid`, the rows of the result are those of the first factor
    others = [None] * (len(call.tensors) - 1)
    factors = einsum_factors(call, [table, *others], _sum_over)
    return factors[0].expand(call.shape)


@by_first_table
def reduce_positions(
    maps: SourceMaps, call: FollowedCall, table: Tensor
) -> Tensor | None:
    """The rule of a mean or a maximum over axes along which positions do not change, or
    over one axis of patches, as Hiera pools its queries."""
    axes = call.argument(1, "dim")
    if isinstance(axes, Tensor):  # torch.max(x, y), the larger of two
        return table if table.shape == call.shape else None
    if isinstance(axes, int):
        axes = [axes]
    if not axes:  # over all values: the result lies everywhere
        return None
    keepdim = table.ndim == len(call.shape)
    if not any(varies(table, axis) for axis in axes):
        return table.amax(list(axes), keepdim=keepdim)
    # positions that are the same along an axis are merged only once
    for axis in range(table.ndim):
        if not varies(table, axis):
            table = table.narrow(axis, 0, 1)
    (axis,) = axes  # ValueError if there are several
    patches = maps.merge(table.movedim(axis, -1)).movedim(-1, axis)
    return (patches if keepdim else patches.squeeze(axis)).expand(call.shape)


def resample(maps: SourceMaps, call: FollowedCall, tables: Tables) -> Tables:
    """The rule of resizing: the result keeps the positions if it has as many rows and
    columns, else it lies in a new map. It has no positions if the rows or columns of the
    argument are not those of the image."""
    table = tables[0]
    shape = call.shape
    if table is None or table.ndim not in (4, 5):
        return []
    varies_by_channel = varies(table, 1)
    if table.shape[2:] == shape[2:] and not varies_by_channel:
        return [table[:, :1].expand(shape)]
    # its rows or columns are not those of the image
    if not varies(table, -1) or not varies(table, -2):
        return []
    if not varies(table, 0):  # one image, or the heads of its maps
        return [maps.table(shape)]
    if _is_clip_of_frames(maps, table):
        return [maps.table([1, *shape], channel_axis=2)[0]]
    return [] if varies_by_channel else _shrink_pieces(maps, table, shape)


def _shrink_pieces(
    maps: SourceMaps, table: Tensor, shape: Sequence[int]
) -> Sequence[Tensor]:
    """The table of pieces of a map that became smaller by whole factors. A value lies in
    the middle of the block of values from which it was made.

    Args:
        table: [pieces, C, H, W], the same in all channels.
        shape: shape of the result, [pieces, C, rows, columns].

    Returns:
        The table of the result, or nothing if the factors are not whole.
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
    """The rule of convolutions and poolings. If the argument has no positions, the result
    for a batch of one item counts as a new map of the image."""
    if tables[0] is not None:
        return resample(maps, call, tables)
    # An argument without positions may still be an image. Several items may be regions,
    # whose positions are unknown.
    is_map = len(call.shape) in (4, 5) and call.shape[0] == 1
    return [maps.table(call.shape)] if is_map else []
