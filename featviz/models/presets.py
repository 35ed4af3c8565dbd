"""Which preprocessing a model wants: its library's, a preset's, or a guess."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
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
    numbers_text,
)
from featviz.models.requirements import import_letterbox
from featviz.models.sources import ANY_INPUT, FixedInput
from featviz.options import InputOptions
from featviz.records import PRESETS, Raster
from featviz.text import by, counted, first_line, quoted

_FRAMES = 16
"""The frames of a clip, if neither the model nor the user says how many."""

_MAX_CHANNELS = 512
"""The most input channels of a convolution; a file with more is not believed."""


def choose_preprocess(
    module: nn.Module,
    entry: Any,
    options: InputOptions,
    fixed: FixedInput = ANY_INPUT,
    further: Sequence[Argument] = (),
) -> Preprocess:
    """Choose how images become a model's input: by the preset that the user names, else as
    the model's library does it, else by the preset that fits the first convolution. The
    user's options change single steps of it.

    Args:
        module: The model, whose class and first layer are looked at.
        entry: How the model's source prepares images: a Chain, an entry of torchvision's
            weights, or None if it does not say.
        options: The user's choices.
        fixed: The channels and the size of the input, if the model takes only these.
        further: The user's arguments of forward besides images.

    Raises:
        UsageError: Where choices do not go with the model, or with each other.
    """
    if fixed is ANY_INPUT:
        # the caller may have made the module, so no folder said its size
        fixed = FixedInput(size=_size_of_transformers(module))
    chain, guessed = _choose_chain(module, entry, options, fixed)
    guessed = _left_to_guess(guessed, options)
    chain = _change_steps(_crop_to_image_size(chain, module), options)
    _check_chain(chain, options)
    size_is_known = bool(options.size or options.crop or fixed.size or chain.stride)
    return Preprocess(
        chain,
        frames=_clip_frames(module, options),
        frames_first=_frames_of_transformers(module) is not None,
        inputs=options.images_per_pass or images_per_forward(module, further),
        guessed=guessed,
        size_guessed=not size_is_known and (guessed == "imagenet" or chain.own_size),
        any_values=options.mean is not None or options.std is not None,
        dtype=input_dtype(module),
    )


class _ChosenChain(NamedTuple):
    """How images are prepared, before the user's options change steps."""

    chain: Chain
    guessed: str | None = None
    """The preset of the chain if it is a guess; None if the user names it, or the library
    says how images are prepared."""


def _choose_chain(
    module: nn.Module, entry: Any, options: InputOptions, fixed: FixedInput
) -> _ChosenChain:
    """The preset that the user names, else the chain of the model's library, else the preset
    that fits the model's channels. The arguments are those of `choose_preprocess`."""
    expected = fixed.channels or first_layer(module).channels
    if isinstance(entry, Chain):
        expected = entry.channels
    channels = options.input_channels or expected
    preset = options.preset
    guessed = None
    if preset is None:
        library = _library_chain(module, entry)
        # a library's chain is for its own channels; a changed model may take others
        if library is not None and library.channels == channels:
            return _ChosenChain(library)
        preset = guessed = "imagenet" if channels == 3 else "none"
    return _ChosenChain(_preset_chain(preset, channels, module, fixed.size), guessed)


def _left_to_guess(preset: str | None, options: InputOptions) -> str | None:
    """The guessed preset, or None if the user says everything that it would decide: the
    size, the mean and the standard deviation.

    Args:
        preset: A key of PRESETS that was guessed, or None.
        options: The user's choices.
    """
    # the preset `none` does not decide a size
    is_sized = preset == "none" or bool(options.size or options.crop)
    if is_sized and None not in (options.mean, options.std):
        return None
    return preset


def _clip_frames(module: nn.Module, options: InputOptions) -> int | None:
    """How many frames a clip has for a model of videos; None for a model of images."""
    frames = _frames_of_transformers(module)
    if frames is None and not first_layer(module).takes_clips:
        return None
    return options.frames or frames or _FRAMES


def _crop_to_image_size(chain: Chain, module: nn.Module) -> Chain:
    """A chain that crops to the only size that a vision transformer of torchvision takes.
    For any other module the chain is returned as it is."""
    image_size = getattr(module, "image_size", None)
    # a chain without a crop leaves the size to the user
    if not isinstance(image_size, int) or chain.crop in (None, image_size):
        return chain
    return replace(chain, resize=image_size, crop=image_size, library=None)


