"""Selectors of functions: which calls `fn:` takes, in runs and in lists of layers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Run
from networks import Net
from PIL import Image
from tiles import assert_drawn, manifest, rows
from torch import nn

import featviz as fv
from featviz.errors import UsageError
from featviz.models.load import LoadedModel
from featviz.models.presets import choose_preprocess
from featviz.options import InputOptions
from featviz.run.choose import choose_layers

from .small_net import AS_IS, LINE, SUMS, grab


class TestInARun:
    """Functions in the run directory."""

    def test_pictures_numbers_and_names(self, net: nn.Module, picture: Path) -> None:
        """fn:add and the convolutions in one run: the picture shows the sum of the
        convolution and its input, and the manifest, the statistics and run.json call it
        by its name."""
        out = picture.parent / "out"
        options = {"size": (12, 16), "tensors": "npy", "scale": 1, **AS_IS}
        assert fv.run(net, picture, "fn:add,Unit,Conv2d", out, **options).failures == ()
        folder = out / picture.name
        captures = rows(out / picture.name)
        row = captures["layer1.1/fn:add", 0, ""]
        conv, into = (
            torch.from_numpy(np.load(folder / captures[name, 0, ""]["tensor"]))
            for name in ("layer1.1.conv", "layer1.0")
        )
        assert (row["type"], row["index"], row["layout"]) == ("fn:add", 5, "nchw")
        assert row["shape"] == [1, 3, 12, 16]
        assert_drawn(folder, row, (conv + into)[0])
        stats = np.load(folder / "stats.npz")["layer1.1/fn:add|output|0|"]
        assert np.allclose(stats[:, 0], (conv + into)[0].amin((1, 2)).numpy())
        assert float((conv + into).min()) < 0 <= captures["layer1.1", 0, ""]["min"]
        name = Path(row["file"]).parent.name
        assert name.startswith("005_layer1.1_fn_add-")
        assert name == name.strip(". ")
        assert not set(name) & set('<>:"/\\|?*')
        text = Image.open(folder / row["file"]).text
        assert text["Layer"] == "layer1.1/fn:add (fn:add)"
        run = json.loads((out / "run.json").read_text())
        assert "layer1.1/fn:add" in run["layers"]
        assert manifest(folder)["never_ran"] == []

    def test_drawing_is_not_mistaken_for_the_model(self, picture: Path) -> None:
        """What featviz itself computes while it draws a module is no function of that
        module."""
        like = Net(
            lambda self, x: torch.stack([x.flatten(1).mean(1), x.flatten(1).amin(1)], 1)
        )
        out = picture.parent / "out"
        model = nn.Sequential(nn.Conv2d(3, 3, 1), like)
        layers = "*,fn:stack,fn:flatten,fn:mean,fn:amin,fn:clone"
        fv.run(model, picture, layers, out, size=(12, 16), **AS_IS)
        calls = [
            (name, call) for name, call, _ in rows(out / picture.name) if "fn:" in name
        ]
        assert sorted(calls) == [
            ("1/fn:amin", 0),
            ("1/fn:flatten", 0),
            ("1/fn:flatten", 1),
            ("1/fn:mean", 0),
            ("1/fn:stack", 0),
        ]
        with fv.capture(model, "Net,fn:clone,fn:detach") as maps:
            model(torch.zeros(1, 3, 4, 4))
        assert list(maps) == ["1"]

    def test_a_function_that_is_not_called_never_ran(self, picture: Path) -> None:
        """Called with the blank image, not with this one: named in never_ran."""
        out = picture.parent / "out"
        conv = nn.Conv2d(3, 2, 1)
        fussy = Net(
            lambda self, x: self.conv(x) if x.any() else F.gelu(self.conv(x)), conv=conv
        )
        fv.run(fussy, picture, "fn:gelu,Conv2d", out, size=(12, 16), **AS_IS)
        assert manifest(out / picture.name)["never_ran"] == ["fn:gelu"]


class TestSelectors:
    """Which functions selectors take."""

    @pytest.mark.parametrize(
        ("layers", "expected"),
        [
            ("fn:add", SUMS),
            ("fn:add#0", SUMS[:1]),
            ("fn:add#1:", SUMS[1:]),
            ("fn:add#-1", SUMS[2:]),
            ("fn:add@re:2", SUMS[2:]),
            ("fn:add@layer1.*#1", SUMS[1:2]),
            ("fn:add, ! fn:add@layer2.*", SUMS[:2]),
            ("fn:interpolate,fn:cat", ["fn:interpolate", "fn:cat"]),
            ("fn:relu@", ["fn:relu"]),
            ("layer1.*", ["layer1.0", "layer1.0.conv", "layer1.0.relu"]),
            ("Unit,fn:add@layer2.*", ["layer1.0", "layer1.1", "layer2.0", SUMS[2]]),
            (
                "!fn:add,!*.relu,!*.conv,!layer?",
                ["", "layer1.0", "layer1.1", "layer2.0"],
            ),
        ],
    )
    def test_what_a_run_takes(
        self, layers: str, expected: list[str], net: nn.Module
    ) -> None:
        """Indices count calls in their order, globs and expressions name the module
        that calls, and without fn: no selector takes a function."""
        options = InputOptions(size=(12, 16), **AS_IS)
        loaded = LoadedModel(
            net, choose_preprocess(net, None, options), torch.device("cpu"), {}
        )
        chosen = [
            x.name for x in choose_layers(loaded, layers, [torch.zeros(1, 3, 12, 16)])
        ]
        assert chosen[: len(expected)] == expected
        assert len(chosen) == len(expected) or layers == "layer1.*"
        assert any("fn:" in name for name in chosen) == any(
            "fn:" in name for name in expected
        )
        # capture finds functions as they are called, without a blank pass
        if "#-" not in layers:
            seen = list(grab(net, layers, torch.zeros(1, 3, 12, 16)))
            assert set(seen) == set(chosen)

    def test_capture_cannot_count_from_the_end(self, net: nn.Module) -> None:
        """The last call is not known before the model is done: said at once."""
        for layers in ("fn:add#-1", "fn:add#:-1", "fn:add#::-1"):
            with (
                pytest.raises(UsageError, match=f"{layers}' counts from the end"),
                fv.capture(net, layers),
            ):
                pass

    def test_capture_of_a_function_nobody_calls(self, net: nn.Module) -> None:
        """At the end of the block an error lists the functions that were called;
        modules of torch's own call none, and it names what is there."""
        with pytest.raises(UsageError, match="no layer matches 'fn:gelu'") as caught:
            grab(net, "fn:gelu", torch.randn(1, 3, 6, 8))
        assert "fn:relu 1" in str(caught.value.hint)
        assert "fn:add 3" in str(caught.value.hint)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        with pytest.raises(
            UsageError, match="no layer matches 'fn:nonsense'"
        ) as caught:
            grab(model, "fn:nonsense", torch.randn(1, 3, 6, 8))
        assert caught.value.hint == (
            "functions called in the block: none, but inside torch's own modules; "
            "types here: Conv2d 1, ReLU 1"
        )

    def test_an_error_in_the_block_is_not_hidden(self, net: nn.Module) -> None:
        """What the caller's block raises comes out of it, and not that nothing was
        captured."""
        with pytest.raises(KeyError, match="mine"), fv.capture(net, "fn:relu"):
            raise KeyError("mine")

    @pytest.mark.parametrize(
        ("asked", "words"),
        [
            (
                "fn:intrepolate",
                ("did you mean fn:interpolate?", "functions here: fn:add 3"),
            ),
            ("Interpolate", ("the model calls the function interpolate 1 times",)),
        ],
    )
    def test_no_match_points_to_the_functions_there_are(
        self,
        asked: str,
        words: tuple[str, ...],
        net_file: Path,
        picture: Path,
        featviz: Run,
    ) -> None:
        """Exit 2; the functions that the model calls, and the nearest name, also of a
        module."""
        named = ["--weights", "none", "--layers", asked]
        got = featviz("run", f"{net_file}:Net", picture, *named, *LINE)
        assert got.code == 2
        assert got.err.startswith(f"error: no layer matches --layers {asked!r}\n")
        assert len(got.err.splitlines()) == 2
        assert all(word in got.err for word in words)
