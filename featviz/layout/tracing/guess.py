"""Decide which layout a tensor has: as the user says, else by its trace (where in the
image its values lie), else by its shape and what is known of its layer.

    [1, 197, 768]     197 = 1 + 14 × 14 and the input is square: a class token and a grid of tokens
    [1, 100, 256]     a grid of 10 × 10, by its shape; but where nothing was traced to it from the
                      image (the queries of a DETR), rows of a matrix
    [1, 12, 16, 24]   of a convolution: 12 maps; else, of a 96 × 128 input, which is as wide for its
                      height as 12 × 16: 24 maps with channels last

The layouts are tried in order, the likeliest first; the first that fits counts, and
`featviz run -v` prints its reason. A wrong layout draws noise without complaint, so a
shape that fits none is refused. What shapes occur was read off
torchvision, timm, transformers and Ultralytics; tests/layout has models that make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

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
"""How many tokens [1, D, T] has at least: boxes [1, N, 4] are not tokens."""
_MANY_TOKENS = 36
"""How many rows a high and narrow map has at least that is taken for tokens outside an
attention; maps of fewer rows may be high and narrow for other reasons."""


class Decision(NamedTuple):
    """The arrangement of a tensor."""

    arrangement: Arrangement
    reason: str
    """Why the tensor has it: the end of a sentence that begins with the layout's name."""


class ShapeMaps(NamedTuple):
    """The layout of a tensor's maps, and their size in values."""

    layout: str
    height: int
    width: int


def recognise(shape: Sequence[int], hints: Hints) -> Arrangement:
    """The arrangement of a tensor, without the reason; see `decide`."""
    return decide(shape, hints).arrangement


def decide(shape: Sequence[int], hints: Hints) -> Decision:
    """The arrangement of a tensor, and why it has it.

    Args:
        shape: shape of the tensor, of one image.
        hints: what is known of its layer; with a trace if the image was followed to the
            tensor.

    Raises:
        LayoutError: no layout fits.
    """
    if hints.arrangement is not None:
        return Decision(hints.arrangement, "it was decided")
    if 0 in shape:
        raise LayoutError(f"shape {list(shape)} holds no values")
    if hints.override is not None:
        return Decision(_by_override(shape, hints), "--tensor-layout says so")
    decision = _by_shape(shape, hints)
    if hints.trace is not None:
        decision = _by_trace(shape, hints, hints.trace, decision)
    if decision is not None:
        return decision
    if len(shape) == 3 and hints.input_size is not None:
        return Decision(Arrangement("sequence"), "its rows make no grid of the input")
    raise LayoutError(
        f"shape {list(shape)} is neither a map, a vector nor a grid of tokens"
        " of one image; see --tensor-layout"
    )


def map_size(shape: Sequence[int], hints: Hints) -> ShapeMaps | None:
    """The layout and the size of a tensor's maps; None if they are not maps of the input,
    or no layout fits the shape."""
    with suppress(LayoutError):
        arrangement = recognise(shape, hints)
        axes = LAYOUTS[arrangement.layout].spatial_axes
        if arrangement.height:
            return ShapeMaps(arrangement.layout, arrangement.height, arrangement.width)
        if axes is not None:
            return ShapeMaps(arrangement.layout, shape[axes[0]], shape[axes[1]])
    return None


def channel_axis(shape: Sequence[int], hints: Hints) -> int | None:
    """The axis of a tensor that counts channels; it may be negative (-1 for tokens). None
    if no axis or several axes count channels, or no layout fits the shape."""
    with suppress(LayoutError):
        arrangement = recognise(shape, hints)
        if arrangement.trace is None:
            return LAYOUTS[arrangement.layout].channel_axis
        axes = channels_of_pieces(shape, arrangement.trace)
        return axes[0] if len(axes) == 1 else None
    return None


# What the user says


