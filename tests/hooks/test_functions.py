"""Functions inside forward: which calls are captured, under which names, with which values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Outcome
from PIL import Image
from tiles import assert_drawn, manifest, rows
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torchvision import models

import featviz as fv
from featviz.errors import UsageError
from featviz.hooks.capture import hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.forward import forward
from featviz.hooks.functions import list_functions
from featviz.hooks.naming import function_name
from featviz.models.load import LoadedModel
from featviz.models.preprocess import InputOptions
from featviz.models.presets import choose_preprocess
from featviz.pipeline.dry_pass import choose_layers
from featviz.records import Layer

AS_IS: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3}


def grab(model: nn.Module, layers: str, *args: Tensor) -> dict[str, list[Tensor]]:
    with in_eval_mode(model), fv.capture(model, layers) as maps:
        model(*args)
    return dict(maps)


class Unit(nn.Module):
    """Adds in place, then overwrites the sum: what resnet's blocks do."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        out += x
        return self.relu(out)


class Net(nn.Module):
    """Two units, and functions of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Unit(), Unit())
        self.layer2 = nn.Sequential(Unit())

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.layer1(x) - 1)
        x = F.interpolate(x, scale_factor=2)
        x = torch.cat([self.layer2(x), torch.relu(-x)], dim=1)
        return x.relu_()


@pytest.fixture
def net() -> nn.Module:
    """Net with weights that are always the same."""
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def net_file(tmp_path: Path) -> Path:
    """A factory of Net for command lines."""
    path = tmp_path / "nets.py"
    tests = str(Path(__file__).parent)
    path.write_text(f"import sys\nsys.path.insert(0, {tests!r})\nfrom test_functions import Net\n")
    return path


LINE = ["--mean", "0,0,0", "--std", "1,1,1", "--size", "12x16", "--scale", "1"]


class TestAgainstForwardsByHand:
    """What is captured is what torchvision's own lines compute."""

    def test_the_residual_sums_of_resnet18(self) -> None:
        """Eight sums, one a block, each before the in-place ReLU overwrites it."""
        torch.manual_seed(0)
        model, image = models.resnet18().eval(), torch.randn(1, 3, 64, 64)
        seen = grab(model, "fn:add", image)
        with torch.inference_mode():
            x = model.maxpool(F.relu(model.bn1(model.conv1(image))))
            names = []
            for stage in ("layer1", "layer2", "layer3", "layer4"):
                for i, block in enumerate(getattr(model, stage)):
                    same = x if block.downsample is None else block.downsample(x)
                    total = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x))))) + same
                    names.append(f"{stage}.{i}/fn:add")
                    (got,) = seen[names[-1]]
                    assert torch.equal(got, total) and bool((got < 0).any())
                    x = F.relu(total)
        assert list(seen) == names and len(names) == 8

    def test_the_relus_of_inception_v3(self) -> None:
        """Each BasicConv2d's functional, in-place ReLU is the ReLU of its normalised output; no
        BatchNorm is overwritten, and the auxiliary head does not run."""
        torch.manual_seed(0)
        model = models.inception_v3(init_weights=False, aux_logits=True).eval()
        image = torch.randn(1, 3, 96, 96)
        seen = grab(model, "fn:relu,BatchNorm2d", image)
        relus = {name: tensors for name, tensors in seen.items() if name.endswith("/fn:relu")}
        units = [n for n, m in model.named_modules() if type(m).__name__ == "BasicConv2d"]
        ran = [name for name in units if not name.startswith("AuxLogits")]
        assert set(relus) == {f"{name}/fn:relu" for name in ran} and len(ran) == 94
        for name in ran:
            ((got,), (normalised,)) = relus[f"{name}/fn:relu"], seen[f"{name}.bn"]
            assert torch.equal(got, normalised.clamp(min=0)) and bool((normalised < 0).any())
        with torch.inference_mode():
            x = image
            for name in ("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3"):
                unit = getattr(model, name)
                x = unit.bn(unit.conv(x)).clamp(min=0)
                assert torch.equal(relus[f"{name}/fn:relu"][0], x)

    def test_cat_of_googlenet(self) -> None:
        """Nine inceptions, nine concatenations, each of its four branches."""
        torch.manual_seed(0)
        model = models.googlenet(init_weights=False, aux_logits=False).eval()
        branches = "inception??.branch1,*.branch2.1,*.branch3.1,*.branch4.1"
        seen = grab(model, f"fn:cat,{branches}", torch.randn(1, 3, 64, 64))
        cats = [name for name in seen if name.endswith("/fn:cat")]
        assert len(cats) == 9
        for name in cats:
            owner = name.removesuffix("/fn:cat")
            parts = [seen[f"{owner}.branch{i}"][0] for i in ("1", "2.1", "3.1", "4.1")]
            assert torch.equal(seen[name][0], torch.cat(parts, 1))

    def test_the_halves_of_shufflenet(self) -> None:
        """chunk gives two tensors: both are there, under their places in the tuple."""
        model = models.shufflenet_v2_x0_5().eval()
        seen = grab(model, "fn:chunk,stage2.1.branch2.0,stage2.0", torch.randn(1, 3, 64, 64))
        whole, right = seen["stage2.0"][0], seen["stage2.1/fn:chunk:1"][0]
        assert torch.equal(torch.cat([seen["stage2.1/fn:chunk:0"][0], right], 1), whole)
        with torch.inference_mode():
            assert torch.equal(model.stage2[1].branch2[0](right), seen["stage2.1.branch2.0"][0])

    @pytest.mark.slow
    def test_scaled_dot_product_attention_of_timm(self) -> None:
        """timm's ViT attends through torch's function: softmax(Q K^T) V of its own qkv."""
        timm = pytest.importorskip("timm")
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()
        seen = grab(model, "fn:scaled_dot_product_attention,*.qkv", torch.randn(1, 3, 32, 32))
        for i in range(2):
            q, k, v = seen[f"blocks.{i}.attn.qkv"][0].view(5, 3, 3, 64).permute(1, 2, 0, 3)
            want = (q @ k.mT / 8).softmax(-1) @ v
            got = seen[f"blocks.{i}.attn/fn:scaled_dot_product_attention"][0]
            assert torch.allclose(got[0], want, atol=1e-5)


