"""Images for models of Ultralytics: pixel for pixel as its own predictors prepare them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SCENES, Outcome
from PIL import Image
from torch import nn
from torchvision.transforms import functional as F

from featviz.images import decode
from featviz.models.letterbox import LetterBox, Window, of_model
from featviz.models.load import ModelOptions, adopt, load_model
from featviz.models.preprocess import InputOptions, Preprocess
from featviz.records import Sample

from .ultralytics_files import built, save

augment = importlib.import_module("ultralytics.data.augment")

SIZES = [
    (400, 600),
    (600, 400),
    (640, 640),
    (1280, 1280),
    (1, 700),
    (333, 37),
    (65, 64),
    (641, 1283),
]
"""Heights and widths: landscape, portrait, square, half of it, a thread, odd ones."""


def picture(height: int, width: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def yolo() -> nn.Module:
    return built("yolov8n")


@pytest.fixture(scope="module")
def checkpoint(yolo: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(yolo, tmp_path_factory.mktemp("yolo") / "best.pt", train_args={"imgsz": 320})


def preprocess(path: Path, **wishes: object) -> Preprocess:
    options = InputOptions(**wishes)  # type: ignore[arg-type]
    return load_model(ModelOptions(str(path), device="cpu"), options).preprocess


@pytest.mark.parametrize("stride", [32, 64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pixels_are_those_of_their_letterbox(size: tuple[int, int], stride: int) -> None:
    """RGB of every pixel, the padding's included, for images of every shape."""
    image = picture(*size)
    theirs = augment.LetterBox(640, auto=True, stride=stride)(image=np.asarray(image))
    ours = np.asarray(LetterBox(640, stride)(image))
    assert ours.shape == theirs.shape and np.array_equal(ours, theirs)
    assert ours.shape[:2] == LetterBox(640, stride).padded(image.size)


def test_grey_images_are_padded_alike() -> None:
    """One channel, [H, W]."""
    image = picture(30, 50).convert("L")
    theirs = augment.LetterBox(64, auto=True)(image=np.asarray(image)[..., None])
    assert np.array_equal(np.asarray(LetterBox(64)(image)), theirs.squeeze())


def test_the_input_is_their_predictors(yolo: nn.Module, checkpoint: Path) -> None:
    """The tensor that goes into the model, against DetectionPredictor's own preprocessing."""
    predict = importlib.import_module("ultralytics.models.yolo.detect")
    asked = {"imgsz": 320, "device": "cpu", "save": False, "rect": True}  # as YOLO.predict asks
    predictor = predict.DetectionPredictor(overrides=asked)
    predictor.setup_model(yolo, verbose=False)
    predictor.imgsz = [320, 320]
    for size in SIZES:
        image = picture(*size)
        theirs = predictor.preprocess([np.ascontiguousarray(np.asarray(image)[..., ::-1])])
        assert torch.equal(preprocess(checkpoint).tensor(image), theirs)


def test_classifiers_resize_and_crop(tmp_path: Path) -> None:
    """The transform of ClassificationPredictor, with imgsz of the checkpoint."""
    path = save(built("yolo11n-cls"), tmp_path / "cls.pt", train_args={"imgsz": 128})
    theirs = augment.classify_transforms(128)
    for size in [(400, 600), (100, 90), (128, 300)]:
        assert torch.equal(preprocess(path).tensor(picture(*size))[0], theirs(picture(*size)))


def test_the_longer_side_comes_from_the_checkpoint(yolo: nn.Module, checkpoint: Path) -> None:
    """`train_args` first, then the model's own arguments, then 640; whole strides, in bounds."""
    words = "RGB, resize longer side to 320 (bilinear, by OpenCV), pad with 114 to multiples of 32"
    assert preprocess(checkpoint).words == f"{words}, values 0..1"
    yolo.args = {"imgsz": 300}  # type: ignore[assignment]
    for arguments, size in (({"imgsz": 500}, 512), ({}, 320), (None, 320), ({"imgsz": "x"}, 320)):
        assert of_model(yolo, arguments) == LetterBox(size)
    yolo.args = {}  # type: ignore[assignment]
    for wrong in (10**9, 0, -5, True, [640, 640], None):
        assert of_model(yolo, {"imgsz": wrong}) == LetterBox(640)
    assert adopt(yolo, InputOptions()).preprocess.letterbox == LetterBox(640)
    assert of_model(nn.Conv2d(3, 1, 1), {"imgsz": 320}) is None


