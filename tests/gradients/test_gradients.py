"""Gradients and inputs of layers, against torch.autograd.grad; those of clips and
pairs, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradient_models import ALL, FOLDER, SPHERES, Functional, Shared, Table, drawn
from networks import Net
from oracle import Weighted, assert_all_close, assert_close, autograd, input_of, inputs
from PIL import Image
from tiles import manifest
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision import models


def views() -> nn.Module:
    """Views that are changed in place."""

    def way(self: Any, x: Tensor) -> Tensor:
        x = self.a(x)
        first = x[:, :2]
        last = x[:, 2:]
        first.mul_(2)
        return self.flat(self.act(torch.cat([first * 3, last], 1)))

    act = nn.ReLU(inplace=True)
    return Net(way, a=nn.Conv2d(3, 4, 3), act=act, flat=nn.Flatten())


def tokens() -> nn.Module:
    return models.VisionTransformer(12, 6, 1, 2, 8, 8, num_classes=3)


def in_place_on_the_input() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 2, 3))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("make", "frozen"),
    [
        (Shared, True),
        (Functional, False),
        (in_place_on_the_input, False),
        pytest.param(views, False, marks=pytest.mark.slow),
        pytest.param(tokens, False, marks=pytest.mark.slow),
    ],
)
def test_every_tensor_and_gradient_equals_autograds(
    make: Callable[[], nn.Module], frozen: bool
) -> None:
    """Inputs, outputs and both gradients of every call, of in-place and frozen models
    in train mode, as autograd gives them for an out-of-place copy."""
    torch.manual_seed(3)
    model = make()
    tensor = input_of(model, SPHERES, inputs(12))
    with torch.no_grad():
        shape = copy.deepcopy(model).eval()(tensor.clone()).shape
    model = Weighted(model, tuple(shape)).train()
    model.requires_grad_(not frozen)
    expected = autograd(model, tensor)
    assert {stem.split(".")[0] for _, stem in expected} == set(ALL.split(","))

    assert_all_close(drawn(model), expected)


def rectified() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(inplace=True))


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run with all tensors of a convolution writes of an image."""
    out = tmp_path_factory.mktemp("files")
    drawn(rectified(), "0", out)
    return out / "spheres.jpg"


@pytest.mark.medium
def test_files_of_gradients_are_named_by_kind(image_folder: Path) -> None:
    """Beside each picture lies its tensor; a saliency has none of its own."""
    names = {path.name for path in (image_folder / "001_0").iterdir()}
    pictures = {f"{kind}.png" for kind in ALL.split(",")}
    tensors = {f"{kind}.npy" for kind in ALL.split(",")}
    assert names == pictures | tensors | {"grad-input.saliency.png"}


