"""From a picture to the model's input: bit for bit torchvision's, told and undone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image
from torch import Tensor, nn
from torchvision import models
from torchvision.models import ResNet18_Weights, ResNet50_Weights, vit_b_16
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as older
from torchvision.transforms.v2 import functional as oracle

from featviz.errors import FeatvizError, ImageError, UsageError
from featviz.models.preprocess import Chain
from featviz.models.presets import choose_preprocess
from featviz.models.sources import FixedInput
from featviz.options import INTERPOLATIONS, InputOptions
from featviz.records import PRESETS, Raster

RGB, GREY = nn.Conv2d(3, 2, 1), nn.Conv2d(1, 2, 1)
RESNET = models.ResNet18_Weights.IMAGENET1K_V1
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MEAN, STD = (0.1, 0.485, 0.9), (0.229, 3.0, 1e-3)

SIZES = [(40, 60), (7, 200), (37, 53)]
"""Smaller and larger than the picture, odd, in other proportions, and as it is."""
CROPS = [(20, 30), (21, 31), (60, 20), (61, 88)]
"""Inside, at half pixels, the whole, and larger than the picture on one side or both.
"""


def noise(width: int = 53, height: int = 37, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.mark.parametrize("name", INTERPOLATIONS)
@pytest.mark.parametrize("size", [*SIZES, 20, 90], ids=str)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_pictures_are_resized_as_by_torchvision(
    mode: str, size: Any, name: str
) -> None:
    """Pillow resizes for both; type, values and order in memory, which decides how
    torch adds."""
    given, both = noise(mode=mode), [size] if isinstance(size, int) else list(size)
    expected = oracle.resize(given, both, InterpolationMode(name))
    chain = Chain(size, channels=len(given.getbands()), interpolation=name)
    got, values = chain(given)[0], older.to_tensor(expected)
    assert torch.equal(got, values) and f"({name})" in chain.steps[0]
    assert got.stride() == older.pil_to_tensor(expected).stride()


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("name", [name for name in INTERPOLATIONS if name != "lanczos"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("channels", [3, 4])
def test_arrays_are_resized_as_by_torchvision(
    channels: int, size: tuple[int, int], name: str, smooth: bool
) -> None:
    """Floats as both versions resize them; without smoothing, pictures as the older
    resizes bytes."""
    values, mode = torch.randn(channels, 37, 53), InterpolationMode(name)
    chain = Chain(size, channels=channels, interpolation=name, antialias=smooth)
    expected = oracle.resize_image(values, list(size), mode, antialias=smooth)
    assert torch.equal(chain(Raster(values.numpy(), ""))[0], expected)
    if not smooth and channels == 3:
        levels = older.resize(
            older.pil_to_tensor(noise()), list(size), mode, antialias=False
        )
        assert torch.equal(chain(noise())[0], levels / 255)


@pytest.mark.parametrize("size", CROPS, ids=str)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_crops_are_torchvisions(mode: str, size: tuple[int, int]) -> None:
    """The same pixels, and zeros around a picture that is smaller than the crop, for
    pictures and for arrays."""
    given = noise(mode=mode)
    chain, values = Chain(crop=size), older.to_tensor(given)
    expected = older.to_tensor(oracle.center_crop(given, list(size)))
    assert torch.equal(chain(given)[0], expected)
    assert torch.equal(chain(Raster(values.numpy(), ""))[0], expected)


def test_numbers_are_torchvisions() -> None:
    """0..1, then normalised: type, values and order in memory; blue first, and sides
    cropped to multiples, where a model wants it."""
    got = Chain(mean=MEAN, std=STD)(noise())[0]
    scaled = older.convert_image_dtype(older.pil_to_tensor(noise()), torch.float32)
    expected = oracle.normalize(scaled, MEAN, STD)
    assert torch.equal(got, expected) and got.stride() == expected.stride()
    assert torch.equal(Chain(bgr=True)(noise())[0], scaled.flip(0))
    assert torch.equal(
        Chain(multiple=8)(noise())[0], oracle.center_crop(scaled, [32, 48])
    )


def test_an_image_may_not_become_huge() -> None:
    """One so narrow is refused that its shorter side, enlarged, would make it so."""
    with pytest.raises(ImageError, match=r"1×90000 pixels.*would become 4,515,840,000"):
        Chain(224)(Image.new("RGB", (1, 90000)))


ENTRIES = [
    RESNET,
    models.EfficientNet_B0_Weights.IMAGENET1K_V1,
    models.Inception_V3_Weights.IMAGENET1K_V1,
    models.ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1,
    models.segmentation.FCN_ResNet50_Weights.DEFAULT,
]


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_an_entry_prepares_as_its_own_transforms(entry: Any) -> None:
    """The tensor equals weights.transforms() of the same picture, bit for bit; zeros
    before there is a picture have the shape of a square one's."""
    chosen = choose_preprocess(RGB, entry, InputOptions())
    for size in ((300, 200), (97, 311)):
        theirs = entry.transforms()(noise(*size))
        assert torch.equal(
            chosen.tensor(noise(*size)), theirs.reshape(1, *theirs.shape[-3:])
        )
    (blank,) = chosen.blank()
    assert blank.shape == chosen.tensor(noise(600, 600)).shape
    assert not blank.any() and blank.dtype == torch.float32


