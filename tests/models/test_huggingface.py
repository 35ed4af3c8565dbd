"""Hugging Face folders: the library's own module, weights, input and captures."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Outcome
from PIL import Image
from torch import Tensor, nn

from featviz import run
from featviz.hooks.containers import leaves
from featviz.models.load import LoadedModel, ModelOptions, adopt, load_model
from featviz.models.preprocess import InputOptions

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from models.hf_folders import MODELS, NAMES, PROCESSORS, save, theirs  # noqa: E402
from models.test_hf_processor import photo  # noqa: E402

Run = Callable[..., Outcome]


def load(spec: object, **options: Any) -> LoadedModel:
    return load_model(ModelOptions(str(spec), device="cpu", **options), InputOptions())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family, saved once."""
    root = tmp_path_factory.mktemp("hf")
    return lambda family: root / family if (root / family).is_dir() else save(family, root / family)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    photo(90, 60).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def cloned(model: nn.Module, run: Callable[[], Any]) -> dict[str, Tensor]:
    """What each module gives at its first call, copied at once by hooks of torch's own: by name,
    with the way to a tensor inside the output behind it."""
    kept: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            for key, value in leaves(output):
                if isinstance(value, Tensor):
                    kept.setdefault(f"{name}:{key}" if key else name, value.detach().clone())

        return keep

    handles = [part.register_forward_hook(hook(name)) for name, part in model.named_modules()]
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


@pytest.mark.parametrize("family", MODELS)
def test_a_bare_folder_runs(
    family: str, folders: Callable[[str], Path], image: Path, tmp_path: Path, featviz: Run
) -> None:
    """`run DIR IMAGE`: the class that config.json names; each tensor of the run, at least five,
    equals what hooks on the library's own model copy for the input of the library's own processor.
    """
    folder, out = folders(family), tmp_path / "maps"
    done = featviz("run", folder, image, "--layers", "*", "--tensors", "npy", "--out", out)
    assert done.code == 0, done.err
    record = json.loads((out / "run.json").read_text())["model"]
    assert (record["kind"], record["arch"]) == ("huggingface", MODELS[family][0])
    processor = getattr(transformers, PROCESSORS[family][0]).from_pretrained(folder)
    pixels = processor(images=Image.open(image), return_tensors="pt")["pixel_values"].float()
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


@pytest.mark.parametrize("family", MODELS)
def test_the_same_weights(family: str, folders: Callable[[str], Path]) -> None:
    """Every tensor is what the library loads, and the mode is that of evaluation."""
    loaded, expected = load(folders(family)).module, theirs(folders(family)).state_dict()
    own = loaded.state_dict()
    assert own and not loaded.training
    assert all(torch.equal(tensor, expected[name]) for name, tensor in own.items())


def test_other_ways_to_say_it(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """`hf:DIR`, a file beside a config.json, `--arch hf:DIR` and `--weights` lead to one model."""
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
            for a, b in zip(one.module.parameters(), expected.module.parameters(), strict=True)
        )
    assert load(file).source["kind"] == "file" and load(file).source["arch"] == "vit"


