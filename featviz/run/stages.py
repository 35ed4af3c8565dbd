"""The layers of a first look: the first convolution and the end of each stage of a model.

A forward pass on zeros is cut into units, one behind the other: a module is a unit unless it is a
trunk, which holds several stages, and then its children stand in its place. Units of one resolution
in a row are a run, and the last of them is its end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from featviz.hooks.capture import forward, hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import list_layers, modules_by_name
from featviz.layout import map_size
from featviz.layout.tracing.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.records import CaptureSite, Layer

Size = tuple[int, int]  # height and width
ADDS_NOTHING = {
    *("DropPath", "Flatten", "Identity", "Permute", "StochasticDepth", "Unflatten", "Upsample"),
    *("_AdaptiveAvgPoolNd", "_AdaptiveMaxPoolNd", "_AvgPoolNd", "_DropoutNd", "_MaxPoolNd"),
}
"""Classes whose outputs show nothing that the layer before them does not show."""


class Ran(NamedTuple):
    """One call of a layer in a forward pass."""

    layer: Layer
    size: Size | None
    """Height and width of the first of its outputs that is a map; None where none is, and for the
    head of a detector, which gives something else first."""
    takes_several: bool  # true for the head of a detector: it takes maps of several sizes or stages
    learned: bool


def probe(
    model: LoadedModel,
    blank: Sequence[Tensor],
    layers: Sequence[Layer],
    kinds: Sequence[str] = ("output",),
) -> dict[tuple[str, Layer, int], list[list[int]]]:
    """Run the model once on `blank`: the shapes of what each call of these layers gave (`output`),
    or of the floats that it took (`input`), by kind, layer and call, in the order of the pass."""
    ran: dict[tuple[str, Layer, int], list[list[int]]] = {}

    def sink(site: CaptureSite, tensor: Tensor) -> None:
        if tensor.is_nested or (site.kind == "input" and not tensor.is_floating_point()):
            return  # has no shape, or is a mask
        ran.setdefault((site.kind, site.layer, site.call), []).append(list(tensor.shape))

    with in_eval_mode(model.module), hooked(model.module, layers, sink, kinds) as recorder:
        forward(model.module, [arg.to(model.device) for arg in blank], recorder)
    return ran


def first_look(
    model: LoadedModel, blank: Sequence[Tensor], tensor_layout: Sequence[str]
) -> list[Layer]:
    """The first convolution and the end of each stage. Where the blocks of a model all have one
    resolution, as those of a ViT, and are most of it, each of them is taken."""
    layers, book = list_layers(model.module), HintBook(model.module, blank[0].shape, tensor_layout)
    with book.traced(model.module, layers):
        ran = probe(model, blank, layers, ("output", "input"))
    height, width = book.of_layer(layers[0]).input_size or blank[0].shape[-2:]

    def size_of(layer: Layer, shape: Sequence[int], side: str) -> Size | None:
        """Height and width of maps; None where they are no maps, or have one place."""
        found = map_size(shape, book.of_shape(layer, shape, side))
        return found[1:] if found is not None and found[1] * found[2] > 1 else None

    modules, calls, vectors = modules_by_name(model.module), list[Ran](), set[Layer]()
    for (kind, layer, number), given in ran.items():
        if kind != "output":
            continue
        taken = ran.get(("input", layer, number), [])
        beside_image = [shape for shape in taken if shape[-2:] != [height, width]]  # and its mask
        maps = [size for shape in beside_image if (size := size_of(layer, shape, "input"))]
        several = len(maps) > 2 or len(set(maps)) > 1
        sizes = [size_of(layer, shape, "output") for shape in given]
        size = sizes[0] if several else next((size for size in sizes if size is not None), None)
        learned = next(modules[layer.name].parameters(), None) is not None
        calls.append(Ran(layer, size, several, learned))
        if layer.index and any(len(shape) == 2 and shape[0] == 1 for shape in given):
            vectors.add(layer)
    alone = set(layers if len(layers) == 1 else ())  # a model that is one layer
    chosen = _stages(_Pass(calls, (height, width))) or vectors or alone
    return sorted(chosen, key=lambda layer: layer.index)


class _Pass:
    """A forward pass as a tree of calls; the tree is read from the names."""

    def __init__(self, calls: Sequence[Ran], image: Size) -> None:
        """Cut it into units; the calls come in the order in which they finished."""
        names = {call.layer.name for call in calls}
        self.calls, self.image = calls, image
        self.around: dict[str, str | None] = {"": None}  # the innermost called module around each
        for name in names - {""}:
            above = name.rpartition(".")[0]
            while above and above not in names:
                above = above.rpartition(".")[0]
            self.around[name] = above
        self.children: dict[str | None, list[Ran]] = defaultdict(list)
        self.before: dict[str, Size] = {}  # the resolution at which each is reached first
        now = image
        for call in calls:
            self.children[self.around[call.layer.name]].append(call)
            outer: str | None = call.layer.name
            while outer is not None and outer not in self.before:
                self.before[outer] = now
                outer = self.around[outer]
            now = call.size or now
        self.trunks: set[str] = set()
        self.opened = {""}  # those whose children stand in their place, the model's own first
        waiting, begun = [*self.children[""]], False
        while waiting:
            call = waiting.pop(0)
            if self.is_opened(call, begun):
                self.opened.add(call.layer.name)
                waiting = [*self.children[call.layer.name], *waiting]
            else:
                begun = begun or call.size is not None

    def is_opened(self, call: Ran, begun: bool) -> bool:
        """Whether the stages of a module are to be looked at one by one."""
        name, before = call.layer.name, self.before[call.layer.name]
        inside = [child for child in self.children.get(name, ()) if child.size is not None]
        if not inside or call.takes_several:
            return False
        if self.is_trunk(call):
            self.trunks.add(name)
            return True
        if call.size is None:  # a head has no maps either, but comes behind the stages
            return not begun or any(child.size != before for child in inside)
        # Blocks at the old resolution come before a change. (A block that begins with a convolution
        # and its norm, and then changes the resolution, has no blocks inside.)
        change = next((n for n, child in enumerate(inside) if child.size != before), 0)
        early = [child.layer.name for child in inside[:change]]
        return any(
            one.layer.name in self.children for n in early for one in self.children.get(n, ())
        )

    def is_trunk(self, call: Ran) -> bool:
        """Whether the children of a module, or of one in it, have two resolutions or more that are
        new; the latter is so in a wrapper."""
        children = [] if call.takes_several else self.children.get(call.layer.name, [])
        sizes = {child.size for child in children if child.size is not None}
        across = self.image[1] / self.image[0]  # the image's proportions, give or take a column
        new = [size for size in sizes if abs(size[1] - size[0] * across) <= 1]
        return len({*new} - {self.before[call.layer.name]}) > 1 or any(map(self.is_trunk, children))

    def within(self, name: str | None, names: Collection[str]) -> str | None:
        """The module of this name, or the innermost one around it, that is among others."""
        while name is not None and name not in names:
            name = self.around[name]
        return name

    def blocks(self, units: Sequence[Ran]) -> list[Layer]:
        """The outermost modules in units that stand in a row with others of their class, and hold
        modules."""
        names = {unit.layer.name for unit in units if not unit.takes_several}
        inside = {
            call.layer
            for call in self.calls
            if call.size == units[0].size and call.layer.name in self.children
            if self.within(call.layer.name, names) is not None
        }
        rows = Counter((layer.name.rpartition(".")[0], layer.type) for layer in inside)
        blocks: list[Layer] = []
        for layer in sorted(inside, key=lambda layer: layer.index):
            if rows[layer.name.rpartition(".")[0], layer.type] > 1 and not any(
                layer.name.startswith(f"{block.name}.") for block in blocks
            ):
                blocks.append(layer)
        return blocks


def _stages(seen: _Pass) -> set[Layer]:
    runs: list[tuple[list[Ran], bool]] = []  # units of one resolution; if they follow a trunk
    trunk = ""
    for call in seen.calls:
        name, around = call.layer.name, seen.around[call.layer.name]
        if around not in seen.opened or name in seen.opened or call.size is None:
            continue
        left = bool(trunk) and not name.startswith(f"{trunk}.")
        trunk = seen.within(around, seen.trunks) or ""
        if not runs or runs[-1][0][0].size != call.size or left:
            runs.append(([], left))
        runs[-1][0].append(call)
    rows = [seen.blocks(units) for units, _ in runs]
    of_one_size = sum(map(bool, rows)) == 1 and sum(map(len, rows)) >= len(runs)
    maps = [call.layer for call in seen.calls if call.size is not None and call.layer.index]
    chosen = {*[at for at in maps if any(name.startswith("Conv") for name in at.classes)][:1]}
    for (units, follows_trunk), blocks in zip(runs, rows, strict=True):
        holders = [one for one in units if one.learned and one.layer.name in seen.children]
        if of_one_size and blocks:
            last = blocks[-1]
            beside = [*seen.children[seen.around[last.name]], *units]
            necks = [one for one in beside if one.learned and one.layer.name in seen.children]
            necks = [one for one in necks if one.size == units[0].size]
            behind = [one.layer for one in necks if one.layer.index > last.index]
            chosen |= {*blocks, *behind[-1:]}
        elif holders:  # the last unit that holds modules, or else the last one
            chosen.add(holders[-1].layer)
        elif not follows_trunk:  # as a norm does
            shown = [one for one in units if not ADDS_NOTHING.intersection(one.layer.classes)]
            chosen |= {one.layer for one in shown[-1:] if any(unit.learned for unit in shown)}
    return chosen
