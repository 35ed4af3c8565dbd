"""The layouts: how the axes of a tensor stand, and how they become feature maps, a
record for each; which grid a number of tokens makes, and where pieces of a map belong.

Nothing here imports torch or numpy: what reads a run directory and what prints help
read this, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

from featviz.errors import LayoutError
from featviz.records import Hints, Trace
from featviz.text import quoted

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


Size = tuple[int, int]
BEFORE, BEHIND = "extra_token", "token_behind"
"""Names of tokens before and behind a grid, if the model does not name them."""
# what convolutions of stride 2, one behind the other, make, and patches
_USUAL_STRIDES = (1, 2, 4, 8, 16, 32, 64)
_GRID = re.compile(r"([1-9]\d{,17})x([1-9]\d{,17})(?:\+(\d{1,4})(?:,(\d{1,4}))?)?")
"""Height, width, tokens before and behind. The digits are few, so that int() takes them
and each token before or behind the grid can have a name."""
STRIDES = (*_USUAL_STRIDES, *(p for p in range(1, 64) if p not in _USUAL_STRIDES))
"""Pixels of the input from one place of a map to the next, the usual ones first."""


@dataclass(frozen=True)
class Arrangement:
    """The layout of one tensor, with the numbers that turning it into maps takes."""

    layout: str
    height: int = 0
    """Height of the grid that tokens or pieces make; 0 for other layouts."""
    width: int = 0
    time: int = 1
    """Time steps of the grid."""
    prefix: tuple[str, ...] = ()
    """Names of the tokens in front of the grid, a name for each."""
    suffix: tuple[str, ...] = ()
    """Names of the tokens behind the grid."""
    trace: Trace | None = None
    """For pieces: where each belongs."""

    @property
    def token_count(self) -> int:
        """How many tokens are on, before and behind the grid."""
        off_grid = len(self.prefix) + len(self.suffix)
        return self.time * self.height * self.width + off_grid


@dataclass(frozen=True)
class Maps:
    """The maps of one tensor, float32 [C, S, H, W], which may be a view of it. S is 1
    but for clips (time steps) and batches (regions, items), whose slices stand side by
    side."""

    layout: str
    data: Tensor


@dataclass(frozen=True)
class Layout:
    """All that featviz knows of a layout."""

    name: str
    shape: str
    """The axes, for help and messages: `[1, C, H, W]`."""
    description: str
    """What is drawn, for help."""
    dimensions: tuple[int, ...]
    """How many axes a tensor of it may have."""
    to_maps: Callable[[Tensor, Arrangement], Tensor]
    """Turns a float32 tensor into its maps [C, S, H, W]: a view, if possible."""
    rows: Callable[[np.ndarray, int], np.ndarray] | None = None
    """Turns an array into [channels, N], as `channels_first` returns it; takes the array
    and the number of channels. None if it is enough to move the channel axis to the
    front."""
    channel_axis: int | None = None
    """None if several axes make channels, or none does."""
    spatial_axes: tuple[int, int] | None = None
    """The axes of height and width; None for tokens and for what is not a map of the
    input."""
    token_axis: int | None = None
    allows_many: bool = False
    aligned: bool = True
    """Whether the maps are pictures of the input, so that they can be laid over it."""
    strip: bool = False
    """Whether the maps are drawn as one row without padding: the numbers of a vector.
    """
    of_pieces: bool = False
    """Whether the tensor holds maps cut into pieces. Its shape does not say where each
    piece belongs: `--tensor-layout` does not take the name, and `channels_first` leaves
    the values in the order of the pieces."""

    def channels_first(self, array: np.ndarray, channels: int) -> np.ndarray:
        """Turn an array of this layout into rows, one for each channel. Unlike `to_maps`,
        this needs no Arrangement, which only the model tells.

        Args:
            array: a tensor of this layout, as numpy.
            channels: how many channels it has.

        Returns:
            [channels, N]: the values of each channel in the order of its map (but see
            `of_pieces`). All tokens are among them, also a class token that `to_maps`
            leaves out.

        Raises:
            ValueError, IndexError: an axis of the array has length 0, or the array does
                not have so many channels. Not every such array is found out.
        """
        if self.rows is not None:
            return self.rows(array, channels)
        assert self.channel_axis is not None
        return _axis_first(array, self.channel_axis)


def _axis_first(array: np.ndarray, axis: int) -> np.ndarray:
    """Move an axis to the front, and flatten all others into one."""
    others = [i for i in range(array.ndim) if i != axis % array.ndim]
    return array.transpose(axis, *others).reshape(array.shape[axis], -1)


def _on_grid(channels: Tensor, arrangement: Arrangement) -> Tensor:
    """Turn tokens [D, T] into maps [D, time, height, width]. The tokens before and behind
    the grid are left out."""
    end = channels.shape[1] - len(arrangement.suffix)
    tokens = channels[:, len(arrangement.prefix) : end].contiguous()
    return tokens.view(-1, arrangement.time, arrangement.height, arrangement.width)


def _rows_of_windows(array: np.ndarray, channels: int) -> np.ndarray:
    """Turn windows into [channels, N]. The channels are along the last axis, the second
    one, or (heads of tokens) both."""
    if array.shape[-1] == channels:
        return _axis_first(array, -1)
    # [windows, heads, places, D] to [heads, D, places, windows], or without heads
    return array.swapaxes(0, 1).swapaxes(1, -1).reshape(channels, -1)


def _attention(tensor: Tensor, arrangement: Arrangement) -> Tensor:
    """A map for each head (of each window), with a row for each query, a column for
    each key."""
    # CaiT mixes its heads by a linear layer, so they stand last
    if _has_heads_last(tensor.shape):
        return tensor[0].permute(2, 0, 1).contiguous()[:, None]
    return tensor.reshape(-1, 1, *tensor.shape[-2:])


def _has_heads_last(shape: Sequence[int]) -> bool:
    """Whether weights are [1, T, T, heads]."""
    return len(shape) == 4 and shape[0] == 1 and shape[1] == shape[2] != shape[3]


def _rows_of_attention(array: np.ndarray, channels: int) -> np.ndarray:
    """[channels, T · T], a channel for each head of each window."""
    if _has_heads_last(array.shape):
        return _axis_first(array, -1)
    return array.reshape(-1, array.shape[-2] * array.shape[-1])


def _vector(tensor: Tensor, arrangement: Arrangement) -> Tensor:
    """Turn rows of numbers [..., F] into F maps, each a column of a number for each row."""
    return tensor.reshape(-1, tensor.shape[-1]).T.contiguous()[:, None, :, None]


def channels_of_pieces(shape: Sequence[int], trace: Trace) -> list[int]:
    """The channel axes of a tensor that holds a map in pieces, such as windows: the axes
    longer than 1 along which positions do not change."""
    return [i for i in range(len(shape)) if i not in trace.axes and shape[i] > 1]


def join_pieces(tensor: Tensor, trace: Trace | None) -> Tensor:
    """Move each value of a tensor to its position in the map. Padding is left out.

    Two windows of 2 × 2 values a to h, in a map of 2 rows:

        a b c d      positions  0 1 4 5       a b e f
        e f g h                 2 3 6 7       c d g h

    Args:
        tensor: pieces of a map, of any shape.
        trace: of this tensor; it must have positions.

    Returns:
        [C, time, H, W].
    """
    assert trace is not None and trace.grid is not None and trace.positions is not None
    channel_axes = channels_of_pieces(tensor.shape, trace)
    moved = {*trace.axes, *channel_axes}
    # of length 1
    other_axes = [axis for axis in range(tensor.ndim) if axis not in moved]
    in_map = trace.positions >= 0
    rows = tensor.permute(*channel_axes, *other_axes, *trace.axes).reshape(
        -1, len(in_map)
    )
    # each position of the map is there once, so that all of it is filled
    joined = tensor.new_empty(len(rows), int(in_map.sum()))
    joined[:, trace.positions[in_map]] = rows[:, in_map]
    return joined.reshape(-1, *trace.grid)


# Maps that are not views are made contiguous: else each loop that reads their rows would
# copy them anew.
_EACH_CHANNEL = "a map for each channel"
_TIME_STEPS = "for each channel the time steps side by side"
_ON_GRID = "a map for each channel, on the grid of the tokens"

_ALL = (
    Layout(
        name="nchw",
        shape="[1, C, H, W]",
        description=_EACH_CHANNEL,
        dimensions=(4,),
        # torchvision's [C, 1, H, W]
        to_maps=lambda tensor, arrangement: tensor[0][:, None],
        channel_axis=1,
        spatial_axes=(2, 3),
    ),
    Layout(
        name="nhw",
        shape="[1, H, W]",
        description="one map",
        dimensions=(3,),
        to_maps=lambda tensor, arrangement: tensor[:, None],
        rows=lambda array, channels: array.reshape(1, -1),
        spatial_axes=(1, 2),
    ),
    Layout(
        name="nhwc",
        shape="[1, H, W, C]",
        description=_EACH_CHANNEL,
        dimensions=(4,),
        to_maps=lambda tensor, arrangement: (
            tensor[0].permute(2, 0, 1).contiguous()[:, None]
        ),
        channel_axis=3,
        spatial_axes=(1, 2),
    ),
    Layout(
        name="tokens",
        shape="[1, T, D]",
        description=_ON_GRID,
        dimensions=(3, 4),
        # or [1, T, heads, D]
        to_maps=lambda tensor, grid: _on_grid(tensor[0].flatten(1).T, grid),
        rows=lambda array, channels: _axis_first(array.reshape(array.shape[1], -1), 1),
        channel_axis=-1,
        token_axis=1,
    ),
    Layout(
        name="ncl",
        shape="[1, D, T]",
        description=_ON_GRID,
        dimensions=(3,),
        to_maps=lambda tensor, grid: _on_grid(tensor[0], grid),
        channel_axis=1,
        token_axis=2,
    ),
    Layout(
        name="heads",
        shape="[1, heads, T, D]",
        description=f"{_ON_GRID}; one head after another",
        dimensions=(4,),
        to_maps=lambda tensor, grid: _on_grid(
            tensor[0].permute(0, 2, 1).flatten(0, 1), grid
        ),
        rows=lambda array, channels: (
            array[0].swapaxes(1, 2).reshape(-1, array.shape[2])
        ),
        token_axis=2,
    ),
    Layout(
        name="attention",
        shape="[N, heads, T, T]",
        description=(
            "a matrix for each head: a row for each query, a column for each key"
        ),
        dimensions=(3, 4, 5),
        to_maps=_attention,
        rows=_rows_of_attention,
        allows_many=True,
        aligned=False,
    ),
    Layout(
        name="vector",
        shape="[N, F]",
        description="rows of numbers: a column for each channel",
        dimensions=(1, 2, 3),
        to_maps=_vector,
        channel_axis=-1,
        allows_many=True,
        aligned=False,
        strip=True,
    ),
    Layout(
        name="sequence",
        shape="[N, T, D]",
        description=(
            "rows of a matrix, no places of the image: a row for each token, a column"
            " for each channel"
        ),
        dimensions=(3, 4),
        to_maps=_vector,
        channel_axis=-1,
        allows_many=True,
        aligned=False,
        strip=True,
    ),
    Layout(
        name="batch",
        shape="[N, C, H, W]",
        description="for each channel the items side by side",
        dimensions=(4, 5),
        to_maps=lambda tensor, arrangement: (
            tensor.transpose(0, 1).flatten(1, -3).contiguous()
        ),
        channel_axis=1,
        allows_many=True,
        aligned=False,
    ),
    Layout(
        name="ncthw",
        shape="[1, C, T, H, W]",
        description=_TIME_STEPS,
        dimensions=(5,),
        to_maps=lambda tensor, arrangement: tensor[0],
        channel_axis=1,
        spatial_axes=(3, 4),
    ),
    Layout(
        name="nthwc",
        shape="[1, T, H, W, C]",
        description=_TIME_STEPS,
        dimensions=(5,),
        to_maps=lambda tensor, arrangement: tensor[0].permute(3, 0, 1, 2).contiguous(),
        channel_axis=4,
        spatial_axes=(2, 3),
    ),
    Layout(
        # channels may stand in the middle, too: [windows, C, rows, columns]
        name="windows",
        shape="[windows, places, C]",
        description="pieces of a map for each channel, put back into their places",
        dimensions=(3, 4, 5, 6),
        to_maps=lambda tensor, pieces: join_pieces(tensor, pieces.trace),
        rows=_rows_of_windows,
        allows_many=True,
        of_pieces=True,
    ),
)

LAYOUTS = {layout.name: layout for layout in _ALL}

CHOICES = tuple(layout for layout in _ALL if not layout.of_pieces)


# Tokens on a grid


def parse_grid(text: str, layout: str = "tokens") -> Arrangement:
    """Read the grid of `tokens:14x20+1,10`.

    Args:
        text: `14x20`, `14x20+1` with the number of tokens in front of the grid, or
            `14x20+1,10` with that of tokens behind it, too; 9999 at most.
        layout: name of the arrangement's layout, one that has tokens.

    Raises:
        LayoutError: the text is not a grid.
    """
    match = _GRID.fullmatch(text)
    if match is None:
        raise LayoutError(
            f"{quoted(repr(text))} is no grid",
            "rows and columns of tokens, for example 14x20, 14x20+1 with one token (of"
            " at most 9999) in front, or 14x20+1,10 with ten behind",
        )
    height, width, before, behind = (int(number or 0) for number in match.groups())
    # the text does not say which of them are class tokens
    prefix = (BEFORE,) * before
    return Arrangement(layout, height, width, prefix=prefix, suffix=(BEHIND,) * behind)


def find_grid(length: int, hints: Hints, layout: str = "tokens") -> Arrangement | None:
    """Find the grid into which tokens divide the input. 197 tokens of a square input are
    one token and a grid of 14 × 14.

    The model's own tokens may stand in front of the grid: all that `hints` names, the
    first few of them, or none. If `hints` names none, one unnamed token may stand there.

    Args:
        length: how many tokens there are, on the grid and in front of it.
        hints: on the input's size, its time steps, and the model's own tokens.
        layout: name of the arrangement's layout, one that has tokens.

    Returns:
        None if no number of tokens in front leaves a grid, or the input's size is not
        known.
    """
    if hints.input_size is None:
        return None
    names = hints.prefix_tokens
    prefixes = [names[:count] for count in range(len(names), -1, -1)]
    time = hints.time_steps or 1
    for prefix in prefixes if names else [(), (BEFORE,)]:
        count, rest = divmod(length - len(prefix), time)
        # a single token is not a grid
        if rest != 0 or count < 2 or hints.token_count not in (None, count, length):
            continue
        for height, width in map_sizes(hints.input_size):
            if height * width == count:
                return Arrangement(layout, height, width, time, prefix)
    return None


@cache
def map_sizes(size: Size) -> tuple[Size, ...]:
    """Sizes (height, width) of the maps that an input may become by strides of whole
    pixels, the likelier ones first.

    A stride p turns H pixels into ceil(H / p) rows if the border is padded, floor(H / p)
    if it is not, and one row less if the kernel is larger than the stride. Several
    strides of 2 may round rows up and columns down. A square input has square maps only.

    Args:
        size: height and width of the input in pixels.
    """
    sizes: dict[Size, None] = {}
    for stride in STRIDES:
        rows, columns = [
            (-(-pixels // stride), pixels // stride, pixels // stride - 1)
            for pixels in size
        ]
        pairs = [*zip(rows, columns, strict=True)]
        if stride in _USUAL_STRIDES:
            pairs += product(rows[:2], columns[:2])
        for height, width in pairs:
            if height > 0 and width > 0 and (size[0] != size[1] or height == width):
                # a dict keeps the order in which sizes came, each once
                sizes[height, width] = None
    return tuple(sizes)