def _library_chain(module: nn.Module, entry: Any) -> Chain | None:
    """How a model's library prepares images; None if the library does not say.

    Args:
        module: The model.
        entry: How the model's source prepares images: a Chain, an entry of torchvision's
            weights, or None if it does not say.
    """
    if isinstance(entry, Chain):
        return entry
    chain = None if entry is None else from_torchvision(entry)
    chain = chain or from_ultralytics(module)
    if chain is not None:
        return chain
    classes = {type(submodule).__name__ for submodule in module.modules()}
    # torchvision's detectors resize and normalise themselves
    if "GeneralizedRCNNTransform" in classes:
        return Chain()
    if "RAFT" in classes:
        return Chain(mean=(0.5,) * 3, std=(0.5,) * 3, multiple=8)
    return None


def _change_steps(chain: Chain, options: InputOptions) -> Chain:
    """A chain whose size, crop, mean, std and interpolation are replaced by those that the
    user gives."""
    # LetterBox cannot resize to (height, width) or crop: such a chain goes without it
    if chain.stride and (isinstance(options.size, tuple) or options.crop is not None):
        chain = Chain(mean=chain.mean, std=chain.std, channels=chain.channels)
    changes: dict[str, Any] = {}
    if options.size is not None:
        changes |= {"resize": options.size, "crop": None}
    if options.mean is not None or options.std is not None:
        # if the user gives one of the two, the other stays, or has no effect (0 or 1)
        changes["mean"] = chain.mean or (0.0,) * chain.channels
        changes["std"] = chain.std or (1.0,) * chain.channels
    for name in ("interpolation", "crop", "mean", "std"):
        value = getattr(options, name)
        if value is not None:
            changes[name] = value
    # a library's own function would ignore the changes
    if changes:
        return replace(chain, library=None, **changes)
    return chain


def _check_chain(chain: Chain, options: InputOptions) -> None:
    """Raise a UsageError if a chain's mean, std or interpolation does not go with the model.

    Args:
        chain: The chain, with the user's choices in it.
        options: The user's choices, for messages.
    """
    # even a library's numbers may not fit, if the user names other channels
    for name, numbers in (("--mean", chain.mean), ("--std", chain.std)):
        if numbers is not None and len(numbers) != chain.channels:
            count = counted(len(numbers), "number")
            raise UsageError(
                f"{name} has {count} for {counted(chain.channels, 'channel')}",
                f"give {chain.channels}, separated by commas",
            )
    if chain.interpolation == "lanczos" and not chain.antialias:
        raise UsageError(
            "--interpolation lanczos smooths, and this model was trained without",
            "bicubic",
        )
    if chain.std is not None and 0 in chain.std:
        subject = "the std of the model's own preprocessing,"
        if options.std:
            subject = "--std"
        raise UsageError(
            f"{subject} {numbers_text(chain.std)} divides by zero",
            "give positive numbers with --std",
        )


def images_per_forward(module: nn.Module, forward_args: Sequence[Argument] = ()) -> int:
    """How many images one forward pass of a model takes, at least 1. Each positional
    argument of forward without a default counts as an image.

    Args:
        module: The model.
        forward_args: Arguments for which the user gives values. They do not count, unless
            the value stands for the image.
    """
    names = {argument.name for argument in forward_args if argument.value is not IMAGE}
    count = 0
    for parameter in inspect.signature(module.forward).parameters.values():
        # *args is left out, since it may be any number of arguments
        is_positional = parameter.kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        is_needed = parameter.default is inspect.Parameter.empty
        count += is_positional and is_needed and parameter.name not in names
    return max(1, count)


class FirstLayer(NamedTuple):
    """What the first convolution of a model takes."""

    channels: int = 3
    """Its input channels; 3 if there is no convolution, or its number cannot be believed."""
    takes_clips: bool = False
    """Whether it is a Conv3d."""


