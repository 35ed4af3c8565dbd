"""`featviz layers`: parameters, multiply-accumulates and memory against torchvision and
torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from borrowed import assert_same, state_of
from conftest import DIGITS_MODEL, Run
from networks import Net
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

import featviz as fv
from featviz.errors import ForwardError
from featviz.inspection import layers
from featviz.models.load import LoadedModel, adopt
from featviz.options import InputOptions

NETS = """
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.ops import DeformConv2d

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.alias = self.conv
        self.act = nn.ReLU(inplace=True)
        self.never = nn.Linear(7, 5)
    def forward(self, x):
        return self.act(self.conv(self.act(self.conv(x))[:, :, ::2, ::2]))

class Deform(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = DeformConv2d(3, 4, 3)
    def forward(self, x):
        return self.conv(x, torch.zeros(1, 18, x.shape[2] - 2, x.shape[3] - 2)) + 1

class Nest(nn.Module):
    def forward(self, x):
        return torch.nested.nested_tensor([x[0, 0], x[0, 0, :2]], layout=torch.jagged)

class Pad(nn.Module):
    def forward(self, x):
        return x.to_padded_tensor(0.0)[None]

def nested():
    return nn.Sequential(Nest(), Pad())

class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.proj = nn.Linear(3, 8)
    def forward(self, x):
        x = self.proj(x.flatten(2).transpose(1, 2))
        return self.attention(x, x, x, need_weights=False)[0]

def frozen():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1))
    model[0].requires_grad_(False)
    return model

def lazy():
    return nn.Sequential(nn.LazyConv2d(5, 3), nn.ReLU())

def tiny():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4, 5),
    )
"""


List = Callable[..., dict[str, Any]]
"""What `layers --json` says of one of NETS, or of a file."""


@pytest.fixture
def listed(featviz: Run, tmp_path: Path) -> List:
    """Run the command."""
    nets = tmp_path / "layers_nets.py"
    nets.write_text(NETS)

    def invoke(name: str, *arguments: object) -> dict[str, Any]:
        done = featviz("layers", f"{nets}:{name}", "--json", *arguments)
        assert done.code == 0, done.err
        document: dict[str, Any] = json.loads(done.out)
        return document

    return invoke


def rows_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows by the names of their layers."""
    return {row["name"]: row for row in document["layers"]}


@pytest.mark.medium
@pytest.mark.parametrize(
    "name", ["resnet18", pytest.param("swin_t", marks=pytest.mark.slow)]
)
def test_macs_and_parameters_are_torchvisions(name: str) -> None:
    """They are within 1 % of the published GMACs, which have three decimals."""
    entry = models.get_model_weights(name).DEFAULT
    (crop,) = entry.transforms().crop_size
    device = torch.device("meta")
    with device:
        model = models.get_model(name, weights=None).eval()
        image = torch.zeros(1, 3, crop, crop)
    loaded = LoadedModel(model, adopt(model, InputOptions()).preprocess, device, {})

    table = layers.measure(loaded, [image])

    macs = table.usage[0].macs
    assert macs / 1e9 == pytest.approx(entry.meta["_ops"], rel=0.01)
    assert 2 * macs == table.flops.get_total_flops()
    assert sum(usage.own_macs for usage in table.usage.values()) == macs
    parameters = sum(map(torch.numel, model.parameters()))
    assert parameters == entry.meta["num_params"]


def test_attention_is_counted_since_its_fast_path_is_off(listed: List) -> None:
    """Tokens T = 196, width 8: projections 4·T·8·8, scores and their sum 2·T·T·8, input
    T·3·8."""
    document = listed("Attend", "--size", "14x14")
    tokens = 14 * 14
    attention = 4 * tokens * 64 + 2 * tokens * tokens * 8
    rows = rows_of(document)
    assert rows["attention"]["macs"] == attention
    assert rows["attention.out_proj"]["calls"] == 0
    assert document["totals"]["macs"] == attention + tokens * 3 * 8


