"""Numbers, channels, settings and colours in words, as the report shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from markupsafe import Markup

from featviz import text
from featviz.drawing import colormap, normalize
from featviz.records import BACKWARD, KINDS, REDUCTIONS, SALIENCY
from featviz.rundir.image import ReadImage
from featviz.rundir.schema import Capture
from featviz.text import counted, listed, ranges

_LISTED = 24  # runs of channels that are written out; of the others only their number is shown
_STOPS = (0, 51, 102, 153, 204, 255)


def number(value: float | None) -> str:
    """Four digits, with a true minus; a dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.4g}".replace("-", "−")


def span(low: float | None, high: float | None) -> str:
    """`−2.5 to 7.25`."""
    return f"{number(low)} to {number(high)}"


def percent(share: float) -> str:
    """`text.percent`, on one line."""
    return text.percent(share, "\u00a0")


def channel_list(channels: Sequence[int]) -> str:
    """`0–2, 5`, cut off where it would become long."""
    return ranges(channels, _LISTED, comma=", ", dash="–") or "none"


# What a picture shows


def tiles(row: Capture) -> str:
    """`64 feature maps`; what all of them became where they share one tile."""
    if row.reduce is not None:
        return f"{_reduced(row)} of {counted(row.maps, 'feature map')}"
    return counted(len(row.drawn), "feature map")


def _reduced(row: Capture) -> str:
    return REDUCTIONS[row.reduce].title if row.reduce in REDUCTIONS else str(row.reduce)


def _is_saliency(row: Capture) -> bool:
    """Whether a picture is that of all channels of the gradient of an image."""
    return row.key == SALIENCY and row.kind in BACKWARD and row.reduce is not None


def tensor(row: Capture) -> str:
    """What a tensor is of its layer; empty for the output."""
    if row.kind not in KINDS or row.kind == "output":
        return ""
    what = "largest absolute value over the channels of " if _is_saliency(row) else ""
    what += "the gradient at " * (row.kind in BACKWARD)
    return f"{what}the layer’s {KINDS[row.kind].of}"


def maps(row: Capture) -> str:
    """How many maps there are, and how many of them are drawn."""
    if row.reduce is not None:
        return f"{row.maps}, as one tile: their {_reduced(row)} (--reduce {row.reduce})"
    drawn, alike = len(row.drawn), sum(len(ids) - 1 for ids in (row.collapsed or {}).values())
    return (
        f"{row.maps}"
        if drawn == row.maps
        else f"{drawn} of {row.maps}" + " (--collapse)" * bool(alike)
    )


def sharing(row: Capture) -> str:
    """Which maps share a tile; empty where each has its own."""
    groups = (row.collapsed or {}).items()
    shared = [f"{one} for {channel_list(sorted(ids))}" for one, ids in groups]
    return listed(shared, _LISTED, "; ")


def slices(row: Capture) -> str:
    """`5 of 24: 0, 6, 12, 17, 23`, the slices that stand side by side; empty where there is one."""
    if not row.slices or row.slices[1] < 2:
        return ""
    drawn, held = row.slices
    return f"{held}" if drawn == held else f"{drawn} of {held}: {channel_list(row.beside)}"


# What ran


def changes(images: Iterable[ReadImage]) -> str:
    """What interventions changed while these images ran; empty for nothing."""
    rows = (row for image in images for row in image.manifest.interventions or ())
    return ", ".join(dict.fromkeys(" ".join(row.values()) for row in rows))


def name_of(model: Mapping[str, Any]) -> str:
    """What a model is called, by `model` in a record."""
    return str(model.get("name") or model.get("file") or model.get("class") or "model")


def run_facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What ran, by run.json, as terms and values for the foot of the page."""
    model = record.get("model") or {}
    apart = ("kind", "name", "file", "sha256", "taken")
    more = {key: own for key, own in model.items() if own is not None and key not in apart}
    versions = ("featviz", "torch", "torchvision")
    taken, checksum = (model.get(key) for key in ("taken", "sha256"))
    return [
        ("Model", ", ".join([name_of(model), *([setting(more)] if more else [])])),
        ("Weights", "" if taken is None else setting(taken)),
        ("SHA-256", "" if checksum is None else setting(checksum)),
        ("Versions", ", ".join(f"{name} {record[name]}" for name in versions if name in record)),
        ("Device", str(record.get("device", ""))),
    ]


def dotted(name: str) -> Markup:
    """A name that may be broken behind its dots, and nowhere else while there is room."""
    return Markup(".<wbr>").join(name.split("."))


def setting(value: Any) -> str:
    """One option's value, as one would write it; `name resnet18, weights none` of several."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(setting, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {setting(own)}" for key, own in value.items()) or "none"
    return str(value)


