"""Modules with planted channels, and what the audit says of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from networks import Net
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from featviz.audit.audit import audit
from featviz.models.load import LoadedModel, adopt
from featviz.options import InputOptions
from featviz.options.commands import AuditOptions

PLANTED = Path(__file__).with_name("planted.py")
PLAIN = InputOptions(size=(12, 10), mean=(0.0,) * 3, std=(1.0,) * 3)
COLOURS = ("--size", "12x10", "--mean", "0,0,0", "--std", "1,1,1")


def solid(path: Path, colour: tuple[int, int, int]) -> Path:
    Image.new("RGB", (10, 12), colour).save(path)
    return path


def loaded(module: nn.Module, inputs: InputOptions = PLAIN) -> LoadedModel:
    return adopt(module.eval(), inputs)


def document(
    module: nn.Module, images: object, tmp_path: Path, **asked: Any
) -> dict[str, Any]:
    out = tmp_path / "audit"
    shutil.rmtree(out, ignore_errors=True)
    options = AuditOptions(inputs=PLAIN, out=out, **{"max_suspects": 0, **asked})
    audit(loaded(module), [str(images)], options)
    content: dict[str, Any] = json.loads((out / "audit.json").read_text())
    return content


def found(content: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
    return {row["label"]: row["findings"] for row in content["layers"]}


def residual() -> Any:
    """A block that shares its ReLU, as in ResNet-18, between two convolutions; GELU is
    last."""

    def way(self: Any, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)

    convs = {f"conv{n}": nn.Conv2d(4, 4, 3, padding=1) for n in (1, 2)}
    norms = {f"bn{n}": nn.BatchNorm2d(4) for n in (1, 2)}
    block = Net(way, **convs, **norms, relu=nn.ReLU(inplace=True))
    return Net(
        lambda self, x: F.gelu(self.late(self.block(self.stem(x)))),
        stem=nn.Conv2d(3, 4, 1),
        block=block,
        late=nn.Conv2d(4, 2, 1),
    )


def filled(conv: nn.Conv2d, weights: Tensor, biases: list[float]) -> nn.Conv2d:
    """A convolution of one pixel with these weights [C_out, C_in]."""
    with torch.no_grad():
        conv.weight.copy_(weights[:, :, None, None])
        conv.bias.copy_(torch.tensor(biases))
    return conv


def wake(layer: nn.Module) -> None:
    """No channel of random weights dies by chance."""
    with torch.no_grad():
        layer.bias.fill_(5.0)


def kill(conv: nn.Module, channels: list[int]) -> None:
    with torch.no_grad():
        conv.weight[channels] = 0
        conv.bias[channels] = -3
