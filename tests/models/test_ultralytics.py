"""Checkpoints of Ultralytics: their classes are data, and the numbers are those that were saved."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SCENES, Outcome
from torch import Tensor, nn
from torchvision import transforms

from featviz import capture as featviz_capture
from featviz.errors import LoadError
from featviz.hooks.layers import list_layers
from featviz.hooks.selectors import parse, select
from featviz.models.files import checkpoint
from featviz.models.load import ModelOptions, load_model
from featviz.models.preprocess import InputOptions

from .loading import load, same_weights
from .ultralytics_files import NAMES, built, save

tasks = importlib.import_module("ultralytics.nn.tasks")
heads = importlib.import_module("ultralytics.nn.modules.head")
blocks = importlib.import_module("ultralytics.nn.modules.block")
convolutions = importlib.import_module("ultralytics.nn.modules.conv")
utils = importlib.import_module("ultralytics.utils")
IMAGE = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def small() -> nn.Module:
    """YOLO11n, built once; tests copy or save it and leave it as it is."""
    return built("yolo11n")


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else first(output[0])


@pytest.mark.parametrize("place", ["model", "ema"])
@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
)
def test_a_checkpoint_is_the_model_that_was_saved(name: str, place: str, tmp_path: Path) -> None:
    """Classes, weights in single precision and output of the model, from `model` or from `ema`."""
    model = built(name)
    found = load_model(
        ModelOptions(str(save(model, tmp_path / "best.pt", place)), device="cpu"), InputOptions()
    )
    assert found.source["taken"] == [f"took {place!r}"]
    assert [(n, type(m)) for n, m in found.module.named_modules()] == [
        (n, type(m)) for n, m in model.named_modules()
    ]
    assert same_weights(found.module, model)
    with torch.no_grad():
        assert torch.equal(first(found.module.eval()(IMAGE)), first(model(IMAGE)))


def test_nothing_of_the_package_is_constructed(
    small: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No constructor runs while the file is read."""
    path = save(small, tmp_path / "best.pt")

    def refuse(*args: object, **more: object) -> None:
        raise AssertionError("a constructor ran")

    for module in (tasks, heads, blocks, convolutions):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, nn.Module) and "__init__" in vars(kind):
                monkeypatch.setattr(kind, "__init__", refuse)
    assert same_weights(load(path), small)


def test_a_fused_model_runs_fused(small: nn.Module, tmp_path: Path) -> None:
    """Convolutions without their BatchNorm, whose forward is another of their own methods."""
    model = built("yolo11n")
    with torch.no_grad():
        model(IMAGE)  # keeps anchors, strides and a shape in the head
    fused = model.fuse(verbose=False).half().float()  # type: ignore[operator]
    found = load(save(fused, tmp_path / "fused.pt")).eval()
    conv = found.get_submodule("model.0")
    assert isinstance(conv.forward, MethodType)
    assert (conv.forward.__self__, conv.forward.__func__) == (conv, type(conv).forward_fuse)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in found.modules())
    with torch.no_grad():
        assert torch.equal(first(found(IMAGE)), first(fused(IMAGE)))


def test_what_official_files_keep_beside_the_weights(small: nn.Module, tmp_path: Path) -> None:
    """Arguments as a namespace, paths, numbers of numpy, transforms, `Detect.forward`."""
    model = built("yolo11n")
    model.args = utils.IterableSimpleNamespace(imgsz=320, project=pathlib.PosixPath("a/b"))
    model.transforms = transforms.Compose(
        [transforms.Resize(224), transforms.ToTensor(), transforms.Normalize(0.0, 1.0)]
    )
    model.model[-1].detect = heads.Detect.forward  # type: ignore[index, union-attr]
    metrics = {"mAP": np.float64(0.5), "count": np.int64(3), "old": np.float32(0.25)}
    found = load(save(model, tmp_path / "last.pt", train_metrics=metrics))
    assert vars(found.args) == {"imgsz": 320, "project": "a/b"}
    assert [type(step).__name__ for step in found.transforms.transforms] == [
        "Resize", "ToTensor", "Normalize",
    ]  # fmt: skip
    assert found.model[-1].detect is heads.Detect.forward
    content = checkpoint.read(tmp_path / "last.pt")
    assert content["train_metrics"] == {"mAP": 0.5, "count": 3, "old": 0.25}


