"""Tensors of every kind: sparse, quantised, complex ones are drawn, or skipped with a
reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from networks import Net
from pixels import pixels_of
from torch import Tensor, nn

import featviz as fv
from featviz.errors import UsageError

from .drawn import AS_IT_IS, drawn

Make = Callable[[Tensor], Any]
"""Makes an odd tensor of an ordinary one."""


def making(make: Make) -> Net:
    """A layer that gives an odd tensor."""
    return Net(lambda self, x: make(x))


def model_with(make: Make) -> Net:
    """A convolution, and such a layer, whose output nobody takes."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.conv(x)
        self.odd(x)
        return x.mean((2, 3))

    return Net(forward, conv=nn.Conv2d(3, 3, 1), odd=making(make)).eval()


def _quantised(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.125, 3, torch.quint8)


class DrawnType(NamedTuple):
    """A type of tensor that is drawn."""

    make: Make
    dtype: str
    """Of the array that is kept."""


DRAWN = {
    "quantised": DrawnType(_quantised, "float32"),
    "bfloat16": DrawnType(lambda x: x.bfloat16(), "float32"),
    "float8": DrawnType(lambda x: x.to(torch.float8_e4m3fn), "float32"),
    "float16": DrawnType(lambda x: x.half(), "float16"),
    "float64": DrawnType(lambda x: x.double(), "float64"),
    "bool": DrawnType(lambda x: x > 0, "bool"),
    "negative view": DrawnType(lambda x: torch.conj(x * 1j).imag, "float32"),
}


class SkippedType(NamedTuple):
    """A type of tensor that is not drawn."""

    make: Make
    reason: str


SKIPPED = {
    "sparse complex": SkippedType(
        lambda x: (x * 1j).to_sparse(),
        "holds complex numbers (torch.complex64)",
    ),
    "sparse": SkippedType(
        lambda x: x.to_sparse(),
        "is stored as torch.sparse_coo, not as a dense tensor",
    ),
    "meta": SkippedType(
        lambda x: x.to("meta"),
        "is on the device meta, where tensors have no values",
    ),
    "nested": SkippedType(
        lambda x: torch.nested.nested_tensor([x[0, 0], x[0, 1, :3]]),
        "is a nested tensor, not a dense one",
    ),
}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def plain(tensor: Tensor) -> np.ndarray:
    """The values of a tensor that is drawn, as float32."""
    dense = tensor.dequantize() if tensor.is_quantized else tensor
    return dense.float().resolve_neg().numpy()


@pytest.mark.medium
@pytest.mark.parametrize("name", DRAWN)
def test_tensors_of_every_type_are_drawn_and_kept(
    name: str, picture: Path, tmp_path: Path
) -> None:
    """The .npy and TensorBoard's histogram have the same values; quantised ones are
    dequantised."""
    make, dtype = DRAWN[name]
    options = {"tensors": True, "tensorboard": tmp_path / "board"}
    layers = ["conv", "odd"]

    (image,) = drawn(model_with(make), picture, tmp_path / "out", layers, **options)

    assert not image.skipped
    conv, odd = image.captures
    expected = plain(make(conv.tensor))
    assert np.array_equal(odd.tensor.float(), expected)
    assert np.load(odd.file.parent / Path(odd.row.tensor).name).dtype == dtype
    histogram = histogram_of(tmp_path / "board" / "out", "histogram/odd")
    assert histogram.min == expected.min()
    assert histogram.max == expected.max()
    assert histogram.num == expected.size


