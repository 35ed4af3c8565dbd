"""Overlays and reductions, against Pillow and numpy."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_maps import NAN, SITE, captured, colours, is_magenta, noise, row_of, tiles_of
from matplotlib import colormaps
from networks import Net, attend
from numpy.testing import assert_array_equal
from PIL import Image
from tiles import assert_row
from torch import Tensor, nn

import featviz as fv
from featviz.drawing import drawer
from featviz.drawing.picture import GridPicture, caption, encode
from featviz.options import DrawOptions
from featviz.records import ATTENTION_MAPS, CLASS_MAPS, SIGNED, Bytes, Hints

RAW: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "input_channels": 3}
"""An input whose values are the picture's, 0..1."""


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def laid_over(
    tensor: Tensor,
    background: Bytes,
    window: tuple[int, int, int, int] | None = None,
    capture: str = "output",
    **options: Any,
) -> GridPicture:
    """The maps of a tensor over an image.

    Args:
        window: top, left, height and width of the image within its padding.
        capture: its kind.
        options: fields of DrawOptions.
    """
    site = SITE._replace(kind=capture)
    draw_options = DrawOptions(scale=1, **options)
    return drawer.draw(draw_options, site, tensor, Hints(), [background], window)[""]


def blend(share: float, top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """A share of one picture, and the rest of another."""
    return np.floor(share * top + (1 - share) * bottom + 0.5)


def coloured(feature_map: Tensor, size: tuple[int, int], cmap: str) -> np.ndarray:
    """What a map should look like: its 254 levels, resized by Pillow, coloured by
    matplotlib."""
    values = feature_map.numpy()
    shares = (values - values.min()) / np.ptp(values)
    levels = Image.fromarray(np.round(shares * 253).astype(np.uint8))
    grown = levels.resize(size, Image.Resampling.BILINEAR)
    return colormaps[cmap](np.asarray(grown) / 253, bytes=True)[..., :3].astype(int)


@pytest.mark.parametrize(
    ("shape", "cmap"),
    [
        ((1, 5, 7, 9), "viridis"),
        ((1, 3, 90, 60), "magma"),
    ],
)
def test_overlay_is_input_and_coloured_map(shape: tuple[int, ...], cmap: str) -> None:
    """Alpha 0 is the input and alpha 1 the map, exactly; between them it is their
    mixture."""
    tensor = noise(*shape)
    image = np.asarray(photo(48, 36))

    def tiles(alpha: float) -> np.ndarray:
        picture = laid_over(tensor, image, overlay=alpha, cmap=cmap)
        return np.stack(tiles_of(colours(picture), picture.plan))

    expected = np.stack([coloured(maps, (36, 48), cmap) for maps in tensor[0]])
    over = tiles(1.0)
    # a level of a map of 254
    assert np.abs(over - expected).max() <= 6
    assert (over == expected).mean() > 0.95
    assert_array_equal(tiles(0.0), np.stack([image] * shape[1]))
    assert_array_equal(tiles(0.3), blend(0.3, over, image))


def test_overlay_mixes_colours_of_all_channels_by_alpha() -> None:
    """The picture of principal components, too: alpha of it, and the rest of the input."""
    tensor = noise(1, 5, 9, 12)
    image = np.asarray(photo(48, 36))
    components = colours(laid_over(tensor, image, reduce="pca", overlay=1.0))
    mixed = colours(laid_over(tensor, image, reduce="pca", overlay=0.25))
    assert np.abs(mixed - blend(0.25, components, image)).max() <= 1


def test_nonfinite_values_stay_magenta_and_sharp() -> None:
    """NaN is not mixed with its neighbours, and changes none of the others' limits."""
    tensor = noise(1, 1, 6, 6)
    tensor[0, 0, 2, 3] = NAN
    picture = fv.grid(tensor, overlay=1.0, image=photo(36, 36), scale=1)
    magenta = is_magenta(np.asarray(picture))
    assert magenta[12:18, 18:24].all()
    assert magenta.sum() == 36


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layer", "numbers"),
    [
        ("0", range(8)),
        ("1", [2, 6]),
    ],
)
def test_overlay_of_frames_shows_each_its_own(
    layer: str,
    numbers: list[int],
    tmp_path: Path,
) -> None:
    """At alpha 0 the tiles of a clip are the frames in the middle of each time step."""
    frames = [photo(16, 16, seed) for seed in range(8)]
    clip = tmp_path / "clip"
    clip.mkdir()
    for number, frame in enumerate(frames):
        frame.save(clip / f"{number}.png")
    model = nn.Sequential(nn.Conv3d(3, 1, 1), nn.AvgPool3d((4, 2, 2)))
    out = tmp_path / "out"
    fv.run(
        model,
        clip,
        layer,
        out,
        overlay=0.0,
        frames=8,
        size=(16, 16),
        scale=1,
        padding=0,
        nrow=8,
        **RAW,
    )
    picture = Image.open(out / "clip" / captured(out, "clip", layer)["file"])
    expected = np.concatenate([frames[number] for number in numbers], axis=1)
    width = expected.shape[1]
    assert_array_equal(np.asarray(picture)[:16, :width], expected)