def first_layer(module: nn.Module) -> FirstLayer:
    """The input channels of a model's first convolution, and whether it takes clips.
    Transposed convolutions do not count: models that begin with one are generators, which
    take vectors instead of images."""
    for inner in module.modules():
        if isinstance(inner, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            takes_clips = isinstance(inner, nn.Conv3d)
            # 0 in a lazy convolution; a file can contain anything
            channels = inner.in_channels
            if type(channels) is int and 0 < channels <= _MAX_CHANNELS:
                return FirstLayer(channels, takes_clips)
            return FirstLayer(takes_clips=takes_clips)
    return FirstLayer()


def first_features(module: nn.Module) -> int | None:
    """How many numbers the first layer of a model takes, if that is a linear layer. None for
    a model that begins with a convolution or an embedding, or has none of these layers."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            return part.in_features or None
        if isinstance(part, (nn.modules.conv._ConvNd, nn.Embedding)):
            return None
    return None


def _preset_chain(
    name: str, channels: int, module: nn.Module, size: HeightWidth | None
) -> Chain:
    """A preset as a chain for one model.

    Args:
        name: A key of PRESETS.
        channels: How many channels the model takes.
        module: The model; a preset that pads to multiples takes its `stride`.
        size: The only (height, width) that the model takes; None if it takes any.

    Raises:
        UsageError: Where the model does not take the images that the preset makes.
        FeatvizError: Where the preset needs Ultralytics, and that cannot be imported.
    """
    preset = PRESETS[name]
    if channels != 3 and preset.mean is not None:
        takes = counted(channels, "channel")
        raise UsageError(
            f"--preset {name} is for RGB, and the model takes {takes}",
            "--preset none, with --size, --mean and --std; or --input-channels 3",
        )
    if preset.letterbox is not None:
        import_letterbox()
        if size is None:
            stride = _largest_stride(module)
            return Chain(preset.letterbox, channels=channels, stride=stride)
        height, width = size
        if height != width:
            raise UsageError(
                f"--preset {name} pads to squares, and the model takes {by(size)}",
                "--preset none",
            )
        # with a stride of the whole side, both sides are padded to that side
        return Chain(height, channels=channels, stride=height)
    resize: Size | None = preset.resize
    crop: Size | None = preset.crop
    if size is not None:
        resize = size
        if crop is not None and size[0] == size[1]:
            # the resized image is larger than the crop, in the proportion of 256 to 224
            crop = size[0]
            resize = round(crop * 256 / FALLBACK_SIZE[0])
        else:
            crop = None
    return Chain(resize, crop, preset.mean, preset.std, channels, preset.interpolation)


# torchvision and timm
# -------------------------------------------------------------------------


def from_torchvision(entry: Any) -> Chain | None:
    """The transforms of an entry of torchvision's weights as a chain; None if they do not
    resize (those of detectors and of optical flow)."""
    settings = vars(entry.transforms())
    if "resize_size" not in settings:
        return None
    return Chain(
        _torchvision_size(settings["resize_size"]),
        _torchvision_size(settings.get("crop_size")),
        tuple(settings["mean"]),
        tuple(settings["std"]),
        interpolation=settings["interpolation"].value,
        antialias=settings.get("antialias", False),  # transforms of clips lack it
    )


def _torchvision_size(sizes: Sequence[int] | None) -> Size | None:
    """A size in torchvision's form as ours: [256] (the shorter side) becomes 256, [height,
    width] a tuple, None or an empty list None."""
    if not sizes:
        return None
    if len(sizes) == 1:
        return sizes[0]
    return (sizes[0], sizes[1])


def from_timm(config: Mapping[str, Any]) -> Chain:
    """timm's transform for evaluation as a chain. If no chain crops in the same way, timm's
    own function prepares pictures, and the chain only arrays.

    Args:
        config: The result of `timm.data.resolve_model_data_config`.
    """
    channels, height, width = config["input_size"]
    mean = _for_channels(config["mean"], channels)
    std = _for_channels(config["std"], channels)
    crop: Size = (height, width)
    if height == width:
        crop = height
    # the image is larger than the crop by 1 / crop_pct
    resized_height = math.floor(height / config["crop_pct"])
    resized_width = math.floor(width / config["crop_pct"])
    chain = Chain(crop, None, mean, std, channels, config["interpolation"])
    if config["crop_mode"] == "squash":
        return replace(chain, resize=(resized_height, resized_width), crop=crop)
    if config["crop_mode"] == "center" and height == width:
        return replace(chain, resize=resized_height, crop=crop)
    # no chain does the other crops: those of borders, and of unequal sides
    settings = {**config, "mean": mean, "std": std}
    transform = import_module("timm.data").create_transform(**settings)

    def prepare(image: Image.Image | Raster) -> Tensor:
        """Prepare an image; returns the input [1, C, H, W]."""
        if isinstance(image, Raster):
            return chain(image)
        tensor: Tensor = transform(image)[None]
        return tensor

    # without the last step, normalising, which `Chain.steps` adds to `library_steps`
    steps = (f"timm's crop mode {config['crop_mode']}", *chain.steps[:-1])
    return replace(chain, library=prepare, library_steps=steps)


def _for_channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """A number for each channel of a model.

    Args:
        values: A number for each channel that the weights were made for, mostly RGB.
        channels: How many channels the model has. If that is another number, each channel
            gets the mean of `values`.
    """
    numbers = tuple(float(value) for value in values)
    if len(numbers) == channels:
        return numbers
    return (sum(numbers) / len(numbers),) * channels


# Ultralytics
# ----------------------------------------------------------------------------------

_SMALLEST_STRIDE = 32
_LARGEST_STRIDE = 1024
_LARGEST_SIZE = 8192
"""The most pixels of a side; a file with more is not believed."""


def _largest_stride(module: nn.Module) -> int:
    """The largest stride among the heads of a model of Ultralytics, in pixels. It is 32 if
    the model's is smaller, is too large to be believed, or is missing."""
    stride = getattr(module, "stride", None)
    if isinstance(stride, Tensor) and stride.numel():
        largest = float(stride.max())
        if _SMALLEST_STRIDE <= largest <= _LARGEST_STRIDE:
            return int(largest)
    return _SMALLEST_STRIDE


