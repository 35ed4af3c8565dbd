"""The small model, in memory and in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from .small_net import Net


@pytest.fixture
def net() -> nn.Module:
    """Net with weights that are always the same."""
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def net_file(tmp_path: Path) -> Path:
    """A factory of Net for command lines."""
    path = tmp_path / "nets.py"
    tests = str(Path(__file__).parent.parent)
    path.write_text(
        f"import sys\nsys.path.insert(0, {tests!r})\nfrom hooks.small_net import Net\n"
    )
    return path
