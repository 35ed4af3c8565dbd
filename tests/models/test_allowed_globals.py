"""Pickles load only what is safe, and what the user allows: --allow-global and --trust."""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hostile_payloads import CALLS, Call
from torch import nn
from torchvision import models

from featviz.errors import FeatvizError, LoadError, UsageError
from featviz.models.files import checkpoint
from models.loading import SMALL, load, same_weights

pytestmark = pytest.mark.usefixtures("imports_undone")


@pytest.mark.parametrize("make", [make for make, _ in CALLS])
def test_the_hostile_pickles_are_armed(
    make: Callable[[Path], Call], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of the payloads below does leave its marker where it is loaded without care."""
    pickle.loads(pickle.dumps(make(tmp_path)))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("place", ["alone", "in a dict", "in a module"])
@pytest.mark.parametrize(("make", "name"), CALLS)
def test_nothing_in_a_hostile_file_runs(
    make: Callable[[Path], Call],
    name: str,
    place: str,
    zipped: bool,
    tiny: nn.Module,
    tmp_path: Path,
) -> None:
    """The error lists the global and the option that would allow exactly it; nothing has run."""
    evil = make(tmp_path)
    tiny[0].note = evil
    content = {"alone": evil, "in a dict": {"a": [{"b": evil}]}, "in a module": tiny}[place]
    path = tmp_path / "evil.pth"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(LoadError) as caught:
        load(path)
    assert name in caught.value.message
    assert f"--allow-global {name}" in str(caught.value.hint)
    assert caught.value.message.count("\n") == 0
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "name",
    [
        "torchvision.datasets.utils os.system",
        "torchvision.datasets.utils download_url",
        "torch.nn.functional os.system",
        "torchvision.models.resnet nn.modules.module.torch.hub.load",
        "torch.nn.modules.module torch._jit_internal.boolean_dispatch",
    ],
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_dotted_name_does_not_borrow_its_modules_trust(
    name: str, zipped: bool, tmp_path: Path
) -> None:
    """os.system reached through a module of torchvision is refused under that name."""
    module, attribute = name.split(" ")
    command = f"touch {tmp_path / 'marker'}".encode()
    called = f"\x80\x02c{module}\n{attribute}\n".encode("latin-1")
    called += b"X" + len(command).to_bytes(4, "little") + command + b"\x85R."
    path = tmp_path / "evil.pth"
    path.write_bytes(called)
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("evil/data.pkl", called)
            archive.writestr("evil/version", b"3\n")
    with pytest.raises(LoadError, match=rf"needs {module}\.{attribute}, which could run any code"):
        load(path)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_plain_pickle_runs_nothing(protocol: int, tmp_path: Path) -> None:
    """A pickle that torch did not write is refused in every protocol."""
    path = tmp_path / "evil.pth"
    path.write_bytes(pickle.dumps(Call(os.mkdir, str(tmp_path / "marker")), protocol=protocol))
    with pytest.raises(LoadError, match=f"needs {os.mkdir.__module__}.mkdir"):
        load(path)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("suffix", [".pth", ".pt"])
def test_weights_for_an_arch_are_read_as_carefully(suffix: str, tmp_path: Path) -> None:
    """A hostile value between tensors does not run when the file is read as weights."""
    path = tmp_path / f"evil{suffix}"
    torch.save({"conv.weight": torch.zeros(1), "x": Call(os.mkdir, str(tmp_path / "marker"))}, path)
    with pytest.raises(LoadError, match="mkdir"):
        load(path, arch=SMALL)
    assert not (tmp_path / "marker").exists()


@pytest.fixture
def users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole model of a class in a module of the user's."""
    (tmp_path / "user_net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(nn.Conv2d(3, 2, 1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import user_net

    torch.save(user_net.Net(), tmp_path / "net.pth")
    return tmp_path / "net.pth"


def test_a_class_of_the_users_is_refused_by_name(users_file: Path) -> None:
    """Without the option, the file is refused, and the hint has the option to copy."""
    with pytest.raises(LoadError, match=r"needs user_net\.Net") as caught:
        load(users_file)
    assert "--allow-global user_net.Net" in str(caught.value.hint)


def test_allow_global_lets_exactly_that_class_in(users_file: Path) -> None:
    """--allow-global PKG.NAME loads a model of the user's own class."""
    assert type(load(users_file, allow_globals=("user_net.Net",))).__name__ == "Net"


@pytest.mark.parametrize("name", ["user_net.Nat", "user_nothing.Net", "Net", ""])
def test_a_global_that_does_not_exist_is_a_usage_error(name: str, users_file: Path) -> None:
    """A wrong name is named, and nothing is loaded."""
    with pytest.raises(UsageError, match=f"--allow-global '{name}' cannot be found"):
        load(users_file, allow_globals=(name,))


def test_trust_takes_whatever_the_file_holds(users_file: Path) -> None:
    """--trust loads the same file without naming the class."""
    assert type(load(users_file, trust=True)).__name__ == "Net"


def test_allowances_hold_for_weights_too(users_file: Path, tmp_path: Path) -> None:
    """--arch with a whole model of the user's class takes its weights once the class is allowed."""
    arch = f"{tmp_path / 'user_net.py'}:Net"
    model = load(users_file, arch=arch, allow_globals=("user_net.Net",))
    assert same_weights(model, torch.load(users_file, weights_only=False))


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole model of a class whose module lies beside it, and is imported from nowhere else."""
    folder, elsewhere = tmp_path / "models", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "user_beside.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n    pass\n"
    )
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        import user_beside

        torch.save(user_beside.Net(nn.Conv2d(3, 2, 1)), folder / "net.pth")
    del sys.modules["user_beside"]
    importlib.invalidate_caches()
    monkeypatch.chdir(elsewhere)
    return folder


@pytest.mark.parametrize("place", ["beside the file", "current folder"])
@pytest.mark.parametrize("options", [{"trust": True}, {"allow_globals": ("user_beside.Net",)}])
def test_modules_are_found_here_and_beside_the_file(
    options: dict[str, Any], place: str, beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both options find the class in the current folder and in the folder of the file."""
    if place == "current folder":
        (beside / "user_beside.py").rename(Path.cwd() / "user_beside.py")
    model = load(beside / "net.pth", **options)
    assert type(model).__name__ == "Net" and model[0].out_channels == 2


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"trust": True}, LoadError), ({"allow_globals": ("user_beside.Net",)}, UsageError)],
)
def test_a_module_that_is_not_found_is_named_with_where_it_was_looked_for(
    options: dict[str, Any], kind: type[FeatvizError], beside: Path
) -> None:
    """The module, both folders and PYTHONPATH; sys.path is as before."""
    (beside / "user_beside.py").unlink()
    before = list(sys.path)
    with pytest.raises(kind, match="user_beside") as caught:
        load(beside / "net.pth", **options)
    hint = str(caught.value.hint)
    assert all(word in hint for word in (str(beside), str(Path.cwd()), "PYTHONPATH"))
    assert sys.path == before


