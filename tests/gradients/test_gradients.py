"""Gradients and inputs of layers, against torch.autograd.grad; those of clips and
pairs, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gradient_models import ALL, SPHERES, Functional, Given, Shared, drawn
from networks import Net
from oracle import Weighted, assert_all_close, assert_close, autograd, input_of, inputs
from PIL import Image
from tiles import manifest
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision import models


class Views(nn.Module):
    """Views that are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.flat = (
            nn.Conv2d(3, 4, 3),
            nn.ReLU(inplace=True),
            nn.Flatten(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        left, right = x[:, :2], x[:, 2:]
        left.mul_(2)
        return self.flat(self.act(torch.cat([left * 3, right], 1)))


SMALL: dict[str, Callable[[], nn.Module]] = {
    "shared": Shared,
    "functional": Functional,
    "views": Views,
    "tokens": lambda: models.VisionTransformer(12, 6, 1, 2, 8, 8, num_classes=3),
    "in place on the input": lambda: nn.Sequential(
        nn.ReLU(inplace=True), nn.Conv2d(3, 2, 3)
    ),
}


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("shared", True),
        ("functional", False),
        ("in place on the input", False),
        *(
            pytest.param(name, False, marks=pytest.mark.slow)
            for name in ("views", "tokens")
        ),
    ],
)
def test_every_tensor_and_gradient_equals_autograds(
    name: str, frozen: bool, tmp_path: Path
) -> None:
    """Inputs, outputs and both gradients of every call, of in-place and frozen models
    in train mode, as autograd gives them for an out-of-place copy."""
    torch.manual_seed(3)
    model = SMALL[name]()
    tensor = input_of(model, SPHERES, inputs(12))
    with torch.no_grad():
        shape = copy.deepcopy(model).eval()(tensor.clone()).shape
    model = Weighted(model, tuple(shape)).train()
    model.requires_grad_(not frozen)
    want = autograd(model, tensor)
    assert {stem.split(".")[0] for _, stem in want} == set(ALL.split(","))
    assert_all_close(drawn(model, tmp_path / "out"), want)


def test_files_statistics_and_pictures_of_gradients(tmp_path: Path) -> None:
    """Named by kind; numbers in stats.npz; around zero and coloured, unless told
    otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(inplace=True))
    gradient = drawn(model, tmp_path / "out", layers="0")["0", "grad"]
    folder = tmp_path / "out" / "spheres.jpg"
    names = {f"{kind}.{end}" for kind in ALL.split(",") for end in ("png", "npy")}
    names |= {"grad-input.saliency.png"}
    assert {path.name for path in (folder / "001_0").iterdir()} == names
    numbers = np.load(folder / "stats.npz")["0|grad|0|"]
    flat = gradient[0].flatten(1).double()
    std = flat.std(1, correction=0)
    columns = [
        flat.amin(1),
        flat.amax(1),
        flat.mean(1),
        std,
        (flat == 0).double().mean(1),
    ]
    assert np.allclose(numbers[:, :5], torch.stack(columns, 1), rtol=1e-5, atol=1e-7)
    rows = {row["kind"]: row for row in manifest(folder)["captures"] if not row["key"]}
    modes = {kind: Image.open(folder / row["file"]).mode for kind, row in rows.items()}
    clipped = "symmetric-percentile"
    assert {kind: (row["normalize"], modes[kind]) for kind, row in rows.items()} == {
        "output": ("map", "L"),
        "input": ("map", "L"),
        "grad": (clipped, "P"),
        "grad-input": (clipped, "P"),
    }
    low, high = rows["grad"]["range"]
    assert high == -low == pytest.approx(float(gradient.abs().max()))
    drawn(model, tmp_path / "told", layers="0", normalize="map", cmap="grey")
    told = manifest(tmp_path / "told" / "spheres.jpg")["captures"]
    assert {row["normalize"] for row in told if not row["key"]} == {"map"}


class Aside(nn.Module):
    """A table of positions that does not depend on the image, and a branch that leads
    nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.table = nn.Conv2d(3, 4, 3), nn.Linear(2, 4)
        self.lost, self.cut = nn.Conv2d(3, 1, 1), nn.Conv2d(3, 4, 3)
        self.given, self.index = (
            Given(torch.randn(1, 2)),
            Net(lambda self, x: x.argmax(1, True)),
        )

    def forward(self, x: Tensor) -> Tensor:
        self.lost(x)
        self.index(x)
        with torch.no_grad():
            cut = self.cut(x)
        bias = self.table(self.given()).view(1, 4, 1, 1)
        return self.conv(x) * bias + cut


