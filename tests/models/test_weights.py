"""A checkpoint as people have it: wrapped, prefixed, averaged, halved, sharded,
nameless."""

from __future__ import annotations

import gzip
import json
import re
import runpy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DIGITS_MODEL, ROOT, Outcome, Run
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import models

from featviz.errors import LoadError
from featviz.models.identify import INDEX, identify
from featviz.models.load import adopt
from featviz.models.weights import (
    Weights,
    class_beside,
    find_weights,
    load_weights,
    stripped_variants,
)
from featviz.options import InputOptions, ModelOptions
from models.loading import (
    load,
    load_whole,
    nothing_fetched,
    on_meta,
    same_weights,
    uninitialised,
)

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


def parameter_names(state: Mapping[str, Tensor]) -> set[str]:
    """Without the counters of batches, which old files lack."""
    return {name for name in state if "num_batches" not in name}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_weights_are_found_however_they_are_wrapped(
    wrap: Callable[[State], Any], small: nn.Module
) -> None:
    """One of the readings of the tensors has just the model's own names (traps 22 to
    24)."""
    variants = stripped_variants(find_weights(wrap(dict(small.state_dict()))))
    names = [parameter_names(variant.tensors) for variant in variants]
    assert parameter_names(small.state_dict()) in names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapping", "atol"), [("lightning", 0), ("half", 1e-3), ("no counters", 0)]
)
def test_weights_load_without_arch(
    wrapping: str, atol: float, small: nn.Module, tmp_path: Path
) -> None:
    """The architecture, its classes and every weight are found."""
    path = tmp_path / "weights.pth"
    torch.save(WRAPPINGS[wrapping](dict(small.state_dict())), path)
    with uninitialised():
        loaded = load_whole(path)
    assert loaded.source["arch"] == "shufflenet_v2_x0_5"
    assert loaded.source["num_classes"] == 7
    assert "resize shorter side to 256" in loaded.preprocess.words_for()
    assert same_weights(loaded.module, small, atol=atol)


@pytest.mark.parametrize(
    ("prefix", "steps"), [("", []), ("module.", ["stripped 'module.'"])]
)
def test_own_names_that_look_like_a_prefix_are_kept(
    prefix: str, steps: list[str], tmp_path: Path
) -> None:
    """A model whose own names begin with `model.` is not stripped when that fits less."""
    module = nn.ModuleDict({"model": nn.Linear(2, 2)})
    expected = {name: tensor + 1 for name, tensor in module.state_dict().items()}
    file = tmp_path / "weights.pth"
    file.touch()
    weights = Weights(prefixed(expected, prefix))
    source = load_weights(module, weights, file, ModelOptions("net"))
    assert source["taken"] == [*steps, "loaded 2 of 2"]
    assert same_weights(module, expected)


@pytest.mark.parametrize(
    ("names", "stripped"),
    [
        ("module.a module.b module.c module.d loss", ["a b c d"]),
        ("module.a module.b module.c loss", []),
        ("module._orig_mod.a", ["_orig_mod.a", "a", "module.a", "a"]),
        ("a.module.w b.w", ["a.w b.w"]),
        # two names would become one
        ("a.module.w a.w", []),
        (
            "a._orig_mod.module.w b.w",
            ["a.module.w b.w", "a._orig_mod.w b.w", "a.w b.w"],
        ),
    ],
)
def test_names_without_what_wrappers_put_into_them(
    names: str, stripped: list[str]
) -> None:
    """A prefix goes where four of five names have it."""
    weights = Weights({name: torch.zeros(1) for name in names.split()})
    first, *others = stripped_variants(weights)
    assert first is weights
    assert [" ".join(variant.tensors) for variant in others] == stripped


def test_partial_weights_of_which_none_fits_are_an_error(tmp_path: Path) -> None:
    """Random weights would be all that there is."""
    (tmp_path / "w.pth").touch()
    weights = Weights({"weight": torch.zeros(7), "other": torch.zeros(1)})
    options = ModelOptions("x", partial=True)
    with pytest.raises(LoadError, match="0 of 2 tensors; missing bias; unexpected oth"):
        load_weights(nn.Linear(2, 2), weights, tmp_path / "w.pth", options)


def test_a_class_is_found_whatever_its_methods_call_self(tmp_path: Path) -> None:
    """Python does not ask for the name `self`; an attribute of another name is none of the
    class."""
    (tmp_path / "net.py").write_text(
        "class Short:\n"
        "    def __init__(s, width):\n        s.stem = s.head = width\n"
        "class Other:\n"
        "    def __init__(s, net):\n        s.stem = net.head\n"
    )
    named = class_beside(tmp_path / "w.pth", ["stem.weight", "head.weight"])
    assert named is not None
    assert named.endswith("net.py:Short")


