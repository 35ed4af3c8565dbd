"""Which layers of two runs are the same one, where one model was made from the other
and runs elsewhere: a network of PyTorch, and the graph of ONNX that was exported of it.

    PyTorch                     graph                  found by
    relu           ReLU         relu          Relu     name
    layer1.0.bn1   BatchNorm2d  layer1.0.bn1  Conv     name; conv1 has no partner, since
                                                       its norm is folded into it
    layer1.0.bn1   BatchNorm2d  layer1.0.conv1  Conv   folded norm (the older exporter)
    layer1.0/fn:add             layer1.0/Add           module path
    model.9.m.act  SiLU         model.9.act   Mul      order, among equal shapes

Runs of one kind of model have the same names, and need none of this."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from featviz.diff.tensors import map_shape
from featviz.records import CaptureKey, Floats
from featviz.records.tables import FUNCTIONS_OF_OPERATORS
from featviz.rundir.image import ReadImage
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import Capture

BY_NAME = "name"
BY_FOLDED_NORM = "folded norm"
BY_PATH = "module path"
BY_ORDER = "order"

T = TypeVar("T")
Rows = Mapping[CaptureKey, Capture]


class LayerPair(NamedTuple):
    """A tensor of BASE and the one of NEW that it is compared with."""

    base: CaptureKey
    new: CaptureKey
    found_by: str
    """`name`, `folded norm`, `module path` or `order`."""

    @property
    def description(self) -> str:
        """What it is called in NEW, where that is another name: `conv1 (folded norm)`."""
        if self.base == self.new:
            return ""
        call = f".call{self.new.call}" if self.new.call else ""
        return f"{self.new.layer}{call} ({self.found_by})"

    @property
    def document(self) -> dict[str, Any]:
        """For `--json`."""
        return {**self.new._asdict(), "found_by": self.found_by}


@dataclass(frozen=True)
class Alignment:
    """Two runs of which NEW has the names of BASE."""

    base: ReadRun
    new: ReadRun
    pairs: Mapping[CaptureKey, LayerPair] = field(default_factory=dict)
    """By the key in BASE; empty for runs that have the same names anyway."""
    folded: tuple[str, ...] = ()
    """Layers whose output exists in one of the models alone, since it is inside a layer
    of the other: convolutions of the network with their norm folded in, and nodes that
    make up one module (the Sigmoid of a SiLU)."""


@dataclass(frozen=True)
class RenamedImage(ReadImage):
    """An image of a run under the names of another one."""

    names: Mapping[CaptureKey, CaptureKey | None] = field(default_factory=dict)
    """By the image's own key; None for a tensor that is left out."""

    @cached_property
    def captures(self) -> Rows:
        """In the order of the model."""
        renamed = {}
        for row in self.manifest.captures:
            key = self.names.get(row.capture_key, row.capture_key)
            if key is not None:
                renamed[key] = row
        return renamed

    def stats(self) -> Mapping[str, Floats]:
        """All statistics, float32 [maps, 6] under the new keys."""
        # rows keep their own keys, under which the file has its arrays
        arrays = super().stats()
        renamed = {}
        for key, row in self.captures.items():
            renamed[key.stats_key] = arrays[row.capture_key.stats_key]
        return renamed


def align(base: ReadRun, new: ReadRun) -> Alignment:
    """Give the layers of NEW the names that they have in BASE.

    Returns:
        The runs themselves where both are of one runtime: then a layer of the same name
        is the same layer. Else tensors inside a layer of the other model are left out of
        both, and what has no partner is only in one of them.
    """
    base_runtime = _runtime(base)
    new_runtime = _runtime(new)
    if base_runtime == new_runtime:
        return Alignment(base, new)

    def in_order(one: T, other: T) -> tuple[T, T]:
        """What is known of the network and of the graph, as that of BASE and of NEW; and
        the other way round."""
        return (other, one) if new_runtime is None else (one, other)

    # the rules tell a network from a graph, whichever of them is BASE
    network, graph = in_order(_rows(base, new), _rows(new, base))
    paired = _Pairing(network, graph).pairs()
    left_out_base, left_out_new = in_order(paired.of_network, paired.of_graph)
    pairs = {}
    names = dict.fromkeys(left_out_new)
    for of_network, (of_graph, found_by) in paired.partners.items():
        of_base, of_new = in_order(of_network, of_graph)
        pairs[of_base] = LayerPair(of_base, of_new, found_by)
        names[of_new] = of_base
    folded = [key.layer for key in (*paired.of_network, *paired.of_graph)]
    return Alignment(
        base=_renamed(base, dict.fromkeys(left_out_base)),
        new=_renamed(new, names),
        pairs=pairs,
        folded=tuple(dict.fromkeys(folded)),
    )


def _runtime(run: ReadRun) -> object:
    """What computed the model of a run, if torch did not."""
    model = run.record.get("model")
    return model.get("runtime") if isinstance(model, dict) else None


def _rows(run: ReadRun, compared_run: ReadRun) -> Rows:
    """The rows of the images that both runs have, in the order of the model; of a tensor
    that several images have, the row of the first."""
    rows: dict[CaptureKey, Capture] = {}
    for name, image in run.images.items():
        if name in compared_run.images:
            rows = {**image.captures, **rows}
    return rows


def _renamed(run: ReadRun, names: Mapping[CaptureKey, CaptureKey | None]) -> ReadRun:
    """A run whose captures have other names.

    Args:
        names: the new key of each capture; None leaves the capture out.
    """
    images = {}
    for name, image in run.images.items():
        images[name] = RenamedImage(
            root=image.root,
            folder=image.folder,
            manifest=image.manifest,
            input_size=image.input_size,
            sizes=image.sizes,
            kept_stats=image.kept_stats,
            pixels=image.pixels,
            names=names,
        )
    return replace(run, images=images)


