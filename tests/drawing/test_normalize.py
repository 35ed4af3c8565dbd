"""From floats to levels, against torchvision's arithmetic and numpy's percentiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawn_maps import NAN
from numpy.testing import assert_array_equal
from torch import Tensor
from torchvision.utils import make_grid

from featviz.cli.run import run
from featviz.drawing import colormap, normalize, values
from featviz.drawing.values import ValueLimits
from featviz.errors import UsageError

INF = float("inf")


def random_maps(seed: int, *shape: int) -> Tensor:
    """Normal maps [N, H, W], each with a spread and an offset of its own."""
    random = torch.Generator().manual_seed(seed)
    spread = torch.rand(shape[0], 1, 1, generator=random) * 9 + 0.01
    offset = torch.randn(shape[0], 1, 1, generator=random) * 5
    return torch.randn(shape, generator=random) * spread + offset


def limits_of(text: str, maps: Tensor) -> ValueLimits:
    """The values that are drawn darkest and brightest under a scale."""
    stats = values.statistics(maps)
    return values.limits(normalize.parse_scale(text), maps, stats)


def drawn(
    text: str,
    maps: Tensor,
    count: int = 256,
    nonfinite: int | None = None,
) -> np.ndarray:
    """Maps as levels under a scale."""
    return values.to_levels(maps, limits_of(text, maps), count, nonfinite)


def assert_torchvisions(levels: np.ndarray, maps: Tensor, **options: object) -> None:
    """Levels are what make_grid and save_image make of each map: within one, and at
    least 99.9 % identical.

    Args:
        options: of make_grid.
    """
    grids = [make_grid(feature_map[None, None], **options)[0] for feature_map in maps]
    pixels = torch.stack(grids).mul(255).add_(0.5).clamp_(0, 255)
    expected = pixels.to(torch.uint8).numpy()
    assert levels.dtype == np.uint8
    assert levels.shape == expected.shape
    difference = np.abs(levels.astype(int) - expected)
    assert difference.max() <= 1
    assert (difference == 0).mean() >= 0.999


@pytest.mark.parametrize("shape", [(9, 56, 56), (90, 7, 7), (1, 224, 223)], ids=str)
def test_map_scale_is_torchvisions_scale_each(shape: tuple[int, int, int]) -> None:
    """`map` is normalize=True, scale_each=True; the maps stay as they are."""
    maps = random_maps(0, *shape)
    before = maps.clone()
    assert_torchvisions(drawn("map", maps), maps, normalize=True)
    assert_array_equal(maps, before)


@pytest.mark.parametrize("offset", [0.0, 15.0, -17.0, 300.0, 1e4])
def test_map_scale_far_from_zero(offset: float) -> None:
    """An offset many times the spread costs no grey level."""
    maps = random_maps(0, 20, 40, 40) + offset
    assert_torchvisions(drawn("map", maps), maps, normalize=True)


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_positive_scale_begins_at_zero(offset: float) -> None:
    """It is torchvision's value_range from zero to the largest value, also where all
    values are above."""
    maps = random_maps(0, 9, 40, 40) + offset
    ends = (0.0, float(maps.max()))
    assert_torchvisions(drawn("positive", maps), maps, normalize=True, value_range=ends)


def test_layer_scale_shares_the_extremes_of_all_maps() -> None:
    """The scale `layer` is torchvision's value_range from the smallest value to the
    largest."""
    maps = random_maps(0, 30, 33, 31)
    extremes = (float(maps.min()), float(maps.max()))
    levels = drawn("layer", maps)
    assert_torchvisions(levels, maps, normalize=True, value_range=extremes)


def test_range_scale_clips_to_its_numbers() -> None:
    """The scale `range` is torchvision's value_range."""
    maps = random_maps(0, 30, 33, 31)
    levels = drawn("range:-2.5,4", maps)
    assert_torchvisions(levels, maps, normalize=True, value_range=(-2.5, 4.0))


