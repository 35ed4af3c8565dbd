"""Which preprocessing a model wants: its library's, a preset's, or a guess."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from featviz.errors import FileError, ImageError, LoadError, UsageError
from featviz.files import read_json
from featviz.models.arguments import IMAGE, Argument
from featviz.models.preprocess import (
    FALLBACK_SIZE,
    Chain,
    HeightWidth,
    Preprocess,
    Size,
    input_dtype,
    listed,
)
from featviz.models.requirements import letterbox
from featviz.models.sources import ANY, Fixed
from featviz.options import InputOptions
from featviz.records import PRESETS, Raster
from featviz.text import by, counted, quoted

_FRAMES = 16
"""Of a clip, where nobody says how many."""

_MAX_CHANNELS = 512
"""Input channels that are believed of a convolution."""


def choose_preprocess(
    module: nn.Module,
    entry: Any,
    options: InputOptions,
    fixed: Fixed = ANY,
    further: Sequence[Argument] = (),
) -> Preprocess:
    """The preset that the user names, else the library's own, else what fits the first
    convolution or is fixed; then the user's wishes.

    Args:
        entry: what the library says: a chain, an entry of torchvision's weights, or
            None.
        fixed: the channels, and height and width, of the one input that the model
            takes.
        further: arguments of forward beside images.
    """
    library = _of_library(module, entry)
    first, takes_clips = first_channels(module)
    frames = _frames_of_transformers(module)
    if library is None and fixed is ANY:
        # a module of the caller's own, which no folder describes
        fixed = (None, _size_of_transformers(module))
    expected = entry.channels if isinstance(entry, Chain) else fixed[0] or first
    channels = options.input_channels or expected
    guessed = False
    if options.preset is not None:
        base = _named(options.preset, channels, module, fixed[1])
    elif library is not None and library.channels == channels:
        base = library
    elif channels != 3:
        base = Chain(fixed[1], channels=channels)
    else:
        base = _named("imagenet", channels, module, fixed[1])
        guessed = None in (options.size or options.crop, options.mean, options.std)
    side = getattr(module, "image_size", None)  # of torchvision's vision transformers
    if isinstance(side, int) and isinstance(base.crop, int) and base.crop != side:
        base = replace(base, resize=side, crop=side, library=None)
    base = _changed(base, options)
    size_is_known = bool(options.size or options.crop or base.stride)
    return Preprocess(
        base,
        frames=(options.frames or frames or _FRAMES) if takes_clips or frames else None,
        frames_first=frames is not None,
        inputs=options.images_per_pass or required_arguments(module, further),
        guessed=guessed,
        size_guessed=not size_is_known and (guessed or base.own_size),
        any_values=options.mean is not None or options.std is not None,
        dtype=input_dtype(module),
    )


def _of_library(module: nn.Module, entry: Any) -> Chain | None:
    """How the library that made a model prepares images; None where it does not say."""
    if isinstance(entry, Chain):
        return entry
    chain = None if entry is None else from_torchvision(entry)
    chain = chain or from_ultralytics(module)
    if chain is not None:
        return chain
    classes = {type(part).__name__ for part in module.modules()}
    # torchvision's detectors resize and normalise
    if "GeneralizedRCNNTransform" in classes:
        return Chain()
    if "RAFT" in classes:
        return Chain(mean=(0.5,) * 3, std=(0.5,) * 3, multiple=8)
    return None


def _changed(base: Chain, options: InputOptions) -> Chain:
    """A chain with the user's wishes; UsageError where they do not fit together."""
    if base.stride and (isinstance(options.size, tuple) or options.crop is not None):
        base = Chain(mean=base.mean, std=base.std, channels=base.channels)
    changes: dict[str, Any] = {}
    if options.size is not None:
        changes |= {"resize": options.size, "crop": None}
    if options.mean is not None or options.std is not None:
        changes["mean"] = base.mean or (0.0,) * base.channels
        changes["std"] = base.std or (1.0,) * base.channels
    for name in ("interpolation", "crop", "mean", "std"):
        value = getattr(options, name)
        if value is not None:
            changes[name] = value
    if changes:
        base = replace(base, library=None, **changes)
    for name, values in (("--mean", base.mean), ("--std", base.std)):
        if values is not None and len(values) != base.channels:
            message = f"{name} has {len(values)} numbers for {base.channels} channels"
            raise UsageError(message, f"give {base.channels}, separated by commas")
    if base.interpolation == "lanczos" and not base.antialias:
        message = "--interpolation lanczos smooths, and this model was trained without"
        raise UsageError(message, "bicubic")
    if base.std is not None and 0 in base.std:
        whose = "--std" if options.std else "the std of the model's own preprocessing,"
        message = f"{whose} {listed(base.std)} divides by zero"
        raise UsageError(message, "give positive numbers with --std")
    return base


