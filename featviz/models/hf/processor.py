"""`preprocessor_config.json` of a folder: how the model's own image processor prepares an image.

What the file leaves out, the processor's class says; class attributes are read, nothing of it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from featviz.errors import FileError, LoadError
from featviz.files import read_json
from featviz.models.hf.config import Config, library, named
from featviz.models.preprocess import Preprocess, Size
from featviz.models.resizing import Between, Inside, Longer, Multiples, Padding, SizeRule
from featviz.text import quoted

log = logging.getLogger(__name__)

FILE = "preprocessor_config.json"
_NESTED = "processor_config.json"
"""Where newer processors of images and text write the same under `image_processor`."""

_LARGEST = 4096
"""Pixels of a side that a file may ask for."""

_RESAMPLE = {0: "nearest-exact", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of what torchvision resizes tensors with."""

_BYTE = 1 / 255


@dataclass(frozen=True)
class _Said:
    """What a file says, and for what it leaves out, a class."""

    given: Mapping[str, Any]
    kind: Any

    def __call__(self, name: str, otherwise: Any = None) -> Any:
        value = self.given.get(name)
        value = getattr(self.kind, name, None) if value is None else value
        return otherwise if value is None else value

    def side(self, value: Any) -> int:
        """A number of pixels.

        Raises:
            LoadError: it is none, or too many.
        """
        if type(value) is int and 0 < value <= _LARGEST:
            return value
        raise LoadError(
            f"{FILE} asks for a side of {quoted(repr(value))}, not 1 to {_LARGEST} pixels",
            "fetch the file again, or remove it and give --size, --crop, --mean and --std",
        )


def read(config: Config) -> Preprocess | None:
    """The preprocessing of a folder's model; None where no file tells it.

    Raises:
        LoadError: the file cannot be read, or asks for what featviz does not do.
    """
    given = _given(config.folder)
    if given is None:
        return None
    said = _Said(given, _kind(given, config))
    name = getattr(said.kind, "__name__", "")
    if not (name in _OWN or _plain(said.kind)):
        log.warning("%s is taken as a usual image processor", name or "an unknown image processor")
    try:
        return _OWN.get(name, _usual)(said, _channels(config))
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise LoadError(
            f"{quoted(str(config.folder / FILE))} cannot be understood: {quoted(repr(error))}",
            "fetch the file again, or remove it and give --size, --crop, --mean and --std",
        ) from error


def image_size(config: Config) -> tuple[int, int] | None:
    """The (height, width) of the images that a config says the model was made for."""
    value = _vision(config).get("image_size")
    sides = (value, value) if isinstance(value, int) else value
    if not isinstance(sides, (list, tuple)) or len(sides) != 2:
        return None
    height, width = sides
    right = all(type(side) is int and 0 < side <= _LARGEST for side in sides)
    return (height, width) if right else None


def _given(folder: Path) -> Mapping[str, Any] | None:
    for name, key in ((_NESTED, "image_processor"), (FILE, None)):
        try:
            content = read_json(folder / name)
        except FileNotFoundError:
            continue
        except FileError as error:
            raise LoadError(str(error), "fetch the file again, or remove it") from error
        content = content.get(key) if key and isinstance(content, dict) else content
        if isinstance(content, dict):
            return content
    return None


def _kind(given: Mapping[str, Any], config: Config) -> Any:
    """The class of the processor: as the file names it, or as transformers does for the model."""
    package = library(config)
    name = given.get("image_processor_type") or given.get("feature_extractor_type")
    if not isinstance(name, str):
        auto = import_module("transformers.models.auto.image_processing_auto")
        names = auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(config.fields.get("model_type"), {})
        name = names.get("torchvision") or ""
    name = name.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast")
    return named(package, name, "BaseImageProcessor")


def _plain(kind: Any) -> bool:
    """Whether a class resizes, crops and normalises as most do, without steps of its own."""
    usual = import_module("transformers.image_processing_backends").TorchvisionBackend
    steps = ("_preprocess", "resize", "center_crop", "rescale_and_normalize", "pad")
    return kind is not None and all(
        getattr(kind, step, None) is getattr(usual, step) for step in steps
    )


def _vision(config: Config) -> Mapping[str, Any]:
    inner = config.fields.get("vision_config")
    return inner if isinstance(inner, dict) else config.fields


def _channels(config: Config) -> int:
    return 1 if _vision(config).get("num_channels") == 1 else 3


def _usual(said: _Said, channels: int) -> Preprocess:
    """Resize, crop, normalise, pad: each if the processor says so."""
    return Preprocess(
        _resize(said) if said("do_resize") else None,
        _crop(said) if said("do_center_crop") else None,
        *_mean_and_std(said, channels),
        channels,
        _interpolation(said),
        padding=_padding(said) if said("do_pad") else None,
        as_transformers=True,
    )


def _interpolation(said: _Said) -> str:
    number = said("resample", 2)
    if number in _RESAMPLE:
        return _RESAMPLE[number]
    raise LoadError(
        f"{FILE} resamples by {quoted(repr(number))}, which is none of Pillow's 0 to 3",
        "change it there: 2 is bilinear, 3 bicubic",
    )


