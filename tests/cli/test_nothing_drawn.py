"""A run without a single picture has failed, and says why."""

from __future__ import annotations

import re
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
    options = ("--weights", "none", "--preset", "none")
    run = ("run", net, picture, "--layers", layers, "--out", out, *options)
    outcome = featviz(*run)
    assert outcome.code == featviz(*run, "--resume").code == code, outcome.err
    if reasons is None:
        assert "error: " not in outcome.err
        assert "warning: never ran: unused" in outcome.err
        return
    assert f"error: no picture was drawn; {reasons}" in outcome.err
    assert "hint: take other --layers, or other --channels" in outcome.err
    assert "warning: " not in outcome.err


def test_channels_that_no_layer_has_are_named_and_the_command_can_be_mended(
    featviz: Run, nets: str, picture: Path, out: Path
) -> None:
    """The error has the numbers that there are, and no line invites to look at nothing;
    the corrected command replaces what was left, while a run with pictures stays."""
    run = ("run", f"{nets}:grey", picture, "--layers", "Conv2d", "--out", out)

    failed = featviz(*run, "--channels", 99)
    mended = featviz(*run, "--channels", 0)
    again = featviz(*run, "--channels", 1)

    assert failed.code == 1
    lines = failed.err.splitlines()
    assert re.search(r"no picture was drawn; skipped: layer 0 \(has \d+ ch", lines[-2])
    assert lines[-2].endswith("), none of 99)")
    assert lines[-1].startswith("hint: take other --layers, or other --channels;")
    assert mended.code == 0, mended.err
    assert "--out" in again.err
    assert "holds a run, 1 image complete" in again.err


def test_a_run_of_failures_alone_is_not_in_the_way(
    featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """Its run.json says what failed, and the next command may have the folder."""
    run = ("run", f"{nets}:grey", "--layers", "Conv2d", "--out", out)
    assert featviz(*run, folder / "b.png").code == 1
    assert (out / "run.json").is_file()
    assert featviz(*run, folder / "a.png").code == 0
