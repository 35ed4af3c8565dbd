"""Numbers, channels and settings in words, as the report shows them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from featviz import text
from featviz.layout.layouts import LAYOUTS
from featviz.records import KINDS, REDUCTIONS, SALIENCY, Floats, is_gradient
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import CaptureRow, Manifest
from featviz.text import by, counted, listed, ranges

if TYPE_CHECKING:
    from featviz.report.views import ReportForm

Facts = list[tuple[str, str]]
"""Pairs of a term and its value, in the order in which they are shown."""

_LISTED = 24
"""Runs of channels that are written out; of the others only their number is shown."""


def number(value: float | None) -> str:
    """Four digits, with a true minus; a dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.4g}".replace("-", "−")


def span(low: float, high: float) -> str:
    """`−2.5 to 7.25`."""
    return f"{number(low)} to {number(high)}"


def percent(share: float) -> str:
    """`text.percent`, on one line."""
    return text.percent(share, "\u00a0")


def megabytes(size: int) -> str:
    """`25 MB`; below one, `0.4 MB`."""
    return f"{size / 1e6:.3g} MB"


def command(*parts: object) -> str:
    """A command line, quoted for a shell."""
    return text.printable(shlex.join(map(str, parts)))


def channel_list(channels: Sequence[int]) -> str:
    """`0–2, 5`, cut off where it would become long."""
    return ranges(channels, _LISTED, comma=", ", dash="–") or "none"


def all_zero(stats: Floats) -> list[int]:
    """Channels that hold nothing but zeros."""
    channels: list[int] = np.flatnonzero((stats[:, 4] == 1) & (stats[:, 5] == 0)).tolist()
    return channels


def tiles(row: CaptureRow) -> str:
    """`64 feature maps`; what all of them became where they share one tile."""
    if row.reduce is not None:
        return f"{reduced(row.reduce)} of {counted(row.maps, 'feature map')}"
    return counted(len(row.drawn), "feature map")


def is_saliency(row: CaptureRow) -> bool:
    """Whether a picture is that of all channels of the gradient of an image."""
    return row.key == SALIENCY and is_gradient(row.kind) and row.reduce is not None


def tensor(row: CaptureRow) -> str:
    """What a tensor is of its layer; empty for the output."""
    if row.kind not in KINDS or row.kind == "output":
        return ""
    place = f"the layer’s {KINDS[row.kind].of}"
    if not is_gradient(row.kind):
        return place
    what = "largest absolute value over the channels of " if is_saliency(row) else ""
    return f"{what}the gradient at {place}"


def reduced(way: str) -> str:
    """What one tile of all channels shows."""
    return REDUCTIONS[way].words if way in REDUCTIONS else way


def grid_facts(row: CaptureRow, dark: Sequence[int], options: Mapping[str, Any]) -> Facts:
    """Facts about one picture.

    Args:
        dark: its channels that are all zero.
        options: the options of its run.
    """
    facts = [("Shape", f"{by(row.shape)} ({row.layout})")]
    if row.layout in LAYOUTS:
        facts.append(("Layout", LAYOUTS[row.layout].words))
    facts.append(("Maps", _maps(row, options)))
    if row.collapsed:
        facts.append(("Share a tile", _shared(row.collapsed)))
    if row.drawn != sorted(row.drawn) and (order := options.get("order")):
        facts.append(("Order", f"by {setting(order)} (--order)"))
    if side := slices(row):
        facts.append(("Side by side", f"for each channel {side}"))
    if row.constant is not None:
        one = f"each map of {by(row.constant[1:])} holds one value; drawn as a strip of the values"
        facts.append(("Constant", one))
    facts.append(("Drawn", _drawn(row)))
    whole = ", of all channels" if row.reduce is not None else ""
    if row.mean is not None:
        facts.append(("Range", f"{number(row.min)} to {number(row.max)}{whole}"))
        facts.append(("Mean", f"{number(row.mean)} ± {number(row.std)}{whole}"))
    facts.append(("Zeros", percent(row.zero_fraction) + whole))
    if row.nonfinite:
        facts.append(("NaN or infinite", counted(row.nonfinite, "value")))
    if dark:
        facts.append(("All zero", channel_list(dark)))
    return facts


def _maps(row: CaptureRow, options: Mapping[str, Any]) -> str:
    """How many maps there are, how many are drawn, and which options left the others out."""
    if row.reduce is not None:
        return f"{row.maps}, as one tile: their {reduced(row.reduce)} (--reduce {row.reduce})"
    drawn = len(row.drawn)
    if drawn == row.maps:
        return f"{row.maps}"
    alike = sum(len(group) - 1 for group in (row.collapsed or {}).values())
    pick = options.get("pick")
    picked = f" --pick {setting(pick)}" if pick not in (None, "first") else ""
    cut = "--max-size" if options.get("max_size") else f"--max-maps{picked}"
    reasons = [cut] if drawn + alike < row.maps else []
    reasons += ["--collapse"] if alike else []
    return f"{drawn} of {row.maps} ({', '.join(reasons)})"


