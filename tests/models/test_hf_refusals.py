"""Hugging Face folders that cannot be used, or mean harm: one line with the remedy, and
no other file, connection or code."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from featviz.errors import LoadError
from models.hf_folders import edit, save, theirs, transformers
from models.loading import load, same_weights

VIT = {"architectures": ["ViTModel"], "model_type": "vit"}
TINY: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "image_size": 8,
    "patch_size": 4,
}


def folder(path: Path, **config: Any) -> Path:
    """A config, and a file of weights with one tensor."""
    (path / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.zeros(2)}, path / "model.safetensors")
    return path


NO_MODEL = r"which is no model of transformers \d"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "names no architecture of transformers"),
        ({"encoder_name": "resnet34"}, "names no architecture of transformers"),
        (
            {"architecture": "no_such_model_of_timm"},
            "names no architecture of transformers",
        ),
        (
            {**VIT, "vision_config": {"auto_map": {"a": "b"}}},
            "wants code of its own to run",
        ),
        (
            {**VIT, **TINY},
            r"model\.safetensors does not fit ViTModel: missing or of another",
        ),
        ({"architectures": ["NoSuchModel"]}, NO_MODEL),
        ({"architectures": ["os"]}, NO_MODEL),
        ({"architectures": ["__class__"]}, NO_MODEL),
        ({"architectures": ["PreTrainedModel"]}, NO_MODEL),
        ({"architectures": ["a.b"]}, NO_MODEL),
        ({"architectures": ["TimmBackbone"]}, NO_MODEL),
    ],
)
def test_a_config_that_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Other libraries' configs, code from files, quantised weights, and classes that
    are not on the list: models of transformers.models that take an image."""
    with pytest.raises(LoadError, match=message):
        load(folder(tmp_path, **config))


def test_a_folder_of_timm_without_weights_is_refused(tmp_path: Path) -> None:
    """Its architecture is known, yet none of transformers: the file is asked for."""
    path = folder(tmp_path, architecture="resnet18")
    (path / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="names no architecture of tr") as caught:
        load(path)
    assert caught.value.hint is not None
    assert "give the file of weights" in caught.value.hint


