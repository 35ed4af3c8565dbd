"""The numbers of `diff`: differences of arrays, and what a run's files say of the
values."""

from __future__ import annotations

import io
import math
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image
from torch import Tensor

from featviz.diff.compare import (
    compare,
    compare_stats,
    no_change,
    scale_of,
    signed,
    worst_first,
)
from featviz.diff.comparison import Comparison, OnlyIn, PredictionChange
from featviz.diff.matching import compared_tensor
from featviz.diff.output import diff_table
from featviz.diff.tensors import (
    TensorChange,
    TensorPair,
    from_picture,
    from_tensor,
    map_shape,
)
from featviz.drawing import drawer
from featviz.drawing.picture import describe, encode
from featviz.layout.layouts import LAYOUTS
from featviz.options import DrawOptions
from featviz.options.commands import DiffThresholds
from featviz.records import (
    CaptureKey,
    CaptureSite,
    ClassScore,
    Hints,
    Layer,
    Trace,
)
from featviz.rundir.schema import Capture

NUMBERS = st.floats(-1e6, 1e6, width=32) | st.sampled_from(
    [np.nan, np.inf, -np.inf, 0.0, -0.0]
)
PAIRS = array_shapes(min_dims=2, max_dims=2, max_side=6).flatmap(
    lambda shape: st.tuples(*[arrays(np.float32, shape, elements=NUMBERS)] * 2)
)


