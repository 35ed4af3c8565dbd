"""Which layers are drawn: those that selectors take, or without any the ends of a model's stages.

A forward pass on zeros tells which layers run, in which order and with which shapes. For a first
look it is cut into units, one behind the other: a module is a unit unless it is a trunk, which
holds several stages, and then its children stand in its place. Units of one resolution in a row are
a run, and the last of them is its end.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from featviz.errors import ForwardError, UsageError
from featviz.hooks import selectors
from featviz.hooks.capture import forward, hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.functions import list_functions
from featviz.hooks.layers import like_module, list_layers, modules_by_name
from featviz.hooks.selectors import Selector
from featviz.layout import map_size
from featviz.layout.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.records import Layer, Site

log = logging.getLogger(__name__)

Size = tuple[int, int]
"""Height and width."""


def probe(
    model: LoadedModel,
    blank: Sequence[Tensor],
    layers: Sequence[Layer],
    kinds: Sequence[str] = ("output",),
) -> dict[tuple[str, Layer, int], list[list[int]]]:
    """Run the model once on `blank`: the shapes of what each call of these layers gave (`output`),
    or of the floats that it took (`input`), by kind, layer and call, in the order of the pass."""
    ran: dict[tuple[str, Layer, int], list[list[int]]] = {}

    def sink(site: Site, tensor: Tensor) -> None:
        if tensor.is_nested or (site.kind == "input" and not tensor.is_floating_point()):
            return  # has no shape, or is a mask
        ran.setdefault((site.kind, site.layer, site.call), []).append(list(tensor.shape))

    with in_eval_mode(model.module), hooked(model.module, layers, sink, kinds) as recorder:
        forward(model.module, [arg.to(model.device) for arg in blank], recorder)
    return ran


def functions(model: LoadedModel, blank: Sequence[Tensor]) -> dict[Layer, int]:
    """The functions that the model's modules call, as layers with the number of their calls."""
    args, module = [arg.to(model.device) for arg in blank], model.module
    with in_eval_mode(module):
        found = forward(module, args, call=lambda *args: list_functions(module, args))
    return dict(found)


def choose_layers(
    model: LoadedModel, text: str | None, blank: Sequence[Tensor], tensor_layout: Sequence[str] = ()
) -> list[Layer]:
    """The layers that the selectors take; without any, one for each stage of the model.

    A selector that matches nothing beside others that do is warned of.

    Args:
        tensor_layout: `--tensor-layout` values, which decide what is a map.
    """
    if text is None:
        return _first_look(model, blank, tensor_layout)
    layers, wanted = list_layers(model.module), selectors.parse(text)
    if selectors.of_functions(wanted):
        layers += functions(model, blank)
    chosen = selectors.select(layers, wanted)
    if not chosen:
        raise _no_match(model, text, wanted, layers, blank)
    for idle in (one for one in wanted if not one.pick(layers)):
        meant = selectors.meant(layers, [idle])
        log.warning("selector %r matches no layer%s", idle.text, f"; {meant}" if meant else "")
    return chosen


def _no_match(
    model: LoadedModel,
    text: str,
    wanted: list[Selector],
    layers: list[Layer],
    blank: Sequence[Tensor],
) -> UsageError:
    """An error that names the functions that do the same, and the types that there are."""
    names: Counter[str] = Counter()
    with suppress(ForwardError):
        for layer, calls in functions(model, blank).items():
            names[layer.type.removeprefix("fn:")] += calls
    more = [
        f"the model calls the function {name} {count} times, which is no module: --layers fn:{name}"
        for selector in wanted
        for name, count in names.items()
        if like_module(name, selector.text)
    ]
    if selectors.of_functions(wanted):
        called = [layer for layer in layers if layer.is_function]
        more.append(f"functions here: {selectors.types_present(called)}")
    hint = selectors.remedy(layers, wanted, *more)
    return UsageError(f"no layer matches --layers {text!r}", hint)


# The first look


