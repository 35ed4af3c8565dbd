"""The part of a model of transformers that an image goes into."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from featviz.errors import LoadError

log = logging.getLogger(__name__)

_IMAGE = "pixel_values"
"""How transformers calls an image among the arguments of forward."""

_PARTS = ("vision_model", "visual_projection")
"""The parts of a dual encoder that `get_image_features` uses."""


class ImageTower(nn.Module):
    """The part of a dual encoder that sees images; its modules keep the names they have there."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.config, self.training = whole.config, whole.training
        for name in _PARTS:
            if hasattr(whole, name):
                self.add_module(name, getattr(whole, name))
        see: Callable[[Tensor], Any] = whole.get_image_features  # type: ignore[assignment]
        self._see = see

    def forward(self, pixel_values: Tensor) -> Any:
        """The features of an image, of `pixel_values` [1, C, H, W]."""
        return self._see(pixel_values)


def for_images(module: nn.Module) -> nn.Module:
    """The module itself, or the tower of a dual encoder that takes images.

    Raises:
        LoadError: it takes something else than an image.
    """
    first = next(iter(inspect.signature(module.forward).parameters), None)
    name = type(module).__name__
    if first == _IMAGE:
        return module
    if hasattr(module, "get_image_features") and hasattr(module, "vision_model"):
        log.info("%s is run by its vision tower (get_image_features)", name)
        return ImageTower(module)
    raise LoadError(
        f"{name} takes {first} first, and featviz gives it an image",
        f"a model whose forward begins with {_IMAGE}; or --arch file.py:factory that wraps it",
    )
