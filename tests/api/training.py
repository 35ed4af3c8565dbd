"""The digits network, trained for a moment, and what a training must find as it left
it."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

HERE = Path(__file__).parents[2]
FILES = sorted((HERE / "sample_images" / "digits").glob("*.png"))
SHOWN = [str(path) for path in FILES[:2]]
"""The images that are watched."""


def digits() -> tuple[Tensor, Tensor]:
    """The sample digits, float32 [20, 1, 28, 28] in 0..1, and their labels, int64 [20]."""
    pictures = [Image.open(path).convert("L").resize((28, 28)) for path in FILES]
    pixels = torch.tensor(np.stack(pictures))
    labels = [int(path.stem[-1]) for path in FILES]
    return pixels[:, None] / 255, torch.tensor(labels)


def network() -> nn.Sequential:
    """The network of configs/train_digits_cnn.py, four channels wide, from a fixed
    seed."""
    script = runpy.run_path(str(HERE / "configs" / "train_digits_cnn.py"))
    torch.manual_seed(0)
    built: nn.Sequential = script["build_model"](4)
    return built


def moody_network() -> nn.Sequential:
    """A network whose training depends on all that a watcher could disturb: running
    means, dropout, a frozen part in eval mode."""
    torch.manual_seed(0)
    frozen = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    frozen.requires_grad_(False).eval()
    learning = [nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(inplace=True)]
    head = [nn.Dropout(0.5), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 10)]
    return nn.Sequential(frozen, *learning, *head)


def train(
    model: nn.Module,
    steps: int,
    after: Callable[[], object] = lambda: None,
    cast: bool = False,
) -> list[Any]:
    """Train where the model is, `cast` under autocast; what must not depend on who
    watches."""
    device = next(model.parameters()).device
    pixels, labels = (tensor.to(device) for tensor in digits())
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-2)
    torch.manual_seed(7)
    with torch.autocast(device.type, torch.bfloat16, enabled=cast):
        for _ in range(steps):
            chosen = torch.randint(0, len(labels), (8,))
            loss = nn.functional.cross_entropy(model(pixels[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            after()
    return state_of(model)


def state_of(model: nn.Module) -> list[Any]:
    """Weights, buffers, gradients, flags, hooks, and the state of torch's generator."""
    parameters = [
        (p.detach().clone(), p.grad, p.requires_grad) for p in model.parameters()
    ]
    buffers = [buffer.clone() for buffer in model.buffers()]
    flags = [
        (m.training, len(m._forward_hooks), len(m._forward_pre_hooks))
        for m in model.modules()
    ]
    generators = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    return [parameters, buffers, flags, generators]


def same(first: Any, second: Any) -> bool:
    """Whether two such states are equal to the last bit."""
    if isinstance(first, Tensor):
        if not isinstance(second, Tensor) or first.dtype != second.dtype:
            return False
        return torch.equal(first, second)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)
