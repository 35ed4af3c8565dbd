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
    module: nn.Module, images: Path, tmp_path: Path, **options: Any
) -> dict[str, Any]:
    """The audit.json of a module on images."""
    out = tmp_path / "audit"
    shutil.rmtree(out, ignore_errors=True)
    settings = AuditOptions(inputs=PLAIN, out=out, **{"max_suspects": 0, **options})
    audit(loaded(module), [str(images)], settings)
    return read_audit(out)


def read_audit(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "audit.json").read_text())
    return content


def column(content: dict[str, Any], name: str) -> dict[str, Any]:
    """What each layer has under this name in audit.json."""
    return {row["label"]: row[name] for row in content["layers"]}


def dead(content: dict[str, Any]) -> dict[str, list[int]]:
    """The dead channels of each layer that was judged for them."""
    return {
        label: findings["dead"]
        for label, findings in column(content, "findings").items()
        if "dead" in findings
    }


def input_batch(module: nn.Module, images: Path) -> Tensor:
    """What the model gets of a folder of images: [images, 3, 12, 10]."""
    prepare = loaded(module).preprocess.tensor
    return torch.cat([prepare(Image.open(path)) for path in sorted(images.iterdir())])


def residual() -> Any:
    """A block that shares its ReLU, as in ResNet-18, between two convolutions; GELU is
    last."""

    def way(self: Any, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)

    block = Net(
        way,
        conv1=nn.Conv2d(4, 4, 3, padding=1),
        bn1=nn.BatchNorm2d(4),
        conv2=nn.Conv2d(4, 4, 3, padding=1),
        bn2=nn.BatchNorm2d(4),
        relu=nn.ReLU(inplace=True),
    )
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


def wake(*layers: nn.Module) -> None:
    """No channel of random weights dies by chance."""
    for layer in layers:
        nn.init.constant_(layer.bias, 5.0)


def kill(layer: nn.Module, channels: list[int]) -> None:
    """These channels are far below zero, whatever comes in."""
    with torch.no_grad():
        layer.weight[channels] = 0
        layer.bias[channels] = -3
