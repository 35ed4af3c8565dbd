"""From tensors to maps: what each layout gives, what is refused with which reason, and
what each record of the table says of a tensor made after its own words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from numpy.testing import assert_array_equal
from torch import Tensor, nn

import featviz as fv
from featviz import layout
from featviz.errors import LayoutError, UsageError
from featviz.hooks.layers import list_layers
from featviz.layout.layouts import CHOICES, LAYOUTS, Arrangement, Layout
from featviz.layout.tracing.guess import parse_override
from featviz.layout.tracing.hints import HintBook
from featviz.records import Hints, Trace


def test_nchw_is_the_permuted_view() -> None:
    """Maps are the rows of torchvision's [C, 1, H, W], without a copy and without a
    change."""
    tensor = torch.randn(1, 5, 3, 4)
    before = tensor.clone()
    maps = layout.to_maps(tensor)[""]
    assert maps.layout == "nchw"
    assert_array_equal(maps.data, before.permute(1, 0, 2, 3))
    assert maps.data.data_ptr() == tensor.data_ptr()


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
@pytest.mark.parametrize(
    ("shape", "facts", "expected"),
    [
        ((1, 9, 9), {"in_attention": True}, "attention"),
        ((1, 9, 12), {"in_attention": True}, "tokens"),
        ((1, 9, 9), {"in_attention": True, "features_last": True}, "tokens"),
        ((1, 9, 9), {}, "tokens"),
    ],
)
def test_three_axes_are_attention_where_a_square_of_it_can_be(
    shape: tuple[int, ...], facts: dict[str, bool], expected: str
) -> None:
    """A linear layer inside an attention that makes as many numbers as there are tokens
    makes no weights."""
    hints = Hints(input_size=(12, 12), **facts)
    assert layout.to_maps(torch.rand(shape), hints)[""].layout == expected


def test_quantized_tensor_shows_its_real_values() -> None:
    """A quantized tensor is dequantized, not shown as its integers."""
    values = torch.tensor([[0.0, 0.5, 1.0]])
    quantized = torch.quantize_per_tensor(values, 0.5, 3, torch.quint8)
    assert layout.to_maps(quantized)[""].data.flatten().tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    "shape",
    [
        [],
        [1, 3, 4],
        [2, 3, 2, 4, 4],
        [1, 1, 3, 2, 4, 4],
    ],
    ids=str,
)
def test_an_unknown_shape_is_refused(shape: list[int]) -> None:
    """A shape of no layout is refused, since a wrong guess would draw noise."""
    with pytest.raises(LayoutError, match=re.escape(f"shape {shape} is neither")):
        layout.to_maps(torch.zeros(shape))


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        pytest.param(
            torch.zeros(1, 2, 3, 3, dtype=torch.complex64),
            r"complex numbers \(torch.complex64\)",
            id="complex",
        ),
        pytest.param(torch.eye(3).to_sparse(), "as torch.sparse_coo", id="sparse"),
        pytest.param(
            torch.zeros(1, 0, 3, 3),
            r"shape \[1, 0, 3, 3\] holds no values",
            id="empty",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(tensor: Tensor, reason: str) -> None:
    """Complex, sparse and empty tensors are refused with the reason."""
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
    shape: tuple[int, ...],
    size: tuple[int, int] | None,
    name: str,
) -> None:
    """[1, H, W, C] has the input's proportions in front, [1, C, H, W] behind."""
    tensor = torch.randn(shape)
    maps = layout.to_maps(tensor, Hints(input_size=size))[""]
    assert maps.layout == name
    expected = tensor if name == "nchw" else tensor.permute(0, 3, 1, 2)
    assert_array_equal(maps.data[:, 0], expected[0])


@pytest.mark.parametrize(
    ("shape", "size", "name"),
    [
        ([1, 4, 6, 8, 12], (64, 96), "ncthw"),
        ([1, 6, 8, 12, 4], (64, 96), "nthwc"),
        ([1, 3, 8, 8, 8], (64, 64), "ncthw"),
        ([1, 8, 8, 8, 5], (64, 64), "nthwc"),
        ([1, 9, 3, 3, 3], (64, 96), "ncthw"),
        ([1, 4, 6, 8, 12], None, "ncthw"),
    ],
)
def test_of_five_axes_the_rows_and_columns_have_the_inputs_proportions(
    shape: list[int], size: tuple[int, int] | None, name: str
) -> None:
    """Where those in the middle and the last ones have, the last ones count: channels
    stand in front."""
    assert layout.recognise(shape, Hints(input_size=size, time_steps=6)).layout == name


