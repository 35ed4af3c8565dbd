"""Guided backpropagation and deconvnet, against backward passes written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gradient_models import SPHERES, Functional, drawn
from oracle import Tensors, Weighted, assert_close, input_of, inputs
from torch import Tensor, nn
from torch.nn import functional as F


class Rectified(nn.Module):
    """Two convolutions with the kinds of ReLU in turn."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 3)
        self.relu = nn.ReLU(inplace="in place" in kind)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = self._act(self.a(x))
        return self._act(self.b(x)).mean((2, 3))

    def _act(self, x: Tensor) -> Tensor:
        if "module" in self.kind:
            return self.relu(x)
        if "method" in self.kind:
            return x.relu_() if "in place" in self.kind else x.relu()
        return F.relu(x, "in place" in self.kind)


def by_hand(model: Rectified, image: Tensor, weights: Tensor, rule: str) -> Tensors:
    """The backward pass written out with torch.nn.grad."""
    a = model.a(image)
    b = model.b(a.relu())
    passing: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "plain": lambda x, g: g * (x > 0),
        "guided": lambda x, g: g * (x > 0) * (g > 0),
        "deconv": lambda x, g: g * (g > 0),
    }
    top = weights.view(1, 5, 1, 1).expand_as(b) / b[0, 0].numel()
    at_b = passing[rule](b, top)
    at_relu = torch.nn.grad.conv2d_input(list(a.shape), model.b.weight, at_b)
    at_a = passing[rule](a, at_relu)
    at_image = torch.nn.grad.conv2d_input(list(image.shape), model.a.weight, at_a)
    return {
        ("b", "grad"): at_b,
        ("b", "grad-input"): at_relu,
        ("a", "grad"): at_a,
        ("a", "grad-input"): at_image,
    }


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("module in place", "plain"),
        ("module", "guided"),
        ("module in place", "deconv"),
        ("function", "deconv"),
        ("function in place", "guided"),
        ("method", "guided"),
        ("method in place", "deconv"),
    ],
)
def test_rules_equal_a_backward_pass_by_hand(
    rule: str, kind: str, tmp_path: Path
) -> None:
    """Springenberg's and Zeiler's rules at modules, functions and methods, in place or
    not."""
    torch.manual_seed(5)
    inner = Rectified(kind)
    model = Weighted(inner, (1, 5))
    with torch.no_grad():
        image = input_of(inner, SPHERES, inputs(12))
        want = by_hand(inner, image, model.weighting, rule)
        before = inner(image)
    got = drawn(model, tmp_path / "out", layers="Conv2d", grad_rule=rule)
    for (name, stem), tensor in want.items():
        assert_close(got[f"model.{name}", stem], tensor, (name, stem))
    with torch.no_grad():
        assert torch.equal(inner(image), before)  # nothing of the rule stays behind


def test_functions_are_found_under_a_rule(tmp_path: Path) -> None:
    """`fn:relu` still sees the ReLU, not what the rule makes of it."""
    torch.manual_seed(0)
    got = drawn(Functional(), tmp_path / "out", layers="fn:relu", grad_rule="guided")
    gradients = [got["fn:relu", "grad-input"], got["fn:relu", "grad-input.call1"]]
    assert all((g >= 0).all() and (g > 0).any() for g in gradients)


def test_a_rule_without_relu_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GELU networks have no ReLU at which a rule could do something."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU())
    drawn(model, tmp_path / "out", layers="0", grad_rule="guided")
    assert (
        "--grad-rule guided changes nothing: the model calls no ReLU" in caplog.messages
    )
