"""Boxes of detectors: a detector whose evidence is known, the libraries' own decoders,
and maps by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from detectors import CELL, PLAIN, SIDE, Pyramid, RedDetector, squares
from PIL import Image
from small_models import (
    TORCHVISION,
    assert_maps_equal,
    by_hand,
    detr,
    kept_output,
    noise,
    pixels,
    retinanet,
    rtdetr,
    sure_yolo,
    unsure_yolo,
)
from torch import Tensor
from torch.nn import functional

import featviz as fv
from featviz.gradients.answers import NothingFoundError
from featviz.records import Detection

pytestmark = pytest.mark.medium


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("target", "rank"), [(None, 0), ("box:1", 1)])
def test_the_map_of_a_box_peaks_in_the_box(
    target: str | None, rank: int, seed: int
) -> None:
    """The first box is the default, the second has number 1; both are where the squares
    are."""
    image, drawn = squares(seed)
    square = drawn[rank]

    page = fv.cam(RedDetector(), image, target, "layercam", **PLAIN)

    values = page.tensor.numpy()
    assert values.shape == (CELL, CELL)
    assert np.argwhere(values).tolist() == [[square.y // CELL, square.x // CELL]]
    assert page.images[0].detections[rank].box == square.box()


class SharedBackbone(RedDetector):
    """Its backbone has another name, too, which comes first."""

    def __init__(self) -> None:
        super().__init__()
        backbone = self._modules.pop("backbone")
        self.features = backbone
        self.backbone = backbone


def test_a_backbone_of_two_names_is_found() -> None:
    """Of a detector the layer is its `backbone`, also where that is the second name."""
    image, _ = squares(0)
    page = fv.cam(SharedBackbone(), image, None, "layercam", **PLAIN)
    expected = fv.cam(RedDetector(), image, None, "layercam", **PLAIN)
    assert torch.equal(page.tensor, expected.tensor)


def test_a_yolo_whose_head_counts_back_is_explained() -> None:
    """A head of `[[-1], 1, Detect, [nc]]` takes the maps of the module before it."""
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    layers = [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 3, 2]]]
    head = [[[-1], 1, "Detect", ["nc"]]]
    config = {"nc": 3, "backbone": layers, "head": head}
    model = tasks.DetectionModel(config, verbose=False).eval()
    page = fv.cam(model, squares(0)[0], size=SIDE)
    assert [layer_map.layer for layer_map in page.maps] == ["model.1"]


def test_a_box_is_drawn_on_its_map_and_on_the_input() -> None:
    """Its edge is light inside dark; around it the picture is untouched."""
    image, (square, _) = squares(3)

    page = fv.cam(RedDetector(), image, overlay=0, **PLAIN)

    drawn = np.asarray(page.image)
    assert np.array_equal(page.images[0].shown, drawn)
    x0, y0, x1, y1 = square.box()
    assert (drawn[y0, x0:x1] == 0).all()
    assert (drawn[y0 + 1, x0 + 1 : x1 - 1] == 255).all()
    outside = np.ones((SIDE, SIDE), bool)
    outside[y0 : y1 + 1, x0 : x1 + 1] = False
    assert np.array_equal(drawn[outside], np.asarray(image)[outside])


@pytest.mark.parametrize(("method", "lowest"), [("gradxact", -1), ("layercam", 0)])
def test_levels_of_a_head_share_a_scale(method: str, lowest: int) -> None:
    """From zero, or with zero in the middle where evidence may speak against a box, to
    the greatest value of all levels; so has the maximum over them."""
    image, _ = squares(2)

    (result,) = fv.cam(Pyramid(), image, None, method, **PLAIN).images

    fine, coarse = result.maps
    assert fine.tensor.shape == (CELL, CELL)
    assert coarse.tensor.shape == (CELL // 2, CELL // 2)
    assert (coarse.tensor.min() < 0) == (lowest < 0)
    greatest = max(float(level.tensor.abs().max()) for level in result.maps)
    assert result.maximum is not None
    for level in (fine, coarse, result.maximum):
        assert level.limits == pytest.approx((lowest * greatest, greatest))


def test_the_file_of_a_box_begins_with_the_maximum_over_the_levels() -> None:
    """Behind the input, and in front of the levels."""
    image, _ = squares(2)
    options = {"method": "gradxact", "out": Path("cam"), **PLAIN}
    (result,) = fv.cam(Pyramid(), [image], "box", **options).images
    expected = [result.shown, result.maximum.picture]
    expected += [level.picture for level in result.maps]

    with Image.open(result.path) as opened:
        page = np.asarray(opened.convert("RGB")).astype(int)

    for left, picture in zip((15, 285, 613, 941), expected, strict=True):
        tile = page[73:328, left : left + 255]
        enlarged = Image.fromarray(picture).resize((255, 255), Image.Resampling.NEAREST)
        assert np.abs(tile - np.asarray(enlarged)).mean() < 1


def test_a_target_inside_a_detector_is_explained_at_its_layer() -> None:
    """The levels that enter the head explain boxes; it is no box."""
    image, _ = squares(2)
    page = fv.cam(Pyramid(), image, "layer:backbone.fine.0", **PLAIN)
    assert [layer_map.layer for layer_map in page.maps] == ["backbone.fine.0"]


@pytest.mark.medium
def test_a_box_lies_where_it_is_in_an_image_that_was_padded() -> None:
    """LetterBox puts four grey rows above an image of 24, which the map leaves out."""
    pytest.importorskip("ultralytics", reason="its LetterBox pads")
    pixels = np.full((24, SIDE, 3), 90, np.uint8)
    # the second row of cells begins at row 8 of the input, row 4 of the image
    pixels[4:12, 40:48] = (250, 0, 0)

    page = fv.cam(RedDetector(), pixels, preset="yolo", size=SIDE, overlay=0)

    drawn = np.asarray(page.image)
    assert drawn.shape == pixels.shape
    assert (drawn[4, 40:48] == 0).all()
    assert (drawn[5, 41:47] == 255).all()
    assert page.images[0].detections[0].box == pytest.approx((40, 4, 48, 12))


@pytest.mark.parametrize(("rank", "red"), [(0, 250), (1, 200)])
def test_look_draws_the_boxes_on_its_input(rank: int, red: int) -> None:
    """The page has a light line around each red square, which lies on grey."""
    image, _ = squares(3)

    page = fv.look(RedDetector(), image, **PLAIN)

    assert page.detections[rank].index == 1
    pixels = np.asarray(page.image)
    rows, columns = np.nonzero((pixels == (red, 0, 0)).all(axis=2))
    y = int(np.median(rows))
    line = pixels[y, columns.max() : columns.max() + 10].min(axis=1)
    assert line.max() > 150


def test_boxes_are_in_pixels_of_the_file() -> None:
    """A file of twice the size has its boxes twice as large, also in JSON."""
    small, (square, _) = squares(5)
    image = small.resize((2 * SIDE, 2 * SIDE), Image.Resampling.NEAREST)
    box = pytest.approx(square.box(scale=2))

    result = fv.cam(RedDetector(), image, **PLAIN).images[0]

    assert result.detections[0].box == box
    first, second = result.as_json()["detections"]
    assert first["box"] == box
    assert first["index"] == 1
    assert first["name"] is None
    assert first["score"] > second["score"]


def test_a_box_may_lie_at_the_lower_end_of_a_tall_image() -> None:
    """It is cut off at the image's height, not at its width."""
    image = Image.new("RGB", (SIDE, 4 * SIDE), (90, 90, 90))
    image.paste((250, 0, 0), (CELL, 3 * SIDE, 2 * CELL, 3 * SIDE + CELL))

    result = fv.run(RedDetector(), image, "backbone.2", **PLAIN).images[0]

    expected = (CELL, 3 * SIDE, 2 * CELL, 3 * SIDE + CELL)
    assert result.detections[0].box == pytest.approx(expected)


