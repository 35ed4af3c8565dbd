"""Guess which layout a tensor has, from its shape and from what is known of its layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import featviz.layout.origins as origins
import featviz.layout.token_grids as token_grids
import featviz.layout.windows as windows
from featviz.errors import LayoutError
from featviz.layout.layouts import CHOICES, LAYOUTS, Form
from featviz.layout.token_grids import TokenGrid
from featviz.records import Hints
from featviz.text import quoted

_FEW_TOKENS = 16
"""The least number of channels-first tokens: boxes [1, N, 4] are no tokens."""
_MANY_TOKENS = 36
"""A map may be high and narrow for other reasons than that its rows are tokens; above so many rows
that make a grid, outside attention, they are taken for tokens."""


def recognise(shape: Sequence[int], hints: Hints) -> Form:
    """Guess the layout of a shape, unless the hints name one.

    Channels-last is known by its proportions: its first two sizes behind the batch have the
    input's, as maps do, and its last two have not. A token axis is one whose length makes a grid
    of the input's proportions, with or without the model's class, distillation and register tokens.
    Where the image was followed through the model, that decides instead: whatever only looks like
    tokens or attention is a sequence.

    Raises:
        LayoutError: the shape holds no values, or no layout fits.
    """
    if 0 in shape:
        raise LayoutError(f"shape {list(shape)} holds no values")
    if hints.layout is not None:
        return _as_asked(shape, hints)
    guess = _BY_DIMENSIONS.get(len(shape))
    form = _windowed(shape, hints) or (guess(shape, hints) if guess is not None else None)
    if hints.origin is not None:
        form = origins.decide(shape, hints, hints.origin, form)
    if form is None and len(shape) == 3 and hints.input_size is not None:
        form = Form("sequence")
    if form is None:
        raise LayoutError(
            f"shape {list(shape)} is neither a map, a vector nor a grid of tokens of one image; "
            "see --tensor-layout"
        )
    return form


def map_size(shape: Sequence[int], hints: Hints) -> tuple[str, int, int] | None:
    """Layout, height and width of a shape's maps; None where they are no maps of the input."""
    try:
        form = recognise(shape, hints)
    except LayoutError:
        return None
    if form.grid is not None:
        return form.layout, form.grid.height, form.grid.width
    axes = LAYOUTS[form.layout].spatial_axes
    return None if axes is None else (form.layout, shape[axes[0]], shape[axes[1]])


def channel_axis(shape: Sequence[int], hints: Hints) -> int | None:
    """The axis of a shape that counts channels; None where no axis does."""
    try:
        form = recognise(shape, hints)
    except LayoutError:
        return None
    if form.origin is not None:
        return windows.channels_of_pieces(shape, form.origin)
    if form.windows is not None:
        return windows.channel_axis(shape, form.windows)
    return LAYOUTS[form.layout].channel_axis


def check_layout(text: str) -> None:
    """Check a value of `--tensor-layout`: `nhwc`, `tokens`, `tokens:14x20+1`.

    Raises:
        LayoutError: there is no such layout.
    """
    name, colon, numbers = text.partition(":")
    layout = LAYOUTS.get(name)
    if layout is None or not layout.is_choice or (colon and layout.token_axis is None):
        names = ", ".join(choice.name for choice in CHOICES)
        raise LayoutError(
            f"{quoted(repr(text))} is no layout",
            f"one of {names}; with a grid, tokens:14x20 or tokens:14x20+1",
        )
    if colon:
        token_grids.parse(numbers)


def _as_asked(shape: Sequence[int], hints: Hints) -> Form:
    """The form of a shape in the layout that the user named."""
    name, _, numbers = str(hints.layout).partition(":")
    layout = LAYOUTS[name]
    is_many = len(shape) > 1 and shape[0] != 1
    if len(shape) not in layout.dimensions or (is_many and not layout.allows_many):
        raise LayoutError(
            f"shape {list(shape)} cannot be read as {name} {layout.shape} (--tensor-layout)"
        )
    if layout.token_axis is None:
        return Form(name)
    length = shape[layout.token_axis]
    grid = token_grids.parse(numbers) if numbers else token_grids.find(length, hints)
    if grid is None or grid.tokens != length:
        raise LayoutError(
            f"shape {list(shape)}: {length} tokens are no grid of --tensor-layout {hints.layout}"
        )
    return Form(name, grid)


