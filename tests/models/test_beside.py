"""Files beside a model that somebody else wrote: config.json, index.json, TOML. One clear line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Outcome
from torch import nn

from featviz.errors import LoadError
from featviz.models.files import checkpoint
from featviz.models.load import ModelOptions, load_model
from featviz.models.preprocess import InputOptions
from featviz.models.sources import timm as timm_models

Spoil = Callable[[Path], None]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.mkdir()


def _gigabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**30)


def _written(content: bytes) -> Spoil:
    return lambda path: path.write_bytes(content) and None


SPOILT: dict[str, tuple[Spoil, str]] = {
    "block for ever": (_fifo, "it is no regular file"),
    "eat memory": (_device, "it is no regular file"),
    "be a folder": (_folder, "it is no regular file"),
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
    "be a folder": (_folder, "is a directory"),
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
    assert timm_models.named_beside(tmp_path / "net.pth") is None


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


def test_tables_of_other_commands_are_for_them(
    tiny_file: Path, tmp_path: Path, featviz: Callable[..., Outcome]
) -> None:
    """One file serves several commands; each takes its own table over what stands outside."""
    (tmp_path / "c.toml").write_text(
        f'model = {json.dumps(str(tiny_file))}\n[layers]\nlayers = "Linear"\n[audit]\nx = 1\n'
    )
    done = featviz("layers", "--config", tmp_path / "c.toml")
    assert done.code == 0, done.err
    assert "1 taken" in done.out


def test_one_shard_by_many_names_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that names one file 200 times, through 200 folders, costs one reading."""
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pth")
    names = {str(n): f"{'x/' * n}a.pth" for n in range(200)}
    (tmp_path / "m.index.json").write_text(json.dumps({"weight_map": names}))
    read, calls = checkpoint.torch_save.load, []
    monkeypatch.setattr(
        checkpoint.torch_save,
        "load",
        lambda path, allowed: calls.append(path) or read(path, allowed),
    )
    found = checkpoint.read(tmp_path / "m.index.json")
    assert torch.equal(found["w"], torch.ones(3))
    assert calls == [tmp_path / "a.pth"]
