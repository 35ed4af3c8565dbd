"""The colours behind the levels of a tile."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from featviz.errors import UsageError
from featviz.models.requirements import require_matplotlib
from featviz.options import DrawOptions
from featviz.records import ATTENTION_MAPS, CLASS_MAPS, KINDS, SIGNED, Bytes

MAGENTA = (255, 0, 255)
GREYS = ("grey", "gray", "auto")
"""Names of the grey colormap; `auto` is it where nothing else is known (see
`resolved`)."""


@dataclass(frozen=True)
class Palette:
    """What the indices 0..255 of a picture's pixels stand for."""

    levels: int
    """How many indices are levels of maps, from 0 on."""
    pad: int
    """The index between tiles."""
    nonfinite: int | None
    """The index of NaN and infinite values, magenta; None where there are none."""
    colors: bytes | None
    """256 RGB triples; None means that an index is its grey."""
    dark: int = 0
    """The index behind the letters of labels."""
    light: int = 255
    """The index of their letters."""


def resolved(
    cmap: str, kind: str = "output", over: bool = False, reduce: str | None = None
) -> str:
    """The colormap that `auto` stands for.

    coolwarm for gradients and reductions whose values have a sign, with a colour for
    either; over the input turbo for class activation maps, whose cold places leave the
    picture's outlines, and viridis for others; else grey.

    Args:
        kind: of the capture.
        over: whether maps lie over the input.
    """
    if cmap != "auto":
        return cmap
    if reduce in SIGNED:
        return "coolwarm"
    if kind in KINDS and KINDS[kind].cmap != "auto":
        return str(KINDS[kind].cmap)
    if not over:
        return "grey"
    is_evidence = reduce in CLASS_MAPS or reduce in ATTENTION_MAPS
    return "turbo" if is_evidence else "viridis"


def colored(cmap: str, pad: int, labelled: bool = False) -> Palette:
    """Levels of a colormap, then one index for the padding (a grey) and one in magenta.
    There are 254 levels, and 252 of a colormap under labels, which take black and
    white."""
    ink: list[tuple[int, int, int]] = []
    if labelled and cmap not in GREYS:
        ink = [(0, 0, 0), (255, 255, 255)]
    levels = 254 - len(ink)
    colors = np.vstack([ramp(cmap, levels), [[pad] * 3, MAGENTA, *ink]]).astype(
        np.uint8
    )
    return Palette(
        levels=levels,
        pad=levels,
        nonfinite=levels + 1,
        colors=colors.tobytes(),
        dark=levels + 2 if ink else 0,
        light=levels + 3 if ink else levels - 1,
    )


@lru_cache(64)
def chosen(options: DrawOptions, nonfinite: bool, rgb: bool = False) -> Palette:
    """A picture's palette: 256 greys, the padding among them, where they serve; and
    without the magenta where nothing needs it."""
    # A palette is written only where it must be: a grey PNG has no table of 768 bytes,
    # and every other tool reads it as one channel.
    pad = int(min(max(options.gap_grey * 255 + 0.5, 0), 255))  # as save_image rounds
    if rgb or (options.cmap in GREYS and not nonfinite):
        return Palette(levels=256, pad=pad, nonfinite=None, colors=None)
    colors = colored(options.cmap, pad, options.labels or options.collapse is not None)
    return colors if nonfinite else replace(colors, nonfinite=None)


def table(colors: Palette) -> Bytes:
    """The colour of each index, [256, 3]."""
    if colors.colors is None:
        return np.arange(256, dtype=np.uint8)[:, None].repeat(3, axis=1)
    return np.frombuffer(colors.colors, np.uint8).reshape(256, 3)


def ramp(cmap: str, levels: int = 256) -> Bytes:
    """A colormap from its darkest to its brightest, uint8 [levels, 3]."""
    if cmap in GREYS:
        greys = np.round(np.linspace(0, 255, levels)).astype(np.uint8)
        return greys[:, None].repeat(3, axis=1)
    require_matplotlib()
    from matplotlib import colormaps

    rgba = colormaps[cmap](np.linspace(0, 1, levels), bytes=True)
    return np.asarray(rgba)[:, :3]


def check_cmap(name: str) -> None:
    """Say so early where matplotlib has no such colormap."""
    if name in GREYS:
        return
    require_matplotlib()
    from matplotlib import colormaps

    if name not in colormaps:
        close = difflib.get_close_matches(name, list(colormaps), 3)
        hint = "for example viridis or coolwarm"
        if close:
            hint = f"did you mean {' or '.join(close)}?"
        raise UsageError(f"--cmap {name!r} is no colormap of matplotlib", hint)
