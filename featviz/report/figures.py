"""A run's grids as figures, sorted into pages of images and pages of layers.

No figure has its statistics: the page of an image reads those of its image, and a report
never holds those of all images in memory."""

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
"""Tiles in a row up to which a picture takes a third, or two thirds, of a page."""
# The numbers of neighbouring grids stand in one script, since a file for each would be
# slow to load: up to 16 grids of up to 8 images. A layer's page loads twice what it
# shows then, an image's page up to eight times: it has fewer grids.
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
    """What the model saw."""
    row: Capture
    script: str
    """The script that has its numbers."""
    is_other: bool = False
    """Whether it belongs to the run that this one is compared with."""

    @classmethod
    def of(
        cls,
        id: str,
        row: Capture,
        input: PictureView,
        script: str,
        is_other: bool = False,
    ) -> Figure:
        """The grid of a tensor.

        Args:
            id: of its picture, unique in the report, by which the scripts find it.
            row: the tensor, as the manifest has it.
            input: what the model saw, of the same image in the same run.
            script: the name of the script that has its numbers.
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
        """The name of its image."""
        return self.picture.image.name

    @property
    def width_class(self) -> str:
        """How wide it is on a page, as a class of CSS: `small`, `middle` or `whole`, a
        third, two thirds or all of the page."""
        width, height = self.picture.size
        columns = self.row.plan.columns
        if width > _WIDE * height or columns > _MIDDLE:
            return "whole"
        return "small" if columns <= _SMALL else "middle"


@dataclass(frozen=True, slots=True)
class Group:
    """The figures of one tensor of one layer: on the page of an image those of one or two
    runs, on the page of the layer those of all images."""

    id: str
    layer: str
    type: str
    stem: str
    """`output`, `output.call1`."""
    page: str
    """The id of the layer's page."""
    figures: tuple[Figure, ...]
    zeroed: frozenset[int] = frozenset()
    """Channels that interventions set to zero, here or directly before."""

    @property
    def pairs(self) -> Iterator[tuple[Figure, ...]]:
        """The figures of each image: one, or one of each run, that of this run first."""
        # those of an image are neighbours, so that groupby needs no sorting
        for _, figures in groupby(self.figures, key=lambda figure: figure.name):
            yield tuple(figures)

    @property
    def kind(self) -> str:
        """`output`, `grad`: what was captured."""
        return self.figures[0].row.kind

    @property
    def name(self) -> str:
        """`relu`, and `relu.call1` for its second call."""
        return self.layer + self.stem.removeprefix(self.kind)

    @property
    def call(self) -> int:
        """Which call of the layer gave the tensor."""
        return self.figures[0].row.call

    @property
    def of_this_run(self) -> list[Figure]:
        """The figures without those of the run that this one is compared with."""
        return [figure for figure in self.figures if not figure.is_other]

    @property
    def aligned(self) -> bool:
        """Whether all figures show the same channels in the same order."""
        drawn = self.figures[0].row.drawn
        return all(figure.row.drawn == drawn for figure in self.figures)


class MissingLayer(NamedTuple):
    """A layer that an image has no picture of."""

    layer: str
    reason: str


@dataclass(frozen=True)
class ReportPage:
    """A page of one image with all its layers, or of one layer with all images."""

    id: str
    name: str
    """Of the image or of the layer."""
    groups: tuple[Group, ...]
    type: str = ""
    """Of a layer."""
    inputs: Mapping[bool, PictureView] = field(default_factory=dict)
    """What the model saw of an image in this run (False), and in the run that it is
    compared with (True), if that has the image; empty for a layer."""
    missing_layers: Sequence[MissingLayer] = ()
    """Layers that the image lacks."""

    @property
    def image(self) -> ReadImage:
        """The image of an image's page, in this run."""
        return self.inputs[False].image

    @property
    def seen(self) -> dict[bool, PictureView]:
        """`inputs`, without that of the other run where both files are the same."""
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
    """In the model's order."""

    @property
    def tensors(self) -> list[Group]:
        """The groups of all layers' pages, in the order in which their tensors were
        captured: those of the first image, then what only later images have."""
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
    """A layer of the model. A function has the position of the module that calls it."""

    position: int
    name: str


