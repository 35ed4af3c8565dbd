"""Targets of segmentations, encoders and others against autograd by hand, and targets
that a model does not have."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from detectors import PLAIN, RedDetector, squares
from networks import Net
from small_models import assert_maps_equal, by_hand, kept_output, pixels, segformer
from torch import Tensor, nn
from torch.nn import functional

import featviz as fv
from featviz.drawing.outlines import with_outline
from featviz.errors import UsageError
from featviz.gradients.families import Reading, read
from featviz.models.load import adopt
from featviz.options import InputOptions


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


@pytest.fixture(scope="module")
def regions() -> nn.Module:
    """A segmentation of five classes."""
    return UNet(5).eval()


def sizes_of_classes(model: nn.Module) -> Tensor:
    """How many pixels each class wins, [5]."""
    winners = model(pixels()[None])[0].argmax(dim=0)
    return winners.flatten().bincount(minlength=5)


def largest_region(model: nn.Module) -> int:
    """The class of the largest region besides class 0."""
    return int(sizes_of_classes(model)[1:].argmax()) + 1


def smallest_region(model: nn.Module) -> int:
    return int(sizes_of_classes(model).argmin())


@pytest.mark.medium
@pytest.mark.parametrize("method", ["gradcam", "layercam"])
@pytest.mark.parametrize(
    ("target", "region"), [(None, largest_region), ("class:{}", smallest_region)]
)
def test_a_region_is_explained_by_the_sum_of_its_logits(
    target: str | None,
    region: Callable[[nn.Module], int],
    method: str,
    regions: nn.Module,
) -> None:
    """There is a map at the bottleneck and at the last layer before the logits."""
    x = pixels()
    index = region(regions)
    low = kept_output(regions.down)
    last = kept_output(regions.up)
    scores = regions(x[None])[0]
    mask = scores.argmax(dim=0) == index
    number = scores[index][mask].sum()

    page = fv.cam(regions, x, target and target.format(index), method, **PLAIN)

    assert [layer_map.layer for layer_map in page.maps] == ["down", "up"]
    assert_maps_equal(page.maps[0].tensor, by_hand(low[0], number, method))
    assert_maps_equal(page.maps[1].tensor, by_hand(last[0], number, method))
    result = page.images[0]
    assert result.outcome.target == pytest.approx(number.item(), rel=1e-5)
    assert np.array_equal(result.shown, outlined(x, mask))
    assert result.shown_title == f"input, with the edge of class {index}"


def outlined(image: Tensor, mask: Tensor) -> np.ndarray:
    """The picture of an image [3, H, W], 0..1, with the edge of a region."""
    levels = (image * 255).round().byte().permute(1, 2, 0)
    return with_outline(levels.numpy(), mask.long().numpy())


@pytest.mark.medium
def test_a_pixel_is_the_logit_of_the_class_that_wins_it(regions: nn.Module) -> None:
    """`pixel:X,Y` counts from the upper corner at the start of each row, here of 40
    rows of 64 pixels."""
    x = pixels()[:, :40]
    result = fv.cam(regions, x, "pixel:50,9", preset="none").images[0]
    expected = regions(x[None])[0, :, 9, 50].max().item()
    assert result.outcome.target == pytest.approx(expected, rel=1e-5)


@pytest.mark.medium
def test_a_pixel_outside_of_the_image_is_answered_with_its_middle(
    regions: nn.Module,
) -> None:
    """X counts the 64 columns, and Y the 40 rows."""
    x = pixels()[:, :40]
    for target in ("pixel:64,0", "pixel:0,40"):
        with pytest.raises(UsageError, match="the input has 64×40 pixels") as caught:
            fv.cam(regions, x, target, preset="none")
        assert str(caught.value.hint).endswith("pixel:32,20")


@pytest.mark.parametrize(("channels", "noun"), [(3, "channel"), (4, "class")])
def test_a_channel_of_what_may_be_a_picture_is_no_class(
    channels: int, noun: str
) -> None:
    """Three channels may be colours; more are scores of classes."""
    model = UNet(channels).eval()
    x = pixels()
    index = int(model(x[None])[0].argmax(dim=0).flatten().mode().values)
    result = fv.cam(model, x, f"class:{index}", **PLAIN).images[0]
    assert result.target == f"{noun} {index}"


def test_a_segmentation_of_one_class_is_the_mean_of_its_pixels() -> None:
    """Those above zero are meant."""
    model = UNet(1).eval()
    x = pixels()
    result = fv.cam(model, x, **PLAIN).images[0]
    scores = model(x[None])[0, 0]
    expected = scores[scores > 0].mean().item()
    assert result.outcome.target == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("classes", [1, 5])
def test_a_share_is_of_all_pixels(classes: int) -> None:
    """Pixels count that no class wins, which there are where one class is alone."""
    model = UNet(classes).eval()
    x = pixels()
    output = model(x[None])
    reading = read(adopt(model, InputOptions(preset="none")), output, x[None])
    scores = output[0].detach().numpy()
    winners = scores.argmax(axis=0) if classes > 1 else (scores[0] > 0) - 1
    expected = [(winners == index).sum() / winners.size for index in range(classes)]
    assert reading is not None
    assert reading.regions is not None
    assert 0 < expected[0] < 1
    shares = [reading.regions.share(index) for index in range(classes)]
    assert shares == pytest.approx(expected)


def test_a_region_has_an_outline() -> None:
    """Pixels inside the region, next to those outside, are light; elsewhere the picture
    is untouched."""
    mask = np.zeros((8, 8), np.int64)
    mask[2:6, 2:6] = 1
    grey = np.full((32, 32, 3), 90, np.uint8)

    drawn = with_outline(grey, mask)

    light = (drawn == 255).all(axis=2)
    assert light[8, 8:24].all()
    assert light[8:24, 8].all()
    outside = np.kron(mask, np.ones((4, 4))) == 0
    assert (drawn[outside] == 90).all()
    assert (drawn[11:21, 11:21] == 90).all()


@pytest.mark.slow
def test_a_segformer_is_explained_before_its_logits() -> None:
    """A second call gives the same: hooks that the library places on its model do not
    pile up."""
    model: Any = segformer()
    x = pixels()
    layer = model.decode_head.activation

    fv.cam(model, x, **PLAIN)
    page = fv.cam(model, x, **PLAIN)

    assert [layer_map.layer for layer_map in page.maps] == ["decode_head.activation"]
    outputs = kept_output(layer)
    scores = model(x[None]).logits[0]
    index = int(page.images[0].target.removeprefix("class "))
    number = scores[index][scores.argmax(dim=0) == index].sum()
    assert_maps_equal(page.tensor, by_hand(outputs[0], number, "gradcam"))


# Defaults of the others, and refusals


def convolution(output: Callable[[Tensor], Any], classes: int = 0) -> nn.Module:
    """A convolution, and what a function makes of its output."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, padding=1)
    model = Net(lambda self, x: output(self.conv(x)), conv=conv)
    model.num_classes = classes
    return model.eval()


