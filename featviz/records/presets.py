"""Preprocessings that many models share: one record for each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputPreset:
    """How images become the input of a family of models; steps that are None are left out."""

    name: str
    """As in `--preset`."""
    words: str
    """What it does, for help."""
    resize: int | None = None
    """The shorter side in pixels."""
    crop: int | None = None
    """The side of the centre crop in pixels."""
    mean: tuple[float, float, float] | None = None
    """Subtracted from the channels of the 0..1 image."""
    std: tuple[float, float, float] | None = None
    """Divides the channels."""
    interpolation: str = "bilinear"
    """As torchvision's InterpolationMode spells it."""
    letterbox: int | None = None
    """The longer side in pixels, where the image is padded by Ultralytics' LetterBox instead."""


PRESETS: dict[str, InputPreset] = {
    preset.name: preset
    for preset in (
        InputPreset(
            "imagenet",
            "256, crop 224, ImageNet's mean and deviation",
            256,
            224,
            (0.485, 0.456, 0.406),
            (0.229, 0.224, 0.225),
        ),
        InputPreset(
            "clip",
            "224, CLIP's mean and deviation",
            224,
            224,
            (0.48145466, 0.4578275, 0.40821073),
            (0.26862954, 0.26130258, 0.27577711),
            "bicubic",
        ),
        InputPreset(
            "inception", "341, crop 299, values -1..1", 341, 299, (0.5,) * 3, (0.5,) * 3, "bicubic"
        ),
        InputPreset(
            "yolo", "longer side 640, grey padding to multiples of 32, values 0..1", letterbox=640
        ),
        InputPreset("none", "the image's own size, values 0..1"),
    )
}
"""In the order in which help lists them."""
