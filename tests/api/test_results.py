"""What `featviz.run` gives: pictures, tensors and numbers, in memory or on disk."""

from __future__ import annotations

import base64
import gc
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pixels import assert_same_pixels
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor

import featviz as fv
from featviz.api import notebook
from featviz.errors import FeatvizError, StoreError, UsageError
from featviz.records import STAT_COLUMNS

from .drawn import AS_IT_IS


@pytest.mark.slow
def test_without_out_nothing_is_left(
    tiny: nn.Module, pixels: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the last capture is gone, neither the current nor the temporary folder holds
    a file."""
    temporary = tmp_path / "temporary"
    here = tmp_path / "here"
    temporary.mkdir()
    here.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.chdir(here)

    maps = fv.run(tiny, pixels, "Conv2d", **AS_IT_IS).captures[0]
    assert maps.image.size
    assert list(temporary.iterdir())
    del maps
    gc.collect()

    assert not list(temporary.iterdir())
    assert not list(here.iterdir())


@pytest.mark.medium
def test_in_memory_and_on_disk_are_the_same(
    tiny: nn.Module, pixels: np.ndarray, tmp_path: Path
) -> None:
    """Pictures, tensors and statistics are equal."""
    options = {"tensors": True, **AS_IT_IS}
    in_memory = fv.run(tiny, pixels, "Conv2d,ReLU", **options)
    on_disk = fv.run(tiny, pixels, "Conv2d,ReLU", tmp_path / "out", **options)

    for memory, disk in zip(in_memory.captures, on_disk.captures, strict=True):
        assert_same_pixels(memory.image, disk.file)
        assert torch.equal(memory.tensor, disk.tensor)
        assert np.array_equal(memory.stats, disk.stats)


@pytest.mark.medium
def test_a_result_says_where_it_is(
    tiny: nn.Module, pixels: np.ndarray, tmp_path: Path
) -> None:
    """`out` is None in memory, and an image has its name and its input."""
    in_memory = fv.run(tiny, pixels, "Conv2d", **AS_IT_IS)
    on_disk = fv.run(tiny, pixels, "Conv2d", tmp_path / "out", **AS_IT_IS)
    assert in_memory.out is None
    assert on_disk.out == tmp_path / "out"
    assert on_disk.images[0].name == "image-0.png"
    assert_same_pixels(in_memory.images[0].input, pixels)


@pytest.mark.medium
def test_a_tensor_of_other_axes_than_its_manifests_is_refused(
    tiny: nn.Module, pixels: np.ndarray, tmp_path: Path
) -> None:
    """Somebody has saved it anew, channels last: it has as many values as before."""
    (maps,) = fv.run(
        tiny, pixels, "Conv2d", tmp_path / "out", tensors=True, **AS_IT_IS
    ).captures
    path = maps.file.with_name("output.npy")
    np.save(path, np.load(path).transpose(0, 2, 3, 1))
    with pytest.raises(StoreError, match=r"its shape is .* by the manifest"):
        maps.tensor  # noqa: B018


@pytest.fixture
def image(pixels: np.ndarray) -> Tensor:
    """The picture as a tensor, float32 [3, 20, 24] in 0..1."""
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255


@pytest.mark.medium
def test_tensors_and_statistics_are_the_models_own(
    tiny: nn.Module, image: Tensor
) -> None:
    """The tensor is that of torchvision's feature extractor, and the statistics are
    counted over it."""
    expected = create_feature_extractor(tiny[0:1], ["0"])(image[None])["0"].detach()

    (maps,) = fv.run(tiny, image, "Conv2d", tensors=True, **AS_IT_IS).captures

    torch.testing.assert_close(maps.tensor, expected)
    assert maps.stats.dtype.names == STAT_COLUMNS
    channels = expected.flatten(2)[0]
    statistics = {
        "min": channels.amin(1),
        "max": channels.amax(1),
        "mean": channels.mean(1),
    }
    for name, values in statistics.items():
        np.testing.assert_allclose(maps.stats[name], values, rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_numbers_of_a_capture_are_those_of_its_finite_values(image: Tensor) -> None:
    """Over all channels; what is not finite is counted beside them."""

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, 0])
            return x

    (maps,) = fv.run(
        nn.Sequential(Odd()), image, "Odd", tensors=True, normalize="layer", **AS_IT_IS
    ).captures

    finite = maps.tensor[maps.tensor.isfinite()].double()
    numbers = (maps.min, maps.max, maps.mean, maps.std)
    deviation = finite.std(correction=0)
    expected = (finite.min(), finite.max(), finite.mean(), deviation)
    np.testing.assert_allclose(numbers, expected, rtol=1e-5, atol=1e-6)
    assert maps.zero_fraction == pytest.approx(
        (finite == 0).sum() / maps.tensor.numel()
    )
    assert maps.nonfinite == 2
    assert maps.range == pytest.approx((maps.min, maps.max))


@pytest.mark.medium
def test_each_map_has_a_range_of_its_own(tiny: nn.Module, image: Tensor) -> None:
    """Then a capture has none."""
    (maps,) = fv.run(tiny, image, "Conv2d", **AS_IT_IS).captures
    assert maps.range is None


@pytest.mark.medium
def test_a_capture_says_which_it_is(tiny: nn.Module, image: Tensor) -> None:
    """It has its key, shape, layout and channels; without `tensors` it has no tensor."""
    (maps,) = fv.run(tiny, image, "Conv2d", **AS_IT_IS).captures
    capture_key = (maps.layer, maps.type, maps.kind, maps.call, maps.key)
    assert capture_key == ("0", "Conv2d", "output", 0, "")
    assert maps.shape == (1, 4, 20, 24)
    assert maps.layout == "nchw"
    assert maps.channels == [0, 1, 2, 3]
    assert maps.tensor is None


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A file that begins as a PNG does."""
    path = tmp_path / "broken.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    return path


@pytest.mark.medium
def test_an_image_that_fails_says_so(
    tiny: nn.Module, picture: Path, broken: Path
) -> None:
    """The others are there; it has no captures, and its input cannot be read."""
    result = fv.run(tiny, [picture, broken], "Conv2d", **AS_IT_IS)

    (failed,) = result.failures
    assert failed.name == "broken.png"
    assert failed.captures == ()
    assert "broken.png" in str(failed.error)
    with pytest.raises(StoreError, match=r"broken\.png failed"):
        _ = failed.input
    assert [maps.of.name for maps in result.captures] == [picture.name]
    assert result.captures[0].of.name == picture.name
    assert result.exit_code == 3


@pytest.mark.medium
def test_a_result_counts_its_failures(
    tiny: nn.Module, picture: Path, broken: Path
) -> None:
    """The short form and the page name them."""
    result = fv.run(tiny, [picture, broken], "Conv2d", **AS_IT_IS)
    assert repr(result) == "<RunResult of 2 images, 1 failed: 1 picture>"
    whole, failed = result.images
    for shown in (result, failed):
        assert shown._repr_html_().count("broken.png failed") == 1  # type: ignore[attr-defined]
    assert "failed" not in whole._repr_html_()  # type: ignore[attr-defined]
    assert repr(failed) == "<ImageResult 'broken.png': failed>"
    assert repr(whole) == f"<ImageResult {picture.name!r}: 1 picture>"


@pytest.mark.medium
def test_a_gallery_tells_the_likeliest_class(tiny: nn.Module, picture: Path) -> None:
    """Below the input, as the run has it; of a model that classifies nothing it is
    called the input."""
    (image,) = fv.run(tiny, picture, "Conv2d", **AS_IT_IS).images
    (of_maps,) = fv.run(tiny[:1], picture, "Conv2d", **AS_IT_IS).images
    assert f"{picture.name}: {image.prediction[0].text}<" in image._repr_html_()  # type: ignore[attr-defined]
    assert f"{picture.name}: input<" in of_maps._repr_html_()  # type: ignore[attr-defined]


@pytest.mark.medium
@pytest.mark.parametrize("name", ["audit", "exemplars"])
def test_a_study_of_images_that_fail_has_their_exit_code(
    name: str, tiny: nn.Module, picture: Path, broken: Path
) -> None:
    """That of the command, 3; without failures it is 0."""
    study = getattr(fv, name)
    assert study(tiny, [picture, broken], "ReLU", **AS_IT_IS).exit_code == 3
    assert study(tiny, picture, "ReLU", **AS_IT_IS).exit_code == 0


def test_a_single_image_that_fails(tiny: nn.Module, broken: Path) -> None:
    """The run has no captures, and whoever takes one is told why."""
    result = fv.run(tiny, broken, "Conv2d", **AS_IT_IS)
    assert result.captures == ()
    assert result.exit_code == 1
    with pytest.raises(StoreError, match=r"broken\.png failed: .*broken\.png"):
        _ = result.captures[0]


def test_of_images_that_all_fail_the_first_is_named(
    tiny: nn.Module, broken: Path
) -> None:
    """In the order in which they were given."""
    other = broken.with_name("a.png")
    other.write_bytes(broken.read_bytes())
    result = fv.run(tiny, [broken, other], "Conv2d", **AS_IT_IS)
    with pytest.raises(StoreError, match=r"^broken\.png failed"):
        _ = result.captures[0]


def pictures_of(result: Any) -> list[Image.Image]:
    """The pictures of what a notebook shows for a result."""
    html = result._repr_html_()
    encoded = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in encoded]


