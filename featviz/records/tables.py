"""Tables of what options choose from: formats, capture kinds, reductions and presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class PictureFormat:
    """A format in which pictures of feature maps are written and read back."""

    name: str
    """The name on the command line, and the ending of files."""
    pillow: str
    """Pillow's name of the format."""
    mime: str
    largest: int
    """The largest width and height in pixels."""
    save: Mapping[str, object] | None
    """Pillow's options for writing it; None for PNG, which featviz writes itself."""
    description: str = "lossless"
    levels: bool = False
    """Whether a file has the levels of the maps, which can be read back."""
    comment: str | None = None
    """Pillow's option for a text in the file; None if files cannot have a text."""


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
    """A kind of tensor that can be captured at a layer."""

    name: str
    """The name on the command line, and the beginning of file names."""
    of: str
    """`output` or `input`: the tensor is this of the layer, or the gradient at it."""
    backward: bool
    """Whether it needs a backward pass."""
    help: str
    """Its text in the help of `--capture`."""
    normalize: str = "auto"
    """The normalisation that `auto` means; `auto` itself if it depends on the picture."""
    cmap: str = "auto"
    """The colormap that `auto` means; `auto` itself if it depends on the picture."""


SALIENCY = "saliency"
"""The key of the saliency picture: one tile of all channels of the gradient at the image,
without signs."""

# A percentile, since a few values of a gradient are so large that all others would look
# white.
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
"""The capture kinds by name, in the order of help texts."""


BACKWARD = {name for name, kind in KINDS.items() if kind.backward}


@dataclass(frozen=True)
class Reduction:
    """A way to reduce all channels to one tile."""

    name: str
    """The name on the command line."""
    title: str
    """The name in captions, figures and reports."""
    help: str
    """Its text in the help of `--reduce`."""
    unit: str = ""
    """The unit of its values; empty if this is the unit of the tensor."""
    colors: tuple[tuple[str, str], ...] = ()
    """The colours (`#rrggbb`) of its components, each with a meaning. Empty for a reduction
    to a single component, which is drawn by a colormap."""
    weighs: bool = False
    """Whether it is a class activation map, which needs a backward pass, and maps of the
    image."""
    attends: bool = False
    """Whether it is made from the attention weights of the forward pass."""
    signed: bool = False
    """Whether its values are for or against the target: zero is in the middle of the
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
"""The reductions by name, in the order of help texts. Their arithmetic is in
`drawing.drawer`: the functions of METHODS for those that weigh or attend, of REDUCTIONS for
others of a single component."""

CLASS_MAPS = {
    name: reduction for name, reduction in REDUCTIONS.items() if reduction.weighs
}
ATTENTION_MAPS = {
    name: reduction for name, reduction in REDUCTIONS.items() if reduction.attends
}
SIGNED = {name for name, reduction in REDUCTIONS.items() if reduction.signed}


RECTIFIERS = frozenset({"ReLU", "ReLU6", "Relu", "fn:relu", "fn:relu6"})
"""The types of layers that set values below a threshold to zero. A channel that is zero
there in all images is dead. `Relu` is the operator of ONNX."""


# If an exporter writes a function as several operators, the last one stands for it: silu
# becomes Sigmoid and Mul.
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
"""By operator of ONNX, the functions of torch that exporters write as this operator, the
likeliest first."""


class InputPreset(NamedTuple):
    """The preprocessing of images for a family of models. A step that is None is left
    out."""

    description: str
    resize: int | None = None
    """The length in pixels to which the shorter side is resized."""
    crop: int | None = None
    """The height and width in pixels of the crop from the centre."""
    mean: tuple[float, ...] | None = None
    """The mean of each channel, for values 0..1."""
    std: tuple[float, ...] | None = None
    """The standard deviation of each channel, for values 0..1."""
    interpolation: str = "bilinear"
    letterbox: int | None = None
    """The length in pixels to which Ultralytics' LetterBox resizes the longer side, before
    it pads the image; None for no LetterBox."""


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
