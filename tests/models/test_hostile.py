"""Hostile and broken model files: nothing in them runs, and each ends in one clear
line."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from broken_checkpoints import BROKEN, written
from conftest import Run
from hostile_pickles import around, named
from torch import nn

from featviz.errors import LoadError
from featviz.models import weights
from featviz.models.load import load_model
from featviz.options import InputOptions, ModelOptions

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


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    stats = {path: path.lstat() for path in folder.rglob("*")}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


KINDS = (
    "empty",
    "half a file",
    "zip bomb",
    "legacy cut at the end",
    "shard outside",
    "FIFO",
)


@pytest.mark.parametrize("name", KINDS)
def test_a_broken_file_ends_in_one_clear_line(
    name: str, folder: Path, picture: Path, featviz: Run
) -> None:
    """It says what the file looks like or what is wrong with it; no hang, no traceback,
    no trace of it: exit code 1 (2 where there is no such file), an error with its name,
    maybe a hint."""
    make, words = BROKEN[name]
    path, root = make(folder), picture.parent
    before = _listing(root)
    for command in (["run", path, picture, "--out", root / "out"], ["identify", path]):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            outcome = featviz(*command)
        lines = outcome.err.splitlines()
        assert outcome.code == 1 or (outcome.code == 2 and not path.is_file())
        assert outcome.out == ""
        assert lines[0].startswith("error: ") and words in lines[0]
        assert [line.split()[0] for line in lines[1:]] in ([], ["hint:"])
        assert all(line.isprintable() and len(line) < 600 for line in lines)
        assert path.name in lines[0] or path.name.endswith(".index.json")
        assert "weights_only" not in outcome.err
        assert [str(warning.message) for warning in warned] == []
        assert _listing(root) == before


def test_many_names_are_counted(folder: Path) -> None:
    """A file that names a thousand functions does not fill the screen."""
    path = written(around([named(f"m{n:04}:f") for n in range(1000)]))(folder)
    with pytest.raises(
        LoadError, match=r"needs m0000\.f, .*, m0019\.f and 980 more, which"
    ):
        weights.read(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "it is no regular file"),
        (b"\xff\xfe{}", "utf-8"),
        (b'{"a":' * 100_000, "more than 100 levels"),
        (b"[" + b"9" * 10**6 + b"]", "is no JSON"),
    ],
)
def test_a_config_beside_weights_that_is_no_small_file(
    content: bytes | None, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights do not need it: one line says that it is not read, and the model
    loads."""
    torch.save(nn.Conv2d(3, 2, 1), tmp_path / "net.pth")
    file = tmp_path / "config.json"
    os.mkfifo(file) if content is None else file.write_bytes(content)
    found = load_model(
        ModelOptions(str(tmp_path / "net.pth"), device="cpu"), InputOptions()
    )
    assert found.module.out_channels == 2
    line = caplog.messages[0]
    assert words in line and line.endswith("net.pth is loaded without it")


@pytest.mark.parametrize(
    ("text", "words"),
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
    text: str, words: str, tmp_path: Path, featviz: Run
) -> None:
    """A table or key that no command has is refused, with the nearest that there is."""
    (tmp_path / "c.toml").write_text(text)
    done = featviz("run", "resnet18", "x.png", "--config", tmp_path / "c.toml")
    assert done.code == 2
    assert words in " ".join(done.err.replace("│", " ").split())
