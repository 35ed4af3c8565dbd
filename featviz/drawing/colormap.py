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
"""Names of the grey colormap, among them `auto` where `resolved` was not asked."""


@dataclass(frozen=True)
class Palette:
    """What the values 0..255 of a picture's pixels stand for: indices of colours."""

    levels: int
    """How many indices are levels of maps, from 0 on: dark to bright."""
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
    """The name of a colormap, with `auto` decided.

    Args:
        cmap: a name, which is returned, or `auto`.
        kind: of the capture; `saliency`, or `kernel`.
        over: whether maps lie over the input.
        reduce: how channels become one; None where they do not.
    """
    if cmap != "auto":
        return cmap
    # values with a sign: a colour for either
    if reduce in SIGNED:
        return "coolwarm"
    # saliency and kernels are not kinds of CaptureKind
    if kind in KINDS and KINDS[kind].cmap != "auto":
        return str(KINDS[kind].cmap)
    # greys over the greys of a photo could not be told from it
    if not over:
        return "grey"
    # papers draw where the evidence lies in turbo, which is cold where nothing is
    is_evidence = reduce in CLASS_MAPS or reduce in ATTENTION_MAPS
    return "turbo" if is_evidence else "viridis"


def palette_of(cmap: str, pad: int, labelled: bool = False) -> Palette:
    """The palette of a colormap: its levels, then the padding, magenta for what is not
    finite, and the ink of labels.

    Args:
        cmap: a name of GREYS, or of matplotlib's colormaps, which `check_cmap` has let
            pass; another one is a KeyError.
        pad: the grey between tiles, 0..255.
        labelled: whether there are labels. On colours they take black and white, so
            there are 252 levels, else 254.
    """
    # on greys letters take the darkest and the brightest level
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
    """The palette of a picture: 256 plain greys for RGB tiles, and for finite maps in
    greys; else the colours of the colormap, with magenta only for NaN and infinity.

    Args:
        options: with `cmap` decided.
        nonfinite: whether a map has NaN or infinite values.
        rgb: whether the tiles are RGB, which takes no palette.
    """
    # A palette is written only where it must be: a grey PNG has no table of 768 bytes,
    # and every other tool reads it as one channel.
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
    """The colours of a colormap from its low end to its high end, uint8 [levels, 3];
    KeyError for a name that is neither among GREYS nor one of matplotlib's."""
    if cmap in GREYS:
        greys = np.round(np.linspace(0, 255, levels)).astype(np.uint8)
        return greys[:, None].repeat(3, axis=1)
    require_matplotlib()
    from matplotlib import colormaps

    rgba = colormaps[cmap](np.linspace(0, 1, levels), bytes=True)
    return np.asarray(rgba)[:, :3]


def check_cmap(name: str) -> None:
    """Refuse a name of no colormap, before anything is drawn.

    Raises:
        UsageError: it is neither among GREYS nor a colormap of matplotlib.
    """
    if name in GREYS:
        return
    require_matplotlib()
    from matplotlib import colormaps

    if name not in colormaps:
        hint = did_you_mean(name, colormaps, "for example viridis or coolwarm", most=3)
        raise UsageError(f"--cmap {name!r} is no colormap of matplotlib", hint)
