"""Hostile and broken model files: nothing in them runs, and each ends in one clear
line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from broken_checkpoints import written
from conftest import Run
from hostile_pickles import around, named
from torch import nn

from featviz.errors import LoadError
from featviz.models import weights
from models.loading import load

pytestmark = pytest.mark.usefixtures("deadline")


def test_many_names_are_counted(tmp_path: Path) -> None:
    """A file that names a thousand functions does not fill the screen."""
    path = written(around([named(f"m{n:04}:f") for n in range(1000)]))(tmp_path)
    with pytest.raises(
        LoadError, match=r"needs m0000\.f, .*, m0019\.f and 980 more, which"
    ):
        weights.read(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "it is no regular file"),
        (b"\xff\xfe{}", "utf-8"),
        (b'{"a":' * 100_000, "more than 100 levels"),
        (b"[" + b"9" * 10**6 + b"]", "is no JSON"),
    ],
)
def test_a_config_beside_weights_that_is_no_small_file(
    content: bytes | None, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights do not need it: one line says that it is not read, and the model
    loads."""
    torch.save(nn.Conv2d(3, 2, 1), tmp_path / "net.pth")
    config = tmp_path / "config.json"
    if content is None:
        os.mkfifo(config)
    else:
        config.write_bytes(content)
    assert load(tmp_path / "net.pth").out_channels == 2
    line = caplog.messages[0]
    assert reason in line
    assert line.endswith("net.pth is loaded without it")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[runn]\nsize = 8", "has 'runn', which no command"),
        ("[featviz]\nsize = 8", "has 'featviz', which no command"),
        ("[run.size]\na = 8", "--size {'a': 8}: expected pixels from 1 to 65536"),
        ("run = 5", "has 'run', which featviz run lacks"),
        ("[[run]]\nsize = 8", "has 'run', which featviz run lacks"),
        ('["a\\u001b]0;b"]\nsize = 8', "has 'a\\x1b]0;b', which no command"),
    ],
)
def test_a_toml_table_is_a_command(
    text: str, message: str, tmp_path: Path, featviz: Run
) -> None:
    """A table or key that no command has is refused, with the nearest that there is."""
    (tmp_path / "c.toml").write_text(text)
    done = featviz("run", "resnet18", "x.png", "--config", tmp_path / "c.toml")
    assert done.code == 2
    assert message in " ".join(done.err.replace("│", " ").split())
