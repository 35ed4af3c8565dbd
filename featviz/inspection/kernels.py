"""The story of `kernels`: from a model's convolutions to a folder of pictures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from msgspec import structs

from featviz.drawing import colormap, tensorboard
from featviz.drawing.channels import warn_of_missing
from featviz.drawing.kernels import (
    Filters,
    draw_filters,
    is_convolution,
    post_filters,
    read_filters,
)
from featviz.drawing.page import Page, PageRow, draw_page, figure_tiles
from featviz.drawing.picture import GridPicture, caption, describe, encode, write_pixels
from featviz.drawing.values import statistics
from featviz.errors import LayoutError, UsageError
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import list_layers, modules_by_name
from featviz.hooks.selectors import types_present
from featviz.models.load import LoadedModel, load_model
from featviz.models.requirements import versions
from featviz.options import DrawOptions, InputOptions, ModelOptions
from featviz.options.commands import KernelOptions
from featviz.records import CaptureSite, Floats, Layer, Skip
from featviz.run.choose import choose_layers
from featviz.run.prepare import check_drawing, files_read
from featviz.rundir.place import RUN, check_apart, replacing
from featviz.rundir.schema import Capture
from featviz.rundir.write import ImageFolder, RunDirectory, manifest_rows
from featviz.text import by, counted, layer_named

log = logging.getLogger(__name__)

PAGE_FILE = "kernels.png"
"""The page with kernels of all layers, in the folder of the kernels."""
_COLUMNS = 8
"""Kernels of each layer on the page."""
NO_IMAGE = InputOptions(input_channels=1)
"""Input options for a model that is never run: with a number of channels, `load_model` does
not look for it in the first convolution."""
_FOR_MAPS = ("tensors", "flat", "overlay", "reduce", "figure")
"""Options of drawing that do not apply to kernels."""


def draw_kernels(
    model: ModelOptions | LoadedModel, options: KernelOptions
) -> tuple[dict[str, Any], list[Skip]]:
    """Draw a model's kernels, one picture for each layer. The folder looks like a run
    directory with one image.

    Args:
        options: `layers` may name any layer; without it, all convolutions are drawn.

    Returns:
        What `--json` prints, and the layers that could not be drawn.

    Raises:
        FeatvizError: no such model or layer, no layer with kernels, or `options.out` is a
            folder that may not be replaced.
    """
    check_drawing(options.draw, options.tensorboard)
    check_apart(options.out, "--out", files_read(model))
    # As for a run, a hidden folder is written, and gets its name when all is in it.
    with replacing(options.out, RUN, options.overwrite) as folder:
        loaded = load_model(model, NO_IMAGE)
        # in training mode, reading a weight under spectral norm would change its buffers
        with in_eval_mode(loaded.module):
            filters, skipped = _read(loaded, options.layers)
        run = RunDirectory(folder)
        run.write_run(_record(loaded, list(filters), options))
        images = ImageFolder(run, "")
        drawn = _draw_all(filters, skipped, images, options)
        captures = [layer.row for layer in drawn]
        channels = {row["layer"]: range(row["maps"]) for row in captures}
        warn_of_missing(options.draw.channels, channels)
        _write_page(images, loaded, [layer.page_row for layer in drawn], options.draw)
        manifest = {
            "captures": captures,
            "skipped": list(map(asdict, skipped)),
        }
        images.finish(manifest, {layer.key: layer.stats for layer in drawn})
    return {"out": str(options.out), **manifest}, skipped


def _record(
    loaded: LoadedModel, layers: Sequence[Layer], options: KernelOptions
) -> dict[str, Any]:
    """The content of run.json.

    Args:
        layers: the layers that have kernels.
    """
    drawing = structs.asdict(options.draw)
    for name in _FOR_MAPS:
        del drawing[name]
    return {
        "kind": "kernels",
        **versions(),
        "model": loaded.source,
        "layers": [layer.name for layer in layers],
        "options": {
            "layers": options.layers,
            "all_slices": options.all_slices,
            **drawing,
        },
    }


def _read(
    loaded: LoadedModel, selectors: str | None
) -> tuple[dict[Layer, Filters], list[Skip]]:
    """Read the kernels of the chosen layers. The kernels of a shared module are read once,
    under the first of its chosen names.

    Args:
        selectors: which layers; None for all convolutions.

    Returns:
        The kernels of each layer that has some; and the chosen layers that have none, among
        them functions (`fn:conv2d`), with reasons.

    Raises:
        UsageError: none of the chosen layers has kernels.
    """
    modules = modules_by_name(loaded.module)
    layers = list_layers(loaded.module)
    chosen = [layer for layer in layers if is_convolution(modules[layer.name])]
    if selectors is not None:
        chosen = choose_layers(loaded, selectors, loaded.preprocess.blank())
    filters: dict[Layer, Filters] = {}
    skipped: list[Skip] = []
    seen: set[int] = set()
    for layer in chosen:
        if layer.is_function:
            skipped.append(Skip.of(_site(layer), "it is a function, not a module"))
            continue
        module = modules[layer.name]
        # a shared module is one object under several names
        if id(module) in seen:
            continue
        seen.add(id(module))
        try:
            filters[layer] = read_filters(module)
        except LayoutError as error:
            skipped.append(Skip.of(_site(layer), error.message))
    if filters:
        return filters, skipped
    message = "the model has no convolutions"
    if skipped:
        message = _nothing_to_draw(skipped)
    raise UsageError(message, f"types here: {types_present(layers)}")


def _nothing_to_draw(skipped: Sequence[Skip]) -> str:
    """The message if no layer could be drawn, with the reason of the first layer.

    Args:
        skipped: the layers, at least one.
    """
    first = skipped[0]
    layers = counted(len(skipped), "layer")
    reason = f"{layer_named(first.label)}: {first.reason}"
    return f"no kernels to draw in {layers}: {reason}"


class _Drawn(NamedTuple):
    """A layer whose picture was written."""

    row: dict[str, Any]
    """The layer's row of the manifest."""
    page_row: PageRow
    key: str
    """The name of `stats` in stats.npz."""
    stats: Floats
    """Statistics of the weights of each output channel, [output channels, 6]."""


