"""Checkpoints of Ultralytics: their classes are data, and the numbers are those that
were saved."""

from __future__ import annotations

import importlib
import os
import pathlib
import subprocess
import sys
import zipfile
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms
from torchvision.transforms import functional as F

from featviz.errors import LoadError
from featviz.models import weights
from featviz.models.load import adopt, load_model
from featviz.models.preprocess import Chain, Preprocess
from featviz.models.presets import from_ultralytics
from featviz.options import InputOptions, ModelOptions

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"),
    [
        (NAMES[0], "model"),
        *(pytest.param(name, "ema", marks=pytest.mark.slow) for name in NAMES[1:4]),
    ],
)
def test_a_checkpoint_is_the_model_that_was_saved(
    name: str, place: str, tmp_path: Path
) -> None:
    """Classes, weights in single precision and output of the model, from `model` or
    from `ema`."""
    model = built(name)
    found = load_model(
        ModelOptions(str(save(model, tmp_path / "best.pt", place)), device="cpu"),
        InputOptions(),
    )
    assert found.source["taken"] == [f"took {place!r}"]
    assert [(n, type(m)) for n, m in found.module.named_modules()] == [
        (n, type(m)) for n, m in model.named_modules()
    ]
    assert same_weights(found.module, model)
    with torch.no_grad():
        assert torch.equal(first(found.module.eval()(IMAGE)), first(model(IMAGE)))


