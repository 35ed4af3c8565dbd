"""Detectors and segmentation: regions side by side, boxes and scores as rows, masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import SCENES
from tiles import levels, raw, rows, tiles

from featviz import cli


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a detector with random weights, as the command line makes it."""
    out = tmp_path_factory.mktemp("detector") / "out"
    layers = (
        "FasterRCNN,MultiScaleRoIAlign,roi_heads.box_head.fc6,FeaturePyramidNetwork"
    )
    line = [
        "run",
        "fasterrcnn_mobilenet_v3_large_320_fpn",
        str(SCENES / "landscape.jpg"),
    ]
    line += ["--weights", "none", "--model-arg", "weights_backbone=None"]
    line += [
        "--model-arg",
        "box_score_thresh=0.0",
        "--layers",
        layers,
        "--channels",
        "first:16",
    ]
    line += ["--out", str(out), "--tensors", "npy", "--scale", "1"]
    assert cli.guarded(line) == 0
    return out / "landscape.jpg"


@pytest.mark.slow
class TestDetectors:
    """Regions of interest, and what detectors and segmenters give."""

    def test_regions_stand_side_by_side(self, seen: Path) -> None:
        """[N, 256, 7, 7]: a row of the first 16 regions for each channel; the manifest
        has both numbers, and the scale is that of all regions."""
        row = rows(seen)["roi_heads.box_roi_pool", 0, ""]
        tensor = raw(seen, row)
        regions = tensor.shape[0]
        assert regions > 16
        assert tensor.shape[1:] == (256, 7, 7)
        assert (row["layout"], row["slices"], row["maps"]) == (
            "batch",
            [16, regions],
            256,
        )
        assert row["grid"]["nrow"] % 16 == 0
        want = levels(tensor.transpose(0, 1)[:16])[:, :16].reshape(-1, 7, 7).astype(int)
        assert np.abs(tiles(seen, row).astype(int) - want).max() <= 1
        kept = np.load(seen / "stats.npz")["roi_heads.box_roi_pool|output|0|"]
        assert np.allclose(kept[:, 1], tensor.amax((0, 2, 3)).numpy())