class TestInARun:
    """Functions in the run directory."""

    def test_pictures_numbers_and_names(self, net: nn.Module, picture: Path) -> None:
        """fn:add and the convolutions in one run: the picture shows the sum of the convolution and
        its input, and the manifest, the statistics and run.json call it by its name."""
        out = picture.parent / "out"
        options = {"size": (12, 16), "tensors": "npy", "scale": 1, **AS_IS}
        assert fv.run(net, picture, "fn:add,Unit,Conv2d", out, **options).failures == ()
        folder, found = out / picture.name, rows(out / picture.name)
        row = found["layer1.1/fn:add", 0, ""]
        conv, into = (
            torch.from_numpy(np.load(folder / found[name, 0, ""]["tensor"]))
            for name in ("layer1.1.conv", "layer1.0")
        )
        assert (row["type"], row["index"], row["layout"]) == ("fn:add", 5, "nchw")
        assert row["shape"] == [1, 3, 12, 16]
        assert_drawn(folder, row, (conv + into)[0])
        stats = np.load(folder / "stats.npz")["layer1.1/fn:add|output|0|"]
        assert np.allclose(stats[:, 0], (conv + into)[0].amin((1, 2)).numpy())
        assert float((conv + into).min()) < 0 <= found["layer1.1", 0, ""]["min"]
        name = Path(row["file"]).parent.name
        assert name.startswith("005_layer1.1_fn_add-") and name == name.strip(". ")
        assert not set(name) & set('<>:"/\\|?*')
        text = Image.open(folder / row["file"]).text
        assert text["Layer"] == "layer1.1/fn:add (fn:add)"
        run = json.loads((out / "run.json").read_text())
        assert "layer1.1/fn:add" in run["layers"] and manifest(folder)["never_ran"] == []

    def test_drawing_is_not_mistaken_for_the_model(self, picture: Path) -> None:
        """What featviz itself computes while it draws a module is no function of that module."""

        class Like(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.stack([x.flatten(1).mean(1), x.flatten(1).amin(1)], 1)

        out, model = picture.parent / "out", nn.Sequential(nn.Conv2d(3, 3, 1), Like())
        layers = "*,fn:stack,fn:flatten,fn:mean,fn:amin,fn:clone"
        fv.run(model, picture, layers, out, size=(12, 16), **AS_IS)
        calls = [(name, call) for name, call, _ in rows(out / picture.name) if "fn:" in name]
        assert sorted(calls) == [
            ("1/fn:amin", 0),
            ("1/fn:flatten", 0),
            ("1/fn:flatten", 1),
            ("1/fn:mean", 0),
            ("1/fn:stack", 0),
        ]
        with fv.capture(model, "Like,fn:clone,fn:detach") as maps:
            model(torch.zeros(1, 3, 4, 4))
        assert list(maps) == ["1"]

    def test_calls_in_one_module_are_numbered(self, net: nn.Module, picture: Path) -> None:
        """F.relu, torch.relu and Tensor.relu_ of one module are three calls of fn:relu."""
        out = picture.parent / "out"
        fv.run(net, picture, "fn:relu", out, size=(12, 16), **AS_IS)
        files = [Path(row["file"]).name for row in rows(out / picture.name).values()]
        assert files == ["output.png", "output.call1.png", "output.call2.png"]
        stats = np.load(out / picture.name / "stats.npz")
        assert sorted(stats) == [f"fn:relu|output|{i}|" for i in range(3)]

    def test_a_function_that_is_not_called_never_ran(self, picture: Path) -> None:
        """Called with the blank image, not with this one: named in never_ran."""

        class Fussy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 2, 1)

            def forward(self, x: Tensor) -> Tensor:
                y = self.conv(x)
                return y if bool(x.any()) else F.gelu(y)

        out = picture.parent / "out"
        fv.run(Fussy(), picture, "fn:gelu,Conv2d", out, size=(12, 16), **AS_IS)
        assert manifest(out / picture.name)["never_ran"] == ["fn:gelu"]

    def test_what_a_function_gives_besides_tensors_is_skipped(self, picture: Path) -> None:
        """A tensor in a tuple is drawn, what stands beside it is named with the reason."""

        class Weighing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 1)

            def forward(self, x: Tensor) -> Tensor:
                x = self.conv(x).flatten(2).transpose(1, 2)
                weight = torch.eye(4)
                options = {"in_proj_bias": None, "bias_k": None, "bias_v": None}
                x, _ = F.multi_head_attention_forward(
                    x, x, x, 4, 2, torch.cat([weight] * 3), **options, add_zero_attn=False,
                    dropout_p=0.0, out_proj_weight=weight, out_proj_bias=None, need_weights=False,
                )  # fmt: skip
                return x

        out = picture.parent / "out"
        layers = "fn:multi_head_attention_forward"
        fv.run(Weighing(), picture, layers, out, size=(12, 16), tensor_layout="vector", **AS_IS)
        (skip,) = manifest(out / picture.name)["skipped"]
        assert (skip["layer"], skip["key"]) == ("fn:multi_head_attention_forward", "1")
        assert skip["reason"] == "is None, not a tensor"

    def test_dry_run_plans_what_is_written(
        self, net_file: Path, picture: Path, featviz: Callable[..., Outcome], tmp_path: Path
    ) -> None:
        """--dry-run names the functions and the sizes of their pictures."""
        line = ["run", f"{net_file}:Net", picture, "--layers", "fn:relu,fn:cat", *LINE]
        line += ["--out", tmp_path / "o"]
        planned = json.loads(featviz(*line, "--dry-run", "--json").out)["per_image"]
        assert featviz(*line).code == 0
        written = rows(tmp_path / "o" / picture.name)
        assert [(f["layer"], f["file"]) for f in planned] == [
            (row["layer"], Path(row["file"]).name) for row in written.values()
        ]
        for file, row in zip(planned, written.values(), strict=True):
            size = Image.open(tmp_path / "o" / picture.name / row["file"]).size
            assert (file["width"], file["height"]) == size