def test_no_scale_takes_values_as_0_to_1() -> None:
    """`none` is save_image without normalize: below 0 is black, above 1 white."""
    maps = random_maps(1, 30, 33, 31) / 3
    levels = drawn("none", maps)
    assert_torchvisions(levels, maps)
    assert (levels[maps.numpy() <= 0] == 0).all()
    assert (levels[maps.numpy() >= 1] == 255).all()


@pytest.mark.parametrize("count", [256, 254])
@pytest.mark.parametrize("factor", [1e-3, 0.77, 12.0, 3e5])
def test_symmetric_scale_keeps_zero_in_the_middle(count: int, factor: float) -> None:
    """Zero is the middle level, and the larger extreme reaches its end."""
    shares = torch.tensor([0.0, 1.0, -0.25, 0.5, -0.5])
    levels = drawn("symmetric", (shares * factor).reshape(1, 1, 5), count)
    expected = (shares.numpy() + 1) / 2 * (count - 1)
    assert levels.flatten() == pytest.approx(expected, abs=0.51)
    assert levels.max() == count - 1


def test_one_large_value_does_not_whiten_the_others() -> None:
    """symmetric-percentile ends at the percentile of the values that are not zero: what
    is beyond is clipped, zero stays in the middle, and all else is numpy's."""
    maps = torch.randn(4, 30, 30, generator=torch.Generator().manual_seed(0))
    maps[:, ::2] = 0
    maps[1, 1, 1] = 1e6
    maps[2, 3, 3] = -1e6
    limit = np.percentile(maps[maps != 0].abs().numpy(), 99)
    expected = (maps.double().numpy().clip(-limit, limit) / limit + 1) / 2 * 255
    levels = drawn("symmetric-percentile:99", maps)
    assert levels == pytest.approx(expected, abs=1)
    assert levels[1, 1, 1] == 255
    assert levels[2, 3, 3] == 0
    assert set(levels[:, ::2].flat) <= {127, 128}


@pytest.mark.parametrize("mode", ["symmetric", "symmetric-percentile:99"])
def test_zeros_alone_are_in_the_middle_of_a_symmetric_scale(mode: str) -> None:
    """Zeros have the middle level where no value is there for a percentile."""
    levels = drawn(mode, torch.zeros(2, 3, 3))
    assert set(levels.flat) <= {127, 128}


@pytest.mark.parametrize("numbers", [(1, 99), (0, 100), (25, 50)], ids=str)
def test_percentile_scale_is_numpys(numbers: tuple[int, int]) -> None:
    """The limits are numpy's percentiles of all finite values, and what lies outside is
    clipped."""
    maps = random_maps(2, 12, 20, 20)
    maps[3, 4, 5] = NAN
    array = maps.numpy()
    bottom, top = np.percentile(array[np.isfinite(array)], numbers)
    limits = limits_of("percentile:{},{}".format(*numbers), maps)
    assert limits.shared == pytest.approx((bottom, top), rel=1e-6)
    levels = values.to_levels(maps, limits, 254, 255)
    assert (levels[array <= bottom - 1e-4] == 0).all()
    assert (levels[array >= top + 1e-4] == 253).all()


def test_equal_percentiles_split_dark_from_bright() -> None:
    """Where both percentiles are one value, what lies above it is bright and the rest
    dark."""
    maps = torch.zeros(1, 10, 10)
    maps[0, 0, 0] = 5
    maps[0, 0, 1] = -5
    levels = drawn("percentile:10,90", maps)[0]
    assert levels[0, 0] == 255
    assert levels[0, 1] == 0
    assert set(levels[1:].flat) <= {0, 128}