# What colours mean


Key = tuple[str, str, str, tuple[str, ...], bool]
"""What dark, bright and the scale of a picture are, in words; its colours, darkest first, none
where they are no levels; and whether it is grey, and may be shown in others."""


def legend(options: Mapping[str, Any], captures: Iterable[Capture]) -> list[tuple[str, str]]:
    """What the colours of these pictures of a run mean: `#rrggbb`, and words. Only maps by
    themselves are marked: no overlay, no tile of all channels, and nothing under `--no-marks`."""
    entries: dict[tuple[str, str], None] = {}
    for row in captures:
        cmap, mode = _colormap(row, options), normalize.MODES.get(row.normalize)
        if row.reduce in REDUCTIONS and REDUCTIONS[row.reduce].colors:
            entries |= dict.fromkeys(REDUCTIONS[row.reduce].colors)
        elif mode and (mode.shared or row.overlay is not None or options.get("marks") is not False):
            levels = mode.over if mode.over and row.overlay is not None else mode.legend
            colors = scale(cmap, tuple(level for level, _ in levels))
            words = (meaning for _, meaning in levels)
            entries |= dict.fromkeys(zip(colors, words, strict=False))
    return [*entries, ("#{:02x}{:02x}{:02x}".format(*colormap.MAGENTA), "NaN or infinite")]


def key(row: Capture, options: Mapping[str, Any], strip: bool = False) -> Key:
    """The colours of a picture; of a `strip` in words that suit other layers, too."""
    reduction, mode = REDUCTIONS.get(row.reduce or ""), normalize.MODES.get(row.normalize)
    if reduction and reduction.colors:
        ends = span(*(row.range or (None, None)))
        return "", "", f"each component from {ends} {reduction.unit}", (), False
    cmap, fixed = _colormap(row, options), bool(mode and mode.fixed)
    colors, grey = scale(cmap), cmap in colormap.GREYS and row.overlay is None
    over = [] if row.overlay is None else [f"{percent(row.overlay)} over the input"]
    if row.range is None:
        words = ["scaled per map"] if strip or len(row.drawn) > 1 else []
        return "min", "max", ", ".join(words if strip else words + over), colors, grey
    (bottom, top), below, above = row.range, False, False
    if strip and not fixed:
        if bottom is not None and bottom == -(top or 0):
            return "−", "+", "0 in the middle, scaled per layer", colors, grey
        return "min", "max", "scaled per layer", colors, grey
    if mode and mode.clips and (row.reduce is not None or row.layout == "mean"):
        below = above = ":" in mode.spelling  # the row's extremes are not the tiles' own
    elif mode and mode.clips:
        below = None in (row.min, bottom) or row.min < bottom  # type: ignore[operator]
        above = None in (row.max, top) or row.max > top  # type: ignore[operator]
    low, high = "≤ " * below + number(bottom), "≥ " * above + number(top)
    if row.layout == "rgb":  # kernels of three inputs
        return "", "", f"red, green and blue, each from {low} to {high}", (), False
    what = "values" if row.layout == "vector" else "maps"
    words = [f"one scale for all {what}{'' if fixed else ' of this image'}"]
    if row.maps == 1 or row.reduce is not None:
        words = []
    elif row.constant is not None:
        words = ["one stripe per channel, each map constant; one scale for all"]
    elif row.kind == "kernel":
        words = ["one scale for all kernels"]
    return low, high, ", ".join(words + over), colors, grey


@lru_cache
def scale(cmap: str, levels: tuple[int, ...] = _STOPS) -> tuple[str, ...]:
    """Colours of levels 0..255 of a colormap; none where matplotlib here does not have it."""
    try:
        ramp = colormap.ramp(cmap).tolist()
    except KeyError:
        return ()
    return tuple("#{:02x}{:02x}{:02x}".format(*ramp[level]) for level in levels)


def _colormap(row: Capture, options: Mapping[str, Any]) -> str:
    """The colormap of a picture; the saliency of an image has no sign, and is no gradient there."""
    if row.cmap is not None:
        return row.cmap
    kind = "output" if _is_saliency(row) else row.kind
    named = str(options.get("cmap") or "grey")
    return colormap.resolved(named, kind, row.overlay is not None, row.reduce)
