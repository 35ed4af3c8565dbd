"""Factories as MODEL: a function, a class or an instance, in a file or a module."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Outcome
from torch import nn

from featviz.cli.options import key_values
from featviz.errors import FeatvizError, LoadError, UsageError
from featviz.models.sources import ModelOptions, check_source
from models.loading import SMALL, load, same_weights

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
"""


@pytest.fixture
def factory_file(tmp_path: Path) -> Path:
    path = tmp_path / "user_factory.py"
    path.write_text(FACTORY)
    return path


@pytest.mark.parametrize(
    ("attribute", "arguments", "width"),
    [
        ("make", {}, 3),
        ("make", {"width": 5}, 5),
        ("Net", {}, 2),
        ("Net", {"width": 4}, 4),
        ("ready", {}, 7),
        ("Box.make", {"width": 6}, 6),
    ],
)
@pytest.mark.parametrize("form", ["file", "module"])
def test_factories_give_models(
    form: str,
    attribute: str,
    arguments: dict[str, Any],
    width: int,
    factory_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function, a class, an instance or an attribute of one, from a file or a module."""
    monkeypatch.syspath_prepend(factory_file.parent)
    where = str(factory_file) if form == "file" else "user_factory"
    assert load(f"{where}:{attribute}", model_args=arguments)[0].out_channels == width


def test_a_factory_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pkg.mod:factory is found from the current folder, as with python -m."""
    (tmp_path / "user_pkg").mkdir()
    (tmp_path / "user_pkg" / "mod.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    assert load("user_pkg.mod:make")[0].out_channels == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=3", 3),
        ("a=0.5", 0.5),
        ("a=True", True),
        ("a=None", None),
        ("a=(1, 2)", (1, 2)),
        ("a=relu", "relu"),
        ("a='3'", "3"),
        ("a=x=y", "x=y"),
        ("a=", ""),
    ],
)
def test_model_arguments_are_python_literals_else_strings(text: str, value: object) -> None:
    """--model-arg gives values the type that Python would."""
    parsed = key_values([text])["a"]
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("attribute", "kind", "message"),
    [
        ("wrong", LoadError, "gave a dict, not an nn.Module"),
        ("broken", LoadError, "raised ValueError: no such width"),
        ("number", LoadError, "is a int, not a factory"),
        ("maek", UsageError, "there is no 'maek'"),
    ],
)
def test_factories_that_fail(
    attribute: str, kind: type[FeatvizError], message: str, factory_file: Path
) -> None:
    """What the user's code did is named in one line; the exit code tells usage from failure."""
    with pytest.raises(kind, match=message) as caught:
        load(f"{factory_file}:{attribute}")
    assert type(caught.value) is kind


def test_a_missing_attribute_lists_what_there_is(factory_file: Path) -> None:
    """The hint for a misspelt factory has the callables of the file."""
    with pytest.raises(UsageError) as caught:
        load(f"{factory_file}:maek")
    assert "make" in str(caught.value.hint) and "number" not in str(caught.value.hint)


def test_arguments_that_a_factory_does_not_take(factory_file: Path) -> None:
    """A wrong --model-arg is named, with the nearest argument, else with all that there are."""
    with pytest.raises(UsageError, match="--model-arg blocks: make takes no such argument") as far:
        load(f"{factory_file}:make", model_args={"blocks": 2})
    assert far.value.hint == "it takes width"
    with pytest.raises(UsageError) as close:
        load(f"{factory_file}:make", model_args={"widht": 2})
    assert close.value.hint == "did you mean width?"


