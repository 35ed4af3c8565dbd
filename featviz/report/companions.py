"""What was made of the same model as a run and stands on its pages: audits, kernels,
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
    """What stands on the pages of a run."""

    extras: dict[str, list[Extra]]
    """By the id of the group of a layer's page."""
    audit: AuditView | None


class _Tensor(NamedTuple):
    """A tensor of a layer."""

    layer: str
    stem: str


def read_companions(
    run: ReadRun, pages: Sequence[ReportPage], options: ReportOptions
) -> Companions:
    """Read what `options` names, and the audit in the run's folder.

    Args:
        pages: those of the run's layers.
        options: name the folders; None for those that are not wanted.

    Raises:
        CompareError: something is of another model.
        StoreError: something is of none of the run's layers.
    """
    groups = {}
    for page in pages:
        for group in page.groups:
            groups[_Tensor(page.name, group.stem)] = group.id
    # kernels know layers, not tensors, and audits calls: they stand at the first one
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
    """The pictures of each layer's suspects, and the id of the group where they stand:
    the first one of the layer's call, else that of the page."""
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
    """The kernels of those layers that the run has.

    Args:
        path: the folder of the kernels, as the user named it.
        layers: names of the layers that have pages.
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
    """The audit at a path, or in the run's folder if there is one.

    Args:
        path: None looks into the run's folder.
        layers: names of the run's layers; the view has no others.
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
    """The exemplars of some tensors of a run."""
    record = read_exemplars(path)
    check_model(run, "exemplars", path, record.model)
    sheets = _exemplar_extras(record, exemplar_pictures(path, record))
    shared = {tensor: extras for tensor, extras in sheets.items() if tensor in tensors}
    _check_shared(shared, [tensor.layer for tensor in sheets], "exemplars", path)
    return shared


def _check_shared(
    shared: Collection[object], layers: Iterable[str], option: str, path: Path
) -> None:
    """Refuse kernels or exemplars of which none are of a layer of the run.

    Args:
        shared: those that are of layers of the run.
        layers: all layers that `path` knows, for the hint.
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
    """Refuse what is of another model, and warn where that is not known.

    Models are compared by a digest, whatever they are called, the surest first; where
    neither record has one, as torchvision's own by name, weights and seed.

    Args:
        option: without its dashes; also the command that makes the right one.
        path: as the user named it.
        record: `model` of what was read from `path`.

    Raises:
        CompareError: it is of another model.
    """
    # the parameters come first: the same ones may be saved in files of other bytes
    model = run.record.get("model") or {}
    digests = ("parameters", "sha256")
    compared = [name for name in digests if model.get(name) and record.get(name)][:1]
    # Without weights of a file the name and the seed decide what the numbers are.
    if not any(model.get(name) or record.get(name) for name in digests):
        names = ("name", "weights", "seed")
        compared = [name for name in names if name in model and name in record]
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


def _identity(model: Mapping[str, Any], differing: Sequence[str]) -> str:
    """A model and what tells it from another: `resnet18 (weights none)`.

    Args:
        model: `model` of a record.
        differing: keys in it, by which the two differ. Of a digest the first 12 letters
            are shown.
    """
    text = quoted(model_name(model))
    # the name stands in front anyway
    for name in differing:
        if name != "name":
            text += f" ({name} {quoted(str(model.get(name)))[:12]})"
    return text


def kernel_extras(
    record: Mapping[str, Any], pictures: ReadImage
) -> Iterator[tuple[str, Extra]]:
    """The kernels of each convolution with its name: a tile or a row of tiles for each
    channel.

    Args:
        record: the run.json of the kernels.
        pictures: the folder of the kernels, read like that of an image.
    """
    for n, row in enumerate(pictures.captures.values()):
        alt = f"{counted(row.maps, 'kernel')} of {row.label}"
        size = (row.plan.width, row.plan.height)
        # the first tile: of a kernel of several inputs these stand side by side
        slots = range(len(row.drawn) * row.slice_count)
        tiles = [TileBox(*row.plan.box(slot)) for slot in slots]
        boxes = dict(zip(row.drawn, tiles[:: row.slice_count], strict=True))
        yield (
            row.layer,
            Extra(
                title="Kernels",
                text=_kernel_text(row),
                picture=PictureView(f"k{n}", pictures, row.file, size, alt),
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
    """The sheets of each tensor, one for each class with `--per-class`.

    Args:
        pictures: the folder of the exemplars, whose pictures are read like those of an
            image.
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
    """Where the tiles of all channels are in the sheet of a layer."""
    tiles = []
    for left, top, width, size in filter(None, (row.row for row in layer.channels)):
        for start in range(left, left + width, size + BETWEEN):
            tiles.append(TileBox(start, top, size, size))
    return tiles


def _exemplar_channels(
    layer: ExemplarLayer, grid: TileGrid, pictures: ReadImage
) -> dict[int, TiledPicture]:
    """The pictures of single channels; one without exemplars has none.

    Args:
        grid: where the tiles of each picture are.
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
