"""A network with one change, and what `featviz diff` says of runs of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from conftest import Outcome
from PIL import Image
from torch import nn

Run = Callable[..., Path]
CLI = Callable[..., Outcome]
Pair = tuple[Path, Path]
"""Two runs or models: before, after."""
Document = dict[str, Any]

CHANGED = 5
"""The output channel of the middle convolution whose weight the tests change."""
SMALL = ("--size", "40", "--crop", "32", "--layers", "Conv2d,ReLU")


def network() -> nn.Sequential:
    """Three convolutions with ReLUs; the second ReLU works in place."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 6, 3, stride=2),
    ).eval()


def unchanged(model: nn.Sequential) -> None:
    """Leave it as it is."""


def saved(path: Path, change: Callable[[nn.Sequential], None] = unchanged) -> Path:
    model = network()
    with torch.no_grad():
        change(model)
    torch.save(model, path)
    return path


def one_weight(model: nn.Sequential, by: float = 0.02) -> None:
    model[2].weight[CHANGED, 3, 1, 1] += by


def nan_bias(model: nn.Sequential) -> None:
    model[2].bias[CHANGED] = float("nan")


class Documented(NamedTuple):
    """What `diff --json` gives."""

    code: int
    document: Document


def documented(featviz: CLI, *arguments: object) -> Documented:
    """The exit code and the document, which must be strict JSON."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    done = featviz("diff", *arguments, "--json")
    return Documented(done.code, json.loads(done.out, parse_constant=refuse))


def layer_of(document: Document, name: str) -> Document:
    return next(layer for layer in document["layers"] if layer["layer"] == name)


def drawn(folder: Path) -> dict[str, Image.Image]:
    """The difference maps of a folder, by layer."""
    pictures = {}
    for path in sorted(folder.glob("*.png")):
        if not path.name.endswith((".before.png", ".after.png")):
            with Image.open(path) as image:
                image.load()
            pictures[image.text["Layer"]] = image  # type: ignore[attr-defined]
    return pictures


KEPT = ("--tensors", "npy")
IMAGES = ("a.png", "b.png")


class Tensors(NamedTuple):
    """A layer's tensors of two runs, [C, H, W], in float64."""

    before: np.ndarray
    after: np.ndarray


def kept_tensors(pair: Pair, image: str, layer: str) -> Tensors:
    """What `--tensors npy` has written."""
    file = f"{image}/{int(layer) + 1:03d}_{layer}/output.npy"
    before, after = (np.load(run / file)[0].astype(np.float64) for run in pair)
    return Tensors(before, after)
