"""Every function of the API with the types that a caller has: mypy, which CI runs over
this file, must be content with it, and it must run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import featviz as fv


def use_all(folder: Path) -> list[str]:
    """Call each function; the short forms of the results."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    photo = Image.new("RGB", (24, 20), "red")
    array = np.zeros((20, 24, 3), np.uint8)
    tensor = torch.rand(3, 20, 24)

    result = fv.run(
        model, [photo, array, tensor], nn.Conv2d, size=16, tensors=True, cmap="viridis"
    )
    maps = result.captures[0]
    picture: Image.Image = maps.image
    kept: torch.Tensor | None = maps.tensor
    means: np.ndarray = maps.stats["mean"]
    assert picture.width
    assert kept is not None
    assert len(means) == len(maps.channels) == 4
    written = fv.run(model, photo, "Conv2d,ReLU", folder / "maps", size=16)
    fed = fv.run(model, photo, transform=lambda image: torch.zeros(3, 8, 8))

    with fv.capture(model, [nn.ReLU]) as captured:
        model(tensor[None])
    drawn: Image.Image = fv.grid(captured["1"][0], normalize="symmetric", nrow=2)
    assert drawn.height

    page = fv.look(model, photo, [nn.Conv2d], folder / "look.png", size=16, maps=2)
    seen: Image.Image = page.image
    assert seen.size == page.image.size
    assert page.layers[0].layer == "0"

    listed = fv.layers(model, "Conv2d", functions=True, size=16)
    kernels = fv.kernels(model, scale=2)
    cams = fv.cam(model, photo, "mean", "layercam", "Conv2d", size=16)
    values: torch.Tensor = cams.tensor
    assert values.ndim == 2
    assert cams.image.size == (19, 16)
    field = fv.field(model, [photo, tensor], "Conv2d", size=16)
    assert field.layers[0].sides[0.99] == 3
    audit = fv.audit(model, [photo, tensor], fail_on="nonfinite>0", size=16)
    best = fv.exemplars(
        model, [photo, tensor], nn.Conv2d, top=2, rank_by="mean", size=16
    )
    difference = fv.diff(written, folder / "maps", tolerance=1e-3)
    sheet = fv.sheet([written], "0", channels=[0, 3], width=8.5, dpi=150)
    assert abs(sheet.image.width - 8.5 / 2.54 * 150) <= 1
    report = fv.report(written, single_file=True, out=folder / "maps.html")
    assert listed.rows[1].selected
    assert listed.totals.macs
    assert audit.exit_code == 0
    assert difference.equal
    assert report.page.is_file()
    assert best.picture(next(iter(best.files))).width
    with fv.Watcher(
        model, [photo, tensor], nn.Conv2d, 1, folder / "series", size=16
    ) as watcher:
        step: Path | None = watcher.step()
    assert step is not None
    assert fv.report(folder / "series").page.is_file()
    runs = [result, written, fed, page, difference, sheet]
    everything = [watcher, *runs, cams, field, listed, kernels, audit, best]
    return [repr(one) for one in everything]
