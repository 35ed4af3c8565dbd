"""The grids of a run as figures, sorted into the pages of images and of layers.

A figure does not hold the statistics of its tensor: the page of an image reads them, so
that the statistics of all images are never in memory at the same time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from featviz.records import RECTIFIERS, CaptureKey
from featviz.report.descriptions import tile_count
from featviz.report.links import PictureView
from featviz.rundir import INPUT_FILE
from featviz.rundir.image import ReadImage, same_content
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import Capture

_WIDE = 3.0
"""A picture wider than this many times its height gets a whole row of the page."""
_SMALL = 8
_MIDDLE = 16
"""A picture of at most _SMALL tiles in a row takes a third of a page, one of at most
_MIDDLE two thirds."""
# A file for the numbers of each grid would be slow to load. So a script has up to 16
# grids, of up to 8 images. The page of a layer then loads twice the grids that it shows,
# and the page of an image, which shows fewer, up to eight times.
_GRIDS_PER_SCRIPT = 16
IMAGES_PER_SCRIPT = 8
_CHANNELWISE = re.compile(
    r"(fn:)?(relu|batch_?norm|(adaptive_?)?(max|avg)_?pool|dropout|identity)",
    re.IGNORECASE,
)
"""Types of modules and functions that make each output channel of one input channel."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A grid on a page."""

    picture: PictureView
    input: PictureView
    """The picture of what the model saw."""
    row: Capture
    script: str
    """The name of the script with the numbers of the grid."""
    is_other: bool = False
    """Whether the figure belongs to the run that this one is compared with."""

    @classmethod
    def of(
        cls,
        id: str,
        row: Capture,
        input: PictureView,
        script: str,
        is_other: bool = False,
    ) -> Figure:
        """Make the figure of a tensor.

        Args:
            id: the id of the grid's picture in HTML, unique in the report; scripts find
                the picture by it.
            row: the row of the tensor in the manifest.
            input: the picture of what the model saw, of the same image in the same run.
            script: the name of the script with the numbers of the grid.
            is_other: whether the figure belongs to the run that this one is compared with.
        """
        image = input.image
        alt = (
            f"{tile_count(row)} of {row.label}, {row.capture_key.stem}, of {image.name}"
        )
        picture = PictureView(id, image, row.file, row.size, alt, input.home)
        return cls(picture, input, row, script, is_other)

    @property
    def name(self) -> str:
        """The name of the image."""
        return self.picture.image.name

    @property
    def width_class(self) -> str:
        """The class of CSS for the width of the figure: `small`, `middle` or `whole` for a
        third, two thirds or all of the page."""
        width, height = self.picture.size
        columns = self.row.plan.columns
        if width > _WIDE * height or columns > _MIDDLE:
            return "whole"
        return "small" if columns <= _SMALL else "middle"


@dataclass(frozen=True, slots=True)
class Group:
    """The figures of one tensor of one layer. On the page of an image, a group has the
    figures of one or two runs; on the page of the layer, the figures of all images."""

    id: str
    """The id of the group in HTML."""
    layer: str
    """The name of the layer; for the model itself, its class."""
    type: str
    """The class of the layer."""
    stem: str
    """The tensor of the layer: `output`, `output.call1`."""
    page: str
    """The id of the layer's page."""
    figures: tuple[Figure, ...]
    zeroed: frozenset[int] = frozenset()
    """The channels that interventions set to zero, in this layer or directly before."""

    @property
    def pairs(self) -> Iterator[tuple[Figure, ...]]:
        """The figures of each image: that of this run, and then that of the run that it is
        compared with, if there is one."""
        # the figures of an image are neighbours, so groupby needs no sorting
        for _, figures in groupby(self.figures, key=lambda figure: figure.name):
            yield tuple(figures)

    @property
    def kind(self) -> str:
        """The kind of the capture: `output`, `grad`."""
        return self.figures[0].row.kind

    @property
    def name(self) -> str:
        """The name of the tensor: `relu`, or `relu.call1` for the second call."""
        return self.layer + self.stem.removeprefix(self.kind)

    @property
    def call(self) -> int:
        """The number of the call that gave the tensor, from 0."""
        return self.figures[0].row.call

    @property
    def of_this_run(self) -> list[Figure]:
        """The figures of this run, without those of the run that it is compared with."""
        return [figure for figure in self.figures if not figure.is_other]

    @property
    def aligned(self) -> bool:
        """Whether all figures show the same channels in the same order."""
        drawn = self.figures[0].row.drawn
        return all(figure.row.drawn == drawn for figure in self.figures)


class MissingLayer(NamedTuple):
    """A layer without a picture for an image."""

    layer: str
    reason: str
    """Why there is no picture."""


