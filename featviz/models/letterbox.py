"""How Ultralytics brings an image into a model: the longer side is resized, the rest is padded."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor, nn

from featviz.errors import UsageError
from featviz.text import by

_DEFAULT_SIZE, _CLASSIFIER_SIZE = 640, 224
_LARGEST_SIZE = 8192
_SMALLEST_STRIDE, _LARGEST_STRIDE = 32, 1024
_FILL = 114
"""The grey of the padding, 0..255."""

_TASKS = "ultralytics.nn.tasks"
_CLASSIFIER = "ClassificationModel"
_STRETCHED = ("RTDETRDetectionModel", "DepthModel")
"""Models whose images are resized to a square, without padding."""


class Window(NamedTuple):
    """Where the image lies in the input, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class LetterBox:
    """Ultralytics' LetterBox as its predictor uses it (8.4), pixel for pixel."""

    size: int
    """The longer side of the resized image, in pixels: `imgsz`."""
    stride: int = _SMALLEST_STRIDE
    """The sides are padded to multiples of it."""
    stretch: bool = False
    """The image is resized to a square of `size` instead, and not padded."""

    def __call__(self, image: Image.Image) -> Image.Image:
        """Resize and pad an image of mode L or RGB."""
        window, (height, width) = self.window(image.size), self.padded(image.size)
        pixels = np.asarray(image)
        if image.size != (window.width, window.height):
            cv2: Any = import_module("cv2")  # a requirement of Ultralytics, whose pixels these are
            pixels = cv2.resize(
                pixels, (window.width, window.height), interpolation=cv2.INTER_LINEAR
            )
        top, left = window.top, window.left
        around = (top, height - window.height - top), (left, width - window.width - left)
        depth = ((0, 0),) * (pixels.ndim - 2)
        return Image.fromarray(np.pad(pixels, (*around, *depth), constant_values=_FILL))

    def window(self, size: tuple[int, int]) -> Window:
        """Where an image of a size (width, height) lies in the padded one."""
        if self.stretch:
            return Window(0, 0, self.size, self.size)
        width, height = size
        factor = min(self.size / height, self.size / width)
        wide, high = (max(round(side * factor), 1) for side in (width, height))
        # half of the padding, and its odd pixel at the bottom and at the right
        top, left = (round((self.size - side) % self.stride / 2 - 0.1) for side in (high, wide))
        return Window(top, left, high, wide)

    def padded(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the input for an image of a size (width, height)."""
        window = self.window(size)
        high, wide = (side + (self.size - side) % self.stride for side in window[2:])
        return high, wide

    def resized(self, size: int) -> LetterBox:
        """The same with another longer side, rounded up to whole strides as Ultralytics does."""
        return LetterBox(ceil(size / self.stride) * self.stride, self.stride, self.stretch)

    @property
    def words(self) -> str:
        """The steps in words, for the manifest."""
        if self.stretch:
            return f"resize to {self.size}×{self.size} (bilinear, by OpenCV)"
        return (
            f"resize longer side to {self.size} (bilinear, by OpenCV), "
            f"pad with {_FILL} to multiples of {self.stride}"
        )


def require_opencv() -> None:
    """Refuse to go on without OpenCV, which computes the pixels.

    Raises:
        UsageError: it is not installed.
    """
    if find_spec("cv2") is None:
        raise UsageError(
            "--preset yolo resizes by OpenCV, which is not installed",
            "pip install opencv-python-headless; or --preset none with --size HxW",
        )


def for_module(module: nn.Module, side: int, fixed: tuple[int, int] | None) -> LetterBox:
    """A LetterBox to a longer side in pixels; where the model takes one square size alone, to all
    of that size.

    Args:
        fixed: (height, width) that the model takes, if it takes nothing else.

    Raises:
        UsageError: the model takes one size that is no square.
    """
    if fixed is None:
        stride = _stride(module)
        return LetterBox(ceil(side / stride) * stride, stride)
    if fixed[0] != fixed[1]:
        raise UsageError(
            f"--preset yolo pads to squares, and the model takes {by(fixed)}", "--preset none"
        )
    return LetterBox(fixed[0], fixed[0])


def of_model(module: nn.Module, arguments: Any) -> LetterBox | int | None:
    """How Ultralytics prepares images for a model.

    Args:
        arguments: `train_args` of its checkpoint, if there is one: a dict with `imgsz`.

    Returns:
        None for a model that is not Ultralytics', and for its classifiers the side to which they
        resize and crop.
    """
    classes = [kind.__name__ for kind in type(module).__mro__ if kind.__module__ == _TASKS]
    if not classes:
        return None
    if _CLASSIFIER in classes:
        return _size(module, arguments) or _CLASSIFIER_SIZE
    box = LetterBox(_DEFAULT_SIZE, _stride(module), not {*_STRETCHED}.isdisjoint(classes))
    return box.resized(_size(module, arguments) or _DEFAULT_SIZE)


def _size(module: nn.Module, arguments: Any) -> int | None:
    """`imgsz` of the checkpoint's arguments, or else of the model's."""
    for given in (arguments, getattr(module, "args", None)):
        values = given if isinstance(given, dict) else vars(given) if _is_plain(given) else {}
        size = values.get("imgsz")
        if type(size) is int and 0 < size <= _LARGEST_SIZE:
            return size
    return None


def _is_plain(value: Any) -> bool:
    """Whether a value is a namespace of arguments."""
    return hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module))


def _stride(module: nn.Module) -> int:
    """The largest stride of the model's heads, at least 32; a file can say anything."""
    stride = getattr(module, "stride", None)
    largest = float(stride.max()) if isinstance(stride, Tensor) and stride.numel() else 0.0
    return int(largest) if _SMALLEST_STRIDE <= largest <= _LARGEST_STRIDE else _SMALLEST_STRIDE
