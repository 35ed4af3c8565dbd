"""The table of docs/models.md: what people have, the command, and whether it works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Outcome
from safetensors.torch import save_file

pytest.importorskip("transformers", reason="transformers is not installed")

from models.hf_folders import MODELS, edit, photo, save, theirs, transformers
from models.model_tables import Row, check_row, rows

TITLE = "Hugging Face folders"


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the rows name, in one folder."""
    root = tmp_path_factory.mktemp("things")
    photo(90, 60).save(root / "photo.jpg")
    for family in set(MODELS) | {"vit"}:
        save(family, root / family)
    weights = (root / "vit" / "model.safetensors").read_bytes()
    (root / "tuned.safetensors").write_bytes(weights)
    edit(save("vit", root / "remote"), auto_map={"AutoModel": "modeling.Net"})
    edit(save("vit", root / "quantised"), quantization_config={"quant_method": "gptq"})
    torch.save(theirs(save("vit", root / "old")).state_dict(), root / "old" / "pytorch_model.bin")
    (root / "old" / "model.safetensors").unlink()
    text = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    transformers.BertModel(transformers.BertConfig(**text)).save_pretrained(root / "bert")
    (root / "folder").mkdir()
    (root / "folder" / "weights.pth").touch()
    (root / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "vit"}
    (root / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    factors = {f"base_model.model.head.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    save_file(factors, root / "adapter" / "adapter_model.safetensors")
    _save_timm(root / "timm-folder")
    program = torch.export.export(theirs(root / "vit"), (torch.zeros(1, 3, 32, 32),))
    torch.export.save(program, root / "vit.pt2")
    return root


def _save_timm(folder: Path) -> None:
    import timm

    folder.mkdir()
    save_file(timm.create_model("test_resnet").state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"architecture": "test_resnet"}')


@pytest.mark.parametrize("row", rows(TITLE, 26), ids=lambda row: row.command)
def test_each_row_is_true(
    row: Row,
    things: Path,
    tmp_path: Path,
    featviz: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What works draws pictures; what does not ends with the words of the table."""
    monkeypatch.chdir(things)
    check_row(row, tmp_path / "out", featviz)
