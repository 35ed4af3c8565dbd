"""From tensors to maps: what each layout gives, and what is refused with which reason."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from featviz import layout
from featviz.errors import LayoutError
from featviz.records import Hints


def test_nchw_is_the_permuted_view() -> None:
    """Maps are the rows of torchvision's [C, 1, H, W], without a copy and without a change."""
    tensor = torch.randn(1, 5, 3, 4)
    before = tensor.clone()
    maps = layout.to_maps(tensor)[""]
    assert (maps.layout, maps.strip) == ("nchw", False)
    assert torch.equal(maps.data, tensor.permute(1, 0, 2, 3))
    assert maps.data.data_ptr() == tensor.data_ptr()
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("shape", [(7,), (1, 7)])
def test_vector_is_a_strip_of_single_numbers(shape: tuple[int, ...]) -> None:
    """[F] and [1, F] become F maps of one number each, in order."""
    maps = layout.to_maps(torch.arange(7.0).reshape(shape))[""]
    assert (maps.layout, maps.strip) == ("vector", True)
    assert maps.data.shape == (7, 1, 1, 1)
    assert maps.data.flatten().tolist() == list(range(7))


@pytest.mark.parametrize(
    "dtype",
    [torch.half, torch.bfloat16, torch.float64, torch.uint8, torch.int8, torch.int64, torch.bool],
)
def test_every_real_dtype_becomes_float32(dtype: torch.dtype) -> None:
    """Half, bfloat16, double, integers and booleans keep their values as float32."""
    values = [[[[0, 1], [1, 0]], [[1, 1], [0, 1]]]]
    maps = layout.to_maps(torch.tensor(values, dtype=dtype))[""]
    assert maps.data.dtype == torch.float32
    assert maps.data[:, 0].tolist() == values[0]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_tensor_shows_its_real_values() -> None:
    """A quantized tensor is dequantized, not shown as its integers."""
    quantized = torch.quantize_per_tensor(torch.tensor([[0.0, 0.5, 1.0]]), 0.5, 3, torch.quint8)
    assert layout.to_maps(quantized)[""].data.flatten().tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(1, 4, 5, 3).permute(0, 3, 1, 2),
        torch.randn(1, 6, 5, 4)[:, ::2, 1:, ::2],
        torch.randn(1, 3, 1, 1).expand(1, 3, 4, 4),
    ],
    ids=["channels_last", "sliced", "expanded"],
)
def test_strides_do_not_matter(tensor: torch.Tensor) -> None:
    """Views of any strides give the same maps as their contiguous copies."""
    assert torch.equal(layout.to_maps(tensor)[""].data[:, 0], tensor.contiguous()[0])


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(1, 2, 3, 3, dtype=torch.complex64), r"complex numbers \(torch.complex64\)"),
        (torch.eye(3).to_sparse(), "stored as torch.sparse_coo"),
        (torch.zeros(1, 0, 3, 3), r"shape \[1, 0, 3, 3\] holds no values"),
        (torch.zeros(0), r"shape \[0\] holds no values"),
        (torch.zeros(()), r"shape \[\] is neither"),
        (torch.zeros(1, 3, 4), r"shape \[1, 3, 4\] is neither"),
        (torch.zeros(2, 3, 4), r"shape \[2, 3, 4\] is neither"),
        (torch.zeros(2, 3, 2, 4, 4), r"shape \[2, 3, 2, 4, 4\] is neither"),
        (torch.zeros(1, 1, 3, 2, 4, 4), r"shape \[1, 1, 3, 2, 4, 4\] is neither"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(list(value.shape)),
)
def test_what_no_layout_knows_is_refused_with_the_reason(tensor: torch.Tensor, reason: str) -> None:
    """A wrong guess would draw noise, so an unknown tensor is refused and its shape named."""
    with pytest.raises(LayoutError, match=reason):
        layout.to_maps(tensor)


def test_lazily_negated_tensor_can_leave_torch() -> None:
    """The imaginary part of a conjugate is a lazy negation; its maps are plain numbers."""
    tensor = torch.complex(torch.zeros(1, 2, 3, 3), torch.ones(1, 2, 3, 3)).conj().imag
    assert (layout.to_maps(tensor)[""].data.numpy() == -1).all()


@pytest.mark.parametrize(
    ("shape", "size", "name"),
    [
        ((1, 96, 56, 56), (224, 224), "nchw"),
        ((1, 56, 56, 96), (224, 224), "nhwc"),
        ((1, 14, 20, 7), (224, 320), "nhwc"),
        ((1, 7, 14, 20), (224, 320), "nchw"),
        ((1, 56, 56, 56), (224, 224), "nchw"),
        ((1, 512, 1, 1), (224, 320), "nchw"),
        ((1, 1, 1, 512), (224, 320), "nhwc"),
        ((1, 35, 17, 17), (299, 299), "nchw"),
        ((1, 8, 50, 50), (224, 320), "nchw"),
        ((1, 56, 56, 96), None, "nchw"),
    ],
)
def test_channels_last_is_told_by_proportion(
    shape: tuple[int, ...], size: tuple[int, int] | None, name: str
) -> None:
    """[1, H, W, C] has the input's proportions in front, [1, C, H, W] behind."""
    tensor = torch.arange(float(np.prod(shape))).reshape(shape)
    maps = layout.to_maps(tensor, Hints(input_size=size))[""]
    assert maps.layout == name
    want = tensor[0] if name == "nchw" else tensor[0].permute(2, 0, 1)
    assert torch.equal(maps.data[:, 0], want)
