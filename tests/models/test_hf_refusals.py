"""Hugging Face folders that cannot be used, or mean harm: one line with the remedy."""

from __future__ import annotations

import importlib
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Outcome
from safetensors.torch import save_file
from torch import nn

from featviz.errors import FeatvizError, LoadError
from featviz.models.load import ModelOptions, load_model
from featviz.models.preprocess import InputOptions

Run = Callable[..., Outcome]

VIT = {"architectures": ["ViTModel"], "model_type": "vit"}
TINY: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "image_size": 8,
    "patch_size": 4,
}


def load(spec: object, **options: Any) -> nn.Module:
    return load_model(ModelOptions(str(spec), device="cpu", **options), InputOptions()).module


def folder(path: Path, **config: Any) -> Path:
    """A config, and a file of weights with one tensor."""
    (path / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.zeros(2)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("google/vit-base", "no model file 'google/vit-base'", "hf download google/vit-base"),
        ("hf:google/vit", "no folder 'google/vit'", "--local-dir vit, and MODEL is hf:vit"),
        ("hf:nowhere", "no folder 'nowhere'", "check the path"),
        ("models/net.pth", "no model file 'models/net.pth'", "check the path"),
    ],
)
def test_no_folder(spec: str, message: str, hint: str) -> None:
    """A model id is no folder: the hint says how to download it."""
    with pytest.raises(FeatvizError) as caught:
        load(spec)
    assert message in caught.value.message and hint in str(caught.value.hint)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    """The error says what it lacks and holds, and how its weights are given."""
    with pytest.raises(LoadError, match=r"lacks config\.json \(it holds nothing\)"):
        load(tmp_path)
    torch.save({}, tmp_path / "net.pth")
    with pytest.raises(LoadError, match=r"lacks config\.json \(it holds net\.pth\)") as caught:
        load(tmp_path)
    assert caught.value.hint.endswith("net.pth --arch MODEL")  # type: ignore[union-attr]
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(LoadError, match="holds an adapter without the model"):
        load(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "names no architecture of transformers"),
        ({"architectures": []}, "names no architecture of transformers"),
        ({"architectures": [3]}, "names no architecture of transformers"),
        ({"encoder_name": "resnet34"}, "names no architecture of transformers"),
        ({"architecture": "no_such_model_of_timm"}, "is one of timm's, or of none"),
        ({**VIT, "auto_map": {"AutoModel": "evil.Evil"}}, "wants code of its own to run"),
        ({**VIT, "vision_config": {"auto_map": {"a": "b"}}}, "wants code of its own to run"),
        ({**VIT, "quantization_config": {"bits": 4}}, "of ViTModel are quantised"),
        ({**VIT, "num_hidden_layers": 10**9}, "num_hidden_layers of 1,000,000,000"),
        ({**VIT, "depths": [10**6] * 9}, "depths of 9,000,000"),
        ({**VIT, "num_labels": 10**6}, "num_labels of 1,000,000; 65,536 is the most"),
        ({**VIT, "backbone": "hf-hub:evil/model"}, "names a backbone elsewhere: hf-hub:evil/mod"),
    ],
)
def test_a_config_that_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Other libraries' configs, code from files, quantised weights and sizes without bounds."""
    with pytest.raises(LoadError, match=message):
        load(folder(tmp_path, **config))


def test_a_config_that_is_no_config(tmp_path: Path) -> None:
    """Damage, depth, a list and a FIFO are errors that name the file."""
    file = folder(tmp_path) / "config.json"
    for text, message in (
        ("{", "is no JSON"),
        ("[" * 200 + "]" * 200, "levels inside one another"),
        ("[1]", "names no architecture"),
        ('{"architectures": ["ViTModel"], "x": NaN}', "JSON has no number NaN"),
    ):
        file.write_text(text)
        with pytest.raises(LoadError, match=message):
            load(tmp_path)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint is the extra to install, for a folder and for a file beside a config.json."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    for spec in (folder(tmp_path, **VIT), tmp_path / "model.safetensors"):
        with pytest.raises(LoadError, match="ViTModel is a model of the package transf") as caught:
            load(spec)
        assert caught.value.hint == "pip install 'featviz[hf]'"


