"""`--tensor-layout` and dry runs of tokens, through the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Outcome, Run
from ramps import Look, positions, save
from tiles import assert_drawn, assert_row, levels, manifest, rows

import featviz as fv
from featviz.errors import LayoutError

FACTORY = """
import sys
sys.path.insert(0, {tests!r})
from ramps import PositionViT


def plain():
    return PositionViT({{"odd_name": 1}})
"""
AS_IS = ("--mean", "0,0,0", "--std", "1,1,1", "--size", "56x80", "--scale", "1")

RunWith = Callable[..., Outcome]


@pytest.fixture
def run(featviz: Run, tmp_path: Path) -> RunWith:
    """Run a transformer of 14 × 20 tokens, and one of its own, with tensor layouts."""
    factory = tmp_path / "nets.py"
    factory.write_text(FACTORY.format(tests=str(Path(__file__).parent)), "utf-8")
    image = save(tmp_path, 56, 80)

    def run(*layouts: str, layers: str = "blocks.*.same") -> Outcome:
        options = [f"--tensor-layout={layout}" for layout in layouts]
        model = f"{factory}:plain"
        selection = ("--layers", layers, "--out", tmp_path / "out")
        return featviz("run", model, image, *selection, *AS_IS, *options)

    return run


@pytest.fixture
def look(run: RunWith, tmp_path: Path) -> Callable[..., Look]:
    """The same, and read the captures back."""

    def look(*layouts: str, **selection: str) -> Look:
        assert run(*layouts, **selection).code == 0
        folder = tmp_path / "out" / "ramps.png"
        return Look(folder, rows(folder))

    return look


@pytest.mark.medium
def test_one_token_of_an_odd_name_is_an_extra_one(look: Callable[..., Look]) -> None:
    """A token too many, of a parameter with no known name, is told apart without the
    option."""
    seen = look()
    row = seen.row("blocks.0.same")
    assert row["layout"] == "tokens"
    assert_drawn(seen.folder, row, positions(14, 20))
    assert ("blocks.0.same", 0, "extra_token") in seen.captures


@pytest.mark.medium
@pytest.mark.parametrize("grid", [(14, 20), (20, 14)], ids=str)
def test_a_grid_with_extra_tokens(
    grid: tuple[int, int],
    look: Callable[..., Look],
) -> None:
    """tokens:14x20+1 is taken at its word; a transposed 20x14 draws another picture."""
    seen = look("tokens:{}x{}+1".format(*grid))
    row = seen.row("blocks.0.same")
    assert row["layout"] == "tokens"
    assert row["grid"]["tile"] == list(grid)
    assert_drawn(seen.folder, row, positions(14, 20).reshape(3, *grid))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layouts", "first", "second"),
    [
        (["tokens:20x14+1", "blocks.1.*=tokens:14x20+1"], [20, 14], [14, 20]),
        (["Identity,!blocks.0.*=tokens:20x14+1"], [14, 20], [20, 14]),
    ],
)
def test_selectors_say_for_which_layers(
    layouts: list[str],
    first: list[int],
    second: list[int],
    look: Callable[..., Look],
) -> None:
    """SELECTORS=LAYOUT is for these layers only; of several the last that matches
    counts."""
    seen = look(*layouts)
    assert seen.row("blocks.0.same")["grid"]["tile"] == first
    assert seen.row("blocks.1.same")["grid"]["tile"] == second


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (
            "tokens:10x10",
            "shape [1, 281, 3]: 281 tokens are no grid of --tensor-layout tokens:10x10",
        ),
        (
            "nchw",
            "shape [1, 281, 3] cannot be read as nchw [1, C, H, W] (--tensor-layout)",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_skipped_with_the_reason(
    layout: str,
    reason: str,
    run: RunWith,
    tmp_path: Path,
) -> None:
    """Nothing is drawn by a layout that the tensor cannot have."""
    assert run(layout).code == 1
    first, _ = manifest(tmp_path / "out" / "ramps.png")["skipped"]
    assert first["reason"] == reason


@pytest.mark.medium
def test_a_map_can_be_read_as_channels_last(look: Callable[..., Look]) -> None:
    """nhwc for a convolution's [1, 3, 14, 20]: twenty maps of 3 × 14; other layers
    stay."""
    seen = look("Conv2d=nhwc", layers="conv_proj,blocks.0.same")
    row = seen.row("conv_proj")
    assert_row(row, layout="nhwc", maps=20)
    assert row["grid"]["tile"] == [3, 14]
    assert_drawn(seen.folder, row, positions(14, 20).permute(2, 0, 1))
    assert seen.row("blocks.0.same")["layout"] == "tokens"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("nwhc", "'nwhc' is no layout"),
        ("Conv2d=", "'' is no layout"),
        ("tokens:0x20", "'0x20' is no grid"),
        ("tokens:1x1+10000", "'1x1+10000' is no grid"),
        ("=nhwc", "the list '' holds no selector"),
        ("re:(=nhwc", "is no regular expression"),
        ("Conv2d#0=nhwc", "takes no index"),
    ],
)
def test_bad_values_are_usage_errors(
    layout: str,
    message: str,
    run: RunWith,
    tmp_path: Path,
) -> None:
    """Exit 2 before any work, one line that names the value, and a hint what there is."""
    done = run(layout)
    assert done.code == 2
    error, hint = done.err.splitlines()
    assert error.startswith(f"error: --tensor-layout {layout!r}: ")
    assert message in error
    assert hint.startswith("hint: ")
    assert not (tmp_path / "out").exists()


TOKENS = torch.cat([torch.zeros(1, 3), positions(14, 20).flatten(1).T])[None]


def test_grid_takes_a_layout() -> None:
    """featviz.grid draws tokens whose grid is given."""
    options: dict[str, Any] = {"scale": 1, "padding": 0, "nrow": 1}
    picture = fv.grid(TOKENS, tensor_layout="tokens:14x20+1", **options)
    drawn = np.asarray(picture).reshape(3, 14, 20)
    assert drawn == pytest.approx(levels(positions(14, 20)).astype(int), abs=1)


def test_grid_without_a_layout_says_what_is_missing() -> None:
    """An error names the option that helps."""
    with pytest.raises(LayoutError, match=r"shape \[1, 281, 3\].*tensor_layout"):
        fv.grid(TOKENS)
