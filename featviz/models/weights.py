"""Weights of files into modules: all of them, or as many as fit where that was asked for."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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


def put_into(
    module: nn.Module, tensors: Mapping[str, Tensor], what: str, partial: bool = False
) -> str:
    """Load tensors into a module; half precision is cast to the module's own.

    Args:
        what: begins the message: `net.pth does not fit resnet18`.
        partial: load what fits, and say how much that is.

    Returns:
        How many of the module's tensors there were: `loaded 122 of 122`.

    Raises:
        LoadError: something is missing, unexpected or of another shape (not with `partial`), or
            nothing fits at all.
    """
    own = module.state_dict()
    expected = {k: v for k, v in own.items() if isinstance(v, Tensor)}
    # BatchNorm's step counter: old checkpoints lack it, and nothing depends on it here
    total = [k for k in expected if k in tensors or not k.endswith("num_batches_tracked")]
    chosen = OrderedDict(
        (k, v) for k, v in tensors.items() if k in expected and expected[k].shape == v.shape
    )
    odd = {
        "missing ": [quoted(key) for key in total if key not in tensors],
        "unexpected ": [quoted(key) for key in tensors if key not in expected],
        "": [
            f"{quoted(key)} is {list(tensors[key].shape)}, not {list(expected[key].shape)}"
            for key in total
            if key in tensors and key not in chosen
        ],
    }
    words = "; ".join(word + listed(keys, _SHOWN) for word, keys in odd.items() if keys)
    if words and not (partial and chosen):
        raise LoadError(
            f"{what}: {len(chosen)} of {len(total)} tensors; {words}",
            "another --arch, --model-arg (for example num_classes=10), or --partial for what fits",
        )
    # MNASNet loads no unknown version
    vars(chosen)["_metadata"] = getattr(own, "_metadata", {})
    try:
        module.load_state_dict(chosen, strict=False)
    except (RuntimeError, KeyError) as error:  # of sparse and quantised tensors and modules
        raise LoadError(
            f"{what}: {quoted(str(error).strip().splitlines()[-1].strip())}",
            "save the weights as plain dense tensors",
        ) from error
    loaded = f"loaded {len(chosen)} of {len(total)}"
    if words:
        log.warning("%s tensors (--partial): %s", loaded, words)
    return loaded


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
    loaded = put_into(module, fitting.tensors, what, options.partial)
    return {**checkpoint.record(path), "taken": [*fitting.steps, loaded]}


def in_full_precision(module: nn.Module, device: torch.device) -> nn.Module:
    """Half and bfloat16 become float32 on a CPU, where many operations lack them."""
    halves = (torch.float16, torch.bfloat16)
    tensors: Sequence[Tensor] = [*module.parameters(), *module.buffers()]
    if device.type == "cpu" and any(tensor.dtype in halves for tensor in tensors):
        log.info("half precision is cast to float32 on the CPU")
        return module.float()
    return module
