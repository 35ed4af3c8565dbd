"""The colours behind the levels of a tile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from featviz.errors import UsageError
from featviz.models.requirements import require_matplotlib
from featviz.options import DrawOptions
from featviz.records import ATTENTION_MAPS, CLASS_MAPS, KINDS, SIGNED, Bytes
from featviz.text import did_you_mean

MAGENTA = (255, 0, 255)
GREYS = ("grey", "gray", "auto")
"""Names of the grey colormap, among them `auto` before `decide_cmap` is called."""


@dataclass(frozen=True)
class Palette:
    """What the values 0..255 of a picture's pixels stand for. A value is the index of a
    colour."""

    levels: int
    """How many indices, from 0 on, are the levels of maps, dark to bright."""
    pad: int
    """The index of the pixels between tiles."""
    nonfinite: int | None
    """The index of NaN and infinite values, magenta; None if there are no such values."""
    colors: bytes | None
    """The 256 colours as RGB triples. None for greys: an index is a grey level."""
    dark: int = 0
    """The index of the ground of labels."""
    light: int = 255
    """The index of the letters of labels."""


def decide_cmap(
    cmap: str, kind: str = "output", over: bool = False, reduce: str | None = None
) -> str:
    """The name of a colormap, with `auto` decided.

    Args:
        cmap: a name, which is returned as it is, or `auto`.
        kind: kind of the capture; or `saliency` or `kernel`.
        over: whether maps lie over the input.
        reduce: how all channels become one map; None if they do not.
    """
    if cmap != "auto":
        return cmap
    # values with a sign: one colour for each sign
    if reduce in SIGNED:
        return "coolwarm"
    # saliency and kernels are not kinds of CaptureKind
    if kind in KINDS and KINDS[kind].cmap != "auto":
        return str(KINDS[kind].cmap)
    # over a photo, grey maps could not be told from the photo
    if not over:
        return "grey"
    # the usual colours of class activation maps in papers: blue means no evidence
    is_evidence = reduce in CLASS_MAPS or reduce in ATTENTION_MAPS
    return "turbo" if is_evidence else "viridis"


def palette_of(cmap: str, pad: int, labelled: bool = False) -> Palette:
    """The palette of a colormap: its levels, the colour of the padding, magenta for values
    that are not finite, and black and white for labels.

    Args:
        cmap: a name of GREYS or of a colormap of matplotlib; `check_cmap` has accepted
            it, and any other name is a KeyError.
        pad: the grey between tiles, 0..255.
        labelled: whether there are labels. In a coloured palette, their black and white
            take two indices: 252 levels are left, else 254.
    """
    # in greys, labels use the darkest and the brightest level
    has_ink = labelled and cmap not in GREYS
    ink = [(0, 0, 0), (255, 255, 255)] if has_ink else []
    levels = 254 - len(ink)
    extra_colors = np.array([[pad] * 3, MAGENTA, *ink], np.uint8)
    colors = np.vstack([ramp(cmap, levels), extra_colors])
    return Palette(
        levels=levels,
        pad=levels,
        nonfinite=levels + 1,
        colors=colors.tobytes(),
        dark=254 if has_ink else 0,
        light=255 if has_ink else levels - 1,
    )


@lru_cache(64)
def picture_palette(
    options: DrawOptions, nonfinite: bool, rgb: bool = False
) -> Palette:
    """The palette of a picture: 256 plain greys for RGB tiles and for grey maps without
    NaN and infinity; else the palette of the colormap.

    Args:
        options: `cmap` is not `auto`.
        nonfinite: whether a map has NaN or infinite values; only then is there an index
            for magenta.
        rgb: whether the tiles are RGB, and need no palette.
    """
    # A grey PNG without a palette is 768 bytes smaller, and other tools read it as one
    # channel.
    pad = int(min(max(options.gap_grey * 255 + 0.5, 0), 255))  # as save_image rounds
    if rgb or (options.cmap in GREYS and not nonfinite):
        return Palette(levels=256, pad=pad, nonfinite=None, colors=None)
    colors = palette_of(
        options.cmap, pad, options.labels or options.collapse is not None
    )
    if nonfinite:
        return colors
    return replace(colors, nonfinite=None)


def color_table(colors: Palette) -> Bytes:
    """The colour of each index, uint8 [256, 3]."""
    if colors.colors is None:
        return np.arange(256, dtype=np.uint8)[:, None].repeat(3, axis=1)
    return np.frombuffer(colors.colors, np.uint8).reshape(256, 3)


def ramp(cmap: str, levels: int = 256) -> Bytes:
    """The colours of a colormap from its low end to its high end, uint8 [levels, 3].
    KeyError if the name is neither in GREYS nor a colormap of matplotlib."""
    if cmap in GREYS:
        greys = np.round(np.linspace(0, 255, levels)).astype(np.uint8)
        return greys[:, None].repeat(3, axis=1)
    require_matplotlib()
    from matplotlib import colormaps

    rgba = colormaps[cmap](np.linspace(0, 1, levels), bytes=True)
    return np.asarray(rgba)[:, :3]


def check_cmap(name: str) -> None:
    """Check the name of a colormap before anything is drawn.

    Raises:
        UsageError: the name is neither in GREYS nor a colormap of matplotlib.
    """
    if name in GREYS:
        return
    require_matplotlib()
    from matplotlib import colormaps

    if name not in colormaps:
        hint = did_you_mean(name, colormaps, "for example viridis or coolwarm", most=3)
        raise UsageError(f"--cmap {name!r} is no colormap of matplotlib", hint)
