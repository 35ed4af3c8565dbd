"""Model files: whole models and weights, read without running what they hold."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch import nn

from featviz.errors import FeatvizError, FileError, LoadError
from featviz.files import open_regular, read_json, real
from featviz.models import exported, sniff, torch_files
from featviz.models.code import from_script, importable
from featviz.models.torch_files import RefusedError, UnknownNamesError
from featviz.text import listed, quoted

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

_SHOWN = 20


def record(path: Path) -> dict[str, Any]:
    """What run.json says of a file: its name and sha256, no folder."""
    with path.open("rb") as file:
        return {"file": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read(path: Path, unsafe: bool = False) -> Any:
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
        words = f"{path.name} is no checkpoint: it is {kind}"
        raise LoadError(words, "a file that torch.save wrote")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old ways to save, which a reader cannot change
        return _READERS[kind](path, unsafe)


def _read_torch(path: Path, unsafe: bool) -> Any:
    if unsafe:
        return _read_unsafely(path)
    trust = "if you trust the file, --trust"
    try:
        with open_regular(path) as file:
            return torch_files.load(file)
    except FeatvizError:
        raise
    except UnknownNamesError as error:
        if lacking := [name for name in error.names if torch_files.lacks(name)]:
            package = lacking[0].partition(".")[0]
            raise LoadError(
                f"{path.name} needs the package {package} for {listed([*map(quoted, lacking)], 3)}",
                f"pip install {package}, or a newer one (-U) if it is there",
            ) from error
        shown = listed([quoted(name) for name in error.names], _SHOWN)
        message = f"{path.name} needs {shown}, which could run any code; nothing was executed"
        raise LoadError(message, trust, add=("--trust",)) from error
    except RefusedError as error:
        remedy = f"save the state_dict() of a model that runs; {trust}"
        raise LoadError(f"{path.name} {error}", remedy, add=("--trust",)) from error
    except Exception as error:  # a broken pickle decides itself what it makes torch raise
        raise _damaged(path, error) from error


def _read_unsafely(path: Path) -> Any:
    """Any pickle; a class that was defined in the script that saved the model is found in the file
    of code that defines it."""

    class TrustingUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            scripted = module == "__main__"
            return from_script(name, path) if scripted else super().find_class(module, name)

    def load(file: BinaryIO, **options: Any) -> Any:
        return TrustingUnpickler(file, **options).load()

    reader: Any = SimpleNamespace(__name__="pickle", Unpickler=TrustingUnpickler, load=load)
    try:
        with importable(path.parent):
            content = torch.load(path, "cpu", reader, weights_only=False)
    except LoadError:
        raise
    except ModuleNotFoundError as error:
        places = ", ".join(dict.fromkeys(str(real(f)) for f in (Path.cwd(), path.parent)))
        raise LoadError(
            f"{path.name} needs the module {str(error.name)!r}, which cannot be found",
            f"it was looked for in {places}; PYTHONPATH=FOLDER adds the folder that has it",
        ) from error
    except Exception as error:
        raise _damaged(path, error) from error
    if isinstance(content, nn.Module) and not isinstance(content, torch.jit.ScriptModule):
        content = unwrapped(content)
        for part in content.modules():
            if not torch_files.is_sound(part):
                remedy = "save a model that runs, or its state dict"
                raise LoadError(f"{path.name} {torch_files.broken(part)}", remedy)
    return content


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's, DataParallel's or DistributedDataParallel's wrapper; a
    compiled one ignores hooks that come later, or traces them into its graph."""
    inner = getattr(module, "_orig_mod", None)
    if inner is None and isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = module.module
    return unwrapped(inner) if isinstance(inner, nn.Module) else module


def _read_safetensors(path: Path, unsafe: bool) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _read_shards(path: Path, unsafe: bool) -> Any:
    """The files that an index.json names, which must lie beside it."""
    try:
        shards = sorted({Path(str(n)).name for n in read_json(path)["weight_map"].values()})
    except FileError as error:
        raise LoadError(f"{path.name} is no index of shards: {error}", None) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path.name} is no index of shards", "it lacks a weight_map") from error
    tensors: dict[str, Any] = {}
    for name in shards:
        words, shard = f"{path.name} names {quoted(name)}", path.with_name(name)
        is_index = name.endswith(".index.json")  # which could name itself
        if is_index or not os.path.isfile(shard):  # noqa: PTH113 - takes names of any length
            raise LoadError(f"{words}, which is not beside it", "fetch it")
        part = read(shard, unsafe)
        if not isinstance(part, dict):
            raise LoadError(f"{words}, which holds no dict of tensors")
        tensors |= part
    return tensors


def _damaged(path: Path, error: Exception) -> LoadError:
    cause: BaseException = error
    if isinstance(error, pickle.UnpicklingError) and error.__context__ is not None:
        cause = error.__context__  # the same without torch's advice to load the file unsafely
    words = quoted(re.split(r"(?<=\w)\. |\n", str(cause).strip())[0])
    if isinstance(cause, _PICKLE_ERRORS):
        words = f"{type(cause).__name__}: {words}".removesuffix(": ")
        words = f"its pickle is broken, or not as torch.save writes it ({words})"
    message = f"{path.name} cannot be loaded: {words or type(cause).__name__}"
    if "Unsupported operand" in str(error):  # of a pickle protocol that is not torch.save's own
        return LoadError(message, "if you trust the file, --trust", add=("--trust",))
    return LoadError(message, "is the file whole, and from this torch or older?")


_READERS: dict[str, Callable[[Path, bool], Any]] = {
    sniff.ZIP: _read_torch,
    sniff.PICKLE: _read_torch,
    sniff.SAFETENSORS: _read_safetensors,
    sniff.SHARDS: _read_shards,
    sniff.EXPORTED: lambda path, unsafe: exported.read(path, unsafe)[0],
}
