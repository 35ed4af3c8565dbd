"""Files of weights, whole models and programs; tensors by name, and from these into a
module."""

from __future__ import annotations

import hashlib
import inspect
import io
import logging
import os
import re
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from featviz.errors import FeatvizError, FileError, LoadError
from featviz.files import npy, open_regular, read_json
from featviz.models import inert, sources
from featviz.models.classes import classes_of
from featviz.models.rebuild import (
    RefusedError,
    UnbuiltModule,
    is_missing_from_library,
    rebuild,
)
from featviz.models.sources import FixedInput, importable, read_code
from featviz.options import ModelOptions
from featviz.text import first_line, listed, quoted

log = logging.getLogger(__name__)

_SHOWN = 4
"""How many of the tensors that do not fit are named."""

_SAVE_IMAGE = "torch.save(tensor, 'image.pt') of a plain tensor [C, H, W]"

_SCRIPT = "__main__."
"""What the names of classes begin with that the script defined which saved the file."""

TO_FILL_IN = "FILE.py:CLASS"
"""Stands in hints for a value of --arch that is not known. In capitals, since a command
with a likely name would be copied as it stands."""

# Files
# -------------------------------------------------------------------------------------------


def file_record(path: Path) -> dict[str, Any]:
    """What run.json says of a file: its name without folders, and its sha256."""
    with path.open("rb") as file:
        return {
            "file": path.name,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


@contextmanager
def as_load_errors(path: Path) -> Iterator[None]:
    """A context for all that is done with the content of a file: any exception in it
    becomes a LoadError with a hint. A FeatvizError stays as it is."""
    try:
        with warnings.catch_warnings():
            # they are about old ways to save, which the user of a file cannot change
            warnings.simplefilter("ignore")
            yield
    except FeatvizError:
        raise
    except RefusedError as error:
        raise _refusal_error(path, error) from error
    except Exception as error:
        raise _damage_error(path, error) from error


def read(path: Path, trust: bool = False, complete: bool = True) -> Any:
    """Read what a file holds.

    Args:
        path: A file of any of `sources.FILE_FORMATS`.
        trust: Let the file run code. Modules that it imports may also lie in its folder.
        complete: Refuse a module whose class is on no list of `models.rebuild`. If
            False, such a module is returned as an UnbuiltModule.

    Returns:
        What was saved: a module, or a mapping with tensors somewhere in it; a pickle may
        also hold anything else.

    Raises:
        LoadError: Where the file is not a checkpoint or is damaged; or where it needs a
            class or function that is on no list, and `trust` is False.
    """
    with as_load_errors(path):
        file_format = sources.sniff(path)
        # the format decides, whatever the name ends with
        if file_format == sources.TORCHSCRIPT:
            raise LoadError(
                f"{path.name} is TorchScript, which takes no hooks on its layers",
                "torch.save(torch.jit.load(FILE).state_dict(), 'weights.pth') and"
                " --arch MODEL",
            )
        if file_format == sources.EXPORTED:
            return read_program(path, trust)[0]
        if file_format == sources.SHARDS:
            return _read_shards(path, trust)
        if file_format == sources.SAFETENSORS:
            from safetensors.torch import load_file

            return load_file(path)
        if file_format not in sources.FILE_FORMATS:
            raise LoadError(
                f"{path.name} is no checkpoint: it is {file_format}",
                "a file that torch.save wrote",
            )
        code_beside = importable(path.parent) if trust else nullcontext()
        with code_beside, open_regular(path) as file:
            if file_format == sources.ARRAYS:
                return npy.read_arrays(file.read())
            if trust:
                return torch.load(file, "cpu", weights_only=False)
            content = rebuild(inert.read(file))
        if complete and isinstance(content, UnbuiltModule):
            raise content.refusal
        return content


def _refusal_error(path: Path, error: RefusedError) -> LoadError:
    """The error for a file with a class or function that is on no list."""
    # a YOLO without Ultralytics is the commonest of all refusals
    missing = [quoted(name) for name in error.names if is_missing_from_library(name)]
    if missing:
        package = missing[0].partition(".")[0]
        return LoadError(
            f"{path.name} needs the package {package} for {listed(missing, 3)}",
            f"pip install {package}, or a newer one (-U) if it is there",
        )
    message = f"{path.name} {error}"
    arch = _class_at_hand(path, error.names)
    if any(name.startswith(_SCRIPT) for name in error.names):
        return LoadError(
            message,
            "the script that saved the file defined it, where --trust cannot find it;"
            f" for the weights in the file, --arch {arch}",
            add=("--arch", arch),
        )
    return LoadError(
        message,
        f"if you trust the file, --trust; for the weights in it, --arch {arch}",
        add=("--trust",),
        instead=("--arch", arch),
    )


def _class_at_hand(path: Path, names: Sequence[str]) -> str:
    """A value of --arch for a file that needs a class: `net.py:Net` for the first of the
    names whose code lies in the current folder or in the file's. If no code is found,
    TO_FILL_IN.

    Args:
        path: The file.
        names: The names of the classes and functions that it needs, such as `net.Net`.
    """
    for name in names:
        module, _, class_name = name.rpartition(".")
        # a path and no pattern for `glob`: the file may name a module `**/*`
        file = f"{module.replace('.', '/')}.py"
        files = [Path(file), path.parent / file]
        # the name does not say which file the script was
        if name.startswith(_SCRIPT):
            files = [*Path().glob("*.py"), *path.parent.glob("*.py")]
        for code in files:
            if f"class {class_name}" in read_code(code):
                return f"{code}:{class_name}"
    return TO_FILL_IN


def class_beside(path: Path, tensors: Iterable[str]) -> str | None:
    """A value of --arch for a file of weights, such as `net.py:Net`: the class in the
    file's folder or the current folder whose methods have `self.NAME` for each outermost
    module of the tensors. None if there is no such class, or several.

    Args:
        path: The file.
        tensors: The names of the tensors: `conv1.weight` belongs to the module `conv1`.
    """
    modules = {name.partition(".")[0] for name in tensors}
    fitting = {}
    for code in (*path.parent.glob("*.py"), *Path().glob("*.py")):
        pieces = re.split(r"^class (\w+)", read_code(code), flags=re.MULTILINE)
        for class_name, body in zip(pieces[1::2], pieces[2::2], strict=True):
            # `self` may have another name in a method
            own_names = {"self", *re.findall(r"\bdef \w+\(\s*(\w+)", body)}
            attributes = re.findall(rf"\b(?:{'|'.join(own_names)})\.(\w+)", body)
            if modules <= set(attributes):
                # if both folders are the same, each class is found twice
                fitting[code.name, class_name] = f"{code}:{class_name}"
    return fitting.popitem()[1] if len(fitting) == 1 else None


def _damage_error(path: Path, error: Exception) -> LoadError:
    """The error for a file; `error` is what a library raised when it read the content."""
    failure = f"{path.name} cannot be loaded"
    if isinstance(error, RecursionError):
        return LoadError(
            f"{failure}: it nests values in values without end",
            "save the state_dict() of the model alone",
        )
    if isinstance(error, OSError) and error.strerror and error.filename:
        return LoadError(f"{path} cannot be read: {error.strerror}")
    if isinstance(error, ModuleNotFoundError):  # of a file that is trusted
        return LoadError(
            f"{path.name} needs the module {str(error.name)!r}, which cannot be found",
            "PYTHONPATH=FOLDER adds the folder that has it",
        )
    # torch's errors are paragraphs, of which the first sentence says what is wrong
    text = quoted(re.split(r"(?<=\w)\. |\n", str(error).strip())[0])
    # of a file that is trusted: here `__main__` is featviz, not the script
    absent = re.match(r"Can't get attribute '(\w+)' on <module '[\w.]*__main__'", text)
    if absent is not None:
        name = f"{_SCRIPT}{absent[1]}"
        return LoadError(
            f"{path.name} needs {name}, which the script that saved the file defined",
            f"without --trust, --arch {_class_at_hand(path, [name])} takes the weights"
            " in it",
        )
    return LoadError(
        f"{failure}: {type(error).__name__}: {text}".removesuffix(": "),
        "is the file whole, and from this torch or older?",
    )


def read_saved_tensor(data: bytes) -> np.ndarray:
    """Read the one tensor of a file that torch.save wrote: an image, or an argument of
    forward.

    Args:
        data: The file's content: a tensor, or a dict with one tensor, or a dict with
            several of which one is called `image`.

    Returns:
        The tensor as an array; bfloat16, which numpy lacks, as float32.

    Raises:
        FileError: Where the file has no such tensor, is broken, or is a checkpoint; or
            where the tensor is complex.
    """
    content = _saved_data(data)
    if isinstance(content, dict):
        tensors = {
            str(k): value for k, value in content.items() if isinstance(value, Tensor)
        }
        content = npy.only(tensors, "tensors", "torch.save(tensors[NAME], 'image.pt')")
    if not isinstance(content, Tensor):
        raise FileError(f"holds a {type(content).__name__}, and no tensor", _SAVE_IMAGE)
    # sparse and quantised ones were refused by `rebuild`
    if content.is_complex():
        raise FileError("holds a complex tensor", _SAVE_IMAGE)
    tensor = content.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.numpy()


def _saved_data(data: bytes) -> Any:
    """The value that torch.save wrote into a file, unless the file is a checkpoint.

    Args:
        data: The file's content.

    Raises:
        FileError: Where the file is broken, needs a class that is on no list, or is a
            checkpoint.
    """
    try:
        content = rebuild(inert.read(io.BytesIO(data)))
        if isinstance(content, UnbuiltModule):
            raise content.refusal
        weights = _tensors_in(_find_inner(content, None, []))
    except RefusedError as error:
        raise FileError(str(error), _SAVE_IMAGE) from error
    except Exception as error:  # a broken pickle decides itself what is raised
        text = quoted(first_line(error))
        raise FileError(f"is no whole file of torch.save: {text}", None) from error
    if any(name.rpartition(".")[2] == "weight" for name in weights):
        raise FileError(
            "is a checkpoint, the weights of a model, and no image",
            "one model stands before the images; `featviz diff` compares two",
        )
    return content


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside all wrappers of torch.compile, DataParallel and
    DistributedDataParallel; a module without a wrapper is returned as it is."""
    inner = getattr(module, "_orig_mod", None)
    if inner is None and isinstance(
        module, (nn.DataParallel, nn.parallel.DistributedDataParallel)
    ):
        inner = module.module
    if isinstance(inner, nn.Module):
        return unwrap(inner)
    return module


def _read_shards(path: Path, trust: bool) -> dict[str, Any]:
    """The tensors of all files that an index.json names; they must lie in its folder.

    Args:
        path: The index.
        trust: Let the files run code.

    Raises:
        LoadError: Where `path` is no such index, or a file is missing or cannot be read.
    """
    try:
        files = read_json(path)["weight_map"].values()
        names = {Path(str(name)).name for name in files}
    except (FileError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(
            f"{path.name} is no index of shards: {error}", "it lacks a weight_map"
        ) from error
    tensors: dict[str, Any] = {}
    for name in sorted(names):
        message = f"{path.name} names {quoted(name)}"
        shard = path.parent / name
        is_index = name.endswith(".index.json")  # which could name itself
        if is_index or not os.path.isfile(shard):  # noqa: PTH113 - takes names of any length
            raise LoadError(f"{message}, which is not beside it", "fetch it")
        content = read(shard, trust, complete=False)
        if not isinstance(content, dict):
            raise LoadError(f"{message}, which holds no dict of tensors")
        tensors |= content
    return tensors


# torch.export programs, .pt2, as modules whose layers take hooks
# ---------------------------------


_NEEDED = re.compile(
    rb'(?<=\\"type\\": \\")[\w.]+(?=\.\w+\\")'
    rb"|(?<=torch\.ops\.)(?:torchvision|quantized_decomposed)(?=\.)"
)
"""In the JSON of a program: modules of the classes that it returns, and namespaces of the
operators that it calls."""

_OPERATOR_HOMES = {"quantized_decomposed": "torch.ao.quantization.fx._decomposed"}
"""By a namespace of operators, the module whose import registers it, if that has another
name. This one belongs to programs of PT2E, torch's quantisation."""


def read_program(
    path: Path, trust: bool = False, device: torch.device | None = None
) -> tuple[nn.Module, FixedInput]:
    """Read a .pt2 file with `torch.export.load`, which can run any code in the file.

    Args:
        path: The file.
        trust: Whether the user lets the file run code.
        device: The device on which the program is to run. A program contains the names of
            devices, so for another device than a CPU it is rewritten. None leaves the
            program as it was exported.

    Returns:
        The program as a tree of modules with the names of the original model, and the
        channels and the size of its input.

    Raises:
        LoadError: Where `trust` is False, or where the file cannot be loaded or its
            program takes anything but one image.
    """
    name = quoted(path.name)
    if not trust:
        raise LoadError(
            f"{name} is an exported program, and torch reads it by running what it"
            " holds; nothing was executed",
            "if you trust the file, --trust",
            add=("--trust",),
        )
    disabled_level = logging.root.manager.disable
    logging.disable(logging.ERROR)  # torch logs tracebacks, and raises
    try:
        with importable(path.parent), path.open("rb") as file:
            _import_needed(path)
            program = torch.export.load(file)
        if device is not None and device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        module = torch.export.unflatten(program)
    except Exception as error:  # the file decides what torch raises
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch says last what it was doing
            cause = cause.__cause__
        raise LoadError(
            f"{name} cannot be loaded: {quoted(first_line(cause))}",
            "is the file whole, as torch.export.save wrote it, and from this torch or"
            " older?",
        ) from error
    finally:
        logging.disable(disabled_level)
    return module, _fixed_input(path.name, program)


def _import_needed(path: Path) -> None:
    """Import the modules that a program needs: those of its operators, and of the classes
    that it returns. torch does not import them itself. This runs code, so the file must be
    trusted.

    Args:
        path: The program, a zip file.

    Raises:
        ImportError: Where a module is not installed.
    """
    needed = set()
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith("models/model.json"):
                needed.update(_NEEDED.findall(archive.read(name)))
    for name in {module.decode() for module in needed}:
        import_module(_OPERATOR_HOMES.get(name, name))


def _fixed_input(file_name: str, program: Any) -> FixedInput:
    """The channels and the size of the images that a program takes.

    Args:
        file_name: The name of its file, for the message.
        program: A torch.export.ExportedProgram.

    Raises:
        LoadError: Where the program takes anything but one float32 image [1, C, H, W].
    """
    names = program.graph_signature.user_inputs
    inputs = ", ".join(map(str, names)) or "no input"
    one_positional = torch.utils._pytree.tree_structure(((0,), {}))
    if program.module_call_graph[0].signature.in_spec == one_positional:
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        value = values.get(names[0])
        dtype = getattr(value, "dtype", None)
        # a free size is a symbol
        shape = [
            size if isinstance(size, int) else None
            for size in getattr(value, "shape", ())
        ]
        if len(shape) == 4 and shape[0] in (1, None) and dtype == torch.float32:
            _, channels, height, width = shape
            if height is None or width is None:
                return FixedInput(channels)
            return FixedInput(channels, (height, width))
        inputs = f"{dtype} {shape}".replace("None", "any")
    raise LoadError(
        f"{file_name} takes {inputs}, not one image",
        "export it for one positional argument, an image torch.float32 [1, C, H, W]",
    )


# Digests
# -----------------------------------------------------------------------------------------

ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
"""An address in memory in an object's `repr`, which differs from process to process."""


def digest(module: nn.Module) -> str:
    """The sha256 of the names, classes and settings (`extra_repr`) of all modules in a
    module, and of its parameters and buffers. The code of the modules does not count; of a
    tensor whose values cannot be read, only name, type and shape count."""
    sha256 = hashlib.sha256()
    for name, submodule in module.named_modules():
        try:
            settings = ADDRESS.sub("0x", str(submodule.extra_repr()))
        except Exception:  # the user's own code fails
            settings = ""
        text = f"{name}: {type(submodule).__qualname__}({settings})\n"
        sha256.update(text.encode("utf-8", "backslashreplace"))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        sha256.update(f"{name}: {tensor.dtype}\n".encode())
        if is_lazy(tensor) or tensor.is_meta:
            continue
        sha256.update(f"{list(tensor.shape)}\n".encode())
        with suppress(Exception):  # a tensor of somebody else's class
            add_values(tensor, sha256)
    return sha256.hexdigest()


def add_values(tensor: Tensor, sha256: Any) -> None:
    """Add the bytes of a tensor to a digest. A tensor that wraps other tensors, as torchao's
    do, adds the bytes of these.

    Args:
        tensor: A dense, sparse, quantised or wrapping tensor.
        sha256: The hash object of hashlib, which is updated.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, settings = tensor.__tensor_flatten__()
        sha256.update(ADDRESS.sub("0x", repr(settings)).encode())
        for name in names:
            add_values(getattr(tensor, name), sha256)
        return
    tensor = tensor.detach().cpu()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    sha256.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


# From what a training script saved to tensors by name
# ---------------------------------------------
_PLAIN = (
    "state_dict",
    "model_state_dict",
    "model",
    "net",
    "network",
    "module",
    "weights",
    "params",
)
_AVERAGED = (
    "state_dict_ema",
    "model_ema",
    "ema_state_dict",
    "ema_model",
    "ema",
    "params_ema",
)
"""Keys under which checkpoints keep weights; the second are exponential moving
averages."""

_PREFIXES = (
    "module.",
    "_orig_mod.",
    "model.",
    "net.",
    "network.",
    "encoder.",
    "backbone.",
    "timm_model.",
)
"""What wrappers and training scripts put before names."""

_PREFIXED_SHARE = 0.8
"""The share of the names that must begin with a prefix before it is stripped: a state dict
may have other tensors (losses) among those of the model."""

_WRAPPERS = (
    re.compile(r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\."),
    re.compile(r"(?<=\.)module\."),
)
"""What wrappers of submodules put into the names of tensors. The last pattern may also
match the name of a real module."""

_PROFILED = re.compile(r"(.*\.)?total_(ops|params)")
"""Buffers that profilers (thop) leave in modules."""

_MAX_DEPTH = 4
"""How many levels of keys of _PLAIN and _AVERAGED are searched."""

_MAX_MODULES = 100_000
"""The most modules of a model that is read without its class. A shared module counts each
time: shared modules inside shared modules would make a small file endless."""


class Weights(NamedTuple):
    """The tensors of a checkpoint by the names of a state dict."""

    tensors: dict[str, Tensor]
    steps: tuple[str, ...] = ()
    """How the tensors were found and renamed, for people: `took 'state_dict'`."""
    classes: tuple[str, ...] = ()
    """The names of the model's classes, if the checkpoint has a list of them."""
    module: nn.Module | UnbuiltModule | None = None
    """The module in the checkpoint that has the tensors; None if it holds only tensors."""


def read_weights(path: Path, options: ModelOptions) -> Weights:
    """The tensors of a file. If the file holds a module, its class may be unknown.

    Raises:
        LoadError: Where the file cannot be read, or has no tensors where `options` say.
    """
    with as_load_errors(path):
        content = read(path, options.trust, complete=False)
        return find_weights(
            content, options.key, options.strip_prefix, options.ema, path.name
        )


def find_weights(
    content: Any,
    key: str | None = None,
    prefix: str | None = None,
    ema: bool | None = None,
    name: str = "the checkpoint",
) -> Weights:
    """Find the weights in a checkpoint.

    Args:
        content: What `read` returned.
        key: The place of the weights: keys of dicts and indices of lists, with dots
            between. By default the usual places are searched.
        prefix: The prefix to strip from names; tensors without it are left out. By default
            nothing is stripped.
        ema: True for averaged weights, False for plain weights. By default averaged
            weights are taken only if there are no plain ones.
        name: The name of the file, for messages.

    Raises:
        LoadError: Where no tensors are found.
    """
    # the steps go into run.json, since they decide what is drawn
    steps = []
    if key:
        inner = _value_at_key(content, key)
        steps.append(f"took {key!r}")
    else:
        inner = _find_inner(content, ema, steps)
    tensors = _without_counters(_tensors_in(inner), steps)
    if not tensors:
        # if the file holds a module that was not built, the reason for that says more
        if isinstance(inner, UnbuiltModule):
            raise inner.refusal
        subject = "weights"
        hint = "--key says where they are"
        if ema:
            hint = "leave out --ema for the plain ones"
            subject = "averaged weights (--ema)"
        if key:
            subject = f"weights under {key!r}"
        raise LoadError(f"{name} holds no {subject}: {_describe(content)}", hint)
    module = inner if isinstance(inner, (nn.Module, UnbuiltModule)) else None
    weights = Weights(tensors, tuple(steps), classes_of(content), module)
    if prefix:
        return _strip_prefix(weights, prefix)
    return weights


def _without_counters(
    tensors: dict[str, Tensor], steps: list[str]
) -> dict[str, Tensor]:
    """The tensors without the counters of a profiler. If all are counters, all are kept.

    Args:
        tensors: The tensors of a checkpoint, by name.
        steps: Changed in place: a line is added if counters are left out.
    """
    model_tensors = {
        n: tensor for n, tensor in tensors.items() if not _PROFILED.fullmatch(n)
    }
    count = len(tensors) - len(model_tensors)
    if not count or not model_tensors:
        return tensors
    steps.append(f"left out {count} counters of a profiler")
    return model_tensors


def _value_at_key(content: Any, key: str) -> Any:
    """The value in a checkpoint that `--key` names.

    Args:
        content: The checkpoint.
        key: One key of the checkpoint, which may have dots; or keys of dicts and indices
            of lists, with dots between.

    Raises:
        LoadError: Where there is no such key or index.
    """
    if isinstance(content, Mapping) and key in content:  # a key may have dots itself
        return content[key]
    inner = content
    for name in key.split("."):
        try:
            inner = inner[name if isinstance(inner, Mapping) else int(name)]
        except (LookupError, ValueError, TypeError) as error:
            raise LoadError(
                f"--key {key!r}: there is no {name!r}", f"found {_describe(inner)}"
            ) from error
    return inner


def _find_inner(
    content: Any, ema: bool | None, steps: list[str], depth: int = _MAX_DEPTH
) -> Any:
    """The innermost value under the usual keys of a checkpoint, such as `state_dict` in
    `model`; the checkpoint itself if it has none of them. A key is taken only if more
    tensors lie under it than directly in the checkpoint.

    Args:
        content: A checkpoint, or the value under a usual key of one.
        ema: True for averaged weights, False for plain weights, None for plain before
            averaged.
        steps: Changed in place: a line is added for each key that is taken.
        depth: How many levels of keys are searched.
    """
    if not isinstance(content, Mapping) or not depth:
        return content
    names = {True: _AVERAGED, False: _PLAIN, None: (*_PLAIN, *_AVERAGED)}[ema]
    count = len(_tensors_in(content))  # not weights, but a loss or a running mean
    for name in names:
        inner = content.get(name)
        if any(len(_tensors_in(value)) > count for value in _with_inner(inner)):
            steps.append(f"took {name!r}")
            # the keys inside averaged weights are plain ones
            return _find_inner(inner, ema if name in _PLAIN else None, steps, depth - 1)
    return content


def _with_inner(content: Any) -> Iterator[Any]:
    """A value; if it is a mapping, also all values in it at every depth, each object once.
    Values inside an UnbuiltModule are left out."""
    # a checkpoint may contain itself, so each object is entered only once
    reached = [content]
    seen = {id(content)}
    for value in reached:
        yield value
        if isinstance(value, UnbuiltModule) or not isinstance(value, Mapping):
            continue
        for inner in value.values():
            if id(inner) not in seen:
                reached.append(inner)
                seen.add(id(inner))


def _tensors_in(content: Any) -> dict[str, Tensor]:
    """The tensors of a module or a mapping, by name. Arrays of numpy become tensors; other
    values (an epoch) are left out. Empty for anything but a module or a mapping."""
    # a trusted file, or one of listed classes, may hold the module itself
    if isinstance(content, nn.Module):
        content = content.state_dict()
    if isinstance(content, UnbuiltModule):
        return _named_tensors(content)
    tensors = {}
    for name, value in content.items() if isinstance(content, Mapping) else ():
        if isinstance(value, Tensor):
            tensors[str(name)] = value.data
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            native = value.astype(value.dtype.newbyteorder("="))
            tensors[str(name)] = torch.from_numpy(native)
    return tensors


def _named_tensors(module: UnbuiltModule) -> dict[str, Tensor]:
    """The tensors that the state dict of a module would have, read from the module's
    attributes, since its class is unknown.

    Raises:
        RefusedError: Where the module has more than _MAX_MODULES modules.
    """
    tensors = {}
    # grows while it is gone through: each module adds its children
    reached: list[tuple[str, Mapping[str, Any]]] = [("", module)]
    for prefix, attributes in reached:
        # a state dict leaves these buffers out
        hidden = attributes.get("_non_persistent_buffers_set") or ()
        values = dict(attributes.get("_parameters") or {})
        values |= attributes.get("_buffers") or {}
        for name, value in values.items():
            if isinstance(value, Tensor) and name not in hidden:
                tensors[f"{prefix}{name}"] = value.data
        for name, child in dict(attributes.get("_modules") or {}).items():
            # a child that was built has the same attributes as one that was not
            inner = vars(child) if isinstance(child, nn.Module) else child
            if isinstance(inner, dict):
                reached.append((f"{prefix}{name}.", inner))
        if len(reached) > _MAX_MODULES:
            raise RefusedError("holds a model of too many modules")
    return tensors


def _describe(content: Any) -> str:
    """What a checkpoint, or a part of it, holds, for messages."""
    name = f"a {type(content).__name__}"
    if isinstance(content, (list, tuple)):
        return f"{name} of {len(content)}, of which --key 0 takes the first"
    if not isinstance(content, Mapping):
        return name
    keys = [quoted(repr(key)) for key in content if isinstance(key, (str, int))]
    if keys:
        return f"keys {listed(keys, 8)}"
    return "nothing"


def _strip_prefix(weights: Weights, prefix: str) -> Weights:
    """Take a prefix off the names of tensors. Tensors without it are left out, and a step
    says how many.

    Raises:
        LoadError: Where no name begins with the prefix.
    """
    kept = {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.tensors.items()
        if name.startswith(prefix)
    }
    if not kept:
        raise LoadError(
            f"--strip-prefix {prefix!r}: no name begins with it",
            f"names: {', '.join([*weights.tensors][:3])}",
        )
    step = f"stripped {prefix!r}"
    if len(kept) < len(weights.tensors):
        step += f", leaving {len(weights.tensors) - len(kept)} others out"
    return weights._replace(tensors=kept, steps=(*weights.steps, step))


def stripped_variants(weights: Weights) -> list[Weights]:
    """The same tensors under different names. The first variant has the names of the file;
    each of the next has one more of the usual prefixes stripped; then come the same
    variants without the names of wrappers of submodules. The last variant has the shortest
    names."""
    variants = [weights]
    prefix = _common_prefix(weights)
    while prefix is not None:
        # wrappers may be nested: `module._orig_mod.`
        variants.append(_strip_prefix(variants[-1], prefix))
        prefix = _common_prefix(variants[-1])
    for wrapper in _WRAPPERS:
        for variant in [*variants]:
            tensors = variant.tensors
            wrappers = {text for name in tensors for text in wrapper.findall(name)}
            renamed = {
                wrapper.sub("", name): tensor for name, tensor in tensors.items()
            }
            if wrappers and len(renamed) == len(tensors):  # else two names became one
                step = f"took {', '.join(map(repr, sorted(wrappers)))} out of names"
                steps = (*variant.steps, step)
                variants.append(variant._replace(tensors=renamed, steps=steps))
    return variants


def _common_prefix(weights: Weights) -> str | None:
    """The first of _PREFIXES with which most of the names begin (_PREFIXED_SHARE); None if
    there is none."""
    for prefix in _PREFIXES:
        count = sum(name.startswith(prefix) for name in weights.tensors)
        if count >= _PREFIXED_SHARE * len(weights.tensors):
            return prefix
    return None


def load_weights(
    module: nn.Module, weights: Weights, path: Path, options: ModelOptions
) -> dict[str, Any]:
    """Load the tensors of a file into a module. Of their `stripped_variants` the one is
    loaded that has the most names of the module.

    Args:
        module: The module, which is changed in place.
        weights: The tensors.
        path: The file of the tensors.
        options: How the model is loaded: `spec` for messages, `model_args` and `partial`.

    Returns:
        What run.json says of the weights.

    Raises:
        LoadError: As from `load_tensors`.
    """
    names = module.state_dict().keys()
    best = max(stripped_variants(weights), key=lambda w: len(names & w.tensors.keys()))
    if best.steps:
        log.info("%s: %s", path.name, "; ".join(best.steps))
    message = f"{path.name} does not fit {options.spec}"
    instead = ""
    if isinstance(weights.module, nn.Module):
        instead = (
            "the file is a whole model, which runs by itself: give it as MODEL, without"
            " --arch"
        )
    elif not names & best.tensors.keys():
        arch = class_beside(path, best.tensors)
        if arch is not None:
            instead = f"another --arch: {arch} has such modules"
    loaded = load_tensors(module, best.tensors, message, options, instead)
    return {**file_record(path), "taken": [*best.steps, loaded]}


def load_tensors(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    message: str,
    options: ModelOptions,
    instead: str = "",
) -> str:
    """Load tensors into a module, which keeps its own precision.

    Args:
        module: The module, which is changed in place.
        tensors: The tensors, by their names in the module's state dict.
        message: The beginning of the error message.
        options: How the model was built: `model_args` for the hint, and `partial`.
        instead: The hint of the error if no tensor fits at all. If empty, that hint names
            options.

    Returns:
        How many of the module's tensors were loaded, for people: `loaded 120 of 122`.

    Raises:
        LoadError: Where a tensor does not fit, is missing or is unexpected; with
            `--partial` only where no tensor fits at all.
    """
    state = module.state_dict()
    fit = _compare(state, tensors)
    counts = f"{len(fit.tensors)} of {fit.total}"
    if fit.misfits and not (options.partial and fit.tensors):
        argument = _fitting_arguments(
            module, options.model_args, fit.differing.values()
        )
        hint = instead or f"another --arch, or {argument}"
        if fit.tensors:
            hint = f"another --arch, {argument}, or --partial for what fits"
        raise LoadError(f"{message}: {counts} tensors; {fit.misfits}", hint)
    # MNASNet refuses weights whose metadata does not name their version
    vars(fit.tensors)["_metadata"] = getattr(state, "_metadata", {})
    try:
        module.load_state_dict(fit.tensors, strict=False)
    # raised for sparse and quantised tensors and modules
    except (RuntimeError, KeyError) as error:
        reason = quoted(str(error).strip().splitlines()[-1].strip())
        raise LoadError(
            f"{message}: {reason}", "save the weights as plain dense tensors"
        ) from error
    if fit.misfits:
        log.warning("loaded %s tensors (--partial): %s", counts, fit.misfits)
    return f"loaded {counts}"


class _Shapes(NamedTuple):
    """The two shapes of a tensor that does not fit."""

    expected: torch.Size
    """The shape in the module."""
    in_file: torch.Size


class _Fit(NamedTuple):
    """How tensors fit a module."""

    tensors: OrderedDict[str, Tensor]
    """The tensors that fit, by name."""
    missing: list[str]
    """Names of the module's tensors that have no tensor to load."""
    unexpected: list[str]
    """Names of tensors that the module does not have."""
    differing: dict[str, _Shapes]
    """By name, the shapes of tensors that have another shape than the module's."""

    @property
    def total(self) -> int:
        """How many tensors the module expects."""
        return len(self.tensors) + len(self.missing) + len(self.differing)

    @property
    def misfits(self) -> str:
        """What is missing, unexpected or of another shape, for people; empty if all
        tensors fit."""
        shapes = [
            f"{quoted(name)} is {list(pair.in_file)}, not {list(pair.expected)}"
            for name, pair in self.differing.items()
        ]
        texts = []
        if self.missing:
            texts.append(f"missing {listed([*map(quoted, self.missing)], _SHOWN)}")
        if self.unexpected:
            texts.append(
                f"unexpected {listed([*map(quoted, self.unexpected)], _SHOWN)}"
            )
        if shapes:
            texts.append(listed(shapes, _SHOWN))
        return "; ".join(texts)


def _compare(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _Fit:
    """Compare tensors with a module, by names and shapes.

    Args:
        state: The module's state dict.
        tensors: The tensors to load, by name.
    """
    # a state dict may also have an extra state, which can be anything
    expected = {
        name: value for name, value in state.items() if isinstance(value, Tensor)
    }
    fitting = OrderedDict()
    missing = []
    differing = {}
    for name, own_tensor in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            missing.append(name)
        elif tensor.shape != own_tensor.shape:
            differing[name] = _Shapes(own_tensor.shape, tensor.shape)
        else:
            fitting[name] = tensor
    # BatchNorm's step counter: old checkpoints lack it, and nothing depends on it here
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    unexpected = [name for name in tensors if name not in expected]
    return _Fit(fitting, missing, unexpected, differing)


def _fitting_arguments(
    module: nn.Module, model_args: Mapping[str, Any], differing: Iterable[_Shapes]
) -> str:
    """The options that would give a module the shapes of the file: if 10 in the module is 7
    everywhere in the file, and 10 is the value of only one argument of the module's class,
    `--model-arg num_classes=7`. Just `--model-arg` if no argument is found.

    Args:
        module: The module that was built.
        model_args: The arguments that the user gave its class; all other arguments have
            their defaults.
        differing: The shapes that differ.
    """
    sizes = defaultdict[int, set[int]](set)
    for expected, in_file in differing:
        # of a kernel only the channels: its height and width are seldom arguments
        for size, size_in_file in zip(expected[:2], in_file[:2], strict=False):
            sizes[size].add(size_in_file)
    parameters = inspect.signature(type(module)).parameters
    # compared as text, since a default may be an array, whose `==` returns an array
    values = {name: repr(parameter.default) for name, parameter in parameters.items()}
    values |= {name: repr(value) for name, value in model_args.items()}
    texts = []
    for size, sizes_in_file in sizes.items():
        names = [name for name in values if values[name] == str(size)]
        if len(names) == len(sizes_in_file) == 1 and size not in sizes_in_file:
            texts.append(f"--model-arg {names[0]}={sizes_in_file.pop()}")
    return " ".join(texts) or "--model-arg"
