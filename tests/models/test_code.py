"""Factories as MODEL: a function, a class or an instance, in a file or a module."""

from __future__ import annotations

import contextlib
import pickle
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from featviz.errors import FeatvizError, LoadError, UsageError
from featviz.models.sources import imported_object
from models.loading import SMALL, load, load_whole, same_weights

pytestmark = pytest.mark.usefixtures("imports_undone")

FACTORY = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, width=2, **more):
        super().__init__(nn.Conv2d(3, width, 1))
        self.more = more

def make(width=3):
    return Net(width)

class Box:
    make = staticmethod(make)

ready = Net(7)
number = 4

def wrong():
    return {"model": 1}

def broken():
    raise ValueError("no such width")

def lacking(width=3):
    return make_of()

def make_of(kind):
    return Net()
"""


@pytest.fixture
def factory_file(tmp_path: Path) -> Path:
    path = tmp_path / "user_factory.py"
    path.write_text(FACTORY)
    return path


@pytest.mark.parametrize(
    ("attribute", "arguments", "width"),
    [
        ("make", {"width": 5}, 5),
        ("Net", {"width": 4}, 4),
        ("ready", {}, 7),
        ("Box.make", {"width": 6}, 6),
    ],
)
@pytest.mark.parametrize("source", ["user_factory.py", "user_factory", "user_pkg.mod"])
def test_factories_give_models(
    source: str,
    attribute: str,
    arguments: dict[str, Any],
    width: int,
    factory_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function, a class, an instance or an attribute of one; modules and packages are
    found from the current folder, as with python -m."""
    monkeypatch.chdir(factory_file.parent)
    Path("user_pkg").mkdir()
    shutil.copy(factory_file, "user_pkg/mod.py")
    module = load(f"{source}:{attribute}", model_args=arguments)
    assert module[0].out_channels == width


@pytest.mark.parametrize(
    ("attribute", "arguments", "error", "message"),
    [
        ("wrong", {}, LoadError, "gave a dict, not an nn.Module"),
        ("broken", {}, LoadError, "raised ValueError: no such width"),
        ("number", {}, LoadError, "is a int, not a factory"),
        # not an argument of the factory's own
        ("lacking", {}, LoadError, "positional argument: 'kind'; -v shows the traceb"),
        ("make_of", {}, LoadError, "; add --model-arg kind=VALUE"),
        ("maek", {}, UsageError, "there is no 'maek'"),
        (
            "make",
            {"widht": 2},
            UsageError,
            "got an unexpected keyword argument 'widht'",
        ),
    ],
)
def test_factories_that_fail(
    attribute: str,
    arguments: dict[str, Any],
    error: type[FeatvizError],
    message: str,
    factory_file: Path,
) -> None:
    """What the user's code did is named in one line; the exit code tells usage from
    failure."""
    with pytest.raises(error) as caught:
        load(f"{factory_file}:{attribute}", model_args=arguments)
    assert type(caught.value) is error
    assert re.search(message, f"{caught.value.message}; {caught.value.hint}")


def test_two_factories_of_one_name_are_two_modules(tmp_path: Path) -> None:
    """The second net.py does not take the place of the first, whose classes still
    pickle."""
    made = []
    for width in (2, 5):
        folder = tmp_path / str(width)
        folder.mkdir()
        (folder / "net.py").write_text(
            "from torch import nn\n"
            "class Net(nn.Conv2d):\n"
            f"    def __init__(self):\n        super().__init__(3, {width}, 1)\n"
        )
        made.append(load(f"{folder / 'net.py'}:Net"))
    assert [module.out_channels for module in made] == [2, 5]
    for module in made:
        assert sys.modules[type(module).__module__].Net is type(module)
        assert type(pickle.loads(pickle.dumps(module))) is type(module)