@dataclass(frozen=True)
class ReportPage:
    """A page of one image with all its layers, or of one layer with all images."""

    id: str
    """The id of the page: `image-004`, `layer-003`."""
    name: str
    """The name of the image, or of the layer."""
    groups: tuple[Group, ...]
    type: str = ""
    """The class of the layer; empty for the page of an image."""
    inputs: Mapping[bool, PictureView] = field(default_factory=dict)
    """The pictures of what the model saw of the image: by False in this run; by True in
    the run that it is compared with, if that has the image. Empty for the page of a
    layer."""
    missing_layers: Sequence[MissingLayer] = ()
    """The layers without a picture for this image."""

    @property
    def image(self) -> ReadImage:
        """The image in this run; only for the page of an image."""
        return self.inputs[False].image

    @property
    def seen(self) -> dict[bool, PictureView]:
        """The `inputs` to show: if both files are the same, only that of this run."""
        views = dict(self.inputs)
        if len(views) > 1:
            files = [(view.image, view.file) for view in views.values()]
            if same_content(files[0], files[1]):
                del views[True]
        return views


class ReportPages(NamedTuple):
    """The pages of a run."""

    images: Sequence[ReportPage]
    layers: Sequence[ReportPage]
    """The pages of layers, in the order in which they ran."""

    @property
    def tensors(self) -> list[Group]:
        """The groups of the pages of all layers, in the order in which the tensors of the
        first image were captured; then groups that only later images have."""
        groups = {}
        for page in self.layers:
            for group in page.groups:
                groups[page.id, group.stem] = group
        in_order = {}
        for page in self.images:
            for group in page.groups:
                in_order[group.page, group.stem] = groups[group.page, group.stem]
        return list(in_order.values())


class _LayerKey(NamedTuple):
    """A layer of the model."""

    position: int
    """The position of the module in the model; for a function, of the module that calls
    it."""
    name: str


def _script_name(image: int, layer: int, images_per_script: int) -> str:
    """The name of the script that has the grids of a layer for an image.

    Args:
        image, layer: the numbers of the image and of the layer in the run.
        images_per_script: how many images share a script.
    """
    # a script has 16 layers of one image, or two layers of eight images
    layers_per_script = _GRIDS_PER_SCRIPT // images_per_script
    return f"grids-{image // images_per_script:03d}-{layer // layers_per_script:03d}.js"


def arrange(run: ReadRun, compared_run: ReadRun | None = None) -> ReportPages:
    """Sort the grids of a run into pages of images and of layers.

    Args:
        run: the run of the report; it may be without images.
        compared_run: the run to compare with, or None. Each of its grids is shown next to
            the grid of the same image and tensor in `run`; grids without such a partner
            are not shown.
    """
    numbers = _layer_numbers(run)
    images_per_script = max(1, min(IMAGES_PER_SCRIPT, len(run.images)))
    image_pages = []
    for number, image in enumerate(run.images.values()):
        compared_image = None
        if compared_run is not None:
            compared_image = compared_run.images.get(image.name)
        image_pages.append(
            _image_page(number, image, compared_image, numbers, images_per_script)
        )
    # the dict has all layers in the order of their numbers: an image may lack some
    groups_of_layer: dict[str, dict[str, list[Group]]] = {
        _layer_id(number): {} for number in numbers.values()
    }
    for page in image_pages:
        for group in page.groups:
            groups_of_layer[group.page].setdefault(group.stem, []).append(group)
    layer_pages = [_layer_page(id, groups) for id, groups in groups_of_layer.items()]
    return ReportPages(image_pages, layer_pages)


def _image_page(
    number: int,
    image: ReadImage,
    compared_image: ReadImage | None,
    layer_numbers: Mapping[_LayerKey, int],
    images_per_script: int,
) -> ReportPage:
    """The page of an image.

    Args:
        number: the number of the image in the run, from 0.
        image: the image in the run.
        compared_image: the image in the run to compare with; None if that run does not
            have the image, or there is no such run.
        layer_numbers: the numbers of all layers of the run.
        images_per_script: how many images share a script.
    """
    page_id = f"image-{number:03d}"
    inputs = {False: input_view(f"p{number}-i", image, page_id)}
    compared_rows = {}
    if compared_image is not None:
        inputs[True] = input_view(f"o{number}-i", compared_image, page_id)
        for position, row in enumerate(compared_image.captures.values()):
            tensor = (row.layer, row.capture_key.stem)
            compared_rows[tensor] = (position, row)
    groups = []
    zeroed = _zeroed_channels(image)
    for position, row in enumerate(image.captures.values()):
        layer_number = layer_numbers[_LayerKey(row.index, row.layer)]
        stem = row.capture_key.stem
        script = _script_name(number, layer_number, images_per_script)
        figures = [Figure.of(f"p{number}-{position}", row, inputs[False], script)]
        partner = compared_rows.get((row.layer, stem))
        if partner is not None:
            other_position, other_row = partner
            id = f"o{number}-{other_position}"
            figures.append(
                Figure.of(id, other_row, inputs[True], script, is_other=True)
            )
        group = Group(
            id=f"{page_id}-{position}",
            layer=row.label,
            type=row.type,
            stem=stem,
            page=_layer_id(layer_number),
            figures=tuple(figures),
            zeroed=zeroed.get(row.capture_key, frozenset()),
        )
        groups.append(group)
    return ReportPage(
        id=page_id,
        name=image.name,
        groups=tuple(groups),
        inputs=inputs,
        missing_layers=_missing_layers(image),
    )


