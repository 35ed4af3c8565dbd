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
from typing import Any

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

_FRAMES, _MOST_CHANNELS = 16, 512
"""Of a clip, where nobody says how many; and input channels that are believed of a convolution."""


def choose_preprocess(
    module: nn.Module,
    entry: Any,
    options: InputOptions,
    fixed: Fixed = ANY,
    further: Sequence[Argument] = (),
) -> Preprocess:
    """The preset that the user names, else the library's own (`entry`), else what fits the first
    convolution or is `fixed`; then the user's wishes. `further` are arguments beside images."""
    known: Chain | None = entry if isinstance(entry, Chain) else None
    first, of_clips = first_channels(module)
    expected = known.channels if known else fixed[0] or first
    if known is None:
        known = None if entry is None else from_torchvision(entry)
        known = known or from_ultralytics(module)
    kinds = {type(part).__name__ for part in module.modules()} if known is None else set()
    if "GeneralizedRCNNTransform" in kinds:  # torchvision's detectors resize and normalise
        known = Chain()
    elif "RAFT" in kinds:
        known = Chain(mean=(0.5,) * 3, std=(0.5,) * 3, multiple=8)
    channels, guessed = options.input_channels or expected, False
    if options.preset is not None:
        base = _named(options.preset, channels, module, fixed[1])
    elif known is not None and known.channels == channels:
        base = known
    elif channels != 3:
        base = Chain(fixed[1], channels=channels)
    else:
        base = _named("imagenet", channels, module, fixed[1])
        guessed = None in (options.size or options.crop, options.mean, options.std)
    side = getattr(module, "image_size", None)  # of torchvision's vision transformers
    if isinstance(side, int) and isinstance(base.crop, int) and base.crop != side:
        base = replace(base, resize=side, crop=side, library=None)
    base = _changed(base, options)
    said = options.size or options.crop or base.stride
    return Preprocess(
        base,
        frames=(options.frames or _FRAMES) if of_clips else None,
        inputs=options.images_per_pass or required_arguments(module, further),
        guessed=guessed,
        size_guessed=not said and (guessed or base.own_size),
        any_values=options.mean is not None or options.std is not None,
        dtype=input_dtype(module),
    )


def _changed(base: Chain, options: InputOptions) -> Chain:
    given = {name: getattr(options, name) for name in ("interpolation", "crop", "mean", "std")}
    changes = {name: value for name, value in given.items() if value is not None}
    if base.stride and (isinstance(options.size, tuple) or "crop" in changes):
        base = Chain(mean=base.mean, std=base.std, channels=base.channels)
    if options.size is not None:
        changes = {"resize": options.size, "crop": None, **changes}
    if "mean" in changes or "std" in changes:
        one, zero = (base.std or (1.0,) * base.channels), (base.mean or (0.0,) * base.channels)
        changes = {"mean": zero, "std": one, **changes}
    base = replace(base, library=None, **changes) if changes else base
    for name, values in (("--mean", base.mean), ("--std", base.std)):
        if values is not None and len(values) != base.channels:
            words = f"{name} has {len(values)} numbers for {base.channels} channels"
            raise UsageError(words, f"give {base.channels}, separated by commas")
    if base.interpolation == "lanczos" and not base.antialias:
        words = "--interpolation lanczos smooths, and this model was trained without"
        raise UsageError(words, "bicubic")
    if base.std is not None and 0 in base.std:
        whose = "--std" if options.std else "the std of the model's own preprocessing,"
        words = f"{whose} {listed(base.std)} divides by zero"
        raise UsageError(words, "give positive numbers with --std")
    return base


def required_arguments(module: nn.Module, forward_args: Sequence[Argument] = ()) -> int:
    """How many arguments forward cannot do without, beside those that are given; at least 1."""
    given = [name for name, _, value, _ in forward_args if value is not IMAGE]
    needed = [
        p
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        if p.default is p.empty and p.name not in given
    ]
    return max(1, len(needed))