def test_a_module_called_twice(listed: List) -> None:
    """Its parameters count once under both names; MACs and memory are of both calls, in
    place or not."""
    document = listed("Twice", "--size", "8x8")
    rows = rows_of(document)
    values = 3 * (8 * 8 + 4 * 4)
    expected = {
        "aliases": ["alias"],
        "calls": 2,
        "parameters": 81,
        "macs": 27 * values,
        "activation_bytes": 4 * values,
        "input_shape": [1, 3, 8, 8],
        "output_shape": [1, 3, 8, 8],
    }
    assert "alias" not in rows
    assert rows["conv"].items() >= expected.items()
    assert rows["act"]["activation_bytes"] == 4 * values
    totals = {"macs": 27 * values, "activation_bytes": 8 * values, "parameters": 121}
    assert document["totals"].items() >= totals.items()


def test_a_module_that_never_ran(listed: List) -> None:
    """It has parameters and nothing else."""
    row = rows_of(listed("Twice", "--size", "8x8"))["never"]
    expected = {
        "parameters": 40,
        "input_shape": None,
        "output_shape": None,
        "calls": 0,
        "macs": 0,
    }
    assert row.items() >= expected.items()


def test_activation_memory_counts_each_tensor_once(listed: List) -> None:
    """Conv and ReLU 4·8·8, pooling 4, flatten 4, linear 5 floats; containers add
    nothing."""
    document = listed("tiny", "--size", "8x8")
    sizes = [row["activation_bytes"] for row in document["layers"]]
    whole_model = 256 + 256 + 4 + 4 + 5
    assert sizes == [4 * values for values in (whole_model, 256, 256, 4, 4, 5)]
    assert document["totals"]["activation_bytes"] == sizes[0]


@pytest.mark.medium
def test_frozen_parameters_are_not_trainable(listed: List) -> None:
    """A frozen first convolution has 16 parameters of 26."""
    document = listed("frozen")
    assert [row["trainable"] for row in document["layers"]] == [10, 0, 10]
    assert document["totals"].items() >= {"parameters": 26, "trainable": 10}.items()


def test_a_lazy_layer_has_its_size_after_the_pass(listed: List) -> None:
    """Three channels in and five out are 140 parameters."""
    document = listed("lazy", "--input-channels", "3")
    assert document["totals"]["parameters"] == 140


@pytest.mark.medium
def test_operators_without_a_formula_are_named(listed: List) -> None:
    """A deformable convolution of torchvision's is in no figure, and is said to be."""
    document = listed("Deform")
    assert document["not_counted"] == {"torchvision::deform_conv2d": 1}
    assert document["totals"]["macs"] == 0


@pytest.mark.medium
def test_the_footer_has_every_total_with_units(featviz: Run) -> None:
    """resnet18 has those that torchvision publishes; every operator of it is torch's own."""
    table = featviz("layers", "resnet18", "--weights", "none").out
    footer = (
        "input        1×3×224×224\n"
        "parameters   11,689,512 (11,689,512 trainable), 46.758 MB\n"
        "MACs         1.814 G = 3.628 G FLOPs\n"
        "activations  29.911 MB\n"
        "68 modules; * 6 taken by the selectors\n"
    )
    assert table.endswith(footer)


def test_the_model_is_as_before() -> None:
    """Hooks, flags, requires_grad, buffers, RNG and the fast path are; also after a
    failure."""
    convolution = nn.Conv2d(3, 4, 3)
    norm = nn.BatchNorm2d(4)
    model = nn.Sequential(convolution, norm, nn.ReLU(), nn.Linear(3, 3)).train()
    norm.eval()
    convolution.requires_grad_(False)
    loaded = adopt(model, InputOptions(size=64, mean=(0, 0, 0), std=(1, 1, 1)))
    fitting = torch.rand(1, 3, 5, 5)
    image = torch.rand(1, 3, 64, 64)
    before = state_of(model)
    layers.measure(loaded, [fitting])
    with pytest.raises(ForwardError, match=r"3 \(Linear\)"):
        layers.measure(loaded, [image])
    assert_same(before, state_of(model))


@pytest.mark.medium
def test_a_guess_of_the_size_is_warned_of(featviz: Run) -> None:
    """No option, model or weights say it; a tenth of the figures would be as credible."""
    done = featviz("layers", DIGITS_MODEL)
    assert "warning: the input's size is a guess, 1×1×224×224" in done.err
    assert "guess" not in featviz("layers", DIGITS_MODEL, "--size", "28").err


