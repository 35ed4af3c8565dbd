"""`look` and `cam` answer for a model of each family by themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import TORCHVISION, TRANSFORMERS, yolo

import featviz as fv

ULTRALYTICS = ("yolo11n", "yolo11n-seg", "yolo11n-pose", "yolo11n-obb", "yolov10n")
MODELS: dict[str, Any] = {
    **TORCHVISION,
    **{name: partial(yolo, name, confident=False) for name in ULTRALYTICS},
    **TRANSFORMERS,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_look_and_cam_answer_without_target_and_layers(name: str) -> None:
    """Whatever the model is: `cam` has a target and a map that is not the same
    everywhere (with its sign, since with random weights nothing may speak for the
    target); `look` has layers."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((80, 64))
    found = fv.cam(model, image, method="gradxact")
    assert found.images[0].target
    assert all(layer_map.tensor.isfinite().all() for layer_map in found.maps)
    assert any(float(layer_map.tensor.std()) > 0 for layer_map in found.maps)
    assert fv.look(model, image).layers
