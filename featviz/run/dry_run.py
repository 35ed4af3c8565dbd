"""`run --dry-run`: what would be written, from one forward pass on zeros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs
from torch import Tensor

from featviz.drawing import grid
from featviz.drawing.drawer import check_places, is_saliency, magnitude_and_phase
from featviz.layout import Maps, to_maps
from featviz.layout.layouts import LAYOUTS
from featviz.options import DrawOptions, ModelOptions, RunOptions
from featviz.records import SALIENCY, STAT_COLUMNS, CaptureSite, Hints, Shard
from featviz.run.prepare import find_images, prepare
from featviz.text import by, counted, printable

# PNG bytes, on the safe side of what was measured over the sample scenes with random weights
BYTES_PER_VALUE = 0.8  # of a map at scale 1; resnet18 took 0.72 and vgg16 0.57
ENLARGED = 1.5  # times as much for enlarged maps, however large
BLENDED = 0.6  # times as much for each byte of maps over the input
FIGURE = 0.5  # for each pixel of a figure
OWN_FILES = 3  # of an image beside its pictures: input.png, stats.npz and manifest.json
ROW_BYTES = 1000  # for each picture in manifest.json and stats.npz, without numbers of channels


def render(plan: Mapping[str, Any]) -> str:
    """What `dry_run` found, as a table for people."""
    rows = [
        f"{f['layer']}  {f['file']}  {f['maps']} maps  {by((f['width'], f['height']))}"
        f"  ~{f['bytes'] / 1e3:.0f} kB"
        for f in plan["per_image"]
    ]
    rows += [f"{row['layer']}  skipped: {row['reason']}" for row in plan["skipped"]]
    images, pictures, layers = (counted(plan[f"{one}s"], one) for one in ("image", "file", "layer"))
    rows.append(
        f"{images}: {pictures} of {layers}, {plan['maps']} maps, "
        f"{plan['megapixels']:.1f} megapixels, about {plan['estimated_bytes'] / 1e6:.1f} MB "
        f"in {plan['all_files']} files in all"
    )
    return "\n".join(map(printable, rows))


def dry_run(model: ModelOptions, arguments: Sequence[str], options: RunOptions) -> dict[str, Any]:
    """Plan a run without writing anything: the files of each image, and totals of all. Where a
    model takes images in their own size, the first one stands for all."""
    prepared = prepare(model, find_images(arguments, options), options)
    images = len((options.shard or Shard()).of(prepared.samples))
    blank, draw, shown = prepared.blank, prepared.options.draw, prepared.shown
    hints, inputs = prepared.hints(blank), [arg.shape for arg in blank]
    files: list[dict[str, Any]] = []
    beside, size = OWN_FILES, int(blank[0].numel() * BYTES_PER_VALUE)

    def sink(
        site: CaptureSite,
        tensor: Tensor,
        gradient: Tensor | None = None,
        about: Hints | None = None,
    ) -> None:
        nonlocal beside, size
        about = about or hints.of_tensor(site, tensor)
        if tensor.is_complex() and gradient is None:
            for part in magnitude_and_phase(site, tensor, about, draw):
                sink(*part[:2], None, part[2])
            return
        parts = to_maps(tensor, about)
        if gradient is not None:
            check_places(parts[""])
            parts = {"": parts[""]}
        if draw.tensors:
            beside += 1
            size += tensor.numel() * 4
        alone = structs.replace(draw, overlay=None) if about.phase else draw
        for key, maps in parts.items():
            files.extend(_planned(site.inside(key), maps, alone, shown))
            if not key and is_saliency(site, tensor.shape, inputs, draw):
                one = structs.replace(draw, reduce="max-abs")
                files.extend(_planned(site.inside(SALIENCY), maps, one, shown))
            size += ROW_BYTES + 4 * len(STAT_COLUMNS) * maps.data.shape[0]

    with prepared.watched() as show:
        _, recorder = show(blank, hints, sink)
    skipped = [(skip.layer, skip.reason) for skip in recorder.skipped]
    skipped += [(layer.name, "did not run") for layer in recorder.never_ran]
    pixels = sum(file["width"] * file["height"] for file in files)
    return {
        "images": images,
        "layers": len({file["layer"] for file in files}),
        "files": len(files) * images,
        "maps": sum(file["maps"] for file in files) * images,
        "megapixels": round(pixels * images / 1e6, 3),
        "all_files": (len(files) + beside) * images,
        "estimated_bytes": (sum(file["bytes"] for file in files) + size) * images,
        "per_image": files,
        "skipped": [{"layer": layer, "reason": reason} for layer, reason in skipped],
    }


def _planned(
    site: CaptureSite, maps: Maps, draw: DrawOptions, shown: Sequence[int]
) -> list[dict[str, Any]]:
    """The picture of some maps, and its figure; near-equal maps are not known yet, and counted."""
    channels, slices, *size = maps.data.shape
    kind = LAYOUTS[maps.layout]
    reduced = draw.reduce is not None and not kind.strip
    count = 1 if reduced else min(channels, draw.max_maps or channels)
    laid_over = draw.overlay is not None and kind.aligned
    shape = (count, min(slices, draw.max_slices), *(shown if laid_over else size))
    plan = grid.plan(shape, draw, strip=kind.strip, alone=reduced)
    share = 3 * BLENDED if laid_over else 3 if reduced and draw.reduce == "pca" else 1
    share *= BYTES_PER_VALUE * (ENLARGED if plan.scale > (1, 1) else 1)
    bytes = int(plan.maps * plan.map_size[0] * plan.map_size[1] * share)
    files = [(f"{site.stem}.{draw.format}", plan.maps, plan.width, plan.height, bytes)]
    if draw.figure:
        from featviz.drawing import page

        panels = 1 if kind.strip else min(page.FIRST, count)
        height, width = page.figure_size(panels)[:2]
        pixels = int(width * height * FIGURE)
        files.append((f"{site.stem}.figure.png", panels, width, height, pixels))
    names = ("file", "maps", "width", "height", "bytes")
    of = {"layer": site.layer.name, "type": site.layer.type}
    return [of | dict(zip(names, row, strict=True)) for row in files]
