"""The layers of a first look: the first convolution and the end of each stage of a
model.

A forward pass on zeros is cut into units, one behind the other: a module is a unit
unless it is opened, since it holds several stages, and then its children stand in its
place. Units of one resolution in a row are a stage, and its last unit is what is shown
of it. For ResNet-18:

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
"""Classes, and operators of ONNX, whose outputs show nothing that the layer before them
does not show."""


class CallSide(NamedTuple):
    """One side of one call of a layer."""

    kind: str
    """`output` or `input`."""
    layer: Layer
    call: int


Shapes: TypeAlias = dict[CallSide, list[list[int]]]
"""The shapes of all tensors that a layer gave or took at a call, in the order of the
pass."""


class SeenCall(NamedTuple):
    """One call of a layer in a forward pass."""

    layer: Layer
    size: Size | None
    """That of its first output that is a map; None where none is, and for the head of a
    detector, which gives something else first."""
    takes_several: bool
    """Whether it takes maps of several sizes or stages, as the head of a detector does.
    """
    learned: bool
    """Whether it has parameters."""


@dataclass(frozen=True)
class Stage:
    """Units of one resolution, one behind the other."""

    units: list[SeenCall]
    follows_trunk: bool
    """Whether a trunk ended before it: a module that holds several stages, such as the
    backbone of a detector."""

    @property
    def size(self) -> Size | None:
        """Height and width of the maps of its units, which all have one size."""
        return self.units[0].size


def probe(
    model: LoadedModel,
    blank: Sequence[Tensor],
    layers: Sequence[Layer],
    capture_kinds: Sequence[str] = ("output",),
) -> Shapes:
    """Run the model once, and note what shapes its layers give and take.

    Args:
        blank: zeros, as the model takes them: a tensor [1, ...] for each input.
        layers: those of `list_layers`, or some of them.
        capture_kinds: `output`, and `input` for the floats that layers take.

    Returns:
        The shapes of the tensors at each call of these layers, in the order of the
        pass.

    Raises:
        FeatvizError: the model fails.
    """
    # shapes alone: the tensors of all layers would fill the memory
    shapes: Shapes = {}

    def sink(site: CaptureSite, tensor: Tensor) -> None:
        """Note the shape of a tensor, unless it is a mask, or nested."""
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
    """The first convolution and the end of each stage. Where the blocks of a model all
    have one resolution, as those of a ViT, and are most of it, each of them is taken. A
    model without maps shows its vectors.

    Args:
        blank: zeros, as the model takes them: a tensor [1, ...] for each input.
        tensor_layout: values of `--tensor-layout`.

    Returns:
        Layers in the order of `list_layers`; empty where none of several gives a map or
        a vector.

    Raises:
        FeatvizError: the model fails.
    """
    layers = list_layers(model.module)
    book = HintBook(model.module, blank[0].shape, tensor_layout)
    # zeros are followed like an image: the layout of some tensors is known by that alone
    with book.traced(model.module, layers):
        shapes = probe(model, blank, layers, ("output", "input"))
    # torchvision's detectors resize what they are given, before their layers see it
    seen_size = book.of_layer(layers[0]).input_size
    height, width = seen_size or blank[0].shape[-2:]
    calls = _calls(model, book, shapes, (height, width))
    tree = CallTree(calls, (height, width))
    chosen = _ends_of_stages(tree)
    if chosen:
        _warn_of_a_small_image(model, tree, shapes)
    else:
        chosen = _layers_of_vectors(shapes)
    # a model that is one module, which may give anything
    if not chosen and len(layers) == 1:
        chosen = {*layers}
    return sorted(chosen, key=lambda layer: layer.index)


def _calls(
    model: LoadedModel, book: HintBook, shapes: Shapes, image: Size
) -> list[SeenCall]:
    """Each call with the resolution of what it gave, in the order in which they
    finished.

    Args:
        book: the hints for inputs of this size.
        shapes: of outputs and inputs, from `probe`.
        image: height and width of what the layers see.
    """

    def sizes_of(side: CallSide, tensor_shapes: Sequence[Sequence[int]]) -> list[Size]:
        """The sizes of those tensors of a call that are maps of more than one place."""
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
        # some heads take the image and its mask as well
        features = [
            shape for shape in shapes.get(input, ()) if tuple(shape[-2:]) != image
        ]
        input_sizes = sizes_of(input, features)
        takes_several = len(input_sizes) > 2 or len(set(input_sizes)) > 1
        # the head of a detector returns its boxes first, and behind them what it took
        sizes = sizes_of(output, given_shapes[:1] if takes_several else given_shapes)
        size = sizes[0] if sizes else None
        learned = any(True for _ in modules[output.layer.name].parameters())
        calls.append(SeenCall(output.layer, size, takes_several, learned))
    return calls


def _warn_of_a_small_image(model: LoadedModel, tree: CallTree, shapes: Shapes) -> None:
    """Warn of the first unit that is no stage, since the image is too small for it: a
    kernel of several places sees one."""
    units = set()
    for call in tree.calls:
        # a detector has such kernels at its smallest level for an image of any size
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
    """Layers that give one vector, but for the model itself."""
    layers = set()
    for side, outputs in shapes.items():
        is_vector = any(len(shape) == 2 and shape[0] == 1 for shape in outputs)
        # the model itself has the index 0
        if side.kind == "output" and side.layer.index and is_vector:
            layers.add(side.layer)
    return layers


class CallTree:
    """The calls of a forward pass as a tree, which is read from the names, cut into
    units."""

    def __init__(self, calls: Sequence[SeenCall], image: Size) -> None:
        """Cut it into units.

        Args:
            calls: in the order in which they finished.
            image: height and width of what the layers see.
        """
        self.calls = calls
        self.image = image
        self.parents = _parents({call.layer.name for call in calls})
        self.children: dict[str | None, list[SeenCall]] = defaultdict(list)
        """The calls right inside a module, by its name."""
        self.size_before: dict[str, Size] = {}
        """The size of the maps that first reach a module, by its name."""
        size = image
        for call in calls:
            self.children[self.parents[call.layer.name]].append(call)
            ancestor: str | None = call.layer.name
            # an inner module finishes before those around it
            while ancestor is not None and ancestor not in self.size_before:
                self.size_before[ancestor] = size
                ancestor = self.parents[ancestor]
            size = call.size or size
        self.trunks: set[str] = set()
        """Names of opened modules that hold several stages of new resolutions, such as
        the backbone of a detector."""
        self.opened = {""}
        """Names of modules whose children stand in their place, the model's own first.
        """
        # depth first, in the order of the pass: `has_maps` is of all units before
        waiting = [*self.children[""]]
        has_maps = False
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
        """Whether the stages of a module are to be looked at one by one.

        Args:
            has_maps: whether a unit before it gave maps.
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
        if call.size is None:  # a head has no maps either, but comes behind the stages
            return not has_maps or any(child.size != before for child in inside)
        # Blocks at the old resolution come before a change. (A block that begins with a
        # convolution and its norm, and then changes the resolution, has no blocks
        # inside.)
        for child in inside:
            if child.size != before:
                return False
            if any(map(self.is_parent, self.children.get(child.layer.name, ()))):
                return any(later.size != before for later in inside)
        return False

    def is_parent(self, call: SeenCall) -> bool:
        """Whether other calls are inside it."""
        return call.layer.name in self.children

    def is_unit(self, call: SeenCall) -> bool:
        """Whether it is not opened, and what is around it is."""
        name = call.layer.name
        return self.parents[name] in self.opened and name not in self.opened

    def is_trunk(self, call: SeenCall) -> bool:
        """Whether a module holds several stages: its children give maps of at least two
        resolutions that it does not take. A wrapper around such a module is one, too."""
        # the head of a detector has a resolution for each input, and is not a trunk
        if call.takes_several:
            return False
        children = self.children.get(call.layer.name, [])
        across = self.image[1] / self.image[0]
        new = set()
        for child in children:
            if child.size is not None:
                height, width = child.size
                # of the image's proportions, give or take a column
                if abs(width - height * across) <= 1:
                    new.add(child.size)
        new.discard(self.size_before[call.layer.name])
        return len(new) > 1 or any(map(self.is_trunk, children))

    def within(self, name: str | None, names: Collection[str]) -> str | None:
        """The module of this name, or the innermost one around it, that is among
        others."""
        while name is not None and name not in names:
            name = self.parents[name]
        return name

    def stages(self) -> list[Stage]:
        """Units with maps of one resolution in a row; the end of a trunk ends a stage,
        too."""
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
        """The outermost modules in a stage that stand in a row with others of their
        class, and hold modules."""
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
    return layer.name.rpartition(".")[0]


