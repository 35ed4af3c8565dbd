"""The colours behind the levels of a tile."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import numpy as np

from featviz.errors import UsageError

MAGENTA = (255, 0, 255)
GREYS = ("grey", "gray", "auto")
"""`auto` is grey but for gradients."""
_SPARE = 2
"""Indices at the end of a palette that are no level: the padding, then non-finite values."""


@dataclass(frozen=True)
class Palette:
    """How many levels a tile has, which index pads, and the colours where grey does not serve."""

    levels: int
    pad: int
    nonfinite: int | None
    colors: bytes | None
    """256 RGB triples; None means that an index is its grey."""


def plain_grey(pad_value: float) -> Palette:
    """256 greys, the padding among them; nothing is left for non-finite values."""
    return Palette(256, _grey(pad_value), None, None)


def colored(cmap: str, pad_value: float) -> Palette:
    """254 levels of a colormap, one index for the padding (grey) and one in magenta."""
    levels = 256 - _SPARE
    table = np.vstack([_table(cmap, levels), [[_grey(pad_value)] * 3, MAGENTA]])
    return Palette(levels, levels, levels + 1, table.astype(np.uint8).tobytes())


def check_cmap(name: str) -> None:
    """Say so early where matplotlib has no such colormap.

    Raises:
        UsageError: with the nearest names.
    """
    if name in GREYS:
        return
    from matplotlib import colormaps

    if name not in colormaps:
        close = difflib.get_close_matches(name, list(colormaps), 3)
        raise UsageError(
            f"--cmap {name!r} is no colormap of matplotlib",
            f"did you mean {' or '.join(close)}?" if close else "for example viridis or coolwarm",
        )


def _table(cmap: str, levels: int) -> np.ndarray:
    """[levels, 3] RGB, 0..255."""
    if cmap in GREYS:
        return np.round(np.linspace(0, 255, levels))[:, None].repeat(3, axis=1)
    from matplotlib import colormaps

    rgba = colormaps[cmap](np.linspace(0, 1, levels), bytes=True)
    return np.asarray(rgba)[:, :3]


def _grey(pad_value: float) -> int:
    """save_image's rounding of a value 0..1 to a grey."""
    return int(min(max(pad_value * 255 + 0.5, 0), 255))