def test_statistics_of_gradients_are_numpys(image_folder: Path) -> None:
    """Least, largest, mean, deviation, and the share of zeros of each channel."""
    values = np.load(image_folder / "001_0/grad.npy")[0].reshape(2, -1).astype(float)
    expected = [
        values.min(1),
        values.max(1),
        values.mean(1),
        values.std(1),
        (values == 0).mean(1),
    ]
    with np.load(image_folder / "stats.npz") as arrays:
        statistics = arrays["0|grad|0|"][:, :5]
    np.testing.assert_allclose(statistics, np.stack(expected, 1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("capture", "normalize", "mode"),
    [
        ("output", "map", "L"),
        ("input", "map", "L"),
        ("grad", "symmetric-percentile", "P"),
        ("grad-input", "symmetric-percentile", "P"),
    ],
)
def test_gradients_are_coloured_around_zero(
    capture: str, normalize: str, mode: str, image_folder: Path
) -> None:
    """Values are grey, each map on a scale of its own."""
    captures = manifest(image_folder)["captures"]
    (row,) = (row for row in captures if row["kind"] == capture and not row["key"])
    assert row["normalize"] == normalize
    with Image.open(image_folder / row["file"]) as picture:
        assert picture.mode == mode
    if capture == "grad":
        gradient = np.load(image_folder / row["tensor"])
        low, high = row["range"]
        assert high == -low == pytest.approx(abs(gradient).max())


@pytest.mark.medium
def test_gradients_are_drawn_as_the_options_say() -> None:
    """A scale mode that is named holds for gradients as well."""
    drawn(rectified(), "0", normalize="map", cmap="grey")
    captures = manifest(FOLDER)["captures"]
    assert {row["normalize"] for row in captures if not row["key"]} == {"map"}


class Aside(nn.Module):
    """A table of positions that does not depend on the image, and a branch that leads
    nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.linear = nn.Linear(2, 4)
        self.lost = nn.Conv2d(3, 1, 1)
        self.cut = nn.Conv2d(3, 4, 3)
        self.table = Table(torch.randn(1, 2))
        self.index = Net(lambda self, x: x.argmax(1, True))

    def forward(self, x: Tensor) -> Tensor:
        self.lost(x)
        self.index(x)
        with torch.no_grad():
            cut = self.cut(x)
        bias = self.linear(self.table()).view(1, 4, 1, 1)
        return self.conv(x) * bias + cut


@pytest.mark.medium
def test_what_hangs_on_parameters_only_has_its_gradient() -> None:
    """It is not on the way from the target to the image, and yet autograd gives it."""
    torch.manual_seed(0)
    model = Aside()
    expected = autograd(model, input_of(model, SPHERES, inputs(12)))
    for capture in [("linear", "grad"), ("linear", "grad-input"), ("table", "grad")]:
        assert capture in expected

    assert_all_close(drawn(model), expected)

    assert all(p._backward_hooks is None and p.grad is None for p in model.parameters())


def skipped(kind: str) -> dict[str, str]:
    """The reasons for which tensors of a kind are skipped, by layer."""
    rows = manifest(FOLDER)["skipped"]
    return {row["layer"]: row["reason"] for row in rows if row["kind"] == kind}


OFF = (
    "has no gradient: it does not depend on the input, or is cut off from it"
    " (detach, no_grad)"
)
LOST = "has no gradient: the target does not depend on it, or it was changed in place"


def test_what_has_no_gradient_is_skipped_with_the_reason() -> None:
    """No tensor is lost without a line."""
    model = Aside().requires_grad_(False)
    gradients = drawn(model, capture="grad")

    assert {layer for layer, _ in gradients} == {"", "conv"}
    assert skipped("grad") == {
        "lost": LOST,
        "index": "has no gradient: it holds torch.int64",
        "cut": OFF,
        "linear": OFF,
        "table": OFF,
    }


@pytest.mark.medium
def test_a_view_that_is_changed_in_place_is_no_silent_zero() -> None:
    """It is taken out of the graph, which its reason says; what is around it is right."""
    torch.manual_seed(0)

    def halved(self: nn.Module, x: Tensor) -> Tensor:
        x = self.conv(x)
        self.act(x[:, :2])
        return x

    model = Net(halved, conv=nn.Conv2d(3, 4, 3), act=nn.ReLU(inplace=True))
    output = model.conv(input_of(model, SPHERES, inputs(12)))
    total = output[:, :2].relu().sum() + output[:, 2:].sum()
    (expected,) = torch.autograd.grad(total, output)

    tensors = drawn(model)

    assert_close(tensors["conv", "grad"], expected)
    assert skipped("grad") == {"act": LOST}
    assert skipped("grad-input") == {"act": LOST}


@pytest.mark.medium
def test_recomputed_layers_are_not_a_second_call() -> None:
    """What a checkpoint runs again in the backward pass has been seen."""
    torch.manual_seed(0)

    def way(self: nn.Module, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda y: F.relu(self.a(y)), x, use_reentrant=False))

    model = Net(way, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 2, 3))
    tensors = autograd(model, input_of(model, SPHERES, inputs(12)))
    expected = {key: t for key, t in tensors.items() if "call1" not in key[1]}

    plain = drawn(model, out="plain", grad_rule="plain")
    guided = drawn(model, out="guided", grad_rule="guided")

    assert not [stem for _, stem in plain if "call" in stem]
    assert_all_close(plain, expected)
    assert not torch.equal(guided["a", "grad"], plain["a", "grad"])


@pytest.mark.medium
def test_gradients_of_functions() -> None:
    """`fn:` layers have inputs and gradients too; those of a method in place are right."""
    torch.manual_seed(0)
    model = Functional()
    a = model.a(input_of(model, SPHERES, inputs(12)))
    b = model.b(a.relu())
    of_a, of_b = torch.autograd.grad(b.relu().sum(), [a, b])

    tensors = drawn(model, "fn:relu,fn:add")

    assert_close(tensors["fn:relu", "grad-input"], of_a)
    assert_close(tensors["fn:relu", "grad-input.call1"], of_b)
    assert torch.equal(tensors["fn:relu", "input"], a.detach())
    assert torch.equal(tensors["fn:relu", "input.call1"], b.detach())
    assert torch.equal(tensors["fn:add", "grad"], torch.ones(1, 4, 8, 8))
