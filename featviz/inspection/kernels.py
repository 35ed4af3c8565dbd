"""The story of `kernels`: from a model's convolutions to a folder of pictures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from featviz.drawing import filters, png, stats, tensorboard
from featviz.drawing.filters import Filters
from featviz.drawing.kernels import DRAW, draw_filters, post_filters
from featviz.drawing.picture import caption, describe, encode
from featviz.drawing.tensorboard import Board
from featviz.drawing.titles import titled
from featviz.errors import LayoutError, UsageError
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import list_layers, modules_by_name
from featviz.hooks.selectors import types_present
from featviz.models.load import LoadedModel, ModelOptions, load_model, mistakes_first
from featviz.models.preprocess import InputOptions
from featviz.models.requirements import versions
from featviz.pipeline.dry_pass import choose_layers
from featviz.pipeline.options import check_drawing
from featviz.records import DrawOptions, GridPlan, Layer, Site, Skip
from featviz.rundir import destination, lock
from featviz.rundir.write import ImageFolder, RunDirectory, check_free, manifest_rows

log = logging.getLogger(__name__)

NO_IMAGE = InputOptions(channels=1)
"""Kernels need no input; with this, none is guessed from the first convolution."""

_FOR_MAPS = ("tensors", "flat", "overlay", "reduce", "shared_basis", "figure", "first")
"""Fields of DrawOptions that kernels have no use for."""


@dataclass(frozen=True)
class KernelOptions:
    """Everything that `kernels` can be told beside the model."""

    layers: str | None = None
    """Selectors; None takes all convolutions."""
    out: Path = Path("featviz-kernels")
    overwrite: bool = False
    all_slices: bool = False
    """A tile for each input of each kernel, instead of one for each kernel."""
    tensorboard: Path | None = None
    """Folder for TensorBoard's runs."""
    draw: DrawOptions = DRAW

    @property
    def board(self) -> Path | None:
        """The folder of TensorBoard's events."""
        if self.tensorboard is None:
            return None
        return tensorboard.run_folder(self.tensorboard, self.out)


@dataclass(frozen=True)
class KernelsResult:
    """The pictures of a model's kernels."""

    out: Path
    rows: tuple[dict[str, Any], ...]
    """As in the manifest."""
    skipped: tuple[Skip, ...]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "out": str(self.out),
            "captures": list(self.rows),
            "skipped": [asdict(skip) for skip in self.skipped],
        }


@dataclass(frozen=True)
class _Drawn:
    row: dict[str, Any]
    stats_key: str
    numbers: Any
    """[output channels, 6], of all weights of each."""


def draw_kernels(model: ModelOptions | LoadedModel, options: KernelOptions) -> KernelsResult:
    """Draw a model's kernels, one picture for each layer, into a folder like a run's image.

    Raises:
        FeatvizError: a bad option, no such model, nothing to draw, or the folder failed.
    """
    check_drawing(options.draw, options.tensorboard)
    names = () if isinstance(model, LoadedModel) else (model.spec, model.arch, model.weights)
    destination.check_apart(options.out, "--out", destination.model_files(*names))
    with lock.held(options.out):
        return _draw_all(model, options)


def _draw_all(model: ModelOptions | LoadedModel, options: KernelOptions) -> KernelsResult:
    events = options.board
    besides = [] if events is None else list(events.glob(tensorboard.EVENTS))
    with mistakes_first(model):
        check_free(options.out, options.overwrite, None, besides)
    loaded = load_model(model, NO_IMAGE)
    with in_eval_mode(loaded.module):
        read, skipped = _read(loaded, options.layers)
    store = RunDirectory.create(options.out, options.overwrite, None, besides)
    store.write_run(_record(loaded, [layer for layer, _ in read], options))
    folder = ImageFolder(store.root, "")
    drawn: list[_Drawn] = []
    with tensorboard.opened(events, options.out) as board:
        for layer, kernels in read:
            try:
                drawn.append(_draw(layer, kernels, folder, options, board))
            except LayoutError as error:
                skipped.append(_skip(layer, error))
    rows = tuple(one.row for one in drawn)
    manifest = {"captures": list(rows), "skipped": manifest_rows((), skipped)["skipped"]}
    folder.finish(manifest, {one.stats_key: one.numbers for one in drawn})
    return KernelsResult(options.out, rows, tuple(skipped))


