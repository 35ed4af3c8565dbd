"""Runs with gradients: failures, reasons, --dry-run and options in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import featviz as fv
from featviz.rundir.schema import read_json


class Picky(torch.autograd.Function):
    """Fails on the way back of a bright picture."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.bad = bool(x.max() > 0.9)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if ctx.bad:
            raise RuntimeError("too bright")
        return gradient


class Moody(nn.Module):
    """Fails on the way back of bright pictures, or gives a dict of them in place of
    scores."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 1)
        self.fails = fails

    def forward(self, x: Tensor) -> Any:
        if self.fails:
            return self.conv(Picky.apply(x)).mean((2, 3))
        maps = self.conv(x)
        return {"maps": maps} if x.max() > 0.9 else maps.mean((2, 3))


NO_TENSOR = "the output is no tensor there; the model gives output[maps] [1, 3, 5, 5]"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("fails", "error"),
    [
        (True, "the backward pass failed: too bright"),
        (False, f"target 'top1': {NO_TENSOR}"),
    ],
)
def test_a_failing_image_leaves_nothing_and_the_others_go_on(
    fails: bool, error: str
) -> None:
    """The trial on zeros cannot know: exit code 3, and nothing of the image is written."""
    for name, level in (("a.png", 10), ("b.png", 255), ("c.png", 20)):
        Image.new("L", (5, 5), level).save(name)
    out = Path("out")
    raw = {"capture": "output,grad", "mean": (0.0,), "std": (1.0,)}
    result = fv.run(Moody(fails), "*.png", "conv", out, **raw)
    assert result.exit_code == 3
    assert [image.error for image in result.images] == [None, error, None]
    assert sorted(path.name for path in out.iterdir()) == ["a.png", "c.png", "run.json"]
    assert read_json(out / "run.json")["failures"] == [
        {"image": "b.png", "error": error}
    ]
