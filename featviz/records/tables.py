"""What options choose from, one record each: formats, capture kinds, reductions and
presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class PictureFormat:
    """A format in which pictures of feature maps are written and read back."""

    name: str
    """On the command line, and the ending of files."""
    pillow: str
    """What Pillow calls it."""
    mime: str
    largest: int
    """Pixels of a side that it can hold."""
    save: Mapping[str, object] | None
    """Options with which Pillow writes it; None for PNG, which our own encoder writes.
    """
    description: str = "lossless"
    levels: bool = False
    """Whether the pixels that are read back are the levels that were drawn."""
    comment: str | None = None
    """Pillow's option for a text in the file; None where it has no place for one."""


FORMATS = {
    "png": PictureFormat(
        name="png",
        pillow="PNG",
        mime="image/png",
        largest=2**31 - 1,  # https://www.w3.org/TR/png-3/#11IHDR
        save=None,
        levels=True,
    ),
    "webp": PictureFormat(
        name="webp",
        pillow="WEBP",
        mime="image/webp",
        largest=16_383,  # 14 bits
        save={"lossless": True},
    ),
    # 4:4:4: colours of a colormap change from one pixel to the next
    "jpg": PictureFormat(
        name="jpg",
        pillow="JPEG",
        mime="image/jpeg",
        largest=65_500,  # libjpeg's JPEG_MAX_DIMENSION
        save={"quality": 95, "subsampling": 0},
        description="with losses",
        comment="comment",
    ),
}

SUFFIXES = tuple(f".{name}" for name in FORMATS)


class CaptureKind(NamedTuple):
    """One kind of tensor that can be captured of a layer."""

    name: str
    """On the command line, and the begin of file names."""
    of: str
    """What of the layer it is, or is the gradient of: `output` or `input`."""
    backward: bool
    """Whether it takes a backward pass."""
    help: str
    """What the help of `--capture` says of it."""
    normalize: str = "auto"
    """The normalisation that `auto` stands for; `auto` where the picture decides."""
    cmap: str = "auto"
    """The colormap that `auto` stands for."""


SALIENCY = "saliency"
"""The key of the picture of all channels of a gradient of the image; its values have no
sign."""

# A few values of a gradient are so large that all others would be white beside them
_GRADIENT_SCALE = "symmetric-percentile:99"
KINDS = {
    kind.name: kind
    for kind in (
        CaptureKind(name="output", of="output", backward=False, help="output"),
        CaptureKind(name="input", of="input", backward=False, help="input"),
        CaptureKind(
            name="grad",
            of="output",
            backward=True,
            help="grad (the gradient at its output)",
            normalize=_GRADIENT_SCALE,
            cmap="coolwarm",
        ),
        CaptureKind(
            name="grad-input",
            of="input",
            backward=True,
            help="grad-input (the gradient at its input)",
            normalize=_GRADIENT_SCALE,
            cmap="coolwarm",
        ),
    )
}
"""By name, in the order of help texts."""


# What several folders ask of the table, worked out once.
BACKWARD = {name for name, kind in KINDS.items() if kind.backward}


@dataclass(frozen=True)
class Reduction:
    """One way to make one tile of all channels."""

    name: str
    """On the command line."""
    title: str
    """The picture for people: in captions, figures and reports."""
    help: str
    """What the help of `--reduce` says of it."""
    unit: str = ""
    """What its values are counted in, where that is not the unit of the tensor."""
    colors: tuple[tuple[str, str], ...] = ()
    """Colours (`#rrggbb`) of its components and what they stand for; none where it has
    one, which is drawn in levels."""
    weighs: bool = False
    """Whether it is a class activation map, which needs a backward pass and places of
    the image."""
    attends: bool = False
    """Whether it is made of attention weights, which are there in the forward pass."""
    signed: bool = False
    """Whether its values are for or against something: zero is the middle of its
    colours."""


