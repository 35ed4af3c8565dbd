"""Counting over batches: images are read ahead, and numbers of several batches merge at once."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import Net
from PIL import Image
from torch import nn

from featviz.errors import FeatvizError
from featviz.images.find import find_samples
from featviz.run.visit import batches as read_batches

from .audited import PLAIN, document, loaded


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """Nine images of noise, the fifth of which cannot be read."""
    folder = tmp_path / "noise"
    folder.mkdir()
    generator = np.random.default_rng(3)
    for number in range(9):
        pixels = generator.integers(0, 256, (12, 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (folder / "4.png").write_bytes(b"no picture")
    return folder


@pytest.mark.parametrize("size", [1, 3, 20])
def test_batches_are_those_of_reading_one_by_one(noise: Path, size: int) -> None:
    """In order, without the image that fails, each image's own values, and no thread stays."""
    samples, model = find_samples([str(noise)]), loaded(nn.Identity())
    failed: list[int] = []

    def fail(number: int, error: FeatvizError) -> None:
        assert threading.current_thread() is threading.main_thread()
        failed.append(number)

    batches = list(read_batches(samples, model, PLAIN, size, fail))
    order = [number for batch in batches for number in batch.images]
    assert order == [0, 1, 2, 3, 5, 6, 7, 8] and failed == [4]
    assert [len(b.images) for b in batches[:-1]] == [size] * (len(batches) - 1)
    for batch in batches:
        for number, values in zip(batch.images, batch.inputs[0], strict=True):
            pixels = np.asarray(Image.open(noise / f"{number}.png"))
            expected = torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255
            torch.testing.assert_close(values, expected)
    assert not [t for t in threading.enumerate() if t.name.startswith("featviz-reader")]


def test_a_call_whose_channels_change_is_named(tmp_path: Path, noise: Path) -> None:
    """Before they merge or after, a call with other channels than before is skipped, with both."""
    # as many channels as the first pixel says
    fickle = Net(lambda self, x: self.relu(x if x[0, 0, 0, 0] > 0.5 else x[:, :2]), relu=nn.ReLU())
    skipped = document(fickle, noise, tmp_path)["skipped"]
    assert [entry["layer"] for entry in skipped] == ["relu"]
    assert "channels, then" in skipped[0]["reason"]
