"""From a picture to the model's input: bit for bit torchvision's, told and undone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image
from tiles import manifest
from torch import Tensor, nn
from torchvision import models
from torchvision.models import ResNet18_Weights, ResNet50_Weights, vit_b_16
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as older
from torchvision.transforms.v2 import functional as oracle

from featviz.errors import FeatvizError, ImageError, UsageError
from featviz.models.preprocess import Chain, Preprocess
from featviz.models.presets import (
    choose_preprocess,
    first_features,
    first_layer,
    image_size,
)
from featviz.models.sources import ANY_INPUT, FixedInput
from featviz.options import INTERPOLATIONS, InputOptions
from featviz.records import PRESETS, Raster

RGB = nn.Conv2d(3, 2, 1)
GREY = nn.Conv2d(1, 2, 1)
RESNET = models.ResNet18_Weights.IMAGENET1K_V1
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MEAN = (0.1, 0.485, 0.9)
STD = (0.229, 3.0, 1e-3)

SIZES = [(40, 60), (7, 200), (37, 53)]
"""Smaller and larger than the picture, odd, in other proportions, and as it is."""
CROPS = [(20, 30), (21, 31), (60, 20), (61, 88)]
"""Inside, at half pixels, the whole, and larger than the picture on one side or both.
"""


def noise(width: int = 53, height: int = 37, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def prepare(
    module: nn.Module, entry: Any = None, fixed: FixedInput = ANY_INPUT, **options: Any
) -> Preprocess:
    """How images become the input of a module with these weights, or others."""
    return choose_preprocess(module, entry, InputOptions(**options), fixed)


@pytest.mark.parametrize("name", INTERPOLATIONS)
@pytest.mark.parametrize("size", [*SIZES, 20, 90], ids=str)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_pictures_are_resized_as_by_torchvision(
    mode: str, size: Any, name: str
) -> None:
    """Pillow resizes for both; type, values and order in memory, which decides how
    torch adds."""
    picture = noise(mode=mode)
    expected = oracle.resize(picture, size, InterpolationMode(name))
    chain = Chain(size, channels=len(mode), interpolation=name)
    (tensor,) = chain(picture)
    assert torch.equal(tensor, older.to_tensor(expected))
    assert tensor.stride() == older.pil_to_tensor(expected).stride()
    assert f"({name})" in chain.steps[0]


BY_TORCH = [name for name in INTERPOLATIONS if name != "lanczos"]


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("name", BY_TORCH)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("channels", [3, 4])
def test_arrays_are_resized_as_by_torchvision(
    channels: int, size: tuple[int, int], name: str, smooth: bool
) -> None:
    """Floats as both versions resize them."""
    values = torch.randn(channels, 37, 53)
    mode = InterpolationMode(name)
    chain = Chain(size, channels=channels, interpolation=name, antialias=smooth)
    expected = oracle.resize_image(values, list(size), mode, antialias=smooth)
    assert torch.equal(chain(Raster(values.numpy(), ""))[0], expected)


@pytest.mark.parametrize("name", BY_TORCH)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_without_smoothing_pictures_are_bytes(size: tuple[int, int], name: str) -> None:
    """As the older version of torchvision resizes them."""
    chain = Chain(size, interpolation=name, antialias=False)
    pixels = older.pil_to_tensor(noise())
    mode = InterpolationMode(name)
    expected = older.resize(pixels, list(size), mode, antialias=False)
    assert torch.equal(chain(noise())[0], expected / 255)


@pytest.mark.parametrize("size", CROPS, ids=str)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_crops_are_torchvisions(mode: str, size: tuple[int, int]) -> None:
    """The same pixels, and zeros around a picture that is smaller than the crop, for
    pictures and for arrays."""
    picture = noise(mode=mode)
    chain = Chain(crop=size)
    values = older.to_tensor(picture)
    expected = older.to_tensor(oracle.center_crop(picture, list(size)))
    assert torch.equal(chain(picture)[0], expected)
    assert torch.equal(chain(Raster(values.numpy(), ""))[0], expected)


SCALED = older.to_tensor(noise())
"""The picture, 0..1."""


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        (Chain(mean=MEAN, std=STD), oracle.normalize(SCALED, MEAN, STD)),
        (Chain(bgr=True), SCALED.flip(0)),
        (Chain(multiple=8), oracle.center_crop(SCALED, [32, 48])),
    ],
    ids=["normalised", "blue first", "cropped to multiples"],
)
def test_numbers_are_torchvisions(chain: Chain, expected: Tensor) -> None:
    """0..1, then normalised, blue first, or cropped, where a model wants it."""
    assert torch.equal(chain(noise())[0], expected)


def test_memory_is_torchvisions() -> None:
    """The order of values decides how torch adds them."""
    scaled = older.convert_image_dtype(older.pil_to_tensor(noise()), torch.float32)
    expected = oracle.normalize(scaled, MEAN, STD)
    assert Chain(mean=MEAN, std=STD)(noise())[0].stride() == expected.stride()


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"image_size": 384}, (384, 384)),
        ({"image_size": [224, 320]}, (224, 320)),
        ({"vision_config": {"image_size": 336}, "image_size": 1}, (336, 336)),
        ({"image_size": 384, "backbone_config": {"image_size": 224}}, (384, 384)),
        ({"backbone_config": {"image_size": 518}}, (518, 518)),
        ({"backbone_config": {"depths": [3]}}, None),
        ({"image_size": 224, "backbone_config": {"depths": [3]}}, (224, 224)),
        ({"image_size": 0}, None),
        ({"image_size": [224]}, None),
        ({"image_size": 4097}, None),
        ({"image_size": True}, None),
    ],
)
def test_the_size_that_a_config_of_transformers_says(
    config: dict[str, Any], size: tuple[int, int] | None
) -> None:
    """One number is both sides; that of the backbone counts where there is no other."""
    assert image_size(config) == size


def test_an_image_may_not_become_huge() -> None:
    """One so narrow is refused that its shorter side, enlarged, would make it so."""
    with pytest.raises(ImageError, match=r"1×90000 pixels.*would become 4,515,840,000"):
        Chain(224)(Image.new("RGB", (1, 90000)))


def test_a_large_square_and_an_image_that_stays_are_taken() -> None:
    """Whatever their pixels are: a square has as many as were asked for."""
    limit = 5793  # its square is above 2 ** 25
    square = (limit, limit)
    assert Chain(limit).window_in_input(square, square) == (0, 0, limit, limit)
    assert Chain(4096).window_in_input((8192, 4096), (4096, 8192)) == (0, 0, 4096, 8192)
    assert Chain(5000).window_in_input((8000, 5000), (5000, 8000)) == (0, 0, 5000, 8000)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # what resizing may make of a picture is clipped
        ([-0.5, 0.0, 0.25, 1.5], [0.0, 0.0, 0.25, 1.0]),
        # what it does not is stretched
        ([-1.0, 0.0, 2.0, 3.0], [0.0, 0.25, 0.75, 1.0]),
        ([0.0, 1.0, 2.0, 2.0], [0.0, 0.5, 1.0, 1.0]),
    ],
)
def test_inputs_are_shown_as_pictures_where_they_are(
    values: list[float], expected: list[float]
) -> None:
    """Values near 0..1 are clipped, others go from their least to their largest."""
    (shown,) = prepare(GREY, preset="none").pictures([torch.tensor([[[values]]])])
    assert shown.flatten().tolist() == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (InputOptions(size=96), Chain(96, stride=32)),
        (InputOptions(size=(48, 96)), Chain((48, 96))),
        (InputOptions(crop=48), Chain(crop=48)),
        (InputOptions(size=96, crop=(48, 32)), Chain(96, crop=(48, 32))),
        (
            InputOptions(std=(2, 2, 2)),
            Chain(64, stride=32, mean=(0, 0, 0), std=(2,) * 3),
        ),
    ],
)
def test_a_letterbox_is_left_where_another_size_is_wanted(
    options: InputOptions, expected: Chain
) -> None:
    """It makes sizes of its own."""
    assert choose_preprocess(RGB, Chain(64, stride=32), options).chain == expected


@pytest.mark.parametrize(
    ("size", "cropped"), [((20, 5), (8, 16)), ((16, 31), (24, 16)), ((1, 1), (8, 8))]
)
def test_a_crop_to_multiples_leaves_one_at_least(
    size: tuple[int, int], cropped: tuple[int, int]
) -> None:
    """Around a smaller image there is black."""
    image = Image.new("RGB", size, "white")
    values = Chain(multiple=8)(image)
    assert values.shape[2:] == cropped
    assert int(values[0, 0].sum()) == min(size[0], cropped[1]) * min(
        size[1], cropped[0]
    )


@pytest.mark.parametrize(
    ("size", "resize", "crop"),
    [
        ((224, 224), 256, 224),
        ((299, 299), 342, 299),
        ((48, 64), (48, 64), None),
    ],
)
def test_a_preset_makes_the_size_that_the_model_takes(
    size: tuple[int, int], resize: Any, crop: int | None
) -> None:
    """Seven eighths of the shorter side are left of a square, as at 224."""
    fixed = FixedInput(3, size)
    chain = choose_preprocess(RGB, None, InputOptions(preset="imagenet"), fixed).chain
    assert (chain.resize, chain.crop) == (resize, crop)


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        (Chain(channels=1), "greyscale"),
        (Chain(bgr=True), "BGR"),
        (Chain(channels=2), "2 channels (the first is shown)"),
        (Chain(channels=5), "5 channels (the first three are shown)"),
    ],
)
def test_words_for_the_channels(chain: Chain, words: str) -> None:
    """They say which of many are shown."""
    assert Preprocess(chain).words_for() == f"{words}, values 0..1"


def test_a_librarys_own_function_fills_the_input() -> None:
    """Where it crops nobody knows."""
    chain = Chain(library=lambda image: torch.zeros(1, 3, 30, 40))
    assert chain.window_in_input((10, 20), (30, 40)) == (0, 0, 30, 40)


def with_channels(count: Any) -> nn.Module:
    """A convolution of which a file says this."""
    module = nn.Conv2d(3, 2, 1)
    module.in_channels = count
    return module


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Sequential(nn.ReLU(), nn.Conv2d(5, 2, 1), nn.Conv2d(2, 7, 1)), (5, False)),
        (nn.Conv1d(2, 2, 1), (2, False)),
        (nn.Sequential(nn.Conv3d(2, 2, 1), nn.Conv2d(5, 2, 1)), (2, True)),
        (nn.LazyConv3d(2, 1), (3, True)),
        (nn.LazyConv2d(2, 1), (3, False)),
        (with_channels(512), (512, False)),
        (with_channels(513), (3, False)),
        (with_channels(True), (3, False)),
        (with_channels("4"), (3, False)),
        (nn.Linear(4, 2), (3, False)),
    ],
)
def test_the_first_convolution_says_what_is_taken(
    module: nn.Module, expected: tuple[int, bool]
) -> None:
    """Channels, and whether clips; where it says nothing that can be believed, RGB."""
    assert first_layer(module) == expected


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Sequential(nn.ReLU(), nn.Linear(4, 2), nn.Conv2d(3, 2, 1)), 4),
        (nn.Sequential(nn.Conv2d(3, 2, 1), nn.Linear(4, 2)), None),
        (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), None),
        (nn.LazyLinear(2), None),
        (nn.ReLU(), None),
    ],
)
def test_a_linear_layer_that_is_first_takes_a_vector(
    module: nn.Module, expected: int | None
) -> None:
    """Of as many numbers as it has inputs."""
    assert first_features(module) == expected


def test_an_optical_flow_takes_multiples_of_eight() -> None:
    """As torchvision's RAFT does, which refuses other sizes."""
    raft = type("RAFT", (nn.Conv2d,), {})(3, 2, 1)
    chain = choose_preprocess(raft, None, InputOptions()).chain
    assert (chain.mean, chain.std) == ((0.5,) * 3, (0.5,) * 3)
    assert chain(Image.new("RGB", (31, 18))).shape == (1, 3, 16, 24)


