"""The whole way: the run directory, its pictures and numbers, against torchvision's own
drawing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SCENES
from networks import Net
from PIL import Image
from runs import tree
from torch import Tensor, nn
from torchvision import models
from torchvision.utils import save_image

import featviz as fv
from featviz.images.decode import decode
from featviz.models.load import adopt
from featviz.options import InputOptions
from featviz.records import Sample
from featviz.rundir.schema import read_json

INPUTS: dict[str, Any] = {
    "size": 96,
    "crop": 96,
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "input_channels": 3,
}


def independent(
    model: nn.Module, image: Path, types: tuple[type, ...]
) -> dict[str, list[Tensor]]:
    """Outputs by qualified name from plain hooks that clone."""
    outputs: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda m, a, o, name=name: outputs.setdefault(name, []).append(o.clone())
        )
        for name, module in model.named_modules()
        if isinstance(module, types)
    ]
    tensor = adopt(model, InputOptions(**INPUTS)).preprocess.tensor(
        decode(Sample("x", (image,)))[0][0]
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - max(1, len(os.sched_getaffinity(0)) // 4)))
    with torch.inference_mode():
        model(tensor)
    torch.set_num_threads(threads)
    for handle in handles:
        handle.remove()
    return outputs


def without_constants(
    picture: np.ndarray, tensor: Tensor, nrow: int, padding: int
) -> tuple[np.ndarray, int]:
    """The picture with the tiles of constant maps blanked, which featviz marks on
    purpose, and how many others there are."""
    maps, (height, width) = tensor[0].flatten(1), tensor.shape[2:]
    flat = maps.amax(1) - maps.amin(1) <= 2**-20 * maps.abs().amax(1)
    picture = picture.copy()
    for index in flat.nonzero().flatten().tolist():
        top = index // min(nrow, len(maps)) * (height + padding) + padding
        left_edge = index % min(nrow, len(maps)) * (width + padding) + padding
        picture[top : top + height, left_edge : left_edge + width] = 0
    return picture, int((~flat).sum())


def family(name: str) -> tuple[nn.Module, dict[str, list[Tensor]]]:
    """A model of torchvision or a small one, and what it makes of the landscape."""
    torch.manual_seed(1)
    small = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True)]
    model = (
        models.get_model(name, weights=None)
        if name != "small"
        else nn.Sequential(*small)
    )
    return model.eval(), independent(
        model, SCENES / "landscape.jpg", (nn.Conv2d, nn.ReLU)
    )


@pytest.mark.parametrize(
    ("name", "mode", "nrow", "padding", "pad_value"),
    [
        ("small", "layer", 5, 0, 0.0),
        ("small", "none", 13, 3, 0.7),
        pytest.param("densenet121", "map", 8, 2, 0.0, marks=pytest.mark.slow),
    ],
)
def test_grids_equal_torchvisions(
    name: str, mode: str, nrow: int, padding: int, pad_value: float, tmp_path: Path
) -> None:
    """The decoded PNG is what make_grid and save_image write for a tensor captured
    otherwise: within one grey level everywhere, and identical in 99.9 % of the
    pixels."""
    model, seen = family(name)
    image = SCENES / "landscape.jpg"
    grid = {"normalize": mode, "nrow": nrow, "padding": padding, "pad_value": pad_value}
    layers = "Conv2d#::9,ReLU#::9"
    fv.run(model, image, layers, tmp_path / "out", scale=1, **grid, **INPUTS)
    manifest = read_json(tmp_path / "out" / "landscape.jpg" / "manifest.json")
    options = {"nrow": nrow, "padding": padding, "pad_value": pad_value}
    if mode != "none":
        options |= {"normalize": True, "scale_each": mode == "map"}
    compared = 0
    for row in manifest["captures"]:
        tensor = seen[row["layer"]][row["call"]]
        got = np.asarray(
            Image.open(tmp_path / "out" / "landscape.jpg" / row["file"])
        ).astype(int)
        save_image(tensor.permute(1, 0, 2, 3), tmp_path / "x.png", **options)  # type: ignore[arg-type]
        want = np.asarray(Image.open(tmp_path / "x.png"))[..., 0].astype(int)
        (ours, maps), (expected, _) = (
            without_constants(picture, tensor, nrow, padding) for picture in (got, want)
        )
        assert ours.shape == expected.shape
        assert np.abs(ours - expected).max() <= 1
        assert (ours == expected).mean() >= 0.999
        compared += maps
    assert compared >= (7 if name == "small" else 400)  # maps, over all layers


def test_kept_tensors_and_statistics_agree(tiny: nn.Module, tmp_path: Path) -> None:
    """The npy file is the tensor; stats.npz and the manifest are its numbers."""
    fv.run(
        tiny,
        SCENES / "spheres.jpg",
        "Conv2d,Linear",
        tmp_path / "out",
        tensors="npy",
        **INPUTS,
    )
    folder = tmp_path / "out" / "spheres.jpg"
    seen = independent(tiny, SCENES / "spheres.jpg", (nn.Conv2d, nn.Linear))
    stats = np.load(folder / "stats.npz")
    for row in read_json(folder / "manifest.json")["captures"]:
        kept = np.load(folder / row["tensor"])
        np.testing.assert_array_equal(kept, seen[row["layer"]][0].numpy())
        maps = kept.reshape(kept.shape[1], -1).astype(np.float64)
        columns = stats[f"{row['layer']}|output|0|"]
        assert columns.dtype == np.float32
        expected = [
            maps.min(1),
            maps.max(1),
            maps.mean(1),
            maps.std(1),
            (maps == 0).mean(1),
        ]
        np.testing.assert_allclose(
            columns[:, :5], np.stack(expected, 1), rtol=1e-5, atol=1e-6
        )
        assert row["mean"] == pytest.approx(kept.mean(), rel=1e-5, abs=1e-6)
        assert row["std"] == pytest.approx(kept.std(), rel=1e-5)
        assert (row["min"], row["max"]) == (kept.min(), kept.max())


def test_input_png_is_what_the_model_saw(tiny: nn.Module, tmp_path: Path) -> None:
    """Resized and cropped, but not normalised."""
    fv.run(tiny, SCENES / "landscape.jpg", "Conv2d", tmp_path / "out", **INPUTS)
    got = np.asarray(
        Image.open(tmp_path / "out" / "landscape.jpg" / "input.png")
    ).astype(int)
    image = Image.open(SCENES / "landscape.jpg").resize(
        (144, 96), Image.Resampling.BILINEAR
    )
    want = np.asarray(image.crop((24, 0, 120, 96))).astype(int)
    assert got.shape == (96, 96, 3)
    assert np.abs(got - want).max() <= 2


def test_same_command_writes_the_same_bytes(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs give the same tree, byte for byte; no path, time or duration is in it."""
    photo = SCENES / "spheres.jpg"
    for name in ("a", "b"):
        fv.run(tiny, photo, "Conv2d,ReLU", tmp_path / name, tensors="npy", **INPUTS)
        monkeypatch.setattr(time, "time", lambda: 2e9)
        monkeypatch.setattr(time, "localtime", lambda *_: time.gmtime(2e9))
    first = tree(tmp_path / "a")
    assert first == tree(tmp_path / "b")
    assert not any(str(tmp_path).encode() in data for data in first.values())
    run = json.loads(first["run.json"])
    assert run["options"]["layers"] == "Conv2d,ReLU"
    assert run["layers"] == ["0", "1"]
    versions = {"schema_version", "featviz", "torch", "torchvision"}
    settings = {"device", "model", "preprocessing", "layers", "options"}
    assert set(run) == versions | settings | {"images", "failures"}


