"""timm's models: the same module, weights and input tensor as timm itself gives."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import SCENES
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from torch import Tensor, nn

from featviz.errors import LoadError, UsageError
from featviz.models.load import LoadedModel, load_model
from featviz.models.presets import choose_preprocess, from_timm
from featviz.options import InputOptions, ModelOptions
from models.loading import same_weights as same

SMALL = "test_resnet"
"""Half a million parameters, made by timm for tests."""


def load(
    spec: object, inputs: InputOptions | None = None, **options: Any
) -> LoadedModel:
    chosen = ModelOptions(str(spec), device="cpu", **options)
    return load_model(chosen, inputs or InputOptions())


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hub to be reached, and nothing fetched before."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def own() -> nn.Module:
    """The small model with weights of its own."""
    torch.manual_seed(5)
    return timm.create_model(SMALL).eval()


KINDS: dict[str, dict[str, Any]] = {
    "resnet18.a1_in1k": {},
    "convnext_tiny.fb_in22k_ft_in1k_384": {},
    "test_resnet.r160_in1k": {},
    "dm_nfnet_f0.dm_in1k": {},
    "resnet18.tv_in1k": {
        "crop_mode": "border",
        "input_size": (3, 64, 64),
        "crop_pct": 0.9,
    },
    "resnet18.fb_swsl_ig1b_ft_in1k": {"crop_mode": "center", "input_size": (3, 64, 48)},
    "resnet18.a2_in1k": {"crop_mode": "squash", "input_size": (3, 64, 48)},
}
"""Pretrained models of each kind of preprocessing, some with another size or mode."""


@pytest.mark.parametrize("name", KINDS)
def test_the_input_is_timms(name: str) -> None:
    """The tensor that goes in is bit by bit that of timm's own evaluation transform;
    the words say a mode that is none of featviz's own."""
    config = resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    config = {**config, **KINDS[name]}
    image = Image.open(SCENES / "landscape.jpg").convert("RGB")
    expected = create_transform(**config, is_training=False)(image)
    ours = choose_preprocess(nn.Identity(), from_timm(config), InputOptions())
    assert torch.equal(ours.tensor(image)[0], expected)
    assert ours.blank()[0].shape == expected[None].shape
    assert ("timm's crop mode" in ours.words_for()) is (
        name in ("resnet18.tv_in1k", [*KINDS][-2])
    )


