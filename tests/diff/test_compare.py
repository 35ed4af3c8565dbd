"""The numbers of `diff`: differences of arrays, and what a run's files say of the
values."""

from __future__ import annotations

import io
import math
from dataclasses import asdict, replace
from types import SimpleNamespace
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
from featviz.diff.tensors import TensorPair, from_picture, from_tensor, map_shape
from featviz.drawing import drawer
from featviz.drawing.picture import describe, encode
from featviz.layout.layouts import LAYOUTS
from featviz.options import DrawOptions
from featviz.records import CaptureSite, Hints, Layer, Trace
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


@settings(max_examples=100, deadline=None)
@given(PAIRS, st.floats(0, 1e6), st.floats(0, 1))
def test_a_channel_differs_as_allclose_says(
    pair: tuple[np.ndarray, np.ndarray], size: float, tolerance: float
) -> None:
    """numpy.isclose(rtol=tolerance, atol=tolerance * scale), on the larger of both
    values."""
    base, new = pair
    size += max(abs(values[np.isfinite(values)]).max(initial=0) for values in pair)
    change = compare(base, new, size)
    b = base.astype(np.float64)
    n = new.astype(np.float64)
    with np.errstate(all="ignore"):
        larger = np.maximum(abs(b), abs(n))
        gap = abs(n - b)
        beyond = gap > tolerance * larger + tolerance * size
        near = np.isclose(gap, tolerance * (larger + size), rtol=1e-9)
    finite = np.isfinite(b) & np.isfinite(n)
    expected = (beyond & finite).any(1) | unlike(b, n).any(1)
    sure = ~(near & finite).any(1)
    np.testing.assert_array_equal(change.differs(tolerance)[sure], expected[sure])
    np.testing.assert_array_equal(change.unlike, unlike(b, n).sum(1))
    assert ((change.relative >= 0) & (change.relative <= 1)).all()


def test_equal_is_no_change() -> None:
    """Not by one bit, whatever the values; two zero channels are alike."""
    values = np.random.default_rng(0).normal(size=(5, 150_000)).astype(np.float32)
    values[1] = 0
    values[2, ::3] = np.nan
    values[3, ::3] = -np.inf
    change = compare(values, values.copy(), 5.0)
    for name, column in vars(no_change(5, 150_000)).items():
        if name != "products":
            np.testing.assert_allclose(
                getattr(change, name), column, rtol=1e-12, err_msg=name
            )
    assert change.layer_cosine == pytest.approx(no_change(5, 150_000).layer_cosine) == 1
    assert not change.differs(0.0).any()


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
    oracle = (base * new).sum() / np.linalg.norm(base) / np.linalg.norm(new)
    comparison = compare(base * size, new * size, size)
    assert comparison.layer_cosine == pytest.approx(oracle)
    assert oracle > 0.98
    assert width == 1 or comparison.cosine[3] == 0
    assert np.isnan(compare_stats(*np.ones((2, 3, 6), np.float32), 1.0).layer_cosine)
    assert compare(base * 0, new, 1.0).layer_cosine == 0


def test_differences_have_a_sign_beyond_the_slack() -> None:
    """Set against the larger value and the scale; none where it is within the slack."""
    found = signed(np.zeros((1, 3)), np.array([[1, -1, 0.1]]), 1.0, np.array([0.2]))
    np.testing.assert_allclose(found, [[0.4, -0.4, 0]])


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
    assert np.isnan(change.cosine).all()


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


PLACES = np.arange(24).reshape(2, 2, 3, 2).swapaxes(1, 2).flatten()
PIECES = Trace(grid=(1, 4, 6), axes=(0, 1), positions=PLACES)
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


def keeps(row: Capture) -> bool:
    """Whether a kept tensor would have all channels of a row."""
    kept = replace(row, tensor="output.npy")
    return TensorPair(kept.capture_key, (), (kept, kept), ()).keeps  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SHAPES)
def test_kept_tensors_have_the_channels_of_the_manifest(name: str) -> None:
    """Least, largest and mean value of each channel are those of stats.npz."""
    shape, hints = SHAPES[name]
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
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
    rows = captured(tensor, Hints(override="tokens:6x9+1,3"))
    behind = math.prod(map_shape(rows["token_behind"][0]))
    values = from_tensor(tensor.numpy(), rows[""][0], behind)
    np.testing.assert_array_equal(values.min(1), rows[""][2][:, 0])


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
    shape, hints = SHAPES[name]
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    row, picture, stats = captured(tensor, hints, **options)[""]
    ids, data, slack = from_picture(*pixels_of(picture), row, stats)
    kept = from_tensor(tensor.numpy(), row)
    assert ids == (row.channels or list(range(row.maps)))
    slices = row.slices[1] if row.slices else 1
    exact = (
        kept[ids]
        .reshape(len(ids), slices, -1)[:, row.drawn_slices]
        .reshape(len(ids), -1)
    )
    assert (abs(data - exact) <= slack[:, None]).all()
    spans = stats[ids, 1] - stats[ids, 0]
    fixed_width = (
        {"normalize": 10} if options.get("normalize", "") == "range:-5,5" else {}
    )
    scale_width = np.maximum(
        spans.max(), fixed_width.get("normalize", 2 * abs(stats[:, :2]).max())
    )
    assert (slack <= 0.51 * scale_width / 253).all()


def test_pixels_are_compared_of_channels_that_both_have_drawn() -> None:
    """Each with the values, and half the levels, of its own channel."""
    noise = torch.randn(2, 1, 5, 6, 9, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([[10.0, 20, 30, 1, 1], [1, 40, 50, 60, 1]])[
        :, None, :, None, None
    ]
    captures = [
        captured(tensor, Hints(), channels="top:3")[""] for tensor in noise * weights
    ]
    images = [
        SimpleNamespace(levels=lambda row, p=p: pixels_of(p)) for _, p, _ in captures
    ]
    rows = tuple(row for row, _, _ in captures)
    stats = tuple(channel_stats for _, _, channel_stats in captures)
    pair = TensorPair(rows[0].capture_key, tuple(images), rows, stats)
    ids, before, after, slack = pair.pixels()
    assert ids == sorted({*rows[0].channels} & {*rows[1].channels})
    assert 1 < len(ids) < 3
    exact = (noise * weights)[:, 0, ids].flatten(2).numpy()
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
    found = captured(
        tensor, Hints(input_size=(96, 144), prefix_tokens=("class_token",))
    )
    assert [keeps(row) for row, _, _ in found.values()] == [True, False]
    values = from_tensor(tensor.numpy(), found[""][0])
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
    row = captured(torch.randn(SHAPES[name][0]), SHAPES[name][1])[""][0]
    for shape in ((), (0,), (1, 0, 0), (0, 0, 0, 0), (1, 0, 2, 2, 2), (1,) * 7):
        assert from_tensor(np.zeros(shape, np.float32), row) is None


def test_channels_that_lost_their_numbers_come_first() -> None:
    """However far the values of others are apart; those out of the mask are left out."""
    relative = np.array([0.9, 0.0, 0.5, 1.0])
    unlike = np.array([0, 2, 0, 0])
    assert worst_first(relative, unlike, np.array([True, True, True, False])) == [
        1,
        0,
        2,
    ]
