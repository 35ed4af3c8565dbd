"""audit --verify on images that cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Outcome
from runs import make_photos
from torch import nn

from featviz.errors import ImageError
from featviz.images import decode
from featviz.records import Sample

Run = Callable[..., Outcome]


def test_audit_verify_names_the_image_that_fails(
    featviz: Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that is broken from the start does not shift the names of the others."""
    make_photos(photos, 4)
    (photos / "00.png").write_bytes(b"no picture")
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.ReLU())
    with torch.no_grad():
        net[0].bias[1] = -1000.0  # type: ignore[union-attr, index]
    torch.save(net.eval(), tmp_path / "net.pth")
    real, seen = decode.decode, []

    def vanishing(sample: Sample, *more: Any) -> Any:
        seen.append(sample.name)
        if sample.name == "02.png" and seen.count("02.png") > 1:
            raise ImageError("02.png cannot be read: it vanished", None)
        return real(sample, *more)

    monkeypatch.setattr("featviz.images.decode.decode", vanishing)
    base = ["audit", tmp_path / "net.pth", photos, "--size", "16", "--out", tmp_path / "out"]
    done = featviz(*base, "--verify", "--max-suspects", "0")
    assert "error: 02.png cannot be read: it vanished" in done.err
    assert "error: 01.png" not in done.err and "error: 00.png is no image" in done.err