def test_a_stride_that_a_file_made_up_is_not_believed(yolo: nn.Module) -> None:
    """Between 32 and 1024, or 32."""
    before = yolo.stride
    for stride, used in ((64.0, 64), (8.0, 32), (1e9, 32), (float("nan"), 32)):
        yolo.stride = torch.tensor([8.0, stride])
        assert of_model(yolo, {}) == LetterBox(640, used)
    yolo.stride = torch.empty(0)
    assert of_model(yolo, {}) == LetterBox(640)
    yolo.stride = before


def test_wishes_for_the_size(checkpoint: Path) -> None:
    """--size N is the longer side; HxW and --crop take padding away."""
    assert preprocess(checkpoint, size=600).letterbox == LetterBox(608)
    assert preprocess(checkpoint, size=600).tensor(picture(300, 600)).shape == (1, 3, 320, 608)
    exact = preprocess(checkpoint, size=(96, 64))
    assert exact.letterbox is None and exact.tensor(picture(30, 50)).shape == (1, 3, 96, 64)
    cropped = preprocess(checkpoint, crop=64)
    image = picture(100, 90)
    want = F.to_tensor(F.center_crop(image, [64, 64]))[None]
    assert cropped.letterbox is None and torch.equal(cropped.tensor(image), want)


def test_a_window_is_where_the_image_lies() -> None:
    """Without the padding, the input is the resized image."""
    image = picture(300, 500)
    box = LetterBox(320)
    assert box.window(image.size) == Window(0, 0, 192, 320)
    assert box.window((500, 310)) == Window(13, 0, 198, 320)
    assert box.padded((500, 310)) == (224, 320)
    window = box.window((500, 310))
    inner = np.asarray(box(picture(310, 500)))[window.top : window.top + window.height]
    assert np.array_equal(inner, np.asarray(LetterBox(320, 1)(picture(310, 500))))


@pytest.mark.slow
def test_an_overlay_has_no_padding(
    featviz: Callable[..., Outcome], checkpoint: Path, tmp_path: Path
) -> None:
    """Tiles have the size of the resized image, and where alpha is 0 its pixels; the plan of
    --dry-run knows it."""
    image = SCENES / "spheres.jpg"
    with Image.open(image) as opened:
        opened.crop((0, 0, opened.width, opened.width * 310 // 500)).save(tmp_path / "wide.png")
    call = [
        "run", checkpoint, tmp_path / "wide.png", "--layers", "model.4", "--overlay", "0",
        "--max-maps", "1", "--padding", "0", "--scale", "1",
    ]  # fmt: skip
    done = featviz(*call, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    (file,) = (tmp_path / "out").glob("wide.png/*/output.png")
    with Image.open(tmp_path / "wide.png") as opened:
        box = LetterBox(320)
        window = box.window(opened.size)
        seen = np.asarray(box(opened.convert("RGB")))
    assert window.height < seen.shape[0]
    with Image.open(file) as drawn:
        assert drawn.size == (window.width, window.height)
        part = seen[window.top : window.top + window.height, window.left :][:, : window.width]
        assert np.array_equal(np.asarray(drawn.convert("RGB")), part)
    planned = json.loads(featviz(*call, "--dry-run", "--json").out)["per_image"]
    assert [(f["width"], f["height"]) for f in planned] == [(window.width, window.height)]


def test_sixteen_bits_are_padded_as_eight(tmp_path: Path) -> None:
    """Ultralytics has 8 bits for all pictures."""
    deep = np.linspace(0, 65535, 48).astype(np.uint16).reshape(6, 8)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    Image.fromarray((deep / 65535 * 255 + 0.5).astype(np.uint8)).save(tmp_path / "plain.png")
    padded = Preprocess(None, None, None, None, 3, letterbox=LetterBox(32))
    of = [decode.decode(Sample(n, (tmp_path / n,))).images for n in ("deep.png", "plain.png")]
    assert torch.equal(padded(of[0])[0], padded(of[1])[0])