def test_nothing_is_lost_without_a_word(tmp_path: Path) -> None:
    """Each matched layer is drawn, skipped with a reason, or named as never run; a None
    beside a drawn tensor is no news, nor is a list of modules that the model calls one
    by one."""

    def way(self: Any, x: Tensor) -> dict[str, Any]:
        left, _ = self.pair(self.list[0](self.steps[0](x)))
        self.words(x)
        return {"out": left, "boxes": torch.zeros(2, 3, 4, 4, 4), "count": 3}

    pair = Net(lambda self, x: (x * 2, None))
    text_output = Net(lambda self, x: "words")
    lists = {"list": nn.ModuleList([nn.ReLU()]), "steps": nn.Sequential(nn.Tanh())}
    odd = Net(way, pair=pair, unused=nn.Conv2d(3, 1, 1), words=text_output, **lists)
    fv.run(odd, SCENES / "spheres.jpg", "*", tmp_path / "out", **INPUTS)
    manifest = read_json(tmp_path / "out" / "spheres.jpg" / "manifest.json")
    drawn = {(row["layer"], row["key"]) for row in manifest["captures"]}
    skipped = {(row["layer"], row["key"]): row["reason"] for row in manifest["skipped"]}
    assert drawn == {("pair", "0"), ("", "out"), ("list.0", ""), ("steps.0", "")}
    assert skipped == {
        ("words", ""): "is a str, not a tensor",
        (
            "",
            "boxes",
        ): "shape [2, 3, 4, 4, 4] is neither a map, a vector nor a grid of tokens of "
        "one image; see --tensor-layout",
        ("", "count"): "is a int, not a tensor",
    }
    assert manifest["never_ran"] == ["unused"]
    assert (tmp_path / "out/spheres.jpg/000_Net/output.out.png").is_file()