def from_ultralytics(module: nn.Module, trained: Any = None) -> Chain | None:
    """How Ultralytics' predictors prepare images for a model; None if the model is of
    another library.

    Args:
        module: A model of any library.
        trained: The `train_args` of its checkpoint; None if there are none.
    """
    bases = type(module).__mro__
    classes = {
        base.__name__ for base in bases if base.__module__ == "ultralytics.nn.tasks"
    }
    if not classes:
        return None
    # the arguments in the checkpoint win over those in the model, which may be converted
    size = _trained_size(trained) or _trained_size(getattr(module, "args", None))
    channels = first_layer(module).channels
    if "ClassificationModel" in classes:
        return Chain(size or 224, size or 224, channels=channels)
    stretch = not classes.isdisjoint({"RTDETRDetectionModel", "DepthModel"})
    stride = _largest_stride(module)
    return Chain(size or 640, channels=channels, stride=stride, stretch=stretch)


def _trained_size(arguments: Any) -> int | None:
    """The size of images in pixels from the arguments of a training; None if they have no
    size, or one that cannot be believed.

    Args:
        arguments: A dict by rights; but a file can contain anything.
    """
    size = arguments.get("imgsz") if isinstance(arguments, dict) else None
    if type(size) is int and 0 < size <= _LARGEST_SIZE:
        return size
    return None


# transformers
# ---------------------------------------------------------------------------------

