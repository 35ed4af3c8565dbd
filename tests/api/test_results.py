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
    """Neither here nor in the temporary folder, once the last capture is gone."""
    (tmp_path / "temporary").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "here")
    maps = fv.run(tiny, pixels, "Conv2d", **AS_IT_IS).captures[0]
    assert maps.image.size
    assert maps.of.temporary is not None
    assert maps.of.temporary.path.is_dir()
    del maps
    gc.collect()
    assert not list((tmp_path / "here").iterdir()) + list(
        (tmp_path / "temporary").iterdir()
    )


def test_in_memory_and_on_disk_are_the_same(
    tiny: nn.Module, pixels: np.ndarray, tmp_path: Path
) -> None:
    """Pictures, tensors and statistics; with `out` the files are the run directory's."""
    in_memory = fv.run(tiny, pixels, "Conv2d,ReLU", tensors=True, **AS_IT_IS)
    on_disk = fv.run(
        tiny, pixels, "Conv2d,ReLU", tmp_path / "out", tensors=True, **AS_IT_IS
    )
    assert in_memory.out is None
    assert on_disk.out == tmp_path / "out"
    assert on_disk.images[0].name == "image-0.png"
    for memory, disk in zip(in_memory.captures, on_disk.captures, strict=True):
        assert np.array_equal(
            np.asarray(memory.image), np.asarray(Image.open(disk.file))
        )
        assert memory.tensor is not None
        assert disk.tensor is not None
        assert torch.equal(memory.tensor, disk.tensor)
        assert np.array_equal(memory.stats, disk.stats)
    assert np.array_equal(np.asarray(in_memory.images[0].input), pixels)


def test_tensors_and_statistics_are_the_models_own(
    tiny: nn.Module, pixels: np.ndarray
) -> None:
    """Held against torchvision's feature extractor; without `tensors` there is none."""
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255
    expected = create_feature_extractor(tiny[0:1], ["0"])(image[None])["0"]
    (maps,) = fv.run(tiny, image, "Conv2d", tensors=True, **AS_IT_IS).captures
    assert maps.tensor is not None
    torch.testing.assert_close(maps.tensor, expected)
    assert maps.stats.dtype.names == STAT_COLUMNS
    assert maps.stats.shape == (4,)
    flat = expected.detach().flatten(2)[0]
    for name, values in {
        "min": flat.amin(1),
        "max": flat.amax(1),
        "mean": flat.mean(1),
    }.items():
        np.testing.assert_allclose(
            maps.stats[name], values.numpy(), rtol=1e-4, atol=1e-5
        )
    capture_key = (maps.layer, maps.type, maps.kind, maps.call, maps.key)
    assert capture_key == ("0", "Conv2d", "output", 0, "")
    assert (maps.shape, maps.layout, maps.channels) == (
        (1, 4, 20, 24),
        "nchw",
        [0, 1, 2, 3],
    )
    assert fv.run(tiny, image, "Conv2d", **AS_IT_IS).captures[0].tensor is None


def test_an_image_that_fails_says_so(
    tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """The others are there; it has no captures, and its input cannot be read."""
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    result = fv.run(tiny, [picture, tmp_path / "broken.png"], "Conv2d", **AS_IT_IS)
    assert [image.name for image in result.failures] == ["broken.png"]
    assert result.exit_code == 3
    assert result.captures[0].of.name == picture.name
    (failed,) = result.failures
    assert failed.captures == ()
    assert "broken.png" in str(failed.error)
    alone = fv.run(tiny, tmp_path / "broken.png", "Conv2d", **AS_IT_IS)
    assert alone.captures == ()
    assert alone.exit_code == 1
    with pytest.raises(StoreError, match=r"broken\.png failed: .*broken\.png"):
        alone.captures[0]
    with pytest.raises(StoreError, match=r"broken\.png failed"):
        failed.input  # noqa: B018 - it is read when it is asked for
    assert repr(result) == "<RunResult of 2 images, 1 failed: 1 picture>"
    assert "broken.png failed" in result._repr_html_()


def _pictures(html: str) -> list[Image.Image]:
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in found]