def test_counters_of_a_profiler_are_weights_where_there_are_no_others() -> None:
    """Beside others they are left out, which is told."""
    counters = {"total_ops": torch.zeros(1), "conv.total_params": torch.zeros(1)}
    assert find_weights(counters).tensors.keys() == counters.keys()
    both = find_weights({**counters, **PLAIN})
    assert both.tensors.keys() == PLAIN.keys()
    assert both.steps == ("left out 2 counters of a profiler",)


PLAIN = {"w": torch.zeros(1)}
AVERAGED = {"w": torch.ones(1)}


@pytest.mark.parametrize(
    ("ema", "expected"), [(None, PLAIN), (False, PLAIN), (True, AVERAGED)]
)
def test_averaged_weights_are_taken_when_asked_for(
    ema: bool | None, expected: State
) -> None:
    """--ema, --no-ema, and plain ones without either."""
    content = {"state_dict": PLAIN, "state_dict_ema": AVERAGED}
    assert same_weights(dict(find_weights(content, ema=ema).tensors), expected)


@pytest.mark.parametrize(
    ("content", "ema", "keys"),
    [
        ({"model": PLAIN, "ema": {"state_dict": AVERAGED}}, True, "ema state_dict"),
        ({"ema": {"module": {"model": AVERAGED}}}, True, "ema module model"),
        ({"ema": {"ema": AVERAGED}}, None, "ema ema"),
        ({"model": {"state_dict": PLAIN, "ema": AVERAGED}}, None, "model state_dict"),
        ({"model": {"ema": AVERAGED}}, None, "model ema"),
        ({"ema": AVERAGED, "net": PLAIN}, False, "net"),
    ],
)
def test_usual_keys_may_lie_in_each_other(
    content: Any, ema: bool | None, keys: str
) -> None:
    """What was taken is told key by key."""
    weights = find_weights(content, ema=ema)
    assert weights.steps == tuple(f"took {key!r}" for key in keys.split())
    expected = AVERAGED if "ema" in keys else PLAIN
    assert same_weights(dict(weights.tensors), expected)


@pytest.mark.parametrize(
    "content",
    [{"state_dict": {"state_dict_ema": 1}}, {"state_dict": PLAIN, "schema": PLAIN}],
)
def test_averaged_weights_that_are_not_there(content: Any) -> None:
    """The error says what there is."""
    message = r"holds no averaged weights .*'state_dict'"
    with pytest.raises(LoadError, match=message) as caught:
        find_weights(content, ema=True)
    assert caught.value.hint == "leave out --ema for the plain ones"


NESTED = {
    "nets": {"G": {"gen.w": torch.ones(1), "x": torch.ones(2)}},
    "a.b": {"v": torch.ones(3)},
    "list": [{"w": torch.ones(1)}, {"w": torch.ones(2)}],
}


@pytest.mark.parametrize(
    ("key", "name", "length"),
    [("nets.G", "gen.w", 1), ("a.b", "v", 3), ("list.1", "w", 2)],
)
def test_a_key_is_obeyed(key: str, name: str, length: int) -> None:
    """--key goes where it says, also along dots and by an index."""
    assert len(find_weights(NESTED, key=key).tensors[name]) == length


def test_a_prefix_is_stripped() -> None:
    """--strip-prefix takes off just that."""
    weights = find_weights(NESTED, key="nets.G", prefix="gen.")
    assert list(weights.tensors) == ["w"]
    assert weights.steps == ("took 'nets.G'", "stripped 'gen.', leaving 1 others out")


@pytest.mark.parametrize(
    ("key", "message", "hint"),
    [
        ("nets.D", "--key 'nets.D': there is no 'D'", "found keys 'G'"),
        ("list.2", "there is no '2'", "found a list of 2"),
    ],
)
def test_a_key_that_is_not_there(key: str, message: str, hint: str) -> None:
    """The hint says what there is."""
    with pytest.raises(LoadError, match=re.escape(message)) as caught:
        find_weights(NESTED, key=key)
    assert str(caught.value.hint).startswith(hint)


def test_a_prefix_that_no_name_has() -> None:
    """It is an error, not nothing."""
    with pytest.raises(LoadError, match="--strip-prefix 'no': no name begins with it"):
        find_weights(NESTED, key="nets.G", prefix="no")


