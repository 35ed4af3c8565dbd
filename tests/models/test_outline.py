"""What a file of code defines is read from its syntax tree; nothing of it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from featviz.errors import FeatvizError, FileError, LoadError, UsageError
from featviz.models import outline
from models.loading import load

CODE = """
import torch
import torch.nn as neural
import torch.nn.functional as F
import lightning as L
from torch import nn
from torchvision.models import resnet18
from elsewhere import Base

raise SystemExit("this file must not run")

class Block(nn.Module):
    pass

class Net(neural.Sequential):
    def __init__(self, width, depth=2, *, classes):
        super().__init__(Block())

class Deep(Net):
    pass

class Lit(L.LightningModule):
    pass

class Data(L.LightningDataModule):
    pass

class Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

class Own(Base):
    def forward(self, x):
        return F.relu(x)

class Config:
    pass

class _Hidden(nn.Module):
    pass

def make(width):
    net = Net(width, classes=2)
    net.load_state_dict({})
    return net

def chained():
    return resnet18().eval()

def annotated() -> nn.Module:
    return helper()

def through():
    def inner():
        return nn.ReLU()
    return make(3)

def data():
    def inner():
        return nn.ReLU()
    return F.relu(torch.zeros(1))

def endless():
    return endless()
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(CODE)
    return path


def test_makers_are_the_classes_and_functions_that_give_a_module(code: Path) -> None:
    """Modules by their bases or their forward, functions by what they return; those that nothing
    else uses come first, and the arguments without a default are there."""
    assert [(maker.name, maker.needs) for maker in outline.makers(code)] == [
        ("Deep", ("width", "classes")),
        ("Lit", ()),
        ("Own", ()),
        ("chained", ()),
        ("annotated", ()),
        ("through", ()),
        ("Block", ()),
        ("Net", ("width", "classes")),
        ("make", ("width",)),
    ]


@pytest.mark.parametrize("options", [{}, {"arch": "net.py"}])
def test_a_file_of_code_as_model_lists_what_gives_a_module(
    options: dict[str, str], code: Path, tiny_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run net.py` and `--arch net.py` say net.py:CLASS; the code does not run."""
    monkeypatch.chdir(code.parent)
    where = "--arch" if options else "MODEL"
    with pytest.raises(UsageError, match=rf"{where} 'net\.py' is code: .* net\.py:CLASS") as caught:
        load(tiny_file if options else "net.py", **options)
    assert str(caught.value.hint).startswith(
        "it has net.py:Deep (--model-arg width=... --model-arg classes=...), net.py:Lit, net.py:Own"
    )
    assert caught.value.replace == ("net.py", "net.py:Deep")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (b"def f(:\n", LoadError, r"net\.py, line 1 is no Python code"),
        (b"x = '\0'", LoadError, "is no Python code"),
        (b"\xff\xfe", LoadError, "is not UTF-8"),
        (b"x" + b"+x" * 2**19, LoadError, "more than the 1,048,576 bytes"),
        (b"(" * 90_000, LoadError, "is no Python code"),
        (b"class Config:\n    pass\n", UsageError, r"net\.py:NAME"),
    ],
)
def test_code_that_cannot_be_read_gets_one_line(
    text: bytes, kind: type[FeatvizError], message: str, code: Path
) -> None:
    """Broken, deep, large and foreign text: the error says what is wrong with it."""
    code.write_bytes(text)
    with pytest.raises(kind, match=message):
        load(code)


def test_definitions_are_found_by_name(code: Path, tmp_path: Path) -> None:
    """Only definitions at the top of a file count, each file once, broken files not at all."""
    (tmp_path / "broken.py").write_text("class Net(:")
    (tmp_path / "other.py").write_text("from net import Net\ndef f():\n    class Net: pass\n")
    assert outline.defining("Net", [tmp_path, tmp_path]) == [code]
    assert {maker.name for path, maker in outline.models_in([tmp_path]) if path == code} >= {"Net"}
    with pytest.raises(FileError):
        outline.makers(tmp_path / "broken.py")


def test_a_folder_of_much_code_is_read_in_part(tmp_path: Path) -> None:
    """Of 30 files of 100 kB no more than 1 MiB is parsed for a hint, which takes about a second."""
    for number in range(30):
        code = f"import torch\nclass Net{number}(torch.nn.Module): pass\n"
        (tmp_path / f"{number:02d}.py").write_text(code + "#" * (100_000 - len(code)))
    names = [maker.name for _, maker in outline.models_in([tmp_path])]
    assert names == [f"Net{number}" for number in range(10)]