class Override(NamedTuple):
    """A value of `--tensor-layout`."""

    selectors: list[selectors.Selector] | None
    """None for all layers."""
    layout: str
    """`nhwc`, `tokens`, `tokens:14x20+1`."""


def parse_override(text: str) -> Override:
    """Read a value of `--tensor-layout`, `LAYOUT` or `SELECTORS=LAYOUT`.

    Raises:
        UsageError: there is no such layout or grid; or a selector has an index, such as
            `Conv2d#0`, which counts among all layers: here, each layer is matched alone.
    """
    selector_text, equals, layout_text = text.rpartition("=")
    try:
        _check_layout(layout_text)
        if not equals:
            return Override(None, layout_text)
        chosen = selectors.parse(selector_text)
        for selector in chosen:
            if selector.taken != slice(None):
                raise UsageError(
                    f"selector {selector.text!r} takes no index here",
                    "name the layers, for example layer1.*",
                )
    except (LayoutError, UsageError) as error:
        raise UsageError(
            f"--tensor-layout {quoted(repr(text))}: {error.message}", error.hint
        ) from None
    return Override(chosen, layout_text)


def _check_layout(text: str) -> None:
    """Raise LayoutError unless a text is the name of one of CHOICES, for tokens with or
    without a grid, such as `tokens:14x20`."""
    name, colon, grid = text.partition(":")
    layout = LAYOUTS.get(name)
    if layout is None or layout.of_pieces or (colon and layout.token_axis is None):
        names = ", ".join(choice.name for choice in CHOICES)
        raise LayoutError(
            f"{quoted(repr(text))} is no layout",
            f"one of {names}; with a grid, tokens:14x20 or tokens:14x20+1",
        )
    if colon:
        parse_grid(grid)


def _by_override(shape: Sequence[int], hints: Hints) -> Arrangement:
    """The arrangement of a tensor in the layout that the user named (`hints.override`).

    Raises:
        LayoutError: the shape does not fit this layout, or its tokens make no grid.
    """
    name, _, grid = str(hints.override).partition(":")
    layout = LAYOUTS[name]
    has_many = len(shape) > 1 and shape[0] != 1
    if len(shape) not in layout.dimensions or (has_many and not layout.allows_many):
        raise LayoutError(
            f"shape {list(shape)} cannot be read as {name} {layout.shape}"
            " (--tensor-layout)"
        )
    if layout.token_axis is None:
        return Arrangement(name)
    length = shape[layout.token_axis]
    tokens = parse_grid(grid, name) if grid else find_grid(length, hints, name)
    if tokens is None or tokens.token_count != length:
        raise LayoutError(
            f"shape {list(shape)}: {length} tokens are no grid of --tensor-layout"
            f" {hints.override}"
        )
    return tokens


# By the shape


def _by_shape(shape: Sequence[int], hints: Hints) -> Decision | None:
    """What the shape says, without the trace; None if it fits no layout."""
    axes = len(shape)
    if axes in (1, 2):
        return Decision(Arrangement("vector"), "it has one or two axes")
    if axes == 3 and shape[0] == 1:
        return _of_three_axes(shape, hints)
    if axes == 4:
        return _of_four_axes(shape, hints)
    if axes == 5 and shape[0] == 1:
        last_are_map = _has_proportions(shape[3:5], hints)
        if _has_proportions(shape[2:4], hints) and not last_are_map:
            reason = "axes 2 and 3 have the input's proportions"
            return Decision(Arrangement("nthwc"), reason)
        return Decision(Arrangement("ncthw"), "it has five axes")
    # queries of windows [3, windows, heads, T, D] have five axes, too
    if axes == 5 and hints.channels == "first":
        return Decision(Arrangement("batch"), "the first of five axes counts items")
    return None


