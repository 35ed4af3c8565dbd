"""Pair the layers of a network of PyTorch with those of the ONNX graph that was exported
from it.

    PyTorch                     graph                  found by
    relu           ReLU         relu          Relu     name
    layer1.0.bn1   BatchNorm2d  layer1.0.bn1  Conv     name; conv1 has no partner, since
                                                       its norm is folded into it
    layer1.0.bn1   BatchNorm2d  layer1.0.conv1  Conv   folded norm (the older exporter)
    layer1.0/fn:add             layer1.0/Add           module path
    model.9.m.act  SiLU         model.9.act   Mul      order, among equal shapes

Two runs of one runtime need no pairing: a layer of the same name is the same layer."""

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
    """The rule: BY_NAME, BY_FOLDED_NORM, BY_PATH or BY_ORDER."""

    @property
    def description(self) -> str:
        """The name in NEW and the rule, `conv1 (folded norm)`; empty if both runs have the
        same name."""
        if self.base == self.new:
            return ""
        call = f".call{self.new.call}" if self.new.call else ""
        return f"{self.new.layer}{call} ({self.found_by})"

    @property
    def document(self) -> dict[str, Any]:
        """The entry `in_new` of the JSON document."""
        return {**self.new._asdict(), "found_by": self.found_by}


@dataclass(frozen=True)
class Alignment:
    """Two runs whose layers have the same names."""

    base: ReadRun
    new: ReadRun
    pairs: Mapping[CaptureKey, LayerPair] = field(default_factory=dict)
    """By the key in BASE; empty for runs of one runtime."""
    folded: tuple[str, ...] = ()
    """Layers without a partner, since they are a part of a layer of the other model:
    convolutions of the network, if the graph has norms folded into them; and nodes of the
    graph that are a part of one module (the Sigmoid of a SiLU)."""


@dataclass(frozen=True)
class RenamedImage(ReadImage):
    """An image of a run whose captures have the names of another run."""

    names: Mapping[CaptureKey, CaptureKey | None] = field(default_factory=dict)
    """The new key of a capture, by its key in the manifest; None leaves the capture out. A
    capture that is not in here keeps its key."""

    @cached_property
    def captures(self) -> Rows:
        """By new key, in the order of the model."""
        renamed = {}
        for row in self.manifest.captures:
            key = self.names.get(row.capture_key, row.capture_key)
            if key is not None:
                renamed[key] = row
        return renamed

    def stats(self) -> Mapping[str, Floats]:
        """The statistics of each capture, float32 [maps, 6], by `stats_key` of the new key.

        Raises:
            DamagedError: they cannot be read.
        """
        # the file has the arrays under the old keys, which the rows still have
        arrays = super().stats()
        renamed = {}
        for key, row in self.captures.items():
            renamed[key.stats_key] = arrays[row.capture_key.stats_key]
        return renamed


def align(base: ReadRun, new: ReadRun) -> Alignment:
    """Give the layers of NEW the names that they have in BASE.

    Returns:
        For two runs of one runtime: the runs as they are. For a network and a graph: BASE
        and NEW without the tensors of `Alignment.folded`, and NEW with the names of BASE. A
        tensor without a partner keeps its name.
    """
    base_runtime = _runtime(base)
    new_runtime = _runtime(new)
    if base_runtime == new_runtime:
        return Alignment(base, new)

    def in_order(first: T, second: T) -> tuple[T, T]:
        """Turn (network, graph) into (BASE, NEW), or (BASE, NEW) into (network, graph): swap
        both if NEW is the network."""
        return (second, first) if new_runtime is None else (first, second)

    # the rules of pairing are for a network and a graph, whichever of them is BASE
    network, graph = in_order(_rows(base, new), _rows(new, base))
    paired = _Pairing(network, graph).pairs()
    left_out_base, left_out_new = in_order(
        paired.folded_of_network, paired.folded_of_graph
    )
    pairs = {}
    names = dict.fromkeys(left_out_new)
    for of_network, (of_graph, found_by) in paired.partners.items():
        of_base, of_new = in_order(of_network, of_graph)
        pairs[of_base] = LayerPair(of_base, of_new, found_by)
        names[of_new] = of_base
    folded = [key.layer for key in (*paired.folded_of_network, *paired.folded_of_graph)]
    return Alignment(
        base=_rename_captures(base, dict.fromkeys(left_out_base)),
        new=_rename_captures(new, names),
        pairs=pairs,
        folded=tuple(dict.fromkeys(folded)),
    )


def _runtime(run: ReadRun) -> object:
    """The name of the runtime that computed the model of a run; None for torch."""
    model = run.record.get("model") or {}
    return model.get("runtime")


def _rows(run: ReadRun, compared_run: ReadRun) -> Rows:
    """The captures of `run` in the images that both runs have, in the order of the model.
    A capture of several images has the row of the first one."""
    rows: dict[CaptureKey, Capture] = {}
    for name, image in run.images.items():
        if name in compared_run.images:
            rows = {**image.captures, **rows}
    return rows