def required_arguments(module: nn.Module, forward_args: Sequence[Argument] = ()) -> int:
    """How many arguments forward cannot do without, beside those that are given; at
    least 1."""
    given = [argument.name for argument in forward_args if argument.value is not IMAGE]
    count = 0
    for parameter in inspect.signature(module.forward).parameters.values():
        is_positional = parameter.kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        is_needed = (
            parameter.default is inspect.Parameter.empty and parameter.name not in given
        )
        count += is_positional and is_needed
    return max(1, count)


class FirstLayer(NamedTuple):
    """What the first convolution of a model takes."""

    channels: int
    """3 where there is no convolution, or its number cannot be believed."""
    takes_clips: bool


def first_channels(module: nn.Module) -> FirstLayer:
    """Input channels of the first convolution, and whether it is of clips."""
    for part in module.modules():
        if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            channels = part.in_channels  # 0 in a lazy one; a file can say anything
            is_believed = type(channels) is int and 0 < channels <= _MAX_CHANNELS
            return FirstLayer(
                channels if is_believed else 3, isinstance(part, nn.Conv3d)
            )
    return FirstLayer(3, False)


def first_features(module: nn.Module) -> int | None:
    """Numbers that the model takes where its first layer is linear; None where it is
    another."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            return part.in_features or None
        if isinstance(part, (nn.modules.conv._ConvNd, nn.Embedding)):
            return None
    return None


def _named(
    name: str, channels: int, module: nn.Module, size: HeightWidth | None
) -> Chain:
    """A preset, for models that take `channels`; in the size of those that take one
    size alone."""
    preset = PRESETS[name]
    if channels != 3 and preset.mean is not None:
        message = (
            f"--preset {name} is for RGB, and the model takes"
            f" {counted(channels, 'channel')}"
        )
        raise UsageError(
            message,
            "--preset none, with --size, --mean and --std; or --input-channels 3",
        )
    if preset.letterbox is not None:
        letterbox()
        if size is not None and size[0] != size[1]:
            message = f"--preset {name} pads to squares, and the model takes {by(size)}"
            raise UsageError(message, "--preset none")
        if size is None:
            return Chain(
                preset.letterbox, channels=channels, stride=_largest_stride(module)
            )
        # which pads to that very size
        return Chain(size[0], channels=channels, stride=size[1])
    resize: Size | None = preset.resize
    crop: Size | None = preset.crop
    if size is not None and crop is not None and size[0] == size[1]:
        resize, crop = round(size[0] * 256 / FALLBACK_SIZE[0]), size[0]
    elif size is not None:
        resize, crop = size, None
    return Chain(resize, crop, preset.mean, preset.std, channels, preset.interpolation)


# torchvision and timm
# -------------------------------------------------------------------------


def from_torchvision(entry: Any) -> Chain | None:
    """The transforms of an entry of torchvision's weights; None where they only make
    numbers."""
    settings = vars(entry.transforms())
    if "resize_size" not in settings:
        return None
    return Chain(
        _torchvision_size(settings["resize_size"]),
        _torchvision_size(settings.get("crop_size")),
        tuple(settings["mean"]),
        tuple(settings["std"]),
        interpolation=settings["interpolation"].value,
        antialias=settings.get("antialias", False),  # which those of clips lack
    )


def _torchvision_size(sizes: Sequence[int] | None) -> Size | None:
    """[256] is the shorter side, [height, width] both."""
    if not sizes:
        return None
    return (
        sizes[0]
        if isinstance(sizes, list) and len(sizes) == 1
        else (sizes[0], sizes[1])
    )


def from_timm(config: Mapping[str, Any]) -> Chain:
    """timm's transform for evaluation, of what `timm.data.resolve_model_data_config`
    gives."""
    channels, height, width = config["input_size"]
    mean = tuple(float(value) for value in config["mean"])
    std = tuple(float(value) for value in config["std"])
    if len(mean) != channels:
        mean = (sum(mean) / len(mean),) * channels
        std = (sum(std) / len(std),) * channels
    resized_height = math.floor(height / config["crop_pct"])
    resized_width = math.floor(width / config["crop_pct"])
    is_square = height == width
    crop: Size = height if is_square else (height, width)
    resize: Size | None = None
    if config["crop_mode"] == "squash":
        resize = resized_height, resized_width
    elif config["crop_mode"] == "center" and is_square:
        resize = resized_height
    chain = Chain(
        resize or crop,
        crop if resize else None,
        mean,
        std,
        channels,
        config["interpolation"],
    )
    if resize:
        return chain
    transform = import_module("timm.data").create_transform(
        **{**config, "mean": mean, "std": std}, is_training=False
    )

    def prepare(image: Image.Image | Raster) -> Tensor:
        return chain(image) if isinstance(image, Raster) else transform(image)[None]

    steps = (f"timm's crop mode {config['crop_mode']}", *chain.steps[:-1])
    return replace(chain, library=prepare, library_steps=steps)


# Ultralytics
# ----------------------------------------------------------------------------------

_SMALLEST_STRIDE = 32
_LARGEST_STRIDE = 1024
_LARGEST_SIZE = 8192
"""Pixels of a side, that are believed of a file."""


def _largest_stride(module: nn.Module) -> int:
    """Of the heads of a model of Ultralytics, at least 32; a file can say anything."""
    stride = getattr(module, "stride", None)
    largest = (
        float(stride.max()) if isinstance(stride, Tensor) and stride.numel() else 0.0
    )
    return (
        int(largest)
        if _SMALLEST_STRIDE <= largest <= _LARGEST_STRIDE
        else _SMALLEST_STRIDE
    )


def from_ultralytics(module: nn.Module, trained: Any = None) -> Chain | None:
    """How Ultralytics' predictors prepare images; None for another model. `trained` are
    the `train_args` of the checkpoint."""
    bases = type(module).__mro__
    classes = {
        base.__name__ for base in bases if base.__module__ == "ultralytics.nn.tasks"
    }
    if not classes:
        return None
    size = _trained_size(trained) or _trained_size(getattr(module, "args", None))
    channels = first_channels(module).channels
    if "ClassificationModel" in classes:
        return Chain(size or 224, size or 224, channels=channels)
    stretch = not classes.isdisjoint({"RTDETRDetectionModel", "DepthModel"})
    stride = _largest_stride(module)
    return Chain(size or 640, channels=channels, stride=stride, stretch=stretch)


def _trained_size(arguments: Any) -> int | None:
    """The size of images in arguments of a training, a dict or a namespace; a file can
    say anything."""
    is_namespace = hasattr(arguments, "__dict__") and not isinstance(
        arguments, (type, nn.Module)
    )
    values = vars(arguments) if is_namespace else arguments
    side = values.get("imgsz") if isinstance(values, dict) else None
    return side if type(side) is int and 0 < side <= _LARGEST_SIZE else None


# transformers
# ---------------------------------------------------------------------------------

_VIDEO_MODELS = ("videomae", "timesformer", "vivit")
"""Types of models that take clips as [1, T, C, H, W], of `num_frames` frames."""
_FILE = "preprocessor_config.json"
_LARGEST = 4096
"""Number that a file may hold: pixels of a side, mostly."""
_RESAMPLE = {0: "nearest-exact", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
_AGAIN = "fetch the file again, or remove it and give --size, --crop, --mean and --std"

_ALLOWED = (
    "Aria|Beit|Bit|Blip|BridgeTower|CHMv2|CLIP|Chameleon|ChineseCLIP|ConditionalDetr|ConvNext|"
    "DINOv3ViT|DPT|DeepseekVL|DeepseekVLHybrid|DeformableDetr|DeiT|DepthPro|Detr|Donut|"
    "EfficientNet|Eomt|Flava|GLPN|Gemma3|GotOcr2|GroundingDino|Janus|Levit|Llama4|Llava|"
    "Mask2Former|MaskFormer|MobileNetV1|MobileNetV2|MobileViT|Nougat|OwlViT|Owlv2|Perceiver|"
    "Pixtral|PoolFormer|PromptDepthAnything|Pvt|RTDetr|RfDetr|Sam|Sam2|Sam3|Sapiens2|SegGpt|"
    "Segformer|Siglip|SuperPoint|Swin2SR|TextNet|Tvp|ViT|VideoMAE|Vilt|Vivit|Yolos|ZoeDepth"
)
"""Image processors that read nothing but the image."""


def from_transformers(folder: Path, config: Mapping[str, Any]) -> Chain | None:
    """The image processor of a folder's model; None where no file tells it."""
    where = quoted(str(folder / _FILE))
    try:
        settings = _processor_settings(folder)
    except FileError as error:
        raise LoadError(str(error), "fetch the file again, or remove it") from error
    if settings is None:
        return None
    _check_numbers(settings, where)
    try:
        channels = 1 if _vision(config).get("num_channels") == 1 else 3
        return _measured(_processor(settings, config), channels)
    except Exception as error:  # whatever the code of a processor makes of a bad file
        reason = (
            f"{type(error).__name__}:"
            f" {quoted(str(error).strip().partition(chr(10))[0])}"
        )
        raise LoadError(f"{where} cannot be understood: {reason}", _AGAIN) from error