def _first_look(
    model: LoadedModel, blank: Sequence[Tensor], tensor_layout: Sequence[str]
) -> list[Layer]:
    layers, book = list_layers(model.module), HintBook(model.module, blank[0].shape, tensor_layout)
    with book.traced(model.module, layers):
        ran = probe(model, blank, layers, ("output", "input"))
    height, width = book.of(layers[0]).input_size or blank[0].shape[-2:]

    def size_of(layer: Layer, shape: Sequence[int], side: str) -> Size | None:
        """Height and width of maps; None where they are no maps, or have one place."""
        found = map_size(shape, book.of_shape(layer, shape, side))
        return found[1:] if found is not None and found[1] * found[2] > 1 else None

    modules, calls = modules_by_name(model.module), []
    vectors: set[Layer] = set()
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
    chosen = _stages(calls, (height, width)) or vectors or alone
    return sorted(chosen, key=lambda layer: layer.index)


ADDS_NOTHING = {
    *("DropPath", "Flatten", "Identity", "Permute", "StochasticDepth", "Unflatten", "Upsample"),
    *("_AdaptiveAvgPoolNd", "_AdaptiveMaxPoolNd", "_AvgPoolNd", "_DropoutNd", "_MaxPoolNd"),
}
"""Classes whose outputs show nothing that the layer before them does not show."""


@dataclass(frozen=True)
class Ran:
    """One call of a layer in a forward pass."""

    layer: Layer
    size: Size | None
    """Height and width of the first of its outputs that is a map; None where none is, and for the
    head of a detector, which gives something else first."""
    takes_several: bool
    """Whether it takes maps of several sizes or stages, as the head of a detector does."""
    learned: bool


def _stages(calls: Sequence[Ran], image: Size) -> set[Layer]:
    """The first convolution and the end of each stage.

    Where the blocks of a model all have one resolution, as those of a ViT, and are most of it, each
    of them is taken.

    Args:
        calls: the calls of a forward pass, in the order in which they finished.
        image: height and width of the model's input.
    """
    seen = _Pass(calls, image)
    runs = seen.runs()
    rows = [seen.blocks(units) for units, _ in runs]
    of_one_size = sum(map(bool, rows)) == 1 and sum(map(len, rows)) >= len(runs)
    maps = [call.layer for call in calls if call.size is not None and call.layer.index]
    chosen = {*[at for at in maps if any(name.startswith("Conv") for name in at.classes)][:1]}
    for (units, follows_trunk), blocks in zip(runs, rows, strict=True):
        if of_one_size and blocks:
            chosen |= {*blocks, *seen.behind(blocks, units)}
            continue
        # the last unit that holds modules, or else the last one; none where it learnt nothing, or
        # only follows a trunk as a norm does
        shown = [unit for unit in units if not ADDS_NOTHING.intersection(unit.layer.classes)]
        if holders := [unit for unit in units if unit.learned and seen.holds_modules(unit)]:
            chosen.add(holders[-1].layer)
        elif not follows_trunk and any(unit.learned for unit in shown):
            chosen.add(shown[-1].layer)
    return chosen


