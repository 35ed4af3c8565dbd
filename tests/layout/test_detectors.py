"""Detectors and segmentation: regions side by side, boxes and scores as rows, masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import SCENES
from tiles import assert_row, levels, raw, rows, tiles

from featviz import cli

POOL = "roi_heads.box_roi_pool"
LINE = """
    run fasterrcnn_mobilenet_v3_large_320_fpn
    --weights none --model-arg weights_backbone=None
    --model-arg box_score_thresh=0.0
    --channels first:16 --tensors npy --scale 1
"""


@pytest.mark.slow
def test_regions_stand_side_by_side(tmp_path: Path) -> None:
    """[N, 256, 7, 7]: a row of the first 16 regions for each channel; the manifest has
    both numbers, and the scale is that of all regions."""
    out = tmp_path / "out"
    line = [*LINE.split(), str(SCENES / "landscape.jpg"), "--layers", POOL]
    assert cli.guarded([*line, "--out", str(out)]) == 0
    folder = out / "landscape.jpg"
    row = rows(folder)[POOL, 0, ""]
    tensor = raw(folder, row)
    count = len(tensor)
    assert count > 16
    assert tensor.shape[1:] == (256, 7, 7)
    assert_row(row, layout="batch", slices=[16, count], maps=256)
    assert row["grid"]["nrow"] % 16 == 0
    regions = levels(tensor.transpose(0, 1)[:16])[:, :16]
    drawn = tiles(folder, row).astype(int)
    assert np.abs(drawn - regions.reshape(-1, 7, 7)).max() <= 1
    with np.load(folder / "stats.npz") as stats:
        maxima = stats[f"{POOL}|output|0|"][:, 1]
    assert np.allclose(maxima, tensor.amax((0, 2, 3)))
