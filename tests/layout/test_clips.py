"""Samples of several frames: clips."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from frames import AS_IS, animation, folder_of, numbers, still
from numpy.testing import assert_array_equal
from PIL import Image
from tiles import assert_drawn, assert_row, manifest, rows, tiles
from torch import Tensor, nn

import featviz as fv
from featviz import layout
from featviz.drawing import drawer
from featviz.drawing.picture import GridPicture
from featviz.errors import ImageError
from featviz.hooks.layers import list_layers
from featviz.images import decode, find
from featviz.layout.tracing.hints import HintBook
from featviz.options import DrawOptions
from featviz.records import CaptureSite, Hints, Layer, Sample

SITE = CaptureSite(Layer(1, "conv", "Conv3d"), "output", 0, "")


class Clip(nn.Module):
    """A clip seen through a convolution that gives the colours as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 3, 1, bias=False)
        self.conv.weight = nn.Parameter(torch.eye(3)[:, :, None, None, None])
        self.last = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x).permute(0, 2, 3, 4, 1))


def clips_of(*paths: Path | str) -> list[Sample]:
    """The clips that the command line makes of paths."""
    return find.join_clips(find.find_samples([str(path) for path in paths]))


class TestGrouping:
    """Which files make a clip."""

    def test_frames_stand_in_natural_order(self, tmp_path: Path) -> None:
        """frame2 comes before frame10, whatever the order of the alphabet."""
        (clip,) = clips_of(folder_of(tmp_path / "walk", 12))
        assert clip.name == "walk"
        assert [path.stem for path in clip.paths] == [f"frame{n}" for n in range(12)]

    @pytest.mark.parametrize("suffix", [".gif", ".png"])
    def test_an_animation_is_a_clip_of_its_own(
        self,
        suffix: str,
        tmp_path: Path,
    ) -> None:
        """Animated GIF and APNG beside stills: the animation is one clip, the stills
        are another."""
        folder = folder_of(tmp_path / "both", 2)
        animation(folder / f"anim{suffix}", 5)
        animated, stills = clips_of(folder)
        assert animated.name == f"anim{suffix}"
        assert numbers(decode.decode(animated, frames=5)[0]) == [0, 1, 2, 3, 4]
        assert stills.name == "both"
        assert len(stills.paths) == 2

    def test_a_photo_with_a_preview_is_a_still(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Phones write MPO: the further images in the file are smaller ones of the
        first, of which nobody is told, and which --frames does not take."""
        folder = folder_of(tmp_path / "photos", 2)
        small = still(9).resize((4, 4))
        still(2).save(
            folder / "frame2.jpg", "MPO", save_all=True, append_images=[small]
        )

        (clip,) = clips_of(folder)
        photo = Sample("photo", clip.paths[2:])
        sizes = {image.size for image in decode.decode(photo, frames=2)[0]}
        decode.decode(photo)

        names = ["frame0.png", "frame1.png", "frame2.jpg"]
        assert [path.name for path in clip.paths] == names
        assert sizes == {still(2).size}
        assert not caplog.messages

    def test_folders_of_one_name_are_two_clips(self, tmp_path: Path) -> None:
        """Stills of a/frames and b/frames, which have different names, are two clips."""
        first = folder_of(tmp_path / "a" / "frames", 2, "a")
        second = folder_of(tmp_path / "b" / "frames", 2, "b")
        names = [clip.name for clip in clips_of(first, second)]
        assert names == ["a/frames", "b/frames"]

    def test_relative_and_absolute_paths_name_frames_of_one_clip(
        self,
        tmp_path: Path,
    ) -> None:
        """A relative and an absolute path into one folder name frames of one clip."""
        folder = folder_of(tmp_path / "walk", 3)
        (clip,) = clips_of("walk/frame0.png", folder / "frame2.png")
        assert clip.name == "walk"
        assert [path.name for path in clip.paths] == ["frame0.png", "frame2.png"]

    def test_a_clip_has_the_digest_of_all_its_frames(self, tmp_path: Path) -> None:
        """Whether it is decoded or not, and in whole or in part."""
        (clip,) = clips_of(folder_of(tmp_path / "walk", 3))
        content = b"".join(path.read_bytes() for path in clip.paths)
        digest = hashlib.sha256(content).hexdigest()
        assert decode.digest(clip) == digest
        assert decode.decode(clip, frames=2)[1] == digest

    @pytest.mark.parametrize(
        ("content", "reason"),
        [(b"no image", "is no image that Pillow"), (None, "is no file")],
    )
    def test_an_error_names_the_frame(
        self, content: bytes | None, reason: str, tmp_path: Path
    ) -> None:
        """Behind the name of its clip."""
        (clip,) = clips_of(folder_of(tmp_path / "walk", 3))
        frame = clip.paths[1]
        assert isinstance(frame, Path)
        frame.unlink()
        if content is not None:
            frame.write_bytes(content)
        with pytest.raises(ImageError, match=f"^walk: frame1.png {reason}"):
            decode.decode(clip)

    def test_a_still_is_repeated(self, tmp_path: Path) -> None:
        """A single still keeps its name, and is repeated."""
        still(3).save(tmp_path / "one.png")
        (clip,) = clips_of(tmp_path / "one.png")
        assert clip.name == "one.png"
        assert numbers(decode.decode(clip, frames=4)[0]) == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("available", "frames"),
    [
        (12, 5),
        (3, 8),
        (7, 1),
    ],
)
@pytest.mark.parametrize("make", [folder_of, animation])
def test_frames_are_evenly_spread(
    available: int,
    frames: int,
    make: Any,
    tmp_path: Path,
) -> None:
    """--frames takes numpy.linspace's choice, first and last among them; fewer are
    repeated."""
    (clip,) = clips_of(make(tmp_path / "clip.gif", available))
    expected = np.linspace(0, available - 1, frames).round().tolist()
    assert numbers(decode.decode(clip, frames=frames)[0]) == expected


RUN: dict[str, Any] = {"frames": 6, "size": (6, 8), "scale": 1, **AS_IS}
"""Options for clips of six frames."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image folder of six frames, of which red and green are drawn."""
    folder = folder_of(tmp_path_factory.mktemp("clips") / "walk", 6)
    out = folder.parent / "out"
    fv.run(Clip(), folder, "conv,last", out, channels="first:2", **RUN)
    return out / "walk"


@pytest.mark.parametrize(
    ("layer", "layout_name"),
    [
        ("conv", "ncthw"),
        ("last", "nthwc"),
    ],
)
def test_time_runs_from_left_to_right(
    layer: str,
    layout_name: str,
    seen: Path,
) -> None:
    """Six frames, one row a channel: red grows from tile to tile, green stays;
    channels-last gives the same picture."""
    row = rows(seen)[layer, 0, ""]
    assert_row(row, layout=layout_name, maps=3, channels=[0, 1], slices=[6, 6])
    assert row["grid"]["nrow"] == 6
    expected = torch.zeros(2, 6, 6, 8)
    expected[0] = torch.arange(6.0)[:, None, None] * 10 / 255
    expected[1] = torch.arange(8.0) * 20 / 255
    assert_drawn(seen, row, expected)


def test_the_picture_of_the_input_shows_the_frames(seen: Path) -> None:
    """The frames stand from left to right."""
    image = Image.open(seen / "input.png")
    assert image.size == (6 * 8, 6)
    frames = [image.crop((8 * n, 0, 8 * n + 8, 6)) for n in range(6)]
    assert numbers(frames) == [0, 1, 2, 3, 4, 5]


def test_the_manifest_names_the_frames(seen: Path) -> None:
    """The manifest lists the frames, and says how the input was made of them."""
    content = manifest(seen)
    assert content["image"]["files"] == [f"frame{n}.png" for n in range(6)]
    assert content["input"]["shape"] == [1, 3, 6, 6, 8]
    assert content["input"]["preprocessing"].endswith("6 frames, evenly spread")


@pytest.mark.medium
def test_max_slices_says_what_it_leaves_out(tmp_path: Path) -> None:
    """--max-slices draws evenly spread steps; scale, statistics and manifest are of
    all."""
    folder = folder_of(tmp_path / "walk", 6)
    out = tmp_path / "out"
    fv.run(Clip(), folder, "conv", out, max_slices=4, channels="first:2", **RUN)
    row = rows(out / "walk")["conv", 0, ""]
    assert_row(row, slices=[4, 6], steps=[0, 2, 3, 5])
    reds = tiles(out / "walk", row)[:4, 0, 0]
    assert reds == pytest.approx(np.array([0, 2, 3, 5]) * 51.0, abs=1)
    with np.load(out / "walk" / "stats.npz") as stats:
        assert stats["conv|output|0|"][0, 1] == pytest.approx(50 / 255)
    text = Image.open(out / "walk" / row["file"]).info["Slices"]
    assert text == "4 of 6 side by side for each channel: 0,2-3,5 (--max-slices)"


@pytest.mark.medium
def test_a_dry_run_foretells_the_slices(featviz: Run, tmp_path: Path) -> None:
    """Its maps and the size of its picture are those of the run, which draws four of
    six steps."""
    folder = folder_of(tmp_path / "walk", 6)
    torch.save(nn.Sequential(nn.Conv3d(3, 2, 1)), tmp_path / "net.pth")
    out = tmp_path / "out"
    command = ("run", tmp_path / "net.pth", folder, "--layers", "0", "--out", out)
    command = (*command, "--frames", "6", "--max-slices", "4")

    (planned,) = json.loads(featviz(*command, "--dry-run", "--json").out)["per_image"]
    assert featviz(*command).code == 0

    with Image.open(next(out.rglob("output.png"))) as picture:
        assert (planned["width"], planned["height"]) == picture.size
    assert planned["maps"] == 2 * 4


def drawn(tensor: Tensor, reduce: str | None) -> GridPicture:
    options = DrawOptions(scale=1, padding=0, nrow=16, reduce=reduce)
    return drawer.draw(options, SITE, tensor)[""]


REDUCE = pytest.mark.parametrize("reduce", [None, "mean"])


@REDUCE
def test_slices_of_a_volume_are_evenly_spread(reduce: str | None) -> None:
    """Of 155 slices 16, from near the first to near the last, no more than 10 apart."""
    picture = drawn(torch.rand(1, 2, 155, 5, 5), reduce)
    assert len(picture.steps) == 16
    assert picture.steps[0] < 6
    assert picture.steps[-1] > 148
    assert set(np.diff(picture.steps)) <= {9, 10}


VOLUME = torch.arange(155.0).reshape(1, 1, 155, 1, 1).expand(1, 2, 155, 5, 5)


def test_a_volume_has_the_scale_of_all_its_slices() -> None:
    """Slices that are left out count for the scale."""
    picture = drawn(VOLUME, None)
    expected = np.array(picture.steps) / 154 * 255
    assert picture.tiles[:16][:, 0, 0] == pytest.approx(expected, abs=1)


def test_a_mean_has_the_scale_of_the_slices_that_are_drawn() -> None:
    """The scale of a mean goes from the first drawn slice to the last."""
    picture = drawn(VOLUME, "mean")
    steps = np.array(picture.steps)
    expected = (steps - steps[0]) / np.ptp(steps) * 255
    assert picture.tiles[:16][:, 0, 0] == pytest.approx(expected, abs=1)


@REDUCE
def test_the_regions_of_a_batch_are_the_first(reduce: str | None) -> None:
    """Of forty regions the first sixteen are drawn."""
    picture = drawn(torch.rand(40, 2, 5, 5), reduce)
    assert picture.steps == list(range(16))
    assert picture.slices == (16, 40)


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """Three frames, of which the last is higher."""
    folder = folder_of(tmp_path / "walk", 2)
    still(2, height=9).save(folder / "frame2.png")
    return folder


def test_frames_of_different_sizes_fail_with_the_remedy(uneven: Path) -> None:
    """An error says that the frames differ, and the hint how they become one size."""
    result = fv.run(Clip(), uneven, "conv", frames=3, size=6, **AS_IS)
    (failure,) = result.failures
    assert "frames differ in size" in str(failure.error)
    assert "size HxW" in str(failure.hint)


@pytest.mark.medium
def test_size_brings_frames_to_one_size(uneven: Path) -> None:
    """A size for all frames helps."""
    assert fv.run(Clip(), uneven, "conv", frames=3, size=(6, 8), **AS_IS).exit_code == 0


def test_a_clip_of_odd_frames_has_as_many_steps_as_its_first_layer() -> None:
    """A stride of two makes three of five frames."""
    first = nn.Conv3d(3, 2, 3, stride=(2, 1, 1), padding=1)
    clip = torch.randn(1, 3, 5, 6, 8)
    (root,) = list_layers(first)
    hints = HintBook(first, clip.shape).of_layer(root)
    assert hints.time_steps == first(clip).shape[2] == 3


def test_tokens_of_a_clip() -> None:
    """MViT's blocks give [1, 1 + 8·h·w, D]: eight steps of a grid, behind a class
    token."""
    tokens = torch.randn(1, 1 + 8 * 4 * 6, 3)
    hints = Hints(input_size=(32, 48), time_steps=8, prefix_tokens=("class_token",))
    maps = layout.to_maps(tokens, hints)
    assert_array_equal(maps[""].data, tokens[0, 1:].T.reshape(3, 8, 4, 6))
    assert_array_equal(maps["class_token"].data.flatten(), tokens[0, 0])