@pytest.mark.parametrize("mode", ["map", "layer"])
@pytest.mark.parametrize(
    ("value", "level"),
    [
        (0.0, 0),
        (7.0, 128),
        (-3.0, 128),
        (1e-20, 128),
        (1e20, 128),
    ],
)
def test_constant_map_is_told_from_a_dark_one(
    mode: str,
    value: float,
    level: int,
) -> None:
    """A constant map is black only where it is zero; else it has the middle level."""
    assert (drawn(mode, torch.full((2, 4, 4), value)) == level).all()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("map", [[0] * 4, [128] * 4, [0, 64, 128, 255]]),
        ("layer", [[0] * 4, [255] * 4, [0, 51, 102, 204]]),
    ],
)
def test_constant_maps_among_others(mode: str, expected: list[list[int]]) -> None:
    """Under `map`, flat maps change nothing for the others; under `layer` they are like
    others."""
    maps = torch.tensor([[0.0] * 4, [5.0] * 4, [0.0, 1, 2, 4]])
    assert drawn(mode, maps[:, None])[:, 0].tolist() == expected


TINY = pytest.mark.parametrize("exponent", [-98, -104, -110, -121])
SCALES = pytest.mark.parametrize(
    "mode", ["map", "layer", "symmetric", "percentile:5,95"]
)
TWO_RAMPS = torch.linspace(0, 1, 64).reshape(1, 8, 8) * torch.tensor([[[1.0]], [[0.5]]])


@TINY
@SCALES
def test_maps_of_tiny_ranges_are_drawn_like_others(exponent: int, mode: str) -> None:
    """Down to the smallest normal float, where the reciprocal of a range overflows: the
    levels are those of the same map times a power of two."""
    tiny = TWO_RAMPS * 2.0**exponent
    assert float(tiny[tiny > 0].min()) >= 2.0**-128
    assert_array_equal(drawn(mode, tiny), drawn(mode, TWO_RAMPS))


@TINY
@SCALES
def test_maps_of_tiny_ranges_may_have_holes(exponent: int, mode: str) -> None:
    """A map with a NaN is drawn by torch's arithmetic, not in the compiled loop."""
    tiny = TWO_RAMPS * 2.0**exponent
    tiny[1, 3, 3] = NAN
    levels = drawn(mode, tiny, 254, nonfinite=255)
    assert levels[0].max() == 253
    assert np.argwhere(levels == 255).tolist() == [[1, 3, 3]]


def test_one_number_maps_share_the_layers_scale() -> None:
    """Maps of one pixel differ by their values, not all black."""
    maps = torch.tensor([0.0, 7.0, -3.0]).reshape(3, 1, 1)
    limits = limits_of("map", maps)
    assert limits.mode == "layer"
    assert limits.shared == (-3.0, 7.0)
    assert drawn("map", maps).flatten().tolist() == [77, 255, 0]


@pytest.mark.parametrize("text", ["map", "layer", "symmetric", "none", "range:-1,2"])
def test_nonfinite_values_change_nothing_for_the_others(text: str) -> None:
    """NaN and Inf get their own index, and all finite values keep the level they have."""
    maps = random_maps(3, 8, 9, 9)
    holes = {
        (2, 4, 4): NAN,
        (5, 1, 1): INF,
        (7, 0, 0): -INF,
    }
    for position in holes:
        # an extreme would take part in the scale
        maps[position] = maps[position[0]].median()
    clean = drawn(text, maps, 254)
    for position, value in holes.items():
        clean[position] = 255
        maps[position] = value
    assert_array_equal(drawn(text, maps, 254, nonfinite=255), clean)


EVERY_SCALE = ["map", "layer", "none", "symmetric", "range:0,1", "percentile:0,100"]


@pytest.mark.parametrize("text", EVERY_SCALE)
def test_a_map_of_nan_among_others(text: str) -> None:
    """A map of NaN is all non-finite, and the others are drawn."""
    maps = random_maps(4, 3, 5, 5)
    maps[1] = NAN
    levels = drawn(text, maps, 254, nonfinite=255)
    assert (levels[1] == 255).all()
    assert (levels[[0, 2]] < 254).all()
    assert len(np.unique(levels[0])) > 1


