"""`featviz.grid`: the maps and images that it takes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pixels import assert_same_pixels
from torch import Tensor

import featviz as fv
from featviz.errors import LayoutError, UsageError


@pytest.mark.parametrize(
    "convert",
    [
        lambda t: t,
        lambda t: t[None].numpy().astype(">f4"),
        lambda t: t.numpy()[:, ::-1, ::-1][:, ::-1, ::-1],
        lambda t: t.double().requires_grad_(),
    ],
)
def test_grid_draws_maps_of_every_type(convert: Callable[[Tensor], Any]) -> None:
    """[C, H, W] is [1, C, H, W] of one image; an array is a tensor."""
    maps = torch.rand(5, 6, 7)
    assert_same_pixels(fv.grid(convert(maps)), fv.grid(maps[None]))


def test_grid_does_not_guess_between_a_map_and_tokens() -> None:
    """[1, X, Y] is refused with the option that says which."""
    ambiguous = torch.rand(1, 16, 8)
    with pytest.raises(LayoutError, match=r"shape \[1, 16, 8\]") as caught:
        fv.grid(ambiguous)
    assert caught.value.hint == "one map is [1, 1, H, W]: tensor[None]"
    as_tokens = fv.grid(ambiguous, tensor_layout="tokens:4x4")
    maps = ambiguous.reshape(1, 4, 4, 8).permute(0, 3, 1, 2)
    assert_same_pixels(as_tokens, fv.grid(maps))


def test_grid_draws_a_vector() -> None:
    """[1, 1, F] is one."""
    vector = torch.arange(6.0)
    assert_same_pixels(fv.grid(vector.reshape(1, 1, 6)), fv.grid(vector[None]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Image.new("L", (2, 2)), "grid draws a tensor or an array .* not 'Image'"),
        (np.array([["a", "b"]]), "not '<U1'"),
        (None, "not 'NoneType'"),
        (np.ones((3, 4, 4), np.longdouble), "not 'float128'"),
        (torch.ones(3, 4, 4, dtype=torch.complex64), "holds complex numbers"),
        (torch.zeros(0, 3, 3), "holds no values"),
    ],
)
def test_what_grid_cannot_draw(value: Any, message: str) -> None:
    """The error is one line, whatever it is."""
    with pytest.raises((UsageError, LayoutError), match=message):
        fv.grid(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlay": 0.5}, "an overlay and its image go together"),
        ({"image": np.zeros((4, 4), np.uint8)}, "an overlay and its image go together"),
        ({"reduce": "gradcam"}, "reduce=gradcam needs more than a layer's output"),
        ({"reduce": "rollout"}, "reduce=rollout needs more than a layer's output"),
        ({"flat": True}, "no option flat"),
        ({"min_tile": 8}, "no option min_tile"),
        ({"colour": "red", "normalise": "map"}, "no option colour, normalise"),
    ],
)
def test_what_one_tensor_alone_cannot_have(
    options: dict[str, Any], message: str
) -> None:
    """It is refused, and not ignored."""
    with pytest.raises(UsageError, match=f"^{message}"):
        fv.grid(torch.zeros(1, 2, 4, 4), **options)


def test_grid_takes_one_layout_for_its_one_tensor() -> None:
    """Several layouts, or one for chosen layers, are refused, and not read by half."""
    message = "grid draws one tensor, which has one layout"
    for layouts in (["nchw", "nhwc"], "Conv2d=nhwc"):
        with pytest.raises(UsageError, match=message):
            fv.grid(torch.zeros(1, 3, 4, 5), tensor_layout=layouts)


def test_the_image_of_an_overlay_is_any_image(pixels: np.ndarray) -> None:
    """It is a PIL image, an array or a tensor."""
    maps = torch.rand(2, 5, 6)
    expected = fv.grid(maps, overlay=0.5, image=pixels)
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255
    for image in (Image.fromarray(pixels), tensor):
        assert_same_pixels(fv.grid(maps, overlay=0.5, image=image), expected)
    with pytest.raises(UsageError, match="an overlay takes one image, not 2"):
        fv.grid(maps, overlay=0.5, image=torch.rand(2, 3, 4, 4))