def test_what_is_installed_wins_over_what_lies_beside_a_file(beside: Path) -> None:
    """A module beside a file does not take the place of one that is installed."""
    (beside / "colorsys.py").write_text("raise RuntimeError('the wrong one')")
    sys.modules.pop("colorsys", None)
    with pytest.raises(LoadError, match="needs user_beside"):
        load(beside / "net.pth", allow_globals=("colorsys.rgb_to_hls",))


class Odd(argparse.Namespace):
    """A Namespace whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        super().__init__(call=(function, arguments))

    def __reduce__(self) -> Any:
        return self.call


class Filled(argparse.Namespace):
    """A Namespace with a class of its own."""


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", [argparse.Namespace, SimpleNamespace])
def test_arguments_of_a_script_load_as_data(
    kind: Callable[..., Any], zipped: bool, tmp_path: Path
) -> None:
    """Beside the weights, nested and with paths: the weights are those of the file."""
    weights = models.shufflenet_v2_x0_5(num_classes=3).state_dict()
    arguments = kind(lr=1e-3, data=Path("runs/a"), more=kind(depth=2), betas=(0.9, 0.99))
    content = {"model": weights, "args": arguments}
    torch.save(content, tmp_path / "c.pth", _use_new_zipfile_serialization=zipped)
    loaded = load(tmp_path / "c.pth").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    read = checkpoint.read(tmp_path / "c.pth")["args"]
    assert (read.lr, read.data, read.more.depth) == (1e-3, "runs/a", 2)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    ("evil", "message"),
    [
        (lambda marker: Odd(os.system, f"touch {marker}"), r"needs (posix|nt)\.system"),
        (lambda marker: Filled(lr=1), "needs .*Filled"),
        (lambda marker: Odd(SimpleNamespace, {"lr": 1}), "cannot be read|holds|broken"),
        (
            lambda marker: argparse.Namespace(lr=Odd(os.system, f"touch {marker}")),
            r"needs (posix|nt)\.system",
        ),
    ],
    ids=["reduce", "subclass", "arguments", "inside"],
)
def test_a_hostile_twin_of_arguments_is_refused(
    evil: Callable[[Path], Any], message: str, zipped: bool, tmp_path: Path
) -> None:
    """One that calls something, a derived class, a call with arguments; nothing runs."""
    marker, path = tmp_path / "marker", tmp_path / "evil.pth"
    content = {"model": {"w": torch.ones(1)}, "args": evil(marker)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(LoadError, match=message):
        load(path)
    assert not marker.exists()
