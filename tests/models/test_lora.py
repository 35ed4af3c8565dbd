"""Adapters (LoRA) are merged before featviz sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from featviz.errors import LoadError
from models.loading import load


def test_the_folder_of_an_adapter_is_told_how_to_become_a_model(tmp_path: Path) -> None:
    """The hint is what peft does with an adapter and its model."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(
        LoadError, match="holds an adapter, which is no model by itself"
    ) as caught:
        load(tmp_path)
    assert "model.merge_and_unload().save_pretrained('DIR')" in str(caught.value.hint)