def _parents(names: Collection[str]) -> dict[str, str | None]:
    """The innermost called module around each, by name; the model has none. A module
    that is not called (a ModuleList) is no one's parent.

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
    """The layers that are shown: the first convolution, and of each stage its last unit
    that holds modules, else the last that changes values. Where only one stage has
    blocks, as a ViT has, all blocks are shown."""
    stages = tree.stages()
    blocks = [tree.blocks(stage) for stage in stages]
    # A ViT has its blocks in one stage, and little else; a CNN has some in many stages.
    in_one_stage = sum(map(bool, blocks)) == 1 and sum(map(len, blocks)) >= len(stages)
    chosen = {*_first_convolution(tree)}
    for stage, blocks_of_stage in zip(stages, blocks, strict=True):
        if in_one_stage and blocks_of_stage:
            chosen |= {*_every_block(tree, stage, blocks_of_stage)}
        else:
            chosen |= {*(_last_parent(tree, stage) or _last_change(stage))}
    return chosen


def _first_convolution(tree: CallTree) -> list[Layer]:
    """The first convolution, since its maps still look like the image."""
    for call in tree.calls:
        is_convolution = any(name.startswith("Conv") for name in call.layer.classes)
        if is_convolution and call.size is not None and call.layer.index:
            return [call.layer]
    return []


def _every_block(tree: CallTree, stage: Stage, blocks: Sequence[Layer]) -> list[Layer]:
    """Each block, since no change of resolution tells which of them end a stage; and
    the last module behind them at their resolution, which is the neck.

    Args:
        blocks: those of the stage, at least one, in the order of the model.
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
    """The last unit that holds modules: a whole stage of a CNN, or its last block."""
    for unit in reversed(stage.units):
        if unit.learned and tree.is_parent(unit):
            return [unit.layer]
    return []


def _last_change(stage: Stage) -> list[Layer]:
    """The last unit that changes values, where some unit is learned. A norm behind all
    stages shows what the last of them showed."""
    changing = [
        unit
        for unit in stage.units
        if not ADDS_NOTHING.intersection(unit.layer.classes)
    ]
    if stage.follows_trunk or not any(unit.learned for unit in changing):
        return []
    return [changing[-1].layer]