def mean(maps: Tensor) -> Tensor:
    """An embedding [1, C]."""
    return maps.mean(dim=(2, 3))


def coarse(maps: Tensor) -> Tensor:
    """A map of fewer places."""
    return functional.avg_pool2d(maps, 16)


OTHERS: dict[str, nn.Module] = {
    "embedding": convolution(mean),
    "pooled": convolution(lambda maps: {"pooler_output": mean(maps)}),
    "map": convolution(coarse),
    "depth": convolution(lambda maps: maps[:, 0]),
    "heat maps": convolution(lambda maps: {"heatmaps": maps}),
    "classifier": convolution(mean, classes=4),
}


@pytest.mark.parametrize(
    ("name", "target", "number"),
    [
        ("embedding", None, lambda maps: mean(maps).norm()),
        ("pooled", None, lambda maps: mean(maps).norm()),
        ("map", None, lambda maps: coarse(maps).norm()),
        ("depth", None, lambda maps: maps[:, 0].mean()),
        ("depth", "pixel:3,5", lambda maps: maps[0, 0, 5, 3]),
        ("heat maps", None, lambda maps: maps.max()),
        ("heat maps", "keypoint:2", lambda maps: maps[0, 2].max()),
    ],
)
def test_encoders_depth_and_heat_maps_have_defaults(
    name: str, target: str | None, number: Callable[[Tensor], Tensor]
) -> None:
    """The norm of an embedding or a map, the mean of a depth, the strongest peak."""
    model = OTHERS[name]
    x = pixels()
    maps = model.conv(x[None])
    expected = number(maps)
    (gradient,) = torch.autograd.grad(expected, maps)

    page = fv.cam(model, x, target, "gradxact", layers="conv", **PLAIN)

    value = page.images[0].outcome.target
    assert value == pytest.approx(expected.item(), rel=1e-5)
    assert_maps_equal(page.tensor, (gradient * maps).sum(dim=1)[0].detach())


