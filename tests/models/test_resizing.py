"""Resizing in other ways, by rules that look at the image, and padding."""

from __future__ import annotations

import pytest
import torch
from conftest import SCENES
from PIL import Image
from torch import nn
from torchvision import models
from torchvision.transforms import InterpolationMode, v2

from featviz.errors import ImageError, UsageError
from featviz.models.preprocess import InputOptions, Preprocess
from featviz.models.presets import choose_preprocess
from featviz.models.resizing import Between, Inside, Longer, Multiples, Padding, SizeRule
from featviz.records import INTERPOLATIONS


@pytest.mark.parametrize("name", INTERPOLATIONS)
@pytest.mark.parametrize("of_bytes", [False, True], ids=["picture", "tensor"])
def test_interpolation_may_be_told(name: str, of_bytes: bool) -> None:
    """What torchvision's Resize gives for a picture or for a tensor, and the words say it."""
    base = Preprocess(20, None, None, None, as_transformers=of_bytes)
    chosen = choose_preprocess(nn.Identity(), base, InputOptions(interpolation=name))
    picture = Image.open(SCENES / "spheres.jpg").convert("RGB")
    given = v2.functional.pil_to_tensor(picture) if of_bytes else picture
    expected = v2.Resize(20, InterpolationMode(name), antialias=True)(given)
    expected = expected if of_bytes else v2.functional.pil_to_tensor(expected)
    assert torch.equal(chosen([picture])[0][0], expected / 255)
    assert f"({name})" in chosen.words


def test_lanczos_needs_smoothing() -> None:
    """torchvision's video models resize without antialiasing, which Lanczos cannot."""
    entry = models.video.R3D_18_Weights.DEFAULT
    with pytest.raises(UsageError, match="--interpolation lanczos smooths"):
        choose_preprocess(nn.Identity(), entry, InputOptions(interpolation="lanczos"))


RULES = [
    Longer(48),
    Between(32, 50),
    Between(32, 50, 7),
    Inside(30, 50),
    Multiples(40, 40, 7, True),
    Multiples(40, 60, 8, False),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.words)
@pytest.mark.parametrize("size", [(1, 1), (1, 999), (64, 64), (333, 500), (500, 333), (4000, 3)])
def test_rules_of_sizes(rule: SizeRule, size: tuple[int, int]) -> None:
    """No side vanishes, turning the image turns the size, and proportions are kept to a pixel."""
    height, width = rule(size)
    assert min(height, width) >= 1
    turned = rule if not isinstance(rule, (Inside, Multiples)) else None
    if turned is not None:
        assert turned(size[::-1]) == (width, height)
    step = getattr(rule, "multiple", 1)
    if getattr(rule, "proportions", True) and min(height, width) > step:
        assert abs(height - width * size[0] / size[1]) <= step * (1 + size[0] / size[1])


@pytest.mark.parametrize(
    ("padding", "border"),
    [
        (Padding((10, 12)), [0, 0, 7, 3]),
        (Padding((10, 12), centred=True), [3, 1, 4, 2]),
        (Padding(multiple=4), [0, 0, 3, 1]),
        (Padding((3, 3), multiple=2), [0, 0, 1, 1]),
    ],
)
def test_padding(padding: Padding, border: list[int]) -> None:
    """Left, top, right and bottom of an image of 7 × 5; what is larger already stays."""
    assert padding.border((7, 5)) == border
    left, top, right, bottom = border
    assert padding.padded((7, 5)) == (7 + top + bottom, 5 + left + right)


def test_an_image_may_not_become_huge() -> None:
    """A rule that keeps proportions refuses a narrow image, in the rule's words."""
    base = Preprocess(Between(800, 10**6), None, None, None)
    with pytest.raises(ImageError, match=r"1×900 pixels.*longer side to at most 1000000"):
        base([Image.new("RGB", (1, 900))])
