"""Model files: whole models and weights, read without running what they hold."""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from featviz.errors import LoadError
from featviz.models import pickles, programs, sniff

SUFFIXES = frozenset((".pth", ".pt", ".ckpt", ".bin", ".safetensors", ".pt2"))


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


def _read_program(path: Path, allow: Sequence[str], unsafe: bool) -> Any:
    return programs.read(path, unsafe).module


def _read_shards(path: Path, allow: Sequence[str], unsafe: bool) -> Any:
    """The files that an index.json names, which must lie beside it."""
    try:
        names = sorted(set(json.loads(path.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path.name} is no index of shards", "it lacks weight_map") from error
    found: dict[str, Any] = {}
    for name in names:
        shard = path.with_name(Path(str(name)).name)
        if not shard.is_file():
            raise LoadError(f"{path.name} names {shard.name}, which is not beside it", "fetch it")
        found |= read(shard, allow, unsafe)
    return found


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
    sniff.SHARDS: _read_shards,
    sniff.EXPORTED: _read_program,
}
