"""audit, kernels and gradient rules say of a .pt2 what they say of the model it was
made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Run
from exported import export
from networks import Net
from torch import Tensor, nn
from torchvision.ops import DeformConv2d

from featviz.audit import plan
from featviz.drawing import kernels as filters
from featviz.models.load import adopt
from featviz.models.weights import read_program
from featviz.options import InputOptions


class Mixed(nn.Module):
    """Activations as modules, in place, and as functions; one operator of each awkward
    kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 8, 3, groups=2)
        self.silu = nn.SiLU()
        self.conv3 = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 8, 2, groups=4)
        self.clip = nn.ReLU6()
        self.conv4 = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv1(x)))
        x = 1 - self.silu(self.conv2(x))
        x = F.hardswish(self.conv3(F.relu(x)))
        x = self.clip(self.up(x))
        x = torch.relu_(self.conv4(x))
        pooled: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return pooled


def export_mixed(module: nn.Module, folder: Path, decomposed: bool = False) -> Path:
    """The program of a module that takes [1, 3, 16, 16]."""
    return export(module.eval(), folder / "m.pt2", 1, 3, 16, 16, decomposed=decomposed)


def read(path: Path) -> nn.Module:
    """The module of a program."""
    return read_program(path, trust=True)[0].eval()


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, list[Any]]:
    """MODEL arguments for the eager net and for its program."""
    torch.manual_seed(0)
    module = Mixed()
    module.norm.running_mean.normal_()
    module.norm.running_var.uniform_(0.5, 2)
    torch.save(module.state_dict(), tmp_path / "net.pth")
    eager = [tmp_path / "net.pth", "--arch", f"{Path(__file__)}:Mixed"]
    return {"eager": eager, "program": [export_mixed(module, tmp_path), "--trust"]}


@pytest.mark.slow
def test_audit_of_a_program_is_the_eager_models(
    sources: dict[str, list[Any]],
    photos: Path,
    featviz: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has the same activations, verdicts and numbers, functions included. Of a program
    no channel is listed to be cut out: it has no layers that could be replaced."""
    # the file of the architecture imports its neighbours
    monkeypatch.syspath_prepend(Path(__file__).parent)
    audits = {}
    for source, model in sources.items():
        options = ("--size", "16x16", "--redundant-at", "0.9", "--prove")
        done = featviz("audit", *model, photos, *options, "--out", source)
        assert done.code == 0, done.err
        audits[source] = json.loads(Path(source, "audit.json").read_text())
        audits[source].pop("model")
    cut = {source: audit.pop("prune") for source, audit in audits.items()}
    for audit in audits.values():
        del audit["not_prunable"], audit["verify"]

    assert cut == {"program": {}, "eager": {"conv4": [0, 1, 2, 7]}}
    assert audits["program"] == audits["eager"]
    labels = [layer["label"] for layer in audits["program"]["layers"]]
    assert labels == [
        "relu",
        "silu",
        "fn:relu",
        "fn:hardswish",
        "clip",
        "fn:relu.call1",
    ]


def activations_of(module: nn.Module) -> list[Any]:
    """The activations of the layers that an audit would count."""
    image = torch.zeros(1, 3, 16, 16)
    chosen = plan.plan_audit(adopt(module, InputOptions(size=16)), None, [image])
    return [target.activation for target in chosen.targets]


@pytest.mark.slow
@pytest.mark.parametrize("ends", [(-2.0, 2.0), (-2.0, 1.0), (0.0, 1.0)])
def test_a_hardtanh_keeps_its_ends(ends: tuple[float, float], tmp_path: Path) -> None:
    """Where an exported activation saturates is read from its operator, which leaves out
    an upper end of 1."""
    module = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Hardtanh(*ends)).eval()
    activations = activations_of(module)
    assert activations[0] is not None
    assert activations_of(read(export_mixed(module, tmp_path))) == activations


def convolutions_of(module: nn.Module) -> dict[str, filters.Filters]:
    """The kernels of all convolutions, by name."""
    return {
        name: filters.read_filters(part)
        for name, part in module.named_modules()
        if filters.is_convolution(part)
    }


@pytest.mark.slow
def test_effective_kernels_are_read_from_a_program(tmp_path: Path) -> None:
    """Grouped, transposed and deformable ones are, of a program in core operators."""
    eager = Net(
        lambda self, x: self.up(self.conv(x, self.offset(x))),
        offset=nn.Conv2d(3, 18, 3),
        conv=DeformConv2d(3, 4, 3),
        up=nn.ConvTranspose2d(4, 6, 3, groups=2),
    ).eval()
    expected = convolutions_of(eager)

    program = convolutions_of(read(export_mixed(eager, tmp_path, decomposed=True)))

    assert program.keys() == expected.keys() == {"offset", "conv", "up"}
    for name, kernels in expected.items():
        torch.testing.assert_close(program[name][0], kernels[0])
        assert program[name][1:] == kernels[1:]