class _ChangedLayer(NamedTuple):
    """A layer that interventions change."""

    position: int
    """The position of the layer in the model."""
    zeroed: frozenset[int]
    """The channels that interventions set to zero."""


def _changed_layers(image: ReadImage) -> dict[str, _ChangedLayer]:
    """The layers that interventions change, by name."""
    layers: dict[str, _ChangedLayer] = {}
    for change in image.manifest.interventions:
        for name, position in change.layers.items():
            layer = layers.get(name, _ChangedLayer(position, frozenset()))
            layers[name] = layer._replace(zeroed=layer.zeroed.union(change.zeroed))
    return layers


def _zeroed_before(
    changed: Mapping[str, _ChangedLayer], outputs: Sequence[Capture]
) -> dict[CaptureKey, frozenset[int]]:
    """The channels that are set to zero in layers without a captured output, by the key of
    the first captured output behind that layer in the model.

    Args:
        changed: the layers that interventions change, by name.
        outputs: the captured outputs of an image.
    """
    drawn = {row.layer for row in outputs}
    zeroed: dict[CaptureKey, frozenset[int]] = {}
    for name, layer in changed.items():
        behind = [row.capture_key for row in outputs if row.index > layer.position]
        if name not in drawn and behind:
            zeroed[behind[0]] = layer.zeroed.union(zeroed.get(behind[0], ()))
    return zeroed


def _zeroed_channels(image: ReadImage) -> dict[CaptureKey, frozenset[int]]:
    """The channels that interventions set to zero in each captured output, by its key. A
    channel that is zero in one layer counts as zero in the layers behind it, up to the
    first one that mixes channels."""
    changed = _changed_layers(image)
    outputs = [row for row in image.captures.values() if row.kind == "output"]
    before = _zeroed_before(changed, outputs)
    zeroed = {}
    # The state of the previous output: the channels that are zero in it, and whether it
    # went through a ReLU since a layer mixed channels.
    passed_on: frozenset[int] = frozenset()
    is_rectified = False
    for row in outputs:
        if row.capture_key in before:
            passed_on = before[row.capture_key]
            is_rectified = False
        is_rectifier = row.type in RECTIFIERS
        keeps_apart = _CHANNELWISE.match(row.type) is not None
        # Between two ReLUs there must be a layer that mixes channels, even if it has no
        # captured output.
        if not keeps_apart or (is_rectifier and is_rectified):
            passed_on = frozenset()
        if row.layer in changed:
            passed_on |= changed[row.layer].zeroed
        is_rectified = is_rectifier or (is_rectified and keeps_apart)
        zeroed[row.capture_key] = passed_on
    return zeroed


def _layer_id(number: int) -> str:
    """The id of a layer's page."""
    return f"layer-{number:03d}"


def _layer_numbers(run: ReadRun) -> dict[_LayerKey, int]:
    """The numbers of the layers of a run, from 0 in the order in which they ran."""
    in_order: list[_LayerKey] = []
    for image in run.images.values():
        layers = {
            _LayerKey(row.index, row.layer): None for row in image.captures.values()
        }
        if layers.keys() <= set(in_order):
            continue
        # what no image before had comes behind the layer that ran before it in this one
        position = 0
        for layer in layers:
            if layer in in_order:
                position = in_order.index(layer) + 1
            else:
                in_order.insert(position, layer)
                position += 1
    return {layer: number for number, layer in enumerate(in_order)}


def input_view(id: str, image: ReadImage, home: str) -> PictureView:
    """The view of the picture that shows what the model saw of an image.

    Args:
        id: the id of the picture in HTML.
        image: the image, as it was read from its run.
        home: the id of the image's page; empty where the report has only one page.
    """
    alt = f"What the model saw of {image.name}"
    return PictureView(id, image, INPUT_FILE, image.input_size, alt, home)


def _missing_layers(image: ReadImage) -> list[MissingLayer]:
    """The layers without a picture for an image, each with the reason."""
    manifest = image.manifest
    missing = []
    for skip in manifest.skipped:
        # the model itself has no name
        missing.append(MissingLayer(skip.layer or skip.type, skip.reason))
    for name in manifest.never_ran:
        missing.append(MissingLayer(name, "never ran"))
    return missing


def _layer_page(id: str, groups_by_stem: Mapping[str, Sequence[Group]]) -> ReportPage:
    """The page of a layer: for each of its tensors, a group with the figures of all
    images.

    Args:
        id: the id of the page.
        groups_by_stem: the groups on the pages of images, by the stem of the tensor.
    """
    merged = []
    # but for its id and its figures, a merged group is that of the first image
    for n, groups in enumerate(groups_by_stem.values()):
        figures = tuple(figures_of(groups))
        merged.append(replace(groups[0], id=f"{id}-{n}", figures=figures))
    return ReportPage(id, merged[0].layer, tuple(merged), merged[0].type)


def figures_of(groups: Iterable[Group]) -> Iterator[Figure]:
    """All figures of some groups."""
    for group in groups:
        yield from group.figures
