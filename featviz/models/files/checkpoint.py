"""Model files: whole models and weights, read without running what they hold."""

from __future__ import annotations

import hashlib
import pickle
import re
import struct
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch import nn

from featviz.errors import FeatvizError, FileError, LoadError
from featviz.files import read_json
from featviz.models.files import exported, module_state, pickles, sniff, torch_save
from featviz.models.files.rebuilding import RefusedError
from featviz.models.files.state_dict import nested, unwrapped
from featviz.models.importing import SCRIPT, from_script, importable, where_looked
from featviz.text import quoted

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


_LONGEST = 1000
"""Characters of what the user's own code raises, which may name folders."""


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old ways to save, which a reader cannot change
        if unsafe:
            return _read_unsafely(path)
        return _read_safely(path, allow)


def _read_safely(path: Path, allow: Sequence[str]) -> Any:
    allowed = pickles.allowed(allow, path)
    try:
        return _checked(path, torch_save.load(path, allowed))
    except FeatvizError:
        raise
    except RefusedError as error:
        raise LoadError(
            f"{path.name} {error}",
            "save the state_dict() of a model that runs, with a newer torch; "
            "if you trust the file, --trust",
            add=("--trust",),
        ) from error
    except Exception as error:  # a broken pickle decides itself what it makes torch raise
        raise _damaged(path, error) from error


def _read_unsafely(path: Path) -> Any:
    try:
        with importable(path.parent):
            content = torch.load(path, "cpu", _with_scripts(path), weights_only=False)
    except LoadError:
        raise
    except ModuleNotFoundError as error:
        raise LoadError(
            f"{path.name} needs the module {str(error.name)!r}, which cannot be found",
            where_looked(str(error.name), path.parent),
        ) from error
    except Exception as error:
        raise _damaged(path, error) from error
    if isinstance(content, nn.Module) and not isinstance(content, torch.jit.ScriptModule):
        content = unwrapped(content)
        for part in content.modules():
            if not module_state.is_sound(part):
                raise _broken(path, part)
    return content


def _with_scripts(path: Path) -> Any:
    """The module pickle, for torch.load, with the classes of scripts: a class that was defined in
    the script that saved the model is found in the file of code that defines it."""

    class TrustingUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module != SCRIPT:
                return super().find_class(module, name)
            try:
                return from_script(name, path.parent)
            except Exception as error:  # the user's own code is run
                raise LoadError(
                    f"{path.name} needs a class of a script: {quoted(str(error), _LONGEST)}",
                    "run where the one file is that defines it",
                ) from error

    def load(file: BinaryIO, **options: Any) -> Any:
        return TrustingUnpickler(file, **options).load()

    return SimpleNamespace(__name__="pickle", Unpickler=TrustingUnpickler, load=load)


def _checked(path: Path, content: Any) -> Any:
    """Refuse a module that torch itself could not use, though each part of it is right."""
    for value in nested(content):
        if isinstance(value, nn.Module):
            try:
                value.state_dict()
                value.to(non_blocking=False)  # goes through all tensors as any .to, changing none
            except Exception as error:  # whatever a state that a file made up leads to
                raise _broken(path, value) from error
    return content


def _broken(path: Path, module: nn.Module) -> LoadError:
    if "quantized" in type(module).__module__:
        return LoadError(
            f"{path.name} is a quantised model saved whole, which torch cannot load again",
            "save its state_dict(), or the float model that it was made from",
        )
    return LoadError(
        f"{path.name} {module_state.broken(module)}", "save a model that runs, or its state dict"
    )


def _read_safetensors(path: Path, allow: Sequence[str], unsafe: bool) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _read_program(path: Path, allow: Sequence[str], unsafe: bool) -> Any:
    return exported.read(path, unsafe).module


def _read_shards(path: Path, allow: Sequence[str], unsafe: bool) -> Any:
    """The files that an index.json names, which must lie beside it."""
    try:
        weights = dict.fromkeys(read_json(path)["weight_map"].values())
        names = sorted({Path(str(name)).name for name in weights})
        shards = [path.with_name(name) for name in names]
    except FileError as error:
        raise LoadError(f"{path.name} is no index of shards: {error}", None) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path.name} is no index of shards", "it lacks a weight_map") from error
    tensors: dict[str, Any] = {}
    for shard in shards:
        name = quoted(shard.name)
        if not _is_shard(shard):
            raise LoadError(f"{path.name} names {name}, which is not beside it", "fetch it")
        part = read(shard, allow, unsafe)
        if not isinstance(part, dict):
            raise LoadError(f"{path.name} names {name}, which holds no dict of tensors", None)
        tensors |= part
    return tensors


def _is_shard(path: Path) -> bool:
    """Whether there is such a file; an index is none, as it could name itself."""
    try:
        return path.is_file() and not path.name.endswith(".index.json")
    except OSError:  # a name longer than a file may have
        return False


def _damaged(path: Path, error: Exception) -> LoadError:
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
