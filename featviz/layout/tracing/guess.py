"""Guess which layout a tensor has, from its shape, from what is known of its layer, and from the
tensor's trace, where it was followed from the image."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from featviz.errors import LayoutError, UsageError
from featviz.hooks import selectors
from featviz.layout.layouts import (
    BEFORE,
    BEHIND,
    CHOICES,
    LAYOUTS,
    Arrangement,
    channels_of_pieces,
    find_grid,
    parse_grid,
)
from featviz.records import Hints, Trace
from featviz.text import quoted

_FEW_TOKENS = 16
"""The least number of channels-first tokens: boxes [1, N, 4] are no tokens."""
_MANY_TOKENS = 36
"""A map may be high and narrow for other reasons than that its rows are tokens; above so many rows
that make a grid, outside attention, they are taken for tokens."""


def recognise(shape: Sequence[int], hints: Hints) -> Arrangement:
    """Guess the layout of a shape, unless the hints name one; LayoutError where none fits.

    Channels-last is known by its proportions: its first two sizes behind the batch have the
    input's, as maps do, and its last two have not. A token axis is one whose length makes a grid
    of the input's proportions, with or without the model's tokens beside it. Where the image was
    followed through the model, that decides instead: whatever only looks like tokens or attention
    is a sequence.
    """
    form: Arrangement | None = hints.arrangement
    if form is not None:
        return form
    if 0 in shape:
        raise LayoutError(f"shape {list(shape)} holds no values")
    if hints.override is not None:
        return _as_asked(shape, hints)
    if len(shape) in (1, 2):
        form = Arrangement("vector")
    elif len(shape) == 3 and shape[0] == 1:
        form = _three(shape, hints)
    elif len(shape) == 4:
        form = _four(shape, hints)
    elif len(shape) == 5 and shape[0] != 1:
        form = Arrangement("batch") if hints.channels == "first" else None
    elif len(shape) == 5:
        middle, last = (_has_proportions(shape[i : i + 2], hints) for i in (2, 3))
        form = Arrangement("nthwc" if middle and not last else "ncthw")
    if hints.trace is not None:
        form = decide(shape, hints, hints.trace, form)
    if form is None and len(shape) == 3 and hints.input_size is not None:
        form = Arrangement("sequence")
    if form is None:
        words = "is neither a map, a vector nor a grid of tokens of one image; see --tensor-layout"
        raise LayoutError(f"shape {list(shape)} {words}")
    return form


def map_size(shape: Sequence[int], hints: Hints) -> tuple[str, int, int] | None:
    """Layout, height and width of a shape's maps; None where they are no maps of the input."""
    with suppress(LayoutError):
        form = recognise(shape, hints)
        axes = LAYOUTS[form.layout].spatial_axes
        if form.height:
            return form.layout, form.height, form.width
        if axes is not None:
            return form.layout, shape[axes[0]], shape[axes[1]]
    return None


def channel_axis(shape: Sequence[int], hints: Hints) -> int | None:
    """The axis of a shape that counts channels; None where no axis does."""
    with suppress(LayoutError):
        form = recognise(shape, hints)
        if form.trace is None:
            return LAYOUTS[form.layout].channel_axis
        channels = channels_of_pieces(shape, form.trace)
        return channels[0] if len(channels) == 1 else None
    return None


def parse_override(text: str) -> tuple[list[selectors.Selector] | None, str]:
    """Read a value of `--tensor-layout`, `LAYOUT` or `SELECTORS=LAYOUT`, into selectors, None for
    all layers, and a layout: `nhwc`, `tokens`, `tokens:14x20+1`. A selector must match a layer
    without knowing the others, so it takes no index."""
    layers, equals, asked = text.rpartition("=")
    name, colon, numbers = asked.partition(":")
    layout = LAYOUTS.get(name)
    try:
        if layout is None or layout.of_pieces or (colon and layout.token_axis is None):
            names = ", ".join(choice.name for choice in CHOICES)
            hint = f"one of {names}; with a grid, tokens:14x20 or tokens:14x20+1"
            raise LayoutError(f"{quoted(repr(asked))} is no layout", hint)
        if colon:
            parse_grid(numbers)
        chosen = selectors.parse(layers) if equals else None
        if indexed := [one.text for one in chosen or () if one.index is not None]:
            hint = "name the layers, for example layer1.*"
            raise UsageError(f"selector {indexed[0]!r} takes no index here", hint)
    except (LayoutError, UsageError) as error:
        words = f"--tensor-layout {quoted(repr(text))}: {error.message}"
        raise UsageError(words, error.hint) from None
    return chosen, asked


