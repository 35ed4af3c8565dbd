"""Hostile and broken model files: nothing in them runs, and each ends in one clear line."""

from __future__ import annotations

import contextlib
import functools
import shlex
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from broken_checkpoints import (
    BROKEN,
    index_of_shards,
    module_with_state,
    saved_content,
    small_weights,
)
from conftest import Outcome
from hostile_payloads import HOSTILE, NAMED, Maker, around, called, global_opcode
from safetensors.torch import save_file
from torch import nn
from torchvision import models

from featviz.errors import LoadError
from featviz.models.files import checkpoint

pytestmark = pytest.mark.usefixtures("deadline")


def _weights(**special: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(t.shape, 0.01) for name, t in small_weights().items()} | {
        name: torch.full(small_weights()[name].shape, value) for name, value in special.items()
    }


def _whole_resnet() -> nn.Module:
    with torch.device("meta"):
        module = models.resnet18()
    module.to_empty(device="cpu")
    for tensor in module.state_dict().values():
        tensor.fill_(1)
    return module


def _with_partial() -> nn.Module:
    return module_with_state(norm=functools.partial(nn.LayerNorm, eps=1e-6))()


def _saved_safely(folder: Path) -> Path:
    save_file(_weights(), folder / "model.safetensors")
    return folder / "model.safetensors"


def _sharded(folder: Path) -> Path:
    weights = _weights()
    for number, names in enumerate([[*weights][:20], [*weights][20:]]):
        torch.save({name: weights[name] for name in names}, folder / f"{number}.bin")
    index = {name: f"{n > 19:d}.bin" for n, name in enumerate(weights)}
    return index_of_shards({"weight_map": index})(folder)


GOOD: dict[str, tuple[Maker, str]] = {
    "state dict": (saved_content(_weights), "it is squeezenet1_1 with 1000 classes"),
    "legacy state dict": (
        saved_content(_weights, _use_new_zipfile_serialization=False),
        "it is squeezenet1_1",
    ),
    "protocol 4": (saved_content(_weights, pickle_protocol=4), "it is squeezenet1_1"),
    "nested state dict": (saved_content(lambda: {"epoch": 1, "model": _weights()}), "took 'model'"),
    "safetensors": (_saved_safely, "it is squeezenet1_1"),
    "shards": (_sharded, "it is squeezenet1_1"),
    "NaN": (
        saved_content(lambda: _weights(**{"features.0.bias": float("nan")})),
        "it is squeezenet1_1",
    ),
    "whole resnet18": (saved_content(_whole_resnet), "it is resnet18"),
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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the file is, deep enough to climb out of; modules are found there."""
    inner = tmp_path / "one" / "two"
    inner.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(inner), *sys.path])
    yield inner
    sys.modules.pop("user_trap", None)


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
    before, modules = _listing(root), set(sys.modules)
    for command in (["run", path, image, "--out", root / "out"], ["identify", path]):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            _one_clear_line(featviz(*command), path, words)
        assert [str(warning.message) for warning in warned] == []
        assert _listing(root) == before
    assert not {"user_trap", "antigravity", "this"} & (set(sys.modules) - modules)


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_in_a_hostile_file_runs(
    name: str, folder: Path, picture: Path, featviz: Callable[..., Outcome]
) -> None:
    """No disguise of a call gets it executed; the line names what was refused."""
    make, words = HOSTILE[name]
    path = make(folder)
    _refused(featviz, path, words, picture)
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_the_hostile_files_are_armed(name: str, folder: Path) -> None:
    """Read and used without care, each of them leaves its marker: the test above can fail."""
    path = HOSTILE[name][0](folder)
    assert not (folder / "marker").exists()
    with contextlib.suppress(Exception):
        model = torch.load(path, weights_only=False)
        with contextlib.suppress(Exception):
            model.load_state_dict(model.state_dict())
        model(torch.zeros(1, 3, 4, 4))
    assert (folder / "marker").exists()


@pytest.mark.parametrize("name", NAMED)
def test_no_function_is_lent_to_a_file(
    name: str, folder: Path, picture: Path, featviz: Callable[..., Outcome]
) -> None:
    """Names in and near the packages whose classes are trusted are refused, and not imported."""
    path = around(called(name))(folder)
    _refused(featviz, path, "which could run any code; nothing was executed", picture)
    with pytest.raises(LoadError) as caught:  # before the console takes escapes away
        checkpoint.read(path)
    assert f"{caught.value.message}{caught.value.hint}".isprintable()


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
    _refused(featviz, HOSTILE["partial, zip"][0](folder / "evil"), "mkdir", picture)
    make, words = GOOD[name]
    path, out = make(folder), folder / "out"
    done = featviz("run", path, picture, "--layers", "Conv2d#0", "--out", out)
    assert done.code == 0 and "error: " not in done.err
    assert len([*out.rglob("output.png")]) == 1
    assert ("NaN or infinite" in done.err) == (name == "NaN")
    assert words in featviz("identify", path).out


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(BROKEN["pickle.dump of numbers"][0], id="protocol 4"),
        pytest.param(HOSTILE["exec, zip"][0], id="exec"),
        pytest.param(BROKEN["module within itself"][0], id="recursion"),
    ],
)
def test_a_process_of_its_own_says_no_more(
    path: Maker, folder: Path, picture: Path, shell: Callable[..., Outcome]
) -> None:
    """Nothing but the two lines is on stderr, where the warnings of libraries would show."""
    file = path(folder)
    outcome = shell("run", file, picture, "--out", folder / "out", cwd=folder)
    _one_clear_line(outcome, file, "model.pth")
    assert not (folder / "out").exists() and not (folder / "marker").exists()


def test_many_names_are_counted(folder: Path) -> None:
    """A file that names a thousand functions does not fill the screen."""
    path = around(b"\x80\x02" + b"".join(global_opcode(f"m{n:04}:f") for n in range(1000)) + b".")(
        folder
    )
    with pytest.raises(LoadError, match=r"needs m0000\.f, .*, m0019\.f and 980 more, which") as e:
        checkpoint.read(path)
    assert str(e.value.hint).count("--allow-global") == 20


def test_a_hint_is_safe_to_paste(folder: Path) -> None:
    """A name is one word to the shell, whatever is in it."""
    path = around(called("torch.nn;touch marker:$(touch marker)"))(folder)
    with pytest.raises(LoadError) as caught:
        checkpoint.read(path)
    options = str(caught.value.hint).partition(" lets it")[0]
    assert shlex.split(options) == [
        "--allow-global",
        "torch.nn;touch marker.$(touch marker)",
    ]
