"""Companions of a run: an audit, kernels and exemplars of the same model, which the report
shows on the pages of the run."""

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
    """What the pages of a run show besides its maps."""

    extras: dict[str, list[Extra]]
    """Pictures for each tensor, by the id of its group on the page of the layer."""
    audit: AuditView | None
    """The audit; None without one."""


class _Tensor(NamedTuple):
    """A tensor of a layer."""

    layer: str
    """The label of the layer."""
    stem: str
    """The tensor of the layer: `output.call1`."""


def read_companions(
    run: ReadRun, pages: Sequence[ReportPage], options: ReportOptions
) -> Companions:
    """Read the kernels, exemplars and audit that `options` names. If it names no audit, an
    audit in the run's folder is read.

    Args:
        pages: the pages of all layers of the run.

    Raises:
        CompareError: a result is of another model.
        StoreError: kernels or exemplars have no layer in common with the run, or a result
            cannot be read.
    """
    groups = {}
    for page in pages:
        for group in page.groups:
            groups[_Tensor(page.name, group.stem)] = group.id
    # kernels belong to a layer: they are shown with its first tensor
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
    """Find the group that shows the suspects of a layer: the first group of the audited
    call, else the first group of the page. Layers without a page are left out.

    Yields:
        The id of the group, and the pictures of the suspects.
    """
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
    """Read the kernels in a folder, and return those of the run's layers, by layer.

    Args:
        path: the folder that the user named.
        layers: the names of the layers that have pages.

    Raises:
        CompareError, StoreError: as for `read_companions`.
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
    """Read the audit at a path, or in the run's folder; None if the run's folder holds no
    audit.

    Args:
        path: the audit.json, or its folder, that the user named; None for the run's
            folder.
        layers: the names of the layers that have pages.

    Raises:
        CompareError, StoreError: as for `read_companions`.
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
    """Read the exemplars in a folder, and return those of the run's tensors, by tensor.

    Args:
        path: the folder that the user named.
        tensors: the tensors that have groups on pages.

    Raises:
        CompareError, StoreError: as for `read_companions`.
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
        shared: the layers or tensors that the folder and the run have in common.
        layers: all layers in the folder, for the hint.
        option: `kernels` or `exemplars`.
        path: the folder that the user named.

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
    """Refuse a result of another model than the run's. Warn if the records do not tell
    whether the models are the same.

    Args:
        option: the option that names the result, without its dashes. A command with the
            same name makes such results.
        path: the path of the result that the user named.
        record: the entry `model` in the record of the result.

    Raises:
        CompareError: the result is of another model.
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
    """The keys by which the entries `model` of two records are compared. If both have the
    same kind of digest, this is the key; if neither has any, name, weights and seed, as
    far as both have them. Empty if the entries cannot be compared."""
    # The digest of the parameters is preferred: two files may differ, and hold the same
    # parameters.
    digests = ("parameters", "sha256")
    if any(model.get(name) or other.get(name) for name in digests):
        return [name for name in digests if model.get(name) and other.get(name)][:1]
    # these determine the parameters of a library's model
    return [
        name for name in ("name", "weights", "seed") if name in model and name in other
    ]


def _identity(model: Mapping[str, Any], differing: Sequence[str]) -> str:
    """A model and how it differs from another: `resnet18 (weights none)`.

    Args:
        model: the entry `model` of a record.
        differing: the keys in which the other model differs. Of each value, 12 characters
            are shown.
    """
    text = quoted(model_name(model))
    # the text begins with the name already
    for name in differing:
        if name != "name":
            text += f" ({name} {quoted(str(model.get(name)))[:12]})"
    return text


def kernel_extras(
    record: Mapping[str, Any], pictures: ReadImage
) -> Iterator[tuple[str, Extra]]:
    """The pictures of the kernels of all convolutions.

    Args:
        record: the run.json of the kernels.
        pictures: the pictures, from `read_kernels`.

    Yields:
        The name of the layer, and its picture, which has a tile, or a row of tiles, for
        each channel.
    """
    for n, row in enumerate(pictures.captures.values()):
        alt = f"{counted(row.maps, 'kernel')} of {row.label}"
        slots = range(len(row.drawn) * row.slice_count)
        tiles = [TileBox(*row.plan.box(slot)) for slot in slots]
        # a channel may have a tile for each input: the page crops the first one
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
    """The text below a picture of kernels:
    `3 inputs per channel · 64 kernels · 64×3×7×7 · weights −0.8 to 1.1`."""
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
    """The sheets of exemplars of each tensor: one, or with `--per-class` one for each
    class.

    Args:
        record: the content of exemplars.json.
        pictures: the pictures of the exemplars, from `exemplar_pictures`.
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
    """The places of all tiles in the sheet of a layer, in which each channel has a row of
    square tiles."""
    tiles = []
    for left, top, width, size in filter(None, (row.row for row in layer.channels)):
        for start in range(left, left + width, size + BETWEEN):
            tiles.append(TileBox(start, top, size, size))
    return tiles


def _exemplar_channels(
    layer: ExemplarLayer, grid: TileGrid, pictures: ReadImage
) -> dict[int, TiledPicture]:
    """The pictures of single channels, by channel; channels without exemplars are left
    out.

    Args:
        grid: the places of the tiles in each picture, the best exemplar first.
        pictures: the pictures of the exemplars, from `exemplar_pictures`.
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
