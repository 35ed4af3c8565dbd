"""Targets of segmentations, encoders and others against autograd by hand, and targets
that a model does not have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from detectors import PLAIN, RedDetector, squares
from small_models import assert_maps_equal, by_hand, kept_output, pixels, segformer
from torch import Tensor, nn
from torch.nn import functional

import featviz as fv
from featviz.errors import FeatvizError, UsageError


class UNet(nn.Module):
    """A U-Net of two levels."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU())
        self.up = nn.Sequential(nn.Conv2d(11, 6, 3, padding=1), nn.ReLU())
        self.out = nn.Conv2d(6, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        low = functional.interpolate(self.down(x), scale_factor=2)
        scores: Tensor = self.out(self.up(torch.cat([low, x], dim=1)))
        return scores - scores.mean(dim=(2, 3), keepdim=True)


@pytest.mark.parametrize("method", ["gradcam", "layercam"])
def test_a_region_is_explained_by_the_sum_of_its_logits(method: str) -> None:
    """At the bottleneck and at the last layer before the logits; by default the largest
    region besides class 0, or a class by its number."""
    model = UNet(5).eval()
    x = pixels()
    scores = model(x[None])[0]
    counts = scores.argmax(dim=0).flatten().bincount(minlength=5)
    largest = int(counts[1:].argmax()) + 1
    other = int(counts.argmin()) if counts.min() > 0 else 0
    for target, index in ((None, largest), (f"class:{other}", other)):
        found = fv.cam(model, x, target, method, **PLAIN)
        assert [layer_map.layer for layer_map in found.maps] == ["down", "up"]
        low, last = kept_output(model.down), kept_output(model.up)
        scores = model(x[None])[0]
        number = scores[index][scores.argmax(dim=0) == index].sum()
        assert found.images[0].outcome.target == pytest.approx(float(number), rel=1e-5)
        assert_maps_equal(found.maps[0].tensor, by_hand(low[0], number, method))
        assert_maps_equal(found.maps[1].tensor, by_hand(last[0], number, method))
        focus = found.images[0].outcome.focus
        assert (focus == (scores.argmax(dim=0) == index).numpy()).all()


def test_a_pixel_and_a_model_of_one_class() -> None:
    """A pixel is the logit of the class that wins it; one class alone is the mean over
    the pixels above zero."""
    five, one = UNet(5).eval(), UNet(1).eval()
    x = pixels()
    pixel = fv.cam(five, x, "pixel:20,9", **PLAIN).images[0]
    assert pixel.outcome.target == pytest.approx(
        float(five(x[None])[0, :, 9, 20].max()), rel=1e-5
    )
    scores = one(x[None])[0, 0]
    found = fv.cam(one, x, **PLAIN).images[0]
    assert found.outcome.target == pytest.approx(
        float(scores[scores > 0].mean()), rel=1e-5
    )


def test_a_region_has_an_outline() -> None:
    """Light pixels inside the region, next to those outside; elsewhere the picture is
    untouched."""
    from featviz.drawing.outlines import with_outline

    mask = np.zeros((8, 8), np.int64)
    mask[2:6, 2:6] = 1
    grey = np.full((32, 32, 3), 90, np.uint8)
    drawn = with_outline(grey, mask)
    inside = np.kron(mask, np.ones((4, 4))) > 0
    light = (drawn == 255).all(axis=2)
    assert light[8, 8:24].all() and light[8:24, 8].all()
    assert not light[~inside].any()
    assert (drawn[~inside] == 90).all()
    assert (drawn[11:21, 11:21] == 90).all()


@pytest.mark.slow
def test_a_segformer_is_explained_before_its_logits() -> None:
    """Again for a second call: hooks that the library places on its model do not pile
    up."""
    model: Any = segformer()
    x = pixels()
    for _ in range(2):
        found = fv.cam(model, x, **PLAIN)
        assert [layer_map.layer for layer_map in found.maps] == [
            "decode_head.activation"
        ]
    kept = kept_output(model.decode_head.activation)
    scores = model(x[None]).logits[0]
    winners = scores.argmax(dim=0)
    index = int(found.images[0].target.removeprefix("class "))
    number = scores[index][winners == index].sum()
    assert_maps_equal(found.tensor, by_hand(kept[0], number, "gradcam"))


# Defaults of the others, and refusals


class Returns(nn.Module):
    """A convolution, and what a function makes of its output."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.output = output
        self.num_classes = 0

    def forward(self, x: Tensor) -> Any:
        return self.output(self.conv(x))


OTHERS = {
    "embedding": Returns(lambda maps: maps.mean(dim=(2, 3))),
    "pooled": Returns(lambda maps: {"pooler_output": maps.mean(dim=(2, 3))}),
    "map": Returns(lambda maps: functional.avg_pool2d(maps, 16)),
    "depth": Returns(lambda maps: maps[:, 0]),
    "heat maps": Returns(lambda maps: {"heatmaps": maps}),
}


@pytest.mark.parametrize(
    ("name", "target", "number"),
    [
        ("embedding", None, lambda maps: maps.mean(dim=(2, 3)).norm()),
        ("pooled", None, lambda maps: maps.mean(dim=(2, 3)).norm()),
        ("map", None, lambda maps: functional.avg_pool2d(maps, 16).norm()),
        ("depth", None, lambda maps: maps[:, 0].mean()),
        ("depth", "pixel:3,5", lambda maps: maps[0, 0, 5, 3]),
        ("heat maps", None, lambda maps: maps.max()),
        ("heat maps", "keypoint:2", lambda maps: maps[0, 2].max()),
    ],
)
def test_encoders_depth_and_heat_maps_have_defaults(
    name: str, target: Any, number: Any
) -> None:
    """The norm of an embedding or a map, the mean of a depth, the strongest peak."""
    model = OTHERS[name]
    x = pixels()
    found = fv.cam(model, x, target, "gradxact", layers="conv", **PLAIN)
    maps = model.conv(x[None])
    assert found.images[0].outcome.target == pytest.approx(
        float(number(maps)), rel=1e-5
    )
    expected = (
        (torch.autograd.grad(number(maps), maps)[0] * maps).sum(dim=1)[0].detach()
    )
    assert_maps_equal(found.tensor, expected)


OTHERS["classifier"] = Returns(lambda maps: maps.mean(dim=(2, 3)))
OTHERS["classifier"].num_classes = 4

WRONG: dict[str, tuple[nn.Module, str]] = {
    "detector": (
        RedDetector(),
        "top1 box:2 box:99 box:dog class:5 class:dog pixel:3,3 keypoint keypoint:1 mean"
        " sum norm",
    ),
    "regions": (
        UNet(5),
        "box box:1 box:dog class:5 class:dog pixel:64,0 pixel:0,64 keypoint keypoint:3",
    ),
    "one region": (
        UNet(1),
        "box box:0 class:1 class:dog pixel:64,64 pixel:9999,0 keypoint keypoint:0",
    ),
    "embedding": (
        OTHERS["embedding"],
        "top1 class:3 class:dog box box:1 pixel:1,1 keypoint",
    ),
    "pooled": (
        OTHERS["pooled"],
        "top1 class:0 box box:cat pixel:5,5 keypoint keypoint:1",
    ),
    "depth": (OTHERS["depth"], "top1 class:3 box box:dog pixel:64,3 keypoint"),
    "heat maps": (
        OTHERS["heat maps"],
        "keypoint:4 keypoint:99 top1 class:2 box pixel:3,3",
    ),
    "classifier": (
        OTHERS["classifier"],
        "class:4 class:dog box box:1 pixel:3,3 keypoint keypoint:2",
    ),
}
"""Models, and targets that they do not have: more than sixty."""


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, target) for name, (_, wrong) in WRONG.items() for target in wrong.split()],
)
def test_a_wrong_target_is_answered_with_targets_of_this_model(
    name: str, target: str
) -> None:
    """Each that the hint lists works."""
    model = WRONG[name][0].eval()
    x = squares(0)[0] if name == "detector" else pixels()
    with pytest.raises(FeatvizError) as caught:
        fv.cam(model, x, target, **PLAIN)
    assert isinstance(caught.value, UsageError)
    assert f"target '{target}'" in caught.value.message
    assert caught.value.hint is not None
    _, mark, listed = caught.value.hint.partition("targets here: ")
    assert mark, caught.value.hint
    for text in listed.replace("'", "").split(", "):
        assert fv.cam(model, x, text, **PLAIN).maps


def test_look_draws_the_boxes_and_the_regions(tmp_path: Any) -> None:
    """The picture of the input changes where boxes are; a legend has the regions'
    shares."""
    image, _ = squares(5)
    seen = fv.look(RedDetector(), image, out=tmp_path / "boxes.png", **PLAIN)
    assert [box.index for box in seen.detections] == [1, 1]
    regions = fv.look(UNet(5), pixels(), out=tmp_path / "regions.png", **PLAIN)
    assert regions.detections == ()
    assert (tmp_path / "boxes.png").is_file() and (tmp_path / "regions.png").is_file()
