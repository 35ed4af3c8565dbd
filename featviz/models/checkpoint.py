"""Model files: whole models and weights, read without running what they hold."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import struct
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featviz.errors import FeatvizError, LoadError
from featviz.models import pickles, programs, sniff
from featviz.models.unwrap import nested
from featviz.text import quoted

SUFFIXES = frozenset((".pth", ".pt", ".ckpt", ".bin", ".safetensors", ".pt2"))

_MOST_REPEATED = 2**30
"""Bytes that a tensor may repeat the same few to (`expand`): no weights need more."""

_PICKLE_ERRORS = (
    pickle.UnpicklingError,
    struct.error,
    EOFError,
    LookupError,
    AttributeError,
    TypeError,
    AssertionError,
)
"""What reading a pickle raises, in words that do not say what was being read."""


def record(path: Path) -> dict[str, Any]:
    """What run.json says of a file: its name and sha256, no folder."""
    with path.open("rb") as file:
        return {"file": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read(path: Path, allow: Sequence[str] = (), unsafe: bool = False) -> Any:
    """Read what a file holds: a module, or a mapping with tensors somewhere in it.

    Raises:
        LoadError: no checkpoint, truncated, or a pickle that needs more than is allowed.
    """
    try:
        kind = sniff.sniff(path)
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}", None) from error
    if kind == sniff.TORCHSCRIPT:
        raise LoadError(
            f"{path.name} is TorchScript, which takes no hooks on its layers",
            "give the Python model that it was made from, with its weights: "
            "torch.save(torch.jit.load(FILE).state_dict(), 'weights.pth') and --arch MODEL",
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old ways to save, which a reader cannot change
            return _checked(path, _load_safely(path, allow))
    except FeatvizError:
        raise
    except Exception as error:  # a broken pickle decides itself what it makes torch raise
        raise _damaged(path, error) from error


def _load_safely(path: Path, allow: Sequence[str]) -> Any:
    with torch.serialization.safe_globals(pickles.vetted(path, allow)):
        return torch.load(path, map_location="cpu", weights_only=True)


def _checked(path: Path, content: Any) -> Any:
    """Refuse what can be read, though no model can be made of it."""
    for value in nested(content):
        tensors = [value]
        if isinstance(value, nn.Module):
            _check_parts(path, value)
            tensors = [*value.parameters(), *value.buffers()]
        for tensor in tensors:
            if isinstance(tensor, Tensor) and _lacks_data(tensor):
                raise LoadError(
                    f"{path.name} holds a tensor of shape {list(tensor.shape)} without its data",
                    "save the model again, with its weights on the CPU",
                )
    return content


def _check_parts(path: Path, module: nn.Module) -> None:
    if not _is_sound(module):
        raise LoadError(
            f"{path.name} holds a broken {type(module).__name__}: it lacks parts of an nn.Module, "
            "or contains itself",
            "save a model that runs, or its state dict",
        )


def _is_sound(module: nn.Module) -> bool:
    """Whether all that nn.Module keeps is there and of its kind, in every submodule."""
    kept = vars(nn.Module()).items()
    kinds = {name: k for name, value in kept for k in (bool, dict, set) if isinstance(value, k)}
    try:
        module.state_dict()
        module.to(non_blocking=False)  # goes through all tensors as any .to does, changing none
    except Exception:  # whatever a state that a file made up leads to
        return False
    return all(
        isinstance(vars(part).get(name), kind)
        for part in module.modules()
        for name, kind in kinds.items()
    )


def _lacks_data(tensor: Tensor) -> bool:
    """A tensor on no device, or one that repeats a few bytes to more than _MOST_REPEATED."""
    size = tensor.numel() * tensor.element_size()
    return tensor.is_meta or (size > _MOST_REPEATED and size > tensor.untyped_storage().nbytes())


def _read_safetensors(path: Path, allow: Sequence[str], unsafe: bool) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _read_program(path: Path, allow: Sequence[str], unsafe: bool) -> Any:
    return programs.read(path, unsafe).module


def _read_shards(path: Path, allow: Sequence[str], unsafe: bool) -> Any:
    """The files that an index.json names, which must lie beside it."""
    try:
        names = sorted(set(json.loads(path.read_text("utf-8"))["weight_map"].values()))
        shards = [path.with_name(Path(str(name)).name) for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{path.name} is no index of shards", "it lacks a weight_map") from error
    found: dict[str, Any] = {}
    for shard in shards:
        name = quoted(shard.name)
        if not _is_shard(shard):
            raise LoadError(f"{path.name} names {name}, which is not beside it", "fetch it")
        part = read(shard, allow, unsafe)
        if not isinstance(part, dict):
            raise LoadError(f"{path.name} names {name}, which holds no dict of tensors", None)
        found |= part
    return found


def _is_shard(path: Path) -> bool:
    """Whether there is such a file; an index is none, as it could name itself."""
    try:
        return path.is_file() and not path.name.endswith(".index.json")
    except OSError:  # a name longer than a file may have
        return False


def _damaged(path: Path, error: Exception) -> LoadError:
    if "persistent_load of storage" in str(error):
        return LoadError(
            f"{path.name} is a whole model in torch's format before 1.6, which cannot be read "
            "without running it",
            "save it again with a newer torch, or its state_dict(); --unsafe-load if you trust it",
        )
    return LoadError(
        f"{path.name} cannot be loaded: {_reason(error)}",
        "is the file whole, and from this torch or older?",
    )


def _reason(error: BaseException) -> str:
    """The first sentence of what went wrong."""
    if isinstance(error, pickle.UnpicklingError) and error.__context__ is not None:
        error = error.__context__  # the same without torch's advice to load the file unsafely
    words = quoted(re.split(r"(?<=\w)\. |\n", str(error).strip())[0])
    if isinstance(error, _PICKLE_ERRORS):
        words = f"{type(error).__name__}: {words}".removesuffix(": ")
        return f"its pickle is broken, or not as torch.save writes it ({words})"
    return words or type(error).__name__


_READERS: dict[str, Callable[[Path, Sequence[str], bool], Any]] = {
    sniff.ZIP: _read_torch,
    sniff.PICKLE: _read_torch,
    sniff.SAFETENSORS: _read_safetensors,
    sniff.SHARDS: _read_shards,
    sniff.EXPORTED: _read_program,
}
