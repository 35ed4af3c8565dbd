"""timm's models: the same module, weights and input tensor as timm itself gives."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import SCENES, Run
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from torch import Tensor, nn

from featviz.errors import LoadError, UsageError
from featviz.models.load import LoadedModel, architecture_beside
from featviz.models.presets import choose_preprocess, from_timm
from featviz.options import InputOptions
from models.loading import load, load_whole, same_weights

SMALL = "test_resnet"
"""Half a million parameters, made by timm for tests."""


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hub to be reached, and nothing fetched before."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def tuned() -> nn.Module:
    """The small model with weights of its own."""
    torch.manual_seed(5)
    return timm.create_model(SMALL).eval()


PRETRAINED: dict[str, dict[str, Any]] = {
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


def config_of(name: str) -> dict[str, Any]:
    config = timm.get_pretrained_cfg(name).to_dict()
    return {**resolve_data_config(pretrained_cfg=config), **PRETRAINED[name]}


@pytest.mark.parametrize("name", PRETRAINED)
def test_the_input_is_timms(name: str) -> None:
    """The tensor that goes in is bit by bit that of timm's own evaluation transform."""
    config = config_of(name)
    image = Image.open(SCENES / "landscape.jpg").convert("RGB")
    expected = create_transform(**config, is_training=False)(image)[None]
    ours = choose_preprocess(nn.Identity(), from_timm(config), InputOptions())
    assert torch.equal(ours.tensor(image), expected)
    assert ours.blank()[0].shape == expected.shape


@pytest.mark.parametrize(
    ("name", "timms"), [("resnet18.tv_in1k", True), ("resnet18.a2_in1k", False)]
)
def test_a_crop_mode_of_timms_own_is_said(name: str, timms: bool) -> None:
    """featviz has none like it."""
    chain = from_timm(config_of(name))
    ours = choose_preprocess(nn.Identity(), chain, InputOptions())
    assert ("timm's crop mode" in ours.words_for()) is timms


def test_numbers_of_colours_become_their_mean() -> None:
    """For a model that was built for other channels."""
    config = config_of("resnet18.a1_in1k")
    chain = from_timm({**config, "input_size": (2, 64, 64)})
    for numbers, colours in ((chain.mean, config["mean"]), (chain.std, config["std"])):
        assert numbers == pytest.approx([sum(colours) / 3] * 2)


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("r160_in1k", f"timm:{SMALL}.r160_in1k"),
        ("mine", f"timm:{SMALL}"),
        (None, f"timm:{SMALL}"),
    ],
)
def test_a_tag_of_config_json_is_one_of_timms(
    tag: str | None, name: str, tmp_path: Path
) -> None:
    """Weights of somebody's own have a tag that timm lacks."""
    config = {"architecture": SMALL, "pretrained_cfg": {"tag": tag}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert architecture_beside(tmp_path / "model.safetensors") == name


@pytest.mark.medium
def test_random_weights_are_timms_under_the_seed(
    messages: pytest.LogCaptureFixture,
) -> None:
    """--weights none --seed 3 gives what timm.create_model gives after that seed, and
    says so."""
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    loaded = load_whole(f"timm:{SMALL}", weights="none", seed=3)
    after = torch.random.get_rng_state()
    torch.manual_seed(3)
    assert same_weights(loaded.module, timm.create_model(SMALL))
    assert torch.equal(after, before)
    source = {"kind": "timm", "name": SMALL, "weights": "none", "seed": 3}
    assert loaded.source == source
    assert "test_resnet has random weights (--weights none, --seed 3)" in messages.text


def assert_loaded(loaded: LoadedModel, expected: nn.Module) -> None:
    """With all weights of a file, and timm's input."""
    assert same_weights(loaded.module, expected)
    assert loaded.source["taken"][-1] == "loaded 92 of 92"
    assert loaded.preprocess.blank()[0].shape == (1, 3, 160, 160)


@pytest.mark.medium
def test_a_file_of_weights_for_an_architecture(
    tuned: nn.Module, tmp_path: Path
) -> None:
    """MODEL with --arch timm:NAME, freed of usual prefixes."""
    state = {f"model._orig_mod.{k}": v for k, v in tuned.state_dict().items()}
    torch.save(state, tmp_path / "w.pth")
    assert_loaded(load_whole(tmp_path / "w.pth", arch=f"timm:{SMALL}"), tuned)


@pytest.mark.medium
def test_an_architecture_with_a_file_of_weights(
    tuned: nn.Module, tmp_path: Path
) -> None:
    """timm:NAME with --weights, freed of usual prefixes."""
    path = tmp_path / "w.safetensors"
    save_file({f"module.{k}": v for k, v in tuned.state_dict().items()}, path)
    assert_loaded(load_whole(f"timm:{SMALL}", weights=str(path)), tuned)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["test_vit", "levit_128s", SMALL])
