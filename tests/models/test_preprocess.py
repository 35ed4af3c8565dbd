"""From a picture to the model's input: torchvision's transforms, told and undone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision import models
from torchvision.transforms import functional as F

from featviz.errors import UsageError
from featviz.models.preprocess import InputOptions, Preprocess
from featviz.models.presets import choose_preprocess, first_channels

RGB = nn.Conv2d(3, 2, 1)
GREY = nn.Conv2d(1, 2, 1)
RESNET = models.ResNet18_Weights.IMAGENET1K_V1
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What featviz logs, also after a command line has set the logger up for itself."""
    logger = logging.getLogger("featviz")
    before = logger.propagate, logger.level
    logger.propagate = True
    logger.setLevel(logging.INFO)
    yield caplog
    logger.propagate, level = before
    logger.setLevel(level)


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


ENTRIES = [
    models.ResNet18_Weights.IMAGENET1K_V1,
    models.ResNet50_Weights.IMAGENET1K_V2,
    models.EfficientNet_B0_Weights.IMAGENET1K_V1,
    models.Inception_V3_Weights.IMAGENET1K_V1,
    models.ViT_B_16_Weights.IMAGENET1K_V1,
    models.ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1,
    models.segmentation.FCN_ResNet50_Weights.DEFAULT,
]


@pytest.mark.parametrize("size", [(300, 200), (97, 311), (640, 480)], ids=str)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_an_entry_prepares_as_its_own_transforms(entry: Any, size: tuple[int, int]) -> None:
    """The tensor equals weights.transforms() of the same picture, bit for bit."""
    image = noise(*size)
    ours = choose_preprocess(RGB, entry, InputOptions()).tensor(image)
    theirs = entry.transforms()(image)
    assert torch.equal(ours, theirs if theirs.ndim == 4 else theirs[None])


def test_a_grey_picture_becomes_rgb_for_an_rgb_model() -> None:
    """A grey picture gives three equal channels before they are normalised."""
    tensor = Preprocess(None, None, None, None).tensor(noise(5, 4, "L"))
    assert tensor.shape == (1, 3, 4, 5)
    assert torch.equal(tensor[:, 0], tensor[:, 1]) and torch.equal(tensor[:, 0], tensor[:, 2])


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"size": 64}, (64, 96)),
        ({"size": (50, 70)}, (50, 70)),
        ({"crop": 100}, (100, 100)),
        ({"crop": (60, 80)}, (60, 80)),
        ({"size": 64, "crop": 32}, (32, 32)),
        ({"size": (50, 70), "crop": (20, 30)}, (20, 30)),
    ],
)
def test_size_and_crop_override_the_entry(options: dict[str, Any], shape: tuple[int, int]) -> None:
    """--size alone drops the entry's crop; --crop alone keeps its size."""
    chosen = choose_preprocess(RGB, RESNET, InputOptions(**options))
    assert chosen.tensor(noise(300, 200)).shape == (1, 3, *shape)


def test_mean_and_std_override_the_entry() -> None:
    """--mean and --std replace the entry's numbers, and only those."""
    image = noise(300, 200)
    chosen = choose_preprocess(RGB, RESNET, InputOptions(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.5)))
    plain = RESNET.transforms(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.5))(image)[None]
    assert torch.equal(chosen.tensor(image), plain)


def test_mean_alone_keeps_the_entrys_std_and_the_other_way_round() -> None:
    """What is not said stays the entry's; without an entry it is 1 or 0."""
    mean = choose_preprocess(RGB, RESNET, InputOptions(mean=(0.1, 0.2, 0.3)))
    std = choose_preprocess(RGB, RESNET, InputOptions(std=(0.1, 0.2, 0.3)))
    assert (mean.mean, mean.std) == ((0.1, 0.2, 0.3), IMAGENET_STD)
    assert (std.mean, std.std) == (IMAGENET_MEAN, (0.1, 0.2, 0.3))
    grey = choose_preprocess(GREY, None, InputOptions(mean=(0.4,)))
    assert (grey.mean, grey.std) == ((0.4,), (1.0,))
    grey = choose_preprocess(GREY, None, InputOptions(std=(0.4,)))
    assert (grey.mean, grey.std) == ((0.0,), (0.4,))


@pytest.mark.parametrize("entry", [None, RESNET], ids=["no entry", "entry"])
def test_a_one_channel_model_sees_the_picture_in_grey_as_it_is(
    entry: Any, messages: pytest.LogCaptureFixture
) -> None:
    """Own size, values 0..1, no normalisation, and nothing to warn of."""
    image = noise(37, 23)
    chosen = choose_preprocess(GREY, entry, InputOptions())
    assert torch.equal(chosen.tensor(image), F.to_tensor(image.convert("L"))[None])
    assert chosen.own_size
    assert messages.text == ""


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_may_be_told(channels: int) -> None:
    """--channels wins over what the first convolution says."""
    chosen = choose_preprocess(nn.Conv2d(4, 2, 1), None, InputOptions(channels=channels))
    assert chosen.tensor(noise(300, 200)).shape[1] == channels


def test_an_unknown_model_gets_imagenets(messages: pytest.LogCaptureFixture) -> None:
    """The guess is ImageNet's 256, 224, mean and std, and knows that it is one."""
    chosen = choose_preprocess(RGB, None, InputOptions())
    assert chosen == Preprocess(256, 224, IMAGENET_MEAN, IMAGENET_STD)
    image = noise(300, 200)
    assert torch.equal(chosen.tensor(image), RESNET.transforms()(image)[None])
    assert chosen.guessed and messages.text == ""