class Beyond(RedDetector):
    """Its boxes are larger than the image."""

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        (boxes,) = super().forward(x)
        boxes["boxes"] += torch.tensor([-SIDE, -SIDE, SIDE, SIDE])
        return [boxes]


def test_a_box_ends_at_the_edges_of_the_image() -> None:
    """What a model adds beyond them is not in the file."""
    image = Image.new("RGB", (SIDE, SIDE), (250, 0, 0))
    (result,) = fv.run(Beyond(), image, "backbone.2", **PLAIN).images
    assert result.detections[0].box == (0, 0, SIDE, SIDE)


class Located(NamedTuple):
    """Boxes of an image, the likeliest first."""

    indices: list[int]
    scores: np.ndarray
    corners: np.ndarray
    """[boxes, 4], in pixels."""


def located(boxes: Sequence[Detection]) -> Located:
    """Those that were found."""
    return Located(
        indices=[box.index for box in boxes],
        scores=np.array([box.score for box in boxes]),
        corners=np.array([box.box for box in boxes]),
    )


# torchvision


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("fasterrcnn", "gradcam"),
        ("retinanet", "layercam"),
        ("fcos", "gradcam"),
        ("ssd", "layercam"),
    ],
)
def test_boxes_of_torchvision_have_the_score_of_their_box(
    name: str, method: str
) -> None:
    """The map at the backbone is that of the highest score, also of one below the
    threshold, which is as before afterwards."""
    torch.manual_seed(0)
    model: Any = TORCHVISION[name]().eval()
    head = model.roi_heads if name == "fasterrcnn" else model
    threshold = head.score_thresh
    x = pixels()
    boxes = model([x])[0]["boxes"].detach()

    page = fv.cam(model, x, None, method)

    assert head.score_thresh == threshold
    outcome = page.images[0].outcome
    drawn = np.reshape([box.box for box in outcome.detections], (-1, 4))
    assert np.allclose(drawn, boxes, atol=0.01)
    assert [layer_map.layer for layer_map in page.maps] == ["backbone"]

    head.score_thresh = 0.0
    maps = kept_output(model.backbone)
    (answer,) = model([x])
    # of equal scores the first, since the gradient of `max` is shared among them
    number = answer["scores"][answer["scores"].argmax()]
    assert outcome.target == pytest.approx(number.item(), rel=1e-5)
    assert_maps_equal(page.tensor, by_hand(maps[0], number, method))