def test_the_file_says_how_many_classes_and_channels(name: str, tmp_path: Path) -> None:
    """Fine-tuned weights of 7 classes for grey images need no --model-arg; also of a
    distilled model, which has two classifiers."""
    tuned = timm.create_model(name, num_classes=7, in_chans=1)
    save_file(tuned.state_dict(), tmp_path / "w.safetensors")
    loaded = load_whole(tmp_path / "w.safetensors", arch=f"timm:{name}")
    assert same_weights(loaded.module, tuned)
    assert loaded.source["num_classes"] == 7
    assert loaded.preprocess.chain.channels == 1


@pytest.mark.medium
def test_the_size_of_an_argument_is_that_of_the_input() -> None:
    """Height and width, and the channels, which the weights do not have."""
    arguments = {"img_size": (48, 64), "in_chans": 1}
    loaded = load_whole("timm:test_vit", weights="none", model_args=arguments)
    chain = loaded.preprocess.chain
    assert loaded.preprocess.blank()[0].shape == (1, 1, 48, 64)
    # for one channel the means of three
    colours = timm.get_pretrained_cfg("test_vit").to_dict()
    assert chain.mean == pytest.approx([sum(colours["mean"]) / 3])
    assert chain.std == pytest.approx([sum(colours["std"]) / 3])


@pytest.mark.medium
def test_config_json_beside_the_file_names_the_model(
    tuned: nn.Module, tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    """A folder as timm's hub has it needs no --arch; a message says where the name came
    from."""
    file = tmp_path / "model.safetensors"
    save_file(tuned.state_dict(), file)
    config = {
        "architecture": SMALL,
        "num_classes": 1000,
        "pretrained_cfg": {"tag": "r160_in1k"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with messages.at_level("INFO", "featviz"):
        assert same_weights(load(file), tuned)
    line = "model.safetensors: config.json beside it says timm:test_resnet.r160_in1k"
    assert line in messages.text


def test_identify_names_the_model_of_config_json(featviz: Run, tmp_path: Path) -> None:
    """As timm itself calls it; `run` takes it without --arch."""
    save_file({"stem.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": SMALL}))
    done = featviz("identify", tmp_path / "model.safetensors")
    assert f"config.json beside it says {SMALL}" in done.out


def _cached(tmp_path: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """A repository of the hub as its client keeps it."""
    folder = tmp_path / "hub" / f"models--timm--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    save_file(tensors, folder / "snapshots" / "abc" / "model.safetensors")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("spec", "weights"),
    [(SMALL, None), (f"{SMALL}.r160_in1k", None), (SMALL, "r160_in1k")],
)
def test_weights_fetched_before_need_no_network(
    spec: str, weights: str | None, tuned: nn.Module, tmp_path: Path
) -> None:
    """Unset, `default` and a tag take pretrained weights, out of the hub's cache."""
    _cached(tmp_path, f"{SMALL}.r160_in1k", tuned.state_dict())
    assert same_weights(load(f"timm:{spec}", weights=weights), tuned)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("num_classes", "warnings"),
    [
        (0, []),
        (
            7,
            [
                "the classifier of test_resnet is random: its weights have 1000 classes,"
                " not 7"
            ],
        ),
    ],
)
def test_a_head_of_other_classes_is_random(
    num_classes: int,
    warnings: list[str],
    tuned: nn.Module,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning says so, unless it is left out."""
    _cached(tmp_path, f"{SMALL}.r160_in1k", tuned.state_dict())
    model = load_whole(f"timm:{SMALL}", model_args={"num_classes": num_classes})
    module: Any = model.module
    assert same_weights(module.layer4, tuned.layer4)
    assert caplog.messages == warnings
    # without a head there are no classes
    assert (model.scores is None) == (num_classes == 0)


@pytest.mark.medium
def test_weights_that_cannot_be_downloaded() -> None:
    """The error says what to put where."""
    message = "weights of test_resnet could not be loaded"
    with pytest.raises(LoadError, match=message) as caught:
        load(f"timm:{SMALL}")
    hint = str(caught.value.hint)
    assert "timm/test_resnet.r160_in1k" in hint
    assert "--weights FILE" in hint
    assert "model.safetensors" in hint
    assert "--weights none" in hint
    assert caught.value.exit_code == 1


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


@pytest.mark.parametrize("weights", [None, "a1_in1k"])
def test_a_hub_that_does_not_answer_is_asked_once(
    weights: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own client would try again for a minute; weights may be named twice."""
    requests: list[str] = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            requests.append(url)
            raise ConnectionError("no route to it")

    monkeypatch.setattr("huggingface_hub.get_session", Session)
    monkeypatch.setattr(timm, "create_model", pytest.fail)
    with pytest.raises(LoadError, match="does not answer: no route to it"):
        load(
            f"timm:{SMALL}" if weights is None else "timm:resnet18.a1_in1k",
            weights=weights,
        )
    assert len(requests) == 1
