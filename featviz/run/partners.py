"""Chooses the layers of a network and of an ONNX graph that was exported from it, for
their comparison. A layer that is selected in one model is drawn in both: its partner is
the layer of the other model that computes the same.

`--layers Conv2d,ReLU` matches no class of a graph, so partners are found by their names. A
convolution of the graph may have the norm behind it folded in."""

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
    """The selectors; None stands for one layer of each stage."""


def run_models(
    base: ModelOptions, new: ModelOptions, inputs: InputOptions, text: str | None
) -> tuple[RunModel, RunModel]:
    """Choose the layers of two models that are to be compared.

    Two networks, or two graphs, both get the given selectors. For a network and a graph,
    both models are loaded: if the preprocessing of the graph is a guess, the graph gets
    that of the network; the network gets the image size of the graph.

    Args:
        base, new: the two models, in the order of the results.
        inputs: how images go into both models.
        text: the selectors; a selector may match in only one of the models. None chooses
            one layer of each stage.

    Raises:
        UsageError: no layer of either model matches, or the graph has no partner for the
            selected layers.
        LoadError: a model cannot be loaded.
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
    """Choose the layers and the preprocessing of a network and of its graph.

    Args:
        text: the selectors, or None, as for `run_models`.

    Returns:
        The network, then the graph, each with selectors of its layers.
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
    """The preprocessing for a network and its graph: that of the network. If the graph was
    exported for only one image size, images are resized to it."""
    chain = network.preprocess.chain
    graph_chain = graph.preprocess.chain
    # if both are guesses, only that of the graph has the right size
    if network.preprocess.guessed and graph.preprocess.guessed:
        return graph_chain
    if chain.own_size and isinstance(graph_chain.resize, tuple):
        return replace(chain, resize=graph_chain.resize, stride=0, library=None)
    return chain


def _layers_of_both(
    network: LoadedModel, graph: LoadedModel, text: str | None
) -> tuple[list[Layer], list[Layer]]:
    """The layers to draw of a network, and of its graph: the selected layers of both, and
    their partners in the other model.

    Args:
        text: the selectors, or None, as for `run_models`.

    Returns:
        The layers of the network, then the nodes of the graph.

    Raises:
        UsageError: no layer of either model matches, or the graph has no partner for the
            selected layers.
    """
    blank = network.preprocess.blank()
    selected = _matching(network, text, blank)
    selected_nodes = _matching(graph, text, blank)
    if not selected and not selected_nodes:
        choose_layers(network, text, blank)  # raises the error, with its hint
    norms = _norms_behind(network.module)
    nodes = _with_nodes_of(selected, graph, selected_nodes, norms)
    if not nodes:
        raise UsageError(
            f"the graph has no layer that stands for {text!r} of the network",
            "featviz layers MODEL.onnx lists its layers",
        )
    layers = list_layers(network.module)
    # Only functions have partners with a slash in the name. Functions are listed only
    # here, since that takes a forward pass.
    if any("/" in name for name in nodes):
        layers += functions(network, blank)
    names = {layer.name for layer in selected}
    for layer in layers:
        if not nodes.keys().isdisjoint(_node_names(layer)):
            names.add(layer.name)
    # A node may be the partner of a convolution, or of the norm behind it that was folded
    # in. Both are drawn: the comparison of values will tell.
    names |= {norms[name].name for name in names & norms.keys()}
    return [layer for layer in layers if layer.name in names], [*nodes.values()]


def _with_nodes_of(
    layers: Sequence[Layer],
    graph: LoadedModel,
    selected_nodes: Sequence[Layer],
    norms: Mapping[str, Layer],
) -> dict[str, Layer]:
    """The nodes of a graph to draw, by name: the selected ones, and the partners of the
    selected layers of the network.

    Args:
        layers: the selected layers of the network.
        selected_nodes: the selected nodes of the graph.
        norms: from `_norms_behind`. In a graph of the newer exporter, a convolution with
            the norm folded in has the name of the norm.
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
    """The layers of a model that selectors match; empty if they match none, since they may
    match only in the other model.

    Args:
        text: the selectors; None chooses one layer of each stage.
        blank: zeros in the shapes of the model's inputs.

    Raises:
        UsageError: `choose_layers` fails without selectors.
    """
    try:
        return choose_layers(model, text, blank)
    except UsageError:
        if text is None:
            raise
        return []


def _norms_behind(module: nn.Module) -> dict[str, Layer]:
    """For each convolution whose next layer, in the same module, is a batch norm: this
    norm, by the name of the convolution."""
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
    """The names that the partner of a layer may have in a graph."""
    if not layer.is_function:
        return [layer.name, *layer.aliases]
    function = layer.type.removeprefix("fn:")
    names = []
    for operator, called in FUNCTIONS_OF_OPERATORS.items():
        if function in called.split():
            names.append(f"{layer.owner}/{operator}" if layer.owner else operator)
    return names


def _as_selectors(layers: Sequence[Layer]) -> str:
    """Selectors that match only these layers: `Conv2d@layer1.0.conv1`, with the class and
    the name of each."""
    texts = []
    for layer in layers:
        # `?` matches any character: it replaces those with a meaning in selectors
        pattern = re.sub(r"[][,#!*@(){}\\]", "?", layer.owner)
        texts.append(f"{layer.type}@{pattern}" if pattern else layer.type)
    return ",".join(texts)
