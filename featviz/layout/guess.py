"""Which layout has a tensor of this shape?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import featviz.layout.grids as grids
from featviz.errors import LayoutError
from featviz.layout.grids import TokenGrid
from featviz.records import Hints, Windows
from featviz.text import by


@dataclass(frozen=True)
class Form:
    """A layout, and what drawing it needs beside the tensor."""

    layout: str
    grid: TokenGrid | None = None
    """For tokens and windows: the grid that they make."""
    windows: Windows | None = None
    unrolled: tuple[int, int] | None = None
    """For tokens in the order of their pooling: the grid that is left of them at the end."""


AXES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "nchw": ((4,), None),
    "nhwc": ((4,), None),
    "tokens": ((3, 4), 1),
    "ncl": ((3,), 2),
    "heads": ((4,), 2),
    "attention": ((3, 4), None),
    "vector": ((1, 2, 3), None),
    "batch": ((4, 5), None),
    "ncthw": ((5,), None),
    "nthwc": ((5,), None),
}
"""The layouts that one can ask for: how many axes they have, and which of them counts tokens."""

_SPATIAL = {"nchw": (2, 3), "nhwc": (1, 2), "ncthw": (3, 4), "nthwc": (2, 3)}
_CHANNELS = {
    "nchw": 1,
    "nhwc": 3,
    "tokens": -1,
    "ncl": 1,
    "vector": -1,
    "batch": 1,
    "ncthw": 1,
    "nthwc": 4,
}
_OF_MANY = ("batch", "vector")
"""Layouts whose first axis may be more than 1."""
_FEW_TOKENS = 16
"""Fewer are not taken for channels-first tokens: boxes [1, N, 4] are none."""
_MANY_TOKENS = 36
"""A map may be high and narrow for other reasons than that its rows are tokens; above so many rows
that make a grid, outside attention, they are taken for tokens."""


def recognise(shape: Sequence[int], hints: Hints) -> Form:
    """The layout of a shape.

    Channels-last is told by proportion: its first two sizes have the input's, as maps do, and its
    last two have not. A token axis is one whose length makes a grid of the input's proportions,
    with or without the model's class, distillation and register tokens.

    Raises:
        LayoutError: no values, or no layout that fits.
    """
    if 0 in shape:
        raise LayoutError(f"shape {list(shape)} holds no values")
    if hints.layout is not None:
        return _as_told(shape, hints)
    guess = _BY_DIMENSIONS.get(len(shape), _none)
    form = _windowed(shape, hints) or guess(shape, hints)
    if form is None:
        raise LayoutError(f"shape {list(shape)} {_why_not(shape, hints)}; see --tensor-layout")
    return form


def map_size(shape: Sequence[int], hints: Hints) -> tuple[str, int, int] | None:
    """Layout, height and width of a shape's maps; None for what is no map of the image."""
    try:
        form = recognise(shape, hints)
    except LayoutError:
        return None
    if form.grid is not None:
        return form.layout, form.grid.height, form.grid.width
    axes = _SPATIAL.get(form.layout)
    return None if axes is None else (form.layout, shape[axes[0]], shape[axes[1]])


def channel_axis(shape: Sequence[int], hints: Hints) -> int | None:
    """Which axis of a shape counts channels; None where no axis does."""
    try:
        form = recognise(shape, hints)
    except LayoutError:
        return None
    if form.windows is not None:
        return grids.channels_of_windows(shape, form.windows)
    return _CHANNELS.get(form.layout)


def check_layout(text: str) -> None:
    """Whether there is such a layout: `nhwc`, `tokens`, `tokens:14x20+1`.

    Raises:
        LayoutError: there is not.
    """
    name, colon, numbers = text.partition(":")
    if name not in AXES or (colon and AXES[name][1] is None):
        raise LayoutError(
            f"{text!r} is no layout",
            f"one of {', '.join(AXES)}; with a grid, tokens:14x20 or tokens:14x20+1",
        )
    if colon:
        grids.parse(numbers)


def _as_told(shape: Sequence[int], hints: Hints) -> Form:
    name, _, numbers = str(hints.layout).partition(":")
    dimensions, token_axis = AXES[name]
    if len(shape) not in dimensions or (len(shape) > 1 and shape[0] != 1 and name not in _OF_MANY):
        raise LayoutError(f"shape {list(shape)} cannot be read as {name} (--tensor-layout)")
    if token_axis is None:
        return Form(name)
    length = shape[token_axis]
    grid = grids.parse(numbers) if numbers else grids.find(length, hints)
    if grid is None or grid.tokens != length:
        raise LayoutError(
            f"shape {list(shape)}: {length} tokens are no grid of --tensor-layout {hints.layout}"
        )
    return Form(name, grid)