def test_a_detector_of_torchvision_without_boxes_names_its_strongest_candidate() -> (
    None
):
    """RetinaNet's scores are 0.01 with random weights: that is no box, but the target
    that the hint offers can be asked for."""
    torch.manual_seed(0)
    model = retinanet().eval()

    message = r"threshold of 0\.05; the highest score is 0\.01\d* \(class \d\)"
    with pytest.raises(NothingFoundError, match=message) as caught:
        fv.cam(model, pixels(), "box")

    target = caught.value.hint.removeprefix("targets here: ")
    assert re.fullmatch(r"class:\d", target)
    title = fv.cam(model, pixels(), target).images[0].title
    assert re.search(r"for class \d \(1\.\d %, below 0\.05: no box\)$", title)
    assert fv.cam(model, pixels()).images[0].title == title
    assert fv.look(model, pixels()).remark == "no box above the threshold"


def test_a_threshold_is_that_of_the_boxes_and_not_of_proposals() -> None:
    """An R-CNN has one for each; both are as before afterwards."""
    torch.manual_seed(0)
    model: Any = TORCHVISION["fasterrcnn"]().eval()
    model.rpn.score_thresh = 0.01
    model.roi_heads.score_thresh = 0.9

    page = fv.cam(model, pixels()).images[0]

    assert page.detections == ()
    assert page.title.endswith(" %, below 0.9: no box)")
    assert (model.rpn.score_thresh, model.roi_heads.score_thresh) == (0.01, 0.9)


NAMES = ("cat", "dog", "bird")


