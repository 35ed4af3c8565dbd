"""A run without a single picture has failed, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Run

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.unused = nn.Conv2d(1, 2, 1)
        self.odd = nn.Identity()
    def forward(self, x):
        self.odd(torch.zeros(2, 3, 4, 5, 6, 7))
        return self.conv(x)
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "user_idle.py").write_text(CODE)
    return f"{tmp_path}/user_idle.py:Net"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layers", "code", "reasons"),
    [
        ("odd,unused", 1, "never ran: unused; skipped: odd ("),
        ("conv,odd,unused", 0, None),
    ],
)
def test_a_run_that_drew_nothing_has_failed(
    layers: str,
    code: int,
    reasons: str | None,
    net: str,
    featviz: Run,
    picture: Path,
    out: Path,
) -> None:
    """The exit code is 1 and the error has the reasons, also of images that are kept; with
    one picture they are warnings, as ever."""
    options = ("--weights", "none", "--input-channels", 1)
    run = ("run", net, picture, "--layers", layers, "--out", out, *options)
    outcome = featviz(*run)
    assert outcome.code == featviz(*run, "--resume").code == code, outcome.err
    if reasons is None:
        assert "error: " not in outcome.err
        assert "warning: never ran: unused" in outcome.err
        return
    assert f"error: no picture was drawn; {reasons}" in outcome.err
    assert "hint: --layers takes others" in outcome.err
    assert "warning: " not in outcome.err