MODELS: dict[str, nn.Module] = {
    **OTHERS,
    "detector": RedDetector(),
    "regions": UNet(5),
    "one region": UNet(1),
}
WRONG = {
    "detector": "top1 box:2 box:dog class:0 class:5 class:dog pixel:3,3 keypoint keypoint:1 sum",
    "regions": "box box:1 class:5 class:dog pixel:64,0 pixel:0,64 keypoint keypoint:3",
    "one region": "box box:0 class:1 class:dog pixel:64,64 pixel:9999,0 keypoint",
    "embedding": "top1 class:3 class:dog box box:1 pixel:1,1 keypoint",
    "pooled": "top1 class:0 box box:cat pixel:5,5 keypoint keypoint:1",
    "depth": "top1 class:3 box box:dog pixel:64,3 keypoint",
    "heat maps": "keypoint:4 keypoint:99 top1 class:2 box pixel:3,3",
    "classifier": "class:4 class:dog box box:1 pixel:3,3 keypoint keypoint:2",
}
"""Targets that the models do not have."""


def image_for(name: str) -> Any:
    """An image that a model answers for."""
    return squares(0)[0] if name == "detector" else pixels()


@cache
def has_maps(name: str, target: str) -> bool:
    """Whether a model is explained for a target; the hints of most wrong targets list
    the same ones."""
    return bool(fv.cam(MODELS[name].eval(), image_for(name), target, **PLAIN).maps)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "target"),
    [(name, target) for name, targets in WRONG.items() for target in targets.split()],
)
def test_a_wrong_target_is_answered_with_targets_of_this_model(
    name: str, target: str
) -> None:
    """Each that the hint lists works, and so do both ends of `class:0 to class:3`."""
    model = MODELS[name].eval()

    with pytest.raises(UsageError) as caught:
        fv.cam(model, image_for(name), target, **PLAIN)

    assert f"target '{target}'" in caught.value.message
    assert caught.value.hint is not None
    listed = caught.value.hint.partition("targets here: ")[2]
    for text in listed.replace("'", "").replace(" to ", ", ").split(", "):
        assert has_maps(name, text), text


class Queries(UNet):
    """A detector of transformers for three classes, by what it says of itself."""

    config = SimpleNamespace(num_labels=3)


def reading_of(output: Any, size: tuple[int, int], model: nn.Module) -> Reading:
    """An output of a model for an image of this height and width, as it is read."""
    loaded = adopt(model, InputOptions(preset="none"))
    reading = read(loaded, output, torch.zeros(1, 3, *size))
    assert reading is not None
    return reading


