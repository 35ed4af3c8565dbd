"""What the repository ships works: configurations, trained networks, examples of docstrings."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch
from conftest import ROOT


def train_script(name: str = "digits") -> ModuleType:
    spec = importlib.util.spec_from_file_location("train", ROOT / f"configs/train_{name}_cnn.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shipped_model_is_what_the_script_makes() -> None:
    """Same architecture, one Sequential, and at most 400 KB."""
    path = ROOT / "configs" / "digits_cnn.pth"
    shipped = torch.load(path, weights_only=False)
    assert str(shipped) == str(train_script().build_model(32))
    assert path.stat().st_size <= 400 * 1024
