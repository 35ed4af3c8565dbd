"""A run's grids as figures, sorted by image and by layer.

Statistics are in none of these: the page of an image reads its own, and no report holds
all."""

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

# a picture wider than this many times its height gets a row of its own
_WIDE = 3.0
# tiles in a row up to which a picture takes a third, or two thirds, of a page
_SMALL = 8
_MIDDLE = 16
# The numbers of neighbouring grids stand in one script, since a file for each would be
# slow to load: up to 16 grids of up to 8 images. A layer's page loads twice what it
# shows then, an image's page up to eight times: it has fewer grids.
_GRIDS_PER_SCRIPT = 16
IMAGES_PER_SCRIPT = 8
# types of layers that make each channel of one channel, modules and functions
_CHANNELWISE = re.compile(
    r"(fn:)?(relu|batch_?norm|(adaptive_?)?(max|avg)_?pool|dropout|identity)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A grid on a page."""

    picture: PictureView
    input: PictureView
    """What the model saw."""
    row: Capture
    script: str
    """The script that has its numbers."""
    other: bool = False
    """Whether it belongs to the run that this one is compared with."""

    @classmethod
    def of(
        cls, id: str, row: Capture, input: PictureView, script: str, other: bool = False
    ) -> Figure:
        """The grid of a tensor, from the same image as an input.

        Args:
            id: of its picture, unique in the report: the scripts know it by this.
            row: the tensor, as the manifest has it.
            input: what the model saw, in the run of the tensor.
            script: the name of the script that has its numbers.
            other: whether it belongs to the run that is compared with.
        """
        image = input.image
        alt = (
            f"{tile_count(row)} of {row.label}, {row.capture_key.stem}, of {image.name}"
        )
        size = (row.plan.width, row.plan.height)
        picture = PictureView(id, image, row.file, size, alt, input.home)
        return cls(picture, input, row, script, other)

    @property
    def name(self) -> str:
        """Its image."""
        return self.picture.image.name

    @property
    def width_class(self) -> str:
        """How much room its tiles need to be seen: `small` and `middle`, a third and two
        thirds of a page; or `whole`, a row of its own. They are classes of CSS."""
        width, height = self.picture.size
        columns = self.row.plan.columns
        if width > _WIDE * height or columns > _MIDDLE:
            return "whole"
        return "small" if columns <= _SMALL else "middle"


@dataclass(frozen=True, slots=True)
class Group:
    """Figures of one tensor of one layer, of several images or of two runs."""

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
        """The figures of each image: one, or those of two runs, this one first."""
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
        return [figure for figure in self.figures if not figure.other]

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
    """One image with all its layers, or one layer of all images."""

    id: str
    name: str
    groups: tuple[Group, ...]
    type: str = ""
    inputs: Mapping[bool, PictureView] = field(default_factory=dict)
    """What the model saw of an image in this run (False), and in the other (True), if
    it has it."""
    missing_layers: Sequence[MissingLayer] = ()
    """Layers that the image lacks."""

    @property
    def image(self) -> ReadImage:
        """The image in this run."""
        return self.inputs[False].image

    @property
    def seen(self) -> dict[bool, PictureView]:
        """What the model saw: one picture where both runs saw the same."""
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


class _LayerKey(NamedTuple):
    """A layer of the model; functions share the position of the module that calls them."""

    position: int
    name: str


def _script_name(image: int, layer: int, images_per_script: int) -> str:
    """The script with the grids of an image and a layer, by their numbers."""
    # with one image a script has 16 layers, with eight or more it has two of each
    layers_per_script = _GRIDS_PER_SCRIPT // images_per_script
    return f"grids-{image // images_per_script:03d}-{layer // layers_per_script:03d}.js"


def arrange(run: ReadRun, compared_run: ReadRun | None = None) -> ReportPages:
    """Sort the grids of a run into pages of images and of layers.

    Args:
        run: may have no image at all.
        compared_run: whose grids stand with those of the same image and tensor. What
            it alone has is on no page.
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
    # in the model's order, although an image may lack a layer, or have it later
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
        compared_image: the same in the run to compare with; None where it lacks it.
        layer_numbers: of all layers of the run.
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
            figures.append(Figure.of(id, other_row, inputs[True], script, other=True))
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
    """Channels that are set to zero in layers that are not drawn, by the first output
    behind such a layer in the model."""
    drawn = {row.layer for row in outputs}
    zeroed: dict[CaptureKey, frozenset[int]] = {}
    for name, layer in changed.items():
        behind = [row.capture_key for row in outputs if row.index > layer.position]
        if name not in drawn and behind:
            zeroed[behind[0]] = layer.zeroed.union(zeroed.get(behind[0], ()))
    return zeroed


def _zeroed_channels(image: ReadImage) -> dict[CaptureKey, frozenset[int]]:
    """Channels of outputs that interventions set to zero: in the layers that they
    change, and in what stands directly behind these and keeps channels apart."""
    changed = _changed_layers(image)
    outputs = [row for row in image.captures.values() if row.kind == "output"]
    before = _zeroed_before(changed, outputs)
    zeroed = {}
    passed_on: frozenset[int] = frozenset()
    is_rectified = False
    for row in outputs:
        if row.capture_key in before:
            passed_on = before[row.capture_key]
            is_rectified = False
        is_rectifier = row.type in RECTIFIERS
        keeps_apart = _CHANNELWISE.match(row.type) is not None
        # A ReLU behind another one has a layer before it that mixes channels, be it drawn
        # or not.
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
    """The layers of a run in the model's order, numbered."""
    layers: dict[_LayerKey, None] = {}
    for image in run.images.values():
        for row in image.captures.values():
            layers[_LayerKey(row.index, row.layer)] = None
    # by position alone: the sort is stable, and leaves functions of one module in the
    # order in which they ran
    in_order = sorted(layers, key=lambda layer: layer.position)
    return {layer: number for number, layer in enumerate(in_order)}


def input_view(id: str, image: ReadImage, home: str) -> PictureView:
    """The picture of what the model saw of an image.

    Args:
        home: the id of the image's page.
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
    """The page of a layer: for each of its tensors the figures of all images."""
    merged = []
    # what the groups of a tensor share is that of the first image that has it
    for n, groups in enumerate(groups_by_stem.values()):
        figures = tuple(figures_of(groups))
        merged.append(replace(groups[0], id=f"{id}-{n}", figures=figures))
    return ReportPage(id, merged[0].layer, tuple(merged), merged[0].type)


def figures_of(groups: Iterable[Group]) -> Iterator[Figure]:
    """All figures of some groups."""
    for group in groups:
        yield from group.figures
