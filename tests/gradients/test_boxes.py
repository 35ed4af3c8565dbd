"""Boxes of detectors: a detector whose evidence is known, the libraries' own decoders,
and maps by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectors import CELL, PLAIN, SIDE, RedDetector, squares
from PIL import Image
from small_models import (
    TORCHVISION,
    assert_maps_equal,
    by_hand,
    detr,
    kept_output,
    pixels,
    retinanet,
    yolo,
)
from torch import Tensor

import featviz as fv
from featviz.gradients.answers import NothingFoundError


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


# torchvision


@pytest.mark.parametrize("method", ["gradcam", "layercam"])
@pytest.mark.parametrize("name", TORCHVISION)
def test_boxes_of_torchvision_have_the_score_of_their_box(
    name: str, method: str
) -> None:
    """At the maps that enter the head, also of boxes below the threshold, which is as
    before afterwards."""
    torch.manual_seed(0)
    model: Any = TORCHVISION[name]().eval()
    head = model.roi_heads if name == "fasterrcnn" else model
    threshold = head.score_thresh
    x = pixels()
    boxes = model([x])[0]["boxes"]
    found = fv.cam(model, x, None, method)
    assert head.score_thresh == threshold
    detections = found.images[0].outcome.detections
    ours = [box.box for box in detections]
    assert np.allclose(np.reshape(ours, (-1, 4)), boxes.detach(), atol=0.01)
    head.score_thresh = 0.0
    kept = kept_output(model.backbone)
    (answer,) = model([x])
    # of equal scores the first, since the gradient of `max` is shared among them
    number = answer["scores"][answer["scores"].argmax()]
    assert float(number) == pytest.approx(found.images[0].outcome.target, rel=1e-5)
    assert [layer_map.layer for layer_map in found.maps] == ["backbone"]
    assert_maps_equal(found.tensor, by_hand(kept[0], number, method))


def test_a_detector_of_torchvision_without_boxes_names_its_strongest_candidate() -> (
    None
):
    """With random weights RetinaNet's scores are 0.01: it is no box, but the targets
    that the hint offers can be asked for."""
    torch.manual_seed(0)
    model = retinanet().eval()
    with pytest.raises(
        NothingFoundError,
        match=r"threshold of 0\.05; the highest score is 0\.01\d* \(class \d\)",
    ) as caught:
        fv.cam(model, pixels(), "box")
    target = caught.value.hint.removeprefix("targets here: ")
    assert re.fullmatch(r"class:\d", target)
    title = fv.cam(model, pixels(), target).images[0].title
    assert "(below 0.05: no box)" in title
    assert fv.cam(model, pixels()).images[0].title == title
    assert fv.look(model, pixels()).remark == "no box above the threshold"


def test_a_list_of_classes_may_leave_out_the_background(tmp_path: Path) -> None:
    """torchvision's detectors count classes from 1; three names are those of 1 to 3,
    four those of 0 to 3."""
    torch.manual_seed(0)
    model = TORCHVISION["fasterrcnn"]().eval()
    names = ["cat", "dog", "bird"]
    torch.save(model, tmp_path / "model.pth")
    for listed in (names, ["nothing", *names]):
        (tmp_path / "names.txt").write_text("\n".join(listed))
        page = fv.look(
            tmp_path / "model.pth",
            pixels(),
            classes=tmp_path / "names.txt",
            trust=True,
        )
        assert page.detections
        for box in page.detections:
            assert box.name == names[box.index - 1]


# Ultralytics


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
    remark = fv.look(model, x, preset="none").remark
    assert re.fullmatch(
        r"no box above the threshold of 0.25; the highest score is \S+ \(class \d+\)",
        remark,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["yolo11n", "yolo11n-seg", "yolo11n-pose", "yolo11n-obb"]
)
def test_boxes_of_yolo_are_those_of_its_predictor(name: str, tmp_path: Path) -> None:
    """To a pixel of the file, in the same order, with the same classes and scores."""
    model = yolo(name)
    from ultralytics import YOLO

    generator = np.random.default_rng(0)
    noise = generator.integers(0, 256, (30, 45, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((450, 300))
    image.save(tmp_path / "image.png")
    ours = fv.look(model, tmp_path / "image.png").detections
    predictor = YOLO(f"{name}.yaml")
    predictor.model = model
    (theirs,) = predictor.predict(
        tmp_path / "image.png", conf=0.25, iou=0.7, imgsz=640, verbose=False, save=False
    )
    boxes = theirs.boxes if theirs.obb is None else theirs.obb
    assert len(ours) == len(boxes) > 1
    for box, corners, index, score in zip(
        ours, boxes.xyxy.tolist(), boxes.cls.tolist(), boxes.conf.tolist(), strict=True
    ):
        assert box.index == index
        assert box.score == pytest.approx(score, abs=1e-3)
        # turned boxes of theirs may go beyond the edges of the file
        inside = np.clip(corners, 0, [450, 300, 450, 300])
        assert box.box == pytest.approx(inside.tolist(), abs=1)


@pytest.mark.slow
def test_maps_of_a_box_of_yolo_are_those_of_pytorch_grad_cam() -> None:
    """With a target of their kind that takes the logit of the same anchor."""
    theirs = pytest.importorskip("pytorch_grad_cam", reason="grad-cam is not installed")
    model = yolo()
    x = pixels()
    found = fv.cam(model, x, "box:0", preset="none")
    level = max(found.maps, key=lambda level: float(level.tensor.max()))
    # which pytorch-grad-cam needs, and the library's loader takes away
    model.requires_grad_(True)
    x.requires_grad_()
    logits = model(x[None])[1]["scores"][0]
    index = found.images[0].outcome.focus.index
    anchor = int((logits[index] - found.images[0].outcome.target).abs().argmin())

    class Logit(torch.nn.Module):
        """The model with its logits as output."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, image: Tensor) -> Tensor:
            scores: Tensor = self.model(image)[1]["scores"]
            return scores

    layer = model.get_submodule(level.layer)
    with theirs.GradCAM(model=Logit(), target_layers=[layer]) as oracle:
        oracle.get_target_width_height = lambda inputs: None
        expected = oracle(x[None].detach(), [lambda scores: scores[index, anchor]])[0]
    values = np.maximum(level.tensor.double().numpy(), 0)
    values = (values - values.min()) / (values.max() - values.min())
    assert np.abs(values - expected).max() < 1e-5


# transformers


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
