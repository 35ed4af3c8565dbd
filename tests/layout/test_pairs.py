"""Samples of two images: models that take several at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frames import AS_IS, still
from PIL import Image
from tiles import manifest, raw, rows
from torch import Tensor, nn

import featviz as fv
from featviz.errors import UsageError
from featviz.models.presets import required_arguments


class Siamese(nn.Module):
    """Takes two images and tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 3, 1, bias=False)
        self.body.weight = nn.Parameter(torch.eye(3)[:, :, None, None])

    def forward(self, a: Tensor, b: Tensor, steps: int = 1) -> Tensor:
        return self.body(a) - self.body(b)


class TestPairs:
    """Models that take several images at once."""

    @pytest.fixture
    def pair(self, tmp_path: Path) -> list[Path]:
        """Two stills with different numbers, and a third."""
        paths = [tmp_path / f"{name}.png" for name in "abc"]
        for number, path in enumerate(paths):
            still(3 + number * 2).save(path)
        return paths

    @pytest.mark.parametrize(
        ("forward", "count"),
        [
            (lambda self, x: x, 1),
            (lambda self, x, y=None: x, 1),
            (lambda self, x, y: x, 2),
            (lambda self, x, y, *z, k=1, **rest: x, 2),
            (lambda self, *x: x, 1),
            (lambda self, x, y, z, *, k: x, 3),
        ],
    )
    def test_forward_says_how_many(self, forward: Any, count: int) -> None:
        """Arguments that forward cannot do without are images."""
        assert (
            required_arguments(type("M", (nn.Module,), {"forward": forward})()) == count
        )

    def test_two_images_are_one_sample(self, pair: list[Path], tmp_path: Path) -> None:
        """a.png+b.png holds both calls of the shared body, and both images side by
        side."""
        out = tmp_path / "out"
        options = {"size": (6, 8), "tensors": "npy", "scale": 1, "channels": 0, **AS_IS}
        result = fv.run(Siamese(), pair[:2], "body,Siamese", out, **options)
        assert [image.name for image in result.images] == ["a.png+b.png"]
        folder = out / "a.png+b.png"
        captures = rows(folder)
        for call, number in ((0, 3), (1, 5)):
            tensor = raw(folder, captures["body", call, ""])
            assert torch.allclose(tensor[0, 0], torch.full((6, 8), number * 10 / 255))
        assert float(raw(folder, captures["", 0, ""])[0, 0].mean()) == pytest.approx(
            -20 / 255
        )
        seen = np.asarray(Image.open(folder / "input.png"))
        assert seen.shape == (6, 16, 3)
        assert (seen[0, 0, 0], seen[0, 8, 0]) == (30, 50)
        content = manifest(folder)
        assert content["image"]["files"] == ["a.png", "b.png"]
        assert content["input"]["shape"] == [[1, 3, 6, 8]] * 2

    def test_inputs_may_be_told(self, pair: list[Path], tmp_path: Path) -> None:
        """images_per_pass=3 gives three images to a forward with an optional third."""

        def way(
            self: nn.Module, a: Tensor, b: Tensor, c: Tensor | None = None
        ) -> list[Tensor]:
            return [self.conv(x) for x in (a, b, c) if x is not None]

        net = type("Three", (nn.Module,), {"forward": way})()
        net.conv = nn.Conv2d(3, 2, 1)
        with pytest.raises(UsageError, match="takes 2 images at once, and there are 3"):
            fv.run(net, pair, "conv", tmp_path / "out", size=8, **AS_IS)
        assert not (tmp_path / "out").exists()
        done = fv.run(
            net, pair, "conv", tmp_path / "out", size=8, images_per_pass=3, **AS_IS
        )
        assert [maps.call for maps in done.captures] == [0, 1, 2]

    def test_pairs_of_a_folder_and_of_different_sizes(self, tmp_path: Path) -> None:
        """Consecutive images of a folder are pairs; images of a pair may differ in
        size."""
        (tmp_path / "all").mkdir()
        for number in range(4):
            still(number, height=5 + number).save(tmp_path / "all" / f"{number}.png")

        class Two(Siamese):
            def forward(self, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
                return self.body(a).mean() - self.body(b).mean()

        result = fv.run(
            Two(), tmp_path / "all", "body", tmp_path / "out", size=6, **AS_IS
        )
        assert [image.name for image in result.images] == ["0.png+1.png", "2.png+3.png"]
        assert result.failures == ()