def test_inputs_of_other_sizes_stand_side_by_side() -> None:
    """Below the lower ones it is black."""
    low = torch.rand(1, 3, 4, 5)
    high = torch.rand(1, 3, 7, 2)
    shown = prepare(RGB, preset="none").shown([low, high, low])
    assert torch.equal(shown[..., 5:7], high)
    for left in (0, 7):
        assert torch.equal(shown[..., :4, left : left + 5], low)
        assert not shown[..., 4:, left : left + 5].any()


@pytest.mark.parametrize(
    ("shape", "rows", "numbers"),
    [((1, 6), 1, 6), ((1, 2, 3), 2, 3), ((1, 6, 1, 1), 1, 6)],
    ids=str,
)
def test_inputs_that_are_no_pictures_are_shown_as_rows(
    shape: tuple[int, ...], rows: int, numbers: int
) -> None:
    """A row for each row of the input, of which a single one is drawn thick."""
    values = torch.arange(6.0).reshape(shape)
    (shown,) = prepare(GREY, preset="none").pictures([values])
    height = shown.shape[2]
    assert shown.shape[3] == numbers
    assert height == rows if rows > 1 else height > 1
    assert shown[0, 0, 0].tolist() == (values.flatten()[:numbers] / 5).tolist()


def test_of_two_channels_the_first_is_shown() -> None:
    """Of four the first three are, as the words say."""
    for count, shown in ((2, 1), (4, 3)):
        chosen = prepare(nn.Conv2d(count, 2, 1), preset="none")
        values = torch.rand(1, count, 3, 4)
        (picture,) = chosen.pictures([values])
        first = values[:, :shown]
        assert torch.equal(picture, (first - first.min()) / (first.max() - first.min()))