def histogram_of(board: Path, tag: str) -> Any:
    """A histogram, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board), size_guidance={"histograms": 0}).Reload()
    return events.Histograms(tag)[0].histogram_value


@pytest.mark.medium
@pytest.mark.parametrize("name", SKIPPED)
def test_what_cannot_be_drawn_is_skipped_with_the_reason(
    name: str, picture: Path, tmp_path: Path
) -> None:
    """The rest of the image is complete."""
    make, reason = SKIPPED[name]
    options = {"tensors": "npy", "tensorboard": tmp_path / "board"}
    layers = ["conv", "odd"]
    (image,) = drawn(model_with(make), picture, tmp_path / "out", layers, **options)
    assert [capture.layer for capture in image.captures] == ["conv"]
    assert [skip.reason for skip in image.skipped] == [reason]


def test_without_selectors_what_cannot_be_drawn_is_no_stage(
    picture: Path, tmp_path: Path
) -> None:
    """The convolution is drawn all the same."""
    model = model_with(SKIPPED["nested"].make)
    (image,) = drawn(model, picture, tmp_path / "out", None)
    assert [capture.layer for capture in image.captures] == ["conv"]


def fourier(x: Tensor) -> Tensor:
    """Complex numbers."""
    return torch.fft.fft2(x.to(torch.complex64))


class ComplexMaps(NamedTuple):
    """What a run drew of a layer of complex numbers."""

    magnitude: Any
    phase: Any
    values: Tensor
    """That they were made of, [1, C, H, W]."""


@pytest.fixture
def complex_maps(picture: Path, tmp_path: Path) -> ComplexMaps:
    """Draw them with scale, colours and overlay of the run's own."""
    options = {"cmap": "viridis", "normalize": "layer", "overlay": 0.5}
    layers = ["conv", "odd"]
    out = tmp_path / "out"
    model = model_with(fourier)
    (image,) = drawn(model, picture, out, layers, tensors=True, **options)
    assert not image.skipped
    conv, magnitude, phase = image.captures
    return ComplexMaps(magnitude, phase, fourier(conv.tensor))


@pytest.mark.medium
def test_complex_numbers_are_magnitude_and_phase(complex_maps: ComplexMaps) -> None:
    """They are two tensors of real numbers, each with its statistics."""
    magnitude, phase, values = complex_maps
    assert magnitude.key == "abs"
    assert phase.key == "angle"
    assert phase.file.name == "output.angle.png"
    for maps, expected in ((magnitude, values.abs()), (phase, values.angle())):
        torch.testing.assert_close(maps.tensor.float(), expected)
        means = expected.mean((0, 2, 3))
        np.testing.assert_allclose(maps.stats["mean"], means, rtol=1e-4, atol=1e-5)


def test_a_phase_has_a_scale_of_its_own(complex_maps: ComplexMaps) -> None:
    """It goes from −π to π, whatever the run's scale and colours are, and it lies over
    no image."""
    magnitude = complex_maps.magnitude.row
    phase = complex_maps.phase.row
    assert phase.range == pytest.approx((-np.pi, np.pi))
    assert (phase.normalize, phase.cmap, phase.overlay) == ("range", "twilight", None)
    assert (magnitude.cmap, magnitude.overlay) == (None, 0.5)


def test_the_colours_of_a_phase_meet_at_their_ends(complex_maps: ComplexMaps) -> None:
    """They are matplotlib's twilight."""
    _, phase, values = complex_maps
    plan = phase.row.plan
    x, y, width, height = plan.box(1)
    pixels = pixels_of(phase.image.convert("RGB"))[y : y + height, x : x + width]
    tile = pixels[:: plan.scale[0], :: plan.scale[1]] / 255
    shares = (values[0, 1].angle().numpy() / np.pi + 1) / 2
    colors = np.array(colormaps["twilight"](shares))[..., :3]
    assert abs(tile - colors).max() < 0.03


@pytest.fixture
def through_complex() -> Net:
    """A model whose scores come of complex numbers in a dict."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.fft.ifft2(self.odd(self.conv(x))["a"]).real.square().mean((2, 3))

    odd = making(lambda x: {"a": torch.fft.fft2(x)})
    return Net(forward, conv=nn.Conv2d(3, 3, 1), odd=odd).eval()


@pytest.mark.medium
def test_gradients_of_complex_numbers(
    through_complex: Net, picture: Path, tmp_path: Path
) -> None:
    """They have both parts; the run has a report, and equals itself."""
    out = tmp_path / "out"
    options = {"capture": "output,grad", "target": "class:1"}
    (image,) = drawn(through_complex, picture, out, ["odd"], **options)
    keys = [f"{maps.kind}.{maps.key}" for maps in image.captures]
    assert keys == ["output.a.abs", "output.a.angle", "grad.a.abs", "grad.a.angle"]
    assert fv.diff(out, out).equal
    assert fv.report(out).page.is_file()


@pytest.mark.medium
def test_where_one_part_is_shown_it_is_the_magnitude(
    through_complex: Net, picture: Path, tmp_path: Path
) -> None:
    """`look` and `--reduce` have it."""
    (image,) = drawn(through_complex, picture, tmp_path / "out", ["odd"], reduce="mean")
    assert [maps.key for maps in image.captures] == ["a.abs"]
    assert fv.look(through_complex, picture, "odd", **AS_IT_IS).layers[0].key == "a.abs"


@pytest.mark.parametrize("name", DRAWN)
def test_audit_counts_tensors_that_are_drawn(name: str, picture: Path) -> None:
    """A layer with real values is counted."""
    model = model_with(DRAWN[name].make)
    document = fv.audit(model, picture, "conv,odd", **AS_IT_IS).document
    assert "odd" in [row["label"] for row in document["layers"]]
    assert not document["skipped"]


@pytest.mark.medium
@pytest.mark.parametrize("name", SKIPPED)
def test_audit_skips_tensors_that_are_not_drawn(name: str, picture: Path) -> None:
    """The layer is named with the reason."""
    make, reason = SKIPPED[name]
    document = fv.audit(model_with(make), picture, "conv,odd", **AS_IT_IS).document
    reasons = {row["layer"]: row["reason"] for row in document["skipped"]}
    assert reasons["odd"] in (reason, "gives a nested tensor, not a tensor")


def ending_in(make: Make) -> nn.Sequential:
    """A convolution of the image, and the odd tensor as the model's output."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 3, 1), making(make)).eval()


