"""Which channels are drawn, from images to run directories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featviz as fv
from featviz.drawing.channels import choose_channels, count_chosen
from featviz.drawing.values import inner_deviations
from featviz.errors import FeatvizError

PLAIN = {"preset": "none", "input_channels": 1}
RAMP = np.tile(np.arange(24, dtype=np.uint8) * 10, (24, 1))
"""An image whose values grow from left to right by whole levels."""


def framed_network(kernel: int) -> nn.Sequential:
    """Channel 0 is a second difference, zero on a ramp but where padding ends it;
    channel 1 is the image, darker."""
    middle = kernel // 2
    conv = nn.Conv2d(1, 2, kernel, padding=middle, bias=False)
    nn.init.zeros_(conv.weight)
    with torch.no_grad():
        conv.weight[0, 0, middle, [0, middle, -1]] = torch.tensor([1.0, -2.0, 1.0])
        conv.weight[1, 0, middle, middle] = 0.1
    return nn.Sequential(conv)


@pytest.mark.parametrize(
    ("kernel", "border"),
    [
        (3, 1),
        (7, 3),
    ],
)
def test_a_frame_that_padding_makes_is_no_variation(
    kernel: int,
    border: int,
    tmp_path: Path,
) -> None:
    """`varied` leaves half of the kernel's field out: it draws the channel that follows
    the image, though the frame of the other deviates more."""
    model = framed_network(kernel)
    result = fv.run(
        model,
        RAMP,
        "Conv2d",
        tmp_path,
        channels="varied:1",
        tensors=True,
        **PLAIN,
    )
    (maps,) = result.captures
    assert maps.channels == [1]
    values = maps.tensor[0].double().numpy()
    deviations = values.std((1, 2))
    assert deviations[0] > deviations[1]
    inner = values[:, border:-border, border:-border]
    with np.load(next(tmp_path.glob("*/stats.npz"))) as arrays:
        stored = arrays["0|output|0||inner_std"]
    assert stored == pytest.approx(inner.std((1, 2)), abs=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layer", "inner"),
    [
        # each of two convolutions pads by a pixel
        (
            nn.Sequential(nn.Conv2d(1, 2, 3, 1, 1), nn.Conv2d(2, 2, 3, 1, 1)),
            slice(2, -2),
        ),
        (nn.Conv2d(1, 2, 7, 2, 3), slice(2, -2)),
        # patches beside each other overlap with no padding
        (nn.Conv2d(1, 2, 3, 3), slice(1, -1)),
        # the side counts on which it is wider
        (nn.Conv2d(1, 2, (1, 7), 1, (0, 3)), slice(3, -3)),
        (nn.Conv2d(1, 2, 3, 1, 4, dilation=4), slice(4, -4)),
    ],
    ids=["two", "stride", "patches", "oblong", "dilated"],
)
def test_the_border_is_what_padding_reaches(
    layer: nn.Module, inner: slice, tmp_path: Path
) -> None:
    """Several convolutions add up, and a stride makes the border of the map narrower."""
    model = nn.Sequential(layer)
    result = fv.run(model, RAMP, "0", tmp_path, tensors=True, **PLAIN)
    (maps,) = result.captures
    values = maps.tensor[0].double().numpy()[:, inner, inner]
    with np.load(next(tmp_path.glob("*/stats.npz"))) as arrays:
        (stored,) = [arrays[key] for key in arrays if key.endswith("inner_std")]
    assert stored == pytest.approx(values.std((1, 2)), rel=1e-4)


@pytest.mark.medium
def test_look_shows_no_frame_that_padding_makes() -> None:
    """`look` ranks channels without their borders, too."""
    page = fv.look(framed_network(3), RAMP, "Conv2d", maps=1, **PLAIN)
    assert page.layers[0].channels == (1,)


@pytest.mark.parametrize(
    ("size", "inner"),
    [
        ((3, 3), slice(None)),
        ((4, 4), slice(1, -1)),
        ((7, 7), slice(1, -1)),
        ((4, 20), slice(1, -1)),
        ((20, 3), slice(None)),
    ],
)
def test_small_maps_keep_half_of_each_side(size: tuple[int, int], inner: slice) -> None:
    """A map of 4 by 4 loses one pixel on each side, one of 3 by 3 none; of oblong maps
    the shorter side counts."""
    maps = torch.rand(5, *size)
    expected = maps.numpy()[:, inner, inner].std((1, 2))
    assert inner_deviations(maps, 3) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("scale", "offset", "hole"),
    [
        (1.0, 0.0, None),
        (0.01, 1000.0, None),
        (1e-25, 0.0, None),
        (0.0, 0.5, None),
        (1.0, 3.0, float("nan")),
        (1.0, 3.0, float("inf")),
    ],
)
def test_deviations_without_a_border_are_those_of_numpy(
    scale: float, offset: float, hole: float | None
) -> None:
    """They are those of all finite values inside, of more slices than the border is
    wide, whatever the frame is."""
    inner = (torch.rand(4, 9, 17, 30) * scale + offset).float()
    if hole is not None:
        inner[2, 1, 8, 8] = hole
    framed = nn.functional.pad(inner, (3, 3, 3, 3))
    numbers = inner.numpy().astype(np.float64)
    expected = np.nanstd(np.where(np.isfinite(numbers), numbers, np.nan), (1, 2, 3))
    assert inner_deviations(framed, 3) == pytest.approx(expected, rel=1e-4, abs=0)


def test_deviations_do_not_depend_on_the_order_in_memory() -> None:
    """Maps whose values lie apart have the deviations of their copies."""
    maps = torch.rand(12, 30, 4).permute(2, 0, 1)[:, :1]
    assert not maps.flatten(1).is_contiguous()
    expected = inner_deviations(maps.clone(memory_format=torch.contiguous_format), 1)
    assert (inner_deviations(maps, 1) == expected).all()


MEANS = np.array([1, np.nan, 3, 3, 2], np.float32)
DEVIATIONS = np.array([5, 1, np.nan, 5, 2], np.float32)


@pytest.mark.parametrize(
    ("text", "candidates", "chosen"),
    [
        ("2,0", range(5), [2, 0]),
        ("0,3", [1, 3, 4], [3]),
        ("first:2", [1, 3, 4], [1, 3]),
        ("spread:3", range(5), [0, 2, 4]),
        ("spread:4", range(5), [0, 1, 3, 4]),
        ("spread:9", [1, 3, 4], [1, 3, 4]),
        ("top:3", range(5), [2, 3, 4]),
        ("top:9", range(5), [2, 3, 4, 0, 1]),
        ("top:2", [1, 3, 4], [3, 4]),
        ("varied:2", range(5), [0, 3]),
        ("varied:9", range(5), [0, 3, 4, 1, 2]),
    ],
)
def test_rules_choose_among_candidates(
    text: str, candidates: Sequence[int], chosen: list[int]
) -> None:
    """Of equal channels the earlier one comes first, and one of NaN last."""
    assert choose_channels(text, candidates, MEANS, DEVIATIONS) == chosen


@pytest.mark.parametrize(
    ("text", "count"),
    [(None, 5), ("first:9", 5), ("top:2", 2), ("0-4", 5), ("4,5", 1), ("5-9", 0)],
)
def test_channels_are_counted_before_they_are_there(
    text: str | None, count: int
) -> None:
    """Of five; their numbers begin at 0."""
    assert count_chosen(text, 5) == count


def test_channels_are_drawn_in_the_order_of_the_text() -> None:
    """Each layer draws the channels that it has, in the order of the text."""
    model = nn.Sequential(nn.Conv2d(1, 9, 3), nn.Conv2d(9, 2, 3))
    result = fv.run(model, RAMP, "Conv2d", channels=[7, 0], **PLAIN)
    assert [list(maps.channels) for maps in result.captures] == [[7, 0], [0]]


@pytest.mark.medium
def test_a_layer_without_the_channels_is_skipped() -> None:
    """The reason names the channels that the layer lacks."""
    model = nn.Sequential(nn.Conv2d(1, 9, 3), nn.Conv2d(9, 2, 3))
    result = fv.run(model, RAMP, "Conv2d", channels=7, **PLAIN)
    assert [maps.layer for maps in result.captures] == ["0"]
    (skipped,) = result.images[0].skipped
    assert skipped.reason == "has 2 channels (0-1), none of 7"


@pytest.fixture
def classifier() -> nn.Sequential:
    """Five channels, and three classes."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(80, 3))
    return nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), head)


