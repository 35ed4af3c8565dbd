"""The table of layouts: what each record says holds for a tensor made after its own words."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Outcome
from torch import Tensor

import featviz as fv
from featviz import layout as wing
from featviz.errors import LayoutError
from featviz.layout.layouts import CHOICES, LAYOUTS, Form, Layout
from featviz.layout.token_grids import TokenGrid
from featviz.records import Hints, Windows

README = Path(__file__).parents[2] / "README.md"
SIZES = {"1": 1, "N": 3, "C": 5, "H": 6, "W": 9, "D": 7, "F": 11, "heads": 2, "T": 24}
SIZES |= {"windows": 6, "places": 4, "a": 2, "b": 2}
"""A size for each axis that a record may name; 24 tokens and 6 windows of 4 places are 4 × 6."""

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


def form(layout: Layout) -> Form:
    """All that any layout may need to know of the example."""
    return Form(layout.name, TokenGrid(4, 6), Windows((2, 2)))


@pytest.mark.parametrize(
    ("layout", "shape"), CASES, ids=lambda value: getattr(value, "name", value)
)
def test_arrays_are_read_as_tensors_are_drawn(layout: Layout, shape: str) -> None:
    """`channels_first` gives each channel the values of its map, in their order if it says so."""
    tensor = example(shape)
    maps = layout.to_maps(tensor, form(layout))
    assert maps.ndim == 4
    assert tensor.ndim in layout.dimensions
    rows, drawn = layout.channels_first(tensor.numpy(), len(maps)), maps.flatten(1).numpy()
    if not layout.in_map_order:
        rows, drawn = np.sort(rows, 1), np.sort(drawn, 1)
    np.testing.assert_array_equal(rows, drawn)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_axes_are_those_of_the_maps(layout: Layout) -> None:
    """The axes of channels, of height and width, and of tokens have the sizes of what is drawn."""
    tensor = example(layout.shape)
    maps = layout.to_maps(tensor, form(layout))
    if layout.channel_axis is not None:
        assert tensor.shape[layout.channel_axis] == len(maps)
    if layout.spatial_axes is not None:
        assert tuple(tensor.shape[axis] for axis in layout.spatial_axes) == maps.shape[2:]
    if layout.token_axis is not None:
        assert tensor.shape[layout.token_axis] == maps.shape[2] * maps.shape[3]
    assert layout.allows_many == (not layout.shape.startswith("[1"))


@pytest.mark.parametrize("layout", CHOICES, ids=lambda layout: layout.name)
def test_each_choice_can_be_asked_for(layout: Layout) -> None:
    """`--tensor-layout` takes the name, and draws the tensor so."""
    hints = Hints(layout=layout.name + (":4x6" if layout.token_axis is not None else ""))
    wing.check_layout(str(hints.layout))
    maps = wing.to_maps(example(layout.shape), hints)[""]
    assert (maps.layout, maps.strip) == (layout.name, layout.strip)


@pytest.mark.parametrize("layout", CHOICES, ids=lambda layout: layout.name)
def test_only_aligned_maps_are_laid_over_the_input(layout: Layout) -> None:
    """An overlay changes the picture of a layout whose maps are aligned, and of no other."""
    tensor, image = example(layout.shape), torch.rand(3, 48, 72)
    name = layout.name + (":4x6" if layout.token_axis is not None else "")
    plain = fv.grid(tensor, tensor_layout=name)
    over = fv.grid(tensor, tensor_layout=name, overlay=0.5, image=image)
    assert (plain.size != over.size or plain.mode != over.mode) == layout.aligned


def test_help_and_readme_name_every_choice(featviz: Callable[..., Outcome]) -> None:
    """`run --help` says each name with its axes; each stands in the README's table, too."""
    text = " ".join(featviz("run", "--help-all").out.split())
    table = README.read_text("utf-8").partition("| layout |")[2].partition("\n\n")[0]
    first_cells = " ".join(re.findall(r"^\| ([^|]+) \|", table, re.M))
    for layout in CHOICES:
        assert f"{layout.name} {layout.shape}" in text
        assert f"`{layout.name}`" in first_cells


def test_an_unknown_name_is_answered_with_all_names() -> None:
    """The hint lists the choices; `windows` is none, because only a model's block explains them."""
    for name in ("nope", "windows", "nchw:2x2"):
        with pytest.raises(LayoutError, match="is no layout") as caught:
            wing.check_layout(name)
        assert ", ".join(layout.name for layout in CHOICES) in str(caught.value.hint)


def test_the_table_needs_neither_torch_nor_numpy() -> None:
    """Help, reports and diff read it without them."""
    code = "import sys, featviz.layout.layouts as _; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