def first_channels(module: nn.Module) -> tuple[int, bool]:
    """Input channels of the first convolution, or 3; and whether it is of clips."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    first = next((part for part in module.modules() if isinstance(part, kinds)), None)
    channels = getattr(first, "in_channels", 0)  # 0 in a lazy one; a file can say anything
    believed = type(channels) is int and 0 < channels <= _MOST_CHANNELS
    return channels if believed else 3, isinstance(first, nn.Conv3d)


def first_features(module: nn.Module) -> int | None:
    """Numbers that the model takes where its first layer is linear; None where it is another."""
    kinds = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding)
    first = next((part for part in module.modules() if isinstance(part, kinds)), None)
    return first.in_features or None if isinstance(first, nn.Linear) else None


def _named(name: str, channels: int, module: nn.Module, size: HeightWidth | None) -> Chain:
    """A preset, for models that take `channels`; in the size of those that take one size alone."""
    preset = PRESETS[name]
    if channels != 3 and preset.mean is not None:
        words = f"--preset {name} is for RGB, and the model takes {counted(channels, 'channel')}"
        raise UsageError(
            words, "--preset none, with --size, --mean and --std; or --input-channels 3"
        )
    if preset.letterbox is not None:
        letterbox()
        if size is not None and size[0] != size[1]:
            words = f"--preset {name} pads to squares, and the model takes {by(size)}"
            raise UsageError(words, "--preset none")
        side, stride = (preset.letterbox, _largest_stride(module)) if size is None else size
        return Chain(side, channels=channels, stride=stride)
    resize: Size | None = preset.resize
    crop: Size | None = preset.crop
    if size is not None and crop is not None and size[0] == size[1]:
        resize, crop = round(size[0] * 256 / FALLBACK_SIZE[0]), size[0]
    elif size is not None:
        resize, crop = size, None
    return Chain(resize, crop, preset.mean, preset.std, channels, preset.interpolation)


# torchvision and timm -------------------------------------------------------------------------


def from_torchvision(entry: Any) -> Chain | None:
    """The transforms of an entry of torchvision's weights; None where they only make numbers."""
    said = vars(entry.transforms())
    if "resize_size" not in said:
        return None
    resize, crop = (
        size[0] if isinstance(size, list) and len(size) == 1 else tuple(size or ()) or None
        for size in (said["resize_size"], said.get("crop_size"))
    )
    mode, smooths = said["interpolation"].value, said.get("antialias", False)  # of clips: not
    mean, std = tuple(said["mean"]), tuple(said["std"])
    return Chain(resize, crop, mean, std, interpolation=mode, antialias=smooths)


