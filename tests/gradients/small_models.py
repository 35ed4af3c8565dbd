"""Small models of each family, with random weights: those of torchvision, Ultralytics
and transformers. What needs a library that is not installed is skipped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import (
    AnchorGenerator,
    DefaultBoxGenerator,
)
from torchvision.ops import MultiScaleRoIAlign

SIDE = 64
"""Pixels of the input's sides."""


class Backbone(nn.Sequential):
    """Maps of 32 channels, an eighth of the input's size."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 5, 4, 2), nn.ReLU(), nn.Conv2d(8, 32, 3, 2, 1), nn.ReLU()
        )
        self.out_channels: Any = 32


ANCHORS: Any = AnchorGenerator(((16, 32),), ((1.0,),))
SIZES: Any = {"num_classes": 4, "min_size": SIDE, "max_size": SIDE}


def rcnn(make: Callable[..., nn.Module] = detection.FasterRCNN) -> nn.Module:
    pool = MultiScaleRoIAlign(["0"], 4, 2)
    return make(Backbone(), rpn_anchor_generator=ANCHORS, box_roi_pool=pool, **SIZES)


def retinanet() -> nn.Module:
    return detection.RetinaNet(Backbone(), anchor_generator=ANCHORS, **SIZES)


def fcos() -> nn.Module:
    anchors = AnchorGenerator(((8,),), ((1.0,),))
    return detection.FCOS(Backbone(), anchor_generator=anchors, **SIZES)


def ssd() -> nn.Module:
    boxes = DefaultBoxGenerator([[2]], scales=[0.2, 0.5])
    backbone = Backbone()
    backbone.out_channels = [32]  # of each level
    return detection.ssd.SSD(backbone, boxes, (SIDE, SIDE), num_classes=4)


TORCHVISION: dict[str, Callable[[], nn.Module]] = {
    "fasterrcnn": rcnn,
    "retinanet": retinanet,
    "fcos": fcos,
    "ssd": ssd,
}


YOLO_CLASSES = {
    "yolo11n-seg": "SegmentationModel",
    "yolo11n-pose": "PoseModel",
    "yolo11n-obb": "OBBModel",
}
"""Those that are no plain `DetectionModel`, by the name of their architecture."""


@cache
def untrained_yolo(name: str) -> Any:
    """A model of Ultralytics as its configuration says, which is slow to build."""
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    torch.manual_seed(0)
    build = getattr(tasks, YOLO_CLASSES.get(name, "DetectionModel"))
    model = build(f"{name}.yaml", verbose=False).eval()
    return model.requires_grad_(False)


def unsure_yolo(name: str = "yolo11n") -> Any:
    """A detector none of whose classes is likely; frozen, as the library loads it."""
    return copy.deepcopy(untrained_yolo(name))


def sure_yolo(name: str = "yolo11n") -> Any:
    """A detector whose classes are likely enough to give boxes."""
    model = unsure_yolo(name)
    head = model.model[-1]
    # of a head that can select boxes itself, the branch that does
    selecting = getattr(head, "one2one_cv3", ())
    if selecting:
        head.end2end = True
    for branch in (*head.cv3, *selecting):
        branch[-1].weight *= 1000
        branch[-1].bias[:] = 0
    return model


def made(model_name: str, config_name: str, **settings: Any) -> nn.Module:
    """A model of transformers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**settings)
    model: nn.Module = getattr(transformers, model_name)(config)
    return model.eval()


def config(name: str, **settings: Any) -> Any:
    """A configuration of transformers."""
    return getattr(pytest.importorskip("transformers"), name)(**settings)


SMALL: Any = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
CLIP_SHAPE: Any = {"image_size": 32, "num_frames": 4, "num_labels": 5, **SMALL}
RESNET: Any = {
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1] * 4,
    "layer_type": "basic",
}


def detr(**changes: Any) -> Any:
    """A small DETR whose queries are sure of their class."""
    model: Any = made(
        "DetrForObjectDetection",
        "DetrConfig",
        use_timm_backbone=False,
        backbone=None,
        backbone_config=config("ResNetConfig", **RESNET, out_features=["stage4"]),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_queries=9,
        num_labels=4,
        **changes,
    )
    model.class_labels_classifier.weight.data *= 40
    return model


