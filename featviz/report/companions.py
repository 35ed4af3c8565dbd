"""Results of the same model that are shown on the pages of a run: audits, kernels,
exemplars."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from featviz.drawing.sheet import TileGrid
from featviz.errors import CompareError, StoreError
from featviz.exemplars.pictures import BETWEEN, tile_grid
from featviz.options.commands import ReportOptions
from featviz.report.audits import AuditView
from featviz.report.color_keys import color_key
from featviz.report.descriptions import model_name, number, span
from featviz.report.extras import CaptionedTile, Extra, TileBox, TiledPicture
from featviz.report.figures import ReportPage
from featviz.report.links import PictureView
from featviz.rundir import AUDIT_FILE
from featviz.rundir.image import ReadImage
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import Capture
from featviz.rundir.studies import (
    ExemplarLayer,
    ExemplarRecord,
    exemplar_pictures,
    read_audit,
    read_exemplars,
    read_kernels,
)
from featviz.text import by, counted, listed, quoted

log = logging.getLogger(__name__)


class Companions(NamedTuple):
    """What is shown on the pages of a run besides its maps."""

    extras: dict[str, list[Extra]]
    """Pictures for each tensor, by the id of its group on the page of the layer."""
    audit: AuditView | None


class _Tensor(NamedTuple):
    """A tensor of a layer."""

    layer: str
    """Its label."""
    stem: str
    """`output.call1`."""


def read_companions(
    run: ReadRun, pages: Sequence[ReportPage], options: ReportOptions
) -> Companions:
    """Read the kernels, exemplars and audit that `options` names; of audits else the one
    in the run's folder.

    Args:
        pages: of all layers of the run.

    Raises:
        CompareError: a result is of another model.
        StoreError: kernels or exemplars are of none of the run's layers; or a result
            cannot be read.
    """
    groups = {}
    for page in pages:
        for group in page.groups:
            groups[_Tensor(page.name, group.stem)] = group.id
    # kernels belong to a layer, not to one of its tensors: they are shown at the first
    first_groups = {page.name: page.groups[0].id for page in pages}
    extras: dict[str, list[Extra]] = {id: [] for id in groups.values()}
    if options.kernels is not None:
        for layer, kernels in _shared_kernels(
            run, options.kernels, first_groups
        ).items():
            extras[first_groups[layer]].append(kernels)
    audit = _audit(run, options.audit, first_groups)
    if audit is not None:
        for id, suspects in _suspects_of_groups(audit, pages):
            extras[id].extend(suspects)
    if options.exemplars is not None:
        for tensor, sheets in _shared_exemplars(run, options.exemplars, groups).items():
            extras[groups[tensor]] += sheets
    return Companions(extras, audit)


def _suspects_of_groups(
    audit: AuditView, pages: Sequence[ReportPage]
) -> Iterator[tuple[str, Sequence[Extra]]]:
    """The pictures of each layer's suspects, and the id of the group where they are shown:
    the first of the audited call, else the first of the page. Layers without a page are
    left out."""
    first_groups: dict[tuple[str, int | None], str] = {}
    for page in pages:
        first_groups[page.name, None] = page.groups[0].id
        for group in page.groups:
            first_groups.setdefault((page.name, group.call), group.id)
    for layer in audit.layers:
        at_call = first_groups.get((layer.home, layer.call))
        id = at_call or first_groups.get((layer.home, None))
        if id is not None:
            yield id, layer.suspects


def _shared_kernels(
    run: ReadRun, path: Path, layers: Container[str]
) -> dict[str, Extra]:
    """The kernels in a folder by layer, but for layers that the run does not have.

    Args:
        path: the folder, as the user named it.
        layers: names of the layers that have pages.

    Raises:
        CompareError, StoreError: as from `read_companions`.
    """
    record, pictures = read_kernels(path)
    check_model(run, "kernels", path, record["model"])
    kernels = dict(kernel_extras(record, pictures))
    shared = {layer: extra for layer, extra in kernels.items() if layer in layers}
    _check_shared(shared, kernels, "kernels", path)
    return shared


def _audit(
    run: ReadRun, path: Path | None, layers: Collection[str]
) -> AuditView | None:
    """The audit at a path, or in the run's folder; None where that has none.

    Args:
        path: audit.json or its folder, as the user named it; None for the run's folder.
        layers: names of the layers that have pages.

    Raises:
        CompareError, StoreError: as from `read_companions`.
    """
    audit_and_pictures = read_audit(run.root, path)
    if audit_and_pictures is None:
        return None
    record, pictures = audit_and_pictures
    check_model(run, "audit", path or run.root / AUDIT_FILE, record.model)
    return AuditView.of_record(record, pictures, layers)


def _shared_exemplars(
    run: ReadRun, path: Path, tensors: Container[_Tensor]
) -> dict[_Tensor, list[Extra]]:
    """The exemplars in a folder by tensor, but for those that the run does not have.

    Args:
        path: the folder, as the user named it.
        tensors: those that have groups on pages.

    Raises:
        CompareError, StoreError: as from `read_companions`.
    """
    record = read_exemplars(path)
    check_model(run, "exemplars", path, record.model)
    sheets = _exemplar_extras(record, exemplar_pictures(path, record))
    shared = {tensor: extras for tensor, extras in sheets.items() if tensor in tensors}
    _check_shared(shared, [tensor.layer for tensor in sheets], "exemplars", path)
    return shared


def _check_shared(
    shared: Collection[object], layers: Iterable[str], option: str, path: Path
) -> None:
    """Refuse kernels or exemplars that have no layer in common with the run.

    Args:
        shared: those of layers of the run.
        layers: all layers that the folder has, for the hint.
        option: `kernels` or `exemplars`.
        path: their folder, as the user named it.

    Raises:
        StoreError: `shared` is empty.
    """
    if not shared:
        names = [quoted(name or ".") for name in dict.fromkeys(layers)]
        hint = f"run again with these --layers: {listed(names, 5)}"
        raise StoreError(
            f"{quoted(str(path))} has {option} of no layer of this run", hint
        )


def check_model(
    run: ReadRun, option: str, path: Path, record: Mapping[str, Any]
) -> None:
    """Refuse a result of another model than the run's; warn where that is not known.

    Args:
        option: that names the result, without its dashes; also the command that makes
            one.
        path: of the result, as the user named it.
        record: the entry `model` in the record of the result.

    Raises:
        CompareError: it is of another model.
    """
    model = run.record.get("model") or {}
    compared = _comparable(model, record)
    differing = [name for name in compared if model.get(name) != record.get(name)]
    title = f"--{option} {quoted(str(path))}"
    if differing:
        there = _identity(record, differing)
        in_run = _identity(model, differing)
        message = (
            f"{title} is of another model than the run: {there} there, {in_run} in the"
            " run"
        )
        hint = f"make it with featviz {option} {quoted(model_name(model))}"
        raise CompareError(message, hint)
    if not compared:
        log.warning("%s: whether it is of the run's model is not known", title)


def _comparable(model: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys by which two entries `model` of records are compared: a digest that both
    have; name, weights and seed where neither has one. Empty where neither is possible."""
    # the parameters come first: the same ones may be saved in files of other bytes
    digests = ("parameters", "sha256")
    if any(model.get(name) or other.get(name) for name in digests):
        return [name for name in digests if model.get(name) and other.get(name)][:1]
    # of a library's own model these decide what the parameters are
    return [
        name for name in ("name", "weights", "seed") if name in model and name in other
    ]