def from_timm(config: Mapping[str, Any]) -> Chain:
    """timm's transform for evaluation, of what `timm.data.resolve_model_data_config` gives."""
    channels, height, width = config["input_size"]
    mean, std = (tuple(float(value) for value in config[name]) for name in ("mean", "std"))
    if len(mean) != channels:
        mean, std = ((sum(values) / len(values),) * channels for values in (mean, std))
    tall, wide = (math.floor(side / config["crop_pct"]) for side in (height, width))
    usual = {"squash": (tall, wide), "center": tall if height == width else None}
    resize, crop = usual.get(config["crop_mode"]), height if height == width else (height, width)
    chain = Chain(
        resize or crop, crop if resize else None, mean, std, channels, config["interpolation"]
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


# Ultralytics ----------------------------------------------------------------------------------

_SMALLEST_STRIDE, _LARGEST_STRIDE, _LARGEST_SIZE = 32, 1024, 8192


def _largest_stride(module: nn.Module) -> int:
    """Of the heads of a model of Ultralytics, at least 32; a file can say anything."""
    stride = getattr(module, "stride", None)
    largest = float(stride.max()) if isinstance(stride, Tensor) and stride.numel() else 0.0
    return int(largest) if _SMALLEST_STRIDE <= largest <= _LARGEST_STRIDE else _SMALLEST_STRIDE


def from_ultralytics(module: nn.Module, trained: Any = None) -> Chain | None:
    """How Ultralytics' predictors prepare images; None for another model. `trained` are the
    `train_args` of the checkpoint."""
    tasks = "ultralytics.nn.tasks"
    classes = {kind.__name__ for kind in type(module).__mro__ if kind.__module__ == tasks}
    if not classes:
        return None
    size = None
    for given in (trained, getattr(module, "args", None)):
        plain = hasattr(given, "__dict__") and not isinstance(given, (type, nn.Module))
        values = given if isinstance(given, dict) else vars(given) if plain else {}
        side = values.get("imgsz")
        if size is None and type(side) is int and 0 < side <= _LARGEST_SIZE:
            size = side
    channels, _ = first_channels(module)
    if "ClassificationModel" in classes:
        return Chain(size or 224, size or 224, channels=channels)
    stretch = not classes.isdisjoint({"RTDETRDetectionModel", "DepthModel"})
    stride = _largest_stride(module)
    return Chain(size or 640, channels=channels, stride=stride, stretch=stretch)


# transformers ---------------------------------------------------------------------------------

_FILE = "preprocessor_config.json"
_LARGEST = 4096  # number that a file may hold: pixels of a side, mostly
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
    where, found = quoted(str(folder / _FILE)), list[Any]()
    try:
        for name in ("processor_config.json", _FILE):  # the first also of processors of text
            if (folder / name).exists():
                content = read_json(folder / name)
                whole = name == _FILE or not isinstance(content, dict)
                found.append(content if whole else content.get("image_processor"))
    except FileError as error:
        raise LoadError(str(error), "fetch the file again, or remove it") from error
    given = next((one for one in found if isinstance(one, dict)), None)
    if given is None:
        return None
    _check_numbers(given, where)
    try:
        channels = 1 if _vision(config).get("num_channels") == 1 else 3
        return _measured(_processor(given, config), channels)
    except Exception as error:  # whatever the code of a processor makes of a bad file
        words = f"{type(error).__name__}: {quoted(str(error).strip().partition(chr(10))[0])}"
        raise LoadError(f"{where} cannot be understood: {words}", _AGAIN) from error


def image_size(config: Mapping[str, Any]) -> HeightWidth | None:
    """The (height, width) of the images that a config.json says the model was made for."""
    value = _vision(config).get("image_size")
    both = (value, value) if isinstance(value, int) else value
    if not isinstance(both, (list, tuple)) or len(both) != 2:
        return None
    right = all(type(side) is int and 0 < side <= _LARGEST for side in both)
    return (both[0], both[1]) if right else None


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("vision_config")
    return inner if isinstance(inner, dict) else config


def _check_numbers(value: Any, where: str) -> None:
    """Refuse numbers that no processor has, at every depth: they decide how large images become."""
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_numbers(item, where)
    elif isinstance(value, (int, float)) and not abs(value) <= _LARGEST:
        raise LoadError(f"{where} asks for {value:,}; {_LARGEST} is the most", _AGAIN)


def _processor(given: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """The image processor, from a folder that holds nothing but what was checked."""
    name = given.get("image_processor_type") or given.get("feature_extractor_type")
    if name is None:
        auto = import_module("transformers.models.auto.image_processing_auto")
        name = auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(config.get("model_type"), {}).get(
            "torchvision"
        )
    name = re.sub("(ImageProcessor|FeatureExtractor)(Fast)?$", "", str(name))
    if name not in _ALLOWED.split("|"):
        raise ValueError(f"{name} names no image processor that featviz lets prepare an image")
    plain = {key: value for key, value in given.items() if key != "auto_map"}
    with TemporaryDirectory(prefix="featviz-") as folder:
        content = json.dumps({**plain, "image_processor_type": f"{name}ImageProcessor"})
        Path(folder, _FILE).write_text(content, "utf-8")
        auto = import_module("transformers").AutoImageProcessor
        return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _pixels(processor: Any, image: Image.Image | Raster) -> Tensor:
    """The output of a processor, [1, C, H, W]."""
    given: dict[str, Any] = {"images": image}
    if isinstance(image, Raster):
        numbers = torch.from_numpy(image.values) * 255
        given = {"images": numbers, "input_data_format": "channels_first"}
    name = type(processor).__name__
    try:
        values: Tensor = processor(**given, return_tensors="pt")["pixel_values"].float()
    except Exception as error:  # whatever its own code makes of an image
        words = f"{type(error).__name__}: {quoted(str(error))}"
        raise ImageError(f"{name} raised {words}", "-v shows the traceback") from error
    values = values[0] if values.shape[:2] == (1, 1) and values.ndim == 5 else values  # a frame
    if values.ndim != 4 or len(values) != 1:
        raise ImageError(f"{name} gave {list(values.shape)}, not [1, C, H, W]", "--size HxW")
    return values


def _measured(processor: Any, channels: int) -> Chain:
    """A processor with its outputs for black, white and another shape. The chain has its own size,
    mean and deviation, for where the user changes one."""
    (height, width), mode = FALLBACK_SIZE, "L" if channels == 1 else "RGB"
    black, white, narrow = (
        _pixels(processor, Image.new(mode, (width, high), colour))
        for high, colour in ((height, 0), (height, "white"), (height * 3 // 4, 0))
    )
    if black.shape[1] != channels:
        raise ValueError(f"it gives {black.shape[1]} channels, and the model takes {channels}")
    low, high = (v[0, :, v.shape[2] // 2, v.shape[3] // 2].double().numpy() for v in (black, white))
    if not (np.isfinite(high - low).all() and (high - low).all()):
        raise ValueError("it does not tell black from white")
    std = tuple(float(f"{value:.6g}") for value in 1 / (high - low))
    mean = tuple(float(f"{value:.6g}") + 0.0 for value in -low / (high - low))
    plain = std == (1.0,) * channels and mean == (0.0,) * channels
    said, own_size = {"size": {}, "resample": 2, **processor.to_dict()}, black.shape != narrow.shape
    size = None if own_size else (int(black.shape[2]), int(black.shape[3]))
    name, edge = type(processor).__name__, said["size"].get("shortest_edge")
    return Chain(
        edge or size,
        size if edge else None,
        None if plain else mean,
        None if plain else std,
        channels,
        _RESAMPLE[said["resample"]],
        bgr=bool(said.get("do_flip_channel_order")),
        library=partial(_pixels, processor),
        library_steps=(f"by {name}" + (f" to {by(size)}" if size else ""),),
        library_own_size=own_size,
    )
