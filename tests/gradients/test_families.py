"""Targets of detectors, segmentations and encoders, against autograd by hand, the
libraries' own decoders, and a detector whose evidence is known."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional

import featviz as fv
from featviz.errors import FeatvizError, UsageError
from featviz.gradients.families import NothingFoundError

SIDE = 64
CELL = 8
PLAIN: dict[str, Any] = {"preset": "none", "size": SIDE}


class RedDetector(nn.Module):
    """Finds red squares: the two cells of 8×8 pixels that are reddest are boxes of
    class 1."""

    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv2d(3, 2, 1, bias=False)
        conv.weight.data = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, 1.0]]).view(
            2, 3, 1, 1
        )
        self.backbone = nn.Sequential(conv, nn.AvgPool2d(CELL), nn.ReLU())

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        redness = self.backbone(x)[0, 0].flatten()
        scores, cells = redness.topk(2)
        top = cells // CELL * CELL
        left = cells % CELL * CELL
        boxes = torch.stack((left, top, left + CELL, top + CELL), dim=1).float()
        labels = torch.ones(2, dtype=torch.long)
        return [{"boxes": boxes, "labels": labels, "scores": scores}]


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


def squares(seed: int) -> tuple[Image.Image, list[tuple[int, int]]]:
    """Two red squares on grey, the brighter one first; their cells (x, y)."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (SIDE, SIDE), (90, 90, 90))
    draw = ImageDraw.Draw(image)
    cells = rng.choice(CELL * CELL, 2, replace=False)
    corners = []
    for cell, red in zip(cells, (250, 200), strict=True):
        x, y = int(cell) % CELL, int(cell) // CELL
        corner = (x * CELL, y * CELL, x * CELL + CELL - 1, y * CELL + CELL - 1)
        draw.rectangle(corner, fill=(red, 0, 0))
        corners.append((x, y))
    return image, corners


@pytest.mark.parametrize("seed", range(20))
def test_the_map_of_a_box_peaks_in_the_box(seed: int) -> None:
    """Of the first box by default, and of the second by its number; both are where
    squares are."""
    image, corners = squares(seed)
    model = RedDetector()
    for target, (x, y) in zip((None, "box:1"), corners, strict=True):
        found = fv.cam(model, image, target, "layercam", **PLAIN)
        values = found.tensor.numpy()
        assert values.shape == (CELL, CELL)
        assert np.unravel_index(values.argmax(), values.shape) == (y, x)
        assert np.count_nonzero(values) == 1
        focus = found.images[0].outcome.focus
        assert focus.box == (x * CELL, y * CELL, x * CELL + CELL, y * CELL + CELL)


def test_a_box_is_drawn_on_its_map_and_on_the_input() -> None:
    """Its edge is light inside dark; without it the pictures are as they were."""
    image, ((x, y), _) = squares(3)
    found = fv.cam(RedDetector(), image, overlay=0, **PLAIN)
    drawn = np.asarray(found.image)
    assert (found.images[0].shown == drawn).all()
    left, top = x * CELL, y * CELL
    assert (drawn[top, left : left + CELL] == 0).all()
    assert (drawn[top + 1, left + 1 : left + CELL - 1] == 255).all()
    inside = np.ones((SIDE, SIDE), bool)
    inside[top : top + CELL + 1, left : left + CELL + 1] = False
    assert (drawn[inside] == np.asarray(image)[inside]).all()


def by_hand(output: Tensor, number: Tensor, method: str) -> Tensor:
    """Grad-CAM or LayerCAM of a layer's output [1, C, H, W]."""
    gradient = torch.autograd.grad(number, output, retain_graph=True)[0]
    weights = (
        gradient.mean(dim=(2, 3), keepdim=True)
        if method == "gradcam"
        else gradient.relu()
    )
    return (weights * output).sum(dim=1)[0].relu().detach()


def kept_output(module: nn.Module) -> list[Tensor]:
    """Where the output of a module will be."""
    outputs: list[Tensor] = []
    module.register_forward_hook(lambda module, args, output: outputs.append(output))
    return outputs


def pixels(side: int = SIDE) -> Tensor:
    """Noise, 0..1, [3, H, W], of whole levels as pictures have them."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (3, side, side), generator=generator) / 255


def assert_maps_equal(found: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest value."""
    scale = float(expected.abs().max())
    assert scale > 0
    assert float((found - expected).abs().max()) <= 1e-5 * scale


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


# Ultralytics


def yolo(name: str = "yolo11n.yaml", confident: bool = True) -> Any:
    """A detector with random weights, whose classes are likely enough to give boxes."""
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    torch.manual_seed(0)
    model = tasks.DetectionModel(name, verbose=False).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if confident:
        for branch in model.model[-1].cv3:
            branch[-1].weight *= 1000
            branch[-1].bias[:] = 0
    return model


