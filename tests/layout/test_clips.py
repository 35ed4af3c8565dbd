"""Samples of several images: clips and pairs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SCENES, Outcome
from PIL import Image
from tiles import assert_drawn, manifest, raw, rows, tiles
from torch import Tensor, nn
from torchvision import models
from torchvision.models import optical_flow, video
from torchvision.transforms import functional as F
from torchvision.utils import make_grid

import featviz as fv
from featviz.errors import UsageError
from featviz.images import decode, find, group
from featviz.models.preprocess import InputOptions
from featviz.models.presets import choose_preprocess, required_arguments
from featviz.records import Sample

AS_IS: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
RGB3D = nn.Conv3d(3, 2, 1)


def still(number: int, height: int = 6, width: int = 8) -> Image.Image:
    """A frame that shows its number: red is ten times it, green counts columns."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = 10 * number
    pixels[..., 1] = np.arange(width) * 20
    return Image.fromarray(pixels)


def numbers(pictures: Sequence[Image.Image]) -> list[int]:
    """The frames' own numbers back."""
    return [round(np.asarray(p.convert("RGB"))[..., 0].mean() / 10) for p in pictures]


def folder_of(path: Path, count: int, **size: int) -> Path:
    path.mkdir(parents=True)
    for number in range(count):
        still(number, **size).save(path / f"frame{number}.png")
    return path


def animation(path: Path, count: int) -> Path:
    options: dict[str, Any] = {"lossless": True} if path.suffix == ".webp" else {}
    first, *rest = (still(number) for number in range(count))
    first.save(path, save_all=True, append_images=rest, duration=40, **options)
    return path


class Clip(nn.Module):
    """A clip seen through a convolution that gives the colours as they are."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 3, 1, stride=(stride, 1, 1), bias=False)
        self.conv.weight = nn.Parameter(torch.eye(3)[:, :, None, None, None])
        self.last = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x).permute(0, 2, 3, 4, 1))


def grid_pixels(maps: Tensor, row: dict[str, Any]) -> np.ndarray:
    """torchvision's picture of maps [C, S, H, W], each channel by its own range over all slices."""
    flat = maps.double().flatten(1)
    low, high = (v[:, None, None, None] for v in (flat.amin(1), flat.amax(1)))
    span = torch.where(high > low, high - low, 1)
    assert not bool(((high == low) & (low != 0)).any()), "featviz draws such on purpose otherwise"
    values = ((maps.double() - low) / span).flatten(0, 1)[:, None]
    grid = make_grid(values, nrow=row["grid"]["nrow"], padding=row["grid"]["padding"])
    return (grid[0] * 255 + 0.5).floor().numpy().astype(int)


def assert_clip_drawn(folder: Path, row: dict[str, Any], maps: Tensor, drawn: int = 16) -> None:
    """The picture is make_grid's of the slices side by side, row by row of channels."""
    slices = min(drawn, maps.shape[1])
    assert row["slices"] == ([slices, maps.shape[1]] if maps.shape[1] > 1 else None)
    assert row["grid"]["nrow"] % slices == 0 and slices == maps.shape[1]
    got = np.asarray(Image.open(folder / row["file"])).astype(int)
    want = grid_pixels(maps, row)
    assert got.shape == want.shape
    same = ~marked(maps, row, got.shape)
    assert np.abs(got - want)[same].max() <= 1
    assert (got == want)[same].mean() > 0.99