class Difference(nn.Module):
    """Takes two images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        result: Tensor = self.conv(second - first)
        return result


@pytest.mark.medium
def test_maps_of_two_images_lie_over_the_first() -> None:
    """At alpha 0 it is all that is seen."""
    images = [photo(16, 16, seed) for seed in range(2)]
    result = fv.run(Difference(), images, "conv", overlay=0.0, scale=1, preset="none")
    (maps,) = result.captures
    assert_array_equal(np.asarray(maps.image), images[0])


WINDOW = (4, 3, 12, 9)


def test_overlay_leaves_out_what_pads_the_image() -> None:
    """The window of a letterboxed picture is drawn, and not its padding."""
    background = np.asarray(photo(24, 20))
    picture = laid_over(noise(1, 2, 6, 5), background, WINDOW, overlay=0.0)
    expected = background[4:16, 3:12]
    assert_array_equal(picture.tiles[0:2], np.stack([expected, expected]))


def test_a_map_covers_what_pads_the_image() -> None:
    """A map covers the padding too, and is cropped as the image is."""
    background = np.asarray(photo(24, 20))
    tensor = noise(1, 2, 6, 5)
    cropped = laid_over(tensor, background, WINDOW, overlay=1.0).tiles[0:2]
    uncropped = laid_over(tensor, background, overlay=1.0).tiles[0:2]
    assert_array_equal(cropped, uncropped[:, 4:16, 3:12])


@pytest.mark.medium
def test_overlay_of_many_maps_is_made_piece_by_piece() -> None:
    """Tiles are blended row by row of the picture: memory does not grow with the maps."""
    background = np.asarray(photo(128, 128))
    picture = laid_over(noise(1, 400, 4, 4), background, overlay=0.5)
    assert picture.tiles.nbytes < 100_000
    assert picture.plan.pixels * 3 > 20e6
    tracemalloc.start()
    with Path("/dev/null").open("wb") as file:
        encode(picture, file, "png", {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12e6


ORACLES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda maps: maps.mean(0),
    "max": lambda maps: maps.max(0),
    "l2": lambda maps: np.linalg.norm(maps, axis=0),
    "max-abs": lambda maps: np.abs(maps).max(0),
}
EVERY_REDUCTION = pytest.mark.parametrize("name", ORACLES)
MAPS = noise(1, 7, 9, 11)


@EVERY_REDUCTION
def test_reduction_is_numpys(name: str) -> None:
    """A reduction is one tile of all channels, scaled by its own range."""
    values = ORACLES[name](MAPS[0].numpy())
    expected = (values - values.min()) / np.ptp(values) * 255
    assert np.asarray(fv.grid(MAPS, reduce=name, scale=1)) == pytest.approx(
        expected, abs=1
    )
    row = row_of(MAPS, reduce=name)
    assert row.range == pytest.approx([values.min(), values.max()], rel=1e-5)


@EVERY_REDUCTION
def test_the_statistics_of_a_reduction_are_the_channels(name: str) -> None:
    """The manifest counts all maps, and says that they share a tile."""
    row = row_of(MAPS, reduce=name, scale=None)
    assert_row(
        asdict(row),
        reduce=name,
        maps=7,
        channels=None,
        min=MAPS.min(),
        max=MAPS.max(),
        grid={"nrow": 1, "padding": 0, "tile": [189, 231], "scale": 21},
    )
    text = caption(row)
    assert text["Reduce"] == f"{name} of all channels"
    assert text["Maps"] == "7 of 7"


@pytest.mark.parametrize("name", ["mean", "max", "l2", "pca"])
def test_reduction_shows_where_a_channel_is_not_finite(name: str) -> None:
    """A NaN in one of the channels is magenta in the picture of all."""
    tensor = noise(1, 5, 6, 6)
    tensor[0, 3, 1, 2] = NAN
    picture = fv.grid(tensor, reduce=name, scale=1).convert("RGB")
    assert np.argwhere(is_magenta(np.asarray(picture))).tolist() == [[1, 2]]


def by_svd(values: np.ndarray) -> np.ndarray:
    """numpy's scores [3, P] in standard deviations, the largest number of a component
    positive."""
    centred = values - values.mean(1, keepdims=True)
    u, _, vt = np.linalg.svd(centred, full_matrices=False)
    largest = u[np.abs(u).argmax(0), range(u.shape[1])]
    scores = vt * np.sign(largest)[:, None] * np.sqrt(values.shape[1])
    return scores[:3]


@pytest.fixture(params=[(6, 20), (40, 5), (3, 8), (300, 4)], ids=str)
def mixed(request: pytest.FixtureRequest) -> Tensor:
    """Channels [C, size, size] with more or fewer of them than pixels."""
    channels, size = request.param
    shares = noise(channels, channels, seed=1) * torch.linspace(3, 0.2, channels)
    values = shares @ noise(channels, size * size, seed=2) + 5
    return values.reshape(channels, size, size)


def test_principal_components_are_numpys_svd(mixed: Tensor) -> None:
    """The first three components are numpy's scores, in standard deviations."""
    values = mixed.flatten(1).double()
    components = drawer.component_maps(values)
    assert components.numpy() == pytest.approx(by_svd(values.numpy()), abs=1e-5)


