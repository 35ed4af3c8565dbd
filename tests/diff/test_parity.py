"""A network against the graph that was exported of it: pairs, faults, and what is said
of both."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from conftest import ROOT, Run  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx_graphs import (  # noqa: E402
    conv_weights,
    exported,
    graph_file,
    silu_net,
    small_net,
)

pytestmark = pytest.mark.medium


NETWORK = f"{ROOT / 'tests/onnx_graphs.py'}:small_net"
LAYERS = "Conv2d,ReLU,Linear"


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(small_net(), tmp_path_factory.mktemp("g") / "g.onnx", dynamo=False)


def compared(featviz: Run, *command: object) -> tuple[int, dict[str, Any]]:
    outcome = featviz("diff", *command, "--size", "32x32", "--json")
    assert outcome.out, outcome.err
    return outcome.code, json.loads(outcome.out)


def test_every_layer_has_its_partner(featviz: Run, graph: Path, picture: Path) -> None:
    """Convolutions with a norm are compared where the norm gives its output."""
    _, document = compared(featviz, NETWORK, graph, picture, "--layers", LAYERS)
    counts = Counter(layer["in_new"]["found_by"] for layer in document["layers"])
    # stem, two times conv2, four calls of relu, fc; and two norms
    assert counts == {"name": 8, "folded norm": 2}
    assert document["folded"] == ["blocks.0.conv1", "blocks.1.conv1"]
    assert not document["only_in_base"]["layers"]
    assert not document["only_in_new"]["layers"]


def test_a_network_and_its_export_are_equal(
    featviz: Run, graph: Path, picture: Path
) -> None:
    """Where there is noise at all, it is 90 dB below the signal."""
    code, document = compared(featviz, NETWORK, graph, picture, "--layers", LAYERS)
    assert code == 0
    sqnr = [layer["sqnr"] for layer in document["layers"]]
    assert min(number for number in sqnr if number is not None) > 90


def test_the_graph_may_come_first(featviz: Run, graph: Path, picture: Path) -> None:
    """The same pairs the other way round, in the order of the graph."""
    code, document = compared(featviz, graph, NETWORK, picture, "--layers", LAYERS)
    assert code == 0
    pairs = {layer["layer"]: layer["in_new"]["layer"] for layer in document["layers"]}
    assert pairs["blocks.0.conv1"] == "blocks.0.bn1"
    assert pairs["blocks.1.conv2"] == "blocks.1.conv2"


def test_a_graph_of_one_size_decides_the_size_of_both(
    featviz: Run, graph: Path, picture: Path
) -> None:
    """Without --size, also where the preset would keep that of the image."""
    for options in ([], ["--preset", "none"]):
        done = featviz("diff", NETWORK, graph, picture, *options)
        assert (done.code, done.out.count("equal")) == (0, 1), done.err


def test_weights_are_those_of_the_network(
    featviz: Run, graph: Path, picture: Path
) -> None:
    """The graph beside it has its own."""
    torch.save(small_net().state_dict(), "weights.pth")
    done = featviz("diff", NETWORK, graph, picture, "--weights", "weights.pth")
    assert done.code == 0, done.err


@pytest.mark.parametrize("layers", ["Conv", "Conv2d"])
def test_selectors_may_match_one_of_both(
    layers: str, featviz: Run, graph: Path, picture: Path
) -> None:
    """Nodes of a graph have types of their own; their partners are drawn, too."""
    _, document = compared(featviz, NETWORK, graph, picture, "--layers", layers)
    convolutions = [
        name
        for name, module in small_net().named_modules()
        if isinstance(module, torch.nn.Conv2d)
    ]
    names = [layer["layer"] for layer in document["layers"]]
    assert set(convolutions) <= {*names, *document["folded"]}


def test_selectors_that_match_neither_are_refused(
    featviz: Run, graph: Path, picture: Path
) -> None:
    """The message says what there is in the network."""
    done = featviz("diff", NETWORK, graph, picture, "--layers", "Nix")
    assert done.code == 2
    assert "no layer matches --layers 'Nix'" in done.err
    assert "Conv2d" in done.err


def test_without_layers_the_stages_are_compared(
    featviz: Run, graph: Path, picture: Path
) -> None:
    """The same first look at both."""
    code, document = compared(featviz, NETWORK, graph, picture)
    assert code == 0
    assert "blocks.1" in [layer["layer"] for layer in document["layers"]]


def test_functions_are_paired_by_their_module(
    featviz: Run, graph: Path, picture: Path
) -> None:
    """`blocks.0/fn:add` is `blocks.0/Add`, and the table says so."""
    command = ("diff", NETWORK, graph, picture, "--size", "32x32")
    outcome = featviz(*command, "--layers", "fn:add", "--tolerance", "0")
    assert "blocks.0/Add (module path)" in outcome.out
    assert "paired: 2 by module path" in outcome.out


def test_nodes_inside_a_module_are_no_difference(featviz: Run, picture: Path) -> None:
    """A SiLU is compared as a whole; its Sigmoid is listed as inside it."""
    path = exported(silu_net(), Path("silu.onnx"), dynamo=False)
    network = NETWORK.replace("small_net", "silu_net")
    code, document = compared(
        featviz, network, path, picture, "--layers", "SiLU,Sigmoid"
    )
    assert code == 0
    assert [layer["layer"] for layer in document["layers"]] == ["1"]
    assert document["folded"] == ["1/Sigmoid"]


# Faults


def _scaled(model: Any) -> None:
    tensor = _weights_of(model, "/blocks/blocks.1/conv2/Conv")
    array = numpy_helper.to_array(tensor) * 1.5
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _swapped(model: Any) -> None:
    """Two channels of a convolution change places."""
    tensor = _weights_of(model, "/blocks/blocks.0/conv2/Conv")
    array = numpy_helper.to_array(tensor).copy()
    array[[0, 1]] = array[[1, 0]]
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _badly_quantised(model: Any) -> None:
    """A layer is quantised by a scale that is too small, so that it saturates."""
    node = _node(model, "/blocks/blocks.0/relu/Relu")
    value = node.output[0]
    scale = numpy_helper.from_array(np.float32(1e-4), "scale")
    zero = numpy_helper.from_array(np.uint8(0), "zero")
    model.graph.initializer.extend([scale, zero])
    _behind(
        model,
        node,
        helper.make_node("QuantizeLinear", [value, "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
    )


def _in_half(model: Any) -> None:
    """A block computes on values of bfloat16."""
    node = _node(model, "/blocks/blocks.1/conv1/Conv")
    value = node.output[0]
    cast = {"to": TensorProto.BFLOAT16}
    half = helper.make_node(
        "Cast", [value], ["q"], "/blocks/blocks.1/conv1/Cast", **cast
    )
    name = "/blocks/blocks.1/conv1/Cast_1"
    back = helper.make_node("Cast", ["q"], ["d"], name, to=TensorProto.FLOAT)
    _behind(model, node, half, back)


def _node(model: Any, name: str) -> Any:
    (node,) = [node for node in model.graph.node if node.name == name]
    return node


def _weights_of(model: Any, name: str) -> Any:
    weights = _node(model, name).input[1]
    (tensor,) = [t for t in model.graph.initializer if t.name == weights]
    return tensor


def _behind(model: Any, node: Any, *nodes: Any) -> None:
    """Puts nodes behind another one; what took its value takes the last one's."""
    value = node.output[0]
    for user in model.graph.node:
        user.input[:] = ["d" if name == value else name for name in user.input]
    number = list(model.graph.node).index(node)
    for new in reversed(nodes):
        model.graph.node.insert(number + 1, new)


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        (_scaled, "blocks.1.conv2"),
        (_swapped, "blocks.0.conv2"),
        (_badly_quantised, "blocks.0.relu"),
        (_in_half, "blocks.1.bn1"),
    ],
)
def test_a_fault_is_the_first_divergence(
    fault: Callable[[Any], None],
    first: str,
    featviz: Run,
    graph: Path,
    picture: Path,
) -> None:
    """What comes before it is equal, and it is named."""
    model = onnx.load(graph)
    fault(model)
    path = Path("faulty.onnx")
    onnx.save(model, path)
    code, document = compared(featviz, NETWORK, path, picture, "--layers", LAYERS)
    assert code == 4
    assert document["first_divergence"]["layer"] == first


