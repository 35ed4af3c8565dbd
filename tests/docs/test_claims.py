"""What the README claims about other tools and about speed is what a test or a table
says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from documents import read
from torch import Tensor, nn
from torchvision import models

import featviz


@pytest.mark.slow
def test_a_hook_that_keeps_outputs_shows_wrong_maps() -> None:
    """Of a ResNet-50, 49 of 53 BatchNorm layers; featviz.capture shows none of them
    wrong."""
    torch.manual_seed(0)
    model = models.resnet50().eval()
    kept = dict[str, Tensor]()
    copied = dict[str, Tensor]()

    def hook(name: str) -> Any:
        def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
            kept[name] = output
            copied[name] = output.clone()

        return keep

    norms = dict[str, nn.Module]()
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            norms[name] = module
    handles = [
        module.register_forward_hook(hook(name)) for name, module in norms.items()
    ]
    image = torch.rand(1, 3, 64, 64)
    with torch.inference_mode():
        model(image)
    for handle in handles:
        handle.remove()
    with featviz.capture(model, "BatchNorm2d") as captured, torch.inference_mode():
        model(image)
    wrong = [name for name in norms if not torch.equal(kept[name], copied[name])]
    assert f"[{len(wrong)} of the {len(norms)}]" in read("README")
    assert all(torch.equal(captured[name][0], copied[name]) for name in norms)


def test_the_readme_has_the_speed_of_the_table() -> None:
    """Its ratios are the least and the greatest of docs/speed.md."""
    rows = re.findall(
        r"^\| \w+ \| (\d+) \| (\d+) \| \d+ \| (\d+) \| (\d+) \| [\d.]+ \|$",
        read("speed"),
        re.MULTILINE,
    )
    assert len(rows) == 3
    forward = [int(drawn) / int(passed) for _, passed, drawn, _ in rows]
    plain = [int(ratio) for *_, ratio in rows]
    least, most = min(plain), max(plain)
    assert (round(min(forward), 1), round(max(forward))) == (1.5, 3)
    assert "1.5 to 3 times as long as its forward pass" in read("README")
    assert re.search(rf"{least} to {most} times as\s+fast as a hook", read("README"))
    assert f"{least} to {most} times as long" in read("speed")
    for slow, _, drawn, ratio in rows:
        assert int(slow) / int(drawn) == pytest.approx(int(ratio), abs=0.6)