@pytest.mark.parametrize(("size", "resize"), [(224, 256), (384, 384)])
def test_a_vision_transformer_of_the_entrys_size_is_resized_as_the_entry_says(
    size: int, resize: int
) -> None:
    """One of another size takes no other, and nothing is cut off."""
    module = nn.Conv2d(3, 2, 1)
    module.image_size = size
    chain = prepare(module, Chain(256, 224)).chain
    assert (chain.resize, chain.crop) == (resize, size)


ENTRIES = [
    RESNET,
    models.EfficientNet_B0_Weights.IMAGENET1K_V1,
    models.Inception_V3_Weights.IMAGENET1K_V1,
    models.ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1,
    models.segmentation.FCN_ResNet50_Weights.DEFAULT,
]


@pytest.mark.parametrize("size", [(300, 200), (97, 311)], ids=str)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_an_entry_prepares_as_its_own_transforms(
    entry: Any, size: tuple[int, int]
) -> None:
    """The tensor equals weights.transforms() of the same picture, bit for bit."""
    chosen = prepare(RGB, entry)
    theirs = entry.transforms()(noise(*size))
    assert torch.equal(chosen.tensor(noise(*size)), theirs.view(1, *theirs.shape[-3:]))


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_zeros_have_the_shape_of_a_square_picture(entry: Any) -> None:
    """They are there before there is a picture."""
    chosen = prepare(RGB, entry)
    (blank,) = chosen.blank()
    assert blank.shape == chosen.tensor(noise(600, 600)).shape
    assert blank.dtype == torch.float32
    assert not blank.any()