@pytest.mark.medium
def test_a_notebook_shows_a_sheet(
    tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """The figure itself, where it is no larger than a page."""
    run = fv.run(tiny, picture, "Conv2d", out=tmp_path / "run", **AS_IT_IS)
    sheet = fv.sheet(run)
    (shown,) = pictures_of(sheet)
    assert np.array_equal(shown.convert("RGB"), sheet.pixels)


@pytest.mark.medium
def test_a_notebook_shows_the_fields_as_their_file(
    tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """In the colours that were asked for."""
    out = tmp_path / "field.png"
    field = fv.field(tiny, picture, "Conv2d", out, cmap="viridis", **AS_IT_IS)
    (shown,) = pictures_of(field)
    assert_same_pixels(shown, out)


@pytest.mark.medium
def test_a_notebook_links_a_report(
    tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """To its first page; a name is no markup."""
    out = tmp_path / "a&b"
    report = fv.report(fv.run(tiny, picture, "Conv2d", out, **AS_IT_IS))
    html = report._repr_html_()  # type: ignore[attr-defined]
    assert f'<a href="{tmp_path}/a&amp;b/report/index.html"' in html


@pytest.mark.medium
def test_a_notebook_shows_changed_maps_below_their_table(
    tiny: nn.Module, pixels: np.ndarray, tmp_path: Path
) -> None:
    """Before, after and difference side by side; without a folder it says how to have
    them."""
    before = fv.run(tiny, pixels, "Conv2d", **AS_IT_IS)
    with torch.no_grad():
        tiny[0].weight[2] += 1
    after = fv.run(tiny, pixels, "Conv2d", **AS_IT_IS)
    shown = fv.diff(before, after, out=tmp_path / "changes")
    html = shown._repr_html_()  # type: ignore[attr-defined]
    assert html.index("<table") < html.index("<img")
    (row,) = pictures_of(shown)
    assert ": before, after, difference" in html
    maps = shown.differing[0].difference
    left = 0
    for name in (maps.before_file, maps.after_file, maps.file):
        picture = Image.open(tmp_path / "changes" / name).convert("RGB")
        cell = row.convert("RGB").crop((left, 0, left + picture.width, picture.height))
        assert np.array_equal(cell, picture)
        left += picture.width
    assert row.width == left
    assert "out=&#39;changes&#39;" in fv.diff(before, after)._repr_html_()  # type: ignore[attr-defined]


@pytest.mark.medium
def test_a_notebook_shows_the_upper_end_of_a_sheet(pixels: np.ndarray) -> None:
    """In its own size, cut in the white between two tiles."""
    wide = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU())
    exemplars = fv.exemplars(wide, [pixels, 255 - pixels], "Conv2d", **AS_IT_IS)
    (shown,) = pictures_of(exemplars)
    whole = exemplars.picture(exemplars.document["layers"][0]["sheet"])
    assert whole.height > shown.height > 240
    end = whole.crop((0, 0, *shown.size))
    assert_same_pixels(shown, end)
    assert (np.asarray(shown.convert("L"))[-1] == 255).all()


@pytest.mark.medium
def test_the_gallery_shows_input_and_captures(
    tiny: nn.Module, pixels: np.ndarray
) -> None:
    """They are pictures in the page, none larger than it may be."""
    result = fv.run(tiny, [pixels, pixels], "Conv2d,ReLU", scale=40, **AS_IT_IS)

    pictures = pictures_of(result)
    assert len(pictures) == 6
    assert max(max(picture.size) for picture in pictures) == notebook.SMALL
    assert_same_pixels(pictures[0], pixels)
    (capture,) = pictures_of(result.captures[0])
    assert max(capture.size) == notebook.LARGE
    assert len(pictures_of(result.images[0])) == 3


@pytest.mark.parametrize(
    ("kernel", "shown"),
    [((3, 4), (480, 360)), ((1, 200), (400, 2)), ((200, 1), (2, 400))],
)
def test_small_pictures_are_enlarged_by_a_whole_factor(
    kernel: tuple[int, int], shown: tuple[int, int]
) -> None:
    """To half the width of a page, also where they are long and narrow."""
    convolution = nn.Conv2d(1, 1, kernel)
    (picture,) = fv.kernels(convolution, scale=1, padding=0, marks=False).captures
    assert picture.image.size == kernel[::-1]
    html = picture._repr_html_()  # type: ignore[attr-defined]
    assert f'width="{shown[0]}" height="{shown[1]}"' in html


@pytest.mark.parametrize(("layers", "side"), [("1", 480), ("0,1", 240)])
def test_a_heat_map_is_enlarged_so_that_one_sees_it(layers: str, side: int) -> None:
    """One alone to half the width of a page, several to a quarter."""
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))
    maps = fv.cam(net, torch.rand(3, 8, 8), "class:1", layers=layers, size=8)
    html = maps._repr_html_()  # type: ignore[attr-defined]
    assert f'width="{side}" height="{side}"' in html


