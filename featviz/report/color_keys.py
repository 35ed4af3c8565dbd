"""What colours mean: a colour key stands below each picture, a legend above several."""

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
    """The scale of colours of a picture."""

    low: str = ""
    """The value of the darkest colour, or a word for it."""
    high: str = ""
    """The value of the brightest colour, or a word for it."""
    text: str = ""
    """The scale in words."""
    colors: tuple[str, ...] = ()
    """Colours of the scale, `#rrggbb`, the darkest first; empty for a picture without a
    scale from dark to bright."""
    is_grey: bool = False
    """Whether the picture is grey, so that a page may show it in other colours."""


class LegendEntry(NamedTuple):
    """A colour with a meaning of its own, maybe with a mark on it."""

    color: str
    """`#rrggbb`."""
    meaning: str
    lines: str = ""
    """The mark, as a path of SVG in a square of 14 pixels; empty for none."""
    ink: str = ""
    """The colour of the mark, `#rrggbb`."""
    is_grey: bool = False
    """Whether the colour is of a grey scale, so that a page may show another one."""


_MARKS = ("M0 0 14 14M0 14 14 0", "M0 14 14 0")
"""The SVG paths of `ScaleMode.marks`, in their order; `grid.mark_shapes` draws the same."""


def legend(
    options: Mapping[str, Any], captures: Iterable[Capture]
) -> list[LegendEntry]:
    """The legend of some pictures of a run: components of a reduction, marks on constant
    maps, and the colour of NaN and infinite values. Colour keys explain all other colours.

    Args:
        options: the options of the run in run.json; any may be missing.
        captures: the captures that the pictures show.
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
    # any picture may have NaN or infinite values
    magenta = "#{:02x}{:02x}{:02x}".format(*colormap.MAGENTA)
    return [*entries, LegendEntry(magenta, "NaN or infinite")]


def _mark_entries(mode: ScaleMode, cmap: str) -> list[LegendEntry]:
    """The entries of marks on constant maps; empty if the installed matplotlib does not
    have the colormap.

    Args:
        mode: the mode of the scale, which says what the marks mean.
        cmap: the name of the colormap.
    """
    entries = []
    for lines, (level, meaning) in zip(_MARKS, mode.marks, strict=False):
        # the ink of a mark is 128 levels away from the map, so that it stands out
        colors = scale_colors(cmap, (level, (level + 128) % 256))
        if colors:
            is_grey = cmap in colormap.GREYS
            entries.append(LegendEntry(colors[0], meaning, lines, colors[1], is_grey))
    return entries


def color_key(row: Capture, options: Mapping[str, Any]) -> ColorKey:
    """The colour key of a picture.

    Args:
        row: the capture that the picture shows.
        options: the options in run.json of the run that drew it.
    """
    components = _component_key(row)
    if components is not None:
        return components
    cmap = _colormap(row, options)
    colors = scale_colors(cmap)
    # in maps over the input, other colours would change the input, too
    is_grey = cmap in colormap.GREYS and row.overlay is None
    over = []
    if row.overlay is not None:
        over.append(f"{percent(row.overlay)} over the input")
    if row.range is None:  # each map has its own scale
        scaling = ["scaled per map"] if len(row.drawn) > 1 else []
        return ColorKey("min", "max", ", ".join(scaling + over), colors, is_grey)
    low, high = _ends(row)
    # kernels of three inputs are drawn in red, green and blue, without a colour scale
    if row.layout == "rgb":
        return ColorKey(text=f"red, green and blue, each from {low} to {high}")
    return ColorKey(low, high, ", ".join(_scaling(row) + over), colors, is_grey)


def strip_key(row: Capture, options: Mapping[str, Any]) -> ColorKey:
    """The colour key of a strip of maps, without the numbers of its layer: strips of
    several layers share one key.

    Args:
        row: the capture of the layer.
        options: the options in run.json of the run that drew it.
    """
    key = color_key(row, options)
    if _component_key(row) is not None:
        return key
    if row.range is None:
        return key._replace(text="scaled per map")
    if _is_fixed(row):
        return key
    # the limits differ from layer to layer, but scales may all have zero in the middle
    bottom, top = row.range
    if bottom is not None and bottom == -(top or 0):
        return key._replace(low="−", high="+", text="0 in the middle, scaled per layer")
    return key._replace(low="min", high="max", text="scaled per layer")


def _component_key(row: Capture) -> ColorKey | None:
    """The colour key of a picture whose colours are components, such as those of a PCA;
    None for any other picture."""
    reduction = REDUCTIONS.get(row.reduce or "")
    if reduction is None or not reduction.colors:
        return None
    ends = span(*(row.range or (None, None)))
    return ColorKey(text=f"each component from {ends} {reduction.unit}")


def _mode(row: Capture) -> ScaleMode | None:
    """The scale mode of a picture; None for a mode that this version does not know."""
    return normalize.MODES.get(row.normalize)


def _is_fixed(row: Capture) -> bool:
    """Whether the scale has the same limits in all pictures."""
    mode = _mode(row)
    return mode is not None and mode.fixed


def _ends(row: Capture) -> tuple[str, str]:
    """The values of the darkest and the brightest colour as text, with `≤` or `≥` if there
    are values beyond them.

    Args:
        row: the capture of a picture with one scale for all its maps.
    """
    assert row.range is not None
    bottom, top = row.range
    mode = _mode(row)
    clips_low = False
    clips_high = False
    if mode is not None and mode.clips:
        if row.reduce is not None or row.layout == "mean":
            # The row has the extremes of the maps before they became one tile, which do
            # not help here. Only limits that the user set are taken to cut off values.
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
    """Colours of a colormap, `#rrggbb`; empty if the installed matplotlib does not have the
    colormap.

    Args:
        cmap: the name of the colormap.
        levels: the levels, 0..255, of the wanted colours.
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
    # saliency has no sign, so it gets the colormap of an output, not of a gradient
    kind = "output" if is_saliency(row) else row.kind
    cmap = str(options.get("cmap") or "grey")
    return colormap.decide_cmap(cmap, kind, row.overlay is not None, row.reduce)
