"""Which channels are drawn, from images to run directories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import featviz as fv
from featviz.errors import FeatvizError

PLAIN = {"preset": "none", "input_channels": 1}


def framed_network(kernel: int) -> nn.Sequential:
    """Channel 0 is a second difference, zero on a ramp but where padding ends it;
    channel 1 is the image, darker."""
    conv = nn.Conv2d(1, 2, kernel, padding=kernel // 2, bias=False)
    middle = kernel // 2
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[0, 0, middle, [0, middle, -1]] = torch.tensor([1.0, -2.0, 1.0])
        conv.weight[1, 0, middle, middle] = 0.1
    return nn.Sequential(conv)


def ramp() -> np.ndarray:
    """An image whose values grow from left to right by whole levels."""
    return np.tile(np.arange(24, dtype=np.uint8) * 10, (24, 1))


@pytest.mark.parametrize(("kernel", "border"), [(3, 1), (7, 3)])
def test_a_frame_that_padding_makes_is_no_variation(
    kernel: int, border: int, tmp_path: Path
) -> None:
    """Half of the kernel's field is left out: `varied` and `look` show the channel that
    follows the image, though the frame of the other deviates more."""
    model = framed_network(kernel)
    out = tmp_path / "out"
    result = fv.run(
        model, ramp(), "Conv2d", out, channels="varied:1", tensors=True, **PLAIN
    )
    maps = result.captures[0]
    assert maps.channels == [1]
    assert maps.tensor is not None
    values = maps.tensor[0].numpy().astype(np.float64)
    inner = values[:, border:-border, border:-border]
    deviations = values.std((1, 2))
    assert deviations[0] > deviations[1]
    with np.load(next(out.glob("*/stats.npz"))) as arrays:
        stored = arrays["0|output|0||inner_std"]
    assert stored == pytest.approx(inner.std((1, 2)), abs=1e-6)
    page = fv.look(model, ramp(), "Conv2d", maps=1, **PLAIN)
    assert page.layers[0].channels == (1,)


def test_small_maps_keep_half_of_each_side() -> None:
    """A map of 4 by 4 loses one pixel on each side, one of 3 by 3 none."""
    from featviz.drawing.values import inner_deviations

    for side, kept in ((3, slice(None)), (4, slice(1, -1)), (7, slice(1, -1))):
        maps = torch.rand(5, side, side)
        expected = maps.numpy()[:, kept, kept].std((1, 2))
        assert inner_deviations(maps, 3)[:5] == pytest.approx(expected, abs=1e-6)


def test_channels_are_drawn_as_they_are_named(tmp_path: Path) -> None:
    """In the order of the text, by any layer that has one of them; a layer that has
    none is skipped with the reason."""
    model = nn.Sequential(nn.Conv2d(1, 9, 3), nn.Conv2d(9, 2, 3))
    result = fv.run(model, ramp(), "Conv2d", tmp_path / "a", channels=[7, 0], **PLAIN)
    assert [list(maps.channels) for maps in result.captures] == [[7, 0], [0]]
    result = fv.run(model, ramp(), "Conv2d", tmp_path / "b", channels=7, **PLAIN)
    assert [maps.layer for maps in result.captures] == ["0"]
    (skip,) = result.images[0].skipped
    assert skip.reason == "has 2 channels, none of 7"


def test_a_class_activation_map_of_some_channels_weighs_only_these() -> None:
    """Gradient × activation of one channel is what autograd says of it."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(80, 3))
    model = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), head)
    maps = fv.cam(
        model, ramp(), "class:1", "gradxact", "1", channels="3", size=24, **PLAIN
    )
    image = torch.from_numpy(ramp()).float()[None, None] / 255
    output = model[1](model[0](image))
    output.retain_grad()
    model[2](output)[0, 1].backward()
    assert output.grad is not None
    expected = (output * output.grad)[0, 3].detach()
    assert torch.allclose(maps.tensor, expected, atol=1e-6)
    with pytest.raises(FeatvizError, match="has 5 channels, none of 8"):
        fv.cam(model, ramp(), "class:1", "gradxact", "1", channels="8", **PLAIN)


def test_exemplars_of_some_channels(tmp_path: Path) -> None:
    """By number, or those of the largest values."""
    model = nn.Sequential(nn.Conv2d(1, 4, 1, bias=False))
    with torch.no_grad():
        model[0].weight[:] = torch.tensor([1.0, 4, 3, 2]).reshape(4, 1, 1, 1)
    found = fv.exemplars(model, ramp(), "Conv2d", channels="top:2", **PLAIN)
    rows = found.document["layers"][0]["channels"]
    assert [row["channel"] for row in rows] == [1, 2]
    assert all(row["exemplars"] for row in rows)
    found = fv.exemplars(model, ramp(), "Conv2d", channels=[3], **PLAIN)
    rows = found.document["layers"][0]["channels"]
    assert [row["channel"] for row in rows] == [3]
