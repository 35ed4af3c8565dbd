"""State dicts that keep something else than the weights load into the plain
architecture."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm
from torch.nn.utils.parametrizations import spectral_norm as new_spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision import models

from featviz.errors import LoadError
from featviz.models import identify
from featviz.models.weights import Weights, find_weights, stripped_variants
from models.loading import load, load_whole, uninitialised

pytestmark = [
    pytest.mark.usefixtures("imports_undone"),
    # torch's own, about what is to take their place
    pytest.mark.filterwarnings("ignore"),
]

CODE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.up = nn.ConvTranspose2d(6, 6, 2, stride=2, bias=False)
        self.one = nn.Conv2d(6, 1, 1)
        self.flat = nn.Conv1d(1, 2, 3)

    def forward(self, x):
        return self.flat(self.one(self.up(self.conv(x))).flatten(2))
"""

Change = Callable[[nn.Module], nn.Module]


def averaged(net: nn.Module) -> nn.Module:
    """The average of a model and of itself a few steps on."""
    model = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        model.update_parameters(net)
        for tensor in net.parameters():
            tensor.data += 0.1
    return model


def compiled_part(net: nn.Module) -> nn.Module:
    net.conv = torch.compile(net.conv, backend="eager")
    return net


def all_at_once(net: nn.Module) -> nn.Module:
    return nn.DataParallel(torch.compile(net, backend="eager"))


CHANGES: dict[str, tuple[Change, str]] = {
    "EMA": (averaged, "stripped 'module.', leaving 1 others out"),
    "compiled part": (compiled_part, "took '_orig_mod.' out of names"),
    "all at once": (all_at_once, "stripped 'module.'; stripped '_orig_mod.'"),
}
"""What is done to a model, and what is said of its weights."""


@pytest.fixture
def arch(tmp_path: Path) -> str:
    path = tmp_path / "user_net.py"
    path.write_text(CODE)
    return f"{path}:Net"


def live(module: nn.Module, name: str) -> Tensor:
    """The weight or bias that a module computes with."""
    path, _, tensor = name.rpartition(".")
    return getattr(inside(inside(module).get_submodule(path)), tensor)


def inside(module: nn.Module) -> nn.Module:
    """The module in its wrappers."""
    while isinstance(module, (AveragedModel, nn.DataParallel)):
        module = module.module
    return getattr(module, "_orig_mod", module)


def test_a_part_may_be_named_module_beside_a_compiled_one() -> None:
    """Both readings are tried: of DataParallel, and of a name of the model's own."""
    weight = torch.ones(1)
    tensors = {"stem._orig_mod.weight": weight, "block.module.weight": weight}
    variants = [set(variant.tensors) for variant in stripped_variants(Weights(tensors))]
    assert {"stem.weight", "block.module.weight"} in variants
    assert {"stem.weight", "block.weight"} in variants


@pytest.mark.medium
@pytest.mark.parametrize(("change", "description"), CHANGES.values(), ids=CHANGES)
def test_the_effective_weights_load(
    change: Change,
    description: str,
    arch: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Weights and output are those of the live module, and one line says what was done."""
    torch.manual_seed(0)
    net = change(load(arch)).eval()
    picture = torch.rand(1, 3, 8, 8)
    torch.save(net.state_dict(), tmp_path / "weights.pth")
    with caplog.at_level(logging.INFO, "featviz"):
        loaded = load(tmp_path / "weights.pth", arch=arch)
    lines = [line for line in caplog.messages if "weights.pth" in line]
    assert lines == [f"weights.pth: {description}"]
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, live(net, name), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(loaded(picture), net(picture), atol=1e-5, rtol=1e-4)


@pytest.mark.medium
def test_a_recognised_file_is_told_in_the_order_of_what_was_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was taken of it, what was stripped, and then what it is."""
    weights = models.squeezenet1_1(num_classes=7).state_dict()
    prefixed = {f"module.{name}": tensor for name, tensor in weights.items()}
    torch.save({"state_dict": prefixed}, tmp_path / "weights.pth")
    with caplog.at_level(logging.INFO, "featviz"):
        load(tmp_path / "weights.pth")
    steps = "took 'state_dict'; stripped 'module.'; it is squeezenet1_1 with 7 classes"
    assert f"weights.pth: {steps}" in caplog.messages


@pytest.mark.parametrize("change", [weight_norm, new_spectral_norm])
def test_norms_ask_for_code_that_applies_them(
    change: Callable[[nn.Module], nn.Module], arch: str, tmp_path: Path
) -> None:
    """What is not the model's own weight is not guessed: the error lists its tensors."""
    net = load(arch)
    change(net.conv)
    torch.save(net.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(LoadError, match=r"missing conv\.weight; unexpected conv\."):
        load(tmp_path / "weights.pth", arch=arch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "description"),
    [
        (
            "deeplabv3_mobilenet_v3_large",
            {"weights_backbone": None, "aux_loss": True},
            "with 7 classes with its auxiliary heads",
        ),
        (
            "googlenet",
            {"init_weights": False, "aux_logits": False},
            "with 7 classes without its auxiliary heads",
        ),
    ],
)
def test_auxiliary_heads_are_read_from_the_file(
    name: str, options: dict[str, Any], description: str, tmp_path: Path
) -> None:
    """A file with other auxiliary heads than the builder makes, and other classes,
    loads; the line that identifies it says so."""
    with torch.device("meta"):
        module = models.get_model(name, weights=None, num_classes=7, **options)
    weights = {k: torch.zeros(v.shape) for k, v in module.state_dict().items()}
    torch.save(weights, tmp_path / "w.pth")
    with uninitialised():
        loaded = load_whole(tmp_path / "w.pth")
    heads = {key: value for key, value in options.items() if key.startswith("aux")}
    match = identify.best_match(find_weights(weights))
    assert loaded.source == {**loaded.source, "arch": name, "num_classes": 7, **heads}
    assert set(loaded.module.state_dict()) == set(weights)
    assert description in match.description


@pytest.mark.medium
@pytest.mark.parametrize("partial", [False, True])
def test_no_neighbour_is_named_below_a_third(partial: bool, tmp_path: Path) -> None:
    """One tensor of a hundred is no likeness: no name, and no advice to load it in
    part."""
    with torch.device("meta"):
        weights = models.resnet18().state_dict()
    few = {k: torch.zeros(v.shape) for k, v in list(weights.items())[:12]}
    torch.save(few, tmp_path / "few.pth")
    with pytest.raises(LoadError) as caught:
        load(tmp_path / "few.pth", partial=partial)
    assert caught.value.message.endswith("matches no torchvision architecture")
    assert "--partial" not in str(caught.value.hint)


@pytest.mark.medium
def test_the_nearest_is_offered_in_part(tmp_path: Path) -> None:
    """Where most tensors of an architecture are there, the hint is a command that runs."""
    weights = models.squeezenet1_1().state_dict()
    part = {name: weights[name] for name in weights if "features.3" not in name}
    torch.save(part, tmp_path / "part.pth")
    with pytest.raises(LoadError) as caught:
        load(tmp_path / "part.pth")
    assert caught.value.add == ("--arch", "squeezenet1_1", "--partial")
    assert "loads what fits into squeezenet1_1" in str(caught.value.hint)
    loaded = load(tmp_path / "part.pth", partial=True, arch="squeezenet1_1")
    assert loaded.state_dict()["features.0.bias"].equal(part["features.0.bias"])