@pytest.mark.parametrize("listed", [NAMES, ("nothing", *NAMES)])
def test_a_list_of_classes_may_leave_out_the_background(
    listed: tuple[str, ...],
) -> None:
    """torchvision's detectors count classes from 1: three names are those of 1 to 3,
    four those of 0 to 3."""
    torch.manual_seed(0)
    torch.save(TORCHVISION["fasterrcnn"]().eval(), "model.pth")
    Path("names.txt").write_text("\n".join(listed))

    page = fv.look("model.pth", pixels(), classes="names.txt", trust=True)

    assert page.detections
    for box in page.detections:
        assert box.name == NAMES[box.index - 1]


# Ultralytics


class YoloAnswer(NamedTuple):
    """What the library's own suppression leaves."""

    rows: Tensor
    """[boxes, 6]: corners in pixels, score and class."""
    logits: Tensor
    """[boxes]: of each box's class, at its anchor."""


def suppressed(model: Any, x: Tensor) -> YoloAnswer:
    """The boxes of an image [3, H, W], with a graph behind their logits."""
    nms = pytest.importorskip("ultralytics.utils.nms").non_max_suppression
    answer, raw = model(x[None].clone().requires_grad_())
    (rows,), (anchors,) = nms(answer.detach(), 0.25, 0.7, return_idxs=True, nc=80)
    classes = rows[:, 5].long()
    return YoloAnswer(rows, raw["scores"][0, classes, anchors.long().flatten()])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "method"), [(0, "gradcam"), (1, "layercam")])
def test_boxes_of_yolo_have_the_logit_of_their_anchor(number: int, method: str) -> None:
    """The map at each level that enters the head is the one by hand, though the loader
    has frozen the parameters."""
    model = sure_yolo()
    x = pixels()
    layers = ("model.16", "model.19", "model.22")
    levels = {layer: kept_output(model.get_submodule(layer)) for layer in layers}
    expected = suppressed(model, x)
    logit = expected.logits[number]

    page = fv.cam(model, x, f"box:{number}", method, preset="none")

    for layer_map in page.maps:
        level = levels[layer_map.layer][0]
        assert_maps_equal(layer_map.tensor, by_hand(level, logit, method))
    result = page.images[0]
    assert result.outcome.target == pytest.approx(logit.item(), rel=1e-5)
    boxes = [box.box for box in result.outcome.detections]
    assert len(boxes) > 1
    np.testing.assert_allclose(boxes, expected.rows[:, :4], atol=0.01)
    # a box at one level is not of the others
    assert (result.maximum is None) == (len(page.maps) == 1)
    assert page.image.size == (SIDE, SIDE)


@pytest.mark.slow
def test_a_yolo_without_boxes_shows_its_strongest_anchor() -> None:
    """The title says that it is no box; and `box` names targets that there are."""
    model = unsure_yolo()
    x = pixels()
    message = (
        r"no box above the threshold of 0.25; the highest score is \S+ \(class \d+\)"
    )

    title = fv.cam(model, x, preset="none").images[0].title
    page = fv.look(model, x, preset="none")

    assert re.search(r"class \d+ \(.*, below 0.25: no box\)", title)
    assert re.fullmatch(message, page.remark)
    with pytest.raises(NothingFoundError, match=message):
        fv.cam(model, x, "box", preset="none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("yolo11n", 1),
        # its predictor drops boxes without a mask, and there are some in small inputs
        ("yolo11n-seg", 5),
        ("yolo11n-pose", 1),
        ("yolo11n-obb", 1),
    ],
)
def test_boxes_of_yolo_are_those_of_its_predictor(name: str, scale: int) -> None:
    """They have its order, classes and scores, and lie within a pixel of the file."""
    model = sure_yolo(name)
    width = 90 * scale
    height = 60 * scale
    file = Path("image.png")
    noise(9 * scale, 6 * scale).resize((width, height)).save(file)
    predictor = pytest.importorskip("ultralytics").YOLO(f"{name}.yaml")
    predictor.model = model
    options = {"conf": 0.25, "iou": 0.7, "verbose": False, "save": False}

    boxes = located(fv.look(model, file, size=128 * scale).detections)

    (answer,) = predictor.predict(file, imgsz=128 * scale, **options)
    expected = answer.boxes if answer.obb is None else answer.obb
    assert len(boxes.indices) > 1
    assert boxes.indices == expected.cls.tolist()
    np.testing.assert_allclose(boxes.scores, expected.conf, atol=1e-3)
    # turned boxes of theirs may go beyond the edges of the file
    inside = np.clip(expected.xyxy, 0, [width, height, width, height])
    np.testing.assert_allclose(boxes.corners, inside, atol=1)


