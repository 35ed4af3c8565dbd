"""`look` and `cam` answer for a model of each family by themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from small_models import SIDE, TORCHVISION, TRANSFORMERS, noise, unsure_yolo
from torch import nn

import featviz as fv

# test_boxes.py has others of these two libraries, which answer in the same way
DETECTORS = ("fcos", "ssd")
ULTRALYTICS = ("yolo11n-seg", "yolo11n-obb", "yolov10n")
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: TORCHVISION[name] for name in DETECTORS},
    **{name: partial(unsure_yolo, name) for name in ULTRALYTICS},
    **TRANSFORMERS,
}
# whose inputs have no size of their own: by default they would see 640 pixels a side
SIZES: dict[str, tuple[int, int] | int] = {
    **dict.fromkeys((*ULTRALYTICS, "detr", "mask2former", "segformer"), SIDE),
    "rtdetr": (SIDE, SIDE),  # joins maps of the sides 2, 4 and 8
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_look_and_cam_answer_without_target_and_layers(name: str) -> None:
    """`cam` finds a target and a map that is not the same everywhere, and `look` finds
    layers."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    image = noise(8, 6).resize((80, 64))

    # with its sign, since with random weights nothing may speak for the target
    page = fv.cam(model, image, method="gradxact", size=SIZES.get(name))
    stages = fv.look(model, image, size=SIZES.get(name)).layers

    assert page.images[0].target
    maps = [layer_map.tensor for layer_map in page.maps]
    assert all(tensor.isfinite().all() for tensor in maps)
    assert any(tensor.std() > 0 for tensor in maps)
    assert stages
