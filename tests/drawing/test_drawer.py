"""Which tile stands where: orders, and one tile for near-equal maps, against numpy."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from drawn_maps import NAN, SITE, drawn, drawn_tiles, noise, row_of
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from torch import Tensor

from featviz.drawing import drawer, values
from featviz.drawing.normalize import Scale
from featviz.drawing.picture import caption, describe, to_image
from featviz.options import DrawOptions


def by_similarity(maps: Tensor) -> list[int]:
    """The order of maps [N, H, W]."""
    stats = values.statistics(maps)
    return drawer.by_similarity(maps.flatten(1), stats)


def collapse(maps: Tensor, threshold: float) -> dict[int, list[int]]:
    """Near-equal maps of [N, H, W], by the first of them."""
    stats = values.statistics(maps)
    return drawer.collapse(maps.flatten(1), stats, threshold)


def test_correlations_are_numpys() -> None:
    """The correlations of maps are Pearson's coefficients."""
    maps = noise(9, 50) * 3 + 7
    expected = np.corrcoef(maps.numpy())
    assert drawer.correlations(maps) == pytest.approx(expected, abs=1e-5)


def test_a_constant_map_correlates_with_none() -> None:
    """A constant map has coefficients of 0, where numpy's are NaN."""
    maps = noise(9, 50)
    maps[4] = 2.5
    correlations = drawer.correlations(maps)
    assert correlations[4] == pytest.approx(0, abs=1e-3)
    assert correlations[:, 4] == pytest.approx(0, abs=1e-3)


def test_similarity_restores_a_sequence() -> None:
    """A blob that wanders: shuffled, but for the first, its steps come back in their
    order."""
    x = torch.arange(60.0)
    centres = torch.arange(5, 55, 3)[:, None]
    steps = torch.exp(-(((x - centres) / 4) ** 2)).reshape(17, 6, 10)
    later = torch.randperm(16, generator=torch.Generator().manual_seed(3)) + 1
    shuffled = [0, *later.tolist()]
    order = by_similarity(steps[shuffled])
    assert [shuffled[channel] for channel in order] == list(range(17))


def test_similarity_puts_constants_and_nonfinite_maps_last() -> None:
    """Constants by value, the largest first; a map with NaN at the very end."""
    maps = noise(7, 5, 5)
    maps[0] = -1.0
    maps[2] = 3.0
    maps[4] = 0.0
    maps[1, 2, 2] = NAN
    order = by_similarity(maps)
    assert order[0] == 3
    assert set(order[:3]) == {3, 5, 6}
    assert order[3:] == [2, 4, 0, 1]


@pytest.mark.medium
@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 40),
    size=st.integers(1, 6),
    seed=st.integers(0, 9999),
    threshold=st.floats(0.05, 1.0),
    has_nan=st.booleans(),
)
def test_orders_and_groups_are_partitions(
    count: int,
    size: int,
    seed: int,
    threshold: float,
    has_nan: bool,
) -> None:
    """Every channel has exactly one place, and one group, led by its lowest index."""
    maps = noise(count, size, size, seed=seed).round()
    if has_nan:
        maps[seed % count, 0, 0] = NAN
    assert sorted(by_similarity(maps)) == list(range(count))
    groups = collapse(maps, threshold)
    assert sorted(chain(*groups.values())) == list(range(count))
    leaders = [min(group) for group in groups.values()]
    assert leaders == [group[0] for group in groups.values()]
    assert leaders == sorted(groups)


BASE = noise(16, 16)
NEAR = BASE + 0.1 * noise(16, 16, seed=1)
CORRELATION = float(np.corrcoef(BASE.flatten(), NEAR.flatten())[0, 1])


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        pytest.param(1.0, [0, 2], id="copies"),
        pytest.param(CORRELATION + 1e-3, [0, 2], id="not quite"),
        pytest.param(CORRELATION - 1e-3, [0, 2, 4], id="near copies"),
    ],
)
def test_collapse_joins_copies_and_near_copies(
    threshold: float,
    expected: list[int],
) -> None:
    """Scaled and shifted copies are alike, negatives and strangers are not; noise
    counts."""
    stranger = noise(16, 16, seed=2)
    maps = torch.stack([BASE, stranger, 3 * BASE + 5, -BASE, NEAR])
    groups = collapse(maps, threshold)
    assert groups.pop(0) == expected
    assert all(group == [leader] for leader, group in groups.items())


