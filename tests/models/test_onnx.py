"""MODEL is an .onnx file: its layers are those of the network that it was made from."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import torch  # noqa: E402
from conftest import Run  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402
from onnx_graphs import conv_weights, exported, graph_file, small_net  # noqa: E402
from PIL import Image  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import featviz as fv  # noqa: E402
from featviz.errors import FeatvizError, LoadError, UsageError  # noqa: E402
from featviz.hooks.capture import forward, hooked  # noqa: E402
from featviz.hooks.eval_mode import in_eval_mode  # noqa: E402
from featviz.hooks.layers import list_layers  # noqa: E402
from featviz.models import onnx_file, onnx_model  # noqa: E402
from featviz.options import InputOptions  # noqa: E402
from featviz.records import CaptureSite  # noqa: E402
from featviz.run.workers import can_fork  # noqa: E402
from models.loading import load, load_whole  # noqa: E402

CaptureKey = tuple[str, str, int]
"""Name of the layer, kind, call."""


def captured(
    module: nn.Module, *args: Tensor, capture_kinds: tuple[str, ...] = ("output",)
) -> dict[CaptureKey, Tensor]:
    """What every layer gives."""
    tensors: dict[CaptureKey, Tensor] = {}

    def keep(site: CaptureSite, tensor: Tensor) -> None:
        tensors[site.layer.name, site.kind, site.call] = tensor.clone()

    with in_eval_mode(module), hooked(module, list_layers(module), keep, capture_kinds):
        forward(module, args)
    return tensors


IMAGE = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
ONES = torch.ones(1, 3, 8, 8)


@pytest.fixture(scope="module")
def of_torch(net: nn.Module) -> dict[CaptureKey, Tensor]:
    """What the network's own layers give for the image."""
    return captured(net, IMAGE)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return small_net()


