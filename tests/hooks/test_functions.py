"""Functions inside forward: which calls are captured, under which names, with which values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

import featviz as fv
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.functions import list_functions
from featviz.hooks.naming import function_name

from .small_net import SUMS, Unit, grab


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

    def test_a_shared_module_has_its_functions_in_each_place(self) -> None:
        """One module in two places of a Sequential: a function is named by the place."""
        unit = Unit()
        model = nn.Sequential(unit, nn.Identity(), unit)
        image = torch.randn(1, 3, 4, 4)
        for place, x in (("0", image), ("2", model[0](image))):
            seen = grab(model, f"fn:add@{place}", image)
            assert list(seen) == [f"{place}/fn:add"]
            assert torch.equal(seen[f"{place}/fn:add"][0], unit.conv(x) + x)

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
