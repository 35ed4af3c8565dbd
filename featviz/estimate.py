"""`run --dry-run`: what would be written, from one forward pass on zeros."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from featviz import drawing, images, passes, pipeline, plans
from featviz.borrowed import borrowed
from featviz.hints import HintBook
from featviz.layout import Maps, to_maps
from featviz.models.load import ModelOptions, load_model
from featviz.probe import choose_layers
from featviz.records import DrawOptions, GridPlan, Site

BYTES_PER_VALUE = 0.8
"""PNG bytes for each value of a map at scale 1, on the safe side: over the sample scenes, with
random weights, resnet18 took 0.72 and vgg16 0.57."""
ENLARGED = 1.5
"""Enlarged maps take somewhat more, though not as much as their pixels suggest: with this factor
the estimate for the default scale was 8 % (resnet18) and 40 % (vgg16) above what was written."""
TENSOR_BYTES = 4


@dataclass(frozen=True)
class PlannedFile:
    """A picture that would be written for each image."""

    layer: str
    type: str
    file: str
    maps: int
    width: int
    height: int
    bytes: int
    """An estimate."""


@dataclass(frozen=True)
class DryRun:
    """What a run would write; numbers are for all images together."""

    images: int
    files: tuple[PlannedFile, ...]
    skipped: tuple[tuple[str, str], ...]
    """(layer, reason)."""

    @property
    def totals(self) -> dict[str, Any]:
        """Layers, files, maps, megapixels and estimated bytes, over all images."""
        pixels = sum(file.width * file.height for file in self.files)
        return {
            "images": self.images,
            "layers": len({file.layer for file in self.files}),
            "files": len(self.files) * self.images,
            "maps": sum(file.maps for file in self.files) * self.images,
            "megapixels": round(pixels * self.images / 1e6, 3),
            "estimated_bytes": sum(file.bytes for file in self.files) * self.images,
        }

    def render(self, as_json: bool) -> str:
        """One JSON document, or a table for people."""
        if as_json:
            files = [asdict(file) for file in self.files]
            skipped = [{"layer": layer, "reason": reason} for layer, reason in self.skipped]
            return json.dumps({**self.totals, "per_image": files, "skipped": skipped}, indent=1)
        rows = [
            f"{f.layer}  {f.file}  {f.maps} maps  {f.width}×{f.height}  ~{f.bytes / 1e3:.0f} kB"
            for f in self.files
        ]
        rows += [f"{layer}  skipped: {reason}" for layer, reason in self.skipped]
        total = self.totals
        rows.append(
            f"{total['images']} images: {total['files']} files of {total['layers']} layers, "
            f"{total['maps']} maps, {total['megapixels']:.1f} megapixels, "
            f"about {total['estimated_bytes'] / 1e6:.1f} MB"
        )
        return "\n".join(rows)


def dry_run(model: ModelOptions, arguments: Sequence[str], options: pipeline.RunOptions) -> DryRun:
    """Plan a run without writing anything.

    Raises:
        FeatvizError: what `run` would raise before it begins.
    """
    pipeline.check_options(options)
    found = images.find_samples(arguments, None, options.nul_separated)
    loaded = load_model(model, options.inputs)
    samples = pipeline.grouped(found, loaded.preprocess)
    blank = pipeline.blank_input(loaded, samples, options.inputs)
    layers = choose_layers(loaded, options.layers, blank, options.draw.tensor_layout)
    book = HintBook(loaded.module, blank[0].shape, options.draw.tensor_layout)
    files: list[PlannedFile] = []

    def sink(site: Site, tensor: Tensor) -> None:
        for key, maps in to_maps(tensor, book.of(site.layer)).items():
            files.append(_planned(site.inside(key), maps, options.draw))

    plan = plans.plan(loaded, options.passes)
    with borrowed(loaded.module, options.passes.gradients):
        _, recorder = passes.run(loaded, plan, blank, book, layers, sink)
    skipped = [(skip.layer, skip.reason) for skip in recorder.skipped]
    skipped += [(layer.name, "did not run") for layer in recorder.never_ran]
    return DryRun(len(samples), tuple(files), tuple(skipped))


def _planned(site: Site, maps: Maps, draw: DrawOptions) -> PlannedFile:
    channels, slices, *size = maps.data.shape
    count = min(channels, draw.max_maps or channels)
    shape = (count, min(slices, draw.max_slices), *size)
    plan = drawing.plan_for(shape, maps.strip, draw)
    return PlannedFile(
        layer=site.layer.name,
        type=site.layer.type,
        file=f"{site.stem}.{draw.format}",
        maps=plan.maps,
        width=plan.width,
        height=plan.height,
        bytes=_bytes(plan, draw, maps.data.numel()),
    )


def _bytes(plan: GridPlan, draw: DrawOptions, values: int) -> int:
    drawn = plan.maps * plan.map_size[0] * plan.map_size[1]
    picture = drawn * BYTES_PER_VALUE * (ENLARGED if plan.scale > (1, 1) else 1)
    return int(picture) + (values * TENSOR_BYTES if draw.tensors else 0)
