"""Small graphs of ONNX, and networks exported to them; for tests."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn


class Block(nn.Module):
    """A residual block: one activation that is called twice, and an addition."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.conv2(self.relu(self.bn1(self.conv1(x))))
        return self.relu(inner + x)  # type: ignore[no-any-return]


class SmallNet(nn.Module):
    """Two blocks between a stem and a classifier, for images of 32 × 32 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.blocks(self.stem(x)))
        return self.fc(torch.flatten(x, 1))  # type: ignore[no-any-return]


def small_net() -> nn.Module:
    """A network whose norms have seen something."""
    torch.manual_seed(0)
    net = SmallNet()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.running_mean, 0, 0.2)  # type: ignore[arg-type]
    return net.eval()


def silu_net() -> nn.Module:
    """A convolution and a SiLU, which exporters take apart."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU()).eval()


def exported(
    net: nn.Module, path: Path, dynamo: bool, size: int = 32, **options: Any
) -> Path:
    """A network written by one of torch's exporters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net,
            (torch.zeros(1, 3, size, size),),
            path,
            dynamo=dynamo,
            verbose=False,
            **options,
        )
    return path


def graph_file(
    path: Path,
    nodes: Sequence[Any],
    tensors: dict[str, np.ndarray] | None = None,
    shape: Sequence[int | str] = (1, 3, 8, 8),
    dtype: int = TensorProto.FLOAT,
    inputs: Sequence[Any] = (),
    outputs: Sequence[str] = ("y",),
    functions: Sequence[Any] = (),
) -> Path:
    """A graph by hand: from `x`, and further inputs, to `y`."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", dtype, shape), *inputs],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(a, name) for name, a in (tensors or {}).items()],
    )
    domains = {"", *(function.domain for function in functions)}
    opsets = [helper.make_opsetid(domain, 18) for domain in sorted(domains)]
    model = helper.make_model(graph, opset_imports=opsets, functions=functions)
    model.ir_version = 9
    path.write_bytes(model.SerializeToString())
    return path


def conv_weights(outputs: int = 4, inputs: int = 3) -> np.ndarray:
    """Weights of a convolution of 3 × 3."""
    random = np.random.default_rng(0)
    return random.normal(size=(outputs, inputs, 3, 3)).astype(np.float32)
