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

FAMILIES = ("resnet18", "swin_t", "vit_b_16")
QUICK = ("resnet18",)

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
"""


@pytest.fixture
def nets(tmp_path: Path) -> Callable[[str], str]:
    """The MODEL string of one of NETS."""
    path = tmp_path / "layers_nets.py"
    path.write_text(NETS)
    return lambda name: f"{path}:{name}"


def listed(featviz: Run, model: str, *arguments: object) -> dict[str, Any]:
    done = featviz("layers", model, "--json", *arguments)
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES],
)
def test_macs_and_parameters_are_torchvisions(name: str) -> None:
    """Within 1 % of the published GMACs, which have three decimals."""
    entry = models.get_model_weights(name).DEFAULT
    (crop,) = entry.transforms().crop_size
    device = torch.device("meta")
    with device:
        model = models.get_model(name, weights=None).eval()
    loaded = LoadedModel(model, adopt(model, InputOptions()).preprocess, device, {})
    table = layers.measure(loaded, [torch.zeros(1, 3, crop, crop, device=device)])
    assert table.usage[0].macs / 1e9 == pytest.approx(entry.meta["_ops"], rel=0.01)
    assert sum(p.numel() for p in model.parameters()) == entry.meta["num_params"]
    assert sum(usage.own_macs for usage in table.usage.values()) == table.usage[0].macs
    assert 2 * table.usage[0].macs == table.flops.get_total_flops()


def test_attention_is_counted_since_its_fast_path_is_off(
    featviz: Run, nets: Any
) -> None:
    """Tokens T = 196, width 8: projections 4·T·8·8, scores and their sum 2·T·T·8, input
    T·3·8."""
    found = listed(featviz, nets("Attend"), "--size", "14x14")
    tokens = 14 * 14
    attention = 4 * tokens * 64 + 2 * tokens * tokens * 8
    rows = {row["name"]: row for row in found["layers"]}
    assert rows["attention"]["macs"] == attention
    assert rows["attention.out_proj"]["calls"] == 0
    assert found["totals"]["macs"] == attention + tokens * 3 * 8


def test_a_module_called_twice(featviz: Run, nets: Any) -> None:
    """Parameters once under both names; MACs and memory of both calls, in place or not.
    What never ran has parameters and nothing else."""
    table = listed(featviz, nets("Twice"), "--size", "8x8")
    rows = {row["name"]: row for row in table["layers"]}
    conv = rows["conv"]
    assert conv["aliases"] == ["alias"]
    assert "alias" not in rows
    assert (conv["calls"], conv["parameters"]) == (2, 81)
    assert conv["macs"] == 81 * (64 + 16) == table["totals"]["macs"]
    assert (
        conv["activation_bytes"] == rows["act"]["activation_bytes"] == 4 * 3 * (64 + 16)
    )
    assert (conv["input_shape"], conv["output_shape"]) == ([1, 3, 8, 8], [1, 3, 8, 8])
    assert table["totals"]["activation_bytes"] == 2 * conv["activation_bytes"]
    assert table["totals"]["parameters"] == 81 + 40
    row = rows["never"]
    assert row["parameters"] == 40
    assert [row[k] for k in ("input_shape", "output_shape", "calls", "macs")] == [
        None,
        None,
        0,
        0,
    ]


def test_activation_memory_counts_each_tensor_once(
    featviz: Run, tiny_file: Path
) -> None:
    """Conv and ReLU 4·8·8, pooling 4, flatten 4, linear 5 floats; containers add
    nothing."""
    found = listed(featviz, str(tiny_file), "--size", "8x8", "--mean", "0,0,0")
    sizes = [row["activation_bytes"] for row in found["layers"]]
    assert sizes == [4 * n for n in (256 + 256 + 4 + 4 + 5, 256, 256, 4, 4, 5)]
    assert found["totals"]["activation_bytes"] == sizes[0]


def test_frozen_and_lazy_parameters(featviz: Run, nets: Any) -> None:
    """A frozen first convolution: 16 parameters of 26; a lazy one has its size after
    the pass."""
    found = listed(featviz, nets("frozen"))
    assert [row["trainable"] for row in found["layers"]] == [10, 0, 10]
    assert (found["totals"]["parameters"], found["totals"]["trainable"]) == (26, 10)
    assert (
        listed(featviz, nets("lazy"), "--input-channels", "3")["totals"]["parameters"]
        == 140
    )


def test_operators_without_a_formula_are_named(featviz: Run, nets: Any) -> None:
    """A deformable convolution of torchvision's is in no figure, and is said to be."""
    found = listed(featviz, nets("Deform"))
    assert found["not_counted"] == {"torchvision::deform_conv2d": 1}
    assert found["totals"]["macs"] == 0


