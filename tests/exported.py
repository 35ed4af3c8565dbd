"""Programs of torch.export in files, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn


def export(
    module: nn.Module,
    path: Path,
    *shape: int,
    dynamic: Any = None,
    decomposed: bool = False,
) -> Path:
    """Save a module as a program for one input, of [1, 3, 16, 20] unless said
    otherwise."""
    example = (torch.zeros(shape or (1, 3, 16, 20)),)
    program = torch.export.export(module, example, dynamic_shapes=dynamic)
    torch.export.save(program.run_decompositions() if decomposed else program, path)
    return path