def _read(
    loaded: LoadedModel, selectors: str | None
) -> tuple[list[tuple[Layer, Filters]], list[Skip]]:
    """The kernels of the chosen layers, and which of these have none. A shared module's are drawn
    once, under the first chosen name.

    Raises:
        UsageError: none has.
    """
    modules = modules_by_name(loaded.module)
    chosen: dict[int, Layer] = {}
    for layer in _choose(loaded, selectors):
        chosen.setdefault(id(modules[layer.name]), layer)
    kernels, skipped = [], []
    for layer in chosen.values():
        try:
            kernels.append((layer, filters.read_filters(modules[layer.name])))
        except LayoutError as error:
            skipped.append(_skip(layer, error))
    if not kernels:
        raise _nothing(loaded, skipped)
    return kernels, skipped


def _choose(loaded: LoadedModel, selectors: str | None) -> list[Layer]:
    """The layers that the selectors take; without selectors, all convolutions."""
    if selectors is not None:
        return choose_layers(loaded, selectors, loaded.preprocess.blank())
    modules = modules_by_name(loaded.module)
    layers = list_layers(loaded.module)
    return [layer for layer in layers if filters.is_convolution(modules[layer.name])]


def _nothing(loaded: LoadedModel, skipped: Sequence[Skip]) -> UsageError:
    present = f"types here: {types_present(list_layers(loaded.module))}"
    if not skipped:
        return UsageError("the model has no convolutions", present)
    first = skipped[0]
    return UsageError(
        f"none of {len(skipped)} layers has kernels to draw: {first.layer or first.type}: "
        f"{first.reason}",
        present,
    )


def _draw(
    layer: Layer,
    kernels: Filters,
    folder: ImageFolder,
    options: KernelOptions,
    board: Board | None,
) -> _Drawn:
    tiles, picture = draw_filters(kernels, options.draw, options.all_slices)
    numbers = stats.channel_stats(kernels.data.flatten(1)[:, :, None])
    site = Site(layer, "kernel", 0, "")
    file = folder.file(layer, f"{site.stem}.{options.draw.format}")
    values = kernels.data[0].numel()
    titles, format = options.draw.titles, options.draw.format
    shown = titled(picture, site, kernels.shape, format) if titles else picture
    row = describe(replace(shown, stats=numbers), site, kernels.shape, file, values)
    _warn_of(layer, row.nonfinite, shown.plan)
    with folder.writing(file) as opened:
        encode(shown, opened, format, {**caption(row), "Tile": tiles.words})
    if board is not None:
        post_filters(board, layer, kernels, picture)
    (entry,) = manifest_rows([row], ())["captures"]
    more = {"groups": kernels.groups, "transposed": kernels.transposed}
    slices = {"slices": tiles.data.shape[1], "tiles": tiles.words}
    return _Drawn({**entry, **more, **slices}, site.stats_key, numbers)


def _warn_of(layer: Layer, nonfinite: int, plan: GridPlan) -> None:
    if nonfinite:
        log.warning("%s holds %d NaN or infinite weights, shown in magenta", layer.label, nonfinite)
    png.warn_of_size(layer.label, plan.pixels)


def _skip(layer: Layer, error: LayoutError) -> Skip:
    return Skip(layer.name, layer.type, layer.index, "kernel", 0, "", error.message)


def _record(model: LoadedModel, layers: Sequence[Layer], options: KernelOptions) -> dict[str, Any]:
    """The content of run.json; nothing of when and where."""
    drawing = {k: v for k, v in asdict(options.draw).items() if k not in _FOR_MAPS}
    return {
        "kind": "kernels",
        **versions(),
        "model": model.source,
        "layers": [layer.name for layer in layers],
        "options": {"layers": options.layers, "all_slices": options.all_slices, **drawing},
    }
