"""The layers of a first look, where nobody named any: the ends of a model's stages.

A pass is cut into units, one behind the other: a module is a unit unless it is a trunk, which holds
several stages, and then its children stand in its place. Units of one resolution in a row are a
run, and the last of them is its end. Pure, knows no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from featviz.records import Layer

Size = tuple[int, int]

ADDS_NOTHING = frozenset(
    {
        "DropPath",
        "Flatten",
        "Identity",
        "Permute",
        "StochasticDepth",
        "Unflatten",
        "Upsample",
        "_AdaptiveAvgPoolNd",
        "_AdaptiveMaxPoolNd",
        "_AvgPoolNd",
        "_DropoutNd",
        "_MaxPoolNd",
    }
)
"""Classes whose outputs show nothing that the layer before them does not show."""


@dataclass(frozen=True)
class Ran:
    """One call of a layer in a forward pass."""

    layer: Layer
    size: Size | None
    """Height and width of the first of its outputs that is a map; None where none is, and for the
    head of a detector, which gives something else first."""
    takes_several: bool = False
    """Whether it takes maps of several sizes or stages, as the head of a detector does."""
    learned: bool = True
    """Whether it or a module inside it has parameters."""


def stages(calls: Sequence[Ran], image: Size) -> list[Layer]:
    """The first convolution and the end of each stage, in model order.

    Where the blocks of a model all have one resolution, as those of a ViT, and are most of it, each
    of them is taken.

    Args:
        calls: the calls of a forward pass, in the order in which they finished.
        image: height and width of the model's input.
    """
    seen = _Pass(calls, image)
    runs = seen.runs()
    rows = [seen.blocks(run) for run in runs]
    of_one_size = sum(map(bool, rows)) == 1 and sum(map(len, rows)) >= len(runs)
    chosen = set(seen.first_convolution())
    for run, blocks in zip(runs, rows, strict=True):
        if of_one_size and blocks:
            chosen |= {*blocks, *seen.behind(blocks, run)}
        else:
            chosen |= set(seen.end(run))
    return sorted(chosen, key=lambda layer: layer.index)


def vectors(outputs: Iterable[tuple[Layer, Sequence[int]]]) -> list[Layer]:
    """The first look at a model without maps: the layers that give vectors."""
    layers = {
        layer for layer, shape in outputs if layer.index and len(shape) == 2 and shape[0] == 1
    }
    return sorted(layers, key=lambda layer: layer.index)


@dataclass(frozen=True)
class _Run:
    """Units of one resolution, one behind the other."""

    size: Size
    units: list[Ran]
    follows_trunk: bool
    """Whether a trunk has ended before it."""


class _Pass:
    """A forward pass as a tree of calls; the tree is read from the names."""

    def __init__(self, calls: Sequence[Ran], image: Size) -> None:
        names = {call.layer.name for call in calls}
        self._calls, self._image = calls, image
        self._around = {"": None, **{name: _parent(name, names) for name in names}}
        self._children: dict[str | None, list[Ran]] = {}
        for call in calls:
            self._children.setdefault(self._around[call.layer.name], []).append(call)
        self._before = self._sizes_before(image)
        self._trunks: set[str] = set()
        self._opened = self._open()

    def _sizes_before(self, image: Size) -> dict[str, Size]:
        """The resolution at which each module is reached for the first time, by its name."""
        before: dict[str, Size] = {}
        now = image
        for call in self._calls:
            name: str | None = call.layer.name
            while name is not None and name not in before:
                before[name] = now
                name = self._around[name]
            now = call.size or now
        return before

    def _open(self) -> set[str]:
        """Names of the modules whose children stand in their place, the model's own first."""
        opened, waiting, begun = {""}, [*self._children.get("", ())], False
        while waiting:
            call = waiting.pop(0)
            if self._is_opened(call, begun):
                opened.add(call.layer.name)
                waiting = [*self._children[call.layer.name], *waiting]
            else:
                begun = begun or call.size is not None
        return opened

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
        return self._passes_a_stage(inside, before)

    def _is_trunk(self, call: Ran) -> bool:
        """Whether the children of a module, or of one in it, have two resolutions or more that are
        new; the latter is so in a wrapper."""
        name = call.layer.name
        children = [] if call.takes_several else self._children.get(name, [])
        sizes = {child.size for child in children if child.size is not None}
        new = [size for size in sizes - {self._before[name]} if self._fits(size)]
        return len(new) > 1 or any(map(self._is_trunk, children))

    def _fits(self, size: Size) -> bool:
        """Whether a map has the image's proportions, give or take a column."""
        return abs(size[1] - size[0] * self._image[1] / self._image[0]) <= 1

    def _passes_a_stage(self, inside: Sequence[Ran], before: Size) -> bool:
        """Whether blocks at the old resolution come before a change; a block that begins with a
        convolution and its norm, and then changes the resolution, has no blocks inside."""
        old = [child.size == before and self._holds_blocks(child) for child in inside]
        change = next((n for n, child in enumerate(inside) if child.size != before), 0)
        return any(old[:change])

    def _holds_blocks(self, call: Ran) -> bool:
        """Whether a module holds modules that hold modules."""
        return any(map(self._holds_modules, self._children.get(call.layer.name, ())))

    def runs(self) -> list[_Run]:
        """The units of the pass, those of one resolution together."""
        runs: list[_Run] = []
        trunk = ""
        for call in self._calls:
            name = call.layer.name
            around = self._around[name]
            if around not in self._opened or name in self._opened or call.size is None:
                continue
            left = not _is_inside(name, trunk)
            trunk = self._trunk_around(name)
            if not runs or runs[-1].size != call.size or left:
                runs.append(_Run(call.size, [], left))
            runs[-1].units.append(call)
        return runs

    def _trunk_around(self, name: str) -> str:
        around = self._around[name]
        while around is not None and around not in self._trunks:
            around = self._around[around]
        return around or ""

    def first_convolution(self) -> list[Layer]:
        """The convolution that finished first, if there is one that gives maps."""
        return [
            call.layer
            for call in self._calls
            if call.size is not None
            and call.layer.index
            and any(name.startswith("Conv") for name in call.layer.classes)
        ][:1]

    def end(self, run: _Run) -> list[Layer]:
        """The last unit of a run that holds modules, or else the last one; none where it learnt
        nothing, or only follows a trunk as a norm does."""
        if holders := [unit for unit in run.units if unit.learned and self._holds_modules(unit)]:
            return [holders[-1].layer]
        shown = [unit for unit in run.units if not ADDS_NOTHING.intersection(unit.layer.classes)]
        if run.follows_trunk or not any(unit.learned for unit in shown):
            return []
        return [shown[-1].layer]

    def behind(self, blocks: Sequence[Layer], run: _Run) -> list[Layer]:
        """The last module that follows the blocks of a run and holds modules, as a neck does."""
        beside = self._children[self._around[blocks[-1].name]]
        candidates = [call for call in (*beside, *run.units) if call.size == run.size]
        return [
            call.layer
            for call in candidates
            if call.layer.index > blocks[-1].index and call.learned and self._holds_modules(call)
        ][-1:]

    def blocks(self, run: _Run) -> list[Layer]:
        """The outermost modules in a run that stand in a row with others of their class, and hold
        modules."""
        units = {unit.layer.name for unit in run.units if not unit.takes_several}
        inside = {
            call.layer
            for call in self._calls
            if call.size == run.size and self._holds_modules(call) and self._is_part(call, units)
        }
        rows = Counter((layer.name.rpartition(".")[0], layer.type) for layer in inside)
        blocks: list[Layer] = []
        for layer in sorted(inside, key=lambda layer: layer.index):
            if rows[layer.name.rpartition(".")[0], layer.type] > 1 and not any(
                _is_inside(layer.name, block.name) for block in blocks
            ):
                blocks.append(layer)
        return blocks

    def _is_part(self, call: Ran, units: set[str]) -> bool:
        name: str | None = call.layer.name
        while name is not None and name not in units:
            name = self._around[name]
        return name is not None

    def _holds_modules(self, call: Ran) -> bool:
        return call.layer.name in self._children


def _parent(name: str, names: set[str]) -> str | None:
    """The innermost module around a name that was called; None for the model itself."""
    if not name:
        return None
    name = name.rpartition(".")[0]
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def _is_inside(name: str, outer: str) -> bool:
    """Whether a module stands in another; every module stands in the model."""
    return not outer or name.startswith(f"{outer}.")
