"""What the origin of a tensor, followed from the image, says of its layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import featviz.layout.layouts as layouts
from featviz.layout.token_grids import TokenGrid
from featviz.records import Hints, Origin

if TYPE_CHECKING:
    from featviz.layout.layouts import Form

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


def decide(shape: Sequence[int], hints: Hints, origin: Origin, guess: Form | None) -> Form | None:
    """The layout of a tensor whose origin is known; a guess stands where it claims nothing else.

    Args:
        guess: what the shape and the model's blocks suggest; None where nothing does.
    """
    if guess is not None and _is_told(hints, guess):
        return guess
    if origin.weights and _is_matrix(shape):
        return layouts.Form("attention")
    if guess is not None and guess.layout == "attention" and len(shape) == 4:
        return _as_map(shape, hints, origin) or guess
    if guess is not None and not _is_claim(shape, hints, guess):
        return guess
    form = _on_grid(shape, hints, origin) or _in_pieces(shape, origin)
    if form is not None:
        return form
    if guess is not None and guess.layout in ("batch", "ncthw", "nthwc"):
        return guess
    return layouts.Form("sequence") if len(shape) in (3, 4) else guess


def decides(shape: Sequence[int], hints: Hints, origin: Origin) -> bool:
    """Whether the layout of a tensor may depend on its origin."""
    in_pieces = origin.grid is not None and (shape[0] > 1 or len(shape) > 4)
    return len(shape) == 3 or origin.weights or in_pieces or hints.attention


def _is_told(hints: Hints, guess: Form) -> bool:
    """Whether the model's modules say how a tensor lies: in windows, in the order of its pooling,
    or that so many tokens are mixed."""
    by_count = layouts.LAYOUTS[guess.layout].token_axis is not None and bool(hints.tokens)
    return guess.layout == "windows" or guess.unrolled is not None or by_count


def _is_matrix(shape: Sequence[int]) -> bool:
    """Whether weights have rows and columns: [N, T, T], or [1, heads, T, T]."""
    return min(shape[-2:]) > 1 and (len(shape) == 3 or (len(shape) == 4 and shape[0] == 1))


def _is_claim(shape: Sequence[int], hints: Hints, guess: Form) -> bool:
    """Whether a guess says of a tensor what only its origin can tell."""
    is_tokens = layouts.LAYOUTS[guess.layout].token_axis is not None
    averaged = guess.layout == "attention" and len(shape) == 3
    of_clip = guess.layout in ("ncthw", "nthwc") and hints.time is None
    return is_tokens or averaged or of_clip or guess.layout in ("batch", "sequence")


def _on_grid(shape: Sequence[int], hints: Hints, origin: Origin) -> Form | None:
    """Tokens and maps of one image whose places go row by row, behind tokens of the model's own."""
    name = _BY_AXES.get((len(shape), origin.axes))
    places, grid = origin.places, origin.grid
    if name is None or places is None or grid is None or shape[0] != 1:
        return None
    time, height, width = grid
    before = len(places) - time * height * width
    own, on_grid = places[:before], places[before:]
    if bool((own >= 0).any()) or bool((on_grid[1:] <= on_grid[:-1]).any()):
        return None
    if layouts.LAYOUTS[name].token_axis is None:
        return layouts.Form(name) if time == 1 and not before else None
    names = hints.prefix[:before] if before <= len(hints.prefix) else ("extra_token",) * before
    return layouts.Form(name, TokenGrid(height, width, time, names))


def _as_map(shape: Sequence[int], hints: Hints, origin: Origin) -> Form | None:
    """A square map with as many rows as there are tokens, which only looks like their weights: its
    places go row by row."""
    form = _on_grid(shape, hints, origin)
    return form if form is not None and form.layout in ("nchw", "nhwc") else None


def _in_pieces(shape: Sequence[int], origin: Origin) -> Form | None:
    """Pieces of a map in whatever order, with channels along one axis."""
    if origin.grid is None or origin.places is None or len(shape) < 3:
        return None
    time, height, width = origin.grid
    left = [i for i in range(len(shape)) if i not in origin.axes and shape[i] > 1]
    beside = len(origin.axes) == 1 and bool((origin.places < 0).any())
    if time > 1 or beside or left not in ([1], [len(shape) - 1]):
        return None
    return layouts.Form("windows", TokenGrid(height, width), origin=origin)
