"""The whole way: the run directory, its pictures and numbers, against torchvision's own
drawing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SCENES
from networks import Net
from oracle import input_of, inputs
from PIL import Image
from runs import tree
from torch import Tensor, nn
from torchvision import models
from torchvision.utils import save_image

import featviz as fv
from featviz.run.results import RunResult
from featviz.rundir.schema import read_json

INPUTS = inputs(96)
LANDSCAPE = SCENES / "landscape.jpg"
SPHERES = SCENES / "spheres.jpg"


def outputs_of(
    model: nn.Module, image: Path, types: tuple[type, ...]
) -> dict[str, list[Tensor]]:
    """Outputs by qualified name from plain hooks that clone."""
    outputs: dict[str, list[Tensor]] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        outputs.setdefault(names[module], []).append(output.clone())

    names = {module: name for name, module in model.named_modules()}
    hooked = [module for module in names if isinstance(module, types)]
    handles = [module.register_forward_hook(keep) for module in hooked]
    with torch.inference_mode():
        model(input_of(model, image, INPUTS))
    for handle in handles:
        handle.remove()
    return outputs


def manifest_of(folder: Path) -> dict[str, Any]:
    """The record of an image."""
    manifest: dict[str, Any] = read_json(folder / "manifest.json")
    return manifest


def blank_constants(
    picture: np.ndarray, tensor: Tensor, nrow: int, padding: int
) -> int:
    """Blank the tiles of constant maps, which featviz marks on purpose; gives how many
    others there are."""
    maps = tensor[0].flatten(1)
    height, width = tensor.shape[2:]
    columns = min(nrow, len(maps))
    is_constant = maps.amax(1) - maps.amin(1) <= 2**-20 * maps.abs().amax(1)
    for index in is_constant.nonzero().flatten().tolist():
        row, column = divmod(index, columns)
        top = row * (height + padding) + padding
        start = column * (width + padding) + padding
        picture[top : top + height, start : start + width] = 0
    return int((~is_constant).sum())


def network(name: str) -> nn.Module:
    """A model of torchvision, or a small one."""
    torch.manual_seed(1)
    if name == "small":
        convolution = nn.Conv2d(3, 4, 3, padding=1)
        return nn.Sequential(convolution, nn.ReLU(inplace=True)).eval()
    return models.get_model(name, weights=None).eval()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "mode", "nrow", "padding", "pad_value", "fewest"),
    [
        ("small", "layer", 5, 0, 0.0, 7),
        ("small", "none", 13, 3, 0.7, 7),
        pytest.param("densenet121", "map", 8, 2, 0.0, 400, marks=pytest.mark.slow),
    ],
)
def test_grids_equal_torchvisions(
    name: str,
    mode: str,
    nrow: int,
    padding: int,
    pad_value: float,
    fewest: int,
    tmp_path: Path,
) -> None:
    """The decoded PNG is what make_grid and save_image write for a tensor captured
    otherwise: within one grey level everywhere, and identical in 99.9 % of the
    pixels."""
    model = network(name)
    outputs = outputs_of(model, LANDSCAPE, (nn.Conv2d, nn.ReLU))
    grid: dict[str, Any] = {"nrow": nrow, "padding": padding, "pad_value": pad_value}
    out = tmp_path / "out"
    layers = "Conv2d#::9,ReLU#::9"
    fv.run(model, LANDSCAPE, layers, out, scale=1, normalize=mode, **grid, **INPUTS)
    if mode != "none":
        grid |= {"normalize": True, "scale_each": mode == "map"}
    maps = 0
    for row in manifest_of(out / "landscape.jpg")["captures"]:
        tensor = outputs[row["layer"]][row["call"]]
        maps += check_grid(out / "landscape.jpg" / row["file"], tensor, grid)
    assert maps >= fewest


def check_grid(path: Path, tensor: Tensor, options: dict[str, Any]) -> int:
    """Compare a picture with torchvision's; gives how many maps were compared."""
    torchvisions = path.with_name("expected.png")
    save_image(tensor.permute(1, 0, 2, 3), torchvisions, **options)
    expected = grey_levels(torchvisions)
    drawn = grey_levels(path)
    assert drawn.shape == expected.shape
    nrow = options["nrow"]
    padding = options["padding"]
    blank_constants(expected, tensor, nrow, padding)
    maps = blank_constants(drawn, tensor, nrow, padding)
    assert abs(drawn - expected).max() <= 1
    assert (drawn == expected).mean() >= 0.999
    return maps


def grey_levels(path: Path) -> np.ndarray:
    """The pixels of a grey picture, int [height, width]."""
    return np.array(Image.open(path).convert("L"), int)