def test_a_file_imports_what_lies_beside_it(tmp_path: Path) -> None:
    """Wherever the command is run, and before another module of the name."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        text = f"from torch import nn\n\nclass Block(nn.ReLU):\n    path = {folder!r}\n"
        (tmp_path / folder / "blocks_beside.py").write_text(text)
    (tmp_path / "there" / "net.py").write_text("from blocks_beside import Block as Net")
    with contextlib.chdir(tmp_path / "here"):
        assert load("../there/net.py:Net").path == "there"


def test_a_library_that_code_needs_is_to_be_installed(tmp_path: Path) -> None:
    """featviz has an environment of its own, where it is missing: the hint names it."""
    path = tmp_path / "net.py"
    path.write_text("import no_such_library.part\n")
    with pytest.raises(LoadError, match="no_such_library") as caught:
        load(f"{path}:Net")
    assert str(caught.value.hint).startswith(
        "install no_such_library where featviz is installed; -v"
    )


def test_a_failed_import_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither a half-loaded module nor its folder on sys.path; mended, the file loads."""
    path = tmp_path / "user_half.py"
    path.write_text("import torch\nmake = torch.nn.ReLU\n1 / 0\n")
    before = list(sys.path)
    modules = set(sys.modules)
    with pytest.raises(
        LoadError, match=r"_half\.py failed.*ZeroDivisionError: division by zero"
    ):
        load(f"{path}:make")
    assert sys.path == before
    assert set(sys.modules) == modules
    path.write_text("import torch\nmake = torch.nn.ReLU\n")
    assert type(load(f"{path}:make")) is nn.ReLU


@pytest.mark.medium
@pytest.mark.parametrize("spec", [SMALL, "user_factory.py:make"])
def test_the_seed_decides(spec: str, factory_file: Path) -> None:
    """Equal seeds give equal weights, others do not."""
    module = load(spec, weights="none", seed=1)
    assert same_weights(module, load(spec, weights="none", seed=1))
    assert not same_weights(module, load(spec, weights="none", seed=2))


@pytest.mark.parametrize("spec", [SMALL, "user_factory.py:make"])
def test_the_global_generator_is_left_alone(spec: str, factory_file: Path) -> None:
    """Torch's own state is as before."""
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    load(spec, weights="none", seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_class_of_a_script_is_given_as_code(tmp_path: Path) -> None:
    """A script that saves a model of its own class leaves `__main__.Net`, which nobody
    finds."""
    script = (
        "import torch\nclass Net(torch.nn.Identity): pass\ntorch.save(Net(),"
        " 'net.pth')\n"
    )
    (tmp_path / "train.py").write_text(script)
    with contextlib.chdir(tmp_path):
        runpy.run_path("train.py", run_name="__main__")
        with pytest.raises(LoadError, match=r"needs __main__.Net, which the") as caught:
            load("net.pth", trust=True)
    assert caught.value.hint == (
        "without --trust, --arch train.py:Net takes the weights in it"
    )


def test_arguments_of_code_are_kept_in_the_record(factory_file: Path) -> None:
    """As Python writes them; those of the seed's weights with the seed."""
    arguments = {"width": 4, "act": "relu"}
    source = load_whole(f"{factory_file}:Net", model_args=arguments, seed=5).source
    assert source["arguments"] == {"width": "4", "act": "'relu'"}
    assert source["seed"] == 5
    assert "arguments" not in load_whole(f"{factory_file}:Net").source


def test_weights_that_code_makes_are_said(
    factory_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names the class and the option, unless the weights are named."""
    load(f"{factory_file}:Net")
    line = "weights as user_factory.py:Net makes them; --weights FILE loads yours"
    assert caplog.messages == [line]
    caplog.clear()
    torch.save(nn.Sequential(nn.Conv2d(3, 2, 1)).state_dict(), tmp_path / "w.pth")
    for weights in ("none", str(tmp_path / "w.pth")):
        load(f"{factory_file}:Net", weights=weights)
    # which has none
    load("torch.nn:ReLU")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("file", "hint"),
    [("net.py", "did you mean net.py:Net?"), ("nett.pt", "check the path")],
)
def test_a_file_of_a_like_name_is_named_if_it_is_code(
    file: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not weights, which have no class."""
    monkeypatch.chdir(tmp_path)
    Path(file).touch()
    with pytest.raises(UsageError, match=r"no file 'nett\.py'") as caught:
        imported_object("nett.py:Net")
    assert caught.value.hint == hint
