"""The story of `kernels`: from a model's convolutions to a folder of pictures."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import Any

from msgspec import structs

from featviz.drawing import tensorboard
from featviz.drawing.kernels import (
    Filters,
    draw_filters,
    is_convolution,
    post_filters,
    read_filters,
)
from featviz.drawing.picture import caption, describe, encode
from featviz.drawing.tensorboard import Board
from featviz.drawing.values import statistics
from featviz.errors import LayoutError, UsageError
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import list_layers, modules_by_name
from featviz.hooks.selectors import types_present
from featviz.models.load import LoadedModel, load_model
from featviz.models.requirements import versions
from featviz.options import InputOptions, ModelOptions
from featviz.options.commands import KernelOptions
from featviz.records import CaptureSite, Floats, Layer, Skip
from featviz.run.choose import choose_layers
from featviz.run.prepare import check_drawing, files_read
from featviz.rundir.place import RUN, check_apart, replacing
from featviz.rundir.write import ImageFolder, RunDirectory, manifest_rows

log = logging.getLogger(__name__)

NO_IMAGE = InputOptions(channels=1)
"""Kernels need no input; with this, none is guessed from the first convolution."""
_FOR_MAPS = ("tensors", "flat", "overlay", "reduce", "figure")


def draw_kernels(
    model: ModelOptions | LoadedModel, options: KernelOptions
) -> tuple[dict[str, Any], list[Skip]]:
    """Draw a model's kernels, one picture for each layer, into a folder like a run's image.

    Returns:
        What `--json` prints, and what could not be drawn.
    """
    check_drawing(options.draw, options.tensorboard)
    check_apart(options.out, "--out", files_read(model))
    events = None
    if options.tensorboard is not None:
        events = tensorboard.run_folder(options.tensorboard, options.out)
    with replacing(options.out, RUN, options.overwrite) as fresh:
        loaded = load_model(model, NO_IMAGE)
        with in_eval_mode(loaded.module):
            read, skipped = _read(loaded, options.layers)
        drawing = {k: v for k, v in structs.asdict(options.draw).items() if k not in _FOR_MAPS}
        run = RunDirectory(fresh)
        given = {"layers": options.layers, "all_slices": options.all_slices, **drawing}
        layers = [layer.name for layer, _ in read]
        record = {"kind": "kernels", **versions(), "model": loaded.source, "layers": layers}
        run.write_run({**record, "options": given})
        folder = ImageFolder(run, "")
        drawn = []
        with tensorboard.opened(events, options.out) as board:
            for layer, kernels in read:
                try:
                    drawn.append(_draw(layer, kernels, folder, options, board))
                except LayoutError as error:
                    skipped.append(_skip(layer, error))
        rows = [row for row, _, _ in drawn]
        manifest = {"captures": rows, "skipped": manifest_rows((), skipped)["skipped"]}
        folder.finish(manifest, {key: numbers for _, key, numbers in drawn})
    about = {"captures": rows, "skipped": [asdict(skip) for skip in skipped]}
    return {"out": str(options.out), **about}, skipped


def _read(
    loaded: LoadedModel, selectors: str | None
) -> tuple[list[tuple[Layer, Filters]], list[Skip]]:
    """The kernels of the chosen layers, and which of these have none. A shared module's are drawn
    once, under the first chosen name."""
    modules, every = modules_by_name(loaded.module), list_layers(loaded.module)
    layers = [layer for layer in every if is_convolution(modules[layer.name])]
    if selectors is not None:
        layers = choose_layers(loaded, selectors, loaded.preprocess.blank())
    chosen: dict[int, Layer] = {}
    for layer in layers:
        chosen.setdefault(id(modules[layer.name]), layer)
    kernels, skipped = [], []
    for layer in chosen.values():
        try:
            kernels.append((layer, read_filters(modules[layer.name])))
        except LayoutError as error:
            skipped.append(_skip(layer, error))
    if kernels:
        return kernels, skipped
    message = "the model has no convolutions"
    if skipped:
        first = skipped[0]
        message = f"none of {len(skipped)} layers has kernels to draw: "
        message += f"{first.layer or first.type}: {first.reason}"
    raise UsageError(message, f"types here: {types_present(every)}")


def _draw(
    layer: Layer, kernels: Filters, folder: ImageFolder, options: KernelOptions, board: Board | None
) -> tuple[dict[str, Any], str, Floats]:
    """Write a layer's picture; its row of the manifest, and the key and statistics [output
    channels, 6] of all weights of each."""
    picture, words = draw_filters(kernels, options.draw, options.all_slices)
    data, shape, groups, transposed = kernels
    numbers = statistics(data)[0]
    site = CaptureSite(layer, "kernel", 0, "")
    file = folder.file(layer, f"{site.stem}.{options.draw.format}")
    values = data[0].numel()
    row = describe(replace(picture, stats=numbers), site, shape, file, values)
    if row.nonfinite:
        message = "%s holds %d NaN or infinite weights, shown in magenta"
        log.warning(message, layer.label, row.nonfinite)
    with folder.writing(file) as opened:
        encode(picture, opened, options.draw.format, {**caption(row), "Tile": words})
    if board is not None:
        post_filters(board, layer, kernels, options.draw)
    (entry,) = manifest_rows([row], ())["captures"]
    more = {"groups": groups, "transposed": transposed}
    return {**entry, **more, "slices": picture.slices[1], "tiles": words}, site.stats_key, numbers


def _skip(layer: Layer, error: LayoutError) -> Skip:
    return Skip(layer.name, layer.type, layer.index, "kernel", 0, "", error.message)