def test_the_footer_has_every_total_with_units(featviz: Run) -> None:
    """resnet18 as torchvision publishes it; every operator of it is torch's own."""
    out = featviz("layers", "resnet18", "--weights", "none").out
    assert "input        1×3×224×224" in out
    assert "guess" not in out
    assert "parameters   11,689,512 (11,689,512 trainable), 46.758 MB" in out
    assert "MACs         1.814 G = 3.628 G FLOPs" in out
    assert "activations  29.911 MB" in out
    assert "not counted" not in out


def test_the_model_is_as_before() -> None:
    """Hooks, flags, requires_grad, buffers, RNG and the fast path; also after a
    failure."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Linear(3, 3)
    ).train()
    model[1].eval()
    model[0].requires_grad_(False)
    loaded = adopt(model, InputOptions(size=64, mean=(0, 0, 0), std=(1, 1, 1)))
    fitting = torch.rand(1, 3, 5, 5)
    image = torch.rand(1, 3, 64, 64)
    before = state_of(model)
    layers.measure(loaded, [fitting])
    with pytest.raises(ForwardError, match=r"3 \(Linear\)"):
        layers.measure(loaded, [image])
    assert_same(before, state_of(model))


def test_a_guess_of_the_size_is_warned_of(featviz: Run) -> None:
    """Where no option, model or weights say it; a tenth of the figures would be as
    credible."""
    done = featviz("layers", DIGITS_MODEL)
    assert "warning: the input's size is a guess, 1×1×224×224" in done.err
    assert "guess" not in featviz("layers", DIGITS_MODEL, "--size", "28").err


def test_nested_tensors_have_no_shape_and_count_their_values(
    nets: Callable[[str], str], featviz: Run
) -> None:
    """A nested tensor's memory is that of its parts; where a shape would stand, there
    is none."""
    model, nest, pad = listed(featviz, nets("nested"), "--size", 8)["layers"]
    assert (nest["output_shape"], pad["input_shape"]) == (None, None)
    assert pad["output_shape"] == model["output_shape"] == [1, 2, 8, 8]
    assert nest["activation_bytes"] == 4 * (8 * 8 + 2 * 8)


def test_no_cost_is_lost_where_a_module_raises() -> None:
    """The model's MACs are torch's; each layer that came to its end has its own, and
    what a failed call did itself is its caller's."""

    def fails(self: Any, x: Tensor) -> None:
        nn.functional.conv2d(self.inner(x), torch.zeros(2, 4, 3, 3))
        raise ValueError("not for this input")

    def goes_on(self: Any, x: Tensor) -> Any:
        x = self.before(x)
        with suppress(ValueError):
            return self.tried(x)
        return self.other(x)

    tried = nn.Sequential(Net(fails, inner=nn.Conv2d(3, 4, 3)))
    modules = {
        "before": nn.Conv2d(3, 3, 3),
        "tried": tried,
        "other": nn.Conv2d(3, 8, 3),
    }
    model = Net(goes_on, **modules)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        model(torch.zeros(1, 3, 16, 16))
    result = fv.layers(model, size=16)
    rows = {row.name: row for row in result.rows}
    assert result.totals.macs == rows[""].macs == flops.get_total_flops() // 2
    expected = {
        "before": 27 * 3 * 14 * 14,
        "other": 27 * 8 * 12 * 12,
        "": 36 * 2 * 10 * 10,
    }
    expected |= {"tried.0.inner": 27 * 4 * 12 * 12}
    assert {
        name: row.own_macs for name, row in rows.items() if row.own_macs
    } == expected
    assert [rows[name].calls for name in ("", "tried", "tried.0", "other")] == [
        1,
        0,
        0,
        1,
    ]
