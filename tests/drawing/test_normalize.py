"""From floats to levels, against torchvision's arithmetic and numpy's percentiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.utils import make_grid

from featviz.cli.run import run
from featviz.drawing import normalize, values
from featviz.errors import UsageError

NAN = float("nan")
INF = float("inf")


def random_maps(seed: int, *shape: int) -> Tensor:
    """Normal maps [N, H, W], each with a spread and an offset of its own."""
    random = torch.Generator().manual_seed(seed)
    spread = torch.rand(shape[0], 1, 1, generator=random) * 9 + 0.01
    offset = torch.randn(shape[0], 1, 1, generator=random) * 5
    return torch.randn(shape, generator=random) * spread + offset


def drawn(
    text: str, maps: Tensor, count: int = 256, nonfinite: int | None = None
) -> np.ndarray:
    """Maps as levels under a scale."""
    numbers = values.statistics(maps)[0]
    found = values.limits(
        normalize.parse_scale(text), maps, numbers[:, 0], numbers[:, 1]
    )
    return values.to_levels(maps, found, count, nonfinite)


def torchvision_levels(maps: Tensor, **options: object) -> np.ndarray:
    """What make_grid and save_image make of each map."""
    grids = [make_grid(part[None, None], **options)[0] for part in maps]  # type: ignore[arg-type]
    return torch.stack(grids).mul(255).add_(0.5).clamp_(0, 255).to(torch.uint8).numpy()


def assert_same_greys(found: np.ndarray, expected: np.ndarray) -> None:
    """Within one grey level, and at least 99.9 % identical."""
    assert found.dtype == np.uint8
    assert found.shape == expected.shape
    difference = np.abs(found.astype(int) - expected)
    assert difference.max() <= 1
    assert (difference == 0).mean() >= 0.999


@pytest.mark.parametrize("shape", [(9, 56, 56), (90, 7, 7), (1, 224, 223)])
def test_map_scale_is_torchvisions_scale_each(shape: tuple[int, int, int]) -> None:
    """`map` is normalize=True, scale_each=True."""
    maps = random_maps(0, *shape)
    before = maps.clone()
    assert_same_greys(drawn("map", maps), torchvision_levels(maps, normalize=True))
    assert torch.equal(maps, before)


@pytest.mark.parametrize("offset", [0.0, 15.0, -17.0, 300.0, 1e4])
def test_map_scale_far_from_zero(offset: float) -> None:
    """An offset many times the spread costs no grey level."""
    maps = random_maps(0, 20, 40, 40) + offset
    assert_same_greys(drawn("map", maps), torchvision_levels(maps, normalize=True))


def test_layer_and_range_scales_are_torchvisions_value_range() -> None:
    """`layer` shares the extremes of all maps; `range` clips to the numbers given."""
    maps = random_maps(0, 30, 33, 31)
    low = float(maps.min())
    high = float(maps.max())
    shared = torchvision_levels(maps, normalize=True, value_range=(low, high))
    assert_same_greys(drawn("layer", maps), shared)
    cut = torchvision_levels(maps, normalize=True, value_range=(-2.5, 4.0))
    assert_same_greys(drawn("range:-2.5,4", maps), cut)


def test_no_scale_takes_values_as_0_to_1() -> None:
    """`none` is save_image without normalize: below 0 is black, above 1 white."""
    maps = random_maps(1, 30, 33, 31) / 3
    found = drawn("none", maps)
    assert_same_greys(found, torchvision_levels(maps))
    assert (found[maps.numpy() <= 0] == 0).all()
    assert (found[maps.numpy() >= 1] == 255).all()


@pytest.mark.parametrize("count", [256, 254])
@pytest.mark.parametrize("factor", [1e-3, 0.77, 12.0, 3e5])
def test_symmetric_scale_keeps_zero_in_the_middle(count: int, factor: float) -> None:
    """Zero is the middle level, and the larger extreme reaches its end."""
    maps = torch.tensor([[[0.0, 1.0, -0.25]], [[0.5, -0.5, 0.0]]]) * factor
    found = drawn("symmetric", maps, count)
    middle = (count - 1) / 2
    assert np.abs(found[[0, 1], 0, [0, 2]] - middle).max() <= 0.5
    assert found[0, 0, 1] == count - 1
    assert abs(found[0, 0, 2] - middle * 0.75) <= 1
    assert int(found[1, 0, 0]) + int(found[1, 0, 1]) == pytest.approx(count - 1, abs=1)


def test_one_large_value_does_not_whiten_the_others() -> None:
    """symmetric-percentile ends at the percentile of the values that are not zero: what
    is beyond is clipped, zero stays in the middle, and all else is numpy's."""
    maps = torch.randn(4, 30, 30, generator=torch.Generator().manual_seed(0))
    maps[:, ::2] = 0
    maps[1, 1, 1], maps[2, 3, 3] = 1e6, -1e6
    values = maps[maps != 0].abs().numpy()
    limit = np.percentile(values, 99)
    levels = drawn("symmetric-percentile:99", maps)
    expected = ((np.clip(maps.numpy(), -limit, limit) / limit + 1) / 2 * 255).astype(
        np.float64
    )
    assert np.abs(levels - expected).max() <= 1
    assert levels[1, 1, 1] == 255
    assert levels[2, 3, 3] == 0
    assert set(levels[:, ::2].flat) <= {127, 128}
    assert set(drawn("symmetric-percentile:99", torch.zeros(2, 3, 3)).flat) <= {
        127,
        128,
    }


