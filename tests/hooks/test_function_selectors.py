"""Selectors of functions: which calls `fn:` takes, in runs and in lists of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Run
from networks import Net
from PIL import Image
from runs import run_json
from tiles import assert_drawn, manifest, raw, rows
from torch import Tensor, nn

import featviz as fv
from featviz.errors import UsageError
from featviz.models.load import adopt
from featviz.options import InputOptions
from featviz.run.choose import choose_layers

from .small_net import AS_IS, LINE, SUMS, grab

SIZED: dict[str, Any] = {"size": (12, 16), **AS_IS}


class DrawnSum(NamedTuple):
    """The residual sum of a block, as a run drew it."""

    image_folder: Path
    captures: dict[tuple[str, int, str], dict[str, Any]]
    """Rows of the manifest by layer, call and key."""
    row: dict[str, Any]
    """That of the sum."""
    expected: Tensor
    """The block's convolution and its input, added: [3, 12, 16]."""


@pytest.fixture
def drawn_sum(net: nn.Module, picture: Path, tmp_path: Path) -> DrawnSum:
    """A run of functions, of what holds them, and of convolutions."""
    out = tmp_path / "out"
    run = fv.run(
        net, picture, "fn:add,Unit,Conv2d", out, tensors="npy", scale=1, **SIZED
    )
    assert not run.failures
    folder = out / picture.name
    captures = rows(folder)
    conv = raw(folder, captures["layer1.1.conv", 0, ""])
    into = raw(folder, captures["layer1.0", 0, ""])
    row = captures["layer1.1/fn:add", 0, ""]
    return DrawnSum(folder, captures, row, expected=(conv + into)[0])


@pytest.mark.medium
def test_the_picture_of_a_function_shows_what_it_gives(drawn_sum: DrawnSum) -> None:
    """Pixels and statistics are those of the sum, before a ReLU overwrites it."""
    stats = np.load(drawn_sum.image_folder / "stats.npz")
    minima = drawn_sum.expected.amin((1, 2))
    assert_drawn(drawn_sum.image_folder, drawn_sum.row, drawn_sum.expected)
    assert np.allclose(stats["layer1.1/fn:add|output|0|"][:, 0], minima)
    assert minima.min() < 0 <= drawn_sum.captures["layer1.1", 0, ""]["min"]


@pytest.mark.medium
def test_a_function_is_a_layer_in_every_record(drawn_sum: DrawnSum) -> None:
    """The manifest, the picture's text and run.json call it by its name and type."""
    row = drawn_sum.row
    text = Image.open(drawn_sum.image_folder / row["file"]).text
    assert (row["type"], row["index"], row["layout"]) == ("fn:add", 5, "nchw")
    assert row["shape"] == [1, 3, 12, 16]
    assert text["Layer"] == "layer1.1/fn:add (fn:add)"
    assert "layer1.1/fn:add" in run_json(drawn_sum.image_folder.parent)["layers"]
    assert manifest(drawn_sum.image_folder)["never_ran"] == []


@pytest.mark.medium
def test_the_folder_of_a_function_is_named_portably(drawn_sum: DrawnSum) -> None:
    """No mark of its name is one that a file system refuses."""
    name = Path(drawn_sum.row["file"]).parent.name
    assert name.startswith("005_layer1.1_fn_add-")
    assert name == name.strip(". ")
    assert not set(name) & set('<>:"/\\|?*')


MEASURED = Net(
    lambda self, x: torch.stack([x.flatten(1).mean(1), x.flatten(1).amin(1)], 1)
)
"""Calls functions that statistics call, too."""


@pytest.mark.medium
def test_drawing_is_not_mistaken_for_the_model(picture: Path, tmp_path: Path) -> None:
    """What featviz itself computes while it draws a module is no function of that
    module."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), MEASURED)
    layers = "*,fn:stack,fn:flatten,fn:mean,fn:amin,fn:clone"
    fv.run(model, picture, layers, tmp_path / "out", **SIZED)
    calls = [key[:2] for key in rows(tmp_path / "out" / picture.name) if "fn" in key[0]]
    assert sorted(calls) == [
        ("1/fn:amin", 0),
        ("1/fn:flatten", 0),
        ("1/fn:flatten", 1),
        ("1/fn:mean", 0),
        ("1/fn:stack", 0),
    ]


def test_copies_of_a_capture_are_not_mistaken_for_the_model() -> None:
    """Tensors are cloned and detached to be kept, by nobody in the model."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), MEASURED)
    assert list(grab(model, "Net,fn:clone,fn:detach", torch.zeros(1, 3, 4, 4))) == ["1"]


@pytest.mark.medium
def test_a_function_that_is_not_called_never_ran(picture: Path, tmp_path: Path) -> None:
    """Called with the blank image, not with this one: named in never_ran."""
    fussy = Net(
        lambda self, x: self.conv(x) if x.any() else F.gelu(self.conv(x)),
        conv=nn.Conv2d(3, 2, 1),
    )
    fv.run(fussy, picture, "fn:gelu,Conv2d", tmp_path / "out", **SIZED)
    assert manifest(tmp_path / "out" / picture.name)["never_ran"] == ["fn:gelu"]


