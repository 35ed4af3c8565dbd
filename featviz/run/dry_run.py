"""`run --dry-run`: what would be written, from one forward pass on zeros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import structs
from torch import Tensor

from featviz.drawing import grid
from featviz.drawing.channels import count_chosen
from featviz.drawing.drawer import check_places, is_saliency, magnitude_and_phase
from featviz.layout import Maps, to_maps
from featviz.layout.layouts import LAYOUTS
from featviz.options import DrawOptions, ModelOptions, RunOptions
from featviz.records import (
    SALIENCY,
    STAT_COLUMNS,
    CaptureSite,
    GridPlan,
    Hints,
    Shard,
)
from featviz.run.prepare import Prepared, find_images, prepare
from featviz.text import by, counted, printable, size_text

# Bytes of a PNG, estimated from the sample scenes with random weights, and rounded up
BYTES_PER_VALUE = 0.8  # for each value of a map; resnet18 took 0.72 and vgg16 0.57
ENLARGED = 1.5  # an enlarged map takes this many times as much, at any scale
BLENDED = 0.6  # maps over the input take this many times as much in each colour channel
FIGURE = 0.5  # for each pixel of a figure
OWN_FILES = 3  # each image also has input.png, stats.npz and manifest.json
# for each picture in manifest.json and stats.npz, without numbers of channels
ROW_BYTES = 1000


class PlannedFile(NamedTuple):
    """A file that a run would write for each image: a row of `per_image`."""

    layer: str
    type: str
    file: str
    maps: int
    width: int
    height: int
    bytes: int
    """An estimate."""


def render(plan: Mapping[str, Any]) -> str:
    """The document of `dry_run`, as a table for people."""
    rows = []
    for file in plan["per_image"]:
        size = by((file["width"], file["height"]))
        numbers = f"{counted(file['maps'], 'map')}  {size}  ~{size_text(file['bytes'])}"
        rows.append(f"{file['layer']}  {file['file']}  {numbers}")
    for row in plan["skipped"]:
        rows.append(f"{row['layer']}  skipped: {row['reason']}")
    images = counted(plan["images"], "image")
    # `files` are the pictures; `all_files` counts input.png, manifests and tensors, too
    files = counted(plan["files"], "file")
    layers = counted(plan["layers"], "layer")
    maps = counted(plan["maps"], "map")
    megapixels = f"{plan['megapixels']:.1f}"
    if megapixels == "0.0":
        megapixels = "under 0.1"
    rows.append(
        f"{images}: {files} of {layers}, {maps}, {megapixels} megapixels, about"
        f" {size_text(plan['estimated_bytes'])} in {plan['all_files']} files in all"
    )
    return "\n".join(map(printable, rows))


def dry_run(
    model: ModelOptions, arguments: Sequence[str], options: RunOptions
) -> dict[str, Any]:
    """Plan a run without writing anything: the files of each image, and the totals over
    all images. If a model takes images in their own size, the plan supposes that all have
    the size of the first one.

    Args:
        arguments: the images, as on the command line.

    Returns:
        The document of `run --dry-run --json`: `per_image` has a row for each
        PlannedFile, and the totals are over all images of this shard.
    """
    prepared = prepare(model, find_images(arguments, options), options)
    images = len((options.shard or Shard()).of(prepared.samples))
    planner = _Planner(prepared)
    with prepared.watched() as show:
        _, recorder = show(prepared.blank, planner.hints, planner.plan)
    skipped = [{"layer": row.layer, "reason": row.reason} for row in recorder.skipped]
    for layer in recorder.never_ran:
        skipped.append({"layer": layer.name, "reason": "did not run"})
    # the blank image will do: the size of a picture depends only on shapes
    files = planner.files
    pixels = sum(file.width * file.height for file in files)
    size = sum(file.bytes for file in files) + planner.other_bytes
    return {
        "images": images,
        "layers": len({file.layer for file in files}),
        "files": len(files) * images,
        "maps": sum(file.maps for file in files) * images,
        "megapixels": round(pixels * images / 1e6, 3),
        "all_files": (len(files) + planner.other_files) * images,
        "estimated_bytes": size * images,
        "per_image": [file._asdict() for file in files],
        "skipped": skipped,
    }


class _Planner:
    """Plans the files of the tensors of one forward pass."""

    def __init__(self, prepared: Prepared) -> None:
        """Begin with the files that every image has."""
        self.prepared = prepared
        self.draw = prepared.options.draw
        self.hints = prepared.hints(prepared.blank)
        self.input_shapes = [arg.shape for arg in prepared.blank]
        self.files: list[PlannedFile] = []
        self.other_files = OWN_FILES
        self.other_bytes = int(prepared.blank[0].numel() * BYTES_PER_VALUE)

    def plan(
        self,
        site: CaptureSite,
        tensor: Tensor,
        gradient: Tensor | None = None,
        hints: Hints | None = None,
    ) -> None:
        """Plan the files of a tensor. The hooks call this method.

        Args:
            site: the capture that gave the tensor.
            gradient: the gradient at the tensor, for class activation maps.
            hints: hints on the tensor's layout; None looks them up.

        Raises:
            LayoutError: the tensor cannot be drawn.
        """
        hints = hints or self.hints.of_tensor(site, tensor)
        if tensor.is_complex() and gradient is None:
            for real in magnitude_and_phase(site, tensor, hints, self.draw):
                self.plan(real.site, real.tensor, hints=real.hints)
            return
        maps_by_key = to_maps(tensor, hints)
        if gradient is not None:
            check_places(maps_by_key[""])
            maps_by_key = {"": maps_by_key[""]}
        if self.draw.tensors:
            self.other_files += 1
            self.other_bytes += tensor.numel() * 4
        draw = self.draw
        if hints.phase:  # angles lie over nothing
            draw = structs.replace(draw, overlay=None)
        for key, maps in maps_by_key.items():
            self._plan_picture(site.inside(key), maps, draw)
            self.other_bytes += ROW_BYTES + 4 * len(STAT_COLUMNS) * maps.data.shape[0]
        if is_saliency(site, tensor.shape, self.input_shapes, self.draw):
            strongest = structs.replace(self.draw, reduce="max-abs")
            self._plan_picture(site.inside(SALIENCY), maps_by_key[""], strongest)

    def _plan_picture(self, site: CaptureSite, maps: Maps, draw: DrawOptions) -> None:
        """Plan the picture of some maps, and its figure. --collapse leaves out maps that
        are nearly equal to another; the plan cannot know these, and counts all maps.

        Args:
            site: the capture, or the part of a capture, that the picture shows.
            draw: how this picture is drawn, which may differ from the run's options.
        """
        channels, slices, *size = maps.data.shape
        layout = LAYOUTS[maps.layout]
        is_reduced = draw.reduce is not None and not layout.strip
        is_overlay = draw.overlay is not None and layout.aligned
        tiles = 1 if is_reduced else count_chosen(draw.channels, channels)
        tile_size = self.prepared.image_size if is_overlay else size
        shape = (tiles, min(slices, draw.max_slices), *tile_size)
        plan = grid.plan(shape, draw, strip=layout.strip, alone=is_reduced)
        is_pca = is_reduced and draw.reduce == "pca"
        picture = PlannedFile(
            layer=site.layer.name,
            type=site.layer.type,
            file=f"{site.stem}.{draw.format}",
            maps=plan.tile_count,
            width=plan.width,
            height=plan.height,
            bytes=_estimated_bytes(plan, is_overlay, is_pca),
        )
        self.files.append(picture)
        if draw.figure:
            panels = 1 if layout.strip else tiles
            self.files.append(_figure(picture, f"{site.stem}.figure.png", panels))


def _estimated_bytes(plan: GridPlan, is_overlay: bool, is_pca: bool) -> int:
    """An estimate of the size of a grid's PNG, in bytes.

    Args:
        is_overlay: whether the maps lie over the input; then `is_pca` has no effect.
        is_pca: whether the picture shows three principal components, as red, green and
            blue.
    """
    bytes_per_value = BYTES_PER_VALUE
    if is_overlay:
        bytes_per_value *= 3 * BLENDED  # red, green and blue
    elif is_pca:
        bytes_per_value *= 3
    if plan.scale > (1, 1):
        bytes_per_value *= ENLARGED
    height, width = plan.map_size
    return int(plan.tile_count * height * width * bytes_per_value)


def _figure(picture: PlannedFile, file: str, panels: int) -> PlannedFile:
    """The planned figure of a picture.

    Args:
        picture: the planned picture.
        file: the path of the figure.
        panels: how many panels there are maps for; a figure shows only the first ones.
    """
    from featviz.drawing import page

    shown = min(page.FIRST, panels)
    size = page.figure_size(shown)
    return picture._replace(
        file=file,
        maps=shown,
        width=size.width,
        height=size.height,
        bytes=int(size.width * size.height * FIGURE),
    )
