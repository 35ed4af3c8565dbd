"""Class activation maps: the published formulas, in-place layers, shared modules,
tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from gradient_models import Shared
from networks import Net
from PIL import Image
from small_models import kept_output
from tiles import raw, rows
from torch import Tensor, nn
from torch.nn import functional as F

import featviz as fv
from featviz.drawing.drawer import class_map
from featviz.errors import FeatvizError
from featviz.layout import Maps
from featviz.records import CLASS_MAPS

pytestmark = pytest.mark.medium


SIZE = 12
INPUT = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
"""What the models see."""


def maps_of(
    model: nn.Module, target: str, method: str = "gradxact", layers: str | None = None
) -> Any:
    """The maps of `INPUT`."""
    image = Image.new("RGB", (SIZE, SIZE))
    page = fv.cam(model, image, target, method, layers, transform=lambda image: INPUT)
    return page.maps


def channel_weights(method: str, a: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Of the methods with one weight for each channel, as the papers write them."""
    if method == "gradcam":
        return g.mean((1, 2))
    total = a.sum((1, 2))[:, None, None]
    if method == "xgradcam":
        return (g * a / np.where(total == 0, np.inf, total)).sum((1, 2))
    assert method == "gradcam++"
    divisor = 2 * g**2 + total * g**3
    alpha = np.divide(g**2, divisor, where=g != 0, out=np.zeros_like(g))
    return (alpha * np.maximum(g, 0)).sum((1, 2))


