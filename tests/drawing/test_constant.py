"""Maps that are constant: one strip of values where all are, marks where some are, or
neither."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawn_maps import SITE
from msgspec import structs
from torch import Tensor

from featviz.drawing import drawer, values
from featviz.drawing.picture import GridPicture, to_image
from featviz.options import DrawOptions

PLAIN = DrawOptions(scale=1, padding=2, pad_value=0.0)
VALUES = torch.tensor([2.99, -1.0, 0.0, 7.0])


def constant(values: Tensor = VALUES, side: int = 6) -> Tensor:
    """Maps [1, C, side, side], each of one value."""
    return values.reshape(1, -1, 1, 1).expand(1, -1, side, side).clone()


def drawn(tensor: Tensor, kind: str = "output", **options: object) -> GridPicture:
    """The picture of a tensor of this kind."""
    return drawer.draw(
        structs.replace(PLAIN, **options), SITE._replace(kind=kind), tensor
    )[""]


def pixels(picture: GridPicture) -> np.ndarray:
    return np.asarray(to_image(picture))


def test_constant_maps_are_one_strip_of_their_values() -> None:
    """A pixel for each channel, from the layer's smallest value (black) to its largest."""
    picture = drawn(constant())
    assert picture.constant == (1, 6, 6)
    assert picture.limits.shared == (-1, 7)
    assert pixels(picture).tolist() == [[127, 0, 32, 255]]
    assert np.array_equal(picture.stats, drawn(constant(), marks=False).stats)
    assert picture.values == 36


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1, 4, 6, 6),
        torch.full((1, 1, 6, 6), 3.0),
        torch.full((1, 4, 1, 1), 3.0),
        torch.cat([constant(), torch.arange(36.0).reshape(1, 1, 6, 6)], 1),
        torch.cat([constant(), torch.full((1, 1, 6, 6), torch.nan)], 1),
    ],
    ids=["all zero", "one map", "one number each", "one that varies", "one of NaN"],
)
def test_what_stays_a_grid(tensor: Tensor) -> None:
    """A grid in which something can be seen, a dead layer, and a map alone."""
    picture = drawn(tensor)
    assert picture.constant is None
    assert not picture.strip


def test_clip_that_never_changes_is_a_strip_of_channels() -> None:
    """All slices of a channel are one value; slices that differ are a picture."""
    clip = torch.tensor([1.0, 1.99, 3]).reshape(1, 3, 1, 1, 1).repeat(1, 1, 2, 5, 5)
    assert pixels(drawn(clip)).tolist() == [[0, 126, 255]]
    clip[:, :, 1] += 1
    assert drawn(clip).constant is None


@pytest.mark.parametrize(("kind", "struck"), [("output", True), ("grad", False)])
def test_constant_gradient_is_not_struck_through(kind: str, struck: bool) -> None:
    """A gradient behind a pooling is constant by nature, an output is not; zeros are
    crossed out in both."""
    maps = torch.cat(
        [constant(torch.tensor([2.0, 0.0]), 9), torch.randn(1, 1, 9, 9)], 1
    )
    plain = pixels(drawn(maps, kind, nrow=1, marks=False, padding=0)).reshape(3, 81)
    found = pixels(drawn(maps, kind, nrow=1, padding=0)).reshape(3, 81)
    assert [(a != b).any() for a, b in zip(found, plain, strict=True)] == [
        struck,
        True,
        False,
    ]


def test_one_other_value_in_a_large_map_is_seen() -> None:
    """Its mean is the constant's but for rounding; its range is not."""
    maps = torch.full((2, 64, 64), 1000.0)
    maps[1, 3, 4] = 1001
    assert values.is_constant(values.statistics(maps)[0]).tolist() == [True, False]
