"""MODEL is an .onnx file: its layers are those of the network that it was made from."""

from __future__ import annotations

import sys
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
from torch import nn  # noqa: E402

from featviz.errors import FeatvizError, LoadError, UsageError  # noqa: E402
from featviz.hooks.capture import forward, hooked  # noqa: E402
from featviz.hooks.eval_mode import in_eval_mode  # noqa: E402
from featviz.hooks.layers import list_layers  # noqa: E402
from featviz.models import onnx_model  # noqa: E402
from featviz.models.load import LoadedModel, load_model  # noqa: E402
from featviz.options import InputOptions, ModelOptions  # noqa: E402
from featviz.records import CaptureSite  # noqa: E402


def load(path: Path, **inputs: Any) -> LoadedModel:
    return load_model(ModelOptions(str(path), device="cpu"), InputOptions(**inputs))


def captured(
    module: nn.Module, *args: torch.Tensor, kinds: tuple[str, ...] = ("output",)
) -> dict[tuple[str, str, int], torch.Tensor]:
    """What every layer gives, by name, kind and call."""
    tensors: dict[tuple[str, str, int], torch.Tensor] = {}

    def keep(site: CaptureSite, tensor: torch.Tensor) -> None:
        tensors[site.layer.name, site.kind, site.call] = tensor.clone()

    with in_eval_mode(module), hooked(module, list_layers(module), keep, kinds):
        forward(module, args)
    return tensors


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return small_net()


