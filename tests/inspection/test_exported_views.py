"""audit, kernels and gradient rules say of a .pt2 what they say of the model it was
made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


def _mixed() -> nn.Module:
    torch.manual_seed(0)
    module = Mixed()
    module.norm.running_mean.normal_()  # type: ignore[operator, union-attr]
    module.norm.running_var.uniform_(0.5, 2)  # type: ignore[operator, union-attr]
    return module.eval()


def _exported(module: nn.Module, folder: Path, decomposed: bool = False) -> Path:
    return export(module.eval(), folder / "m.pt2", 1, 3, 16, 16, decomposed=decomposed)


def _read(path: Path) -> nn.Module:
    return read_program(path, trust=True)[0].eval()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """MODEL arguments for the eager net and for its program."""
    module = _mixed()
    torch.save(module.state_dict(), tmp_path / "net.pth")
    monkeypatch.syspath_prepend(Path(__file__).parent)
    eager = [tmp_path / "net.pth", "--arch", f"{Path(__file__)}:Mixed"]
    return {"eager": eager, "program": [_exported(module, tmp_path), "--trust"]}


@pytest.mark.slow
def test_audit_of_a_program_is_the_eager_models(
    sources: dict[str, list[Any]],
    photos: Path,
    tmp_path: Path,
    featviz: Callable[..., Any],
) -> None:
    """The same activations, verdicts, numbers and prunable channels, functions
    included."""
    audits = {}
    for source, model in sources.items():
        out = tmp_path / source
        options = ("--size", "16x16", "--redundant-at", "0.9", "--prove", "--out", out)
        done = featviz("audit", *model, photos, *options)
        assert done.code == 0, done.err
        audits[source] = json.loads((out / "audit.json").read_text())
        audits[source].pop("model")
    assert audits["program"] == audits["eager"]
    assert [layer["label"] for layer in audits["program"]["layers"]] == [
        "relu",
        "silu",
        "fn:relu",
        "fn:hardswish",
        "clip",
        "fn:relu.call1",
    ]


@pytest.mark.slow
def test_a_hardtanh_keeps_its_own_ends(tmp_path: Path) -> None:
    """Where an exported activation saturates is read from its operator."""
    module = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Hardtanh(-2.0, 2.0)).eval()
    plans = [
        plan.choose(
            adopt(one, InputOptions(size=16)), None, [torch.zeros(1, 3, 16, 16)]
        )
        for one in (module, _read(_exported(module, tmp_path)))
    ]
    eager, program = ([t.activation for t in plan.targets] for plan in plans)
    assert program == eager
    assert eager[0] is not None


@pytest.mark.slow
def test_effective_kernels_are_read_from_a_program(tmp_path: Path) -> None:
    """Grouped, transposed and deformable ones, of a program in core operators."""
    torch.manual_seed(0)
    eager = Net(
        lambda self, x: self.up(self.conv(x, self.offset(x))),
        offset=nn.Conv2d(3, 18, 3),
        conv=DeformConv2d(3, 4, 3),
        up=nn.ConvTranspose2d(4, 6, 3, groups=2),
    ).eval()
    program = dict(_read(_exported(eager, tmp_path, True)).named_modules())
    convolutions = {
        name for name, module in program.items() if filters.is_convolution(module)
    }
    assert (
        convolutions
        == {n for n, m in eager.named_modules() if filters.is_convolution(m)}
        != set()
    )
    for name in convolutions:
        program_filters, kept = (
            filters.read_filters(m) for m in (program[name], eager.get_submodule(name))
        )
        torch.testing.assert_close(program_filters[0], kept[0])
        assert program_filters[1:] == kept[1:]
