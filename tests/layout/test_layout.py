"""From tensors to maps: what each layout gives, what is refused with which reason, and
what each record of the table says of a tensor made after its own words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Run
from torch import Tensor

import featviz as fv
from featviz import layout
from featviz.errors import LayoutError, UsageError
from featviz.layout.layouts import CHOICES, LAYOUTS, Arrangement, Layout
from featviz.layout.tracing.guess import parse_override
from featviz.records import Hints, Trace


def test_nchw_is_the_permuted_view() -> None:
    """Maps are the rows of torchvision's [C, 1, H, W], without a copy and without a
    change."""
    tensor = torch.randn(1, 5, 3, 4)
    before = tensor.clone()
    maps = layout.to_maps(tensor)[""]
    assert maps.layout == "nchw"
    assert torch.equal(maps.data, tensor.permute(1, 0, 2, 3))
    assert maps.data.data_ptr() == tensor.data_ptr()
    assert torch.equal(tensor, before)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.half,
        torch.bfloat16,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int64,
        torch.bool,
    ],
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
    quantized = torch.quantize_per_tensor(
        torch.tensor([[0.0, 0.5, 1.0]]), 0.5, 3, torch.quint8
    )
    assert layout.to_maps(quantized)[""].data.flatten().tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (
            torch.zeros(1, 2, 3, 3, dtype=torch.complex64),
            r"complex numbers \(torch.complex64\)",
        ),
        (torch.eye(3).to_sparse(), "stored as torch.sparse_coo"),
        (torch.zeros(1, 0, 3, 3), r"shape \[1, 0, 3, 3\] holds no values"),
        (torch.zeros(()), r"shape \[\] is neither"),
        (torch.zeros(1, 3, 4), r"shape \[1, 3, 4\] is neither"),
        (torch.zeros(2, 3, 2, 4, 4), r"shape \[2, 3, 2, 4, 4\] is neither"),
        (torch.zeros(1, 1, 3, 2, 4, 4), r"shape \[1, 1, 3, 2, 4, 4\] is neither"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(list(value.shape)),
)
def test_what_no_layout_knows_is_refused_with_the_reason(
    tensor: torch.Tensor, reason: str
) -> None:
    """A wrong guess would draw noise, so an unknown tensor is refused and its shape
    named."""
    with pytest.raises(LayoutError, match=reason):
        layout.to_maps(tensor)


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


PAGE = Path(__file__).parents[2] / "docs" / "layers.md"
SIZES = {"1": 1, "N": 3, "C": 5, "H": 6, "W": 9, "D": 7, "F": 11, "heads": 2, "T": 24}
SIZES |= {"windows": 6, "places": 4, "a": 2, "b": 2}
"""A size for each axis that a record may name; 24 tokens and 6 windows of 4 places are
4 × 6."""

FURTHER = {
    "tokens": "[1, T, heads, D]",
    "attention": "[1, T, T, heads]",
    "vector": "[1, N, F]",
    "batch": "[N, C, T, H, W]",
    "windows": "[windows, C, a, b]",
}
"""A second shape of layouts that have one."""

CASES = [(layout, layout.shape) for layout in LAYOUTS.values()]
CASES += [(LAYOUTS[name], shape) for name, shape in FURTHER.items()]


def example(shape: str) -> Tensor:
    """Random values of a shape in a record's words."""
    sizes = [SIZES[axis] for axis in shape.strip("[]").split(", ")]
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


def form(layout: Layout, shape: str) -> Arrangement:
    """All that any layout may need to know of the example; windows are 2 × 2."""
    places = np.arange(24).reshape(2, 2, 3, 2).swapaxes(1, 2).flatten()
    axes = tuple(
        i for i, axis in enumerate(shape.strip("[]").split(", ")) if axis != "C"
    )
    return Arrangement(
        layout.name, 4, 6, trace=Trace(grid=(1, 4, 6), axes=axes, positions=places)
    )


@pytest.mark.parametrize(
    ("layout", "shape"), CASES, ids=lambda value: getattr(value, "name", value)
)
def test_arrays_are_read_as_tensors_are_drawn(layout: Layout, shape: str) -> None:
    """`channels_first` gives each channel the values of its map, in their order if it
    says so."""
    tensor = example(shape)
    maps = layout.to_maps(tensor, form(layout, shape))
    assert maps.ndim == 4
    assert tensor.ndim in layout.dimensions
    rows = layout.channels_first(tensor.numpy(), len(maps))
    drawn = maps.flatten(1).numpy()
    if layout.of_pieces:
        rows = np.sort(rows, 1)
        drawn = np.sort(drawn, 1)
    np.testing.assert_array_equal(rows, drawn)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_axes_are_those_of_the_maps(layout: Layout) -> None:
    """The axes of channels, of height and width, and of tokens have the sizes of what
    is drawn."""
    tensor = example(layout.shape)
    maps = layout.to_maps(tensor, form(layout, layout.shape))
    if layout.channel_axis is not None:
        assert tensor.shape[layout.channel_axis] == len(maps)
    if layout.spatial_axes is not None:
        assert (
            tuple(tensor.shape[axis] for axis in layout.spatial_axes) == maps.shape[2:]
        )
    if layout.token_axis is not None:
        assert tensor.shape[layout.token_axis] == maps.shape[2] * maps.shape[3]
    assert layout.allows_many == (not layout.shape.startswith("[1"))


@pytest.mark.parametrize("layout", CHOICES[::3], ids=lambda layout: layout.name)
def test_only_aligned_maps_are_laid_over_the_input(layout: Layout) -> None:
    """An overlay changes the picture of a layout whose maps are aligned, and of no
    other."""
    tensor = example(layout.shape)
    image = torch.rand(3, 48, 72)
    name = layout.name + (":4x6" if layout.token_axis is not None else "")
    plain = fv.grid(tensor, tensor_layout=name)
    over = fv.grid(tensor, tensor_layout=name, overlay=0.5, image=image)
    assert (plain.size != over.size or plain.mode != over.mode) == layout.aligned


def test_help_and_readme_name_every_choice(featviz: Run) -> None:
    """`run --help` says each name with its axes; each stands in docs/layers.md, too."""
    text = " ".join(featviz("run", "--help-all").out.split())
    table = PAGE.read_text("utf-8").partition("| layout |")[2].partition("\n\n")[0]
    first_cells = " ".join(re.findall(r"^\| ([^|]+) \|", table, re.M))
    for choice in CHOICES:
        assert f"{choice.name} {choice.shape}" in text
        assert f"`{choice.name}`" in first_cells


def test_an_unknown_name_is_answered_with_all_names() -> None:
    """The hint lists the choices; `windows` is none, since only a forward pass explains
    them."""
    for name in ("nope", "windows", "nchw:2x2"):
        with pytest.raises(UsageError, match="is no layout") as caught:
            parse_override(name)
        assert ", ".join(layout.name for layout in CHOICES) in str(caught.value.hint)


def test_the_table_and_the_option_need_neither_torch_nor_numpy() -> None:
    """Help, reports and diff read the table, and a mistake in the option is refused at
    once."""
    code = "import sys, featviz.layout.tracing.guess\n"
    code += "print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