def _as_asked(shape: Sequence[int], hints: Hints) -> Arrangement:
    """The form of a shape in the layout that the user named."""
    name, _, numbers = str(hints.override).partition(":")
    layout = LAYOUTS[name]
    is_many = len(shape) > 1 and shape[0] != 1
    if len(shape) not in layout.dimensions or (is_many and not layout.allows_many):
        words = f"cannot be read as {name} {layout.shape} (--tensor-layout)"
        raise LayoutError(f"shape {list(shape)} {words}")
    if layout.token_axis is None:
        return Arrangement(name)
    length = shape[layout.token_axis]
    form = parse_grid(numbers, name) if numbers else find_grid(length, hints, name)
    beside = 0 if form is None else len(form.prefix) + len(form.suffix)
    if form is None or beside + form.time * form.height * form.width != length:
        words = f"{length} tokens are no grid of --tensor-layout {hints.override}"
        raise LayoutError(f"shape {list(shape)}: {words}")
    return form


def _three(shape: Sequence[int], hints: Hints) -> Arrangement | None:
    """[1, T, D], [1, D, T] or, averaged over heads, attention weights [1, T, T]."""
    if shape[1] in (1, len(hints.prefix_tokens)):
        return Arrangement("vector")
    if hints.channels == "first":
        return _tokens(shape, hints, "ncl")
    if hints.in_attention and not hints.features_last and shape[1] == shape[2]:
        return Arrangement("attention")
    names = ("tokens", "ncl") if shape[2] >= _FEW_TOKENS else ("tokens",)
    return _tokens(shape, hints, *names)


def _four(shape: Sequence[int], hints: Hints) -> Arrangement | None:
    """[1, C, H, W], [1, H, W, C], [1, heads, T, D], [1, T, heads, D], attention weights of tokens
    [1, heads, T, T] or [1, T, T, heads], or [N, C, H, W]."""
    if shape[0] != 1:
        return Arrangement("batch")
    if hints.channels is not None:
        return Arrangement("nchw" if hints.channels == "first" else "nhwc")
    if not hints.features_last and _weights(shape[2:], hints):
        return Arrangement("attention")
    first, last = (_has_proportions(shape[i : i + 2], hints) for i in (1, 2))
    if first and not last:
        return Arrangement("nhwc")
    if _weights(shape[1:3], hints) and shape[3] < shape[1]:
        return Arrangement("attention")
    # a height and width that are no map's, but those of many tokens below one another: at least
    # twice as high, for the width, as the input is
    height, width, size = *shape[2:], hints.input_size
    narrow = size is not None and height * size[1] >= 2 * width * size[0]
    is_column = narrow and height >= _MANY_TOKENS and width > 1
    if not last and (hints.in_attention or is_column):
        return _tokens(shape, hints, "heads", "tokens") or Arrangement("nchw")
    return Arrangement("nchw")


def _weights(sides: Sequence[int], hints: Hints) -> bool:
    """Whether two axes are those of an attention's weights, tokens by tokens."""
    square = hints.in_attention and sides[0] == sides[1] > 1
    return square and find_grid(sides[0], hints) is not None


def _has_proportions(sides: Sequence[int], hints: Hints) -> bool:
    """Whether a height and width have the input's proportions, give or take a column."""
    (height, width), size = sides, hints.input_size
    return size is not None and abs(width - height * size[1] / size[0]) <= 1