def unlike(base: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Values that are no number on one side and something else on the other."""
    equal = (base == new) | (np.isnan(base) & np.isnan(new))
    return ~equal & ~(np.isfinite(base) & np.isfinite(new))


def largest(base: np.ndarray, new: np.ndarray) -> float:
    """The largest finite absolute value of both."""
    values = np.concatenate([base, new], axis=None)
    return float(abs(values[np.isfinite(values)]).max(initial=0))


@pytest.mark.medium
@settings(max_examples=100, deadline=None)
@given(PAIRS, st.floats(0, 1e6), st.floats(0, 1))
def test_a_channel_differs_as_allclose_says(
    pair: tuple[np.ndarray, np.ndarray], margin: float, tolerance: float
) -> None:
    """numpy.isclose(rtol=tolerance, atol=tolerance * scale), on the larger of both
    values."""
    base, new = (values.astype(np.float64) for values in pair)
    scale = margin + largest(base, new)

    change = compare(*pair, scale)

    with np.errstate(all="ignore"):
        gap = abs(new - base)
        limit = tolerance * (np.maximum(abs(base), abs(new)) + scale)
        near = np.isclose(gap, limit, rtol=1e-9)
    finite = np.isfinite(base) & np.isfinite(new)
    odd = unlike(base, new)
    expected = ((gap > limit) & finite).any(1) | odd.any(1)
    sure = ~(near & finite).any(1)
    np.testing.assert_array_equal(change.differs(tolerance)[sure], expected[sure])
    np.testing.assert_array_equal(change.unlike, odd.sum(1))
    assert ((change.relative >= 0) & (change.relative <= 1)).all()


@pytest.mark.medium
def test_equal_is_no_change() -> None:
    """Not by one bit, whatever the values; two zero channels are alike."""
    values = np.random.default_rng(0).normal(size=(5, 150_000)).astype(np.float32)
    values[1] = 0
    values[2, ::3] = np.nan
    values[3, ::3] = -np.inf
    change = compare(values, values.copy(), 5.0)
    expected = no_change(5, 150_000)
    for name in ("absolute", "relative", "cosine", "unlike"):
        column = getattr(expected, name)
        np.testing.assert_allclose(getattr(change, name), column, rtol=1e-12)
    assert change.layer_cosine == pytest.approx(1)
    assert expected.layer_cosine == pytest.approx(1)
    assert not change.differs(0.0).any()


@pytest.mark.medium
def test_cosine_is_torchs() -> None:
    """Over all blocks of a large channel; a zero channel against another gives 0."""
    rng = np.random.default_rng(0)
    base, new = rng.normal(size=(2, 4, 200_000)) * 1e200
    base[2] = 0
    new[3] = -base[3]
    oracle = torch.nn.functional.cosine_similarity(
        torch.from_numpy(base / 1e200), torch.from_numpy(new / 1e200), dim=1
    )
    np.testing.assert_allclose(compare(base, new, 1e200).cosine, oracle, atol=1e-12)
    assert compare(base, new, 1e200).cosine[3] == pytest.approx(-1)


@pytest.mark.parametrize(("size", "width"), [(1e-200, 5), (1.0, 1), (1e200, 5)])
def test_the_cosine_of_a_layer_is_that_of_all_its_values(
    size: float, width: int
) -> None:
    """numpy's, over all channels; one that was zero before does not make it 0."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=(8, width))
    new = base + 0.1 * rng.normal(size=(8, width))
    base[3] = 0
    new[3] = 1e-6
    expected = (base * new).sum() / np.linalg.norm(base) / np.linalg.norm(new)
    assert expected > 0.98

    change = compare(base * size, new * size, size)

    assert change.layer_cosine == pytest.approx(expected)
    assert width == 1 or change.cosine[3] == 0


def test_the_cosine_of_a_layer_against_zeros_is_zero() -> None:
    """Nothing points anywhere."""
    assert compare(np.zeros((2, 3)), np.ones((2, 3)), 1.0).layer_cosine == 0


def test_statistics_have_no_cosine() -> None:
    """Neither channels nor the layer."""
    change = compare_stats(*np.ones((2, 3, 6), np.float32), 1.0)
    assert np.isnan(change.layer_cosine)
    assert np.isnan(change.cosine).all()


def test_differences_have_a_sign_beyond_the_slack() -> None:
    """Set against the larger value and the scale; none where it is within the slack."""
    new = np.array([[1, -1, 0.1]])
    differences = signed(np.zeros((1, 3)), new, 1.0, np.array([0.2]))
    np.testing.assert_allclose(differences, [[0.4, -0.4, 0]])


def test_the_cosine_of_single_numbers_is_none() -> None:
    """A logit that crosses zero is no opposite; nor are equal ones more than equal."""
    assert np.isnan(compare(np.array([[1e-6]]), np.array([[-1e-6]]), 1.0).cosine).all()
    assert np.isnan(no_change(3, 1).cosine).all()


def test_statistics() -> None:
    """The four moments count and so do values that are not finite; zeros do not."""
    base = np.array([[-1, 2, 0.5, 1, 0.25, 0]] * 4, np.float32)
    new = base.copy()
    new[1, 4] = 0.5
    new[2, 3] = 1.5
    new[3, 5] = 7
    change = compare_stats(base, new, scale_of(base, new))
    np.testing.assert_array_equal(change.differs(1e-4), [False, False, True, True])
    np.testing.assert_allclose(change.absolute, [0, 0, 0.5, 0])
    np.testing.assert_allclose(change.relative, [0, 0, 0.5 / 3.5, 0])
    np.testing.assert_array_equal(change.unlike, [0, 0, 0, 7])


class WrittenCapture(NamedTuple):
    """What `run` writes of one capture."""

    row: Capture
    """Of the manifest."""
    picture: Image.Image
    """As it is read back."""
    stats: np.ndarray
    """[channels, 6]."""


def captured(tensor: Tensor, hints: Hints, **options: Any) -> dict[str, WrittenCapture]:
    """What `run` writes of a tensor, by the key of the capture."""
    site = CaptureSite(Layer(1, "layer", "Layer"), "output", 0, "")
    captures = {}
    for key, picture in drawer.draw(
        DrawOptions(**options), site, tensor, hints
    ).items():
        row = describe(picture, site.inside(key), tensor.shape, "output.png")
        file = io.BytesIO()
        encode(picture, file, "png", {})
        captures[key] = WrittenCapture(
            row=Capture(**asdict(row)), picture=Image.open(file), stats=picture.stats
        )
    return captures


def pixels_of(picture: Image.Image) -> tuple[np.ndarray, np.ndarray | None]:
    """Its levels, and its palette where it has one."""
    colors = picture.getpalette()
    return np.asarray(picture), None if colors is None else np.reshape(colors, (-1, 3))


POSITIONS = np.arange(24).reshape(2, 2, 3, 2).swapaxes(1, 2).flatten()
PIECES = Trace(grid=(1, 4, 6), axes=(0, 1), positions=POSITIONS)
"""6 windows of 2 × 2 places."""

SHAPES: dict[str, tuple[tuple[int, ...], Hints]] = {
    "nchw": ((1, 5, 6, 9), Hints()),
    "nhwc": ((1, 6, 9, 5), Hints(override="nhwc")),
    "tokens": ((1, 55, 7), Hints(override="tokens:6x9+1")),
    "ncl": ((1, 7, 54), Hints(override="ncl:6x9")),
    "heads": ((1, 3, 55, 4), Hints(override="heads:6x9+1")),
    "attention": ((1, 3, 8, 8), Hints(override="attention")),
    "nhw": ((1, 6, 9), Hints(override="nhw")),
    "sequence": ((2, 8, 11), Hints(override="sequence")),
    "vector": ((1, 11), Hints()),
    "rows": ((4, 11), Hints()),
    "batch": ((3, 5, 6, 9), Hints(override="batch")),
    "ncthw": ((1, 5, 3, 6, 9), Hints(override="ncthw")),
    "nthwc": ((1, 3, 6, 9, 5), Hints(override="nthwc")),
    "windows": ((6, 4, 5), Hints(trace=PIECES)),
}


def noise_of(layout: str) -> tuple[Tensor, Hints]:
    """A tensor of a layout, and how it is told."""
    shape, hints = SHAPES[layout]
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)), hints