def rtdetr() -> nn.Module:
    stages = ["stage2", "stage3", "stage4"]
    return made(
        "RTDetrForObjectDetection",
        "RTDetrConfig",
        backbone_config=config("RTDetrResNetConfig", **RESNET, out_features=stages),
        use_timm_backbone=False,
        d_model=16,
        encoder_hidden_dim=16,
        encoder_in_channels=[8, 16, 16],
        encoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        decoder_in_channels=[16, 16, 16],
        decoder_ffn_dim=16,
        decoder_layers=1,
        num_queries=20,
        num_labels=4,
    )


def yolos() -> nn.Module:
    return made(
        "YolosForObjectDetection",
        "YolosConfig",
        image_size=[SIDE, SIDE],
        patch_size=8,
        num_detection_tokens=7,
        num_labels=4,
        **SMALL,
    )


def mask2former() -> nn.Module:
    stages = ["stage1", "stage2", "stage3", "stage4"]
    swin = config(
        "SwinConfig",
        image_size=SIDE,
        patch_size=4,
        embed_dim=8,
        depths=[1] * 4,
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=stages,
    )
    return made(
        "Mask2FormerForUniversalSegmentation",
        "Mask2FormerConfig",
        backbone_config=swin,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=6,
        num_labels=4,
    )


def segformer() -> nn.Module:
    return made(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        hidden_sizes=[8, 8, 16, 16],
        depths=[1] * 4,
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        num_labels=4,
    )


def dpt() -> nn.Module:
    return made(
        "DPTForDepthEstimation",
        "DPTConfig",
        image_size=SIDE,
        patch_size=8,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        **{**SMALL, "num_hidden_layers": 4},
    )


def vitpose() -> nn.Module:
    backbone = config(
        "VitPoseBackboneConfig",
        image_size=[SIDE, SIDE],
        patch_size=[8, 8],
        out_indices=[3],
        **SMALL,
    )
    return made(
        "VitPoseForPoseEstimation",
        "VitPoseConfig",
        backbone_config=backbone,
        num_labels=5,
        use_simple_decoder=False,
    )


def dinov2() -> nn.Module:
    return made("Dinov2Model", "Dinov2Config", image_size=SIDE, patch_size=8, **SMALL)


def clip_tower() -> nn.Module:
    shape = {"image_size": SIDE, "patch_size": 8}
    return made("CLIPVisionModel", "CLIPVisionConfig", **shape, **SMALL)


def videomae() -> nn.Module:
    name = "VideoMAEForVideoClassification"
    shape = {"patch_size": 8, "tubelet_size": 2}
    return made(name, "VideoMAEConfig", **shape, **CLIP_SHAPE)


def timesformer() -> nn.Module:
    name = "TimesformerForVideoClassification"
    return made(name, "TimesformerConfig", patch_size=8, **CLIP_SHAPE)


def vivit() -> nn.Module:
    name = "VivitForVideoClassification"
    return made(name, "VivitConfig", tubelet_size=[2, 8, 8], **CLIP_SHAPE)


TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    make.__name__: make
    for make in (
        detr,
        rtdetr,
        yolos,
        mask2former,
        segformer,
        dpt,
        vitpose,
        dinov2,
        clip_tower,
        videomae,
        timesformer,
        vivit,
    )
}


def pixels(side: int = SIDE) -> Tensor:
    """Noise, 0..1, [3, H, W], of whole levels as pictures have them."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (3, side, side), generator=generator) / 255


def noise(width: int, height: int) -> Image.Image:
    """A picture of random colours."""
    generator = np.random.default_rng(0)
    levels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def kept_output(module: nn.Module) -> list[Any]:
    """Where the output of a module will be."""
    outputs: list[Any] = []
    module.register_forward_hook(lambda module, args, output: outputs.append(output))
    return outputs


def by_hand(output: Tensor, number: Tensor, method: str) -> Tensor:
    """Grad-CAM or LayerCAM of a layer's output [1, C, H, W]."""
    gradient = torch.autograd.grad(number, output, retain_graph=True)[0]
    weights = gradient.relu()
    if method == "gradcam":
        weights = gradient.mean(dim=(2, 3), keepdim=True)
    return (weights * output).sum(dim=1)[0].relu().detach()


def assert_maps_equal(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest value; where nothing speaks for a target both are
    zero."""
    scale = float(expected.abs().max())
    assert float((actual - expected).abs().max()) <= 1e-5 * scale
