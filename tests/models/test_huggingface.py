"""Hugging Face folders: the library's own module, weights, input and captures."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from featviz import run
from featviz.errors import FeatvizError, ImageError, LoadError
from featviz.hooks.capture import leaves
from featviz.models.load import LoadedModel, adopt, load_model
from featviz.models.preprocess import Chain, Preprocess
from featviz.models.presets import _ALLOWED, choose_preprocess, from_transformers
from featviz.options import InputOptions, ModelOptions
from featviz.records import Raster
from models.hf_folders import MODELS, NAMES, PROCESSORS, photo, save, theirs

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
)


def load(spec: object, **options: Any) -> LoadedModel:
    return load_model(ModelOptions(str(spec), device="cpu", **options), InputOptions())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family, saved once."""
    root = tmp_path_factory.mktemp("hf")
    return lambda family: (
        root / family if (root / family).is_dir() else save(family, root / family)
    )


@pytest.fixture
def image(tmp_path: Path) -> Path:
    photo(90, 60).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def cloned(model: nn.Module, run: Callable[[], Any]) -> dict[str, Tensor]:
    """What each module gives at its first call, copied at once by hooks of torch's own:
    by name, with the way to a tensor inside the output behind it."""
    kept: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            for key, value in leaves(output):
                if isinstance(value, Tensor):
                    kept.setdefault(
                        f"{name}:{key}" if key else name, value.detach().clone()
                    )

        return keep

    handles = [
        part.register_forward_hook(hook(name)) for name, part in model.named_modules()
    ]
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return kept


def seen_by(model: Any, pixels: Tensor) -> Any:
    """Run the library's model on an image: a dual encoder by its vision tower."""
    if hasattr(model, "get_image_features"):
        return model.get_image_features(pixels)
    return model(pixels)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.slow] * (f != "vit")) for f in MODELS]
)
def test_a_bare_folder_runs(
    family: str,
    folders: Callable[[str], Path],
    image: Path,
    tmp_path: Path,
    featviz: Run,
) -> None:
    """`run DIR IMAGE`: the class that config.json names; each tensor of the run, at
    least five, equals what hooks on the library's own model copy for the input of the
    library's own processor."""
    folder, out = folders(family), tmp_path / "maps"
    done = featviz(
        "run", folder, image, "--layers", "*", "--tensors", "npy", "--out", out
    )
    assert done.code == 0, done.err
    record = json.loads((out / "run.json").read_text())["model"]
    assert (record["kind"], record["arch"]) == ("huggingface", MODELS[family][0])
    processor = getattr(transformers, PROCESSORS[family][0]).from_pretrained(folder)
    pixels = processor(images=Image.open(image), return_tensors="pt")[
        "pixel_values"
    ].float()
    model = theirs(folder)
    expected = cloned(model, lambda: seen_by(model, pixels))
    manifest = json.loads(next(out.glob("*/manifest.json")).read_text())
    compared = 0
    for row in manifest["captures"]:
        name = row["layer"] + (f":{row['key']}" if row.get("key") else "")
        if name not in expected or row.get("call", 0) or not row["layer"]:
            continue
        ours = np.load(next(out.glob(f"*/{row['tensor']}")))
        np.testing.assert_allclose(ours, expected[name].numpy(), atol=2e-5, rtol=1e-4)
        compared += 1
    assert compared >= 5
    idle = [model.get_submodule(name) for name in manifest["never_ran"]]
    assert not any(isinstance(part, (nn.ModuleList, nn.Sequential)) for part in idle)
    assert not [skip for skip in manifest["skipped"] if "is None" in skip["reason"]]


@pytest.mark.slow
def test_other_ways_to_say_it(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """`hf:DIR`, a file beside a config.json, `--arch hf:DIR` and `--weights` lead to
    one model."""
    folder = folders("vit")
    file = folder / "model.safetensors"
    elsewhere = tmp_path / "tuned.safetensors"
    elsewhere.write_bytes(file.read_bytes())
    expected = load(folder)
    for one in (
        load(f"hf:{folder}"),
        load(file),
        load(elsewhere, arch=f"hf:{folder}"),
        load(folder, weights=str(elsewhere)),
    ):
        assert one.preprocess == expected.preprocess
        assert one.categories == expected.categories and one.scores == "logits"
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                one.module.parameters(), expected.module.parameters(), strict=True
            )
        )
    assert load(file).source["kind"] == "file" and load(file).source["arch"] == "vit"