def test_a_clip_is_prepared_as_by_its_entry() -> None:
    """The frames of a clip equal weights.transforms() of them, bit for bit; lanczos is
    refused."""
    entry, module = models.video.R3D_18_Weights.DEFAULT, nn.Conv3d(3, 2, 1)
    frames = [noise(300, 200).rotate(n) for n in range(3)]
    (ours,) = choose_preprocess(module, entry, InputOptions())(frames)
    clip = torch.stack([older.pil_to_tensor(frame) for frame in frames])
    assert torch.equal(ours[0], entry.transforms()(clip))
    with pytest.raises(UsageError, match="--interpolation lanczos smooths"):
        choose_preprocess(module, entry, InputOptions(interpolation="lanczos"))


@pytest.mark.parametrize(
    ("module", "entry", "options", "mean", "std"),
    [
        (RGB, RESNET, {"mean": MEAN, "std": STD}, MEAN, STD),
        (RGB, RESNET, {"std": STD}, IMAGENET[0], STD),
        (GREY, None, {"mean": (0.4,)}, (0.4,), (1.0,)),
        (GREY, None, {"std": (0.4,)}, (0.0,), (0.4,)),
    ],
)
def test_mean_and_std_override_the_entry(
    module: nn.Module, entry: Any, options: dict[str, Any], mean: Any, std: Any
) -> None:
    """What is not said stays the entry's; without an entry it is 0 or 1."""
    chosen = choose_preprocess(module, entry, InputOptions(**options))
    assert (chosen.chain.mean, chosen.chain.std) == (mean, std)
    if entry is not None:
        theirs = entry.transforms(mean=mean, std=std)(noise(300, 200))[None]
        assert torch.equal(chosen.tensor(noise(300, 200)), theirs)


@pytest.mark.parametrize("entry", [None, RESNET], ids=["no entry", "entry"])
def test_colours_become_what_the_model_takes(entry: Any) -> None:
    """A model of one channel sees the picture in grey as it is, with nothing to warn
    of; one of RGB a grey picture in three equal channels; --input-channels wins over
    the first convolution."""
    chosen = choose_preprocess(GREY, entry, InputOptions())
    assert torch.equal(chosen.tensor(noise()), older.to_tensor(noise(mode="L"))[None])
    assert chosen.chain.own_size and not chosen.guessed
    grey = noise(mode="L")
    tensor = choose_preprocess(RGB, Chain(), InputOptions()).tensor(grey)
    assert torch.equal(tensor, older.to_tensor(grey).expand(1, 3, -1, -1))
    for channels in (1, 3):
        told = choose_preprocess(
            nn.Conv2d(4, 2, 1), entry, InputOptions(input_channels=channels)
        )
        assert told.tensor(noise()).shape[1] == channels


