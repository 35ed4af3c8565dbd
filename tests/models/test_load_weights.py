"""Weights for an architecture: from files, from torchvision's cache, or random."""

from __future__ import annotations

import logging
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import models

from featviz.errors import LoadError, UsageError
from models.loading import OLD, SMALL, WHOLE, load, same_weights, skeleton

pytestmark = pytest.mark.usefixtures("imports_undone")

ENTRY = models.SqueezeNet1_1_Weights.IMAGENET1K_V1


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of torch.hub's downloads."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """A state dict of SMALL that no seed gives."""
    return dict(skeleton(SMALL).state_dict())


def _write(path: Path, weights: dict[str, Tensor]) -> Path:
    if path.suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path)
    return path


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".ckpt", ".bin", ".safetensors"])
def test_weights_for_an_arch_arrive_unchanged(
    suffix: str, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """FILE --arch NAME gives the architecture with exactly the file's tensors."""
    path = _write(tmp_path / f"weights{suffix}", weights)
    assert same_weights(load(path, arch=SMALL), weights)


def test_weights_as_an_option_are_the_same(weights: dict[str, Tensor], tmp_path: Path) -> None:
    """NAME --weights FILE is FILE --arch NAME, said the other way round."""
    path = _write(tmp_path / "weights.pth", weights)
    assert same_weights(load(SMALL, weights=str(path)), weights)


def test_weights_for_a_factory(tiny: nn.Module, tmp_path: Path) -> None:
    """--arch takes a factory, with its arguments."""
    weights = {f"0.{key}": value for key, value in tiny[0].state_dict().items()}
    path = _write(tmp_path / "weights.pth", weights)
    (tmp_path / "user_a.py").write_text(
        "from torch import nn\ndef make(n):\n    return nn.Sequential(nn.Conv2d(3, n, 3))\n"
    )
    model = load(path, arch=f"{tmp_path / 'user_a.py'}:make", model_args={"n": 4})
    assert same_weights(model, weights)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_of_another_arch_do_not_fit(
    suffix: str, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """The error counts the tensors that fit and names missing and unexpected keys."""
    path = _write(tmp_path / f"weights{suffix}", weights)
    state = models.shufflenet_v2_x0_5().state_dict()
    keys = [key for key in state if not key.endswith("num_batches_tracked")]
    message = (
        rf"weights{suffix} does not fit shufflenet_v2_x0_5: 0 of {len(keys)} tensors; "
        rf"missing conv1\.0\.weight, .* and {len(keys) - 4} more; "
        rf"unexpected .*features\.0\.weight.* and {len(weights) - 4} more"
    )
    with pytest.raises(LoadError, match=message):
        load(path, arch="shufflenet_v2_x0_5")


def test_one_key_more_and_one_less_are_named(weights: dict[str, Tensor], tmp_path: Path) -> None:
    """A prefix on a single key shows as one missing and one unexpected key."""
    other = dict(weights)
    other["module.classifier.1.bias"] = other.pop("classifier.1.bias")
    path = _write(tmp_path / "weights.pth", other)
    n = len(weights)
    with pytest.raises(
        LoadError,
        match=rf"{n - 1} of {n} tensors; missing classifier\.1\.bias; "
        r"unexpected module\.classifier\.1\.bias$",
    ):
        load(path, arch=SMALL)


def test_another_number_of_classes_is_told_by_shapes(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """The shapes of the head are named, and the hint says how to change the model's."""
    path = _write(tmp_path / "weights.pth", weights)
    n = len(weights)
    match = rf"{n - 2} of {n} tensors; classifier\.1\.weight is \[1000, 512, 1, 1\], not \[10, 512"
    with pytest.raises(LoadError, match=match) as caught:
        load(path, arch=SMALL, model_args={"num_classes": 10})
    assert "num_classes" in str(caught.value.hint)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_unknown_weights_ask_for_an_arch(suffix: str, tmp_path: Path) -> None:
    """The line says that no known architecture fits, and the hint names the option."""
    weights = {"mine.weight": torch.ones(3)}
    match = f"weights{suffix} holds weights of an architecture that torchvision has not"
    with pytest.raises(LoadError, match=match) as caught:
        load(_write(tmp_path / f"weights{suffix}", weights))
    assert "--arch" in str(caught.value.hint)


def test_the_explicit_form_is_the_same_model() -> None:
    """torchvision:NAME is NAME."""
    one, other = (load(f"{p}{SMALL}", weights="none") for p in ("", "torchvision:"))
    assert same_weights(one, other)


def test_a_wrong_weights_entry_lists_the_entries() -> None:
    """--weights with an entry that the model lacks lists those it has."""
    with pytest.raises(UsageError, match="'IMAGENET1K_V9' is neither a file nor an entry") as e:
        load("resnet50", weights="IMAGENET1K_V9")
    assert all(word in str(e.value.hint) for word in ("IMAGENET1K_V1", "IMAGENET1K_V2", "none"))


@pytest.mark.parametrize("choice", [None, "default", "IMAGENET1K_V1"])
def test_weights_that_cannot_be_downloaded(
    choice: str | None, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network: the file, the folder where to put it, and --weights none."""

    def offline(*args: object, **kwargs: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(LoadError, match=r"SqueezeNet1_1_Weights\.IMAGENET1K_V1.*not known") as e:
        load(SMALL, weights=choice)
    hint = str(e.value.hint)
    assert Path(ENTRY.url).name in hint and str(hub) in hint and "--weights none" in hint


@pytest.mark.parametrize("choice", [None, "default", "IMAGENET1K_V1"])
def test_weights_in_the_cache_are_used(
    choice: str | None, hub: Path, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file put where the message says is taken, without a network."""
    monkeypatch.setattr(torch.hub, "download_url_to_file", pytest.fail)
    torch.save(weights, hub / Path(ENTRY.url).name)
    assert same_weights(load(SMALL, weights=choice), weights)


@pytest.mark.parametrize(
    "content", [b"", b"<html>", WHOLE[:1000], OLD[:1000]], ids=["empty", "page", "zip", "legacy"]
)
def test_a_corrupt_file_in_the_cache(content: bytes, hub: Path) -> None:
    """A broken download is named with its folder, and ends in one line."""
    (hub / Path(ENTRY.url).name).write_bytes(content)
    with pytest.raises(LoadError, match="could not be loaded") as caught:
        load(SMALL)
    assert "\n" not in caught.value.message
    assert Path(ENTRY.url).name in str(caught.value.hint) and str(hub) in str(caught.value.hint)


def test_random_weights_are_announced(messages: pytest.LogCaptureFixture) -> None:
    """--weights none warns that the weights are random, and by which seed."""
    messages.set_level(logging.INFO, "featviz")
    load(SMALL, weights="none", seed=3)
    assert f"{SMALL} has random weights (--weights none, --seed 3)" in messages.text