@pytest.fixture(scope="module")
def file(net: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(net, tmp_path_factory.mktemp("onnx") / "net.onnx", dynamo=False)


def test_layers_have_the_names_of_the_network(file: Path) -> None:
    """Modules by their paths, functions behind their module, classes by operator."""
    layers = {layer.name: layer.type for layer in list_layers(load(file).module)}
    assert layers["stem"] == "Conv"
    assert layers["blocks.1.relu"] == "Relu"
    assert layers["blocks.0/Add"] == "Add"
    assert layers["fc"] == "Gemm"


def test_every_layer_gives_what_the_network_gives(file: Path, net: nn.Module) -> None:
    """Each call of each layer equals torch's, but for a convolution whose norm is
    folded into it."""
    image = torch.rand(1, 3, 32, 32)
    of_graph = captured(load(file).module, image)
    of_torch = captured(net, image)
    folded = [f"blocks.{number}.conv1" for number in range(2)]
    shared = of_graph.keys() & of_torch.keys()
    compared = [key for key in shared if key[0] not in folded]
    assert ("blocks.1.relu", "output", 1) in compared
    assert ("blocks.0", "output", 0) in compared
    assert len(compared) == 13
    for key in compared:
        torch.testing.assert_close(of_graph[key], of_torch[key], rtol=1e-4, atol=1e-5)
    for name in folded:
        norm = of_torch[name.replace("conv", "bn"), "output", 0]
        torch.testing.assert_close(of_graph[name, "output", 0], norm)


@pytest.mark.slow
def test_the_newer_exporter_names_the_folded_norm(
    net: nn.Module, tmp_path: Path
) -> None:
    """A fused convolution has the norm's name, whose output it computes."""
    image = torch.rand(1, 3, 32, 32)
    model = load(exported(net, tmp_path / "net.onnx", dynamo=True))
    of_graph = captured(model.module, image)
    of_torch = captured(net, image)
    shared = of_graph.keys() & of_torch.keys()
    assert ("blocks.0.bn1", "output", 0) in shared
    assert ("blocks.1.relu", "output", 1) in shared
    for key in shared:
        torch.testing.assert_close(of_graph[key], of_torch[key], rtol=1e-4, atol=1e-5)
    classes = {layer.name: layer.type for layer in list_layers(model.module)}
    assert classes["blocks.0"] == "Block"


def test_inputs_of_layers_are_what_comes_before_them(file: Path) -> None:
    """A layer takes the very values that another gave."""
    tensors = captured(
        load(file).module, torch.rand(1, 3, 32, 32), kinds=("input", "output")
    )
    stem = tensors["stem", "output", 0]
    assert torch.equal(tensors["blocks.0.conv1", "input", 0], stem)
    assert torch.equal(tensors["blocks.0", "input", 0], stem)


def test_values_come_in_parts_where_they_are_large(
    file: Path, net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for one value at a time every layer still sees its own."""
    image = torch.rand(1, 3, 32, 32)
    whole = captured(load(file).module, image)
    monkeypatch.setattr(onnx_model, "MOST_BYTES_AT_ONCE", 1)
    in_parts = captured(load(file).module, image)
    assert whole.keys() == in_parts.keys()
    for key, tensor in whole.items():
        assert torch.equal(tensor, in_parts[key])


def test_a_session_returns_what_is_hooked_alone(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of other layers stay in ONNX Runtime."""
    model = load(file)
    layers = [layer for layer in list_layers(model.module) if layer.name == "stem"]
    names: list[str] = []
    compute = onnx_model.OnnxModel._compute

    def watch(self: Any, all_names: Any, feeds: Any, wanted: Any) -> Any:
        names.extend(wanted)
        return compute(self, all_names, feeds, wanted)

    monkeypatch.setattr(onnx_model.OnnxModel, "_compute", watch)
    with (
        in_eval_mode(model.module),
        hooked(model.module, layers, lambda site, tensor: None),
    ):
        forward(model.module, [torch.zeros(1, 3, 32, 32)])
    assert len(names) == 2  # the stem's value, and the graph's


# Inputs


def test_an_image_with_channels_last_is_turned(tmp_path: Path) -> None:
    """A graph that takes [N, H, W, C] gets it, with the size that it fixes."""
    path = graph_file(
        tmp_path / "nhwc.onnx",
        [helper.make_node("Identity", ["x"], ["y"], "copy")],
        shape=("n", 6, 8, 3),
    )
    model = load(path)
    image = torch.rand(1, 3, 6, 8)
    assert model.preprocess.blank()[0].shape == (1, 3, 6, 8)
    assert torch.equal(model.module(image), image.permute(0, 2, 3, 1))


def test_a_graph_of_bytes_takes_levels(tmp_path: Path) -> None:
    """uint8 inputs are 0 to 255, without mean and std."""
    path = graph_file(
        tmp_path / "bytes.onnx",
        [helper.make_node("Identity", ["x"], ["y"], "copy")],
        dtype=TensorProto.UINT8,
    )
    model = load(path)
    assert not model.preprocess.guessed
    output = model.module(torch.full((1, 3, 8, 8), 0.5))
    assert output.dtype == torch.uint8
    assert output.unique().tolist() == [128]


def test_half_precision_is_fed_as_such(tmp_path: Path) -> None:
    """A float16 graph takes the float32 that images are made into."""
    path = graph_file(
        tmp_path / "half.onnx",
        [helper.make_node("Relu", ["x"], ["y"], "relu")],
        dtype=TensorProto.FLOAT16,
    )
    assert load(path).module(torch.rand(1, 3, 8, 8)).dtype == torch.float16


def test_several_inputs_have_names(tmp_path: Path, featviz: Run) -> None:
    """What is no image is asked for by name, in one line."""
    path = graph_file(
        tmp_path / "two.onnx",
        [helper.make_node("Mul", ["x", "im:scale"], ["y"], "mul")],
        inputs=[helper.make_tensor_value_info("im:scale", TensorProto.FLOAT, [1])],
    )
    model = load(path)
    assert model.preprocess.inputs == 1
    with pytest.raises(UsageError, match=r"im:scale, float32 1") as caught:
        model.module(torch.ones(1, 3, 8, 8))
    assert caught.value.hint == "--forward-arg im_scale=VALUE"
    fed = load(path, forward_args=("im_scale=ones:1",))
    assert fed.module(torch.ones(1, 3, 8, 8)).sum() == 192


def test_names_that_python_keeps_for_itself(tmp_path: Path) -> None:
    """A keyword gets an underscore, and no two inputs one argument."""
    values = ("in", "x.1", "x_1")
    path = graph_file(
        tmp_path / "names.onnx",
        [
            helper.make_node("Mul", ["x", "in"], ["a"], "first"),
            helper.make_node("Mul", ["a", "x.1"], ["b"], "second"),
            helper.make_node("Mul", ["b", "x_1"], ["y"], "third"),
        ],
        inputs=[
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])
            for name in values
        ],
    )
    fed = load(path, forward_args=("_in=ones:1", "x_1=ones:1", "x_1_=ones:1"))
    assert fed.module(torch.ones(1, 3, 8, 8)).sum() == 192


def test_the_image_may_be_the_second_input(tmp_path: Path) -> None:
    """Positional arguments are images, wherever these stand in the graph."""
    path = graph_file(
        tmp_path / "late.onnx",
        [helper.make_node("Mul", ["x", "image"], ["y"], "mul")],
        shape=(1,),
        inputs=[
            helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 8, 8])
        ],
    )
    fed = load(path, forward_args=("x=ones:1",))
    assert fed.module(torch.ones(1, 3, 8, 8)).sum() == 192