@pytest.mark.parametrize(
    ("code", "attribute", "refused"),
    [
        ("class Net(nn.Module): ...", "Nte", True),
        ("class Net(nn.Module): ...", "Net", False),
        ("from models import *", "Net", False),
        ("globals()['N' + 'et'] = nn.Identity", "Net", False),
        ("if 1:\n    Net = nn.Identity", "Net", False),
        ("def __getattr__(name): return nn.Identity", "Net", False),
        ("from torch.nn import Identity as Net", "Net", False),
        ("def (", "Net", False),
        ("def make(width=1): ...", "make", True),
        ("def make(wide=1, depth=1, **more): ...", "make", False),
        ("@wrap\ndef make(width=1): ...", "make", False),
        ("class make(Base): ...", "make", False),
        (
            "class Base(nn.Module):\n    def __init__(self, a): ...\nclass make(Base): ...",
            "make",
            1,
        ),
    ],
)
def test_only_what_a_file_cannot_have_is_refused_before_it_runs(
    code: str, attribute: str, refused: bool, tmp_path: Path
) -> None:
    """Names and arguments, read from the syntax tree; what the tree does not tell is let through,
    and nothing runs."""
    file = tmp_path / "net.py"
    file.write_text(f"raise SystemExit\n{code}\n")
    options = ModelOptions(f"{file}:{attribute}", model_args={"depth": 2})
    with pytest.raises(UsageError) if refused else nullcontext():
        check_source(options)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import user_not_there", "No module named 'user_not_there'"),
        ("def make(:", "SyntaxError"),
    ],
)
def test_factory_files_that_cannot_be_imported(code: str, message: str, tmp_path: Path) -> None:
    """An error while importing is the file's, and is passed on in one line."""
    (tmp_path / "user_bad.py").write_text(code)
    with pytest.raises(LoadError, match=f"importing .*user_bad.py failed.*{message}") as caught:
        load(f"{tmp_path / 'user_bad.py'}:make")
    assert "\n" not in caught.value.message


def test_two_factories_of_one_name_are_two_modules(tmp_path: Path) -> None:
    """The second net.py does not take the place of the first, whose classes still pickle."""
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


def test_a_failed_import_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither a half-loaded module nor its folder on sys.path; mended, the file loads."""
    path = tmp_path / "user_half.py"
    path.write_text("import torch\nmake = torch.nn.ReLU\n1 / 0\n")
    before, modules = list(sys.path), set(sys.modules)
    with pytest.raises(LoadError, match="division by zero"):
        load(f"{path}:make")
    assert sys.path == before
    assert set(sys.modules) == modules
    path.write_text("import torch\nmake = torch.nn.ReLU\n")
    assert type(load(f"{path}:make")) is nn.ReLU


@pytest.mark.parametrize(
    ("spec", "message"),
    [("user_absent.py:make", "no file 'user_absent.py'"), ("user_absent:make", "no module 'user_")],
)
def test_a_factory_that_is_not_there(spec: str, message: str) -> None:
    """A missing file or module is a usage error."""
    with pytest.raises(UsageError, match=message):
        load(spec)


@pytest.mark.parametrize("form", ["torchvision", "factory"])
def test_the_seed_decides_and_the_global_generator_is_left_alone(
    form: str, factory_file: Path
) -> None:
    """Equal seeds give equal weights, others do not, and torch's own state is as before."""
    spec = SMALL if form == "torchvision" else f"{factory_file}:make"
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    one, again, other = (load(spec, weights="none", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert same_weights(one, again)
    assert not same_weights(one, other)


def test_a_model_without_values_is_refused(featviz: Callable[..., Outcome], tmp_path: Path) -> None:
    """Built on the device meta and never filled: one line that names the first such tensor."""
    factory = tmp_path / "hollow.py"
    factory.write_text(
        "from torch import nn\n"
        "def make(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, device='meta'))\n"
    )
    for command in ("kernels", "summary", "layers"):
        done = featviz(command, f"{factory}:make")
        first, second = done.err.splitlines()[-2:]
        assert done.code == 1
        assert (
            first
            == "error: the model's 1.weight is on the device meta, where tensors have no values"
        )
        assert second.startswith("hint: call model.to_empty(device='cpu')")
