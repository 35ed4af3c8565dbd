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
from tiles import rows
from torch import Tensor, nn
from torch.nn import functional as F

import featviz as fv
from featviz.errors import FeatvizError
from featviz.records import CLASS_MAPS

SIZE = 12


def seen(seed: int = 0) -> Tensor:
    """What the model sees, [3, SIZE, SIZE]."""
    return torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def cam(
    model: nn.Module, target: str, method: str = "gradxact", layers: Any = None
) -> Any:
    """The maps of `seen()`."""
    photo = Image.new("RGB", (SIZE, SIZE))
    return fv.cam(model, photo, target, method, layers, transform=lambda image: seen())


def formula(method: str, a: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The map [H, W] of outputs and gradients [C, H, W], as the papers write it, in
    float64."""
    total = a.sum((1, 2))[:, None, None]
    shares = np.divide(
        g**2, 2 * g**2 + total * g**3, where=g != 0, out=np.zeros_like(g)
    )
    weights = {
        "gradcam": g.mean((1, 2)),
        "gradcam++": (shares * np.maximum(g, 0)).sum((1, 2)),
        "xgradcam": (g * a / np.where(total == 0, np.inf, total)).sum((1, 2)),
    }
    if method in weights:
        found = np.einsum("c,chw->hw", weights[method], a)
    else:
        found = ((np.maximum(g, 0) if method == "layercam" else g) * a).sum(0)
    return found if method in ("xgradcam", "gradxact") else np.maximum(found, 0)


@pytest.fixture
def net() -> nn.Module:
    """A convolution, a ReLU in place, and a head that makes the gradient differ from
    place to place."""
    torch.manual_seed(3)
    body = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(inplace=True))
    return nn.Sequential(
        body, nn.Tanh(), nn.Flatten(), nn.Linear(5 * SIZE**2, 4)
    ).eval()


@pytest.mark.parametrize(
    ("method", "layer"),
    [*((name, "0.0") for name in CLASS_MAPS), ("gradcam", "0"), ("gradcam", "1")],
)
def test_every_method_is_its_formula(method: str, layer: str, net: nn.Module) -> None:
    """Computed by torch.autograd.grad on an out-of-place copy, at the convolution whose
    output the ReLU overwrites, behind the ReLU, and behind the tanh; with their
    signs."""
    conv = net[0][0](seen()[None])
    relu = F.relu(conv)
    tanh = relu.tanh()
    at = {"0.0": conv, "0": relu, "1": tanh}[layer]
    (gradient,) = torch.autograd.grad(net[3](tanh.flatten(1))[0, 2], at)
    a, g = (t[0].detach().double().numpy() for t in (at, gradient))
    (found,) = cam(net, "class:2", method, layer).maps
    assert (found.layer, found.site.call, found.tensor.dtype) == (
        layer,
        0,
        torch.float32,
    )
    wanted = formula(method, a, g)
    assert np.allclose(found.tensor, wanted, rtol=1e-4, atol=1e-5 * abs(wanted).max())
    assert bool(wanted.min() < 0) is CLASS_MAPS[method].signed and wanted.max() > 0


def test_every_call_of_a_shared_module_is_a_map() -> None:
    """In the order of the calls, each with its own gradient, though the ReLU works in
    place and the sum after it does, too."""
    torch.manual_seed(0)
    model = Shared().eval()
    x = F.relu(model.a(seen()[None]))
    y = F.relu(model.norm(model.b(x)) + x)
    z = F.relu(y - x * 2)
    gradients = torch.autograd.grad(z.sum(), (x, y, z))
    found = cam(model, "sum", layers="relu").maps
    assert [one.site.call for one in found] == [0, 1, 2]
    for one, at, gradient in zip(found, (x, y, z), gradients, strict=True):
        assert torch.allclose(one.tensor, (at * gradient)[0].sum(0), atol=1e-5)


class Tokens(nn.Module):
    """A class token and 3 × 4 others, mixed by one attention, of which the head reads
    the first."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.cut, self.own = (
            nn.Conv2d(3, 8, (4, 3), (4, 3)),
            nn.Parameter(torch.randn(1, 1, 8)),
        )
        self.before, self.mix = (
            nn.LayerNorm(8),
            nn.MultiheadAttention(8, 2, batch_first=True),
        )
        self.after, self.head, self.last = nn.LayerNorm(8), nn.Linear(8, 5), last

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.own, self.cut(x).flatten(2).mT], 1)
        y = self.before(x)
        y = self.after(x + self.mix(y, y, y)[0])
        return self.head(y.mean(1) if self.last else y[:, 0])


