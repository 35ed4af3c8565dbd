"""`run --dry-run`: what would be written, from one forward pass on zeros."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from featviz.drawing import figure, grid
from featviz.drawing.drawer import is_saliency
from featviz.gradients import forward_backward
from featviz.hooks.eval_mode import in_eval_mode
from featviz.layout import Maps, to_maps
from featviz.layout.layouts import LAYOUTS
from featviz.models.load import ModelOptions
from featviz.pipeline.limits import check_plan
from featviz.pipeline.options import RunOptions
from featviz.pipeline.prepare import Prepared, find_images, prepare
from featviz.records import (
    SALIENCY,
    STAT_COLUMNS,
    DrawOptions,
    GridPlan,
    Limits,
    Shard,
    Site,
    Written,
)
from featviz.text import by, counted, printable

BYTES_PER_VALUE = 0.8
"""PNG bytes for each value of a map at scale 1, on the safe side: over the sample scenes, with
random weights, resnet18 took 0.72 and vgg16 0.57."""
ENLARGED = 1.5
"""Enlarged maps take somewhat more, though not as much as their pixels suggest: with this factor
the estimate for the default scale was 8 % (resnet18) and 40 % (vgg16) above what was written."""
BLENDED = 0.6
"""Maps laid over the input, for each byte of their RGB, as a share of BYTES_PER_VALUE: resnet18's
over the sample scenes took 0.42 bytes, or 0.53 of it."""
FIGURE = 0.5
"""PNG bytes for each pixel of a figure: 0.31 with 16 maps, 0.47 with 4, over the sample scenes."""
TENSOR_BYTES = 4
OWN_FILES = 3
"""Files of an image beside its pictures: input.png, stats.npz and manifest.json."""
ROW_BYTES = 1000
"""Bytes for each picture in manifest.json and stats.npz, without the numbers of its channels."""
CHANNEL_BYTES = 4 * len(STAT_COLUMNS)


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
    beside: Written
    """Other files of each image: input.png, stats.npz, manifest.json, and raw tensors."""

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
            "all_files": self.written.files,
            "estimated_bytes": self.written.bytes,
        }

    @property
    def written(self) -> Written:
        """Everything that would be in the folders of the images."""
        files = len(self.files) + self.beside.files
        size = sum(file.bytes for file in self.files) + self.beside.bytes
        return Written(files * self.images, size * self.images)

    def render(self, as_json: bool) -> str:
        """One JSON document, or a table for people."""
        if as_json:
            files = [asdict(file) for file in self.files]
            skipped = [{"layer": layer, "reason": reason} for layer, reason in self.skipped]
            return json.dumps({**self.totals, "per_image": files, "skipped": skipped}, indent=1)
        rows = [
            f"{f.layer}  {f.file}  {f.maps} maps  {by((f.width, f.height))}"
            f"  ~{f.bytes / 1e3:.0f} kB"
            for f in self.files
        ]
        rows += [f"{layer}  skipped: {reason}" for layer, reason in self.skipped]
        total = self.totals
        rows.append(
            f"{counted(total['images'], 'image')}: {counted(total['files'], 'file')} of "
            f"{counted(total['layers'], 'layer')}, "
            f"{total['maps']} maps, {total['megapixels']:.1f} megapixels, "
            f"about {total['estimated_bytes'] / 1e6:.1f} MB in {total['all_files']} files in all"
        )
        return "\n".join(map(printable, rows))


def dry_run(model: ModelOptions, arguments: Sequence[str], options: RunOptions) -> DryRun:
    """Plan a run without writing anything.

    Raises:
        FeatvizError: what `run` would raise before it begins.
    """
    prepared = prepare(model, find_images(arguments, options), options)
    share = options.shard or Shard()
    return _plan(prepared, len(share.of(prepared.samples)))


def check_limits(prepared: Prepared, images: int) -> None:
    """Hold what a run of so many images would write against its limits.

    Where a model takes images in their own size the first one stands for all.

    Raises:
        UsageError: it would write more than it may.
    """
    limits = prepared.options.limits
    if limits != Limits():
        check_plan(limits, _plan(prepared, images).written)


def _plan(prepared: Prepared, images: int) -> DryRun:
    """The files that a run of so many images would write, from a pass on zeros."""
    loaded, blank, options = prepared.model, prepared.blank, prepared.options
    book = prepared.hint_book(blank)
    files: list[PlannedFile] = []
    inputs = [arg.shape for arg in blank]
    beside = [Written(OWN_FILES, int(blank[0].numel() * BYTES_PER_VALUE))]

    def sink(site: Site, tensor: Tensor) -> None:
        if options.draw.tensors:
            beside.append(Written(1, tensor.numel() * TENSOR_BYTES))
        for key, maps in to_maps(tensor, book.at(site, tensor)).items():
            files.extend(_planned(site.inside(key), maps, options.draw, prepared.shown))
            if not key and is_saliency(site, tensor.shape, inputs, options.draw):
                one = replace(options.draw, reduce="max-abs")
                files.extend(_planned(site.inside(SALIENCY), maps, one, prepared.shown))
            beside.append(Written(0, ROW_BYTES + CHANNEL_BYTES * maps.data.shape[0]))

    with in_eval_mode(loaded.module, options.passes.gradients):
        _, recorder = forward_backward.run(
            loaded, prepared.plan, blank, book, prepared.layers, sink
        )
    skipped = [(skip.layer, skip.reason) for skip in recorder.skipped]
    skipped += [(layer.name, "did not run") for layer in recorder.never_ran]
    return DryRun(images, tuple(files), tuple(skipped), sum(beside, Written()))


def _planned(site: Site, maps: Maps, draw: DrawOptions, shown: Sequence[int]) -> list[PlannedFile]:
    """The picture of some maps, and its figure; near-equal maps are not known yet, and counted."""
    channels, slices, *size = maps.data.shape
    reduced = draw.reduce is not None and not maps.strip
    count = 1 if reduced else min(channels, draw.max_maps or channels)
    laid_over = draw.overlay is not None and LAYOUTS[maps.layout].aligned
    shape = (count, min(slices, draw.max_slices), *(shown if laid_over else size))
    plan = grid.plan_file(shape, draw, strip=maps.strip, alone=reduced)
    share = 3 * BLENDED if laid_over else 3 if reduced and draw.reduce == "pca" else 1
    bytes = _bytes(plan, share)
    of = (site.layer.name, site.layer.type)
    picture = f"{site.stem}.{draw.format}"
    files = [PlannedFile(*of, picture, plan.maps, plan.width, plan.height, bytes)]
    if draw.figure:
        panels = 1 if maps.strip else figure.shown_first(draw.first, count)
        height, width = figure.FigureGeometry(panels, "own").pixels
        file = f"{site.stem}.figure.png"
        files.append(PlannedFile(*of, file, panels, width, height, int(width * height * FIGURE)))
    return files


def _bytes(plan: GridPlan, share: float) -> int:
    """An estimate; a value of a map counts `share` times."""
    drawn = plan.maps * plan.map_size[0] * plan.map_size[1] * share
    return int(drawn * BYTES_PER_VALUE * (ENLARGED if plan.scale > (1, 1) else 1))
