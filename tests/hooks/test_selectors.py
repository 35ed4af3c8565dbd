"""Selectors: each form of the design's table, and what is said when one cannot be read."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from featviz.errors import UsageError
from featviz.hooks import selectors as select
from featviz.hooks.layers import function_layer, list_layers
from featviz.records import Layer


class OwnConv(nn.Conv2d):
    """A convolution of a class of its own."""


@pytest.fixture
def layers() -> list[Layer]:
    """A model of seven modules (0 is the model), `layer1.conv2` being of a subclass."""
    block = OrderedDict(
        conv1=nn.Conv2d(1, 1, 1), relu=nn.ReLU(), conv2=OwnConv(1, 1, 1)
    )
    stages = OrderedDict(
        stem=nn.Conv2d(1, 1, 1), layer1=nn.Sequential(block), fc=nn.Linear(1, 1)
    )
    return list_layers(nn.Sequential(stages))


def taken(layers: list[Layer], text: str) -> list[str]:
    """Names of the layers that selectors take."""
    return [layer.name for layer in select.select(layers, select.parse(text))]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Conv2d", ["stem", "layer1.conv1", "layer1.conv2"]),
        ("OwnConv", ["layer1.conv2"]),
        ("conv2d", []),
        (r"re:no\(t,Linear", ["fc"]),
        ("no),t],fc", ["fc"]),
        ("*1.*,! OwnConv", ["layer1.conv1", "layer1.relu"]),
        ("_ConvNd,Linear", ["stem", "layer1.conv1", "layer1.conv2", "fc"]),
        ("layer1.conv?", ["layer1.conv1", "layer1.conv2"]),
        ("re:conv", ["layer1.conv1", "layer1.conv2"]),
        ("re:conv(1,|2)", ["layer1.conv2"]),
        ("Conv2d@layer1.*", ["layer1.conv1", "layer1.conv2"]),
        ("Conv2d@re:1$", ["layer1.conv1"]),
        ("Conv2d#0", ["stem"]),
        ("Conv2d#-1", ["layer1.conv2"]),
        ("Conv2d#-3", ["stem"]),
        ("Conv2d#3", []),
        ("Conv2d#-4", []),
        ("Conv2d#::2", ["stem", "layer1.conv2"]),
        ("Conv2d#::-1", ["stem", "layer1.conv1", "layer1.conv2"]),
        ("Conv2d@layer1.*#0", ["layer1.conv1"]),
        ("Conv2d,!layer1.*", ["stem"]),
        ("Conv2d,!Conv2d#0", ["layer1.conv1", "layer1.conv2"]),
        ("fc, stem", ["stem", "fc"]),
        ("!fc,!stem", ["", "layer1", "layer1.conv1", "layer1.relu", "layer1.conv2"]),
        ("stem,,Conv2d,stem,", ["stem", "layer1.conv1", "layer1.conv2"]),
    ],
)
def test_selector_takes(layers: list[Layer], text: str, names: list[str]) -> None:
    """Each form takes its layers, once, and in model order; negative ones alone leave
    the rest."""
    assert taken(layers, text) == names


@pytest.fixture
def aliased() -> list[Layer]:
    """Layers of a model in which `first` and `again` are one module."""
    relu = nn.ReLU()
    return list_layers(
        nn.ModuleDict({"first": relu, "again": relu, "other": nn.ReLU()})
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("again", "first"),
        ("ag*", "first"),
        ("re:^again$", "first"),
        ("ReLU@again", "first"),
        ("ReLU@re:gai", "first"),
        ("first", "first"),
        ("ReLU,!again", "other"),
    ],
)
def test_every_alias_of_a_shared_module_matches(
    text: str, name: str, aliased: list[Layer]
) -> None:
    """A name that named_modules() drops selects the module that it shares, where one
    caller has it under several names."""
    assert taken(aliased, text) == [name]


def test_a_question_mark_stands_for_a_mark_of_selectors_in_a_name() -> None:
    """The key of a ModuleDict may hold a comma, a `#` or brackets."""
    model = nn.ModuleDict({"x,y": nn.ReLU(), "a#0": nn.ReLU(), "[0]": nn.ReLU()})
    layers = list_layers(model)
    assert taken(layers, "x?y") == ["x,y"]
    assert taken(layers, "a?0,?0?") == ["a#0", "[0]"]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "holds no selector", "Conv2d,ReLU"),
        (" , ,", "holds no selector", "Conv2d,ReLU"),
        ("!", "'!' names no layer", "for example"),
        ("Conv2d,#2", "'#2' names no layer", "for example"),
        ("re:[", r"'re:\[' is no regular expression", "re:"),
        ("Conv2d@re:(", r"'Conv2d@re:\(' is no regular expression", "re:"),
        ("Conv2d#::0", "slice #::0 has a step of 0", "#::2"),
    ],
)
def test_unreadable_selector_is_named(text: str, message: str, hint: str) -> None:
    """What cannot be read is a usage error with the selector and a working example."""
    with pytest.raises(UsageError, match=message) as caught:
        select.parse(text)
    assert hint in str(caught.value.hint)


def test_selectors_without_a_layer_are_named(layers: list[Layer]) -> None:
    """Of several selectors, those that match nothing, negative ones too."""
    selectors = select.parse("Conv2d,BatchNorm2d,!*.downsample,Conv2d#9")
    unmatched = [selector.text for selector in selectors if not selector.pick(layers)]
    assert unmatched == ["BatchNorm2d", "!*.downsample", "Conv2d#9"]


def test_types_present_come_commonest_first(layers: list[Layer]) -> None:
    """The model itself is none of them."""
    first, *rest = select.types_present(layers).split(", ")
    assert first == "Conv2d 2"
    assert sorted(rest) == ["Linear 1", "OwnConv 1", "ReLU 1", "Sequential 1"]


def test_what_helps_speaks_of_modules(layers: list[Layer]) -> None:
    """Of functions only where there is nothing else; the nearest name comes first."""
    function = function_layer(layers[1], "relu")
    remedy = select.remedy([*layers, function], select.parse("layer2"))
    assert remedy.startswith("did you mean layer1? types here: Conv2d 2, ")
    assert "fn:relu" not in remedy
    assert select.remedy(layers, select.parse("tem")).startswith("did you mean stem? ")
    assert remedy.endswith(
        "layers here: stem (Conv2d), layer1 (Sequential), layer1.conv1 (Conv2d) and 3 more"
    )
    assert select.remedy([function], select.parse("Nothing")) == (
        "types here: fn:relu 1; layers here: stem/fn:relu (fn:relu)"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Linear#3", "Linear has #0"),
        ("Conv2d#7", "Conv2d has #0 to #2"),
        ("relu.call1", "did you mean '*relu' or layer1.relu?"),
        ("Nothing", ""),
    ],
)
def test_what_is_meant_is_said(text: str, expected: str, layers: list[Layer]) -> None:
    """The numbers that there are, or names; tables number the calls of a layer."""
    parsed = select.parse(text)
    assert select.suggest(layers, parsed) == expected
    mark = "; " if expected.endswith(("0", "2")) else " "
    remedy = select.remedy(layers, parsed)
    assert remedy.startswith(f"{expected}{mark}types here".strip())


def test_names_of_another_case_are_near() -> None:
    """Classes are often written in small letters."""
    layers = list_layers(nn.Sequential(nn.ELU()))
    assert select.nearest(layers, select.parse("elu")) == ["ELU"]
