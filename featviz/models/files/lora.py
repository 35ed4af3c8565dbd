"""LoRA adapters as peft saves them: adapter_config.json, and low-rank factors beside it.

LoRA is https://arxiv.org/abs/2106.09685: a weight W becomes W + B·A·alpha/r.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featviz.errors import FileError, LoadError
from featviz.files import read_json
from featviz.models.files import checkpoint
from featviz.text import listed, quoted

CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_REPLACED = ".original_module."
"""In the names of what `modules_to_save` has replaced, which peft keeps beside it."""

_SHOWN = 4

_PLAIN, _EMBEDDING = (
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_embedding_A", ".lora_embedding_B"),
)
"""Ends of the names of the factors A and B; what is not of LoRA replaces a tensor of the model."""

_MERGE_FIRST = "merge it where it was made: model.merge_and_unload(), and save that model"


@dataclass(frozen=True)
class LoraChange:
    """What an adapter adds to the weight of a layer."""

    a: Tensor
    """[r, in], or of a convolution [r, in, h, w]."""
    b: Tensor
    """[out, r], or of a convolution [out, r, 1, 1]."""
    scale: float
    """alpha / r."""
    transposed: bool
    """Whether the layer keeps its weight as [in, out]."""

    def of_weight(self) -> Tensor:
        """The change of the weight, float32."""
        a, b = self.a.float(), self.b.float()
        if a.ndim > 2:
            return torch.einsum("or,ri...->oi...", b.flatten(1), a) * self.scale
        product = b @ a * self.scale
        return product.T if self.transposed else product


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter."""

    name: str
    """Its folder."""
    file: Path
    base: str
    """The model that it says it belongs to, in words."""
    changes: Mapping[str, LoraChange]
    """By name of the layer."""
    replaced: Mapping[str, Tensor]
    """Tensors that stand in place of the model's own, such as a new head."""

    def merge(self, module: nn.Module) -> str:
        """Add the adapter to a model's weights, in place; returns what was done, in words.

        Raises:
            LoadError: the model lacks a layer of the adapter, or has it in another shape.
        """
        weights = module.state_dict()
        wanted = [*(f"{layer}.weight" for layer in self.changes), *self.replaced]
        if missing := [quoted(name) for name in wanted if name not in weights]:
            raise self._other_base(f"is for {listed(missing, _SHOWN)}, which the model lacks")
        for layer, change in self.changes.items():
            weight = weights[f"{layer}.weight"]
            self._put(f"{layer}.weight", weight, weight + change.of_weight().to(weight))
        for name, tensor in self.replaced.items():
            self._put(name, weights[name], tensor)
        more = f", replaced {len(self.replaced)} tensors" if self.replaced else ""
        return f"merged LoRA into {len(self.changes)} layers{more}"

    def _put(self, name: str, weight: Tensor, new: Tensor) -> None:
        if weight.shape != new.shape:
            shapes = f"{list(new.shape)}, and the model's is {list(weight.shape)}"
            raise self._other_base(f"has {quoted(name)} as {shapes}")
        weight.copy_(new)

    def _other_base(self, what: str) -> LoadError:
        return LoadError(
            f"{self.name} {what}", f"--arch with the model that it was made for: {self.base}"
        )


def read(folder: Path, allow: tuple[str, ...] = (), trust: bool = False) -> Adapter:
    """Read an adapter's folder; pickled weights as carefully as any.

    Raises:
        LoadError: it is no LoRA, of a kind that is not plain LoRA, or cannot be read.
    """
    try:
        config = read_json(folder / CONFIG)
    except FileError as error:
        raise LoadError(error.message, error.hint) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise LoadError(f"{folder.name} is no LoRA: {CONFIG} says so", _MERGE_FIRST)
    file = next((folder / n for n in _WEIGHTS if (folder / n).is_file()), None)
    if file is None:
        raise LoadError(f"{folder.name} has no {_WEIGHTS[0]}", "fetch it")
    tensors = checkpoint.read(file, allow, trust)
    if not isinstance(tensors, dict) or not all(isinstance(v, Tensor) for v in tensors.values()):
        raise LoadError(
            f"{file.name} holds no dict of tensors", "peft's save_pretrained writes one"
        )
    named = {_plain_name(str(k)): v for k, v in tensors.items() if _REPLACED not in str(k)}
    changes = _changes(named, config, folder.name)
    replaced = {k: v for k, v in named.items() if "lora_" not in k}
    base = quoted(str(config.get("base_model_name_or_path") or "it does not say which"))
    return Adapter(folder.name, file, base, changes, replaced)


def _plain_name(name: str) -> str:
    """The name in the base model of what peft has put into its own modules."""
    for part in (".base_layer.", ".modules_to_save."):
        name = name.replace(part, ".")
    return name.removeprefix(_PREFIX)


def _changes(
    named: Mapping[str, Tensor], config: Mapping[str, Any], adapter: str
) -> dict[str, LoraChange]:
    changes: dict[str, LoraChange] = {}
    left = {name for name in named if "lora_" in name}
    for ends in (_PLAIN, _EMBEDDING):
        for layer in [name.removesuffix(ends[0]) for name in named if name.endswith(ends[0])]:
            a, b = named[layer + ends[0]], named.get(layer + ends[1])
            if (
                b is None
                or a.ndim < 2
                or a.ndim != b.ndim
                or b.shape[1:] != (len(a), *[1] * (a.ndim - 2))
            ):
                raise LoadError(f"{adapter}: the factors of {quoted(layer)} do not fit", None)
            left -= {layer + end for end in ends}
            transposed = ends is _EMBEDDING or config.get("fan_in_fan_out") is True
            changes[layer] = LoraChange(a, b, _scale(layer, len(a), config, adapter), transposed)
    if left or config.get("use_dora"):
        what = quoted(min(left)) if left else "DoRA"
        raise LoadError(f"{adapter} is more than plain LoRA: it has {what}", _MERGE_FIRST)
    return changes


def _scale(layer: str, rank: int, config: Mapping[str, Any], adapter: str) -> float:
    alpha = config.get("lora_alpha")
    patterns = config.get("alpha_pattern") or {}
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        if not re.fullmatch(r"[\w.]+", pattern):
            raise LoadError(
                f"{adapter} has the alpha pattern {quoted(pattern)}, expected names", _MERGE_FIRST
            )
        if f".{layer}".endswith(f".{pattern}"):
            alpha = value
    if not isinstance(alpha, (int, float)) or not rank:
        raise LoadError(
            f"{adapter} has lora_alpha {quoted(repr(alpha))} and rank {rank}, expected numbers",
            _MERGE_FIRST,
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