@pytest.mark.medium
def test_a_class_activation_map_of_one_channel_weighs_only_it(
    classifier: nn.Sequential,
) -> None:
    """Gradient × activation of one channel is what autograd says of it."""
    image = torch.from_numpy(RAMP).float()[None, None] / 255
    output = classifier[:2](image)
    output.retain_grad()
    classifier[2](output)[0, 1].backward()
    expected = (output * output.grad)[0, 3].detach()

    maps = fv.cam(
        classifier,
        RAMP,
        "class:1",
        "gradxact",
        "1",
        channels="3",
        size=24,
        **PLAIN,
    )

    assert torch.allclose(maps.tensor, expected, atol=1e-6)


def test_a_class_activation_map_needs_a_channel(classifier: nn.Sequential) -> None:
    """A channel that the layer lacks is an error."""
    with pytest.raises(FeatvizError, match=r"has 5 channels \(0-4\), none of 8"):
        fv.cam(classifier, RAMP, "class:1", "gradxact", "1", channels="8", **PLAIN)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("channels", "expected"),
    [
        ("top:2", [1, 2]),
        ([3], [3]),
    ],
)
def test_exemplars_of_some_channels(
    channels: str | list[int],
    expected: list[int],
) -> None:
    """Channels are chosen by number, or by the largest of their values."""
    model = nn.Sequential(nn.Conv2d(1, 4, 1, bias=False))
    with torch.no_grad():
        model[0].weight[:, 0, 0, 0] = torch.tensor([1.0, 4, 3, 2])
    result = fv.exemplars(model, RAMP, "Conv2d", channels=channels, **PLAIN)
    rows = result.document["layers"][0]["channels"]
    assert [row["channel"] for row in rows] == expected
    assert all(row["exemplars"] for row in rows)


