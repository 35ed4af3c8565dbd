"""LoRA adapters, as peft saves them, are merged into the model that --arch names."""

from __future__ import annotations

import json
import logging
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from featviz.errors import LoadError, UsageError
from featviz.models import sources
from models.loading import load

peft: Any = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = pytest.mark.usefixtures("imports_undone")

CODE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.block = nn.Sequential(nn.Linear(3, 2))
        self.table = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 1)
        for parameter in self.parameters():
            nn.init.ones_(parameter)
"""

FACTORS = {
    "conv.lora_A.weight": torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]),
    "conv.lora_B.weight": torch.tensor([[1.0], [-1.0]])[..., None, None],
    "block.0.lora_A.weight": torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]]),
    "block.0.lora_B.weight": torch.tensor([[1.0, 0.0], [3.0, 5.0]]),
    "table.lora_embedding_A": torch.tensor([[1.0, 2.0, 3.0]]),
    "table.lora_embedding_B": torch.tensor([[1.0], [10.0]]),
    "head.weight": torch.tensor([[7.0, 8.0]]),
    "head.bias": torch.tensor([9.0]),
}
"""Factors of rank 1 and 2, and a head that replaces the model's."""

MERGED = {
    "conv.weight": [[[[3.0, 5.0], [7.0, 9.0]]], [[[-1.0, -3.0], [-5.0, -7.0]]]],
    "block.0.weight": [[2.0, 1.0, 3.0], [4.0, 6.0, 7.0]],
    "table.weight": [[3.0, 21.0], [5.0, 41.0], [7.0, 61.0]],
    "head.weight": [[7.0, 8.0]],
    "head.bias": [9.0],
    "conv.bias": [1.0, 1.0],
}
"""1 + B·A·alpha/r by hand, for alpha = 2 and weights of ones: a factor of 2, of rank 2 one of 1."""


def adapter(folder: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """An adapter's folder, beside the code of the model."""
    (folder / "user_net.py").write_text(CODE)
    (folder / "lora").mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "base_model_name_or_path": "acme/net"}
    (folder / "lora" / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    tensors = FACTORS if tensors is None else tensors
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "lora" / "adapter_model.safetensors")
    return folder / "lora"


def merged(folder: Path, **options: Any) -> nn.Module:
    return load(folder, arch=f"{folder.parent}/user_net.py:Net", **options)


def test_an_adapter_is_merged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Convolution, linear layer and embedding are those written by hand; the head is replaced."""
    with caplog.at_level(logging.INFO, "featviz"):
        weights = merged(adapter(tmp_path)).state_dict()
    assert {name: weights[name].tolist() for name in MERGED} == MERGED
    assert "lora: merged LoRA into 3 layers, replaced 2 tensors" in caplog.messages


def test_a_header_that_begins_as_a_pickle_does(tmp_path: Path) -> None:
    """A safetensors header of 640 bytes begins with the first two bytes of a pickle."""
    path = tmp_path / "weights.safetensors"
    for length in range(500, 700):
        save_file({"x" * length: torch.zeros(1)}, path)
        if path.read_bytes().startswith(b"\x80\x02"):
            break
    assert path.read_bytes().startswith(b"\x80\x02")
    assert sources.sniff(path) == sources.SAFETENSORS


LINEAR = {k: v for k, v in FACTORS.items() if k.startswith("block")}


def pair(layer: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        ({}, {"peft_type": "IA3"}, "lora is no LoRA"),
        ({**LINEAR, "block.0.lora_magnitude_vector": torch.ones(2)}, {}, "other half, or others"),
        (LINEAR, {"use_dora": True}, "without their other half.*lora_magnitude_vector"),
        (LINEAR, {"alpha_pattern": {"(a+)+b": 1}}, "alpha pattern"),
        ({"block.0.lora_A.weight": torch.ones(2, 3)}, {}, r"half, or others: block\.0\.lora_B"),
        ({k.replace("0", "1"): v for k, v in LINEAR.items()}, {}, r"block\.1\.weight, which the"),
        (pair("head", torch.ones(1, 200_000), torch.ones(200_000, 1)), {}, "size mismatch for "),
        (pair("all-linear", torch.ones(1, 2), torch.ones(3, 1)), {}, "all-linear.weight, which"),
        ({"head.bias": torch.ones(4)}, {}, r"size mismatch for head\.bias: .*\[4\]"),
    ],
)
def test_what_is_no_lora_for_the_model_gets_one_line(
    tensors: dict[str, Tensor], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Other adapters, and factors that do not fit, which get no memory: nothing is guessed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(LoadError, match=message) as caught:
        merged(adapter(tmp_path, tensors, **changes))
    assert "\n" not in caught.value.message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


IGNORED: dict[str, Any] = {
    **{"target_modules": "(.*.*.*.*)*x", "exclude_modules": "(a+)+$"},
    **{"rank_pattern": {"(.*.*.*.*)*x": 10**9}, "layers_pattern": "(.*.*.*.*)*x"},
    **{"modules_to_save": ["conv", "../../secret"], "target_parameters": ["(.*.*)*x"]},
    **{"init_lora_weights": "pissa", "corda_config": {"cache_file": "/"}},
    **{"auto_mapping": {"base_model_class": "Popen", "parent_library": "subprocess"}},
    **{"base_model_name_or_path": "/etc", "revision": "evil", "task_type": "CAUSAL_LM"},
    **{"layer_replication": [[0, 10**9]], "megatron_config": {}, "megatron_core": "os"},
}


def test_only_numbers_of_the_configuration_are_used(
    tmp_path: Path, watched: Callable[[], list[str]]
) -> None:
    """Patterns that take for ever, classes, other models and files: the result is that without."""
    weights = merged(adapter(tmp_path, **IGNORED)).state_dict()
    assert {name: weights[name].tolist() for name in MERGED} == MERGED
    assert not watched()


def test_an_adapter_alone_asks_for_its_model(tmp_path: Path) -> None:
    """By the name that peft has kept."""
    with pytest.raises(UsageError, match=r"is a LoRA adapter, and needs the model .*: acme/net"):
        load(adapter(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["head"], "bias": "all"},
        {"use_rslora": True, "alpha_pattern": {"0": 6}, "rank_pattern": {"conv": 1}},
        {"alpha_pattern": {"block.0": 4, "lock.0": 9}},
        {"use_dora": True},
    ],
)
def test_the_same_as_peft(options: dict[str, Any], tmp_path: Path) -> None:
    """The weights are those of peft's own merged model, and train as before."""
    folder = adapter(tmp_path)
    net = load(f"{tmp_path}/user_net.py:Net")
    targets = ["conv", "0", "table"]
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=targets, **options)
    torch.manual_seed(0)
    model = peft.get_peft_model(net, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    model.save_pretrained(folder)
    module = merged(folder)
    weights, expected = module.state_dict(), model.merge_and_unload().state_dict()
    assert set(weights) == set(expected) and all(p.requires_grad for p in module.parameters())
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name])


def test_without_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint is the extra to install."""
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(LoadError, match="merged by the package peft") as caught:
        merged(adapter(tmp_path))
    assert caught.value.hint == "pip install 'featviz[hf]'"