@pytest.mark.parametrize("text", EVERY_SCALE)
def test_a_map_of_nan_alone(text: str) -> None:
    """A map of NaN needs no finite value to make a scale of."""
    levels = drawn(text, torch.full((1, 5, 5), NAN), 254, nonfinite=255)
    assert (levels == 255).all()


RANGE = "expected range:LO,HI with LO below HI"
PERCENTILE = "expected percentile:LO,HI with LO below HI from 0 to 100"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--normalize '' is no normalization mode"),
        ("maps", "--normalize 'maps' is no normalization mode"),
        ("range", "'range' is no normalization mode"),
        ("range:1", RANGE),
        ("range:a,b", RANGE),
        ("range:2,2", RANGE),
        ("range:0,inf", RANGE),
        ("percentile:99,1", PERCENTILE),
        ("percentile:1,101", PERCENTILE),
        ("symmetric-percentile:101", "expected symmetric-percentile:P from 0 to 100"),
    ],
)
def test_no_scale_is_a_usage_error(text: str, message: str) -> None:
    """What is no normalization mode is named with its value, and the hint tells what is
    one."""
    with pytest.raises(UsageError, match=message) as caught:
        normalize.parse_scale(text)
    assert caught.value.hint


def test_a_misspelt_scale_is_told_the_nearest() -> None:
    """A slip in `percentile` gets its spelling."""
    with pytest.raises(UsageError) as caught:
        normalize.parse_scale("percentil:99")
    assert caught.value.hint == "did you mean percentile:LO,HI?"


EVERY_MODE = pytest.mark.parametrize(
    "mode",
    normalize.MODES.values(),
    ids=normalize.MODES,
)


@EVERY_MODE
def test_a_scale_is_drawn_by_its_spelling(mode: normalize.ScaleMode) -> None:
    """Its record says whether all maps share its limits."""
    name = mode.spelling.partition(":")[0]
    text = mode.example or name
    assert normalize.parse_scale(text)[0] == name
    limits = limits_of(text, random_maps(6, 4, 5, 5))
    assert limits.mode == name
    assert (limits.shared is not None) == mode.shared


@EVERY_MODE
def test_a_scale_is_in_the_help_and_in_the_hint(mode: normalize.ScaleMode) -> None:
    """The text of the option, and what is said of a wrong scale, are made of its record."""
    (option,) = [option for option in run.params if option.name == "normalize"]
    assert f"{mode.spelling}: {mode.description}" in option.help
    with pytest.raises(UsageError) as caught:
        normalize.parse_scale("?")
    assert mode.spelling in str(caught.value.hint)


@pytest.mark.parametrize(
    ("kind", "reduce", "scale", "cmap"),
    [
        ("output", None, ("map", ()), "grey"),
        ("input", None, ("map", ()), "grey"),
        ("grad", None, ("symmetric-percentile", (99,)), "coolwarm"),
        ("grad-input", None, ("symmetric-percentile", (99,)), "coolwarm"),
        # of the gradient of the image, one picture of all channels, and kernels
        ("saliency", None, ("map", ()), "grey"),
        ("output", "mean", ("map", ()), "grey"),
        ("output", "gradcam", ("positive", ()), "grey"),
        ("output", "xgradcam", ("symmetric", ()), "coolwarm"),
        ("grad", "gradxact", ("symmetric", ()), "coolwarm"),
    ],
)
def test_each_kind_of_capture_has_a_scale_and_colours_of_its_own(
    kind: str, reduce: str | None, scale: tuple[str, tuple[float, ...]], cmap: str
) -> None:
    """What has a sign is drawn around zero, in two colours."""
    assert normalize.parse_scale("auto", kind, reduce) == scale
    assert colormap.decide_cmap("auto", kind, reduce=reduce) == cmap
