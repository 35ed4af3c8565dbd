"""Models of half, bfloat16 and double precision: their inputs take the type of their
parameters."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featviz as fv
from featviz.models.load import load_model
from featviz.options import InputOptions, ModelOptions

WISHES: dict[str, Any] = {"preset": "none", "target": "class:1"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_live_model_is_drawn_in_its_own_precision(
    dtype: torch.dtype, tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """Outputs and gradients are those of the same model in float32 within its
    precision, and the input's picture shows the image; all other functions take it,
    too, and a transform of one's own, whose floats are cast."""
    model, wishes = deepcopy(tiny).to(dtype), {**WISHES, "tensors": "npy"}
    one, other = (
        fv.run(
            module, picture, "*", tmp_path / name, capture="output,grad,input", **wishes
        )
        for name, module in (("single", tiny), ("other", model))
    )
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    limit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) * 100
    for expected, own in zip(one.captures, other.captures, strict=True):
        assert expected.tensor is not None and own.tensor is not None
        torch.testing.assert_close(
            own.tensor.float(), expected.tensor, rtol=limit, atol=limit
        )
    inputs = [np.asarray(run.images[0].input).astype(int) for run in (one, other)]
    assert np.abs(inputs[0] - inputs[1]).max() <= 1

    def grey(image: Any) -> torch.Tensor:
        return torch.full((3, image.height, image.width), 0.5)

    assert (
        fv.run(model, picture, out=tmp_path / "grey", transform=grey).images[0].error
        is None
    )
    assert fv.look(model, picture, preset="none").layers
    assert fv.layers(model, size=20).rows
    assert fv.audit(model, picture, out=tmp_path / "audit", preset="none").document
    assert fv.cam(model, picture, layers="0", **WISHES)
    fv.exemplars(model, picture, "*", out=tmp_path / "best", preset="none")


def test_a_file_in_half_precision(tiny: nn.Module, tmp_path: Path) -> None:
    """Becomes float32 on a CPU, which lacks many operations in half."""
    torch.save(tiny.half(), tmp_path / "net.pth")
    options = ModelOptions(str(tmp_path / "net.pth"), device="cpu")
    module = load_model(options, InputOptions()).module
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