@pytest.mark.parametrize("numbers", [(1.0, 99.0), (0.0, 100.0), (25.0, 50.0)])
def test_percentile_scale_is_numpys(numbers: tuple[float, float]) -> None:
    """The limits are numpy's percentiles of all finite values, and what lies outside is
    clipped."""
    maps = random_maps(2, 12, 20, 20)
    maps[3, 4, 5] = NAN
    finite = maps.numpy()[np.isfinite(maps.numpy())]
    bottom, top = np.percentile(finite, numbers)
    rows = values.statistics(maps)[0]
    limits = values.limits(("percentile", numbers), maps, rows[:, 0], rows[:, 1])
    assert limits.shared == pytest.approx((bottom, top), rel=1e-6)
    tiles = values.to_levels(maps, limits, 254, 255)
    assert (tiles[maps.numpy() <= bottom - 1e-4] == 0).all()
    assert (tiles[maps.numpy() >= top + 1e-4] == 253).all()


def test_equal_percentiles_split_dark_from_bright() -> None:
    """Where both percentiles are one value, what lies above it is bright and the rest
    dark."""
    maps = torch.zeros(1, 10, 10)
    maps[0, 0, 0], maps[0, 0, 1] = 5, -5
    found = drawn("percentile:10,90", maps)[0]
    assert found[0, 0] == 255
    assert found[0, 1] == 0
    assert set(found[1:].flat) <= {0, 128}


@pytest.mark.parametrize("mode", ["map", "layer"])
@pytest.mark.parametrize(
    ("value", "level"), [(0.0, 0), (7.0, 128), (-3.0, 128), (1e-20, 128), (1e20, 128)]
)
def test_constant_map_is_told_from_a_dark_one(
    mode: str, value: float, level: int
) -> None:
    """A constant map is black only where it is zero; else it has the middle level."""
    assert (drawn(mode, torch.full((2, 4, 4), value)) == level).all()


def test_constant_map_among_others_keeps_theirs() -> None:
    """Under `map`, flat maps change nothing for the others; under `layer` they are like
    others."""
    maps = torch.stack(
        [torch.zeros(2, 2), torch.full((2, 2), 5.0), torch.tensor([[0, 1], [2, 4]])]
    )
    assert drawn("map", maps).reshape(3, 4).tolist() == [
        [0] * 4,
        [128] * 4,
        [0, 64, 128, 255],
    ]
    assert drawn("layer", maps).reshape(3, 4).tolist() == [
        [0] * 4,
        [255] * 4,
        [0, 51, 102, 204],
    ]


@pytest.mark.parametrize("mode", ["map", "layer", "symmetric", "percentile:5,95"])
@pytest.mark.parametrize("exponent", [-98, -104, -110, -121])
def test_maps_of_tiny_ranges_are_drawn_like_others(exponent: int, mode: str) -> None:
    """Down to the smallest normal float, where the reciprocal of a range overflows: the
    levels are those of the same map times a power of two, in a compiled loop and by
    torch's arithmetic."""
    maps = torch.linspace(0, 1, 64).reshape(1, 8, 8) * torch.tensor([1.0, 0.5]).reshape(
        2, 1, 1
    )
    tiny = maps * 2.0**exponent
    assert float(tiny[tiny > 0].min()) >= 2.0**-128
    assert np.array_equal(drawn(mode, tiny), drawn(mode, maps))
    tiny[1, 3, 3] = NAN
    levels = drawn(mode, tiny, 254, nonfinite=255)
    assert levels[0].max() == 253
    assert levels[1, 3, 3] == 255
    assert levels[1].max() < 254 + 2


