"""Hostile and broken model files: nothing in them runs, and each ends in one clear line."""

from __future__ import annotations

import functools
import json
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from broken_checkpoints import (
    BROKEN,
    Maker,
    module_with_state,
    saved_content,
    small_weights,
    written,
)
from conftest import Outcome
from hostile_nodes import around, call, named
from torch import nn

from featviz.errors import LoadError
from featviz.models import zoo
from featviz.models.files import checkpoint
from featviz.models.load import load_model
from featviz.options import InputOptions, ModelOptions

pytestmark = pytest.mark.usefixtures("deadline")


def _weights(**special: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(t.shape, 0.01) for name, t in small_weights().items()} | {
        name: torch.full(small_weights()[name].shape, value) for name, value in special.items()
    }


def _with_partial() -> nn.Module:
    return module_with_state(norm=functools.partial(nn.LayerNorm, eps=1e-6))()


GOOD: dict[str, tuple[Maker, str]] = {
    "legacy state dict": (
        saved_content(_weights, _use_new_zipfile_serialization=False),
        "it is squeezenet1_1 with 1000 classes",
    ),
    "NaN": (
        saved_content(lambda: _weights(**{"features.0.bias": float("nan")})),
        "it is squeezenet1_1",
    ),
    "module with a partial": (saved_content(_with_partial), "a whole model ("),
}
"""What the same commands must go on to read, and what `identify` says of it."""


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


def _one_clear_line(outcome: Outcome, path: Path, words: str) -> None:
    """Exit code 1 (2 where there is no such file), an error line with its file, maybe a hint."""
    lines = outcome.err.splitlines()
    assert outcome.code == 1 or (outcome.code == 2 and not path.is_file())
    assert outcome.out == ""
    assert lines[0].startswith("error: ")
    assert [line.split()[0] for line in lines[1:]] in ([], ["hint:"])
    assert all(line.isprintable() and len(line) < 600 for line in lines)
    assert path.name in lines[0] or path.name.endswith(".index.json")
    assert words in lines[0]
    assert "weights_only" not in outcome.err


def _refused(featviz: Callable[..., Outcome], path: Path, words: str, image: Path) -> None:
    """`run` and `identify` make nothing of the file, and leave no trace of it."""
    root = image.parent
    before = _listing(root)
    for command in (["run", path, image, "--out", root / "out"], ["identify", path]):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            _one_clear_line(featviz(*command), path, words)
        assert [str(warning.message) for warning in warned] == []
        assert _listing(root) == before


def _evil(folder: Path) -> Path:
    """Would leave a marker where it is loaded without care."""
    code = f"open({str(folder / 'marker')!r}, 'w')"
    return written(around(call(named("builtins:exec"), code)))(folder)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_ends_in_one_clear_line(
    name: str, folder: Path, picture: Path, featviz: Callable[..., Outcome]
) -> None:
    """It says what the file looks like or what is wrong with it; no hang, no traceback."""
    make, words = BROKEN[name]
    _refused(featviz, make(folder), words, picture)


@pytest.mark.parametrize("name", GOOD)
def test_good_files_still_load(
    name: str, folder: Path, picture: Path, featviz: Callable[..., Outcome]
) -> None:
    """After a hostile file was refused, in the same process, good ones are drawn and known."""
    (folder / "evil").mkdir()
    _refused(featviz, _evil(folder / "evil"), "builtins.exec", picture)
    assert not (folder / "evil" / "marker").exists()
    make, words = GOOD[name]
    path, out = make(folder), folder / "out"
    done = featviz("run", path, picture, "--layers", "Conv2d#0", "--out", out)
    assert done.code == 0 and "error: " not in done.err
    assert len([*out.rglob("output.png")]) == 1
    assert ("NaN or infinite" in done.err) == (name == "NaN")
    assert words in featviz("identify", path).out


def test_many_names_are_counted(folder: Path) -> None:
    """A file that names a thousand functions does not fill the screen."""
    path = written(around([named(f"m{n:04}:f") for n in range(1000)]))(folder)
    with pytest.raises(LoadError, match=r"needs m0000\.f, .*, m0019\.f and 980 more, which"):
        checkpoint.read(path)


Spoil = Callable[[Path], object]


def _gigabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**30)


def _written(content: bytes) -> Spoil:
    return lambda path: path.write_bytes(content)