@pytest.mark.medium
@pytest.mark.parametrize("name", ["quantised", "bool"])
def test_the_change_by_an_ablation_is_numpys(
    name: str, picture: Path, tmp_path: Path
) -> None:
    """Outputs of every type are compared, where there is an intervention."""
    make = DRAWN[name].make
    model = ending_in(make)
    (before,) = drawn(model, picture, tmp_path / "before", tensors=True)
    (after,) = drawn(model, picture, tmp_path / "after", ablate="0:0")

    maps = before.captures[0].tensor
    ablated = maps.clone()
    ablated[:, 0] = 0
    change = plain(make(maps)).astype(float) - plain(make(ablated))
    expected = np.abs(change).max()
    assert expected > 0
    assert after.outcome.largest_change == pytest.approx(expected, rel=1e-6)
    assert before.outcome.largest_change is None


@pytest.mark.medium
def test_outputs_without_plain_values_are_not_compared(
    picture: Path, tmp_path: Path
) -> None:
    """The layer is drawn all the same."""
    model = ending_in(SKIPPED["sparse"].make)
    (image,) = drawn(model, picture, tmp_path / "out", ablate="0:0")
    assert len(image.captures) == 1
    assert image.outcome.largest_change is None
    assert image.outcome.nonfinite == 0


@pytest.mark.medium
@pytest.mark.parametrize(
    ("make", "target"),
    [
        # the mean's gradient is 0 in float8
        pytest.param(DRAWN["float8"].make, "sum", id="float8"),
        pytest.param(SKIPPED["sparse"].make, "norm", id="sparse"),
    ],
)
def test_targets_of_outputs_that_torch_does_not_reduce(
    make: Make, target: str, picture: Path
) -> None:
    """The map of a float8 or sparse output is that of the same output as dense float32."""
    odd = ending_in(make)
    dense = ending_in(lambda x: make(x).to_dense().float())
    maps = fv.cam(odd, picture, target, layers="0", **AS_IT_IS).tensor
    expected = fv.cam(dense, picture, target, layers="0", **AS_IT_IS).tensor
    assert expected.any()
    assert torch.allclose(maps, expected, rtol=1e-2, atol=1e-6)


def test_kernels_without_values_are_skipped() -> None:
    """An empty weight and one on the device meta are named; the others are drawn."""
    full = nn.Conv2d(3, 4, 3)
    empty = nn.Conv2d(4, 0, 3)
    meta = nn.Conv2d(4, 4, 3, device="meta")
    model = nn.Sequential(full, empty, meta, nn.ConvTranspose2d(4, 0, 3))
    kernels = fv.kernels(model)
    assert [kernel.layer for kernel in kernels.captures] == ["0"]
    assert {row["layer"]: row["reason"] for row in kernels.document["skipped"]} == {
        "1": "its weight is empty: 0×4×3×3",
        "2": "its weight is on the device meta, where tensors have no values",
        "3": "its weight is empty: 4×0×3×3",
    }


def test_where_no_kernel_has_values_nothing_is_written(tmp_path: Path) -> None:
    """The error has the reason."""
    message = "no kernels to draw in 1 layer: layer 0: its weight is"
    with pytest.raises(UsageError, match=message):
        fv.kernels(nn.Sequential(nn.Conv2d(4, 0, 3)), out=tmp_path / "none")
    assert not (tmp_path / "none").exists()