def _draw_all(
    filters: dict[Layer, Filters],
    skipped: list[Skip],
    folder: ImageFolder,
    options: KernelOptions,
) -> list[_Drawn]:
    """Write the picture of each layer, and send it to TensorBoard if the options ask for
    that.

    Args:
        skipped: this list gets the layers that have none of the channels of --channels.
        folder: the folder of all pictures.

    Returns:
        The layers that were drawn, at least one.

    Raises:
        UsageError: no layer has any of the channels.
    """
    events = None
    if options.tensorboard is not None:
        events = tensorboard.run_folder(options.tensorboard, options.out)
    drawn = []
    with tensorboard.open_board(events, options.out) as board:
        for layer, layer_filters in filters.items():
            try:
                drawn.append(_draw(layer, layer_filters, folder, options))
            except LayoutError as error:
                skipped.append(Skip.of(_site(layer), error.message))
                continue
            if board is not None:
                post_filters(board, layer, layer_filters, options.draw)
    if not drawn:
        raise UsageError(_nothing_to_draw(skipped), "take other --channels")
    return drawn


def _draw(
    layer: Layer, filters: Filters, folder: ImageFolder, options: KernelOptions
) -> _Drawn:
    """Write a layer's picture. Warns of weights that are NaN or infinite.

    Args:
        folder: the folder of all pictures.

    Raises:
        LayoutError: the layer has none of the channels of --channels.
    """
    picture, tiles = draw_filters(filters, options.draw, options.all_slices)
    stats = statistics(filters.kernels)
    site = _site(layer)
    file = folder.file(layer, f"{site.stem}.{options.draw.format}")
    # the statistics are those of all weights, even if a tile shows a mean over inputs
    picture = replace(picture, stats=stats, values=filters.kernels[0].numel())
    capture = describe(picture, site, filters.weight_shape, file)
    if capture.nonfinite:
        message = "%s holds %d NaN or infinite weights, shown in magenta"
        log.warning(message, layer_named(layer.label), capture.nonfinite)
    with folder.writing(file) as opened:
        encode(
            picture, opened, options.draw.format, {**caption(capture), "Tile": tiles}
        )
    (row,) = manifest_rows([capture], ())["captures"]
    row |= {
        "groups": filters.groups,
        "transposed": filters.transposed,
        "slices": picture.slices[1],
        "tiles": tiles,
    }
    cmap = colormap.decide_cmap(options.draw.cmap, "kernel")
    page_row = _page_row(capture, tiles, picture, cmap)
    return _Drawn(row, page_row, site.stats_key, stats)


def _page_row(
    capture: Capture, description: str, picture: GridPicture, cmap: str
) -> PageRow:
    """A layer's row on the page: its first kernels, with their channels and their ranges.

    Args:
        capture: the layer's row of the manifest.
        description: what a tile shows; each part between commas gets a line.
        cmap: the name of the page's colormap.
    """
    lines = [capture.type, by(capture.shape), *description.split(", ")]
    shared = picture.limits.shared
    if shared is not None:
        lines.append("{:.3g} … {:.3g}".format(*shared))
    tiles = []
    for tile in figure_tiles(picture, cmap)[:_COLUMNS]:
        note = ""
        if shared is None and tile.limits is not None:
            note = "{:.2g} … {:.2g}".format(*tile.limits)
        title = tile.title.removeprefix("channel ")
        tiles.append(replace(tile, title=title, note=note))
    return PageRow(layer_named(capture.layer or capture.type), lines, tiles)


def _write_page(
    folder: ImageFolder,
    loaded: LoadedModel,
    rows: Sequence[PageRow],
    options: DrawOptions,
) -> None:
    """Write the page with the first kernels of all layers. If the page would be too large,
    log that, and write none.

    Args:
        rows: one for each layer, at least one.
    """
    source = loaded.source
    title = str(source.get("name") or source.get("file") or source.get("type"))
    # for a file of weights, `name` is the architecture
    if source.get("kind") == "file":
        title = source["file"]
    key = f"the first {_COLUMNS} channels of each layer"
    if options.channels is not None:
        key = f"the first {_COLUMNS} of channels {options.channels}"
    color_key = "max of each layer, written beside its kernels"
    if rows[0].tiles[0].note:
        color_key = "max of each kernel, written below it"
    # only the first layer takes the colours of an image
    if "RGB of three inputs" in rows[0].lines:
        color_key += "; RGB: for each colour"
    page = Page(
        title=title + loaded.weights_note,
        subtitle=f"kernels of {counted(len(rows), 'layer')}",
        pictures=(),
        bars=(),
        remarks=(),
        rows=rows,
        key=key,
        cmap=colormap.decide_cmap(options.cmap, "kernel"),
        color_key_note=color_key,
    )
    try:
        pixels = draw_page(page)
    except UsageError as error:
        log.info("no %s: %s", PAGE_FILE, error.message)
        return
    with folder.writing(PAGE_FILE) as file:
        write_pixels(file, pixels, {"Software": "featviz kernels"})


def _site(layer: Layer) -> CaptureSite:
    return CaptureSite(layer, "kernel", 0, "")
