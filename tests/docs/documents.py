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
from typing import Any, NamedTuple

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


class Block(NamedTuple):
    """A block of commands."""

    commands: list[Command]
    shown: list[str]
    """What the last command prints, if a block behind it that is marked as text shows
    it; `...` stands for lines that are left out."""


def command_blocks(page: str) -> list[Block]:
    """The blocks of a page that are marked as sh, and then the examples of its table."""
    found = re.findall(
        r"^```sh\n((?:(?!```).*\n)+)```$(?:\n\n```text\n((?:(?!```).*\n)+)```$)?",
        read(page),
        re.MULTILINE,
    )
    blocks = [Block(commands_in(text), shown.splitlines()) for text, shown in found]
    return [*blocks, Block(examples(page), [])]


def commands(page: str) -> list[Command]:
    """The commands of all blocks of a page, without their comments."""
    return [command for block in command_blocks(page) for command in block.commands]


def examples(page: str) -> list[Command]:
    """The commands that end the rows of a page's table."""
    cells = re.findall(
        r"\| `(featviz [^`]+)`(?: \(exit code (\d+)\))? \|$", read(page), re.MULTILINE
    )
    return [Command(line, int(code or 0)) for line, code in cells]


def commands_in(text: str) -> list[Command]:
    """The lines of a block that is marked as sh."""
    text = text.replace("\\\n", " ")
    lines = []
    for line in filter(None, map(str.strip, text.splitlines())):
        command, _, comment = line.partition("  #")
        expected = re.search(r"exit code (\d+)", comment)
        code = int(expected[1]) if expected else 0
        lines.append(Command(" ".join(command.split()), code))
    return lines


MAKE_NET = """

def make_net(width):
    return nn.Sequential(nn.Conv2d(1, width, 3))
"""


def furnish(folder: Path) -> None:
    """Put there what a clone has, and what the pages say that the reader has."""
    for name in ("configs", "sample_images"):
        shutil.copytree(ROOT / name, folder / name)
    # the pages show what eight digits show as well
    for path in (folder / "sample_images" / "digits").glob("[01]*.png"):
        if int(path.name[:2]) >= 8:
            path.unlink()
    for path in (folder / "sample_images" / "scenes").iterdir():
        with Image.open(path) as opened:
            small = opened.resize((opened.width // 4, opened.height // 4))
        small.save(path)
    save_images(folder)
    save_models(folder)
    save_files("cookbook", folder)
    with (folder / "net.py").open("a") as file:
        file.write(MAKE_NET)


def save_files(page: str, folder: Path) -> None:
    """The files of code whose text a page shows, with the name in the first line."""
    for block in blocks(page, "python"):
        name = re.match(r"# (\w+\.py)\n", block)
        if name is not None:
            (folder / name[1]).write_text(block)


def save_images(folder: Path) -> None:
    """Photos in a folder and in archives."""
    photos = make_photos(folder / "photos", 2, (72, 64))
    with Image.open(SCENES / "spheres.jpg") as opened:
        opened.resize((96, 96)).save(folder / "photo.jpg")
        opened.resize((48, 48)).convert("L").save(folder / "scan.png")
    shutil.copy(folder / "photo.jpg", photos / "cat.jpg")
    with tarfile.open(folder / "photos.tar.gz", "w:gz") as archive:
        archive.add(photos, "photos")
    with zipfile.ZipFile(folder / "photos.zip", "w") as packed:
        packed.write(folder / "photo.jpg", "a/b.jpg")


def small_net(seed: int) -> nn.Sequential:
    """Two convolutions with their ReLUs, of which the second lets everything through."""
    torch.manual_seed(seed)
    last = nn.Conv2d(4, 2, 3)
    nn.init.constant_(last.bias, 3.0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), last, nn.ReLU())


def save_models(folder: Path) -> None:
    """Whole models, weights, and graphs where the package for them is there."""
    from safetensors.torch import save_file
    from torchvision import models

    for seed, name in enumerate(("model", "before", "after", "float")):
        torch.save(small_net(seed), folder / f"{name}.pth")
    quantised = small_net(3)
    for parameter in quantised.parameters():
        parameter.data = (parameter.data * 256).round() / 256
    torch.save(quantised, folder / "quantised.pth")
    weights = {"conv.weight": torch.randn(8, 3, 3, 3), "conv.bias": torch.zeros(8)}
    torch.save(weights, folder / "weights.pth")
    save_file(models.squeezenet1_1().state_dict(), folder / "weights.safetensors")
    if importlib.util.find_spec("onnxruntime") is not None:
        save_graphs(folder)


def save_graphs(folder: Path) -> None:
    """The graph of the network, one with a fault, and one of int8."""
    import onnx

    path = folder / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            small_net(0).eval(),
            (torch.zeros(1, 3, 64, 64),),
            path,
            dynamo=False,
            input_names=["image"],
            dynamic_axes={"image": {2: "height", 3: "width"}},
        )
    for name, change in (("broken", scale_kernels), ("int8", quantise)):
        model = onnx.load(path)
        change(model.graph)
        onnx.save(model, folder / f"{name}.onnx")


def scale_kernels(graph: Any) -> None:
    """Multiply the weights of the second convolution."""
    from onnx import numpy_helper

    for tensor in graph.initializer:
        if tensor.name == "2.weight":
            scaled = numpy_helper.to_array(tensor) * 1.5
            tensor.CopyFrom(numpy_helper.from_array(scaled, tensor.name))


def reroute(graph: Any, value: str, replacement: str) -> None:
    """Give the nodes that take a value another one."""
    for node in graph.node:
        inputs = [replacement if name == value else name for name in node.input]
        node.input[:] = inputs


def quantise(graph: Any) -> None:
    """Put a quantiser behind each ReLU, as onnxruntime.quantization writes it, but
    behind the output."""
    from onnx import helper, numpy_helper

    outputs = {output.name for output in graph.output}
    for node in [node for node in graph.node if node.op_type == "Relu"]:
        value = node.output[0]
        if value in outputs:
            continue
        scale = numpy_helper.from_array(np.float32(0.05), f"{value}_scale")
        zero = numpy_helper.from_array(np.uint8(0), f"{value}_zero")
        graph.initializer.extend([scale, zero])
        reroute(graph, value, f"{value}_d")
        parameters = [scale.name, zero.name]
        position = list(graph.node).index(node)
        to_int8 = [value, *parameters]
        quantiser = helper.make_node("QuantizeLinear", to_int8, [f"{value}_q"])
        back = [f"{value}_q", *parameters]
        dequantiser = helper.make_node("DequantizeLinear", back, [f"{value}_d"])
        graph.node.insert(position + 1, quantiser)
        graph.node.insert(position + 2, dequantiser)