def test_there_are_as_many_boxes_as_queries() -> None:
    """Where each class has a sigmoid of its own, as `post_process_object_detection` of
    RT-DETR has it: the best of all classes, one query twice."""
    output = {
        "logits": torch.tensor([[[3.0, 2.5, -1.0], [1.0, 2.0, -2.0]]]),
        "pred_boxes": torch.tensor([[[0.5, 0.5, 0.2, 0.4], [0.1, 0.1, 0.1, 0.1]]]),
    }
    first, second = reading_of(output, (10, 20), Queries(3)).detections
    assert (first.index, second.index) == (0, 1)
    assert first.box == second.box == pytest.approx((8, 3, 12, 7))
    assert second.score == pytest.approx(1 / (1 + np.exp(-2.5)))


def test_boxes_that_are_not_finite_are_none() -> None:
    """They could neither be drawn nor be written as JSON."""
    boxes = torch.tensor([[0, 0, np.nan, 4], [1, 2, 3, 4], [0, np.inf, 3, 4]])
    labels = torch.tensor([1, 2, 1])
    output = [
        {"boxes": boxes, "labels": labels, "scores": torch.tensor([0.9, 0.8, 0.7])}
    ]
    (detection,) = reading_of(output, (10, 20), UNet(1)).detections
    assert (detection.index, detection.box) == (2, (1, 2, 3, 4))


def turned_detector() -> nn.Module:
    """A detector of turned boxes of one class, by what Ultralytics calls its parts."""
    head = type("OBB", (nn.Conv2d,), {"nc": 1})(3, 1, 1)
    parts = {"__module__": "ultralytics.nn.tasks"}
    detector = type("DetectionModel", (nn.Module,), parts)()
    detector.model = nn.ModuleList([head])
    return detector


@pytest.mark.parametrize(
    ("angle", "box"),
    [
        (0, (30, 35, 70, 45)),
        (np.pi / 2, (45, 20, 55, 60)),
        (-np.pi / 4, (32.32, 22.32, 67.68, 57.68)),
    ],
)
def test_a_turned_box_has_the_upright_one_around_it(
    angle: float, box: tuple[float, ...]
) -> None:
    """Of 40 × 10 pixels around (50, 40)."""
    pytest.importorskip("ultralytics", reason="its suppression decodes boxes")
    output = torch.tensor([50, 40, 40, 10, 0.9, angle])[None, :, None]
    (detection,) = reading_of(output, (80, 100), turned_detector()).detections
    assert detection.box == pytest.approx(box, abs=0.01)


@pytest.mark.parametrize(
    ("channels", "output"),
    [
        (1, lambda maps: maps[:, 0]),
        (3, lambda maps: {"out": maps}),
        (3, lambda maps: {"heatmaps": maps}),
    ],
    ids=["depth", "segmentation", "poses"],
)
def test_the_answer_is_no_evidence_for_itself(
    channels: int, output: Callable[[Tensor], Any]
) -> None:
    """By default the layer before the one that gives it is shown."""
    torch.manual_seed(0)
    model = Net(
        lambda self, x: output(self.head(self.body(x))),
        body=nn.Conv2d(3, 6, 3, padding=1),
        head=nn.Conv2d(6, channels, 1),
    )
    page = fv.cam(model, pixels(), **PLAIN)
    assert [layer_map.layer for layer_map in page.maps] == ["body"]


@pytest.mark.parametrize(
    ("shape", "title"),
    [
        ((33, 64, 64), "a segmentation"),
        ((32, 32, 32), "a segmentation"),
        ((32, 16, 16), "a segmentation"),
        ((33, 16, 16), "an encoder"),
        ((5, 8, 8), "an encoder"),
        ((5, 32, 16), "an encoder"),
    ],
)
def test_maps_of_few_channels_are_scores(shape: tuple[int, ...], title: str) -> None:
    """In the size of the input of 64 pixels, or a half or a quarter of it."""
    reading = reading_of(torch.zeros(1, *shape), (64, 64), UNet(1))
    assert reading.family.title == title