@pytest.fixture(scope="module")
def file(net: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(net, tmp_path_factory.mktemp("onnx") / "net.onnx", dynamo=False)


@pytest.mark.medium
def test_layers_have_the_names_of_the_network(file: Path) -> None:
    """Modules by their paths, functions behind their module, classes by operator."""
    layers = {layer.name: layer.type for layer in list_layers(load(file))}
    assert layers["stem"] == "Conv"
    assert layers["blocks.1.relu"] == "Relu"
    assert layers["blocks.0/Add"] == "Add"
    assert layers["fc"] == "Gemm"


class Products(nn.Module):
    """A convolution upwards, one in groups, linear layers and a product of maps."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 6, 3, stride=2, groups=3)
        self.grouped = nn.Conv2d(6, 12, 3, groups=6, stride=4)
        self.query = nn.Linear(12, 7)
        self.key = nn.Linear(12, 7, bias=False)
        self.fc = nn.Linear(256, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.grouped(self.up(x)).flatten(2).transpose(1, 2)
        scores = self.query(tokens) @ self.key(tokens).transpose(1, 2)
        return self.fc(scores.mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("make", [small_net, Products])
def test_multiply_accumulates_are_those_of_the_network(
    make: Callable[[], nn.Module], dynamo: bool, tmp_path: Path
) -> None:
    """As torch counts them in the network that was exported."""
    module = make().eval()
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(1, 3, 32, 32))
    path = exported(module, tmp_path / "g.onnx", dynamo=dynamo)
    listing = fv.layers(path)
    assert 2 * listing.totals.macs == counter.get_total_flops()
    assert sum(row.own_macs for row in listing.rows) == listing.totals.macs
    assert listing.not_counted == {}


def test_a_node_whose_products_are_unknown_is_named(tmp_path: Path) -> None:
    """Below the table, since it is in no sum."""
    einsum = helper.make_node("Einsum", ["x", "x"], ["y"], equation="nchw,nchw->nchw")
    listing = fv.layers(graph_file(tmp_path / "einsum.onnx", [einsum]))
    assert listing.not_counted == {"Einsum": 1}


FOLDED = ["blocks.0.conv1", "blocks.1.conv1"]


@pytest.mark.medium
def test_every_layer_gives_what_the_network_gives(
    file: Path, of_torch: dict[CaptureKey, Tensor]
) -> None:
    """Each call of each layer equals torch's, but for a convolution whose norm is
    folded into it."""
    of_graph = captured(load(file), IMAGE)
    shared = of_graph.keys() & of_torch.keys()
    compared = [key for key in shared if key[0] not in FOLDED]
    assert ("blocks.1.relu", "output", 1) in compared
    assert ("blocks.0", "output", 0) in compared
    assert len(compared) == 13
    for key in compared:
        torch.testing.assert_close(of_graph[key], of_torch[key], rtol=1e-4, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("name", FOLDED)
def test_a_convolution_gives_what_its_folded_norm_gives(
    name: str, file: Path, of_torch: dict[CaptureKey, Tensor]
) -> None:
    """The exporter has made one layer of both."""
    of_graph = captured(load(file), IMAGE)
    norm = of_torch[name.replace("conv", "bn"), "output", 0]
    torch.testing.assert_close(of_graph[name, "output", 0], norm)


@pytest.mark.slow
def test_the_newer_exporter_names_the_folded_norm(
    net: nn.Module, of_torch: dict[CaptureKey, Tensor], tmp_path: Path
) -> None:
    """A fused convolution has the norm's name, whose output it computes."""
    model = load(exported(net, tmp_path / "net.onnx", dynamo=True))
    of_graph = captured(model, IMAGE)
    shared = of_graph.keys() & of_torch.keys()
    assert shared >= {("blocks.0.bn1", "output", 0), ("blocks.1.relu", "output", 1)}
    for key in shared:
        torch.testing.assert_close(of_graph[key], of_torch[key], rtol=1e-4, atol=1e-5)
    classes = {layer.name: layer.type for layer in list_layers(model)}
    assert classes["blocks.0"] == "Block"
    assert fnmatch.filter(classes, "blocks.0.bn1*") == ["blocks.0.bn1"]
    assert classes["blocks.0.bn1"] == "Conv"


def test_inputs_of_layers_are_what_comes_before_them(file: Path) -> None:
    """A layer takes the very values that another gave."""
    tensors = captured(load(file), IMAGE, capture_kinds=("input", "output"))
    stem = tensors["stem", "output", 0]
    assert torch.equal(tensors["blocks.0.conv1", "input", 0], stem)
    assert torch.equal(tensors["blocks.0", "input", 0], stem)


def test_a_session_returns_what_is_hooked_alone(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of other layers stay in ONNX Runtime."""
    model = load(file)
    layers = [layer for layer in list_layers(model) if layer.name == "stem"]
    names: list[str] = []
    # nothing public tells which values a session was asked for
    compute = onnx_model.OnnxModel._compute

    def watch(self: Any, outputs: Any, feeds: Any) -> Any:
        names.extend(outputs)
        return compute(self, outputs, feeds)

    monkeypatch.setattr(onnx_model.OnnxModel, "_compute", watch)
    with in_eval_mode(model), hooked(model, layers, lambda site, tensor: None):
        forward(model, [torch.zeros(1, 3, 32, 32)])
    assert len(names) == 2  # the stem's value, and the graph's


# Inputs


def node(operator: str, inputs: str, output: str, name: str = "", **more: Any) -> Any:
    return helper.make_node(operator, inputs.split(), [output], name, **more)


def fed(path: Path, *arguments: str) -> nn.Module:
    """The model with further inputs."""
    return load_whole(path, InputOptions(forward_args=arguments)).module


def one_node(operator: str, path: Path, **graph: Any) -> Path:
    """A graph from x to y."""
    return graph_file(path, [node(operator, "x", "y")], **graph)


def scalar(name: str) -> Any:
    """A further input."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])


def test_an_axis_of_no_length_has_any(tmp_path: Path) -> None:
    """Some exporters write -1 in place of a name."""
    path = one_node("Identity", tmp_path / "any.onnx", shape=(-1, 3, -1, -1))
    model = load_whole(path)
    assert model.preprocess.blank()[0].shape == (1, 3, 224, 224)


def test_an_image_with_channels_last_is_turned(tmp_path: Path) -> None:
    """A graph that takes [N, H, W, C] gets it, with the size that it fixes."""
    path = one_node("Identity", tmp_path / "nhwc.onnx", shape=("n", 6, 8, 3))
    model = load_whole(path)
    image = torch.rand(1, 3, 6, 8)
    assert model.preprocess.blank()[0].shape == (1, 3, 6, 8)
    assert torch.equal(model.module(image), image.permute(0, 2, 3, 1))


def test_an_image_four_wide_has_its_channels_first(tmp_path: Path) -> None:
    """[N, 3, 8, 4] could be either, and most tools write [N, C, H, W]."""
    path = one_node("Identity", tmp_path / "narrow.onnx", shape=("n", 3, 8, 4))
    model = load_whole(path)
    image = torch.rand(1, 3, 8, 4)
    assert model.preprocess.blank()[0].shape == (1, 3, 8, 4)
    assert torch.equal(model.module(image), image)


def test_a_graph_of_bytes_takes_levels(tmp_path: Path) -> None:
    """uint8 inputs are 0 to 255, without mean and std."""
    path = one_node("Identity", tmp_path / "bytes.onnx", dtype=TensorProto.UINT8)
    model = load_whole(path)
    output = model.module(ONES / 2)
    assert not model.preprocess.guessed
    assert output.dtype == torch.uint8
    assert output.unique().tolist() == [128]


def test_half_precision_is_fed_as_such(tmp_path: Path) -> None:
    """A float16 graph takes the float32 that images are made into."""
    path = one_node("Relu", tmp_path / "half.onnx", dtype=TensorProto.FLOAT16)
    assert load(path)(ONES).dtype == torch.float16


def test_several_inputs_have_names(tmp_path: Path) -> None:
    """What is no image is asked for by name, in one line."""
    nodes = [node("Mul", "x im:scale", "y", "mul")]
    path = graph_file(tmp_path / "two.onnx", nodes, inputs=[scalar("im:scale")])
    model = load_whole(path)
    assert model.preprocess.inputs == 1
    with pytest.raises(UsageError, match=r"im:scale, float32 1") as caught:
        model.module(ONES)
    assert caught.value.hint == "--forward-arg im_scale=VALUE"
    assert fed(path, "im_scale=ones:1")(ONES).sum() == 192


def test_names_that_python_keeps_for_itself(tmp_path: Path) -> None:
    """A keyword gets an underscore, and no two inputs one argument."""
    nodes = [
        node("Mul", "x in", "a", "first"),
        node("Mul", "a x.1", "b", "second"),
        node("Mul", "b x_1", "y", "third"),
    ]
    inputs = [scalar("in"), scalar("x.1"), scalar("x_1")]
    path = graph_file(tmp_path / "names.onnx", nodes, inputs=inputs)
    model = fed(path, "_in=ones:1", "x_1=ones:1", "x_1_=ones:1")
    assert model(ONES).sum() == 192


def test_the_image_may_be_the_second_input(tmp_path: Path) -> None:
    """Positional arguments are images, wherever these stand in the graph."""
    nodes = [node("Mul", "x image", "y", "mul")]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 8, 8])
    path = graph_file(tmp_path / "late.onnx", nodes, shape=(1,), inputs=[image])
    assert fed(path, "x=ones:1")(ONES).sum() == 192