@pytest.mark.parametrize(
    ("classes", "expected"), [("Net", "net.py:Net"), ("Net Other", None), ("", None)]
)
def test_a_class_that_is_the_only_one_is_named(
    classes: str,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two that fit nobody knows which is meant."""
    monkeypatch.chdir(tmp_path)
    bodies = [f"class {name}:\n    self.conv = 1\n" for name in classes.split()]
    (tmp_path / "net.py").write_text("".join(bodies) + "class Else:\n    self.a = 1\n")
    named = class_beside(tmp_path / "w.pth", ["conv.weight", "conv.bias"])
    assert named == expected


def test_counters_of_a_profiler_are_left_out() -> None:
    """thop leaves them in each module."""
    counter = torch.ones(1)
    content = {"a.w": counter, "a.total_ops": counter, "total_params": counter}
    weights = find_weights(content)
    assert list(weights.tensors) == ["a.w"]
    assert weights.steps == ("left out 2 counters of a profiler",)


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        torch.compile,
        lambda net: torch.compile(nn.DataParallel(net)),
    ],
    ids=["parallel", "compiled", "both"],
)
def test_wrapped_modules_are_taken_out(
    wrap: Callable[[nn.Module], Any], tiny: nn.Module
) -> None:
    """A compiled module ignores later hooks, DataParallel changes the names."""
    assert adopt(wrap(tiny), InputOptions(size=8, crop=8)).module is tiny


@pytest.fixture
def other_head(small: nn.Module, tmp_path: Path) -> Path:
    """Weights of a model with a head of the user's."""
    state = {k: v for k, v in small.state_dict().items() if not k.startswith("fc.")}
    state |= {"fc.0.weight": torch.ones(9, 512), "fc.2.weight": torch.ones(2, 9)}
    torch.save(state, tmp_path / "a.pth")
    return tmp_path / "a.pth"


@pytest.mark.medium
def test_replaced_head_gives_the_nearest(other_head: Path) -> None:
    """Nearest architectures with counts, and --partial."""
    message = r"nearest: shufflenet_v2_x0_5 \(280 of 282 tensors fit\)"
    with pytest.raises(LoadError, match=message) as caught:
        load(other_head)
    assert "--partial" in str(caught.value.hint)


@pytest.mark.medium
def test_the_rest_of_a_replaced_head_loads_in_part(
    other_head: Path, small: nn.Module
) -> None:
    """--partial goes on and says how much."""
    loaded = load_whole(other_head, partial=True)
    assert loaded.source["taken"] == ["loaded 336 of 338"]
    weight = loaded.module.get_parameter("conv1.0.weight")
    assert torch.equal(weight, small.get_parameter("conv1.0.weight"))


@pytest.mark.medium
def test_sharded_safetensors_load(small: nn.Module, tmp_path: Path) -> None:
    """An index.json stands for the files beside it."""
    state = {k: v.contiguous() for k, v in small.state_dict().items()}
    names = list(state)
    weight_map = {}
    for file, keys in (
        ("m-1.safetensors", names[:60]),
        ("m-2.safetensors", names[60:]),
    ):
        save_file({key: state[key] for key in keys}, tmp_path / file)
        weight_map |= dict.fromkeys(keys, file)
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert same_weights(load(index), state)


def test_an_index_that_names_itself_is_refused(tmp_path: Path) -> None:
    """In one line, and not after a thousand readings."""
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"conv1.0.weight": index.name}}))
    with pytest.raises(LoadError, match="which is not beside it"):
        load(index)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"metadata": {}}, "is no index of shards: .*weight_map"),
        ({"weight_map": ["a", "b"]}, "is no index of shards"),
        ([1, 2], "is no index of shards"),
        (
            {"weight_map": {"conv.weight": "gone.pth"}},
            "'?gone.pth'?, which is not beside",
        ),
        ({"weight_map": {"conv.weight": "list.pth"}}, "list.pth.* holds no dict of"),
    ],
)
def test_an_index_without_shards_is_refused(index: object, message: str) -> None:
    """In one line, which names what is missing."""
    torch.save([1, 2], "list.pth")
    path = Path("m.safetensors.index.json")
    path.write_text(json.dumps(index))
    with pytest.raises(LoadError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ({}, {}, "holds no weights: nothing"),
        ({"epoch": 3, 7: "a"}, {}, "holds no weights: keys 'epoch', 7"),
        ([1, 2], {}, "holds no weights: a list of 2, of which --key 0 takes the first"),
        ("text", {}, "holds no weights: a str"),
        (
            {"a": {"lr": 1}, "state_dict": {"w": torch.ones(1)}},
            {"key": "a"},
            "holds no weights under 'a': keys 'a', 'state_dict'",
        ),
    ],
)
def test_a_file_without_weights_says_what_it_holds(
    content: object, options: dict[str, str], message: str
) -> None:
    """Its keys, or the kind of thing that it is."""
    torch.save(content, "a.pth")
    with pytest.raises(LoadError) as caught:
        load("a.pth", arch="squeezenet1_1", **options)
    assert message in caught.value.message


@pytest.fixture
def identified(featviz: Run, tmp_path: Path) -> Callable[..., Outcome]:
    """What `featviz identify` says of a file, saved as `a.pth`."""

    def identify_content(content: object, *options: str) -> Outcome:
        torch.save(content, tmp_path / "a.pth")
        return featviz("identify", tmp_path / "a.pth", *options)

    return identify_content