CLIP = models.video.R3D_18_Weights.DEFAULT


def test_a_clip_is_prepared_as_by_its_entry() -> None:
    """The frames of a clip equal weights.transforms() of them, bit for bit."""
    frames = [noise(300, 200).rotate(n) for n in range(3)]
    (ours,) = prepare(nn.Conv3d(3, 2, 1), CLIP)(frames)
    theirs = torch.stack([older.pil_to_tensor(frame) for frame in frames])
    assert torch.equal(ours[0], CLIP.transforms()(theirs))


def test_a_clip_is_not_resized_by_lanczos() -> None:
    """Torch, which resizes frames, lacks it."""
    with pytest.raises(UsageError, match="--interpolation lanczos smooths"):
        prepare(nn.Conv3d(3, 2, 1), CLIP, interpolation="lanczos")


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
    chosen = prepare(module, entry, **options)
    assert (chosen.chain.mean, chosen.chain.std) == (mean, std)
    if entry is not None:
        theirs = entry.transforms(mean=mean, std=std)(noise(300, 200))[None]
        assert torch.equal(chosen.tensor(noise(300, 200)), theirs)


ENTRY_OR_NONE = pytest.mark.parametrize(
    "entry", [None, RESNET], ids=["no entry", "entry"]
)


@ENTRY_OR_NONE
def test_a_model_of_one_channel_sees_grey(entry: Any) -> None:
    """The picture as it is."""
    chosen = prepare(GREY, entry)
    assert torch.equal(chosen.tensor(noise()), older.to_tensor(noise(mode="L"))[None])
    assert chosen.chain.own_size


@pytest.mark.parametrize(
    ("options", "guessed"),
    [
        ({}, "none"),
        ({"size": 28, "mean": (0.1,)}, "none"),
        ({"mean": (0.1,), "std": (0.3,)}, None),
        ({"preset": "none"}, None),
    ],
    ids=["nothing", "mean", "mean and std", "preset"],
)
def test_the_values_of_a_grey_model_are_a_guess(
    options: dict[str, Any], guessed: str | None
) -> None:
    """Unless the user gives mean and std, or a preset."""
    assert prepare(GREY, **options).guessed == guessed


def test_a_grey_picture_has_three_equal_channels() -> None:
    """For a model of RGB."""
    grey = noise(mode="L")
    tensor = prepare(RGB, Chain()).tensor(grey)
    assert torch.equal(tensor, older.to_tensor(grey).expand(1, 3, -1, -1))


