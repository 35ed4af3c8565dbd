"""Boxes, regions and values: which number a target is, at the limits of each."""

from __future__ import annotations

import pytest
import torch

from featviz.errors import UsageError
from featviz.gradients import targets
from featviz.gradients.answers import Boxes, LabelledBox, Regions, Values

SIZE = (6, 8)
"""Height and width of the input."""
SCORES = torch.zeros(2, 3, 4)
"""Of two classes: the first wins nine of twelve places."""
SCORES[0, :, :3] = 2
SCORES[1, :, 3] = 5


@pytest.mark.parametrize(
    ("names", "title"),
    [
        ((), "class 1"),
        (("Background", "cat"), "cat"),
        (("__background__", "cat"), "cat"),
        (("wall", "cat"), "wall"),
    ],
)
def test_the_default_region_is_no_background(
    names: tuple[str, ...], title: str
) -> None:
    """Whatever the case of its name; without names the first class is one."""
    value = Regions(SCORES, SIZE, names).value(targets.parse("top1"))
    assert value is not None
    assert value.title.partition(" (")[0] == title
    assert float(value.number) == (18 if title == "wall" else 15)


def test_a_background_alone_is_a_region() -> None:
    """There is no other one."""
    value = Regions(SCORES[:, :, :2], SIZE).value(targets.parse("top1"))
    assert value is not None
    assert value.title == "class 0"


def test_a_single_class_has_the_places_above_zero() -> None:
    """Its number is their mean, so that a large region is no evidence."""
    scores = torch.tensor([[[-1.0, 0.0, 2.0, 4.0]]])
    regions = Regions(scores, SIZE)
    assert regions.winners.tolist() == [[-1, -1, 0, 0]]
    value = regions.value(targets.parse("class:0"))
    assert value is not None
    assert float(value.number) == 3


@pytest.mark.parametrize(("text", "place"), [("7,5", 11), ("0,0", 0), ("1,2", 4)])
def test_a_pixel_lies_in_a_place_of_the_map(text: str, place: int) -> None:
    """Across and down, from the first to the last."""
    depth = torch.arange(12.0).reshape(1, 3, 4)
    value = Values(depth, ("pixel",), SIZE).value(targets.parse(f"pixel:{text}"))
    assert value is not None
    assert float(value.number) == place


@pytest.mark.parametrize("text", ["8,0", "0,6", "8,6"])
def test_a_pixel_behind_the_last_is_refused(text: str) -> None:
    """In either direction; the hint names one in the middle."""
    values = Values(torch.zeros(1, 3, 4), ("pixel",), SIZE)
    with pytest.raises(UsageError, match="the input has 8×6 pixels") as caught:
        values.value(targets.parse(f"pixel:{text}"))
    assert caught.value.hint == "targets here: pixel:4,3"


def test_a_keypoint_is_one_of_the_maps() -> None:
    """The last one is, and none behind it; without a number it is the strongest."""
    maps = torch.zeros(1, 3, 2, 2)
    maps[0, 1, 1, 0] = 7
    values = Values(maps, ("keypoint",), SIZE)
    for text, title in (("keypoint:2", "keypoint 2"), ("keypoint", "keypoint 1")):
        value = values.value(targets.parse(text))
        assert value is not None
        assert value.title == title
    with pytest.raises(UsageError, match="the model has keypoints 0 to 2"):
        values.value(targets.parse("keypoint:3"))


@pytest.mark.parametrize(
    ("threshold", "title"),
    [(0.5, "cat (30.0 %, below 0.5: no box)"), (None, "cat (30.0 %)")],
)
def test_a_weak_box_is_told_where_the_threshold_is_known(
    threshold: float | None, title: str
) -> None:
    """And what is no box has no number among the targets."""
    boxes = Boxes(
        corners=torch.tensor([[0.0, 0.0, 2.0, 2.0]]),
        numbers=torch.tensor([[0.1, 0.3]]),
        scores=torch.tensor([[0.1, 0.3]]),
        kept=[],
        threshold=threshold,
        names=("dog", "cat"),
    )
    value = boxes.value(targets.parse("class:cat"))
    assert value is not None
    assert value.title == title
    assert boxes.examples == ["class:1"]


def three_boxes() -> Boxes:
    """A dog, and two cats of which the second is the surer."""
    scores = torch.tensor([[0.9, 0.1], [0.3, 0.6], [0.2, 0.7]])
    return Boxes(
        corners=torch.arange(12.0).reshape(3, 4),
        numbers=scores * 10,
        scores=scores,
        kept=[LabelledBox(0, 0), LabelledBox(2, 1), LabelledBox(1, 1)],
        threshold=0.5,
        names=("dog", "cat"),
    )


@pytest.mark.parametrize(
    ("text", "number", "title"),
    [
        ("box:dog", 9, "dog (90.0 %)"),
        ("box:cat", 7, "cat (70.0 %)"),
        ("box:2", 6, "cat (60.0 %)"),
        ("class:cat", 7, "cat (70.0 %)"),
    ],
)
def test_a_box_of_a_class_is_the_most_confident_one(
    text: str, number: float, title: str
) -> None:
    """And a number counts the boxes of all classes."""
    value = three_boxes().value(targets.parse(text))
    assert value is not None
    assert float(value.number) == pytest.approx(number)
    assert value.title == title


def test_a_class_without_a_box_is_refused() -> None:
    """`class:cat` has its strongest candidate all the same, where `box:cat` has none."""
    boxes = three_boxes()
    boxes.kept = boxes.kept[:1]
    with pytest.raises(UsageError, match="'box:cat'") as caught:
        boxes.value(targets.parse("box:cat"))
    assert caught.value.hint == "targets here: box:0, box:dog, class:0"
    value = boxes.value(targets.parse("class:cat"))
    assert value is not None
    assert value.title == "cat (70.0 %, no box)"


@pytest.mark.parametrize("text", ["box", "box:0", "box:cat", "class:cat"])
def test_a_detector_without_candidates_has_no_box(text: str) -> None:
    """Whatever is asked of it; and it offers none."""
    nothing = torch.zeros(0, 2)
    boxes = Boxes(torch.zeros(0, 4), nothing, nothing, [], 0.5, ("dog", "cat"))
    assert boxes.examples == []
    with pytest.raises(UsageError, match="no box above the threshold"):
        boxes.value(targets.parse(text))


def test_a_box_that_is_not_finite_is_left_out() -> None:
    """The next one has its number."""
    corners = torch.tensor([[0.0, 0.0, torch.inf, 2.0], [1.0, 2.0, 3.0, 4.0]])
    scores = torch.tensor([[0.9], [0.8]])
    kept = [LabelledBox(0, 0), LabelledBox(1, 0)]
    boxes = Boxes(corners, scores, scores, kept, 0.5)
    assert [detection.box for detection in boxes.detections] == [(1, 2, 3, 4)]
    with pytest.raises(UsageError, match="no such box among 1"):
        boxes.value(targets.parse("box:1"))
