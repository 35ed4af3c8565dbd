"""Weights of one's own classes, Lightning's checkpoints among them: the class is found
by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run
from runs import refused
from torch import Tensor, nn

from featviz.errors import LoadError, UsageError
from models.loading import SMALL, load, same_weights

pytestmark = [pytest.mark.usefixtures("imports_undone"), pytest.mark.medium]

CODE = """
import torch
from torch import nn

class Lit(nn.Module):
    def __init__(self, width, depth=1, *, lr=0.1):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.loss = nn.MSELoss()
        self.net: nn.Module = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(depth)))
        self.head = nn.Conv2d(3, width, 1)

    def forward(self, x):
        return self.head(self.net(x)) * self.scale

class AsOne(nn.Module):
    def __init__(self, hparams):
        super().__init__()
        self.head = nn.Conv2d(3, hparams["width"], 1)

class OfWidth(AsOne):
    def __init__(self, width):
        super().__init__({"width": width})

def make(**options):
    return Lit(options.pop("width"), options.pop("depth"))
"""


def lit() -> dict[str, Tensor]:
    """The state dict of `Lit(5, 2)` in CODE, made without it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    parts = nn.ModuleDict({"net": net, "head": nn.Conv2d(3, 5, 1)})
    return {"scale": torch.full((1,), 2.0), **parts.state_dict()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with CODE and a Lightning checkpoint, in which the command runs."""
    (tmp_path / "user_lit.py").write_text(CODE)
    save(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(folder: Path, **changes: Any) -> None:
    """A checkpoint as Lightning's Trainer writes it."""
    content = {
        "epoch": 3,
        "global_step": 7,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": lit(),
        "callbacks": {},
        "optimizer_states": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 5, "depth": 2, "lr": 0.5, "batch_size": 8},
    }
    torch.save({**content, **changes}, folder / "last.ckpt")


def test_the_error_asks_for_the_class(featviz: Run, folder: Path) -> None:
    """It names the arguments that the file has, and how they are passed."""
    done = featviz("layers", "last.ckpt")
    message = "last.ckpt is a Lightning checkpoint, and does not say of which class"
    refused(done, 1, message)
    assert "it has hyper_parameters: width, depth, lr, batch_size" in done.err
    assert "name the class: --arch user_lit.py:Lit --model-arg @hparams" in done.err


def test_the_remedy_of_that_error_helps(featviz: Run, folder: Path) -> None:
    """The class and @hparams load the checkpoint."""
    options = ["--arch", "user_lit.py:Lit", "--model-arg", "@hparams"]
    done = featviz("layers", "last.ckpt", *options)
    assert done.code == 0
    assert "net.1" in done.out


@pytest.mark.parametrize("arch", ["user_lit.py:Lit", "user_lit.py:make"])
def test_hyper_parameters_are_the_arguments(arch: str, folder: Path) -> None:
    """Those that the class takes are passed, all where it takes any; the weights are
    the file's."""
    module = load("last.ckpt", arch=arch, hparams=True)
    assert module.head.out_channels == 5
    assert len(module.net) == 2
    assert same_weights(module, lit())


@pytest.mark.parametrize("arch", ["user_lit.py:Lit", "user_lit.py:make"])
def test_an_argument_of_the_user_goes_before_the_files(arch: str, folder: Path) -> None:
    """The file's weights do not fit it then."""
    with pytest.raises(LoadError, match="head"):
        load("last.ckpt", arch=arch, hparams=True, model_args={"width": 7})


def test_hyper_parameters_as_one_argument(folder: Path) -> None:
    """Where Lightning saved one argument that holds them all, it is passed as one."""
    head = {k: v for k, v in lit().items() if k.startswith("head")}
    save(folder, state_dict=head, hparams_name="hparams")
    module = load("last.ckpt", arch="user_lit.py:AsOne", hparams=True)
    assert module.head.out_channels == 5


def test_a_class_of_one_argument_gets_no_other(folder: Path) -> None:
    """Of four in the file."""
    head = {k: v for k, v in lit().items() if k.startswith("head")}
    save(folder, state_dict=head)
    module = load("last.ckpt", arch="user_lit.py:OfWidth", hparams=True)
    assert module.head.out_channels == 5


@pytest.mark.parametrize(
    ("spec", "options", "error", "message"),
    [
        (
            "last.ckpt",
            {"arch": SMALL},
            UsageError,
            "@hparams is for a class of your own",
        ),
        ("last.ckpt", {}, UsageError, "@hparams is for a class of your own"),
        ("user_lit.py:Lit", {}, LoadError, "has no dict of hyper_parameters"),
        (
            "list.ckpt",
            {"arch": "user_lit.py:Lit"},
            LoadError,
            r"list\.ckpt has no dict of hyper",
        ),
    ],
)
def test_hyper_parameters_need_a_checkpoint_and_a_class(
    spec: str,
    options: dict[str, str],
    error: type[Exception],
    message: str,
    folder: Path,
) -> None:
    """Each place where they are not gets one line."""
    torch.save({"state_dict": lit(), "hyper_parameters": [5, 2]}, "list.ckpt")
    with pytest.raises(error, match=message):
        load(spec, hparams=True, **options)
