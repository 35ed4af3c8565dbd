"""Preprocessing of Hugging Face folders: the same pixels as the library's own image processors."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from featviz.errors import FeatvizError, LoadError
from featviz.models.preprocess import InputOptions, Preprocess
from featviz.models.presets import choose_preprocess
from featviz.models.resizing import Between

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from featviz.models.hf import processor  # noqa: E402
from featviz.models.hf.config import read  # noqa: E402

SQUARE = {"height": 224, "width": 224}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTImageProcessor", {}),
    "deit": ("DeiTImageProcessor", {}),
    "dinov2": (
        "BitImageProcessor",
        {"size": {"shortest_edge": 256}, "image_mean": [0.485, 0.456, 0.406]},
    ),
    "clip": ("CLIPImageProcessor", {}),
    "siglip": ("SiglipImageProcessor", {}),
    "swin": ("ViTImageProcessor", {"resample": 3, "image_mean": [0.485, 0.456, 0.406]}),
    "beit": ("BeitImageProcessor", {}),
    "beit, cropped": (
        "BeitImageProcessor",
        {"size": {"height": 256, "width": 256}, "do_center_crop": True},
    ),
    "convnext 224": ("ConvNextImageProcessor", {"size": {"shortest_edge": 224}, "crop_pct": 0.875}),
    "convnext 384": ("ConvNextImageProcessor", {}),
    "segformer": ("SegformerImageProcessor", {}),
    "detr": ("DetrImageProcessor", {}),
    "detr, small": ("DetrImageProcessor", {"size": {"shortest_edge": 301, "longest_edge": 397}}),
    "deformable detr": ("DeformableDetrImageProcessor", {}),
    "conditional detr": ("ConditionalDetrImageProcessor", {}),
    "dpt": ("DPTImageProcessor", {}),
    "dpt, in proportion": (
        "DPTImageProcessor",
        {
            "keep_aspect_ratio": True,
            "ensure_multiple_of": 14,
            "size": {"height": 518, "width": 518},
        },
    ),
    "dpt, padded": (
        "DPTImageProcessor",
        {"do_resize": False, "do_pad": True, "size_divisor": 64, "do_rescale": False},
    ),
    "sam": ("SamImageProcessor", {}),
    "mobilevit": ("MobileViTImageProcessor", {"size": {"shortest_edge": 288}}),
    "mobilevit, larger crop": ("MobileViTImageProcessor", {}),
    "dinov3": ("DINOv3ViTImageProcessor", {}),
    "mask2former": ("Mask2FormerImageProcessor", {}),
    "maskformer": ("MaskFormerImageProcessor", {"size_divisor": 48}),
    "grounding dino": ("GroundingDinoImageProcessor", {}),
    "rt-detr": ("RTDetrImageProcessor", {}),
    "other factor": ("ViTImageProcessor", {"rescale_factor": 1 / 127.5, "resample": 1}),
    "bytes": ("ViTImageProcessor", {"do_rescale": False, "do_normalize": False, "resample": 0}),
    "as it is": ("ViTImageProcessor", {"do_resize": False, "do_normalize": False}),
}


def photo(width: int = 600, height: int = 400) -> Image.Image:
    """Colour noise of several sizes, with edges."""
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    coarse = Image.fromarray(values[:40, :60]).resize((width, height), Image.Resampling.BILINEAR)
    return Image.blend(coarse, Image.fromarray(values), 0.3)


def folder(path: Path, said: dict[str, Any], name: str = "preprocessor_config.json") -> Path:
    (path / "config.json").write_text('{"architectures": ["ViTModel"], "model_type": "vit"}')
    (path / name).write_text(json.dumps(said))
    return path


def prepared(path: Path) -> Preprocess:
    preprocess = processor.read(read(path))
    assert preprocess is not None
    return preprocess


def worst(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("size", [(600, 400), (333, 499)], ids=["400×600", "499×333"])
@pytest.mark.parametrize(("kind", "options"), FAMILIES.values(), ids=FAMILIES)
def test_the_same_pixels(
    kind: str,
    options: dict[str, Any],
    size: tuple[int, int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the library's own processor gives, to a ten-thousandth of a level, without a warning."""
    theirs = getattr(transformers, kind)(**options)
    theirs.save_pretrained(tmp_path)
    ours = prepared(
        folder(tmp_path, json.loads((tmp_path / "preprocessor_config.json").read_text()))
    )
    picture = photo(*size)
    (tensor,) = ours([picture])
    expected = theirs(images=picture, return_tensors="pt")["pixel_values"].float()
    assert worst(tensor, expected) < 1e-6
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_number_for_a_size(tmp_path: Path) -> None:
    """As older files have it: the shorter side, or both, as the processor's class says."""
    clip = {"image_processor_type": "CLIPFeatureExtractor", "size": 64, "crop_size": 48}
    assert prepared(folder(tmp_path, clip)).resize == 64
    vit = {"feature_extractor_type": "ViTFeatureExtractor", "size": 64}
    assert prepared(folder(tmp_path, vit)).resize == (64, 64)
    fast = {"image_processor_type": "DetrImageProcessorFast", "size": 80, "max_size": 100}
    assert prepared(folder(tmp_path, fast)).resize == Between(80, 100)