def _script_name(image: int, layer: int, images_per_script: int) -> str:
    """The name of the script that has the grids of an image and a layer.

    Args:
        image, layer: their numbers in the run.
        images_per_script: the images whose grids share a script.
    """
    # with one image a script has 16 layers, with eight or more it has two
    layers_per_script = _GRIDS_PER_SCRIPT // images_per_script
    return f"grids-{image // images_per_script:03d}-{layer // layers_per_script:03d}.js"


def arrange(run: ReadRun, compared_run: ReadRun | None = None) -> ReportPages:
    """Sort the grids of a run into pages of images and of layers.

    Args:
        run: may have no image at all.
        compared_run: the run to compare with, if there is one. Its grids are shown
            beside those of the same image and tensor; what it alone has is on no page.
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
    # all layers first, in the model's order: an image may lack one, or have it later
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
        number: of the image in its run, from 0.
        compared_image: the same image in the run to compare with; None where that has
            it not.
        layer_numbers: the numbers of all layers of the run.
        images_per_script: the images whose grids share a script.
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
    """In the model."""
    zeroed: frozenset[int]
    """The channels that they set to zero."""


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
    """Channels that are set to zero in layers that are not drawn, by the key of the first
    output behind such a layer in the model.

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
    """Channels of each captured output that interventions set to zero: those of the layers
    that they change, and of layers directly behind these that keep channels apart."""
    changed = _changed_layers(image)
    outputs = [row for row in image.captures.values() if row.kind == "output"]
    before = _zeroed_before(changed, outputs)
    zeroed = {}
    # of the output before: the channels that are set to zero in it, and whether it has
    # been through a ReLU since channels were mixed
    passed_on: frozenset[int] = frozenset()
    is_rectified = False
    for row in outputs:
        if row.capture_key in before:
            passed_on = before[row.capture_key]
            is_rectified = False
        is_rectifier = row.type in RECTIFIERS
        keeps_apart = _CHANNELWISE.match(row.type) is not None
        # Between two ReLUs there is always a layer that mixes channels, drawn or not.
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
    """The numbers of the layers of a run, from 0 in the model's order."""
    layers: dict[_LayerKey, None] = {}
    for image in run.images.values():
        for row in image.captures.values():
            layers[_LayerKey(row.index, row.layer)] = None
    # by position alone: the sort is stable, and leaves functions of one module in the
    # order in which they ran
    in_order = sorted(layers, key=lambda layer: layer.position)
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
    """The layers without a picture of an image, each with the reason."""
    manifest = image.manifest
    missing = []
    for skip in manifest.skipped:
        # the model itself has no name
        missing.append(MissingLayer(skip.layer or skip.type, skip.reason))
    for name in manifest.never_ran:
        missing.append(MissingLayer(name, "never ran"))
    return missing


def _layer_page(id: str, groups_by_stem: Mapping[str, Sequence[Group]]) -> ReportPage:
    """The page of a layer: for each of its tensors the figures of all images.

    Args:
        id: of the page.
        groups_by_stem: the groups of the images' pages, by which tensor they show.
    """
    merged = []
    # a group of the page has the fields of that of the first image, but for its figures
    for n, groups in enumerate(groups_by_stem.values()):
        figures = tuple(figures_of(groups))
        merged.append(replace(groups[0], id=f"{id}-{n}", figures=figures))
    return ReportPage(id, merged[0].layer, tuple(merged), merged[0].type)


def figures_of(groups: Iterable[Group]) -> Iterator[Figure]:
    """All figures of some groups."""
    for group in groups:
        yield from group.figures