@pytest.mark.medium
def test_identify_names_the_architecture(
    small: nn.Module, identified: Callable[..., Outcome]
) -> None:
    """In a line for people, with what was taken and stripped."""
    done = identified({"state_dict": prefixed(small.state_dict(), "module.")})
    assert done.code == 0
    assert "took 'state_dict'; stripped 'module.'" in done.out
    assert "it is shufflenet_v2_x0_5 with 7 classes (or quantized_shuff" in done.out


@pytest.mark.medium
def test_identify_speaks_json(
    small: nn.Module, identified: Callable[..., Outcome]
) -> None:
    """For programs."""
    content = json.loads(identified(small.state_dict(), "--json").out)
    assert content["architecture"] == "shufflenet_v2_x0_5"
    assert content["num_classes"] == 7
    assert content["also"] == ["quantized_shufflenet_v2_x0_5"]


@pytest.mark.medium
def test_identify_names_the_nearest(
    small: nn.Module, identified: Callable[..., Outcome]
) -> None:
    """Of weights without a head."""
    headless = {k: v for k, v in small.state_dict().items() if not k.startswith("fc.")}
    nearest = "nearest: shufflenet_v2_x0_5 (280 of 282 tensors fit)"
    assert nearest in identified(headless).out


def test_identify_says_that_nothing_fits(identified: Callable[..., Outcome]) -> None:
    """That is no failure."""
    done = identified({"w": torch.ones(3)})
    assert done.code == 0
    assert done.out == (
        "a.pth: 1 tensor; no architecture of torchvision has such tensors; "
        "--arch names the class or the architecture\n"
    )


def test_identify_knows_a_whole_model(featviz: Run) -> None:
    """It runs as it stands."""
    done = featviz("identify", DIGITS_MODEL)
    description = "a whole model (Sequential), which is run as it stands"
    assert done.out == f"digits_cnn.pth: 8 tensors; {description}\n"
    assert done.code == 0


@pytest.mark.medium
def test_identify_names_the_class_of_a_whole_model(
    small: nn.Module, identified: Callable[..., Outcome]
) -> None:
    """For programs."""
    done = identified(small, "--json")
    assert json.loads(done.out)["whole_model"] == "ShuffleNetV2"
    assert done.code == 0


def test_identify_reads_a_config_beside_the_weights(
    identified: Callable[..., Outcome], tmp_path: Path
) -> None:
    """It says what `run` takes them for."""
    config = {"architectures": ["ViTModel"], "model_type": "vit"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = identified({"stem.weight": torch.ones(1), "head.bias": torch.ones(1)})
    assert done.code == 0
    assert "config.json beside it says ViTModel" in done.out


def test_identify_trusts_no_class(identified: Callable[..., Outcome]) -> None:
    """The hint speaks of `run`, which can."""
    done = identified(_Stranger())
    assert done.code == 1
    assert "_Stranger, which could run any code" in done.err
    assert "hint: with `featviz run`: if you trust the file, --trust" in done.err
    assert "identify" not in done.err


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
    names = {plain, TWINS.get(plain, plain)}
    assert match.name in names or name in match.names, match.description
    assert match.arguments.get("num_classes") == options.get("num_classes")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("googlenet", "aux_logits"),
        ("inception_v3", "aux_logits"),
        ("fcn_resnet50", "aux_loss"),
    ],
)
@pytest.mark.parametrize("has_head", [False, True])
def test_heads_that_only_training_uses_may_be_there(
    name: str, argument: str, has_head: bool
) -> None:
    """The builder makes the tensors of the file of the arguments that are found."""
    with uninitialised(), on_meta(name):
        options = {**nothing_fetched(name), argument: has_head}
        shapes = models.get_model(name, **options).state_dict()
        match = identify(Weights(dict(shapes)))
        options = {**nothing_fetched(name), **match.arguments}
        built = models.get_model(name, **options).state_dict()
    assert match.name == name
    assert built.keys() == shapes.keys()


SHIPPED = json.loads(gzip.decompress(INDEX.read_bytes()))
"""The index of architectures in the package."""


def test_index_is_that_of_the_installed_torchvision() -> None:
    """Every builder is in it."""
    assert sorted(SHIPPED) == sorted(models.list_models())
    names = INDEX.with_name("names.txt").read_text("utf-8").split()
    assert names == models.list_models()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["resnet18", "ssd300_vgg16", "vit_b_16", "deeplabv3_resnet50", "r3d_18"]
)
def test_an_entry_made_anew_is_the_same(name: str) -> None:
    """By the script that made them all."""
    entry = runpy.run_path(str(ROOT / "scripts" / "make_architectures.py"))["entry"]
    assert SHIPPED[name] == json.loads(json.dumps(entry(name)))