def marked(maps: Tensor, row: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """Where the tiles of constant maps lie, on which featviz draws a mark."""
    where, padding, nrow = np.zeros(shape, bool), row["grid"]["padding"], row["grid"]["nrow"]
    height, width = row["grid"]["tile"]
    flat = maps.flatten(2).amax(2) == maps.flatten(2).amin(2)
    for index in flat.flatten().nonzero().flatten().tolist():
        top, left = (index // nrow) * (height + padding), (index % nrow) * (width + padding)
        where[top + padding : top + padding + height, left + padding : left + padding + width] = 1
    assert flat.float().mean() < 0.5
    return where


class TestGrouping:
    """Which files make a clip."""

    def test_frames_stand_in_natural_order(self, tmp_path: Path) -> None:
        """frame2 before frame10, whatever the order of the alphabet."""
        (clip,) = group.clips(find.find_samples([str(folder_of(tmp_path / "walk", 12))]))
        assert (clip.name, len(clip.paths)) == ("walk", 12)
        assert [path.stem for path in clip.paths] == [f"frame{i}" for i in range(12)]

    @pytest.mark.parametrize("suffix", [".gif", ".webp", ".png"])
    def test_an_animation_is_a_clip_of_its_own(self, suffix: str, tmp_path: Path) -> None:
        """Animated GIF, WebP and APNG beside stills: the animation is one clip, the stills are
        another."""
        folder = folder_of(tmp_path / "both", 2)
        animation(folder / f"anim{suffix}", 5)
        found = group.clips(find.find_samples([str(folder)]))
        assert [(clip.name, len(clip.paths)) for clip in found] == [
            (f"anim{suffix}", 1),
            ("both", 2),
        ]
        assert numbers(decode.decode(found[0], frames=5).images) == [0, 1, 2, 3, 4]

    def test_each_folder_is_a_clip(self, tmp_path: Path) -> None:
        """Two folders inside one, or named one by one, are two clips under their names."""
        for name in ("run", "walk"):
            folder_of(tmp_path / "all" / name, 3)
        for arguments in (["all"], ["all/run", "all/walk"], ["all/*/*.png"]):
            found = group.clips(
                find.find_samples([str(tmp_path / argument) for argument in arguments])
            )
            assert [(clip.name, len(clip.paths)) for clip in found] == [("run", 3), ("walk", 3)]

    def test_clips_of_one_name_are_told_apart(self, tmp_path: Path) -> None:
        """a/frames and b/frames, whose stills have different names, are two clips."""
        for name in ("a", "b"):
            path = tmp_path / name / "frames"
            path.mkdir(parents=True)
            for number in range(2):
                still(number).save(path / f"{name}{number}.png")
        arguments = [str(tmp_path / name / "frames") for name in ("a", "b")]
        found = group.clips(find.find_samples(arguments))
        assert [clip.name for clip in found] == ["a/frames", "b/frames"]

    def test_one_folder_is_one_clip_however_it_is_spelt(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A relative and an absolute path into one folder name frames of the same clip."""
        folder = folder_of(tmp_path / "walk", 3)
        monkeypatch.chdir(tmp_path)
        found = find.find_samples(["walk/frame0.png", str(folder / "frame2.png")])
        (clip,) = group.clips(found)
        assert (clip.name, [p.name for p in clip.paths]) == ("walk", ["frame0.png", "frame2.png"])

    def test_a_single_still_is_a_clip_that_stands(self, tmp_path: Path) -> None:
        """One still keeps its name and is repeated."""
        still(3).save(tmp_path / "one.png")
        (clip,) = group.clips(find.find_samples([str(tmp_path / "one.png")]))
        assert clip.name == "one.png"
        assert numbers(decode.decode(clip, frames=4).images) == [3, 3, 3, 3]

    def test_a_broken_file_fails_its_clip_alone(self, tmp_path: Path) -> None:
        """What cannot be read is named; the other clip is complete."""
        folder_of(tmp_path / "all" / "good", 2)
        bad = folder_of(tmp_path / "all" / "poor", 2)
        (bad / "frame1.png").write_bytes(b"no picture")
        options = {"frames": 2, "size": (6, 8), **AS_IS}
        result = fv.run(Clip(), tmp_path / "all", "conv", tmp_path / "out", **options)
        assert result.exit_code == 3
        (failure,) = result.failures
        assert failure.image == "poor" and "frame1.png" in str(failure.error)
        assert (tmp_path / "out" / "good" / "manifest.json").is_file()
        assert not (tmp_path / "out" / "poor").exists()

    @pytest.mark.parametrize(("held", "asked"), [(12, 5), (12, 12), (3, 8), (7, 1), (2, 3)])
    @pytest.mark.parametrize("kind", ["folder", ".gif", ".webp", ".png"])
    def test_frames_are_evenly_spread(
        self, held: int, asked: int, kind: str, tmp_path: Path
    ) -> None:
        """--frames takes numpy.linspace's choice, first and last among them; fewer are repeated."""
        path = (
            folder_of(tmp_path / "c", held)
            if kind == "folder"
            else animation(tmp_path / f"c{kind}", held)
        )
        (clip,) = group.clips(find.find_samples([str(path)]))
        want = np.linspace(0, held - 1, asked).round().astype(int).tolist()
        assert numbers(decode.decode(clip, frames=asked).images) == want


class TestClips:
    """Clips [1, C, T, H, W] in runs."""

    def test_time_runs_from_left_to_right(self, tmp_path: Path) -> None:
        """Six frames, one row a channel: red grows from tile to tile, green stays; channels-last
        gives the same picture; the picture of the input shows the frames side by side."""
        folder = folder_of(tmp_path / "walk", 6)
        out = tmp_path / "out"
        options = {"frames": 6, "size": (6, 8), "tensors": "npy", "scale": 1, **AS_IS}
        fv.run(Clip(), folder, "conv,last", out, max_maps=2, **options)
        found, want = rows(out / "walk"), torch.zeros(2, 6, 6, 8)
        want[0] = torch.arange(6.0)[:, None, None] * 10 / 255
        want[1] = torch.arange(8.0) * 20 / 255
        for name, layout in (("conv", "ncthw"), ("last", "nthwc")):
            row = found[name, 0, ""]
            assert (row["layout"], row["maps"], row["channels"]) == (layout, 3, [0, 1])
            assert row["slices"] == [6, 6] and row["grid"]["nrow"] == 6
            assert_drawn(out / "walk", row, want)
        seen = np.asarray(Image.open(out / "walk" / "input.png"))
        assert seen.shape == (6, 6 * 8, 3)
        assert numbers([Image.fromarray(seen[:, i * 8 : i * 8 + 8]) for i in range(6)]) == [
            *range(6)
        ]
        content = manifest(out / "walk")
        assert content["input"]["shape"] == [1, 3, 6, 6, 8]
        assert content["input"]["preprocessing"].endswith("6 frames, evenly spread")
        assert content["image"]["files"] == [f"frame{i}.png" for i in range(6)]

    def test_max_slices_says_what_it_leaves_out(self, tmp_path: Path) -> None:
        """--max-slices draws the first steps; scale, statistics and manifest are of them all."""
        folder, out = folder_of(tmp_path / "walk", 6), tmp_path / "out"
        options = {"frames": 6, "size": (6, 8), "scale": 1, **AS_IS}
        fv.run(Clip(), folder, "conv", out, max_slices=4, max_maps=2, **options)
        row = rows(out / "walk")["conv", 0, ""]
        assert row["slices"] == [4, 6]
        reds = tiles(out / "walk", row)[:4, 0, 0].astype(int)
        assert np.abs(reds - np.arange(4) * 51).max() <= 1
        numbers_kept = np.load(out / "walk" / "stats.npz")["conv|output|0|"]
        assert numbers_kept[0, 1] == pytest.approx(50 / 255)
        text = Image.open(out / "walk" / row["file"]).text
        assert text["Slices"] == "4 of 6 side by side for each channel (--max-slices)"

    def test_frames_of_different_sizes_fail_with_the_remedy(self, tmp_path: Path) -> None:
        """One clip has one size; --size brings them to one."""
        folder = folder_of(tmp_path / "walk", 2)
        still(2, height=9).save(folder / "frame2.png")
        result = fv.run(Clip(), folder, "conv", tmp_path / "o", frames=3, size=6, **AS_IS)
        assert "frames differ in size" in str(result.failures[0].error)
        assert "--size HxW" in str(result.failures[0].hint)
        options = {"frames": 3, "size": (6, 8), "overwrite": True, **AS_IS}
        assert fv.run(Clip(), folder, "conv", tmp_path / "o", **options).exit_code == 0

    def test_grid_draws_a_clip(self) -> None:
        """featviz.grid gives the picture that a run writes for [1, C, T, H, W]."""
        clip = torch.randn(1, 4, 3, 5, 7)
        row = {"grid": {"nrow": 6, "padding": 2}}
        got = np.asarray(fv.grid(clip, scale=1, nrow=6)).astype(int)
        assert np.abs(got - grid_pixels(clip[0], row)).max() <= 1
        last = clip.permute(0, 2, 3, 4, 1)
        told = np.asarray(fv.grid(last, scale=1, nrow=6, tensor_layout="nthwc"))
        assert np.array_equal(told, got)

    @pytest.mark.slow
    def test_dry_run_plans_a_clip(self, tmp_path: Path, featviz: Callable[..., Outcome]) -> None:
        """--dry-run counts clips, not frames, and knows the sizes of their pictures."""
        folder_of(tmp_path / "all" / "run", 6, height=64, width=64)
        folder_of(tmp_path / "all" / "walk", 6, height=64, width=64)
        line = ["run", "r3d_18", tmp_path / "all", "--weights", "none", "--frames", "4"]
        line += ["--size", "64x64", "--layers", "stem.0,layer4", "--max-maps", "8"]
        line += ["--out", tmp_path / "out"]
        planned = json.loads(featviz(*line, "--dry-run", "--json").out)
        assert planned["images"] == 2
        assert featviz(*line).code == 0
        written = rows(tmp_path / "out" / "walk")
        for file in planned["per_image"]:
            row = written[file["layer"], 0, ""]
            picture = Image.open(tmp_path / "out" / "walk" / row["file"])
            assert picture.size == (file["width"], file["height"])


VIDEO_ENTRIES = [
    video.R3D_18_Weights.KINETICS400_V1,
    video.MC3_18_Weights.KINETICS400_V1,
    video.MViT_V1_B_Weights.KINETICS400_V1,
    video.MViT_V2_S_Weights.KINETICS400_V1,
    video.Swin3D_T_Weights.KINETICS400_V1,
    video.S3D_Weights.KINETICS400_V1,
]


@pytest.mark.parametrize("entry", VIDEO_ENTRIES, ids=str)
@pytest.mark.parametrize("size", [(90, 70), (131, 202)], ids=str)
def test_clips_are_prepared_as_by_their_own_transforms(entry: Any, size: tuple[int, int]) -> None:
    """The tensor equals weights.transforms() of the same frames, bit for bit."""
    generator = np.random.default_rng(1)
    frames = [Image.fromarray(generator.integers(0, 256, (*size, 3), np.uint8)) for _ in range(3)]
    (ours,) = choose_preprocess(RGB3D, entry, InputOptions())(frames)
    theirs = entry.transforms()(torch.stack([F.pil_to_tensor(frame) for frame in frames]))
    assert torch.equal(ours, theirs[None])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "frames", "size", "layers"),
    [
        ("r3d_18", 8, 64, "stem.0,layer1,layer2,layer3"),
        ("mc3_18", 8, 64, "stem.0,layer1,layer2"),
        ("swin3d_t", 8, 64, "patch_embed.proj,features.0,features.2,features.4"),
        ("s3d", 16, 224, "features.0,features.3,features.5"),
        ("mvit_v1_b", 16, None, "conv_proj"),
    ],
)
def test_clips_of_torchvisions_models(
    name: str, frames: int, size: int | None, layers: str, tmp_path: Path
) -> None:
    """Every picture is make_grid's of the tensor that was kept, slices side by side, and each
    channel's scale is shared over time."""
    torch.manual_seed(0)
    model = models.get_model(name, weights=None).eval()
    folder, out = tmp_path / "clip", tmp_path / "out"
    folder.mkdir()
    scene = Image.open(SCENES / "landscape.jpg").convert("RGB")
    for i in range(frames):
        scene.crop((6 * i, 0, 6 * i + 300, 300)).save(folder / f"frame{i}.png")
    side = size or 224
    options = {"size": (side, side), "tensors": "npy", "scale": 1, "frames": frames}
    fv.run(model, folder, layers, out, **options, **AS_IS)
    found = rows(out / "clip")
    assert len(found) == layers.count(",") + 1
    for (layer, _, _), row in found.items():
        tensor = raw(out / "clip", row)
        last = name == "swin3d_t" and layer.startswith("features")
        assert row["layout"] == ("nthwc" if last else "ncthw")
        maps = tensor[0].permute(3, 0, 1, 2) if last else tensor[0]
        assert_clip_drawn(out / "clip", row, maps)


@pytest.mark.slow
def test_tokens_of_a_clip(tmp_path: Path) -> None:
    """MViT's blocks give [1, 1 + 8·h·w, D]: eight steps of a grid, behind a class token."""
    torch.manual_seed(0)
    model = video.mvit_v1_b().eval()
    folder, out = folder_of(tmp_path / "walk", 16, height=32, width=32), tmp_path / "out"
    layers = "MultiscaleBlock#0,MultiscaleBlock#1,MultiscaleBlock#-1"
    options = {"size": (224, 224), "tensors": "npy", "scale": 1, "max_maps": 8, **AS_IS}
    fv.run(model, folder, layers, out, **options)
    sides = {0: 56, 1: 28, 15: 7}
    for index, side in sides.items():
        found = rows(out / "walk")
        row = found[f"blocks.{index}", 0, "0"]
        tensor = raw(out / "walk", row)
        assert (row["layout"], row["slices"]) == ("tokens", [8, 8])
        maps = tensor[0, 1:].T.reshape(-1, 8, side, side)
        assert_drawn(out / "walk", row, maps[:8])
        token = found[f"blocks.{index}", 0, "0.class_token"]
        assert token["max"] == pytest.approx(float(tensor[0, 0].max()), rel=1e-5)


class Siamese(nn.Module):
    """Takes two images and tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 3, 1, bias=False)
        self.body.weight = nn.Parameter(torch.eye(3)[:, :, None, None])

    def forward(self, a: Tensor, b: Tensor, steps: int = 1) -> Tensor:
        return self.body(a) - self.body(b)


class TestPairs:
    """Models that take several images at once."""

    @pytest.fixture
    def pair(self, tmp_path: Path) -> list[Path]:
        """Two stills with different numbers, and a third."""
        paths = [tmp_path / f"{name}.png" for name in "abc"]
        for number, path in enumerate(paths):
            still(3 + number * 2).save(path)
        return paths

    @pytest.mark.parametrize(
        ("forward", "count"),
        [
            (lambda self, x: x, 1),
            (lambda self, x, y=None: x, 1),
            (lambda self, x, y: x, 2),
            (lambda self, x, y, *z, k=1, **rest: x, 2),
            (lambda self, *x: x, 1),
            (lambda self, x, y, z, *, k: x, 3),
        ],
    )
    def test_forward_says_how_many(self, forward: Any, count: int) -> None:
        """Arguments that forward cannot do without are images."""
        assert required_arguments(type("M", (nn.Module,), {"forward": forward})()) == count

    def test_two_images_are_one_sample(self, pair: list[Path], tmp_path: Path) -> None:
        """a.png+b.png holds both calls of the shared body, and both images side by side."""
        out = tmp_path / "out"
        options = {"size": (6, 8), "tensors": "npy", "scale": 1, "max_maps": 1, **AS_IS}
        result = fv.run(Siamese(), pair[:2], "body,Siamese", out, **options)
        assert [image.image for image in result.images] == ["a.png+b.png"]
        folder = out / "a.png+b.png"
        found = rows(folder)
        for call, number in ((0, 3), (1, 5)):
            tensor = raw(folder, found["body", call, ""])
            assert torch.allclose(tensor[0, 0], torch.full((6, 8), number * 10 / 255))
        assert float(raw(folder, found["", 0, ""])[0, 0].mean()) == pytest.approx(-20 / 255)
        seen = np.asarray(Image.open(folder / "input.png"))
        assert seen.shape == (6, 16, 3)
        assert (seen[0, 0, 0], seen[0, 8, 0]) == (30, 50)
        content = manifest(folder)
        assert content["image"]["files"] == ["a.png", "b.png"]
        assert content["input"]["shape"] == [[1, 3, 6, 8]] * 2

    def test_an_odd_number_is_a_usage_error(self, pair: list[Path], tmp_path: Path) -> None:
        """Nothing is paired with nothing: said before any work, with what there is."""
        with pytest.raises(UsageError, match="takes 2 images at once, and there are 3") as caught:
            fv.run(Siamese(), pair, "body", tmp_path / "out", **AS_IS, size=8)
        assert "--inputs" in str(caught.value.hint)
        assert not (tmp_path / "out").exists()

    def test_inputs_may_be_told(
        self, pair: list[Path], tmp_path: Path, featviz: Callable[..., Outcome]
    ) -> None:
        """--inputs 3 gives three images to a forward with an optional third."""
        path = tmp_path / "nets.py"
        path.write_text(
            "import torch\n"
            "class Net(torch.nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.conv = torch.nn.Conv2d(3, 2, 1)\n"
            "    def forward(self, a, b, c=None):\n"
            "        return [self.conv(x) for x in (a, b, c) if x is not None]\n"
        )
        line = ["run", f"{path}:Net", *pair, "--layers", "conv", "--mean", "0,0,0", "--std"]
        line += ["1,1,1", "--size", "8", "--out", tmp_path / "out"]
        got = featviz(*line)
        assert got.code == 2 and "takes 2 images at once, and there are 3" in got.err
        assert featviz(*line, "--inputs", "3").code == 0
        calls = [call for _, call, _ in rows(tmp_path / "out" / "a.png+b.png+c.png")]
        assert calls == [0, 1, 2]
        got = featviz(*line, "--inputs", "0")
        assert got.code == 2 and "--inputs 0 is below 1" in got.err

    def test_pairs_of_a_folder_and_of_different_sizes(self, tmp_path: Path) -> None:
        """Consecutive images of a folder are pairs; images of a pair may differ in size."""
        (tmp_path / "all").mkdir()
        for number in range(4):
            still(number, height=5 + number).save(tmp_path / "all" / f"{number}.png")

        class Two(Siamese):
            def forward(self, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
                return self.body(a).mean() - self.body(b).mean()

        result = fv.run(Two(), tmp_path / "all", "body", tmp_path / "out", size=6, **AS_IS)
        assert [image.image for image in result.images] == ["0.png+1.png", "2.png+3.png"]
        assert result.failures == ()

    @pytest.mark.parametrize("size", [(136, 160), (139, 165)], ids=str)
    def test_raft_is_prepared_as_by_its_own_transforms(self, size: tuple[int, int]) -> None:
        """Both images are what OpticalFlow's transforms give, cropped to what RAFT takes."""
        generator = np.random.default_rng(1)
        a, b = (Image.fromarray(generator.integers(0, 256, (*size, 3), np.uint8)) for _ in range(2))
        with torch.device("meta"):
            module = optical_flow.raft_small()
        entry = optical_flow.Raft_Small_Weights.DEFAULT
        for known in (entry, None):
            chosen = choose_preprocess(module, known, InputOptions())
            assert (chosen.inputs, chosen.frames) == (2, None)
            for ours, theirs in zip(chosen([a, b]), entry.transforms()(a, b), strict=True):
                assert torch.equal(ours[0], F.center_crop(theirs, [136, 160]))

    def test_raft(self, tmp_path: Path, featviz: Callable[..., Outcome]) -> None:
        """raft_small sees both images at once: a batch of two in its feature encoder, every step
        of its update block, and a list of flows."""
        scene = Image.open(SCENES / "landscape.jpg").convert("RGB")
        for name, x in (("a", 0), ("b", 8), ("c", 16)):
            scene.crop((x, 0, x + 160, 128)).save(tmp_path / f"{name}.png")
        line = ["run", "raft_small", tmp_path / "a.png", tmp_path / "b.png", "--weights", "none"]
        line += ["--layers", "RAFT,feature_encoder.convnormrelu.0,update_block"]
        line += ["--out", tmp_path / "out", "--tensors", "npy", "--scale", "1"]
        got = featviz(*line)
        assert got.code == 0 and "guess" not in got.err
        folder = tmp_path / "out" / "a.png+b.png"
        found = rows(folder)
        row = found["feature_encoder.convnormrelu.0", 0, ""]
        tensor = raw(folder, row)
        assert (row["layout"], row["slices"], tensor.shape[0]) == ("batch", [2, 2], 2)
        assert_drawn(folder, row, tensor.transpose(0, 1))
        flows = [key for name, _, key in found if name == ""]
        assert flows == [str(i) for i in range(12)]
        assert found["", 0, "11"]["shape"] == [1, 2, 128, 160]
        assert len({call for name, call, _ in found if name == "update_block"}) == 12
        got = featviz(*line, tmp_path / "c.png", "--overwrite")
        assert got.code == 2
        assert "the model takes 2 images at once, and there are 3" in got.err


@pytest.mark.parametrize(("name", "count"), [("raft_small", 2), ("r3d_18", 1)])
@pytest.mark.slow
def test_layers_lists_models_of_several_images(
    name: str, count: int, featviz: Callable[..., Outcome]
) -> None:
    """`featviz layers` feeds them as `run` does, so every shape is known."""
    got = featviz("layers", name, "--weights", "none", "--frames", "4", "--size", "128", "--json")
    assert got.code == 0
    listed = {row["name"]: row for row in json.loads(got.out)["layers"]}
    first = "feature_encoder.convnormrelu.0" if count == 2 else "stem.0"
    shape = [2, 32, 64, 64] if count == 2 else [1, 64, 4, 64, 64]
    assert listed[first]["output_shape"] == shape
    assert any(row["selected"] for row in listed.values())


def test_a_sample_of_one_file_keeps_its_name() -> None:
    """together() with one image a group changes nothing of the names."""
    samples = [Sample(f"{i}.png", (Path(f"{i}.png"),)) for i in range(3)]
    assert group.together(samples, 1) == samples
    joined = group.together([Sample("d/a.png", (Path("d/a.png"),)), samples[0]], 2)
    assert joined == [Sample("d/a.png+0.png", (Path("d/a.png"), Path("0.png")))]
