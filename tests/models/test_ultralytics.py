"""Checkpoints of Ultralytics: their classes are data, and the numbers are those that
were saved."""

from __future__ import annotations

import importlib
import math
import os
import pathlib
import subprocess
import sys
import zipfile
from copy import deepcopy
from itertools import chain
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
from featviz.models.load import adopt
from featviz.models.preprocess import Chain, Preprocess
from featviz.models.presets import from_ultralytics
from featviz.options import InputOptions

from .loading import load, load_whole, same_modules, same_weights
from .ultralytics_files import built, save

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


def raw_output(model: nn.Module) -> Tensor:
    """The first tensor that a model gives for the image."""
    with torch.no_grad():
        output = model.eval()(IMAGE)
    while not isinstance(output, Tensor):
        output = output[0]
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("yolo11n", "model"),
        ("yolov8n", "ema"),
        ("yolo11n-seg", "ema"),
        ("yolo11n-cls", "ema"),
    ],
)
def test_a_checkpoint_is_the_model_that_was_saved(
    name: str, key: str, tmp_path: Path
) -> None:
    """Classes, weights in single precision and output of the model, from `model` or
    from `ema`."""
    model = built(name)
    loaded = load_whole(save(model, tmp_path / "best.pt", key))
    assert loaded.source["taken"] == [f"took {key!r}"]
    same_modules(loaded.module, model)
    assert same_weights(loaded.module, model)
    assert torch.equal(raw_output(loaded.module), raw_output(model))


def modules_in(*files: Any) -> set[type[nn.Module]]:
    """The classes of modules that files name, with constructors of their own."""
    modules = set()
    for value in chain.from_iterable(vars(file).values() for file in files):
        if isinstance(value, type) and issubclass(value, nn.Module):
            modules.add(value)
    return {module for module in modules if "__init__" in vars(module)}