def _resize(said: _Said) -> Size | SizeRule:
    size = said("size")
    if isinstance(size, int):
        side = said.side(size)
        return (side, side) if said("default_to_square", True) else side
    if isinstance(size, (list, tuple)):
        height, width = map(said.side, size)
        return height, width
    sides = {key: said.side(value) for key, value in size.items() if value}
    if "shortest_edge" in sides:
        short = sides["shortest_edge"]
        return Between(short, sides["longest_edge"]) if "longest_edge" in sides else short
    if "longest_edge" in sides:
        return Longer(sides["longest_edge"])
    if "max_height" in sides:
        return Inside(sides["max_height"], sides["max_width"])
    return sides["height"], sides["width"]


def _square(said: _Said, value: Any) -> tuple[int, int]:
    """A (height, width) that may be written as one number."""
    if isinstance(value, Mapping):
        value = (value["height"], value["width"])
    height, width = map(said.side, (value, value) if isinstance(value, int) else value)
    return height, width


def _crop(said: _Said) -> Size:
    return _square(said, said("crop_size"))


def _padding(said: _Said) -> Padding | None:
    size = said("pad_size")
    return None if size is None else Padding(_square(said, size))


Values = tuple[float, ...] | None


def _mean_and_std(said: _Said, channels: int) -> tuple[Values, Values]:
    """Mean and std for values of 0..1: `rescale_factor` is folded into them where it is another
    than 1/255."""
    mean, std = (0.0,) * channels, (1.0,) * channels
    if said("do_normalize"):
        mean, std = (_listed(said(name), channels) for name in ("image_mean", "image_std"))
    scale = 255 * float(said("rescale_factor", _BYTE)) if said("do_rescale", True) else 255.0
    if not said("do_normalize") and scale == 255 * _BYTE:
        return None, None
    return tuple(v / scale for v in mean), tuple(v / scale for v in std)


def _listed(value: Any, channels: int) -> tuple[float, ...]:
    values = (value,) * channels if isinstance(value, (int, float)) else value
    return tuple(float(number) for number in values)


def _convnext(said: _Said, channels: int) -> Preprocess:
    """Below 384 pixels a larger image is cropped, by `crop_pct`; from there on it is squashed."""
    usual = _usual(said, channels)
    side = usual.resize
    if not isinstance(side, int):
        return usual
    if side >= 384:
        return replace(usual, resize=(side, side))
    larger = said.side(int(side / float(said("crop_pct", 224 / 256))))
    return replace(usual, resize=larger, crop=side)


def _dpt(said: _Said, channels: int) -> Preprocess:
    """Sides become multiples, in proportion or not, or are padded to multiples."""
    usual = _usual(said, channels)
    multiple, divisor = said.side(said("ensure_multiple_of", 1)), said("size_divisor")
    near = Multiples(*_square(said, said("size")), multiple, bool(said("keep_aspect_ratio")))
    padded = bool(said("do_pad")) and divisor is not None
    return replace(
        usual,
        resize=None if usual.resize is None else near,
        padding=Padding(multiple=said.side(divisor), centred=True) if padded else None,
    )


def _dinov3(said: _Said, channels: int) -> Preprocess:
    """Values of 0..1 are resized, not bytes."""
    return replace(_usual(said, channels), floats=True)


def _mask2former(said: _Said, channels: int) -> Preprocess:
    """As DETR's, and sides are enlarged to multiples."""
    usual = _detr(said, channels)
    if not isinstance(usual.resize, Between):
        return usual
    multiple = said.side(said("size_divisor", 1) or 1)
    return replace(usual, resize=replace(usual.resize, multiple=multiple))


def _mobilevit(said: _Said, channels: int) -> Preprocess:
    """Blue comes first, and nothing is normalised."""
    plain = _Said({**said.given, "do_normalize": False}, said.kind)
    return replace(_usual(plain, channels), bgr=bool(said("do_flip_channel_order")))


def _segformer(said: _Said, channels: int) -> Preprocess:
    """Nothing is cropped."""
    return replace(_usual(said, channels), crop=None)


def _detr(said: _Said, channels: int) -> Preprocess:
    """A size that is one number is that of the shorter side; the longer one has a limit."""
    size = said("size", {"shortest_edge": 800, "longest_edge": 1333})
    if isinstance(size, int):
        size = {"shortest_edge": size, "longest_edge": said("max_size", 1333)}
    return _usual(_Said({**said.given, "size": size}, said.kind), channels)


_OWN: dict[str, Callable[[_Said, int], Preprocess]] = {
    "BeitImageProcessor": _usual,
    "ConditionalDetrImageProcessor": _detr,
    "ConvNextImageProcessor": _convnext,
    "DINOv3ViTImageProcessor": _dinov3,
    "DPTImageProcessor": _dpt,
    "DeformableDetrImageProcessor": _detr,
    "DetrImageProcessor": _detr,
    "GroundingDinoImageProcessor": _detr,
    "Mask2FormerImageProcessor": _mask2former,
    "MaskFormerImageProcessor": _mask2former,
    "MobileViTImageProcessor": _mobilevit,
    "RTDetrImageProcessor": _usual,
    "SamImageProcessor": _usual,
    "SegformerImageProcessor": _segformer,
}
"""Image processors with steps of their own, which these readers know."""