@ENTRY_OR_NONE
@pytest.mark.parametrize("channels", [1, 3])
def test_input_channels_win_over_the_first_convolution(
    channels: int, entry: Any
) -> None:
    """--input-channels is the user's word."""
    chosen = prepare(nn.Conv2d(4, 2, 1), entry, input_channels=channels)
    assert chosen.tensor(noise()).shape[1] == channels


def test_an_unknown_model_gets_imagenets() -> None:
    """The guess is ImageNet's 256, 224, mean and std, and knows that it is one."""
    chosen = prepare(RGB)
    assert chosen.chain == Chain(256, 224, *IMAGENET)
    assert chosen.guessed == "imagenet"


@pytest.mark.parametrize(
    ("entry", "options"),
    [
        (None, {"size": 64, "mean": (0.5,) * 3, "std": (0.5,) * 3}),
        (RESNET, {}),
        (None, {"preset": "imagenet"}),
    ],
    ids=["options", "weights", "preset"],
)
def test_what_is_known_is_no_guess(entry: Any, options: dict[str, Any]) -> None:
    """Size, mean and std from the user, weights or a preset leave none."""
    assert not prepare(RGB, entry, **options).guessed


def test_the_size_of_an_exported_program_is_no_guess() -> None:
    """It is in the file, other than mean and std."""
    chosen = prepare(RGB, fixed=FixedInput(3, (64, 64)))
    assert chosen.guessed == "imagenet"
    assert not chosen.size_guessed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.5,)}, "--mean has 1 number for 3 channels"),
        ({"std": (0.5, 0.5)}, "--std has 2 numbers for 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, r"--std \[0\.5, 0, 0\.5\] divides by zero"),
        (
            {"mean": (0.5,) * 3, "input_channels": 1},
            "--mean has 3 numbers for 1 channel",
        ),
    ],
)
def test_means_and_deviations_must_fit(options: dict[str, Any], message: str) -> None:
    """A wrong number of values, or a zero deviation, is a usage error that names the
    option."""
    with pytest.raises(UsageError, match=message):
        prepare(RGB, RESNET, **options)


def test_a_deviation_of_zero_in_a_models_file() -> None:
    """The error names the file's preprocessing, which has it."""
    message = r"^the std of the model's own preprocessing, \[0, 1, 1\]"
    with pytest.raises(UsageError, match=message):
        prepare(RGB, Chain(mean=MEAN, std=(0, 1, 1)))


@pytest.mark.parametrize(
    ("channels", "counted"), [(1, "1 channel"), (12, "12 channels")]
)
def test_a_model_of_other_channels_takes_what_the_file_has(
    channels: int, counted: str
) -> None:
    """Not RGB: the image's own size, and no statistics of RGB, which a preset has."""
    module = nn.Conv2d(channels, 2, 1)
    chain = prepare(module).chain
    assert chain.channels == channels
    assert chain.mean is None
    assert chain.own_size
    with pytest.raises(
        UsageError, match=f"--preset clip is for RGB, .* takes {counted}"
    ):
        prepare(module, preset="clip")