SUMS = ["layer1.0/fn:add", "layer1.1/fn:add", "layer2.0/fn:add"]


class TestSelectors:
    """Which functions selectors take."""

    @pytest.mark.parametrize(
        ("layers", "taken"),
        [
            ("fn:add", SUMS),
            ("fn:add#0", SUMS[:1]),
            ("fn:add#1:", SUMS[1:]),
            ("fn:add#-1", SUMS[2:]),
            ("fn:add@layer1.*", SUMS[:2]),
            ("fn:add@re:2", SUMS[2:]),
            ("fn:add@layer1.*#1", SUMS[1:2]),
            ("fn:add,!fn:add@layer1.*", SUMS[2:]),
            ("fn:add, ! fn:add@layer2.*", SUMS[:2]),
            ("fn:add,!fn:add#0", SUMS[1:]),
            ("fn:interpolate,fn:cat", ["fn:interpolate", "fn:cat"]),
            ("fn:relu@", ["fn:relu"]),
            ("layer1.*", ["layer1.0", "layer1.0.conv", "layer1.0.relu"]),
            ("re:^layer2", ["layer2", "layer2.0", "layer2.0.conv", "layer2.0.relu"]),
            ("Unit,fn:add@layer2.*", ["layer1.0", "layer1.1", "layer2.0", SUMS[2]]),
            ("!fn:add,!*.relu,!*.conv,!layer?", ["", "layer1.0", "layer1.1", "layer2.0"]),
        ],
    )
    def test_what_a_run_takes(self, layers: str, taken: list[str], net: nn.Module) -> None:
        """Indices count calls in their order, globs and expressions name the module that calls,
        and without fn: no selector takes a function."""
        options = InputOptions(size=(12, 16), **AS_IS)
        loaded = LoadedModel(net, choose_preprocess(net, None, options), torch.device("cpu"), {})
        chosen = [x.name for x in choose_layers(loaded, layers, [torch.zeros(1, 3, 12, 16)])]
        assert chosen[: len(taken)] == taken
        assert len(chosen) == len(taken) or layers == "layer1.*"
        assert any("fn:" in name for name in chosen) == any("fn:" in name for name in taken)

    @pytest.mark.parametrize(
        ("layers", "names"),
        [
            ("fn:add", SUMS),
            ("fn:add#0", SUMS[:1]),
            ("fn:add#1:", SUMS[1:]),
            ("fn:add@layer1.*", SUMS[:2]),
            ("fn:add,!fn:add@layer2.*", SUMS[:2]),
            ("Conv2d@layer2.*,fn:add@layer2.*", ["layer2.0.conv", SUMS[2]]),
            ("Conv2d#-1,fn:cat", ["layer2.0.conv", "fn:cat"]),
        ],
    )
    def test_what_capture_takes(self, layers: str, names: list[str], net: nn.Module) -> None:
        """featviz.capture finds functions as they are called, without a blank forward pass."""
        assert list(grab(net, layers, torch.randn(1, 3, 6, 8))) == names

    def test_capture_has_the_right_values(self, net: nn.Module) -> None:
        """The tensors are copies: each equals what a forward by hand gives."""
        image = torch.randn(1, 3, 6, 8)
        seen = grab(net, "fn:*,fn:relu,fn:sub,fn:interpolate,fn:cat,layer2", image)
        with torch.inference_mode():
            below = net.layer1(image) - 1
            doubled = F.interpolate(below.clamp(min=0), scale_factor=2)
            both = torch.cat([net.layer2(doubled), (-doubled).clamp(min=0)], 1)
        assert torch.equal(seen["fn:sub"][0], below)
        assert torch.equal(seen["fn:relu"][0], below.clamp(min=0))
        assert torch.equal(seen["fn:interpolate"][0], doubled)
        assert torch.equal(seen["fn:cat"][0], both)
        assert torch.equal(seen["fn:relu"][2], both.clamp(min=0))

    def test_capture_cannot_count_from_the_end(self, net: nn.Module) -> None:
        """The last call is not known before the model is done: said at once."""
        for layers in ("fn:add#-1", "fn:add#:-1", "fn:add#::-1"):
            with (
                pytest.raises(UsageError, match=f"{layers}' counts from the end"),
                fv.capture(net, layers),
            ):
                pass

    def test_capture_of_a_function_nobody_calls(self, net: nn.Module) -> None:
        """At the end of the block an error lists the functions that were called."""
        with pytest.raises(UsageError, match="no layer matches 'fn:gelu'") as caught:
            grab(net, "fn:gelu", torch.randn(1, 3, 6, 8))
        assert "fn:relu 1" in str(caught.value.hint) and "fn:add 3" in str(caught.value.hint)

    def test_no_match_lists_the_functions_there_are(
        self, net_file: Path, picture: Path, featviz: Callable[..., Outcome]
    ) -> None:
        """Exit 2; the functions that the model calls, and the nearest name."""
        got = featviz("run", f"{net_file}:Net", picture, "--layers", "fn:intrepolate", *LINE)
        assert got.code == 2
        first, second = got.err.splitlines()
        assert first == "error: no layer matches --layers 'fn:intrepolate'"
        assert "did you mean fn:interpolate?" in second
        assert "functions here: fn:add 3" in second and "fn:cat 1" in second
        assert "types here: Unit 3, Conv2d 3" in second

    def test_a_module_name_for_a_function_points_to_it(
        self, net_file: Path, picture: Path, featviz: Callable[..., Outcome]
    ) -> None:
        """--layers Upsample finds nothing; Interpolate is called as a function."""
        got = featviz("run", f"{net_file}:Net", picture, "--layers", "Interpolate", *LINE)
        assert got.code == 2
        assert "the model calls the function interpolate 1 times" in got.err
        assert "--layers fn:interpolate" in got.err

    def test_an_idle_selector_beside_others_is_warned_of(
        self, net_file: Path, picture: Path, featviz: Callable[..., Outcome], tmp_path: Path
    ) -> None:
        """fn:gelu matches nothing, fn:add does: drawn, with a warning."""
        line = ["run", f"{net_file}:Net", picture, "--layers", "fn:gelu,fn:add", *LINE]
        got = featviz(*line, "--out", tmp_path / "o")
        assert got.code == 0 and "selector 'fn:gelu' matches no layer" in got.err


