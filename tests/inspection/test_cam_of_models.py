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


@dataclass(frozen=True)
class Case:
    """A small model, the layer that `cam` finds, and how pytorch-grad-cam is told to
    read it."""

    make: Callable[[], nn.Module]
    layer: str
    reshape: Callable[[Tensor], Tensor] = torch.clone
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


@dataclass(frozen=True)
class Method:
    """A class of pytorch-grad-cam, whose maps are all cut off at zero."""

    class_name: str
    tolerance: float = 1e-5
    """Larger where a map is divided by sums that come near zero."""


METHODS = {
    "gradcam": Method("GradCAM"),
    "gradcam++": Method("GradCAMPlusPlus", 1e-3),
    "layercam": Method("LayerCAM"),
    "hirescam": Method("HiResCAM"),
    "xgradcam": Method("XGradCAM", 1e-3),
    "gradxact": Method("HiResCAM"),
}


@cache
def model(name: str) -> nn.Module:
    """Random weights. Outputs and gradients are so large that the small numbers which
    pytorch-grad-cam adds to what it divides by do not count."""
    torch.manual_seed(0)
    made = CASES[name].make().eval()
    linears = [m for m in made.modules() if isinstance(m, nn.Linear)]
    nn.init.normal_(linears[-1].weight, std=1e4)
    return made


def map_of_pytorch_grad_cam(name: str, class_name: str, image: Tensor) -> np.ndarray:
    """Its map for class 3, [H, W] from 0 to 1, as large as the layer's maps."""
    package = pytest.importorskip(
        "pytorch_grad_cam", reason="grad-cam is not installed"
    )
    targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    case = CASES[name]
    method = getattr(package, class_name)(
        model=model(name),
        target_layers=[model(name).get_submodule(case.layer)],
        reshape_transform=case.reshape,
    )
    with method:
        method.get_target_width_height = lambda inputs: None
        target = targets.ClassifierOutputTarget(3)
        values: np.ndarray = method(image[None].clone(), [target])[0]
    return values


def test_all_methods_are_compared() -> None:
    """A method that is added needs its oracle here."""
    assert METHODS.keys() == {*CLASS_MAPS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("resnet18", method) for method in METHODS),
        ("vit", "gradcam"),
        ("swin", "gradcam"),
    ],
)
def test_maps_are_those_of_pytorch_grad_cam(name: str, method: str) -> None:
    """Cut off at zero and scaled to 0..1 they are equal within rounding, at the layer
    that is found by itself: of a ViT before its last attention."""
    image = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(1))
    expected = map_of_pytorch_grad_cam(name, METHODS[method].class_name, image)

    photo = Image.new("RGB", (8, 8))
    result = fv.cam(model(name), photo, "class:3", method, transform=lambda _: image)

    assert result.maps[0].layer == CASES[name].layer
    values = np.maximum(result.tensor.double().numpy(), 0)
    values = (values - values.min()) / (values.max() - values.min())
    assert expected.max() == pytest.approx(1)
    assert (expected > 0.01).any()
    assert values.shape == expected.shape
    assert np.abs(values - expected).max() < METHODS[method].tolerance