def test_pickled_weights(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """An older folder with pytorch_model.bin is read by featviz's own reader of pickles."""
    folder = folders("vit")
    model = theirs(folder)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert all(
        torch.equal(a, b)
        for a, b in zip(load(tmp_path).module.parameters(), model.parameters(), strict=True)
    )


def test_shards_and_half_precision(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Weights in several files, in half precision, are those of the library, in float."""
    model = theirs(folders("vit")).half()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load(tmp_path).module
    for one, other in zip(loaded.parameters(), model.parameters(), strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other.float())


def test_a_config_of_timm(tmp_path: Path) -> None:
    """A folder of timm's goes the way of timm, also as `hf:DIR`."""
    timm = pytest.importorskip("timm")
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "test_resnet"}))
    for spec in (tmp_path, f"hf:{tmp_path}"):
        loaded = load(spec)
        assert type(loaded.module) is type(model) and loaded.source["kind"] == "huggingface"
        assert torch.equal(loaded.module.conv1[0].weight, model.conv1[0].weight)  # type: ignore[index,union-attr]


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_a_dual_encoder_is_run_by_its_vision_tower(
    family: str, folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """It says so, and its modules are the vision tower's, with their names in the whole model."""
    with caplog.at_level(logging.INFO):
        loaded = load(folders(family))
    kind = MODELS[family][0]
    assert f"{kind} is run by its vision tower (get_image_features)" in caplog.text
    names = {name for name, _ in loaded.module.named_modules() if name}
    assert all(name.startswith(("vision_model", "visual_projection")) for name in names)
    pixels = loaded.preprocess([photo()])[0]
    with torch.no_grad():
        ours, other = loaded.module(pixels), seen_by(theirs(folders(family)), pixels)
    assert torch.equal(ours.pooler_output, other.pooler_output)


@pytest.mark.parametrize(
    ("family", "names"),
    [("vit", list(NAMES.values())), ("swin", ["LABEL_0", "LABEL_1"]), ("dinov2", []), ("clip", [])],
)
def test_classes_have_names_and_embeddings_have_none(
    family: str, names: list[str], folders: Callable[[str], Path], image: Path, featviz: Run
) -> None:
    """The likeliest classes by id2label, as the library's own logits order them; a model that is no
    classifier has no classes."""
    folder = folders(family)
    done = featviz("run", folder, image, "--layers", "*.0.*", "--out", image.parent / "maps")
    manifest = json.loads(next((image.parent / "maps").glob("*/manifest.json")).read_text())
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


@pytest.mark.parametrize("target", ["top1", "class:1", "class:dog", "output[logits]:norm"])
def test_targets_read_the_logits(
    target: str, folders: Callable[[str], Path], image: Path, featviz: Run
) -> None:
    """Gradients of a class's score equal those of torch.autograd for the library's model."""
    folder, out = folders("vit"), image.parent / "maps"
    layer = "vit.layers.0" if hasattr(theirs(folder).vit, "layers") else "vit.encoder.layer.0"
    done = featviz(
        "run", folder, image, "--capture", "grad", "--target", target, "--layers", layer,
        "--tensors", "npy", "--out", out,
    )  # fmt: skip
    assert done.code == 0, done.err
    model, pixels = theirs(folder), load(folder).preprocess([Image.open(image)])[0]
    kept: list[Tensor] = []
    model.get_submodule(layer).register_forward_hook(
        lambda module, args, output: kept.append(output[0] if isinstance(output, tuple) else output)
    )
    logits = model(pixels.requires_grad_()).logits
    value = {"top1": logits.max(), "output[logits]:norm": logits.norm()}.get(target, logits[0, 1])
    (expected,) = torch.autograd.grad(value, kept[0])
    row = json.loads(next(out.glob("*/manifest.json")).read_text())["captures"][0]
    ours = np.load(next(out.glob(f"*/{row['tensor']}")))
    np.testing.assert_allclose(ours, expected.numpy(), atol=1e-6, rtol=1e-4)


def test_no_class_of_what_is_no_classifier(
    folders: Callable[[str], Path], image: Path, featviz: Run
) -> None:
    """A class of an embedding is refused, with what could be a target."""
    done = featviz(
        "run", folders("dinov2"), image, "--capture", "grad", "--out", image.parent / "maps"
    )
    assert done.code == 2
    assert "the model is no classifier" in done.err and "output[last_hidden_state]" in done.err


def test_partial_weights(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """What is missing is an error, and with --partial random by --seed, with a warning."""
    from safetensors.torch import save_file

    from featviz.errors import LoadError

    folder = folders("vit")
    tensors = {
        k: v.contiguous() for k, v in theirs(folder).state_dict().items() if "class" not in k
    }
    file = tmp_path / "backbone.safetensors"
    save_file(tensors, file)
    with pytest.raises(LoadError, match=r"does not fit ViTForImageClassification: missing class"):
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


def test_a_module_in_hand(folders: Callable[[str], Path], image: Path) -> None:
    """featviz.run of a module of the library, or of a class derived from one, knows its classes."""
    model = theirs(folders("vit"))
    kind = type("Mine", (type(model),), {})
    model.__class__ = kind
    assert kind.__module__ != "transformers.models.vit.modeling_vit"
    adopted = adopt(model, InputOptions(size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3))
    assert (adopted.scores, len(adopted.categories)) == (None, 0)  # its name says nothing
    model.__class__ = type("MineForImageClassification", (kind,), {})
    result = run(model, image, "*.0", image.parent / "maps", size=(32, 32))
    named = [guess.name for guess in result.images[0].outcome.prediction]
    assert len(named) == 3 and "dog" in named