class Residual(nn.Module):
    """As in many networks for super-resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + x


def test_a_module_may_be_called_body(tmp_path: Path) -> None:
    """It is a name like any other."""
    net = nn.Sequential(Residual(), nn.Conv2d(3, 2, 1)).eval()
    path = exported(net, tmp_path / "body.onnx", dynamo=False, size=8)
    image = torch.rand(1, 3, 8, 8)
    values = captured(load(path), image)
    assert torch.allclose(values["0", "output", 0], net[0](image), atol=1e-6)


class Twice(nn.Module):
    """A module of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 1)
        self.second = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        return x, self.second(x)


class OfTwo(nn.Module):
    """Takes both of them."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = Twice()

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.twice(x)
        return first.relu() * second


def test_a_module_of_two_outputs_has_none_of_its_own(tmp_path: Path) -> None:
    """Which of them it returned first nobody knows; what is in it has its own."""
    net = OfTwo().eval()
    path = exported(net, tmp_path / "two.onnx", dynamo=False, size=8)
    image = torch.rand(1, 3, 8, 8)
    values = captured(load(path), image)
    assert ("twice", "output", 0) not in values
    expected = net.twice(image)[1]
    assert torch.allclose(values["twice.second", "output", 0], expected, atol=1e-6)


PARTS = [f"s{number}" for number in range(62)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conv", "conv"),
        (".a..b.", "a.b"),
        (".", "node"),
        ("", "y"),
        (".".join(PARTS), "_".join(PARTS)),
    ],
    ids=["plain", "empty parts", "dot", "none", "deep"],
)
def test_what_a_node_is_called(name: str, expected: str, tmp_path: Path) -> None:
    """By its name, without empty parts, and not too deep; else by its value."""
    path = graph_file(tmp_path / "named.onnx", [node("Relu", "x", "y", name)])
    assert [layer.name for layer in list_layers(load(path)) if layer.name][
        -1
    ] == expected


def test_nodes_whose_names_become_one_are_layers_of_their_own(tmp_path: Path) -> None:
    """They are numbered, past the names of others."""
    chain = [
        node("Relu", "x", "a", "same"),
        node("Relu", "a", "b", "same_1"),
        node("Relu", "b", "c", ".same"),
        node("Relu", "c", "d", "same."),
        node("Relu", "d", "y", "..same"),
    ]
    model = load(graph_file(tmp_path / "same.onnx", chain))
    names = [layer.name for layer in list_layers(model) if layer.name]
    assert names == ["same", "same_1", "same_2", "same_3", "same_4"]


def test_a_graph_of_too_many_nodes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where they stand, and as functions become them."""
    monkeypatch.setattr(onnx_file, "MOST_NODES", 3)
    names = ["x", "a", "b", "c", "y"]
    chain = [node("Relu", *pair) for pair in pairwise(names)]
    opset = helper.make_opsetid("", 18)
    twice = [node("Relu", "i", "t"), node("Relu", "t", "o")]
    function = helper.make_function("own", "Twice", ["i"], ["o"], twice, [opset])
    calls = [node("Twice", *pair, domain="own") for pair in (("x", "a"), ("a", "y"))]
    for nodes, functions, message in (
        (chain, [], "has 4 nodes"),
        (calls, [function], "has 4 nodes"),
    ):
        path = graph_file(tmp_path / "many.onnx", nodes, functions=functions)
        with pytest.raises(LoadError, match=message) as caught:
            load(path)
        assert caught.value.hint == "at most 3"
    assert load(graph_file(tmp_path / "few.onnx", chain[:2], outputs=["b"]))


