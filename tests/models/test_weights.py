"""A checkpoint as people have it: wrapped, prefixed, averaged, halved, sharded,
nameless."""

from __future__ import annotations

import gzip
import json
import runpy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DIGITS_MODEL, ROOT, Run
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import models

from featviz.errors import LoadError
from featviz.models.identify import INDEX, identify
from featviz.models.load import adopt, load_model
from featviz.models.weights import Weights, put_weights, stripped_variants, unwrap
from featviz.options import InputOptions, ModelOptions
from models.loading import nothing_fetched, on_meta, uninitialised

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def small() -> nn.Module:
    torch.manual_seed(5)
    return models.shufflenet_v2_x0_5(num_classes=7)


def prefixed(state: Mapping[str, Tensor], prefix: str) -> State:
    return {prefix + key: value for key, value in state.items()}


WRAPPINGS: dict[str, Callable[[State], Any]] = {
    "bare": lambda s: s,
    "ordered": OrderedDict,
    "state_dict": lambda s: {"epoch": 3, "state_dict": s, "optimizer": {"lr": 0.1}},
    "model": lambda s: {"model": s, "args": {"a": 1}},
    "model_state_dict": lambda s: {"model_state_dict": s, "loss": torch.tensor(1.0)},
    "net": lambda s: {"net": s},
    "ema alone": lambda s: {"ema": s},
    "nested": lambda s: {"checkpoint": 1, "model": {"state_dict": s}},
    "module.": lambda s: prefixed(s, "module."),
    "_orig_mod.": lambda s: {"state_dict": prefixed(s, "_orig_mod.")},
    "lightning": lambda s: {
        "state_dict": {**prefixed(s, "model."), "criterion.weight": torch.ones(7)},
        "pytorch-lightning_version": "2.4",
    },
    "any order and depth": lambda s: {"model": prefixed(s, "model._orig_mod.module.")},
    "half": lambda s: {
        k: v.half() if v.is_floating_point() else v for k, v in s.items()
    },
    "no counters": lambda s: {k: v for k, v in s.items() if "num_batches" not in k},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_weights_are_found_however_they_are_wrapped(
    wrapping: str, small: nn.Module
) -> None:
    """One of the forms of the tensors has just the model's own names (traps 22 to 24)."""
    forms = stripped_variants(unwrap(WRAPPINGS[wrapping](dict(small.state_dict())))[0])
    names = {name for name in small.state_dict() if "num_batches" not in name}
    assert any(
        {n for n in tensors if "num_batches" not in n} == names for tensors, *_ in forms
    )


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", ["lightning", "half", "no counters"])
def test_weights_load_without_arch(
    wrapping: str, small: nn.Module, tmp_path: Path
) -> None:
    """The architecture, its classes and every weight are found."""
    path = tmp_path / "weights.pth"
    torch.save(WRAPPINGS[wrapping](dict(small.state_dict())), path)
    with uninitialised():
        loaded = load_model(ModelOptions(str(path)), InputOptions())
    assert (loaded.source["arch"], loaded.source["num_classes"]) == (
        "shufflenet_v2_x0_5",
        7,
    )
    assert "resize shorter side to 256" in loaded.preprocess.words_for()
    for key, value in small.state_dict().items():
        if "num_batches" not in key:
            found = loaded.module.state_dict()[key]
            assert torch.allclose(
                found, value, atol=1e-3 * (wrapping == "half"), rtol=0
            ), key


def test_own_names_that_look_like_a_prefix_are_kept(tmp_path: Path) -> None:
    """A model whose own names begin with `model.` is not stripped when that fits less."""
    module, file = nn.ModuleDict({"model": nn.Linear(2, 2)}), tmp_path / "weights.pth"
    file.touch()
    for prefix, steps in (("", []), ("module.", ["stripped 'module.'"])):
        weights = prefixed({k: v + 1 for k, v in module.state_dict().items()}, prefix)
        said = put_weights(module, Weights(weights), file, ModelOptions("net"))
        assert said["taken"] == [*steps, "loaded 2 of 2"]
        assert all(
            torch.equal(v, weights[prefix + k]) for k, v in module.state_dict().items()
        )


def test_averaged_weights_are_taken_when_asked_for(small: nn.Module) -> None:
    """--ema, --no-ema, and plain ones without either."""
    plain, averaged = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    content = {"state_dict": plain, "state_dict_ema": averaged}
    picked = [float(unwrap(content, ema=ema)[0][0]["w"]) for ema in (None, False, True)]
    assert picked == [0.0, 0.0, 1.0]
    for content in (
        {"state_dict": {"state_dict_ema": 1}},
        {"state_dict": plain, "schema": plain},
    ):
        with pytest.raises(
            LoadError, match=r"holds no averaged weights .*'state_dict'"
        ) as raised:
            unwrap(content, ema=True)
        assert raised.value.hint == "leave out --ema for the plain ones"


def test_key_and_strip_prefix_are_obeyed() -> None:
    """--key goes where it says, also along dots; --strip-prefix takes off just that."""
    content = {
        "nets": {"G": {"gen.w": torch.ones(1), "x": torch.ones(2)}},
        "a.b": {"v": torch.ones(3)},
    }
    (tensors, steps, _), _ = unwrap(content, key="nets.G", prefix="gen.")
    assert list(tensors) == ["w"]
    assert steps == ("took 'nets.G'", "stripped 'gen.', leaving 1 others out")
    assert list(unwrap(content, key="a.b")[0][0]) == ["v"]
    with pytest.raises(LoadError, match=r"--key 'nets\.D': there is no 'D'") as caught:
        unwrap(content, key="nets.D")
    assert caught.value.hint == "there is keys 'G'"
    with pytest.raises(LoadError, match="--strip-prefix 'no': no name begins with it"):
        unwrap(content, key="nets.G", prefix="no")


def test_a_key_may_be_an_index() -> None:
    """Of tuples and lists, with dots between; what there is is said where there is
    none."""
    content = ({"nets": [{"w": torch.ones(1)}, {"w": torch.ones(2)}]}, 7)
    assert len(unwrap(content, key="0.nets.1").weights.tensors["w"]) == 2
    with pytest.raises(LoadError, match="there is no '2'") as caught:
        unwrap(content, key="0.nets.2")
    assert str(caught.value.hint).startswith("there is a list of 2")


def test_counters_of_a_profiler_are_left_out() -> None:
    """thop leaves them in each module."""
    content = {
        "a.w": torch.ones(1),
        "a.total_ops": torch.ones(1),
        "total_params": torch.ones(1),
    }
    tensors, steps, _ = unwrap(content).weights
    assert [*tensors] == ["a.w"] and steps == ("left out 2 counters of a profiler",)


@pytest.mark.slow
def test_wrapped_modules_are_taken_out(tiny: nn.Module) -> None:
    """A compiled module ignores later hooks, DataParallel changes the names."""
    for wrapped in (
        nn.DataParallel(tiny),
        torch.compile(tiny),
        torch.compile(nn.DataParallel(tiny)),
    ):
        assert adopt(wrapped, InputOptions(size=8, crop=8)).module is tiny


def test_replaced_head_gives_the_nearest(small: nn.Module, tmp_path: Path) -> None:
    """Another head: nearest architectures with counts; --partial goes on and says how
    much."""
    state = {k: v for k, v in small.state_dict().items() if not k.startswith("fc.")}
    state |= {"fc.0.weight": torch.ones(9, 512), "fc.2.weight": torch.ones(2, 9)}
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(
        LoadError, match=r"nearest: shufflenet_v2_x0_5 \(280 of 282 tensors fit\)"
    ) as caught:
        load_model(ModelOptions(str(tmp_path / "a.pth")), InputOptions())
    assert "--partial" in str(caught.value.hint)
    loaded = load_model(
        ModelOptions(str(tmp_path / "a.pth"), partial=True), InputOptions()
    )
    assert loaded.source["taken"] == ["loaded 336 of 338"]
    assert torch.equal(
        loaded.module.state_dict()["conv1.0.weight"], state["conv1.0.weight"]
    )


def test_sharded_safetensors_load(small: nn.Module, tmp_path: Path) -> None:
    """An index.json stands for the files beside it."""
    state = {k: v.contiguous() for k, v in small.state_dict().items()}
    names = [*state]
    halves = {"m-1.safetensors": names[:60], "m-2.safetensors": names[60:]}
    for file, keys in halves.items():
        save_file({key: state[key] for key in keys}, tmp_path / file)
    index = {"weight_map": {key: file for file, keys in halves.items() for key in keys}}
    path = tmp_path / "m.safetensors.index.json"
    path.write_text(json.dumps(index))
    loaded = load_model(ModelOptions(str(path)), InputOptions())
    assert torch.equal(loaded.module.state_dict()["fc.weight"], state["fc.weight"])


def test_identify_command_says_what_it_is(
    small: nn.Module, tmp_path: Path, featviz: Run
) -> None:
    """For people a line, for programs JSON; also where nothing fits."""
    torch.save(
        {"state_dict": prefixed(small.state_dict(), "module.")}, tmp_path / "a.pth"
    )
    done = featviz("identify", tmp_path / "a.pth")
    assert done.code == 0
    assert "took 'state_dict'; stripped 'module.'" in done.out
    assert "it is shufflenet_v2_x0_5 with 7 classes (or quantized_shuff" in done.out
    found = json.loads(featviz("identify", tmp_path / "a.pth", "--json").out)
    assert (found["architecture"], found["num_classes"]) == ("shufflenet_v2_x0_5", 7)
    assert found["also"] == ["quantized_shufflenet_v2_x0_5"]
    headless = {k: v for k, v in small.state_dict().items() if not k.startswith("fc.")}
    torch.save(headless, tmp_path / "c.pth")
    nearest = "nearest: shufflenet_v2_x0_5 (280 of 282 tensors fit)"
    assert nearest in featviz("identify", tmp_path / "c.pth").out
    torch.save({"w": torch.ones(3)}, tmp_path / "b.pth")
    done = featviz("identify", tmp_path / "b.pth")
    assert (done.code, done.out) == (
        0,
        (
            "b.pth: 1 tensors; no architecture of torchvision has such tensors; "
            "--arch names the class or the architecture\n"
        ),
    )


def test_identify_says_what_run_takes_a_file_for(
    small: nn.Module, tmp_path: Path, featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole model, as it stands; weights beside a config.json; a model of a class
    that is not trusted, never."""
    monkeypatch.chdir(tmp_path)
    done = featviz("identify", DIGITS_MODEL)
    words = (
        "digits_cnn.pth: 8 tensors; a whole model (Sequential), which is run as it"
        " stands\n"
    )
    assert (done.code, done.out) == (0, words)
    torch.save(small, "whole.pth")
    done = featviz("identify", "whole.pth", "--json")
    assert json.loads(done.out)["whole_model"] == "ShuffleNetV2" and done.code == 0
    torch.save({"stem.weight": torch.ones(1), "head.bias": torch.ones(1)}, "own.pth")
    Path("config.json").write_text(
        json.dumps({"architectures": ["ViTModel"], "model_type": "vit"})
    )
    done = featviz("identify", "own.pth")
    assert done.code == 0 and "config.json beside it says ViTModel" in done.out
    torch.save(_Stranger(), "stranger.pth")
    done = featviz("identify", "stranger.pth")
    assert done.code == 1 and "_Stranger, which could run any code" in done.err
    assert (
        "hint: with `featviz run`: if you trust the file, --trust" in done.err
        and "identify" not in done.err
    )


class _Stranger(nn.Module):
    """A class that no list has."""


TWINS = {"fasterrcnn_mobilenet_v3_large_320_fpn": "fasterrcnn_mobilenet_v3_large_fpn"}
"""Two builders of the same shapes; float and quantised ones are told by their names."""


@pytest.mark.slow
@pytest.mark.parametrize("name", models.list_models()[::3])
def test_every_torchvision_builder_is_found_from_its_state_dict(name: str) -> None:
    """With 7 classes; twins may answer for each other."""
    options = {} if name.startswith("raft") else {"num_classes": 7}
    with uninitialised(), on_meta(name):
        module = models.get_model(name, **nothing_fetched(name), **options)
    match = identify(Weights(dict(module.state_dict())))
    plain = name.removeprefix("quantized_")
    assert match.name in (plain, TWINS.get(plain)) or name in match.names, (
        match.description
    )
    assert match.arguments.get("num_classes") == options.get("num_classes")


@pytest.mark.slow
def test_index_is_that_of_the_installed_torchvision(tmp_path: Path) -> None:
    """The shipped index has every builder, and a few made anew are the same."""
    shipped = json.loads(gzip.decompress(INDEX.read_bytes()))
    assert sorted(shipped) == sorted(models.list_models())
    assert (
        INDEX.with_name("names.txt").read_text("utf-8").split() == models.list_models()
    )
    entry = runpy.run_path(str(ROOT / "scripts" / "make_architectures.py"))["entry"]
    for name in (
        "resnet18",
        "ssd300_vgg16",
        "vit_b_16",
        "deeplabv3_resnet50",
        "r3d_18",
    ):
        assert shipped[name] == json.loads(json.dumps(entry(name)))