@pytest.mark.parametrize("spec", ["", "model.safetensors"], ids=["folder", "file"])
def test_without_transformers(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint is the extra to install, for a folder and for a file beside a
    config.json."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = "ViTModel is a model of the package transf"
    with pytest.raises(LoadError, match=message) as caught:
        load(folder(tmp_path, **VIT) / spec)
    assert caught.value.hint == "pip install 'featviz[hf]'"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Honest folders."""
    root = tmp_path_factory.mktemp("saved")
    for family in ("vit", "detr", "clip"):
        save(family, root / family)
    transformers.ViTModel(transformers.ViTConfig(**TINY)).save_pretrained(root / "tiny")
    return root


EVIL = "local-dir:{secret}"
TIMM: dict[str, Any] = {"architectures": ["TimmWrapperForImageClassification"]}
WRAPPED = {
    "model_type": "timm_wrapper",
    "architecture": EVIL,
    "model_args": {"pretrained": True},
}
BARE = {"model_type": "evil", "architecture": EVIL}
BACKBONE = {"model_type": "timm_backbone", "backbone": EVIL}
PLAIN = {"use_timm_backbone": False, "backbone_config": None}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("vit", {**TIMM, "architecture": EVIL}, NO_MODEL),
    (
        "vit",
        {"architectures": ["Gemma3nModel"], "vision_config": BARE},
        "elsewhere: local-dir:",
    ),
    (
        "detr",
        {"backbone_config": {**WRAPPED, "num_classes": 3}},
        "elsewhere: local-dir:",
    ),
    (
        "detr",
        {**PLAIN, "use_timm_backbone": True, "backbone": EVIL},
        "names a backbone elsewhere",
    ),
    ("vit", {"parts": [[{"auto_map": {"A": "a.B"}}]]}, "wants code of its own to run"),
    ("vit", {"parts": [{"quantization_config": {"bits": 4}}]}, "are quantised"),
    ("detr", {"backbone_config": {"model_type": "evil"}}, "could not be built"),
]
"""Configs that lead out of the folder: the honest family, the change, and the message."""


@pytest.mark.medium
@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_a_config_that_leads_elsewhere(
    family: str,
    change: dict[str, Any],
    message: str,
    saved: Path,
    tmp_path: Path,
    watched: Callable[[], list[str]],
) -> None:
    """Folders, files and hubs that a config names stay closed, through timm, too."""
    secret = _secret(tmp_path)
    values = json.loads(json.dumps(change).replace("{secret}", str(secret)))
    copy = shutil.copytree(saved / family, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **values}))
    watched()
    with pytest.raises(LoadError, match=message) as caught:
        load(copy)
    assert "\n" not in caught.value.message
    assert not watched()


IGNORED: dict[str, Any] = {
    "transformers_weights": "../secret/code.bin",
    "gguf_file": "../secret/code.bin",
    "_attn_implementation": "evil/kernel",
    "attn_implementation": "evil/kernel",
    "use_kernels": True,
    "kernel_config": {"a": "e/k"},
    "torch_dtype": "../secret",
    "name_or_path": "evil/model",
    "_name_or_path": "../secret",
    "model_type": "evil",
    "backbone_config": BACKBONE,
    "vision_config": WRAPPED,
    "auto_map": {},
    "quantization_config": None,
    "adapter_kwargs": {"_adapter_model_path": "../secret"},
    "_from_auto": "evil",
}
"""Values that change nothing."""

CODE_FILES = (
    "modeling_vit.py",
    "chat_template.jinja",
    "adapter_config.json",
    "tokenizer.json",
)
"""Files that no vision model needs, here with code that would end the process."""

PIPES = (
    "generation_config.json",
    "pytorch_model.bin",
    "adapter_model.safetensors",
)
"""Files that would block whoever opens them."""


@pytest.mark.slow
def test_a_config_whose_values_are_not_used(
    saved: Path, tmp_path: Path, watched: Callable[[], list[str]]
) -> None:
    """How and from where to load is not the config's to say: the weights are those of
    the folder, and of all its files just config, weights and image processor are
    opened."""
    secret = _secret(tmp_path)
    copy = shutil.copytree(saved / "vit", tmp_path / "copy")
    for name in CODE_FILES:
        shutil.copy(secret / "code.py", copy / name)
    for name in PIPES:
        os.mkfifo(copy / name)
    edit(copy, **IGNORED)
    expected = theirs(saved / "vit")
    watched()
    module: Any = load(copy)
    assert same_weights(module, expected)
    assert module.config._attn_implementation == "eager"
    assert not watched()


def wrapped_by_timm() -> tuple[Any, nn.Module]:
    """A model of timm in transformers' wrapper, and itself."""
    settings = {"architecture": "test_resnet", "num_classes": 3}
    config = transformers.TimmWrapperConfig.from_dict(settings)
    model = transformers.TimmWrapperForImageClassification(config)
    return model, model.timm_model


def with_timms_backbone() -> tuple[Any, nn.Module]:
    """A detector whose backbone has a plain name of timm's, and itself."""
    config = transformers.DetrConfig(
        use_timm_backbone=True,
        backbone="resnet18",
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        num_queries=4,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    )
    model = transformers.DetrForObjectDetection(config)
    return model, model


@pytest.mark.slow
@pytest.mark.parametrize("make", [wrapped_by_timm, with_timms_backbone])
def test_a_folder_that_names_timm_is_timms(
    make: Callable[[], tuple[Any, nn.Module]], tmp_path: Path
) -> None:
    """What transformers saves of a model of timm has timm's names, and is loaded by
    timm; so is the backbone of a detector."""
    pytest.importorskip("timm", reason="timm is not installed")
    model, expected = make()
    model.save_pretrained(tmp_path)
    assert same_weights(load(tmp_path), expected)


class _Code:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def _secret(root: Path) -> Path:
    """A folder that no model may open: a model of timm's, code, a pickle that runs
    code."""
    secret = root / "secret"
    secret.mkdir()
    (secret / "code.py").write_text("raise SystemExit('run')")
    torch.save({"a": _Code(root / "ran")}, secret / "code.bin")
    folder(secret, architecture="test_resnet", architectures=["ViTModel"])
    (secret / "model.safetensors").rename(secret / "weights.safetensors")
    return secret