@pytest.mark.slow
def test_boxes_of_yolo_have_the_logit_of_their_anchor() -> None:
    """Grad-CAM and LayerCAM of two boxes at all levels that enter the head, by hand;
    the loader's frozen parameters do not matter."""
    model = yolo()  # skips without Ultralytics
    from ultralytics.utils.nms import non_max_suppression

    x = pixels()
    levels = [kept_output(model.model[index]) for index in (16, 19, 22)]
    y, extra = model(x[None].clone().requires_grad_())
    (rows,), (kept,) = non_max_suppression(
        y.detach(), 0.25, 0.7, return_idxs=True, nc=80
    )  # fmt: skip
    assert len(rows) > 1
    for number in (0, 1):
        anchor, index = int(kept[number]), int(rows[number, 5])
        logit = extra["scores"][0, index, anchor]
        for method in ("gradcam", "layercam"):
            found = fv.cam(model, x, f"box:{number}", method, preset="none")
            expected = {
                f"model.{index}": by_hand(level[0], logit, method)
                for index, level in zip((16, 19, 22), levels, strict=True)
            }
            for layer_map in found.maps:
                assert_maps_equal(layer_map.tensor, expected[layer_map.layer])
            detections = found.images[0].outcome.detections
            assert len(detections) == len(rows)
            assert detections[number].box == pytest.approx(
                rows[number, :4].tolist(), abs=0.01
            )
            assert found.images[0].outcome.target == pytest.approx(
                float(logit), rel=1e-5
            )
        # a box at one level is not of the others
        assert (found.images[0].maximum is None) == (len(found.maps) == 1)
        assert found.image.size == (SIDE, SIDE)


@pytest.mark.slow
def test_a_yolo_without_boxes_shows_its_strongest_anchor() -> None:
    """The title says that it is no box; and `box` names targets that there are."""
    model = yolo(confident=False)
    x = pixels()
    title = fv.cam(model, x, preset="none").images[0].title
    assert re.search(r"class \d+ .* \(below 0.25: no box\)", title)
    with pytest.raises(
        NothingFoundError, match=r"no box above the threshold of 0.25; the highest"
    ):
        fv.cam(model, x, "box", preset="none")


# transformers


def detr(**changes: Any) -> Any:
    """A small DETR whose queries are sure of their class."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 8, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_queries=9,
        num_labels=4,
        **changes,
    )
    model = transformers.DetrForObjectDetection(config).eval()
    model.class_labels_classifier.weight.data *= 40
    return model


@pytest.mark.slow
def test_boxes_of_detr_are_those_of_its_processor() -> None:
    """Boxes, classes and scores; the number is the logit of the query, without "no
    object"; the names are those of the config."""
    transformers = pytest.importorskip("transformers")
    model = detr(id2label={0: "cat", 1: "dog", 2: "bird", 3: "fish"})
    x = pixels()
    output = model(x[None])
    (theirs,) = transformers.DetrImageProcessor().post_process_object_detection(
        output, threshold=0.5, target_sizes=[(SIDE, SIDE)]
    )
    order = theirs["scores"].argsort(descending=True)
    assert len(order) > 0
    found = fv.cam(model, x, **PLAIN)
    ours = found.images[0].outcome.detections
    assert [box.index for box in ours] == theirs["labels"][order].tolist()
    for box, number in zip(ours, order, strict=True):
        assert box.score == pytest.approx(float(theirs["scores"][number]), abs=1e-5)
        assert box.box == pytest.approx(theirs["boxes"][number].tolist(), abs=0.01)
    query = int(output.logits[0].softmax(-1)[:, :-1].amax(dim=1).argmax())
    logit = output.logits[0, query, ours[0].index]
    assert found.images[0].outcome.target == pytest.approx(float(logit), rel=1e-4)
    assert found.images[0].target.startswith(("cat ", "dog ", "bird ", "fish "))
    assert [layer_map.layer for layer_map in found.maps] == ["model.input_projection"]


@pytest.mark.slow
def test_a_segformer_is_explained_before_its_logits() -> None:
    """Again for a second call: hooks that the library places on its model do not pile
    up."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        num_labels=4,
    )
    model = transformers.SegformerForSemanticSegmentation(config).eval()
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


WRONG = {
    "detector": (RedDetector(), ("top1", "box:2", "box:dog", "class:5", "class:dog", "pixel:3,3",
                                 "keypoint", "mean", "sum", "norm", "keypoint:1", "box:99")),
    "regions": (UNet(5), ("box", "box:1", "box:dog", "class:5", "class:dog", "pixel:64,0",
                          "pixel:0,64", "keypoint", "keypoint:3")),
    "embedding": (OTHERS["embedding"], ("top1", "class:3", "class:dog", "box", "box:1", "pixel:1,1",
                                        "keypoint")),
    "depth": (OTHERS["depth"], ("top1", "class:3", "box", "box:dog", "pixel:64,3", "keypoint")),
    "heat maps": (OTHERS["heat maps"], ("keypoint:4", "top1", "class:2", "box", "pixel:3,3")),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, target) for name, (_, wrong) in WRONG.items() for target in wrong],
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


def test_boxes_are_in_pixels_of_the_file() -> None:
    """A file of twice the size has its boxes twice as large, also in JSON."""
    small, ((x, y), _) = squares(5)
    image = small.resize((2 * SIDE, 2 * SIDE), Image.Resampling.NEAREST)
    found = fv.cam(RedDetector(), image, **PLAIN).images[0]
    box = (2 * x * CELL, 2 * y * CELL, 2 * (x + 1) * CELL, 2 * (y + 1) * CELL)
    assert found.detections[0].box == pytest.approx(box)
    first, second = found.as_json()["detections"]
    assert first["box"] == pytest.approx(box)
    assert (first["index"], first["name"]) == (1, None)
    assert first["score"] > second["score"]


def test_look_draws_the_boxes_and_the_regions(tmp_path: Any) -> None:
    """The picture of the input changes where boxes are; a legend has the regions'
    shares."""
    image, _ = squares(5)
    seen = fv.look(RedDetector(), image, out=tmp_path / "boxes.png", **PLAIN)
    assert [box.index for box in seen.detections] == [1, 1]
    regions = fv.look(UNet(5), pixels(), out=tmp_path / "regions.png", **PLAIN)
    assert regions.detections == ()
    assert (tmp_path / "boxes.png").is_file() and (tmp_path / "regions.png").is_file()