class TestWithTransformers:
    """What only the library itself can tell."""

    transformers: Any

    @pytest.fixture(autouse=True)
    def _needs_transformers(self) -> None:
        reason = "transformers is not installed"
        type(self).transformers = pytest.importorskip("transformers", reason=reason)

    @pytest.mark.parametrize(
        "name",
        [
            "NoSuchModel",
            "os",
            "__class__",
            "ViTConfig",
            "PreTrainedModel",
            "Trainer",
            "a.b",
            "évil",
        ],
    )
    def test_names_that_are_no_model(self, name: str, tmp_path: Path) -> None:
        """Only subclasses of PreTrainedModel that transformers.models defines are taken."""
        with pytest.raises(LoadError, match=r"which is no model of transformers \d"):
            load(folder(tmp_path, architectures=[name]))

    def test_a_model_of_text(self, tmp_path: Path) -> None:
        """A model that takes no image says what it takes."""
        config = self.transformers.BertConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            vocab_size=9,
        )  # fmt: skip
        self.transformers.BertModel(config).save_pretrained(tmp_path)
        with pytest.raises(LoadError, match="BertModel takes input_ids first, and featviz gives"):
            load(tmp_path)

    def test_weights_of_another_model(self, tmp_path: Path) -> None:
        """Missing tensors are named."""
        with pytest.raises(LoadError, match=r"model\.safetensors does not fit ViTModel: missing "):
            load(folder(tmp_path, **VIT, **TINY))

    def test_another_shape(self, tmp_path: Path) -> None:
        """A tensor of another shape is an error in one line."""
        self.saved(tmp_path)
        config = {**VIT, **TINY, "intermediate_size": 16}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(LoadError) as caught:
            load(tmp_path)
        assert "\n" not in caught.value.message and "ViTModel" in caught.value.message

    @pytest.mark.parametrize(
        "value",
        [
            {"hidden_size": "8"},
            {"hidden_size": 7},
            {"hidden_act": "__import__('os')"},
            {"patch_size": 0},
            {"id2label": {"x": "y"}},
            {"image_size": [1, 2, 3]},
            {"layer_norm_eps": "small"},
        ],
    )
    def test_values_that_make_no_model(self, value: dict[str, Any], tmp_path: Path) -> None:
        """Whatever the library raises of a config is one line."""
        self.saved(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({**VIT, **TINY, **value}))
        with pytest.raises(FeatvizError) as caught:
            load(tmp_path)
        assert "\n" not in caught.value.message

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({"hidden_size": 2**20}, "asks for a larger model than its weights"),
            ({"num_hidden_layers": 2**16}, "asks for a larger model than its weights"),
            ({"image_size": 2**20, "patch_size": 1}, "asks for a larger model than its weights"),
        ],
    )
    def test_sizes_beyond_the_weights(
        self, value: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        """The config cannot make more of a file than a small multiple of its bytes."""
        self.saved(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({**VIT, **TINY, **value}))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(LoadError, match=message):
            load(tmp_path)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
        assert grown < 128 * 1024

    def test_nothing_beside_the_weights_is_read_or_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Python files, adapters, generation configs and pickles beside safetensors stay closed,
        whatever keys of the config lead to them."""
        self.saved(tmp_path)
        config = {
            **VIT,
            **TINY,
            "transformers_weights": "other.bin",
            "_attn_implementation": "evil/kernel",
            "attn_implementation": "evil/kernel",
            "fusion_config": {"patch_embeddings": True},
            "dtype": "load",
            "name_or_path": "evil/model",
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        for name in ("modeling_vit.py", "configuration_vit.py", "conftest.py"):
            (tmp_path / name).write_text("raise SystemExit('run')")
        for name in ("adapter_config.json", "generation_config.json", "pytorch_model.bin"):
            (tmp_path / name).write_text("{")
        monkeypatch.chdir(tmp_path)
        opened: list[str] = []
        on = [True]

        def watch(event: str, args: Any) -> None:
            if on[0] and event == "open" and str(args[0]).startswith(str(tmp_path)):
                opened.append(Path(args[0]).name)
            if on[0] and event in ("socket.connect", "subprocess.Popen", "os.system"):
                opened.append(event)

        importlib.invalidate_caches()
        sys.addaudithook(watch)
        try:
            module = load(tmp_path)
        finally:
            on[0] = False
        assert set(opened) <= {"config.json", "model.safetensors"} and "config.json" in opened
        assert module.config._attn_implementation == "eager"  # type: ignore[union-attr]

    def saved(self, path: Path) -> None:
        """A tiny ViTModel."""
        config = self.transformers.ViTConfig(**TINY)
        self.transformers.ViTModel(config).save_pretrained(path)