@pytest.mark.parametrize(
    ("family", "names"), [("vit", list(NAMES.values())), ("clip", [])]
)
def test_classes_have_names_and_embeddings_have_none(
    family: str,
    names: list[str],
    folders: Callable[[str], Path],
    image: Path,
    featviz: Run,
) -> None:
    """The likeliest classes by id2label, as the library's own logits order them; a
    model that is no classifier has no classes."""
    folder = folders(family)
    done = featviz(
        "run", folder, image, "--layers", "*.0.*", "--out", image.parent / "maps"
    )
    manifest = json.loads(
        next((image.parent / "maps").glob("*/manifest.json")).read_text()
    )
    assert done.code == 0, done.err
    if not names:
        assert "prediction" not in manifest and "%" not in done.out + done.err
        return
    loaded = load(folder)
    with torch.no_grad():
        logits = theirs(folder)(loaded.preprocess([Image.open(image)])[0]).logits[0]
    order = logits.argsort(descending=True).tolist()
    assert [guess["index"] for guess in manifest["prediction"]] == order
    said = [names[index].replace("\x1b", "\\x1b") for index in order]
    assert [guess["name"] for guess in manifest["prediction"]] == said
    assert "\x1b" not in done.out + done.err


@pytest.mark.slow
def test_partial_weights(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """What is missing is an error, and with --partial random by --seed, with a warning."""
    folder = folders("vit")
    tensors = {
        k: v.contiguous()
        for k, v in theirs(folder).state_dict().items()
        if "class" not in k
    }
    file = tmp_path / "backbone.safetensors"
    save_file(tensors, file)
    with pytest.raises(
        LoadError,
        match=(
            r"does not fit ViTForImageClassification: missing or of another shape:"
            r" class"
        ),
    ):
        load(folder, weights=str(file))
    one, two, other = (
        load(folder, weights=str(file), partial=True, seed=seed).module.state_dict()
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])


def test_arguments_change_the_config(folders: Callable[[str], Path]) -> None:
    """--model-arg sets values of the config, as keywords of from_pretrained do."""
    module = load(folders("vit"), model_args={"output_hidden_states": True}).module
    with torch.no_grad():
        assert len(module(torch.zeros(1, 3, 32, 32)).hidden_states) == 3
    assert module.config._attn_implementation == "eager"  # type: ignore[union-attr]
    chosen = load(folders("vit"), model_args={"attn_implementation": "sdpa"}).module
    assert chosen.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_module_in_hand(folders: Callable[[str], Path], image: Path) -> None:
    """featviz.run of a module of the library, or of a class derived from one, knows its
    classes."""
    model = theirs(folders("vit"))
    kind = type("Mine", (type(model),), {})
    model.__class__ = kind
    assert kind.__module__ != "transformers.models.vit.modeling_vit"
    adopted = adopt(model, InputOptions(size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3))
    assert adopted.scores is None  # its name says nothing
    model.__class__ = type("MineForImageClassification", (kind,), {})
    result = run(model, image, "*.0", image.parent / "maps", size=(32, 32))
    named = [guess.name for guess in result.images[0].outcome.prediction]
    assert len(named) == 3 and "dog" in named


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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
    path: Path, said: dict[str, Any], name: str = "preprocessor_config.json"
) -> Path:
    (path / name).write_text(json.dumps(said))
    return path


def prepared(
    path: Path, config: dict[str, Any] | None = None, **wishes: Any
) -> Preprocess:
    processor = from_transformers(path, config or {"model_type": "vit"})
    assert processor is not None
    return choose_preprocess(nn.Identity(), processor, InputOptions(**wishes))


def of(family: str, path: Path, **wishes: Any) -> Preprocess:
    kind, options = FAMILIES[family]
    return prepared(folder(path, {"image_processor_type": kind, **options}), **wishes)