def test_an_unknown_model_gets_imagenets() -> None:
    """The guess is ImageNet's 256, 224, mean and std, and knows that it is one; size,
    mean and std from the user, weights or a preset leave none."""
    chosen = choose_preprocess(RGB, None, InputOptions())
    assert chosen.chain == Chain(256, 224, *IMAGENET) and chosen.guessed
    told = InputOptions(size=64, mean=(0.5,) * 3, std=(0.5,) * 3)
    preset = InputOptions(preset="imagenet")
    for entry, options in ((None, told), (RESNET, InputOptions()), (None, preset)):
        assert not choose_preprocess(RGB, entry, options).guessed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.5,)}, "--mean has 1 numbers for 3 channels"),
        ({"std": (0.5, 0.5)}, "--std has 2 numbers for 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, r"--std \[0\.5, 0, 0\.5\] divides by zero"),
        (
            {"mean": (0.5,) * 3, "input_channels": 1},
            "--mean has 3 numbers for 1 channels",
        ),
    ],
)
def test_means_and_deviations_must_fit(options: dict[str, Any], message: str) -> None:
    """A wrong number of values, or a zero deviation, is a usage error that names the
    option, or the model's file, which has it."""
    with pytest.raises(UsageError, match=message):
        choose_preprocess(RGB, RESNET, InputOptions(**options))
    with pytest.raises(
        UsageError, match=r"^the std of the model's own preprocessing, \[0, 1, 1\]"
    ):
        choose_preprocess(RGB, Chain(mean=MEAN, std=(0, 1, 1)), InputOptions())


@pytest.mark.parametrize("channels", [1, 12])
@pytest.mark.parametrize("preset", ["clip"])
def test_a_model_of_other_channels_takes_what_the_file_has(
    channels: int, preset: str
) -> None:
    """Not RGB: the image's own size, and no statistics of RGB, which a preset has."""
    module, counted = nn.Conv2d(channels, 2, 1), "channel" + "s" * (channels > 1)
    chain = choose_preprocess(module, None, InputOptions()).chain
    assert (chain.channels, chain.mean, chain.own_size) == (channels, None, True)
    message = f"--preset {preset} is for RGB, .* takes {channels} {counted}"
    with pytest.raises(UsageError, match=message):
        choose_preprocess(module, None, InputOptions(preset=preset))


@pytest.mark.parametrize("options", [{}, {"mean": MEAN, "std": (0.3, 2.0, 0.05)}])
def test_undo_is_the_inverse_of_normalising(options: dict[str, Any]) -> None:
    """undo gives the resized and cropped picture in 0..1 back."""
    chosen = choose_preprocess(RGB, RESNET, InputOptions(**options))
    tensor = chosen.tensor(noise(300, 200))
    before = tensor.clone()
    assert torch.allclose(
        chosen.shown([tensor]), Chain(256, 224)(noise(300, 200)), atol=1e-6
    )
    assert torch.equal(tensor, before)


def theirs(name: str, image: Image.Image) -> Tensor:
    """The input as the library prepares it that the preset is taken from: [3, H, W]."""
    if name == "imagenet":
        return ResNet18_Weights.IMAGENET1K_V1.transforms()(image)
    timm = pytest.importorskip("timm.data")
    if name == "inception":
        config = {
            "input_size": (3, 299, 299),
            "crop_pct": 0.875,
            "interpolation": "bicubic",
        }
        statistics = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
        return timm.create_transform(**config, **statistics)(image)
    steps = [
        v2.Resize(224, v2.InterpolationMode.BICUBIC),
        v2.CenterCrop(224),
        v2.ToTensor(),
    ]
    return v2.Compose(
        [*steps, v2.Normalize(timm.OPENAI_CLIP_MEAN, timm.OPENAI_CLIP_STD)]
    )(image)