def _rename_captures(
    run: ReadRun, names: Mapping[CaptureKey, CaptureKey | None]
) -> ReadRun:
    """The run with new names of its captures.

    Args:
        names: `RenamedImage.names`.
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
    """The tensor of a graph that is paired with one of a network."""

    of_graph: CaptureKey
    found_by: str


class _PairingResult(NamedTuple):
    """The result of pairing a network with a graph."""

    partners: dict[CaptureKey, _Partner]
    """By key of the network."""
    folded_of_network: list[CaptureKey]
    """Left out of the network: convolutions whose norm is folded in."""
    folded_of_graph: list[CaptureKey]
    """Left out of the graph: nodes inside a module that is paired."""


class _Pairing:
    """Pairs the tensors of a network with those of a graph. Each rule looks only at tensors
    that no earlier rule has paired; `pairs` applies all rules."""

    def __init__(self, network: Rows, graph: Rows) -> None:
        """Begin with all tensors of both, and no pair."""
        # copies, from which the rules remove what they pair
        self.network = dict(network)
        self.graph = dict(graph)
        self.norm_behind = _norms_behind(network)
        self.found = _PairingResult({}, [], [])

    def pairs(self) -> _PairingResult:
        """Pair all that can be paired. To be called once."""
        # From the surest rule to the weakest. Folded norms come before names: a Conv with a
        # folded norm may have the name of the network's convolution, but its output is that
        # of the norm.
        self.by_folded_norms()
        for key in [key for key in self.graph if key in self.network]:
            self.pair(key, key, BY_NAME)
        self.by_paths()
        self.leave_out_folded()
        self.by_order()
        return self.found

    def pair(self, of_network: CaptureKey, of_graph: CaptureKey, found_by: str) -> None:
        """Note a pair, and remove both from what later rules look at."""
        del self.network[of_network]
        del self.graph[of_graph]
        self.found.partners[of_network] = _Partner(of_graph, found_by)

    def by_folded_norms(self) -> None:
        """Pair a convolution of the graph with the norm behind it in the network, if the
        graph does not have the norm. Then the norm was folded into the convolution, and the
        output of this convolution is the output of the norm."""
        layers = {key.layer for key in self.graph}
        for key in [*self.graph]:
            norm = self.norm_behind.get(key.layer)
            if norm is None or norm in layers:
                continue
            of_norm = key._replace(layer=norm)
            if of_norm in self.network:
                self.pair(of_norm, key, BY_FOLDED_NORM)

    def by_paths(self) -> None:
        """Pair a node of the graph with a function that the same module calls in the
        network: `layer1.0/Add` with `layer1.0/fn:add`."""
        for key in [*self.graph]:
            path, _, operator = key.layer.rpartition("/")
            # an operator may stand for several functions, as Clip for relu6 and clamp
            for function in FUNCTIONS_OF_OPERATORS.get(operator, "").split():
                name = f"{path}/fn:{function}" if path else f"fn:{function}"
                of_function = key._replace(layer=name)
                if of_function in self.network:
                    self.pair(of_function, key, BY_PATH)
                    break

    def leave_out_folded(self) -> None:
        """Remove what can have no partner: convolutions of the network whose norm is
        paired, and nodes of the graph that are inside a paired module."""
        paired_layers = {key.layer for key in self.found.partners}
        for key in [*self.network]:
            if self.norm_behind.get(key.layer) in paired_layers:
                self.found.folded_of_network.append(key)
                del self.network[key]
        # the Sigmoid inside `model.9.m.act` is called `model.9.m.act/Sigmoid`
        paired = {partner.of_graph.layer for partner in self.found.partners.values()}
        for key in [*self.graph]:
            path = key.layer.rpartition("/")[0]
            if path and path in paired:
                self.found.folded_of_graph.append(key)
                del self.graph[key]

    def by_order(self) -> None:
        """Pair the remaining tensors of one family and shape by their order, if network and
        graph have equally many. Graphs without names of modules run in the network's
        order."""
        graph_families = _group_by_family(self.graph)
        for family, keys in _group_by_family(self.network).items():
            partners = graph_families[family]
            # with one more or less, all tensors after it would get the wrong partner
            if len(keys) == len(partners):
                for key, partner in zip(keys, partners, strict=True):
                    self.pair(key, partner, BY_ORDER)


def _norms_behind(network: Rows) -> dict[str, str]:
    """By name of each convolution that has a norm right behind it: the name of the norm."""
    # Right behind means: next in the list of modules, and with the same parent. Exporters
    # fold such a norm into the convolution.
    norms = {row.index: row.layer for row in network.values() if "Norm" in row.type}
    behind = {}
    for row in network.values():
        norm = norms.get(row.index + 1)
        if norm is None or "Conv" not in row.type:
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
"""Families of layers, and pieces of the names of their classes, functions and operators. A
layer is of the first family of which its name contains a piece."""


def _group_by_family(rows: Rows) -> defaultdict[object, list[CaptureKey]]:
    """The keys of some rows, by `_family`, in the order of the rows; an empty list for a
    family without rows."""
    families = defaultdict[object, list[CaptureKey]](list)
    for key, row in rows.items():
        families[_family(key, row)].append(key)
    return families


def _family(key: CaptureKey, row: Capture) -> object:
    """A key that two tensors must share to be paired by their order: capture kind, family
    (or type), number of maps, and their shape."""
    name = row.type
    for family, pieces in _FAMILIES.items():
        if any(piece in row.type for piece in pieces.split()):
            name = family
            break
    return key.kind, name, row.maps, map_shape(row)
