"""--preset: preprocessings that many models share, by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.outcomes import Run, refused
from PIL import Image
from torch import Tensor, nn
from torchvision.models import ResNet18_Weights, ResNet50_Weights, vit_b_16
from torchvision.transforms import v2

from featviz.errors import UsageError
from featviz.models.preprocess import InputOptions
from featviz.models.presets import FixedInput, choose_preprocess
from featviz.records import PRESETS

pytestmark = pytest.mark.usefixtures("imports_undone")

RGB = nn.Conv2d(3, 2, 1)


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).resize((width * 2, height * 2))


def theirs(name: str, image: Image.Image) -> Tensor:
    """The input as the library prepares it that the preset is taken from: [3, H, W]."""
    if name == "imagenet":
        return ResNet18_Weights.IMAGENET1K_V1.transforms()(image)
    timm = pytest.importorskip("timm.data")
    if name == "inception":
        config = {"input_size": (3, 299, 299), "crop_pct": 0.875, "interpolation": "bicubic"}
        statistics = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
        return timm.create_transform(**config, **statistics)(image)
    steps = [v2.Resize(224, v2.InterpolationMode.BICUBIC), v2.CenterCrop(224), v2.ToTensor()]
    return v2.Compose([*steps, v2.Normalize(timm.OPENAI_CLIP_MEAN, timm.OPENAI_CLIP_STD)])(image)


@pytest.mark.filterwarnings("ignore:The transform `ToTensor")
@pytest.mark.parametrize("name", ["imagenet", "clip", "inception"])
@pytest.mark.parametrize("size", [(200, 300), (150, 90)])
def test_a_preset_is_its_librarys_preprocessing(name: str, size: tuple[int, int]) -> None:
    """Pixel for pixel, also for a model whose weights say otherwise."""
    image = noise(*size)
    entry = ResNet50_Weights.IMAGENET1K_V2
    ours = choose_preprocess(RGB, entry, InputOptions(preset=name)).tensor(image)
    torch.testing.assert_close(ours[0], theirs(name, image), atol=1e-6, rtol=0)


def test_none_leaves_the_image_as_it_is() -> None:
    """Its own size, values 0..1; grey for a model of one channel."""
    image = noise(30, 20)
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
    chosen = choose_preprocess(RGB, ResNet18_Weights.DEFAULT, InputOptions(preset="none"))
    torch.testing.assert_close(chosen.tensor(image), values)
    grey = choose_preprocess(nn.Conv2d(1, 2, 1), None, InputOptions(preset="none"))
    assert grey.tensor(image).shape == (1, 1, 40, 60)


@pytest.mark.parametrize("size", [(300, 200), (90, 150), (640, 480)])
def test_yolo_is_the_letterbox_of_ultralytics(size: tuple[int, int]) -> None:
    """Pixel for pixel as its predictor does for a model of largest stride 32, of any class."""
    augment = pytest.importorskip("ultralytics.data.augment", exc_type=ImportError)
    image = noise(size[0] // 2, size[1] // 2)
    theirs = augment.LetterBox(640, auto=True, stride=32)(image=np.array(image))
    chosen = choose_preprocess(RGB, ResNet18_Weights.DEFAULT, InputOptions(preset="yolo"))
    expected = torch.from_numpy(theirs).permute(2, 0, 1)[None] / 255
    torch.testing.assert_close(chosen.tensor(image), expected)
    assert chosen.window(image.size) is not None and not chosen.guessed


def test_yolo_fills_the_square_that_a_model_takes_alone() -> None:
    """An exported program of 96 × 96 gets the whole square; one of another shape is refused."""
    pytest.importorskip("cv2")
    options = InputOptions(preset="yolo")
    chosen = choose_preprocess(RGB, None, options, FixedInput(3, (96, 96)))
    values = chosen.tensor(Image.new("RGB", (60, 20), "white"))
    assert values.shape == (1, 3, 96, 96) and chosen.blank()[0].shape == values.shape
    torch.testing.assert_close(
        values[0, 0, :, 5], torch.tensor([114 / 255] * 32 + [1] * 32 + [114 / 255] * 32)
    )
    with pytest.raises(UsageError, match="pads to squares, and the model takes 96×64"):
        choose_preprocess(RGB, None, options, FixedInput(3, (96, 64)))


def test_yolo_without_opencv_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the command that installs it."""
    monkeypatch.setattr("featviz.models.letterbox.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="not installed") as caught:
        choose_preprocess(RGB, None, InputOptions(preset="yolo"))
    assert "pip install opencv-python-headless" in str(caught.value.hint)


def test_other_options_change_a_preset() -> None:
    """--size, --mean and --std win over it."""
    options = InputOptions(preset="clip", size=(10, 12), mean=(0.5,) * 3)
    chosen = choose_preprocess(RGB, None, options)
    assert (chosen.resize, chosen.crop, chosen.mean) == ((10, 12), None, (0.5,) * 3)
    assert chosen.std == PRESETS["clip"].std and chosen.interpolation == "bicubic"


def test_a_model_of_one_size_keeps_it() -> None:
    """Of an exported program and of a vision transformer the size is the model's."""
    options = InputOptions(preset="clip")
    fixed = choose_preprocess(RGB, None, options, FixedInput(3, (64, 64)))
    assert (fixed.resize, fixed.crop) == (73, 64)
    with torch.device("meta"):
        transformer = vit_b_16(image_size=96)
    assert choose_preprocess(transformer, None, options).crop == 96


@pytest.mark.parametrize("name", ["imagenet", "clip", "inception"])
def test_a_preset_of_rgb_is_refused_for_grey(name: str) -> None:
    """The message names the preset and the channels; the hint another preset."""
    with pytest.raises(UsageError, match=f"--preset {name} is for RGB, .* takes 1 channel$"):
        choose_preprocess(nn.Conv2d(1, 2, 1), None, InputOptions(preset=name))


CODE = """
from torch import nn
def make():
    return nn.Sequential(nn.Conv2d(3, 2, 1))
"""


def test_the_guess_is_said_once_and_only_where_images_are_used(
    featviz: Run, picture: Path, tmp_path: Path
) -> None:
    """`run`, its --dry-run and `audit` say it once; `layers` and `summary` do not."""
    (tmp_path / "user_net.py").write_text(CODE)
    model, out = f"{tmp_path}/user_net.py:make", tmp_path / "out"
    others = "clip, inception, yolo, none"
    said = f"warning: preprocessing is a guess, --preset imagenet (others: {others}; "
    for command in ("layers", "summary"):
        assert "a guess" not in featviz(command, model).err
    for words in (("run",), ("run", "--dry-run"), ("audit",)):
        outcome = featviz(*words, model, picture, "--out", out / str(len(words)) / words[0])
        assert outcome.err.count(said) == 1 and outcome.err.count("a guess") == 1, outcome.err
    outcome = featviz("run", model, picture, "--out", tmp_path / "x", "--preset", "clip")
    assert "a guess" not in outcome.err
    manifest = json.loads((tmp_path / "x" / picture.name / "manifest.json").read_text())
    words = "RGB, resize shorter side to 224 (bicubic), centre crop 224×224, normalise by mean "
    assert manifest["input"]["preprocessing"].startswith(f"{words}[0.481455,")


def test_there_is_no_other_preset(featviz: Run, picture: Path) -> None:
    """A wrong name is a usage error that lists the names."""
    refused(featviz("run", "resnet18", picture, "--preset", "kinetics"), 2, ".*'kinetics' is not")