@pytest.mark.medium
def test_a_picture_that_is_gone_says_so(
    tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """In the place where it would stand; the others are shown."""
    out = tmp_path / "out"
    result = fv.run(tiny, picture, "Conv2d,ReLU", out, **AS_IT_IS)
    result.captures[0].file.unlink()
    html = result._repr_html_()  # type: ignore[attr-defined]
    assert len(pictures_of(result)) == 2
    assert "output.png is missing" in html


@pytest.mark.medium
def test_a_notebook_shows_the_colours_of_a_picture(
    tiny: nn.Module, picture: Path
) -> None:
    """Those of a palette."""
    (capture,) = fv.run(tiny, picture, "Conv2d", cmap="magma", **AS_IT_IS).captures
    assert capture.image.mode == "P"
    (shown,) = pictures_of(capture)
    assert_same_pixels(shown, capture.image.convert("RGB"))


@pytest.mark.medium
def test_a_long_table_says_how_many_rows_are_left_out() -> None:
    """A notebook shows sixty rows: here the model itself, and 59 of its 70 modules."""
    listing = fv.layers(nn.Sequential(*[nn.ReLU() for _ in range(70)]), size=4)
    html = listing._repr_html_()
    assert len(listing.rows) == 71
    assert html.count("ReLU") == 59
    assert "11 more rows" in html
    listing = fv.layers(nn.Sequential(*[nn.ReLU() for _ in range(59)]), size=4)
    assert "more rows" not in listing._repr_html_()
    assert "71 modules; * 0 taken" in html


@pytest.mark.medium
@pytest.mark.parametrize(("images", "is_cut"), [(12, False), (13, True)])
def test_the_gallery_is_bounded(
    images: int, is_cut: bool, tiny: nn.Module, pixels: np.ndarray
) -> None:
    """It ends at so many pictures, and says so where it leaves some out."""
    result = fv.run(tiny, [pixels] * images, "0", **AS_IT_IS)
    assert len(pictures_of(result)) == notebook.MOST_PICTURES == 24
    assert ("more pictures" in result._repr_html_()) is is_cut


EVIL = "<img src=x onerror=alert(1)>"


@pytest.mark.medium
@pytest.mark.parametrize("name", ["run", "layers", "kernels", "audit", "exemplars"])
def test_names_are_no_markup(
    name: str, tiny: nn.Module, pixels: np.ndarray, tmp_path: Path
) -> None:
    """Neither those of images nor those of layers reach a page as they are."""
    image = tmp_path / f"{EVIL}.png"
    Image.fromarray(pixels).save(image)
    model = nn.Sequential()
    model.add_module(EVIL, tiny[0])
    arguments: list[Any] = [model]
    if name not in ("layers", "kernels"):
        arguments += [image, "Conv2d"]

    html = getattr(fv, name)(*arguments)._repr_html_()

    assert "<img src=x" not in html
    assert "onerror=alert(1)&gt;" in html


def test_what_needs_a_run_directory_asks_for_one(
    tiny: nn.Module, picture: Path
) -> None:
    """Without one there is nothing to go on with."""
    with pytest.raises(UsageError, match="resume is for a run directory"):
        fv.run(tiny, picture, "Conv2d", resume=True)


class Conditional(nn.Module):
    """Scales an image by what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Identity()

    def forward(
        self, x: Tensor, t: Tensor, more: dict[str, float] | None = None
    ) -> Tensor:
        return self.conv(x * t + (more or {"shift": 0.0})["shift"])


def test_transform_and_forward_args_are_objects(pixels: np.ndarray) -> None:
    """A module gets them in every call, in `run` and in `layers`, and has no hook
    left."""
    net = Conditional()
    seen: list[Image.Image] = []

    def transform(image: Image.Image) -> Tensor:
        seen.append(image)
        return torch.full((3, 4, 5), 2.0)

    options: dict[str, Any] = {
        "transform": transform,
        "forward_args": {"t": torch.tensor([3.0]), "more": {"shift": 0.5}},
    }

    (maps,) = fv.run(net, pixels, "conv", tensors=True, **options).captures

    assert torch.equal(maps.tensor, torch.full((1, 3, 4, 5), 6.5))
    assert seen[-1].mode == "RGB"
    assert seen[-1].size == (24, 20)
    assert fv.layers(net, **options).rows[1].output_shape == [1, 3, 4, 5]
    assert not net._forward_pre_hooks


@pytest.mark.medium
@pytest.mark.parametrize("count", [1, 3])
def test_an_argument_that_forward_needs_is_no_image(
    count: int, pixels: np.ndarray, image: Tensor
) -> None:
    """forward(x, t) of a module takes one image where t is given, without a transform,
    too."""
    arguments = {"t": torch.tensor([3.0])}
    options: dict[str, Any] = {"forward_args": arguments, "preset": "none"}

    result = fv.run(Conditional(), [pixels] * count, "conv", tensors=True, **options)

    assert len(result.images) == count
    torch.testing.assert_close(result.captures[0].tensor, image[None] * 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"forward_args": {"z": 1}},
            "forward_args z: forward of Conditional takes x, t, more",
        ),
        ({"forward_args": 5}, "forward_args is 'int'"),
        ({"transform": "file.py:f"}, "transform as text is for a MODEL string"),
        ({"edit": "conv:clamp=0,1", "seed": 1}, "seed is for a MODEL string"),
        ({"edit": "noise1*0", "seed": 1}, "seed is for a MODEL string"),
        ({"device": "cpu"}, "device is for a MODEL string"),
        ({"transform": lambda image: 5, "forward_args": {"t": 1}}, "gave a int"),
    ],
)
def test_bad_feeding_ends_in_one_line(
    options: dict[str, Any], message: str, pixels: np.ndarray
) -> None:
    """The line says what is wrong, and the module is as it was."""
    net = Conditional()
    with pytest.raises(FeatvizError, match=message):
        fv.run(net, pixels, "conv", **options)
    assert not net._forward_pre_hooks