def test_constants_are_alike_only_if_equal() -> None:
    """Zeros join zeros, sevens sevens; NaN joins nothing, not even itself."""
    levels = torch.tensor([0.0, 7.0, 0.0, NAN, 7.0, NAN, 7.5])
    maps = levels[:, None, None].expand(7, 3, 3).contiguous()
    assert collapse(maps, 0.5) == {0: [0, 2], 1: [1, 4], 3: [3], 5: [5], 6: [6]}


@pytest.mark.parametrize("normalize", ["map", "layer"])
@pytest.mark.parametrize("order", ["mean", "similarity"])
def test_manifest_names_the_channel_of_each_tile(order: str, normalize: str) -> None:
    """The tile at place p is that of channel `channels[p]` in the plain grid."""
    shift = torch.arange(12).mul(5).remainder(7).reshape(1, 12, 1, 1)
    tensor = noise(1, 12, 6, 7) + shift
    channels = row_of(tensor, normalize=normalize, order=order).channels
    assert channels is not None
    assert sorted(channels) == list(range(12))
    plain = np.stack(drawn_tiles(tensor, normalize=normalize))
    ordered = drawn_tiles(tensor, normalize=normalize, order=order)
    assert_array_equal(ordered, plain[channels])


def test_order_by_mean_is_numpys() -> None:
    """The channel with the largest mean comes first."""
    tensor = noise(1, 12, 6, 7)
    means = tensor.mean((0, 2, 3)).numpy()
    assert row_of(tensor, order="mean").channels == np.argsort(-means).tolist()


@pytest.fixture
def twins() -> Tensor:
    """Channel 5 is a copy of channel 1, and 6 and 7 are copies of 0; means differ."""
    tensor = noise(1, 8, 9, 9)
    tensor[0, 5] = 2 * tensor[0, 1]
    tensor[0, 6:] = tensor[0, 0]
    means = torch.tensor([0.0, 9, 1, 8, 2, 3, 0, 0])
    return tensor + means.reshape(1, 8, 1, 1)


def test_collapsed_channels_share_the_tile_of_the_first(twins: Tensor) -> None:
    """The manifest lists the groups, and the caption says of how many."""
    row = row_of(twins, collapse=0.99)
    assert row.channels == [0, 1, 2, 3, 4]
    assert row.collapsed == {"0": [0, 6, 7], "1": [1, 5]}
    assert caption(row)["Maps"] == "5 of 8 (--collapse)"


def test_collapse_channels_and_order_work_together(twins: Tensor) -> None:
    """First groups, of which --channels chooses, and then the order."""
    row = row_of(twins, collapse=0.99, channels="top:3", order="mean")
    assert row.channels == [1, 3, 4]
    assert row.collapsed == {"1": [1, 5]}
    text = caption(row)
    assert text["Maps"] == "3 of 8 (--channels, --collapse)"
    assert text["Channels"] == "1,3-4"
    assert text["Collapsed"] == "1: 1,5"


def test_shared_tile_is_marked_in_its_corner_alone() -> None:
    """`×3` changes the lower right of one tile; all other pixels stay."""
    tensor = noise(1, 4, 40, 40)
    tensor[0, 2:] = tensor[0, 0]
    shared, alone = drawn_tiles(tensor, collapse=0.99)
    plain = drawn_tiles(tensor)
    assert_array_equal(alone, plain[1])
    changed = (shared != plain[0]).any(-1)
    assert changed.any()
    assert not changed[:-9].any()
    assert not changed[:, :-13].any()


@pytest.mark.parametrize(
    ("layout", "most", "expected"),
    [
        ("ncthw", 2, [1, 4]),
        ("ncthw", 1, [3]),
        ("windows", 2, [1, 4]),
        ("batch", 2, [0, 1]),
        ("nchw", 6, None),
    ],
)
def test_of_many_slices_some_are_drawn(
    layout: str, most: int, expected: list[int] | None
) -> None:
    """Of steps and windows those in the middle of equal parts, of a batch the first, which
    may be its best; the manifest says which."""
    options = DrawOptions(max_slices=most, scale=1)
    data = noise(2, 6, 1, 5, 5)
    picture = drawer.draw_tiles(data, layout, options, Scale("map"))
    row = describe(picture, SITE, (1, 2, 6, 5, 5), "output.png")
    assert row.slices == [most, 6]
    assert row.steps == expected


def test_vectors_keep_their_order() -> None:
    """The numbers of a vector stand by index, and none is left out."""
    vector = torch.tensor([[255.0, 255.0, 0.0, 90.0]])
    picture = drawn(vector, order="mean", collapse=0.9)
    assert picture.channels is None
    assert picture.collapsed == {}
    assert np.asarray(to_image(picture)).tolist() == [[255, 255, 0, 90]]