def test_a_module_may_be_called_body(tmp_path: Path) -> None:
    """As in many networks for super-resolution; it is a name like any other."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) + x

    net = nn.Sequential(Block(), nn.Conv2d(3, 2, 1)).eval()
    path = exported(net, tmp_path / "body.onnx", dynamo=False, size=8)
    model = load(path)
    image = torch.rand(1, 3, 8, 8)
    values = captured(model.module, image)
    assert torch.allclose(values["0", "output", 0], net[0](image), atol=1e-6)


# Quantised graphs


def quantised(path: Path, scale: float = 0.02) -> Path:
    """A convolution between nodes that quantise, as onnxruntime.quantization writes it."""
    tensors = {
        "weight": conv_weights(),
        "scale": np.float32(scale).reshape(()),
        "zero": np.uint8(128).reshape(()),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["xq"], "q1"),
        helper.make_node("DequantizeLinear", ["xq", "scale", "zero"], ["xd"], "d1"),
        helper.make_node("Conv", ["xd", "weight"], ["c"], "conv"),
        helper.make_node("QuantizeLinear", ["c", "scale", "zero"], ["cq"], "q2"),
        helper.make_node("DequantizeLinear", ["cq", "scale", "zero"], ["cd"], "d2"),
        helper.make_node("Relu", ["cd"], ["y"], "relu"),
    ]
    return graph_file(path, nodes, tensors)


def test_the_value_behind_dequantize_stands_for_the_layer(tmp_path: Path) -> None:
    """A quantised convolution gives multiples of its scale, and quantisers are no
    layers."""
    model = load(quantised(tmp_path / "q.onnx"))
    assert [layer.name for layer in list_layers(model.module)] == ["", "conv", "relu"]
    tensors = captured(model.module, torch.rand(1, 3, 8, 8))
    steps = tensors["conv", "output", 0] / 0.02
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)


# What is refused


def test_gradients_are_refused_in_a_line(
    featviz: Run, file: Path, picture: Path
) -> None:
    """Nothing goes back through ONNX Runtime."""
    for option in (("--capture", "grad"), ("--ablate", "stem:0")):
        outcome = featviz("run", file, picture, "--out", "out", *option)
        assert outcome.code == 2
        assert "ONNX Runtime runs this model: it has no gradients" in outcome.err


def test_without_the_extra_the_message_names_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install 'featviz[onnx]'` is the remedy."""
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(LoadError) as caught:
        load(file)
    assert caught.value.hint == "pip install 'featviz[onnx]'"


def test_a_loop_without_end_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watchdog ends the run of a graph that counts to 2^40."""
    monkeypatch.setattr(onnx_model, "MOST_SECONDS", 0.5)
    scalar = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Add", ["a", "a"], ["b"]),
        ],
        "body",
        [
            scalar("i", TensorProto.INT64, []),
            scalar("go", TensorProto.BOOL, []),
            scalar("a", TensorProto.FLOAT, []),
        ],
        [scalar("go_on", TensorProto.BOOL, []), scalar("b", TensorProto.FLOAT, [])],
    )
    path = graph_file(
        tmp_path / "loop.onnx",
        [
            helper.make_node("ReduceMean", ["x"], ["m"], keepdims=0),
            helper.make_node("Loop", ["count", "true", "m"], ["y"], body=body),
        ],
        {"count": np.int64(2**40).reshape(()), "true": np.array(True)},
    )
    model = load(path)
    with pytest.raises(FeatvizError, match="terminate flag"):
        forward(model.module, [torch.zeros(1, 3, 8, 8)])


# Commands


@pytest.mark.slow
def test_commands_take_it_as_any_model(featviz: Run, file: Path, picture: Path) -> None:
    """run, layers, audit, look, report and exemplars end well."""
    commands = [
        ("run", file, picture, "--layers", "Conv,Relu", "--out", "run"),
        ("report", "run"),
        ("layers", file, "--layers", "Conv"),
        ("look", file, picture, "--out", "look.png"),
        ("audit", file, picture, "--layers", "Conv,Relu", "--out", "audit"),
        ("exemplars", file, picture, "--layers", "Relu#0", "--out", "exemplars"),
    ]
    for command in commands:
        outcome = featviz(*command)
        assert outcome.code == 0, (command, outcome.err)
    drawn = {path.name for path in Path("run/picture.png").iterdir() if path.is_dir()}
    assert any(name.endswith("_blocks.0.conv1") for name in drawn)
