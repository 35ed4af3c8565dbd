"""Samples of several frames: clips."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from frames import AS_IS, animation, folder_of, numbers, still
from PIL import Image
from tiles import assert_drawn, manifest, rows, tiles
from torch import Tensor, nn

import featviz as fv
from featviz import layout
from featviz.drawing import drawer
from featviz.images import decode, find
from featviz.options import DrawOptions
from featviz.records import CaptureSite, Hints, Layer

SITE = CaptureSite(Layer(1, "conv", "Conv3d"), "output", 0, "")


class Clip(nn.Module):
    """A clip seen through a convolution that gives the colours as they are."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 3, 1, stride=(stride, 1, 1), bias=False)
        self.conv.weight = nn.Parameter(torch.eye(3)[:, :, None, None, None])
        self.last = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x).permute(0, 2, 3, 4, 1))


class TestGrouping:
    """Which files make a clip."""

    def test_frames_stand_in_natural_order(self, tmp_path: Path) -> None:
        """frame2 before frame10, whatever the order of the alphabet."""
        (clip,) = find.clips(find.find_samples([str(folder_of(tmp_path / "walk", 12))]))
        assert (clip.name, len(clip.paths)) == ("walk", 12)
        assert [path.stem for path in clip.paths] == [f"frame{i}" for i in range(12)]

    @pytest.mark.parametrize("suffix", [".gif", ".png"])
    def test_an_animation_is_a_clip_of_its_own(
        self, suffix: str, tmp_path: Path
    ) -> None:
        """Animated GIF, WebP and APNG beside stills: the animation is one clip, the
        stills are another."""
        folder = folder_of(tmp_path / "both", 2)
        animation(folder / f"anim{suffix}", 5)
        clips = find.clips(find.find_samples([str(folder)]))
        assert [(clip.name, len(clip.paths)) for clip in clips] == [
            (f"anim{suffix}", 1),
            ("both", 2),
        ]
        assert numbers(decode.decode(clips[0], frames=5)[0]) == [0, 1, 2, 3, 4]

    def test_names_of_clips(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """a/frames and b/frames, whose stills have different names, are two clips; a
        relative and an absolute path into one folder name frames of one; one still
        keeps its name, and is repeated."""
        for name in ("a", "b"):
            path = tmp_path / name / "frames"
            path.mkdir(parents=True)
            for number in range(2):
                still(number).save(path / f"{name}{number}.png")
        arguments = [str(tmp_path / name / "frames") for name in ("a", "b")]
        clips = find.clips(find.find_samples(arguments))
        assert [clip.name for clip in clips] == ["a/frames", "b/frames"]
        folder = folder_of(tmp_path / "walk", 3)
        monkeypatch.chdir(tmp_path)
        samples = find.find_samples(["walk/frame0.png", str(folder / "frame2.png")])
        (clip,) = find.clips(samples)
        assert (clip.name, [p.name for p in clip.paths]) == (
            "walk",
            ["frame0.png", "frame2.png"],
        )
        still(3).save(tmp_path / "one.png")
        (clip,) = find.clips(find.find_samples([str(tmp_path / "one.png")]))
        assert clip.name == "one.png"
        assert numbers(decode.decode(clip, frames=4)[0]) == [3, 3, 3, 3]

    @pytest.mark.parametrize(("available", "frames"), [(12, 5), (3, 8), (7, 1)])
    @pytest.mark.parametrize("clip_type", ["folder", ".gif"])
    def test_frames_are_evenly_spread(
        self, available: int, frames: int, clip_type: str, tmp_path: Path
    ) -> None:
        """--frames takes numpy.linspace's choice, first and last among them; fewer are
        repeated."""
        path = (
            folder_of(tmp_path / "c", available)
            if clip_type == "folder"
            else animation(tmp_path / f"c{clip_type}", available)
        )
        (clip,) = find.clips(find.find_samples([str(path)]))
        want = np.linspace(0, available - 1, frames).round().astype(int).tolist()
        assert numbers(decode.decode(clip, frames=frames)[0]) == want


class TestClips:
    """Clips [1, C, T, H, W] in runs."""

    def test_time_runs_from_left_to_right(self, tmp_path: Path) -> None:
        """Six frames, one row a channel: red grows from tile to tile, green stays;
        channels-last gives the same picture; the picture of the input shows the frames
        side by side."""
        folder = folder_of(tmp_path / "walk", 6)
        out = tmp_path / "out"
        options = {"frames": 6, "size": (6, 8), "tensors": "npy", "scale": 1, **AS_IS}
        fv.run(Clip(), folder, "conv,last", out, channels="first:2", **options)
        captures = rows(out / "walk")
        want = torch.zeros(2, 6, 6, 8)
        want[0] = torch.arange(6.0)[:, None, None] * 10 / 255
        want[1] = torch.arange(8.0) * 20 / 255
        for name, layout_name in (("conv", "ncthw"), ("last", "nthwc")):
            row = captures[name, 0, ""]
            assert (row["layout"], row["maps"], row["channels"]) == (
                layout_name,
                3,
                [0, 1],
            )
            assert row["slices"] == [6, 6]
            assert row["grid"]["nrow"] == 6
            assert_drawn(out / "walk", row, want)
        seen = np.asarray(Image.open(out / "walk" / "input.png"))
        assert seen.shape == (6, 6 * 8, 3)
        assert numbers(
            [Image.fromarray(seen[:, i * 8 : i * 8 + 8]) for i in range(6)]
        ) == [*range(6)]
        content = manifest(out / "walk")
        assert content["input"]["shape"] == [1, 3, 6, 6, 8]
        assert content["input"]["preprocessing"].endswith("6 frames, evenly spread")
        assert content["image"]["files"] == [f"frame{i}.png" for i in range(6)]

    def test_max_slices_says_what_it_leaves_out(self, tmp_path: Path) -> None:
        """--max-slices draws evenly spread steps; scale, statistics and manifest are of
        all."""
        folder = folder_of(tmp_path / "walk", 6)
        out = tmp_path / "out"
        options = {"frames": 6, "size": (6, 8), "scale": 1, **AS_IS}
        fv.run(Clip(), folder, "conv", out, max_slices=4, channels="first:2", **options)
        row = rows(out / "walk")["conv", 0, ""]
        assert row["slices"] == [4, 6]
        assert row["steps"] == [0, 2, 3, 5]
        reds = tiles(out / "walk", row)[:4, 0, 0].astype(int)
        assert np.abs(reds - np.array([0, 2, 3, 5]) * 51).max() <= 1
        numbers_kept = np.load(out / "walk" / "stats.npz")["conv|output|0|"]
        assert numbers_kept[0, 1] == pytest.approx(50 / 255)
        text = Image.open(out / "walk" / row["file"]).text
        assert (
            text["Slices"]
            == "4 of 6 side by side for each channel: 0,2-3,5 (--max-slices)"
        )

    @pytest.mark.parametrize("reduce", [None, "mean"])
    def test_slices_of_a_volume_are_evenly_spread(self, reduce: str | None) -> None:
        """Of 155 slices 16, from near the first to near the last, no more than 10
        apart, each with its own level; the regions of a batch are the first."""
        volume = torch.arange(155.0).reshape(1, 1, 155, 1, 1).expand(1, 2, 155, 5, 5)
        options = DrawOptions(scale=1, padding=0, nrow=16, reduce=reduce)
        picture = drawer.draw(options, SITE, volume)[""]
        steps = np.array(picture.steps)
        assert len(steps) == 16
        assert steps[0] < 6
        assert steps[-1] > 148
        assert set(np.diff(steps)) <= {9, 10}
        low, high = (0, 154) if reduce is None else steps[[0, -1]]
        expected = (steps - low) / (high - low) * 255
        assert np.abs(picture.tiles[:16][:, 0, 0] - expected).max() <= 1
        batch = drawer.draw(options, SITE, torch.rand(40, 2, 5, 5))[""]
        assert batch.steps == list(range(16))
        assert batch.slices == (16, 40)

    def test_frames_of_different_sizes_fail_with_the_remedy(
        self, tmp_path: Path
    ) -> None:
        """One clip has one size; --size brings them to one."""
        folder = folder_of(tmp_path / "walk", 2)
        still(2, height=9).save(folder / "frame2.png")
        result = fv.run(
            Clip(), folder, "conv", tmp_path / "o", frames=3, size=6, **AS_IS
        )
        assert "frames differ in size" in str(result.failures[0].error)
        assert "size HxW" in str(result.failures[0].hint)
        options = {"frames": 3, "size": (6, 8), "overwrite": True, **AS_IS}
        assert fv.run(Clip(), folder, "conv", tmp_path / "o", **options).exit_code == 0


def test_tokens_of_a_clip() -> None:
    """MViT's blocks give [1, 1 + 8·h·w, D]: eight steps of a grid, behind a class
    token."""
    tokens = torch.randn(1, 1 + 8 * 4 * 6, 3)
    hints = Hints(input_size=(32, 48), time_steps=8, prefix_tokens=("class_token",))
    parts = layout.to_maps(tokens, hints)
    assert torch.equal(parts[""].data, tokens[0, 1:].T.reshape(3, 8, 4, 6))
    assert torch.equal(parts["class_token"].data.flatten(), tokens[0, 0])
