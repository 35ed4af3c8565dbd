"""How the cores are shared follows from the model and the layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

from featviz.models.load import adopt
from featviz.models.preprocess import InputOptions
from featviz.pipeline.dry_pass import choose_layers, effort

INPUTS = InputOptions(size=64, crop=64, channels=3)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "shufflenet_v2_x0_5"])
def test_effort_counts_the_multiplications_of_flop_counter_mode(name: str) -> None:
    """Two operations for each multiplication, divided by the values that the layers give."""
    model = adopt(models.get_model(name, weights=None).eval(), INPUTS)
    blank = model.preprocess.blank()
    layers = choose_layers(model, "Conv2d", blank)
    values: list[int] = []
    handles = [
        part.register_forward_hook(lambda part, args, output: values.append(output.numel()))
        for part in model.module.modules()
        if isinstance(part, nn.Conv2d)
    ]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.module(*blank)
    for handle in handles:
        handle.remove()
    expected = counter.get_total_flops() / 2 / sum(values)
    assert effort(model, blank, layers) == pytest.approx(expected)


def test_a_model_that_refuses_zeros_counts_as_light_and_keeps_its_random_numbers() -> None:
    """A pass on zeros that fails says nothing of the run, and no pass moves the generators."""

    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not x.any():
                raise ValueError("nothing to see")
            return x

    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    for module in (Picky(), Noisy()):
        model = adopt(module.eval(), INPUTS)
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        assert effort(model, model.preprocess.blank(), choose_layers(model, "*", [])) == 0
        assert torch.equal(torch.rand(3), expected)
