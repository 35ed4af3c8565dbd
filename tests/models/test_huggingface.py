"""Hugging Face folders: the library's own module, weights, input and captures."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image
from runs import run_json
from safetensors.torch import load_file, save_file
from tiles import raw
from torch import Tensor, nn

from featviz import run
from featviz.errors import FeatvizError, ImageError, LoadError
from featviz.hooks.capture import leaves
from featviz.models.load import adopt
from featviz.models.preprocess import Chain, Preprocess
from featviz.models.presets import (
    IMAGE_PROCESSORS,
    choose_preprocess,
    from_transformers,
)
from featviz.options import InputOptions
from featviz.records import Raster
from models.drawn import DrawnImage
from models.hf_folders import MODELS, NAMES, PROCESSORS, photo, save, theirs
from models.loading import load, load_whole, same_weights

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
)


Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a family, saved once."""
    root = tmp_path_factory.mktemp("hf")
    return cache(lambda family: save(family, root / family))


@pytest.fixture(scope="module")
def vit(folders: Folders) -> Path:
    return folders("vit")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    photo(90, 60).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def cloned(model: nn.Module, run: Callable[[], Any]) -> dict[str, Tensor]:
    """What each module gives at its first call, copied at once by hooks of torch's own:
    by name, with the way to a tensor inside the output behind it."""
    copies: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        for key, value in leaves(output):
            if isinstance(value, Tensor):
                copies.setdefault(f"{name}:{key}".rstrip(":"), value.detach().clone())

    with ExitStack() as hooks, torch.no_grad():
        for name, layer in model.named_modules():
            hooks.enter_context(layer.register_forward_hook(partial(keep, name)))
        run()
    return copies


def seen_by(model: Any, pixels: Tensor) -> Any:
    """Run the library's model on an image: a dual encoder by its vision tower."""
    if hasattr(model, "get_image_features"):
        return model.get_image_features(pixels)
    return model(pixels)


def processed(family: str, folder: Path, image: Path) -> Tensor:
    """The input that the library's own processor makes."""
    processor = getattr(transformers, PROCESSORS[family][0]).from_pretrained(folder)
    inputs = processor(images=Image.open(image), return_tensors="pt")
    return inputs["pixel_values"].float()


def first_outputs(drawn: DrawnImage) -> dict[str, Tensor]:
    """The tensors of each layer's first call, but for the model as a whole."""
    return {
        f"{row['layer']}:{row['key']}".rstrip(":"): raw(drawn.folder, row)
        for row in drawn.manifest["captures"]
        if row["layer"] and not row["call"]
    }


@pytest.mark.medium
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.slow] * (f != "vit")) for f in MODELS]
)
def test_a_bare_folder_runs(
    family: str, folders: Folders, image: Path, tmp_path: Path, featviz: Run
) -> None:
    """`run DIR IMAGE`: the class that config.json names; each tensor of the run, at
    least five, equals what hooks on the library's own model copy for the input of the
    library's own processor."""
    folder = folders(family)
    out = tmp_path / "maps"
    options = ["--layers", "*", "--tensors", "npy", "--out", out]
    done = featviz("run", folder, image, *options)
    assert done.code == 0, done.err

    model = theirs(folder)
    pixels = processed(family, folder, image)
    expected = cloned(model, lambda: seen_by(model, pixels))
    drawn = DrawnImage(out / image.name)
    tensors = first_outputs(drawn)
    shared = tensors.keys() & expected.keys()
    assert len(shared) >= 5
    for name in shared:
        torch.testing.assert_close(
            tensors[name], expected[name], atol=2e-5, rtol=1e-4, msg=name
        )
    record = run_json(out)["model"]
    assert record["kind"] == "huggingface"
    assert record["arch"] == MODELS[family][0]
    check_left_out(drawn, model)


def check_left_out(drawn: DrawnImage, model: nn.Module) -> None:
    """Layers without a tensor, and lists of modules, are no news."""
    for skip in drawn.manifest["skipped"]:
        assert "is None" not in skip["reason"]
    for name in drawn.manifest["never_ran"]:
        idle = model.get_submodule(name)
        assert not isinstance(idle, (nn.ModuleList, nn.Sequential)), name


WEIGHTS = "model.safetensors"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("hf:{folder}", {}),
        ("{folder}/model.safetensors", {}),
        ("{elsewhere}", {"arch": "hf:{folder}"}),
        ("{folder}", {"weights": "{elsewhere}"}),
    ],
    ids=["hf:DIR", "file beside a config", "--arch", "--weights"],
)
def test_other_ways_to_say_it(
    spec: str, options: dict[str, str], vit: Path, tmp_path: Path
) -> None:
    """All lead to one model."""
    paths = {"folder": vit, "elsewhere": tmp_path / "tuned.safetensors"}
    shutil.copy(vit / WEIGHTS, paths["elsewhere"])
    expected = load_whole(vit)
    filled = {name: value.format(**paths) for name, value in options.items()}
    loaded = load_whole(spec.format(**paths), **filled)
    assert loaded.preprocess == expected.preprocess
    assert loaded.categories == expected.categories
    assert loaded.scores == "logits"
    assert same_weights(loaded.module, expected.module)


