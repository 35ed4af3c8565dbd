"""Gradients of clips, pairs, quantised models, segmentation, detection and optical flow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SCENES, Outcome
from gradient_models import SPHERES
from oracle import assert_close, inputs, saved
from PIL import Image
from torch import Tensor, nn

import featviz as fv
from featviz.errors import UsageError
from featviz.rundir.read import read_json


class Clip(nn.Module):
    """A model of clips."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv3d(3, 4, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.conv(x)).mean((2, 3, 4))


def test_clips_have_gradients(tmp_path: Path) -> None:
    """[1, C, T, H, W], each channel's steps side by side."""
    torch.manual_seed(0)
    model = Clip().eval()
    (tmp_path / "clip").mkdir()
    rng = np.random.default_rng(0)
    for index in range(4):
        pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "clip" / f"{index}.png")
    fv.run(
        model, tmp_path / "clip", "conv", tmp_path / "out", capture="grad,grad-input", target="sum",
        frames=4, tensors="npy", ablate="conv:1", **inputs(8),
    )  # fmt: skip
    got = saved(tmp_path / "out" / "clip")
    assert got["conv", "grad-input"].shape == (1, 3, 4, 8, 8)
    gradient = got["conv", "grad"]
    assert not gradient[0, 1].any()  # relu of a channel that is zero
    assert gradient.unique().tolist() == [0.0, 1 / 256]  # 4 steps of 8×8
    weights = model.conv.weight.clone()
    weights[1] = 0
    want = torch.nn.grad.conv3d_input((1, 3, 4, 8, 8), weights, gradient, padding=1)
    assert_close(got["conv", "grad-input"], want.detach())
    row = read_json(tmp_path / "out" / "clip" / "manifest.json")["captures"][0]
    assert (row["layout"], row["slices"]) == ("ncthw", [4, 4])


class Stereo(nn.Module):
    """Takes two images, one of which it needs twice as much."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (self.conv(left) + 2 * self.conv(right)).mean((2, 3))


def test_two_images_have_their_own_gradients(tmp_path: Path) -> None:
    """Both inputs require gradients; the model itself shows them as two inputs."""
    files = [SPHERES, SCENES / "landscape.jpg"]
    options = {**inputs(8), "size": (8, 8)}
    fv.run(
        Stereo(), files, "*", tmp_path / "out", capture="input,grad-input,grad", target="sum",
        tensors="npy", **options,
    )  # fmt: skip
    got = saved(tmp_path / "out" / "spheres.jpg+landscape.jpg")
    assert_close(got["", "grad-input.1"], 2 * got["", "grad-input.0"])
    assert torch.equal(got["conv", "grad-input.call1"], got["", "grad-input.1"])
    assert_close(got["conv", "grad.call1"], 2 * got["conv", "grad"])
    assert torch.equal(got["", "input.1"], got["conv", "input.call1"])


def quantised() -> nn.Module:
    """A convolution of eight bits."""
    torch.manual_seed(0)
    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
    model = nn.Sequential(
        torch.ao.quantization.QuantStub(), nn.Conv2d(3, 2, 1), torch.ao.quantization.DeQuantStub()
    ).eval()
    model.qconfig = torch.ao.quantization.default_qconfig
    torch.ao.quantization.prepare(model, inplace=True)
    model(torch.randn(1, 3, 8, 8))
    return torch.ao.quantization.convert(model)


@pytest.mark.filterwarnings("ignore")
def test_quantised_models_have_no_gradients(tmp_path: Path) -> None:
    """A clear refusal for gradients and interventions, and outputs as ever."""
    model = quantised()
    with pytest.raises(UsageError) as caught:
        fv.run(model, SPHERES, "1", tmp_path / "out", capture="grad", target="sum", **inputs(8))
    assert caught.value.message == "target 'sum': no gradient flows back from it"
    assert "quantized" in str(caught.value.hint)
    with pytest.raises(UsageError, match=r"edit='1:clamp=0,1': 1 gives a quantized tensor"):
        fv.run(model, SPHERES, "1", tmp_path / "out", edit="1:clamp=0,1", **inputs(8))
    assert not (tmp_path / "out").exists()
    fv.run(model, SPHERES, "1", tmp_path / "out", capture="output,input", **inputs(8))


@pytest.mark.slow
def test_segmentation_and_detection(tmp_path: Path, featviz: Callable[..., Outcome]) -> None:
    """Dicts and lists: refused with what there is, and reached into when asked for."""
    fixed = ("--weights", "none", "--size", "64", "--capture", "grad", "--out", tmp_path / "out")
    done = featviz("run", "lraspp_mobilenet_v3_large", SPHERES, *fixed)
    assert done.code == 2
    assert "the model gives output[out] [1, 21, 64, 64]\n" in done.err
    assert not (tmp_path / "out").exists()
    done = featviz(
        "run", "lraspp_mobilenet_v3_large", SPHERES, *fixed, "--target", "output[out]:mean",
        "--layers", "classifier.low_classifier",
    )  # fmt: skip
    assert done.code == 0
    rows = read_json(tmp_path / "out" / "spheres.jpg" / "manifest.json")["captures"]
    assert [(row["layer"], row["shape"]) for row in rows] == [
        ("classifier.low_classifier", [1, 21, 8, 8])
    ]
    assert rows[0]["mean"] == pytest.approx(1 / (21 * 8 * 8), rel=1e-3)
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    done = featviz("run", name, SPHERES, *fixed, "--overwrite")
    assert done.code == 2
    assert (
        "the model gives output[0][boxes] [0, 4], output[0][labels] [0], output[0][scores] [0]"
        in (done.err)
    )
    done = featviz("run", name, SPHERES, *fixed, "--overwrite", "--target", "output[0][labels]:sum")
    assert "'output[0][labels]:sum': it holds torch.int64, and has no gradient" in done.err


@pytest.mark.slow
def test_optical_flow(tmp_path: Path) -> None:
    """RAFT: two images, twelve outputs, a loop that calls its update block twelve times."""
    torch.manual_seed(0)
    files = [SPHERES, SCENES / "landscape.jpg"]
    options = {"weights": "none", "size": (128, 128), "capture": "grad", "tensors": "npy"}
    with pytest.raises(UsageError, match=r"output\[0\] \[1, 2, 128, 128\].* and 4 more"):
        fv.run("raft_small", files, "*flow_head", tmp_path / "out", **options)
    result = fv.run(
        "raft_small", files, "*.flow_head.conv2,*.convgru1.convq", tmp_path / "out",
        target="output[11]:mean", **options,
    )  # fmt: skip
    calls = [row.layer.rpartition(".")[2] for row in result.images[0].captures]
    assert (calls.count("convq"), calls.count("conv2")) == (12, 1)
    skipped = [(skip.layer.rpartition(".")[2], skip.call) for skip in result.images[0].skipped]
    assert skipped == [("conv2", call) for call in range(11)]  # RAFT detaches earlier flows
    got = saved(next(path for path in (tmp_path / "out").iterdir() if path.is_dir()))
    assert all(bool(gradient.any()) for gradient in got.values())