def test_each_part_of_a_tensor_has_statistics_of_its_own(tmp_path: Path) -> None:
    """A grid of tokens, and the token before it."""
    tokens = torch.rand(1, 17, 8)
    net = nn.Sequential(Net(lambda self, x: tokens), nn.Linear(8, 2))
    more: Any = {"tensor_layout": "tokens:4x4+1", **INPUTS}
    image = fv.run(net, SCENES / "spheres.jpg", "0", tmp_path / "out", **more).images[0]
    with np.load(tmp_path / "out/spheres.jpg/stats.npz") as stats:
        keys = {f"0|output|0|{row.key}" for row in image.captures}
        assert keys | {f"{key}|inner_std" for key in keys} == {*stats}
        assert np.allclose(stats["0|output|0|"][:, 2], tokens[0, 1:].mean(0), atol=1e-6)


def test_nan_is_drawn_counted_and_warned_about(
    tmp_path: Path, picture: Path, messages: pytest.LogCaptureFixture
) -> None:
    """One NaN does not blacken the grid; it is magenta, in the numbers, and warned of
    once."""
    spoilt = torch.zeros(1, 3, 20, 20)
    spoilt[0, 1, 2, 3] = torch.nan
    net = Net(lambda self, x: self.inner(x + spoilt), inner=nn.Identity())
    second = tmp_path / "second.png"
    second.write_bytes(picture.read_bytes())
    options = {"size": (20, 20), "scale": 1, "preset": "none"}
    done = fv.run(net, [picture, second], "Identity", tmp_path / "out", **options)
    assert messages.text.count("NaN or infinite values") == 1
    assert "NaN or infinite values, shown in magenta: inner (2 images)" in messages.text
    (row,) = done.images[0].captures
    assert row.nonfinite == 1
    pixels = np.asarray(
        Image.open(tmp_path / "out/picture.png" / row.file).convert("RGB")
    )
    assert (pixels == (255, 0, 255)).all(axis=2).sum() == 1
    assert pixels[..., 0].std() > 30


def test_the_model_is_run_once_for_each_image(tiny: nn.Module, tmp_path: Path) -> None:
    """And no more, with the threads that torch has; afterwards it has as many."""
    seen: list[int] = []
    tiny.register_forward_hook(
        lambda module, args, output: seen.append(torch.get_num_threads())
    )
    threads = torch.get_num_threads()
    pictures = [Image.new("RGB", (20, 20), (n * 20, 99, 0)) for n in range(3)]
    done = fv.run(tiny, pictures, "Conv2d", tmp_path / "out", **INPUTS)
    assert done.exit_code == 0
    assert torch.get_num_threads() == threads
    assert seen == [threads] * 3