@pytest.mark.medium
def test_a_file_beside_a_config_is_a_file(vit: Path) -> None:
    """The record has it as one, of the architecture of the config."""
    source = load_whole(vit / WEIGHTS).source
    assert (source["kind"], source["arch"]) == ("file", "vit")


@pytest.mark.medium
def test_classes_have_names(
    vit: Path, image: Path, tmp_path: Path, featviz: Run
) -> None:
    """The likeliest classes by id2label, as the library's own logits order them."""
    done = featviz("run", vit, image, "--layers", "*.0.*", "--out", tmp_path / "maps")
    assert done.code == 0, done.err
    with torch.no_grad():
        logits = theirs(vit)(processed("vit", vit, image)).logits[0]
    order = logits.argsort(descending=True).tolist()
    prediction = DrawnImage(tmp_path / "maps" / image.name).manifest["prediction"]
    names = [NAMES[index].replace("\x1b", "\\x1b") for index in order]
    assert [guess["index"] for guess in prediction] == order
    assert [guess["name"] for guess in prediction] == names
    assert "\x1b" not in done.out + done.err


@pytest.mark.medium
def test_embeddings_are_no_classes(
    folders: Folders, image: Path, tmp_path: Path, featviz: Run
) -> None:
    """A model that is no classifier predicts nothing."""
    options = ["--layers", "*.0.*", "--out", tmp_path / "maps"]
    done = featviz("run", folders("clip"), image, *options)
    assert done.code == 0, done.err
    assert "prediction" not in DrawnImage(tmp_path / "maps" / image.name).manifest
    assert "%" not in done.out + done.err


@pytest.fixture
def backbone(vit: Path, tmp_path: Path) -> str:
    """A file of weights without those of the classifier."""
    tensors = load_file(vit / WEIGHTS)
    file = tmp_path / "backbone.safetensors"
    save_file({k: v for k, v in tensors.items() if "class" not in k}, file)
    return str(file)


@pytest.mark.medium
def test_missing_weights_are_an_error(vit: Path, backbone: str) -> None:
    """It names the first that is missing."""
    message = (
        "does not fit ViTForImageClassification: missing or of another shape: class"
    )
    with pytest.raises(LoadError, match=message):
        load(vit, weights=backbone)


@pytest.mark.medium
@pytest.mark.parametrize("has_bars", [False, True])
def test_settings_of_transformers_are_put_back(
    vit: Path, has_bars: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress bars, how much is said, and whether the hub is asked."""
    messages = transformers.utils.logging
    hub = import_module("huggingface_hub.constants")
    is_offline = not has_bars
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", is_offline)
    before = messages.is_progress_bar_enabled()
    (messages.enable_progress_bar if has_bars else messages.disable_progress_bar)()
    messages.set_verbosity(21)
    try:
        load(vit)
        assert messages.is_progress_bar_enabled() == has_bars
        assert messages.get_verbosity() == 21
        assert is_offline == hub.HF_HUB_OFFLINE
    finally:
        (messages.enable_progress_bar if before else messages.disable_progress_bar)()


@pytest.mark.medium
def test_weights_of_another_shape_are_an_error(vit: Path, tmp_path: Path) -> None:
    """transformers would put random numbers in their place."""
    tensors = load_file(vit / WEIGHTS)
    tensors["classifier.bias"] = torch.zeros(99)
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(LoadError, match=r"of another shape: classifier\.bias\b"):
        load(vit, weights=str(tmp_path / "other.safetensors"))


@pytest.mark.medium
def test_partial_weights_are_random_by_seed(vit: Path, backbone: str) -> None:
    """With --partial, what is missing."""

    def seeded(seed: int) -> nn.Module:
        return load(vit, weights=backbone, partial=True, seed=seed)

    assert same_weights(seeded(1), seeded(1))
    assert not same_weights(seeded(1), seeded(2))


@pytest.mark.medium
def test_arguments_change_the_config(vit: Path) -> None:
    """--model-arg sets values of the config, as keywords of from_pretrained do."""
    arguments = {"output_hidden_states": True, "hidden_act": "relu"}
    module: Any = load(vit, model_args=arguments)
    assert module.config.hidden_act == "relu"
    with torch.no_grad():
        assert len(module(torch.zeros(1, 3, 32, 32)).hidden_states) == 3


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "attention"),
    [({}, "eager"), ({"attn_implementation": "sdpa"}, "sdpa")],
)
def test_attention_is_eager_unless_asked_for(
    arguments: dict[str, str], attention: str, vit: Path
) -> None:
    """Only then its weights are tensors that can be drawn."""
    module: Any = load(vit, model_args=arguments)
    assert module.config._attn_implementation == attention


def derived(model: nn.Module, name: str) -> None:
    """Make a model one of a class of the user's."""
    model.__class__ = type(name, (type(model),), {})


@pytest.mark.medium
def test_a_derived_module_in_hand_is_known_by_its_name(vit: Path, image: Path) -> None:
    """featviz.run of a module of a class derived from the library's knows its classes."""
    model = theirs(vit)
    derived(model, "MineForImageClassification")
    result = run(model, image, "*.0", size=(32, 32))
    prediction = result.images[0].prediction
    assert len(prediction) == 3
    assert "dog" in [guess.name for guess in prediction]


def test_a_name_that_says_nothing_makes_no_classifier(vit: Path) -> None:
    """What the outputs mean is not known."""
    model = theirs(vit)
    derived(model, "Mine")
    assert adopt(model, InputOptions()).scores is None


MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTImageProcessor", {}),
    "clip": ("CLIPImageProcessor", {}),
    "convnext": (
        "ConvNextImageProcessor",
        {"size": {"shortest_edge": 224}, "crop_pct": 0.875},
    ),
    "detr": ("DetrImageProcessor", {}),
    "dpt, in proportion": (
        "DPTImageProcessor",
        {"keep_aspect_ratio": True, "ensure_multiple_of": 14, "size": square(518)},
    ),
    "sam": (
        "SamImageProcessor",
        {"size": {"longest_edge": 128}, "pad_size": square(128)},
    ),
    "mobilevit": ("MobileViTImageProcessor", {"size": {"shortest_edge": 288}}),
    "bytes": (
        "ViTImageProcessor",
        {"do_rescale": False, "do_normalize": False, "resample": 0},
    ),
    "efficientnet, normalised twice": (
        "EfficientNetImageProcessor",
        {"include_top": True},
    ),
    "glpn": ("GLPNImageProcessor", {}),
}


