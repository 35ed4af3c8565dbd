"""Overlays and reductions, against Pillow and numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_maps import NAN, SITE, captured, noise
from matplotlib import colormaps
from msgspec.structs import replace
from PIL import Image
from torch import nn

import featviz as fv
from featviz.drawing import drawer
from featviz.drawing.picture import caption, describe, encode, to_image
from featviz.options import DrawOptions
from featviz.records import CaptureSite, Hints

RAW: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "input_channels": 3}
"""An input whose values are the picture's, 0..1."""


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )
    return Image.fromarray(pixels)


def tiles(
    picture: Image.Image, size: tuple[int, int], padding: int = 2
) -> list[np.ndarray]:
    """Tiles (height, width) of a grid, row by row."""
    pixels, (height, width) = np.asarray(picture.convert("RGB")).astype(int), size
    rows, columns = (
        (side - padding) // (tile + padding)
        for side, tile in zip(pixels.shape[:2], size, strict=True)
    )
    tops = [
        (padding + r * (height + padding), padding + c * (width + padding))
        for r in range(rows)
        for c in range(columns)
    ]
    return [pixels[top : top + height, left : left + width] for top, left in tops]


def coloured(values: np.ndarray, size: tuple[int, int], cmap: str) -> np.ndarray:
    """What a map should look like: its 254 levels, resized by Pillow, coloured by
    matplotlib."""
    low = values.min()
    high = values.max()
    levels = np.round((values - low) / (high - low) * 253).astype(np.uint8)
    grown = np.asarray(
        Image.fromarray(levels).resize(size[::-1], Image.Resampling.BILINEAR)
    )
    return colormaps[cmap](grown / 253, bytes=True)[..., :3].astype(int)


@pytest.mark.parametrize(
    ("shape", "cmap"), [((1, 5, 7, 9), "viridis"), ((1, 3, 90, 60), "magma")]
)
def test_overlay_is_input_and_coloured_map(shape: tuple[int, ...], cmap: str) -> None:
    """Alpha 0 is the input and alpha 1 the map, exactly; between them it is their
    mixture."""
    tensor = noise(*shape)
    image = photo(48, 36)
    background = np.asarray(image).astype(int)
    drawn_tiles = {
        alpha: tiles(
            fv.grid(tensor, overlay=alpha, image=image, cmap=cmap, scale=1, nrow=2),
            (48, 36),
        )
        for alpha in (0.0, 0.3, 1.0)
    }
    for channel in range(shape[1]):
        over = coloured(tensor[0, channel].numpy(), (48, 36), cmap)
        assert np.array_equal(drawn_tiles[0.0][channel], background)
        # a level of a map of 254
        assert np.abs(drawn_tiles[1.0][channel] - over).max() <= 6
        assert (drawn_tiles[1.0][channel] == over).mean() > 0.95
        mixed = np.floor(0.7 * background + 0.3 * drawn_tiles[1.0][channel] + 0.5)
        assert np.array_equal(drawn_tiles[0.3][channel], mixed)


def test_overlay_mixes_colours_of_all_channels_by_alpha() -> None:
    """The picture of principal components, too: alpha of it, and the rest of the input."""
    tensor = noise(1, 5, 9, 12)
    image = photo(48, 36)
    options = {"reduce": "pca", "image": image, "scale": 1}
    whole, part = (
        np.asarray(fv.grid(tensor, overlay=alpha, **options)).astype(int)
        for alpha in (1.0, 0.25)
    )
    mixed = np.floor(0.75 * np.asarray(image) + 0.25 * whole + 0.5)
    assert np.abs(part - mixed).max() <= 1


def test_nonfinite_values_stay_magenta_and_sharp() -> None:
    """NaN is not mixed with its neighbours, and changes none of the others' limits."""
    tensor = noise(1, 1, 6, 6)
    tensor[0, 0, 2, 3] = NAN
    found = np.asarray(fv.grid(tensor, overlay=1.0, image=photo(36, 36), scale=1))
    magenta = (found == (255, 0, 255)).all(-1)
    assert magenta[12:18, 18:24].all()
    assert magenta.sum() == 36


