"""Which layers are drawn of two models of which one was exported from the other: those
that the selectors take in one of them, and in the other those that stand for them.

`--layers Conv2d,ReLU` names no class of a graph of ONNX, whose convolution may give what
the norm behind it gives; the layers are found by their names instead."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

from featviz.errors import UsageError
from featviz.hooks.layers import list_layers
from featviz.models.load import LoadedModel, load_model
from featviz.models.preprocess import Chain
from featviz.options import InputOptions, ModelOptions
from featviz.records import Layer
from featviz.records.tables import FUNCTIONS_OF_OPERATORS
from featviz.run.choose import choose_layers, functions


class RunModel(NamedTuple):
    """A model, and the selectors of its layers."""

    model: ModelOptions | LoadedModel
    layers: str | None


def run_models(
    base: ModelOptions, new: ModelOptions, inputs: InputOptions, text: str | None
) -> tuple[RunModel, RunModel]:
    """Choose the layers of two models that are to be compared.

    A graph whose preprocessing is a guess gets that of the network, and the network the
    size for which the graph was exported. Two models of one kind have the same layers,
    and keep their selectors.

    Args:
        base, new: the two models, in the order of the results.
        inputs: how images go into both.
        text: selectors of both, of which each must match in one model; None for one
            layer of each stage.

    Raises:
        UsageError: no layer of either model matches.
    """
    graphs = [options.spec.endswith(".onnx") for options in (base, new)]
    if graphs[0] == graphs[1]:
        return RunModel(base, text), RunModel(new, text)
    network, graph = (new, base) if graphs[0] else (base, new)
    of_network, of_graph = _with_partners(
        load_model(network, inputs), load_model(graph, inputs), text
    )
    if graphs[0]:
        return of_graph, of_network
    return of_network, of_graph


def _with_partners(
    network: LoadedModel, graph: LoadedModel, text: str | None
) -> tuple[RunModel, RunModel]:
    """A network and the graph that was exported of it, in this order: with layers that
    stand for each other, and with the network's preprocessing where that of the graph is
    a guess.

    Args:
        text: selectors, or None, as `run_models` has them.
    """
    preprocess = replace(network.preprocess, chain=_chain_of_both(network, graph))
    network = replace(network, preprocess=preprocess)
    if graph.preprocess.guessed:
        graph = replace(graph, preprocess=preprocess)
    of_network, of_graph = _layers_of_both(network, graph, text)
    return (
        RunModel(network, _as_selectors(of_network)),
        RunModel(graph, _as_selectors(of_graph)),
    )


def _chain_of_both(network: LoadedModel, graph: LoadedModel) -> Chain:
    """How images are prepared for a network, in the size that its graph takes where it
    was exported for one alone."""
    chain = network.preprocess.chain
    graph_chain = graph.preprocess.chain
    # of two guesses, that for the graph knows the size
    if network.preprocess.guessed and graph.preprocess.guessed:
        return graph_chain
    if chain.own_size and isinstance(graph_chain.resize, tuple):
        return replace(chain, resize=graph_chain.resize, stride=0, library=None)
    return chain


def _layers_of_both(
    network: LoadedModel, graph: LoadedModel, text: str | None
) -> tuple[list[Layer], list[Layer]]:
    """The layers to draw of a network, and of the graph that was exported of it: those
    that are selected in either, and their partners in the other.

    Args:
        text: selectors, or None, as `run_models` has them.

    Raises:
        UsageError: no layer of either matches, or none of the graph stands for one of
            the network.
    """
    blank = network.preprocess.blank()
    selected = _matching(network, text, blank)
    selected_nodes = _matching(graph, text, blank)
    if not selected and not selected_nodes:
        choose_layers(network, text, blank)  # raises, and says what there is
    norms = _norms_behind(network.module)
    nodes = _with_nodes_of(selected, graph, selected_nodes, norms)
    if not nodes:
        raise UsageError(
            f"the graph has no layer that stands for {text!r} of the network",
            "featviz layers MODEL.onnx lists its layers",
        )
    layers = list_layers(network.module)
    # functions have the names of nodes, and take a forward pass to be listed
    if any("/" in name for name in nodes):
        layers += functions(network, blank)
    names = {layer.name for layer in selected}
    for layer in layers:
        if not nodes.keys().isdisjoint(_node_names(layer)):
            names.add(layer.name)
    # A node with a folded norm stands for the convolution or for the norm. Both are
    # drawn: the values will tell which.
    names |= {norms[name].name for name in names & norms.keys()}
    return [layer for layer in layers if layer.name in names], [*nodes.values()]


def _with_nodes_of(
    layers: Sequence[Layer],
    graph: LoadedModel,
    selected_nodes: Sequence[Layer],
    norms: Mapping[str, Layer],
) -> dict[str, Layer]:
    """The layers of a graph that were selected in it, and those that stand for layers of
    the network, by name.

    Args:
        layers: of the network, which were selected there.
        norms: as `_norms_behind` has them. A convolution with its norm folded in has
            the norm's name in a graph of the newer exporter.
    """
    by_name = {layer.name: layer for layer in list_layers(graph.module)}
    nodes = {layer.name: layer for layer in selected_nodes}
    for layer in layers:
        names = _node_names(layer)
        if layer.name in norms:
            names.append(norms[layer.name].name)
        for name in names:
            if name in by_name:
                nodes[name] = by_name[name]
    return nodes


def _matching(
    model: LoadedModel, text: str | None, blank: Sequence[Tensor]
) -> list[Layer]:
    """The layers that selectors take; an empty list where they match nothing, which may be
    so in one of two models.

    Args:
        text: the selectors; None takes a layer for each stage.
        blank: zeros, as the model takes them.

    Raises:
        UsageError: there are no selectors, and the model has no layer to show.
    """
    try:
        return choose_layers(model, text, blank)
    except UsageError:
        # without selectors the model itself is the fault
        if text is None:
            raise
        return []


def _norms_behind(module: nn.Module) -> dict[str, Layer]:
    """The norm that stands right behind each convolution in its module, by name."""
    layers = list_layers(module)
    behind = {}
    for layer, following in pairwise(layers):
        is_norm = "_BatchNorm" in following.classes
        is_convolution = "_ConvNd" in layer.classes
        parents = [name.rpartition(".")[0] for name in (layer.name, following.name)]
        if is_convolution and is_norm and parents[0] == parents[1]:
            behind[layer.name] = following
    return behind


def _node_names(layer: Layer) -> list[str]:
    """The names that a graph may have for a layer of the network."""
    if not layer.is_function:
        return [layer.name, *layer.aliases]
    function = layer.type.removeprefix("fn:")
    names = []
    for operator, called in FUNCTIONS_OF_OPERATORS.items():
        if function in called.split():
            names.append(f"{layer.owner}/{operator}" if layer.owner else operator)
    return names


def _as_selectors(layers: Sequence[Layer]) -> str:
    """Selectors that take these layers alone."""
    texts = []
    for layer in layers:
        # By class, too: a node of the model itself is called as its operator is. `?`
        # stands for what has a meaning in selectors.
        pattern = re.sub(r"[][,#!*@(){}\\]", "?", layer.owner)
        texts.append(f"{layer.type}@{pattern}" if pattern else layer.type)
    return ",".join(texts)
