"""Weights of files into modules: all of them, or as many as fit where that was asked for."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featviz.errors import LoadError
from featviz.models.files import checkpoint
from featviz.models.files.state_dict import Unwrapped, strip, unwrap
from featviz.options import ModelOptions
from featviz.text import listed, quoted

log = logging.getLogger(__name__)

_SHOWN = 4
"""Keys that an error names before it says how many more there are."""


@dataclass(frozen=True)
class Fit:
    """How well a state dict fits a module: counts and names of tensors."""

    total: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    other: tuple[str, ...]
    """Keys whose shapes differ, with both shapes in words."""

    @property
    def fitting(self) -> int:
        """Tensors of the module that the state dict has in the right shape."""
        return self.total - len(self.missing) - len(self.other)

    @property
    def words(self) -> str:
        """The tensors that do not fit, in words; empty if all fit."""
        parts = {"missing ": self.missing, "unexpected ": self.unexpected, "": self.other}
        return "; ".join(
            word + listed([quoted(key) for key in keys], _SHOWN)
            for word, keys in parts.items()
            if keys
        )


def compare(module: nn.Module, tensors: Mapping[str, Tensor]) -> Fit:
    """Hold tensors against a module's own names and shapes."""
    expected = {k: v for k, v in module.state_dict().items() if isinstance(v, Tensor)}
    # BatchNorm's step counter: old checkpoints lack it, and nothing depends on it here
    counted = [k for k in expected if k in tensors or not k.endswith("num_batches_tracked")]
    return Fit(
        total=len(counted),
        missing=tuple(key for key in counted if key not in tensors),
        unexpected=tuple(key for key in tensors if key not in expected),
        other=tuple(
            f"{key} is {list(tensors[key].shape)}, not {list(expected[key].shape)}"
            for key in counted
            if key in tensors and tensors[key].shape != expected[key].shape
        ),
    )


def put_into(
    module: nn.Module, tensors: Mapping[str, Tensor], what: str, partial: bool = False
) -> Fit:
    """Load tensors into a module; half precision is cast to the module's own.

    Args:
        what: begins the message: `net.pth does not fit resnet18`.
        partial: load what fits, and say how much that is.

    Raises:
        LoadError: something is missing, unexpected or of another shape (not with `partial`), or
            nothing fits at all.
    """
    fit = compare(module, tensors)
    if fit.words and not (partial and fit.fitting):
        raise LoadError(
            f"{what}: {fit.fitting} of {fit.total} tensors; {fit.words}",
            "another --arch, --model-arg (for example num_classes=10), or --partial for what fits",
        )
    expected = module.state_dict()
    chosen = OrderedDict(
        (k, v) for k, v in tensors.items() if k in expected and expected[k].shape == v.shape
    )
    # MNASNet loads no unknown version
    vars(chosen)["_metadata"] = getattr(expected, "_metadata", {})
    try:
        module.load_state_dict(chosen, strict=False)
    except (RuntimeError, KeyError) as error:  # of sparse and quantised tensors and modules
        raise LoadError(
            f"{what}: {quoted(str(error).strip().splitlines()[-1].strip())}",
            "save the weights as plain dense tensors",
        ) from error
    if fit.words:
        log.warning("loaded %d of %d tensors (--partial): %s", fit.fitting, fit.total, fit.words)
    return fit


def read_weights(path: Path, options: ModelOptions) -> Unwrapped:
    """The tensors of a file by name.

    Raises:
        LoadError: the file holds no weights.
    """
    content = checkpoint.read(path, options.trust)
    return unwrap(content, options.key, options.strip_prefix, options.ema, path.name)


def put_weights(
    module: nn.Module, tensors: Unwrapped, path: Path, options: ModelOptions
) -> dict[str, Any]:
    """Load the tensors of a file into a module; returns what run.json says of them.

    Raises:
        LoadError: they do not fit.
    """
    fitting = strip(tensors, module)
    if fitting.steps:
        log.info("%s: %s", path.name, "; ".join(fitting.steps))
    what = f"{path.name} does not fit {options.spec}"
    fit = put_into(module, fitting.tensors, what, options.partial)
    taken = [*fitting.steps, f"loaded {fit.fitting} of {fit.total}"]
    return {**checkpoint.record(path), "taken": taken}


def in_full_precision(module: nn.Module, device: torch.device) -> nn.Module:
    """Half and bfloat16 become float32 on a CPU, where many operations lack them."""
    halves = (torch.float16, torch.bfloat16)
    tensors: Sequence[Tensor] = [*module.parameters(), *module.buffers()]
    if device.type == "cpu" and any(tensor.dtype in halves for tensor in tensors):
        log.info("half precision is cast to float32 on the CPU")
        return module.float()
    return module