@pytest.mark.parametrize(("kind", "options"), FAMILIES.values(), ids=FAMILIES)
def test_the_same_pixels(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """What the library's own processor gives, bit for bit; and undoing the
    normalisation gives the picture of the processor that does not normalise. Zeros have
    the shape of a picture of 224 × 224."""
    theirs = getattr(transformers, kind)(**options)
    theirs.save_pretrained(tmp_path)
    ours = prepared(tmp_path)
    (zeros,), (whole,) = ours.blank(), ours([photo(224, 224)])
    assert zeros.shape == whole.shape
    assert ours.chain.own_size or ours([photo(100, 150)])[0].shape == zeros.shape
    for size in ((90, 60), (33, 49)):
        (tensor,) = ours([photo(*size)])
        expected = theirs(images=photo(*size), return_tensors="pt")["pixel_values"]
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected.float())
    rest = {
        "do_normalize": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_pad": False,
    }
    more = {
        "rescale_offset": False,
        "include_top": False,
        "do_flip_channel_order": False,
    }
    theirs = getattr(transformers, kind)(**{**options, **rest, **more})
    plain = theirs(images=photo(*size), return_tensors="pt")["pixel_values"].clamp(0, 1)
    shown = ours.shown([tensor])[..., : plain.shape[2], : plain.shape[3]]
    torch.testing.assert_close(shown, plain.float(), atol=4e-6, rtol=0)


@pytest.mark.parametrize("family", ["vit", "clip"])
def test_arrays_are_values_of_0_to_1(family: str, tmp_path: Path) -> None:
    """A float array goes through the same processor, within the rounding of bytes."""
    ours, values = (
        of(family, tmp_path),
        np.moveaxis(np.asarray(photo(), "f4") / 255, -1, 0),
    )
    (of_bytes,), (of_floats,) = ours([photo()]), ours([Raster(values, "float32")])
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
    mean and deviation; the words say them."""
    chosen = of(family, tmp_path, **wishes)
    assert chosen.chain == chain and chosen.chain.steps == chain.steps


def test_the_processor_of_images_and_text(tmp_path: Path) -> None:
    """What processor_config.json has under image_processor comes first, as in the
    library; without a file nothing is known."""
    assert from_transformers(tmp_path, {}) is None
    folder(tmp_path, {"size": {"height": 10, "width": 10}})
    nested = {
        "image_processor": {"image_processor_type": "ViTImageProcessor", "size": 20}
    }
    folder(tmp_path, nested, "processor_config.json")
    assert prepared(tmp_path)([photo()])[0].shape == (1, 3, 20, 20)


@pytest.mark.parametrize(
    ("said", "message"),
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
    said: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A value that no processor has is an error that shows it."""
    said = {"image_processor_type": "ViTImageProcessor", **said}
    with pytest.raises(FeatvizError, match=message) as caught:
        prepared(folder(tmp_path, said))
    assert "\n" not in caught.value.message and caught.value.hint


def test_what_is_refused_of_files_and_images(tmp_path: Path) -> None:
    """A damaged file, a model of other channels, and an image that would become huge."""
    assert of("clip", tmp_path) is not None
    with pytest.raises(LoadError, match="gives 3 channels, and the model takes 1"):
        prepared(tmp_path, {"vision_config": {"num_channels": 1}})
    with pytest.raises(LoadError, match="names no image processor"):
        prepared(folder(tmp_path, {"size": 20}), {"model_type": "mine"})
    of("clip", tmp_path)
    with pytest.raises(ImageError, match="would become"):
        of("clip", tmp_path)([Image.new("RGB", (1, 90000))])
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(LoadError, match="is no JSON"):
        prepared(tmp_path)


@pytest.mark.slow
def test_no_processor_that_may_be_used_reaches_beyond_the_image() -> None:
    """No class of the list, nor one that it is made of, opens, fetches or starts
    anything."""
    reaching = re.compile(
        r"\bopen\(|hf_hub_download|cached_file|requests\.|subprocess|pytesseract|\beval\("
        r"|\bexec\(|import_module|torch\.load|urlopen|pickle|__import__"
    )
    kinds = [
        getattr(transformers, f"{name}ImageProcessor", None)
        for name in _ALLOWED.split("|")
    ]
    assert sum(kind is not None for kind in kinds) > 50
    homes = {part.__module__ for kind in kinds if kind for part in kind.__mro__}
    for home in homes:
        if home.startswith("transformers.models."):
            assert not reaching.search(inspect.getsource(sys.modules[home])), home
