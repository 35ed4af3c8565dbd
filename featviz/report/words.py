"""Numbers, channels and settings in words, as the report shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from featviz.records import Floats
from featviz.rundir.read import DrawnGrid, ReadRun
from featviz.rundir.schema import Class, Manifest
from featviz.text import by, listed, ranges

Facts = list[tuple[str, str]]
"""Terms and what is to be said of them."""

_REDUCED = {
    "mean": "mean",
    "max": "maximum",
    "l2": "L2 norm",
    "pca": "principal components 1 to 3",
}
"""What one tile of all channels shows, by `reduce`."""
_LISTED = 24
"""Runs of channels that are written out; of more, how many there are is said."""


def number(value: float | None) -> str:
    """Four digits, with a true minus; a dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.4g}".replace("-", "−")


def percent(share: float) -> str:
    """A share 0..1 with one decimal; neither 0 nor 100 unless it is exact."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    return f"{100 * share:.1f} %"


def counted(count: int, noun: str) -> str:
    """`1 image`, `2 images`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def channel_list(channels: Sequence[int]) -> str:
    """`0–2, 5`, cut off where it would become long."""
    return ranges(channels, _LISTED, comma=", ", dash="–") or "none"


def all_zero(stats: Floats) -> list[int]:
    """Channels that hold nothing but zeros."""
    own: list[int] = np.flatnonzero((stats[:, 4] == 1) & (stats[:, 5] == 0)).tolist()
    return own


def tiles(grid: DrawnGrid) -> str:
    """`64 feature maps`; what all of them became where they share one tile."""
    own = grid.capture
    if own.reduce is not None:
        return f"{reduced(own.reduce)} of {counted(own.maps, 'feature map')}"
    return counted(len(grid.channels), "feature map")


def reduced(way: str) -> str:
    """What one tile of all channels shows."""
    return _REDUCED.get(way, way)


def grid_facts(grid: DrawnGrid, dark: Sequence[int], options: Mapping[str, Any]) -> Facts:
    """What is to be said of one picture, `dark` of whose channels are all zero.

    Args:
        options: of its run.
    """
    own = grid.capture
    facts = [("Shape", f"{by(own.shape)} ({own.layout})"), ("Maps", _maps(grid, options))]
    if own.collapsed:
        facts.append(("Share a tile", _shared(own.collapsed)))
    if grid.channels != sorted(grid.channels) and (order := options.get("order")):
        facts.append(("Order", f"by {setting(order)} (--order)"))
    if own.slices and own.slices[1] > 1:
        facts.append(("Side by side", "{} of {} for each channel".format(*own.slices)))
    facts.append(("Drawn", _drawn(grid)))
    whole = ", of all channels" if own.reduce is not None else ""
    if own.mean is not None:
        facts.append(("Range", f"{number(own.min)} to {number(own.max)}{whole}"))
        facts.append(("Mean", f"{number(own.mean)} ± {number(own.std)}{whole}"))
    facts.append(("Zeros", percent(own.zero_fraction) + whole))
    if own.nonfinite:
        facts.append(("NaN or infinite", counted(own.nonfinite, "value")))
    if dark:
        facts.append(("All zero", channel_list(dark)))
    return facts


def _maps(grid: DrawnGrid, options: Mapping[str, Any]) -> str:
    """How many maps there are, how many are drawn, and which options left the others out."""
    own = grid.capture
    if own.reduce is not None:
        return f"{own.maps}, as one tile: their {reduced(own.reduce)} (--reduce {own.reduce})"
    drawn = len(grid.channels)
    if drawn == own.maps:
        return f"{own.maps}"
    alike = sum(len(group) - 1 for group in (own.collapsed or {}).values())
    pick = options.get("pick")
    picked = f" --pick {setting(pick)}" if pick not in (None, "first") else ""
    reasons = [f"--max-maps{picked}"] if drawn + alike < own.maps else []
    reasons += ["--collapse"] if alike else []
    return f"{drawn} of {own.maps} ({', '.join(reasons)})"


def _shared(collapsed: Mapping[str, Sequence[int]]) -> str:
    """Which channels stand for which others."""
    groups = [f"{leader} for {channel_list(sorted(ids))}" for leader, ids in collapsed.items()]
    return listed(groups, _LISTED, "; ")


def _drawn(grid: DrawnGrid) -> str:
    own = grid.capture
    low, high = own.range or (None, None)
    if own.reduce == "pca":
        words = f"each component from {number(low)} to {number(high)} standard deviations"
    elif own.range is None:
        words = "each map by its own range"
    else:
        words = f"{number(low)} to {number(high)} ({own.normalize})"
    if own.overlay is not None:
        words += f", {percent(own.overlay)} over the input (--overlay)"
    return words


def model_name(run: ReadRun) -> str:
    """What the model is called."""
    model = run.record.get("model") or {}
    return str(model.get("name") or model.get("file") or model.get("class") or "model")


def run_facts(run: ReadRun) -> Facts:
    """What is to be said of a run."""
    record = run.record
    told = {k: v for k, v in (record.get("model") or {}).items() if v is not None}
    model = {k: v for k, v in told.items() if k not in ("kind", "name", "file")}
    versions = ("featviz", "torch", "torchvision")
    grids = sum(len(image.grids) for image in run.images.values())
    return [
        ("Model", ", ".join([model_name(run), *([settings(model)] if model else [])])),
        ("Images", _image_count(run)),
        ("Pictures", f"{grids:,}"),
        ("Input", str(record.get("preprocessing", ""))),
        ("Versions", ", ".join(f"{name} {record[name]}" for name in versions if name in record)),
        ("Device", str(record.get("device", ""))),
    ]


def _image_count(run: ReadRun) -> str:
    total = run.record["images"].get("total", len(run.images))
    rest = total - len(run.images) - len(run.failures) - len(run.left_out)
    parts = [f"{len(run.images):,} complete of {total:,}"]
    parts += [f"{len(run.failures):,} failed"] if run.failures else []
    parts += [f"{len(run.left_out):,} incomplete"] if run.left_out else []
    parts += [f"{rest:,} not reached"] if rest > 0 else []
    return ", ".join(parts)


def settings(values: Mapping[str, Any]) -> str:
    """`name resnet18, weights none`."""
    return ", ".join(f"{key} {setting(value)}" for key, value in values.items())


def setting(value: Any) -> str:
    """One option's value, as one would write it."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(setting, value)) or "none"
    if isinstance(value, Mapping):
        return settings(value) or "none"
    return str(value)


def image_facts(manifest: Manifest) -> Facts:
    """What is to be said of an image."""
    image = manifest.image
    facts = []
    if image.size:
        facts.append(("File", f"{by((image.size.width, image.size.height))} pixels"))
    if image.files:
        facts.append(("Files", ", ".join(image.files)))
    if manifest.input.shape:
        facts.append(("Input", ", ".join(map(by, manifest.input.shapes))))
    facts.append(("Prepared", manifest.input.preprocessing))
    if manifest.prediction:
        facts.append(("Prediction", ", ".join(map(_guess, manifest.prediction))))
    if target := manifest.target:
        facts.append(("Gradient", settings(vars(target))))
    if changes := manifest.interventions:
        facts.append(("Changed", ", ".join(f"{row.kind} {row.what}" for row in changes)))
    return facts


def _guess(row: Class) -> str:
    return f"{row.name or f'class {row.index}'} {percent(row.probability)}"