def test_values_beside_a_graph_are_read_where_they_lie(tmp_path: Path) -> None:
    """The graph that reaches ONNX Runtime names no file any more."""
    model = onnx.load(graph_file(tmp_path / "g.onnx", [node("Identity", "x", "y")]))
    tensor = model.graph.initializer.add(name="w", dims=[2], data_location=1)
    tensor.data_type = TensorProto.FLOAT
    for key, value in {"location": "w.bin", "offset": "5", "length": "8"}.items():
        tensor.external_data.add(key=key, value=value)
    (tmp_path / "w.bin").write_bytes(bytes(range(30)))
    (tmp_path / "g.onnx").write_bytes(model.SerializeToString())
    (read,) = onnx_file.read_graph(tmp_path / "g.onnx").graph.initializer
    assert read.raw_data == bytes(range(5, 13))
    assert not read.external_data


# Quantised graphs


def quantised(path: Path, outputs: Sequence[str] = ("y",)) -> Path:
    """A convolution between nodes that quantise, as onnxruntime.quantization writes it."""
    tensors = {
        "weight": conv_weights(),
        "scale": np.float32(0.02).reshape(()),
        "zero": np.uint8(128).reshape(()),
    }
    nodes = [
        node("QuantizeLinear", "x scale zero", "xq", "q1"),
        node("DequantizeLinear", "xq scale zero", "xd", "d1"),
        node("Conv", "xd weight", "c", "conv"),
        node("QuantizeLinear", "c scale zero", "cq", "q2"),
        node("DequantizeLinear", "cq scale zero", "cd", "d2"),
        node("Relu", "cd", "y", "relu"),
    ]
    return graph_file(path, nodes, tensors, outputs=outputs)