def test_random_weights_are_timms_under_the_seed(
    messages: pytest.LogCaptureFixture,
) -> None:
    """--weights none --seed 3 gives what timm.create_model gives after that seed, and
    says so."""
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    found = load(f"timm:{SMALL}", weights="none", seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(3)
    assert same(found.module, timm.create_model(SMALL))
    assert found.source == {"kind": "timm", "name": SMALL, "weights": "none", "seed": 3}
    assert "test_resnet has random weights (--weights none, --seed 3)" in messages.text


@pytest.mark.parametrize(
    ("way", "prefix", "suffix"),
    [("arch", "model._orig_mod.", ".pth"), ("weights", "module.", ".safetensors")],
)
def test_a_file_of_weights(
    way: str, prefix: str, suffix: str, own: nn.Module, tmp_path: Path
) -> None:
    """A file goes in as MODEL with --arch timm:NAME and as --weights, freed of usual
    prefixes."""
    path = tmp_path / f"w{suffix}"
    tensors = {f"{prefix}{k}": v for k, v in own.state_dict().items()}
    save_file(tensors, path) if suffix == ".safetensors" else torch.save(tensors, path)
    if way == "arch":
        found = load(path, arch=f"timm:{SMALL}")
    else:
        found = load(f"timm:{SMALL}", weights=str(path))
    assert same(found.module, own)
    assert found.source["taken"][-1] == "loaded 92 of 92"
    assert found.preprocess.blank()[0].shape == (1, 3, 160, 160)


@pytest.mark.parametrize("name", ["test_vit", SMALL])
def test_the_file_says_how_many_classes_and_channels(name: str, tmp_path: Path) -> None:
    """Fine-tuned weights of 7 classes for grey images need no --model-arg."""
    tuned = timm.create_model(name, num_classes=7, in_chans=1)
    save_file(tuned.state_dict(), tmp_path / "w.safetensors")
    found = load(tmp_path / "w.safetensors", arch=f"timm:{name}")
    assert same(found.module, tuned)
    assert (found.source["num_classes"], found.preprocess.chain.channels) == (7, 1)


@pytest.mark.slow
def test_config_json_beside_the_file_names_the_model(
    own: nn.Module, tmp_path: Path, featviz: Callable[..., Any]
) -> None:
    """A folder as timm's hub has it needs no --arch; stderr says where the name came
    from."""
    save_file(own.state_dict(), tmp_path / "model.safetensors")
    config = {
        "architecture": SMALL,
        "num_classes": 1000,
        "pretrained_cfg": {"tag": "r160_in1k"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert same(load(tmp_path / "model.safetensors").module, own)
    done = featviz("layers", tmp_path / "model.safetensors")
    assert (
        "model.safetensors: config.json beside it says timm:test_resnet.r160_in1k"
        in done.err
    )
    assert done.code == 0


def _cached(tmp_path: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """A repository of the hub as its client keeps it."""
    folder = tmp_path / "hub" / f"models--timm--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    save_file(tensors, folder / "snapshots" / "abc" / "model.safetensors")


@pytest.mark.parametrize(
    ("spec", "weights"),
    [(SMALL, None), (f"{SMALL}.r160_in1k", None), (SMALL, "r160_in1k")],
)
def test_weights_fetched_before_need_no_network(
    spec: str, weights: str | None, own: nn.Module, tmp_path: Path
) -> None:
    """Unset, `default` and a tag take pretrained weights, out of the hub's cache."""
    _cached(tmp_path, f"{SMALL}.r160_in1k", own.state_dict())
    assert same(load(f"timm:{spec}", weights=weights).module, own)


def test_weights_that_cannot_be_downloaded() -> None:
    """The error says what to put where."""
    with pytest.raises(
        LoadError, match="weights of test_resnet could not be loaded"
    ) as caught:
        load(f"timm:{SMALL}")
    hint = str(caught.value.hint)
    for part in ("timm/test_resnet.r160_in1k", "--weights FILE", "model.safetensors"):
        assert part in hint
    assert "--weights none" in hint and caught.value.exit_code == 1


@pytest.mark.parametrize("name", ["ResNet18x", "hf-hub:timm/resnet18"])
def test_an_unknown_name_gives_the_nearest(name: str) -> None:
    """Exit code 2, with names that timm has."""
    with pytest.raises(UsageError, match="no timm model named") as caught:
        load(f"timm:{name}", weights="none")
    assert caught.value.exit_code == 2
    assert "timm:resnet18" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("spec", "weights", "message"),
    [
        ("botnet50ts_256", None, "timm has no weights for botnet50ts_256"),
        (
            "resnet18.nonesuch",
            None,
            "'nonesuch' is neither a file nor weights .*a1_in1k, a2_in1k",
        ),
        (
            "resnet18",
            "nonesuch",
            "'nonesuch' is neither a file nor weights .*a1_in1k, a2_in1k",
        ),
        (
            "resnet18.a1_in1k",
            "tv_in1k",
            r"--weights tv_in1k and timm:resnet18\.a1_in1k differ",
        ),
    ],
)
def test_weights_that_timm_has_not(
    spec: str, weights: str | None, message: str
) -> None:
    """No pretrained ones, a tag that there is not, with those that there are, and two
    that differ."""
    with pytest.raises(UsageError) as caught:
        load(f"timm:{spec}", weights=weights)
    assert re.search(message, f"{caught.value.message}: {caught.value.hint}")


def test_without_timm_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra that is missing, and how to get it."""
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(LoadError, match="needs the package timm") as caught:
        load("timm:resnet18")
    assert caught.value.hint == "pip install 'featviz[timm]'"


def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own client would try again for a minute."""
    asked: list[str] = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append(url)
            raise ConnectionError("no route to it")

    monkeypatch.setattr("huggingface_hub.get_session", Session)
    monkeypatch.setattr(
        timm, "create_model", lambda *args, **more: pytest.fail("asked again")
    )
    with pytest.raises(LoadError, match="does not answer: no route to it"):
        load(f"timm:{SMALL}")
    assert len(asked) == 1