@pytest.mark.slow
def test_boxes_that_a_head_selects_itself_are_its_own() -> None:
    """All that are likely, the most confident first."""
    model = sure_yolo("yolov10n")
    x = pixels()
    rows = model(x[None])[0][0]
    rows = rows[rows[:, 4] > 0.25]
    rows = rows[rows[:, 4].argsort(descending=True, stable=True)].numpy()

    boxes = located(fv.look(model, x, preset="none").detections)

    assert len(boxes.indices) == len(rows) > 1
    np.testing.assert_allclose(boxes.scores, rows[:, 4], atol=1e-5)
    # boxes of equal scores may stand in another order
    inside = rows[:, :4].clip(0, [*x.shape[:0:-1], *x.shape[:0:-1]])
    distances = abs(boxes.corners[:, None] - inside).max(axis=2)
    distances += abs(np.array(boxes.indices)[:, None] - rows[:, 5])
    assert distances.min(axis=0).max() < 0.01
    assert distances.min(axis=1).max() < 0.01


# transformers


def processed(output: Any) -> Located:
    """The boxes that the processor of DETR makes of an output."""
    processor = pytest.importorskip("transformers").DetrImageProcessor()
    (answer,) = processor.post_process_object_detection(
        output, threshold=0.5, target_sizes=[(SIDE, SIDE)]
    )
    order = answer["scores"].argsort(descending=True)
    return Located(
        indices=answer["labels"][order].tolist(),
        scores=answer["scores"][order].detach().numpy(),
        corners=answer["boxes"][order].detach().numpy(),
    )


@pytest.mark.slow
def test_boxes_of_detr_are_those_of_its_processor() -> None:
    """The number is the logit of the likeliest query, without "no object"; the names
    are those of the config."""
    model = detr(id2label={0: "cat", 1: "dog", 2: "bird", 3: "fish"})
    x = pixels()
    output = model(x[None])
    expected = processed(output)

    page = fv.cam(model, x, **PLAIN)

    result = page.images[0]
    boxes = located(result.outcome.detections)
    assert boxes.indices == expected.indices
    np.testing.assert_allclose(boxes.scores, expected.scores, atol=1e-5)
    np.testing.assert_allclose(boxes.corners, expected.corners, atol=0.01)
    query = output.logits[0].softmax(-1)[:, :-1].amax(dim=1).argmax()
    logit = output.logits[0, query, boxes.indices[0]]
    assert result.outcome.target == pytest.approx(logit.item(), rel=1e-4)
    assert result.target.startswith(("cat ", "dog ", "bird ", "fish "))
    assert [layer_map.layer for layer_map in page.maps] == ["model.input_projection"]


@pytest.mark.slow
def test_a_box_that_depends_on_several_levels_is_shown_at_all_of_them() -> None:
    """The picture of the image is the largest value at each pixel, and all are in its
    scale."""
    torch.manual_seed(0)

    page = fv.cam(rtdetr().eval(), pixels(), preset="none")

    levels = [
        functional.interpolate(at.tensor[None, None], (SIDE, SIDE), mode="bilinear")
        for at in page.maps
    ]
    assert_maps_equal(page.tensor, torch.cat(levels)[:, 0].amax(0))
    largest = max(float(at.tensor.max()) for at in page.maps)
    assert [at.limits for at in page.maps] == [pytest.approx((0, largest))] * 3
    maximum = page.images[0].maximum
    assert maximum is not None
    assert maximum.name == "maximum of 3 levels"
    assert np.array_equal(page.image, maximum.picture)
