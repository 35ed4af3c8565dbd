"""True capture: every call, before anything overwrites it; the model is given back as
it was."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from borrowed import assert_same, state_of
from networks import Net
from torch import Tensor, nn
from torchvision import models
from torchvision.models.feature_extraction import (
    create_feature_extractor,
    get_graph_node_names,
)

import featviz as fv
from featviz.errors import ForwardError
from featviz.hooks.capture import forward, given_tensors, hooked, leaves
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import list_layers
from featviz.hooks.selectors import parse, select

from .small_net import Maps, assert_equal, call_counts, grab

ONE = torch.zeros(1)


@pytest.mark.medium
def test_every_call_of_a_shared_module_is_captured() -> None:
    """ResNet-18 has 9 ReLU modules and 17 calls."""
    counts = call_counts(grab(models.resnet18(), "ReLU", torch.randn(1, 3, 64, 64)))
    assert len(counts) == 9
    assert sum(counts.values()) == 17


def expected_outputs(model: nn.Module, tensor: Tensor) -> Maps:
    """What torchvision's extractor gives for each call of each leaf, by qualified name."""
    twin = copy.deepcopy(model).eval()
    leaf_names = set[str]()
    for name, module in twin.named_modules():
        if not list(module.children()):
            leaf_names.add(name)
        if isinstance(module, nn.ReLU):
            module.inplace = False
    nodes = get_graph_node_names(twin)[1]
    values = create_feature_extractor(twin, return_nodes=nodes)(tensor)
    tensors: Maps = {}
    for node in nodes:
        # the second call of "layer1.0.relu" is its node "layer1.0.relu_1"
        name = re.sub(r"_\d+$", "", node)
        if name in leaf_names:
            tensors.setdefault(name, []).append(values[node])
    return tensors


@pytest.mark.medium
def test_captures_equal_the_feature_extractors() -> None:
    """Every captured tensor is what create_feature_extractor gives for that node."""
    torch.manual_seed(0)
    model = models.resnet18().eval()
    tensor = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        expected = expected_outputs(model, tensor)
        maps = grab(model, "*", tensor)
    assert len(expected) == 52
    assert_equal({name: maps[name] for name in expected}, expected)


class Halving(nn.Module):
    """Calls itself with half of what it is given, twice."""

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        return self(x / 2, times - 1) if times else x


def test_a_layer_that_calls_itself_has_an_input_for_each_call() -> None:
    """They are counted as the calls begin, the outermost first."""
    model = Net(lambda self, x: self.halving(x), halving=Halving())
    image = torch.rand(3, 6, 6)

    result = fv.run(
        model, image, "halving", preset="none", capture="input", tensors=True
    )

    first, *others = result.captures
    assert [maps.call for maps in result.captures] == [0, 1, 2]
    for call, maps in enumerate(others, 1):
        assert torch.equal(maps.tensor, first.tensor / 2**call)


class Careless(nn.Module):
    """Changes a buffer, swaps another, draws random numbers, and may raise."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        self.norm = nn.BatchNorm2d(2)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = torch.ones(1)
        x = self.norm(self.conv(x)) + torch.rand(1)
        if self.fails:
            raise ValueError("no\nsuch thing")
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_everything_borrowed_goes_back(fails: bool) -> None:
    """Flags of each module, buffers, RNG, hooks, fast path: as before, also after a
    raise (10)."""
    model = Careless(fails)
    model.train()
    model.norm.eval()
    next(model.parameters()).requires_grad_(False)
    before = state_of(model)
    raises = pytest.raises(ForwardError) if fails else nullcontext()
    with (
        raises,
        in_eval_mode(model),
        hooked(model, list_layers(model), lambda site, tensor: None) as recorder,
    ):
        assert not model.training
        assert not torch.is_grad_enabled()
        forward(model, [torch.randn(1, 3, 4, 4)], recorder)
    assert_same(before, state_of(model))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [nn.Identity(), nn.Sequential(nn.Conv2d(3, 2, 1), Careless(True))],
            r"failed in 1\.1\.conv \(Conv2d\): .*channels",
        ),
        ([Careless(True)], r"failed in 0 \(Careless\): no"),
    ],
    ids=["inside", "itself"],
)
def test_failure_names_the_innermost_module(
    steps: list[nn.Module], message: str
) -> None:
    """The message says which module raised, with the first line of what it said."""
    with pytest.raises(ForwardError, match=message):
        forward(nn.Sequential(*steps), [torch.randn(1, 3, 4, 4)])


@pytest.mark.parametrize(
    ("size", "remedies"),
    [
        ((64, 64), "--size, "),
        ((64, 96), "--size 64x64 makes it square, "),
        ((20, 20), "--size 32x32 lets it be halved five times, "),
        (
            (60, 100),
            "--size 60x60 makes it square, --size 64x96 lets it be halved five times, ",
        ),
    ],
)
def test_a_failure_offers_sizes_that_many_models_take(
    size: tuple[int, int], remedies: str
) -> None:
    """Square ones, and multiples of 32 next to both sides, height first."""
    with pytest.raises(ForwardError) as caught:
        forward(nn.Conv2d(4, 2, 1), [torch.zeros(1, 3, *size)])
    assert caught.value.hint == (
        f"the input was {[1, 3, *size]}; {remedies}--crop and --input-channels change it,"
        " -v shows the traceback"
    )


def test_attention_submodules_fire_when_the_fast_path_is_off() -> None:
    """The encoder layer's fast path would run past the hooks of what is inside it."""
    model = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    maps = grab(model, "Linear,LayerNorm", torch.randn(1, 5, 8))
    assert {"linear1", "linear2", "norm1", "norm2"} <= set(maps)