class TestWhoCalls:
    """The module in which a function happens."""

    def test_modules_of_torch_keep_their_functions_to_themselves(self) -> None:
        """Conv2d, ReLU, MaxPool2d and what derives from them without a forward of its own call
        functions too, which are theirs; a subclass with its own forward reports its own."""

        class Same(nn.Conv2d):
            pass

        class Other(nn.Conv2d):
            def forward(self, x: Tensor) -> Tensor:
                return F.conv2d(x, self.weight).abs()

        model = nn.Sequential(
            nn.Conv2d(3, 3, 1), nn.ReLU(), nn.MaxPool2d(2), Same(3, 3, 1), Other(3, 3, 1),
            nn.MultiheadAttention(4, 2),
        )[:-1]  # fmt: skip
        with in_eval_mode(model):
            found = list_functions(model, [torch.zeros(1, 3, 4, 4)])
        assert {layer.name: calls for layer, calls in found.items()} == {
            "4/fn:conv2d": 1,
            "4/fn:abs": 1,
        }

    def test_what_a_function_calls_inside_is_not_reported(self) -> None:
        """F.interpolate is one call, whatever it is made of."""

        class One(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return F.group_norm(F.interpolate(x, size=(4, 4)), 1)

        found = list_functions(One(), [torch.zeros(1, 3, 2, 2)])
        assert [layer.type for layer in found] == ["fn:interpolate", "fn:group_norm"]

    def test_a_function_behind_an_inner_module_is_the_outers(self) -> None:
        """Before, between and behind calls of inner modules the outer one is running."""

        class Inner(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * 2

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = Inner(), Inner()

            def forward(self, x: Tensor) -> Tensor:
                return (self.b(self.a(x * 3) * 5) * 7).sum()

        seen = grab(nn.Sequential(Outer()), "fn:mul,fn:sum", torch.ones(1, 1))
        assert {name: [t.item() for t in tensors] for name, tensors in seen.items()} == {
            "0/fn:mul": [3, 30, 420],
            "0.a/fn:mul": [6],
            "0.b/fn:mul": [60],
            "0/fn:sum": [420],
        }

    def test_a_shared_module_counts_on_and_has_all_its_names(self) -> None:
        """One module under two names: its functions are calls of the first, found by either."""
        unit = Unit()
        model = nn.Sequential(unit, nn.Identity(), unit)
        for pattern in ("0", "2"):
            seen = grab(model, f"fn:add@{pattern}", torch.randn(1, 3, 4, 4))
            assert {name: len(tensors) for name, tensors in seen.items()} == {"0/fn:add": 2}

    def test_a_module_that_calls_itself(self) -> None:
        """Recursion comes back to the outer call."""

        class Countdown(nn.Module):
            def forward(self, x: Tensor, depth: int = 2) -> Tensor:
                return self(x + 1, depth - 1) * 2 if depth else x

        seen = grab(Countdown(), "fn:add,fn:mul", torch.zeros(1, 1))
        assert [t.item() for t in seen["fn:add"]] == [1, 2]
        assert [t.item() for t in seen["fn:mul"]] == [4, 8]

    def test_a_failure_that_the_model_catches(self) -> None:
        """After an inner module has raised and was caught, the outer one is running again."""

        class Fails(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                raise ValueError(float((x - 1).sum()))

        class Catches(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Fails()

            def forward(self, x: Tensor) -> Tensor:
                try:
                    return self.inner(x)
                except ValueError:
                    return x + 1

        seen = grab(nn.Sequential(Catches()), "fn:add,fn:sub", torch.zeros(1, 1))
        assert set(seen) == {"0/fn:add", "0.inner/fn:sub"}

    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (F.relu, "relu"),
            (torch.relu_, "relu"),
            (Tensor.relu_, "relu"),
            (Tensor.__add__, "add"),
            (Tensor.__iadd__, "add"),
            (Tensor.__radd__, "add"),
            (Tensor.add_, "add"),
            (Tensor.__rsub__, "sub"),
            (Tensor.__truediv__, "div"),
            (Tensor.__pow__, "pow"),
            (Tensor.__rpow__, "pow"),
            (Tensor.__matmul__, "matmul"),
            (F.max_pool2d, "max_pool2d"),
            (F.scaled_dot_product_attention, "scaled_dot_product_attention"),
            (Tensor.shape.__get__, "shape"),
        ],
    )
    def test_one_name_for_all_forms(self, function: Callable[..., Any], name: str) -> None:
        """A function, its method, its in-place form and its operator have one name."""
        assert function_name(function) == name

    @pytest.mark.parametrize(
        ("call", "name"),
        [
            (lambda x: x + x, "add"),
            (lambda x: 1 + x, "add"),
            (lambda x: x.clone().add_(1), "add"),
            (lambda x: 1 - x, "sub"),
            (lambda x: x / 2, "div"),
            (lambda x: 2 / (x + 3), "div"),
            (lambda x: 2**x, "pow"),
            (lambda x: F.gelu(x), "gelu"),
            (lambda x: F.silu(x, inplace=False), "silu"),
            (lambda x: F.hardswish(x), "hardswish"),
            (lambda x: F.max_pool2d(x, 2), "max_pool2d"),
            (lambda x: F.max_pool2d(x, 2, return_indices=True), "max_pool2d_with_indices"),
            (lambda x: F.adaptive_avg_pool2d(x, 1), "adaptive_avg_pool2d"),
            (lambda x: F.softmax(x, -1), "softmax"),
            (lambda x: F.pad(x, (1, 1)), "pad"),
            (lambda x: x.softmax(-1), "softmax"),
            (lambda x: torch.stack([x, x]), "stack"),
            (lambda x: F.scaled_dot_product_attention(x, x, x), "scaled_dot_product_attention"),
        ],
    )
    def test_what_a_call_is_called(self, call: Callable[[Tensor], Any], name: str) -> None:
        """Each way to write it is captured under the function's name, with what it gives."""

        class One(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return call(x)

        image = torch.rand(1, 2, 4, 4)
        seen = grab(One(), f"fn:{name}", image)
        want = call(image)
        got = seen[f"fn:{name}" + (":0" if isinstance(want, tuple) else "")][-1]
        assert torch.equal(got, want[0] if isinstance(want, tuple) else want)


def test_functions_of_an_exported_program(net: nn.Module) -> None:
    """The operators of an exported program have the names of the functions they were, and what
    stands for torch's own modules keeps its functions to itself."""
    image = torch.randn(1, 3, 6, 8)
    program = torch.export.unflatten(torch.export.export(net, (image,)))
    found = list_functions(program, [image])
    names = [layer.name for layer in found]
    assert set(SUMS) | {"fn:sub", "fn:relu", "fn:cat"} <= set(names)
    assert not [name for name in names if ".conv/" in name or ".relu/" in name or ".T" in name]
    assert {x.name: calls for x, calls in found.items()}["fn:relu"] == 3
    want = grab(net, "fn:add", image)
    with torch.inference_mode(), fv.capture(program, "fn:add") as got:
        program(image)
    assert list(got) == SUMS
    assert all(torch.allclose(got[name][0], want[name][0], atol=1e-6) for name in SUMS)


def leftovers(model: nn.Module) -> int:
    """Hooks and function modes that are still there."""
    modules = list(model.modules())
    hooks_left = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)
    return hooks_left + len(_get_current_function_mode_stack())


@pytest.mark.filterwarnings("error")  # a hook of ours that fails behind theirs warns
@pytest.mark.parametrize("at", ["layer1.1.conv", "layer2.0.relu"])
def test_a_failing_forward_leaves_nothing_behind(at: str, net: nn.Module) -> None:
    """After an exception inside forward no hook and no mode is left, and the next pass works."""

    def fail(module: nn.Module, args: Any) -> None:
        raise RuntimeError("on purpose")

    handle = net.get_submodule(at).register_forward_pre_hook(fail)
    image = torch.randn(1, 3, 6, 8)
    for attempt in (
        lambda: grab(net, "fn:add,Conv2d", image),
        lambda: list_functions(net, [image]),
    ):
        with pytest.raises(RuntimeError, match="on purpose"):
            attempt()
        assert leftovers(net) == 1
    handle.remove()
    assert list(grab(net, "fn:add", image)) == SUMS
    assert leftovers(net) == 0


def test_a_failing_sink_leaves_nothing_behind(net: nn.Module) -> None:
    """A fault of ours comes out, and hooks and mode are gone."""

    def broken(site: Any, tensor: Tensor) -> None:
        raise ZeroDivisionError("ours")

    (layer,) = [x for x in _functions(net) if x.name == "layer2.0/fn:add"]
    with (
        pytest.raises(ZeroDivisionError, match="ours"),
        hooked(net, [layer], broken) as recorder,
    ):
        forward(net, [torch.randn(1, 3, 6, 8)], recorder)
    assert leftovers(net) == 0


def _functions(model: nn.Module) -> list[Layer]:
    return list(list_functions(model, [torch.zeros(1, 3, 6, 8)]))


def test_the_output_is_the_same_bit_for_bit(net: nn.Module) -> None:
    """Watching functions changes no value."""
    image = torch.randn(1, 3, 6, 8)
    plain = net(image)
    with fv.capture(net, "fn:add,fn:relu,fn:cat,Conv2d"):
        assert torch.equal(net(image), plain)


def test_no_mode_where_no_function_is_asked_for(
    net: nn.Module, picture: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Runs, listings and captures of modules never enter torch's function mode; fn: does."""
    entered: list[type] = []
    enter = TorchFunctionMode.__enter__

    def counting(self: TorchFunctionMode) -> Any:
        entered.append(type(self))
        return enter(self)

    monkeypatch.setattr(TorchFunctionMode, "__enter__", counting)
    for layers in (None, "Conv2d,ReLU", "*", "!*.conv"):
        fv.run(net, picture, layers, tmp_path / "o", overwrite=True, size=(12, 16), **AS_IS)
    grab(net, "*", torch.randn(1, 3, 6, 8))
    assert entered == []
    fv.run(net, picture, "fn:add", tmp_path / "o", overwrite=True, size=(12, 16), **AS_IS)
    assert len(entered) == 2  # to list them, and for the image
    grab(net, "fn:add", torch.randn(1, 3, 6, 8))
    assert len(entered) == 3


class TestListing:
    """featviz layers --functions."""

    def test_table(self, net_file: Path, featviz: Callable[..., Outcome]) -> None:
        """Functions stand behind their modules, with shape and calls; without the option they
        are not listed."""
        line = ["layers", f"{net_file}:Net", "--size", "12x16"]
        got = featviz(*line, "--functions")
        assert got.code == 0
        table = [row.split() for row in got.out.splitlines()]
        names = [row[-5] for row in table[1:-1] if len(row) >= 5]
        assert names.index("layer1.0/fn:add") < names.index("layer1.1")
        (row,) = [row for row in table if "layer2.0/fn:add" in row]
        assert row[-4:] == ["fn:add", "0", "1×3×24×32", "1"]
        (row,) = [row for row in table if row[1:3] == ["fn:relu", "fn:relu"]]
        assert row[-1] == "3"
        assert "12 modules, 8 functions" in got.out.splitlines()[-1]
        assert "fn:" not in featviz(*line).out

    def test_json_and_selectors(self, net_file: Path, featviz: Callable[..., Outcome]) -> None:
        """A selector of functions lists them without being asked, and marks what it takes."""
        line = ["layers", f"{net_file}:Net", "--size", "12x16", "--json"]
        listed = json.loads(featviz(*line, "--layers", "fn:add@layer1.*").out)["layers"]
        assert [row["name"] for row in listed if row["selected"]] == SUMS[:2]
        (row,) = [row for row in listed if row["name"] == SUMS[2]]
        assert row["output_shape"] == [1, 3, 24, 32] and row["index"] == 9
        assert (row["calls"], row["parameters"], row["type"]) == (1, 0, "fn:add")
        plain = json.loads(featviz(*line, "--layers", "Conv2d").out)["layers"]
        assert not [row for row in plain if row["type"].startswith("fn:")]

    @pytest.mark.slow
    def test_inception(self, featviz: Callable[..., Outcome]) -> None:
        """inception_v3 has no ReLU module and 94 calls of one; --functions lists them."""
        got = featviz("layers", "inception_v3", "--weights", "none", "--functions", "--json")
        types = [row["type"] for row in json.loads(got.out)["layers"]]
        assert types.count("fn:relu") == 94 and "ReLU" not in types