def chosen(net: nn.Module, layers: str) -> list[str]:
    """Names of the layers that a run draws."""
    model = adopt(net, InputOptions(**SIZED))
    return [x.name for x in choose_layers(model, layers, [torch.zeros(1, 3, 12, 16)])]


MODULES = ["layer1.0", "layer1.1", "layer2.0"]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("fn:add", SUMS),
        ("fn:add#0", SUMS[:1]),
        ("fn:add#1:", SUMS[1:]),
        ("fn:add@re:2", SUMS[2:]),
        ("fn:add@layer1.*#1", SUMS[1:2]),
        ("fn:add, ! fn:add@layer2.*", SUMS[:2]),
        ("fn:interpolate,fn:cat", ["fn:interpolate", "fn:cat"]),
        ("fn:relu@", ["fn:relu"]),
        ("layer1.?", ["layer1.0", "layer1.1"]),
        ("Unit,fn:add@layer2.*", [*MODULES, SUMS[2]]),
        ("!fn:add,!*.relu,!*.conv,!layer?", ["", *MODULES]),
    ],
)
def test_runs_and_captures_take_the_same(
    layers: str, expected: list[str], net: nn.Module
) -> None:
    """Indices count calls in their order, globs and expressions name the module that
    calls, and without fn: no selector takes a function; also where a capture meets the
    functions as they are called, without a blank pass."""
    assert chosen(net, layers) == expected
    assert set(grab(net, layers, torch.zeros(1, 3, 12, 16))) == set(expected)


def test_a_run_counts_from_the_end(net: nn.Module) -> None:
    """The blank pass has met all calls."""
    assert chosen(net, "fn:add#-1") == SUMS[2:]


@pytest.mark.parametrize(
    "layers", ["fn:add#-1", "fn:add#:-1", "fn:add#0:-1", "fn:add#::-1"]
)
def test_capture_cannot_count_from_the_end(layers: str, net: nn.Module) -> None:
    """The last call is not known before the model is done: said at once."""
    with (
        pytest.raises(UsageError, match=f"{layers}' counts from the end"),
        fv.capture(net, layers),
    ):
        pass


def test_capture_of_a_function_nobody_calls(net: nn.Module) -> None:
    """At the end of the block an error lists the functions that were called."""
    with pytest.raises(UsageError, match="no layer matches 'fn:gelu'") as caught:
        grab(net, "fn:gelu", torch.randn(1, 3, 6, 8))
    assert "fn:relu 1" in str(caught.value.hint)
    assert "fn:add 3" in str(caught.value.hint)


@pytest.mark.parametrize("layers", ["layer1,fn:gelu", "layer1,gelu"])
def test_capture_warns_of_a_selector_that_takes_nothing(
    layers: str, net: nn.Module, messages: pytest.LogCaptureFixture
) -> None:
    """At the end of the block, since functions are met only as the model runs."""
    with fv.capture(net, layers):
        net(torch.zeros(1, 3, 6, 8))
    name = layers.partition(",")[2]
    assert messages.messages[0].startswith(f"selector {name!r} matches no layer")


def test_capture_of_a_function_where_none_is_called() -> None:
    """Modules of torch's own call none, and the error names what is there."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    with pytest.raises(UsageError, match="no layer matches 'fn:nonsense'") as caught:
        grab(model, "fn:nonsense", torch.randn(1, 3, 6, 8))
    assert caught.value.hint == (
        "functions called in the block: none, but inside torch's own modules; "
        "types here: Conv2d 1, ReLU 1; layers here: 0 (Conv2d), 1 (ReLU)"
    )


def test_an_error_in_the_block_is_not_hidden(net: nn.Module) -> None:
    """What the caller's block raises comes out of it, and not that nothing was
    captured."""
    with pytest.raises(KeyError, match="mine"), fv.capture(net, "fn:relu"):
        raise KeyError("mine")


@pytest.mark.parametrize(
    ("layers", "hints"),
    [
        (
            "fn:intrepolate",
            ["did you mean fn:interpolate?", "functions here: fn:add 3"],
        ),
        ("Interpolate", ["the model calls the function interpolate once, "]),
        ("Add", ["the model calls the function add 3 times"]),
    ],
)
def test_no_match_points_to_the_functions_there_are(
    layers: str, hints: list[str], net_file: Path, picture: Path, featviz: Run
) -> None:
    """Exit 2; the functions that the model calls, and the nearest name, also of a
    module."""
    options = ["--weights", "none", "--layers", layers, *LINE]
    done = featviz("run", f"{net_file}:Net", picture, *options)
    assert done.code == 2
    assert done.err.startswith(f"error: no layer matches --layers {layers!r}\n")
    assert len(done.err.splitlines()) == 2
    for hint in hints:
        assert hint in done.err