@pytest.mark.filterwarnings("ignore:The transform `ToTensor")
@pytest.mark.parametrize("name", ["imagenet", "clip", "inception"])
@pytest.mark.parametrize("size", [(300, 180)])
def test_a_preset_is_its_librarys_preprocessing(
    name: str, size: tuple[int, int]
) -> None:
    """Pixel for pixel, also for a model whose weights say otherwise."""
    image = noise(*size)
    entry = ResNet50_Weights.IMAGENET1K_V2
    ours = choose_preprocess(RGB, entry, InputOptions(preset=name)).tensor(image)
    torch.testing.assert_close(ours[0], theirs(name, image), atol=1e-6, rtol=0)


def test_yolo_is_the_letterbox_of_ultralytics() -> None:
    """For a model of any class, to multiples of 32. An exported program of 96 × 96 gets
    the whole square; one of another shape is refused."""
    pytest.importorskip("ultralytics", exc_type=ImportError)
    options = InputOptions(preset="yolo")
    chosen = choose_preprocess(RGB, ResNet18_Weights.DEFAULT, options)
    assert chosen.chain == Chain(640, stride=32) and not chosen.guessed
    chosen = choose_preprocess(RGB, None, options, FixedInput(3, (96, 96)))
    values = chosen.tensor(Image.new("RGB", (60, 20), "white"))
    assert values.shape == (1, 3, 96, 96) and chosen.blank()[0].shape == values.shape
    grey = [114 / 255] * 32
    torch.testing.assert_close(
        values[0, 0, :, 5], torch.tensor([*grey, *[1] * 32, *grey])
    )
    with pytest.raises(UsageError, match="pads to squares, and the model takes 96×64"):
        choose_preprocess(RGB, None, options, FixedInput(3, (96, 64)))


def test_yolo_without_ultralytics_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line with the command that installs it."""
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "ultralytics"
    ]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "ultralytics", None)
    with pytest.raises(FeatvizError, match="Ultralytics cannot be imported") as caught:
        choose_preprocess(RGB, None, InputOptions(preset="yolo"))
    assert "pip install ultralytics" in str(caught.value.hint)


def test_other_options_and_a_model_of_one_size_change_a_preset() -> None:
    """--size, --mean and --std win over it; of an exported program and of a vision
    transformer the size is the model's."""
    options = InputOptions(preset="clip", size=(10, 12), mean=(0.5,) * 3)
    chosen = choose_preprocess(RGB, None, options)
    assert chosen.chain == Chain(
        (10, 12), None, (0.5,) * 3, PRESETS["clip"].std, 3, "bicubic"
    )
    options = InputOptions(preset="clip")
    fixed = choose_preprocess(RGB, None, options, FixedInput(3, (64, 64)))
    assert fixed.chain.steps[:2] == (
        "resize shorter side to 73 (bicubic)",
        "centre crop 64×64",
    )
    with torch.device("meta"):
        transformer = vit_b_16(image_size=96)
    assert choose_preprocess(transformer, None, options).blank()[0].shape == (
        1,
        3,
        96,
        96,
    )


def test_the_guess_is_said_once_and_only_where_images_are_used(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path
) -> None:
    """`run`, its --dry-run and `audit` say it once; `layers` does not."""
    model, out = tiny_file, tmp_path / "out"
    others = "clip, inception, yolo, none"
    said = f"warning: preprocessing is a guess, --preset imagenet (others: {others}; "
    assert "preprocessing is a guess" not in featviz("layers", model).err
    for words in (("run",), ("run", "--dry-run"), ("audit",)):
        outcome = featviz(
            *words, model, picture, "--out", out / str(len(words)) / words[0]
        )
        assert outcome.err.count(said) == 1 and outcome.err.count("a guess") == 1, (
            outcome.err
        )
    outcome = featviz(
        "run", model, picture, "--out", tmp_path / "x", "--preset", "clip"
    )
    assert "a guess" not in outcome.err
    manifest = json.loads((tmp_path / "x" / picture.name / "manifest.json").read_text())
    words = (
        "RGB, resize shorter side to 224 (bicubic), centre crop 224×224, normalise by"
        " mean "
    )
    assert manifest["input"]["preprocessing"].startswith(f"{words}[0.481455,")