def _identity(model: Mapping[str, Any], differing: Sequence[str]) -> str:
    """A model and how it differs from another: `resnet18 (weights none)`.

    Args:
        model: the entry `model` of a record.
        differing: keys in which the other one differs. 12 letters of a value are shown.
    """
    text = quoted(model_name(model))
    # the name is there already
    for name in differing:
        if name != "name":
            text += f" ({name} {quoted(str(model.get(name)))[:12]})"
    return text


def kernel_extras(
    record: Mapping[str, Any], pictures: ReadImage
) -> Iterator[tuple[str, Extra]]:
    """The kernels of each convolution.

    Args:
        record: the run.json of the kernels.
        pictures: the kernels, as `read_kernels` reads them.

    Yields:
        The name of the layer, and the picture with a tile, or a row of tiles, for each
        channel.
    """
    for n, row in enumerate(pictures.captures.values()):
        alt = f"{counted(row.maps, 'kernel')} of {row.label}"
        slots = range(len(row.drawn) * row.slice_count)
        tiles = [TileBox(*row.plan.box(slot)) for slot in slots]
        # of a channel with a tile for each input, the first one stands for it
        boxes = dict(zip(row.drawn, tiles[:: row.slice_count], strict=True))
        yield (
            row.layer,
            Extra(
                title="Kernels",
                text=_kernel_text(row),
                picture=PictureView(f"k{n}", pictures, row.file, row.size, alt),
                boxes=boxes,
                tiles=tiles,
                key=color_key(row, record["options"]),
            ),
        )