def test_the_gallery_shows_input_and_captures(
    tiny: nn.Module, pixels: np.ndarray
) -> None:
    """As pictures in the page, none larger than it may be."""
    result = fv.run(tiny, [pixels, pixels], "Conv2d,ReLU", scale=40, **AS_IT_IS)
    pictures = _pictures(result._repr_html_())
    assert len(pictures) == 6
    assert max(max(one.size) for one in pictures) == notebook.SMALL
    assert np.array_equal(np.asarray(pictures[0]), pixels)
    (alone,) = _pictures(result.captures[0]._repr_html_())
    assert max(alone.size) == notebook.LARGE
    assert len(_pictures(result.images[0]._repr_html_())) == 3


def test_the_gallery_is_bounded(
    tiny: nn.Module, pixels: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pictures and in bytes, and it says that it leaves some out."""
    result = fv.run(tiny, [pixels] * 15, "Conv2d", **AS_IT_IS)
    html = result._repr_html_()
    assert len(_pictures(html)) == notebook.MOST_PICTURES == 24
    assert "more pictures" in html
    monkeypatch.setattr(notebook, "MOST_BYTES", 2000)
    small = result._repr_html_()
    assert len(small) < 8000
    assert "more pictures" in small


def test_names_are_no_markup(
    tiny: nn.Module, pixels: np.ndarray, tmp_path: Path
) -> None:
    """Neither those of images nor those of layers."""
    evil = "<img src=x onerror=alert(1)>"
    Image.fromarray(pixels).save(tmp_path / f"{evil}.png")
    model = nn.Sequential()
    model.add_module(evil.replace(".", ""), tiny[0])
    shown = [
        fv.run(model, tmp_path / f"{evil}.png", "Conv2d", **AS_IT_IS),
        fv.layers(model, **AS_IT_IS),
        fv.kernels(model),
        fv.audit(model, tmp_path / f"{evil}.png", "Conv2d", **AS_IT_IS),
        fv.exemplars(model, tmp_path / f"{evil}.png", "Conv2d", **AS_IT_IS),
    ]
    for result in shown:
        html = result._repr_html_()
        assert "<img src=x" not in html
        assert "onerror=alert(1)&gt;" in html


def test_what_needs_a_run_directory_asks_for_one(
    tiny: nn.Module, picture: Path
) -> None:
    """There is nothing to go on with."""
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
    """A module gets them in every call, and has no hook left."""
    net = Conditional()
    seen: list[tuple[str, tuple[int, int]]] = []

    def transform(image: Image.Image) -> Tensor:
        seen.append((image.mode, image.size))
        return torch.full((3, 4, 5), 2.0)

    further = {"t": torch.tensor([3.0]), "more": {"shift": 0.5}}
    options: dict[str, Any] = {
        "transform": transform,
        "forward_args": further,
        "tensors": True,
    }
    (maps,) = fv.run(net, pixels, "conv", **options).captures
    assert maps.tensor is not None
    assert torch.equal(maps.tensor, torch.full((1, 3, 4, 5), 6.5))
    assert seen[-1] == ("RGB", (24, 20))
    del options["tensors"]
    assert fv.layers(net, **options).rows[1].output_shape == [1, 3, 4, 5]
    assert not net._forward_pre_hooks


def test_an_argument_that_forward_needs_is_no_image(pixels: np.ndarray) -> None:
    """forward(x, t) of a module takes one image where t is given, without a transform,
    too."""
    net = Conditional()
    options: dict[str, Any] = {
        "forward_args": {"t": torch.tensor([3.0])},
        "preset": "none",
    }
    for images in (pixels, [pixels] * 3):
        result = fv.run(net, images, "conv", tensors=True, **options)
        assert len(result.images) == len(images if isinstance(images, list) else [0])
        x = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None] / 255
        torch.testing.assert_close(result.captures[0].tensor, net.conv(x * 3).detach())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"forward_args": {"z": 1}},
            "forward_args z: forward of Conditional takes x, t, more",
        ),
        ({"forward_args": 5}, "forward_args is 'int'"),
        ({"transform": "file.py:f"}, "transform as text is for a MODEL string"),
        ({"transform": lambda image: 5, "forward_args": {"t": 1}}, "gave a int"),
    ],
)
def test_bad_feeding_ends_in_one_line(
    options: dict[str, Any], message: str, pixels: np.ndarray
) -> None:
    """And leaves the module as it was."""
    net = Conditional()
    with pytest.raises(FeatvizError, match=message):
        fv.run(net, pixels, "conv", **options)
    assert not net._forward_pre_hooks
