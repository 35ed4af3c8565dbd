"""What a command line leaves: its error line, its files, its complete images."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from conftest import Outcome

Run = Callable[..., Outcome]

NETS = """
import torch
from torch import nn
from torch.nn import functional as F

class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.again = nn.Conv2d(4, 4, 3)
    def forward(self, x):
        x = F.relu(self.conv(x))
        return torch.relu(self.again(x)).relu_()

class Picky(nn.Module):
    def forward(self, x):
        if x.shape[-1] == 13:
            raise ValueError("no picture may be 13 wide")
        return x

def picky():
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(nn.ReLU(), Picky()))

def grey(width=2):
    return nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU(inplace=True))
"""


def refused(outcome: Outcome, code: int, message: str) -> None:
    """One error line, at most one hint, nothing else; nothing on stdout."""
    assert outcome.code == code, outcome.err
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert re.match(f"error: .*{message}", lines[0]), outcome.err
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), outcome.err


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def images_done(root: Path) -> list[str]:
    return sorted(p.parent.relative_to(root).as_posix() for p in root.rglob("manifest.json"))
