"""The layouts: how the axes of a tensor stand, and how they become feature maps; a record for each.

Nothing here imports torch or numpy, so that what reads a run directory and what prints help can
read the table too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from featviz.layout.tokens import TokenGrid, join_pieces
from featviz.records import Origin

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True)
class Form:
    """The layout of one tensor, with all that turning the tensor into maps takes."""

    layout: str
    grid: TokenGrid | None = None
    """The grid that tokens or pieces make; None for other layouts."""
    origin: Origin | None = None
    """The places of pieces of a map."""


@dataclass(frozen=True)
class Maps:
    """The maps of one tensor; `data` is float32 [C, S, H, W] and may be a view of the tensor.

    S is 1 but for clips (time steps) and batches (regions, items), whose slices stand side by side.
    """

    layout: str
    data: Tensor


@dataclass(frozen=True)
class Layout:
    """All that featviz knows of a layout."""

    name: str
    shape: str
    """The axes in words, for help and messages: `[1, C, H, W]`."""
    words: str
    dimensions: tuple[int, ...]
    to_maps: Callable[[Tensor, Form], Tensor]
    """Turns a float32 tensor into its maps [C, S, H, W]; a view where that is possible."""
    rows: Callable[[np.ndarray, int], np.ndarray] | None = None
    """Turns an array into [channels, N]; takes the number of channels. None where moving the
    channel axis to the front does. See `channels_first`."""
    channel_axis: int | None = None
    """None where several axes make channels, or none does."""
    spatial_axes: tuple[int, int] | None = None
    """The axes of height and width; None for tokens and for what is no map of the input."""
    token_axis: int | None = None
    allows_many: bool = False
    """Whether the first axis may be more than 1."""
    aligned: bool = True
    """Whether the maps are pictures of the input, so that they can be laid over it."""
    strip: bool = False
    """Whether the maps are drawn as one row without padding: the numbers of a vector."""
    in_map_order: bool = True
    """Whether `channels_first` gives the values in the order of the maps."""
    is_choice: bool = True
    """Whether `--tensor-layout` takes the name: the shape alone says how to draw it."""

    def channels_first(self, array: np.ndarray, channels: int) -> np.ndarray:
        """Turn an array of this layout into [channels, N], without knowing the model.

        N counts the values of each channel in the order of `to_maps`; those of tokens beside
        a grid lie where they lie.

        Args:
            array: a tensor as the layer gave it, with as many axes as `dimensions` says.
            channels: how many maps the tensor holds; only windows need it.

        Raises:
            ValueError, IndexError: the array holds no values.
        """
        if self.rows is not None:
            return self.rows(array, channels)
        assert self.channel_axis is not None
        return _axis_first(array, self.channel_axis)


def _axis_first(array: np.ndarray, axis: int) -> np.ndarray:
    """Move an axis to the front, and flatten all others into one."""
    others = [i for i in range(array.ndim) if i != axis % array.ndim]
    return array.transpose(axis, *others).reshape(array.shape[axis], -1)


def _on_grid(channels: Tensor, form: Form) -> Tensor:
    """[D, T] to maps, without the tokens beside the grid."""
    grid = form.grid
    assert grid is not None
    tokens = channels[:, len(grid.prefix) : channels.shape[1] - len(grid.suffix)].contiguous()
    return tokens.view(len(tokens), grid.time, grid.height, grid.width)


def _rows_of_windows(array: np.ndarray, channels: int) -> np.ndarray:
    """Channels are along the last axis, the second one, or (heads of tokens) both."""
    if channels in (array.shape[-1], array.shape[1]):
        return _axis_first(array, -1 if array.shape[-1] == channels else 1)
    return array.swapaxes(0, 1).swapaxes(1, -1).reshape(channels, -1)


def _attention(tensor: Tensor, form: Form) -> Tensor:
    """A map for each head (of each window), with a row for each query, a column for each key."""
    if _has_heads_last(tensor.shape):
        return tensor[0].permute(2, 0, 1).contiguous()[:, None]
    return tensor.reshape(-1, 1, *tensor.shape[-2:])


def _has_heads_last(shape: Sequence[int]) -> bool:
    """Whether weights are [1, T, T, heads]."""
    return len(shape) == 4 and shape[0] == 1 and shape[1] == shape[2] != shape[3]


def _rows_of_attention(array: np.ndarray, channels: int) -> np.ndarray:
    if _has_heads_last(array.shape):
        return _axis_first(array, -1)
    return array.reshape(-1, array.shape[-2] * array.shape[-1])


def _vector(tensor: Tensor, form: Form) -> Tensor:
    """F maps of N numbers each."""
    return tensor.reshape(-1, tensor.shape[-1]).T.contiguous()[:, None, :, None]


_EACH_CHANNEL = "a map for each channel"
_TIME_STEPS = "for each channel the time steps side by side"

_ON_GRID = "a map for each channel, on the grid of the tokens"

_ALL = (
    Layout(
        "nchw",
        "[1, C, H, W]",
        _EACH_CHANNEL,
        (4,),
        lambda tensor, form: tensor[0][:, None],  # torchvision's [C, 1, H, W]
        channel_axis=1,
        spatial_axes=(2, 3),
    ),
    Layout(
        "nhw",
        "[1, H, W]",
        "one map",
        (3,),
        lambda tensor, form: tensor[:, None],
        lambda array, channels: array.reshape(1, -1),
        spatial_axes=(1, 2),
    ),
    Layout(
        "nhwc",
        "[1, H, W, C]",
        _EACH_CHANNEL,
        (4,),
        lambda tensor, form: tensor[0].permute(2, 0, 1).contiguous()[:, None],
        channel_axis=3,
        spatial_axes=(1, 2),
    ),
    Layout(
        "tokens",
        "[1, T, D]",
        _ON_GRID,
        (3, 4),
        lambda tensor, form: _on_grid(tensor[0].flatten(1).T, form),  # or [1, T, heads, D]
        lambda array, channels: _axis_first(array.reshape(array.shape[1], -1), 1),
        channel_axis=-1,
        token_axis=1,
    ),
    Layout(
        "ncl",
        "[1, D, T]",
        _ON_GRID,
        (3,),
        lambda tensor, form: _on_grid(tensor[0], form),
        channel_axis=1,
        token_axis=2,
    ),
    Layout(
        "heads",
        "[1, heads, T, D]",
        f"{_ON_GRID}; one head after another",
        (4,),
        lambda tensor, form: _on_grid(tensor[0].permute(0, 2, 1).flatten(0, 1), form),
        lambda array, channels: array[0].swapaxes(1, 2).reshape(-1, array.shape[2]),
        token_axis=2,
    ),
    Layout(
        "attention",
        "[N, heads, T, T]",
        "a matrix for each head: a row for each query, a column for each key",
        (3, 4, 5),
        _attention,
        _rows_of_attention,
        allows_many=True,
        aligned=False,
    ),
    Layout(
        "vector",
        "[N, F]",
        "rows of numbers: a column for each channel",
        (1, 2, 3),
        _vector,
        channel_axis=-1,
        allows_many=True,
        aligned=False,
        strip=True,
    ),
    Layout(
        "sequence",
        "[N, T, D]",
        "rows of a matrix, no places of the image: a row for each token, a column for each channel",
        (3, 4),
        _vector,
        channel_axis=-1,
        allows_many=True,
        aligned=False,
        strip=True,
    ),
    Layout(
        "batch",
        "[N, C, H, W]",
        "for each channel the items side by side",
        (4, 5),
        lambda tensor, form: tensor.transpose(0, 1).flatten(1, -3).contiguous(),
        channel_axis=1,
        allows_many=True,
        aligned=False,
    ),
    Layout(
        "ncthw",
        "[1, C, T, H, W]",
        _TIME_STEPS,
        (5,),
        lambda tensor, form: tensor[0],
        channel_axis=1,
        spatial_axes=(3, 4),
    ),
    Layout(
        "nthwc",
        "[1, T, H, W, C]",
        _TIME_STEPS,
        (5,),
        lambda tensor, form: tensor[0].permute(3, 0, 1, 2).contiguous(),
        channel_axis=4,
        spatial_axes=(2, 3),
    ),
    Layout(
        "windows",
        "[windows, places, C]",
        "pieces of a map for each channel, put back into their places",
        (3, 4, 5, 6),
        lambda tensor, form: join_pieces(tensor, form.origin),  # [n, C, a, b], or channels last
        _rows_of_windows,
        allows_many=True,
        in_map_order=False,
        is_choice=False,
    ),
)

LAYOUTS = {layout.name: layout for layout in _ALL}
"""All layouts by name."""

CHOICES = tuple(layout for layout in _ALL if layout.is_choice)
"""The layouts that `--tensor-layout` takes."""