def test_components_are_red_green_and_blue(mixed: Tensor) -> None:
    """Each colour spans 2.5 standard deviations to either side of mid-grey."""
    scores = by_svd(mixed.flatten(1).double().numpy())
    levels = np.clip((scores + 2.5) / 5 * 255, 0, 255)
    expected = levels.reshape(3, *mixed.shape[1:]).transpose(1, 2, 0)
    picture = np.asarray(fv.grid(mixed[None], reduce="pca", scale=1))
    error = np.abs(picture - expected)
    assert error.max() <= 1
    assert (error <= 0.51).mean() > 0.98


def test_one_component_gives_one_colour() -> None:
    """Colours without a component are mid-grey."""
    line = noise(1, 1, 8, 8) * torch.tensor([1.0, -2.0]).reshape(1, 2, 1, 1)
    pixels = np.asarray(fv.grid(line, reduce="pca", scale=1))
    assert np.ptp(pixels[..., 0]) > 100
    assert set(pixels[..., 1:].flat) <= {127, 128}


def test_no_component_gives_mid_grey() -> None:
    """Maps that do not vary are mid-grey."""
    flat = fv.grid(torch.full((1, 4, 8, 8), 3.0), reduce="pca", scale=1)
    assert set(np.asarray(flat).flat) <= {127, 128}


def test_gradients_under_an_overlay_keep_their_colours() -> None:
    """coolwarm around zero, laid over the input: where the gradient is zero it is light
    grey."""
    tensor = torch.tensor([[[[1.0, 0.0, -1.0]]]])
    background = np.zeros((1, 3, 3), np.uint8)
    pixels = colours(laid_over(tensor, background, capture="grad", overlay=1.0))
    expected = colormaps["coolwarm"]([1.0, 0.5, 0.0], bytes=True)[:, :3]
    assert np.abs(pixels[0] - expected).max() <= 2


@pytest.mark.parametrize("method", [*CLASS_MAPS, *ATTENTION_MAPS])
def test_evidence_over_an_image_has_the_colours_of_papers(method: str) -> None:
    """Every pixel is one of matplotlib's turbo, or of coolwarm where values have signs."""
    cmap = "coolwarm" if method in SIGNED else "turbo"
    ramp = colormaps[cmap](np.linspace(0, 1, 254), bytes=True)[:, :3].astype(int)
    head = nn.Linear(192, 2)
    nn.init.ones_(head.weight)
    net = nn.Sequential(Net(attend), nn.Flatten(), head)
    image = noise(3, 8, 8).sigmoid()

    picture = fv.cam(net, image, None, method, "0", overlay=1, preset="none")

    pixels = np.asarray(picture.image).reshape(-1, 1, 3).astype(int)
    assert len(np.unique(pixels, axis=0)) > 2
    assert np.abs(pixels - ramp).max(2).min(1).max() <= 1