def _of_three_axes(shape: Sequence[int], hints: Hints) -> Decision | None:
    """What a tensor of three axes is: tokens [1, T, D] or [1, D, T], a vector, or attention
    weights [1, T, T] that were averaged over heads. None if it can only be tokens, and
    these make no grid."""
    if shape[1] in (1, len(hints.prefix_tokens)):
        return Decision(
            Arrangement("vector"), "it has one row, or one for each token of the model"
        )
    if hints.channels == "first":
        return _tokens(shape, hints, "ncl")
    if hints.in_attention and not hints.features_last and shape[1] == shape[2]:
        return Decision(Arrangement("attention"), "it is square, inside an attention")
    if shape[2] < _FEW_TOKENS:
        return _tokens(shape, hints, "tokens")
    return _tokens(shape, hints, "tokens", "ncl")


def _of_four_axes(shape: Sequence[int], hints: Hints) -> Decision:
    """What a tensor of four axes is: maps [1, C, H, W] or [1, H, W, C], heads of tokens
    [1, heads, T, D] or [1, T, heads, D], attention weights [1, heads, T, T] or
    [1, T, T, heads], or a batch [N, C, H, W]."""
    # it may hold windows, too, which `_by_trace` finds
    if shape[0] != 1:
        return Decision(Arrangement("batch"), "its first axis counts items")
    if hints.channels is not None:
        name = "nchw" if hints.channels == "first" else "nhwc"
        return Decision(Arrangement(name), f"its layer has channels {hints.channels}")
    # a linear layer with as many features as tokens looks like weights, but is not
    if not hints.features_last and _pairs_tokens(shape[2:], hints):
        reason = "the last two axes count tokens, in an attention"
        return Decision(Arrangement("attention"), reason)
    last_are_map = _has_proportions(shape[2:], hints)
    if _has_proportions(shape[1:3], hints) and not last_are_map:
        reason = "axes 1 and 2 have the input's proportions"
        return Decision(Arrangement("nhwc"), reason)
    if _pairs_tokens(shape[1:3], hints) and shape[3] < shape[1]:
        reason = "axes 1 and 2 count tokens, in an attention"
        return Decision(Arrangement("attention"), reason)
    tokens = None
    if not last_are_map and (hints.in_attention or _is_column(shape[2:], hints)):
        tokens = _tokens(shape, hints, "heads", "tokens")
    return tokens or Decision(Arrangement("nchw"), "it has four axes")


def _pairs_tokens(sizes: Sequence[int], hints: Hints) -> bool:
    """Whether two axes of these lengths may be the token axes of attention weights: inside
    an attention, they are equal, and so many tokens make a grid."""
    is_square = sizes[0] == sizes[1] > 1
    return hints.in_attention and is_square and find_grid(sizes[0], hints) is not None


def _has_proportions(sizes: Sequence[int], hints: Hints) -> bool:
    """Whether a height and width have the input's proportions, within one column."""
    if hints.input_size is None:
        return False
    height, width = hints.input_size
    return abs(sizes[1] - sizes[0] * width / height) <= 1


def _is_column(sizes: Sequence[int], hints: Hints) -> bool:
    """Whether a height and width are those of tokens and features rather than of a map:
    there are many rows, and the proportion of height to width is at least twice the
    input's."""
    if hints.input_size is None or sizes[0] < _MANY_TOKENS or sizes[1] == 1:
        return False
    height, width = hints.input_size
    return sizes[0] * width >= 2 * sizes[1] * height