@pytest.fixture
def kept(tiny: nn.Module, tmp_path: Path) -> Path:
    """The image folder of a run of the tiny model, with its tensors."""
    out = tmp_path / "out"
    fv.run(tiny, SPHERES, "Conv2d,Linear", out, tensors="npy", **INPUTS)
    return out / "spheres.jpg"


@pytest.mark.medium
def test_the_npy_file_is_the_tensor(kept: Path, tiny: nn.Module) -> None:
    """It is equal to what a plain hook sees, bit for bit."""
    outputs = outputs_of(tiny, SPHERES, (nn.Conv2d, nn.Linear))
    rows = manifest_of(kept)["captures"]
    assert [row["layer"] for row in rows] == ["0", "4"]
    for row in rows:
        tensor = outputs[row["layer"]][0].numpy()
        np.testing.assert_array_equal(np.load(kept / row["tensor"]), tensor)


def test_the_npy_file_is_the_tensor_before_an_operation_in_place(
    picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its file is written long after the layer has ended."""
    save = np.save

    def save_late(file: Any, array: np.ndarray) -> None:
        time.sleep(0.1)
        save(file, array)

    monkeypatch.setattr(np, "save", save_late)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True))
    nn.init.constant_(net[0].bias, -9)  # type: ignore[arg-type]
    result = fv.run(net, picture, "Conv2d", tmp_path / "out", tensors=True, size=8)
    (maps,) = result.captures
    assert (maps.tensor < 0).all()


def test_statistics_are_those_of_the_tensor(kept: Path) -> None:
    """stats.npz has the numbers of each channel, the manifest those of the capture
    (numpy)."""
    stats = np.load(kept / "stats.npz")
    close = {"rtol": 1e-5, "atol": 1e-6}
    for row in manifest_of(kept)["captures"]:
        tensor = np.load(kept / row["tensor"]).astype(np.float64)
        maps = tensor.reshape(tensor.shape[1], -1)
        zeros = (maps == 0).mean(1)
        expected = [maps.min(1), maps.max(1), maps.mean(1), maps.std(1), zeros]
        columns = stats[f"{row['layer']}|output|0|"]
        assert columns.dtype == np.float32
        np.testing.assert_allclose(columns[:, :5].T, expected, **close)
        numbers = [row[name] for name in ("min", "max", "mean", "std")]
        expected = [tensor.min(), tensor.max(), tensor.mean(), tensor.std()]
        np.testing.assert_allclose(numbers, expected, **close)


def test_input_png_is_what_the_model_saw(tiny: nn.Module, tmp_path: Path) -> None:
    """It is resized and cropped, but not normalised (Pillow)."""
    fv.run(tiny, LANDSCAPE, "Conv2d", tmp_path / "out", **INPUTS)
    shown = Image.open(tmp_path / "out" / "landscape.jpg" / "input.png")
    image = Image.open(LANDSCAPE).resize((144, 96), Image.Resampling.BILINEAR)
    expected = np.array(image.crop((24, 0, 120, 96)), int)
    np.testing.assert_allclose(np.array(shown, int), expected, atol=2)


@pytest.mark.medium
def test_same_command_writes_the_same_bytes(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs give the same tree, byte for byte, whatever the time is; no path is in
    it."""
    for name in ("a", "b"):
        out = tmp_path / name
        fv.run(tiny, SPHERES, "Conv2d,ReLU", out, tensors="npy", **INPUTS)
        monkeypatch.setattr(time, "time", lambda: 2e9)
        monkeypatch.setattr(time, "localtime", lambda *_: time.gmtime(2e9))
    first = tree(tmp_path / "a")
    assert first == tree(tmp_path / "b")
    assert str(tmp_path).encode() not in b"".join(first.values())


@pytest.mark.medium
def test_the_run_record_has_what_makes_the_run(tiny: nn.Module, tmp_path: Path) -> None:
    """run.json has versions, settings, images and failures, and nothing besides."""
    fv.run(tiny, SPHERES, "Conv2d,ReLU", tmp_path / "out", **INPUTS)
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["options"]["layers"] == "Conv2d,ReLU"
    assert record["layers"] == ["0", "1"]
    versions = {"schema_version", "featviz", "torch", "torchvision"}
    settings = {"device", "model", "preprocessing", "layers", "options"}
    assert set(record) == versions | settings | {"images", "failures"}


def odd_network() -> nn.Module:
    """A network with layers that give no tensor, or never run."""

    def forward(self: Any, x: Tensor) -> dict[str, Any]:
        doubled, _ = self.pair(self.list[0](self.steps[0](x)))
        self.text(x)
        return {"out": doubled, "boxes": torch.zeros(2, 3, 4, 4, 4), "count": 3}

    return Net(
        forward,
        pair=Net(lambda self, x: (x * 2, None)),
        unused=nn.Conv2d(3, 1, 1),
        text=Net(lambda self, x: "text"),
        list=nn.ModuleList([nn.ReLU()]),
        steps=nn.Sequential(nn.Tanh()),
    )


@pytest.mark.medium
def test_nothing_is_lost_without_a_word(tmp_path: Path) -> None:
    """Each matched layer is drawn, skipped with a reason, or named as never run; a None
    beside a drawn tensor is no news, nor is a list of modules that the model calls one
    by one."""
    fv.run(odd_network(), SPHERES, "*", tmp_path / "out", **INPUTS)
    folder = tmp_path / "out" / "spheres.jpg"
    manifest = manifest_of(folder)
    drawn = {(row["layer"], row["key"]) for row in manifest["captures"]}
    assert drawn == {("pair", "0"), ("", "out"), ("list.0", ""), ("steps.0", "")}
    assert (folder / "000_Net" / "output.out.png").is_file()
    skipped = {(row["layer"], row["key"]): row["reason"] for row in manifest["skipped"]}
    no_map = (
        "shape [2, 3, 4, 4, 4] is neither a map, a vector nor a grid of tokens of one"
        " image; see --tensor-layout"
    )
    assert skipped == {
        ("text", ""): "is a str, not a tensor",
        ("", "boxes"): no_map,
        ("", "count"): "is a int, not a tensor",
    }
    assert manifest["never_ran"] == ["unused"]


def test_each_part_of_a_tensor_has_statistics_of_its_own(tmp_path: Path) -> None:
    """A grid of tokens has those of its tokens, and the token before it others."""
    tokens = torch.rand(1, 17, 8)
    net = nn.Sequential(Net(lambda self, x: tokens), nn.Linear(8, 2))
    options = {"tensor_layout": "tokens:4x4+1", **INPUTS}
    result = fv.run(net, SPHERES, "0", tmp_path / "out", **options)
    keys = {f"0|output|0|{row.key}" for row in result.images[0].captures}
    with np.load(tmp_path / "out" / "spheres.jpg" / "stats.npz") as stats:
        assert {*stats} == keys | {f"{key}|inner_std" for key in keys}
        means = stats["0|output|0|"][:, 2]
    np.testing.assert_allclose(means, tokens[0, 1:].mean(0), atol=1e-6)


def run_with_nan(picture: Path, tmp_path: Path) -> RunResult:
    """A run of two images, in whose map one value is NaN at both calls of a layer."""
    noise = torch.zeros(1, 3, 20, 20)
    noise[0, 1, 2, 3] = torch.nan
    net = Net(lambda self, x: self.inner(self.inner(x + noise)), inner=nn.Identity())
    second = tmp_path / "second.png"
    second.write_bytes(picture.read_bytes())
    options = {"size": (20, 20), "scale": 1, "preset": "none"}
    return fv.run(net, [picture, second], "Identity", tmp_path / "out", **options)


def test_nan_is_warned_about_once(
    messages: pytest.LogCaptureFixture, picture: Path, tmp_path: Path
) -> None:
    """The message names the layer, and for how many images."""
    run_with_nan(picture, tmp_path)
    assert messages.text.count("NaN or infinite values") == 1
    warning = "NaN or infinite values, shown in magenta: inner (2 images)"
    assert warning in messages.text


def test_nan_is_drawn_and_counted(picture: Path, tmp_path: Path) -> None:
    """It is magenta and in the numbers, and does not blacken the grid."""
    row, _ = run_with_nan(picture, tmp_path).images[0].captures
    assert row.nonfinite == 1
    assert row.zero_fraction == row.row.zero_fraction
    assert row.index == row.row.index
    grid = Image.open(tmp_path / "out" / "picture.png" / row.file).convert("RGB")
    pixels = np.asarray(grid)
    assert (pixels == (255, 0, 255)).all(axis=2).sum() == 1
    assert pixels[..., 0].std() > 30


@pytest.mark.medium
def test_the_model_is_run_once_for_each_image(tiny: nn.Module, tmp_path: Path) -> None:
    """It runs with the threads that torch has, and afterwards torch has as many."""
    seen: list[int] = []
    tiny.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    threads = torch.get_num_threads()
    pictures = [Image.new("RGB", (20, 20), (n * 20, 99, 0)) for n in range(3)]
    assert fv.run(tiny, pictures, "Conv2d", tmp_path / "out", **INPUTS).exit_code == 0
    assert torch.get_num_threads() == threads
    assert seen == [threads] * 3