@pytest.mark.parametrize("options", [{}, {"mean": MEAN, "std": (0.3, 2.0, 0.05)}])
def test_undo_is_the_inverse_of_normalising(options: dict[str, Any]) -> None:
    """undo gives the resized and cropped picture in 0..1 back."""
    chosen = prepare(RGB, RESNET, **options)
    tensor = chosen.tensor(noise(300, 200))
    before = tensor.clone()
    expected = Chain(256, 224)(noise(300, 200))
    torch.testing.assert_close(chosen.shown([tensor]), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(tensor, before)


def imagenets(image: Image.Image) -> Tensor:
    return RESNET.transforms()(image)


def inceptions(image: Image.Image) -> Tensor:
    timm = pytest.importorskip("timm.data")
    return timm.create_transform(
        input_size=(3, 299, 299),
        crop_pct=0.875,
        interpolation="bicubic",
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )(image)


def clips(image: Image.Image) -> Tensor:
    timm = pytest.importorskip("timm.data")
    return v2.Compose(
        [
            v2.Resize(224, v2.InterpolationMode.BICUBIC),
            v2.CenterCrop(224),
            v2.ToTensor(),
            v2.Normalize(timm.OPENAI_CLIP_MEAN, timm.OPENAI_CLIP_STD),
        ]
    )(image)


@pytest.mark.filterwarnings("ignore:The transform `ToTensor")
@pytest.mark.parametrize(
    ("name", "theirs"),
    [("imagenet", imagenets), ("clip", clips), ("inception", inceptions)],
)
def test_a_preset_is_its_librarys_preprocessing(
    name: str, theirs: Callable[[Image.Image], Tensor]
) -> None:
    """Pixel for pixel, also for a model whose weights say otherwise."""
    image = noise(300, 180)
    entry = ResNet50_Weights.IMAGENET1K_V2
    ours = prepare(RGB, entry, preset=name).tensor(image)
    torch.testing.assert_close(ours[0], theirs(image), atol=1e-6, rtol=0)


def test_yolo_is_the_letterbox_of_ultralytics() -> None:
    """For a model of any class, to multiples of 32."""
    pytest.importorskip("ultralytics", exc_type=ImportError)
    chosen = prepare(RGB, ResNet18_Weights.DEFAULT, preset="yolo")
    assert chosen.chain == Chain(640, stride=32)
    assert not chosen.guessed


def test_yolo_pads_to_the_square_of_an_exported_program() -> None:
    """Of 96 × 96, with grey above and below."""
    pytest.importorskip("ultralytics", exc_type=ImportError)
    chosen = prepare(RGB, fixed=FixedInput(3, (96, 96)), preset="yolo")
    values = chosen.tensor(Image.new("RGB", (60, 20), "white"))
    grey = [114 / 255] * 32
    column = torch.tensor([*grey, *[1] * 32, *grey])
    assert values.shape == (1, 3, 96, 96)
    assert chosen.blank()[0].shape == values.shape
    torch.testing.assert_close(values[0, 0, :, 5], column)


def test_yolo_refuses_a_program_of_another_shape() -> None:
    """Padding makes squares."""
    pytest.importorskip("ultralytics", exc_type=ImportError)
    with pytest.raises(UsageError, match="pads to squares, and the model takes 96×64"):
        prepare(RGB, fixed=FixedInput(3, (96, 64)), preset="yolo")


def test_yolo_without_ultralytics_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line with the command that installs it."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "ultralytics":
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "ultralytics", None)
    with pytest.raises(FeatvizError, match="Ultralytics cannot be imported") as caught:
        prepare(RGB, preset="yolo")
    assert "pip install ultralytics" in str(caught.value.hint)


def test_other_options_change_a_preset() -> None:
    """--size, --mean and --std win over it."""
    chain = prepare(RGB, preset="clip", size=(10, 12), mean=(0.5,) * 3).chain
    std = PRESETS["clip"].std
    assert chain == Chain((10, 12), None, (0.5,) * 3, std, 3, "bicubic")


def test_the_size_of_an_exported_program_changes_a_preset() -> None:
    """It takes no other."""
    fixed = prepare(RGB, fixed=FixedInput(3, (64, 64)), preset="clip")
    steps = ("resize shorter side to 73 (bicubic)", "centre crop 64×64")
    assert fixed.chain.steps[:2] == steps


def test_the_size_of_a_vision_transformer_changes_a_preset() -> None:
    """Its positions are counted."""
    with torch.device("meta"):
        transformer = vit_b_16(image_size=96)
    (blank,) = prepare(transformer, preset="clip").blank()
    assert blank.shape == (1, 3, 96, 96)


GUESS = "warning: preprocessing is a guess, --preset imagenet; --preset none, "


@pytest.mark.medium
@pytest.mark.parametrize("command", ["run", "run --dry-run", "audit"])
def test_the_guess_is_said_once(
    command: str, featviz: Run, tiny_file: Path, picture: Path
) -> None:
    """By each command that uses images."""
    done = featviz(*command.split(), tiny_file, picture, "--out", "out")
    assert done.err.count(GUESS) == 1
    assert done.err.count("a guess") == 1


def test_nothing_is_guessed_without_images(featviz: Run, tiny_file: Path) -> None:
    """`layers` takes none."""
    assert "preprocessing is a guess" not in featviz("layers", tiny_file).err


@pytest.mark.medium
def test_a_preset_is_said_in_place_of_a_guess(
    featviz: Run, tiny_file: Path, picture: Path
) -> None:
    """By the manifest, in full."""
    done = featviz("run", tiny_file, picture, "--out", "out", "--preset", "clip")
    assert "a guess" not in done.err
    described = manifest(Path("out") / picture.name)["input"]["preprocessing"]
    assert described.startswith(
        "RGB, resize shorter side to 224 (bicubic), centre crop 224×224, normalise by"
        " mean [0.481455,"
    )
