"""Tensors of every kind: sparse, quantised, complex ones are drawn, or skipped with a
reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from networks import Net
from torch import Tensor, nn

import featviz as fv
from featviz.errors import UsageError

from .drawn import AS_IT_IS, drawn


def _beside(make: Callable[[Tensor], Any]) -> Net:
    """A convolution, and a layer whose output nobody takes."""

    def way(self: Any, x: Tensor) -> Tensor:
        x = self.conv(x)
        self.odd(x)
        return x.mean((2, 3))

    return Net(way, conv=nn.Conv2d(3, 3, 1), odd=Net(lambda self, x: make(x))).eval()


def _quantised(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.125, 3, torch.quint8)


DRAWN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "quantised": (_quantised, "float32"),
    "bfloat16": (lambda x: x.bfloat16(), "float32"),
    "float8": (lambda x: x.to(torch.float8_e4m3fn), "float32"),
    "float16": (lambda x: x.half(), "float16"),
    "float64": (lambda x: x.double(), "float64"),
    "bool": (lambda x: x > 0, "bool"),
    "negative view": (lambda x: torch.conj(x * 1j).imag, "float32"),
}
SKIPPED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sparse complex": (
        lambda x: (x * 1j).to_sparse(),
        "holds complex numbers (torch.complex64)",
    ),
    "sparse": (
        lambda x: x.to_sparse(),
        "is stored as torch.sparse_coo, not as a dense tensor",
    ),
    "meta": (
        lambda x: x.to("meta"),
        "is on the device meta, where tensors have no values",
    ),
    "nested": (
        lambda x: torch.nested.nested_tensor([x[0, 0], x[0, 1, :3]]),
        "is a nested tensor, not a dense one",
    ),
}


def mostly_slow(kinds: Iterable[str], count: int) -> list[Any]:
    """The first kinds, and the others as slow ones."""
    marks = pytest.mark.slow
    return [
        k if n < count else pytest.param(k, marks=marks) for n, k in enumerate(kinds)
    ]


def _plain(tensor: Tensor) -> np.ndarray:
    dense = tensor.dequantize() if tensor.is_quantized else tensor
    return dense.float().resolve_neg().numpy()


@pytest.mark.parametrize("tensor_kind", mostly_slow(DRAWN, 2))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_of_every_kind_are_drawn_kept_and_counted(
    tensor_kind: str, picture: Path, tmp_path: Path
) -> None:
    """Picture, .npy and TensorBoard's histogram of the same values; quantised ones
    dequantised."""
    make, dtype = DRAWN[tensor_kind]
    torch.manual_seed(0)
    model = _beside(make)
    board = tmp_path / "board"
    options = {"tensors": "npy", "tensorboard": board}
    (image,) = drawn(model, picture, tmp_path / "out", ["conv", "odd"], **options)
    assert not image.skipped
    kept = {
        c.layer: np.load(tmp_path / "out" / image.folder / str(c.row.tensor))
        for c in image.captures
    }
    expected = _plain(make(torch.from_numpy(kept["conv"])))
    assert kept["odd"].dtype == dtype
    assert np.array_equal(kept["odd"].astype(np.float32), expected)
    histogram = _histograms(board / "out")["histogram/odd"]
    assert (histogram.min, histogram.max) == (expected.min(), expected.max())
    assert histogram.num == expected.size


def _histograms(board: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(board), size_guidance={"histograms": 0})
    found.Reload()
    return {
        tag: found.Histograms(tag)[0].histogram_value
        for tag in found.Tags()["histograms"]
    }


@pytest.mark.parametrize("tensor_kind", mostly_slow(SKIPPED, 2))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_drawn_is_skipped_with_the_reason(
    tensor_kind: str, picture: Path, tmp_path: Path
) -> None:
    """The rest of the image is complete, with and without selectors."""
    make, reason = SKIPPED[tensor_kind]
    for number, layers in enumerate((["conv", "odd"], None)):
        options = {"tensors": "npy", "tensorboard": tmp_path / "board"}
        (image,) = drawn(
            _beside(make), picture, tmp_path / str(number), layers, **options
        )
        assert [capture.layer for capture in image.captures] == ["conv"]
        reasons = [skip.reason for skip in image.skipped]
        assert reasons == [reason] if number == 0 else set(reasons) <= {reason}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_complex_numbers_are_drawn_as_magnitude_and_phase(
    picture: Path, tmp_path: Path
) -> None:
    """Two parts of real numbers, each with its own statistics and tensor; a phase from
    −π to π in colours that meet at its ends, whatever the run's scale and colours are,
    and over no image."""
    made: list[Tensor] = []

    def spectrum(x: Tensor) -> Tensor:
        made.append(torch.fft.fft2(x.to(torch.complex64)))
        return made[-1]

    options = {
        "tensors": "npy",
        "cmap": "viridis",
        "normalize": "layer",
        "overlay": 0.5,
    }
    (image,) = drawn(
        _beside(spectrum), picture, tmp_path / "out", ["odd"], figure=True, **options
    )
    assert not image.skipped
    size, phase = image.captures
    wide = made[-1].to(torch.complex64)
    for maps, expected in ((size, wide.abs()), (phase, wide.angle())):
        torch.testing.assert_close(maps.tensor.float(), expected)
        np.testing.assert_allclose(
            maps.stats["mean"], expected.mean((0, 2, 3)), rtol=1e-4, atol=1e-5
        )
    assert (size.key, phase.key) == ("abs", "angle")
    assert phase.file.name == "output.angle.png"
    assert phase.row.overlay is None
    assert size.row.overlay == 0.5
    assert phase.range == pytest.approx((-np.pi, np.pi))
    assert phase.row.normalize == "range"
    assert phase.row.cmap == "twilight"
    assert size.row.cmap is None
    pixels = np.asarray(phase.image.convert("RGB"))
    box = phase.row.plan.box(1)
    factor = phase.row.plan.scale[0]
    tile = (
        pixels[box[1] : box[1] + box[3] : factor, box[0] : box[0] + box[2] : factor]
        / 255
    )
    colors = np.array(colormaps["twilight"]((expected[0, 1].numpy() / np.pi + 1) / 2))[
        ..., :3
    ]
    assert abs(tile - colors).max() < 0.03


def test_complex_numbers_on_the_way(picture: Path, tmp_path: Path) -> None:
    """look shows the magnitude, a plan counts both parts, gradients have both,
    `--reduce` one; the run is whole, has a report, and equals itself."""

    def way(self: Any, x: Tensor) -> Tensor:
        return torch.fft.ifft2(self.odd(self.conv(x))["a"]).real.square().mean((2, 3))

    modules = {
        "conv": nn.Conv2d(3, 3, 1),
        "odd": Net(lambda self, x: {"a": torch.fft.fft2(x)}),
    }
    model = Net(way, **modules).eval()
    out = tmp_path / "out"
    with_gradients = {"capture": "output,grad", "target": "class:1"}
    (image,) = drawn(model, picture, out, ["odd"], **with_gradients)
    keys = [f"{maps.kind}.{maps.key}" for maps in image.captures]
    assert keys == ["output.a.abs", "output.a.angle", "grad.a.abs", "grad.a.angle"]
    (image,) = drawn(model, picture, tmp_path / "one", ["odd"], reduce="mean")
    assert [maps.key for maps in image.captures] == ["a.abs"]
    assert fv.look(model, picture, "odd", **AS_IT_IS).layers[0].key == "a.abs"
    assert fv.diff(out, out).equal
    assert fv.report(out).page.is_file()


@pytest.mark.parametrize("kind", [*mostly_slow(DRAWN, 1), *mostly_slow(SKIPPED, 2)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_audit_counts_or_skips_tensors_of_every_kind(kind: str, picture: Path) -> None:
    """A layer with real values is counted; another is named with the reason."""
    make, reason = {**DRAWN, **SKIPPED}[kind]
    found = fv.audit(_beside(make), picture, "conv,odd", **AS_IT_IS).document
    skipped = {row["layer"]: row["reason"] for row in found["skipped"]}
    if kind in DRAWN:
        assert "odd" in [row["label"] for row in found["layers"]]
        assert not skipped
    else:
        assert skipped["odd"] in (reason, "gives a nested tensor, not a tensor")


def _ends(kind: str) -> nn.Sequential:
    """A convolution of the image, and the odd tensor as the model's output."""
    torch.manual_seed(0)
    make = {**DRAWN, **SKIPPED}[kind][0]
    return nn.Sequential(nn.Conv2d(3, 3, 1), Net(lambda self, x: make(x))).eval()