def _three(shape: Sequence[int], hints: Hints) -> Form | None:
    """[1, T, D], [1, D, T] or, averaged over heads, attention weights [1, T, T]."""
    if shape[0] != 1:
        return None
    if shape[1] in (1, len(hints.prefix)):
        return Form("vector")
    if hints.channels == "first":
        return _tokens(shape, hints, "ncl")
    if hints.unrolled is not None:
        return _unrolled(shape[1], hints, hints.unrolled)
    if hints.attention and not hints.features_last and shape[1] == shape[2]:
        return Form("attention")
    names = ("tokens", "ncl") if shape[2] >= _FEW_TOKENS else ("tokens",)
    return _tokens(shape, hints, *names)


def _four(shape: Sequence[int], hints: Hints) -> Form | None:
    """[1, C, H, W], [1, H, W, C], [1, heads, T, D], [1, T, heads, D], attention weights of tokens
    [1, heads, T, T] or [1, T, T, heads], or [N, C, H, W]."""
    if shape[0] != 1:
        return Form("batch")
    if hints.channels is not None:
        return Form("nchw" if hints.channels == "first" else "nhwc")
    if not hints.features_last and _weights(shape[2:], hints):
        return Form("attention")
    first, last = (_has_proportions(shape[i : i + 2], hints) for i in (1, 2))
    if first and not last:
        return Form("nhwc")
    if _weights(shape[1:3], hints) and shape[3] < shape[1]:
        return Form("attention")
    if not last and (hints.attention or _column(shape[2], shape[3], hints)):
        return _tokens(shape, hints, "heads", "tokens") or Form("nchw")
    return Form("nchw")


def _weights(sides: Sequence[int], hints: Hints) -> bool:
    """Whether two axes are those of an attention's weights, tokens by tokens."""
    square = hints.attention and sides[0] == sides[1] > 1
    return square and token_grids.find(sides[0], hints) is not None


def _has_proportions(sides: Sequence[int], hints: Hints) -> bool:
    """Whether a height and width have the input's proportions, give or take a column."""
    (height, width), size = sides, hints.input_size
    return size is not None and abs(width - height * size[1] / size[0]) <= 1


def _column(height: int, width: int, hints: Hints) -> bool:
    """Whether a height and width are no map's, but those of many tokens below one another: at
    least twice as high, for the width, as the input is."""
    size = hints.input_size
    narrow = size is not None and height * size[1] >= 2 * width * size[0]
    return narrow and height >= _MANY_TOKENS and width > 1


def _five(shape: Sequence[int], hints: Hints) -> Form | None:
    if shape[0] != 1:
        return Form("batch") if hints.channels == "first" else None
    middle, last = (_has_proportions(shape[i : i + 2], hints) for i in (2, 3))
    return Form("nthwc" if middle and not last else "ncthw")


_BY_DIMENSIONS: dict[int, Callable[[Sequence[int], Hints], Form | None]] = {
    1: lambda shape, hints: Form("vector"),
    2: lambda shape, hints: Form("vector"),
    3: _three,
    4: _four,
    5: _five,
}


def _tokens(shape: Sequence[int], hints: Hints, *names: str) -> Form | None:
    """The first of several layouts whose token axis makes a grid; one that makes the grid of the
    patches goes before the others."""
    grids = {name: token_grids.find(shape[LAYOUTS[name].token_axis or 0], hints) for name in names}
    forms = [Form(name, grid) for name, grid in grids.items() if grid is not None]
    of_patches = [one for one in forms if one.grid and token_grids.is_of_patches(one.grid, hints)]
    return next(iter(of_patches + forms), None)


def _unrolled(length: int, hints: Hints, last: tuple[int, int]) -> Form | None:
    grid = token_grids.find(length, hints)
    count, rest = divmod(length, last[0] * last[1])
    times = 2 ** (count.bit_length() // 2)
    if grid is None or rest or (grid.height, grid.width) != (last[0] * times, last[1] * times):
        return None
    return Form("tokens", grid, unrolled=last)


def _windowed(shape: Sequence[int], hints: Hints) -> Form | None:
    """Windows in a block that cuts them: [n, a·b, C], [n, a, b, C], [n, C, a, b], or with the axes
    that the block names."""
    cut, size = hints.windows, hints.input_size
    number = windows.count(shape, cut) if cut is not None else 0
    if cut is None or size is None or number == 0:
        return None
    sides = windows.map_size(number, cut, size)
    return None if sides is None else Form("windows", TokenGrid(*sides), cut)