def test_what_hangs_on_parameters_only_has_its_gradient(tmp_path: Path) -> None:
    """It is not on the way from the target to the image, and yet autograd gives it."""
    torch.manual_seed(0)
    model = Aside()
    want = autograd(model, input_of(model, SPHERES, inputs(12)))
    assert {("table", "grad"), ("table", "grad-input"), ("given", "grad")} <= set(want)
    assert_all_close(drawn(model, tmp_path / "out"), want)
    assert all(p._backward_hooks is None and p.grad is None for p in model.parameters())


def skipped(out: Path, kind: str) -> dict[str, str]:
    """The reasons for which tensors of a kind are skipped, by layer."""
    rows = manifest(out / "spheres.jpg")["skipped"]
    return {row["layer"]: row["reason"] for row in rows if row["kind"] == kind}


def test_what_has_no_gradient_is_skipped_with_the_reason(tmp_path: Path) -> None:
    """Nothing hooked is lost without a word."""
    got = drawn(Aside().requires_grad_(False), tmp_path / "out", capture="grad")
    off = (
        "has no gradient: it does not depend on the input, or is cut off from it"
        " (detach, no_grad)"
    )
    assert skipped(tmp_path / "out", "grad") == {
        "lost": "has no gradient: the target does not depend on it, or it was changed in place",
        "index": "has no gradient: it holds torch.int64",
        "cut": off,
        "table": off,
        "given": off,
    }
    assert {layer for layer, _ in got} == {"", "conv"}


def test_a_view_that_is_changed_in_place_is_no_silent_zero(tmp_path: Path) -> None:
    """It is taken out of the graph, which its reason says; what is around it is right."""
    torch.manual_seed(0)

    def halved(self: nn.Module, x: Tensor) -> Tensor:
        x = self.conv(x)
        self.act(x[:, :2])
        return x

    model = Net(halved, conv=nn.Conv2d(3, 4, 3), act=nn.ReLU(inplace=True))
    got = drawn(model, tmp_path / "out")
    tensor = input_of(model, SPHERES, inputs(12))
    out = model.conv(tensor)
    (want,) = torch.autograd.grad(
        torch.cat([out[:, :2].relu(), out[:, 2:]], 1).sum(), out
    )
    assert_close(got["conv", "grad"], want)
    reason = (
        "has no gradient: the target does not depend on it, or it was changed in place"
    )
    for kind in ("grad", "grad-input"):
        assert skipped(tmp_path / "out", kind) == {"act": reason}


def test_recomputed_layers_are_not_a_second_call(tmp_path: Path) -> None:
    """What a checkpoint runs again in the backward pass has been seen."""
    torch.manual_seed(0)

    def way(self: nn.Module, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda y: F.relu(self.a(y)), x, use_reentrant=False))

    model = Net(way, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 2, 3))
    want = autograd(model, input_of(model, SPHERES, inputs(12)))
    want = {key: tensor for key, tensor in want.items() if "call1" not in key[1]}
    got = drawn(model, tmp_path / "out", grad_rule="plain")
    assert not [stem for _, stem in got if "call" in stem]
    assert_all_close(got, want)
    guided = drawn(model, tmp_path / "guided", grad_rule="guided")
    assert not torch.equal(guided["a", "grad"], got["a", "grad"])


def test_gradients_of_functions(tmp_path: Path) -> None:
    """`fn:` layers have inputs and gradients too; those of a method in place are right."""
    torch.manual_seed(0)
    model = Functional()
    got = drawn(model, tmp_path / "out", layers="fn:relu,fn:add")
    tensor = input_of(model, SPHERES, inputs(12)).requires_grad_()
    a = model.a(tensor)
    b = model.b(a.relu())
    want = torch.autograd.grad(b.relu().sum(), [a, b])
    assert_close(got["fn:relu", "grad-input"], want[0])
    assert_close(got["fn:relu", "grad-input.call1"], want[1])
    assert torch.equal(got["fn:relu", "input"], a.detach())
    assert torch.equal(got["fn:relu", "input.call1"], b.detach())
    assert torch.equal(got["fn:add", "grad"], torch.ones(1, 4, 8, 8))