def _vector(shape: Sequence[int], hints: Hints) -> Form | None:
    return Form("vector")


def _none(shape: Sequence[int], hints: Hints) -> Form | None:
    return None


def _three(shape: Sequence[int], hints: Hints) -> Form | None:
    """[1, T, D], [1, D, T] or, averaged over heads, attention weights [1, T, T]."""
    if shape[0] != 1:
        return None
    if shape[1] in (1, len(hints.prefix)):
        return Form("vector")
    if hints.channels == "first":
        return _tokens(shape, hints, {"ncl": 2})
    if hints.unrolled is not None:
        return _unrolled(shape[1], hints, hints.unrolled)
    if hints.attention and shape[1] == shape[2]:
        return Form("attention")
    return _tokens(shape, hints, {"tokens": 1, **({"ncl": 2} if shape[2] >= _FEW_TOKENS else {})})


def _four(shape: Sequence[int], hints: Hints) -> Form | None:
    """[1, C, H, W], [1, H, W, C], [1, heads, T, D], [1, T, heads, D], attention weights of tokens
    [1, heads, T, T] or [1, T, T, heads], or [N, C, H, W]."""
    if shape[0] != 1:
        return Form("batch")
    if hints.channels is not None:
        return Form("nchw" if hints.channels == "first" else "nhwc")
    if _weights(shape[2:], hints):
        return Form("attention")
    first, last = (grids.in_proportion(shape[i], shape[i + 1], hints.input_size) for i in (1, 2))
    if first and not last:
        return Form("nhwc")
    if _weights(shape[1:3], hints) and shape[3] < shape[1]:
        return Form("attention")
    if not last and (hints.attention or _column(shape[2], shape[3], hints)):
        return _tokens(shape, hints, {"heads": 2, "tokens": 1}) or Form("nchw")
    return Form("nchw")


def _weights(sides: Sequence[int], hints: Hints) -> bool:
    """Whether these are two axes of an attention's weights: of tokens by tokens."""
    square = hints.attention and sides[0] == sides[1] > 1
    return square and grids.find(sides[0], hints) is not None


def _column(height: int, width: int, hints: Hints) -> bool:
    """Whether it is no map, but many tokens below one another."""
    narrow = grids.far_from_proportion(height, width, hints.input_size)
    return narrow and height >= _MANY_TOKENS and width > 1


def _five(shape: Sequence[int], hints: Hints) -> Form | None:
    if shape[0] != 1:
        return Form("batch") if hints.channels == "first" else None
    middle, last = (grids.in_proportion(shape[i], shape[i + 1], hints.input_size) for i in (2, 3))
    return Form("nthwc" if middle and not last else "ncthw")


_BY_DIMENSIONS: dict[int, Callable[[Sequence[int], Hints], Form | None]] = {
    1: _vector,
    2: _vector,
    3: _three,
    4: _four,
    5: _five,
}


def _tokens(shape: Sequence[int], hints: Hints, axes: dict[str, int]) -> Form | None:
    """The first axis that makes a grid; of several, rather the one that makes the patches' own."""
    found = {layout: grids.find(shape[axis], hints) for layout, axis in axes.items()}
    forms = [Form(layout, grid) for layout, grid in found.items() if grid is not None]
    own = [form for form in forms if form.grid and grids.is_of_patches(form.grid, hints)]
    return next(iter(own + forms), None)


def _unrolled(length: int, hints: Hints, last: tuple[int, int]) -> Form | None:
    grid = grids.find(length, hints)
    count, rest = divmod(length, last[0] * last[1])
    times = 2 ** (count.bit_length() // 2)
    if grid is None or rest or (grid.height, grid.width) != (last[0] * times, last[1] * times):
        return None
    return Form("tokens", grid, unrolled=last)


def _windowed(shape: Sequence[int], hints: Hints) -> Form | None:
    """Windows in a block that cuts them: [n, a·b, C], [n, a, b, C], [n, C, a, b], or as it says."""
    windows, size = hints.windows, hints.input_size
    count = grids.windows_in(shape, windows) if windows is not None else 0
    if windows is None or size is None or count == 0:
        return None
    found = grids.map_of_windows(count, windows, size)
    return None if found is None else Form("windows", TokenGrid(*found), windows)


def _why_not(shape: Sequence[int], hints: Hints) -> str:
    if len(shape) == 3 and shape[0] == 1 and hints.input_size is not None:
        return f"is no grid of tokens for an input of {by(hints.input_size)}"
    return "is neither a map, a vector nor a grid of tokens of one image"
