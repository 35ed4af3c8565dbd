"""Model files: whole models and weights, read without running what they hold."""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featviz.errors import LoadError
from featviz.models import pickles, sniff

SUFFIXES = frozenset((".pth", ".pt", ".ckpt", ".bin", ".safetensors", ".pt2"))

_SHOWN = 4
"""Keys that an error names before it says how many more there are."""


def record(path: Path) -> dict[str, Any]:
    """What run.json says of a file: its name and sha256, no folder."""
    with path.open("rb") as file:
        return {"file": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def load_module(path: Path, allow: Sequence[str] = (), unsafe: bool = False) -> nn.Module:
    """Load a whole model, `torch.save(model)`.

    Raises:
        LoadError: no checkpoint, weights only, or a pickle that needs more than is allowed.
    """
    content = _read(path, allow, unsafe)
    if isinstance(content, nn.Module):
        return content
    if isinstance(content, Mapping):
        raise LoadError(
            f"{path.name} holds weights, not a model",
            "--arch says what they belong to, e.g. --arch resnet18",
        )
    raise LoadError(
        f"{path.name} holds a {type(content).__name__}, not a model", "save an nn.Module"
    )


def load_weights(
    module: nn.Module, path: Path, arch: str, allow: Sequence[str] = (), unsafe: bool = False
) -> None:
    """Load a file's weights into a module, every one of them.

    Raises:
        LoadError: no weights in it, or they do not fit; names missing and unexpected keys.
    """
    content = _read(path, allow, unsafe)
    if isinstance(content, nn.Module):
        content = content.state_dict()
    if not isinstance(content, Mapping) or not all(isinstance(v, Tensor) for v in content.values()):
        raise LoadError(f"{path.name} holds no weights", "a state dict: {name: tensor}")
    _fit(module, content, f"{path.name} does not fit {arch}")
    module.load_state_dict(content)


def _fit(module: nn.Module, content: Mapping[str, Tensor], what: str) -> None:
    own = module.state_dict()
    missing = [key for key in own if key not in content]
    unexpected = [key for key in content if key not in own]
    other = [
        f"{key} is {list(content[key].shape)}, not {list(own[key].shape)}"
        for key in own
        if key in content and content[key].shape != own[key].shape
    ]
    if missing or unexpected or other:
        fitting = len(own) - len(missing) - len(other)
        parts = [
            f"missing {_some(missing)}" if missing else "",
            f"unexpected {_some(unexpected)}" if unexpected else "",
            _some(other) if other else "",
        ]
        raise LoadError(
            f"{what}: {fitting} of {len(own)} tensors; {'; '.join(p for p in parts if p)}",
            "another --arch, or --model-arg (for example num_classes=10)",
        )


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more


def _read(path: Path, allow: Sequence[str], unsafe: bool) -> Any:
    try:
        kind = sniff.sniff(path)
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}", None) from error
    if kind in _REFUSED:
        raise LoadError(
            f"{path.name} {_REFUSED[kind]}", "save the nn.Module or its state dict instead"
        )
    if kind not in _READERS:
        raise LoadError(
            f"{path.name} is no checkpoint: it is {kind}", "a file that torch.save wrote"
        )
    return _READERS[kind](path, allow, unsafe)


def _read_torch(path: Path, allow: Sequence[str], unsafe: bool) -> Any:
    try:
        if unsafe:
            return torch.load(path, map_location="cpu", weights_only=False)
        with torch.serialization.safe_globals(pickles.vetted(path, allow)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, EOFError) as error:
        raise _damaged(path, error) from error
    except (AttributeError, ImportError, KeyError, ValueError, TypeError, IndexError) as error:
        raise _damaged(path, error) from error


def _read_safetensors(path: Path, allow: Sequence[str], unsafe: bool) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> LoadError:
    if "persistent_load of storage" in str(error):
        return LoadError(
            f"{path.name} is a whole model in torch's format before 1.6, which cannot be read "
            "without running it",
            "save it again with a newer torch, or its state_dict(); --unsafe-load if you trust it",
        )
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return LoadError(
        f"{path.name} cannot be loaded: {line}", "is the file whole, and from this torch or older?"
    )


_READERS: dict[str, Callable[[Path, Sequence[str], bool], Any]] = {
    sniff.ZIP: _read_torch,
    sniff.PICKLE: _read_torch,
    sniff.SAFETENSORS: _read_safetensors,
}
_REFUSED = {
    sniff.TORCHSCRIPT: "is TorchScript, which takes no hooks on its layers",
    sniff.EXPORTED: "is a torch.export program, which this version does not read",
}