def test_the_value_behind_dequantize_stands_for_the_layer(tmp_path: Path) -> None:
    """A quantised convolution gives multiples of its scale, and quantisers are no
    layers."""
    model = load(quantised(tmp_path / "q.onnx"))
    assert [layer.name for layer in list_layers(model)] == ["", "conv", "relu"]
    steps = captured(model, torch.rand(1, 3, 8, 8))["conv", "output", 0] / 0.02
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)


def test_a_value_that_the_graph_returns_is_that_of_the_layer(tmp_path: Path) -> None:
    """It is the one before it is quantised."""
    model = load(quantised(tmp_path / "q.onnx", ["c", "y"]))
    image = torch.rand(1, 3, 8, 8)
    assert torch.equal(captured(model, image)["conv", "output", 0], model(image)["c"])


def module_of_convolutions(path: Path, is_quantised: bool) -> Path:
    """Two convolutions and an addition inside the module `block`, by torch's older names,
    of which the second and the addition take what is made inside."""
    tensors = {
        "weight": conv_weights(3),
        "scale": np.float32(0.02).reshape(()),
        "zero": np.uint8(128).reshape(()),
    }
    steps = {
        "a": node("Relu", "x", "a", "/stem/Relu"),
        "b": node("Conv", "a weight", "b", "/block/conv1/Conv", pads=[1] * 4),
        "c": node("Conv", "b weight", "c", "/block/conv2/Conv", pads=[1] * 4),
        "y": node("Add", "c b", "y", "/block/Add"),
    }
    nodes = []
    for value, step in steps.items():
        nodes.append(step)
        if is_quantised and value != "y":
            # as onnxruntime.quantization does, whoever takes the value takes the last name
            step.output[0] = f"{value}0"
            nodes.append(node("QuantizeLinear", f"{value}0 scale zero", f"{value}q"))
            nodes.append(node("DequantizeLinear", f"{value}q scale zero", value))
    return graph_file(path, nodes, tensors)


def inputs_of_layers(model: nn.Module) -> list[str]:
    """The name of a layer for each tensor that it takes."""
    names: list[str] = []

    def keep(site: CaptureSite, tensor: Tensor) -> None:
        names.append(site.layer.name)

    with in_eval_mode(model), hooked(model, list_layers(model), keep, ("input",)):
        forward(model, [ONES])
    return names


def test_a_quantised_module_takes_what_the_same_one_in_floats_takes(
    tmp_path: Path,
) -> None:
    """Values that are made inside of it are not among its inputs."""
    floats = load(module_of_convolutions(tmp_path / "floats.onnx", False))
    integers = load(module_of_convolutions(tmp_path / "integers.onnx", True))
    inputs = inputs_of_layers(floats)
    assert inputs.count("block") == 1
    assert inputs_of_layers(integers) == inputs


# Local functions


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_function_may_be_called_as_often_as_one_likes(
    calls: int, depth: int, tmp_path: Path
) -> None:
    """Each call counts, also those of functions inside functions, of which the last one
    doubles its values."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("f", 18)]
    names = [f"F{number}" for number in range(depth)]

    def chain(callee: str) -> list[Any]:
        """Nodes from x to y, each of which calls the same."""
        values = ["x", *(f"v{number}" for number in range(1, calls)), "y"]
        domain = "f" if callee in names else ""
        inputs = "{0} {0}" if callee == "Add" else "{0}"
        return [
            node(callee, inputs.format(before), after, domain=domain)
            for before, after in pairwise(values)
        ]

    functions = []
    for name, callee in zip(names, [*names[1:], "Add"], strict=True):
        body = chain(callee)
        functions.append(helper.make_function("f", name, ["x"], ["y"], body, opsets))
    file = graph_file(tmp_path / "f.onnx", chain(names[0]), functions=functions)
    doubled = calls ** (depth + 1)
    assert torch.equal(load(file)(ONES), ONES * 2**doubled)


# What is refused


@pytest.mark.medium
@pytest.mark.parametrize("option", ["--capture=grad", "--ablate=stem:0"])
def test_gradients_are_refused_in_a_line(
    option: str, featviz: Run, file: Path, picture: Path
) -> None:
    """Nothing goes back through ONNX Runtime."""
    done = featviz("run", file, picture, "--out", "out", option)
    assert done.code == 2
    assert "ONNX Runtime runs this model: it has no gradients" in done.err


def test_without_the_extra_the_message_names_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install 'featviz[onnx]'` is the remedy."""
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(LoadError) as caught:
        load(file)
    assert caught.value.hint == "pip install 'featviz[onnx]'"


