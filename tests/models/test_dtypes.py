"""Models of half, bfloat16 and double precision: their inputs take the type of their parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Outcome
from hostile_images import png
from torch import nn

import featviz as fv

DTYPES = [torch.float16, torch.bfloat16, torch.float64]


def network(dtype: torch.dtype) -> nn.Module:
    """A small classifier."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4, 5)).eval().to(dtype)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    path.write_bytes(png())
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_live_model_is_drawn_in_its_own_precision(
    dtype: torch.dtype, image: Path, tmp_path: Path
) -> None:
    """Outputs and gradients are those of the same model in float32 within its precision, and the
    input's picture shows the image."""
    runs = []
    for kind in (torch.float32, dtype):
        wishes: dict[str, Any] = {"preset": "none", "tensors": "npy", "target": "class:1"}
        out, model = tmp_path / str(kind), network(kind)
        runs.append(fv.run(model, image, "*", out=out, capture="output,grad,input", **wishes))
        assert {p.dtype for p in model.parameters()} == {kind}
    limit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) * 100
    for one, other in zip(runs[0].captures, runs[1].captures, strict=True):
        assert one.tensor is not None and other.tensor is not None
        torch.testing.assert_close(other.tensor.float(), one.tensor, rtol=limit, atol=limit)
    inputs = [np.asarray(run.images[0].input).astype(int) for run in runs]
    assert np.abs(inputs[0] - inputs[1]).max() <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_function_takes_them(dtype: torch.dtype, image: Path, tmp_path: Path) -> None:
    """Also a transform of one's own, whose floats are cast."""
    model, wishes = network(dtype), {"preset": "none"}
    assert fv.look(model, image, **wishes).layers
    assert fv.layers(model, size=20).rows
    assert fv.audit(model, image, out=tmp_path / "audit", **wishes)
    assert fv.cam(model, image, target="class:1", layers="0", **wishes)
    fv.exemplars(model, image, "*", out=tmp_path / "best", **wishes)

    def grey(picture: Any) -> torch.Tensor:
        return torch.full((3, picture.height, picture.width), 0.5)

    run = fv.run(model, image, "Conv2d", out=tmp_path / "out", transform=grey)
    assert run.images[0].error is None


def test_a_file_in_double_precision(
    image: Path, tmp_path: Path, featviz: Callable[..., Outcome]
) -> None:
    """Whole, as `torch.save` writes it."""
    torch.save(network(torch.float64), tmp_path / "net.pth")
    out = tmp_path / "out"
    done = featviz("run", tmp_path / "net.pth", image, "--preset", "none", "--out", out)
    assert done.code == 0 and (out / "a.png" / "manifest.json").is_file()
