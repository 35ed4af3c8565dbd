"""Guided backpropagation and deconvnet, against backward passes written by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gradient_models import SPHERES, Functional, drawn
from oracle import Tensors, Weighted, assert_close, input_of, inputs
from torch import Tensor, nn
from torch.nn import functional as F


def in_place(x: Tensor) -> Tensor:
    return F.relu(x, inplace=True)


def as_a_statement(x: Tensor) -> Tensor:
    x.relu_()
    return x


RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "module": nn.ReLU(),
    "module in place": nn.ReLU(inplace=True),
    "function": F.relu,
    "function in place": in_place,
    "method": Tensor.relu,
    "method in place": Tensor.relu_,
    "statement": as_a_statement,
}


class Rectified(nn.Module):
    """Two convolutions with a ReLU behind each."""

    def __init__(self, relu: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 6, 3)
        self.b = nn.Conv2d(6, 5, 3)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.a(x))
        return self.relu(self.b(x)).mean((2, 3))


PASSING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda x, g: g * (x > 0),
    "guided": lambda x, g: g * (x > 0) * (g > 0),
    "deconv": lambda x, g: g * (g > 0),
}
"""What a ReLU of input x makes of the gradient g (Springenberg et al., "Striving for
Simplicity", 2015, figure 1)."""


def by_hand(model: Rectified, image: Tensor, weights: Tensor, rule: str) -> Tensors:
    """The backward pass written out with torch.nn.grad."""
    a = model.a(image)
    b = model.b(a.relu())
    at_relu_b = weights.view(1, 5, 1, 1).expand_as(b) / b[0, 0].numel()
    at_b = PASSING[rule](b, at_relu_b)
    at_relu_a = torch.nn.grad.conv2d_input(list(a.shape), model.b.weight, at_b)
    at_a = PASSING[rule](a, at_relu_a)
    at_image = torch.nn.grad.conv2d_input(list(image.shape), model.a.weight, at_a)
    return {
        ("b", "grad"): at_b,
        ("b", "grad-input"): at_relu_a,
        ("a", "grad"): at_a,
        ("a", "grad-input"): at_image,
    }


@pytest.mark.medium
@pytest.mark.parametrize(
    ("relu", "rule"),
    [
        ("module in place", "plain"),
        ("module", "guided"),
        ("module in place", "deconv"),
        ("function", "deconv"),
        ("function in place", "guided"),
        ("method", "guided"),
        ("method in place", "deconv"),
        ("statement", "guided"),
    ],
)
def test_rules_equal_a_backward_pass_by_hand(rule: str, relu: str) -> None:
    """Springenberg's and Zeiler's rules hold at modules, functions and methods, in place
    or not, and nothing of them stays behind."""
    torch.manual_seed(5)
    inner = Rectified(RELUS[relu])
    model = Weighted(inner, (1, 5))
    with torch.no_grad():
        image = input_of(inner, SPHERES, inputs(12))
        expected = by_hand(inner, image, model.weighting, rule)
        before = inner(image)

    gradients = drawn(model, "Conv2d", grad_rule=rule)

    for (layer, stem), tensor in expected.items():
        assert_close(gradients[f"model.{layer}", stem], tensor, (layer, stem))
    with torch.no_grad():
        assert torch.equal(inner(image), before)


@pytest.mark.medium
def test_functions_are_found_under_a_rule() -> None:
    """`fn:relu` still sees the ReLU, not what the rule makes of it."""
    torch.manual_seed(0)
    tensors = drawn(Functional(), "fn:relu", grad_rule="guided")
    for stem in ("grad-input", "grad-input.call1"):
        gradient = tensors["fn:relu", stem]
        assert gradient.min() == 0
        assert gradient.max() > 0


@pytest.mark.medium
def test_a_rule_without_relu_is_warned_of(messages: pytest.LogCaptureFixture) -> None:
    """GELU networks have no ReLU at which a rule could do something."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU())
    drawn(model, "0", grad_rule="guided")
    warning = "grad_rule guided changes nothing: the model calls no ReLU"
    assert warning in messages.messages