class _Partner(NamedTuple):
    """The tensor of a graph that stands for one of a network."""

    of_graph: CaptureKey
    found_by: str


class _Partners(NamedTuple):
    """What was found of two runs."""

    partners: dict[CaptureKey, _Partner]
    """By key of the network."""
    of_network: list[CaptureKey]
    """Convolutions whose norm is folded in."""
    of_graph: list[CaptureKey]
    """Nodes inside a module that is paired."""


class _Pairing:
    """Looks for the tensors of a network among those of a graph, by one rule after the
    other; each takes what the earlier ones have left."""

    def __init__(self, network: Rows, graph: Rows) -> None:
        # copies, which the rules empty: what is left at the end has no partner
        self.network = dict(network)
        self.graph = dict(graph)
        self.norm_behind = _norms_behind(network)
        self.found = _Partners({}, [], [])

    def pairs(self) -> _Partners:
        """Pair all that can be paired."""
        # From the surest to the weakest. Folded norms come before names: a Conv that is
        # called as in the network gives what the norm behind it gives there.
        self.by_folded_norms()
        for key in [key for key in self.graph if key in self.network]:
            self.pair(key, key, BY_NAME)
        self.by_paths()
        self.leave_out_folded()
        self.by_order()
        return self.found

    def pair(self, of_network: CaptureKey, of_graph: CaptureKey, found_by: str) -> None:
        """Note a pair, which no later rule looks at."""
        del self.network[of_network]
        del self.graph[of_graph]
        self.found.partners[of_network] = _Partner(of_graph, found_by)

    def by_folded_norms(self) -> None:
        """Pair a convolution of the graph with the norm behind it in the network, where the
        graph has no such norm: it was folded in, so that the convolution gives what the
        norm gives."""
        layers = {key.layer for key in self.graph}
        for key in [*self.graph]:
            norm = self.norm_behind.get(key.layer)
            if norm is None or norm in layers:
                continue
            of_norm = key._replace(layer=norm)
            if of_norm in self.network:
                self.pair(of_norm, key, BY_FOLDED_NORM)

    def by_paths(self) -> None:
        """Pair a node that stands in a module itself with a function that the module calls:
        `layer1.0/Add` with `layer1.0/fn:add`."""
        for key in [*self.graph]:
            path, _, operator = key.layer.rpartition("/")
            # an operator may stand for several functions, as Clip for relu6 and clamp
            for function in FUNCTIONS_OF_OPERATORS.get(operator, "").split():
                name = f"{path}/fn:{function}" if path else f"fn:{function}"
                if key._replace(layer=name) in self.network:
                    self.pair(key._replace(layer=name), key, BY_PATH)
                    break

    def leave_out_folded(self) -> None:
        """Leave out what has no partner of its own: convolutions of the network whose norm
        is paired with a convolution, and nodes of the graph inside a module that is
        paired."""
        paired_layers = {key.layer for key in self.found.partners}
        for key in [*self.network]:
            if self.norm_behind.get(key.layer) in paired_layers:
                self.found.of_network.append(key)
                del self.network[key]
        # a node inside `model.9.m.act`, as its Sigmoid, has that path before the slash
        paired = {partner.of_graph.layer for partner in self.found.partners.values()}
        for key in [*self.graph]:
            path = key.layer.rpartition("/")[0]
            if path and path in paired:
                self.found.of_graph.append(key)
                del self.graph[key]

    def by_order(self) -> None:
        """Pair what is left of one family and shape in its order, if both have as many:
        graphs without names of modules still run in the network's order."""
        families = defaultdict[object, list[CaptureKey]](list)
        for key, row in self.network.items():
            families[_family(key, row)].append(key)
        of_graph = defaultdict[object, list[CaptureKey]](list)
        for key, row in self.graph.items():
            of_graph[_family(key, row)].append(key)
        for family, keys in families.items():
            # one more or less, and all behind it would be paired with the wrong one
            if len(keys) == len(of_graph[family]):
                for key, partner in zip(keys, of_graph[family], strict=True):
                    self.pair(key, partner, BY_ORDER)


def _is_convolution(row: Capture) -> bool:
    return "Conv" in row.type


def _norms_behind(network: Rows) -> dict[str, str]:
    """The norm that stands right behind each convolution in its module, by name."""
    # right behind in the list of modules, and below the same parent: such a norm is what
    # exporters fold into the convolution
    norms = {row.index: row.layer for row in network.values() if "Norm" in row.type}
    behind = {}
    for row in network.values():
        norm = norms.get(row.index + 1)
        if norm is None or not _is_convolution(row):
            continue
        if norm.rpartition(".")[0] == row.layer.rpartition(".")[0]:
            behind[row.layer] = norm
    return behind


_FAMILIES = {
    "convolution": "Conv conv",
    "linear": "Linear linear Gemm MatMul",
    "norm": "Norm norm",
    "activation": "LU lu Relu Sigmoid sigmoid Tanh tanh wish Mish mish Erf Clip Mul",
    "addition": "add Add",
    "pool": "Pool pool ReduceMean",
}
"""Endings and pieces of the names of classes, functions and operators."""


def _family(key: CaptureKey, row: Capture) -> object:
    """What two tensors have in common that may be paired by their order."""
    name = row.type
    for family, pieces in _FAMILIES.items():
        if any(piece in row.type for piece in pieces.split()):
            name = family
            break
    return key.kind, name, row.maps, map_shape(row)