@pytest.mark.medium
def test_a_loop_without_end_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watchdog ends the run of a graph that counts to 2^40."""
    monkeypatch.setattr(onnx_model, "MOST_SECONDS", 0.5)
    value = helper.make_tensor_value_info
    inputs = [
        value("i", TensorProto.INT64, []),
        value("go", TensorProto.BOOL, []),
        value("a", TensorProto.FLOAT, []),
    ]
    outputs = [value("go_on", TensorProto.BOOL, []), value("b", TensorProto.FLOAT, [])]
    steps = [
        node("Identity", "go", "go_on"),
        node("Add", "a a", "b"),
    ]
    body = helper.make_graph(steps, "body", inputs, outputs)
    nodes = [
        node("ReduceMean", "x", "m", keepdims=0),
        node("Loop", "count true m", "y", body=body),
    ]
    constants = {"count": np.int64(2**40).reshape(()), "true": np.array(True)}
    model = load(graph_file(tmp_path / "loop.onnx", nodes, constants))
    with pytest.raises(FeatvizError, match="terminate flag"):
        forward(model, [ONES])


# Commands


@pytest.mark.medium
@pytest.mark.parametrize(
    "command",
    [
        "run {file} {picture} --layers Conv,Relu --out run",
        "layers {file} --layers Conv",
        "look {file} {picture} --out look.png",
        "audit {file} {picture} --layers Conv,Relu --out audit",
        "exemplars {file} {picture} --layers Relu#0 --out exemplars",
    ],
)
def test_commands_take_it_as_any_model(
    command: str, featviz: Run, file: Path, picture: Path
) -> None:
    """They end well."""
    done = featviz(*command.format(file=file, picture=picture).split())
    assert done.code == 0, done.err


@pytest.mark.medium
def test_pictures_lie_under_the_names_of_the_network(
    featviz: Run, file: Path, picture: Path
) -> None:
    """A folder for each layer."""
    featviz("run", file, picture, "--layers", "Conv", "--out", "run")
    names = [path.name for path in Path("run", picture.name).iterdir()]
    assert any(name.endswith("_blocks.0.conv1") for name in names)


@pytest.mark.slow
@pytest.mark.skipif(not can_fork(), reason="workers are forked on Linux alone")
def test_worker_processes_draw_a_graph(file: Path, tmp_path: Path) -> None:
    """A worker has sessions of its own, and leaves those of its parent alone, whose
    threads it lacks: their end would wait for ever."""
    for number in range(5):
        Image.new("RGB", (32, 32), (40 * number, 90, 0)).save(
            tmp_path / f"{number}.png"
        )
    pictures = sorted(tmp_path.glob("*.png"))

    def drawn_by(jobs: str) -> dict[Path, bytes]:
        """The pictures of so many processes."""
        out = tmp_path / f"out-{jobs}"
        options = ["--preset", "none", "--layers", "Relu", "--jobs", jobs]
        command = ["run", file, *pictures, *options, "-q", "--out", out]
        subprocess.run(
            [sys.executable, "-m", "featviz", *map(str, command)],
            env={**os.environ, "OMP_NUM_THREADS": "2"},
            check=True,
            timeout=100,
        )
        files = [path for path in out.rglob("*.png") if path.is_file()]
        return {path.relative_to(out): path.read_bytes() for path in files}

    alone = drawn_by("1")
    assert len(alone) > 5
    assert drawn_by("2") == alone