REDUCTIONS = {
    reduction.name: reduction
    for reduction in (
        Reduction("mean", "mean", "their mean"),
        Reduction("max", "maximum", "their maximum"),
        Reduction("l2", "L2 norm", "their L2 norm"),
        Reduction(
            "max-abs", "largest absolute value", "the largest of their absolute values"
        ),
        Reduction(
            "pca",
            "principal components 1 to 3",
            "three principal components as red, green and blue",
            unit="standard deviations",
            colors=(
                ("#ff0000", "much of the first principal component"),
                ("#00ff00", "much of the second"),
                ("#0000ff", "much of the third"),
            ),
        ),
        Reduction(
            "gradcam",
            "Grad-CAM",
            "the class activation map Grad-CAM (see --target)",
            weighs=True,
        ),
        Reduction("gradcam++", "Grad-CAM++", "Grad-CAM++", weighs=True),
        Reduction("layercam", "LayerCAM", "LayerCAM", weighs=True),
        Reduction("hirescam", "HiResCAM", "HiResCAM", weighs=True),
        Reduction(
            "xgradcam",
            "XGrad-CAM",
            "XGrad-CAM, for and against",
            weighs=True,
            signed=True,
        ),
        Reduction(
            "gradxact",
            "gradient × activation",
            "the sum of gradient × activation, for and against",
            weighs=True,
            signed=True,
        ),
        Reduction(
            "rollout",
            "attention rollout",
            "attention rollout of a transformer up to the layer",
            attends=True,
        ),
        Reduction(
            "attention",
            "attention",
            "the class token's attention in the layer's block",
            attends=True,
        ),
    )
}
"""By name, in the order of help texts; `--reduce`, figures and the report read it. The
arithmetic is `drawing.drawer.REDUCTIONS`, a function for each of one component, and
`drawing.drawer.METHODS`, which has one for each that weighs or attends."""

CLASS_MAPS = {
    name: reduction for name, reduction in REDUCTIONS.items() if reduction.weighs
}
ATTENTION_MAPS = {
    name: reduction for name, reduction in REDUCTIONS.items() if reduction.attends
}
SIGNED = {name for name, reduction in REDUCTIONS.items() if reduction.signed}


RECTIFIERS = frozenset({"ReLU", "ReLU6", "Relu", "fn:relu", "fn:relu6"})
"""Types of calls whose output is zero below a threshold, whatever the model: a channel
that is zero there in all images is dead. `Relu` is ONNX's."""


# Of a function that an exporter writes as several operators, the last has its value:
# silu is Sigmoid and Mul.
FUNCTIONS_OF_OPERATORS = {
    "Add": "add",
    "Clip": "relu6 hardtanh clamp",
    "Concat": "cat",
    "Div": "div",
    "Flatten": "flatten",
    "Gelu": "gelu",
    "GlobalAveragePool": "adaptive_avg_pool2d mean",
    "HardSigmoid": "hardsigmoid",
    "HardSwish": "hardswish",
    "LeakyRelu": "leaky_relu",
    "MatMul": "matmul bmm",
    "MaxPool": "max_pool2d",
    "Mul": "mul silu",
    "ReduceMean": "mean adaptive_avg_pool2d",
    "Relu": "relu",
    "Resize": "interpolate",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "Sub": "sub",
    "Tanh": "tanh",
}
"""Operators of ONNX, and the functions of torch that become them, the likeliest first."""


class InputPreset(NamedTuple):
    """How images become the input of a family of models; steps that are None are left
    out."""

    description: str
    resize: int | None = None
    """The shorter side, pixels."""
    crop: int | None = None
    """Both sides, pixels."""
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    """`mean` and `std` of the channels, for values 0..1."""
    interpolation: str = "bilinear"
    letterbox: int | None = None
    """The longer side in pixels, where Ultralytics' LetterBox pads the image instead.
    """


PRESETS = {
    "imagenet": InputPreset(
        "256, crop 224, ImageNet's mean and deviation",
        resize=256,
        crop=224,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    ),
    "clip": InputPreset(  # openai/CLIP, clip/clip.py: _transform
        "224, CLIP's mean and deviation",
        resize=224,
        crop=224,
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        interpolation="bicubic",
    ),
    # timm's for the Inception family: 299 of 341 pixels is its crop_pct of 0.875
    "inception": InputPreset(
        "341, crop 299, values -1..1",
        resize=341,
        crop=299,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        interpolation="bicubic",
    ),
    "yolo": InputPreset(
        "longer side 640, grey padding to multiples of 32, values 0..1", letterbox=640
    ),
    "none": InputPreset("the image's own size, values 0..1"),
}