def test_what_a_file_leaves_out(tmp_path: Path) -> None:
    """The class of the model's own processor says it, where the file names none."""
    chosen = prepared(folder(tmp_path, {"image_mean": [0.1, 0.2, 0.3]}))
    assert chosen.words == (
        "RGB, resize to 224×224 (bilinear), normalise by mean [0.1, 0.2, 0.3] and "
        "std [0.5, 0.5, 0.5]"
    )


def test_the_processor_of_images_and_text(tmp_path: Path) -> None:
    """What processor_config.json has under image_processor comes first, as in the library."""
    folder(tmp_path, {"size": {"height": 10, "width": 10}})
    nested = {"image_processor": {"image_processor_type": "ViTImageProcessor", "size": 20}}
    assert prepared(folder(tmp_path, nested, "processor_config.json")).resize == (20, 20)


def test_none_of_the_files(tmp_path: Path) -> None:
    """Without a file nothing is known."""
    (tmp_path / "config.json").write_text('{"architectures": ["ViTModel"]}')
    assert processor.read(read(tmp_path)) is None


def test_an_unknown_processor_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A class with steps of its own, or none that transformers has, is taken as a usual one, with a
    warning."""
    prepared(folder(tmp_path, {"image_processor_type": "PoolFormerImageProcessor"}))
    prepared(folder(tmp_path, {"image_processor_type": "os", "size": 32}))
    assert [record.getMessage() for record in caplog.records] == [
        "PoolFormerImageProcessor is taken as a usual image processor",
        "an unknown image processor is taken as a usual image processor",
    ]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"size": {"height": 10**9, "width": 4}}, "a side of 1000000000, not 1 to 4096"),
        ({"size": 0}, "a side of 0, not 1 to 4096"),
        ({"size": {"shortest_edge": True}}, "a side of True"),
        ({"size": "big"}, "cannot be understood"),
        ({"size": {}}, "cannot be understood"),
        ({"size": {"height": 3}}, "cannot be understood"),
        ({"image_mean": "grey"}, "cannot be understood"),
        ({"image_std": [0, 0, 0]}, "--std .* divides by zero"),
        ({"image_mean": [1.0]}, "--mean has 1 numbers for 3 channels"),
        ({"resample": 5}, "resamples by 5, which is none of Pillow's 0 to 3"),
        ({"resample": [2]}, "cannot be understood"),
        ({"rescale_factor": 0}, "cannot be understood"),
        ({"do_pad": True, "pad_size": {"height": -1, "width": 1}}, "a side of -1"),
    ],
)
def test_nonsense_is_one_line(said: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A value that no processor has is an error that shows it."""
    said = {"image_processor_type": "ViTImageProcessor", **said}
    with pytest.raises(FeatvizError, match=message):
        choose_preprocess(nn.Identity(), prepared(folder(tmp_path, said)), InputOptions())


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """Damage is an error, not a guess."""
    (folder(tmp_path, {}) / "preprocessor_config.json").write_text("{")
    with pytest.raises(LoadError, match="is no JSON"):
        processor.read(read(tmp_path))


@pytest.mark.parametrize("family", ["sam", "mobilevit", "detr", "clip"])
def test_the_input_is_shown_as_it_was(family: str, tmp_path: Path) -> None:
    """Undoing the normalisation gives the resized picture, in RGB, in the size of the input."""
    kind, options = FAMILIES[family]
    ours = prepared(folder(tmp_path, {"image_processor_type": kind, **options}))
    picture = photo()
    plain = replace(ours, mean=None, std=None, bgr=False, padding=None)
    (tensor,), (bare,) = ours([picture]), plain([picture])
    shown = ours.shown([tensor])
    assert shown.shape == tensor.shape
    height, width = bare.shape[2:]
    torch.testing.assert_close(shown[..., :height, :width], bare, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_zeros_have_the_shape_of_an_image(family: str, tmp_path: Path) -> None:
    """What stands for an image before there is one: that of a picture of 224 × 224."""
    kind, options = FAMILIES[family]
    ours = prepared(folder(tmp_path, {"image_processor_type": kind, **options}))
    assert [zeros.shape for zeros in ours.blank()] == [x.shape for x in ours([photo(224, 224)])]
    other = ours([photo(100, 150)])[0].shape
    assert ours.own_size or other == ours.blank()[0].shape


def test_words_say_each_step(tmp_path: Path) -> None:
    """Longer side, channel order, padding and resampling are in the words of run.json."""
    sam = prepared(folder(tmp_path, {"image_processor_type": "SamImageProcessor"}))
    assert sam.words == (
        "RGB, resize longer side to 1024 (bilinear), normalise by mean [0.485, 0.456, 0.406] and "
        "std [0.229, 0.224, 0.225], pad to 1024×1024 right and below"
    )
    mobile = prepared(folder(tmp_path, {"image_processor_type": "MobileViTImageProcessor"}))
    assert mobile.words == (
        "BGR, resize shorter side to 224 (bicubic), centre crop 256×256, values 0..1"
    )
