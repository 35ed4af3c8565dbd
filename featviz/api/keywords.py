"""The keywords of the public functions, with their types: the fields of the option records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

Model: TypeAlias = str | Path | nn.Module
"""A MODEL string (`"resnet18"`, a file, `"file.py:factory"`), or a module, which is given back as
it was."""

Layers: TypeAlias = str | type[nn.Module] | Sequence[str | type[nn.Module]]
"""Selectors as text, classes of modules, or a list of these."""

Picture: TypeAlias = str | Path | Image.Image | np.ndarray | Tensor
"""A path, or an image in memory."""

Size: TypeAlias = int | str | Sequence[int]
"""Pixels: one side, (height, width), or "HEIGHTxWIDTH"."""

Count: TypeAlias = int | Literal["auto"] | None

CamMethod: TypeAlias = Literal[
    "gradcam", "gradcam++", "layercam", "hirescam", "xgradcam", "gradxact"
]
"""Class activation maps."""

Reduce: TypeAlias = Literal["mean", "max", "l2", "max-abs", "pca"] | CamMethod


class TileKeywords(TypedDict, total=False):
    """How maps become tiles: fields of `featviz.records.DrawOptions`, which says what they mean."""

    normalize: str
    cmap: str
    nrow: Count
    padding: int | None
    pad_value: float | None
    scale: Count
    min_tile: int
    max_maps: int | None
    max_slices: int
    pick: Literal["first", "top", "spread"]
    order: Literal["index", "mean", "similarity"]
    collapse: float | None
    labels: bool
    marks: bool


class GridKeywords(TileKeywords, total=False):
    """How a tensor becomes a picture: more fields of DrawOptions."""

    reduce: Reduce | None
    overlay: float | None
    tensor_layout: str | Sequence[str]


class InputKeywords(TypedDict, total=False):
    """How an image becomes the model's input: fields of `featviz.models.preprocess.InputOptions`,
    and what else forward gets."""

    preset: str | None
    size: Size | None
    crop: Size | None
    interpolation: str | None
    mean: Sequence[float] | float | str | None
    std: Sequence[float] | float | str | None
    channels: int | None
    exif: bool
    background: str
    frames: int
    inputs: int | None
    transform: str | Callable[[Any], Any] | None
    readers: int | None
    forward_args: Mapping[str, Any]


class ModelKeywords(TypedDict, total=False):
    """How a MODEL string is loaded: fields of `featviz.models.sources.ModelOptions`."""

    arch: str | None
    weights: str | None
    seed: int
    model_args: Mapping[str, Any]
    hparams: bool
    allow_globals: str | Sequence[str]
    trust: bool
    key: str | None
    strip_prefix: str | None
    ema: bool | None
    partial: bool
    device: str | torch.device


class LoadingKeywords(InputKeywords, ModelKeywords, total=False):
    """The model, and how it is fed."""


class KernelKeywords(TileKeywords, ModelKeywords, total=False):
    """The model, and how kernels become pictures."""

    titles: bool
    format: Literal["png", "webp", "jpg", "avif"]


class WatchKeywords(GridKeywords, InputKeywords, total=False):
    """How the maps of a series are drawn, and how its images become the model's input."""

    format: Literal["png", "webp", "jpg", "avif"]
    tensors: bool | Literal["npy"] | None


class RunKeywords(GridKeywords, LoadingKeywords, total=False):
    """All that a run can be told."""

    titles: bool
    figure: bool
    first: int | None
    shared_basis: bool
    format: Literal["png", "webp", "jpg", "avif"]
    flat: bool
    tensors: bool | Literal["npy"] | None
    archive: str | Path | None
    wait: float
    verify: bool
    prune: bool
    durable: bool
    fail_fast: bool
    jobs: int | None
    step: int | None
    shard: str | None
    max_output_size: int | str | None
    max_files: int | None
    capture: str | Sequence[str]
    target: str | None
    grad_rule: Literal["plain", "guided", "deconv"]
    ablate: str | Sequence[str]
    scale_channel: str | Sequence[str]
    clamp: str | Sequence[str]
    noise: str | Sequence[str]
    grad_scale: str | Sequence[str]
