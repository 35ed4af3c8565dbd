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

from featviz.errors import LoadError
from models.hf_folders import edit, save, theirs, transformers
from models.loading import load

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
        *(
            ({"architectures": [name]}, NO_MODEL)
            for name in (
                "NoSuchModel",
                "os",
                "__class__",
                "PreTrainedModel",
                "a.b",
                "TimmBackbone",
            )
        ),
    ],
)
def test_a_config_that_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Other libraries' configs, code from files, quantised weights, and classes that
    are not on the list: models of transformers.models that take an image."""
    with pytest.raises(LoadError, match=message):
        load(folder(tmp_path, **config))


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint is the extra to install, for a folder and for a file beside a
    config.json."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    for spec in (folder(tmp_path, **VIT), tmp_path / "model.safetensors"):
        with pytest.raises(
            LoadError, match="ViTModel is a model of the package transf"
        ) as caught:
            load(spec)
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
    ("detr", {"backbone_config": {"model_type": "evil"}}, "could not be built"),
]
"""Configs that lead out of the folder: the honest family, the change, and the words."""


@pytest.mark.parametrize(("family", "change", "words"), REFUSED)
def test_a_config_that_leads_elsewhere(
    family: str,
    change: dict[str, Any],
    words: str,
    saved: Path,
    tmp_path: Path,
    watched: Callable[[], list[str]],
) -> None:
    """Folders, files and hubs that a config names stay closed, through timm, too."""
    _secret(tmp_path)
    change = json.loads(
        json.dumps(change).replace("{secret}", str(tmp_path / "secret"))
    )
    given = shutil.copytree(saved / family, tmp_path / "given")
    config = {**json.loads((given / "config.json").read_text()), **change}
    (given / "config.json").write_text(json.dumps(config))
    watched()
    with pytest.raises(LoadError, match=words) as caught:
        load(given)
    assert "\n" not in caught.value.message and not watched()


IGNORED: dict[str, Any] = {
    **{"transformers_weights": "../secret/code.bin", "gguf_file": "../secret/code.bin"},
    **{"_attn_implementation": "evil/kernel", "attn_implementation": "evil/kernel"},
    **{"use_kernels": True, "kernel_config": {"a": "e/k"}, "torch_dtype": "../secret"},
    **{
        "name_or_path": "evil/model",
        "_name_or_path": "../secret",
        "model_type": "evil",
    },
    **{"backbone_config": BACKBONE, "vision_config": WRAPPED, "auto_map": {}},
    **{"adapter_kwargs": {"_adapter_model_path": "../secret"}, "_from_auto": "evil"},
}
"""Values that change nothing."""


@pytest.mark.slow
def test_a_config_whose_values_are_not_used(
    saved: Path, tmp_path: Path, watched: Callable[[], list[str]]
) -> None:
    """How and from where to load is not the config's to say: the weights are those of
    the folder, and of all its files just config, weights and image processor are
    opened."""
    _secret(tmp_path)
    given = shutil.copytree(saved / "vit", tmp_path / "given")
    for name in (
        "modeling_vit.py",
        "chat_template.jinja",
        "adapter_config.json",
        "tokenizer.json",
    ):
        shutil.copy(tmp_path / "secret" / "code.py", given / name)
    for name in (
        "generation_config.json",
        "pytorch_model.bin",
        "adapter_model.safetensors",
    ):
        os.mkfifo(given / name)
    edit(given, **IGNORED)
    expected = theirs(saved / "vit").state_dict()
    watched()
    module = load(given)
    assert all(
        torch.equal(tensor, expected[k]) for k, tensor in module.state_dict().items()
    )
    assert module.config._attn_implementation == "eager"  # type: ignore[union-attr]
    assert not watched()


@pytest.mark.slow
def test_a_folder_that_names_timm_is_timms(tmp_path: Path) -> None:
    """What transformers saves of a model of timm has timm's names, and is loaded by
    timm; so is the backbone of a detector that has a plain name of timm's."""
    pytest.importorskip("timm", reason="timm is not installed")
    torch.manual_seed(0)
    config = transformers.TimmWrapperConfig.from_dict(
        {"architecture": "test_resnet", "num_classes": 3}
    )
    model = transformers.TimmWrapperForImageClassification(config)
    model.save_pretrained(tmp_path / "wrapped")
    assert torch.equal(
        load(tmp_path / "wrapped").conv1[0].weight,  # type: ignore[index,union-attr]
        model.timm_model.conv1[0].weight,
    )
    detr = transformers.DetrConfig(
        **{"use_timm_backbone": True, "backbone": "resnet18"},
        **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 4},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
    )
    transformers.DetrForObjectDetection(detr).save_pretrained(tmp_path / "detr")
    module, expected = load(tmp_path / "detr"), theirs(tmp_path / "detr").state_dict()
    assert all(
        torch.equal(tensor, expected[k]) for k, tensor in module.state_dict().items()
    )


class _Code:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def _secret(root: Path) -> None:
    """A folder that no model may open: a model of timm's, code, a pickle that runs
    code."""
    (root / "secret").mkdir()
    (root / "secret" / "code.py").write_text("raise SystemExit('run')")
    torch.save({"a": _Code(root / "ran")}, root / "secret" / "code.bin")
    folder(root / "secret", architecture="test_resnet", architectures=["ViTModel"])
    (root / "secret" / "model.safetensors").rename(
        root / "secret" / "weights.safetensors"
    )