def keeps(row: Capture) -> bool:
    """Whether a kept tensor would have all channels of a row."""
    kept = replace(row, tensor="output.npy")
    return TensorPair(kept.capture_key, (), (kept, kept), ()).has_tensors  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SHAPES)
def test_kept_tensors_have_the_channels_of_the_manifest(name: str) -> None:
    """Least, largest and mean value of each channel are those of stats.npz."""
    tensor, hints = noise_of(name)
    row, _, stats = captured(tensor, hints)[""]
    assert keeps(row)
    values = from_tensor(tensor.numpy(), row)
    assert len(values) == row.maps
    np.testing.assert_array_equal(values.min(1), stats[:, 0])
    np.testing.assert_array_equal(values.max(1), stats[:, 1])
    np.testing.assert_allclose(values.mean(1), stats[:, 2], atol=1e-6)


def test_tokens_behind_a_grid_are_left_out() -> None:
    """Least and largest value of each channel are those of the places."""
    tensor = torch.randn(1, 58, 7, generator=torch.Generator().manual_seed(0))
    captures = captured(tensor, Hints(override="tokens:6x9+1,3"))
    behind = math.prod(map_shape(captures["token_behind"].row))
    grid = captures[""]
    values = from_tensor(tensor.numpy(), grid.row, behind)
    np.testing.assert_array_equal(values.min(1), grid.stats[:, 0])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nchw", {}),
        ("nchw", {"cmap": "viridis"}),
        ("nhwc", {"normalize": "layer"}),
        ("tokens", {"normalize": "range:-5,5"}),
        ("ncl", {"scale": 3, "padding": 0, "nrow": 2}),
        ("heads", {"normalize": "symmetric", "cmap": "coolwarm"}),
        ("vector", {}),
        ("nchw", {"scale": 1, "padding": 5, "pad_value": 1.0}),
        ("sequence", {}),
        ("nchw", {"channels": "top:3"}),
        ("ncthw", {"max_slices": 2}),
    ],
    ids=str,
)
def test_pictures_give_values_back_within_half_a_level(
    name: str, options: dict[str, Any]
) -> None:
    """Of the drawn channels and slices, in the order of the maps."""
    tensor, hints = noise_of(name)
    row, picture, stats = captured(tensor, hints, **options)[""]

    channels, values, slack = from_picture(*pixels_of(picture), row, stats)

    assert channels == (row.channels or list(range(row.maps)))
    exact = from_tensor(tensor.numpy(), row)[channels]
    if row.slices:
        maps = exact.reshape(len(channels), row.slices[1], -1)
        exact = maps[:, row.drawn_slices].reshape(len(channels), -1)
    assert (abs(values - exact) <= slack[:, None]).all()
    assert (slack <= 0.51 * widest_scale(row, stats) / 253).all()


