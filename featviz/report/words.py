"""Numbers, channels and settings in words, as the report shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from featviz.records import Floats
from featviz.report.reading import Grid, Run

Facts = list[tuple[str, str]]
"""Terms and what is to be said of them."""

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
    if not channels:
        return "none"
    array = np.asarray(channels)
    runs = np.split(array, np.flatnonzero(np.diff(array) != 1) + 1)
    words = [f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    more = f" and {sum(map(len, runs[_LISTED:]))} more" if len(runs) > _LISTED else ""
    return ", ".join(words[:_LISTED]) + more


def all_zero(stats: Floats) -> list[int]:
    """Channels that hold nothing but zeros."""
    own: list[int] = np.flatnonzero((stats[:, 4] == 1) & (stats[:, 5] == 0)).tolist()
    return own


def shape(sizes: Iterable[int]) -> str:
    """`1×64×56×56`."""
    return "×".join(map(str, sizes))


def grid_facts(grid: Grid, dark: Sequence[int]) -> Facts:
    """What is to be said of one picture, `dark` of whose channels are all zero."""
    own = grid.capture
    drawn = len(grid.channels)
    facts = [
        ("Shape", f"{shape(own.shape)} ({own.layout})"),
        ("Maps", f"{own.maps}" if drawn == own.maps else f"{drawn} of {own.maps} (--max-maps)"),
    ]
    if own.slices and own.slices[1] > 1:
        facts.append(("Side by side", "{} of {} for each channel".format(*own.slices)))
    facts.append(("Drawn", "each map by its own range" if own.range is None else _drawn(grid)))
    if own.mean is not None:
        facts.append(("Range", f"{number(own.min)} to {number(own.max)}"))
        facts.append(("Mean", f"{number(own.mean)} ± {number(own.std)}"))
    facts.append(("Zeros", percent(own.zero_fraction)))
    if own.nonfinite:
        facts.append(("NaN or infinite", counted(own.nonfinite, "value")))
    if dark:
        facts.append(("All zero", channel_list(dark)))
    return facts


def _drawn(grid: Grid) -> str:
    low, high = grid.capture.range or (None, None)
    return f"{number(low)} to {number(high)} ({grid.capture.normalize})"


def model_name(run: Run) -> str:
    """What the model is called."""
    model = run.record.get("model") or {}
    return str(model.get("name") or model.get("file") or model.get("class") or "model")


def run_facts(run: Run) -> Facts:
    """What is to be said of a run."""
    record = run.record
    told = {k: v for k, v in (record.get("model") or {}).items() if v is not None}
    model = {k: v for k, v in told.items() if k not in ("kind", "name", "file")}
    versions = ("featviz", "torch", "torchvision")
    grids = sum(len(image.grids) for image in run.images)
    return [
        ("Model", ", ".join([model_name(run), *([settings(model)] if model else [])])),
        ("Images", _image_count(run)),
        ("Pictures", f"{grids:,}"),
        ("Input", str(record.get("preprocessing", ""))),
        ("Versions", ", ".join(f"{name} {record[name]}" for name in versions if name in record)),
        ("Device", str(record.get("device", ""))),
    ]


def _image_count(run: Run) -> str:
    total = run.record["images"].get("total", len(run.images))
    rest = total - len(run.images) - len(run.failures) - len(run.incomplete)
    parts = [f"{len(run.images):,} complete of {total:,}"]
    parts += [f"{len(run.failures):,} failed"] if run.failures else []
    parts += [f"{len(run.incomplete):,} incomplete"] if run.incomplete else []
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


def image_facts(manifest: Mapping[str, Any]) -> Facts:
    """What is to be said of an image."""
    image, seen = manifest["image"], manifest.get("input", {})
    facts = []
    if size := image.get("size"):
        facts.append(("File", f"{size['width']}×{size['height']} pixels"))
    if files := image.get("files"):
        facts.append(("Files", ", ".join(files)))
    if sizes := seen.get("shape"):
        several = isinstance(sizes[0], list)
        facts.append(("Input", ", ".join(map(shape, sizes)) if several else shape(sizes)))
    facts.append(("Prepared", seen.get("preprocessing", "")))
    if guesses := manifest.get("prediction"):
        facts.append(("Prediction", ", ".join(map(_guess, guesses))))
    if target := manifest.get("target"):
        facts.append(("Gradient", settings(target)))
    if changes := manifest.get("interventions"):
        facts.append(("Changed", ", ".join(f"{row['kind']} {row['what']}" for row in changes)))
    return facts


def _guess(row: Mapping[str, Any]) -> str:
    return f"{row.get('name') or 'class {}'.format(row['index'])} {percent(row['probability'])}"
