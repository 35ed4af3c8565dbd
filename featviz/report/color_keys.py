"""What the colours of a picture mean: a key below each picture, a legend above several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from featviz.drawing import colormap, normalize
from featviz.drawing.normalize import ScaleMode
from featviz.records import REDUCTIONS
from featviz.report.descriptions import is_saliency, number, percent, span
from featviz.rundir.schema import Capture

_STOPS = (0, 51, 102, 153, 204, 255)
"""The levels, 0..255, whose colours a key shows."""


class ColorKey(NamedTuple):
    """The colours of a picture, and what they mean."""

    low: str = ""
    """The value of the darkest colour, or a word for it."""
    high: str = ""
    """Likewise of the brightest."""
    text: str = ""
    """The scale in words."""
    colors: tuple[str, ...] = ()
    """`#rrggbb`, darkest first; none where colours are not levels."""
    is_grey: bool = False
    """Whether the picture may be shown in other colours."""


class LegendEntry(NamedTuple):
    """A colour that stands for something, `#rrggbb`."""

    color: str
    meaning: str
    lines: str = ""
    """The mark on it, as a path of SVG in a square of 14; empty for none."""
    ink: str = ""
    """The colour of the mark."""
    is_grey: bool = False
    """Whether it may be shown in other colours."""


_MARKS = ("M0 0 14 14M0 14 14 0", "M0 14 14 0")
"""SVG paths of `ScaleMode.marks`, as `grid.mark_shapes` draws them."""


def legend(
    options: Mapping[str, Any], captures: Iterable[Capture]
) -> list[LegendEntry]:
    """What single colours mean in some pictures of a run: components of a reduction, marks
    of constant maps, and values that are not finite. The keys explain the other colours.

    Args:
        options: of the run, as run.json has them; any may be missing.
        captures: the pictures.
    """
    entries: dict[LegendEntry, None] = {}
    shows_marks = options.get("marks") is not False
    for row in captures:
        mode = normalize.MODES.get(row.normalize)
        reduction = REDUCTIONS.get(row.reduce or "")
        if reduction is not None and reduction.colors:
            for color, meaning in reduction.colors:
                entries[LegendEntry(color, meaning)] = None
        elif mode and shows_marks and row.overlay is None:
            entries |= dict.fromkeys(_mark_entries(mode, _colormap(row, options)))
    # any picture may have it
    magenta = "#{:02x}{:02x}{:02x}".format(*colormap.MAGENTA)
    return [*entries, LegendEntry(magenta, "NaN or infinite")]


def _mark_entries(mode: ScaleMode, cmap: str) -> list[LegendEntry]:
    """The entries of marks on constant maps; none where matplotlib does not have the
    colormap.

    Args:
        mode: of the scale, which says what the marks mean.
        cmap: the name of the colormap.
    """
    entries = []
    for lines, (level, meaning) in zip(_MARKS, mode.marks, strict=False):
        # the ink is half of all levels away
        colors = scale_colors(cmap, (level, (level + 128) % 256))
        if colors:
            is_grey = cmap in colormap.GREYS
            entries.append(LegendEntry(colors[0], meaning, lines, colors[1], is_grey))
    return entries


def color_key(row: Capture, options: Mapping[str, Any]) -> ColorKey:
    """The key of one picture.

    Args:
        row: the picture.
        options: of the run that drew it, as run.json has them.
    """
    components = _component_key(row)
    if components is not None:
        return components
    cmap = _colormap(row, options)
    colors = scale_colors(cmap)
    # over the input grey maps could not be recoloured alone
    is_grey = cmap in colormap.GREYS and row.overlay is None
    over = []
    if row.overlay is not None:
        over.append(f"{percent(row.overlay)} over the input")
    # each map has a scale of its own
    if row.range is None:
        scaling = ["scaled per map"] if len(row.drawn) > 1 else []
        return ColorKey("min", "max", ", ".join(scaling + over), colors, is_grey)
    low, high = _ends(row)
    # kernels of three inputs are drawn as colours: there is no dark and bright
    if row.layout == "rgb":
        return ColorKey(text=f"red, green and blue, each from {low} to {high}")
    return ColorKey(low, high, ", ".join(_scaling(row) + over), colors, is_grey)


def strip_key(row: Capture, options: Mapping[str, Any]) -> ColorKey:
    """The key of a layer's maps in words that hold for other layers, too: several strips
    have one key.

    Args:
        row: the capture of the layer.
        options: of the run that drew it.
    """
    key = color_key(row, options)
    if _component_key(row) is not None:
        return key
    if row.range is None:
        return key._replace(text="scaled per map")
    if _is_fixed(row):
        return key
    # the ends differ from layer to layer, but zero may be in the middle of all
    bottom, top = row.range
    if bottom is not None and bottom == -(top or 0):
        return key._replace(low="−", high="+", text="0 in the middle, scaled per layer")
    return key._replace(low="min", high="max", text="scaled per layer")


def _component_key(row: Capture) -> ColorKey | None:
    """The key of a picture whose colours are components, as of a PCA; None for others."""
    reduction = REDUCTIONS.get(row.reduce or "")
    if reduction is None or not reduction.colors:
        return None
    ends = span(*(row.range or (None, None)))
    return ColorKey(text=f"each component from {ends} {reduction.unit}")


def _mode(row: Capture) -> ScaleMode | None:
    """The scale of a picture; None for one that this version does not know."""
    return normalize.MODES.get(row.normalize)


def _is_fixed(row: Capture) -> bool:
    """Whether the ends of the scale are the same in all pictures."""
    mode = _mode(row)
    return mode is not None and mode.fixed


def _ends(row: Capture) -> tuple[str, str]:
    """The values of the darkest and the brightest colour, with `≤` or `≥` where values
    beyond them have the same colour.

    Args:
        row: a picture with one scale for all its maps.
    """
    assert row.range is not None
    bottom, top = row.range
    mode = _mode(row)
    clips_low = False
    clips_high = False
    if mode is not None and mode.clips:
        if row.reduce is not None or row.layout == "mean":
            # The extremes in the row are those of the maps before they became one tile, so
            # they do not tell. Limits that a user sets are taken to cut something off.
            clips_low = clips_high = ":" in mode.spelling
        else:
            clips_low = row.min is None or bottom is None or row.min < bottom
            clips_high = row.max is None or top is None or row.max > top
    low = number(bottom)
    high = number(top)
    if clips_low:
        low = f"≤ {low}"
    if clips_high:
        high = f"≥ {high}"
    return low, high


def _scaling(row: Capture) -> list[str]:
    """Which maps share the scale of a picture, in words; empty for a single tile."""
    if row.maps == 1 or row.reduce is not None:
        return []
    if row.constant is not None:
        return ["one stripe per channel, each map constant; one scale for all"]
    if row.kind == "kernel":
        return ["one scale for all kernels"]
    maps = "values" if row.layout == "vector" else "maps"
    return [f"one scale for all {maps}" + ("" if _is_fixed(row) else " of this image")]


@lru_cache
def scale_colors(cmap: str, levels: tuple[int, ...] = _STOPS) -> tuple[str, ...]:
    """Colours `#rrggbb` of a colormap; none where the installed matplotlib does not have
    it.

    Args:
        cmap: its name.
        levels: 0..255, whose colours are asked for.
    """
    try:
        ramp = colormap.ramp(cmap).tolist()
    except KeyError:
        return ()
    return tuple("#{:02x}{:02x}{:02x}".format(*ramp[level]) for level in levels)


def _colormap(row: Capture, options: Mapping[str, Any]) -> str:
    """The name of the colormap of a picture."""
    if row.cmap is not None:
        return row.cmap
    # unlike other gradients, the saliency of an image has no sign
    kind = "output" if is_saliency(row) else row.kind
    cmap = str(options.get("cmap") or "grey")
    return colormap.decide_cmap(cmap, kind, row.overlay is not None, row.reduce)