class _Pass:
    """A forward pass as a tree of calls; the tree is read from the names."""

    def __init__(self, calls: Sequence[Ran], image: Size) -> None:
        names = {call.layer.name for call in calls}
        self._calls, self._image = calls, image
        self._around: dict[str, str | None] = {"": None}
        """The innermost module around each that was called; None for the model itself."""
        for name in names - {""}:
            above = name.rpartition(".")[0]
            while above and above not in names:
                above = above.rpartition(".")[0]
            self._around[name] = above
        self._children: dict[str | None, list[Ran]] = {}
        for call in calls:
            self._children.setdefault(self._around[call.layer.name], []).append(call)
        self._before: dict[str, Size] = {}
        """The resolution at which each module is reached for the first time, by its name."""
        now = image
        for call in calls:
            outer: str | None = call.layer.name
            while outer is not None and outer not in self._before:
                self._before[outer] = now
                outer = self._around[outer]
            now = call.size or now
        self._trunks: set[str] = set()
        self._opened = {""}
        """Names of the modules whose children stand in their place, the model's own first."""
        waiting, begun = [*self._children.get("", ())], False
        while waiting:
            call = waiting.pop(0)
            if self._is_opened(call, begun):
                self._opened.add(call.layer.name)
                waiting = [*self._children[call.layer.name], *waiting]
            else:
                begun = begun or call.size is not None

    def _is_opened(self, call: Ran, begun: bool) -> bool:
        """Whether the stages of a module are to be looked at one by one."""
        name = call.layer.name
        inside = [child for child in self._children.get(name, ()) if child.size is not None]
        if not inside or call.takes_several:
            return False
        if self._is_trunk(call):
            self._trunks.add(name)
            return True
        before = self._before[name]
        if call.size is None:  # a head has no maps either, but comes behind the stages
            return not begun or any(child.size != before for child in inside)
        # Blocks at the old resolution come before a change. (A block that begins with a convolution
        # and its norm, and then changes the resolution, has no blocks inside.)
        change = next((n for n, child in enumerate(inside) if child.size != before), 0)
        early = [child for child in inside[:change] if child.size == before]
        children = [one for child in early for one in self._children.get(child.layer.name, ())]
        return any(map(self.holds_modules, children))

    def _is_trunk(self, call: Ran) -> bool:
        """Whether the children of a module, or of one in it, have two resolutions or more that are
        new; the latter is so in a wrapper."""
        name = call.layer.name
        children = [] if call.takes_several else self._children.get(name, [])
        sizes = {child.size for child in children if child.size is not None}
        across = self._image[1] / self._image[0]  # the image's proportions, give or take a column
        new = [s for s in sizes - {self._before[name]} if abs(s[1] - s[0] * across) <= 1]
        return len(new) > 1 or any(map(self._is_trunk, children))

    def _within(self, name: str | None, names: Collection[str]) -> str | None:
        """The module of this name, or the innermost one around it, that is among others."""
        while name is not None and name not in names:
            name = self._around[name]
        return name

    def runs(self) -> list[tuple[list[Ran], bool]]:
        """The units of the pass, those of one resolution together, and whether they come behind a
        trunk."""
        runs: list[tuple[list[Ran], bool]] = []
        trunk = ""
        for call in self._calls:
            name = call.layer.name
            around = self._around[name]
            if around not in self._opened or name in self._opened or call.size is None:
                continue
            left = bool(trunk) and not name.startswith(f"{trunk}.")
            trunk = self._within(around, self._trunks) or ""
            if not runs or runs[-1][0][0].size != call.size or left:
                runs.append(([], left))
            runs[-1][0].append(call)
        return runs

    def behind(self, blocks: Sequence[Layer], units: Sequence[Ran]) -> list[Layer]:
        """The last module that follows the blocks among units and holds modules, as a neck does."""
        beside = self._children[self._around[blocks[-1].name]]
        return [
            call.layer
            for call in (*beside, *units)
            if call.size == units[0].size and call.layer.index > blocks[-1].index
            if call.learned and self.holds_modules(call)
        ][-1:]

    def blocks(self, units: Sequence[Ran]) -> list[Layer]:
        """The outermost modules in units that stand in a row with others of their class, and hold
        modules."""
        names = {unit.layer.name for unit in units if not unit.takes_several}
        inside = {
            call.layer
            for call in self._calls
            if call.size == units[0].size and self.holds_modules(call)
            if self._within(call.layer.name, names) is not None
        }
        rows = Counter((layer.name.rpartition(".")[0], layer.type) for layer in inside)
        blocks: list[Layer] = []
        for layer in sorted(inside, key=lambda layer: layer.index):
            if rows[layer.name.rpartition(".")[0], layer.type] > 1 and not any(
                layer.name.startswith(f"{block.name}.") for block in blocks
            ):
                blocks.append(layer)
        return blocks

    def holds_modules(self, call: Ran) -> bool:
        """Whether modules ran inside it."""
        return call.layer.name in self._children
