"""What a shell offers for arguments and options: nothing of torch is imported to know it."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from featviz.models.files import sniff

NAMES = Path(__file__).parent.parent / "models" / "names.txt"
"""Names of torchvision's models, one a line."""

_FILES = (*sniff.SUFFIXES, ".py")

_CLASSES = """
    AdaptiveAvgPool2d AvgPool2d BatchNorm1d BatchNorm2d BatchNorm3d Conv1d Conv2d Conv3d
    ConvTranspose2d Dropout ELU Embedding Flatten GELU GroupNorm Hardsigmoid Hardswish Identity
    InstanceNorm2d LSTM LayerNorm LeakyReLU Linear MaxPool2d Mish MultiheadAttention PReLU
    PixelShuffle RMSNorm ReLU ReLU6 Sequential SiLU Sigmoid Softmax Softplus Tanh
    TransformerEncoderLayer Upsample
"""
"""The classes of torch.nn that vision models are made of."""


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """torchvision's names, and the folders and model files here; else any path.

    A shell that is told to complete paths itself shows nothing else, so as long as a name fits,
    what lies in this folder is listed with the names.
    """
    names = [name for name in NAMES.read_text("utf-8").split() if name.startswith(incomplete)]
    if not names:
        return [CompletionItem(incomplete, type="file")]
    return [CompletionItem(name) for name in names + _here(incomplete)]


def _here(incomplete: str) -> list[str]:
    hidden = incomplete.startswith(".")
    names = [
        f"{path.name}/" if path.is_dir() else path.name
        for path in Path().iterdir()
        if path.name.startswith(incomplete) and path.name.startswith(".") == hidden
    ]
    return sorted(name for name in names if name.endswith(("/", *_FILES)))


def layers(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Class names, for the last of the selectors that commas separate."""
    before, comma, last = incomplete.rpartition(",")
    sign = "!" if last.startswith("!") else ""
    return [
        CompletionItem(f"{before}{comma}{sign}{name}")
        for name in _CLASSES.split()
        if name.startswith(last.removeprefix(sign))
    ]


def paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Any path: the shell knows them."""
    return [CompletionItem(incomplete, type="file")]
