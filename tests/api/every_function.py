"""Every function of the API with the types that a caller has: mypy, which CI runs over
this file, must be content with it, and it must run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import featviz as fv

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
PHOTO = Image.new("RGB", (24, 20), "red")
TENSOR = torch.rand(3, 20, 24)
IMAGES: list[Image.Image | torch.Tensor] = [PHOTO, TENSOR]


def draw_runs(folder: Path) -> list[object]:
    """A run in memory, one on disk, and one with a transform."""
    array = np.zeros((20, 24, 3), np.uint8)
    result = fv.run(
        MODEL,
        [PHOTO, array, TENSOR],
        nn.Conv2d,
        size=16,
        tensors=True,
        cmap="viridis",
    )
    maps = result.captures[0]
    picture: Image.Image = maps.image
    tensor: torch.Tensor | None = maps.tensor
    means: np.ndarray = maps.stats["mean"]
    assert picture.width
    assert tensor is not None
    assert len(means) == len(maps.channels) == 4

    written = fv.run(MODEL, PHOTO, "Conv2d,ReLU", folder / "maps", size=16)
    fed = fv.run(MODEL, PHOTO, transform=lambda image: torch.zeros(3, 8, 8))
    return [result, written, fed]


def use_runs(folder: Path) -> list[object]:
    """A comparison, a sheet and a report of the run on disk."""
    maps = folder / "maps"
    difference = fv.diff(maps, maps, tolerance=1e-3)
    assert difference.equal

    sheet = fv.sheet([maps], "0", channels=[0, 3], width=8.5, dpi=150)
    assert abs(sheet.image.width - 8.5 / 2.54 * 150) <= 1

    report = fv.report(maps, single_file=True, out=folder / "maps.html")
    assert report.page.is_file()
    return [difference, sheet]


def draw_tensors() -> None:
    """Outputs of a forward pass of one's own, and a grid of one."""
    with fv.capture(MODEL, [nn.ReLU]) as captured:
        MODEL(TENSOR[None])
    grid: Image.Image = fv.grid(captured["1"][0], normalize="symmetric", nrow=2)
    assert grid.height


def inspect(folder: Path) -> list[object]:
    """What looks into a model: a page, a table, kernels, evidence and a field."""
    page = fv.look(MODEL, PHOTO, [nn.Conv2d], folder / "look.png", size=16, maps=2)
    picture: Image.Image = page.image
    assert picture.size == page.image.size
    assert page.layers[0].layer == "0"

    listed = fv.layers(MODEL, "Conv2d", functions=True, size=16)
    assert listed.rows[1].selected
    assert listed.totals.macs

    kernels = fv.kernels(MODEL, scale=2)
    cams = fv.cam(MODEL, PHOTO, "mean", "layercam", "Conv2d", size=16)
    values: torch.Tensor = cams.tensor
    assert values.ndim == 2
    assert cams.image.size == (19, 16)

    field = fv.field(MODEL, IMAGES, "Conv2d", size=16)
    assert field.layers[0].sides[0.99] == 3
    return [page, listed, kernels, cams, field]


def study() -> list[object]:
    """What goes through many images: findings, and the best images of each channel."""
    audit = fv.audit(MODEL, IMAGES, fail_on="nonfinite>0", size=16)
    assert audit.exit_code == 0

    best = fv.exemplars(MODEL, IMAGES, nn.Conv2d, top=2, rank_by="mean", size=16)
    first = next(iter(best.files))
    assert best.picture(first).width
    return [audit, best]


def watch(folder: Path) -> list[object]:
    """A training of one step, and the page of its series."""
    series = folder / "series"
    with fv.Watcher(MODEL, IMAGES, nn.Conv2d, 1, series, size=16) as watcher:
        step: Path | None = watcher.step()
    assert step is not None
    assert fv.report(series).page.is_file()
    return [watcher]


def use_all(folder: Path) -> list[str]:
    """Call each function; the short forms of the results."""
    draw_tensors()
    results = [
        *draw_runs(folder),
        *use_runs(folder),
        *inspect(folder),
        *study(),
        *watch(folder),
    ]
    return [repr(result) for result in results]