@pytest.mark.parametrize(
    ("shape", "size", "name"),
    [
        ([1, 4, 150, 60], (200, 50), "nchw"),
        ([1, 4, 150, 10], (200, 50), "heads"),
        ([1, 4, 175, 200], (50, 200), "heads"),
        ([1, 4, 175, 500], (50, 200), "nchw"),
    ],
)
def test_a_column_of_tokens_is_one_for_the_inputs_proportions(
    shape: list[int], size: tuple[int, int], name: str
) -> None:
    """A map of a high input is high by itself; tokens stand at least twice as high."""
    assert layout.recognise(shape, Hints(input_size=size)).layout == name


OWN = ("class_token", "distillation_token")


@pytest.mark.parametrize(
    ("shape", "size", "facts", "name"),
    [
        # a column of tokens: 36 at least, twice as high as the input, and not numbers
        ([1, 3, 36, 4], (24, 24), {}, "heads"),
        ([1, 3, 25, 4], (24, 24), {}, "nchw"),
        ([1, 3, 36, 18], (24, 24), {}, "heads"),
        ([1, 3, 36, 19], (24, 24), {}, "nchw"),
        ([1, 8, 49, 1], (28, 28), {}, "nchw"),
        # a column more than the proportions say
        ([1, 15, 11, 64], (30, 20), {}, "nhwc"),
        ([1, 15, 12, 64], (30, 20), {}, "nchw"),
        # tokens that stand last are sixteen at least
        ([1, 51, 16], (224, 224), {}, "ncl"),
        ([1, 51, 9], (224, 224), {}, "sequence"),
        # the grid of the patches counts, where there is another one
        ([1, 64, 196], (224, 224), {"patch_size": (16, 16)}, "ncl"),
        ([1, 196, 64], (224, 224), {"patch_size": (16, 16)}, "tokens"),
        ([1, 64, 196], (224, 224), {}, "tokens"),
        # a row for each token of the model's own
        ([1, 2, 192], (32, 32), {"prefix_tokens": OWN}, "vector"),
        ([1, 1, 192], (32, 32), {"prefix_tokens": OWN}, "vector"),
        # a row of weights is no matrix of queries and keys
        ([1, 4, 1, 49], (28, 28), {"trace": Trace(is_weights=True)}, "nchw"),
        ([1, 4, 2, 49], (28, 28), {"trace": Trace(is_weights=True)}, "attention"),
    ],
)
def test_what_is_at_a_limit_is_told(
    shape: list[int], size: tuple[int, int], facts: dict[str, Any], name: str
) -> None:
    """A value more or less makes another layout."""
    assert layout.recognise(shape, Hints(input_size=size, **facts)).layout == name


def test_queries_of_several_items_have_a_map_for_each_head() -> None:
    """Also where there are as many heads as queries, and more keys."""
    weights = torch.rand(2, 3, 3, 5)
    maps = LAYOUTS["attention"].to_maps(weights, Arrangement("attention"))
    assert_array_equal(maps[:, 0], weights.flatten(0, 1))


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


def axes_of(shape: str) -> list[str]:
    return shape.strip("[]").split(", ")


def example(shape: str) -> Tensor:
    """Random values of a shape in a record's words."""
    return torch.randn([SIZES[axis] for axis in axes_of(shape)])


def maps_of(layout: Layout, shape: str, tensor: Tensor) -> Tensor:
    """The example's maps, of all that any layout may need to know; windows are 2 × 2."""
    positions = np.arange(24).reshape(2, 2, 3, 2).swapaxes(1, 2).flatten()
    axes = tuple(i for i, axis in enumerate(axes_of(shape)) if axis != "C")
    trace = Trace(grid=(1, 4, 6), axes=axes, positions=positions)
    return layout.to_maps(tensor, Arrangement(layout.name, 4, 6, trace=trace))


@pytest.mark.parametrize(
    ("layout", "shape"),
    CASES,
    ids=lambda value: getattr(value, "name", value),
)
def test_arrays_are_read_as_tensors_are_drawn(layout: Layout, shape: str) -> None:
    """`channels_first` gives each channel the values of its map, in their order if it
    says so."""
    tensor = example(shape)
    assert tensor.ndim in layout.dimensions
    maps = maps_of(layout, shape, tensor)
    assert maps.ndim == 4
    drawn = maps.flatten(1).numpy()
    rows = layout.channels_first(tensor.numpy(), len(maps))
    if layout.of_pieces:
        rows = np.sort(rows, 1)
        drawn = np.sort(drawn, 1)
    assert_array_equal(rows, drawn)


def test_windows_with_heads_have_a_channel_for_each_number_of_a_head() -> None:
    """Queries [windows, heads, places, D]: the channels of the first head come first."""
    queries = np.random.default_rng(0).random((6, 2, 4, 7))
    rows = LAYOUTS["windows"].channels_first(queries, 14)
    assert rows.shape == (14, 24)
    for head in range(2):
        for number in range(7):
            expected = np.sort(queries[:, head, :, number].flatten())
            assert_array_equal(np.sort(rows[7 * head + number]), expected)


EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@EVERY_LAYOUT
def test_axes_are_those_of_the_maps(layout: Layout) -> None:
    """The axes of channels, and of height and width, have the sizes of what is drawn."""
    tensor = example(layout.shape)
    maps = maps_of(layout, layout.shape, tensor)
    if layout.channel_axis is not None:
        assert tensor.shape[layout.channel_axis] == len(maps)
    if layout.spatial_axes is not None:
        sizes = [tensor.shape[axis] for axis in layout.spatial_axes]
        assert sizes == list(maps.shape[2:])


@EVERY_LAYOUT
def test_the_axis_of_tokens_is_that_of_the_maps(layout: Layout) -> None:
    """There are as many tokens as positions of a map."""
    tensor = example(layout.shape)
    maps = maps_of(layout, layout.shape, tensor)
    if layout.token_axis is not None:
        assert tensor.shape[layout.token_axis] == maps[0, 0].numel()


@EVERY_LAYOUT
def test_a_layout_of_many_has_no_first_axis_of_one(layout: Layout) -> None:
    """A layout allows many where its shape does not begin with 1."""
    assert layout.allows_many == (axes_of(layout.shape)[0] != "1")


@pytest.mark.parametrize("layout", CHOICES[::3], ids=lambda layout: layout.name)
def test_only_aligned_maps_are_laid_over_the_input(layout: Layout) -> None:
    """An overlay changes the picture of a layout whose maps are aligned, and of no
    other."""
    tensor = example(layout.shape)
    name = layout.name
    if layout.token_axis is not None:
        name += ":4x6"
    plain = fv.grid(tensor, tensor_layout=name)
    image = torch.rand(3, 48, 72)
    over = fv.grid(tensor, tensor_layout=name, overlay=0.5, image=image)
    differs = plain.size != over.size or plain.mode != over.mode
    assert differs == layout.aligned


@pytest.mark.medium
def test_help_names_every_choice(featviz: Run) -> None:
    """`run --help-all` says each name with its axes."""
    text = " ".join(featviz("run", "--help-all").out.split())
    for choice in CHOICES:
        assert f"{choice.name} {choice.shape}" in text


def test_the_page_names_every_choice() -> None:
    """A table of docs/layers.md, of the usual or of the rarer ones, has each name in its
    first column."""
    tables = PAGE.read_text("utf-8").partition("| layout |")[2].partition("\n## ")[0]
    first_cells = " ".join(re.findall(r"^\| ([^|]+) \|", tables, re.M))
    for choice in CHOICES:
        assert f"`{choice.name}`" in first_cells


def test_several_items_are_read_as_a_batch_alone() -> None:
    """Not as the maps of one image, whose layout would drop all but the first."""
    shape = (2, 3, 4, 4)
    assert layout.recognise(shape, Hints(override="batch")).layout == "batch"
    for name in ("nchw", "nhwc", "heads"):
        with pytest.raises(LayoutError, match=f"cannot be read as {name}"):
            layout.recognise(shape, Hints(override=name))


@pytest.mark.parametrize("name", ["nope", "windows", "nchw:2x2"])
def test_an_unknown_name_is_answered_with_all_names(name: str) -> None:
    """The hint lists the choices; `windows` is none, since only a forward pass explains
    them."""
    with pytest.raises(UsageError, match="is no layout") as caught:
        parse_override(name)
    names = ", ".join(layout.name for layout in CHOICES)
    assert names in str(caught.value.hint)


@pytest.mark.medium
def test_the_table_and_the_option_need_neither_torch_nor_numpy() -> None:
    """Help, reports and diff read the table, and a mistake in the option is refused at
    once."""
    code = "import sys, featviz.layout.tracing.guess\n"
    code += "print({'torch', 'numpy'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_border_of_maps_is_that_of_the_convolution_before_them() -> None:
    """An activation, a norm and a 1 × 1 convolution have it too; a convolution with a
    stride has a narrower one, and a block the sum of its convolutions'."""
    block = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, (3, 5)))
    model = nn.Sequential(
        nn.Conv2d(3, 4, 7),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 7, stride=2),
        nn.ReLU(),
        block,
        nn.ReLU(),
    )
    book = HintBook(model, [1, 3, 64, 48])
    borders = {layer.name: book.of_layer(layer).border for layer in list_layers(model)}
    assert borders == {
        "": 3 + 2 + 1 + 2,
        "0": 3,
        "1": 3,
        "2": 3,
        "3": 3,
        "4": 2,
        "5": 2,
        "6": 1 + 2,
        "6.0": 1,
        "6.1": 1,
        "6.2": 2,
        "7": 2,
    }
