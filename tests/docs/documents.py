"""The README and the pages of docs/: their commands, their code, and what these find in
a clone."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tarfile
import warnings
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from conftest import ROOT, SCENES
from PIL import Image
from runs import make_photos
from torch import nn

PAGES = {"README": ROOT / "README.md"} | {
    path.stem: path for path in sorted((ROOT / "docs").glob("*.md"))
}


class Command(NamedTuple):
    """A line of a block that is marked as sh."""

    line: str
    code: int
    """The exit code that a comment tells, else 0."""


def read(page: str) -> str:
    """The text of a page."""
    return PAGES[page].read_text("utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in a language, in order."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL
    )


def commands(page: str) -> list[Command]:
    """The lines of all blocks of a page that are marked as sh, without their comments."""
    text = "".join(blocks(page, "sh")).replace("\\\n", " ")
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        command, _, comment = line.partition("  #")
        told = re.search(r"exit code (\d+)", comment)
        found.append(Command(" ".join(command.split()), int(told[1]) if told else 0))
    return found


def furnish(folder: Path) -> None:
    """Put there what a clone has, and what the pages say that the reader has."""
    for name in ("configs", "sample_images"):
        shutil.copytree(ROOT / name, folder / name)
    for path in (folder / "sample_images" / "scenes").iterdir():
        with Image.open(path) as opened:
            small = opened.resize((opened.width // 4, opened.height // 4))
        small.save(path)
    _images(folder)
    _models(folder)
    for block in blocks("cookbook", "python"):
        if block.startswith("# "):
            (folder / block.split()[1]).write_text(block)
    with (folder / "net.py").open("a") as file:
        file.write(
            "\n\ndef make_net(width):\n    return nn.Sequential(nn.Conv2d(1, width,"
            " 3))\n"
        )


def _images(folder: Path) -> None:
    photos = make_photos(folder / "photos", 2, (72, 64))
    with Image.open(SCENES / "spheres.jpg") as opened:
        opened.resize((96, 96)).save(folder / "photo.jpg")
        opened.resize((48, 48)).convert("L").save(folder / "scan.png")
    shutil.copy(folder / "photo.jpg", photos / "cat.jpg")
    with tarfile.open(folder / "photos.tar.gz", "w:gz") as archive:
        archive.add(photos, "photos")
    with zipfile.ZipFile(folder / "photos.zip", "w") as packed:
        packed.write(folder / "photo.jpg", "a/b.jpg")


def _models(folder: Path) -> None:
    from safetensors.torch import save_file
    from torchvision import models

    for seed, name in enumerate(("model", "before", "after")):
        torch.manual_seed(seed)
        layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.ReLU()]
        nn.init.constant_(layers[2].bias, 3.0)  # type: ignore[arg-type]
        torch.save(nn.Sequential(*layers), folder / f"{name}.pth")
        if seed == 0:
            _graphs(folder, nn.Sequential(*layers).eval())
    weights = {"conv.weight": torch.randn(8, 3, 3, 3), "conv.bias": torch.zeros(8)}
    torch.save(weights, folder / "weights.pth")
    save_file(models.squeezenet1_1().state_dict(), folder / "weights.safetensors")


def _graphs(folder: Path, net: nn.Module) -> None:
    """The graph of a network, one with a fault, and one of int8; none without the
    package."""
    if importlib.util.find_spec("onnxruntime") is None:
        return
    import onnx
    from onnx import helper, numpy_helper

    path = folder / "model.onnx"
    axes = {"image": {2: "height", 3: "width"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net,
            (torch.zeros(1, 3, 64, 64),),
            path,
            dynamo=False,
            input_names=["image"],
            dynamic_axes=axes,
        )
    model = onnx.load(path)
    tensor = next(t for t in model.graph.initializer if t.name == "2.weight")
    faulty = numpy_helper.to_array(tensor) * 1.5
    tensor.CopyFrom(numpy_helper.from_array(faulty, tensor.name))
    onnx.save(model, folder / "broken.onnx")
    model = onnx.load(path)
    # as onnxruntime.quantization writes it: a quantiser behind each activation
    for node in [node for node in model.graph.node if node.op_type == "Relu"]:
        value = node.output[0]
        number = list(model.graph.node).index(node)
        users = [other for other in model.graph.node if value in other.input]
        scale = numpy_helper.from_array(np.float32(0.05), f"{value}_scale")
        zero = numpy_helper.from_array(np.uint8(0), f"{value}_zero")
        model.graph.initializer.extend([scale, zero])
        if not users:
            continue
        for other in users:
            other.input[:] = [f"{value}_d" if n == value else n for n in other.input]
        quantisers = [scale.name, zero.name]
        model.graph.node.insert(
            number + 1,
            helper.make_node("QuantizeLinear", [value, *quantisers], [f"{value}_q"]),
        )
        model.graph.node.insert(
            number + 2,
            helper.make_node(
                "DequantizeLinear", [f"{value}_q", *quantisers], [f"{value}_d"]
            ),
        )
    onnx.save(model, folder / "int8.onnx")