@pytest.mark.parametrize(
    "tensor_kind",
    [
        "quantised",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("bool", "sparse")),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_outputs_of_every_kind_are_compared_or_not(
    tensor_kind: str, picture: Path, tmp_path: Path
) -> None:
    """The change by an ablation is that of numpy, None of an output without plain
    values; without an intervention nothing is compared, and the layer is drawn both
    times."""
    model = _ends(tensor_kind)
    (image,) = drawn(model, picture, tmp_path / "plain", tensors="npy")
    assert image.outcome.largest_change is None
    assert len(image.captures) == 1
    maps = torch.from_numpy(
        np.load(tmp_path / "plain" / image.folder / str(image.captures[0].row.tensor))
    )
    (image,) = drawn(model, picture, tmp_path / "ablated", ablate="0:0")
    assert len(image.captures) == 1
    if tensor_kind in SKIPPED:
        assert (image.outcome.largest_change, image.outcome.nonfinite) == (None, 0)
        return
    ablated = maps.clone()
    ablated[:, 0] = 0
    first, second = (
        _plain(DRAWN[tensor_kind][0](t)).astype(np.float64) for t in (maps, ablated)
    )
    expected = pytest.approx(np.abs(first - second).max(), rel=1e-6)
    assert image.outcome.largest_change == expected
    assert expected.expected > 0


@pytest.mark.parametrize(
    ("tensor_kind", "target"),
    [
        ("float8", "sum"),  # the mean's gradient is 0 in float8
        ("sparse", "norm"),
    ],
)
def test_targets_of_outputs_that_torch_does_not_reduce(
    tensor_kind: str, target: str, picture: Path
) -> None:
    """The map of a float8 or sparse output is that of the same output as dense float32."""
    model = _ends(tensor_kind)
    maps = fv.cam(model, picture, target, layers="0", **AS_IT_IS)
    make = (
        DRAWN[tensor_kind][0]
        if tensor_kind in DRAWN
        else lambda x: SKIPPED[tensor_kind][0](x).to_dense()
    )
    model[1].way = lambda self, x: make(x).float()
    expected = fv.cam(model, picture, target, layers="0", **AS_IT_IS)
    gradient, expected_gradient = (result.maps[0].tensor for result in (maps, expected))
    assert torch.allclose(gradient, expected_gradient, rtol=1e-2, atol=1e-6)
    assert expected_gradient.any()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_kernels_without_values_are_skipped(tmp_path: Path) -> None:
    """An empty weight and one on the device meta are named; the others are drawn."""
    convs = [nn.Conv2d(3, 4, 3), nn.Conv2d(4, 0, 3), nn.Conv2d(4, 4, 3, device="meta")]
    kernels = fv.kernels(
        nn.Sequential(*convs, nn.ConvTranspose2d(4, 0, 3)), out=tmp_path / "k"
    )
    assert [kernel.row["layer"] for kernel in kernels.captures] == ["0"]
    assert {row["layer"]: row["reason"] for row in kernels.document["skipped"]} == {
        "1": "its weight is empty: 0×4×3×3",
        "2": "its weight is on the device meta, where tensors have no values",
        "3": "its weight is empty: 4×0×3×3",
    }
    with pytest.raises(
        UsageError, match="none of 1 layers has kernels to draw: 0: its weight is"
    ):
        fv.kernels(nn.Sequential(convs[1]), out=tmp_path / "none")
    assert not (tmp_path / "none").exists()