def test_overlay_of_frames_shows_each_its_own(tmp_path: Path) -> None:
    """At alpha 0 the tiles of a clip are the frames in the middle of each time step."""
    frames = [photo(16, 16, seed) for seed in range(8)]
    (tmp_path / "clip").mkdir()
    for number, frame in enumerate(frames):
        frame.save(tmp_path / "clip" / f"{number}.png")
    model = nn.Sequential(nn.Conv3d(3, 2, 1), nn.AvgPool3d((4, 2, 2)))
    fv.run(
        model,
        tmp_path / "clip",
        "0,1",
        tmp_path / "out",
        overlay=0.0,
        frames=8,
        size=(16, 16),
        scale=1,
        nrow=8,
        **RAW,
    )
    for layer, shown in (("0", list(range(8))), ("1", [2, 6])):
        row = captured(tmp_path / "out", "clip", layer)
        picture = Image.open(tmp_path / "out" / "clip" / row["file"])
        drawn_tiles = tiles(picture, (16, 16))[: 2 * len(shown)]
        for tile, frame in zip(drawn_tiles, shown * 2, strict=True):
            assert np.array_equal(tile, np.asarray(frames[frame]))


def test_overlay_leaves_out_what_pads_the_image() -> None:
    """Of a letterboxed picture the window is drawn; the map covers all of it."""
    background = np.asarray(photo(24, 20))
    options = DrawOptions(overlay=0.0, scale=1)
    drawn = (noise(1, 2, 6, 5), Hints(), [background])
    picture = drawer.draw(options, SITE, *drawn, (4, 3, 12, 9))[""]
    assert np.array_equal(picture.tiles[0:2], np.stack([background[4:16, 3:12]] * 2))
    over = replace(options, overlay=1.0)
    uncropped, cropped = (
        drawer.draw(over, SITE, *drawn, window)[""].tiles[0:2]
        for window in (None, (4, 3, 12, 9))
    )
    assert np.array_equal(cropped, uncropped[:, 4:16, 3:12])


def test_overlay_of_many_maps_is_made_piece_by_piece() -> None:
    """Tiles are blended row by row of the picture: memory does not grow with the maps."""
    import tracemalloc

    image = photo(128, 128)
    options = DrawOptions(overlay=0.5, scale=1)
    picture = drawer.draw(
        options, SITE, noise(1, 400, 4, 4), Hints(), [np.asarray(image)]
    )[""]
    assert picture.tiles.nbytes < 100_000
    tracemalloc.start()
    with Path("/dev/null").open("wb") as file:
        encode(picture, file, "png", {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert picture.plan.pixels * 3 > 20e6
    assert peak < 12e6


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("mean", lambda x: x.mean(0)),
        ("max", lambda x: x.max(0)),
        ("l2", lambda x: np.sqrt((x * x).sum(0))),
        ("max-abs", lambda x: np.abs(x).max(0)),
    ],
)
def test_reduction_is_numpys(
    name: str, oracle: Callable[[np.ndarray], np.ndarray]
) -> None:
    """One tile of all channels, scaled by its own range; the statistics stay the
    channels'."""
    tensor = noise(1, 7, 9, 11)
    values = oracle(tensor[0].numpy())
    reduced = np.asarray(fv.grid(tensor, reduce=name, scale=1)).astype(int)
    span = values.max() - values.min()
    assert np.abs(reduced - 255 * (values - values.min()) / span).max() <= 1
    picture = drawer.draw(DrawOptions(reduce=name), SITE, tensor, Hints())[""]
    row = describe(picture, SITE, tensor.shape, "output.png")
    assert row.reduce == name
    assert row.maps == 7
    assert row.channels is None
    assert row.range == pytest.approx([values.min(), values.max()], rel=1e-5)
    assert (row.min, row.max) == (tensor.min(), tensor.max())
    assert row.grid == {"nrow": 1, "padding": 0, "tile": [189, 231], "scale": 21}
    text = caption(row)
    assert text["Reduce"] == f"{name} of all channels"
    assert text["Maps"] == "7 of 7"