def _processor_settings(folder: Path) -> dict[str, Any] | None:
    """What a folder's files say of its image processor."""
    path = folder / "processor_config.json"  # also of processors of text
    if path.exists():
        content = read_json(path)
        if isinstance(content, dict):
            content = content.get("image_processor")
        if isinstance(content, dict):
            return content
    content = read_json(folder / _FILE) if (folder / _FILE).exists() else None
    return content if isinstance(content, dict) else None


def image_size(config: Mapping[str, Any]) -> HeightWidth | None:
    """The (height, width) of the images that a config.json says the model was made for."""
    value = _vision(config).get("image_size")
    if isinstance(value, int):
        value = (value, value)
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    height, width = value
    are_sizes = all(
        type(side) is int and 0 < side <= _LARGEST for side in (height, width)
    )
    return (height, width) if are_sizes else None


def _frames_of_transformers(module: nn.Module) -> int | None:
    """The frames of a clip that a model of transformers takes; None for others."""
    config = getattr(module, "config", None)
    if getattr(config, "model_type", None) not in _VIDEO_MODELS:
        return None
    frames = getattr(config, "num_frames", None)
    return frames if type(frames) is int and 0 < frames <= _LARGEST else None


def _size_of_transformers(module: nn.Module) -> HeightWidth | None:
    """The (height, width) that the configuration of a model of transformers has; None
    for others."""
    config = getattr(module, "config", None)
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None or not type(module).__module__.startswith("transformers."):
        return None
    return image_size(to_dict())


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that is about images."""
    inner = config.get("vision_config")
    return inner if isinstance(inner, dict) else config


def _check_numbers(value: Any, where: str) -> None:
    """Refuse numbers that no processor has, at every depth: they decide how large
    images become."""
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_numbers(item, where)
    elif isinstance(value, (int, float)) and not abs(value) <= _LARGEST:
        raise LoadError(f"{where} asks for {value:,}; {_LARGEST} is the most", _AGAIN)


def _processor(settings: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """The image processor, from a folder that holds nothing but what was checked."""
    name = settings.get("image_processor_type") or settings.get(
        "feature_extractor_type"
    )
    if name is None:
        auto = import_module("transformers.models.auto.image_processing_auto")
        backends = auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(config.get("model_type"), {})
        name = backends.get("torchvision")
    name = re.sub("(ImageProcessor|FeatureExtractor)(Fast)?$", "", str(name))
    if name not in _ALLOWED.split("|"):
        raise ValueError(
            f"{name} names no image processor that featviz lets prepare an image"
        )
    plain = {key: value for key, value in settings.items() if key != "auto_map"}
    with TemporaryDirectory(prefix="featviz-") as folder:
        content = json.dumps({**plain, "image_processor_type": f"{name}ImageProcessor"})
        Path(folder, _FILE).write_text(content, "utf-8")
        auto = import_module("transformers").AutoImageProcessor
        return auto.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )


def _pixels(processor: Any, image: Image.Image | Raster) -> Tensor:
    """The output of a processor, [1, C, H, W]."""
    inputs: dict[str, Any] = {"images": image}
    if isinstance(image, Raster):
        numbers = torch.from_numpy(image.values) * 255
        inputs = {"images": numbers, "input_data_format": "channels_first"}
    name = type(processor).__name__
    try:
        values: Tensor = processor(**inputs, return_tensors="pt")[
            "pixel_values"
        ].float()
    except Exception as error:  # whatever its own code makes of an image
        reason = f"{type(error).__name__}: {quoted(str(error))}"
        raise ImageError(f"{name} raised {reason}", "-v shows the traceback") from error
    if values.ndim == 5 and values.shape[:2] == (1, 1):  # a clip of one frame
        values = values[0]
    if values.ndim != 4 or len(values) != 1:
        raise ImageError(
            f"{name} gave {list(values.shape)}, not [1, C, H, W]", "--size HxW"
        )
    return values


def _measured(processor: Any, channels: int) -> Chain:
    """A processor, with its mean, deviation and size as its outputs show them: the
    settings of a hundred processors have no common names. The user's changes then go to
    a chain of ours.

    Black gives -mean / std, white (1 - mean) / std; a narrower image tells whether the
    size of the output is that of the image."""
    height, width = FALLBACK_SIZE
    mode = "L" if channels == 1 else "RGB"
    black = _pixels(processor, Image.new(mode, (width, height), 0))
    white = _pixels(processor, Image.new(mode, (width, height), "white"))
    narrow = _pixels(processor, Image.new(mode, (width, height * 3 // 4), 0))
    if black.shape[1] != channels:
        raise ValueError(
            f"it gives {black.shape[1]} channels, and the model takes {channels}"
        )
    low = _in_the_middle(black)
    span = _in_the_middle(white) - low
    if not (np.isfinite(span).all() and span.all()):
        raise ValueError("it does not tell black from white")
    std = tuple(float(f"{value:.6g}") for value in 1 / span)
    mean = tuple(float(f"{value:.6g}") + 0.0 for value in -low / span)
    normalises = std != (1.0,) * channels or mean != (0.0,) * channels
    settings = {"size": {}, "resample": 2, **processor.to_dict()}
    shortest_edge = settings["size"].get("shortest_edge")
    has_own_size = black.shape != narrow.shape
    size = None if has_own_size else (int(black.shape[2]), int(black.shape[3]))
    step = f"by {type(processor).__name__}"
    return Chain(
        shortest_edge or size,
        size if shortest_edge else None,
        mean if normalises else None,
        std if normalises else None,
        channels,
        _RESAMPLE[settings["resample"]],
        bgr=bool(settings.get("do_flip_channel_order")),
        library=partial(_pixels, processor),
        library_steps=(step if size is None else f"{step} to {by(size)}",),
        library_own_size=has_own_size,
    )


def _in_the_middle(values: Tensor) -> np.ndarray:
    """The numbers [C] of the pixel in the middle of [1, C, H, W]."""
    middle = values[0, :, values.shape[2] // 2, values.shape[3] // 2]
    return middle.double().numpy()