def _tokens(shape: Sequence[int], hints: Hints, *names: str) -> Arrangement | None:
    """The first of several layouts whose token axis makes a grid; one that makes the grid of the
    patches goes before the others."""
    found = [find_grid(shape[LAYOUTS[name].token_axis or 0], hints, name) for name in names]
    forms, patches = [form for form in found if form is not None], None
    if hints.input_size is not None and hints.patch_size is not None:
        patches = tuple(n // p for n, p in zip(hints.input_size, hints.patch_size, strict=True))
    of_patches = [form for form in forms if (form.height, form.width) == patches]
    return next(iter(of_patches + forms), None)


_BY_AXES = {
    (3, (1,)): "tokens",
    (3, (2,)): "ncl",
    (4, (1,)): "tokens",
    (4, (2,)): "heads",
    (3, (1, 2)): "nhw",
    (4, (1, 2)): "nhwc",
    (4, (2, 3)): "nchw",
}
"""The layout of one image's tensor whose places go row by row, by how many axes it has and along
which of them the places change."""


def decide(
    shape: Sequence[int], hints: Hints, trace: Trace, guess: Arrangement | None
) -> Arrangement | None:
    """The layout of a tensor whose trace is known; what its shape suggests stands where it claims
    nothing else."""
    if guess is not None and LAYOUTS[guess.layout].token_axis is not None and hints.token_count:
        return guess  # the model's modules say that so many tokens are mixed
    weighs_places = {len(shape) - 2, len(shape) - 1} <= {*trace.axes}  # along both axes
    if trace.is_weights and min(shape[-2:]) > 1 and not weighs_places:
        return Arrangement("attention")
    form, pieces = _on_grid(shape, hints, trace), _in_pieces(shape, hints, trace)
    if guess is not None and guess.layout == "attention" and len(shape) == 4:
        # a square map with as many rows as there are tokens only looks like their weights
        is_map = form is not None and form.layout in ("nchw", "nhwc")
        return form if is_map else pieces or guess
    if guess is not None:  # of tokens, weights averaged over heads, clips only the trace can tell
        is_claim = LAYOUTS[guess.layout].token_axis is not None
        is_claim |= guess.layout in ("batch", "sequence")
        is_claim |= guess.layout == "attention" and len(shape) == 3
        is_claim |= guess.layout in ("ncthw", "nthwc") and hints.time_steps is None
        if not is_claim and not _is_folded(shape, hints, trace, guess):
            return guess
        if not is_claim or guess.layout in ("batch", "ncthw", "nthwc"):
            return form or pieces or guess
    return form or pieces or (Arrangement("sequence") if len(shape) in (3, 4) else guess)


def _is_folded(shape: Sequence[int], hints: Hints, trace: Trace, guess: Arrangement) -> bool:
    """Whether the rows and columns of a guess are none of the map's, in whatever order."""
    axes, places, grid = LAYOUTS[guess.layout].spatial_axes, trace.positions, trace.grid
    if axes is None or places is None or grid is None or bool((places < 0).any()):
        return False
    sides = [shape[axis] for axis in axes]
    if hints.in_attention and len(trace.axes) == 1 and sides[0] == sides[1]:
        return False  # scores of queries and keys
    if trace.axes != tuple(axis for axis in axes if shape[axis] > 1):
        return True
    rows, columns = divmod(places.reshape(sides), grid[2])
    return bool((rows != rows[:, :1]).any() or (columns != columns[:1]).any())


def _on_grid(shape: Sequence[int], hints: Hints, trace: Trace) -> Arrangement | None:
    """Tokens and maps of one image whose places go row by row, between the model's own tokens."""
    name = _BY_AXES.get((len(shape), trace.axes))
    places, grid = trace.positions, trace.grid
    if name is None or places is None or grid is None or shape[0] != 1:
        return None
    time, height, width = grid
    known = (places >= 0).nonzero()[0]
    before, behind = int(known[0]), len(places) - 1 - int(known[-1])
    on_grid = places[known]
    gaps = len(known) != len(places) - before - behind
    if gaps or bool((on_grid[1:] <= on_grid[:-1]).any()):
        return None
    if LAYOUTS[name].token_axis is None:
        return Arrangement(name) if time == 1 and not before + behind else None
    names = hints.prefix_tokens[:before]
    names = (BEFORE,) * (before - len(names)) + names  # others are put in front of the model's own
    return Arrangement(name, height, width, time, names, (BEHIND,) * behind)


def _in_pieces(shape: Sequence[int], hints: Hints, trace: Trace) -> Arrangement | None:
    """Pieces of a map in whatever order, with channels along one axis, heads along another; the
    model's own tokens may stand in front of each piece."""
    if trace.grid is None or trace.positions is None or len(shape) < 3:
        return None
    time, height, width = trace.grid
    if (
        time > 1
        and len(trace.axes) == 3
        and bool((trace.positions[1:] > trace.positions[:-1]).all())
    ):
        return None  # a clip, or whole frames
    left = channels_of_pieces(shape, trace)
    last = len(shape) - 1
    heads = left == [1, last] and last == 3 and shape[2] != shape[3]  # else weights of windows
    folded = not left and len(trace.axes) > 1
    if not (heads or folded or left in ([1], [last])):
        return None
    beside = trace.positions.reshape(-1, shape[trace.axes[-1]]).max(0) < 0
    before = len(hints.prefix_tokens) if beside[: len(hints.prefix_tokens)].all() else 0
    if len(trace.axes) == 1 and beside[before:].any():
        return None
    return Arrangement("windows", height, width, time, hints.prefix_tokens[:before], trace=trace)