def folder(
    path: Path, content: dict[str, Any], name: str = "preprocessor_config.json"
) -> Path:
    (path / name).write_text(json.dumps(content))
    return path


def prepared(
    path: Path, config: dict[str, Any] | None = None, **wishes: Any
) -> Preprocess:
    processor = from_transformers(path, config or {"model_type": "vit"})
    assert processor is not None
    return choose_preprocess(nn.Identity(), processor, InputOptions(**wishes))


def of(family: str, path: Path, **wishes: Any) -> Preprocess:
    name, options = FAMILIES[family]
    return prepared(folder(path, {"image_processor_type": name, **options}), **wishes)


def processor_of(family: str, **changes: Any) -> Callable[[Image.Image], Tensor]:
    """The library's own processor of a picture."""
    name, options = FAMILIES[family]
    processor = getattr(transformers, name)(**{**options, **changes})
    return lambda picture: processor(images=picture, return_tensors="pt")[
        "pixel_values"
    ].float()


@pytest.mark.parametrize("size", [(90, 60), (33, 49)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_pixels(family: str, size: tuple[int, int], tmp_path: Path) -> None:
    """What the library's own processor gives, bit for bit."""
    (tensor,) = of(family, tmp_path)([photo(*size)])
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, processor_of(family)(photo(*size)))


def test_the_same_pixels_of_a_tall_input(tmp_path: Path) -> None:
    """Four times as high as it is wide."""
    size = {"height": 64, "width": 16}
    config = {"image_processor_type": "ViTImageProcessor", "size": size}
    (tensor,) = prepared(folder(tmp_path, config))([photo(90, 60)])
    assert tensor.shape == (1, 3, 64, 16)
    expected = processor_of("vit", size=size)(photo(90, 60))
    assert torch.allclose(tensor, expected, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_model_saw_is_a_picture(family: str, tmp_path: Path) -> None:
    """Undoing the normalisation gives the picture of the processor that does not
    normalise."""
    ours = of(family, tmp_path)
    picture = processor_of(
        family,
        do_normalize=False,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_pad=False,
        rescale_offset=False,
        include_top=False,
        do_flip_channel_order=False,
    )
    expected = picture(photo(33, 49)).clamp(0, 1)
    shown = ours.shown(ours([photo(33, 49)]))
    shown = shown[..., : expected.shape[2], : expected.shape[3]]
    torch.testing.assert_close(shown, expected, atol=4e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_zeros_have_the_shape_of_a_picture(family: str, tmp_path: Path) -> None:
    """Of one of 224 × 224, and of any other where the size is fixed."""
    ours = of(family, tmp_path)
    (zeros,) = ours.blank()
    assert zeros.shape == ours([photo(224, 224)])[0].shape
    if not ours.chain.own_size:
        assert zeros.shape == ours([photo(100, 150)])[0].shape


@pytest.mark.parametrize("family", ["vit", "clip"])
def test_arrays_are_values_of_0_to_1(family: str, tmp_path: Path) -> None:
    """A float array goes through the same processor, within the rounding of bytes."""
    ours = of(family, tmp_path)
    values = np.moveaxis(np.asarray(photo(), "f4") / 255, -1, 0)
    (of_bytes,) = ours([photo()])
    (of_floats,) = ours([Raster(values, "float32")])
    level = 1 / 255 / min(ours.chain.std or (1.0,))
    torch.testing.assert_close(of_floats, of_bytes, atol=1.1 * level, rtol=0)


class Wish(NamedTuple):
    """Options of the input that go before what a folder says."""

    family: str
    options: dict[str, Any]
    chain: Chain


CHANGED: list[Wish] = [
    Wish("detr", {"size": 64}, Chain(64, None, MEAN, STD)),
    Wish("sam", {"size": (50, 70), "crop": 40}, Chain((50, 70), 40, MEAN, STD)),
    Wish("glpn", {"interpolation": "nearest"}, Chain(interpolation="nearest")),
    Wish(
        "mobilevit",
        {"mean": (0.1, 0.2, 0.3)},
        Chain(288, (256, 256), (0.1, 0.2, 0.3), (1.0,) * 3, 3, "bicubic", bgr=True),
    ),
]


@pytest.mark.parametrize(("family", "wishes", "chain"), CHANGED)
def test_what_the_user_changes(
    family: str, wishes: dict[str, Any], chain: Chain, tmp_path: Path
) -> None:
    """Any such option is met by steps of featviz's own with the processor's size, crop,
    mean and deviation; its description says them."""
    chosen = of(family, tmp_path, **wishes)
    assert chosen.chain == chain
    assert chosen.chain.steps == chain.steps


def test_the_processor_of_images_and_text(tmp_path: Path) -> None:
    """What processor_config.json has under image_processor comes first, as in the
    library; without a file nothing is known."""
    assert from_transformers(tmp_path, {}) is None
    folder(tmp_path, {"size": square(10)})
    processor = {"image_processor_type": "ViTImageProcessor", "size": 20}
    folder(tmp_path, {"image_processor": processor}, "processor_config.json")
    assert prepared(tmp_path)([photo()])[0].shape == (1, 3, 20, 20)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"size": {"height": 10**9, "width": 4}},
            "asks for 1,000,000,000; 4096 is the most",
        ),
        ({"size": {"height": 3}}, "cannot be understood"),
        ({"image_std": [0, 0, 0]}, "does not tell black from white"),
        ({"image_processor_type": "os"}, "os names no image processor"),
    ],
)
def test_nonsense_is_one_line(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A value that no processor has is an error that shows it."""
    config = {"image_processor_type": "ViTImageProcessor", **values}
    with pytest.raises(FeatvizError, match=message) as caught:
        prepared(folder(tmp_path, config))
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_a_processor_of_other_channels_is_refused(tmp_path: Path) -> None:
    """Than the model's."""
    of("clip", tmp_path)
    with pytest.raises(LoadError, match="gives 3 channels, and the model takes 1"):
        prepared(tmp_path, {"vision_config": {"num_channels": 1}})


def test_a_config_without_a_processor_is_refused(tmp_path: Path) -> None:
    """Where the family has none either."""
    with pytest.raises(LoadError, match="names no image processor"):
        prepared(folder(tmp_path, {"size": 20}), {"model_type": "mine"})


def test_an_image_may_not_become_huge(tmp_path: Path) -> None:
    """By a processor that keeps its proportions."""
    with pytest.raises(ImageError, match="would become"):
        of("clip", tmp_path)([Image.new("RGB", (1, 90000))])


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    """In one line."""
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(LoadError, match="is no JSON"):
        prepared(tmp_path)


REACHING = re.compile(
    r"\bopen\(|hf_hub_download|cached_file|requests\.|subprocess|pytesseract|\beval\("
    r"|\bexec\(|import_module|torch\.load|urlopen|pickle|__import__"
)
"""Code that opens, fetches or starts something."""


@pytest.mark.slow
def test_no_processor_that_may_be_used_reaches_beyond_the_image() -> None:
    """No class of the list, nor one that it is made of, opens, fetches or starts
    anything."""
    homes = set[str]()
    for name in IMAGE_PROCESSORS:
        processor = getattr(transformers, f"{name}ImageProcessor", object)
        homes |= {base.__module__ for base in processor.__mro__}
    homes = {home for home in homes if home.startswith("transformers.models.")}
    assert len(homes) > 50
    for home in homes:
        assert not REACHING.search(inspect.getsource(sys.modules[home])), home