NARROW_AND_WIDE = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
)
SHOWN: dict[str, Callable[..., Any]] = {
    "run": lambda out, **options: fv.run(
        NARROW_AND_WIDE, [RAMP, RAMP.T], "Conv2d", out, **options
    ),
    "look": lambda out, **options: fv.look(NARROW_AND_WIDE, RAMP, "Conv2d", **options),
    "cam": lambda out, **options: fv.cam(
        NARROW_AND_WIDE, [RAMP, RAMP.T], None, "gradcam", "Conv2d", **options
    ),
    "exemplars": lambda out, **options: fv.exemplars(
        NARROW_AND_WIDE, [RAMP, RAMP.T], "Conv2d", out, **options
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_channels_that_a_layer_lacks_are_warned_of_once(
    name: str, tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    """Of two images, too, with the layer and what it has; what it has is shown."""
    SHOWN[name](tmp_path / "out", channels="2,6", **PLAIN)
    warnings = [text for text in messages.messages if "channels=" in text]
    assert warnings == ["channels=2,6: layer 0 has 4 channels (0-3), not 6"]


def test_images_that_are_kept_are_not_warned_of_again(
    tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    """`--resume` of a complete run draws nothing, and says nothing of its channels."""
    options = {"channels": "2,6", "resume": True, **PLAIN}
    for _ in range(2):
        fv.run(NARROW_AND_WIDE, RAMP, "Conv2d", tmp_path / "out", **options)
    assert sum("channels=" in text for text in messages.messages) == 1


def test_kernels_and_sheets_warn_of_channels_that_are_not_there(
    tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    """A sheet of those that were drawn."""
    fv.kernels(NARROW_AND_WIDE, out=tmp_path / "kernels", channels="2,6")
    fv.run(NARROW_AND_WIDE, RAMP, "0", tmp_path / "run", channels="1,2", **PLAIN)
    fv.sheet(tmp_path / "run", channels="2,3")
    with pytest.raises(FeatvizError, match=r"channels \(1-2\)"):
        fv.sheet(tmp_path / "run", channels="3")  # the error says it all
    assert [text for text in messages.messages if "channels=" in text] == [
        "channels=2,6: layer 0 has 4 channels (0-3), not 6",
        "channels=2,3: layer 0 has 2 channels (1-2), not 3",
    ]
