"""Hostile and broken model files: nothing in them runs, and each ends in one clear
line."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from broken_checkpoints import BROKEN, written
from conftest import Outcome, Run
from hostile_pickles import around, named
from torch import nn

from featviz.errors import LoadError
from featviz.models import weights
from models.loading import load

pytestmark = pytest.mark.usefixtures("deadline")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody reaches for the network, not even in vain."""
    tried: list[object] = []

    def refuse(*args: object, **kwargs: object) -> None:
        tried.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert tried == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the file is, deep enough to climb out of."""
    inner = tmp_path / "one" / "two"
    inner.mkdir(parents=True)
    return inner


def listing(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of all that lies in a folder."""
    stats = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


ONE_LINE = re.compile(r"error: [^\n]{1,600}\n(hint: [^\n]{1,600}\n)?")


def assert_one_line(done: Outcome, message: str) -> None:
    """An error, and maybe a hint, that a terminal can show; nothing on stdout."""
    assert ONE_LINE.fullmatch(done.err)
    assert done.err.replace("\n", "").isprintable()
    assert message in done.err.splitlines()[0]
    assert "weights_only" not in done.err
    assert done.out == ""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("command", ["run {} picture.png --out out", "identify {}"])
@pytest.mark.parametrize(
    "name",
    [
        "empty",
        "half a file",
        "zip bomb",
        "legacy cut at the end",
        "shard outside",
        "FIFO",
    ],
)
def test_a_broken_file_ends_in_one_clear_line(
    name: str, command: str, folder: Path, picture: Path, featviz: Run
) -> None:
    """It says what the file looks like or what is wrong with it; no hang, no traceback,
    no trace of it: an error with its name, maybe a hint."""
    make, message = BROKEN[name]
    path = make(folder)
    before = listing(picture.parent)
    done = featviz(*command.format(path).split())
    assert_one_line(done, message)
    assert done.code in ([1] if path.is_file() else [1, 2])
    assert path.name in done.err or name == "shard outside"
    assert listing(picture.parent) == before


def test_many_names_are_counted(folder: Path) -> None:
    """A file that names a thousand functions does not fill the screen."""
    path = written(around([named(f"m{n:04}:f") for n in range(1000)]))(folder)
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
        ("[run.size]\na = 8", "size={'a': 8}: expected pixels from 1 to 65536"),
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
