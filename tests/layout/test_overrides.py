"""`--tensor-layout` and dry runs of tokens, through the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Outcome, Run
from ramps import positions, save
from tiles import assert_drawn, levels, manifest, rows

import featviz as fv
from featviz.errors import LayoutError

FACTORY = """
import sys
sys.path.insert(0, {tests!r})
from ramps import PositionViT


def plain(count=1):
    return PositionViT("odd_name", counts=(count,))
"""


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    """A file with factories of position-encoding transformers."""
    path = tmp_path / "nets.py"
    path.write_text(FACTORY.format(tests=str(Path(__file__).parent)), "utf-8")
    return path


TOLD = ["--mean", "0,0,0", "--std", "1,1,1", "--size", "56x80", "--scale", "1"]


class TestTensorLayout:
    """--tensor-layout, through the command line."""

    @pytest.fixture(autouse=True)
    def line(self, factory: Path, featviz: Run, tmp_path: Path) -> None:
        self.image = save(tmp_path, 56, 80)
        self.call = featviz
        self.factory = factory
        self.out = tmp_path / "out"

    def run(
        self, *told: str, layers: str = "blocks.*.same", make: str = "plain"
    ) -> Outcome:
        options = [part for text in told for part in ("--tensor-layout", text)]
        model = f"{self.factory}:{make}"
        out = ("--out", self.out, "--overwrite")
        return self.call(
            "run", model, self.image, "--layers", layers, *TOLD, *options, *out
        )

    def captures(self) -> dict[tuple[str, int, str], dict[str, Any]]:
        return rows(self.out / "ramps.png")

    def test_without_it_one_token_of_an_odd_name_is_an_extra_one(self) -> None:
        """A token too many, of a parameter with no known name, is told apart all the
        same."""
        assert self.run().code == 0
        found = self.captures()
        assert found["blocks.0.same", 0, ""]["layout"] == "tokens"
        assert_drawn(
            self.out / "ramps.png", found["blocks.0.same", 0, ""], positions(14, 20)
        )
        assert ("blocks.0.same", 0, "extra_token") in found

    def test_a_grid_with_extra_tokens(self) -> None:
        """tokens:14x20+1 is taken at its word; a transposed 20x14 draws another
        picture."""
        assert self.run("tokens:14x20+1").code == 0
        row = self.captures()["blocks.0.same", 0, ""]
        assert (row["layout"], row["grid"]["tile"]) == ("tokens", [14, 20])
        assert_drawn(self.out / "ramps.png", row, positions(14, 20))
        assert self.run("tokens:20x14+1").code == 0
        row = self.captures()["blocks.0.same", 0, ""]
        assert row["grid"]["tile"] == [20, 14]
        assert_drawn(self.out / "ramps.png", row, positions(14, 20).reshape(3, 20, 14))

    def test_selectors_say_for_which_layers(self) -> None:
        """SELECTORS=LAYOUT is for these layers only; of several the last that matches
        counts."""
        assert self.run("tokens:20x14+1", "blocks.1.*=tokens:14x20+1").code == 0
        found = self.captures()
        assert found["blocks.0.same", 0, ""]["grid"]["tile"] == [20, 14]
        assert found["blocks.1.same", 0, ""]["grid"]["tile"] == [14, 20]
        assert self.run("Identity,!blocks.0.*=tokens:20x14+1").code == 0
        found = self.captures()
        assert found["blocks.0.same", 0, ""]["grid"]["tile"] == [14, 20]
        assert found["blocks.1.same", 0, ""]["grid"]["tile"] == [20, 14]

    def test_a_grid_that_does_not_fit_is_skipped_with_the_reason(self) -> None:
        """Nothing is drawn by a told layout that the tensor cannot have."""
        assert self.run("tokens:10x10").code == 1
        (first, _) = manifest(self.out / "ramps.png")["skipped"]
        assert first["reason"] == (
            "shape [1, 281, 3]: 281 tokens are no grid of --tensor-layout tokens:10x10"
        )
        assert self.run("nchw").code == 1
        (first, _) = manifest(self.out / "ramps.png")["skipped"]
        assert (
            first["reason"]
            == "shape [1, 281, 3] cannot be read as nchw [1, C, H, W] (--tensor-layout)"
        )

    def test_a_map_can_be_told_to_be_channels_last(self) -> None:
        """nhwc for a convolution's [1, 3, 14, 20]: twenty maps of 3 × 14."""
        assert self.run("Conv2d=nhwc", layers="conv_proj,blocks.0.same").code == 0
        found = self.captures()
        row = found["conv_proj", 0, ""]
        assert (row["layout"], row["maps"], row["grid"]["tile"]) == (
            "nhwc",
            20,
            [3, 14],
        )
        assert_drawn(self.out / "ramps.png", row, positions(14, 20).permute(2, 0, 1))
        assert found["blocks.0.same", 0, ""]["layout"] == "tokens"

    @pytest.mark.parametrize(
        ("told", "message"),
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
    def test_bad_values_are_usage_errors(self, told: str, message: str) -> None:
        """Exit 2 before any work, one line that names the value, and a hint what there
        is."""
        got = self.run(told)
        assert got.code == 2
        first, second = got.err.splitlines()
        assert first.startswith(f"error: --tensor-layout {told!r}: ")
        assert message in first
        assert second.startswith("hint: ")
        assert not self.out.exists()


def test_grid_takes_a_told_layout() -> None:
    """featviz.grid draws tokens where their grid is said, and says why not where it is
    not."""
    maps = positions(14, 20)
    tokens = torch.cat([torch.zeros(1, 3), maps.flatten(1).T])[None]
    got = fv.grid(tokens, tensor_layout="tokens:14x20+1", scale=1, padding=0, nrow=1)
    assert (
        np.abs(np.asarray(got).reshape(3, 14, 20).astype(int) - levels(maps)).max() <= 1
    )
    with pytest.raises(LayoutError, match=r"shape \[1, 281, 3\].*tensor-layout"):
        fv.grid(tokens)