def test_no_warning_where_nothing_is_guessed(messages: pytest.LogCaptureFixture) -> None:
    """Size, mean and std from the user leave no guess to warn of."""
    told = InputOptions(size=64, mean=(0.5,) * 3, std=(0.5,) * 3)
    known = [
        choose_preprocess(RGB, None, told),
        choose_preprocess(RGB, RESNET, InputOptions()),
        choose_preprocess(RGB, None, InputOptions(preset="imagenet")),
        choose_preprocess(nn.Conv2d(1, 2, 1), None, InputOptions()),
    ]
    assert not any(preprocess.guessed for preprocess in known)
    assert messages.text == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.5,)}, "--mean has 1 numbers for 3 channels"),
        ({"mean": (0.5,) * 4}, "--mean has 4 numbers for 3 channels"),
        ({"std": (0.5, 0.5)}, "--std has 2 numbers for 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, r"--std \[0\.5, 0, 0\.5\] divides by zero"),
        ({"mean": (0.5,) * 3, "channels": 1}, "--mean has 3 numbers for 1 channels"),
    ],
)
def test_means_and_deviations_must_fit(options: dict[str, Any], message: str) -> None:
    """A wrong number of values, or a zero deviation, is a usage error that names the option."""
    with pytest.raises(UsageError, match=message):
        choose_preprocess(RGB, RESNET, InputOptions(**options))


@pytest.mark.parametrize("channels", [2, 4, 12])
def test_a_model_of_other_channels_takes_what_the_file_has(channels: int) -> None:
    """Neither grey nor RGB: the image's own size, and no ImageNet statistics."""
    chosen = choose_preprocess(nn.Conv2d(channels, 2, 1), None, InputOptions())
    assert (chosen.channels, chosen.mean, chosen.own_size) == (channels, None, True)
    with pytest.raises(UsageError, match=f"is for RGB, .* takes {channels} channels"):
        choose_preprocess(nn.Conv2d(channels, 2, 1), None, InputOptions(preset="clip"))


@pytest.mark.parametrize(
    ("module", "channels"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Conv2d(1, 2, 1), nn.Conv2d(3, 1, 1)), 1),
        (nn.Sequential(nn.Conv2d(4, 4, 1, groups=4)), 4),
        (nn.Linear(3, 3), 3),
    ],
)
def test_the_first_convolution_says_how_many_channels(module: nn.Module, channels: int) -> None:
    """The first convolution in module order decides; without one it is 3."""
    assert first_channels(module) == channels


@pytest.mark.parametrize(
    ("preprocess", "words"),
    [
        (Preprocess(None, None, None, None), "RGB, values 0..1"),
        (Preprocess(None, None, None, None, channels=1), "greyscale, values 0..1"),
        (
            Preprocess(256, 224, IMAGENET_MEAN, IMAGENET_STD),
            "RGB, resize shorter side to 256 (bilinear), centre crop 224×224, "
            "normalise by mean [0.485, 0.456, 0.406] and std [0.229, 0.224, 0.225]",
        ),
        (
            Preprocess((20, 30), (10, 12), None, None, 3, "bicubic"),
            "RGB, resize to 20×30 (bicubic), centre crop 10×12, values 0..1",
        ),
    ],
)
def test_words_tell_every_step_in_order(preprocess: Preprocess, words: str) -> None:
    """The manifest's words name colour, resize, crop and normalisation."""
    assert preprocess.words == words


@pytest.mark.parametrize("options", [{}, {"mean": (0.1, 0.5, 0.9), "std": (0.3, 2.0, 0.05)}])
def test_undo_is_the_inverse_of_normalising(options: dict[str, Any]) -> None:
    """undo gives the resized and cropped picture in 0..1 back."""
    image = noise(300, 200)
    chosen = choose_preprocess(RGB, RESNET, InputOptions(**options))
    plain = Preprocess(chosen.resize, chosen.crop, None, None).tensor(image)
    tensor = chosen.tensor(image)
    before = tensor.clone()
    assert torch.allclose(chosen.shown([tensor]), plain, atol=1e-6)
    assert torch.equal(tensor, before)


def test_undo_without_normalisation_changes_nothing() -> None:
    """A grey input in 0..1 is what the model saw."""
    tensor = Preprocess(None, None, None, None, channels=1).tensor(noise(9, 7))
    assert torch.equal(Preprocess(None, None, None, None, 1).shown([tensor]), tensor)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_blank_has_the_shape_of_a_square_picture(entry: Any) -> None:
    """Zeros of the shape that a square picture gives, so probing sees what a run sees."""
    chosen = choose_preprocess(RGB, entry, InputOptions())
    blank = chosen.blank()[0]
    assert blank.shape == chosen.tensor(noise(600, 600)).shape
    assert not blank.any() and blank.dtype == torch.float32


@pytest.mark.parametrize(
    ("preprocess", "shape", "own"),
    [
        (Preprocess(None, None, None, None), (3, 224, 224), True),
        (Preprocess(64, None, None, None, channels=1), (1, 64, 64), True),
        (Preprocess((20, 30), None, None, None), (3, 20, 30), False),
        (Preprocess((20, 30), 10, None, None), (3, 10, 10), False),
        (Preprocess(None, (10, 12), None, None), (3, 10, 12), False),
    ],
)
def test_blank_and_own_size(preprocess: Preprocess, shape: tuple[int, ...], own: bool) -> None:
    """Where the picture decides the size, blank is 224 or the resized side."""
    assert preprocess.blank()[0].shape == (1, *shape)
    assert preprocess.own_size is own


def test_every_option_of_the_input_has_a_default() -> None:
    """InputOptions() is what a command line without options means."""
    assert all(
        getattr(InputOptions(), field.name) == field.default for field in fields(InputOptions)
    )