def widest_scale(row: Capture, stats: np.ndarray) -> float:
    """The widest scale of values that a picture can have."""
    if row.normalize.startswith("range"):
        return 10  # range:-5,5
    limits = stats[:, :2]
    return max(np.ptp(limits, axis=1).max(), 2 * abs(limits).max())


class DrawnImage(NamedTuple):
    """An image of a run, as far as its levels are read."""

    picture: Image.Image

    def levels(self, row: Capture) -> tuple[np.ndarray, np.ndarray | None]:
        return pixels_of(self.picture)


def drawn_pair(base: Tensor, new: Tensor) -> TensorPair:
    """Three channels of each of two tensors [C, H, W], as two runs have drawn them."""
    options = {"channels": "top:3"}
    before = captured(base[None], Hints(), **options)[""]
    after = captured(new[None], Hints(), **options)[""]
    return TensorPair(
        before.row.capture_key,
        (DrawnImage(before.picture), DrawnImage(after.picture)),  # type: ignore[arg-type]
        (before.row, after.row),
        (before.stats, after.stats),
    )


def test_pixels_are_compared_of_channels_that_both_have_drawn() -> None:
    """Each with the values, and half the levels, of its own channel."""
    noise = torch.randn(2, 5, 6, 9, generator=torch.Generator().manual_seed(0))
    # channels are chosen by their means
    means = torch.tensor([[10.0, 20, 30, 1, 1], [1, 40, 50, 60, 1]])
    tensors = noise + means[..., None, None]

    channels, before, after, slack = drawn_pair(*tensors).pixels()

    assert channels == [1, 2]
    exact = tensors[:, channels].flatten(2).numpy()
    spans = np.ptp(exact, axis=2).sum(0)
    np.testing.assert_allclose(slack, 0.501 * spans / 255, rtol=1e-5)
    assert (abs(np.stack([before, after]) - exact) <= slack[:, None]).all()


def test_pictures_show_what_is_not_finite() -> None:
    """As NaN, in its place; a map without any number is all NaN, a constant one its
    value."""
    tensor = torch.randn(1, 4, 6, 9)
    tensor[0, 1, 2, 3] = torch.inf
    tensor[0, 2] = torch.nan
    tensor[0, 3] = 7.0
    row, picture, stats = captured(tensor, Hints())[""]
    _, data, _ = from_picture(*pixels_of(picture), row, stats)
    expected = ~torch.isfinite(tensor[0]).flatten(1).numpy()
    np.testing.assert_array_equal(np.isnan(data), expected)
    np.testing.assert_array_equal(data[3], 7.0)


def test_a_palette_that_is_not_ours_gives_nothing() -> None:
    """Its levels stand for no values; nor do those of a palette with the ink of labels."""
    row, picture, stats = captured(torch.randn(1, 3, 6, 9), Hints(), cmap="viridis")[""]
    pixels, palette = pixels_of(picture)
    assert palette is not None
    assert from_picture(pixels, palette[:-1], row, stats) is None
    assert from_picture(pixels, palette[:0], row, stats) is None
    labelled = captured(torch.randn(1, 3, 24, 24), Hints(), cmap="viridis", labels=True)
    row, picture, stats = labelled[""]
    assert from_picture(*pixels_of(picture), row, stats) is None