def test_reduction_shows_where_a_channel_is_not_finite() -> None:
    """A NaN in one of the channels is magenta in the picture of all."""
    tensor = noise(1, 5, 6, 6)
    tensor[0, 3, 1, 2] = NAN
    for name in ("mean", "max", "l2", "pca"):
        found = np.asarray(fv.grid(tensor, reduce=name, scale=1).convert("RGB"))
        magenta = (found == (255, 0, 255)).all(-1)
        assert magenta[1, 2], name
        assert magenta.sum() == 1, name


def by_svd(values: np.ndarray) -> np.ndarray:
    """numpy's scores [3, P] in standard deviations, the largest number of a component
    positive."""
    centred = values - values.mean(1, keepdims=True)
    u, _, vt = np.linalg.svd(centred, full_matrices=False)
    sign = np.sign(u[np.abs(u).argmax(0), range(u.shape[1])])
    return (vt * sign[:, None])[:3] * np.sqrt(values.shape[1])


@pytest.mark.parametrize(("channels", "size"), [(6, 20), (40, 5), (3, 8), (300, 4)])
def test_pca_is_numpys_svd(channels: int, size: int) -> None:
    """Three components as red, green, blue: 2.5 standard deviations to either side of
    mid-grey, whether there are more channels or more pixels."""
    mixing = noise(channels, channels, seed=1) * torch.linspace(3, 0.2, channels)
    values = (mixing @ noise(channels, size * size, seed=2)).double().numpy() + 5
    scores = by_svd(values)
    exact = drawer.principal_components(torch.from_numpy(values)).numpy()
    assert np.abs(exact - scores).max() < 1e-5
    tensor = torch.from_numpy(values).float().reshape(1, channels, size, size)
    reduced = np.asarray(fv.grid(tensor, reduce="pca", scale=1)).astype(float)
    expected = np.clip((scores + 2.5) / 5 * 255, 0, 255).reshape(3, size, size)
    assert np.abs(reduced - expected.transpose(1, 2, 0)).max() <= 1
    assert (np.abs(reduced - expected.transpose(1, 2, 0)) <= 0.51).mean() > 0.98


def test_pca_of_little_variation() -> None:
    """One direction gives one colour that varies; none gives mid-grey."""
    line = noise(1, 1, 8, 8) * torch.tensor([1.0, -2.0])[None, :, None, None]
    found = np.asarray(fv.grid(line, reduce="pca", scale=1)).astype(int)
    assert np.ptp(found[..., 0]) > 100
    assert set(np.unique(found[..., 1:])) <= {127, 128}
    flat = np.asarray(fv.grid(torch.full((1, 4, 8, 8), 3.0), reduce="pca", scale=1))
    assert set(np.unique(flat)) <= {127, 128}


def test_gradients_under_an_overlay_keep_their_colours(
    tmp_path: Path, picture: Path
) -> None:
    """coolwarm around zero, laid over the input: where the gradient is zero it is light
    grey."""
    options = replace(DrawOptions(), overlay=1.0, scale=1)
    site = CaptureSite(SITE.layer, "grad", 0, "")
    tensor = torch.zeros(1, 1, 4, 4)
    tensor[0, 0, 0, 0], tensor[0, 0, 3, 3] = 1.0, -1.0
    background = [np.zeros((4, 4, 3), np.uint8)]
    pixels = np.asarray(
        to_image(drawer.draw(options, site, tensor, Hints(), background)[""])
    )
    ends = [colormaps["coolwarm"](x, bytes=True)[:3] for x in (1.0, 0.0, 0.5)]
    for pixel, colour in zip(
        (pixels[0, 0], pixels[3, 3], pixels[1, 2]), ends, strict=True
    ):
        assert np.abs(pixel.astype(int) - colour).max() <= 2