@dataclass
class Answer:
    logits: Tensor
    note: str = "fine"


def test_leaves_walks_tuples_dicts_and_dataclasses() -> None:
    """Each thing inside an output has a path; empty containers and None are leaves."""
    tensor = torch.zeros(1)
    value = {"out": tensor, "aux": [tensor, (None, Answer(tensor))], "none": ()}
    leaf_types = [(key, type(item).__name__) for key, item in leaves(value)]
    assert leaf_types == [
        ("out", "Tensor"),
        ("aux.0", "Tensor"),
        ("aux.1.0", "NoneType"),
        ("aux.1.1.logits", "Tensor"),
        ("aux.1.1.note", "str"),
        ("none", "tuple"),
    ]


@pytest.mark.parametrize(
    ("args", "kwargs", "keys"),
    [
        ((ONE, 3, None), {}, [""]),
        ((3, ONE), {"scale": 2.0}, [""]),
        ((ONE, ONE), {}, ["0", "1"]),
        ((ONE,), {"mask": ONE}, ["0", "mask"]),
        (([ONE, ONE],), {}, ["0", "1"]),
        ((3,), {"features": {"p3": ONE, "p4": [ONE]}}, ["p3", "p4.0"]),
        (([ONE], ONE), {}, ["0.0", "1"]),
        ((), {}, []),
    ],
)
def test_arguments_have_keys(
    args: tuple[Any, ...], kwargs: dict[str, Any], keys: list[str]
) -> None:
    """Those of the path inside of the only argument with tensors, or of all paths."""
    assert [leaf.key for leaf in given_tensors(args, kwargs)] == keys


@pytest.mark.parametrize(
    ("output", "reasons"),
    [
        ({}, ["is an empty dict, not a tensor"]),
        ((), ["is an empty tuple, not a tensor"]),
        ("name", ["is a str, not a tensor"]),
        (None, ["is None, not a tensor"]),
        ([None, None], ["is None, not a tensor"] * 2),
        ([ONE, None, ONE], []),
    ],
    ids=str,
)
def test_what_is_no_tensor_is_skipped(output: Any, reasons: list[str]) -> None:
    """With the reason; a None beside a tensor is what a layer leaves out by habit."""
    model = Net(lambda self, x: self.odd(x), odd=Net(lambda self, x: output))
    layers = select(list_layers(model), parse("odd"))
    with hooked(model, layers, lambda site, tensor: None) as recorder:
        forward(model, [ONE], recorder)
    assert [skip.reason for skip in recorder.skipped] == reasons


def test_recorder_tells_skipped_and_never_ran() -> None:
    """What gives no tensor is skipped with a reason; what does not fire is named."""
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    layers = list_layers(model)
    with (
        in_eval_mode(model),
        hooked(model, layers, lambda site, tensor: None) as recorder,
    ):
        x = torch.randn(1, 3, 4)
        forward(model, [x, x, x], recorder)
        forward(model, [x, x, x], recorder)
        assert recorder.calls[""] == 2
        model(x, x, x, need_weights=False)
    assert [layer.name for layer in recorder.never_ran] == ["out_proj"]
    assert recorder.skipped == []  # a hooked attention gives its weights


def test_a_caller_that_uses_weights_of_attention_gets_its_own() -> None:
    """Their mean over the heads, [1, T, T], as torch gives it without `need_weights`."""
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 3, 4)
    with in_eval_mode(model):
        _, expected = model(x, x, x)
        with hooked(model, list_layers(model), lambda site, tensor: None) as recorder:
            _, weights = forward(model, [x, x, x], recorder)
    assert torch.equal(weights, expected)


@pytest.mark.parametrize(
    ("selectors", "silent"),
    [("*,!re:^$", ["idle", "idle.0", "odd"]), ("list,steps", ["list", "steps"])],
)
def test_lists_of_modules_never_ran_only_where_nothing_ran(
    selectors: str, silent: list[str]
) -> None:
    """A ModuleList, and a Sequential that is gone through one by one, are named only if
    no hooked layer fires; a Sequential whose parts do not run is."""
    model = Net(
        lambda self, x: self.steps[0](self.list[0](x)),
        list=nn.ModuleList([nn.ReLU()]),
        steps=nn.Sequential(nn.Tanh()),
        idle=nn.Sequential(nn.Tanh()),
        odd=nn.Module(),
    )
    # a forward of its own, which is no method of its class
    model.odd.forward = lambda x: x
    layers = select(list_layers(model), parse(selectors))
    with hooked(model, layers, lambda site, tensor: None) as recorder:
        forward(model, [torch.zeros(1)], recorder)
    assert [layer.name for layer in recorder.never_ran] == silent