def test_names_of_older_versions(small: nn.Module, tmp_path: Path) -> None:
    """Classes that have moved or gone since are what they became."""
    moved = {
        b"ultralytics.nn.modules.conv\nConv\n": b"ultralytics.nn.modules\nConv\n",
        b"ultralytics.nn.tasks\nDetectionModel\n": b"ultralytics.nn.tasks\nYOLOv10DetectionModel\n",
    }
    path = save(small, tmp_path / "old.pt")
    rewritten(path, lambda data: _replaced(data, moved))
    found = load(path)
    assert type(found) is tasks.DetectionModel and same_weights(found, small)


def _replaced(data: bytes, names: dict[bytes, bytes]) -> bytes:
    for before, after in names.items():
        assert before in data
        data = data.replace(before, after)
    return data


def rewritten(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the pickle inside a file of torch.save."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)


class Reaches:
    """Pickles as `getattr(owner, name)`."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (os, "system"),
        (heads.Detect, "__init__"),
        (heads.Detect, "fuse"),
        (nn.Conv2d(1, 1, 1), "__class__"),
        (nn.Conv2d(1, 1, 1), "register_forward_hook"),
        (tasks.DetectionModel, "load"),
        ("text", "format"),
    ],
)
def test_getattr_reaches_forward_methods_alone(owner: Any, name: str, tmp_path: Path) -> None:
    """Any other attribute, and any other owner, refuses the file."""
    if owner is os:
        owner = Reaches(Reaches(nn.Conv2d, "__init__"), "__globals__")
    torch.save({"model": nn.Conv2d(3, 1, 1), "x": Reaches(owner, name)}, tmp_path / "evil.pt")
    with pytest.raises(LoadError, match=r"needs builtins\.getattr, which could run any code"):
        load(tmp_path / "evil.pt")


class Called:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Called(pathlib.PosixPath, *["a" * 10**6] * 90), "copies more bytes than a file"),
        (Called(pathlib.PosixPath, 3), "holds a path that is none"),
        (Called(np.dtype, "O"), "a type of numpy that is none of plain numbers"),
        (Called(np.dtype, "V999999999"), "a type of numpy that is none of plain numbers"),
        (Called(np.float64(0).__reduce__()[0], np.dtype("f8"), b"123"), "3 bytes, expected 8"),
        (
            Called(np.float64(0).__reduce__()[0], "f8", b"12345678"),
            "a number of numpy that is none",
        ),
        (Called(transforms.InterpolationMode, "wild"), "a way to interpolate that torchvision"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_beside_the_weights_are_held_in_bounds(
    value: Any, message: str, tmp_path: Path
) -> None:
    """Long paths, types that are no numbers, numbers without their bytes."""
    torch.save({"model": nn.Conv2d(3, 1, 1), "x": value}, tmp_path / "evil.pt")
    with pytest.raises(LoadError, match=message):
        load(tmp_path / "evil.pt")


def test_a_forward_of_another_module_takes_no_place(tmp_path: Path) -> None:
    """`forward` may be the module's own, and nothing else that can be called."""
    for other in (nn.Conv2d(3, 1, 1).forward, heads.Detect.forward, nn.ReLU()):
        model = nn.Sequential(nn.Conv2d(3, 1, 1))
        vars(model[0])["forward"] = other
        torch.save(model, tmp_path / "evil.pt")
        with pytest.raises(LoadError, match="holds a Conv2d whose state replaces its forward"):
            load(tmp_path / "evil.pt")


def test_what_a_class_would_multiply_is_a_number(tmp_path: Path) -> None:
    """AAttn fills in the product of two attributes: of a text it could be endless."""
    attention = blocks.AAttn(32, 2)
    del attention.all_head_dim
    torch.save(nn.Sequential(attention), tmp_path / "old.pt")
    assert checkpoint.read(tmp_path / "old.pt")[0].all_head_dim == 32
    attention.head_dim = "a"
    torch.save(nn.Sequential(attention), tmp_path / "evil.pt")
    with pytest.raises(LoadError, match="holds a broken AAttn"):
        load(tmp_path / "evil.pt")


def test_other_classes_of_the_package_are_refused(small: nn.Module, tmp_path: Path) -> None:
    """A loss is no module of a model: the line lists it, with the option that would allow it."""
    loss = importlib.import_module("ultralytics.utils.loss")
    model = built("yolo11n")
    model.criterion = loss.BboxLoss(16)
    path = save(model, tmp_path / "epoch3.pt")
    with pytest.raises(LoadError, match=r"needs ultralytics\.utils\.loss\.BboxLoss") as caught:
        load(path)
    assert "--allow-global ultralytics.utils.loss.BboxLoss" in str(caught.value.hint)


def test_without_the_package_the_error_names_it(
    small: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, with the command that installs what is missing."""
    path = save(small, tmp_path / "best.pt")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ultralytics"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LoadError, match="needs the package ultralytics for") as caught:
        load(path)
    assert "pip install ultralytics" in str(caught.value.hint)
    assert "\n" not in caught.value.message


@pytest.mark.slow
def test_the_first_import_has_no_other_effects(small: nn.Module, tmp_path: Path) -> None:
    """stdout is for results, a file makes nobody look something up, and Pillow and torch keep their
    functions: Ultralytics' own would try to install a package for a broken image."""
    path = save(small, tmp_path / "best.pt")
    code = (
        "import socket, sys\n"
        "def refuse(*args, **more): sys.exit('asked the network')\n"
        "socket.getaddrinfo = socket.socket.connect = refuse\n"
        "from featviz.models.files import checkpoint\n"
        f"checkpoint.read(__import__('pathlib').Path({str(path)!r}))\n"
        "assert 'ultralytics' in sys.modules\n"
        "import torch, PIL.Image\n"
        "assert PIL.Image.open.__module__ == 'PIL.Image'\n"
        "assert torch.save.__module__ == 'torch.serialization'\n"
        "assert 'YOLO_OFFLINE' not in __import__('os').environ"
    )
    env = {**os.environ, "YOLO_CONFIG_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_places_of_its_one_activation_have_names(small: nn.Module) -> None:
    """YOLO11n has one SiLU in 77 places: each gives what the convolution around it gives."""
    assert sum(isinstance(part, nn.SiLU) for part in small.modules()) == 1
    want: dict[str, Tensor] = {}
    handles = [
        part.register_forward_hook(lambda m, args, out, n=name: want.update({n: out.clone()}))
        for name, part in small.named_modules()
        if isinstance(part, convolutions.Conv) and isinstance(part.act, nn.SiLU)
    ]
    with torch.no_grad(), featviz_capture(small, "SiLU") as maps:
        small(IMAGE)
    for handle in handles:
        handle.remove()
    assert len(maps) == 77 and maps.keys() == {f"{name}.act" for name in want}
    for name, tensor in want.items():
        (call,) = maps[f"{name}.act"]
        assert torch.equal(call, tensor)
    places = select(list_layers(small), parse("SiLU@model.9.*"))
    assert [layer.name for layer in places] == ["model.9.cv1.act", "model.9.cv2.act"]


@pytest.mark.slow
def test_a_run_is_a_folder_for_each_place(
    featviz: Callable[..., Outcome], small: nn.Module, tmp_path: Path
) -> None:
    """From the checkpoint to pictures, one call in each folder."""
    path = save(small, tmp_path / "best.pt")
    done = featviz(
        "run", path, SCENES / "spheres.jpg", "--layers", "SiLU@model.9.*,SiLU@model.4.*",
        "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    (folder,) = (tmp_path / "out").glob("*/manifest.json")
    rows = json.loads(folder.read_text())["captures"]
    assert "model.9.cv1.act" in [row["layer"] for row in rows]
    assert all(row["call"] == 0 for row in rows)