def slices(row: CaptureRow) -> str:
    """`5 of 24: 0, 6, 12, 17, 23`, the slices that stand side by side; empty where there is one."""
    if not row.slices or row.slices[1] < 2:
        return ""
    drawn, held = row.slices
    return f"{held}" if drawn == held else f"{drawn} of {held}: {channel_list(row.beside)}"


def _shared(collapsed: Mapping[str, Sequence[int]]) -> str:
    """Which channels stand for which others."""
    groups = [f"{leader} for {channel_list(sorted(ids))}" for leader, ids in collapsed.items()]
    return listed(groups, _LISTED, "; ")


def _drawn(row: CaptureRow) -> str:
    low, high = row.range or (None, None)
    unit = REDUCTIONS[row.reduce].unit if row.reduce in REDUCTIONS else ""
    if unit:
        words = f"each component from {number(low)} to {number(high)} {unit}"
    elif row.range is None:
        words = "each map by its own range"
    else:
        words = f"{number(low)} to {number(high)} ({row.normalize})"
        words += ", which leaves out the extremes" * row.normalize.endswith("percentile")
    if row.overlay is not None:
        words += f", {percent(row.overlay)} over the input (--overlay)"
    return words


def model_name(run: ReadRun) -> str:
    """What the model is called."""
    return name_of(run.record.get("model") or {})


def name_of(model: Mapping[str, Any]) -> str:
    """The same, of `model` in a record."""
    return str(model.get("name") or model.get("file") or model.get("class") or "model")


def run_facts(record: Mapping[str, Any]) -> Facts:
    """What ran, by run.json, for the foot of the page."""
    named = record.get("model") or {}
    model = {
        key: value
        for key, value in named.items()
        if value is not None and key not in ("kind", "name", "file")
    }
    versions = ("featviz", "torch", "torchvision")
    checksum, taken = model.pop("sha256", ""), model.pop("taken", "")
    return [
        ("Model", ", ".join([name_of(named), *([settings(model)] if model else [])])),
        ("Weights", setting(taken)),
        ("SHA-256", setting(checksum)),
        ("Versions", ", ".join(f"{name} {record[name]}" for name in versions if name in record)),
        ("Device", str(record.get("device", ""))),
    ]


def run_lead(run: ReadRun) -> str:
    """`Images: 20 complete of 20 · 180 pictures · input: RGB, as it is`."""
    grids = sum(len(image.captures) for image in run.images.values())
    parts = [f"Images: {_image_count(run)}", counted(grids, "picture")]
    prepared = str(run.record.get("preprocessing", ""))
    return " · ".join(parts + ([f"input: {prepared}"] if prepared else []))


def _image_count(run: ReadRun) -> str:
    total = run.record["images"].get("total", len(run.images))
    parts = [f"{len(run.images):,} complete of {total:,}"]
    parts += [f"{len(run.failures):,} failed"] if run.failures else []
    parts += [f"{len(run.left_out):,} incomplete"] if run.left_out else []
    parts += [f"{run.missing:,} not reached"] if run.missing else []
    return ", ".join(parts)


def form_lines(form: ReportForm, most: int) -> Iterator[str]:
    """What one file leaves out to stay small, in sentences.

    Args:
        most: bytes that it may have.
    """
    below = f"So that this file stays below {megabytes(most)}, "
    if form.tiles is not None:
        yield (
            f"{below}each layer shows at most {form.tiles} of its maps, the most telling ones. The "
            "numbers are those of all."
        )
    if form.smaller:
        yield f"{below}large maps have fewer pixels than in the run’s own pictures."
    if not form.figures:
        yield f"{below}it leaves out the run’s figures (--figure)."


def dotted(name: str) -> Markup:
    """A name that may be broken behind its dots, and nowhere else while there is room."""
    return Markup(".<wbr>").join(name.split("."))


def settings(values: Mapping[str, Any]) -> str:
    """`name resnet18, weights none`."""
    return ", ".join(f"{key} {setting(value)}" for key, value in values.items())


def setting(value: Any) -> str:
    """One option's value, as one would write it."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(setting, value)) or "none"
    if isinstance(value, Mapping):
        return settings(value) or "none"
    return str(value)


def image_facts(manifest: Manifest) -> Facts:
    """Facts about an image."""
    image = manifest.image
    facts = []
    if image.size:
        facts.append(("File", f"{by((image.size.width, image.size.height))} pixels"))
    if image.files:
        facts.append(("Files", ", ".join(image.files)))
    if manifest.input.shape:
        facts.append(("Input", ", ".join(map(by, manifest.input.shapes))))
    facts.append(("Prepared", manifest.input.preprocessing))
    if target := manifest.target:
        of = {"of": target.of, "value": target.value, "rule": target.grad_rule}
        facts.append(("Gradient", settings(of)))
    if changes := manifest.interventions:
        facts.append(("Changed", ", ".join(f"{row.kind} {row.what}" for row in changes)))
    return facts