def test_one_number_maps_share_the_layers_scale() -> None:
    """Maps of one pixel differ by their values, not all black."""
    maps = torch.tensor([0.0, 7.0, -3.0]).reshape(3, 1, 1)
    numbers = values.statistics(maps)[0]
    found = values.limits(("map", ()), maps, numbers[:, 0], numbers[:, 1])
    assert (found.mode, found.shared) == ("layer", (-3.0, 7.0))
    assert values.to_levels(maps, found, 256, None).flatten().tolist() == [77, 255, 0]


@pytest.mark.parametrize("text", ["map", "layer", "symmetric", "none", "range:-1,2"])
def test_nonfinite_values_change_nothing_for_the_others(text: str) -> None:
    """NaN and Inf get their own index, and all finite values keep the level they have."""
    maps = random_maps(3, 8, 9, 9)
    spots = [(2, 4, 4), (5, 1, 1), (7, 0, 0)]
    for spot in spots:
        maps[spot] = maps[spot[0]].median()  # an extreme would take part in the scale
    clean = drawn(text, maps, 254)
    for spot, value in zip(spots, (NAN, INF, -INF), strict=True):
        maps[spot] = value
    levels = drawn(text, maps, 254, nonfinite=255)
    holes = ~np.isfinite(maps.numpy())
    assert holes.sum() == 3
    assert (levels[holes] == 255).all()
    assert np.array_equal(levels[~holes], clean[~holes])


@pytest.mark.parametrize(
    "text", ["map", "layer", "none", "symmetric", "range:0,1", "percentile:0,100"]
)
def test_maps_without_a_finite_value(text: str) -> None:
    """A map of NaN is all non-finite, beside others and alone, whatever the scale."""
    maps = random_maps(4, 3, 5, 5)
    maps[1] = NAN
    found = drawn(text, maps, 254, nonfinite=255)
    assert (found[1] == 255).all()
    assert (found[[0, 2]] < 254).all()
    assert len(np.unique(found[0])) > 1
    assert (drawn(text, maps[1:2], 254, nonfinite=255) == 255).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--normalize '' is no normalization mode"),
        ("maps", "--normalize 'maps' is no normalization mode"),
        ("range", "'range' is no normalization mode"),
        *(
            (f"range:{numbers}", "expected range:LO,HI with LO below HI")
            for numbers in ("1", "a,b", "2,2", "0,inf")
        ),
        *(
            (
                f"percentile:{numbers}",
                "expected percentile:LO,HI with LO below HI from 0 to 100",
            )
            for numbers in ("99,1", "1,101")
        ),
        ("symmetric-percentile:101", "expected symmetric-percentile:P from 0 to 100"),
    ],
)
def test_no_scale_is_a_usage_error(text: str, message: str) -> None:
    """What is no normalization mode is named with its value, and the hint tells what is
    one."""
    with pytest.raises(UsageError, match=message) as caught:
        normalize.parse_scale(text)
    assert caught.value.hint


@pytest.mark.parametrize("mode", normalize.MODES.values(), ids=normalize.MODES)
def test_a_scale_is_one_record(mode: normalize.ScaleMode) -> None:
    """A mode's help, message, limits and legend all come from its record: each can be
    drawn by its spelling, is in the help and in what is said of a wrong scale, and has
    words for its ends."""
    name = mode.spelling.partition(":")[0]
    text = mode.example or name
    assert normalize.parse_scale(text)[0] == name
    maps = random_maps(6, 4, 5, 5)
    rows = values.statistics(maps)[0]
    limits = values.limits(normalize.parse_scale(text), maps, rows[:, 0], rows[:, 1])
    assert (limits.shared is not None) == mode.shared
    assert limits.mode == name
    with pytest.raises(UsageError) as caught:
        normalize.parse_scale("?")
    assert mode.spelling in str(caught.value.hint)
    option = next(p for p in run.params if p.name == "normalize")
    assert f"{mode.spelling}: {mode.description}" in option.help
    assert mode.legend
    assert all(0 <= level <= 255 and meaning for level, meaning in mode.legend)
