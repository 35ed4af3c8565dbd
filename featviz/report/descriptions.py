"""Numbers, captures, settings and runs in words, for people who read a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from featviz import text
from featviz.records import BACKWARD, KINDS, REDUCTIONS, SALIENCY
from featviz.rundir.image import ReadImage
from featviz.rundir.schema import Capture
from featviz.text import counted, listed, ranges

_MAX_RANGES = 24
"""How many ranges of channels are written out. Of further channels only the number is
shown."""


def number(value: float | None) -> str:
    """A number with four digits and a true minus; a dash for None and NaN."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.4g}".replace("-", "−")


def span(low: float | None, high: float | None) -> str:
    """A range of values: `−2.5 to 7.25`; a dash stands for None and NaN."""
    return f"{number(low)} to {number(high)}"


def percent(share: float) -> str:
    """A share 0..1 in percent, as `text.percent` writes it, with a no-break space."""
    return text.percent(share, "\u00a0")


def channel_list(channels: Sequence[int]) -> str:
    """A list of channels, in ranges: `0–2, 5`; `none` for an empty list. A long list is cut
    off.

    Args:
        channels: the channels, in rising order.
    """
    return ranges(channels, _MAX_RANGES, comma=", ", dash="–") or "none"


def dotted(name: str) -> Markup:
    """A name with possible line breaks behind its dots."""
    return Markup(".<wbr>").join(name.split("."))


# What a picture shows


def tile_count(row: Capture) -> str:
    """What a picture shows: `64 feature maps`; for a single tile of all channels, the
    reduction and the number of maps: `maximum of 64 feature maps`."""
    if row.reduce is not None:
        return f"{reduction(row)} of {counted(row.maps, 'feature map')}"
    return counted(len(row.drawn), "feature map")


def reduction(row: Capture) -> str:
    """The reduction of a picture in words. The row must have a `reduce`."""
    return REDUCTIONS[row.reduce].title if row.reduce in REDUCTIONS else str(row.reduce)


def is_saliency(row: Capture) -> bool:
    """Whether a picture shows saliency: one tile of all channels of the gradient at the
    image."""
    return row.key == SALIENCY and row.kind in BACKWARD and row.reduce is not None


def tensor_role(row: Capture) -> str:
    """The tensor of the layer that a picture shows: `the gradient at the layer’s input`.
    Empty for the output, and for kinds that are not in KINDS, such as kernels."""
    if row.kind not in KINDS or row.kind == "output":
        return ""
    role = f"the layer’s {KINDS[row.kind].of}"
    if row.kind in BACKWARD:
        role = f"the gradient at {role}"
    if is_saliency(row):
        role = f"largest absolute value over the channels of {role}"
    return role


def map_count(row: Capture) -> str:
    """How many maps a tensor has, and how many of them are drawn: `16 of 64`."""
    if row.reduce is not None:
        return (
            f"{row.maps}, as one tile: their {reduction(row)} (--reduce {row.reduce})"
        )
    drawn = len(row.drawn)
    if drawn == row.maps:
        return str(row.maps)
    # Both --collapse and --channels leave out maps. The text names --collapse, since its
    # maps are nearly equal to a drawn one.
    hidden = sum(len(channels) - 1 for channels in (row.collapsed or {}).values())
    return f"{drawn} of {row.maps}" + (" (--collapse)" if hidden else "")


def shared_tiles(row: Capture) -> str:
    """The maps that share a tile: `3 for 3, 7–9`; empty if each map has its own tile."""
    groups = []
    for leader, channels in (row.collapsed or {}).items():
        groups.append(f"{leader} for {channel_list(sorted(channels))}")
    return listed(groups, _MAX_RANGES, "; ")


def slice_list(row: Capture) -> str:
    """The drawn slices: `5 of 24: 0, 6, 12, 17, 23`, or `24` if all are drawn; empty if the
    tensor has only one slice."""
    if not row.slices or row.slices[1] < 2:
        return ""
    drawn, total = row.slices
    if drawn == total:
        return str(total)
    return f"{drawn} of {total}: {channel_list(row.drawn_slices)}"


# What ran


def interventions(images: Iterable[ReadImage]) -> str:
    """The interventions in the passes of some images, separated by commas; empty for
    none."""
    changes: dict[str, None] = {}
    for image in images:
        for row in image.manifest.interventions:
            changes[f"{row.kind} {row.what}"] = None
    return ", ".join(changes)


def model_name(model: Mapping[str, Any]) -> str:
    """The name of a model: its name in a library, else its file, else the class of its
    module, else `model`.

    Args:
        model: the entry `model` of a record.
    """
    return str(model.get("name") or model.get("file") or model.get("type") or "model")


def model_title(model: Mapping[str, Any]) -> str:
    """The name of a model, with the file of its weights: `broken.pth (shapes.py:ShapeNet)`.
    The file comes first, since many files may have weights for the same code.

    Args:
        model: the entry `model` of a record.
    """
    name = model_name(model)
    file = model.get("file")
    if file and name != file:
        return f"{file} ({name})"
    return name


def run_facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts for the foot of a page: pairs of a term and a value. The value is empty if the
    record does not have it.

    Args:
        record: the content of run.json, or of another record with such entries.
    """
    model = record.get("model") or {}
    shown_apart = ("kind", "name", "arch", "type", "file", "sha256", "taken")
    details = {}
    for key, value in model.items():
        if value is not None and key not in shown_apart:
            details[key] = value
    title = model_title(model)
    if details:
        title += f", {setting(details)}"
    versions = []
    for name in ("featviz", "torch", "torchvision"):
        # a record may lack any of them
        if name in record:
            versions.append(f"{name} {record[name]}")
    return [
        ("Model", title),
        ("Weights", setting(model.get("taken") or "")),
        ("SHA-256", setting(model.get("sha256") or "")),
        ("Versions", ", ".join(versions)),
        ("Device", str(record.get("device", ""))),
    ]


def setting(value: Any) -> str:
    """A value of a record in words: `auto` for None, `name resnet18, weights none` for an
    object, `none` for an empty list or object.

    Args:
        value: a value of any JSON type.
    """
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(setting, value)) or "none"
    if isinstance(value, Mapping):
        return (
            ", ".join(f"{key} {setting(inner)}" for key, inner in value.items())
            or "none"
        )
    return str(value)