# Names and layouts of other tools


def test_channels_last_are_turned(featviz: Run, picture: Path) -> None:
    """[1, H, W, C] of a graph is compared with [1, C, H, W]."""
    weights = conv_weights()
    plain = graph_file(
        Path("first.onnx"),
        [helper.make_node("Conv", ["x", "w"], ["y"], "conv")],
        {"w": weights},
        shape=(1, 3, 32, 32),
    )
    turned = graph_file(
        Path("last.onnx"),
        [
            helper.make_node("Conv", ["x", "w"], ["a"], "inner"),
            helper.make_node("Transpose", ["a"], ["y"], "conv", perm=[0, 2, 3, 1]),
        ],
        {"w": weights},
        shape=(1, 3, 32, 32),
    )
    code, document = compared(featviz, plain, turned, picture, "--layers", "conv")
    assert code == 0
    assert document["layers"][0]["reason"] is None


def test_names_of_other_tools_are_paired_by_order(
    featviz: Run, picture: Path, tiny_file: Path
) -> None:
    """A graph that knows no modules: equally many layers of one family and shape."""
    tiny = torch.load(tiny_file, weights_only=False)
    path = graph_file(
        Path("other.onnx"),
        [
            helper.make_node(
                "Conv", ["x", "w", "b"], ["a"], "model/a/Conv2D", pads=[1] * 4
            ),
            helper.make_node("Relu", ["a"], ["y"], "model/b/Relu"),
        ],
        {"w": tiny[0].weight.detach().numpy(), "b": tiny[0].bias.detach().numpy()},
        shape=(1, 3, 32, 32),
    )
    layers = "Conv2d,ReLU,Conv,Relu"
    code, document = compared(featviz, tiny_file, path, picture, "--layers", layers)
    assert code == 0
    reasons = [layer["in_new"]["found_by"] for layer in document["layers"]]
    assert reasons == ["order", "order"]
