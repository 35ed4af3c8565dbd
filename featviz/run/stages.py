"""Chooses the layers of a first look: the first convolution and the end of each stage of a
model.

A forward pass on zeros is cut into units. A unit is a module; but a module that holds
several stages is opened, and its children are units instead. Successive units with maps
of one resolution are a stage, and the last unit of a stage is shown. For ResNet-18:

    unit    conv1  bn1  relu   maxpool  layer1   layer2   layer3   layer4   avgpool  fc
    size    112    112  112    56       56       28       14       7        -        -
    stage   1      1    1      2        2        3        4        5
    shown   conv1       relu            layer1   layer2   layer3   layer4
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from featviz.hooks.capture import forward, hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import list_layers, modules_by_name
from featviz.layout import map_size
from featviz.layout.tracing.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.records import CaptureSite, Layer
from featviz.text import by, layer_named

log = logging.getLogger(__name__)

Size = tuple[int, int]  # height and width of maps
ADDS_NOTHING = {
    "AveragePool",
    "DropPath",
    "Dropout",
    "Flatten",
    "GlobalAveragePool",
    "Identity",
    "MaxPool",
    "Permute",
    "Reshape",
    "Resize",
    "StochasticDepth",
    "Transpose",
    "Unflatten",
    "Upsample",
    "_AdaptiveAvgPoolNd",
    "_AdaptiveMaxPoolNd",
    "_AvgPoolNd",
    "_DropoutNd",
    "_MaxPoolNd",
}
"""Classes, and operators of ONNX, whose outputs show nothing new after the layer before
them."""


class CallSide(NamedTuple):
    """The outputs, or the inputs, of one call of a layer."""

    kind: str
    """`output` or `input`."""
    layer: Layer
    call: int
    """The number of the call of this layer, from 0."""


Shapes: TypeAlias = dict[CallSide, list[list[int]]]
"""The shapes of all tensors that a layer gave or took at a call, in the order in which
they were captured."""


class SeenCall(NamedTuple):
    """One call of a layer in a forward pass."""

    layer: Layer
    size: Size | None
    """The size of the first output that is a map; None if no output is one. For a layer
    with `takes_several` only the first output counts."""
    takes_several: bool
    """Whether the layer takes maps of several sizes, or more than two maps, as the head of
    a detector does."""
    learned: bool
    """Whether the layer has parameters."""


@dataclass(frozen=True)
class Stage:
    """Successive units with maps of one resolution."""

    units: list[SeenCall]
    follows_trunk: bool
    """Whether the stage comes directly after a trunk: a module that holds several stages,
    such as the backbone of a detector."""

    @property
    def size(self) -> Size | None:
        """Height and width of the maps of all its units."""
        return self.units[0].size


def probe(
    model: LoadedModel,
    blank: Sequence[Tensor],
    layers: Sequence[Layer],
    capture_kinds: Sequence[str] = ("output",),
) -> Shapes:
    """Run the model once, and note the shapes of the tensors that its layers give or take.

    Args:
        blank: zeros in the shapes of the model's inputs: a tensor [1, ...] for each.
        layers: the layers to look at, from `list_layers`.
        capture_kinds: `output` notes what layers give; `input` notes the floats that they
            take.

    Returns:
        The shapes at each call of these layers, in the order of the pass.

    Raises:
        FeatvizError: the model fails.
    """
    # only shapes are kept: the tensors of all layers would fill the memory
    shapes: Shapes = {}

    def sink(site: CaptureSite, tensor: Tensor) -> None:
        """Note the shape of a tensor. Nested tensors, and inputs of other types than
        floats, are left out."""
        is_mask = site.kind == "input" and not tensor.is_floating_point()
        if not tensor.is_nested and not is_mask:  # a nested tensor has no shape
            side = CallSide(site.kind, site.layer, site.call)
            shapes.setdefault(side, []).append(list(tensor.shape))

    with (
        in_eval_mode(model.module),
        hooked(model.module, layers, sink, capture_kinds) as recorder,
    ):
        forward(model.module, [arg.to(model.device) for arg in blank], recorder)
    return shapes


def first_look(
    model: LoadedModel, blank: Sequence[Tensor], tensor_layout: Sequence[str]
) -> list[Layer]:
    """Choose the first convolution and the end of each stage. For a model such as a ViT,
    whose blocks all have one resolution, choose all blocks. For a model without maps,
    choose the layers that give vectors.

    Args:
        blank: zeros in the shapes of the model's inputs: a tensor [1, ...] for each.
        tensor_layout: the values of `--tensor-layout`.

    Returns:
        The chosen layers, in the order of `list_layers`. Empty if no layer gives a map or
        a vector; but a model that is a single module is always chosen.

    Raises:
        FeatvizError: the model fails.
    """
    layers = list_layers(model.module)
    book = HintBook(model.module, blank[0].shape, tensor_layout)
    # zeros are traced like an image, since the layout of some tensors is known only then
    with book.traced(model.module, layers):
        shapes = probe(model, blank, layers, ("output", "input"))
    # torchvision's detectors resize their input before their layers see it
    seen_size = book.of_layer(layers[0]).input_size
    height, width = seen_size or blank[0].shape[-2:]
    calls = _calls(model, book, shapes, (height, width))
    tree = CallTree(calls, (height, width))
    chosen = _ends_of_stages(tree)
    if chosen:
        _warn_of_a_small_image(model, tree, shapes)
    else:
        chosen = _layers_of_vectors(shapes)
    # a model that is a single module may give anything, so it is shown in any case
    if not chosen and len(layers) == 1:
        chosen = {*layers}
    return sorted(chosen, key=lambda layer: layer.index)


def _calls(
    model: LoadedModel, book: HintBook, shapes: Shapes, image: Size
) -> list[SeenCall]:
    """All calls of the layers, each with the size of its maps, in the order in which the
    calls finished.

    Args:
        book: hints on layouts, for inputs of this size.
        shapes: the shapes of outputs and inputs, from `probe`.
        image: height and width of the image that the layers see.
    """

    def sizes_of(side: CallSide, tensor_shapes: Sequence[Sequence[int]]) -> list[Size]:
        """The sizes of the tensors that are maps of more than 1 x 1."""
        sizes = []
        for shape in tensor_shapes:
            # [steps, height, width]
            maps = map_size(shape, book.of_shape(side.layer, shape, side.kind))
            if maps is not None and maps[1] * maps[2] > 1:
                sizes.append(maps[1:])
        return sizes

    modules = modules_by_name(model.module)
    calls = []
    for output, given_shapes in shapes.items():
        if output.kind != "output":
            continue
        input = output._replace(kind="input")
        # some heads also take the image and its mask, which are left out here
        features = [
            shape for shape in shapes.get(input, ()) if tuple(shape[-2:]) != image
        ]
        input_sizes = sizes_of(input, features)
        takes_several = len(input_sizes) > 2 or len(set(input_sizes)) > 1
        # The head of a detector returns its boxes first, and then the maps that it took.
        sizes = sizes_of(output, given_shapes[:1] if takes_several else given_shapes)
        size = sizes[0] if sizes else None
        learned = any(True for _ in modules[output.layer.name].parameters())
        calls.append(SeenCall(output.layer, size, takes_several, learned))
    return calls


def _warn_of_a_small_image(model: LoadedModel, tree: CallTree, shapes: Shapes) -> None:
    """Warn if the image is too small for a unit: a kernel of several pixels gets maps of
    1 x 1. The warning names the first such unit."""
    units = set()
    for call in tree.calls:
        # the head of a detector has such kernels at its smallest level, for any image
        if tree.is_unit(call) and call.size is None and not call.takes_several:
            units.add(call.layer.name)
    modules = modules_by_name(model.module)
    for side, tensors in shapes.items():
        module = modules[side.layer.name]
        if side.kind != "input" or not isinstance(module, _ConvNd):
            continue
        unit = tree.within(side.layer.name, units)
        places = [prod(shape[2:]) for shape in tensors]
        if unit and max(places) == 1 < max(module.kernel_size):
            message = (
                "images of %s are too small: maps from %s on are single numbers, and"
                " not taken; --size makes images larger, --layers takes any layer"
            )
            log.warning(message, by(tree.image), layer_named(unit))
            return


def _layers_of_vectors(shapes: Shapes) -> set[Layer]:
    """The layers that give one vector, [1, features]; without the model itself."""
    layers = set()
    for side, outputs in shapes.items():
        is_vector = any(len(shape) == 2 and shape[0] == 1 for shape in outputs)
        # the model itself has the index 0
        if side.kind == "output" and side.layer.index and is_vector:
            layers.add(side.layer)
    return layers


class CallTree:
    """The calls of a forward pass as a tree of modules, which follows from the names of
    the layers. The tree is cut into units."""

    def __init__(self, calls: Sequence[SeenCall], image: Size) -> None:
        """Build the tree, and cut it into units.

        Args:
            calls: all calls, in the order in which they finished.
            image: height and width of the image that the layers see.
        """
        self.calls = calls
        self.image = image
        self.parents = _parents({call.layer.name for call in calls})
        self.children: dict[str | None, list[SeenCall]] = defaultdict(list)
        """The calls whose parent is a module, by the name of the module."""
        self.size_before: dict[str, Size] = {}
        """The size of the maps that go into a module at its first call, by its name."""
        size = image
        for call in calls:
            self.children[self.parents[call.layer.name]].append(call)
            ancestor: str | None = call.layer.name
            # The call of a module finishes after the calls inside it. So the first call
            # inside tells with which maps the modules around it began.
            while ancestor is not None and ancestor not in self.size_before:
                self.size_before[ancestor] = size
                ancestor = self.parents[ancestor]
            size = call.size or size
        self.trunks: set[str] = set()
        """Names of opened modules for which `is_trunk` holds, such as the backbone of a
        detector."""
        self.opened = {""}
        """Names of modules whose children are units instead of them; the model itself,
        with its empty name, is always opened."""
        # depth first, in the order of the pass
        waiting = [*self.children[""]]
        has_maps = False  # whether any unit so far gave maps
        while waiting:
            call = waiting.pop(0)
            if self.is_opened(call, has_maps):
                self.opened.add(call.layer.name)
                if self.is_trunk(call):
                    self.trunks.add(call.layer.name)
                waiting = [*self.children[call.layer.name], *waiting]
            elif call.size is not None:
                has_maps = True

    def is_opened(self, call: SeenCall, has_maps: bool) -> bool:
        """Whether a module is opened, since it holds several stages.

        Args:
            has_maps: whether any unit before the module gave maps.
        """
        name = call.layer.name
        before = self.size_before[name]
        inside = [
            child for child in self.children.get(name, ()) if child.size is not None
        ]
        if not inside or call.takes_several:
            return False
        if self.is_trunk(call):
            return True
        # A module without maps may be a head behind the stages. It is opened if there were
        # no maps before it, or if the resolution changes in it.
        if call.size is None:
            return not has_maps or any(child.size != before for child in inside)
        # A module with maps is opened if blocks at the old resolution come before a change
        # of resolution in it. A block that begins with a convolution and its norm, and
        # then changes the resolution, is not: it has no blocks inside.
        for child in inside:
            if child.size != before:
                return False
            if any(map(self.is_parent, self.children.get(child.layer.name, ()))):
                return any(later.size != before for later in inside)
        return False

    def is_parent(self, call: SeenCall) -> bool:
        """Whether a module has other calls inside."""
        return call.layer.name in self.children

    def is_unit(self, call: SeenCall) -> bool:
        """Whether a module is a unit: it is not opened, and its parent is opened."""
        name = call.layer.name
        return self.parents[name] in self.opened and name not in self.opened

    def is_trunk(self, call: SeenCall) -> bool:
        """Whether a module is a trunk: its children give maps of at least two resolutions
        other than that of its input. A module that holds a trunk is a trunk, too."""
        # the head of a detector gives several resolutions only because it takes several
        if call.takes_several:
            return False
        children = self.children.get(call.layer.name, [])
        across = self.image[1] / self.image[0]
        new = set()
        for child in children:
            if child.size is not None:
                height, width = child.size
                # only maps with the proportions of the image, up to one column
                if abs(width - height * across) <= 1:
                    new.add(child.size)
        new.discard(self.size_before[call.layer.name])
        return len(new) > 1 or any(map(self.is_trunk, children))

    def within(self, name: str | None, names: Collection[str]) -> str | None:
        """The first of a module and the modules around it, from the inside out, whose name
        is in `names`; None if there is none, or `name` is None."""
        while name is not None and name not in names:
            name = self.parents[name]
        return name

    def stages(self) -> list[Stage]:
        """The stages of the model, in order. A stage ends where the resolution changes,
        and where a trunk ends."""
        stages: list[Stage] = []
        trunk = ""
        for call in self.calls:
            name = call.layer.name
            parent = self.parents[name]
            if not self.is_unit(call) or call.size is None:
                continue
            left_trunk = bool(trunk) and not name.startswith(f"{trunk}.")
            trunk = self.within(parent, self.trunks) or ""
            if not stages or stages[-1].size != call.size or left_trunk:
                stages.append(Stage([], left_trunk))
            stages[-1].units.append(call)
        return stages

    def blocks(self, stage: Stage) -> list[Layer]:
        """The blocks of a stage: modules with modules inside, of which the same container
        holds several of one class. A block inside another one is left out."""
        units = {unit.layer.name for unit in stage.units if not unit.takes_several}
        candidates = set()
        for call in self.calls:
            is_inside = self.within(call.layer.name, units) is not None
            if call.size == stage.size and self.is_parent(call) and is_inside:
                candidates.add(call.layer)
        in_row = Counter((_container(layer), layer.type) for layer in candidates)
        blocks: list[Layer] = []
        for layer in sorted(candidates, key=lambda layer: layer.index):
            is_inside = any(layer.name.startswith(f"{block.name}.") for block in blocks)
            if in_row[_container(layer), layer.type] > 1 and not is_inside:
                blocks.append(layer)
        return blocks


def _container(layer: Layer) -> str:
    """The name of the module that holds a layer."""
    return layer.name.rpartition(".")[0]


def _parents(names: Collection[str]) -> dict[str, str | None]:
    """The parent of each module, by name: the innermost module around it that was called,
    so never a ModuleList. The parent of the model itself is None.

    Args:
        names: qualified names of the modules that were called.
    """
    parents: dict[str, str | None] = {"": None}
    for name in names:
        if name:
            above = name.rpartition(".")[0]
            while above and above not in names:
                above = above.rpartition(".")[0]
            parents[name] = above
    return parents


def _ends_of_stages(tree: CallTree) -> set[Layer]:
    """The layers that are shown: the first convolution and, of each stage, the last unit
    with modules inside, else the last unit that changes values. If all blocks are in one
    stage, as in a ViT, all blocks of this stage are shown instead."""
    stages = tree.stages()
    blocks = [tree.blocks(stage) for stage in stages]
    # A ViT has blocks in only one stage, and at least as many blocks as stages. A CNN has
    # blocks in many stages.
    in_one_stage = sum(map(bool, blocks)) == 1 and sum(map(len, blocks)) >= len(stages)
    chosen = {*_first_convolution(tree)}
    for stage, blocks_of_stage in zip(stages, blocks, strict=True):
        if in_one_stage and blocks_of_stage:
            chosen |= {*_every_block(tree, stage, blocks_of_stage)}
        else:
            chosen |= {*(_last_parent(tree, stage) or _last_change(stage))}
    return chosen


def _first_convolution(tree: CallTree) -> list[Layer]:
    """The first convolution, since its maps still look like the image; empty for a model
    without one."""
    for call in tree.calls:
        is_convolution = any(name.startswith("Conv") for name in call.layer.classes)
        if is_convolution and call.size is not None and call.layer.index:
            return [call.layer]
    return []


def _every_block(tree: CallTree, stage: Stage, blocks: Sequence[Layer]) -> list[Layer]:
    """All blocks of a stage, since no change of resolution tells which of them matter;
    and the neck: the last learned module behind them with modules inside and maps of
    their resolution.

    Args:
        blocks: the blocks of the stage, at least one, in the order of the model.
    """
    last = blocks[-1]
    siblings = tree.children[tree.parents[last.name]]
    necks = []
    for call in (*siblings, *stage.units):
        if call.learned and tree.is_parent(call) and call.size == stage.size:
            necks.append(call.layer)
    behind = [layer for layer in necks if layer.index > last.index]
    return [*blocks, *behind[-1:]]


def _last_parent(tree: CallTree, stage: Stage) -> list[Layer]:
    """The last learned unit of a stage that has modules inside; empty if there is none."""
    for unit in reversed(stage.units):
        if unit.learned and tree.is_parent(unit):
            return [unit.layer]
    return []


def _last_change(stage: Stage) -> list[Layer]:
    """The last unit of a stage that changes values. Empty if no such unit is learned, and
    for a stage behind a trunk, such as a norm, which shows nothing new."""
    changing = [
        unit
        for unit in stage.units
        if not ADDS_NOTHING.intersection(unit.layer.classes)
    ]
    if stage.follows_trunk or not any(unit.learned for unit in changing):
        return []
    return [changing[-1].layer]