_VIDEO_MODELS = ("videomae", "timesformer", "vivit")
"""Types of models that take clips as [1, T, C, H, W], of `num_frames` frames."""
_FILE = "preprocessor_config.json"
_LARGEST = 4096
"""The largest number in a file of settings, mostly pixels of a side; a file with a larger
one is not believed."""
_RESAMPLE = {0: "nearest-exact", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Interpolations by Pillow's numbers for them."""
_AGAIN = "fetch the file again, or remove it and give --size, --crop, --mean and --std"

_PROCESSORS = """
    Aria Beit Bit Blip BridgeTower CHMv2 CLIP Chameleon ChineseCLIP ConditionalDetr
    ConvNext DINOv3ViT DPT DeepseekVL DeepseekVLHybrid DeformableDetr DeiT DepthPro
    Detr Donut EfficientNet Eomt Flava GLPN Gemma3 GotOcr2 GroundingDino Janus Levit
    Llama4 Llava Mask2Former MaskFormer MobileNetV1 MobileNetV2 MobileViT Nougat
    OwlViT Owlv2 Perceiver Pixtral PoolFormer PromptDepthAnything Pvt RTDetr RfDetr
    Sam Sam2 Sam3 Sapiens2 SegGpt Segformer Siglip SuperPoint Swin2SR TextNet Tvp
    ViT VideoMAE Vilt Vivit Yolos ZoeDepth
"""
IMAGE_PROCESSORS = frozenset(_PROCESSORS.split())
"""Image processors that read only the image, and no other files."""


def from_transformers(folder: Path, config: Mapping[str, Any]) -> Chain | None:
    """The image processor of a model of transformers as a chain; None if no file of the
    model's folder has its settings.

    Args:
        folder: The model's folder, with config.json and maybe preprocessor_config.json.
        config: The content of config.json.

    Raises:
        LoadError: Where the settings cannot be read, have a number larger than _LARGEST,
            or name a processor that is not in IMAGE_PROCESSORS; or where it fails.
    """
    path = quoted(folder / _FILE)
    try:
        settings = _processor_settings(folder)
    except FileError as error:
        raise LoadError(str(error), "fetch the file again, or remove it") from error
    if settings is None:
        return None
    _check_settings(settings, path)
    try:
        channels = 1 if _vision_config(config).get("num_channels") == 1 else 3
        return _measured_chain(_processor(settings, config), channels)
    except Exception as error:  # with bad settings, a processor may raise anything
        raise LoadError(
            f"{path} cannot be understood: {type(error).__name__}:"
            f" {quoted(first_line(error))}",
            _AGAIN,
        ) from error


def _processor_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of a model's image processor, from the JSON files of the model's
    folder; None where no file has them.

    Raises:
        FileError: Where one of the files cannot be read, or is not JSON.
    """
    # a processor of texts and images has one file for all its parts
    path = folder / "processor_config.json"
    if path.exists():
        match read_json(path):
            case {"image_processor": dict(settings)}:
                return settings
    path = folder / _FILE
    if path.exists():
        match read_json(path):
            case dict(settings):
                return settings
    return None


def image_size(config: Mapping[str, Any]) -> HeightWidth | None:
    """The (height, width) of a model's images, from its config.json; None if that has no
    size, or one that cannot be believed."""
    value = _vision_config(config).get("image_size")
    backbone = config.get("backbone_config")
    if value is None and isinstance(backbone, dict):
        value = backbone.get("image_size")
    # one number is both sides
    if isinstance(value, int):
        value = (value, value)
    match value:
        case [height, width]:
            # `true` of JSON is an int, too
            if all(type(size) is int and 0 < size <= _LARGEST for size in value):
                return (height, width)
    return None


def _frames_of_transformers(module: nn.Module) -> int | None:
    """The frames of a clip that a model of transformers takes; None if it takes no clips."""
    config = getattr(module, "config", None)
    if getattr(config, "model_type", None) not in _VIDEO_MODELS:
        return None
    frames = getattr(config, "num_frames", None)
    return frames if type(frames) is int and 0 < frames <= _LARGEST else None


def _size_of_transformers(module: nn.Module) -> HeightWidth | None:
    """The (height, width) in the configuration of a model of transformers; None if it has
    none, or the model is of another library."""
    config = getattr(module, "config", None)
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None or not type(module).__module__.startswith("transformers."):
        return None
    return image_size(to_dict())


def _vision_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the vision model; if there is no such
    part, the whole configuration."""
    inner = config.get("vision_config")
    if isinstance(inner, dict):
        return inner
    return config


def _check_settings(value: Any, path: str) -> None:
    """Refuse settings with numbers that are too large, at every depth: an image would be
    resized to as many pixels, and fill the memory.

    Args:
        value: The settings of a processor, or a part of them.
        path: The path of their file, for messages.

    Raises:
        LoadError: Where a number is larger than _LARGEST, or NaN.
    """
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        for item in value:
            _check_settings(item, path)
    # written with `not`, so that NaN is refused, too
    elif isinstance(value, (int, float)) and not abs(value) <= _LARGEST:
        raise LoadError(f"{path} asks for {value:,}; {_LARGEST} is the most", _AGAIN)


def _processor(settings: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """An image processor of transformers, made only from settings: no code of the model's
    folder runs.

    Args:
        settings: The settings of the processor, after `_check_settings`.
        config: The content of the model's config.json, for its type.

    Raises:
        ValueError: Where the class is not one of IMAGE_PROCESSORS.
    """
    # the processor that the settings name; if they name none, that of the model's type
    name = settings.get("image_processor_type")
    name = name or settings.get("feature_extractor_type")  # of old files
    if name is None:
        auto = import_module("transformers.models.auto.image_processing_auto")
        backends = auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(config.get("model_type"), {})
        name = backends.get("torchvision")
    name = re.sub("(ImageProcessor|FeatureExtractor)(Fast)?$", "", str(name))
    if name not in IMAGE_PROCESSORS:
        raise ValueError(
            f"{name} names no image processor that featviz lets prepare an image"
        )
    processor_class = getattr(import_module("transformers"), f"{name}ImageProcessor")
    # `auto_map` names code of the folder's own
    content = {key: settings[key] for key in settings if key != "auto_map"}
    return processor_class.from_dict(content)


def _process(processor: Any, image: Image.Image | Raster) -> Tensor:
    """Prepare an image by a processor; returns the input, float32 [1, C, H, W].

    Args:
        processor: An image processor of transformers.
        image: A picture, or numbers [C, H, W] in 0..1.

    Raises:
        ImageError: Where the processor's code fails, or returns another shape.
    """
    inputs: dict[str, Any] = {"images": image}
    if isinstance(image, Raster):
        # back to 0..255, since the processor scales to 0..1 itself
        numbers = torch.from_numpy(image.values) * 255
        inputs = {"images": numbers, "input_data_format": "channels_first"}
    name = type(processor).__name__
    try:
        outputs = processor(**inputs, return_tensors="pt")
        values: Tensor = outputs["pixel_values"].float()
    except Exception as error:  # a processor may raise anything
        raise ImageError(
            f"{name} raised {type(error).__name__}: {quoted(error)}",
            "-v shows the traceback",
        ) from error
    if values.ndim == 5 and values.shape[:2] == (1, 1):  # a clip of one frame
        values = values[0]
    if values.ndim != 4 or len(values) != 1:
        raise ImageError(
            f"{name} gave {list(values.shape)}, not [1, C, H, W]", "--size HxW"
        )
    return values


def _measured_chain(processor: Any, channels: int) -> Chain:
    """A chain whose `library` is a processor. The chain's own steps, which replace the
    processor if the user changes one, are measured on its outputs for black and white
    images, since the settings of different processors have different names.

    Args:
        processor: An image processor of transformers.
        channels: How many channels the model takes, 1 or 3.

    Raises:
        ValueError: Where the output has other channels, or is the same for black and white.
        KeyError: Where the settings name an interpolation that no chain has.
        ImageError: Where the code of the processor fails.
    """
    width, height = FALLBACK_SIZE
    mode = "L" if channels == 1 else "RGB"
    black = _process(processor, Image.new(mode, (width, height), 0))
    white = _process(processor, Image.new(mode, (width, height), "white"))
    # its output has another size only if the image decides the size
    narrow = _process(processor, Image.new(mode, (width, height * 3 // 4), 0))
    if black.shape[1] != channels:
        raise ValueError(
            f"it gives {counted(black.shape[1], 'channel')}, and the model takes"
            f" {channels}"
        )
    mean, std = _normalisation(black, white)
    settings = {"size": {}, "resample": 2, **processor.to_dict()}
    chain = Chain(
        mean=mean,
        std=std,
        channels=channels,
        interpolation=_RESAMPLE[settings["resample"]],
        bgr=bool(settings.get("do_flip_channel_order")),
        library=partial(_process, processor),
    )
    step = f"by {type(processor).__name__}"
    shortest_edge = settings["size"].get("shortest_edge")
    if black.shape != narrow.shape:
        return replace(
            chain, resize=shortest_edge, library_steps=(step,), library_own_size=True
        )
    size = (int(black.shape[2]), int(black.shape[3]))
    steps = (f"{step} to {by(size)}",)
    if shortest_edge:
        return replace(chain, resize=shortest_edge, crop=size, library_steps=steps)
    return replace(chain, resize=size, library_steps=steps)


def _normalisation(
    black: Tensor, white: Tensor
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """The mean and the standard deviation by which a processor normalises values 0..1, with
    a number for each channel; None and None if it does not normalise.

    Args:
        black: The processor's output for a black image, [1, C, H, W].
        white: Its output for a white image.

    Raises:
        ValueError: Where these are alike, or not finite.
    """
    # black becomes -mean / std, and white (1 - mean) / std
    low = _middle_pixel(black)
    span = _middle_pixel(white) - low
    if not (np.isfinite(span).all() and span.all()):
        raise ValueError("it does not tell black from white")
    std = _round_numbers(1 / span)
    mean = _round_numbers(-low / span)
    if set(std) == {1.0} and set(mean) == {0.0}:
        return None, None
    return mean, std


def _middle_pixel(values: Tensor) -> np.ndarray:
    """The numbers [C] of the pixel in the middle of an image [1, C, H, W]."""
    middle = values[0, :, values.shape[2] // 2, values.shape[3] // 2]
    return middle.double().numpy()


def _round_numbers(values: np.ndarray) -> tuple[float, ...]:
    """The numbers, each rounded to six digits."""
    # adding 0.0 makes -0.0 plain 0.0
    return tuple(float(f"{value:.6g}") + 0.0 for value in values)
