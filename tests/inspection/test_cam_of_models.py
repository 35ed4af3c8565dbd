"""Class activation maps of torchvision's models: the layer that is found, and the maps
of pytorch-grad-cam."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import models

import featviz as fv
from featviz.records import CLASS_MAPS

Shaped = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A small model, the layer that `cam` finds, and how pytorch-grad-cam is told to
    read it."""

    make: Callable[[], nn.Module]
    layer: str
    reshape: Shaped = torch.clone
    """A copy, or a ReLU in place behind the layer changes what pytorch-grad-cam has
    kept."""


CASES = {
    "resnet18": Case(models.resnet18, "layer4"),
    "vit": Case(
        lambda: models.VisionTransformer(64, 16, 2, 2, 32, 64, num_classes=5),
        "encoder.layers.encoder_layer_1.ln_1",
        lambda tokens: tokens[:, 1:].reshape(1, 4, 4, -1).permute(0, 3, 1, 2).clone(),
    ),
    "swin": Case(
        lambda: models.SwinTransformer(
            [4, 4], 16, [1, 1], [1, 2], [4, 4], num_classes=5
        ),
        "norm",
        lambda maps: maps.permute(0, 3, 1, 2).clone(),
    ),
}

THEIRS = {
    "gradcam": "GradCAM",
    "gradcam++": "GradCAMPlusPlus",
    "layercam": "LayerCAM",
    "hirescam": "HiResCAM",
    "xgradcam": "XGradCAM",
    "gradxact": "HiResCAM",
}
"""Their classes, whose maps are all cut off at zero."""

NEAR = {"gradcam++": 1e-3, "xgradcam": 1e-3}
"""Both divide by sums that come near zero."""


@cache
def model(name: str) -> nn.Module:
    """Random weights. Outputs and gradients are so large that the small numbers which
    pytorch-grad-cam adds to what it divides by do not count."""
    torch.manual_seed(0)
    made = CASES[name].make().eval()
    heads = [part for part in made.modules() if isinstance(part, nn.Linear)]
    nn.init.normal_(heads[-1].weight, std=1e4)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("resnet18", method) for method in CLASS_MAPS),
        *((n, "gradcam") for n in list(CASES)[1:]),
    ],
)
def test_maps_are_those_of_pytorch_grad_cam(name: str, method: str) -> None:
    """Cut off at zero and scaled to 0..1, as theirs are, within rounding; at the layer
    that is found by itself: of a ViT before its last attention."""
    theirs = pytest.importorskip("pytorch_grad_cam", reason="grad-cam is not installed")
    targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    case, net = CASES[name], model(name)
    seen = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(1))
    with getattr(theirs, THEIRS[method])(
        model=net,
        target_layers=[net.get_submodule(case.layer)],
        reshape_transform=case.reshape,
    ) as oracle:
        oracle.get_target_width_height = lambda inputs: None
        wanted = oracle(seen[None].clone(), [targets.ClassifierOutputTarget(3)])[0]
    photo = Image.new("RGB", (8, 8))
    (one,) = fv.cam(net, photo, "class:3", method, transform=lambda image: seen).maps
    assert one.layer == case.layer and one.tensor.shape == wanted.shape[:2]
    found = np.maximum(one.tensor.double().numpy(), 0)
    found = (found - found.min()) / (found.max() - found.min())
    assert wanted.max() == pytest.approx(1) and (wanted > 0.01).any()
    assert np.abs(found - wanted).max() < NEAR.get(method, 1e-5)
