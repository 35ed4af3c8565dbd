"""Models of half, bfloat16 and double precision: their inputs take the type of their
parameters."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import featviz as fv
from models.loading import load


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def converted(request: pytest.FixtureRequest, tiny: nn.Module) -> nn.Module:
    """The tiny model in another precision."""
    return deepcopy(tiny).to(request.param)


def precision(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


@pytest.mark.medium
def test_a_live_model_is_drawn_in_its_own_precision(
    converted: nn.Module, tiny: nn.Module, picture: Path
) -> None:
    """Outputs and gradients are those of the same model in float32 within its
    precision, and the input's picture shows the image."""
    before = precision(converted)
    options = {"capture": "output,grad,input", "target": "class:1", "preset": "none"}
    single = fv.run(tiny, picture, "*", tensors=True, **options)
    other = fv.run(converted, picture, "*", tensors=True, **options)
    limit = max(torch.finfo(before).eps, torch.finfo(torch.float32).eps) * 100
    for expected, capture in zip(single.captures, other.captures, strict=True):
        tensor = capture.tensor.float()
        torch.testing.assert_close(tensor, expected.tensor, rtol=limit, atol=limit)
    shown = np.asarray(other.images[0].input).astype(int)
    assert np.abs(shown - np.asarray(single.images[0].input)).max() <= 1
    assert precision(converted) == before


def half_grey(image: Image.Image) -> Tensor:
    return torch.full((3, image.height, image.width), 0.5)


@pytest.mark.medium
def test_floats_of_a_transform_are_cast(converted: nn.Module, picture: Path) -> None:
    """A function of the user's need not know the model's precision."""
    assert not fv.run(converted, picture, transform=half_grey).failures


@pytest.mark.medium
@pytest.mark.parametrize(
    "study",
    [
        lambda model, picture, out: fv.look(model, picture, preset="none").layers,
        lambda model, picture, out: fv.layers(model, size=20).rows,
        lambda model, picture, out: (
            fv.audit(model, picture, out=out, preset="none").document
        ),
        lambda model, picture, out: fv.cam(
            model, picture, layers="0", target="class:1", preset="none"
        ),
        lambda model, picture, out: fv.exemplars(
            model, picture, "*", out=out, preset="none"
        ),
    ],
    ids=["look", "layers", "audit", "cam", "exemplars"],
)
def test_studies_take_a_model_of_any_precision(
    study: Callable[..., object], converted: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """They convert the image, and have a result."""
    assert study(converted, picture, tmp_path / "out")


@pytest.mark.parametrize(
    ("dtype", "loaded"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_a_file_in_half_precision(
    dtype: torch.dtype, loaded: torch.dtype, tiny: nn.Module, tmp_path: Path
) -> None:
    """Becomes float32 on a CPU, which lacks many operations in half."""
    torch.save(tiny.to(dtype), tmp_path / "net.pth")
    assert precision(load(tmp_path / "net.pth")) == loaded
