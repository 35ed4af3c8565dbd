"""Backward passes that fail, for one image or for all, and what is skipped with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from gradient_models import SPHERES
from oracle import inputs
from PIL import Image
from torch import Tensor, nn

import featviz as fv
from featviz.errors import ForwardError
from featviz.rundir.read import read_json


def test_a_failing_image_leaves_nothing_and_the_others_go_on(
    tmp_path: Path, featviz: Callable[..., Outcome]
) -> None:
    """A model that fails for one picture only: exit 3, nothing of it is written."""
    code = (
        "import torch\nfrom torch import nn\n"
        "class Picky(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        ctx.bad = bool(x.max() > 0.9)\n"
        "        return x.clone()\n"
        "    @staticmethod\n"
        "    def backward(ctx, g):\n"
        "        if ctx.bad: raise RuntimeError('too bright')\n"
        "        return g\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.conv = nn.Conv2d(1, 2, 1)\n"
        "    def forward(self, x):\n"
        "        return self.conv(Picky.apply(x)).mean((2, 3))\n"
    )
    (tmp_path / "picky_nets.py").write_text(code)
    (tmp_path / "in").mkdir()
    for name, level in (("a.png", 10), ("b.png", 255), ("c.png", 20)):
        Image.new("L", (5, 5), level).save(tmp_path / "in" / name)
    done = featviz(
        "run", f"{tmp_path}/picky_nets.py:Net", tmp_path / "in", "--capture", "output,grad",
        "--layers", "conv", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.code == 3
    assert "error: b.png: the backward pass failed: too bright\n" in done.err
    assert "hint: without grad and grad-input in --capture none is needed" in done.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "a.png", "c.png", "run.json",
    ]  # fmt: skip
    assert read_json(tmp_path / "out" / "run.json")["failures"] == [
        {"image": "b.png", "error": "the backward pass failed: too bright"}
    ]


class Moody(nn.Module):
    """Gives scores of dark pictures, and two maps of bright ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(1, 3, 1), Shy()

    def forward(self, x: Tensor) -> Any:
        x = self.act(self.conv(x))
        return x.mean((2, 3)) if x.mean() < 100 else {"maps": x}


class Shy(nn.Module):
    """Multiplies by a hundred what is bright."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.max() < 0.9 else x * 1000


def test_an_output_that_fits_for_some_images_fails_for_the_others(tmp_path: Path) -> None:
    """The trial on zeros cannot know: exit code 3, and the others are complete."""
    model = Moody()
    nn.init.ones_(model.conv.weight)
    nn.init.zeros_(model.conv.bias)
    for name, level in (("a.png", 10), ("b.png", 255), ("c.png", 20)):
        Image.new("L", (5, 5), level).save(tmp_path / name)
    result = fv.run(model, str(tmp_path / "*.png"), "conv", tmp_path / "out", capture="grad")
    assert result.exit_code == 3
    assert [image.error for image in result.images] == [
        None,
        "target 'top1': the output is no tensor; the model gives output[maps] [1, 3, 5, 5]",
        None,
    ]
    assert not (tmp_path / "out" / "b.png").exists()


class Wordy(nn.Module):
    """Gives a word beside its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Words()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Words(nn.Module):
    """A tensor and a word."""

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x.mean((2, 3)), "word"


def test_what_is_no_tensor_is_skipped_for_each_kind(tmp_path: Path) -> None:
    """Also where only gradients are captured, nothing is lost without a word."""
    result = fv.run(
        Wordy(), SPHERES, "inner", tmp_path / "out", capture="output,grad", **inputs(8)
    )  # fmt: skip
    found = [(skip.kind, skip.key, skip.reason) for skip in result.images[0].skipped]
    assert found == [(kind, "1", "is a str, not a tensor") for kind in ("output", "grad")]
    assert [row.kind for row in result.images[0].captures] == ["output", "grad"]


def test_nan_effects_are_json(tmp_path: Path, featviz: Callable[..., Outcome]) -> None:
    """An intervention that turns the output into NaN: null would say that its shape changed."""
    code = (
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.one = nn.Identity()\n"
        "    def forward(self, x):\n"
        "        x = self.one(x * 0 + 1).mean((2, 3))\n"
        "        return x / x\n"
    )
    (tmp_path / "nan_nets.py").write_text(code)
    done = featviz(
        "run", f"{tmp_path}/nan_nets.py:Net", SPHERES, "--layers", "one", "--ablate", "one:0",
        "--size", "8x8", "--mean", "0,0,0", "--std", "1,1,1", "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert done.code == 0
    effect = json.loads(done.out, parse_constant=pytest.fail)["effect"]
    assert (effect["largest_change"], effect["nonfinite"]) == (0.0, 1)
    assert (
        "spheres.jpg: the output changed by at most 0, and 1 of its values became NaN or infinite, "
        "or ceased to be\n"
    ) in done.err


def test_a_model_that_undoes_its_graph_in_place_is_told_by_torchs_words(tmp_path: Path) -> None:
    """torch refuses x.sigmoid_().mul_(x), and so do we, in one line."""

    class Undone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.sigmoid()
            x.add_(1)
            return x.mean((2, 3))

    with pytest.raises(ForwardError) as caught:
        fv.run(Undone(), SPHERES, "*", tmp_path / "out", capture="grad", **inputs(8))
    assert caught.value.message.startswith(
        "the backward pass failed: one of the variables needed for gradient computation has been "
        "modified by an inplace operation"
    )
    assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()