def test_class_tokens_are_apart() -> None:
    """Their row holds a part of the kept tensor, and the grid's values leave them out."""
    tensor = torch.randn(1, 55, 7)
    tensor[0, 0] = 100.0
    hints = Hints(input_size=(96, 144), prefix_tokens=("class_token",))
    grid, token = captured(tensor, hints).values()
    assert keeps(grid.row)
    assert not keeps(token.row)
    values = from_tensor(tensor.numpy(), grid.row)
    np.testing.assert_array_equal(values, tensor[0, 1:].T)


def test_a_picture_of_another_size_gives_nothing() -> None:
    """Rather than tiles cut in the wrong place; so does a tensor of another layout."""
    tensor = torch.randn(1, 5, 6, 9)
    row, picture, stats = captured(tensor, Hints())[""]
    pixels, palette = pixels_of(picture)
    assert from_picture(pixels[:-1], palette, row, stats) is None
    assert from_tensor(tensor.permute(0, 2, 3, 1).numpy(), row) is None
    assert from_tensor(tensor[0, 0].numpy(), row) is None


def test_every_layout_is_read_back() -> None:
    """The tests above know a tensor of each layout in the table."""
    assert set(SHAPES) >= set(LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_arrays_that_do_not_fit_give_nothing(name: str) -> None:
    """Whatever shape a manifest claims, an array is read or left alone."""
    row = captured(*noise_of(name))[""].row
    for shape in ((), (0,), (1, 0, 0), (0, 0, 0, 0), (1, 0, 2, 2, 2), (1,) * 7):
        assert from_tensor(np.zeros(shape, np.float32), row) is None


def test_channels_that_lost_their_numbers_come_first() -> None:
    """However far the values of others are apart; those out of the mask are left out."""
    relative = np.array([0.9, 0.0, 0.5, 1.0])
    unlike = np.array([0, 2, 0, 0])
    differing = np.array([True, True, True, False])
    assert worst_first(relative, unlike, differing) == [1, 0, 2]


def changed(image: str, new: list[list[float]]) -> TensorChange:
    """The change of a layer from ones to these values [C, N] in an image."""
    values = np.array(new)
    change = compare(np.ones(values.shape), values, scale=1)
    return TensorChange(
        image=image,
        key=CaptureKey("conv", "output", 0, ""),
        type="Conv2d",
        index=1,
        by="tensors",
        change=change,
        differs=change.differs(0),
    )


def test_a_channel_that_lost_its_numbers_has_changed_as_far_as_can_be() -> None:
    """Its largest difference of finite values would say that nothing did."""
    layer = compared_tensor([changed("a.png", [[1, 1], [1, np.nan], [1, 3]])])
    assert layer.severity == 1
    assert layer.change.tolist() == [0, 1, 0.5]
    assert layer.changed == layer.most_changed == [1, 2]


def test_a_layer_is_shown_in_the_image_where_it_differs_most() -> None:
    """Of equal differences in the one where more channels differ."""
    images = [
        changed("a.png", [[1, np.nan], [1, 1], [1, 1]]),
        changed("b.png", [[1, np.inf], [1, np.nan], [1, 1]]),
        changed("c.png", [[9, 9], [9, 9], [9, 9]]),
    ]
    layer = compared_tensor(images)
    assert layer.image == "b.png"
    assert (layer.count, layer.channel_images) == ((3, 3), (6, 9))


def test_ten_changed_predictions_have_a_line_each() -> None:
    """Of twelve the first ten are named, and the last line counts the others."""
    three = ClassScore(index=3, name=None, score=0, probability=0.5)
    five = replace(three, index=5)
    nothing = OnlyIn({}, [])
    result = Comparison(
        base="a",
        new="b",
        thresholds=DiffThresholds(),
        images=(),
        layers=(),
        only_in_base=nothing,
        only_in_new=nothing,
        incomplete={},
        predictions=tuple(
            PredictionChange(f"{number}.png", [three], [five]) for number in range(12)
        ),
    )

    lines = str(diff_table(result)).splitlines()

    first = lines.index("12 of 12 predictions changed:")
    assert lines[first + 1] == "  0.png: class 3 50.0 % → class 5 50.0 %"
    assert lines[first + 10].startswith("  9.png")
    assert lines[first + 11] == "  and 2 more"
