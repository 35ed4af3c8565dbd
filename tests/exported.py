"""A small torch.export program, exported once, and archives made of its records; for tests."""

from __future__ import annotations

import functools
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Records = dict[str, bytes]
"""Contents by name, without the folder that all are in."""

PROGRAM = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
INPUTS = "data/sample_inputs/model.pt"


class Net(nn.Module):
    """One convolution; the input has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        y: Tensor = self.conv(image)
        return y


def export(module: nn.Module, path: Path, *shape: int, dynamic: Any = None) -> Path:
    """Save a module as a program for one input, of [1, 3, 16, 20] unless said otherwise."""
    example = (torch.zeros(shape or (1, 3, 16, 20)),)
    torch.export.save(torch.export.export(module, example, dynamic_shapes=dynamic), path)
    return path


@functools.cache
def _exported(dynamic: bool) -> bytes:
    torch.manual_seed(0)
    free = torch.export.Dim.AUTO
    shapes = ({0: free, 2: free, 3: free},) if dynamic else None
    example = (torch.zeros(2 if dynamic else 1, 3, 16, 20),)
    file = io.BytesIO()
    torch.export.save(torch.export.export(Net().eval(), example, dynamic_shapes=shapes), file)
    return file.getvalue()


def records(dynamic: bool = False) -> Records:
    """The records of Net as torch.export.save wrote it."""
    with zipfile.ZipFile(io.BytesIO(_exported(dynamic))) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def packed(path: Path, contents: Mapping[str, bytes], root: str = "net", **options: Any) -> Path:
    """An archive of records, in the folder that a file of that name would have."""
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in contents.items():
            archive.writestr(f"{root}/{name}", content)
    return path


def edit(contents: Records, name: str, change: Callable[[Any], object]) -> None:
    """Change a record of JSON."""
    document = json.loads(contents[name])
    change(document)
    contents[name] = json.dumps(document).encode()