SPOILT: dict[str, tuple[Spoil, str]] = {
    "block for ever": (os.mkfifo, "it is no regular file"),
    "eat memory": (lambda path: path.symlink_to("/dev/zero"), "it is no regular file"),
    "be a folder": (Path.mkdir, "it is no regular file"),
    "be a gigabyte": (_gigabyte, "has more than the"),
    "not be UTF-8": (_written(b"\xff\xfe{}"), "is not UTF-8"),
}
DEEP = _written(b'{"a":' * 100_000)
JSON = SPOILT | {
    "nest without end": (DEEP, "more than 100 levels"),
    "be cut short": (_written(b'{"weight_map": {'), "is no JSON"),
    "hold a number of a million digits": (_written(b"[" + b"9" * 10**6 + b"]"), "is no JSON"),
}
TOML = SPOILT | {
    "be a folder": (Path.mkdir, "is a directory"),
    "nest without end": (_written(b"size = " + b"[" * 50_000), "too many levels"),
    "nest tables without end": (_written(b"a" + b".a" * 20_000 + b" = 1"), "more than 50 parts"),
    "hold a number of a million digits": (_written(b"size = " + b"9" * 50_000), "cannot be read"),
    "be no TOML": (_written(b"size = ["), "cannot be read"),
}


@pytest.mark.parametrize("attempt", JSON)
def test_an_index_that_is_no_small_file(attempt: str, tmp_path: Path) -> None:
    """A FIFO does not block, a device does not fill memory, depth does not recurse."""
    spoil, words = JSON[attempt]
    path = tmp_path / "m.index.json"
    spoil(path)
    with pytest.raises(LoadError) as caught:
        checkpoint.read(path)
    assert words in caught.value.message or "no checkpoint" in caught.value.message
    assert "m.index.json" in caught.value.message and caught.value.message.isprintable()


@pytest.mark.parametrize("attempt", JSON)
def test_a_config_beside_weights_that_is_no_small_file(
    attempt: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights do not need it: one line says that it is not read, and the model loads."""
    torch.save(nn.Conv2d(3, 2, 1), tmp_path / "net.pth")
    spoil, words = JSON[attempt]
    spoil(tmp_path / "config.json")
    found = load_model(ModelOptions(str(tmp_path / "net.pth"), device="cpu"), InputOptions())
    assert found.module.out_channels == 2
    line = caplog.messages[0]
    assert words in line and line.endswith("net.pth is loaded without it")


@pytest.mark.parametrize("content", ["[]", "5", '{"architecture": ["x"]}', '{"architecture": 5}'])
def test_a_config_of_something_else_says_nothing(content: str, tmp_path: Path) -> None:
    """A config.json that is not timm's is not looked at further."""
    (tmp_path / "config.json").write_text(content)
    assert zoo.timm_name_beside(tmp_path / "net.pth") is None


@pytest.mark.parametrize("attempt", TOML)
def test_a_toml_file_that_is_no_small_file(
    attempt: str, tmp_path: Path, featviz: Callable[..., Outcome]
) -> None:
    """--config names the file and what is wrong with it; exit code 2, no traceback."""
    spoil, words = TOML[attempt]
    path = tmp_path / "c.toml"
    spoil(path)
    done = featviz("run", "resnet18", "x.png", "--config", path)
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err and len(done.err) < 3000
    assert words in done.err and "c.toml" in done.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[runn]\nsize = 8", "a table [runn], and there is no such command; did you mean run?"),
        ("[featviz]\nsize = 8", "a table [featviz], and there is no such command; one of audit, "),
        ("[run.size]\na = 8", "a table 'size', expected a value"),
        ("[run]\nsiez = 8", "'siez', which featviz run lacks; did you mean size?"),
        ("run = 5", "has 'run', which featviz run lacks"),
        ("[[run]]\nsize = 8", "has 'run', which featviz run lacks"),
        ('["a\\u001b]0;b"]\nsize = 8', "a table [a\\x1b]0;b]"),
    ],
)
def test_a_toml_table_is_a_command(
    text: str, words: str, tmp_path: Path, featviz: Callable[..., Outcome]
) -> None:
    """A table or key that no command has is refused, with the nearest that there is."""
    (tmp_path / "c.toml").write_text(text)
    done = featviz("run", "resnet18", "x.png", "--config", tmp_path / "c.toml")
    assert done.code == 2
    assert words in " ".join(done.err.replace("│", " ").split())


def test_one_shard_by_many_names_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that names one file 200 times, through 200 folders, costs one reading."""
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pth")
    names = {str(n): f"{'x/' * n}a.pth" for n in range(200)}
    (tmp_path / "m.index.json").write_text(json.dumps({"weight_map": names}))
    read, calls = checkpoint.torch_files.load, []
    monkeypatch.setattr(
        checkpoint.torch_files, "load", lambda file: calls.append(file) or read(file)
    )
    found = checkpoint.read(tmp_path / "m.index.json")
    assert torch.equal(found["w"], torch.ones(3))
    assert len(calls) == 1