def _tokens(shape: Sequence[int], hints: Hints, *names: str) -> Decision | None:
    """The first of several layouts whose token axis can make a grid. A layout that makes
    exactly the grid of the model's patches is preferred.

    Args:
        names: names of layouts of tokens, the likelier first.
    """
    patch_grid = None
    if hints.input_size is not None and hints.patch_size is not None:
        sizes = zip(hints.input_size, hints.patch_size, strict=True)
        patch_grid = tuple(pixels // patch for pixels, patch in sizes)
    arrangements = []
    for name in names:
        tokens = find_grid(shape[LAYOUTS[name].token_axis or 0], hints, name)
        if tokens is not None:
            arrangements.append(tokens)
    if not arrangements:
        return None
    # in [196, 64], both axes can make a grid, 14 × 14 and 8 × 8
    tokens = min(arrangements, key=lambda grid: (grid.height, grid.width) != patch_grid)
    size = f"{tokens.height} × {tokens.width}"
    return Decision(tokens, f"its tokens make a grid of {size} of the input")


# By the trace


def _by_trace(
    shape: Sequence[int], hints: Hints, trace: Trace, by_shape: Decision | None
) -> Decision | None:
    """Decide on a tensor that was followed.

    The trace proves where values lie, so it decides when the shape proves little: on
    tokens, attention weights and batches. On a map whose rows and columns the shape shows,
    the shape decides, unless the trace shows that the rows and columns are other axes.

    Args:
        trace: the tensor's trace; empty if it lies nowhere in the image.
        by_shape: what the shape says; None if it fits no layout.
    """
    layout = "" if by_shape is None else by_shape.arrangement.layout
    # the model's modules tell how many tokens there are
    if hints.token_count and layout in ("tokens", "ncl", "heads"):
        return by_shape
    if _are_weights(shape, trace):
        return Decision(
            Arrangement("attention"), "a softmax inside an attention made it"
        )
    if _is_shown(layout, hints) and not _is_folded(shape, hints, trace, layout):
        return by_shape
    in_image = _in_image(shape, hints, trace, layout)
    if in_image is None and (len(shape) == 3 or layout in ("tokens", "heads")):
        reason = "its rows lie nowhere in the image"
        return Decision(Arrangement("sequence"), reason)
    return in_image or by_shape


def _in_image(
    shape: Sequence[int], hints: Hints, trace: Trace, layout: str
) -> Decision | None:
    """What the positions of a tensor's values say; None if they make no map.

    Args:
        layout: name of the layout that the shape alone says.
    """
    on_grid = _row_by_row(shape, hints, trace)
    # If the shape says attention weights, and positions change along one axis, they are
    # those of the queries. A square map, which looks alike, has positions along two.
    are_weights = layout == "attention" and len(shape) == 4 and len(trace.axes) == 1
    if on_grid is None or are_weights:
        return _in_pieces(shape, hints, trace)
    return on_grid


def _are_weights(shape: Sequence[int], trace: Trace) -> bool:
    """Whether a tensor is the weights of an attention, whose last two axes pair queries
    with keys. If positions change along both axes, it is a map that was multiplied by
    weights."""
    last_axes = {len(shape) - 2, len(shape) - 1}
    has_pairs = min(shape[-2:]) > 1 and not last_axes <= {*trace.axes}
    return trace.is_weights and has_pairs


def _is_shown(layout: str, hints: Hints) -> bool:
    """Whether the shape alone is enough to recognise a layout. Five axes are enough only
    if the input is a clip.

    Args:
        layout: name of the layout that the shape says; empty for none.
    """
    if layout in ("ncthw", "nthwc"):
        return hints.time_steps is not None
    return layout in ("nchw", "nhwc", "vector")


def _is_folded(shape: Sequence[int], hints: Hints, trace: Trace, layout: str) -> bool:
    """Whether the trace shows that a layout takes the wrong axes for rows and columns:
    MobileViTV2 has tensors [1, C, 4, N] with N patches of 4 pixels.

    Args:
        layout: name of the layout that the shape alone says.
    """
    axes = LAYOUTS[layout].spatial_axes
    if axes is None or trace.positions is None or trace.grid is None:
        return False
    if (trace.positions < 0).any():
        return False
    sizes = [shape[axis] for axis in axes]
    if hints.in_attention and len(trace.axes) == 1 and sizes[0] == sizes[1]:
        return False  # scores of queries and keys
    if trace.axes != tuple(axis for axis in axes if shape[axis] > 1):
        return True
    # the values in a row of a map lie in one row of the image, those in a column in one
    # column
    rows, columns = divmod(trace.positions.reshape(sizes), trace.grid[2])
    return bool((rows != rows[:, :1]).any() or (columns != columns[:1]).any())


_BY_AXES = {
    (3, (1,)): "tokens",
    (3, (2,)): "ncl",
    (4, (1,)): "tokens",
    (4, (2,)): "heads",
    (3, (1, 2)): "nhw",
    (4, (1, 2)): "nhwc",
    (4, (2, 3)): "nchw",
}
"""The layout of one image's tensor whose positions go row by row. The keys say how many
axes the tensor has, and along which of them the positions change."""


def _row_by_row(shape: Sequence[int], hints: Hints, trace: Trace) -> Decision | None:
    """Decide on tokens and maps of one image whose positions go row by row; the model's
    own tokens may stand before and behind the grid. None for other tensors.

    [-1, 0, 1, 2, 3, -1]    a class token, a grid of 2 × 2, a token behind it
    """
    name = _BY_AXES.get((len(shape), trace.axes))
    if name is None or trace.positions is None or trace.grid is None or shape[0] != 1:
        return None
    (in_grid,) = (trace.positions >= 0).nonzero()
    before = int(in_grid[0])
    end = int(in_grid[-1]) + 1
    # rising positions also prove that no other token, -1, stands inside the grid
    on_grid = trace.positions[before:end]
    if (on_grid[1:] <= on_grid[:-1]).any():
        return None
    time, height, width = trace.grid
    reason = "its values lie in the image row by row"
    if LAYOUTS[name].token_axis is None:
        is_whole = time == 1 and len(on_grid) == len(trace.positions)
        return Decision(Arrangement(name), reason) if is_whole else None
    names = hints.prefix_tokens[:before]
    # unnamed tokens stand in front of the model's own
    prefix = (BEFORE,) * (before - len(names)) + names
    suffix = (BEHIND,) * (len(trace.positions) - end)
    return Decision(Arrangement(name, height, width, time, prefix, suffix), reason)


def _in_pieces(shape: Sequence[int], hints: Hints, trace: Trace) -> Decision | None:
    """Decide on pieces of a map, such as windows, in any order; the model's own tokens may
    stand in front of each piece. None for other tensors.

    [-1, 0, 1, 4, 5]
    [-1, 2, 3, 6, 7]        two windows of 2 × 2 in a grid of 2 × 4, a class token before each
    """
    if trace.grid is None or trace.positions is None or len(shape) < 3:
        return None
    time, height, width = trace.grid
    is_ordered = (trace.positions[1:] > trace.positions[:-1]).all()
    if time > 1 and len(trace.axes) == 3 and is_ordered:
        return None  # a clip, or whole frames
    if not _has_channels(shape, trace):
        return None
    # the model's own tokens are -1 in each piece, padding only in some
    pieces = trace.positions.reshape(-1, shape[trace.axes[-1]])
    lies_nowhere = pieces.max(0) < 0
    prefix = hints.prefix_tokens
    if not lies_nowhere[: len(prefix)].all():
        prefix = ()
    if len(trace.axes) == 1 and lies_nowhere[len(prefix) :].any():
        return None
    arrangement = Arrangement("windows", height, width, time, prefix, trace=trace)
    return Decision(arrangement, "it holds each position of a map once, in pieces")


def _has_channels(shape: Sequence[int], trace: Trace) -> bool:
    """Whether a tensor that holds a map in pieces, such as windows, has channels on the
    usual axes: axis 1, the last axis, or both for heads [N, heads, T, D]. Attention
    weights in windows [N, heads, T, T] have none."""
    axes = channels_of_pieces(shape, trace)
    last = len(shape) - 1
    if not axes:
        return len(trace.axes) > 1  # pieces of one channel
    if axes == [1, 3] and last == 3:
        # [N, heads, T, D], not weights [N, heads, T, T]
        return shape[2] != shape[3]
    return axes in ([1], [last])