def _kernel_text(row: Capture) -> str:
    """`3 inputs per channel · 64 kernels · 64×3×7×7 · weights −0.8 to 1.1`."""
    inputs = counted(row.shape[1] if len(row.shape) > 1 else 1, "input")
    mean = "mean over the inputs, " if row.layout == "mean" else ""
    drawn = f"{len(row.drawn)} of " if len(row.drawn) < row.maps else ""
    return (
        f"{mean}{inputs} per channel · {drawn}{counted(row.maps, 'kernel')} · "
        f"{by(row.shape)} · weights {span(row.min, row.max)}"
    )


def _exemplar_extras(
    record: ExemplarRecord, pictures: ReadImage
) -> dict[_Tensor, list[Extra]]:
    """The sheets of each tensor; with `--per-class` several, one for each class.

    Args:
        pictures: of the exemplars, as `exemplar_pictures` reads them.
    """
    extras = defaultdict(list)
    ranked_by = "value" if record.options["by"] == "max" else "mean"
    for n, layer in enumerate(record.layers):
        text = f"the largest {ranked_by} over {counted(record.images.seen, 'image')}"
        if layer.receptive_field.how == "computed":
            text += (
                f"; a unit sees {by(layer.receptive_field.size)} pixels of the input"
            )
        alt = f"Exemplars of all channels of {layer.title}"
        sheet_size = pictures.pixels[layer.sheet]
        extra = Extra(
            title=f"Exemplars: {layer.class_name}" if layer.class_name else "Exemplars",
            text=text,
            picture=PictureView(f"e{n}", pictures, layer.sheet, sheet_size, alt),
            tiles=_sheet_tiles(layer),
            pictures=_exemplar_channels(layer, tile_grid(record.room), pictures),
        )
        extras[_Tensor(layer.label, layer.address.stem)].append(extra)
    return extras


def _sheet_tiles(layer: ExemplarLayer) -> list[TileBox]:
    """Where the tiles are in the sheet of all channels of a layer; a channel has a row of
    square tiles."""
    tiles = []
    for left, top, width, size in filter(None, (row.row for row in layer.channels)):
        for start in range(left, left + width, size + BETWEEN):
            tiles.append(TileBox(start, top, size, size))
    return tiles


def _exemplar_channels(
    layer: ExemplarLayer, grid: TileGrid, pictures: ReadImage
) -> dict[int, TiledPicture]:
    """The pictures of single channels, by channel; one without exemplars has none.

    Args:
        grid: where the tiles are in each picture, the best exemplar first.
    """
    tiled = {}
    for row in layer.channels:
        if row.file:
            tiles = []
            for rank, exemplar in enumerate(row.exemplars):
                box = TileBox(*map(round, grid.cell(rank)))
                text = f"{number(exemplar.value)} {exemplar.image}"
                tiles.append(CaptionedTile(box, text))
            view = PictureView("", pictures, row.file, pictures.pixels[row.file], "")
            tiled[row.channel] = TiledPicture(view, tiles)
    return tiled