@pytest.mark.parametrize(("last", "layer"), [(False, "before"), (True, "after")])
def test_tokens_stand_on_their_grid(last: bool, layer: str) -> None:
    """The layer is the one before the last attention where the class token alone is
    read, and the last where all are; the class token is no place."""
    torch.manual_seed(0)
    model = Tokens(last).eval()
    kept: list[Tensor] = []
    hook = model.get_submodule(layer).register_forward_hook(
        lambda m, a, out: kept.append(out)
    )
    (gradient,) = torch.autograd.grad(model(seen()[None])[0, 3], kept)
    hook.remove()
    (found,) = cam(model, "class:3").maps
    wanted = (kept[0] * gradient)[0].sum(1)[1:].reshape(3, 4)
    assert found.layer == layer and torch.allclose(found.tensor, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (
            "4",
            (
                r"layer 4 \(Linear\) has no places of the image: its output has the"
                r" layout vector"
            ),
        ),
        (
            "2",
            (
                "2 .* has no places of the image: its output has one value for each"
                " channel"
            ),
        ),
    ],
)
def test_a_layer_without_places_is_refused(
    layers: str, reason: str, tiny: nn.Module
) -> None:
    """A vector, and what global pooling leaves."""
    with pytest.raises(FeatvizError, match=reason):
        cam(tiny, "class:0", layers=layers)


def test_a_layer_without_a_gradient_is_refused() -> None:
    """Its output is cut off, or the target does not depend on it at any place."""

    def way(self: nn.Module, x: Tensor) -> Tensor:
        return self.a(x.detach()).mean((2, 3)).detach() + 0 * self.b(x).mean((2, 3))

    model = Net(way, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(3, 4, 3))
    with pytest.raises(
        FeatvizError, match=r"layer b \(Conv2d\) has a gradient of zero at every place"
    ):
        cam(model, "class:1", layers="b")
    with pytest.raises(
        FeatvizError,
        match=r"layer a \(Conv2d\) has no gradient: the target does not depend on it",
    ):
        cam(model, "class:1", layers="a")
    with pytest.raises(FeatvizError, match="no layer gives maps of the image"):
        cam(nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE**2, 4)), "class:1")


RUN = ("--layers", "0,1", "--reduce", "gradxact", "--target", "class:1", "--size", "16")


def test_run_draws_one_map_a_layer(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path
) -> None:
    """Blue and red around zero, with the statistics and raw tensor of the output; a
    layer without places is skipped with the reason, in the dry run as well."""
    words = (
        "run",
        tiny_file,
        picture,
        *RUN,
        "--layers",
        "4",
        "--tensors",
        "npy",
        "--scale",
        "1",
    )
    planned = featviz(*words, "--dry-run")
    assert "4  skipped: has no places" in planned.out and "1 maps" in planned.out
    done = featviz(*words, "--out", tmp_path / "out")
    assert done.code == 0 and "skipped: 4 (has no places of the image" in done.err
    folder = tmp_path / "out" / "picture.png"
    found = rows(folder)
    assert sorted(found) == [("0", 0, ""), ("1", 0, "")]
    row = found["1", 0, ""]
    assert (row["kind"], row["reduce"], row["normalize"]) == (
        "output",
        "gradxact",
        "symmetric",
    )
    kept = np.load(folder / row["tensor"])
    assert row["maps"] == 4 and row["max"] == pytest.approx(kept.max())
    model = torch.load(tiny_file, weights_only=False)
    share = model[4].weight[1].detach().numpy()[:, None, None] / kept[0, 0].size
    wanted = (share * kept[0]).sum(0)
    limit = abs(wanted).max()
    assert row["range"] == pytest.approx([-limit, limit], rel=1e-4)
    levels = np.asarray(Image.open(folder / row["file"]))
    assert np.abs(levels - (wanted / limit + 1) / 2 * 253).max() <= 1