@pytest.mark.medium
def test_nothing_of_the_package_is_constructed(
    small: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No constructor runs while the file is read."""
    path = save(small, tmp_path / "best.pt")
    for module in modules_in(tasks, heads, blocks, convolutions):
        monkeypatch.setattr(module, "__init__", pytest.fail)
    assert same_weights(load(path), small)


@pytest.mark.slow
def test_a_fused_model_runs_fused(tmp_path: Path) -> None:
    """Convolutions without their BatchNorm, whose forward is another of their own
    methods."""
    model = built("yolo11n")
    raw_output(model)  # keeps anchors, strides and a shape in the head
    fused = model.fuse(verbose=False).half().float()
    loaded = load(save(fused, tmp_path / "fused.pt"))
    conv = loaded.get_submodule("model.0")
    assert isinstance(conv.forward, MethodType)
    assert conv.forward.__self__ is conv
    assert conv.forward.__func__ is type(conv).forward_fuse
    assert not any(isinstance(module, nn.BatchNorm2d) for module in loaded.modules())
    assert torch.equal(raw_output(loaded), raw_output(fused))


@pytest.mark.slow
def test_what_official_files_keep_beside_the_weights(tmp_path: Path) -> None:
    """Arguments as a namespace, paths, numbers of numpy, transforms, `Detect.forward`."""
    model: Any = built("yolo11n")
    project = pathlib.PosixPath("a/b")
    model.args = utils.IterableSimpleNamespace(imgsz=320, project=project)
    steps = [
        transforms.Resize(224),
        transforms.ToTensor(),
        transforms.Normalize(0.0, 1.0),
    ]
    model.transforms = transforms.Compose(steps)
    model.model[-1].detect = heads.Detect.forward
    metrics = {"mAP": np.float64(0.5), "count": np.int64(3), "old": np.float32(0.25)}
    path = save(model, tmp_path / "last.pt", train_metrics=metrics)

    loaded: Any = load(path)
    loaded_steps = loaded.transforms.transforms
    assert vars(loaded.args) == {"imgsz": 320, "project": "a/b"}
    assert list(map(type, loaded_steps)) == list(map(type, steps))
    assert loaded.model[-1].detect is heads.Detect.forward
    content = weights.read(path)
    assert content["train_metrics"] == {"mAP": 0.5, "count": 3, "old": 0.25}


RENAMED = {
    b"ultralytics.nn.modules.conv\nConv\n": b"ultralytics.nn.modules\nConv\n",
    b"ultralytics.nn.tasks\nDetectionModel\n": (
        b"ultralytics.nn.tasks\nYOLOv10DetectionModel\n"
    ),
}
"""Names of today, and of versions before or beside it."""


def as_older(pickled: bytes) -> bytes:
    for today, older in RENAMED.items():
        assert today in pickled
        pickled = pickled.replace(today, older)
    return pickled


@pytest.mark.medium
def test_names_of_older_versions(small: nn.Module, tmp_path: Path) -> None:
    """Classes that have moved or gone since are what they became."""
    path = save(small, tmp_path / "old.pt")
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, as_older(data) if name.endswith(".pkl") else data)
    loaded = load(path)
    assert type(loaded) is tasks.DetectionModel
    assert same_weights(loaded, small)


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
    module.x = Called(getattr, owner, name)
    torch.save(module, tmp_path / "evil.pt")
    with pytest.raises(LoadError, match=r"needs .*getattr"):
        load(tmp_path / "evil.pt")


BROKEN = {
    "path": Called(pathlib.PosixPath, 3),
    "type": Called(np.dtype, "O"),
    "short number": Called(np.float64(0).__reduce__()[0], np.dtype("f8"), b"123"),
    "number of no type": Called(np.float64(0).__reduce__()[0], "f8", b"12345678"),
    "mode": Called(transforms.InterpolationMode, "wild"),
}
"""Values whose pickles say too little, or nonsense."""


@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
def test_values_beside_the_weights_may_be_broken(value: Any, tmp_path: Path) -> None:
    """They are left out, and the model beside them is loaded."""
    torch.save({"model": nn.Conv2d(3, 1, 1), "x": value}, tmp_path / "odd.pt")
    assert load(tmp_path / "odd.pt").out_channels == 1


@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
def test_values_in_a_model_may_not_be_broken(value: Any, tmp_path: Path) -> None:
    """They refuse the file."""
    module = nn.Conv2d(3, 1, 1)
    module.x = value
    torch.save(module, tmp_path / "odd.pt")
    with pytest.raises(LoadError, match=r"holds a (broken|type)"):
        load(tmp_path / "odd.pt")


FIRST_IMPORT = """
import os, socket, sys
from pathlib import Path

def refuse(*args, **more):
    sys.exit("asked the network")

socket.getaddrinfo = socket.socket.connect = refuse
import PIL.Image, torch
before = PIL.Image.open, torch.save
from featviz.models import weights
weights.read(Path(sys.argv[1]))
assert "ultralytics" in sys.modules
assert (PIL.Image.open, torch.save) == before
assert "YOLO_OFFLINE" not in os.environ
"""


@pytest.mark.slow
def test_the_first_import_has_no_other_effects(
    small: nn.Module, tmp_path: Path
) -> None:
    """stdout is for results, a file makes nobody look something up, and Pillow and
    torch keep their functions: Ultralytics' own would try to install a package for a
    broken image."""
    path = save(small, tmp_path / "best.pt")
    home = tmp_path / "home"
    home.mkdir()
    env = {**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home)}
    env.pop("YOLO_CONFIG_DIR", None)
    command = [sys.executable, "-c", FIRST_IMPORT, path]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert not list(home.rglob("*ltralytics*")), "it wrote settings"


augment = importlib.import_module("ultralytics.data.augment")

SIZES = [(400, 600), (640, 640), (1, 700), (641, 383)]
"""Heights and widths: landscape, square, a thread, an odd one."""


def picture(height: int, width: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def yolo_file(small: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained at 320 pixels."""
    path = tmp_path_factory.mktemp("yolo") / "best.pt"
    return save(small, path, train_args={"imgsz": 320})


def preprocess(path: Path, **wishes: Any) -> Preprocess:
    return load_whole(path, InputOptions(**wishes)).preprocess


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_input_is_their_letterbox(size: tuple[int, int], mode: str) -> None:
    """RGB and grey of every pixel for images of every shape."""
    image = picture(*size).convert(mode)
    box = augment.LetterBox(640, auto=True, stride=32)
    theirs = F.to_tensor(box(image=np.atleast_3d(np.asarray(image))))
    assert torch.equal(Chain(640, stride=32)(image)[0], theirs)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_where_the_image_lies_in_the_letterbox(size: tuple[int, int]) -> None:
    """As theirs places it."""
    image = picture(*size)
    box = augment.LetterBox(640, auto=True, stride=32)
    theirs = box.get_params({"img": np.asarray(image)})
    width, height = theirs["new_unpad"]
    window = Chain(640, stride=32).window(image.size)
    assert window == (theirs["top"], theirs["left"], height, width)


@pytest.mark.slow
def test_the_input_is_their_predictors(small: nn.Module, yolo_file: Path) -> None:
    """The tensor that goes into the model, against DetectionPredictor's own
    preprocessing."""
    predict = importlib.import_module("ultralytics.models.yolo.detect")
    # as YOLO.predict asks
    options = {"imgsz": 320, "device": "cpu", "save": False, "rect": True}
    predictor = predict.DetectionPredictor(overrides=options)
    predictor.setup_model(deepcopy(small), verbose=False)
    predictor.imgsz = [320, 320]
    ours = preprocess(yolo_file)
    for image in (picture(*size) for size in SIZES):
        blue_first = np.ascontiguousarray(np.asarray(image)[..., ::-1])
        assert torch.equal(ours.tensor(image), predictor.preprocess([blue_first]))


@pytest.mark.slow
def test_classifiers_resize_and_crop(tmp_path: Path) -> None:
    """The transform of ClassificationPredictor, with imgsz of the checkpoint."""
    path = save(built("yolo11n-cls"), tmp_path / "cls.pt", train_args={"imgsz": 128})
    theirs = augment.classify_transforms(128)
    ours = preprocess(path)
    for image in (picture(400, 600), picture(100, 90), picture(128, 300)):
        assert torch.equal(ours.tensor(image)[0], theirs(image))


@pytest.mark.medium
def test_the_record_says_the_letterbox(yolo_file: Path) -> None:
    """Size, interpolation, colour and stride, as in the checkpoint."""
    assert preprocess(yolo_file).words_for() == (
        "RGB, resize longer side to 320 (bilinear, by OpenCV), pad with 114 to"
        " multiples of 32, values 0..1"
    )


@pytest.fixture
def of_300(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model whose own arguments have a size."""
    monkeypatch.setattr(small, "args", {"imgsz": 300})
    return small


@pytest.mark.parametrize(
    ("arguments", "size"),
    [({"imgsz": 500}, 512), ({}, 320), (None, 320), ({"imgsz": "x"}, 320)],
)
def test_the_longer_side_comes_from_the_checkpoint(
    arguments: Any, size: int, of_300: nn.Module
) -> None:
    """`train_args` first, then the model's own arguments; whole strides."""
    chain = from_ultralytics(of_300, arguments)
    assert chain is not None
    assert chain.steps == Chain(size, stride=32).steps


@pytest.mark.parametrize("size", [10**9, 0, -5, True, [640, 640], None])
def test_a_size_that_is_made_up_is_not_believed(
    size: object, small: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """640 is Ultralytics' own."""
    monkeypatch.setattr(small, "args", {})
    assert from_ultralytics(small, {"imgsz": size}) == Chain(640, stride=32)


@pytest.mark.parametrize(
    ("strides", "stride"),
    [
        ([8.0, 64.0], 64),
        ([8.0, 8.0], 32),
        ([8.0, 1e9], 32),
        ([8.0, math.nan], 32),
        ([], 32),
    ],
)
def test_a_stride_that_is_made_up_is_not_believed(
    strides: list[float],
    stride: int,
    small: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The largest of the model counts within bounds."""
    monkeypatch.setattr(small, "args", {})
    monkeypatch.setattr(small, "stride", torch.tensor(strides))
    assert from_ultralytics(small, {}) == Chain(640, stride=stride)


def test_a_model_in_hand_has_the_letterbox(
    small: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of Ultralytics', and no other."""
    monkeypatch.setattr(small, "args", {})
    assert adopt(small, InputOptions()).preprocess.chain == Chain(640, stride=32)
    assert from_ultralytics(nn.Conv2d(3, 1, 1), {"imgsz": 320}) is None


@pytest.mark.medium
def test_a_size_that_is_asked_for_is_the_longer_side(yolo_file: Path) -> None:
    """--size N, in whole strides."""
    ours = preprocess(yolo_file, size=600)
    assert ours.chain.steps == Chain(608, stride=32).steps
    assert ours.tensor(picture(300, 600)).shape == (1, 3, 320, 608)


@pytest.mark.medium
def test_an_exact_size_takes_padding_away(yolo_file: Path) -> None:
    """--size HxW."""
    exact = preprocess(yolo_file, size=(96, 64))
    assert not exact.chain.stride
    assert exact.tensor(picture(30, 50)).shape == (1, 3, 96, 64)


@pytest.mark.medium
def test_a_crop_takes_padding_away(yolo_file: Path) -> None:
    """--crop is torchvision's."""
    cropped = preprocess(yolo_file, crop=64)
    image = picture(100, 90)
    expected = F.to_tensor(F.center_crop(image, [64, 64]))[None]
    assert not cropped.chain.stride
    assert torch.equal(cropped.tensor(image), expected)
