"""Maps that are constant: one strip of values where all are, marks where some are, or
neither."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawn_maps import drawn, noise
from numpy.testing import assert_array_equal
from torch import Tensor

from featviz.drawing import values
from featviz.drawing.picture import GridPicture, to_image

VALUES = torch.tensor([2.99, -1.0, 0.0, 7.0])


def constant(values: Tensor = VALUES, side: int = 6) -> Tensor:
    """Maps [1, C, side, side], each of one value."""
    return values.reshape(1, -1, 1, 1).expand(1, -1, side, side).clone()


def pixels(picture: GridPicture) -> np.ndarray:
    return np.asarray(to_image(picture))


def test_constant_maps_are_one_strip_of_their_values() -> None:
    """A pixel for each channel, from the layer's smallest value (black) to its largest."""
    picture = drawn(constant())
    assert picture.constant == (1, 6, 6)
    assert picture.limits.shared == (-1, 7)
    assert pixels(picture).tolist() == [[127, 0, 32, 255]]


def test_a_strip_has_the_statistics_of_its_maps() -> None:
    """They count all 36 values of a map, not the pixel that shows them."""
    picture = drawn(constant())
    assert_array_equal(picture.stats, drawn(constant(), marks=False).stats)
    assert picture.values == 36


RISING = torch.arange(36.0).reshape(1, 1, 6, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.zeros(1, 4, 6, 6), id="all zero"),
        pytest.param(torch.full((1, 1, 6, 6), 3.0), id="one map"),
        pytest.param(torch.full((1, 4, 1, 1), 3.0), id="one number each"),
        pytest.param(torch.cat([constant(), RISING], 1), id="one that varies"),
        pytest.param(torch.cat([constant(), RISING * torch.nan], 1), id="one of NaN"),
    ],
)
def test_what_stays_a_grid(tensor: Tensor) -> None:
    """A grid in which something can be seen, a dead layer, and a map alone."""
    picture = drawn(tensor)
    assert picture.constant is None
    assert not picture.strip


def test_clip_that_never_changes_is_a_strip_of_channels() -> None:
    """A clip is a strip where all slices of each channel are one value."""
    levels = torch.tensor([1.0, 1.99, 3]).reshape(1, 3, 1, 1, 1)
    clip = levels.repeat(1, 1, 2, 5, 5)
    assert pixels(drawn(clip)).tolist() == [[0, 126, 255]]


def test_clip_whose_slices_differ_is_a_grid() -> None:
    """Slices are drawn where they differ, though each of them is constant."""
    clip = torch.tensor([1.0, 2.0]).reshape(1, 1, 2, 1, 1).expand(1, 3, 2, 5, 5)
    assert drawn(clip).constant is None


@pytest.mark.parametrize(
    ("capture", "expected"),
    [
        ("output", [True, True, False]),
        ("grad", [False, True, False]),
    ],
)
def test_constant_gradient_is_not_struck_through(
    capture: str,
    expected: list[bool],
) -> None:
    """A gradient behind a pooling is constant by nature, an output is not; zeros are
    crossed out in both."""
    twos_and_zeros = constant(torch.tensor([2.0, 0.0]), side=9)
    maps = torch.cat([twos_and_zeros, noise(1, 1, 9, 9)], 1)
    marked = pixels(drawn(maps, capture, nrow=1, padding=0))
    plain = pixels(drawn(maps, capture, nrow=1, padding=0, marks=False))
    changed = (marked != plain).reshape(3, -1).any(1)
    assert changed.tolist() == expected


def test_one_other_value_in_a_large_map_is_seen() -> None:
    """Its mean is the constant's but for rounding; its range is not."""
    maps = torch.full((2, 64, 64), 1000.0)
    maps[1, 3, 4] = 1001
    stats = values.statistics(maps)
    assert values.is_constant(stats).tolist() == [True, False]