def test_nested_tensors_have_no_shape_and_count_their_values(listed: List) -> None:
    """A nested tensor's memory is that of its parts; where a shape would stand, there
    is none."""
    model, nest, pad = listed("nested", "--size", 8)["layers"]
    assert nest["output_shape"] is None
    assert pad["input_shape"] is None
    assert pad["output_shape"] == model["output_shape"] == [1, 2, 8, 8]
    assert nest["activation_bytes"] == 4 * (8 * 8 + 2 * 8)


def failing_model() -> nn.Module:
    """A convolution, a module that runs two and raises, and a convolution instead."""

    def fail(self: Any, x: Tensor) -> None:
        nn.functional.conv2d(self.inner(x), torch.zeros(2, 4, 3, 3))
        raise ValueError("not for this input")

    def go_on(self: Any, x: Tensor) -> Any:
        x = self.before(x)
        with suppress(ValueError):
            return self.tried(x)
        return self.after(x)

    tried = nn.Sequential(Net(fail, inner=nn.Conv2d(3, 4, 3)))
    before = nn.Conv2d(3, 3, 3)
    return Net(go_on, before=before, tried=tried, after=nn.Conv2d(3, 8, 3))


def test_no_cost_is_lost_where_a_module_raises() -> None:
    """The model's MACs are torch's; each layer that came to its end has its own, and
    what a failed call did itself is its caller's."""
    model = failing_model()
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        model(torch.zeros(1, 3, 16, 16))

    result = fv.layers(model, size=16)

    macs = {row.name: row.own_macs for row in result.rows if row.own_macs}
    assert macs == {
        "": 36 * 2 * 10 * 10,
        "before": 27 * 3 * 14 * 14,
        "tried.0.inner": 27 * 4 * 12 * 12,
        "after": 27 * 8 * 12 * 12,
    }
    assert result.totals.macs == sum(macs.values()) == flops.get_total_flops() // 2
    calls = {row.name: row.calls for row in result.rows}
    assert calls.items() >= {"": 1, "tried": 0, "tried.0": 0, "after": 1}.items()


def test_bytes_are_those_of_the_type() -> None:
    """A number of float64 has eight, a weight and an output alike."""
    totals = fv.layers(nn.Sequential(nn.Conv2d(3, 4, 1)).double(), size=16).totals
    assert (totals.parameters, totals.parameter_bytes) == (16, 8 * 16)
    assert totals.activation_bytes == 8 * 4 * 16 * 16


def test_every_output_of_a_layer_takes_memory() -> None:
    """Those of an LSTM over 8 rows of 9 numbers, and its two states, of 4 bytes each."""
    layer = nn.LSTM(9, 5, batch_first=True)
    model = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Flatten(1, 2), layer)
    (row,) = (r for r in fv.layers(model, size=(8, 9)).rows if r.type == "LSTM")
    assert row.activation_bytes == 4 * (8 * 5 + 5 + 5)


def test_a_function_has_the_shape_of_its_first_call() -> None:
    """As a module has."""
    model = Net(lambda self, x: nn.functional.avg_pool2d(x.relu(), 2).relu())
    rows = {row.name: row for row in fv.layers(model, size=16, functions=True).rows}
    relu = rows["fn:relu"]
    assert (relu.calls, relu.output_shape) == (2, [1, 3, 16, 16])


@pytest.mark.parametrize(("channel", "is_warned"), [(0, True), (9, False)])
def test_a_guess_is_warned_of_where_shapes_follow_it(
    channel: int, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that fails on zeros is listed without any."""
    model = Net(lambda self, x: self.conv(x)[:, channel], conv=nn.Conv2d(3, 2, 1))
    fv.layers(model)
    assert ("the input's size is a guess" in caplog.text) is is_warned
    assert ("no shapes: the model failed" in caplog.text) is not is_warned


def test_a_thousand_is_one_k() -> None:
    """As many multiply-accumulates take a letter."""
    model = nn.Sequential(nn.Conv2d(1, 10, 1, bias=False))
    assert "MACs         1.000 k = 2.000 k FLOPs" in str(fv.layers(model, size=10))
