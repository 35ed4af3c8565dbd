"""The README and the pages of docs/: their commands, their code, and what these find in
a clone."""

from __future__ import annotations

import re
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

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
    weights = {"conv.weight": torch.randn(8, 3, 3, 3), "conv.bias": torch.zeros(8)}
    torch.save(weights, folder / "weights.pth")
    save_file(models.squeezenet1_1().state_dict(), folder / "weights.safetensors")