def formula(method: str, a: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The map [H, W] of outputs and gradients [C, H, W], in float64."""
    if method in ("gradxact", "hirescam"):
        values = (g * a).sum(0)
    elif method == "layercam":
        values = (np.maximum(g, 0) * a).sum(0)
    else:
        values = np.einsum("c,chw->hw", channel_weights(method, a, g), a)
    return values if method in ("gradxact", "xgradcam") else np.maximum(values, 0)


@pytest.fixture
def net() -> nn.Module:
    """A convolution, a ReLU in place, and a head that makes the gradient differ from
    place to place."""
    torch.manual_seed(3)
    body = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(inplace=True))
    head = nn.Linear(5 * SIZE**2, 4)
    return nn.Sequential(body, nn.Tanh(), nn.Flatten(), head).eval()


@pytest.mark.parametrize(
    ("method", "layer"),
    [*((name, "0.0") for name in CLASS_MAPS), ("gradcam", "0"), ("gradcam", "1")],
)
def test_every_method_is_its_formula(method: str, layer: str, net: nn.Module) -> None:
    """The numbers are those of torch.autograd.grad on an out-of-place copy: at the
    convolution whose output the ReLU overwrites, behind the ReLU, and behind the tanh."""
    conv = net[0][0](INPUT[None])
    relu = F.relu(conv)
    tanh = relu.tanh()
    output = {"0.0": conv, "0": relu, "1": tanh}[layer]
    (gradient,) = torch.autograd.grad(net[3](tanh.flatten(1))[0, 2], output)
    a = output[0].detach().double().numpy()
    expected = formula(method, a, gradient[0].double().numpy())

    (layer_map,) = maps_of(net, "class:2", method, layer)

    assert layer_map.layer == layer
    assert layer_map.site.call == 0
    assert layer_map.tensor.dtype == torch.float32
    tolerance = 1e-5 * abs(expected).max()
    np.testing.assert_allclose(layer_map.tensor, expected, rtol=1e-4, atol=tolerance)
    assert expected.max() > 0
    assert (expected.min() < 0) == CLASS_MAPS[method].signed


@pytest.mark.parametrize(
    ("method", "value"), [("gradcam", 1), ("gradcam++", 0.375), ("xgradcam", 1)]
)
def test_a_weight_that_would_be_divided_by_zero_is_zero(
    method: str, value: float
) -> None:
    """One channel is dead; of the other, 2 G² + sum(A) G³ is zero at one place. The map
    is a single row."""
    output = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).reshape(2, 1, 1, 2)
    gradient = torch.tensor([[1.0, 2.0], [-1.0, 3.0]]).reshape(2, 1, 1, 2)
    drawn = class_map(method, Maps("nchw", output), Maps("nchw", gradient))
    assert drawn.flatten().tolist() == [value, value]


def test_every_call_of_a_shared_module_is_a_map() -> None:
    """In the order of the calls, each with its own gradient, though the ReLU works in
    place and the sum after it does, too."""
    torch.manual_seed(0)
    model = Shared().eval()
    x = F.relu(model.a(INPUT[None]))
    y = F.relu(model.norm(model.b(x)) + x)
    z = F.relu(y - x * 2)
    gradients = torch.autograd.grad(z.sum(), (x, y, z))

    maps = maps_of(model, "sum", layers="relu")

    assert [layer_map.site.call for layer_map in maps] == [0, 1, 2]
    for layer_map, output, gradient in zip(maps, (x, y, z), gradients, strict=True):
        expected = (output * gradient)[0].sum(0)
        torch.testing.assert_close(layer_map.tensor, expected, rtol=1e-5, atol=1e-5)


class Tokens(nn.Module):
    """A class token and 3 × 4 others, mixed by one attention; the head reads the first,
    or the mean of all."""

    def __init__(self, reads_all: bool) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 8, (4, 3), (4, 3))
        self.class_token = nn.Parameter(torch.randn(1, 1, 8))
        self.before = nn.LayerNorm(8)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.after = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)
        self.reads_all = reads_all

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.class_token, self.cut(x).flatten(2).mT], 1)
        y = self.before(x)
        y = self.after(x + self.mix(y, y, y)[0])
        return self.head(y.mean(1) if self.reads_all else y[:, 0])


@pytest.mark.parametrize(("reads_all", "layer"), [(False, "before"), (True, "after")])
def test_tokens_stand_on_their_grid(reads_all: bool, layer: str) -> None:
    """By default the layer is the one before the last attention where the class token
    alone is read, and the last where all are; the class token is not on the grid."""
    torch.manual_seed(0)
    model = Tokens(reads_all).eval()
    outputs = kept_output(model.get_submodule(layer))
    (gradient,) = torch.autograd.grad(model(INPUT[None])[0, 3], outputs)
    expected = (outputs[0] * gradient)[0].sum(1)[1:].reshape(3, 4)

    (layer_map,) = maps_of(model, "class:3")

    assert layer_map.layer == layer
    assert torch.allclose(layer_map.tensor, expected, atol=1e-6)


def test_a_layer_that_runs_once_is_taken_before_one_that_runs_twice() -> None:
    """It has one map; the shared ReLU behind it would have two."""
    model = Net(
        lambda self, x: self.act(self.b(self.act(self.a(x)))).mean((2, 3)),
        a=nn.Conv2d(3, 4, 3),
        b=nn.Conv2d(4, 5, 3),
        act=nn.ReLU(),
    )
    nn.init.constant_(model.b.bias, 10.0)  # else a class may be zero behind its ReLU
    (layer_map,) = maps_of(model, "class:3")
    assert layer_map.layer == "b"


LINEAR = r"4 \(has no places of the image: its output has the layout vector"
POOLED = r"2 \(has no places of the image: its output has one value for each channel"


@pytest.mark.parametrize(("layer", "message"), [("4", LINEAR), ("2", POOLED)])
def test_a_layer_without_places_is_refused(
    layer: str, message: str, tiny: nn.Module
) -> None:
    """A vector, and what global pooling leaves."""
    with pytest.raises(FeatvizError, match=f"layer {message}"):
        maps_of(tiny, "class:0", layers=layer)


def half_cut_off() -> nn.Module:
    """A layer that is detached, and one whose output is multiplied by zero."""

    def way(self: nn.Module, x: Tensor) -> Tensor:
        return self.a(x).mean((2, 3)).detach() + 0 * self.b(x).mean((2, 3))

    return Net(way, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(3, 4, 3))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("a", "has no gradient: the target does not depend on it"),
        ("b", "has a gradient of zero at every place"),
    ],
)
def test_a_layer_without_a_gradient_is_refused(layer: str, message: str) -> None:
    """Its output is cut off, or the target does not depend on it at any place."""
    with pytest.raises(FeatvizError, match=rf"skipped: {layer} \({message}"):
        maps_of(half_cut_off(), "class:1", layers=layer)


def test_a_model_without_maps_of_the_image_is_refused() -> None:
    """No layer can be chosen by default."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE**2, 4))
    with pytest.raises(FeatvizError, match="no layer gives maps of the image"):
        maps_of(model, "class:1")


RUN = (
    "--layers",
    "0,1,4",
    "--reduce",
    "gradxact",
    "--target",
    "class:1",
    "--size",
    "16",
    "--scale",
    "1",
    "--tensors",
    "npy",
)


def test_a_dry_run_tells_which_layers_have_maps(
    featviz: Run, tiny_file: Path, picture: Path
) -> None:
    """A layer without places is skipped, with the reason."""
    planned = featviz("run", tiny_file, picture, *RUN, "--dry-run")
    assert "4  skipped: has no places" in planned.out
    assert "1 map  " in planned.out


@pytest.fixture
def image_folder(featviz: Run, tiny_file: Path, picture: Path) -> Path:
    """What `run` writes of an image."""
    done = featviz("run", tiny_file, picture, *RUN, "--out", "out")
    assert done.code == 0
    assert "skipped: layer 4 (has no places of the image" in done.err
    return Path("out/picture.png")


def test_run_draws_one_map_a_layer(image_folder: Path) -> None:
    """Its row has the statistics of the output; a layer without places has none."""
    captures = rows(image_folder)
    assert sorted(captures) == [("0", 0, ""), ("1", 0, "")]
    row = captures["1", 0, ""]
    assert row["kind"] == "output"
    assert row["reduce"] == "gradxact"
    assert row["normalize"] == "symmetric"
    assert row["maps"] == 4
    assert row["max"] == pytest.approx(raw(image_folder, row).max())


def test_the_map_of_a_run_is_blue_and_red_around_zero(
    image_folder: Path, tiny_file: Path
) -> None:
    """Its levels are those of the formula."""
    row = rows(image_folder)["1", 0, ""]
    tensor = raw(image_folder, row)[0]
    # behind the layer stand a mean over its places and one linear layer
    weights = torch.load(tiny_file, weights_only=False)[4].weight[1].detach()
    expected = torch.einsum("c,chw->hw", weights, tensor) / tensor[0].numel()
    limit = float(expected.abs().max())
    assert row["range"] == pytest.approx([-limit, limit], rel=1e-4)
    levels = np.asarray(Image.open(image_folder / row["file"]))
    assert np.abs(levels - (expected.numpy() / limit + 1) / 2 * 253).max() <= 1