@pytest.mark.slow
def test_nothing_of_the_package_is_constructed(
    small: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No constructor runs while the file is read."""
    path = save(small, tmp_path / "best.pt")

    def refuse(*args: object, **more: object) -> None:
        raise AssertionError("a constructor ran")

    for module in (tasks, heads, blocks, convolutions):
        for kind in vars(module).values():
            if (
                isinstance(kind, type)
                and issubclass(kind, nn.Module)
                and "__init__" in vars(kind)
            ):
                monkeypatch.setattr(kind, "__init__", refuse)
    assert same_weights(load(path), small)


@pytest.mark.slow
def test_a_fused_model_runs_fused(small: nn.Module, tmp_path: Path) -> None:
    """Convolutions without their BatchNorm, whose forward is another of their own
    methods."""
    model = built("yolo11n")
    with torch.no_grad():
        model(IMAGE)  # keeps anchors, strides and a shape in the head
    fused = model.fuse(verbose=False).half().float()  # type: ignore[operator]
    found = load(save(fused, tmp_path / "fused.pt")).eval()
    conv = found.get_submodule("model.0")
    assert isinstance(conv.forward, MethodType)
    assert (conv.forward.__self__, conv.forward.__func__) == (
        conv,
        type(conv).forward_fuse,
    )
    assert not any(isinstance(part, nn.BatchNorm2d) for part in found.modules())
    with torch.no_grad():
        assert torch.equal(first(found(IMAGE)), first(fused(IMAGE)))


@pytest.mark.slow
def test_what_official_files_keep_beside_the_weights(
    small: nn.Module, tmp_path: Path
) -> None:
    """Arguments as a namespace, paths, numbers of numpy, transforms, `Detect.forward`."""
    model = built("yolo11n")
    model.args = utils.IterableSimpleNamespace(
        imgsz=320, project=pathlib.PosixPath("a/b")
    )
    model.transforms = transforms.Compose(
        [transforms.Resize(224), transforms.ToTensor(), transforms.Normalize(0.0, 1.0)]
    )
    model.model[-1].detect = heads.Detect.forward  # type: ignore[index, union-attr]
    metrics = {"mAP": np.float64(0.5), "count": np.int64(3), "old": np.float32(0.25)}
    found = load(save(model, tmp_path / "last.pt", train_metrics=metrics))
    assert vars(found.args) == {"imgsz": 320, "project": "a/b"}
    assert [type(step).__name__ for step in found.transforms.transforms] == [
        "Resize",
        "ToTensor",
        "Normalize",
    ]
    assert found.model[-1].detect is heads.Detect.forward
    content = weights.read(tmp_path / "last.pt")
    assert content["train_metrics"] == {"mAP": 0.5, "count": 3, "old": 0.25}


@pytest.mark.slow
def test_names_of_older_versions(small: nn.Module, tmp_path: Path) -> None:
    """Classes that have moved or gone since are what they became."""
    moved = {
        b"ultralytics.nn.modules.conv\nConv\n": b"ultralytics.nn.modules\nConv\n",
        b"ultralytics.nn.tasks\nDetectionModel\n": (
            b"ultralytics.nn.tasks\nYOLOv10DetectionModel\n"
        ),
    }
    path = save(small, tmp_path / "old.pt")
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    (pickled,) = (name for name in records if name.endswith("data.pkl"))
    for before, after in moved.items():
        assert before in records[pickled]
        records[pickled] = records[pickled].replace(before, after)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    found = load(path)
    assert type(found) is tasks.DetectionModel and same_weights(found, small)


class Called:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (os, "system"),
        (nn.Conv2d(1, 1, 1), "__class__"),
        (nn.Conv2d(1, 1, 1), "register_forward_hook"),
    ],
)
def test_getattr_reaches_forward_methods_alone(
    owner: Any, name: str, tmp_path: Path
) -> None:
    """Any other attribute, and any other owner, refuses the file."""
    if owner is os:
        owner = Called(getattr, Called(getattr, nn.Conv2d, "__init__"), "__globals__")
    module = nn.Conv2d(3, 1, 1)
    module.x = Called(getattr, owner, name)  # type: ignore[assignment]
    torch.save(module, tmp_path / "evil.pt")
    with pytest.raises(LoadError, match=r"needs .*getattr"):
        load(tmp_path / "evil.pt")


@pytest.mark.parametrize(
    "value",
    [
        Called(pathlib.PosixPath, 3),
        Called(np.dtype, "O"),
        Called(np.float64(0).__reduce__()[0], np.dtype("f8"), b"123"),
        Called(np.float64(0).__reduce__()[0], "f8", b"12345678"),
        Called(transforms.InterpolationMode, "wild"),
    ],
    ids=["path", "type", "short number", "number of no type", "mode"],
)
def test_values_beside_the_weights_may_be_broken(value: Any, tmp_path: Path) -> None:
    """They are left out, and the model beside them is loaded; within it they refuse it."""
    torch.save({"model": nn.Conv2d(3, 1, 1), "x": value}, tmp_path / "odd.pt")
    assert load(tmp_path / "odd.pt").out_channels == 1
    module = nn.Conv2d(3, 1, 1)
    module.x = value
    torch.save(module, tmp_path / "odd.pt")
    with pytest.raises(LoadError, match=r"holds a (broken|type)"):
        load(tmp_path / "odd.pt")


@pytest.mark.slow
def test_the_first_import_has_no_other_effects(
    small: nn.Module, tmp_path: Path
) -> None:
    """stdout is for results, a file makes nobody look something up, and Pillow and
    torch keep their functions: Ultralytics' own would try to install a package for a
    broken image."""
    path = save(small, tmp_path / "best.pt")
    code = (
        "import socket, sys\n"
        "def refuse(*args, **more): sys.exit('asked the network')\n"
        "socket.getaddrinfo = socket.socket.connect = refuse\n"
        "from featviz.models import weights\n"
        f"weights.read(__import__('pathlib').Path({str(path)!r}))\n"
        "assert 'ultralytics' in sys.modules\n"
        "import torch, PIL.Image\n"
        "assert PIL.Image.open.__module__ == 'PIL.Image'\n"
        "assert torch.save.__module__ == 'torch.serialization'\n"
        "assert 'YOLO_OFFLINE' not in __import__('os').environ"
    )
    home = tmp_path / "home"
    home.mkdir()
    env = {**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home)}
    env.pop("YOLO_CONFIG_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert not list(home.rglob("*ltralytics*")), "it wrote settings"


augment = importlib.import_module("ultralytics.data.augment")

SIZES = [(400, 600), (640, 640), (1, 700), (641, 383)]
"""Heights and widths: landscape, square, a thread, an odd one."""


def picture(height: int, width: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def yolo() -> nn.Module:
    return built("yolov8n")


@pytest.fixture(scope="module")
def yolo_file(yolo: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        yolo, tmp_path_factory.mktemp("yolo") / "best.pt", train_args={"imgsz": 320}
    )


def preprocess(path: Path, **wishes: object) -> Preprocess:
    options = InputOptions(**wishes)  # type: ignore[arg-type]
    return load_model(ModelOptions(str(path), device="cpu"), options).preprocess


@pytest.mark.parametrize("stride", [32])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_input_is_their_letterbox(size: tuple[int, int], stride: int) -> None:
    """RGB and grey of every pixel for images of every shape, and where the image lies
    in it."""
    for mode in ("RGB", "L"):
        image = picture(*size).convert(mode)
        pixels = np.atleast_3d(np.asarray(image))
        box = augment.LetterBox(640, auto=True, stride=stride)
        theirs = F.to_tensor(box(image=pixels))
        assert torch.equal(Chain(640, stride=stride)(image)[0], theirs)
    placed = box.get_params({"img": pixels})
    wide, high = placed["new_unpad"]
    window = Chain(640, stride=stride).window(image.size)
    assert window == (placed["top"], placed["left"], high, wide)


@pytest.mark.slow
def test_the_input_is_their_predictors(yolo: nn.Module, yolo_file: Path) -> None:
    """The tensor that goes into the model, against DetectionPredictor's own
    preprocessing."""
    predict = importlib.import_module("ultralytics.models.yolo.detect")
    # as YOLO.predict asks
    asked = {"imgsz": 320, "device": "cpu", "save": False, "rect": True}
    predictor = predict.DetectionPredictor(overrides=asked)
    predictor.setup_model(yolo, verbose=False)
    predictor.imgsz = [320, 320]
    for size in SIZES:
        image = picture(*size)
        theirs = predictor.preprocess(
            [np.ascontiguousarray(np.asarray(image)[..., ::-1])]
        )
        assert torch.equal(preprocess(yolo_file).tensor(image), theirs)


@pytest.mark.slow
def test_classifiers_resize_and_crop(tmp_path: Path) -> None:
    """The transform of ClassificationPredictor, with imgsz of the checkpoint."""
    path = save(built("yolo11n-cls"), tmp_path / "cls.pt", train_args={"imgsz": 128})
    theirs = augment.classify_transforms(128)
    for size in [(400, 600), (100, 90), (128, 300)]:
        assert torch.equal(
            preprocess(path).tensor(picture(*size))[0], theirs(picture(*size))
        )


def test_the_longer_side_comes_from_the_checkpoint(
    yolo: nn.Module, yolo_file: Path
) -> None:
    """`train_args` first, then the model's own arguments, then 640; whole strides. What
    a file made up, sides and strides out of bounds, is not believed."""
    words = (
        "RGB, resize longer side to 320 (bilinear, by OpenCV), pad with 114 to"
        " multiples of 32"
    )
    assert preprocess(yolo_file).words_for() == f"{words}, values 0..1"
    yolo.args = {"imgsz": 300}  # type: ignore[assignment]
    for arguments, size in (
        ({"imgsz": 500}, 512),
        ({}, 320),
        (None, 320),
        ({"imgsz": "x"}, 320),
    ):
        chain = from_ultralytics(yolo, arguments)
        assert chain is not None and chain.steps == Chain(size, stride=32).steps
    yolo.args = {}  # type: ignore[assignment]
    for wrong in (10**9, 0, -5, True, [640, 640], None):
        assert from_ultralytics(yolo, {"imgsz": wrong}) == Chain(640, stride=32)
    assert adopt(yolo, InputOptions()).preprocess.chain == Chain(640, stride=32)
    assert from_ultralytics(nn.Conv2d(3, 1, 1), {"imgsz": 320}) is None
    before = yolo.stride
    for stride, used in ((64.0, 64), (8.0, 32), (1e9, 32), (float("nan"), 32)):
        yolo.stride = torch.tensor([8.0, stride])
        assert from_ultralytics(yolo, {}) == Chain(640, stride=used)
    yolo.stride = torch.empty(0)
    assert from_ultralytics(yolo, {}) == Chain(640, stride=32)
    yolo.stride = before


@pytest.mark.slow
def test_wishes_for_the_size(yolo_file: Path) -> None:
    """--size N is the longer side; HxW and --crop take padding away."""
    assert preprocess(yolo_file, size=600).chain.steps == Chain(608, stride=32).steps
    assert preprocess(yolo_file, size=600).tensor(picture(300, 600)).shape == (
        1,
        3,
        320,
        608,
    )
    exact = preprocess(yolo_file, size=(96, 64))
    assert not exact.chain.stride
    assert exact.tensor(picture(30, 50)).shape == (1, 3, 96, 64)
    cropped = preprocess(yolo_file, crop=64)
    image = picture(100, 90)
    want = F.to_tensor(F.center_crop(image, [64, 64]))[None]
    assert not cropped.chain.stride and torch.equal(cropped.tensor(image), want)


IMPORT = """
import torch
from PIL import Image
from featviz.models.requirements import import_ultralytics
before = Image.open, torch.save
import_ultralytics("ultralytics.nn.tasks")
assert (Image.open, torch.save) == before
"""


def test_an_import_replaces_nothing() -> None:
    """`torch.save` and `Image.open` stay as they were."""
    subprocess.run([sys.executable, "-c", IMPORT], check=True)
